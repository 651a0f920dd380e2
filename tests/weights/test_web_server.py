"""Weights from a directory on a plain web server: one that resumes, and Python's own, which does not."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from .conftest import SHARD, TOKEN, Fetcher, RunningHub
from .test_plays import Plays, weights_role

CHUNK = 64 * 1024


class Plain(SimpleHTTPRequestHandler):
    """`python3 -m http.server`: no ranges. It notes what it was asked for, and may break off or misbehave."""

    server: Server

    def do_GET(self) -> None:
        self.server.requests.append(("GET", self.path, dict(self.headers)))
        if not self.server.misbehave(self):
            super().do_GET()

    def do_HEAD(self) -> None:
        self.server.requests.append(("HEAD", self.path, dict(self.headers)))
        if not self.server.misbehave(self):
            super().do_HEAD()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        while chunk := source.read(CHUNK):
            left = self.server.cuts.get(self.path)
            if left is not None:
                chunk, self.server.cuts[self.path] = chunk[:left], left - len(chunk)
            outputfile.write(chunk)
            self.server.sent[self.path] = self.server.sent.get(self.path, 0) + len(chunk)
            if left is not None and left <= len(chunk):
                del self.server.cuts[self.path]
                self.close_connection = True
                return

    def page(self, status: int, kind: str, body: bytes, length: bool = True) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class names it)
        """Requests are counted, not printed."""


class Ranges(Plain):
    """A web server that resumes, as nginx and object stores do."""

    def send_head(self) -> Any:
        begin = self.headers.get("Range", "")
        path = Path(self.translate_path(self.path))
        if not begin or not path.is_file():
            return super().send_head()
        offset, size = int(begin.removeprefix("bytes=").rstrip("-")), path.stat().st_size
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {offset}-{size - 1}/{size}")
        self.send_header("Content-Length", str(size - offset))
        self.end_headers()
        handle = path.open("rb")
        handle.seek(offset)
        return handle


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, directory: Path, handler: type[Plain]) -> None:
        super().__init__(("127.0.0.1", 0), lambda *args: handler(*args, directory=str(directory)))
        self.directory = directory
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.sent: dict[str, int] = {}
        self.cuts: dict[str, int] = {}
        self.pages: dict[str, tuple[int, str, bytes, bool]] = {}
        self.no_head = False
        self.scheme = "http"

    def misbehave(self, handler: Plain) -> bool:
        if handler.command == "HEAD" and self.no_head:
            handler.page(501, "text/html", b"")
            return True
        for end, page in self.pages.items():
            if handler.path.endswith(end):
                handler.page(*page)
                return True
        return False

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"

    def asked_for(self, method: str) -> list[str]:
        return [path for how, path, _ in self.requests if how == method]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the server."""


@pytest.fixture
def tree(fetcher: Fetcher, hub: RunningHub, tmp_path: Path) -> Path:
    """What a connected machine brought, unpacked where the web server finds it; the hub is gone from here on."""
    connected = Fetcher(tmp_path / "connected", hub, fetcher.revision)
    connected.fetch(encodings=True)
    assert connected.run("bundle", f"--output={tmp_path / 'bundle.tar'}", encodings=True).returncode == 0
    with tarfile.open(tmp_path / "bundle.tar") as archive:
        archive.extractall(tmp_path / "www", filter="data")
    hub.mend()
    fetcher.environment["HF_ENDPOINT"] = "http://hub.invalid"
    fetcher.python = (*fetcher.python, "-S")  # no client for a hub
    return tmp_path / "www"


@pytest.fixture
def start(tree: Path) -> Iterator[Callable[..., Server]]:
    running = []

    def serve(handler: type[Plain] = Ranges, directory: Path = tree) -> Server:
        server = Server(directory, handler)
        running.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    yield serve
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("handler", [Ranges, Plain])
@pytest.mark.parametrize("head", [True, False])
def test_ends_in_the_same_verified_state(
    fetcher: Fetcher, hub: RunningHub, start: Callable[..., Server], handler: type[Plain], head: bool
) -> None:
    server = start(handler)
    server.no_head = not head
    fetcher.environment["HF_TOKEN"] = TOKEN
    result = fetcher.fetch(f"--from={server.url}/", encodings=True)
    fetcher.assert_complete()
    assert result["transferred_bytes"] == hub.size
    assert hub.requests == []
    assert json.loads(fetcher.marker.read_text())["source"] == server.url
    assert not any("authorization" in map(str.lower, headers) for _, _, headers in server.requests)
    server.requests.clear()
    assert fetcher.fetch(f"--from={server.url}", encodings=True)["changed"] is False
    assert server.requests == []


