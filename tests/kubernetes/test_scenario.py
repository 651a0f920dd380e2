"""The whole way, for every target and with both drivers: from an empty cluster to a served model, and back."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes import cluster as clusters
from tests.kubernetes import scenario
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.drivers import Driver, Stack, UpdateFailedError, changed
from tests.kubernetes.scenario import GRAPH, PLATFORM_NAMESPACE, TARGETS, TOKEN, Target, stack_of
from tests.stand_ins.dynamo_platform.beside import Beside

pytestmark = pytest.mark.kubernetes


@pytest.fixture
def empty_cluster(dynamo_cluster: Cluster) -> Iterator[Cluster]:
    """Without Dynamo's definitions; afterwards as it was."""
    scenario.remove_definitions(dynamo_cluster)
    yield dynamo_cluster
    scenario.clean(dynamo_cluster, *(f"story-{name}" for name in TARGETS), PLATFORM_NAMESPACE)
    clusters.install_dynamo_definitions(dynamo_cluster.api)


def test_from_an_empty_cluster_to_a_measured_endpoint_and_back(
    scenario_driver: Driver, target: Target, empty_cluster: Cluster, charts: Path
) -> None:
    cluster, graph, namespace = empty_cluster, target.graph, f"story-{target.name}"
    stack = stack_of(scenario_driver, cluster, target, namespace, catalog_overlay=str(charts), model_cache_retain=False)
    absent = stack_of(scenario_driver, cluster, target, namespace, name=f"absent-{target.name}", platform="existing")
    with pytest.raises(UpdateFailedError, match=r"platform: existing, but the cluster has no .*; allowed: "):
        absent.up()
    # No spare machine: whatever changes below has to fit where it is.
    with Beside(cluster, PLATFORM_NAMESPACE), cluster.only("cpu-1", *target.just_enough):
        assert "create graph" in changed(stack.preview())
        assert scenario.has_gone(cluster, namespace)

        first = stack.up()

        _is_placed(cluster, target, namespace)
        assert scenario.ready(cluster, namespace, graph)["status"] == "True"
        jobs = scenario.jobs(cluster, namespace)
        assert set(jobs) == {f"{graph}-download", f"{graph}-smoke"}
        assert all(job["status"]["succeeded"] == 1 for job in jobs.values())
        assert first.outputs["namespace"] == namespace
        assert first.outputs["deployment"] == graph
        assert first.outputs["model"] == "openai/gpt-oss-120b"
        assert first.outputs["url"] == f"http://{graph}-frontend.{namespace}.svc:8000"
        assert f"svc/{graph}-frontend 8000:8000" in first.outputs["port_forward"]
        assert "/v1/chat/completions" in first.outputs["curl"]
        assert f"{scenario.GRAPH_LABEL}={graph}" in first.outputs["watch"]
        encoded = base64.b64encode(TOKEN.encode()).decode()
        assert cluster.api.get("v1", "Secret", "hf-token-secret", namespace)["data"]["HF_TOKEN"] == encoded
        for text in (stack.export(), first.text, str(first.outputs)):
            assert TOKEN not in text
            assert encoded not in text

        assert changed(stack.up()) == []

        _scale(cluster, target, namespace, 2)
        assert changed(stack.up()) == []
        stack.refresh()
        assert changed(stack.up()) == []
        _rolls_what_an_option_changes(cluster, target, namespace, stack)
        assert len(scenario.pods_of(cluster, namespace, graph, "frontend")) == 2, "nobody gave it a number"
        _scale(cluster, target, namespace, 1)
        _runs_the_benchmark_once_for_each_id(cluster, target, namespace, stack)

        stack.destroy()
        assert scenario.has_gone(cluster, namespace)
        assert scenario.has_gone(cluster, PLATFORM_NAMESPACE)
        assert stack.export().count("urn:pulumi:") == 0


def _is_placed(cluster: Cluster, target: Target, namespace: str) -> None:
    """Every pod on the machines it is for, and on no others."""
    for kind, count in target.workers.items():
        pods = scenario.pods_of(cluster, namespace, target.graph, kind).values()
        assert len(pods) == count
        assert {scenario.gpus_of(pod) for pod in pods} == {target.gpus[kind]}
        assert {pod["spec"]["nodeName"] for pod in pods} <= target.gpu_nodes
    frontends = scenario.pods_of(cluster, namespace, target.graph, "frontend").values()
    assert {pod["spec"]["nodeName"] for pod in frontends} == {"cpu-1"}
    assert set(cluster.placed(namespace, "batch.kubernetes.io/job-name").values()) == {"cpu-1"}
    assert set(cluster.placed(namespace).values()) <= {"cpu-1", *target.gpu_nodes}


def _rolls_what_an_option_changes(cluster: Cluster, target: Target, namespace: str, stack: Stack) -> None:
    graph = target.graph
    before = {kind: scenario.pods_of(cluster, namespace, graph, kind) for kind in ("frontend", *target.workers)}
    jobs_before = scenario.uids(scenario.jobs(cluster, namespace))
    path, value = target.option
    stack.config["set"] = {path: value}

    done = changed(stack.up())

    assert "update graph" in done
    assert [each.split()[0] for each in done if "engine-config-" in each] == ["create", "delete"]
    after = {kind: scenario.pods_of(cluster, namespace, graph, kind) for kind in before}
    assert after["frontend"].keys() == before["frontend"].keys(), "the frontend has no part in it"
    for kind in target.workers:
        assert not set(after[kind]) & set(before[kind])
        assert len(after[kind]) == target.workers[kind]
    [config] = scenario.mounted_config(after[target.changed])
    assert {config} != scenario.mounted_config(before[target.changed])
    option = path.partition(".")[2]
    assert f"{option}: {value}" in "".join(cluster.api.get("v1", "ConfigMap", config, namespace)["data"].values())
    assert scenario.uids(scenario.jobs(cluster, namespace))[f"{graph}-download"] == jobs_before[f"{graph}-download"]
    _is_placed(cluster, target, namespace)
    assert changed(stack.up()) == []


def _scale(cluster: Cluster, target: Target, namespace: str, count: int) -> None:
    """Another controller decides how many frontends there are."""
    components = cluster.api.get(*GRAPH, target.graph, namespace)["spec"]["components"]
    for component in components:
        if component["type"] == "frontend":
            component["replicas"] = count
    cluster.api.patch(*GRAPH, target.graph, {"spec": {"components": components}}, namespace)

    def scaled() -> bool:
        ready = scenario.ready(cluster, namespace, target.graph)["status"] == "True"
        return ready and len(scenario.pods_of(cluster, namespace, target.graph, "frontend")) == count

    cluster.api.wait(f"{count} frontends", scaled)


def _runs_the_benchmark_once_for_each_id(cluster: Cluster, target: Target, namespace: str, stack: Stack) -> None:
    stack.config["benchmark"] = True
    first = stack.up()
    assert changed(first) == ["create benchmark"]
    assert "/benchmarks/" in first.outputs["artifacts"]
    assert changed(stack.up()) == []
    before = scenario.uids(scenario.jobs(cluster, namespace))
    stack.config["benchmark_run_id"] = "2"
    assert changed(stack.up()) == ["replace benchmark"]
    after = scenario.uids(scenario.jobs(cluster, namespace))
    assert {name for name in after if after[name] != before.get(name)} == set(after) - {
        f"{target.graph}-download",
        f"{target.graph}-smoke",
    }
