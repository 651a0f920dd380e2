#!/usr/bin/python
"""One measured cold start of a host's engine processes."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cold_start
short_description: Restart the engine processes with their weights out of memory, and time it until the first token
description:
  - Stops the processes, takes their weights out of the page cache, asks fio what the drive can do with these files
    (reading only, bounded), starts the processes and follows them until each has made a token.
  - Everything is looked at before the first process is stopped. It interrupts the service for as long as a start takes.
  - The action plugin of the same name puts C(cold_start.json) and C(cold_start.png) beside the host's verdict.
  - In check mode nothing is stopped or measured.
options:
  confirmed: {type: bool, default: false, description: Without this nothing is stopped, and the module fails.}
  configuration_directory: {type: path, default: /etc/gpt-oss, description: Where the processes' descriptions lie.}
  directory: {type: path, required: true, description: Where the result is written on the host.}
  python: {type: path, required: true, description: An interpreter with matplotlib, for the picture.}
  about: {type: dict, default: {}, description: Told in the result and the picture.}
  api_key: {type: str, default: "", description: Bearer token of the endpoint.}
  fio_bytes: {type: int, default: 17179869184, description: What fio reads at most, in bytes. 0 leaves it out.}
  fio_seconds: {type: int, default: 15, description: How long fio reads at most.}
  time_limit_seconds: {type: int, default: 3600, description: How long a start may take.}
  verdict_directory: {type: str, default: verdicts, description: On the controller. The action plugin reads it.}
attributes:
  check_mode: {support: full, description: Stops and measures nothing.}
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Measure a cold start
  cold_start:
    confirmed: true
    directory: /var/tmp/gpt-oss-benchmark/cold_start
    python: /opt/gpt-oss/venvs/aiperf/bin/python
"""

RETURN = r"""
result: {description: The document in cold_start.json., returned: when measured, type: dict}
line: {description: The same for a person., returned: when measured, type: str}
drawing: {description: Why there is no picture; empty when there is one., returned: when measured, type: str}
files: {description: Contents in base64 by file name., returned: when measured, type: dict}
"""

import base64
import http.client
import json
import os
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss import cold_start, engine_log, read_ahead
from ansible.module_utils.gpt_oss.docker_host import run

READ_AHEAD = "gpt-oss-read-ahead.service"
POLL_SECONDS = 0.1


class ColdStartError(Exception):
    """What keeps this from being measured; carries what to tell."""

    def __init__(self, message: str, **more: Any) -> None:
        super().__init__(message)
        self.more = more


class Process:
    """One engine process: its description, and what its start has come to so far."""

    def __init__(self, name: str, described: dict[str, Any]) -> None:
        self.name = name
        self.unit: str = described["unit"]
        self.container: str = described["container"]
        self.described = described
        self.ready: float | None = None
        self.first_token: float | None = None

    def ask(self, method: str, path: str, timeout: float, body: Any = None, api_key: str = "") -> tuple[int, float]:
        """Status of the answer, and when the first bytes of its body came."""
        connection = http.client.HTTPConnection(self.described["address"], self.described["port"], timeout=timeout)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        headers.update({"Authorization": f"Bearer {api_key}"} if api_key else {})
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            response.read(1)
            at = time.time()
            response.read()
            return response.status, at
        finally:
            connection.close()

    def healthy(self) -> bool:
        try:
            return self.ask("GET", self.described["health_path"], timeout=5)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def token(self, api_key: str, timeout: float) -> tuple[int, float]:
        """One streamed token: its status, and when it came."""
        question = {"model": self.described["model"], "prompt": "1", "max_tokens": 1, "stream": True}
        return self.ask("POST", "/v1/completions", timeout, question, api_key)


def systemctl(*words: str) -> None:
    status, said = run(["systemctl", *words], timeout=1800)
    if status != 0:
        raise ColdStartError(f"systemctl {' '.join(words)}: {said.strip() or status}")


def properties(unit: str, *names: str) -> dict[str, str]:
    _, said = run(["systemctl", "show", f"--property={','.join(names)}", unit])
    return dict(row.split("=", 1) for row in said.splitlines() if "=" in row)


