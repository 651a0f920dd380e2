"""Controller side of cold_start: the host is measured in one call, and its result is kept beside its verdict."""

from __future__ import annotations

import base64
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from serving_catalog.checks.arguments import results_of

display = Display()


class ActionModule(ActionBase):
    """See the module's documentation."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        host = str(variables.get("inventory_hostname", "host"))
        arguments = dict(self._task.args)
        stem = results_of(host, arguments.pop("verdict_directory", ""))
        arguments["about"] = {**(arguments.get("about") or {}), "host": host}
        answer: dict[str, Any] = self._execute_module(
            module_name="cold_start", module_args=arguments, task_vars=variables
        )
        files = answer.pop("files", None)
        if files is None:
            return {**result, **answer}
        stem.parent.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            scratch = stem.with_name(f".{stem.name}.{name}.new")
            scratch.write_bytes(base64.b64decode(content))
            scratch.replace(f"{stem}.{name}")
        display.display(f"{host}: {answer['line']}; {stem}.cold_start.json")
        if answer.get("drawing"):
            problem = f"{host}: measured and kept in {stem.parent}, but no picture: {answer['drawing']}"
            raise AnsibleActionFail(problem)
        return {**result, **answer}
