"""Stand-in engines as processes of this machine, with the stand-in hub's weights."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from plugins.module_utils.gpt_oss.probe_endpoint import Endpoint, Wait
from simulator.build import local
from tests.ports import free_port
from tests.stand_ins.hub import content

MODEL = "openai/gpt-oss-120b"
SHORT = {"SIMULATOR_LOAD_SECONDS": "0.2", "SIMULATOR_SPEEDUP": "0"}


class Server:
    """One engine process and its log."""

    def __init__(self, words: list[str], environment: Mapping[str, str], log: Path, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                words, env=dict(environment), stdout=file, stderr=file, start_new_session=True, cwd=log.parent
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait(self, seconds: float = 180) -> int:
        """Its exit status."""
        return self.process.wait(seconds)

    def ready(self, seconds: float = 300) -> Server:
        wait = Wait(Endpoint("0", self.url, MODEL, ready_within_seconds=seconds))
        found = wait.look()
        while found is None:
            assert self.process.poll() is None, self.log
            time.sleep(0.1)
            found = wait.look()
        assert found["ok"], f"{found}\n{self.log}"
        return self

    def until_logged(self, text: str, seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.log:
            assert time.monotonic() < deadline, f"not logged within {seconds} s: {text}\n{self.log}"
            time.sleep(0.05)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


Start = Callable[..., Server]


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face cache with both models, and Harmony's vocabularies beside it."""
    root = tmp_path_factory.mktemp("weights")
    for name in content.repositories():
        content.write_cache(root / "hub", name)
    (root / "encodings").mkdir()
    for name, text in content.encodings().items():
        (root / "encodings" / name).write_bytes(text)
    return root


@pytest.fixture(scope="session")
def start(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a release's command: start("vllm-0.31.0", "vllm", "serve", MODEL, SIMULATOR_FAIL="crash")."""
    running: list[Server] = []

    def begin(release: str, *words: str, port: int | None = None, **variables: str | None) -> Server:
        port = port or free_port()
        environment: dict[str, str] = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("SIMULATOR_", "HF_", "NVIDIA_"))
            },
            **local.environment(release),
            **SHORT,
            "HF_HUB_CACHE": str(weights / "hub"),
            "HF_HUB_OFFLINE": "1",
            "TIKTOKEN_ENCODINGS_BASE": str(weights / "encodings"),
            "NVIDIA_VISIBLE_DEVICES": "0,1,2,3",
        }
        for name, value in variables.items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        directory = tmp_path_factory.mktemp("engine")
        command = [words[0], *words[1:], "--port", str(port)]
        path = environment["PATH"].split(os.pathsep)[0]
        running.append(Server([f"{path}/{command[0]}", *command[1:]], environment, directory / "log", port))
        return running[-1]

    yield begin
    for server in running:
        server.kill()


@pytest.fixture(scope="session")
def tensorrt_llm(start: Start) -> Server:
    """A server of TensorRT-LLM that is ready, for tests that only ask."""
    return start("tensorrt_llm-1.2.1", "trtllm-serve", MODEL, "--host", "127.0.0.1", "--tp_size", "4").ready()


@pytest.fixture(scope="session")
def vllm(start: Start) -> Server:
    """A server of vLLM that is ready, for tests that only ask."""
    return start("vllm-0.31.0", "vllm", "serve", MODEL, "--host", "127.0.0.1", "-tp", "4").ready()
