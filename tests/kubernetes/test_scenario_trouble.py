"""When something goes wrong: it ends in bounded time, says why, and the next up goes on."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.kubernetes import pods, scenario
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.drivers import Driver, UpdateFailedError, changed
from tests.kubernetes.scenario import GRAPH_LABEL, TARGETS, TYPE_LABEL, Target, impatient, meanwhile, stack_of
from tests.stand_ins.dynamo_operator.operator import Operator

pytestmark = pytest.mark.kubernetes


def test_a_failed_download_says_why_and_the_second_up_goes_on(
    scenario_driver: Driver, dynamo_cluster: Cluster, dynamo_operator: Operator, stack_namespace: str
) -> None:
    """One target stands for all: the Job is the same, and its attempts are as far apart as everywhere."""
    cluster, target = dynamo_cluster, TARGETS["gb200-agg"]
    stack = stack_of(scenario_driver, cluster, target, stack_namespace, platform="existing", model_cache_retain=False)
    name = f"{target.graph}-download"
    failing = cluster.behave(pods.fail(), stack_namespace, **{"job-name": name})
    with failing, pytest.raises(UpdateFailedError) as failed:
        stack.up()
    said = str(failed.value)
    assert f"job.{name}: Failed (BackoffLimitExceeded" in said
    assert scenario.TOKEN not in said
    assert cluster.api.find(*scenario.GRAPH, target.graph, stack_namespace) is None, "nothing is served without weights"

    again = stack.up()
    assert "replace download" in changed(again)
    assert scenario.ready(cluster, stack_namespace, target.graph)["status"] == "True"
    assert changed(stack.up()) == []


def test_a_namespace_that_would_refuse_the_workers_gets_nothing(
    scenario_driver: Driver, dynamo_cluster: Cluster, restricted_namespace: str
) -> None:
    """Without the check the graph would wait for pods that are never made, and say only that they are not ready."""
    cluster, target = dynamo_cluster, TARGETS["h200-agg"]
    stack = stack_of(
        scenario_driver, cluster, target, restricted_namespace, platform="existing", create_namespace=False
    )
    with pytest.raises(UpdateFailedError) as refused:
        stack.up()
    said = str(refused.value)
    assert "enforces the Pod Security Standard 'restricted'" in said
    assert "enforce=baseline" in said
    kinds = (("v1", "PersistentVolumeClaim"), ("v1", "Secret"), ("batch/v1", "Job"), scenario.GRAPH)
    assert [kind for kind in kinds if cluster.api.list(*kind, restricted_namespace)] == []


def test_pods_that_never_become_ready(
    scenario_driver: Driver,
    kind: Target,
    dynamo_cluster: Cluster,
    dynamo_operator: Operator,
    stack_namespace: str,
    tmp_path: Path,
) -> None:
    cluster, target, graph = dynamo_cluster, kind, kind.graph
    stack = stack_of(scenario_driver, cluster, target, stack_namespace, platform="existing", load_timeout_seconds=60)
    stuck = {GRAPH_LABEL: graph, TYPE_LABEL: target.changed}
    with (
        cluster.behave(pods.stay_unready(), stack_namespace, **stuck),
        impatient(scenario_driver, stack, tmp_path),
        pytest.raises(UpdateFailedError) as failed,
    ):
        stack.up()
    said = str(failed.value)
    assert graph in said
    assert "not ready" in said.lower()
    assert f"{graph}-smoke" not in scenario.jobs(cluster, stack_namespace), "what is not Ready is not asked"

    stack.up()
    assert scenario.jobs(cluster, stack_namespace)[f"{graph}-smoke"]["status"]["succeeded"] == 1
    assert changed(stack.up()) == []


def test_gpus_that_somebody_else_takes_meanwhile(
    scenario_driver: Driver,
    kind: Target,
    dynamo_cluster: Cluster,
    dynamo_operator: Operator,
    stack_namespace: str,
    tmp_path: Path,
) -> None:
    """Enough of them when the checks look, too few when the pods come."""
    cluster, target, graph = dynamo_cluster, kind, kind.graph
    stack = stack_of(scenario_driver, cluster, target, stack_namespace, platform="existing", load_timeout_seconds=60)
    download = {"job-name": f"{graph}-download"}
    held, drained = ExitStack(), ExitStack()
    held.enter_context(cluster.behave(pods.stay_unready(), stack_namespace, **download))
    with impatient(scenario_driver, stack, tmp_path), drained, meanwhile(stack.up) as running, held:
        labels = f"job-name={graph}-download"
        cluster.api.wait("the download runs", lambda: cluster.pods(stack_namespace, labels))
        drained.enter_context(cluster.only("cpu-1"))
    with pytest.raises(UpdateFailedError) as failed:
        running.result()
    said = str(failed.value)
    assert graph in said
    assert "gpu" in said.lower()
