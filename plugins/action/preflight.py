"""Controller side of preflight: one call of host_survey, every judgement, one answer with all findings."""

from __future__ import annotations

import importlib.util
import time
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from serving_catalog import Catalog, load_catalog
from serving_catalog.checks import Check, PreflightSettings, annotate, plan_survey, preflight, summary, table
from serving_catalog.checks.arguments import plan_of, settings_of
from serving_catalog.errors import CatalogError

_OWN = (
    *("plan", "measure", "hub_token", "insecure_registries", "registry_username", "registry_password"),
    *("url_timeout", "proxies", "image_record", "procfs", "sysfs", "rootfs", "tool_paths", "container_prefix"),
)
_HANDED_ON = _OWN[_OWN.index("url_timeout") :]
# What stands in the way while somebody installs packages, and is over when they have finished.
_PASSING = {"apt.lock", "packages.unfinished"}

display = Display()


class ActionModule(ActionBase):
    """Changes nothing, in check mode or out of it."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        arguments = dict(self._task.args)
        try:
            plan = plan_of(arguments)
            settings = settings_of(PreflightSettings, arguments, _OWN)
            catalog = load_catalog(self._templar.template(variables.get("serving_catalog_overlay")) or None)
        except (ValueError, CatalogError) as error:
            raise AnsibleActionFail(f"preflight: {error}") from None
        asked = plan_survey(plan, settings, arguments.get("measure") or ())
        asked |= {key: arguments[key] for key in _HANDED_ON if arguments.get(key) not in (None, "")}
        asked |= _secrets(arguments, settings)
        asked["image"] |= _registry(arguments, asked["image"])
        survey, checks, answer = self._judged(asked, plan, settings, catalog, variables)
        locked = next((check for check in checks if check.id == "apt.lock" and check.stops), None)
        if settings.lock_timeout and locked is not None and {c.id for c in checks if c.stops} <= _PASSING:
            # A host's first boot updates its packages; it has finished in a minute or two.
            display.display(
                f"{variables.get('inventory_hostname', 'host')}: waiting up to {settings.lock_timeout:g} s, because"
                f" packages are being installed: {locked.seen}"
            )
            asked["lock_timeout"] = settings.lock_timeout
            survey, checks, answer = self._judged(asked, plan, settings, catalog, variables)
        if survey is None:
            return {**result, **answer}
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

    def _judged(
        self,
        asked: dict[str, Any],
        plan: dict[str, Any],
        settings: PreflightSettings,
        catalog: Catalog,
        variables: dict[str, Any],
    ) -> tuple[dict[str, Any] | None, tuple[Check, ...], dict[str, Any]]:
        """The survey and every check; no survey where the module failed."""
        asked = {**asked, "controller_time": time.time()}
        answer: dict[str, Any] = self._execute_module(module_name="host_survey", module_args=asked, task_vars=variables)
        found = (answer.get("ansible_facts") or {}).get("host_survey")
        if answer.get("failed") or found is None:
            return None, (), answer
        survey = annotate(found, catalog)
        if "image" not in survey["sections"] and plan["image"] not in (
            (survey.get("docker") or {}).get("images") or ()
        ):
            survey["image"] = {"error": _archive_problem(settings.image_archive, plan["image"], survey)}
        return survey, preflight(survey, plan, settings, catalog), answer


def _secrets(arguments: dict[str, Any], settings: PreflightSettings) -> dict[str, Any]:
    token = arguments.get("hub_token")
    return {"url_tokens": {need.url: token for need in settings.urls if need.with_token}} if token else {}


def _registry(arguments: dict[str, Any], image: dict[str, Any]) -> dict[str, Any]:
    """How the registry is asked: as Docker will."""
    archives = _archives()
    name = archives.mirrored(image["name"], image["registry"]) if image["registry"] else image["name"]
    return {
        "insecure": archives.split_registry(name)[0] in (arguments.get("insecure_registries") or ()),
        "username": arguments.get("registry_username") or "",
        "password": arguments.get("registry_password") or "",
    }


def _archive_problem(path: str, name: str, survey: dict[str, Any]) -> str | None:
    wrong = _archives().problem(path, name, (survey.get("architecture") or {}).get("dpkg"))
    return f"on the controller: {wrong}" if wrong else None


@cache
def _archives() -> ModuleType:
    """What the module on the host knows of archives and names."""
    path = Path(__file__).parents[1] / "module_utils" / "gpt_oss" / "image_archive.py"
    spec = importlib.util.spec_from_file_location("gpt_oss_image_archive", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
