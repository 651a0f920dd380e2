"""Controller side of preflight: one call of host_survey, every judgement, one answer with all findings."""

from __future__ import annotations

import json
import time
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from pydantic import ValidationError

from serving_catalog import load_catalog
from serving_catalog.checks import PreflightSettings, annotate, plan_survey, preflight, summary, table
from serving_catalog.errors import CatalogError

_OWN = ("plan", "measure", "url_timeout", "proxies", "procfs", "sysfs", "rootfs", "tool_paths", "container_prefix")


class ActionModule(ActionBase):
    """Changes nothing, in check mode or out of it."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        arguments = dict(self._task.args)
        plan = arguments.get("plan")
        if not isinstance(plan, dict) or "processes" not in plan:
            raise AnsibleActionFail("plan: expected the host's plan (ansible_facts['serving_plan'])")
        try:
            settings = PreflightSettings.model_validate_json(
                json.dumps({key: value for key, value in arguments.items() if key not in _OWN})
            )
            catalog = load_catalog(self._templar.template(variables.get("serving_catalog_overlay")) or None)
        except ValidationError as error:
            problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']} (found {e['input']!r})" for e in error.errors()]
            raise AnsibleActionFail("preflight: " + "; ".join(problems)) from None
        except CatalogError as error:
            raise AnsibleActionFail(str(error)) from None
        asked = plan_survey(plan, settings, arguments.get("measure") or ())
        asked |= {key: arguments[key] for key in _OWN[2:] if arguments.get(key) not in (None, "")}
        asked["controller_time"] = time.time()
        answer = self._execute_module(module_name="host_survey", module_args=asked, task_vars=variables)
        survey = (answer.get("ansible_facts") or {}).get("host_survey")
        if answer.get("failed") or survey is None:
            return {**result, **answer}
        survey = annotate(survey, catalog)
        checks = preflight(survey, plan, settings, catalog)
        findings = [check for check in checks if check.stops]
        accepted = [check for check in checks if check.accepted]
        result["changed"] = False
        if accepted:
            result["warnings"] = [f"preflight: accepted by preflight_allow_findings:\n{table(accepted)}"]
        if findings:
            # Short: Ansible prints the whole result of a failed task below the message.
            result |= {"failed": True, "findings": [check.id for check in findings]}
            result["msg"] = (
                f"Preflight stops before anything is changed on {variables.get('inventory_hostname', 'the host')}: "
                f"{summary(checks)}.\n\n{table(findings)}\n\n"
                "Findings that you have looked at and accept: preflight_allow_findings, a list of their ids."
            )
            return result
        return {
            **result,
            "msg": summary(checks),
            "checks": [check.model_dump(mode="json") for check in checks],
            "ansible_facts": {"host_survey": survey},
        }
