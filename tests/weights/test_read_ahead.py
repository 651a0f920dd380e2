"""The program that reads the plan's weights into memory: real files, and the kernel's word for what is in memory."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.programs import load

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "plugins/module_utils/gpt_oss/read_ahead.py"
MIB = 1 << 20
SIZES = (40 * MIB + 12345, 33 * MIB, 7)


read_ahead = load("plugins/module_utils/gpt_oss/read_ahead.py")


class Health(http.server.BaseHTTPRequestHandler):
    """An engine's health endpoint, as the test says."""

    status = 503

    def do_GET(self) -> None:
        self.send_response(type(self).status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass


@dataclass
class Host:
    """A configuration directory, weights and an engine, as the roles leave them."""

    directory: Path
    server: http.server.ThreadingHTTPServer
    files: list[Path] = field(default_factory=list)

    @property
    def configuration(self) -> Path:
        return self.directory / "etc"

    def describe(self, name: str = "0", port: int | None = None) -> None:
        described = {
            "marker": str(self.directory / "marker.json"),
            "snapshot": str(self.directory / "snapshot"),
            "address": "127.0.0.1",
            "port": port or self.server.server_port,
            "health_path": "/health",
        }
        path = self.configuration / "processes" / name / "process.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(described))

    def cached(self) -> int:
        return sum(read_ahead.cached_bytes(path) for path in self.files)

    def evict(self) -> None:
        """Out of memory, with the kernel's word for it. A page that somebody else is looking at takes a moment."""
        until = time.monotonic() + 30
        while self.cached():
            for path in self.files:
                read_ahead.evict(path)
            assert time.monotonic() < until, "the files stay in memory"

    def run(self, *more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(PROGRAM), "--configuration", str(self.configuration), "--margin-bytes=0", *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    Health.status = 503
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    made = Host(tmp_path, server)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    entries = []
    for number, size in enumerate(SIZES, start=1):
        path = snapshot / f"model-{number:05}-of-{len(SIZES):05}.safetensors"
        with path.open("wb") as out:
            for at in range(0, size, MIB):
                out.write(os.urandom(min(MIB, size - at)))
            out.flush()
            os.fsync(out.fileno())  # pages that are not on the disk yet cannot leave memory
        made.files.append(path)
        entries.append({"path": path.name, "size": size})
    (tmp_path / "marker.json").write_text(json.dumps({"files": entries}))
    made.describe()
    if made.cached() == sum(SIZES):
        made.evict()
    yield made
    server.shutdown()
    server.server_close()


def test_everything_is_in_memory_afterwards_and_a_second_run_reads_nothing(host: Host) -> None:
    assert host.cached() == 0
    done = host.run()
    assert done.returncode == 0, done.stderr
    assert host.cached() == sum(SIZES)
    assert re.search(
        r"^read 0\.08 GB in [0-9.]+ s \([0-9.]+ GB/s\); 0\.00 of 0\.08 GB were in memory", done.stdout, re.M
    )
    again = host.run()
    assert again.returncode == 0
    assert "read 0.00 GB in" in again.stdout
    assert "0.08 of 0.08 GB were in memory already" in again.stdout


def test_only_what_is_missing_is_read(host: Host) -> None:
    host.files[1].read_bytes()
    reader = read_ahead.Reader(read_ahead.read_plan(host.configuration).files, threads=4)
    outcome = reader.run()
    assert outcome.cached >= SIZES[1]
    assert outcome.read + outcome.cached == outcome.total == sum(SIZES)
    assert host.cached() == sum(SIZES)


def test_replicas_share_files_and_each_is_read_once(host: Host) -> None:
    host.describe("1", port=1)
    plan = read_ahead.read_plan(host.configuration)
    assert [path for path, _ in plan.files] == host.files
    assert [endpoint.port for endpoint in plan.endpoints] == [host.server.server_port, 1]


def test_too_little_memory_is_said_with_its_numbers_and_is_no_failure(host: Host) -> None:
    done = host.run("--margin-bytes", str(1 << 60))
    assert done.returncode == 0
    assert done.stdout.startswith("skipped: the weights are 0.1 GB and ")
    assert "MemAvailable of the host leaves" in done.stdout
    assert host.cached() == 0


GIB = 1 << 30
GROUPS = {
    "v2, its own": ("0::/a/b\n", {"fs/cgroup/a/b": {"memory.max": GIB, "memory.current": 0}}, GIB, "a/b/memory.max"),
    "v2, one above": (
        "0::/a/b\n",
        {
            "fs/cgroup/a/b": {"memory.max": "max", "memory.current": 0},
            "fs/cgroup/a": {"memory.max": 4 * GIB, "memory.current": 3 * GIB, "memory.stat": f"anon 1\nfile {GIB}\n"},
        },
        2 * GIB,
        "cgroup/a/memory.max",
    ),
    "v1": (
        "3:cpu:/x\n2:memory:/a\n",
        {"fs/cgroup/memory/a": {"memory.limit_in_bytes": GIB, "memory.usage_in_bytes": GIB // 2}},
        GIB // 2,
        "memory.limit_in_bytes",
    ),
    "none": ("0::/\n", {}, 64 * GIB, "MemAvailable of the host"),
}


@pytest.mark.parametrize(("lines", "groups", "room", "limit"), GROUPS.values(), ids=GROUPS.keys())
def test_limits_of_control_groups_count_and_page_cache_gives_way(
    tmp_path: Path, lines: str, groups: dict[str, dict[str, object]], room: int, limit: str
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: 1 kB\nMemAvailable:   {64 * GIB // 1024} kB\nHugePages_Total: 0\n"
    )
    for group, files in groups.items():
        (tmp_path / "sys" / group).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (tmp_path / "sys" / group / name).write_text(f"{content}\n")
    found, what = read_ahead.available_memory(tmp_path / "proc", tmp_path / "sys")
    assert found == room
    assert what.endswith(limit)


class Slow:
    """A reader that never gets done, for those who are to stop it."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.outcome = read_ahead.Outcome(total=1)


def watched(host: Host) -> Slow:
    reader = Slow()
    endpoints = read_ahead.read_plan(host.configuration).endpoints
    threading.Thread(target=read_ahead.stop_when_ready, args=(reader, endpoints, 0.02), daemon=True).start()
    return reader


def test_reading_stops_when_the_engine_becomes_ready(host: Host) -> None:
    reader = watched(host)
    assert not reader.stop.wait(0.3)
    Health.status = 200
    assert reader.stop.wait(10)
    assert reader.outcome.stopped == "the engine is ready"


def test_a_server_that_is_on_its_way_out_does_not_end_the_reading_for_the_next(host: Host) -> None:
    Health.status = 200
    reader = watched(host)
    assert not reader.stop.wait(0.3)
    Health.status = 503
    assert not reader.stop.wait(0.3)
    Health.status = 200
    assert reader.stop.wait(10)


def test_every_process_has_to_be_ready(host: Host) -> None:
    host.describe("1", port=1)
    reader = watched(host)
    Health.status = 200
    assert not reader.stop.wait(0.5)
    reader.stop.set()


def test_a_stop_is_obeyed_between_two_pieces(host: Host) -> None:
    reader = read_ahead.Reader(read_ahead.read_plan(host.configuration).files, threads=2)
    reader.stop.set()
    assert reader.run().read == 0
    assert host.cached() == 0


def test_systemd_ends_it_and_it_says_how_far_it_was(host: Host) -> None:
    large = host.directory / "snapshot" / "large.safetensors"
    with large.open("wb") as out:
        out.truncate(1 << 40)  # a hole: never read to its end in a test
    (host.directory / "marker.json").write_text(json.dumps({"files": [{"path": large.name, "size": 1 << 40}]}))
    command = [sys.executable, str(PROGRAM), f"--configuration={host.configuration}", f"--margin-bytes={-(1 << 41)}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("reading 1 files, 1099.5 GB, with 16 threads")
    process.send_signal(signal.SIGTERM)
    said = process.stdout.read()
    assert process.wait(60) == 0
    assert "stopped: told to (SIGTERM)" in said


def test_weights_that_are_cut_fail_the_read_ahead_and_are_named(host: Host) -> None:
    os.truncate(host.files[1], 5)
    done = host.run()
    assert done.returncode == 1
    assert done.stderr.startswith(f"{host.files[1]}: is shorter than the 33554432 bytes that were verified")
    assert "run playbooks/weights.yml" in done.stderr


def test_a_host_without_a_plan_or_without_weights_says_what_to_run(host: Host) -> None:
    (host.directory / "marker.json").unlink()
    done = host.run()
    assert done.returncode == 1
    assert "weights cannot be found by" in done.stderr
    assert "Run playbooks/weights.yml" in done.stderr
    (host.configuration / "processes/0/process.json").unlink()
    assert "describes no engine process. Run playbooks/serve.yml" in host.run().stderr


def test_a_number_of_threads_that_cannot_be_is_refused(host: Host) -> None:
    done = host.run("--threads=0")
    assert done.returncode == 2
    assert "--threads: 0: allowed are 1 to 64" in done.stderr
