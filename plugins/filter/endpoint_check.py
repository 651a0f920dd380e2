"""Filters of role endpoint_check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - to ask it, not to listen on it


def probe_endpoints(
    plan: Mapping[str, Any], address: str = "127.0.0.1", load_seconds: float = 0, units: bool = True
) -> list[dict[str, Any]]:
    """The plan's processes as module endpoint_probe takes them. load_seconds 0 means the plan's own limit."""
    host = EVERY_ADDRESS.get(address, address)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return [
        {
            "name": str(process["name"]),
            "url": f"http://{host}:{process['port']}",
            "model": process["served_model_id"],
            "health_path": process.get("health_path") or "/health",
            "ready_within_seconds": float(load_seconds or process["ready_within_seconds"]),
            **({"unit": f"gpt-oss@{process['name']}.service"} if units else {}),
        }
        for process in plan["processes"]
    ]


class FilterModule:
    """What Ansible looks for."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"probe_endpoints": probe_endpoints}
