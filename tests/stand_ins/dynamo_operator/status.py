"""What the operator says about what it sees: pure functions from observed objects to statuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.stand_ins.dynamo_operator import names, objects
from tests.stand_ins.dynamo_operator.graph import Graph, Manifest

PENDING, SUCCESSFUL, FAILED = "pending", "successful", "failed"
ROLLING = ("Pending", "InProgress")
COUNTS = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")


# --- conditions -----------------------------------------------------------------------------------------------------


def condition(kind: str, value: str, reason: str, message: str, observed: int | None = None) -> Manifest:
    made: Manifest = {"type": kind, "status": value, "reason": reason, "message": message}
    if observed is not None:
        made["observedGeneration"] = observed
    return made


def merged_conditions(previous: Sequence[Manifest], current: Iterable[Manifest], now: str) -> list[Manifest]:
    """Conditions with the time of their last transition: it moves only when the value does."""
    before = {item["type"]: item for item in previous}
    merged = dict(before)
    for item in current:
        old = before.get(item["type"])
        moved = now if old is None or old["status"] != item["status"] else old["lastTransitionTime"]
        merged[item["type"]] = {**item, "lastTransitionTime": moved}
    return list(merged.values())


def is_true(conditions: Iterable[Manifest], kind: str) -> bool:
    return any(item["type"] == kind and item["status"] == "True" for item in conditions)


# --- a component ----------------------------------------------------------------------------------------------------


def deployment_ready(deployment: Manifest) -> bool:
    """Updated, available and free of old pods, as seen by the controller of Deployments for this generation."""
    desired = deployment["spec"].get("replicas", 1)
    status = deployment.get("status") or {}
    if status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return False
    if desired == 0:
        return True
    if status.get("updatedReplicas", 0) < desired or status.get("availableReplicas", 0) < desired:
        return False
    return status.get("replicas", 0) == desired and is_true(status.get("conditions") or [], "Available")


def starting() -> list[Manifest]:
    message = "Starting to reconcile DynamoComponentDeployment"
    return [
        condition("Available", "Unknown", "Reconciling", message),
        condition("DynamoComponentReady", "Unknown", "Reconciling", message),
    ]


def component_failed(message: str) -> list[Manifest]:
    prefix = "Failed to reconcile DynamoComponentDeployment: failed to reconcile the resources: "
    return [condition("Available", "False", "Reconciling", prefix + message)]


def component_status(owner: Manifest, deployment: Manifest, now: str) -> Manifest:
    """The status of a DynamoComponentDeployment, given its Deployment."""
    ready = deployment_ready(deployment)
    previous = (owner.get("status") or {}).get("conditions") or []
    value, word, not_word = ("True", "ready", "") if ready else ("False", "not ready", "Not")
    current = [
        condition("Available", value, f"Deployment{not_word}Ready", f"Deployment is {word}"),
        condition("DynamoComponentReady", value, f"Component{not_word}Ready", f"DynamoComponent is {word}"),
    ]
    counted = deployment.get("status") or {}
    return {
        "component": {
            "componentKind": "Deployment",
            "componentNames": [deployment["metadata"]["name"]],
            "runtimeNamespace": objects.runtime_namespace(owner),
            **{count: counted.get(count, 0) for count in COUNTS},
        },
        "conditions": merged_conditions(previous, current, now),
        "observedGeneration": owner["metadata"].get("generation", 1),
    }


def not_ready_reason(owner: Manifest) -> str | None:
    """Why a DynamoComponentDeployment is not ready; None when it is."""
    status = owner.get("status") or {}
    generation, observed = owner["metadata"].get("generation", 1), status.get("observedGeneration", 0)
    if observed < generation:
        return f"spec not yet processed: generation={generation}, observedGeneration={observed}"
    if is_true(status.get("conditions") or [], "Available"):
        return None
    return "Component deployment not ready - Available condition not true"


# --- the graph --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a pass over a graph ended, before it is written as a status."""

    state: str
    reason: str
    message: str
    components: Mapping[str, Manifest] | None = None  # None: as they were
    rolling_update: Manifest | None = None
    restart: Manifest | None = None
    status_fields: Mapping[str, Any] = field(default_factory=dict)


def readiness(owners: Iterable[Manifest], old: Iterable[Manifest]) -> Outcome:
    """owners: the DynamoComponentDeployments the graph wants now; old: workers of former generations, draining."""
    current = sorted(owners, key=lambda owner: str(owner["metadata"]["name"]))
    reasons = [
        f"{owner['metadata']['name']}: {reason}" for owner in current if (reason := not_ready_reason(owner)) is not None
    ]
    components = {
        owner["spec"]["name"]: owner["status"]["component"]
        for owner in current
        if (owner.get("status") or {}).get("component")
    }
    components = with_old_workers(components, old)
    if not reasons:
        return Outcome(SUCCESSFUL, "all_resources_are_ready", "All resources are ready", components)
    message = "Resources not ready: " + "; ".join(reasons)
    return Outcome(PENDING, "some_resources_are_not_ready", message, components)


