"""Run the stand-in operator against a local control plane until it is interrupted.

python -m tests.stand_ins.dynamo_operator --kubeconfig F --context C
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path

from kubernetes.config import ConfigException

from tests.stand_ins.dynamo_operator.operator import Operator


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stand_ins.dynamo_operator", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--context", required=True, help="a context of that file; the cluster must be on loopback")
    parser.add_argument("--keep-webhooks", action="store_true", help="leave its webhooks registered when it ends")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        operator = Operator(options.kubeconfig, options.context)
        operator.start()
    except (ConfigException, OSError, LookupError, ValueError) as error:
        print(f"{options.kubeconfig}, context {options.context!r}: {error}", file=sys.stderr)
        return 1
    print("The stand-in Dynamo operator is running; end it with Ctrl+C.", flush=True)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
    operator.stop()
    if not options.keep_webhooks:
        operator.unregister()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
