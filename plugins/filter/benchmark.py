"""Filters of role benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError


def traffic_shapes(names: Sequence[str], traffic: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Shapes of traffic by their names, each with its name, as module benchmark_run takes them."""
    unknown = [name for name in names if name not in traffic]
    if unknown:
        raise AnsibleFilterError(f"benchmark_shapes: {', '.join(unknown)}; allowed: {', '.join(sorted(traffic))}")
    if not names:
        raise AnsibleFilterError(f"benchmark_shapes: empty; allowed: {', '.join(sorted(traffic))}")
    return [{**traffic[name], "name": name} for name in names]


class FilterModule:
    """What Ansible looks for."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"traffic_shapes": traffic_shapes}
