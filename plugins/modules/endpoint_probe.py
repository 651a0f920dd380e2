#!/usr/bin/python
"""Every endpoint of a host in one call: wait until they are ready, then ask."""

from __future__ import annotations

DOCUMENTATION = r"""
module: endpoint_probe
short_description: Wait until engine processes are ready, and ask them whether they answer as they should
description:
  - Looks at all endpoints at once. The action plugin of the same name calls it in slices of O(wait_seconds) and shows
    progress in between, so a server that is up costs one call.
  - A unit that ends while it loads is a finding at once, with the engine's last log lines and the likely cause.
  - Changes nothing. In check mode it looks once and does not wait.
options:
  endpoints:
    description: What to ask.
    type: list
    elements: dict
    required: true
    suboptions:
      name: {type: str, required: true, description: The process, for the checks' ids.}
      url: {type: str, required: true, description: Such as C(http://127.0.0.1:8000).}
      model: {type: str, required: true, description: The id that C(/v1/models) must list.}
      health_path: {type: str, default: /health, description: What answers 200 once the model is loaded.}
      ready_within_seconds: {type: float, default: 2400, description: What loading may take.}
      unit: {type: str, description: The systemd unit on this host. Left out where there is none.}
  probes:
    description: What to ask for, always in this order.
    type: list
    elements: str
    choices: [health, model, completion, stream, reasoning, tool_call]
    default: [health, model, completion, stream]
  answer_seconds: {type: float, default: 300, description: What one answer may take.}
  wait_seconds: {type: float, default: 15, description: What this call may wait.}
  traffic:
    description:
      - A short run to measure, of a shape as serving_catalog/data/traffic.yml has it. It is sent once every probe is
        answered, to all endpoints at once, and only where none of them is a finding. Empty measures nothing.
    type: dict
    default: {}
  state: {type: dict, default: {}, description: The C(state) that the call before returned.}
  api_key: {type: str, default: "", description: Bearer token of the endpoints.}
  fail: {type: bool, default: true, description: Whether a finding fails the task. The action plugin reads it.}
attributes:
  check_mode: {support: full, description: Looks once.}
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Ask the first process
  endpoint_probe:
    endpoints: [{name: "0", url: "http://127.0.0.1:8000", model: openai/gpt-oss-120b, unit: gpt-oss@0.service}]
"""

RETURN = r"""
done: {description: Whether everything was asked or given up., returned: always, type: bool}
ok: {description: Whether no check is a finding., returned: always, type: bool}
checks: {description: The checks, as docs/verdict.md describes them., returned: when done, type: list, elements: dict}
throughput:
  description: What the short run measured, over all endpoints together.
  returned: when a run was asked for and made
  type: dict
  sample: {requests: 8, failed_requests: 0, output_tokens_per_second: 640.5, time_to_first_token_ms: 41.0, seconds: 0.8}
log: {description: Last lines of the engines that are not ready., returned: when done, type: dict}
state: {description: For the next call., returned: always, type: dict}
"""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss import engine_log, probe_endpoint
from ansible.module_utils.gpt_oss.probe_endpoint import PROBES, Endpoint, Wait

LOG_LINES = 40
PROPERTIES = ("Id", "LoadState", "ActiveState", "SubState", "NRestarts", "Result", "ExecMainStatus")


def unit_states(units: list[str]) -> dict[str, dict[str, str]]:
    """What systemd says of these units, by name."""
    if not units:
        return {}
    command = ["systemctl", "show", "--property", ",".join(PROPERTIES), *units]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        return {}
    blocks = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in _blocks(done.stdout)]
    return {block["Id"]: block for block in blocks if "Id" in block}


def _blocks(text: bytes) -> list[str]:
    return text.decode("utf-8", "replace").split("\n\n")


def ended(shown: dict[str, str]) -> str | None:
    """How a unit that should be loading has ended; None while it runs or is about to for the first time."""
    if not shown:
        return None
    if shown.get("LoadState") != "loaded":
        return "there is no such unit"
    how = f"{shown.get('Result')}, status {shown.get('ExecMainStatus')}"
    restarts = int(shown.get("NRestarts") or 0)
    if restarts:
        return f"ended {restarts} time(s) before it was ready ({how})"
    if shown.get("ActiveState") in ("failed", "inactive") or shown.get("SubState") == "auto-restart":
        return f"ended before it was ready ({how})"
    return None


