"""A change with `rollout: blue_green`: no gap where there are as many GPUs again, and no harm where there are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes import scenario
from tests.kubernetes.api import Object
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.drivers import Driver, Stack, UpdateFailedError, changed
from tests.kubernetes.scenario import Target, impatient, meanwhile, stack_of
from tests.stand_ins.dynamo_operator.operator import Operator

pytestmark = pytest.mark.kubernetes


def _ready_workers(cluster: Cluster, namespace: str, graph: str, kind: str) -> int:
    return sum(_is_ready(pod) for pod in scenario.pods_of(cluster, namespace, graph, kind).values())


def _is_ready(pod: Object) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))


class Serving:
    """The fewest workers of each kind that were ready at any moment from `since` on: a watch misses none."""

    def __init__(self, cluster: Cluster, namespace: str, graph: str) -> None:
        self._api, self._namespace, self._graph = cluster.api, namespace, graph
        pods = self._api.request("GET", f"/api/v1/namespaces/{namespace}/pods")
        self._since = str(pods["metadata"]["resourceVersion"])
        self._pods = {pod["metadata"]["uid"]: pod for pod in pods["items"]}
        self.fewest = self._now()

    def _now(self) -> dict[str, int]:
        count: dict[str, int] = {}
        for pod in self._pods.values():
            labels = pod["metadata"].get("labels", {})
            if labels.get(scenario.GRAPH_LABEL) == self._graph and labels[scenario.TYPE_LABEL] != "frontend":
                serves = _is_ready(pod) and "deletionTimestamp" not in pod["metadata"]
                count[labels[scenario.TYPE_LABEL]] = count.get(labels[scenario.TYPE_LABEL], 0) + serves
        return count

    def follow(self, goes_on: Callable[[], bool]) -> None:
        """As long as it goes on, and until everything of that time has been seen."""
        last = False
        while not last:
            last = not goes_on()
            for change, pod in self._api.watch("v1", "Pod", self._namespace, since=self._since, seconds=1):
                self._since = pod["metadata"]["resourceVersion"]
                if change == "DELETED":
                    del self._pods[pod["metadata"]["uid"]]
                else:
                    self._pods[pod["metadata"]["uid"]] = pod
                now = self._now()
                self.fewest = {kind: min(count, now.get(kind, 0)) for kind, count in self.fewest.items()}


def _stack(driver: Driver, cluster: Cluster, target: Target, namespace: str, **more: Any) -> Stack:
    config = {"platform": "existing", "rollout": "blue_green", "model_cache_retain": False, **more}
    return stack_of(driver, cluster, target, namespace, **config)


def test_with_a_spare_machine_there_is_no_gap(
    scenario_driver: Driver, target: Target, dynamo_cluster: Cluster, dynamo_operator: Operator, stack_namespace: str
) -> None:
    cluster = dynamo_cluster
    counts = target.workers
    stack = _stack(scenario_driver, cluster, target, stack_namespace)
    with cluster.another(target.machine):
        stack.up()
        before = {kind: scenario.pods_of(cluster, stack_namespace, target.graph, kind) for kind in counts}
        stack.config["set"] = dict([target.option])

        serving = Serving(cluster, stack_namespace, target.graph)
        with meanwhile(stack.up) as running:
            serving.follow(lambda: running.outcome is None and running.error is None)

        assert "update graph" in changed(running.result())
        assert serving.fewest == counts, "as many as before served at every moment"
        for kind, count in counts.items():
            after = scenario.pods_of(cluster, stack_namespace, target.graph, kind)
            assert len(after) == count
            assert not set(after) & set(before[kind])
        assert changed(stack.up()) == []
        scenario.clean(cluster, stack_namespace)  # before the machine goes


def test_without_a_spare_machine_the_old_workers_serve_and_the_change_can_be_taken_back(
    scenario_driver: Driver,
    target: Target,
    dynamo_cluster: Cluster,
    dynamo_operator: Operator,
    stack_namespace: str,
    tmp_path: Path,
) -> None:
    cluster, graph = dynamo_cluster, target.graph
    # The GPUs are held by the workers that are to be replaced.
    more = {"load_timeout_seconds": 60, "allow_findings": ["gpu.capacity"]}
    stack = _stack(scenario_driver, cluster, target, stack_namespace, **more)

    def workers() -> dict[str, set[str]]:
        return {kind: set(scenario.pods_of(cluster, stack_namespace, graph, kind)) for kind in target.workers}

    def stuck() -> bool:
        return scenario.unschedulable(cluster, stack_namespace, graph, target.changed)

    with cluster.only("cpu-1", *target.just_enough):
        stack.up()
        before = workers()
        stack.config["set"] = dict([target.option])
        with impatient(scenario_driver, stack, tmp_path, stuck), pytest.raises(UpdateFailedError) as failed:
            stack.up()
        assert "nvidia.com/gpu" in str(failed.value), "it says that GPUs are what is missing"
        assert before[target.changed] <= workers()[target.changed]
        for kind, count in target.workers.items():
            assert _ready_workers(cluster, stack_namespace, graph, kind) >= count

        del stack.config["set"]
        stack.up()
        assert scenario.ready(cluster, stack_namespace, graph)["status"] == "True"
        cluster.api.wait("the old workers alone are left", lambda: workers()[target.changed] == before[target.changed])