def with_old_workers(components: Mapping[str, Manifest], old: Iterable[Manifest]) -> dict[str, Manifest]:
    """During a roll a worker's counts are those of all its generations; only the newest counts as updated."""
    merged = dict(components)
    for owner in sorted(old, key=lambda owner: str(owner["metadata"]["name"])):
        status = (owner.get("status") or {}).get("component")
        if not status:
            continue
        name = owner["spec"]["name"]
        present = merged.get(name)
        if present is None:
            merged[name] = {**status, "updatedReplicas": 0}
            continue
        summed = {count: present[count] + status[count] for count in COUNTS if count != "updatedReplicas"}
        component_names = sorted([*present["componentNames"], *status["componentNames"]])
        merged[name] = {
            **present,
            **summed,
            "componentNames": component_names,
            "runtimeNamespace": status["runtimeNamespace"],
        }
    return merged


def failure(reason: str, message: str) -> Outcome:
    return Outcome(FAILED, reason, message)


def graph_status(graph: Graph, previous: Mapping[str, Any], outcome: Outcome, now: str) -> Manifest:
    """The graph's whole status after a pass. A failed pass leaves all but Ready and state as it was."""
    status: Manifest = dict(previous)
    state, reason, message = outcome.state, outcome.reason, outcome.message
    if state != FAILED:
        status["observedGeneration"] = graph.generation
        status.pop("restart", None)
        if outcome.restart is not None:
            status["restart"] = outcome.restart
        if outcome.rolling_update is not None:
            status["rollingUpdate"] = outcome.rolling_update
            if outcome.rolling_update.get("phase") in ROLLING:
                state, reason, message = PENDING, "rolling_update_in_progress", "Rolling update in progress"
        status.pop("components", None)
        if outcome.components:
            status["components"] = dict(outcome.components)
    ready = condition("Ready", "True" if state == SUCCESSFUL else "False", reason, message, graph.generation)
    status["conditions"] = merged_conditions(previous.get("conditions") or [], [ready], now)
    status["state"] = state
    return status


# --- restarts ---------------------------------------------------------------------------------------------------------


def next_restart(graph: Graph, previous: Mapping[str, Any], ready: Mapping[str, bool]) -> Manifest | None:
    """The restart's status: components one after the other by name, or all at once when asked for Parallel.

    ready: component -> its DynamoComponentDeployment is ready in its present generation.
    """
    asked = graph.spec.restart.id if graph.spec.restart else ""
    done = previous.get("phase") in ("Completed", "Failed", "Superseded")
    if not asked:
        return dict(previous) if done else None
    if previous.get("observedID") == asked and done:
        return dict(previous)
    order = restart_order(graph)
    assert graph.spec.restart is not None
    if previous.get("observedID") != asked:
        first = order if graph.spec.restart.parallel else order[:1]
        return {"observedID": asked, "phase": "Restarting", "inProgress": first}
    going: list[str] = list(previous.get("inProgress") or order[:1])
    waiting = [name for name in going if not ready.get(name, False)]
    if waiting:
        return {"observedID": asked, "phase": "Restarting", "inProgress": waiting}
    following = [] if graph.spec.restart.parallel else order[order.index(going[-1]) + 1 :][:1]
    if not following:
        return {"observedID": asked, "phase": "Completed"}
    return {"observedID": asked, "phase": "Restarting", "inProgress": following}


def restart_order(graph: Graph) -> list[str]:
    given: Sequence[str] = graph.spec.restart.strategy.get("order", ()) if graph.spec.restart else ()
    return list(given) or sorted(component.name for component in graph.spec.components)


def restart_annotation(
    graph: Graph, restart: Mapping[str, Any] | None, component: str, existing: str | None
) -> str | None:
    """What a component's pods are to carry: the restart's id once its turn has come, else what they carry already."""
    if restart and restart.get("phase") == "Restarting" and graph.spec.restart:
        order = restart_order(graph)
        last = max(order.index(name) for name in restart["inProgress"])
        if component in order[: last + 1]:
            return graph.spec.restart.id
    return existing


def selector_of(graph: str, component: str) -> str:
    """What a scaling adapter tells the autoscaler to select."""
    return f"{names.COMPONENT_LABEL}={component},{names.GRAPH_LABEL}={graph}"
