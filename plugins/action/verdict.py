"""Controller side of verdict: asks the host once, judges, writes verdicts/<host>.json, prints a table."""

from __future__ import annotations

import json
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from pydantic import TypeAdapter, ValidationError

from serving_catalog import load_catalog
from serving_catalog.checks import (
    Check,
    DiagnosisSettings,
    annotate,
    diagnose,
    diagnosis_survey,
    judged,
    request_of,
    summary,
    table,
)
from serving_catalog.checks.arguments import plan_of, results_of, settings_of
from serving_catalog.errors import CatalogError

_OWN = ("plan", "probes", "benchmark", "directory", "fail", "procfs", "sysfs", "rootfs", "tool_paths")
_PROBES = TypeAdapter(tuple[Check, ...])

display = Display()


class ActionModule(ActionBase):
    """Changes nothing on the host. In check mode the file is not written either."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        arguments = dict(self._task.args)
        try:
            plan = plan_of(arguments)
            settings = settings_of(DiagnosisSettings, arguments, _OWN)
            probes = _PROBES.validate_json(json.dumps(arguments.get("probes") or []))
            catalog = load_catalog(self._templar.template(variables.get("serving_catalog_overlay")) or None)
        except (ValueError, CatalogError) as error:  # pydantic's are among them
            raise AnsibleActionFail(f"verdict: {error}") from None
        asked = diagnosis_survey(plan, settings)
        asked |= {key: arguments[key] for key in _OWN[5:] if arguments.get(key) not in (None, "")}
        asked["controller_time"] = time.time()
        answer = self._execute_module(module_name="host_survey", module_args=asked, task_vars=variables)
        survey = (answer.get("ansible_facts") or {}).get("host_survey")
        if answer.get("failed") or survey is None:
            return {**result, **answer}
        survey = annotate(survey, catalog)
        checks = diagnose(survey, plan, settings, catalog, probes, arguments.get("benchmark") or None)
        name = str(variables.get("inventory_hostname", "host"))
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        try:
            verdict = judged(name, at, request_of(plan), checks)
        except ValidationError as error:  # probes with an id of ours
            raise AnsibleActionFail("verdict: " + "; ".join(e["msg"] for e in error.errors())) from None
        content = verdict.model_dump(mode="json")
        path = Path(f"{results_of(name, arguments.get('directory'))}.json")
        if not self._task.check_mode:
            _write(path, json.dumps(content, indent=2) + "\n")
        word = "ok" if verdict.ok else "not ok"
        where = "not written in check mode" if self._task.check_mode else str(path)
        told = f"{name}: {word}; {summary(checks)} ({where})"
        display.display(f"\n{told}\n{table(checks)}\n", color=None if verdict.ok else "red")
        result |= {"changed": False, "path": str(path), "msg": told}
        if verdict.ok or not arguments.get("fail"):
            return {**result, "verdict": content}
        # Short: Ansible prints the whole result of a failed task below the message, and the table stands above.
        findings = [check.id for check in verdict.findings]
        return {**result, "failed": True, "findings": findings, "msg": f"{told}; findings: {', '.join(findings)}"}


def _write(path: Path, content: str) -> None:
    """Put the file in place whole, or leave what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
