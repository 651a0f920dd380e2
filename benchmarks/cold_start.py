"""How long the README's commands take on a machine that has none of the project's caches.

    python -m benchmarks.cold_start              `make demo`, to the first chat completion
    python -m benchmarks.cold_start --target test

The commands run in a fresh clone of the last commit, with caches, virtual environment and container storage of its own
in a directory beside it; the ones of this checkout are neither used nor touched. What stays warm are the machine's own
packages (podman, debootstrap) and whatever proxy its network has. Test hosts have fixed addresses, so none may run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.hosts import hosts
from tests.hosts.machine import LABEL, REPOSITORY, HostError, podman, say

RESULT = REPOSITORY / "results" / "benchmarks" / "cold_start.json"
# What `make demo` prints when the endpoint has answered for the first time.
FIRST_COMPLETION = "answer: "
# The tests of the bare-metal half have 35 minutes; Kubernetes, drives and boots came with 30 more.
MOST_SECONDS = {"demo": 8 * 60.0, "test": 65 * 60.0}
# What begins a step: the demo says so, and make shows the command.
STEPS = ("=== ", "source .venv/bin/activate && ")


def isolated(directory: Path) -> dict[str, str]:
    """An environment in which nothing that was made before is found."""
    driver = podman("info", "--format", "{{.Store.GraphDriverName}}").strip()
    settings = directory / "storage.conf"
    settings.write_text(
        f'[storage]\ndriver = "{driver}"\ngraphroot = "{directory}/containers"\nrunroot = "{directory}/run"\n',
        encoding="utf-8",
    )
    environment = {
        **os.environ,
        "CONTAINERS_STORAGE_CONF": str(settings),
        "XDG_CACHE_HOME": str(directory / "cache"),
        "PIP_CACHE_DIR": str(directory / "cache" / "pip"),
        "PYTHONUNBUFFERED": "1",
    }
    for name in ("VIRTUAL_ENV", "ANSIBLE_CONFIG", "MAKEFLAGS", "MAKELEVEL"):
        environment.pop(name, None)
    own = f"{Path(sys.executable).parent}{os.pathsep}"
    environment["PATH"] = environment["PATH"].replace(own, "")  # the clone makes its own virtual environment
    return environment


def timed(checkout: Path, target: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run `make TARGET` and note when its lines came."""
    began = time.monotonic()
    first: float | None = None
    steps: list[dict[str, Any]] = []
    process = subprocess.Popen(
        ["make", target],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            seconds = time.monotonic() - began
            print(f"{seconds:7.1f}  {line}", end="", flush=True)
            for mark in STEPS:
                if line.startswith(mark):
                    steps.append({"at_seconds": round(seconds, 1), "step": line.removeprefix(mark).strip()})
            if first is None and line.startswith(FIRST_COMPLETION):
                first = seconds
        status = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    return {
        "target": target,
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "first_completion_seconds": None if first is None else round(first, 1),
        "steps": steps,
    }


def require_nothing_running() -> None:
    running = hosts.names()
    if running or podman("ps", "--quiet", "--filter", f"label={LABEL}").strip():
        raise HostError(
            f"test hosts run ({', '.join(running) or 'the mirror'}) and hold the addresses that this needs; when "
            "nobody needs them, `python -m tests.hosts down --all`"
        )


def benchmark(target: str, parent: Path | None, *, keep: bool) -> dict[str, Any]:
    require_nothing_running()
    directory = Path(tempfile.mkdtemp(prefix="cold-start-", dir=parent))
    environment = isolated(directory)
    checkout = directory / "checkout"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(REPOSITORY), str(checkout)], check=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        result = timed(checkout, target, environment)
    finally:
        if keep:
            say(f"left as it is: {directory}")
        else:
            subprocess.run(["make", "demo-down"], cwd=checkout, env=environment, check=False)
            shutil.rmtree(directory, ignore_errors=True)
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": {"cores": len(os.sched_getaffinity(0)), "processor": platform.machine()},
        **result,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cold_start", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", choices=sorted(MOST_SECONDS), default="demo", help="what to make (default: demo)")
    parser.add_argument(
        "--directory", type=Path, help="where there is room for some 10 GB (default: the temporary one)"
    )
    parser.add_argument("--keep", action="store_true", help="leave clone, caches and hosts for a look")
    parser.add_argument("--check", action="store_true", help="end with status 1 when it took longer than promised")
    arguments = parser.parse_args()
    try:
        result = benchmark(arguments.target, arguments.directory, keep=arguments.keep)
    except HostError as error:
        say(f"error: {error}")
        return 1
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    figure = result["first_completion_seconds"] if arguments.target == "demo" else result["seconds"]
    what = "to the first completion" if arguments.target == "demo" else "in all"
    shown = "never" if figure is None else f"{figure:.0f} s"
    print(
        f"\ncold `make {arguments.target}`, {what}: {shown}; {result['seconds']:.0f} s in all,"
        f" status {result['status']}"
    )
    for step in result["steps"]:
        print(f"  {step['at_seconds']:6.0f} s  {step['step']}")
    print(f"  {RESULT.relative_to(REPOSITORY)}")
    late = figure is None or figure > MOST_SECONDS[arguments.target]
    return 1 if result["status"] != 0 or (arguments.check and late) else 0


if __name__ == "__main__":
    sys.exit(main())