class Gate:
    """All endpoints of the host, until each is ready or given up."""

    def __init__(self, asked: dict[str, Any], once: bool) -> None:
        self.asked = asked
        self.once = once
        self.units: dict[str, str] = {}
        self.waits: dict[str, Wait] = {}
        self.health: dict[str, dict[str, Any]] = {}
        self.log: dict[str, list[str]] = {}
        for entry in asked["endpoints"]:
            endpoint = Endpoint(
                name=entry["name"],
                url=entry["url"].rstrip("/"),
                model=entry["model"],
                health_path=entry["health_path"],
                ready_within_seconds=entry["ready_within_seconds"],
                answer_seconds=asked["answer_seconds"],
                api_key=asked["api_key"],
            )
            self.waits[endpoint.name] = Wait(endpoint, asked["state"].get(endpoint.name))
            if entry["unit"]:
                self.units[endpoint.name] = entry["unit"]

    def wait(self) -> None:
        """Until every endpoint is judged, or this call's time is up."""
        deadline = time.monotonic() + self.asked["wait_seconds"]
        with ThreadPoolExecutor(max_workers=len(self.waits)) as pool:
            while True:
                open_names = [name for name in self.waits if name not in self.health]
                for name, found in zip(open_names, pool.map(lambda name: self.waits[name].look(), open_names)):
                    if found is not None:
                        self.health[name] = found
                if not self.once:  # in check mode a unit may be one that would only be made
                    self._notice_ends()
                if len(self.health) == len(self.waits) or self.once or time.monotonic() >= deadline:
                    return
                time.sleep(probe_endpoint.POLL_SECONDS)

    def _notice_ends(self) -> None:
        waiting = {name: unit for name, unit in self.units.items() if name not in self.health}
        shown = unit_states(list(waiting.values()))
        for name, unit in waiting.items():
            how = ended(shown.get(unit, {}))
            if how is None:
                continue
            lines = engine_log.last_lines(unit, LOG_LINES)
            cause = engine_log.likely_cause("\n".join(lines))
            remedy = f"{cause.title}: {cause.remedy}" if cause else f"journalctl --unit {unit} says why"
            self.health[name] = probe_endpoint.not_ready_check(self.waits[name].endpoint, f"{unit} {how}", remedy)

    def probe(self) -> list[dict[str, Any]]:
        """Every check, the endpoints' in their order."""
        with ThreadPoolExecutor(max_workers=len(self.waits)) as pool:
            return [check for checks in pool.map(self._probe_one, self.waits) for check in checks]

    def _probe_one(self, name: str) -> list[dict[str, Any]]:
        endpoint, first = self.waits[name].endpoint, self.health[name]
        if first["ok"]:
            return [first, *probe_endpoint.run_probes(endpoint, self.asked["probes"])]
        if name in self.units:
            self.log[name] = engine_log.last_lines(self.units[name], LOG_LINES)
        return [first, *probe_endpoint.skipped(endpoint, self.asked["probes"], "not asked: the server is not ready")]

    def measure(self) -> dict[str, Any]:
        """The short run that was asked for."""
        asked = self.asked["traffic"]
        traffic = probe_endpoint.Traffic(
            input_tokens=int(asked["input_tokens"]),
            output_tokens=int(asked["output_tokens"]),
            concurrency=int(asked["concurrency"][0]),
            requests=max(
                int(asked["minimum_requests"]), int(asked["requests_per_slot"]) * int(asked["concurrency"][0])
            ),
        )
        measured: dict[str, Any] = probe_endpoint.measure([wait.endpoint for wait in self.waits.values()], traffic)
        return measured

    def states(self) -> dict[str, dict[str, Any]]:
        """For the next call, and for whoever watches."""
        states = {}
        for name, wait in self.waits.items():
            states[name] = {**wait.state(), "ready": name in self.health}
            if name in self.units and name not in self.health:
                lines = engine_log.last_lines(self.units[name], 1)
                states[name]["log"] = lines[-1] if lines else ""
        return states


def main() -> None:
    endpoint = {
        "name": {"type": "str", "required": True},
        "url": {"type": "str", "required": True},
        "model": {"type": "str", "required": True},
        "health_path": {"type": "str", "default": "/health"},
        "ready_within_seconds": {"type": "float", "default": 2400},
        "unit": {"type": "str"},
    }
    module = AnsibleModule(
        argument_spec={
            "endpoints": {"type": "list", "elements": "dict", "required": True, "options": endpoint},
            "probes": {"type": "list", "elements": "str", "choices": list(PROBES), "default": list(PROBES[:4])},
            "answer_seconds": {"type": "float", "default": 300},
            "wait_seconds": {"type": "float", "default": 15},
            "traffic": {"type": "dict", "default": {}},
            "state": {"type": "dict", "default": {}},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "fail": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    if not module.params["endpoints"]:
        module.fail_json(msg="endpoints: empty; there is nothing to ask")
    gate = Gate(module.params, once=module.check_mode)
    gate.wait()
    if module.check_mode:
        for name, wait in gate.waits.items():
            seen = f"not asked in check mode: {wait.last.seen}"
            gate.health.setdefault(
                name, {**probe_endpoint.not_ready_check(wait.endpoint, seen, ""), "ok": None, "remedy": ""}
            )
    if len(gate.health) < len(gate.waits):
        module.exit_json(done=False, ok=False, state=gate.states())
    checks = gate.probe()
    ok = not any(check["ok"] is False for check in checks)
    measured = gate.measure() if ok and module.params["traffic"] and not module.check_mode else {}
    module.exit_json(done=True, ok=ok, checks=checks, throughput=measured, log=gate.log, state=gate.states())


if __name__ == "__main__":
    main()
