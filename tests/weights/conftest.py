"""The real fetching program against the stand-in hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.programs import load
from tests.stand_ins.hub import content
from tests.stand_ins.hub.server import Fault, Hub, State, make_state

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "plugins" / "module_utils" / "gpt_oss" / "fetch_weights.py"
MODEL = "openai/gpt-oss-120b"
SHARD = "model-00001-of-00002.safetensors"
TOKEN = "hf_ThisIsNobodysToken0123456789"


def wait_for(condition: Callable[[], object], what: str = "it", seconds: float = 120) -> None:
    """Look fifty times a second. The time is a busy machine's; nothing here is a measure of speed."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)


@dataclass
class RunningHub:
    """The stand-in hub in this process, with large files on a port of their own, as on a CDN."""

    url: str
    state: State
    cdn: State
    repository: content.Repository

    @property
    def size(self) -> int:
        return self.repository.served_bytes()

    @property
    def files(self) -> list[content.HubFile]:
        return [f for f in self.repository.files if not f.path.startswith(("original/", "metal/"))]

    def break_(self, *faults: Fault) -> None:
        self.state.faults.extend(f for f in faults if not f.match.startswith("/lfs"))
        self.cdn.faults.extend(f for f in faults if f.match.startswith("/lfs"))

    def mend(self) -> None:
        for state in (self.state, self.cdn):
            state.reset()

    def hurry(self) -> None:
        """What is being sent slowly comes at full speed from here on."""
        for fault in (*self.state.faults, *self.cdn.faults):
            fault.bytes_per_second = 0

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [*self.state.requests, *self.cdn.requests]

    @property
    def bytes_sent(self) -> int:
        return sum(self.state.sent.values()) + sum(self.cdn.sent.values())

    def bytes_of(self, path: str) -> int:
        sent = {**self.state.sent, **self.cdn.sent}
        return sum(count for name, count in sent.items() if name.endswith("/" + path))

    def encodings(self) -> list[dict[str, Any]]:
        import hashlib

        return [
            {"file": name, "url": f"{self.url}/encodings/{name}", "sha256": hashlib.sha256(body).hexdigest()}
            for name, body in content.encodings().items()
        ]


@pytest.fixture(scope="session")
def _servers() -> Iterator[RunningHub]:
    state, cdn_state = make_state(), make_state()
    cdn = Hub(("127.0.0.1", 0), cdn_state)
    hub = Hub(("127.0.0.1", 0), state, cdn_port=cdn.server_address[1])
    for server in (hub, cdn):
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield RunningHub(f"http://127.0.0.1:{hub.server_address[1]}", state, cdn_state, state.repositories[MODEL])
    for server in (hub, cdn):
        server.shutdown()
        server.server_close()


@pytest.fixture
def hub(_servers: RunningHub) -> RunningHub:
    _servers.mend()
    return _servers


@dataclass
class Fetcher:
    """Runs the program in a cache of its own."""

    directory: Path
    hub: RunningHub
    revision: str
    repository: str = MODEL
    environment: dict[str, str] = field(default_factory=dict)
    python: tuple[str, ...] = (sys.executable,)

    @property
    def model(self) -> Path:
        return self.directory / "weights" / ("models--" + self.repository.replace("/", "--"))

    @property
    def snapshot(self) -> Path:
        return self.model / "snapshots" / self.revision

    @property
    def marker(self) -> Path:
        return self.model / "verified" / f"{self.revision}.json"

    @property
    def work(self) -> Path:
        return self.directory / "staging" / self.model.name / self.revision

    def command(self, command: str, *more: str, encodings: bool = False) -> list[str]:
        return [
            *self.python,
            str(PROGRAM),
            command,
            f"--repository={self.repository}",
            f"--revision={self.revision}",
            *(f"--{part}-directory={self.directory / part}" for part in ("weights", "staging", "encodings")),
            f"--encodings={json.dumps(self.hub.encodings() if encodings else [])}",
            *more,
        ]

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
        return {**kept, "HF_ENDPOINT": self.hub.url, **self.environment}

    def run(self, command: str, *more: str, encodings: bool = False) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(command, *more, encodings=encodings),
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def start(self, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command("fetch", *more),
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fetch(self, *more: str, encodings: bool = False) -> dict[str, Any]:
        done = self.run("fetch", *more, encodings=encodings)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def fails(self, *more: str, encodings: bool = False) -> str:
        done = self.run("fetch", *more, encodings=encodings)
        assert done.returncode in (1, 3), done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    def check(self) -> dict[str, Any]:
        done = self.run("check")
        result: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (0 if result["verified"] else 1)
        return result

    def assert_nothing_visible(self) -> None:
        assert not self.snapshot.exists()
        assert not self.marker.exists()
        assert not (self.model / "refs" / "main").exists()
        assert self.check()["verified"] is False

    def assert_complete(self) -> None:
        found = {str(p.relative_to(self.snapshot)): p.read_bytes() for p in self.snapshot.rglob("*") if p.is_file()}
        assert found == {file.path: file.content for file in self.hub.files}
        assert (self.model / "refs" / "main").read_text() == self.revision
        assert self.check()["verified"] is True
        assert not self.work.exists()


@pytest.fixture
def fetcher(tmp_path: Path, hub: RunningHub) -> Fetcher:
    return Fetcher(tmp_path / "cache", hub, hub.repository.revision)


@pytest.fixture(scope="session")
def program() -> ModuleType:
    """The program's functions."""
    return load("plugins/module_utils/gpt_oss/fetch_weights.py")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a filesystem needs root")
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(place)], check=False)
    if mounted.returncode != 0:
        pytest.skip("this machine does not allow mounts")
    yield place
    subprocess.run(["umount", str(place)], check=True)
