"""The program that systemd asks about an engine process: the check before a start, and the watchdog."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.programs import load

PROGRAM = Path(__file__).resolve().parents[2] / "roles/inference_server/files/process.py"
process = load("roles/inference_server/files/process.py")


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers as the test says: a status, or never."""

    answers: dict[str, Any] = {}  # noqa: RUF012

    def answer(self) -> None:
        wanted = self.answers.get(self.path, 404)
        if wanted == "never":
            time.sleep(3)
            return
        length = int(self.headers.get("Content-Length") or 0)
        self.answers["asked"] = json.loads(self.rfile.read(length)) if length else None
        self.send_response(wanted)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_POST = answer  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def engine() -> Iterator[dict[str, Any]]:
    """A description of an engine that listens; `answers` says what it answers."""
    Engine.answers = {"/health": 200, "/v1/completions": 200}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {
        "address": "127.0.0.1",
        "port": server.server_port,
        "health_path": "/health",
        "model": "openai/gpt-oss-120b",
        "container": "no-such-container",
        "unit": "gpt-oss@0.service",
        "watchdog": {"timeout_seconds": 60, "failures": 3},
    }
    server.shutdown()
    server.server_close()


def test_one_token_is_asked_of_the_model(engine: dict[str, Any]) -> None:
    assert process.one_token(engine) == ""
    assert Engine.answers["asked"] == {"model": "openai/gpt-oss-120b", "prompt": "1", "max_tokens": 1}


@pytest.mark.parametrize(
    ("status", "problem"),
    [(400, ""), (429, ""), (404, "HTTP 404"), (500, "HTTP 500"), (503, "HTTP 503"), ("never", "slow")],
)
def test_an_answer_is_a_sign_of_life_unless_the_server_fails_or_has_lost_its_model(
    engine: dict[str, Any], status: Any, problem: str
) -> None:
    Engine.answers["/v1/completions"] = status
    if status == "never":
        engine["watchdog"]["timeout_seconds"] = 0.3
    assert process.one_token(engine) == problem


def test_nobody_listening_is_a_problem_and_not_healthy(engine: dict[str, Any]) -> None:
    nobody = {**engine, "port": 1}
    assert "refused" in process.one_token(nobody)
    assert not process.healthy(nobody)
    assert process.healthy(engine)


def test_failures_in_a_row_are_counted_and_one_success_ends_the_row() -> None:
    state: dict[str, Any] = {}
    assert [process.judge(state, problem, 0) for problem in ("HTTP 503", "HTTP 503")] == ["failed", "failed"]
    assert state["failures"] == 2
    assert process.judge(state, "", 0) == "well"
    assert state["failures"] == 0


def test_a_slow_server_that_sends_to_others_is_busy_and_one_that_sends_nothing_has_failed() -> None:
    state: dict[str, Any] = {"sent": 1000, "failures": 2}
    assert process.judge(state, "slow", 1000 + 10 * process.OWN_TRAFFIC_BYTES) == "busy"
    assert state["failures"] == 0
    assert process.judge(state, "slow", state["sent"] + 200) == "failed"
    assert state["failures"] == 1


def test_traffic_does_not_excuse_errors() -> None:
    state: dict[str, Any] = {"sent": 0}
    assert process.judge(state, "HTTP 503", 10 * process.OWN_TRAFFIC_BYTES) == "failed"


class Systemd:
    """Stands for systemctl and docker: what the watchdog asks of them, and what it does."""

    def __init__(self) -> None:
        self.restarts = 0
        self.active = "active"
        self.invocation = "a"

    def output(self, *command: str) -> tuple[int, str]:
        if command[:2] == ("systemctl", "show"):
            return 0, f"ActiveState={self.active}\nInvocationID={self.invocation}"
        if command[:2] == ("systemctl", "restart"):
            self.restarts += 1
            self.invocation += "a"
            return 0, ""
        return 1, "no such container"


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Systemd:
    stand_in = Systemd()
    monkeypatch.setattr(process, "output", stand_in.output)
    monkeypatch.setattr(process, "STATE", tmp_path)
    return stand_in


