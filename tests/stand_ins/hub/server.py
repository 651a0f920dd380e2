"""The stand-in hub's HTTP side: the Hub's API as the real client uses it, with faults on request.

Control, for tests:
  GET    /control   what was asked and sent since the last reset
  POST   /control   {"faults": [...], "tokens": {...}, "gated": [...], "private": [...]} replaces what it names
  DELETE /control   no faults, no counts, everything public
A fault: {"kind": "cut" | "corrupt" | "throttle" | "deny" | "status" | "hang" | "html", "match": "*.safetensors",
          "times": 1 (-1: always), "after_bytes": N, "bytes_per_second": N, "status": 503, "seconds": 30}
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.stand_ins.hub import content

CHUNK = 64 * 1024
KINDS = ("cut", "corrupt", "throttle", "deny", "status", "hang", "html")


@dataclass
class Fault:
    """Something that goes wrong for requests whose path matches."""

    kind: str
    match: str = "*"
    times: int = 1
    after_bytes: int = 0
    bytes_per_second: int = 0
    status: int = 503
    seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"fault kind {self.kind!r} is unknown; allowed: {', '.join(KINDS)}")


@dataclass
class State:
    """What the hub knows and counts; one lock guards it."""

    repositories: dict[str, content.Repository]
    encodings: dict[str, bytes]
    wheels: Path | None = None
    page_size: int = 1000
    tokens: dict[str, list[str]] = field(default_factory=dict)  # token -> gated or private repositories it may read
    gated: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    faults: list[Fault] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_fault(self, path: str) -> Fault | None:
        """The first fault for this path, used up once."""
        with self.lock:
            for fault in self.faults:
                if fault.times != 0 and fnmatch.fnmatchcase(path, fault.match):
                    fault.times -= 1 if fault.times > 0 else 0
                    return fault
        return None

    def count(self, sent: dict[str, int], path: str, size: int) -> None:
        with self.lock:
            sent[path] = sent.get(path, 0) + size

    def reset(self) -> None:
        with self.lock:
            self.faults.clear()
            self.requests.clear()
            self.sent = {}  # an answer that is still being sent counts where it began
            self.tokens.clear()
            self.gated.clear()
            self.private.clear()

    def report(self) -> dict[str, Any]:
        with self.lock:
            return {
                "requests": list(self.requests),
                "bytes": dict(self.sent),
                "total_bytes": sum(self.sent.values()),
                "repositories": {
                    name: {"revision": entry.revision, "size_bytes": entry.served_bytes()}
                    for name, entry in self.repositories.items()
                },
            }


class Hub(ThreadingHTTPServer):
    """The server; large files are redirected to `cdn_port`, or served here when it is 0."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], state: State, cdn_port: int = 0) -> None:
        super().__init__(address, Handler)
        self.state = state
        self.cdn_port = cdn_port

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the hub."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Hub
    command: str

    @property
    def state(self) -> State:
        return self.server.state

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class names it)
        """Requests are counted, not printed."""

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        if urlsplit(self.path).path != "/control":
            self._error(HTTPStatus.NOT_FOUND, "EntryNotFound", "Not Found")
            return
        try:
            wanted = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))))
            faults = [Fault(**fault) for fault in wanted["faults"]] if "faults" in wanted else None
        except (ValueError, TypeError) as error:
            self._json(HTTPStatus.BAD_REQUEST, {"error": str(error)})
            return
        with self.state.lock:
            if faults is not None:
                self.state.faults[:] = faults
            if "tokens" in wanted:
                self.state.tokens = {token: list(names) for token, names in wanted["tokens"].items()}
            if "gated" in wanted:
                self.state.gated = set(wanted["gated"])
            if "private" in wanted:
                self.state.private = set(wanted["private"])
        self._json(HTTPStatus.OK, {"ok": True})

    def do_DELETE(self) -> None:
        self.state.reset()
        self._json(HTTPStatus.OK, {"ok": True})

    # -- routing ------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        if path == "/control":
            self._json(HTTPStatus.OK, self.state.report())
            return
        if path in ("/", "/healthcheck"):
            self._json(HTTPStatus.OK, {"stand_in": "hub"})
            return
        with self.state.lock:
            self.state.requests.append(
                {
                    "method": self.command,
                    "path": path,
                    "range": self.headers.get("Range"),
                    "authenticated": self.headers.get("Authorization") is not None,
                }
            )
        fault = self.state.take_fault(path)
        if fault is not None and self._refuse(fault):
            return
        if path.startswith("/api/models/"):
            self._api(path.removeprefix("/api/models/"), parse_qs(url.query), url.path)
        elif path.startswith("/lfs/"):
            self._lfs(path.removeprefix("/lfs/"), fault)
        elif path.startswith("/encodings/"):
            body = self.state.encodings.get(path.removeprefix("/encodings/"))
            if body is None:
                self._error(HTTPStatus.NOT_FOUND, None, "The specified resource does not exist.")
            else:
                self._body(body, f'"{hashlib.sha256(body).hexdigest()}"', fault)
        elif path.startswith("/wheels/"):
            self._wheels(path.removeprefix("/wheels/"), fault)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3], fault)
        else:
            self._error(HTTPStatus.NOT_FOUND, "EntryNotFound", "Not Found")

    def _refuse(self, fault: Fault) -> bool:
        """Answer a fault that replaces the whole response; say whether it did."""
        if fault.kind == "deny":
            self._error(HTTPStatus.UNAUTHORIZED, None, "Invalid credentials in Authorization header")
        elif fault.kind == "status":
            self._error(HTTPStatus(fault.status), None, HTTPStatus(fault.status).phrase)
        elif fault.kind == "html":
            body = b"<!DOCTYPE html><html><body>Please sign in to the network.</body></html>\n"
            self._head(HTTPStatus.OK, {"Content-Type": "text/html", "Content-Length": str(len(body))})
            self._write(body)
        elif fault.kind == "hang" and not fault.after_bytes:
            time.sleep(fault.seconds)
            self.close_connection = True
        else:
            return False
        return True

    # -- access -------------------------------------------------------------------------------------------------------

    def _allowed(self, name: str, *, files: bool) -> bool:
        """Check the token as the Hub does; answer the refusal here."""
        header = self.headers.get("Authorization")
        token = header.removeprefix("Bearer ") if header else None
        if token is not None and self.state.tokens and token not in self.state.tokens:
            self._error(HTTPStatus.UNAUTHORIZED, None, "Invalid credentials in Authorization header")
            return False
        granted = token is not None and name in self.state.tokens.get(token, [])
        if name not in self.state.repositories or (name in self.state.private and not granted):
            if token is None:
                self._error(HTTPStatus.UNAUTHORIZED, "RepoNotFound", "Invalid username or password.")
            else:
                self._error(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")
            return False
        if files and name in self.state.gated and not granted:
            text = (
                f"Access to model {name} is restricted. You must have access to it and be authenticated to access it."
            )
            self._error(HTTPStatus.UNAUTHORIZED if token is None else HTTPStatus.FORBIDDEN, "GatedRepo", text)
            return False
        return True

    def _repository(self, name: str, revision: str, *, files: bool) -> content.Repository | None:
        if not self._allowed(name, files=files):
            return None
        entry = self.state.repositories[name]
        if revision not in (entry.revision, "main"):
            self._error(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return entry

    # -- the API ------------------------------------------------------------------------------------------------------

    def _api(self, rest: str, query: dict[str, list[str]], raw_path: str) -> None:
        match = re.fullmatch(r"([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+)(?:/(.+))?)?", rest)
        if match is None:
            self._error(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")
            return
        entry = self._repository(match[1], match[3] or "main", files=False)
        if entry is None:
            return
        if match[2] == "tree":
            self._tree(entry, match[4] or "", query, raw_path)
            return
        info: dict[str, Any] = {
            "_id": entry.revision[:24],
            "id": entry.name,
            "modelId": entry.name,
            "sha": entry.revision,
            "private": entry.name in self.state.private,
            "gated": "manual" if entry.name in self.state.gated else False,
            "disabled": False,
            "tags": ["safetensors", "gpt_oss"],
            "siblings": [self._sibling(file, blobs="blobs" in query) for file in entry.files],
        }
        self._json(HTTPStatus.OK, info)

    @staticmethod
    def _sibling(file: content.HubFile, *, blobs: bool) -> dict[str, Any]:
        sibling: dict[str, Any] = {"rfilename": file.path}
        if blobs:
            sibling |= {"size": len(file.content), "blobId": file.git_oid}
            if file.lfs:
                sibling["lfs"] = {"sha256": file.sha256, "size": len(file.content), "pointerSize": len(file.pointer)}
        return sibling

    def _tree(self, entry: content.Repository, folder: str, query: dict[str, list[str]], raw_path: str) -> None:
        recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        prefix = folder.rstrip("/") + "/" if folder else ""
        rows: dict[str, dict[str, Any]] = {}
        for file in entry.files:
            if not file.path.startswith(prefix):
                continue
            parts = file.path[len(prefix) :].split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                name = prefix + "/".join(parts[:depth])
                oid = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
                rows.setdefault(name, {"type": "directory", "oid": oid, "size": 0, "path": name})
            if recursive or len(parts) == 1:
                row: dict[str, Any] = {
                    "type": "file",
                    "oid": file.git_oid,
                    "size": len(file.content),
                    "path": file.path,
                }
                if file.lfs:
                    row["lfs"] = {"oid": file.sha256, "size": len(file.content), "pointerSize": len(file.pointer)}
                rows[file.path] = row
        if prefix and not rows:
            self._error(HTTPStatus.NOT_FOUND, "EntryNotFound", f"{folder} does not exist on {entry.revision}")
            return
        ordered = list(rows.values())
        start = int(query.get("cursor", ["0"])[0])
        end = start + int(query.get("limit", [str(self.state.page_size)])[0])
        headers = {}
        if end < len(ordered):
            flags = f"recursive={str(recursive).lower()}&expand=false"
            headers["Link"] = f'<{self._origin()}{raw_path}?{flags}&cursor={end}>; rel="next"'
        self._json(HTTPStatus.OK, ordered[start:end], headers)

    # -- files --------------------------------------------------------------------------------------------------------

    def _resolve(self, name: str, revision: str, path: str, fault: Fault | None) -> None:
        entry = self._repository(name, revision, files=True)
        if entry is None:
            return
        commit = {"X-Repo-Commit": entry.revision}
        file = entry.by_path.get(path)
        if file is None:
            self._error(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found", commit)
            return
        if not file.lfs:
            self._body(file.content, f'"{file.git_oid}"', fault, commit)
            return
        headers = commit | {"X-Linked-Size": str(len(file.content)), "X-Linked-Etag": f'"{file.sha256}"'}
        if not self.server.cdn_port:
            self._body(file.content, f'"{file.sha256}"', fault, headers)
            return
        host = (self.headers.get("Host") or "127.0.0.1").rsplit(":", 1)[0]
        location = f"http://{host}:{self.server.cdn_port}/lfs/{file.sha256}/{quote(name)}/{quote(path)}"
        self._head(HTTPStatus.FOUND, headers | {"Location": location, "Content-Length": "0"})

    def _lfs(self, rest: str, fault: Fault | None) -> None:
        sha256, owner, model, path = (*rest.split("/", 3), "", "", "")[:4]
        entry = self.state.repositories.get(f"{owner}/{model}")
        file = entry.by_path.get(path) if entry else None
        if file is None or file.sha256 != sha256:
            self._error(HTTPStatus.NOT_FOUND, None, "Not Found")
            return
        self._body(file.content, f'"{sha256}"', fault)

    def _wheels(self, name: str, fault: Fault | None) -> None:
        directory = self.state.wheels
        if directory is None:
            self._error(HTTPStatus.NOT_FOUND, None, "No wheels are served")
        elif not name:
            links = "".join(f'<a href="{quote(p.name)}">{p.name}</a><br>\n' for p in sorted(directory.glob("*.whl")))
            body = f"<!DOCTYPE html><html><body>\n{links}</body></html>\n".encode()
            self._head(HTTPStatus.OK, {"Content-Type": "text/html", "Content-Length": str(len(body))})
            self._write(body)
        elif "/" not in name and (directory / name).is_file():
            self._body((directory / name).read_bytes(), f'"{name}"', fault)
        else:
            self._error(HTTPStatus.NOT_FOUND, None, "Not Found")

    def _body(self, body: bytes, etag: str, fault: Fault | None, headers: dict[str, str] | None = None) -> None:
        size = len(body)
        start, end, status = 0, size, HTTPStatus.OK
        common = {"ETag": etag, "Accept-Ranges": "bytes", **(headers or {})}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start = int(match[1])
            end = min(size, int(match[2]) + 1) if match[2] else size
            if start >= size:
                common |= {"Content-Range": f"bytes */{size}", "Content-Length": "0"}
                self._head(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, common)
                return
            status = HTTPStatus.PARTIAL_CONTENT
            common["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        common |= {"Content-Type": "application/octet-stream", "Content-Length": str(end - start)}
        self._head(status, common)
        if self.command == "GET":
            self._send(body[start:end], start, fault)

    def _send(self, body: bytes, offset: int, fault: Fault | None) -> None:
        if fault is not None and fault.kind == "corrupt":
            at = max(0, min(fault.after_bytes - offset, len(body) - 1))
            body = body[:at] + bytes([body[at] ^ 0xFF]) + body[at + 1 :]
        stop = None
        if fault is not None and fault.kind in ("cut", "hang"):
            stop = fault.after_bytes
        key = urlsplit(self.path).path
        counts = self.state.sent
        sent = 0
        for chunk in self._pieces(body, fault, stop):
            self.state.count(counts, unquote(key), len(chunk))  # first: who has the last byte may ask for the sum
            self._write(chunk)
            sent += len(chunk)
        if stop is not None and sent < len(body):
            if fault is not None and fault.kind == "hang":
                self.wfile.flush()
                time.sleep(fault.seconds)
            self.close_connection = True

    @staticmethod
    def _pieces(body: bytes, fault: Fault | None, stop: int | None) -> Iterator[bytes]:
        end = len(body) if stop is None else min(stop, len(body))
        began, at = time.monotonic(), 0
        # Read again for each piece: a test that has seen what it waited for lets the rest come at full speed.
        while at < end:
            rate = fault.bytes_per_second if fault is not None and fault.kind == "throttle" else 0
            if rate:
                time.sleep(max(0.0, began + at / rate - time.monotonic()))
            step = max(1, min(CHUNK, rate // 20)) if rate else CHUNK
            yield body[at : min(at + step, end)]
            at += step

    # -- answers ------------------------------------------------------------------------------------------------------

    def _origin(self) -> str:
        return "http://" + (self.headers.get("Host") or "{}:{}".format(*self.server.server_address[:2]))

    def _head(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Last-Modified", formatdate(0, usegmt=True))
        self.end_headers()

    def _write(self, body: bytes) -> None:
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, status: HTTPStatus, value: object, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self._head(status, {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})})
        self._write(body)

    def _error(self, status: HTTPStatus, code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        extra = {"X-Error-Message": message, **(headers or {})}
        if code is not None:
            extra["X-Error-Code"] = code
        self._json(status, {"error": message}, extra)


def make_state(*, wheels: Path | None = None, page_size: int = 1000) -> State:
    """A hub's state with the stand-in repositories and nothing wrong."""
    return State(content.repositories(), content.encodings(), wheels=wheels, page_size=page_size)
