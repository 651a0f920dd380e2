#!/usr/bin/env python3
"""Bring one revision of a model to a directory of weights, verified, or leave that directory as it was.

    fetch_weights.py check   is the snapshot there and verified? Reads names, sizes and times only; asks nobody
    fetch_weights.py verify  read every file of it again, several at once, and compare the checksums; changes nothing
    fetch_weights.py fetch   bring it from the Hub, or from --from DIRECTORY_ARCHIVE_OR_ADDRESS, and verify it
    fetch_weights.py manifest / bundle   write what a host without a way to the Hub needs

How it works. Files are downloaded below the staging directory and resume where they were cut. A complete file is read
back and compared with the checksum that the Hub (or the manifest) gives; only then does it get its final name there.
When all are there, the marker with the manifest is written and the whole directory is renamed into the Hugging Face
cache layout (`models--ORG--NAME/snapshots/REVISION`), so a snapshot that can be seen is complete and verified.
One fetch of a model at a time: another one ends at once, or waits (--lock-wait) and then finds everything done.

The status is 0, 1 for what may work when it is tried again, and 3 for what will not: the token, the revision, a wrong
argument. With --report=line the last line on stdout is one JSON object, whatever happened.

Every option can be given by environment: --weights-directory as WEIGHTS_DIRECTORY and so on. The access token is taken
from HF_TOKEN alone, never from an argument. Needs Python 3.8; huggingface_hub only for fetching from a hub.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import fcntl
import fnmatch
import hashlib
import http.client
import importlib
import io
import json
import os
import re
import shutil
import signal
import ssl
import stat
import sys
import tarfile
import threading
import time
import traceback
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

FORMAT_VERSION = 1
CHUNK = 1 << 20
AHEAD = 32 * CHUNK  # what the drive is asked for ahead of the thread that hashes
WINDOW = CHUNK // 8  # the kernel cuts longer requests to read ahead to the device's window, 128 KiB by default
MANIFEST_NAME = "manifest.json"
MANIFEST_LIMIT = 64 * CHUNK  # what is larger is none
DEFAULT_ENDPOINT = "https://huggingface.co"
# Kinds of failure that the same command, run again, meets again.
PERMANENT = ("gated", "token", "revision", "repository", "input", "layout", "manifest", "locks")
FAILED, HOPELESS = 1, 3
REPORTED = 1500  # characters of a message: with the rest it fits the 2048 bytes that Kubernetes keeps of a log's end


class FetchError(Exception):
    """What went wrong, in words for the person who has to put it right."""

    def __init__(self, message: str, kind: str = "failed") -> None:
        super().__init__(message)
        self.kind = kind


class BrokenOffError(Exception):
    """The source broke off; what has arrived is good, and the rest can be asked for."""

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class StoppedError(Exception):
    """Another worker failed, or the process was told to end."""


# -- what is wanted --


@dataclass(frozen=True)
class WantedFile:
    """A file and the checksum that its publisher gives: sha256 (large files, manifests) or git's sha1 of the blob."""

    path: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True)
class Encoding:
    """A vocabulary file that Harmony reads at run time."""

    file: str
    url: str
    sha256: str
    size: int | None = None


@dataclass(frozen=True)
class Layout:
    """Where everything lies. Staging and weights are on one filesystem, so that publishing is a rename."""

    weights: Path
    staging: Path
    encodings: Path
    repository: str
    revision: str

    @property
    def folder(self) -> str:
        return "models--" + self.repository.replace("/", "--")

    @property
    def model(self) -> Path:
        return self.weights / self.folder

    @property
    def snapshot(self) -> Path:
        return self.model / "snapshots" / self.revision

    @property
    def marker(self) -> Path:
        return self.model / "verified" / (self.revision + ".json")

    @property
    def ref(self) -> Path:
        return self.model / "refs" / "main"

    @property
    def work(self) -> Path:
        return self.staging / self.folder / self.revision

    @property
    def partial(self) -> Path:
        """Files still coming in, or not yet verified."""
        return self.work / "partial"

    @property
    def complete(self) -> Path:
        """Verified files under their final names."""
        return self.work / "files"

    @property
    def shared(self) -> Path:
        """Files that are coming in from other hosts of the fleet, piece by piece."""
        return self.work / "shared"

    @property
    def received(self) -> Path:
        """Files that a controller has sent, named by their sha256, with the manifest beside them."""
        return self.staging / self.folder / (self.revision + ".received")

    @property
    def lock(self) -> Path:
        return self.staging / (self.folder + ".lock")


@dataclass
class Request:
    """One job."""

    layout: Layout
    ignore_patterns: tuple[str, ...]
    encodings: tuple[Encoding, ...]
    endpoint: str = DEFAULT_ENDPOINT
    token: str | None = None
    source: Path | None = None  # a directory or archive; without it and without an address, the hub
    address: str = ""  # of a directory on a plain web server
    manifest: Path | None = None
    workers: int = 8
    keep_free_bytes: int = 0
    attempts: int = 6
    timeout: float = 30.0
    remove_stale_staging: bool = False
    lock_wait: float = 0.0
    progress_file: Path | None = None
    progress_interval: float = 10.0


# -- small tools --


