"""The probe of role endpoint_check: against stand-in engines, and scripted answers for what those cannot say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from plugins.module_utils.gpt_oss import probe_endpoint
from plugins.module_utils.gpt_oss.probe_endpoint import Endpoint, Wait, run_probes
from serving_catalog.checks import Check
from tests.ports import free_port
from tests.simulator.conftest import MODEL, Server, Start
from tests.simulator.test_lifecycle import TRTLLM, VLLM

SCRIPT = Path(probe_endpoint.__file__)
FIRST_FOUR = ["health", "model", "completion", "stream"]


def probe(url: str, *words: str, **variables: str) -> tuple[int, dict[str, Any], str]:
    """The script as a person or a job runs it: status, verdict, progress."""
    command = [sys.executable, str(SCRIPT), "--url", url, "--model", MODEL, *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, timeout=300)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def by_probe(verdict: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["id"].rsplit(".", 1)[1]: check for check in verdict["checks"]}


# --- Against engines ---


@pytest.mark.parametrize("engine", ["tensorrt_llm", "vllm"])
def test_a_good_server_passes(engine: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(engine)
    status, verdict, _ = probe(server.url)
    assert (status, verdict["ok"]) == (0, True)
    assert [check["id"] for check in verdict["checks"]] == [f"endpoint.0.{name}" for name in FIRST_FOUR]
    for check in verdict["checks"]:
        Check.model_validate(check)  # the shape that verdicts have


def test_a_mocked_model_neither_thinks_nor_calls(tensorrt_llm: Server) -> None:
    status, verdict, _ = probe(tensorrt_llm.url, "--probes", "health,reasoning,tool_call")
    checks = by_probe(verdict)
    assert (status, checks["reasoning"]["ok"], checks["tool_call"]["ok"]) == (1, False, False)
    assert checks["reasoning"]["seen"].startswith("no reasoning; content ")
    assert checks["tool_call"]["seen"].startswith("no tool call (finish_reason length)")
    for check in verdict["checks"]:
        Check.model_validate(check)


def test_it_waits_and_tells_how_long(start: Start) -> None:
    server = start(*TRTLLM, SIMULATOR_LOAD_SECONDS="4")
    status, verdict, progress = probe(server.url, "--wait", "240", "--progress", "1")
    assert (status, verdict["ok"]) == (0, True)
    assert "of 240 s: connection refused" in progress
    assert "status 200 after" in by_probe(verdict)["health"]["seen"]


def test_a_load_that_hangs_is_given_up(start: Start) -> None:
    server = start(*TRTLLM, SIMULATOR_FAIL="hang")
    status, verdict, _ = probe(server.url, "--wait", "3")
    checks = by_probe(verdict)
    assert (status, checks["health"]["ok"], checks["model"]["ok"]) == (1, False, None)
    assert re.fullmatch(r"connection refused after \d+ s", checks["health"]["seen"])
    assert "slow-or-stuck-load.md" in checks["health"]["remedy"]


def test_503_for_ever_is_not_waited_for_as_long_as_a_load(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(*TRTLLM, SIMULATOR_FAIL="rank_crash", SIMULATOR_FAIL_AFTER_SECONDS="0.5")
    server.until_logged("The engine is dead")
    monkeypatch.setattr(probe_endpoint, "UNHEALTHY_SECONDS", 2.0)
    wait = Wait(Endpoint("0", server.url, MODEL, ready_within_seconds=2400))
    state: dict[str, Any] = {}
    for _ in range(8):  # as over several calls
        wait = Wait(wait.endpoint, state)
        found = wait.look()
        threading.Event().wait(0.5)
        again = wait.look()
        state = wait.state()
        if found or again:
            break
    result = found or again
    assert result is not None
    assert result["seen"].startswith("status 503 for ")
    assert "503-for-ever.md" in result["remedy"]
    assert wait.elapsed < 30


def test_another_model(start: Start) -> None:
    server = start("vllm-0.31.0", "vllm", "serve", "openai/gpt-oss-20b", "--host", "127.0.0.1").ready()
    status, verdict, _ = probe(server.url)
    checks = by_probe(verdict)
    assert status == 1
    assert checks["model"]["seen"] == "openai/gpt-oss-20b"
    assert checks["model"]["expected"] == "openai/gpt-oss-120b in /v1/models"
    assert "status 404" in checks["completion"]["seen"]


def test_no_streaming(start: Start) -> None:
    server = start(*VLLM, SIMULATOR_FAIL="no_stream").ready()
    checks = by_probe(probe(server.url)[1])
    assert (checks["completion"]["ok"], checks["stream"]["ok"]) == (True, False)
    assert checks["stream"]["seen"] == "the whole answer at once, as application/json"


def test_no_vocabularies(start: Start) -> None:
    server = start(*TRTLLM, TIKTOKEN_ENCODINGS_BASE=None).ready()
    checks = by_probe(probe(server.url)[1])
    assert "status 400: " in checks["completion"]["seen"]
    assert checks["completion"]["remedy"].startswith("Harmony's vocabularies are missing: run playbooks/weights.yml")


def test_a_worker_that_nobody_misses(start: Start) -> None:
    server = start(*TRTLLM, SIMULATOR_FAIL="worker_lost")
    server.until_logged("A worker was lost")
    checks = by_probe(probe(server.url, "--answer-timeout", "2")[1])
    assert (checks["health"]["ok"], checks["completion"]["ok"]) == (True, False)
    assert checks["completion"]["seen"] == "POST /v1/chat/completions: no answer within 2 s"


def test_an_api_key(start: Start) -> None:
    server = start(*VLLM, VLLM_API_KEY="s3cret").ready()
    checks = by_probe(probe(server.url)[1])
    assert "endpoint_check_api_key" in checks["model"]["remedy"]
    assert probe(server.url, OPENAI_API_KEY="s3cret")[0] == 0


def test_an_unknown_probe_is_refused() -> None:
    status, verdict, said = probe("http://127.0.0.1:1", "--probes", "health,thinking")
    assert (status, verdict) == (2, {})
    assert "thinking is not a probe; allowed: health, model, completion, stream, reasoning, tool_call" in said


def test_a_port_with_something_else(tmp_path: Path) -> None:
    with scripted({"GET /health": (404, "not here")}) as endpoint:
        wait = Wait(endpoint._replace(ready_within_seconds=0))
        found = wait.look()
    assert found is not None
    assert found["seen"].startswith("status 404")
    assert "port-in-use.md" in found["remedy"]


# --- Against scripted answers, in the form of the engines' own ---

Answer = tuple[int, Any] | Callable[[dict[str, Any]], tuple[int, Any]]


class scripted:  # noqa: N801 - used as a function
    """A server with the given answers, by method and path."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer("GET")

            def do_POST(self) -> None:
                self._answer("POST")

            def _answer(self, method: str) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                found: Answer = answers.get(f"{method} {self.path}", (404, "nothing"))
                status, content = found(json.loads(body)) if callable(found) else found
                stream = isinstance(content, list)
                data = "".join(content) if stream else content if isinstance(content, str) else json.dumps(content)
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
                self.send_header("Content-Length", str(len(data.encode())))
                self.end_headers()
                self.wfile.write(data.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> Endpoint:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return Endpoint("0", f"http://127.0.0.1:{self.server.server_port}", MODEL, answer_seconds=5)

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


CHAT = "POST /v1/chat/completions"


def message(content: str | None, finish: str = "stop", **more: Any) -> tuple[int, Any]:
    """As TensorRT-LLM answers."""
    entry = {"role": "assistant", "content": content, "reasoning_content": None, "tool_calls": [], **more}
    choice = {"index": 0, "message": entry, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    usage = {"prompt_tokens": 17, "total_tokens": 41, "completion_tokens": 24}
    return 200, {"object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage}


def call(name: str = "get_temperature", arguments: str = '{"city": "Paris"}') -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


def one(endpoint: Endpoint, name: str) -> dict[str, Any]:
    (check,) = run_probes(endpoint, [name])
    Check.model_validate(check)
    return check


@pytest.mark.parametrize(
    ("answer", "ok", "seen"),
    [
        (message("391", reasoning_content="17 x 20 + 17 x 3"), True, "391, after 16 characters of reasoning"),
        (message("391", reasoning="17 x 23"), True, "391, after 7 characters of reasoning"),  # newer vLLM
        (message("391"), False, "no reasoning; content '391'"),
        (message("390", reasoning_content="so"), False, "content '390' (finish_reason stop)"),
        (message(None, "length", reasoning_content="so"), False, "content '' (finish_reason length)"),
        (
            message("<|channel|>analysis<|message|>17 times 23<|end|>391"),
            False,
            "raw Harmony token <|channel|> in the answer",
        ),
        ((200, {"choices": []}), False, "an answer without a message"),
        ((200, {"choices": [{"message": None}]}), False, "an answer without a message"),
        ((200, "<html>"), False, "POST /v1/chat/completions: not a JSON object: <html>"),
        ((500, {"error": "HarmonyError"}), False, "POST /v1/chat/completions: status 500"),
    ],
)
def test_reasoning(answer: tuple[int, Any], ok: bool, seen: str) -> None:
    with scripted({CHAT: answer}) as endpoint:
        check = one(endpoint, "reasoning")
    assert (check["ok"], check["seen"].startswith(seen)) == (ok, True), check["seen"]


def two_steps(first: tuple[int, Any], second: tuple[int, Any], asked: list[dict[str, Any]]) -> Answer:
    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body)
        return first if len(asked) == 1 else second

    return answer


@pytest.mark.parametrize(
    ("first", "second", "ok", "seen"),
    [
        (
            message(None, "tool_calls", tool_calls=[call()]),
            message("It is 17 °C."),
            True,
            "get_temperature(Paris), then: It is 17 °C.",
        ),
        (message("I cannot know."), message(""), False, "no tool call (finish_reason stop): I cannot know."),
        (
            message(None, "tool_calls", tool_calls=[call(arguments='{"city": ')]),
            message(""),
            False,
            'a call of get_temperature with {"city":',
        ),
        (message(None, "tool_calls", tool_calls=[call("search")]), message(""), False, "a call of search with"),
        (
            message(None, "tool_calls", tool_calls=[call()]),
            message("I will look it up."),
            False,
            "after the call: 'I will look it up.'",
        ),
        (message(None, "tool_calls", tool_calls=[call()]), (500, "{}"), False, "POST /v1/chat/completions: status 500"),
    ],
)
def test_tool_call(first: tuple[int, Any], second: tuple[int, Any], ok: bool, seen: str) -> None:
    asked: list[dict[str, Any]] = []
    with scripted({CHAT: two_steps(first, second, asked)}) as endpoint:
        check = one(endpoint, "tool_call")
    assert (check["ok"], check["seen"].startswith(seen)) == (ok, True), check["seen"]
    assert asked[0]["tool_choice"] == "auto"
    if ok:
        roles = [entry["role"] for entry in asked[1]["messages"]]
        assert roles == ["user", "assistant", "tool"]
        assert asked[1]["messages"][2]["tool_call_id"] == "call_1"


def event(text: str = "", finish: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": finish}]}) + "\n\n"


@pytest.mark.parametrize(
    ("events", "ok", "seen"),
    [
        ([event("1 "), event("2"), event(finish="stop"), "data: [DONE]\n\n"], True, "2 events, the first after"),
        ([event("1 2"), event(finish="stop"), "data: [DONE]\n\n"], False, "1 event(s) with text, finish_reason stop"),
        ([event("1 "), event("2")], False, "2 events, then the end without [DONE]"),
        ([event("1 "), 'data: {"error": {"message": "dead"}}\n\n'], False, "an error in the stream"),
        (["data: oops\n\n"], False, "an event that is not JSON"),
    ],
)
def test_stream(events: list[str], ok: bool, seen: str) -> None:
    with scripted({CHAT: (200, events)}) as endpoint:
        check = one(endpoint, "stream")
    assert (check["ok"], check["seen"].startswith(seen)) == (ok, True), check["seen"]


def test_an_empty_completion() -> None:
    with scripted({CHAT: message("")}) as endpoint:
        check = one(endpoint, "completion")
    assert check["ok"] is False
    assert check["seen"] == "no text (finish_reason stop, 24 tokens)"


def test_reasoning_alone_is_text_for_a_short_completion() -> None:
    with scripted({CHAT: message(None, "length", reasoning_content="The user says")}) as endpoint:
        assert one(endpoint, "completion")["ok"] is True


# --- The role, with units that end ---


class Played(NamedTuple):
    """How a play ended, and the checks in the fact that it set."""

    returncode: int
    stdout: str
    checks: list[dict[str, Any]]

    @property
    def said(self) -> dict[str, bool | None]:
        return {check["id"]: check["ok"] for check in self.checks}


@pytest.fixture
def host_tools(tmp_path: Path) -> Path:
    """systemctl and journalctl that say what a test has written down."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("systemctl", "journalctl"):
        (tools / name).write_text(f"#!/bin/sh\ncat '{tmp_path}/{name}.txt'\n")
        (tools / name).chmod(0o755)
    return tmp_path


def play(
    tmp_path: Path, ports: list[int], *words: str, then: tuple[str, Callable[[], object]] | None = None, **inputs: Any
) -> Played:
    """Run the role on this machine; `then`: what to do once its output says something."""
    processes = [
        {"name": str(n), "port": port, "served_model_id": MODEL, "health_path": "/health", "ready_within_seconds": 600}
        for n, port in enumerate(ports)
    ]
    variables = {
        "endpoint_check_plan": {"processes": processes},
        "endpoint_check_probes": FIRST_FOUR,
        "endpoint_check_progress_seconds": 1,
        **inputs,
    }
    play = [
        {
            "hosts": "localhost",
            "connection": "local",
            "gather_facts": False,
            "vars": {"ansible_python_interpreter": sys.executable},
            "roles": [{"role": "endpoint_check", "vars": variables}],
            "post_tasks": [
                {
                    "ansible.builtin.copy": {
                        "content": "{{ ansible_facts['endpoint_check'] | to_json }}",
                        "dest": f"{tmp_path}/fact.json",
                        "mode": "0644",
                    },
                    "check_mode": False,
                    "changed_when": False,
                }
            ],
        }
    ]
    (tmp_path / "play.yml").write_text(json.dumps(play))
    repository = SCRIPT.parents[3]
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(repository / "ansible.cfg"),
        "PATH": f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = ["ansible-playbook", "-i", "localhost,", str(tmp_path / "play.yml"), *words]
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=repository) as process:
        assert process.stdout is not None
        too_long = threading.Timer(300, process.kill)
        too_long.start()
        for line in process.stdout:
            said.append(line)
            if then is not None and then[0] in line:
                then[1]()
                then = None
        too_long.cancel()
    fact = tmp_path / "fact.json"
    return Played(process.returncode, "".join(said), json.loads(fact.read_text())["checks"] if fact.exists() else [])


UNIT = (
    "Id=gpt-oss@0.service\nLoadState=loaded\nActiveState={}\nSubState={}\nNRestarts={}\nResult={}\nExecMainStatus={}\n"
)


def test_the_role_shows_progress_and_sets_a_fact(host_tools: Path, start: Start) -> None:
    (host_tools / "systemctl.txt").write_text(UNIT.format("active", "running", 0, "success", 0))
    (host_tools / "journalctl.txt").write_text("Loading safetensors checkpoint shards: 2/15\n")
    port, progress = free_port(), "of 600 s: Loading safetensors checkpoint shards: 2/15"
    done = play(host_tools, [port], then=(progress, lambda: start(*TRTLLM, port=port)))
    assert done.returncode == 0, done.stdout
    assert progress in done.stdout
    assert "changed=0" in done.stdout
    assert done.said["endpoint.0.stream"] is True


def test_the_role_asks_all_replicas(host_tools: Path, tensorrt_llm: Server, vllm: Server) -> None:
    (host_tools / "systemctl.txt").write_text("")
    (host_tools / "journalctl.txt").write_text("")
    done = play(host_tools, [tensorrt_llm.port, vllm.port])
    assert done.returncode == 0, done.stdout
    assert done.said == {f"endpoint.{n}.{name}": True for n in (0, 1) for name in FIRST_FOUR}


@pytest.mark.parametrize(
    ("shown", "how"),
    [
        (
            ("activating", "auto-restart", 1, "exit-code", 1),
            "ended 1 time(s) before it was ready (exit-code, status 1)",
        ),
        (("failed", "failed", 0, "exit-code", 1), "ended before it was ready (exit-code, status 1)"),
        (("active", "running", 2, "exit-code", 137), "ended 2 time(s) before it was ready (exit-code, status 137)"),
        (("inactive", "dead", 0, "success", 0), "ended before it was ready (success, status 0)"),
    ],
)
def test_a_unit_that_ends_while_it_loads_is_a_finding_at_once(
    shown: tuple[object, ...], how: str, host_tools: Path
) -> None:
    (host_tools / "systemctl.txt").write_text(UNIT.format(*shown))
    (host_tools / "journalctl.txt").write_text("Loading 15/15\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    done = play(host_tools, [free_port()], endpoint_check_load_timeout_seconds=600)
    assert done.returncode == 2
    text = " ".join(done.stdout.split())
    assert f"gpt-oss@0.service {how}" in text
    assert "memory ran out, on a GPU or on the host" in text
    assert "torch.OutOfMemoryError: CUDA out of memory." in text


def test_a_unit_that_does_not_exist_is_a_finding_at_once(host_tools: Path) -> None:
    (host_tools / "systemctl.txt").write_text("Id=gpt-oss@0.service\nLoadState=not-found\nActiveState=inactive\n")
    (host_tools / "journalctl.txt").write_text("")
    done = play(host_tools, [free_port()])
    assert done.returncode == 2
    assert "gpt-oss@0.service there is no such unit" in " ".join(done.stdout.split())


def test_findings_can_be_left_to_a_verdict(host_tools: Path) -> None:
    (host_tools / "systemctl.txt").write_text(UNIT.format("failed", "failed", 0, "exit-code", 1))
    (host_tools / "journalctl.txt").write_text("")
    done = play(host_tools, [free_port()], endpoint_check_fail=False)
    assert done.returncode == 0, done.stdout
    assert done.said == {"endpoint.0.health": False, **{f"endpoint.0.{name}": None for name in FIRST_FOUR[1:]}}


def test_check_mode_does_not_wait(host_tools: Path) -> None:
    (host_tools / "systemctl.txt").write_text("Id=gpt-oss@0.service\nLoadState=not-found\nActiveState=inactive\n")
    (host_tools / "journalctl.txt").write_text("")
    done = play(host_tools, [free_port()], "--check")
    assert done.returncode == 0, done.stdout
    assert done.said["endpoint.0.health"] is None


def test_from_the_controller_no_unit_is_looked_at(host_tools: Path, tensorrt_llm: Server) -> None:
    (host_tools / "systemctl.txt").write_text(UNIT.format("failed", "failed", 0, "exit-code", 1))
    (host_tools / "journalctl.txt").write_text("")
    done = play(host_tools, [tensorrt_llm.port], endpoint_check_from="controller")
    assert done.returncode == 0, done.stdout


def test_a_wrong_probe_is_refused_before_anything_is_asked(host_tools: Path) -> None:
    done = play(host_tools, [free_port()], endpoint_check_probes=["health", "think"])
    assert done.returncode == 2
    assert "think" in done.stdout
    assert "tool_call" in done.stdout
