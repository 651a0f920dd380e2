"""Where something is there already: a platform, a namespace, a Secret, a claim, weights, or another deployment."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kubernetes import scenario
from tests.kubernetes.api import Object
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.drivers import Driver, UpdateFailedError, changed
from tests.kubernetes.scenario import TARGETS, Target, stack_of
from tests.stand_ins.dynamo_operator.operator import Operator

pytestmark = pytest.mark.kubernetes

CLAIM = ("v1", "PersistentVolumeClaim", "model-cache")


def claim(namespace: str) -> Object:
    spec = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "shared-files",
        "resources": {"requests": {"storage": "500Gi"}},
    }
    metadata = {"name": "weights", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def secret(namespace: str) -> Object:
    metadata = {"name": "my-token", "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"token": "hf_of_somebody"}}


def test_platform_namespace_secret_and_claim_that_exist_are_used_and_left(
    scenario_driver: Driver, target: Target, dynamo_cluster: Cluster, dynamo_operator: Operator
) -> None:
    """And another stack that would make the same deployment there is refused before it makes anything."""
    cluster = dynamo_cluster
    with cluster.namespace("existing") as namespace:
        for each in (claim(namespace), secret(namespace)):
            cluster.api.create(each)
        before = cluster.left_in(namespace)
        said: dict[str, Any] = {
            "platform": "existing",
            "create_namespace": False,
            "hf_token_secret": "my-token",
            "hf_token_key": "token",
            "model_cache_existing": True,
            "model_cache_claim": "weights",
        }
        stack = stack_of(scenario_driver, cluster, target, namespace, **said)
        done = stack.up()
        made = {step.type for step in done.steps if step.operation == "create" and step.type.startswith("kubernetes:")}
        assert not {
            kind for kind in made if kind.endswith((":Release", ":Secret", ":Namespace", ":PersistentVolumeClaim"))
        }
        assert scenario.ready(cluster, namespace, target.graph)["status"] == "True"
        [download] = [job for name, job in scenario.jobs(cluster, namespace).items() if name.endswith("-download")]
        assert '{"name": "my-token", "key": "token"}' in _token_reference(download)
        assert changed(stack.up()) == []

        there = cluster.left_in(namespace)
        belongs = f"name: '{target.graph}' exists already in {namespace} and belongs to the stack .*/{stack.name};"
        with pytest.raises(UpdateFailedError, match=belongs):
            stack_of(scenario_driver, cluster, target, namespace, name=f"another-{namespace}", **said).up()
        assert cluster.left_in(namespace) == there

        stack.destroy()
        cluster.api.wait("only what was there is left", lambda: scenario.left_in(cluster, namespace) == before)


def _token_reference(job: Object) -> str:
    found = [
        each["valueFrom"]["secretKeyRef"]
        for container in job["spec"]["template"]["spec"]["containers"]
        for each in container["env"]
        if each["name"] == "HF_TOKEN"
    ]
    return ", ".join(f'{{"name": "{each["name"]}", "key": "{each["key"]}"}}' for each in found)


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        *((name, "shared-files-first-consumer") for name in TARGETS),
        *((name, "shared-files") for name in ("gb200-disagg", "h200-agg")),
    ],
)
def test_weights_are_kept_when_asked_and_taken_back(
    scenario_driver: Driver,
    name: str,
    storage: str,
    dynamo_cluster: Cluster,
    dynamo_operator: Operator,
    stack_namespace: str,
) -> None:
    """Where storage waits for its first consumer, the claim is Pending when it is made and bound when it is taken back.

    Claims that are bound at once differ in nothing else, and targets not in their claims: two stand for all.
    """
    cluster, target = dynamo_cluster, TARGETS[name]
    stack = stack_of(  # kept unless told not to
        scenario_driver, cluster, target, stack_namespace, platform="existing", model_cache_storage_class=storage
    )
    stack.up()
    made = cluster.api.get(*CLAIM, stack_namespace)
    assert made["spec"]["storageClassName"] == storage
    assert made["status"]["phase"] == "Bound"
    assert changed(stack.up()) == []

    stack.destroy()
    cluster.api.wait(
        "the claim alone is left",
        lambda: scenario.left_in(cluster, stack_namespace) == ["PersistentVolumeClaim/model-cache"],
    )
    stack.up()
    assert scenario.ready(cluster, stack_namespace, target.graph)["status"] == "True"
    assert cluster.api.get(*CLAIM, stack_namespace)["metadata"]["uid"] == made["metadata"]["uid"]
    assert changed(stack.up()) == []

    stack.config["model_cache_retain"] = False
    stack.up()
    stack.destroy()
    assert scenario.has_gone(cluster, stack_namespace)


@pytest.mark.parametrize(
    ("first", "second"),
    [("gb200-agg", "gb200-disagg"), ("b200-agg", "b200-disagg"), ("h200-agg", "b200-disagg")],
)
def test_aggregated_and_disaggregated_side_by_side(
    first: str,
    second: str,
    scenario_driver: Driver,
    dynamo_cluster: Cluster,
    dynamo_operator: Operator,
    stack_namespace: str,
) -> None:
    """One namespace, one claim, one token; the second stack uses what the first one made."""
    cluster, one, other = dynamo_cluster, TARGETS[first], TARGETS[second]
    agg = stack_of(
        scenario_driver,
        cluster,
        one,
        stack_namespace,
        platform="existing",
        replicas=dict(one.smaller),
        model_cache_retain=False,
    )
    agg.up()
    disagg = stack_of(
        scenario_driver,
        cluster,
        other,
        stack_namespace,
        platform="existing",
        create_namespace=False,
        model_cache_existing=True,
        hf_token_secret="hf-token-secret",
    )
    disagg.up()
    for graph in (one.graph, other.graph):
        assert scenario.ready(cluster, stack_namespace, graph)["status"] == "True"
    assert changed(agg.up()) == []
    assert changed(disagg.up()) == []

    disagg.destroy()
    assert scenario.ready(cluster, stack_namespace, one.graph)["status"] == "True"
    assert len(scenario.pods_of(cluster, stack_namespace, one.graph)) == 1 + sum((one.smaller or one.workers).values())
    agg.destroy()
    assert scenario.has_gone(cluster, stack_namespace)
