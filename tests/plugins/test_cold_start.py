"""The measured cold start: engines' log lines, the split, fio, the picture; and a whole run against a stand-in host."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.gpt_oss import cold_start

from serving_catalog import load_catalog
from serving_catalog.planning import plan_host
from serving_catalog.plans import ServeRequest
from tests.plugins.conftest import ROOT, RunModule

# As the engines print them; the times are seconds after the start.
VLLM = [
    (
        31.0,
        "(EngineCore pid=99) INFO 06-02 00:51:12 [gpu_model_runner.py:4500] Starting to load model m...",
    ),
    (
        59.0,
        "\rLoading safetensors checkpoint shards:   0% Completed | 0/15\rLoading safetensors checkpoint shards: 100%",
    ),
    (59.0, "(Worker_TP0 pid=1) INFO 06-02 00:51:39 [default_loader.py:397] Loading weights took 26.93 seconds"),
    (60.0, "(Worker_TP1 pid=2) INFO 06-02 00:51:40 [default_loader.py:397] Loading weights took 27.50 seconds"),
    (
        61.0,
        "(Worker_TP0 pid=1) INFO 06-02 00:51:41 [model_runner.py:295] Model loading took 33.6 GiB and 32.9 seconds",
    ),
    (
        98.0,
        "(EngineCore pid=99) INFO 06-02 00:52:18 [model_runner.py:1933] Graph capturing finished in 37 secs",
    ),
]
TENSORRT_LLM = [
    (21.0, "[12/20/2025-04:20:21] [TRT-LLM] [I] Use 63.32 GB for model weights."),
    (21.5, "[12/20/2025-04:20:21] [TRT-LLM] [I] Prefetching 60.77GB checkpoint files."),
    (69.0, "\rLoading weights: 100%|##########| 801/801 [00:46<00:00, 17.29it/s]"),
    (70.0, "Model init total -- 49.14s"),
    (71.0, "[12/20/2025-04:21:11] [TRT-LLM] [I] Creating CUDA graph instances for 34 batch sizes."),
]
START = 1_700_000_000.0


def as_journal(lines: list[tuple[float, str]]) -> str:
    rows = []
    for at, text in lines:
        # systemd gives what is no plain text as a list of bytes.
        message: Any = list(text.encode()) if "\r" in text else text
        rows.append(json.dumps({"__REALTIME_TIMESTAMP": str(int((START + at) * 1e6)), "MESSAGE": message}))
    return "\n".join(rows) + "\nnot JSON\n"


@pytest.mark.parametrize(
    ("lines", "begin", "end"),
    [(VLLM, 59 - 26.93, 60), (TENSORRT_LLM, 21, 70), ([], None, None)],
    ids=["vllm", "trtllm", "silent"],
)
def test_engines_tell_when_they_begin_and_end_with_the_weights(
    lines: list[tuple[float, str]], begin: float | None, end: float | None
) -> None:
    found = cold_start.weights_times(cold_start.read_journal(as_journal(lines)))
    expected = tuple(None if moment is None else START + moment for moment in (begin, end))
    assert found == pytest.approx(expected) if begin is not None else found == expected


def test_the_stand_in_engine_says_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from simulator.engine import Engine
    from simulator.loading import load
    from simulator.settings import Settings

    shard = tmp_path / "model.safetensors"
    shard.write_bytes(bytes(100))
    for kind in ("tensorrt_llm", "vllm"):
        engine = Engine(kind, "1", "model", None, ("model",), "127.0.0.1", 1, 1, 8, 8)
        load(engine, [shard, shard], Settings(load_seconds=0.1), lambda: None)
        lines = [(float(at), text) for at, text in enumerate(capsys.readouterr().out.splitlines())]
        begin, end = cold_start.weights_times(cold_start.read_journal(as_journal(lines)))
        assert begin is not None, kind
        assert end is not None, kind


def test_the_phases_follow_each_other_and_are_the_whole() -> None:
    marks = cold_start.Marks(100.0, 102.5, 120.0, 150.0, 190.0, 191.5)
    phases = cold_start.split(marks)
    assert phases == {"image": 2.5, "program": 17.5, "weights": 30.0, "engine_load": 40.0, "warm_up": 1.5}
    assert list(phases) == [name for name, _ in cold_start.PHASES]


def test_what_an_engine_does_not_tell_counts_to_what_comes_after() -> None:
    phases = cold_start.split(cold_start.Marks(100.0, None, None, None, 190.0, 191.0))
    assert phases == {"engine_load": 90.0, "warm_up": 1.0}


def test_clocks_that_disagree_make_no_negative_time() -> None:
    phases = cold_start.split(cold_start.Marks(100.0, 99.9, 98.0, 150.0, 149.0, 151.0))
    assert min(phases.values()) == 0
    assert sum(phases.values()) == 51


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("2026-11-21T23:51:39.123456789Z", 1795305099.123456789),
        ("2026-11-22T00:51:39+01:00", 1795305099.0),
        ("0001-01-01T00:00:00Z", None),
        ("Error: No such object: gpt-oss-0", None),
    ],
)
def test_dockers_times(text: str, at: float | None) -> None:
    assert cold_start.container_time(text) == at


def test_the_read_aheads_last_line_is_read_as_the_program_writes_it() -> None:
    from ansible.module_utils.gpt_oss import read_ahead

    said = read_ahead.Outcome(
        total=60_000_000_000, read=50_000_000_000, cached=10**10, seconds=25.0, stopped="a reason"
    )
    found = cold_start.read_ahead_of([cold_start.Line(1.0, "reading 15 files"), cold_start.Line(2.0, said.line())])
    assert found == {
        "bytes": 50_000_000_000,
        "bytes_in_memory_before": 10_000_000_000,
        "seconds": 25.0,
        "bytes_per_second": 2_000_000_000,
        "stopped": "a reason",
    }
    skipped = cold_start.read_ahead_of([cold_start.Line(1.0, "skipped: the weights are too large")])
    assert skipped == {"bytes": 0, "skipped": "the weights are too large"}
    assert cold_start.read_ahead_of([]) is None


def document() -> dict[str, Any]:
    marks = {
        "0": cold_start.Marks(100.0, 102.5, 120.0, 150.0, 190.0, 191.5),
        "1": cold_start.Marks(100.0, 102.0, None, None, 180.0, 181.0),
    }
    drive = {"bytes_per_second": 3_000_000_000}
    ahead = {"bytes": 60_000_000_000, "seconds": 22.0, "bytes_per_second": 2_700_000_000}
    found: dict[str, Any] = cold_start.result({"host": "gpu-01"}, marks, 60_000_000_000, drive, ahead)
    return found


def test_the_slowest_process_is_the_hosts() -> None:
    found = document()
    assert found["seconds"] == 91.5
    assert found["processes"]["0"]["weights_bytes_per_second"] == 2_000_000_000
    assert found["processes"]["1"]["weights_bytes_per_second"] is None
    assert cold_start.line(found) == (
        "first token after 91.5 s: image 2.5 s, program 17.5 s, weights 30.0 s, engine load 40.0 s, warm up 1.5 s;"
        " read ahead at 2.70 GB/s of the drive's 3.00"
    )


def test_the_picture_is_drawn_by_an_interpreter_with_matplotlib_and_its_absence_is_said(tmp_path: Path) -> None:
    (tmp_path / "cold_start.json").write_text(json.dumps(document()))
    assert cold_start.draw_with(sys.executable, tmp_path) == ""
    assert (tmp_path / "cold_start.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "No such file" in cold_start.draw_with(str(tmp_path / "no-python"), tmp_path)


def test_fio_only_reads_and_is_bounded() -> None:
    files = [(f"/w/{number}", size) for number, size in enumerate([100, 10**9, 2 * 10**9])]
    words = cold_start.fio_command(files, 3 * 10**8, 7, direct=True)
    assert "--readonly" in words
    assert "--rw=read" in words
    assert "--runtime=7" in words
    sizes = [int(word.split("=")[1]) for word in words if word.startswith("--size=")]
    assert sizes == [10**8, 10**8, 100]


def test_fios_figures(tmp_path: Path) -> None:
    said = {"fio version": "fio-3.33", "jobs": [{"read": {"io_bytes": 3_000_000_000, "runtime": 1500}}]}
    found = cold_start.fio_result("note: something\n" + json.dumps(said), "direct")
    assert found["bytes_per_second"] == 2_000_000_000
    assert found["way"] == "direct"


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed here")
def test_the_real_fio_takes_the_command(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(8 << 20))
    found = cold_start.drive_speed([(str(file), 8 << 20)], 8 << 20, 5)
    assert found["bytes"] == 8 << 20, found


# -- a whole run -------------------------------------------------------------------------------------------------------

SYSTEMCTL = """#!{python}
# Stands for systemctl: starting the unit starts an engine that loads for a moment; stopping it ends it.
import os, signal, subprocess, sys, time
state = "{state}"
pid = os.path.join(state, "pid")
words = [word for word in sys.argv[1:] if not word.startswith("--")]
open(os.path.join(state, "calls"), "a").write(" ".join(sys.argv[1:]) + "\\n")
if words[0] == "show":
    print("ActiveState=active" if os.path.exists(pid) else "ActiveState=inactive")
    print("LoadState=not-found" if os.path.exists(os.path.join(state, "no read-ahead")) else "LoadState=loaded")
    journal = os.path.join(state, "journal")
    ended = os.path.exists(journal) and "OutOfMemoryError" in open(journal).read()
    print("NRestarts=" + ("1" if ended else "0"))
