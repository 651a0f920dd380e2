"""Command line of the stand-in hub.

python3 -m tests.stand_ins.hub --port 8100                      serve (port 0: any; the address is printed)
python3 -m tests.stand_ins.hub overlay --output DIR [--base-url URL]   write the catalog overlay for it
python3 -m tests.stand_ins.hub cache --output DIR [--model NAME]  write a model as a Hugging Face cache
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

from tests.stand_ins.hub import content, overlay
from tests.stand_ins.hub.server import Hub, make_state


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.stand_ins.hub", description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs="?", choices=("serve", "overlay", "cache"), default="serve")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--cdn-port", type=int, default=0, help="serve large files from a second port, as a CDN would")
    parser.add_argument("--wheels", type=Path, help="directory of wheels to serve under /wheels/")
    parser.add_argument("--base-url", default=overlay.DEFAULT_URL)
    parser.add_argument("--output", type=Path, help="overlay, cache: the directory to write")
    parser.add_argument("--model", default="openai/gpt-oss-120b")
    options = parser.parse_args(argv)
    if options.command != "serve" and options.output is None:
        parser.error(f"{options.command} needs --output")
    if options.command == "overlay":
        overlay.write(options.output, options.base_url)
        return 0
    if options.command == "cache":
        print(content.write_cache(options.output, options.model))
        return 0
    state = make_state(wheels=options.wheels)
    hub = Hub((options.host, options.port), state, cdn_port=options.cdn_port)
    if options.cdn_port:
        cdn = Hub((options.host, options.cdn_port), state)
        threading.Thread(target=cdn.serve_forever, daemon=True).start()
    print(f"stand-in hub on http://{options.host}:{hub.server_address[1]}", flush=True)
    try:
        hub.serve_forever()
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
