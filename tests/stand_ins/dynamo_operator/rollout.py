"""The roll of workers from one generation to the next: which replicas each generation gets, and when it is over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.stand_ins.dynamo_operator import names, objects
from tests.stand_ins.dynamo_operator.graph import Component, Graph, Manifest
from tests.stand_ins.dynamo_operator.status import ROLLING


@dataclass(frozen=True)
class Targets:
    """Replicas while generations overlap: new by component, old by DynamoComponentDeployment."""

    new: Mapping[str, int]
    old: Mapping[str, int]


@dataclass(frozen=True)
class Step:
    """What a pass does to the roll: its status from now on, and whether the old generations go for good."""

    status: Manifest | None
    complete: bool = False


def workers_of(owners: Iterable[Manifest]) -> list[Manifest]:
    return [owner for owner in owners if objects.is_worker(owner) and "deletionTimestamp" not in owner["metadata"]]


def old_workers(owners: Iterable[Manifest], worker_hash: str) -> list[Manifest]:
    return [owner for owner in workers_of(owners) if objects.worker_hash_of(owner) != worker_hash]


def advance(
    graph: Graph, previous: Mapping[str, Any] | None, desired: str, owners: Iterable[Manifest], now: str
) -> Step:
    """The roll's next step: Pending, InProgress, Completed; nothing while the workers are as desired."""
    phase = (previous or {}).get("phase")
    rolling = phase in ROLLING
    if not rolling and graph.current_hash == desired:
        return Step(dict(previous) if previous else None)
    if not rolling:
        return Step({"phase": "Pending", "startTime": now})
    assert previous is not None
    everyone = sorted(component.name for component in graph.workers)
    going = {"phase": "InProgress", "startTime": previous["startTime"]}
    over = {**going, "phase": "Completed", "endTime": now, "updatedComponents": everyone}
    if graph.current_hash == desired:  # reverted while it rolled: nothing to wait for
        return Step(over, complete=True)
    if phase == "Pending":
        return Step(going)
    updated = updated_components(graph, desired, list(owners))
    if updated == everyone:
        return Step(over, complete=True)
    return Step({**going, "updatedComponents": updated} if updated else going)


def updated_components(graph: Graph, desired: str, owners: list[Manifest]) -> list[str]:
    """Workers whose new generation is ready in full and whose old ones are ready no more."""
    new, old = ready_by_component(owners, desired, new=True), ready_by_component(owners, desired, new=False)
    return sorted(
        component.name
        for component in graph.workers
        if component.name in new and new[component.name] >= component.desired and not old.get(component.name)
    )


def ready_by_component(owners: Iterable[Manifest], worker_hash: str, *, new: bool) -> dict[str, int]:
    counted: dict[str, int] = {}
    for owner in workers_of(owners):
        if (objects.worker_hash_of(owner) == worker_hash) is new:
            name = owner["spec"]["name"]
            counted[name] = counted.get(name, 0) + count(owner, "readyReplicas")
    return counted


def count(owner: Manifest, what: str) -> int:
    return int(((owner.get("status") or {}).get("component") or {}).get(what, 0))


def targets(graph: Graph, desired: str, owners: Iterable[Manifest], busy: frozenset[str]) -> Targets:
    """busy: names of DynamoComponentDeployments that still have a pod that has not ended."""
    present = workers_of(owners)
    old = old_workers(present, desired)
    new_targets: dict[str, int] = {}
    old_targets: dict[str, int] = {}
    for component in graph.workers:
        leaving = [owner for owner in old if owner["spec"]["name"] == component.name]
        if not leaving:
            continue
        arriving = [
            owner
            for owner in present
            if owner["spec"]["name"] == component.name and objects.worker_hash_of(owner) == desired
        ]
        if graph.annotations_of(component).get(names.STRATEGY) == "Recreate":
            new_targets[component.name] = component.desired if drained(leaving, busy) else 0
            old_targets |= {owner["metadata"]["name"]: 0 for owner in leaving}
            continue
        stay, come = rolling_targets(graph, component, leaving, arriving)
        new_targets[component.name] = come
        old_targets |= allocate(leaving, stay)
    return Targets(new_targets, old_targets)


def drained(leaving: Iterable[Manifest], busy: frozenset[str]) -> bool:
    """Every old generation is declared at zero, is seen at zero, and its pods have ended."""
    return all(
        owner["spec"]["replicas"] == 0
        and (owner.get("status") or {}).get("observedGeneration", 0) >= owner["metadata"].get("generation", 1)
        and count(owner, "replicas") == 0
        and owner["metadata"]["name"] not in busy
        for owner in leaving
    )


def rolling_targets(
    graph: Graph, component: Component, leaving: list[Manifest], arriving: list[Manifest]
) -> tuple[int, int]:
    """How many old replicas stay and how many new ones come, as a Deployment would reckon across both."""
    desired = component.desired
    surge, unavailable = limits(graph.annotations_of(component), desired)
    old_spec, old_available = totals(leaving)
    new_spec, new_available = totals(arriving)
    least = desired - unavailable
    new_missing = max(0, new_spec - new_available)
    removable = max(0, old_spec + new_spec - least - new_missing)
    surplus = max(0, old_available + new_available - least)
    stay = max(0, old_spec - min(removable, max(0, old_spec - old_available) + surplus))
    come = min(desired, new_spec + max(0, desired + surge - old_spec - new_spec))
    return stay, come


def limits(annotations: Mapping[str, str], desired: int) -> tuple[int, int]:
    """maxSurge, rounded up, and maxUnavailable, rounded down; at least one of them lets the roll go on."""
    surge = scaled(annotations.get(names.MAX_SURGE, "25%"), desired, math.ceil)
    unavailable = scaled(annotations.get(names.MAX_UNAVAILABLE, "25%"), desired, math.floor)
    return (1, 0) if surge == unavailable == 0 else (surge, unavailable)


def scaled(value: str, desired: int, rounding: Any) -> int:
    return int(rounding(int(value[:-1]) * desired / 100)) if value.endswith("%") else int(value)


def totals(owners: Iterable[Manifest]) -> tuple[int, int]:
    listed = list(owners)
    return sum(owner["spec"]["replicas"] for owner in listed), sum(count(o, "availableReplicas") for o in listed)


def allocate(leaving: list[Manifest], stay: int) -> dict[str, int]:
    """Replicas among several old generations: those that serve stay, the oldest go first."""
    oldest_first = sorted(leaving, key=lambda o: (o["metadata"].get("creationTimestamp", ""), o["metadata"]["name"]))
    given = {o["metadata"]["name"]: min(o["spec"]["replicas"], count(o, "availableReplicas")) for o in oldest_first}
    surplus = sum(given.values()) - stay
    for owner in oldest_first:
        name = owner["metadata"]["name"]
        taken = min(given[name], max(0, surplus))
        given[name] -= taken
        surplus -= taken
    for owner in reversed(oldest_first):
        name = owner["metadata"]["name"]
        added = min(owner["spec"]["replicas"] - given[name], max(0, -surplus))
        given[name] += added
        surplus += added
    return given