elif words[0] == "stop" and os.path.exists(os.path.join(state, "stuck")):
    sys.exit("a job timed out")
elif words[0] == "stop" and os.path.exists(pid):
    os.kill(int(open(pid).read()), signal.SIGKILL)
    os.unlink(pid)
elif words[0] == "start" and not os.path.exists(pid):
    nothing = open("/dev/null", "w")  # who waits for systemctl does not wait for what it started
    engine = subprocess.Popen([sys.executable, "{engine}"], start_new_session=True, stdout=nothing, stderr=nothing)
    open(pid, "w").write(str(engine.pid))
"""
ENGINE = """
import http.server, json, os, time
state, began = "{state}", time.time()
def say(text):
    row = {{"__REALTIME_TIMESTAMP": str(int(time.time() * 1e6)), "MESSAGE": text}}
    open(os.path.join(state, "journal"), "a").write(json.dumps(row) + "\\n")
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.time() - began > 0.9 else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        allowed = "Authorization" in self.headers or not {guarded}
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(b"data: {{}}\\n\\n")
    def log_message(self, *arguments):
        pass
if os.path.exists(os.path.join(state, "broken")):
    say("torch.OutOfMemoryError: CUDA out of memory.")
    time.sleep(60)
say("[TRT-LLM] [I] Use 63.32 GB for model weights.")
time.sleep(0.5)
say("Model init total -- 0.50s")
http.server.ThreadingHTTPServer(("127.0.0.1", {port}), Answer).serve_forever()
"""


class StandIn:
    """A host whose systemd, Docker and journal are small programs; the engine is a process that answers."""

    def __init__(self, directory: Path, guarded: bool = False) -> None:
        self.directory = directory
        self.state = directory / "state"
        self.tools = directory / "bin"
        for made in (self.state, self.tools, directory / "snapshot"):
            made.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = self.port = int(probe.getsockname()[1])
        engine = directory / "engine.py"
        engine.write_text(ENGINE.format(state=self.state, port=port, guarded=guarded))
        self.tool("systemctl", SYSTEMCTL.format(python=sys.executable, state=self.state, engine=engine))
        self.tool("journalctl", f'#!/bin/sh\ncase "$*" in *gpt-oss@0*) cat {self.state}/journal ;; esac\n')
        self.tool("docker", "#!/bin/sh\ndate --utc +%Y-%m-%dT%H:%M:%S.%NZ > $0.asked; echo 0001-01-01T00:00:00Z\n")
        (directory / "snapshot/model.safetensors").write_bytes(bytes(1 << 20))
        marker = directory / "marker.json"
        marker.write_text(json.dumps({"files": [{"path": "model.safetensors", "size": 1 << 20}]}))
        described = {
            "marker": str(marker),
            "snapshot": str(directory / "snapshot"),
            "unit": "gpt-oss@0.service",
            "container": "gpt-oss-0",
            "address": "127.0.0.1",
            "port": port,
            "health_path": "/health",
            "model": "m",
        }
        path = directory / "etc/processes/0/process.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(described))

    def tool(self, name: str, text: str) -> None:
        path = self.tools / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def systemctl(self, verb: str) -> None:
        os.spawnv(os.P_WAIT, str(self.tools / "systemctl"), ["systemctl", verb, "gpt-oss@0.service"])

    def answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    @property
    def calls(self) -> list[str]:
        return [call for call in (self.state / "calls").read_text().splitlines() if not call.startswith("show")]

    def measure(self, run_module: RunModule, *, check: bool = False, **more: Any) -> dict[str, Any]:
        (self.state / "calls").write_text("")
        parameters = {
            "configuration_directory": str(self.directory / "etc"),
            "directory": str(self.directory / "result"),
            "python": sys.executable,
            "fio_bytes": 0,
            "time_limit_seconds": 300,
            "confirmed": True,
            **more,
        }
        path = f"{self.tools}{os.pathsep}{os.environ['PATH']}"
        return run_module("cold_start", parameters, check=check, environment={"PATH": path})


def started(directory: Path, guarded: bool = False) -> StandIn:
    made = StandIn(directory, guarded)
    made.systemctl("start")
    until = time.monotonic() + 120
    while not made.answers():
        assert time.monotonic() < until, (made.state / "journal").read_text()
        time.sleep(0.05)
    return made


@pytest.fixture
def host(tmp_path: Path) -> Iterator[StandIn]:
    made = started(tmp_path)
    yield made
    made.systemctl("stop")


def test_a_start_is_followed_to_its_first_token(host: StandIn, run_module: RunModule) -> None:
    result = host.measure(run_module)
    assert result.get("failed") is not True, result
    assert host.calls == ["stop gpt-oss@0.service gpt-oss-read-ahead.service", "start --no-block gpt-oss@0.service"]
    found = result["result"]
    phases = found["processes"]["0"]["phases"]
    assert set(phases) == {"program", "weights", "engine_load", "warm_up"}, (
        "Docker did not say when the container began"
    )
    assert 0.4 < phases["weights"] < 60
    assert found["seconds"] == pytest.approx(sum(phases.values()), abs=0.01)
    assert found["weights_bytes"] == 1 << 20
    assert result["drawing"] == ""
    assert json.loads(base64.b64decode(result["files"]["cold_start.json"])) == found
    assert base64.b64decode(result["files"]["cold_start.png"]).startswith(b"\x89PNG")


def test_nothing_is_stopped_without_the_word(host: StandIn, run_module: RunModule) -> None:
    result = host.measure(run_module, confirmed=False)
    assert result["failed"]
    assert "benchmark_cold_start_restart: false, so nothing was stopped" in result["msg"]
    assert "say -e benchmark_cold_start_restart=true" in result["msg"]
    assert host.calls == []


def test_nothing_is_stopped_in_check_mode(host: StandIn, run_module: RunModule) -> None:
    assert host.measure(run_module, check=True)["skipped"]
    assert host.calls == []


def test_a_host_that_does_not_serve_is_left_alone(host: StandIn, run_module: RunModule) -> None:
    host.systemctl("stop")
    result = host.measure(run_module)
    assert "gpt-oss@0.service is inactive; run playbooks/serve.yml first" in result["msg"]
    assert host.calls == []


def test_a_guarded_endpoint_needs_its_token_before_anything_is_stopped(tmp_path: Path, run_module: RunModule) -> None:
    host = started(tmp_path, guarded=True)
    try:
        assert "set benchmark_api_key" in host.measure(run_module)["msg"]
        assert host.calls == []
        assert host.measure(run_module, api_key="a secret").get("failed") is not True
    finally:
        host.systemctl("stop")


def test_what_cannot_be_stopped_is_told_and_the_service_comes_back(host: StandIn, run_module: RunModule) -> None:
    (host.state / "stuck").touch()
    (host.state / "no read-ahead").touch()
    result = host.measure(run_module)
    (host.state / "stuck").unlink()
    assert "systemctl stop gpt-oss@0.service: a job timed out" in result["msg"]
    assert host.calls == ["stop gpt-oss@0.service", "start --no-block gpt-oss@0.service"]


def test_an_engine_that_does_not_come_up_is_told_with_its_likely_cause(host: StandIn, run_module: RunModule) -> None:
    (host.state / "broken").touch()
    result = host.measure(run_module)
    assert result["failed"]
    assert "memory ran out" in result["msg"]
    assert result["cause"] == "out_of_memory"


# -- through a play ----------------------------------------------------------------------------------------------------


def play(host: StandIn, task: dict[str, Any]) -> str:
    """Run one task on a host called gpu-01, with the stand-ins in front of the machine's own tools; what was said."""
    path = f"{host.tools}{os.pathsep}{os.environ['PATH']}"
    playbook = host.directory / "play.yml"
    playbook.write_text(
        yaml.safe_dump([{"hosts": "all", "gather_facts": False, "environment": {"PATH": path}, "tasks": [task]}])
    )
    (host.state / "calls").write_text("")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "gpu-01,", "-c", "local", str(playbook)],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", "COLUMNS": "500"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    return " ".join((done.stdout + done.stderr).split())


