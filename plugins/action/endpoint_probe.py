"""Controller side of endpoint_probe: waits in slices, so that a person sees what is being waited for."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

LOG_LINES = 20

display = Display()


class ActionModule(ActionBase):
    """Calls the module until every endpoint is judged; the findings become facts, and fail the task where asked."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        fail = bool(arguments.pop("fail", True))
        host = str((task_vars or {}).get("inventory_hostname", "the host"))
        limits = {str(entry["name"]): float(entry["ready_within_seconds"]) for entry in arguments["endpoints"]}
        state: dict[str, Any] = {}
        while True:
            answer: dict[str, Any] = self._execute_module(
                module_name="endpoint_probe", module_args={**arguments, "state": state}, task_vars=task_vars
            )
            if answer.get("failed") or answer.get("done"):
                break
            state = answer["state"]
            for name, seen in state.items():
                if not seen["ready"]:
                    said = f": {seen['log']}" if seen.get("log") else f": {seen['seen']}"
                    display.display(
                        f"{host}: process {name} is loading, {seen['waited']:.0f} of {limits[name]:.0f} s{said}"
                    )
        if answer.get("failed"):
            return {**result, **answer}
        checks = answer["checks"]
        if not answer["ok"] and fail:
            return {**result, "failed": True, "msg": message(host, checks, answer.get("log") or {})}
        facts = {"endpoint_check": {"ok": answer["ok"], "checks": checks, "throughput": answer["throughput"]}}
        return {**result, "changed": False, "ok": answer["ok"], "ansible_facts": facts}


def message(host: str, checks: list[dict[str, Any]], log: dict[str, list[str]]) -> str:
    """Every finding with its remedy, then the last words of the engines that are not ready."""
    findings = [check for check in checks if check["ok"] is False]
    lines = [f"{host}: {len(findings)} of {len(checks)} checks of the endpoint failed."]
    for check in findings:
        lines += [
            f"- {check['title']}: {check['seen']}",
            f"    expected: {check['expected']}",
            f"    what to do: {check['remedy']}",
        ]
    for name, said in log.items():
        lines += [f"Process {name}, last lines:", *(f"    {line}" for line in said[-LOG_LINES:])]
    return "\n".join(lines)