class Measurement:
    """One cold start."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.processes: list[Process] = []
        self.files: list[tuple[Path, int]] = []

    # -- before anything is stopped --------------------------------------------------------------------------------

    def look(self) -> None:
        configuration = Path(self.given["configuration_directory"])
        try:
            self.files = list(read_ahead.read_plan(configuration).files)
        except read_ahead.ReadAheadError as error:
            raise ColdStartError(str(error)) from None
        for path in sorted((configuration / "processes").glob("*/process.json")):
            self.processes.append(Process(path.parent.name, json.loads(path.read_text(encoding="utf-8"))))
        for process in self.processes:
            self.require_serving(process)

    def require_serving(self, process: Process) -> None:
        """A server that does not make a token now would make none after a restart either."""
        state = properties(process.unit, "ActiveState").get("ActiveState", "unknown")
        if state != "active":
            raise ColdStartError(f"{process.unit} is {state}; run playbooks/serve.yml first, then measure")
        try:
            status, _ = process.token(self.given["api_key"], timeout=120)
        except (OSError, http.client.HTTPException) as error:
            raise ColdStartError(
                f"{process.unit} does not answer ({error}); wait until it is ready, or see playbooks/diagnose.yml"
            ) from None
        if status in (401, 403):
            raise ColdStartError(f"{process.unit} answers {status}: set benchmark_api_key to the endpoint's token")
        if status != 200:
            raise ColdStartError(f"{process.unit} answers {status} instead of a token; see playbooks/diagnose.yml")

    @property
    def units(self) -> list[str]:
        return [process.unit for process in self.processes]

    # -- the start -------------------------------------------------------------------------------------------------

    def measure(self) -> dict[str, Any]:
        there = properties(READ_AHEAD, "LoadState").get("LoadState") == "loaded"
        try:
            systemctl("stop", *self.units, *([READ_AHEAD] if there else []))
            self.evict()
            files = [(str(path), size) for path, size in self.files if size > 0]
            drive: dict[str, Any] = {}
            if self.given["fio_bytes"] > 0:
                drive = cold_start.drive_speed(files, self.given["fio_bytes"], self.given["fio_seconds"])
                self.evict()
            in_memory = sum(read_ahead.cached_bytes(path) for path, _ in self.files)
        except BaseException:
            systemctl("start", "--no-block", *self.units)  # the service comes back, whatever kept us from measuring
            raise
        began = time.time()
        systemctl("start", "--no-block", *self.units)
        self.follow(began)
        marks = {process.name: self.marks(process, began) for process in self.processes}
        size = sum(size for _, size in self.files)
        ahead = cold_start.read_ahead_of(cold_start.journal(READ_AHEAD, began))
        found = cold_start.result(self.given["about"], marks, size, drive, ahead)
        return {**found, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)), "bytes_in_memory": in_memory}

    def evict(self) -> None:
        for path, _ in self.files:
            read_ahead.evict(path)

    def follow(self, began: float) -> None:
        while any(process.first_token is None for process in self.processes):
            for process in self.processes:
                if process.ready is None and process.healthy():
                    process.ready = time.time()
                elif process.ready is not None and process.first_token is None:
                    self.first_token(process)
                if process.ready is None:
                    self.require_alive(process, began)
            if time.time() - began > self.given["time_limit_seconds"]:
                waiting = [process.unit for process in self.processes if process.first_token is None]
                raise ColdStartError(
                    f"{', '.join(waiting)} made no token within {self.given['time_limit_seconds']} s"
                    " (benchmark_cold_start_time_limit_seconds); the start goes on."
                    " docs/runbooks/slow-or-stuck-load.md says how to tell why"
                )
            time.sleep(POLL_SECONDS)

    def first_token(self, process: Process) -> None:
        status, at = process.token(self.given["api_key"], timeout=300)
        if status != 200:
            raise ColdStartError(f"{process.unit} answered {status} to its first request")
        process.first_token = at

    def require_alive(self, process: Process, began: float) -> None:
        found = properties(process.unit, "ActiveState", "NRestarts")
        if found.get("ActiveState") == "failed" or found.get("NRestarts", "0") != "0":
            lines = engine_log.last_lines(process.unit, since=f"@{began:.3f}")
            report = engine_log.failure(process.unit, "did not come up again", lines)
            raise ColdStartError(report.pop("msg"), **report)

    @staticmethod
    def marks(process: Process, began: float) -> cold_start.Marks:
        _, said = run(["docker", "inspect", "--format", "{{.State.StartedAt}}", process.container])
        begin, end = cold_start.weights_times(cold_start.journal(process.unit, began))
        assert process.ready is not None
        assert process.first_token is not None
        container = cold_start.container_time(said)
        return cold_start.Marks(began, container, begin, end, process.ready, process.first_token)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "confirmed": {"type": "bool", "default": False},
            "configuration_directory": {"type": "path", "default": "/etc/gpt-oss"},
            "directory": {"type": "path", "required": True},
            "python": {"type": "path", "required": True},
            "about": {"type": "dict", "default": {}},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "fio_bytes": {"type": "int", "default": 17179869184},
            "fio_seconds": {"type": "int", "default": 15},
            "time_limit_seconds": {"type": "int", "default": 3600},
            "verdict_directory": {"type": "str", "default": "verdicts"},
        },
        supports_check_mode=True,
    )
    if module.check_mode:
        module.exit_json(changed=False, skipped=True, msg="nothing is stopped or measured in check mode")
    measurement = Measurement(module.params)
    try:
        measurement.look()
        if not module.params["confirmed"]:
            raise ColdStartError(
                "benchmark_cold_start_restart: false, so nothing was stopped. A cold start stops"
                f" {', '.join(measurement.units)} for as long as a start takes; where that is welcome, say"
                " -e benchmark_cold_start_restart=true"
            )
        found = measurement.measure()
    except ColdStartError as error:
        module.fail_json(msg=str(error), **error.more)
    directory = Path(module.params["directory"])
    os.makedirs(str(directory), exist_ok=True)
    (directory / "cold_start.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    drawing = cold_start.draw_with(module.params["python"], directory)
    files = {
        name: base64.b64encode((directory / name).read_bytes()).decode("ascii")
        for name in ("cold_start.json", "cold_start.png")
        if (directory / name).is_file()
    }
    module.exit_json(changed=True, result=found, line=cold_start.line(found), drawing=drawing, files=files)


if __name__ == "__main__":
    main()
