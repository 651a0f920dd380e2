"""What host_survey says of an image: a registry that is as strict as the real ones, and archives."""

from __future__ import annotations

import base64
import hashlib
import json
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ansible.module_utils.survey import registry  # isort: skip
from ansible.module_utils.survey.host import Host  # isort: skip

INDEX = "application/vnd.oci.image.index.v1+json"
LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
REPOSITORY = "nvidia/tensorrt-llm/release"
NAME = f"nvcr.io/{REPOSITORY}:1.2.1"


def index(*architectures: str) -> dict[str, Any]:
    """As buildx writes it: an attestation, which is no image, stands beside each platform."""
    entries = [{"platform": {"architecture": name, "os": "linux"}} for name in architectures]
    return {"manifests": [*entries, {"platform": {"architecture": "unknown", "os": "unknown"}}]}


class Registry(ThreadingHTTPServer):
    """One repository. `access`: open, token, basic or denied; `login`: who may come."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self.access = "open"
        self.login: tuple[str, str] | None = None
        self.kind, self.manifest = INDEX, index("amd64", "arm64")
        self.blobs: dict[str, bytes] = {}
        self.status = 200
        self.head = True
        self.requests: list[tuple[str, str]] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def one_platform(self, architecture: str) -> None:
        configuration = json.dumps({"architecture": architecture, "os": "linux"}).encode()
        digest = "sha256:" + hashlib.sha256(configuration).hexdigest()
        self.kind, self.manifest = MANIFEST, {"config": {"digest": digest}, "layers": []}
        self.blobs[digest] = configuration


class _Handler(BaseHTTPRequestHandler):
    server: Registry

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.server.requests.append((self.command, url.path))
        if url.path == "/token":
            return self._token(parse_qs(url.query))
        if url.path.startswith("/storage/"):  # where blobs lie: a login is an error there, as at S3
            if "Authorization" in self.headers:
                return self._send(400, b"")
            return self._send(200, self.server.blobs[url.path.removeprefix("/storage/")])
        if not self._allowed():
            return None
        if self.server.status != 200:
            return self._send(self.server.status, b"")
        if url.path == f"/v2/{REPOSITORY}/manifests/1.2.1":
            if self.command == "HEAD" and not self.server.head:
                return self._send(405, b"")
            if self.server.kind not in (self.headers.get("Accept") or ""):  # registries answer with what was asked for
                return self._send(404, b"")
            return self._send(200, json.dumps(self.server.manifest).encode(), self.server.kind)
        digest = url.path.removeprefix(f"/v2/{REPOSITORY}/blobs/")
        if digest in self.server.blobs:
            return self._send(307, b"", location=f"http://{self.server.address}/storage/{digest}")
        return self._send(404, b"")

    def _allowed(self) -> bool:
        access, given = self.server.access, self.headers.get("Authorization")
        realm = f"http://{self.server.address}"
        if access == "open" or (access == "token" and given == "Bearer good") or (access == "basic" and self._known()):
            return True
        challenge = f'Basic realm="{realm}"'
        if access == "token":
            challenge = f'Bearer realm="{realm}/token",service="r",scope="repository:{REPOSITORY}:pull"'
        self._send(401, b"", challenge=challenge)
        return False

    def _known(self) -> bool:
        if self.server.login is None:
            return True
        return self.headers.get("Authorization") == "Basic " + _basic(*self.server.login)

    def _token(self, query: dict[str, list[str]]) -> None:
        if query != {"service": ["r"], "scope": [f"repository:{REPOSITORY}:pull"]}:
            return self._send(400, b"")
        return self._send(200, b'{"token": "good"}') if self._known() else self._send(401, b"")

    def _send(
        self, status: int, body: bytes, kind: str = "application/json", location: str = "", challenge: str = ""
    ) -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if location:
            self.send_header("Location", location)
        if challenge:
            self.send_header("WWW-Authenticate", challenge)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = _answer  # noqa: N815
    do_HEAD = _answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Quiet."""


