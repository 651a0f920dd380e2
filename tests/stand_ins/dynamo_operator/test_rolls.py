"""How replicas move between generations of workers, played through without a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.stand_ins.dynamo_operator import graph as graphs
from tests.stand_ins.dynamo_operator import names, objects, rollout, status
from tests.stand_ins.dynamo_operator.graph import Graph

SUBMITTED = Path(__file__).parent / "recorded" / "submitted"
OLD, NEW = "01d01d00", "4e34e300"
SURGE_0 = {names.MAX_SURGE: "0", names.MAX_UNAVAILABLE: "1"}


def graph(replicas: int, annotations: Mapping[str, str]) -> Graph:
    manifest = yaml.safe_load((SUBMITTED / "agg.yaml").read_text())
    manifest["spec"]["annotations"] = dict(annotations)
    manifest["spec"]["components"][1]["replicas"] = replicas
    manifest["metadata"]["annotations"] = {names.CURRENT_WORKER_HASH: OLD}
    return graphs.read(manifest)


def owner(of: Graph, worker_hash: str, replicas: int) -> dict[str, Any]:
    return objects.component_deployment(of, of.workers[0], worker_hash, replicas)


def observe(item: dict[str, Any], available: int) -> None:
    component = {"replicas": item["spec"]["replicas"], "readyReplicas": available, "availableReplicas": available}
    item["status"] = {"component": component, "observedGeneration": item["metadata"].get("generation", 1)}


def play(of: Graph, room: int) -> list[tuple[int, int]]:
    """A roll on a cluster with room for so many workers: declared (old, new) replicas, step by step, until it rests."""
    desired = of.workers[0].desired
    old, new = owner(of, OLD, desired), owner(of, NEW, 0)
    observe(old, desired)
    observe(new, 0)
    steps: list[tuple[int, int]] = []
    rolling: dict[str, Any] | None = None
    for _ in range(30):
        step = rollout.advance(of, rolling, NEW, [old, new], "now")
        rolling = step.status
        if step.complete:
            break
        targets = rollout.targets(of, NEW, [old, new], busy=frozenset())
        old["spec"]["replicas"] = targets.old[old["metadata"]["name"]]
        new["spec"]["replicas"] = targets.new[of.workers[0].name]
        declared = (old["spec"]["replicas"], new["spec"]["replicas"])
        if not steps or steps[-1] != declared:
            steps.append(declared)
        observe(old, declared[0])
        observe(new, min(declared[1], max(0, room - declared[0])))
    assert rolling is not None
    return [*steps, (-1, -1)] if rolling["phase"] == "Completed" else steps


DONE = (-1, -1)


@pytest.mark.parametrize(
    ("replicas", "annotations", "room", "steps"),
    [
        pytest.param(1, {}, 2, [(1, 1), (0, 1), DONE], id="blue-green-with-room"),
        pytest.param(1, {}, 1, [(1, 1)], id="blue-green-without-room-is-stuck-and-still-serves"),
        pytest.param(1, SURGE_0, 1, [(0, 0), (0, 1), DONE], id="surge-0-needs-no-room"),
        pytest.param(1, {names.STRATEGY: "Recreate"}, 1, [(0, 0), (0, 1), DONE], id="recreate-needs-no-room"),
        pytest.param(4, {}, 4, [(3, 1), (2, 2), (1, 3), (0, 4), DONE], id="four-a-quarter-at-a-time"),
        pytest.param(2, SURGE_0, 2, [(1, 0), (1, 1), (0, 1), (0, 2), DONE], id="two-one-at-a-time"),
    ],
)
def test_a_roll_moves_replicas_as_its_annotations_say(
    replicas: int, annotations: dict[str, str], room: int, steps: list[tuple[int, int]]
) -> None:
    assert play(graph(replicas, annotations), room) == steps


def test_recreate_waits_for_the_pods_of_the_old_generation() -> None:
    of = graph(1, {names.STRATEGY: "Recreate"})
    old, new = owner(of, OLD, 0), owner(of, NEW, 0)
    observe(old, 0)
    observe(new, 0)
    name = old["metadata"]["name"]
    assert rollout.targets(of, NEW, [old, new], busy=frozenset({name})).new == {"TrtllmWorker": 0}
    assert rollout.targets(of, NEW, [old, new], busy=frozenset()).new == {"TrtllmWorker": 1}


def test_a_revert_ends_the_roll_at_once() -> None:
    of = graph(1, {})
    stuck = {"phase": "InProgress", "startTime": "before"}
    step = rollout.advance(of, stuck, OLD, [owner(of, OLD, 1), owner(of, NEW, 1)], "now")
    assert step.complete
    assert step.status == {
        "phase": "Completed",
        "startTime": "before",
        "endTime": "now",
        "updatedComponents": ["TrtllmWorker"],
    }


@pytest.mark.parametrize(
    ("path", "value", "rolls"),
    [
        (("spec", "components", 1, "replicas"), 2, False),
        (("spec", "components", 1, "scalingAdapter"), {}, False),
        (("spec", "components", 0, "podTemplate", "spec", "priorityClassName"), "high", False),
        (("metadata", "labels"), {"team": "a"}, False),
        (("metadata", "annotations"), {"note": "x"}, False),
        (("spec", "components", 1, "type"), "decode", True),
        (("spec", "components", 1, "sharedMemorySize"), "64Gi", True),
        (("spec", "components", 1, "podTemplate", "spec", "priorityClassName"), "high", True),
        (("spec", "components", 1, "podTemplate", "metadata"), {"annotations": {names.STRATEGY: "Recreate"}}, True),
        (("spec", "annotations"), {names.STRATEGY: "Recreate"}, True),
    ],
)
def test_what_rolls_workers_is_what_was_recorded(path: tuple[str | int, ...], value: Any, rolls: bool) -> None:
    manifest = yaml.safe_load((SUBMITTED / "agg.yaml").read_text())
    before = graphs.worker_hash(graphs.read(manifest))
    place: Any = manifest
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    assert (graphs.worker_hash(graphs.read(manifest)) != before) is rolls


def test_all_workers_of_a_graph_share_one_hash() -> None:
    manifest = yaml.safe_load((SUBMITTED / "disagg.yaml").read_text())
    before = graphs.worker_hash(graphs.read(manifest))
    manifest["spec"]["components"][2]["podTemplate"]["spec"]["containers"][0]["args"] = ["changed"]
    of = graphs.read(manifest)
    assert graphs.worker_hash(of) != before
    made = [objects.component_deployment(of, worker, graphs.worker_hash(of)) for worker in of.workers]
    assert len({item["metadata"]["labels"][names.HASH_LABEL] for item in made}) == 1


def test_an_unready_worker_is_told_as_recorded() -> None:
    """The status recorded while a worker's pod was not ready, from the components it was told from."""
    recorded = yaml.safe_load((SUBMITTED.parent / "agg-status-worker-not-ready.yaml").read_text())
    of = graph(1, {}).model_copy(update={"generation": recorded["generation"]})
    said = recorded["status"]
    owners = []
    for component, worker_hash in zip(of.spec.components, ("", "5d0f2cb2"), strict=True):
        item = objects.component_deployment(of, component, worker_hash)
        ready = "False" if component.is_worker else "True"
        item["status"] = {
            "component": said["components"][component.name],
            "conditions": [{"type": "Available", "status": ready}],
            "observedGeneration": 1,
        }
        owners.append(item)
    outcome = status.readiness(owners, old=[])
    told = status.Outcome(
        outcome.state, outcome.reason, outcome.message, outcome.components, said["rollingUpdate"], said["restart"]
    )
    assert status.graph_status(of, said, told, "unused") == said
