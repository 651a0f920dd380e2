"""What dpkg knows about the host, read from its own files: packages, versions, locks. No process is started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import time
from fnmatch import fnmatchcase
from typing import Any, Iterator, NamedTuple

ADMIN = "/var/lib/dpkg"
FRONTEND_LOCK = ADMIN + "/lock-frontend"
DATABASE_LOCK = ADMIN + "/lock"
LISTS_LOCK = "/var/lib/apt/lists/lock"

_WANTED_FIELDS = {b"Package", b"Status", b"Version", b"Architecture"}
_BROKEN_STATES = ("half-installed", "half-configured", "unpacked", "triggers-awaited", "triggers-pending")


class Package(NamedTuple):
    version: str
    selection: str  # install, hold, deinstall, purge
    state: str  # installed, config-files, half-configured …
    healthy: bool

    @property
    def installed(self) -> bool:
        return self.state not in ("not-installed", "config-files")

    @property
    def held(self) -> bool:
        return self.selection == "hold"


def read_packages(status_file: str = ADMIN + "/status") -> dict[str, Package]:
    """Every package dpkg knows of: by name, and as name:architecture where it is not of the host's own."""
    with open(status_file, "rb") as stream:
        stanzas = [_fields(stanza) for stanza in stream.read().split(b"\n\n") if stanza.strip()]
    native = next((s[b"Architecture"] for s in stanzas if s.get(b"Package") == b"dpkg"), None)
    packages = {}
    for stanza in stanzas:
        if not {b"Package", b"Status"} <= stanza.keys():
            continue
        name = stanza[b"Package"].decode()
        architecture = stanza.get(b"Architecture", b"all")
        if native is not None and architecture not in (native, b"all"):
            name += ":" + architecture.decode()
        selection, flag, state = stanza[b"Status"].decode().split()
        packages[name] = Package(
            stanza.get(b"Version", b"").decode(), selection, state, flag == "ok" and state not in _BROKEN_STATES
        )
    return packages


def _fields(stanza: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for line in stanza.split(b"\n"):
        key, colon, value = line.partition(b": ")
        if colon and key in _WANTED_FIELDS:
            found[key] = value.strip()
            if len(found) == len(_WANTED_FIELDS):
                break
    return found


def interrupted(packages: dict[str, Package]) -> list[str]:
    """Signs that dpkg was stopped half way, for the operator to read."""
    found = [f"{name} is {package.state}" for name, package in sorted(packages.items()) if not package.healthy]
    with contextlib.suppress(FileNotFoundError):
        if any(name.isdigit() for name in os.listdir(ADMIN + "/updates")):
            found.append(ADMIN + "/updates holds a journal that was not merged")
    return found


# -- versions ----------------------------------------------------------------------------------------------------------


def matches(wanted: str, version: str) -> bool:
    """Whether a Debian version is the wanted one, which may lack epoch and revision or be a glob.

    580.159.04 is 580.159.04-1 and 5:580.159.04-1~debian.12, not 580.159.040-1.
    """
    candidates = [version, version.partition(":")[2]] if ":" in version else [version]
    if any(mark in wanted for mark in "*?["):
        return any(fnmatchcase(candidate, wanted) for candidate in candidates)
    return any(candidate == wanted or candidate.startswith(wanted + "-") for candidate in candidates)


def compare(left: str, right: str) -> int:
    """Negative, zero or positive, as deb-version(7) orders."""
    for one, other in zip(_split(left), _split(right)):
        order = _compare_part(one, other)
        if order:
            return order
    return 0


def _split(version: str) -> tuple[str, str, str]:
    epoch, colon, rest = version.partition(":")
    if not colon:
        epoch, rest = "0", version
    upstream, _, revision = rest.rpartition("-") if "-" in rest else (rest, "", "0")
    return epoch, upstream, revision


def _compare_part(left: str, right: str) -> int:
    while left or right:
        one, left = _take(left, False)
        other, right = _take(right, False)
        for position in range(max(len(one), len(other))):
            order = _weight(one[position : position + 1]) - _weight(other[position : position + 1])
            if order:
                return order
        one, left = _take(left, True)
        other, right = _take(right, True)
        order = int(one or 0) - int(other or 0)
        if order:
            return order
    return 0


def _take(text: str, digits: bool) -> tuple[str, str]:
    end = 0
    while end < len(text) and (text[end] in "0123456789") == digits:
        end += 1
    return text[:end], text[end:]


def _weight(character: str) -> int:
    if character == "~":
        return -1
    if not character:
        return 0
    return ord(character) + (0 if character.isalpha() else 256)


# -- locks -------------------------------------------------------------------------------------------------------------


class LockedError(Exception):
    """Somebody else kept a lock for longer than was allowed."""


def wait_for_lock(path: str, seconds: float) -> None:
    """Block until nobody holds the lock; the kernel wakes us, nothing is polled."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except FileNotFoundError:  # its directory is not there: nobody locks it
        return
    try:
        with _alarm(max(seconds, 0.01)):
            fcntl.lockf(descriptor, fcntl.LOCK_EX)
    except TimeoutError:
        raise LockedError(f"{path} is held by {_holder(descriptor)}") from None
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: Any) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _holder(descriptor: int) -> str:
    pid = _lock_owner(descriptor)
    if not pid:
        return "a process that cannot be seen from here"
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            command = stream.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        command = "which has just ended"
    return f"process {pid} ({command})"


def _lock_owner(descriptor: int) -> int | None:
    layout = "hhqqi"  # struct flock: l_type, l_whence, l_start, l_len, l_pid
    asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, asked)
    kind, _, _, _, pid = struct.unpack(layout, answer)
    return pid if kind != fcntl.F_UNLCK else None


class Deadline:
    """What is left of a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(self._end - time.monotonic(), 0.0)
