"""When something goes wrong: it ends in bounded time, says why, and the next up goes on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kubernetes import pods, scenario
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.drivers import Driver, Stack, UpdateFailedError, changed
from tests.kubernetes.scenario import GRAPH_LABEL, TYPE_LABEL, Target, impatient, meanwhile, stack_of
from tests.stand_ins.dynamo_operator.operator import Operator

pytestmark = pytest.mark.kubernetes


def test_each_trouble_is_said_and_the_next_up_goes_on(
    scenario_driver: Driver,
    target: Target,
    dynamo_cluster: Cluster,
    dynamo_operator: Operator,
    stack_namespace: str,
    tmp_path: Path,
) -> None:
    """One stack meets them all, in the order in which an up comes to them, and serves in the end."""
    cluster, graph = dynamo_cluster, target.graph
    stack = stack_of(scenario_driver, cluster, target, stack_namespace, platform="existing", load_timeout_seconds=60)
    _a_failed_download(cluster, stack, stack_namespace, graph)
    _gpus_that_somebody_else_takes_meanwhile(scenario_driver, cluster, target, stack, stack_namespace, tmp_path)
    _pods_that_never_become_ready(scenario_driver, cluster, target, stack, stack_namespace, tmp_path)

    stack.up()
    assert scenario.ready(cluster, stack_namespace, graph)["status"] == "True"
    assert scenario.jobs(cluster, stack_namespace)[f"{graph}-smoke"]["status"]["succeeded"] == 1
    assert changed(stack.up()) == []


def _a_failed_download(cluster: Cluster, stack: Stack, namespace: str, graph: str) -> None:
    name = f"{graph}-download"
    failing = cluster.behave(pods.fail(long_ago=True), namespace, **{"job-name": name})
    with failing, pytest.raises(UpdateFailedError) as failed:
        stack.up()
    said = str(failed.value)
    assert f"job.{name}: Failed (BackoffLimitExceeded" in said
    assert scenario.TOKEN not in said
    assert cluster.api.find(*scenario.GRAPH, graph, namespace) is None, "nothing is served without weights"


def _gpus_that_somebody_else_takes_meanwhile(
    driver: Driver, cluster: Cluster, target: Target, stack: Stack, namespace: str, directory: Path
) -> None:
    """Enough of them when the checks look, too few when the pods come. The failed download is made anew before."""
    graph, download = target.graph, f"{target.graph}-download"
    before = scenario.uids(scenario.jobs(cluster, namespace))[download]

    def stuck() -> bool:
        return scenario.unschedulable(cluster, namespace, graph, target.changed)

    held, drained = ExitStack(), ExitStack()
    held.enter_context(cluster.behave(pods.stay_unready(), namespace, **{"job-name": download}))
    with impatient(driver, stack, directory, stuck), drained, meanwhile(stack.up) as running, held:
        cluster.api.wait(
            "another download runs",
            lambda: (
                scenario.uids(scenario.jobs(cluster, namespace)).get(download) not in (None, before)
                and cluster.pods(namespace, f"job-name={download}")
            ),
        )
        drained.enter_context(cluster.only("cpu-1"))
    with pytest.raises(UpdateFailedError) as failed:
        running.result()
    said = str(failed.value)
    assert graph in said
    assert "gpu" in said.lower()


def _pods_that_never_become_ready(
    driver: Driver, cluster: Cluster, target: Target, stack: Stack, namespace: str, directory: Path
) -> None:
    graph = target.graph

    def stuck() -> bool:
        return scenario.unready(cluster, namespace, graph, target.changed)

    labels = {GRAPH_LABEL: graph, TYPE_LABEL: target.changed}
    with cluster.behave(pods.stay_unready(), namespace, **labels):
        # They have nodes again by now, and may have been ready for a moment.
        cluster.api.wait("a pod is unready", stuck)
        cluster.api.wait("so is the graph", lambda: scenario.ready(cluster, namespace, graph)["status"] == "False")
        with impatient(driver, stack, directory, stuck), pytest.raises(UpdateFailedError) as failed:
            stack.up()
    said = str(failed.value)
    assert graph in said
    assert "not ready" in said.lower()
    assert f"{graph}-smoke" not in scenario.jobs(cluster, namespace), "what is not Ready is not asked"


def test_a_namespace_that_would_refuse_the_workers_gets_nothing(
    scenario_driver: Driver, target: Target, dynamo_cluster: Cluster, restricted_namespace: str
) -> None:
    """Without the check the graph would wait for pods that are never made, and say only that they are not ready."""
    cluster = dynamo_cluster
    before = cluster.left_in(restricted_namespace)
    stack = stack_of(
        scenario_driver, cluster, target, restricted_namespace, platform="existing", create_namespace=False
    )
    with pytest.raises(UpdateFailedError) as refused:
        stack.up()
    said = str(refused.value)
    assert "enforces the Pod Security Standard 'restricted'" in said
    assert "enforce=baseline" in said
    assert cluster.left_in(restricted_namespace) == before
