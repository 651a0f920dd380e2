"""What building needs of this machine: commands, a cache keyed by content, one builder at a time."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = REPOSITORY / ".cache" / "simulator"
# What `uname -m` says -> what Debian and Docker call it.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class BuildError(Exception):
    """Something a person has to look at; the message says what and how."""


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def run(command: Sequence[str | Path], **environment: str) -> str:
    """Run a command; its output, or BuildError with what it said."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    except FileNotFoundError:
        raise BuildError(f"{words[0]} is not installed; `python -m tests.hosts tools` installs what is missing") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-3000:]
        raise BuildError(f"`{' '.join(words)[:200]}` ended with status {done.returncode}:\n{said}")
    return done.stdout


def machine() -> str:
    name = platform.machine()
    if name not in ARCHITECTURES:
        raise BuildError(f"machine {name!r}: the stand-in engine runs on {', '.join(ARCHITECTURES)}")
    return name


def key_of(*parts: str) -> str:
    """One short name for everything something is made of."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def cached(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """A directory of the cache, made once for each key. Half a directory is never seen, and older ones are removed."""
    CACHE.mkdir(parents=True, exist_ok=True)
    wanted = CACHE / f"{name}-{key}"
    with locked(name):
        if not wanted.is_dir():
            scratch = Path(tempfile.mkdtemp(prefix=f"{name}.new-", dir=CACHE))
            scratch.chmod(0o755)
            try:
                make(scratch)
                scratch.rename(wanted)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
            for old in CACHE.glob(f"{name}-*"):
                if old != wanted and old.is_dir():
                    shutil.rmtree(old, ignore_errors=True)
    return wanted


@contextmanager
def locked(name: str) -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        yield
