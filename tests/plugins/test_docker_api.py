"""docker_image and docker_daemon against a daemon that answers as a test says; a real one is in tests/hosts."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import os
import platform
import socketserver
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ansible.module_utils.gpt_oss import docker_host  # isort: skip
from tests.plugins.conftest import RunModule  # isort: skip

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
NAME = "nvcr.io/nvidia/tensorrt-llm/release:1.2.1"


class Daemon(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A socket like the daemon's. `images` is what it has, `registry` what a registry would answer."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), Handler)
        self.images: dict[str, dict[str, Any]] = {}
        self.registry: dict[str, tuple[int, Any]] = {}
        self.loaded = b""
        self.asked: list[str] = []
        self.logins: list[str | None] = []


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Daemon

    def address_string(self) -> str:
        return "socket"

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass

    def reply(self, status: int, answer: Any) -> None:
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.logins.append(self.headers.get("X-Registry-Auth"))
        if self.path == "/info":
            self.reply(200, {"ServerVersion": "29.8.2", "DockerRootDir": "/", "DriverStatus": []})
        elif self.path.startswith("/images/"):
            name = self.path[len("/images/") : -len("/json")]
            found = self.server.images.get(name)
            self.reply(200 if found else 404, found or {"message": f"No such image: {name}"})
        elif self.path.startswith("/distribution/"):
            name = self.path[len("/distribution/") : -len("/json")]
            self.reply(*self.server.registry.get(name, (404, {"message": f"manifest unknown: {name}"})))

    def do_POST(self) -> None:
        self.server.asked.append(self.path)
        if self.path.startswith("/images/load"):
            while size := int(self.rfile.readline(), 16):
                self.server.loaded += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            self.server.images[NAME] = {"Id": "sha256:1", "Architecture": MACHINE, "RepoDigests": []}
            self.server.images["sha256:1"] = self.server.images[NAME]
        self.reply(200, b'{"status": "fine"}\n')


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    server = Daemon(tmp_path / "docker.sock")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def wanted(tmp_path: Path, daemon: Daemon) -> dict[str, Any]:
    return {"name": NAME, "record": str(tmp_path / "etc/image.json"), "socket": str(tmp_path / "docker.sock")}


def an_image(tmp_path: Path, tags: list[str]) -> Path:
    configuration = json.dumps({"architecture": MACHINE}).encode()
    name = f"{hashlib.sha256(configuration).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": tags, "Layers": []}]
    path = tmp_path / "image.tar"
    with tarfile.open(path, "w") as tar:
        for member, data in ((name, configuration), ("manifest.json", json.dumps(manifest).encode())):
            entry = tarfile.TarInfo(member)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


def test_an_image_under_its_name_is_taken_and_recorded_without_a_registry(
    run_module: RunModule, daemon: Daemon, wanted: dict[str, Any]
) -> None:
    digest = f"nvcr.io/nvidia/tensorrt-llm/release@sha256:{'a' * 64}"
    daemon.images[NAME] = {"Id": "sha256:1", "Architecture": MACHINE, "RepoDigests": ["other@sha256:0", digest]}
    daemon.images["sha256:1"] = daemon.images[NAME]
    first = run_module("docker_image", wanted)
    assert first["changed"] is True
    assert first["reference"] == digest
    daemon.asked.clear()
    second = run_module("docker_image", wanted)
    assert second["changed"] is False
    assert second["reference"] == digest
    assert daemon.asked == ["/images/sha256:1/json"]


def test_an_image_that_is_had_ahead_of_its_use_leaves_no_record(
    run_module: RunModule, daemon: Daemon, wanted: dict[str, Any], tmp_path: Path
) -> None:
    daemon.images[NAME] = {"Id": "sha256:1", "Architecture": MACHINE, "RepoDigests": []}
    del wanted["record"]
    result = run_module("docker_image", wanted)
    assert result["changed"] is False
    assert result["reference"] == "sha256:1"
    assert not (tmp_path / "etc").exists()


def test_a_name_that_moved_on_does_not_move_a_recorded_server(
    run_module: RunModule, daemon: Daemon, wanted: dict[str, Any]
) -> None:
    daemon.images[NAME] = daemon.images["sha256:1"] = {"Id": "sha256:1", "Architecture": MACHINE, "RepoDigests": []}
    assert run_module("docker_image", wanted)["reference"] == "sha256:1"
    daemon.images[NAME] = {"Id": "sha256:2", "Architecture": MACHINE, "RepoDigests": []}
    assert run_module("docker_image", wanted)["reference"] == "sha256:1"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((404, {"message": "manifest unknown"}), "the registry has no such image: check serving_release"),
        ((401, {"message": "unauthorized: authentication required"}), "inference_server_registry_username"),
        ((500, {"message": "dial tcp: lookup nvcr.io: no such host"}), "cannot be reached: check the network"),
        ((500, {"message": "x509: certificate signed by unknown authority"}), "/etc/docker/certs.d"),
        ((500, {"message": "http: server gave HTTP response to HTTPS client"}), "insecure-registries"),
        (
            (200, {"Descriptor": {"digest": "sha256:0"}, "Platforms": [{"architecture": "mips", "os": "linux"}]}),
            f"the registry has it for mips, not for {MACHINE}",
        ),
    ],
)
def test_what_a_registry_refuses_is_explained(
    run_module: RunModule, daemon: Daemon, wanted: dict[str, Any], answer: tuple[int, Any], says: str
) -> None:
    daemon.registry[NAME] = answer
    failed = run_module("docker_image", wanted)
    assert failed["failed"]
    assert says in failed["msg"]
    assert NAME in failed["msg"]
    assert not Path(wanted["record"]).exists()
    assert not any(path.startswith("/images/create") for path in daemon.asked)


def test_check_mode_asks_the_registry_and_pulls_nothing(
    run_module: RunModule, daemon: Daemon, wanted: dict[str, Any], tmp_path: Path
) -> None:
    environment = a_path_with(tmp_path / "bin", dockerd="")
    platforms = [{"architecture": MACHINE, "os": "linux"}]
    daemon.registry[NAME] = (200, {"Descriptor": {"digest": f"sha256:{'b' * 64}"}, "Platforms": platforms})
    predicted = run_module("docker_image", wanted, check=True, environment=environment)
    assert predicted["changed"] is True
    assert predicted["reference"].endswith(f"@sha256:{'b' * 64}")
    assert not any(path.startswith("/images/create") for path in daemon.asked)


def test_a_password_goes_to_the_daemon_and_nowhere_else(
    run_module: RunModule, daemon: Daemon, wanted: dict[str, Any]
) -> None:
    daemon.registry[NAME] = (401, {"message": "unauthorized"})
    login = {"username": "somebody", "password": "hunter2-hunter2"}
    failed = run_module("docker_image", {**wanted, **login})
    assert failed["failed"]
    assert "hunter2" not in json.dumps(failed)
    assert any(daemon.logins)


def test_too_little_room_is_said_in_bytes(run_module: RunModule, daemon: Daemon, wanted: dict[str, Any]) -> None:
    platforms = [{"architecture": MACHINE, "os": "linux"}]
    daemon.registry[NAME] = (200, {"Descriptor": {"digest": "sha256:0"}, "Platforms": platforms})
    failed = run_module("docker_image", {**wanted, "size_bytes": 10**17})
    assert f"{NAME} needs {10**17}" in failed["msg"]
    assert "are missing" in failed["msg"]


def test_an_archive_is_loaded_whole_and_once(
    run_module: RunModule, daemon: Daemon, wanted: dict[str, Any], tmp_path: Path
) -> None:
    archive = an_image(tmp_path, [NAME])
    asked = {**wanted, "archive": str(archive)}
    first = run_module("docker_image", asked)
    assert first["changed"] is True
    assert daemon.loaded == archive.read_bytes()
    assert first["image"]["source"] == f"archive {archive}"
    daemon.loaded = b""
    assert run_module("docker_image", asked)["changed"] is False
    assert daemon.loaded == b""


def test_an_archive_that_is_elsewhere_is_asked_for_only_when_it_is_needed(
    run_module: RunModule, daemon: Daemon, wanted: dict[str, Any], tmp_path: Path
) -> None:
    asked = {**wanted, "archive": "/on/the/controller.tar", "archive_elsewhere": True}
    first = run_module("docker_image", asked)
    assert first["needs_archive"] is True
    assert first["changed"] is False
    here = {**wanted, "archive": str(an_image(tmp_path, [NAME])), "archive_name": "/on/the/controller.tar"}
    assert run_module("docker_image", here)["changed"] is True
    assert run_module("docker_image", asked)["needs_archive"] is False


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"archive": "/no/such.tar"}, "there is no such archive on this host"),
        ({"sha256": "0" * 64}, "is corrupt or another archive"),
        ({"name": "nvcr.io/other:1"}, f"holds no image nvcr.io/other:1; it holds {NAME}"),
    ],
)
def test_an_archive_that_will_not_do_is_refused(
    run_module: RunModule, daemon: Daemon, wanted: dict[str, Any], tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    failed = run_module("docker_image", {**wanted, "archive": str(an_image(tmp_path, [NAME])), **change})
    assert says in failed["msg"]
    assert daemon.loaded == b""


def test_a_daemon_that_is_not_there_is_said_to_be_away(tmp_path: Path) -> None:
    with pytest.raises(docker_host.DockerError, match=r"Docker does not answer on .*nowhere\.sock"):
        docker_host.Docker(str(tmp_path / "nowhere.sock")).info()


@pytest.mark.parametrize(
    ("version", "minimum", "enough"),
    [
        ("20.10.24+dfsg1", "20.10.0", True),
        ("19.03.15", "20.10.0", False),
        ("5:29.8.2-1~debian.12~bookworm", "28.2.0", True),
        ("28.1.1", "28.2.0", False),
        ("26.1.5+dfsg1-9", "25.0.0", True),
        ("29.0.0-rc.1", "29.0.0", True),
    ],
)
def test_versions(version: str, minimum: str, enough: bool) -> None:
    assert docker_host.at_least(version, minimum) is enough


# -- the daemon's configuration ------------------------------------------------------------------------------------


def a_path_with(directory: Path, **programs: str) -> dict[str, str]:
    directory.mkdir(exist_ok=True)
    for name, text in programs.items():
        program = directory / name.replace("_", "-")
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return {"PATH": f"{directory}{os.pathsep}/usr/bin{os.pathsep}/bin"}


def test_docker_that_is_absent_is_an_error_but_not_in_check_mode(run_module: RunModule, tmp_path: Path) -> None:
    environment = a_path_with(tmp_path / "bin")
    failed = run_module("docker_daemon", {}, environment=environment)
    assert failed["msg"].startswith("Docker is absent")
    assert "docker_engine_source" in failed["msg"]
    assert run_module("docker_daemon", {}, check=True, environment=environment)["changed"] is True
    stays = run_module("docker_daemon", {"must_be_there": True}, check=True, environment=environment)
    assert stays["msg"].startswith("Docker is absent")


def test_docker_that_is_too_old_is_an_error(run_module: RunModule, tmp_path: Path) -> None:
    environment = a_path_with(tmp_path / "bin", dockerd="echo Docker version 19.03.15, build 0")
    failed = run_module("docker_daemon", {"minimum_version": "20.10.0"}, environment=environment)
    assert failed["msg"].startswith("Docker 19.03.15 is too old; 20.10.0 or newer is needed")


def test_a_configuration_that_is_not_json_is_an_error(run_module: RunModule, tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    path.write_text("{oops")
    environment = a_path_with(tmp_path / "bin", dockerd="echo Docker version 29.8.2, build 0")
    failed = run_module("docker_daemon", {"path": str(path), "options": {"debug": True}}, environment=environment)
    assert f"{path} is not JSON" in failed["msg"]
    assert path.read_text() == "{oops"


def test_what_docker_itself_refuses_never_gets_into_place(run_module: RunModule, tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    path.write_text('{"debug": true}')
    dockerd = 'case "$1" in --version) echo Docker version 29.8.2, build 0;; *) echo unknown key >&2; exit 1;; esac'
    systemctl = "echo ActiveState=active; echo UnitFileState=enabled; echo ExecMainStartTimestampMonotonic=0"
    environment = a_path_with(tmp_path / "bin", dockerd=dockerd, systemctl=systemctl)
    failed = run_module("docker_daemon", {"path": str(path), "options": {"oops": True}}, environment=environment)
    assert "Docker 29.8.2 refuses the merged configuration: unknown key" in failed["msg"]
    assert path.read_text() == '{"debug": true}'
