"""Controller side of fabric_state: waits in slices, so that a person sees what is being waited for."""

from __future__ import annotations

import time
from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

SLICE = 15  # seconds that one call on the host waits at most

display = Display()


class ActionModule(ActionBase):
    """Calls the module until every GPU has a wanted state or the time is up."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        wait = int(arguments.pop("wait", 0) or 0)
        host = (task_vars or {}).get("inventory_hostname", "the host")
        start = time.monotonic()
        changed = False
        while True:
            spent = time.monotonic() - start
            answer: dict[str, Any] = self._execute_module(
                module_name="fabric_state",
                module_args={**arguments, "wait": max(0, min(SLICE, int(wait - spent))), "waited": spent},
                task_vars=task_vars,
            )
            changed = changed or bool(answer.get("changed"))
            spent = time.monotonic() - start
            settled = answer.get("failed") or answer.get("ready") or answer.get("final")
            if settled or self._task.check_mode or spent + 1 >= wait:
                return {**result, **answer, "changed": changed}
            display.display(f"{host}: NVLink fabric: {answer.get('summary')}; {spent:.0f} of {wait} s")
