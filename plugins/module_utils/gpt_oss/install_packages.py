#!/usr/bin/env python3
"""Put pinned Python packages into a directory, unless this interpreter has them already.

    install_packages.py --target /tools --constraints constraints.txt huggingface-hub==2.4.0
    install_packages.py --target /tools aiperf==0.13.0 --unless python3 fetch_weights.py check …

For a container whose image is plain Python: the packages end up in a directory that PYTHONPATH names. An image that
brings them at these versions needs no package index, and --unless spares even that look where a command says that
they are not needed. The index is PIP_INDEX_URL's. The last line on stdout is one JSON object that says how it went.
Standard library only, Python 3.8 and later.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

LAST_LINES = 5


def installed(package: str, target: Path) -> str | None:
    """The version that would be imported: the target's, or this interpreter's own."""
    # This program's own directory comes first on the path; packages do not lie there.
    for path in ([str(target)], sys.path[1:]):
        for found in metadata.distributions(name=package, path=path):
            return found.version
    return None


def missing(requirements: list[str], target: Path) -> dict[str, str | None]:
    """The requirements that are not met, and the version there is instead."""
    found = {}
    for requirement in requirements:
        package, _, version = requirement.partition("==")
        there = installed(package, target)
        if there != version:
            found[requirement] = there
    return found


def not_needed(command: list[str]) -> bool:
    """Whether the command of --unless ends well. It writes to our log."""
    if not command:
        return False
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False).returncode == 0


def install(requirements: list[str], target: Path, constraints: Path | None) -> str:
    """Run pip; its last words when it fails, or an empty string."""
    building = target / ".building"  # on the target's filesystem: what was unpacked is renamed, not copied
    building.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "install", "--target", str(target), "--upgrade", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--no-warn-script-location", "--progress-bar=off"]
    if constraints is not None:
        command += ["--constraint", str(constraints)]
    # Packages of the image must not make pip believe that those of the target are there.
    environment = {**os.environ, "TMPDIR": str(building), "PIP_ROOT_USER_ACTION": "ignore"}
    environment.pop("PYTHONPATH", None)
    process = subprocess.Popen(
        [*command, *requirements],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    assert process.stdout is not None
    last: list[str] = []
    try:
        for line in process.stdout:
            sys.stderr.write(line)
            sys.stderr.flush()
            if line.strip():
                last = [*last[1 - LAST_LINES :], line.strip()]
        status = process.wait()
    finally:
        process.kill()
        process.wait()
    shutil.rmtree(str(building), ignore_errors=True)
    return "" if status == 0 else " | ".join(last) or f"pip ended with status {status}"


def failure(said: str, lacking: dict[str, str | None]) -> str:
    wanted = ", ".join(f"{name} (there is {there or 'none'})" for name, there in lacking.items())
    if "No module named pip" in said:
        return f"{wanted}: {sys.executable} has no pip; use an image with pip, or one that has the packages"
    hint = "set the package index (PIP_INDEX_URL), or use an image that has the packages"
    if re.search(r"error: command '?\S*(gcc|cc|clang)'? failed|Unable to find a compiler|failed with exit", said):
        hint = "a package has no wheel for this processor and the image no C compiler: use an image with one"
    return f"{wanted} could not be installed: {hint}. pip said: {said}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("requirements", nargs="+", metavar="PACKAGE==VERSION")
    parser.add_argument("--target", type=Path, required=True, help="the directory; PYTHONPATH of what runs later")
    parser.add_argument("--constraints", type=Path, help="versions of what these packages need")
    parser.add_argument(
        "--unless", nargs=argparse.REMAINDER, default=[], help="a command; nothing to do if it succeeds"
    )
    given = parser.parse_args()
    for requirement in given.requirements:
        if not re.match(r"[A-Za-z0-9][\w.-]*==[^=*\s]+\Z", requirement):
            parser.error(f"{requirement}: not pinned; PACKAGE==VERSION is needed")
    # As process 1 of a container nothing ends this but what it asks for.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def end(ok: bool, message: str, **more: Any) -> int:
        print(json.dumps({"program": "install_packages", "ok": ok, "message": message, **more}), flush=True)
        return 0 if ok else 1

    if not_needed(given.unless):
        return end(True, "not needed", installed=False)
    lacking = missing(given.requirements, given.target)
    if not lacking:
        return end(True, "the image has them", installed=False)
    said = install(given.requirements, given.target, given.constraints)
    if said:
        return end(False, failure(said, lacking)[:1500], installed=False)
    still = missing(given.requirements, given.target)
    if still:
        return end(False, failure("it ended well", still), installed=False)
    return end(True, ", ".join(given.requirements), installed=True)


if __name__ == "__main__":
    sys.exit(main())