def test_json_and_picture_are_kept_beside_the_hosts_verdict(host: StandIn) -> None:
    said = play(
        host,
        {
            "cold_start": {
                "confirmed": True,
                "configuration_directory": str(host.directory / "etc"),
                "directory": str(host.directory / "result"),
                "python": sys.executable,
                "fio_bytes": 0,
                "verdict_directory": str(host.directory / "verdicts"),
            }
        },
    )
    assert "failed=0" in said, said
    assert "gpu-01: first token after " in said
    kept = host.directory / "verdicts"
    assert sorted(path.name for path in kept.iterdir()) == ["gpu-01.cold_start.json", "gpu-01.cold_start.png"]
    assert json.loads((kept / "gpu-01.cold_start.json").read_text())["about"]["host"] == "gpu-01"


def test_the_tag_alone_stops_nothing_and_installs_nothing(host: StandIn) -> None:
    request = ServeRequest(engine="tensorrt_llm", profile="low_latency", gpu="H200", gpu_count=4)
    plan = plan_host(request, load_catalog()).model_dump(mode="json")
    said = play(
        host,
        {
            "ansible.builtin.include_role": {"name": "benchmark", "tasks_from": "cold_start"},
            "vars": {
                "benchmark_plan": plan,
                "benchmark_configuration_directory": str(host.directory / "etc"),
                "benchmark_work_directory": str(host.directory / "work"),
            },
        },
    )
    assert "benchmark_cold_start_restart: false, so nothing was stopped" in said, said
    assert "changed=0" in said
    assert host.calls == []
