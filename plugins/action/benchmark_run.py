"""Controller side of benchmark_run: one call for each point, its figures told, its files kept on the controller."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

OWN = ("shapes", "concurrency", "results_directory", "fail")

display = Display()


class ActionModule(ActionBase):
    """Measures nothing in check mode. A failed point does not keep the others from being measured."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = {key: value for key, value in self._task.args.items() if key not in OWN}
        shapes: list[dict[str, Any]] = self._task.args.get("shapes") or []
        if not shapes:
            raise AnsibleActionFail("shapes: empty; there is nothing to measure")
        if self._task.check_mode:
            return {**result, "changed": False, "skipped": True, "msg": "nothing is measured in check mode"}
        variables = task_vars or {}
        host = str(variables.get("inventory_hostname", "host"))
        directory = _directory(self._task.args.get("results_directory"), host)
        results: list[dict[str, Any]] = []
        for shape in shapes:
            for concurrency in self._task.args.get("concurrency") or shape["concurrency"]:
                display.display(f"{host}: measuring {shape['name']}, concurrency {concurrency}")
                point = {"shape": shape, "concurrency": int(concurrency)}
                answer = self._call({**arguments, "point": point}, variables)
                if answer.get("failed"):
                    return {**result, **answer}
                results.append(answer["result"])
                display.display(f"{host}: {answer['line']}", color=None if answer["result"]["ok"] else "red")
                _put(directory / f"{shape['name']}_{concurrency}", answer["files"])
        logs = [entry.pop("log", []) for entry in results]
        about = {**(arguments.get("about") or {}), "host": host}
        answer = self._call({**arguments, "about": about, "results": results}, variables)
        if answer.get("failed"):
            return {**result, **answer}
        _put(directory, answer["files"])
        summary = {**answer["summary"], "results_directory": str(directory)}
        result |= {"changed": False, "summary": summary, "ansible_facts": {"benchmark": summary}}
        problems = [f"{entry['shape']}, concurrency {entry['concurrency']}: {entry['problem']}" for entry in results]
        problems = [text for text, entry in zip(problems, results, strict=True) if not entry["ok"]]
        if answer.get("drawing"):
            problems.append(f"no picture: {answer['drawing']}")
        if problems and self._task.args.get("fail", True):
            tail: list[str] = next((log for log in logs if log), [])
            said = "".join(f"\n    {line}" for line in tail)
            result |= {
                "failed": True,
                "msg": f"{host}: {'; '.join(problems)}. Logs are in {directory}."
                + (f" AIPerf's last lines:{said}" if said else ""),
            }
        return result

    def _call(self, arguments: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self._execute_module(
            module_name="benchmark_run", module_args=arguments, task_vars=variables
        )
        return answer


def _directory(given: Any, host: str) -> Path:
    """Below the directory that the playbook was started in, unless the path is absolute."""
    wanted = Path(str(given or "results")).expanduser()
    return (wanted if wanted.is_absolute() else Path.cwd() / wanted) / re.sub(r"[^A-Za-z0-9._-]", "_", host)


def _put(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        scratch = directory / f".{name}.new"
        scratch.write_bytes(base64.b64decode(content))
        scratch.replace(directory / name)
