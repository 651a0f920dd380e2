"""The real Dynamo frontend with mockers as its workers, as processes of this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Literal

from plugins.module_utils.gpt_oss.probe_endpoint import Endpoint, Wait
from simulator.build import packages
from tests.ports import free_port

Role = Literal["agg", "prefill", "decode"]


class Dynamo:
    """A frontend; workers are started and killed one by one."""

    def __init__(self, hub_cache: Path, model: str) -> None:
        self.model = model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.state = Path(tempfile.mkdtemp(prefix="dynamo-"))
        (self.state / "discovery").mkdir()
        running = f"{sys.version_info.major}.{sys.version_info.minor}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "DYN_"))},
            "PYTHONPATH": str(packages.python_packages(running)),
            "DYN_FILE_KV": str(self.state / "discovery"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_LOG": "warn",
            "HF_HUB_CACHE": str(hub_cache),
            "HF_HUB_OFFLINE": "1",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        options = ["--http-host", "127.0.0.1", "--http-port", str(self.port), "--router-mode", "round-robin"]
        self._start("frontend", "dynamo.frontend", *options)

    def _start(self, name: str, module: str, *options: str) -> None:
        base = sys._base_executable  # type: ignore[attr-defined]
        with (self.state / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [base, "-m", module, *options, "--discovery-backend", "file"],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start_worker(self, role: Role) -> None:
        options = ["--model-path", self.model, "--model-name", self.model, "--speedup-ratio", "0"]
        options += ["--disaggregation-mode", role] if role != "agg" else []
        options += ["--bootstrap-ports", str(free_port())] if role == "prefill" else []
        self._start(role, "dynamo.mocker", *options)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def wait_listed(self, seconds: float = 180) -> None:
        wait = Wait(Endpoint("0", self.url, self.model, ready_within_seconds=seconds, place="kubernetes"))
        found = wait.look()
        while found is None:
            assert all(process.poll() is None for process in self.processes.values()), self.logs()
            time.sleep(0.2)
            found = wait.look()
        assert found["ok"], f"{found}\n{self.logs()}"

    def wait_answering(self, seconds: float = 60) -> None:
        """Until the frontend takes connections, workers or not."""
        deadline = time.monotonic() + seconds
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(f"-- {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in self.state.glob("*.log"))

    def __enter__(self) -> Dynamo:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        shutil.rmtree(self.state, ignore_errors=True)