def test_a_hugging_face_cache_may_be_served_as_it_lies(
    fetcher: Fetcher, start: Callable[..., Server], tree: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "connected" / "weights"
    shutil.copy(tree / "manifest.json", cache)
    fetcher.fetch(f"--from={start(directory=cache).url}")
    fetcher.assert_complete()


def test_a_cut_costs_no_byte_twice_where_the_server_resumes(
    fetcher: Fetcher, hub: RunningHub, start: Callable[..., Server]
) -> None:
    server = start(Ranges)
    server.cuts[f"/{SHARD}"] = 300_001
    fetcher.fetch(f"--from={server.url}")
    fetcher.assert_complete()
    assert server.sent[f"/{SHARD}"] == len(hub.repository.by_path[SHARD].content)


def test_a_server_that_cannot_resume_is_read_from_the_start(
    fetcher: Fetcher, hub: RunningHub, start: Callable[..., Server]
) -> None:
    server = start(Plain)
    server.cuts[f"/{SHARD}"] = 300_001
    fetcher.fetch(f"--from={server.url}")
    fetcher.assert_complete()
    assert server.sent[f"/{SHARD}"] == len(hub.repository.by_path[SHARD].content) + 300_001


def test_the_next_run_goes_on_where_this_one_was_cut(
    fetcher: Fetcher, hub: RunningHub, start: Callable[..., Server]
) -> None:
    server = start(Ranges)
    server.cuts[f"/{SHARD}"] = 300_001
    message = fetcher.fails(f"--from={server.url}", "--attempts=1")
    assert "broke off at byte 300001" in message
    fetcher.assert_nothing_visible()
    fetcher.fetch(f"--from={server.url}")
    fetcher.assert_complete()
    assert server.sent[f"/{SHARD}"] == len(hub.repository.by_path[SHARD].content)


HTML = b"<!DOCTYPE html><html><body>Please sign in.</body></html>"


def edited(tree: Path, **changes: Any) -> None:
    manifest = json.loads((tree / "manifest.json").read_text())
    (tree / "manifest.json").write_text(json.dumps(manifest | changes))


def shard_flipped(tree: Path) -> None:
    body = bytearray((tree / SHARD).read_bytes())
    body[5000] ^= 0xFF
    (tree / SHARD).write_bytes(body)


# What is wrong -> how the server or its directory is made so, words of the message, whether a shard was asked for.
WRONG: dict[str, tuple[Callable[[Server, Path], Any], tuple[str, ...], bool]] = {
    "sign-in page for everything": (
        lambda server, _: server.pages.update({"": (200, "text/html", HTML, True)}),
        ("/manifest.json is an HTML page", "The address is that of the directory"),
        False,
    ),
    "sign-in page for one file": (
        lambda server, _: server.pages.update({SHARD: (200, "text/html", HTML, True)}),
        (f"{SHARD} in http", f"it has {len(HTML)} bytes", "sign-in page"),
        False,
    ),
    "page of unknown length": (
        lambda server, _: server.pages.update({SHARD: (200, "text/html", HTML, False)}),
        (f"an HTML page for {SHARD}",),
        True,
    ),
    "no manifest": (
        lambda _, tree: (tree / "manifest.json").unlink(),
        ("manifest.json does not exist (status 404)", "fetch_weights.py manifest writes one"),
        False,
    ),
    "no JSON": (lambda _, tree: (tree / "manifest.json").write_text("{"), ("manifest.json is not JSON",), False),
    "other revision": (lambda _, tree: edited(tree, revision="0" * 40), ("revision is '000",), False),
    "other model": (lambda _, tree: edited(tree, repository="a/b"), ("repository is 'a/b'",), False),
    "empty": (lambda _, tree: edited(tree, files=[]), ("lists no file",), False),
    "one file missing": (
        lambda _, tree: (tree / SHARD).unlink(),
        (f"has no file {SHARD}, which the manifest lists (status 404)", "lists there again"),
        False,
    ),
    "one file short": (
        lambda _, tree: (tree / SHARD).write_bytes(b"short"),
        (f"{SHARD} in http", "is cut short", "it has 5 bytes"),
        False,
    ),
    "damaged": (lambda _, tree: shard_flipped(tree), (f"{SHARD} from http", "is damaged: its sha256 should be"), True),
    "refused": (
        lambda server, _: server.pages.update({SHARD: (403, "text/plain", b"", True)}),
        (f"{SHARD} is refused (status 403)", "without a token or password"),
        False,
    ),
    "failing": (
        lambda server, _: server.pages.update({SHARD: (500, "text/plain", b"", True)}),
        ("cannot be reached for", "status 500"),
        False,
    ),
    "no encodings": (
        lambda _, tree: shutil.rmtree(tree / "encodings"),
        ("has no file encodings/", "lists there again"),
        False,
    ),
}


@pytest.mark.parametrize(("harm", "words", "asked"), WRONG.values(), ids=WRONG.keys())
def test_a_server_that_is_not_right_is_refused(
    fetcher: Fetcher,
    start: Callable[..., Server],
    tree: Path,
    harm: Callable[[Server, Path], Any],
    words: tuple[str, ...],
    asked: bool,
) -> None:
    server = start()
    harm(server, tree)
    message = fetcher.fails(f"--from={server.url}", "--attempts=2", encodings=True)
    for expected in words:
        assert expected in message
    assert server.url in message
    fetcher.assert_nothing_visible()
    assert (f"/{SHARD}" in server.asked_for("GET")) == asked


@pytest.mark.parametrize(
    "address", ["ftp://mirror/x", "file:///srv", "http://user:secret@mirror/x", "http://mirror/x?token=1", "http://"]
)
def test_an_address_that_is_none_is_refused(fetcher: Fetcher, address: str) -> None:
    message = fetcher.fails(f"--from={address}")
    assert "is not the http or https address of a directory, without credentials or a query" in message
    assert "secret" not in message
    assert not fetcher.directory.exists()


def test_nobody_there(fetcher: Fetcher, tree: Path) -> None:
    message = fetcher.fails("--from=http://127.0.0.1:9/gpt-oss", "--attempts=2")
    assert "http://127.0.0.1:9/gpt-oss cannot be reached" in message
    fetcher.assert_nothing_visible()


def test_a_certificate_that_nobody_vouches_for_is_named_and_one_that_is_trusted_is_taken(
    fetcher: Fetcher, start: Callable[..., Server], tmp_path: Path
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=mirror"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    server = start()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.scheme = "https"
    message = fetcher.fails(f"--from={server.url}")
    assert "the certificate cannot be verified (self-signed certificate)" in message
    assert "update-ca-certificates" in message
    fetcher.assert_nothing_visible()
    fetcher.environment["SSL_CERT_FILE"] = str(certificate)
    fetcher.fetch(f"--from={server.url}")
    fetcher.assert_complete()


def test_a_manifest_that_came_another_way_is_believed_rather_than_the_server(
    fetcher: Fetcher, start: Callable[..., Server], tree: Path, tmp_path: Path
) -> None:
    """Files and manifest that were changed together agree with each other; a manifest carried by hand finds out."""
    own = shutil.copy(tree / "manifest.json", tmp_path / "own.json")
    shard_flipped(tree)
    manifest = json.loads((tree / "manifest.json").read_text())
    digest = subprocess.run(["sha256sum", str(tree / SHARD)], check=True, capture_output=True, text=True).stdout[:64]
    edited(tree, files=[{**f, "sha256": digest} if f["path"] == SHARD else f for f in manifest["files"]])
    message = fetcher.fails(f"--from={start().url}", f"--manifest={own}")
    assert f"{SHARD} from http" in message
    assert "is damaged" in message
    fetcher.assert_nothing_visible()


# -- as a play runs it --


def test_role_brings_weights_from_a_web_server_without_token_or_client(
    fetcher: Fetcher, hub: RunningHub, start: Callable[..., Server], tree: Path, tmp_path: Path
) -> None:
    """With a manifest beside the inventory; the server's own is not even asked for."""
    plays, server = Plays(tmp_path), start()
    manifest = shutil.move(tree / "manifest.json", tmp_path / "manifest.json")
    role = weights_role(
        fetcher,
        hub,
        tmp_path,
        model_weights_source="http",
        model_weights_url=server.url,
        model_weights_manifest=str(manifest),
        model_weights_token=TOKEN,
        model_weights_venv=str(tmp_path / "venv"),
    )
    tasks = plays.role("model_weights", role)
    check = plays.run(tasks, "--check")
    assert check.status == 0, check.output
    assert check.changed
    assert server.requests == []
    first = plays.run(tasks)
    assert first.status == 0, first.output
    fetcher.assert_complete()
    assert not any("authorization" in map(str.lower, headers) for _, _, headers in server.requests)
    assert hub.requests == []
    assert not (tmp_path / "venv").exists()
    assert [p.name for p in (fetcher.directory / "staging").iterdir()] == [f"{fetcher.model.name}.lock"]
    server.requests.clear()
    assert not plays.run(tasks).changed
    assert server.requests == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"model_weights_url": "{server}/elsewhere"},
            "model_weights_url: {server}/elsewhere/manifest.json does not exist",
        ),
        ({"model_weights_url": ""}, "model_weights_url: '' is not the http or https address of a directory"),
        (
            {"model_weights_manifest": "/nowhere.json"},
            "model_weights_manifest: on the controller: the manifest /nowhere",
        ),
    ],
)
def test_role_names_the_input_that_is_wrong(
    fetcher: Fetcher,
    hub: RunningHub,
    start: Callable[..., Server],
    tmp_path: Path,
    given: dict[str, str],
    words: str,
) -> None:
    plays, server = Plays(tmp_path), start()
    given = {"model_weights_source": "http", "model_weights_url": server.url} | {
        name: value.format(server=server.url) for name, value in given.items()
    }
    run = plays.run(plays.role("model_weights", weights_role(fetcher, hub, tmp_path, **given)))
    assert run.status != 0
    assert words.format(server=server.url) in run.said
    fetcher.assert_nothing_visible()
