"""JSON objects laid over one another as RFC 7396 (JSON merge patch) says. Standard library only, Python 3.8 and "
"later."""

from __future__ import annotations

import json
from typing import Any


def json_object(text: str, where: str) -> dict[str, Any]:
    """The object in a text, or a ValueError that says what is wrong with `where`."""
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}); repair it or move it away") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where} must hold a JSON object, not {type(value).__name__}; repair it or move it away")
    return value


def merged(now: Any, patch: Any) -> Any:
    """Objects merge key by key, null removes a key, anything else replaces.

    One step beyond the RFC: removing a key from an object that is not there does not make an empty object.
    """
    if not isinstance(patch, dict):
        return patch
    result = dict(now) if isinstance(now, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            value_after = merged(result.get(key), value)
            if value_after != {} or value == {} or key in result:
                result[key] = value_after
    return result
