#!/usr/bin/env python3
"""Read the plan's weights into memory ahead of the engine, as fast as the drive can.

    read_ahead.py --configuration /etc/gpt-oss    what systemd runs beside the engine's start

The files are those of the verified snapshots that the host's engine processes serve (process.json, and the marker that
it names). Several threads take them in pieces, in the order of their names, in which engines read them too. What is in
memory already is not read again, so a second start costs nothing. Reading ends early once the engine is ready.

It is a help and never a condition: with too little memory for the files and a margin it says so and ends well, and the
engine's start does not wait for it. The status is 0 unless the weights cannot be read.

Standard library only, Python 3.8 and later. Sizes are bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import http.client
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")
PIECE = 32 << 20  # what a thread takes at a time
# The kernel cuts a request to read ahead to the device's window (128 KiB by default), so a piece is asked for in these.
WINDOW = 128 << 10
MINIMUM_THREADS, MAXIMUM_THREADS = 1, 64
PROT_READ, MAP_SHARED = 1, 1

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


class ReadAheadError(Exception):
    """Why the weights cannot be read, for the person at the keyboard."""


# -- what is in memory -----------------------------------------------------------------------------------------------


def cached_pages(handle: int, offset: int, length: int) -> tuple[int, int]:
    """Pages of a part of an open file that are in the page cache, and pages that it has. `offset` is a page's."""
    pages = -(-length // PAGE)
    if not pages:
        return 0, 0
    address = _LIBC.mmap(None, length, PROT_READ, MAP_SHARED, handle, offset)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        found = ctypes.create_string_buffer(pages)
        if _LIBC.mincore(address, length, found) != 0:
            raise OSError(ctypes.get_errno(), "mincore")
        return pages - found.raw[:pages].count(b"\0"), pages
    finally:
        _LIBC.munmap(address, length)


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache."""
    handle = os.open(str(path), os.O_RDONLY)
    try:
        size = os.fstat(handle).st_size
        pages = sum(cached_pages(handle, at, min(PIECE, size - at))[0] for at in range(0, size, PIECE))
    finally:
        os.close(handle)
    return min(pages * PAGE, size)


def evict(path: Path) -> None:
    """Take a file out of the page cache. Pages that a process has mapped stay."""
    handle = os.open(str(path), os.O_RDONLY)
    try:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


# -- room --------------------------------------------------------------------------------------------------------------


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _page_cache(group: Path, key: str) -> int:
    try:
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)


def control_groups(procfs: Path, sysfs: Path) -> Iterator[tuple[Path, str, str, str]]:
    """This process's control groups for memory and all above them: path, and names of limit, usage and page cache."""
    try:
        lines = (procfs / "self" / "cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, names = sysfs / "fs" / "cgroup", ("memory.max", "memory.current", "file")
        elif "memory" in controllers.split(","):
            top, names = sysfs / "fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
        else:
            continue
        group = top / path.strip("/")
        while True:
            yield (group, *names)
            if group == top:
                break
            group = group.parent


def available_memory(procfs: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> tuple[int, str]:
    """Bytes that files may take in memory, and what sets that limit. Page cache counts as free: it gives way."""
    text = (procfs / "meminfo").read_text(encoding="ascii")
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines() if line.endswith("kB")}
    smallest = (found["MemAvailable"], "MemAvailable of the host")
    for group, limit_name, usage_name, cache_name in control_groups(procfs, sysfs):
        limit, usage = _number(group / limit_name), _number(group / usage_name)
        if limit is not None and usage is not None:
            room = limit - usage + _page_cache(group, cache_name)
            smallest = min(smallest, (room, str(group / limit_name)))
    return smallest


# -- what to read ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """Where an engine process says that it is ready."""

    address: str
    port: int
    path: str

    def ready(self) -> bool:
        connection = http.client.HTTPConnection(self.address, self.port, timeout=2)
        try:
            connection.request("GET", self.path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@dataclass(frozen=True)
class Plan:
    """The files of the host's engine processes, each once, in reading order; and where the engines answer."""

    files: tuple[tuple[Path, int], ...]
    endpoints: tuple[Endpoint, ...]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.files)


def read_plan(configuration: Path) -> Plan:
    """What the processes' descriptions and the markers of their weights say, or ReadAheadError."""
    described = sorted((configuration / "processes").glob("*/process.json"))
    if not described:
        raise ReadAheadError(f"{configuration}/processes describes no engine process. Run playbooks/serve.yml")
    files: dict[Path, int] = {}
    endpoints = []
    for path in described:
        try:
            process = json.loads(path.read_text(encoding="utf-8"))
            marker = json.loads(Path(process["marker"]).read_text(encoding="utf-8"))
            for entry in sorted(marker["files"], key=lambda entry: str(entry["path"])):
                files[Path(process["snapshot"]) / entry["path"]] = int(entry["size"])
            endpoints.append(Endpoint(process["address"], int(process["port"]), process["health_path"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ReadAheadError(
                f"weights cannot be found by {path}: {type(error).__name__}: {error}. Run playbooks/weights.yml, then"
                " playbooks/serve.yml"
            ) from None
    return Plan(tuple(files.items()), tuple(endpoints))


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a read-ahead did. Bytes; `seconds` from the first piece to the last."""

    total: int
    read: int = 0
    cached: int = 0
    seconds: float = 0.0
    stopped: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Bytes a second that came from the drive."""
        return self.read / self.seconds if self.seconds else 0.0

    def line(self) -> str:
        """The last line in the journal; READ_LINE of cold_start.py reads it again."""
        said = (
            f"read {self.read / 1e9:.2f} GB in {self.seconds:.2f} s ({self.rate / 1e9:.2f} GB/s);"
            f" {self.cached / 1e9:.2f} of {self.total / 1e9:.2f} GB were in memory already"
        )
        return f"{said}; stopped: {self.stopped}" if self.stopped else said


class Reader:
    """Several threads over the pieces of all files, in order."""

    def __init__(self, files: Sequence[tuple[Path, int]], threads: int) -> None:
        self.outcome = Outcome(total=sum(size for _, size in files))
        self.threads = threads
        self.stop = threading.Event()
        self._lock = threading.Lock()
        self._pieces = iter([(path, at, min(PIECE, size - at)) for path, size in files for at in range(0, size, PIECE)])

    def run(self, progress_seconds: float = 10.0) -> Outcome:
        """Read until everything is in memory or somebody has set `stop`."""
        began = time.monotonic()
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(self.threads)]
        for worker in workers:
            worker.start()
        told = began
        for worker in workers:
            while worker.is_alive():
                worker.join(0.2)
                if time.monotonic() - told >= progress_seconds:
                    told = time.monotonic()
                    self._tell(told - began)
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _tell(self, seconds: float) -> None:
        done = self.outcome.read + self.outcome.cached
        rate = self.outcome.read / seconds
        left = f", {(self.outcome.total - done) / rate:.0f} s left" if rate else ""
        print(
            f"{done / 1e9:.1f} of {self.outcome.total / 1e9:.1f} GB ({100 * done // max(1, self.outcome.total)} %),"
            f" {rate / 1e9:.2f} GB/s{left}",
            flush=True,
        )

    def _next(self) -> tuple[Path, int, int] | None:
        with self._lock:
            return None if self.stop.is_set() else next(self._pieces, None)

    def _work(self) -> None:
        buffer = memoryview(bytearray(4 << 20))
        path, handle = Path(), -1
        try:
            for piece in iter(self._next, None):
                if piece[0] != path:
                    if handle >= 0:
                        os.close(handle)
                    path, handle = piece[0], -1
                    handle = os.open(str(path), os.O_RDONLY)
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
                self._bring(path, handle, piece[1], piece[2], buffer)
        except OSError as error:
            self.stop.set()
            self.outcome.problems.append(f"{path}: {error.strerror or error}")
        finally:
            if handle >= 0:
                os.close(handle)

    def _bring(self, path: Path, handle: int, offset: int, length: int, buffer: memoryview) -> None:
        """Have one piece in memory. Asking for all of it first keeps the drive's queue full while it arrives."""
        if offset + length > os.fstat(handle).st_size:
            raise OSError(
                0, f"is shorter than the {offset + length} bytes that were verified; run playbooks/weights.yml"
            )
        found, pages = cached_pages(handle, offset, length)
        if found == pages:
            with self._lock:
                self.outcome.cached += length
            return
        for at in range(offset, offset + length, WINDOW):
            os.posix_fadvise(handle, at, min(WINDOW, offset + length - at), os.POSIX_FADV_WILLNEED)
        at = offset
        while at < offset + length:
            count = os.preadv(handle, [buffer[: min(len(buffer), offset + length - at)]], at)
            if not count:
                raise OSError(0, "ended early")
            at += count
        already = min(length, found * PAGE)
        with self._lock:
            self.outcome.cached += already
            self.outcome.read += length - already


def stop_when_ready(reader: Reader, endpoints: Sequence[Endpoint], every_seconds: float = 1.0) -> None:
    """Stop reading once every process answers and one of them has become ready meanwhile.

    One that answers from the start is serving, or is on its way out in a restart: it says nothing about the new one.
    """
    before = {endpoint: endpoint.ready() for endpoint in endpoints}
    became = False
    while not reader.stop.wait(every_seconds):
        now = {endpoint: endpoint.ready() for endpoint in endpoints}
        became = became or any(now[endpoint] and not before[endpoint] for endpoint in endpoints)
        before = now
        if became and all(now.values()):
            reader.outcome.stopped = "the engine is ready"
            reader.stop.set()


def run(arguments: argparse.Namespace) -> int:
    """Read the plan's weights; 0 also when there is no room for them."""
    plan = read_plan(arguments.configuration)
    available, limit = available_memory(arguments.procfs, arguments.sysfs)
    if plan.size + arguments.margin_bytes > available:
        print(
            f"skipped: the weights are {plan.size / 1e9:.1f} GB and {arguments.margin_bytes / 1e9:.1f} GB are to stay"
            f" free, but {limit} leaves {available / 1e9:.1f} GB. The engine reads them itself"
        )
        return 0
    reader = Reader(plan.files, arguments.threads)

    def on_signal(number: int, _frame: Any) -> None:
        reader.outcome.stopped = f"told to ({signal.Signals(number).name})"
        reader.stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    threading.Thread(target=stop_when_ready, args=(reader, plan.endpoints), daemon=True).start()
    print(f"reading {len(plan.files)} files, {plan.size / 1e9:.1f} GB, with {arguments.threads} threads", flush=True)
    outcome = reader.run()
    for problem in outcome.problems:
        print(problem, file=sys.stderr)
    print(outcome.line())
    return 1 if outcome.problems else 0


def _threads(text: str) -> int:
    number = int(text)
    if not MINIMUM_THREADS <= number <= MAXIMUM_THREADS:
        raise argparse.ArgumentTypeError(f"{text}: allowed are {MINIMUM_THREADS} to {MAXIMUM_THREADS}")
    return number


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Read the plan's weights into memory ahead of the engine.")
    parser.add_argument("--configuration", type=Path, default=Path("/etc/gpt-oss"), help="where processes/ is")
    parser.add_argument("--threads", type=_threads, default=16, help="pieces read at once (default: 16)")
    parser.add_argument("--margin-bytes", type=int, default=16 << 30, help="memory to leave free beside the weights")
    parser.add_argument("--procfs", type=Path, default=Path("/proc"), help=argparse.SUPPRESS)
    parser.add_argument("--sysfs", type=Path, default=Path("/sys"), help=argparse.SUPPRESS)
    try:
        return run(parser.parse_args(words))
    except ReadAheadError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