def watch(engine: dict[str, Any], times: int) -> None:
    for _ in range(times):
        process.watch("0", engine)


def test_a_server_that_stops_making_tokens_is_restarted_once_after_three_failures(
    engine: dict[str, Any], systemd: Systemd
) -> None:
    watch(engine, 2)  # ready, and well
    Engine.answers["/v1/completions"] = 503
    watch(engine, 2)
    assert systemd.restarts == 0
    watch(engine, 1)
    assert systemd.restarts == 1


def test_a_server_that_is_loading_is_never_restarted(engine: dict[str, Any], systemd: Systemd) -> None:
    loading = {**engine, "port": 1}
    watch(loading, 20)
    assert systemd.restarts == 0


def test_after_a_restart_the_server_may_load_again(engine: dict[str, Any], systemd: Systemd) -> None:
    watch(engine, 1)
    Engine.answers["/v1/completions"] = 503
    watch(engine, 3)
    assert systemd.restarts == 1
    Engine.answers["/health"] = 503
    watch(engine, 20)
    assert systemd.restarts == 1


def test_a_unit_that_was_stopped_is_left_alone(engine: dict[str, Any], systemd: Systemd) -> None:
    watch(engine, 1)
    Engine.answers["/v1/completions"] = 503
    systemd.active = "inactive"
    watch(engine, 10)
    assert systemd.restarts == 0


# -- before a start ----------------------------------------------------------------------------------------------


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, Any]:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").write_bytes(b"12345678")
    marker = tmp_path / "marker.json"
    time_ns = (snapshot / "model.safetensors").stat().st_mtime_ns
    marker.write_text(json.dumps({"files": [{"path": "model.safetensors", "size": 8, "mtime_ns": time_ns}]}))
    return {"marker": str(marker), "snapshot": str(snapshot)}


def test_verified_weights_are_no_problem(weights: dict[str, Any]) -> None:
    assert process.weights_problem(weights) == ""


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("marker", "is not there"),
        ("file", "weights are missing"),
        ("size", "cut: 3 bytes, 8 were verified"),
        ("content", "have changed since they were verified"),
    ],
)
def test_weights_that_are_not_there_are_named_with_the_remedy(weights: dict[str, Any], harm: str, says: str) -> None:
    file = Path(weights["snapshot"]) / "model.safetensors"
    if harm == "marker":
        Path(weights["marker"]).unlink()
    elif harm == "file":
        file.unlink()
    else:
        file.write_bytes(b"123" if harm == "size" else b"87654321")
    assert says in process.weights_problem(weights)
    assert process.weights_problem(weights).endswith("Run playbooks/weights.yml")


def test_a_start_makes_the_planned_revision_the_one_that_the_name_leads_to(tmp_path: Path) -> None:
    """Another revision that was brought ahead is not loaded by a restart of the server that runs."""
    planned = {"snapshot": str(tmp_path / "models--openai--gpt-oss-120b" / "snapshots" / ("a" * 40))}
    Path(planned["snapshot"]).mkdir(parents=True)
    current = tmp_path / "models--openai--gpt-oss-120b" / "refs" / "main"
    for before in (None, "b" * 40, "a" * 40):
        if before is not None:
            current.write_text(before)
        assert process.revision_problem(planned) == ""
        assert current.read_text() == "a" * 40
    assert [path.name for path in current.parent.iterdir()] == ["main"]
    current.unlink()
    current.mkdir()
    assert "refs/main must name aaa" in process.revision_problem(planned)


def test_gpus_are_looked_up_where_cdi_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = "nvidia.com/gpu=0\nnvidia.com/gpu=10\nnvidia.com/gpu=all\n"
    monkeypatch.setattr(process, "output", lambda *command: (0, listed))
    assert process.gpus_problem({"gpu_access": "cdi", "gpus": [0, 10]}) == ""
    assert process.gpus_problem({"gpu_access": "cdi", "gpus": [0, 1]}).startswith("no CDI specification of GPU 1: try")
    assert process.gpus_problem({"gpu_access": "gpus", "gpus": [7]}) == ""