def human(size: float) -> str:
    """A size to read: binary units, as disks and memory are counted here."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    """A duration to read."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def sync_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut."""
    handle = os.open(str(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    sync_directory(path.parent)


def safe_path(path: Any) -> str:
    """A file's path inside a repository, or a failure when it leads elsewhere."""
    text = str(path)
    parts = PurePosixPath(text).parts
    if (
        not text
        or text.startswith("/")
        or "\\" in text
        or "\0" in text
        or ".." in parts
        or str(PurePosixPath(text)) != text
    ):
        raise FetchError(f"the file list names {text!r}, which is not a plain path inside the repository", "manifest")
    return text


def ignored(path: str, patterns: Iterable[str]) -> bool:
    """Whether a file is left out, by the rules of huggingface_hub (`original/` means `original/*`)."""
    return any(fnmatch.fnmatch(path, p + "*" if p.endswith("/") else p) for p in patterns)


def digest_of(path: Path, wanted: WantedFile, stop: threading.Event | None = None) -> tuple[str, str]:
    """The file's sha256, and what it has of the checksum that `wanted` gives."""
    sha256 = hashlib.sha256()
    blob = hashlib.sha1(b"blob %d\0" % wanted.size)  # noqa: S324 - git's own checksum, published by the Hub
    buffer = memoryview(bytearray(4 * CHUNK))
    position = asked = 0
    with path.open("rb", buffering=0) as handle:
        while True:
            while asked < min(position + AHEAD, wanted.size):
                os.posix_fadvise(handle.fileno(), asked, WINDOW, os.POSIX_FADV_WILLNEED)
                asked += WINDOW
            count = handle.readinto(buffer)
            if not count:
                break
            position += count
            if stop is not None and stop.is_set():
                raise StoppedError
            sha256.update(buffer[:count])
            if wanted.sha256 is None:
                blob.update(buffer[:count])
    return sha256.hexdigest(), sha256.hexdigest() if wanted.sha256 is not None else blob.hexdigest()


# -- the marker --


def read_marker(layout: Layout) -> dict[str, Any] | None:
    """The marker of this revision, or nothing when it is missing or not whole."""
    try:
        marker = json.loads(layout.marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(marker, dict) or marker.get("format_version") != FORMAT_VERSION:
        return None
    return marker


def weights_problem(layout: Layout, ignore_patterns: Sequence[str]) -> str | None:
    """Why the snapshot does not count as verified, or nothing. Looks at names, sizes and times; reads no weights."""
    marker = read_marker(layout)
    if marker is None:
        return "there is no snapshot" if not layout.snapshot.exists() else "the snapshot has no marker"
    if marker.get("repository") != layout.repository or marker.get("revision") != layout.revision:
        return "the marker is of another model"
    if sorted(marker.get("ignore_patterns", [])) != sorted(ignore_patterns):
        return "the patterns left out have changed"
    expected = {str(entry["path"]): entry for entry in marker["files"]}
    found = {
        str(path.relative_to(layout.snapshot)): path.lstat()
        for path in layout.snapshot.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    if set(found) != set(expected):
        return "files are missing or added: " + ", ".join(sorted(set(found) ^ set(expected))[:5])
    for name, status in found.items():
        if not stat.S_ISREG(status.st_mode):
            return name + " is not a plain file"
        if status.st_size != expected[name]["size"] or status.st_mtime_ns != expected[name]["mtime_ns"]:
            return name + " has changed since it was verified"
    return None if current_revision(layout) else "refs/main names no revision that is here"


def current_revision(layout: Layout) -> str:
    """The verified revision that the model's name leads to; empty where it leads nowhere.

    It may be another one than this layout's: a server that is running keeps what it was started with, and the start of
    the next one makes its own the current one.
    """
    try:
        current = layout.ref.read_text(encoding="utf-8")
    except OSError:
        return ""
    if not re.match(r"[0-9a-f]{40}\Z", current):
        return ""
    there = dataclasses.replace(layout, revision=current)
    return current if there.snapshot.is_dir() and there.marker.is_file() else ""


def encodings_missing(layout: Layout, encodings: Iterable[Encoding]) -> list[Encoding]:
    """The encodings that are not there as they should be. They are small: their content is read."""
    missing = []
    for encoding in encodings:
        try:
            content = (layout.encodings / encoding.file).read_bytes()
        except OSError:
            content = b""
        if hashlib.sha256(content).hexdigest() != encoding.sha256:
            missing.append(encoding)
    return missing


def check(request: Request) -> dict[str, Any]:
    """Whether everything is there and verified, and if not, why."""
    problems = []
    weights = weights_problem(request.layout, request.ignore_patterns)
    if weights is not None:
        problems.append("weights: " + weights)
    missing = [encoding.file for encoding in encodings_missing(request.layout, request.encodings)]
    if missing:
        problems.append("encodings missing or different: " + ", ".join(missing))
    marker = read_marker(request.layout) or {}
    return {
        "verified": not problems,
        "problems": problems,
        "snapshot": str(request.layout.snapshot),
        "marker": str(request.layout.marker),
        "bytes": sum(int(entry["size"]) for entry in marker.get("files", [])),
        "files": len(marker.get("files", [])),
    }


def verify(request: Request) -> dict[str, Any]:
    """Read a verified snapshot again, several files at once: what differs, and bytes a second. Changes nothing."""
    layout = request.layout
    marker = read_marker(layout)
    if marker is None:
        raise FetchError(f"{layout.marker} is not there: nothing was verified here. Run fetch", "failed")
    began = time.monotonic()

    def problem(entry: dict[str, Any]) -> str | None:
        path = layout.snapshot / safe_path(entry["path"])
        wanted = WantedFile(entry["path"], int(entry["size"]), sha256=entry["sha256"])
        try:
            size, got = path.stat().st_size, digest_of(path, wanted)[0]
        except OSError as error:
            return f"{wanted.path}: {error.strerror}"
        if size != wanted.size:
            return f"{wanted.path}: has {size} bytes, {wanted.size} were verified"
        return None if got == wanted.sha256 else f"{wanted.path}: its sha256 should be {wanted.sha256} and is {got}"

    with ThreadPoolExecutor(max_workers=max(1, request.workers)) as pool:
        entries = sorted(marker["files"], key=lambda entry: int(entry["size"]), reverse=True)
        problems = [found for found in pool.map(problem, entries) if found is not None]
    seconds = time.monotonic() - began
    size = sum(int(entry["size"]) for entry in marker["files"])
    return {
        "verified": not problems,
        "problems": problems,
        "bytes": size,
        "files": len(marker["files"]),
        "seconds": round(seconds, 3),
        "bytes_per_second": int(size / seconds) if seconds else None,
    }


# -- progress --


class Progress:
    """Bytes, rate and time left, for people (a line now and then) and for programs (a file)."""

    def __init__(self, path: Path | None, interval: float) -> None:
        self.path = path
        self.interval = interval
        self.state = "listing"
        self.message = ""
        self.total = 0
        self.done = 0
        self.found = 0
        self.transferred = 0
        self.files_total = 0
        self.files_done = 0
        self.fleet: dict[str, float] = {}  # what other hosts have of the whole, where they are asked
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._report, daemon=True)
        self._thread.start()

    def end(self, state: str, message: str) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self.state, self.message = state, message
        self.write()

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count
            self.transferred += count

    def already(self, count: int) -> None:
        with self._lock:
            self.done += count
            self.found += count

    def take_back(self, count: int, found: int) -> None:
        """These bytes were no good; so many of them had been found here."""
        with self._lock:
            self.done -= count
            self.found -= found

    def file_done(self) -> None:
        with self._lock:
            self.files_done += 1

    def rate(self) -> float:
        """Bytes a second over the last quarter of a minute."""
        now = time.monotonic()
        with self._lock:
            self._samples.append((now, self.transferred))
            while len(self._samples) > 2 and now - self._samples[1][0] > 15:
                self._samples.popleft()
            (then, before), (_, latest) = self._samples[0], self._samples[-1]
        return (latest - before) / (now - then) if now > then else 0.0

    def snapshot(self) -> dict[str, Any]:
        rate = self.rate()
        left = self.total - self.done
        arrived = self.state in ("downloading", "copying", "taking") and self.total > 0 and left <= 0
        return {
            "state": "verifying" if arrived else self.state,
            "message": self.message,
            "bytes_done": self.done,
            "bytes_total": self.total,
            "bytes_found": self.found,
            "bytes_transferred": self.transferred,
            "files_done": self.files_done,
            "files_total": self.files_total,
            "fleet": self.fleet,
            "rate": int(rate),
            "seconds_left": int(left / rate) if rate > 0 and left > 0 else None,
            "pid": os.getpid(),
            "time": time.time(),
        }

    def write(self) -> dict[str, Any]:
        state = self.snapshot()
        if self.path is not None:
            temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            with contextlib.suppress(OSError):  # a full disk must not hide the failure that follows from it
                temporary.write_text(json.dumps(state), encoding="utf-8")
                temporary.replace(self.path)
        return state

    def _report(self) -> None:
        next_line = time.monotonic() + self.interval
        self.write()
        while not self._ended.wait(1.0):
            state = self.write()
            if time.monotonic() >= next_line:
                print(progress_line(state), file=sys.stderr, flush=True)
                next_line = time.monotonic() + self.interval


def progress_line(state: dict[str, Any]) -> str:
    """One line for the terminal."""
    if not state.get("bytes_total"):
        return str(state["state"])
    done, total = state["bytes_done"], state["bytes_total"]
    line = f"{state['state']}: {human(done)} of {human(total)} ({100 * done // total} %)"
    line += f", {state['files_done']} of {state['files_total']} files"
    if state.get("rate"):
        line += ", {}/s".format(human(state["rate"]))
    if state.get("seconds_left") is not None:
        line += ", {} left".format(duration(state["seconds_left"]))
    fleet = state.get("fleet")
    if fleet:
        last = min(fleet, key=lambda name: fleet[name])
        done = sum(part >= 1 for part in fleet.values())
        line += f"; {done} of {len(fleet)} others have all, the last is {last} with {100 * fleet[last]:.0f} %"
    return line


# -- sources --


class Source:
    """Where files come from."""

    name = ""
    parallel = True

    def files(self) -> list[WantedFile]:
        raise NotImplementedError

    def read(self, wanted: WantedFile, offset: int) -> Iterator[bytes]:
        """The file's bytes from `offset`; raises BrokenOffError when the rest is worth asking for again."""
        raise NotImplementedError

    def read_encoding(self, encoding: Encoding) -> Iterator[bytes]:
        raise NotImplementedError

    def require_encodings(self, encodings: Sequence[Encoding]) -> None:
        """Stop where the source is known not to have one of them."""

    def held(self, wanted: WantedFile) -> int:
        """Bytes of a file that take up room on this disk already, in a place of the source's own."""
        return 0

    def collect(self, files: Sequence[WantedFile], progress: Progress) -> None:
        """Bring whole files, all at once, to where `read` would put them; most sources do that one by one."""

    def close(self) -> None:
        """Let go of what is held."""


class HubSource(Source):
    """A Hugging Face Hub or a mirror of one, through huggingface_hub."""

    def __init__(self, request: Request) -> None:
        # The client reads its settings when it is imported; a host's own ones must not change what happens here.
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DEBUG"):
            os.environ.pop(name, None)
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        os.environ["HF_HUB_DISABLE_IMPLICIT_TOKEN"] = "1"  # noqa: S105 - a switch
        os.environ["HF_ENDPOINT"] = request.endpoint
        os.environ["HF_HOME"] = str(request.layout.staging / ".huggingface")
        try:
            hub: Any = importlib.import_module("huggingface_hub")
            errors: Any = importlib.import_module("huggingface_hub.errors")
            utils: Any = importlib.import_module("huggingface_hub.utils")
        except ImportError as error:
            raise FetchError(
                f"huggingface_hub is not installed for {sys.executable} ({error}); install it, or fetch --from a"
                " directory or archive, or the address of one on a web server"
            ) from None
        try:
            transport = importlib.import_module("httpx2")  # huggingface_hub 2
        except ImportError:
            transport = importlib.import_module("httpx")  # huggingface_hub 1
        self.request = request
        self.name = request.endpoint
        self.transport = transport
        self.errors = errors
        self.utils = utils
        self.hub = hub
        self.token: Any = request.token or False
        self.headers = dict(utils.build_hf_headers(token=self.token, library_name="gpt-oss-on-nvidia"))
        self.headers["Accept-Encoding"] = "identity"

    def files(self) -> list[WantedFile]:
        layout = self.request.layout
        api = self.hub.HfApi(endpoint=self.request.endpoint, token=self.token)
        info = self._ask(
            lambda: api.model_info(
                layout.repository, revision=layout.revision, files_metadata=True, timeout=self.request.timeout
            ),
            "the file list",
        )
        if info.sha != layout.revision:
            raise FetchError(f"{self.name} answered for revision {info.sha}, not {layout.revision}", "hub")
        wanted = []
        for entry in info.siblings or []:
            lfs = entry.lfs
            if entry.size is None or (lfs is None and entry.blob_id is None):
                raise FetchError(f"{self.name} gives no size or checksum for {entry.rfilename}", "hub")
            wanted.append(
                WantedFile(
                    safe_path(entry.rfilename),
                    int(lfs.size if lfs else entry.size),
                    sha256=lfs.sha256 if lfs else None,
                    git_sha1=None if lfs else entry.blob_id,
                )
            )
        return wanted

    def _ask(self, call: Callable[[], Any], what: str) -> Any:
        """Ask the hub for something small."""
        look_at = "the network, the proxy, and the endpoint (HF_ENDPOINT)"
        return persistently(lambda: self._translated(call, what), what, self.name, self.request.attempts, look_at)

    def _translated(self, call: Callable[[], Any], what: str) -> Any:
        try:
            return call()
        except self.transport.TransportError as error:
            raise BrokenOffError(str(error) or type(error).__name__) from None
        except self.errors.HfHubHTTPError as error:
            raise self._refusal(error, what) from None
        except (ValueError, TypeError, KeyError) as error:
            raise FetchError(
                f"{self.name} does not answer as a hub does ({type(error).__name__} for {what}); is there a proxy or a"
                " sign-in page in between?",
                "hub",
            ) from None

    def _refusal(self, error: Any, what: str) -> Exception:
        """What an HTTP error of the Hub means. Its own text is not repeated: it may hold a signed address."""
        status = error.response.status_code
        repository, revision = self.request.layout.repository, self.request.layout.revision
        where = f"{self.name}/{repository}"
        said = error.response.headers.get("X-Error-Message", "")
        if isinstance(error, self.errors.GatedRepoError):
            return FetchError(
                "{} is gated and {}. Accept its terms on the hub and pass a token of that account as HF_TOKEN".format(
                    where, "this token's account has no access to it" if self.token else "no token was given"
                ),
                "gated",
            )
        if status == 401 and self.token and "RepoNotFound" not in error.response.headers.get("X-Error-Code", ""):
            return FetchError(
                f"{self.name} refused the token in HF_TOKEN (status 401): it is wrong, expired or revoked. A model that"
                " is neither gated nor private needs none",
                "token",
            )
        if isinstance(error, self.errors.RevisionNotFoundError):
            return FetchError(f"{where} has no revision {revision}", "revision")
        if isinstance(error, self.errors.RepositoryNotFoundError):
            return FetchError(
                "{} does not exist, or is private and {}".format(
                    where, "this token may not read it" if self.token else "no token was given in HF_TOKEN"
                ),
                "repository",
            )
        if status in (401, 403):
            return FetchError(f"{self.name} refused {what} (status {status})", "token")
        if status in (408, 429) or status >= 500:
            after = error.response.headers.get("Retry-After", "")
            return BrokenOffError(f"status {status}", float(after) if after.isdigit() else None)
        return FetchError(f"{self.name} answered status {status} for {what} {said}", "hub")

    def read(self, wanted: WantedFile, offset: int) -> Iterator[bytes]:
        url = self.hub.hf_hub_url(
            self.request.layout.repository,
            wanted.path,
            revision=self.request.layout.revision,
            endpoint=self.request.endpoint,
        )
        headers = dict(self.headers)
        if offset:
            headers["Range"] = f"bytes={offset}-"
        client = self.utils.get_session()
        try:
            with client.stream("GET", url, headers=headers, timeout=self.request.timeout) as response:
                self._translated(lambda: self.utils.hf_raise_for_status(response), wanted.path)
                skip = 0
                if offset and response.status_code != 206:
                    skip = offset  # the server does not resume: pass over what is here already
                length = response.headers.get("Content-Length")
                if length is not None and int(length) + offset - skip != wanted.size:
                    raise FetchError(
                        f"{self.name}: the answer for {wanted.path} has {int(length) + offset - skip} bytes,"
                        f" {wanted.size} were expected; is there a proxy or a sign-in page in between?",
                        "hub",
                    )
                for chunk in response.iter_raw():
                    if skip:
                        dropped = min(skip, len(chunk))
                        skip -= dropped
                        chunk = chunk[dropped:]
                    if chunk:
                        yield chunk
        except self.transport.TransportError as error:
            raise BrokenOffError(str(error) or type(error).__name__) from None

    def read_encoding(self, encoding: Encoding) -> Iterator[bytes]:
        try:
            request = urllib.request.Request(encoding.url, headers={"User-Agent": "gpt-oss-on-nvidia"})  # noqa: S310
            with urllib.request.urlopen(request, timeout=self.request.timeout) as response:  # noqa: S310
                while True:
                    chunk = response.read(CHUNK)
                    if not chunk:
                        return
                    yield chunk
        except urllib.error.HTTPError as error:
            if error.code in (408, 429) or error.code >= 500:
                raise BrokenOffError(f"status {error.code}") from None
            raise FetchError(f"{encoding.url} answered status {error.code}", "unreachable") from None
        except (OSError, ValueError) as error:
            raise BrokenOffError(str(getattr(error, "reason", error))) from None


class ManifestSource(Source):
    """Files that are here already, listed in a manifest: the way without a hub."""

    def __init__(self, request: Request, manifest: dict[str, Any], origin: str) -> None:
        self.request = request
        self.manifest = manifest
        self.origin = origin

    def files(self) -> list[WantedFile]:
        layout = self.request.layout
        if self.manifest.get("format_version") != FORMAT_VERSION:
            raise FetchError(f"{self.origin} is not a manifest of format {FORMAT_VERSION}", "manifest")
        for key, wanted in (("repository", layout.repository), ("revision", layout.revision)):
            if self.manifest.get(key) != wanted:
                raise FetchError(
                    f"{self.origin}: {key} is {self.manifest.get(key)!r}; {wanted!r} was asked for", "manifest"
                )
        files = []
        for entry in self.manifest.get("files") or []:
            size, sha256 = entry.get("size"), entry.get("sha256")
            if not isinstance(size, int) or not re.match(r"[0-9a-f]{64}\Z", str(sha256)):
                raise FetchError("{}: {!r} has no size or no sha256".format(self.origin, entry.get("path")), "manifest")
            files.append(WantedFile(safe_path(entry.get("path")), size, sha256=sha256))
        layout, patterns = self.request.layout, self.request.ignore_patterns
        self._require([f for f in files if not ignored(f.path, patterns) and bytes_here(layout, f) != f.size])
        return files

    def require_encodings(self, encodings: Sequence[Encoding]) -> None:
        self._require([WantedFile("encodings/" + e.file, e.size or -1, sha256=e.sha256) for e in encodings])

    def _require(self, files: Sequence[WantedFile]) -> None:
        """Stop before the first byte where a file is not there or of another size."""
        problems = [problem for problem in self.problems(files) if problem]
        if problems:
            more = f"; and {len(problems) - 3} more files" if len(problems) > 3 else ""
            raise FetchError("; ".join(problems[:3]) + more + f". Copy what {self.origin} lists there again", "source")

    def problems(self, files: Sequence[WantedFile]) -> list[str]:
        """What is wrong with each file as the source has it, without reading it; a size below 0 is not known."""
        return [self.problem(wanted) for wanted in files]

    def problem(self, wanted: WantedFile) -> str:
        """What is wrong with one file; empty where nothing is, or nothing can be known before it is read."""
        return ""

    def other_size(self, wanted: WantedFile, size: int) -> str:
        """What to say of a file with so many bytes; empty when they are what is wanted."""
        if size == wanted.size or wanted.size < 0:
            return ""
        return f"{wanted.path} in {self.name} is cut short or another: it has {size} bytes, {wanted.size} were expected"

    def candidates(self, path: str) -> tuple[str, ...]:
        """Where a file may lie: plainly, or as a Hugging Face cache has it."""
        layout = self.request.layout
        return (path, f"{layout.folder}/snapshots/{layout.revision}/{path}")


class DirectorySource(ManifestSource):
    """A directory, on a disk or a mounted share."""

    def __init__(self, request: Request, directory: Path) -> None:
        self.directory = directory
        manifest = request.manifest or directory / MANIFEST_NAME
        super().__init__(request, load_manifest(manifest), str(manifest))
        self.name = str(directory)

    def find(self, path: str, sha256: str = "") -> Path:
        """Where the file lies: under its name, or under its checksum where a controller has sent it."""
        for candidate in (*self.candidates(path), sha256 or path):
            if (self.directory / candidate).is_file():
                return self.directory / candidate
        raise FetchError(f"{self.directory} has no file {path}, which its manifest lists", "source")

    def problem(self, wanted: WantedFile) -> str:
        try:
            return self.other_size(wanted, self.find(wanted.path, wanted.sha256 or "").stat().st_size)
        except FetchError as error:
            return str(error)

    def read(self, wanted: WantedFile, offset: int) -> Iterator[bytes]:
        with self.find(wanted.path, wanted.sha256 or "").open("rb") as handle:
            handle.seek(offset)
            yield from iter(lambda: handle.read(CHUNK), b"")

    def read_encoding(self, encoding: Encoding) -> Iterator[bytes]:
        with self.find("encodings/" + encoding.file, encoding.sha256).open("rb") as handle:
            yield from iter(lambda: handle.read(CHUNK), b"")


class ArchiveSource(ManifestSource):
    """A tar archive, compressed or not, of such a directory."""

    parallel = False

    def __init__(self, request: Request, path: Path) -> None:
        self.path = path
        try:
            self.archive = tarfile.open(str(path))  # noqa: SIM115 - closed by close()
            self.members = {str(PurePosixPath(m.name)): m for m in self.archive.getmembers() if m.isfile()}
            self._require_end()
            origin = str(request.manifest or f"{MANIFEST_NAME} in {path}")
            if request.manifest is not None:
                manifest = load_manifest(request.manifest)
            elif MANIFEST_NAME in self.members:
                manifest = parse_manifest(self._read(MANIFEST_NAME).read(), origin)
            else:
                raise FetchError(f"{path} holds no {MANIFEST_NAME} and none was given", "manifest")
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            raise self._broken(error) from None
        super().__init__(request, manifest, origin)
        self.name = str(path)

    def _broken(self, error: Exception) -> FetchError:
        if isinstance(error, FileNotFoundError):
            return FetchError(f"{self.path} does not exist", "source")
        return FetchError(f"{self.path} is not a whole tar archive: {error}. Copy it again", "source")

    def _require_end(self) -> None:
        """A plain archive that was cut between two files has no end mark; compressed ones are told by their format."""
        if isinstance(self.archive.fileobj, io.BufferedReader):
            self.archive.fileobj.seek(self.archive.offset)
            if len(self.archive.fileobj.read(tarfile.BLOCKSIZE)) < tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it has no end mark")

    def problem(self, wanted: WantedFile) -> str:
        name = next((c for c in self.candidates(wanted.path) if c in self.members), None)
        if name is None:
            return f"{self.path} has no file {wanted.path}, which its manifest lists"
        return self.other_size(wanted, self.members[name].size)

    def _read(self, path: str) -> Any:
        return self.archive.extractfile(self.members[path])

    def chunks(self, path: str, offset: int) -> Iterator[bytes]:
        """A member's bytes from `offset`."""
        name = next((c for c in self.candidates(path) if c in self.members), None)
        if name is None:
            raise FetchError(f"{self.path} has no file {path}, which its manifest lists", "source")
        try:
            handle = self._read(name)
            handle.seek(offset)
            yield from iter(lambda: handle.read(CHUNK), b"")
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            raise self._broken(error) from None

    def read(self, wanted: WantedFile, offset: int) -> Iterator[bytes]:
        return self.chunks(wanted.path, offset)

    def read_encoding(self, encoding: Encoding) -> Iterator[bytes]:
        return self.chunks("encodings/" + encoding.file, 0)

    def close(self) -> None:
        self.archive.close()


class HttpSource(ManifestSource):
    """A directory that a plain web server hands out: nginx, an object store, `python3 -m http.server`.

    Standard library only. Every file is asked for by its headers first, so that one that is missing or of another size
    is known before the first byte of any. No token is sent.
    """

    def __init__(self, request: Request, address: str) -> None:
        self.name = address
        self.request = request
        self.found: dict[str, str] = {}
        origin = str(request.manifest or f"{address}/{MANIFEST_NAME}")
        manifest = load_manifest(request.manifest) if request.manifest is not None else self._manifest(origin)
        super().__init__(request, manifest, origin)

    def _manifest(self, origin: str) -> dict[str, Any]:
        remedy = "The address is that of the directory that holds it; fetch_weights.py manifest writes one"

        def read() -> bytes:
            with self._open(origin) as response:
                kind = response.headers.get_content_type()
                content = bytes(response.read(MANIFEST_LIMIT))
            if kind == "text/html" or content.lstrip()[:1] == b"<":
                raise FetchError(
                    f"{origin} is an HTML page (a listing or a sign-in?), not a manifest. {remedy}", "source"
                )
            return content

        try:
            return parse_manifest(self._ask(read, origin), origin)
        except FileNotFoundError:
            raise FetchError(f"{origin} does not exist (status 404). {remedy}", "source") from None

    def problems(self, files: Sequence[WantedFile]) -> list[str]:
        with ThreadPoolExecutor(max_workers=max(1, self.request.workers)) as pool:
            return list(pool.map(self.problem, files))

    def problem(self, wanted: WantedFile) -> str:
        for candidate in self.candidates(wanted.path):
            address = self._address(candidate)
            try:
                length = self._ask(lambda address=address: self._length(address), wanted.path)  # type: ignore[misc]
            except FileNotFoundError:
                continue
            self.found[wanted.path] = address
            return "" if length is None else self.other_size(wanted, length)
        return f"{self.name} has no file {wanted.path}, which the manifest lists (status 404)"

    def _length(self, address: str) -> int | None:
        """Bytes of a file as its headers say; nothing where the server gives no headers alone, or no length."""
        try:
            with self._open(address, method="HEAD") as response:
                length = response.headers.get("Content-Length")
                return int(length) if length is not None else None
        except NotImplementedError:
            return None

    def other_size(self, wanted: WantedFile, size: int) -> str:
        wrong = super().other_size(wanted, size)
        return wrong and wrong + "; is there a sign-in page in between?"

    def _address(self, path: str) -> str:
        return self.name + "/" + urllib.parse.quote(path)

    def _ask(self, call: Callable[[], Any], what: str) -> Any:
        """Ask for something small."""
        look_at = "the address, the network and the proxy"
        return persistently(call, what, self.name, self.request.attempts, look_at)

    @contextlib.contextmanager
    def _open(self, address: str, offset: int = 0, method: str = "GET") -> Iterator[Any]:
        """An answer with success. FileNotFoundError for 404, NotImplementedError for a method that is not known."""
        headers = {"User-Agent": "gpt-oss-on-nvidia", "Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        request = urllib.request.Request(address, headers=headers, method=method)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=self.request.timeout) as response:  # noqa: S310
                if response.headers.get("Content-Encoding", "identity") != "identity":
                    raise FetchError(f"{address} comes compressed, though it was asked for as it is", "source")
                yield response
        except urllib.error.HTTPError as error:
            raise self._refusal(error, address) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._broken_off(error, address) from None

    @staticmethod
    def _broken_off(error: Exception, address: str) -> Exception:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return FetchError(
                f"{address}: the certificate cannot be verified ({reason.verify_message}). Add its authority to those"
                " that the host trusts (update-ca-certificates), or correct the name in the address",
                "source",
            )
        return BrokenOffError(str(reason) or type(reason).__name__)

    @staticmethod
    def _refusal(error: urllib.error.HTTPError, address: str) -> Exception:
        """What an HTTP error means; its page is not repeated."""
        if error.code in (404, 410):
            return FileNotFoundError(address)
        if error.code in (405, 501):
            return NotImplementedError(address)
        if error.code in (408, 429) or error.code >= 500:
            after = error.headers.get("Retry-After", "")
            return BrokenOffError(f"status {error.code}", float(after) if after.isdigit() else None)
        if error.code in (401, 403):
            return FetchError(
                f"{address} is refused (status {error.code}): files are read without a token or password; let the hosts"
                " read this directory",
                "source",
            )
        return FetchError(f"{address} answered status {error.code}", "source")

    def read(self, wanted: WantedFile, offset: int) -> Iterator[bytes]:
        try:
            address = self.found.get(wanted.path) or self._address(wanted.path)
            with self._open(address, offset) as response:
                start = offset if response.status == 206 else 0  # else the server does not resume
                said = response.headers.get("Content-Range", "")
                if response.status == 206 and not said.startswith(f"bytes {offset}-"):
                    raise FetchError(
                        f"{self.name} was asked for {wanted.path} from byte {offset}, and sent {said}", "source"
                    )
                length = response.headers.get("Content-Length")
                wrong = "" if length is None else self.other_size(wanted, start + int(length))
                if wrong:
                    raise FetchError(wrong, "source")
                if length is None and response.headers.get_content_type() == "text/html":
                    raise FetchError(f"{self.name} sent an HTML page for {wanted.path}", "source")
                for chunk in iter(lambda: response.read1(CHUNK), b""):
                    fresh = chunk[max(0, offset - start) :]
                    start += len(chunk)
                    if fresh:
                        yield fresh
        except FileNotFoundError:
            raise FetchError(f"{self.name} has no file {wanted.path} any more (status 404)", "source") from None

    def read_encoding(self, encoding: Encoding) -> Iterator[bytes]:
        for candidate in self.candidates("encodings/" + encoding.file):
            try:
                with self._open(self._address(candidate)) as response:
                    yield from iter(lambda: response.read1(CHUNK), b"")
                    return
            except FileNotFoundError:
                continue
        raise FetchError(
            f"{self.name} has no file encodings/{encoding.file} (status 404); copy the encodings there as well",
            "source",
        )


def parse_manifest(content: bytes, origin: str) -> dict[str, Any]:
    """A manifest's JSON."""
    try:
        manifest = json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise FetchError(f"{origin} is not JSON: {error}", "manifest") from None
    if not isinstance(manifest, dict):
        raise FetchError(f"{origin} is not a manifest", "manifest")
    return manifest


def load_manifest(path: Path) -> dict[str, Any]:
    """A manifest from a file."""
    try:
        return parse_manifest(path.read_bytes(), str(path))
    except OSError as error:
        raise FetchError(
            f"the manifest {path} cannot be read: {error.strerror}. Write one with: fetch_weights.py manifest",
            "manifest",
        ) from None


def open_source(request: Request) -> Source:
    """The source that a request names."""
    if request.address:
        return HttpSource(request, request.address)
    if request.source is None:
        return HubSource(request)
    if request.source.is_dir():
        return DirectorySource(request, request.source)
    if request.source.exists():
        return ArchiveSource(request, request.source)
    raise FetchError(
        f"{request.source} does not exist; it should be a directory or a tar archive with the weights", "source"
    )


def pause(attempt: int, retry_after: float | None = None) -> float:
    """Seconds to wait before asking again: longer each time, or what the hub asked for."""
    return min(60.0, retry_after if retry_after is not None else 0.5 * 2 ** min(attempt - 1, 5))


def persistently(call: Callable[[], Any], what: str, name: str, attempts: int, look_at: str) -> Any:
    """What `call` returns, asked again after a moment when the server is busy or the line drops."""
    attempt = 0
    while True:
        attempt += 1
        try:
            return call()
        except BrokenOffError as error:
            if attempt >= attempts:
                told = f"{name} cannot be reached for {what}: {error}. Check {look_at}"
                raise FetchError(told, "unreachable") from None
            time.sleep(pause(attempt, error.retry_after))


# -- the work --


@dataclass
class Job:
    """One run of `fetch`."""

    request: Request
    source: Source
    progress: Progress
    stop: threading.Event = field(default_factory=threading.Event)
    sha256: dict[str, str] = field(default_factory=dict)

    def bring(self, wanted: WantedFile) -> None:
        """Bring one file to its verified place in staging."""
        layout = self.request.layout
        final = layout.complete / wanted.path
        partial = layout.partial / wanted.path
        final.parent.mkdir(parents=True, exist_ok=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        if final.is_file() and not final.is_symlink() and final.stat().st_size == wanted.size:
            # It got this name only after it was verified, by an earlier run that was cut later on.
            self.progress.already(wanted.size)
            self.sha256[wanted.path] = wanted.sha256 or digest_of(final, wanted, self.stop)[0]
            self.progress.file_done()
            return
        sha256 = self._bring_partial(wanted, partial)
        partial.replace(final)
        sync_directory(final.parent)
        self.sha256[wanted.path] = sha256
        self.progress.file_done()

    def _bring_partial(self, wanted: WantedFile, partial: Path) -> str:
        """Complete and verify the file; its sha256. What an earlier run left is given up when it turns out wrong."""
        expected = wanted.sha256 or wanted.git_sha1
        while True:
            found = self._complete(wanted, partial)
            sha256, got = digest_of(partial, wanted, self.stop)
            if got == expected:
                return sha256
            partial.unlink()  # never overwritten: a server may have this very file open
            self.progress.take_back(wanted.size, found)
            if not found:
                break
            print(f"{wanted.path}: what was here is damaged; bringing it anew", file=sys.stderr, flush=True)
        raise FetchError(
            f"{wanted.path} from {self.source.name} is damaged: its {'sha256' if wanted.sha256 else 'git checksum'}"
            f" should be {expected} and is {got}. It was removed; run again to bring this file anew",
            "checksum",
        )

    def _complete(self, wanted: WantedFile, partial: Path) -> int:
        """Bring what is missing of the file and put it on the disk; how much was here before."""
        with contextlib.suppress(FileNotFoundError):
            before = partial.stat()
            if before.st_size > wanted.size or (before.st_nlink > 1 and before.st_size != wanted.size):
                partial.unlink()  # too long, or the same file as another revision's: that one is never written to
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        with os.fdopen(os.open(str(partial), flags, 0o644), "r+b", buffering=0) as out:
            found = os.fstat(out.fileno()).st_size
            self.progress.already(found)
            out.seek(found)
            self._fill(wanted, out, found)
            os.fchmod(out.fileno(), 0o644)
            os.fsync(out.fileno())
        return found

    def _fill(self, wanted: WantedFile, out: Any, have: int) -> None:
        """Read the rest of the file, asking again where the source broke off, as long as bytes keep coming."""
        attempt = 0
        while have < wanted.size:
            before = have
            reason: BrokenOffError
            try:
                for chunk in self.source.read(wanted, have):
                    room = wanted.size - have
                    if len(chunk) > room:
                        raise FetchError(f"{self.source.name}: {wanted.path} is longer than {wanted.size} bytes", "hub")
                    view = memoryview(chunk)
                    while view:
                        written = out.write(view)
                        view = view[written:]
                    have += len(chunk)
                    self.progress.add(len(chunk))
                    if self.stop.is_set():
                        raise StoppedError
                reason = BrokenOffError(f"it ended after {have} of {wanted.size} bytes")
            except BrokenOffError as error:
                reason = error
            if have == wanted.size:
                return
            attempt = 1 if have > before else attempt + 1
            if self.request.source is not None:
                raise FetchError(f"{wanted.path} in {self.source.name} is cut short: {reason}", "source")
            if attempt >= self.request.attempts:
                raise FetchError(
                    f"{self.source.name} broke off at byte {have} of {wanted.size} of {wanted.path}, and {attempt}"
                    f" attempts brought nothing more: {reason}. What has arrived is kept; run again to go on",
                    "unreachable",
                )
            print(f"{wanted.path}: {reason}; going on at byte {have}", file=sys.stderr, flush=True)
            if self.stop.wait(pause(attempt, reason.retry_after)):
                raise StoppedError

    def bring_all(self, files: Sequence[WantedFile]) -> None:
        """Bring every file, the large ones first. One that is damaged or cut does not keep the others from arriving."""
        workers = self.request.workers if self.source.parallel else 1
        apart: list[FetchError] = []
        with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
            ordered = sorted(files, key=lambda f: f.size, reverse=True) if self.source.parallel else files
            pending = {pool.submit(self.bring, wanted) for wanted in ordered}
            first: BaseException | None = None
            try:
                while pending:
                    finished, pending = wait(pending, return_when=FIRST_COMPLETED, timeout=1.0)
                    for future in finished:
                        if future.cancelled():
                            continue
                        error = future.exception()
                        if isinstance(error, FetchError) and error.kind in ("checksum", "unreachable"):
                            apart.append(error)
                        elif error is not None and first is None and not isinstance(error, StoppedError):
                            first = error
                            self.stop.set()
                            for waiting in pending:
                                waiting.cancel()
            except BaseException:
                self.stop.set()
                for waiting in pending:
                    waiting.cancel()
                raise
        if first is not None:
            raise first
        if apart:
            more = f"; and {len(apart) - 3} more files" if len(apart) > 3 else ""
            raise FetchError("; ".join(str(error) for error in apart[:3]) + more, apart[0].kind)

    def bring_encodings(self) -> int:
        """Bring the encodings that are missing; say how many."""
        layout = self.request.layout
        missing = encodings_missing(layout, self.request.encodings)
        for encoding in missing:
            content = self._encoding(encoding)
            layout.encodings.mkdir(parents=True, exist_ok=True)
            temporary = layout.encodings / (f".{encoding.file}.{os.getpid()}")
            with temporary.open("wb") as handle:
                handle.write(content)
                os.fchmod(handle.fileno(), 0o644)
                handle.flush()
                os.fsync(handle.fileno())
            temporary.replace(layout.encodings / encoding.file)
            sync_directory(layout.encodings)
        return len(missing)

    def _encoding(self, encoding: Encoding) -> bytes:
        attempt = 0
        while True:
            attempt += 1
            try:
                content = b"".join(self.source.read_encoding(encoding))
                break
            except BrokenOffError as error:
                if attempt >= self.request.attempts:
                    raise FetchError(f"{encoding.url} cannot be reached: {error}", "unreachable") from None
                if self.stop.wait(pause(attempt, error.retry_after)):
                    raise StoppedError from None
        got = hashlib.sha256(content).hexdigest()
        if got != encoding.sha256:
            origin = encoding.url if isinstance(self.source, HubSource) else self.source.name
            raise FetchError(
                f"{encoding.file} from {origin} is damaged or another version: its sha256 should be {encoding.sha256}"
                f" and is {got}",
                "checksum",
            )
        return content

    def publish(self, files: Sequence[WantedFile]) -> None:
        """Write the marker, then make the snapshot visible under its name; it is the current one where none was."""
        layout = self.request.layout
        keep = {wanted.path for wanted in files}
        for directory, _, names in os.walk(str(layout.complete)):
            for name in names:
                path = Path(directory) / name
                if str(path.relative_to(layout.complete)) not in keep:
                    path.unlink()
            sync_directory(Path(directory))
        entries = []
        for wanted in sorted(files, key=lambda f: f.path):
            status = (layout.complete / wanted.path).stat()
            entry: dict[str, Any] = {
                "path": wanted.path,
                "size": wanted.size,
                "mtime_ns": status.st_mtime_ns,
                "sha256": self.sha256[wanted.path],
            }
            if wanted.git_sha1 is not None:
                entry["git_sha1"] = wanted.git_sha1
            entries.append(entry)
        marker = {
            "format_version": FORMAT_VERSION,
            "repository": layout.repository,
            "revision": layout.revision,
            "source": self.source.name,
            "checked_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "ignore_patterns": sorted(self.request.ignore_patterns),
            "files": entries,
        }
        write_atomically(layout.marker, json.dumps(marker, indent=1) + "\n")
        layout.snapshot.parent.mkdir(parents=True, exist_ok=True)
        layout.complete.rename(layout.snapshot)
        sync_directory(layout.snapshot.parent)
        if not current_revision(layout):
            write_atomically(layout.ref, layout.revision)
        shutil.rmtree(str(layout.work))


def withdraw(layout: Layout, files: Sequence[WantedFile]) -> None:
    """Take a snapshot that is not verified out of sight; what may be right of it is checked, not fetched again."""
    with contextlib.suppress(FileNotFoundError):
        layout.marker.unlink()
    if not layout.snapshot.exists():
        return
    for wanted in files:
        path, target = layout.snapshot / wanted.path, layout.partial / wanted.path
        if path.is_file() and not path.is_symlink() and path.stat().st_size == wanted.size:
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    shutil.rmtree(str(layout.snapshot))


def link_known(layout: Layout, files: Sequence[WantedFile]) -> None:
    """Give files that another verified revision has a second name in staging, where nothing but their check is left.

    Revisions often differ in a few small files. Where the filesystem has no hard links, the files are brought as usual.
    """
    known: dict[tuple[str | None, int], Path] = {}
    for path in layout.marker.parent.glob("*.json"):
        other = dataclasses.replace(layout, revision=path.stem)
        marker = read_marker(other) if path.stem != layout.revision else None
        for entry in marker["files"] if marker is not None else []:
            for checksum in (entry["sha256"], entry.get("git_sha1")):
                known[checksum, int(entry["size"])] = other.snapshot / safe_path(entry["path"])
    for wanted in files:
        source, target = known.get((wanted.sha256 or wanted.git_sha1, wanted.size)), layout.partial / wanted.path
        if source is None or bytes_here(layout, wanted) == wanted.size:
            continue
        with contextlib.suppress(OSError):
            if source.stat().st_size == wanted.size:
                target.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    target.unlink()
                os.link(str(source), str(target))


def bytes_here(layout: Layout, wanted: WantedFile) -> int:
    """How much of a file is on the disk already, verified or not."""
    places = [layout.complete / wanted.path, layout.partial / wanted.path, layout.snapshot / wanted.path]
    if wanted.sha256:
        places.append(layout.received / wanted.sha256)
    sizes = [0]
    for place in places:
        with contextlib.suppress(OSError):
            sizes.append(place.stat().st_size)
    return min(max(sizes), wanted.size)


def require_space(request: Request, files: Sequence[WantedFile], source: Source | None = None) -> None:
    """Stop before the first byte when the disk cannot take what is still to come."""
    layout = request.layout
    here = sum(max(bytes_here(layout, wanted), source.held(wanted) if source else 0) for wanted in files)
    needed = sum(wanted.size for wanted in files) - here + request.keep_free_bytes
    status = os.statvfs(str(layout.staging))
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise FetchError(
            f"{layout.staging} is too small: {needed} bytes are needed ({needed - request.keep_free_bytes} to bring,"
            f" {request.keep_free_bytes} to keep free), {free} are free, {needed - free} are missing"
            + could_go(layout),
            "space",
        )


def could_go(layout: Layout) -> str:
    """The model's revisions that are neither wanted nor the current one, for the person who has to make room."""
    found = []
    for path in sorted(layout.marker.parent.glob("*.json")):
        marker = read_marker(dataclasses.replace(layout, revision=path.stem))
        if marker is not None and path.stem not in (layout.revision, current_revision(layout)):
            found.append("{} ({} bytes)".format(path.stem, sum(int(entry["size"]) for entry in marker["files"])))
    return ". Of the revisions that are here, these could go: " + ", ".join(found) if found else ""


def take_received(layout: Layout, manifest: dict[str, Any]) -> None:
    """Move what a controller has sent to where cut downloads lie; it is verified like them, and not copied."""
    for entry in manifest.get("files", []):
        sent = layout.received / str(entry["sha256"])
        target = layout.partial / safe_path(entry["path"])
        if sent.is_file() and not sent.is_symlink() and sent.stat().st_size == entry["size"]:
            target.parent.mkdir(parents=True, exist_ok=True)
            os.chown(str(sent), os.geteuid(), os.getegid())
            sent.replace(target)


def prepare(request: Request) -> None:
    """Make the directories, and see that publishing will be a rename."""
    layout = request.layout
    for directory in (layout.weights, layout.staging, layout.model):
        directory.mkdir(parents=True, exist_ok=True)
    if layout.weights.stat().st_dev != layout.staging.stat().st_dev:
        raise FetchError(f"{layout.weights} and {layout.staging} must be on one filesystem", "layout")
    if request.remove_stale_staging:
        for entry in (layout.staging / layout.folder).glob("*"):
            if entry.name != layout.revision and entry.is_dir():
                shutil.rmtree(str(entry))


@contextlib.contextmanager
def locked(request: Request, inherited: int | None) -> Iterator[None]:
    """Hold the lock of this model's staging directory; a process that is killed lets go of it."""
    layout = request.layout
    layout.staging.mkdir(parents=True, exist_ok=True)
    handle = inherited if inherited is not None else os.open(str(layout.lock), os.O_RDWR | os.O_CREAT, 0o644)
    began = told = time.monotonic()
    try:
        while not try_lock(handle, layout):
            waited = time.monotonic() - began
            if waited >= request.lock_wait:
                raise FetchError(
                    f"another fetch of {layout.repository} is at work here"
                    + (f", and was for {duration(waited)}" if request.lock_wait else "; wait for it to end"),
                    "busy",
                )
            if time.monotonic() - told >= request.progress_interval:
                told = time.monotonic()
                print(f"waiting for another fetch, {duration(waited)} so far", file=sys.stderr, flush=True)
            time.sleep(min(1.0, request.lock_wait - waited))
        yield
    finally:
        os.close(handle)


def try_lock(handle: int, layout: Layout) -> bool:
    """Whether the lock is ours now."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
            raise FetchError(
                f"the filesystem of {layout.staging} has no locks (flock: {error.strerror}), so two fetches could spoil"
                " each other's files; mount it with them (Lustre: -o flock; NFS: without nolock)",
                "locks",
            ) from None
        raise
    return True


def fetch(
    request: Request, lock: int | None = None, from_source: Callable[[Request], Source] | None = None
) -> dict[str, Any]:
    """Bring and verify everything that is missing. Returns what changed."""
    layout = request.layout
    progress = Progress(request.progress_file, request.progress_interval)
    job: Job | None = None

    def on_signal(number: int, _frame: Any) -> None:
        raise FetchError(f"stopped by signal {number}; what has arrived is kept", "stopped")

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
    try:
        with locked(request, lock):
            before = check(request)
            if before["verified"]:
                progress.end("done", "already verified")
                return {"changed": False, **before}
            progress.start()
            prepare(request)
            source = (from_source or open_source)(request)
            try:
                source.require_encodings(encodings_missing(layout, request.encodings))
                job = Job(request, source, progress)
                bring_weights = weights_problem(layout, request.ignore_patterns) is not None
                if bring_weights:
                    files = [f for f in source.files() if not ignored(f.path, request.ignore_patterns)]
                    if not files:
                        raise FetchError(f"{source.name} lists no file for {layout.repository}", "source")
                    link_known(layout, files)
                    require_space(request, files, source)
                    withdraw(layout, files)
                    progress.total = sum(wanted.size for wanted in files)
                    progress.files_total = len(files)
                    progress.state = "downloading" if request.source is None else "copying"
                    source.collect(files, progress)
                    job.bring_all(files)
                job.bring_encodings()
                if bring_weights:
                    progress.state = "publishing"
                    job.publish(files)
            finally:
                source.close()
            shutil.rmtree(str(layout.staging / ".huggingface"), ignore_errors=True)
            after = check(request)
            if not after["verified"]:
                raise FetchError("still not as it should be: " + "; ".join(after["problems"]))
            message = f"{human(progress.transferred)} brought, {human(progress.found)} were here"
            progress.end("done", message)
            return {"changed": True, "transferred_bytes": progress.transferred, "found_bytes": progress.found, **after}
    except FetchError as error:
        progress.end("failed", hide(str(error), request.token))
        raise FetchError(hide(str(error), request.token), error.kind) from None
    except OSError as error:
        failure = FetchError(os_error(error), "host")
        progress.end("failed", str(failure))
        raise failure from None


def hide(text: str, token: str | None) -> str:
    """The text without the token, wherever it came from."""
    return text.replace(token, "********") if token else text


def os_error(error: OSError) -> str:
    """What the operating system refused, with the remedy where it is known."""
    where = error.filename or "a file"
    text = f"{where}: {error.strerror or error}"
    if error.errno == errno.ENOSPC:
        return text + ". The disk filled up meanwhile; free some room and run again, what has arrived is kept"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        who = f"user {os.geteuid()}, group {os.getegid()}"
        return text + f". The model cache must be writable for {who} while weights are fetched"
    return text


def manifest_of(request: Request) -> dict[str, Any]:
    """The manifest of a verified snapshot, for hosts without a way to the Hub."""
    status = check(request)
    marker = read_marker(request.layout)
    if marker is None or not status["verified"]:
        raise FetchError("{} is not verified here: {}".format(request.layout.repository, "; ".join(status["problems"])))
    return {
        "format_version": FORMAT_VERSION,
        "repository": request.layout.repository,
        "revision": request.layout.revision,
        "source": marker["source"],
        "files": [{"path": e["path"], "size": e["size"], "sha256": e["sha256"]} for e in marker["files"]],
        "encodings": [{"file": e.file, "sha256": e.sha256} for e in request.encodings],
    }


def bundle(request: Request, output: Path) -> None:
    """Write a tar archive with the manifest, the verified snapshot and the encodings."""
    manifest = json.dumps(manifest_of(request), indent=1).encode() + b"\n"
    temporary = output.with_name(output.name + ".partial")
    try:
        with tarfile.open(str(temporary), "w") as archive:
            note = tarfile.TarInfo(MANIFEST_NAME)
            note.size, note.mode, note.mtime = len(manifest), 0o644, int(time.time())
            archive.addfile(note, io.BytesIO(manifest))
            for entry in json.loads(manifest)["files"]:
                archive.add(str(request.layout.snapshot / entry["path"]), entry["path"], recursive=False)
            for encoding in request.encodings:
                archive.add(str(request.layout.encodings / encoding.file), "encodings/" + encoding.file)
        temporary.replace(output)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


# -- command line --


def make_request(values: dict[str, Any]) -> Request:
    """A request from plain values, or a failure naming the key, its value and what is allowed."""
    repository, revision = str(values["repository"]), str(values["revision"])
    if not re.match(r"[\w.-]+/[\w.-]+\Z", repository):
        raise FetchError(f"repository: {repository!r} is not of the form owner/name", "input")
    if not re.match(r"[0-9a-f]{40}\Z", revision):
        raise FetchError(
            f"revision: {revision!r} is not a pinned commit; 40 lower-case hexadecimal digits are needed, not a branch"
            " or tag",
            "input",
        )
    endpoint = str(values.get("endpoint") or DEFAULT_ENDPOINT).rstrip("/")
    if not re.match(r"https?://[^/\s@]+(/\S*)?\Z", endpoint):
        raise FetchError(f"endpoint: {endpoint!r} is not an http or https address without credentials", "input")
    encodings = []
    for entry in values.get("encodings") or []:
        if not re.match(r"[0-9a-f]{64}\Z", str(entry["sha256"])):
            raise FetchError(
                "encodings: the sha256 of {} is {!r}, not 64 digits".format(entry["file"], entry["sha256"]), "input"
            )
        if "/" in safe_path(entry["file"]):
            raise FetchError("encodings: {!r} is not a plain file name".format(entry["file"]), "input")
        size = entry.get("size_bytes")
        encodings.append(Encoding(entry["file"], str(entry["url"]), entry["sha256"], int(size) if size else None))
    layout = Layout(
        Path(values["weights_directory"]),
        Path(values["staging_directory"]),
        Path(values["encodings_directory"]),
        repository,
        revision,
    )

    def path(key: str) -> Path | None:
        return Path(values[key]) if values.get(key) else None

    address = str(values.get("from") or "") if "://" in str(values.get("from") or "") else ""
    if address and not re.match(r"https?://[^/\s@?#]+(/[^\s?#]*)?\Z", address):
        shown = re.sub(r"//[^/@\s]+@", "//***@", address)
        raise FetchError(
            f"from: {shown!r} is not the http or https address of a directory, without credentials or a query", "input"
        )

    return Request(
        layout=layout,
        ignore_patterns=tuple(values.get("ignore_patterns") or ()),
        encodings=tuple(encodings),
        endpoint=endpoint,
        token=values.get("token") or None,
        source=None if address else path("from"),
        address=address.rstrip("/"),
        manifest=path("manifest"),
        workers=int(values.get("workers") or 8),
        keep_free_bytes=int(values.get("keep_free_bytes") or 0),
        attempts=int(values.get("attempts") or 6),
        timeout=float(values.get("timeout") or 30),
        remove_stale_staging=bool(values.get("remove_stale_staging")),
        lock_wait=float(values.get("lock_wait") or 0),
        progress_file=path("progress_file"),
        progress_interval=float(values.get("progress_interval") or 10),
    )


def parse(argv: Sequence[str], environment: dict[str, str]) -> argparse.Namespace:
    """The command line, with the environment behind it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("command", choices=("check", "verify", "fetch", "manifest", "bundle"))

    def option(name: str, text: str, default: str | None = None, **more: Any) -> None:
        variable = name.upper().replace("-", "_")
        parser.add_argument("--" + name, default=environment.get(variable, default), help=text, **more)

    option("repository", "owner/name on the hub")
    option("revision", "the commit: 40 hexadecimal digits")
    option("weights-directory", "the Hugging Face cache to publish into")
    option("staging-directory", "downloads in progress; on the same filesystem")
    option("encodings-directory", "where the encodings go")
    option("ignore-patterns", "files to leave out; patterns separated by spaces", "original/* metal/*")
    option("encodings", "JSON list of {file, url, sha256}", "[]")
    option("from", "a directory, a tar archive or the http(s) address of a directory, instead of a hub")
    option("manifest", "the manifest of that directory or archive, when it holds none")
    option("workers", "files brought or verified at once", "8", type=int)
    option("keep-free-bytes", "room to leave on the disk", "0", type=int)
    option("attempts", "times to ask again without a new byte before giving up", "6", type=int)
    option("timeout", "seconds without a byte after which a connection counts as broken", "30", type=float)
    option("progress-file", "JSON file to keep the progress in")
    option("progress-interval", "seconds between lines of progress", "10", type=float)
    option("lock-descriptor", "an open descriptor of the lock file, already locked by the parent", type=int)
    option("lock-wait", "seconds to wait for another fetch of this model to end", "0", type=float)
    option("output", "manifest, bundle: the file to write")
    option("report", "how to end: text for people, line for programs", "text", choices=("text", "line"))
    parser.add_argument(
        "--remove-stale-staging", action="store_true", help="remove half-done downloads of other revisions"
    )
    options = parser.parse_args(argv)
    needed = ["repository", "revision", "weights_directory", "staging_directory", "encodings_directory"]
    missing = [name for name in needed if not getattr(options, name)]
    if missing:
        parser.error("missing: " + ", ".join("--" + name.replace("_", "-") for name in missing))
    return options


def run(options: argparse.Namespace, token: str) -> tuple[int, dict[str, Any]]:
    """Do what the command line says; the exit status, and what there is to report."""
    values = dict(vars(options))
    values["token"] = token
    values["endpoint"] = os.environ.get("HF_ENDPOINT", "")
    values["ignore_patterns"] = str(options.ignore_patterns).split()
    try:
        values["encodings"] = json.loads(options.encodings)
    except ValueError as error:
        raise FetchError(f"encodings: not JSON: {error}", "input") from None
    request = make_request(values)
    if options.command in ("check", "verify"):
        status = check(request) if options.command == "check" else verify(request)
        return (0 if status["verified"] else FAILED), status
    if options.command == "fetch":
        return 0, fetch(request, options.lock_descriptor)
    if options.command == "bundle":
        if not options.output:
            raise FetchError("bundle: --output names the archive to write", "input")
        bundle(request, Path(options.output))
        return 0, {}
    text = json.dumps(manifest_of(request), indent=1) + "\n"
    if options.output:
        write_atomically(Path(options.output), text)
    else:
        sys.stdout.write(text)
    return 0, {}


def report_line(ok: bool, message: str, **more: Any) -> str:
    return json.dumps({"program": "fetch_weights", "ok": ok, "message": message[:REPORTED], **more})


def main(argv: Sequence[str]) -> int:
    options = parse(argv, dict(os.environ))
    # Taken out of the environment at once: nothing that is started from here inherits it.
    token = os.environ.pop("HF_TOKEN", "").strip()
    os.umask(0o022)
    try:
        status, found = run(options, token)
    except FetchError as error:
        message = hide(str(error), token)
        print(f"fetch_weights: {message}", file=sys.stderr, flush=True)
        if options.report == "line":
            print(report_line(False, message, kind=error.kind), flush=True)
        return HOPELESS if error.kind in PERMANENT else FAILED
    except Exception as error:
        if options.report != "line":
            raise
        sys.stderr.write(hide(traceback.format_exc(), token))
        print(report_line(False, hide(f"{type(error).__name__}: {error}", token), kind="unexpected"), flush=True)
        return FAILED
    if options.report == "line":
        message = "; ".join(found.get("problems", [])) or "verified"
        print(report_line(status == 0, message, **found), flush=True)
    elif found:
        print(json.dumps(found, indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
