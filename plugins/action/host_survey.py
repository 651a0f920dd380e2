"""Controller side of host_survey: adds what the serving catalog knows, and keeps the sections of earlier calls."""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from serving_catalog import load_catalog
from serving_catalog.checks.platforms import annotate
from serving_catalog.errors import CatalogError

# Read together, because each is judged with the others.
_IDENTITY = ("architecture", "gpus", "platform")


class ActionModule(ActionBase):
    """One module call; everything else happens here."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        try:
            catalog = load_catalog(self._templar.template(variables.get("serving_catalog_overlay")) or None)
        except CatalogError as error:
            raise AnsibleActionFail(str(error)) from None
        arguments = {**self._task.args, "controller_time": time.time()}
        sections = arguments.get("sections")
        if isinstance(sections, list) and "platform" in sections:
            arguments["sections"] = [*sections, *(name for name in _IDENTITY if name not in sections)]
        answer = self._execute_module(module_args=arguments, task_vars=variables)
        survey = (answer.get("ansible_facts") or {}).get("host_survey")
        if survey is not None:
            earlier = (variables.get("ansible_facts") or {}).get("host_survey") or {}
            known = list(dict.fromkeys([*(earlier.get("sections") or []), *survey["sections"]]))
            merged = {**earlier, **survey, "sections": known}
            answer["ansible_facts"] = {"host_survey": annotate(merged, catalog)}
        return {**result, **answer}
