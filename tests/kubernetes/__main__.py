"""A Kubernetes control plane to try things on: `python -m tests.kubernetes up`, then kubectl or pulumi against it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from . import build, cluster
from .build import KubernetesError, say

HOME = build.CACHE / "up"  # not among build results: `make clean` would lose sight of what runs


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kubernetes", description=__doc__)
    parser.add_argument("--directory", type=Path, default=HOME, help="where the cluster lives; another is another one")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the programs and keep them in .cache/kubernetes")
    commands.add_parser("up", help="start the cluster, or say that it runs")
    commands.add_parser("down", help="stop it and forget everything in it")
    commands.add_parser("status", help="what runs, and on which nodes")
    commands.add_parser("kubeconfig", help="print the path: export KUBECONFIG=$(python -m tests.kubernetes kubeconfig)")
    arguments = parser.parse_args()
    try:
        chosen = {"build": _build, "up": _up, "down": _down, "status": _status, "kubeconfig": _kubeconfig}
        return chosen[arguments.command](arguments.directory.resolve())
    except KubernetesError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def _build(_: Path) -> int:
    print(build.build().directory)
    return 0


def _up(directory: Path) -> int:
    started = time.monotonic()
    running = cluster.attach(directory)
    if running is None:
        running = cluster.start(build.build(), directory, outlives_us=True)
        say(f"started in {time.monotonic() - started:.0f} s")
    _describe(running)
    return 0


def _down(directory: Path) -> int:
    say("stopped" if cluster.remove(directory) else "nothing runs")
    return 0


def _status(directory: Path) -> int:
    running = cluster.attach(directory)
    if running is None:
        say("nothing runs; `python -m tests.kubernetes up` starts it")
        return 1
    _describe(running)
    for name, pid in running.plane.pids.items():
        print(f"  {name:24} {pid}")
    return 0


def _kubeconfig(directory: Path) -> int:
    running = cluster.attach(directory)
    if running is None:
        say("nothing runs; `python -m tests.kubernetes up` starts it")
        return 1
    print(running.kubeconfig)
    return 0


def _describe(running: cluster.Cluster) -> None:
    plane = running.plane
    print(f"Kubernetes {plane.version} at {plane.server}, logs in {plane.logs}")
    print(f"export KUBECONFIG={plane.kubeconfig}   # context {plane.context}")
    if not running.has_dynamo:
        print(f"without Dynamo's definitions: none in {cluster.DYNAMO_CRDS}; DYNAMO_CRDS names another directory")


if __name__ == "__main__":
    sys.exit(main())
