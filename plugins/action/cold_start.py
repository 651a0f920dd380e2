"""Controller side of cold_start: the host is measured in one call, and its result is kept beside its verdict."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()


class ActionModule(ActionBase):
    """See the module's documentation."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        host = str(variables.get("inventory_hostname", "host"))
        arguments = dict(self._task.args)
        wanted = Path(str(arguments.pop("verdict_directory", "verdicts"))).expanduser()
        arguments["about"] = {**(arguments.get("about") or {}), "host": host}
        answer: dict[str, Any] = self._execute_module(
            module_name="cold_start", module_args=arguments, task_vars=variables
        )
        files = answer.pop("files", None)
        if files is None:
            return {**result, **answer}
        directory = wanted if wanted.is_absolute() else Path.cwd() / wanted
        directory.mkdir(parents=True, exist_ok=True)
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", host)
        for name, content in files.items():
            scratch = directory / f".{stem}.{name}.new"
            scratch.write_bytes(base64.b64decode(content))
            scratch.replace(directory / f"{stem}.{name}")
        display.display(f"{host}: {answer['line']}; {directory / stem}.cold_start.json")
        if answer.get("drawing"):
            raise AnsibleActionFail(f"{host}: measured and kept in {directory}, but no picture: {answer['drawing']}")
        return {**result, **answer}
