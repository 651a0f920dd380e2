"""A change with `rollout: blue_green`: no gap where there are as many GPUs again, and no harm where there are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes import scenario
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.drivers import Driver, UpdateFailedError, changed
from tests.kubernetes.scenario import TARGETS, impatient, meanwhile, stack_of
from tests.stand_ins.dynamo_operator.operator import Operator

pytestmark = pytest.mark.kubernetes


def _ready_workers(cluster: Cluster, namespace: str, graph: str, kind: str) -> int:
    return sum(
        any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))
        for pod in scenario.pods_of(cluster, namespace, graph, kind).values()
    )


@pytest.mark.parametrize("name", ["gb200-agg", "gb200-disagg", "h200-agg"])
def test_with_a_spare_tray_there_is_no_gap(
    scenario_driver: Driver, name: str, dynamo_cluster: Cluster, dynamo_operator: Operator, stack_namespace: str
) -> None:
    cluster, target = dynamo_cluster, TARGETS[name]
    counts = target.smaller or target.workers
    said: dict[str, Any] = {"platform": "existing", "rollout": "blue_green", "model_cache_retain": False}
    if target.smaller:
        said["replicas"] = dict(target.smaller)
    stack = stack_of(scenario_driver, cluster, target, stack_namespace, **said)
    stack.up()
    before = {kind: scenario.pods_of(cluster, stack_namespace, target.graph, kind) for kind in counts}
    stack.config["set"] = dict([target.option])

    fewest = dict(counts)
    with meanwhile(stack.up) as running:
        while running.outcome is None and running.error is None:
            for kind in counts:
                fewest[kind] = min(fewest[kind], _ready_workers(cluster, stack_namespace, target.graph, kind))

    assert "update graph" in changed(running.result())
    assert fewest == counts, "as many as before served at every moment"
    for kind, count in counts.items():
        after = scenario.pods_of(cluster, stack_namespace, target.graph, kind)
        assert len(after) == count
        assert not set(after) & set(before[kind])
    assert changed(stack.up()) == []


def test_without_a_spare_tray_the_old_worker_serves_and_the_change_can_be_taken_back(
    scenario_driver: Driver, dynamo_cluster: Cluster, dynamo_operator: Operator, stack_namespace: str, tmp_path: Path
) -> None:
    cluster, target = dynamo_cluster, TARGETS["gb200-agg"]
    stack = stack_of(
        scenario_driver,
        cluster,
        target,
        stack_namespace,
        platform="existing",
        rollout="blue_green",
        load_timeout_seconds=60,
        model_cache_retain=False,
        allow_findings=["gpu.capacity"],  # the GPUs are held by the worker that is to be replaced
    )
    with cluster.only("cpu-1", *target.just_enough):
        stack.up()
        before = scenario.pods_of(cluster, stack_namespace, target.graph, "worker")
        stack.config["set"] = dict([target.option])
        with impatient(scenario_driver, stack, tmp_path), pytest.raises(UpdateFailedError) as failed:
            stack.up()
        assert "nvidia.com/gpu" in str(failed.value), "it says that GPUs are what is missing"
        assert set(before) <= set(scenario.pods_of(cluster, stack_namespace, target.graph, "worker"))
        assert _ready_workers(cluster, stack_namespace, target.graph, "worker") == 1

        del stack.config["set"]
        stack.up()
        assert scenario.ready(cluster, stack_namespace, target.graph)["status"] == "True"
        cluster.api.wait(
            "the old worker alone is left",
            lambda: set(scenario.pods_of(cluster, stack_namespace, target.graph, "worker")) == set(before),
        )
