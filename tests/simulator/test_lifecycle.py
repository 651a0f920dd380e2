"""Engines from their start to their end: what they check, how they serve, how they fail, how they leave."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.conftest import MODEL, Server, Start
from tests.stand_ins.hub import content

TRTLLM = ("tensorrt_llm-1.2.1", "trtllm-serve", MODEL, "--host", "127.0.0.1")
VLLM = ("vllm-0.31.0", "vllm", "serve", MODEL, "--host", "127.0.0.1")


def ask(url: str, body: Any = None, timeout: float = 30, **headers: str) -> tuple[int, str]:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def chat(text: str = "hello", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **more}


# --- Serving ---


@pytest.mark.parametrize("engine", ["tensorrt_llm", "vllm"])
def test_it_serves_through_dynamo(engine: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(engine)
    assert ask(f"{server.url}/health") == (200, "")
    models = json.loads(ask(f"{server.url}/v1/models")[1])
    assert [entry["id"] for entry in models["data"]] == [MODEL]
    status, text = ask(f"{server.url}/v1/chat/completions", chat())
    answer = json.loads(text)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 8
    assert len(answer["choices"][0]["message"]["content"].split()) == 8
    status, text = ask(f"{server.url}/v1/completions", {"model": MODEL, "prompt": "hello", "max_tokens": 4})
    assert len(json.loads(text)["choices"][0]["text"].split()) == 4


def test_it_streams(tensorrt_llm: Server) -> None:
    status, text = ask(f"{tensorrt_llm.url}/v1/chat/completions", chat(stream=True))
    events = [line for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200
    assert events[-1] == "data: [DONE]"
    assert len(events) > 8


def test_the_endpoints_are_the_engines(tensorrt_llm: Server, vllm: Server) -> None:
    assert json.loads(ask(f"{tensorrt_llm.url}/version")[1]) == {"version": "1.2.1"}
    assert json.loads(ask(f"{vllm.url}/version")[1]) == {"version": "0.31.0"}
    assert ask(f"{tensorrt_llm.url}/health_generate")[0] == 200
    assert ask(f"{vllm.url}/health_generate")[0] == 404
    assert ask(f"{vllm.url}/ping")[0] == 200
    assert "vllm:num_requests_running" in ask(f"{vllm.url}/metrics")[1]
    assert ask(f"{tensorrt_llm.url}/metrics") == (200, "[]")  # statistics were not asked for
    assert ask(f"{tensorrt_llm.url}/prometheus/metrics")[0] == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [(chat(model="other/model"), 404), ("hello", 400), (chat(max_tokens=-1), 400), (chat(messages=3), 400)],
)
def test_a_bad_request_is_refused(body: Any, status: int, vllm: Server) -> None:
    found, text = ask(f"{vllm.url}/v1/chat/completions", body)
    assert (found, json.loads(text)["error"]["code"]) == (status, status)


def test_an_api_key_is_asked_for(start: Start) -> None:
    server = start(*VLLM, VLLM_API_KEY="secret").ready()
    assert ask(f"{server.url}/v1/models")[0] == 401
    assert ask(f"{server.url}/v1/models", Authorization="Bearer secret")[0] == 200
    assert "secret" not in server.log


def test_statistics_are_read_once(start: Start, tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text("enable_iter_perf_stats: true\nreturn_perf_metrics: true\n")
    server = start(*TRTLLM, "--config", str(tmp_path / "options.yaml")).ready()
    ask(f"{server.url}/v1/chat/completions", chat())
    assert len(json.loads(ask(f"{server.url}/metrics")[1])) == 1
    assert ask(f"{server.url}/metrics")[1] == "[]"
    assert "dynamo_" in ask(f"{server.url}/prometheus/metrics")[1]


# --- Loading ---


def test_connections_are_refused_while_it_loads(start: Start) -> None:
    server = start(*TRTLLM, SIMULATOR_LOAD_SECONDS="30")
    server.until_logged("weights")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
    # The port is taken all the same.
    second = start(*TRTLLM, port=server.port)
    assert second.wait() == 1
    assert f"Failed to bind socket to 127.0.0.1:{server.port}" in second.log
    server.terminate()
    assert server.wait() == -signal.SIGTERM


def test_a_taken_port_ends_vllm_at_once(start: Start, vllm: Server) -> None:
    second = start(*VLLM, port=vllm.port)
    assert second.wait() == 1
    assert "Address already in use" in second.log


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        ((*TRTLLM, "--tp_size", "8"), {}, "RuntimeError: Only 4 GPUs are available, but 8 are required."),
        (TRTLLM, {"NVIDIA_VISIBLE_DEVICES": "none"}, "ValueError: No GPU devices found on the node"),
        ((*VLLM, "-tp", "8"), {}, "World size (8) is larger than the number of available GPUs (4)"),
        (TRTLLM, {"HF_HUB_CACHE": "/nonexistent"}, "LocalEntryNotFoundError"),
        (VLLM, {"HF_HUB_CACHE": "/nonexistent"}, "LocalEntryNotFoundError"),
        (VLLM, {"TIKTOKEN_ENCODINGS_BASE": None}, "HarmonyError: error downloading or loading vocab file"),
        (TRTLLM, {"SIMULATOR_FAIL": "out_of_memory"}, "OutOfMemoryError: CUDA out of memory"),
        (VLLM, {"SIMULATOR_FAIL": "out_of_memory"}, "Engine core initialization failed"),
        (TRTLLM, {"SIMULATOR_FAIL": "crash"}, "RuntimeError: Executor worker returned error"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_it_ends_with_status_1(start: Start, words: tuple[str, ...], variables: dict[str, str], said: str) -> None:
    server = start(*words, **variables)
    assert server.wait() == 1
    assert said in server.log


def test_a_model_directory_that_is_not_there(start: Start) -> None:
    server = start("tensorrt_llm-1.2.1", "trtllm-serve", "/models/absent")
    assert server.wait() == 1
    assert "Failed to find model directory /models/absent" in server.log


@pytest.mark.parametrize("damage", ["absent", "cut", "no configuration"])
def test_an_incomplete_snapshot_is_not_served(damage: str, start: Start, tmp_path: Path) -> None:
    snapshot = content.write_cache(tmp_path / "hub", MODEL)
    shard = sorted(snapshot.glob("*.safetensors"))[-1]
    if damage == "absent":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        (snapshot / "config.json").unlink()
    server = start(*TRTLLM, HF_HUB_CACHE=str(tmp_path / "hub"))
    assert server.wait() == 1
    said = {"absent": "No such file", "cut": "file not fully covered", "no configuration": "no file named config.json"}
    assert said[damage] in server.log


def test_a_simulator_variable_that_does_not_exist_is_refused(start: Start) -> None:
    server = start(*TRTLLM, SIMULATOR_LOAD_SECOND="3")
    assert server.wait() == 2
    assert "SIMULATOR_LOAD_SECOND: no such variable; allowed: SIMULATOR_FAIL" in server.log


def test_killed_by_the_kernel_while_loading(start: Start) -> None:
    assert start(*TRTLLM, SIMULATOR_FAIL="killed").wait() == -signal.SIGKILL


def test_chat_without_vocabularies(start: Start) -> None:
    server = start(*TRTLLM, TIKTOKEN_ENCODINGS_BASE=None).ready()
    status, text = ask(f"{server.url}/v1/chat/completions", chat())
    assert (status, json.loads(text)["message"]) == (
        400,
        "error downloading or loading vocab file: failed to download or load vocab file",
    )
    assert ask(f"{server.url}/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 1})[0] == 200


# --- Faults while serving ---


def test_a_dead_rank_leaves_tensorrt_llm_answering_503_for_ever(start: Start) -> None:
    server = start(*TRTLLM, SIMULATOR_FAIL="rank_crash", SIMULATOR_FAIL_AFTER_SECONDS="0.5")
    server.until_logged("The engine is dead")
    assert ask(f"{server.url}/health")[0] == 503
    assert ask(f"{server.url}/v1/chat/completions", chat())[0] == 503
    assert ask(f"{server.url}/health_generate")[0] == 500
    assert server.process.poll() is None


def test_a_dead_worker_ends_vllm_with_status_0(start: Start) -> None:
    server = start(*VLLM, SIMULATOR_FAIL="rank_crash", SIMULATOR_FAIL_AFTER_SECONDS="0.5")
    assert server.wait() == 0
    assert "The engine is dead" in server.log


def test_a_lost_worker_is_not_noticed(start: Start) -> None:
    server = start(*TRTLLM, SIMULATOR_FAIL="worker_lost")
    server.until_logged("A worker was lost")
    with pytest.raises(TimeoutError):
        ask(f"{server.url}/v1/chat/completions", chat(), timeout=2)
    assert ask(f"{server.url}/health")[0] == 200


def test_a_mocker_that_was_starved_until_dynamo_forgot_it_is_a_dead_engine(start: Start) -> None:
    """No engine forgets its own model: what Dynamo says then is not passed on, and the server does not stay so."""
    server = start(*VLLM).ready()
    threads = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    children = " ".join(path.read_text() for path in threads).split()
    [mocker] = [pid for pid in children if "dynamo.mocker" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(int(mocker), signal.SIGSTOP)
    deadline = time.monotonic() + 180
    seen = set()
    while server.process.poll() is None:
        assert time.monotonic() < deadline, server.log
        with contextlib.suppress(OSError, http.client.HTTPException):  # Dynamo still waits for it; the engine is gone
            seen.add(ask(f"{server.url}/v1/chat/completions", chat(), timeout=2)[0])
    assert seen <= {500, 503}, "nobody is told that the model does not exist"
    assert server.process.returncode == 0
    assert "Dynamo no longer knows its mocker" in server.log
    assert "The engine is dead" in server.log


# --- The end ---


def long_request(server: Server, tokens: int) -> tuple[threading.Thread, list[Any]]:
    """A request that is being answered when this returns."""
    result: list[Any] = []
    begun = threading.Event()

    def send() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        body = json.dumps(chat(max_tokens=tokens, stream=True))
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        try:
            response = connection.getresponse()
            first = response.readline()
            begun.set()
            result.append((first + response.read()).decode())
        except (OSError, http.client.HTTPException) as error:
            result.append(error)
            begun.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert begun.wait(120)
    return thread, result


def test_tensorrt_llm_finishes_its_requests_and_ends_by_the_signal(start: Start) -> None:
    server = start(*TRTLLM, SIMULATOR_SPEEDUP="1").ready()
    thread, result = long_request(server, 300)
    server.terminate()
    assert server.wait() == -signal.SIGTERM
    thread.join(120)
    assert result[0].rstrip().endswith("data: [DONE]")
    assert "request(s) in flight" in server.log


@pytest.mark.parametrize(("words", "whole"), [((), False), (("--shutdown-timeout", "60"), True)])
def test_vllm_waits_for_requests_only_where_it_is_told_to(start: Start, words: tuple[str, ...], whole: bool) -> None:
    server = start(*VLLM, *words, SIMULATOR_SPEEDUP="1").ready()
    thread, result = long_request(server, 300)
    server.terminate()
    assert server.wait() == 0
    thread.join(120)
    assert (isinstance(result[0], str) and "[DONE]" in result[0]) is whole


def test_mpirun_gives_a_second(start: Start) -> None:
    mpirun = ("mpirun", "-n", "1", "--oversubscribe", "--allow-run-as-root")
    server = start("tensorrt_llm-gpt-oss-dev", *mpirun, *TRTLLM[1:], SIMULATOR_SPEEDUP="1").ready()
    thread, result = long_request(server, 2000)
    server.terminate()
    assert server.wait() == 128 + signal.SIGTERM
    thread.join(120)
    assert not (isinstance(result[0], str) and "[DONE]" in result[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("mpirun", "--n-ranks", "1"), 'mpirun: Error: unknown option "--n-ranks"'),
        (("mpirun", "--allow-run-as-root", "trtllm-srv"), "unable to find the specified executable file"),
        (("mpirun", "--allow-run-as-root", "-n"), "did not have enough parameters"),
    ],
)
def test_mpirun_refuses(words: tuple[str, ...], said: str, start: Start) -> None:
    server = start("tensorrt_llm-gpt-oss-dev", *words)
    assert server.wait() == 1
    assert said in server.log


def test_mpirun_passes_the_engines_status_on(start: Start) -> None:
    server = start("tensorrt_llm-gpt-oss-dev", "mpirun", "--allow-run-as-root", "trtllm-serve", MODEL, "--foo")
    assert server.wait() == 2
    assert "Exit code:    2" in server.log


def test_nothing_stays_behind(start: Start) -> None:
    server = start(*TRTLLM).ready()
    server.terminate()
    server.wait()
    deadline = time.monotonic() + 30  # what was told to end has a moment to be gone
    while left := [p for p in Path("/proc").glob("[0-9]*/environ") if _mentions(p, str(server.log_path.parent))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert shutil.which("trtllm-serve") is None  # only the processes that were started know the commands


def _mentions(path: Path, text: str) -> bool:
    try:
        return f"PWD={text}".encode() in path.read_bytes()
    except OSError:
        return False
