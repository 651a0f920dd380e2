"""Which host of a fleet gives weights, which takes them, and which one brings them when nobody has them yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LOOKED, ELSEWHERE = "__model_weights_share", "__model_weights_elsewhere"
MOST_SOURCES_ELSEWHERE = 4


def fan_out(batch: Iterable[str], hostvars: Mapping[str, Any], me: str) -> dict[str, Any]:
    """The parts in sharing `me`'s model, as far as hosts have looked.

    `batch` are the hosts that are still in the run. Hosts with another model or revision do not count. Returns
    {participants, holders, elsewhere, lacking: names in the inventory's order; peers: {name: {name, address, port}};
    lead: who speaks with hosts outside the run; bringer: who fetches when nobody has the model; source: who describes
    it}, with empty texts where there is nobody.
    """
    names = list(batch)
    looks = {name: _look(hostvars, name) for name in names}
    model = looks.get(me, {}).get("model")
    here = {name: look for name, look in looks.items() if look.get("model") == model and model is not None}
    holders = [name for name, look in here.items() if look["verified"]]
    lacking = [name for name, look in here.items() if not look["verified"]]
    asked = _elsewhere(hostvars, names)
    able = {name: look for name, look in asked.items() if look.get("model") == model and look.get("verified")}
    elsewhere = [] if holders else list(able)[:MOST_SOURCES_ELSEWHERE]
    sources = holders or elsewhere
    # The one with the most of it goes on; among equals the first in the inventory.
    bringer = "" if sources or not lacking else max(lacking, key=lambda name: here[name]["held_bytes"])
    everyone = {**here, **{name: able[name] for name in elsewhere}}
    return {
        "participants": list(here),
        "holders": holders,
        "elsewhere": elsewhere,
        "lacking": lacking,
        "peers": {
            name: {"name": name, "address": look["address"], "port": look["port"]} for name, look in everyone.items()
        },
        "lead": lacking[0] if lacking else (holders[0] if holders else ""),
        "bringer": bringer,
        "source": sources[0] if sources else "",
        "unreachable": sorted(name for name, look in asked.items() if look.get("unreachable")),
    }


def _look(hostvars: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = hostvars[name].get(LOOKED) or {}
    return dict(found) if "model" in found else {}


def _elsewhere(hostvars: Mapping[str, Any], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """What hosts outside the run answered, whoever asked them."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        for result in (hostvars[name].get(ELSEWHERE) or {}).get("results", []):
            found[str(result.get("item"))] = dict(result)
    return found


def unknown_hosts(wanted: Iterable[str], known: Iterable[str]) -> list[str]:
    """Names that the inventory does not have."""
    there = set(known)
    return sorted({str(name) for name in wanted} - there)


class FilterModule:
    def filters(self) -> dict[str, Any]:
        return {"fan_out": fan_out, "unknown_hosts": unknown_hosts}