def _basic(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def server() -> Iterator[Registry]:
    with Registry() as running:
        yield running
        running.shutdown()


def look(root: Path, *there: str, **asked: Any) -> dict[str, Any]:
    wanted = {"name": NAME, "registry": "", "insecure": True, "username": "", "password": "", "archive": "", **asked}
    host = Host(procfs=str(root / "proc"), sysfs=str(root / "sys"), rootfs=str(root))
    found: dict[str, Any] = registry.image(host, wanted, list(there), 2, {})
    return found


def test_platforms_come_from_the_index(server: Registry, tmp_path: Path) -> None:
    for server.kind in (INDEX, LIST):
        found = look(tmp_path, registry=server.address)
        assert (found["status"], found["architectures"]) == (200, ["amd64", "arm64"])
        assert found["name"] == f"{server.address}/{REPOSITORY}:1.2.1"
    assert {method for method, _ in server.requests} == {"HEAD", "GET"}


def test_an_image_for_one_platform_says_so_in_its_configuration(server: Registry, tmp_path: Path) -> None:
    server.access = "token"  # and storage, to which the blob is redirected, gets no token
    server.one_platform("amd64")
    assert look(tmp_path, registry=server.address)["architectures"] == ["amd64"]


def test_nobody_is_asked_for_what_is_there(server: Registry, tmp_path: Path) -> None:
    there = f"{server.address}/{REPOSITORY}:1.2.1"
    assert look(tmp_path, there, registry=server.address)["there"] is True
    assert server.requests == []


def test_a_missing_image_costs_one_question(server: Registry, tmp_path: Path) -> None:
    found = look(tmp_path, name=f"nvcr.io/{REPOSITORY}:9.9.9", registry=server.address)
    assert (found["status"], found["architectures"]) == (404, None)
    assert server.requests == [("HEAD", f"/v2/{REPOSITORY}/manifests/9.9.9")]


@pytest.mark.parametrize(
    ("access", "login", "asked", "status"),
    [
        ("token", None, {}, 200),
        ("token", ("robot", "s3cret"), {"username": "robot", "password": "s3cret"}, 200),
        ("token", ("robot", "s3cret"), {"username": "robot", "password": "wrong"}, 401),
        ("token", ("robot", "s3cret"), {}, 401),
        ("basic", ("robot", "s3cret"), {"username": "robot", "password": "s3cret"}, 200),
        ("basic", ("robot", "s3cret"), {}, 401),
    ],
    ids=["anonymous token", "token by login", "wrong login", "no login", "basic", "basic without login"],
)
def test_who_may_ask(
    server: Registry, tmp_path: Path, access: str, login: tuple[str, str] | None, asked: dict[str, str], status: int
) -> None:
    server.access, server.login = access, login
    assert look(tmp_path, registry=server.address, **asked)["status"] == status


def test_the_login_that_docker_keeps_on_the_host_is_used(server: Registry, tmp_path: Path) -> None:
    server.access, server.login = "token", ("robot", "s3cret")
    file = tmp_path / "root/.docker/config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"auths": {server.address: {"auth": _basic("robot", "s3cret")}}}))
    assert look(tmp_path, registry=server.address)["status"] == 200


def test_a_mirror_that_answers_get_only(server: Registry, tmp_path: Path) -> None:
    server.head = False
    assert look(tmp_path, registry=server.address)["architectures"] == ["amd64", "arm64"]


def test_a_registry_that_has_trouble_or_is_not_there(server: Registry, tmp_path: Path) -> None:
    server.status = 503
    assert look(tmp_path, registry=server.address)["status"] == 503
    gone = look(tmp_path, registry="127.0.0.1:1")
    assert (gone["status"], gone["kind"], gone["error"]) == (None, "refused", "connection refused")


def test_no_login_goes_where_it_would_be_read_on_the_way(tmp_path: Path) -> None:
    host = Host(rootfs=str(tmp_path))
    asked = registry._Registry(host, NAME, False, ("robot", "s3cret"), 1, {})
    assert asked._answer_to('Bearer realm="http://127.0.0.1:1/token",service="r"') is None


@pytest.mark.parametrize(
    ("name", "repository", "reference"),
    [
        ("release:1.2.1", "release", "1.2.1"),
        ("nvidia/release", "nvidia/release", "latest"),
        ("nvidia/release:1@sha256:ab", "nvidia/release", "sha256:ab"),
    ],
)
def test_parts_of_a_name(name: str, repository: str, reference: str) -> None:
    assert registry._split(name) == (repository, reference)


# -- archives ----------------------------------------------------------------------------------------------------------


def _archive(path: Path, name: str = NAME, mode: str = "w") -> None:
    """As docker save writes it, for amd64."""
    configuration = json.dumps({"architecture": "amd64"}).encode()
    files = {
        "c.json": configuration,
        "l.tar": b"x" * 100,
        "manifest.json": json.dumps([{"Config": "c.json", "RepoTags": [name], "Layers": ["l.tar"]}]).encode(),
    }
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for member, content in files.items():
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            tar.addfile(entry, BytesIO(content))


def _cut(path: Path) -> None:
    _archive(path)
    path.write_bytes(path.read_bytes()[:700])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_archive, None),
        (lambda path: _archive(path, mode="w:gz"), None),
        (lambda path: None, "there is no such archive"),
        (lambda path: path.write_bytes(b"\x1f\x8b not an archive"), "is corrupt or cut short"),
        (lambda path: path.write_bytes(b"not an archive"), "is corrupt or cut short"),
        (_cut, "is corrupt or cut short"),
        (lambda path: _archive(path, "nvcr.io/other:1"), f"holds no image {NAME}; it holds nvcr.io/other:1"),
    ],
    ids=["good", "compressed", "missing", "compressed and corrupt", "corrupt", "cut", "another image"],
)
def test_an_archive_on_the_host(tmp_path: Path, make: Callable[[Path], object], says: str | None) -> None:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/arch").write_text("x86_64\n")
    make(tmp_path / "image.tar")
    found = look(tmp_path, archive="/image.tar")
    if says is None:
        assert found["error"] is None
    else:
        assert says in found["error"]


def test_an_archive_for_another_processor(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/arch").write_text("aarch64\n")
    _archive(tmp_path / "image.tar")
    assert "is for amd64, this host is arm64" in look(tmp_path, archive="/image.tar")["error"]
