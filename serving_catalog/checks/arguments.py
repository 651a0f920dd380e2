"""What the action plugins that judge a host are given: settings, a plan, and where results are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Settings = TypeVar("Settings", bound=BaseModel)


def settings_of(kind: type[Settings], arguments: Mapping[str, Any], without: Collection[str]) -> Settings:
    """The arguments but for those named in `without`, validated. ValueError names each that is wrong."""
    given = {key: value for key, value in arguments.items() if key not in without}
    try:
        return kind.model_validate_json(json.dumps(given))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']} (found {e['input']!r})" for e in error.errors()]
        raise ValueError("; ".join(problems)) from None


def plan_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    plan = arguments.get("plan")
    if not isinstance(plan, dict) or "processes" not in plan:
        raise ValueError("plan: expected the host's plan (ansible_facts['serving_plan'])")
    return plan


def results_of(host: str, directory: Any) -> Path:
    """Where a host's results lie, without an ending; below the directory that the playbook was started in."""
    return Path.cwd() / Path(str(directory or "verdicts")).expanduser() / re.sub(r"[^A-Za-z0-9._-]", "_", host)
