"""The real Dynamo frontend and mocker, as children of the stand-in engine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from simulator.engine import Engine
from simulator.settings import Settings

STARTS_WITHIN = 120.0  # seconds; it takes 3 to 5, and more on a machine that is busy
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # opened before a fork, not in it


class Dynamo:
    """One frontend and one mocker, found by each other through a directory, reachable from this machine alone."""

    def __init__(self, engine: Engine, model: str, settings: Settings) -> None:
        self.port = _free_port()
        self._state = tempfile.mkdtemp(prefix="simulator-")
        environment = {
            **os.environ,
            "DYN_FILE_KV": self._state,
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_LOG": os.environ.get("DYN_LOG", "warn"),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        self._log = Path(self._state, "dynamo.log")
        frontend = ["--http-host", "127.0.0.1", "--http-port", str(self.port), "--router-mode", "round-robin"]
        mocker = [
            *("--model-path", model, "--model-name", engine.served_names[0]),
            *("--engine-type", "trtllm" if engine.kind == "tensorrt_llm" else "vllm"),
            *("--max-num-seqs", str(engine.max_batch_size), "--max-num-batched-tokens", str(engine.max_num_tokens)),
            *("--speedup-ratio", str(settings.speedup)),
        ]
        if engine.kind == "vllm" and engine.max_seq_len:
            mocker += ["--max-model-len", str(engine.max_seq_len)]
        with self._log.open("ab") as log:
            self.processes = [
                subprocess.Popen(
                    [sys.executable, "-m", module, *words, "--discovery-backend", "file"],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # a Ctrl-C is for the engine, which then ends these in order
                    preexec_fn=_die_with_parent,
                )
                for module, words in (("dynamo.frontend", frontend), ("dynamo.mocker", mocker))
            ]
        self.mocker = self.processes[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def require_running(self) -> None:
        """Raise, with the last words, when one of the two has ended."""
        for process in self.processes:
            if process.poll() is not None:
                raise RuntimeError(f"Dynamo ended with status {process.returncode}:\n{self.last_words()}")

    def running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def wait_ready(self, model: str) -> None:
        """Until the frontend has seen the mocker's model."""
        deadline = time.monotonic() + STARTS_WITHIN
        while time.monotonic() < deadline:
            self.require_running()
            with (
                contextlib.suppress(OSError, urllib.error.URLError),
                urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer,  # noqa: S310 - loopback
            ):
                if model.encode() in answer.read():
                    return
            threading.Event().wait(0.1)
        raise RuntimeError(f"Dynamo did not start within {STARTS_WITHIN:.0f} s:\n{self.last_words()}")

    def last_words(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._state, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
