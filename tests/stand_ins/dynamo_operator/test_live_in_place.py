"""The recorded scenarios that leave the workers where they are, on one aggregated graph that is ready before each."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping

import pytest
import yaml

from tests.kubernetes import pods
from tests.kubernetes.api import Object, Refused
from tests.kubernetes.cluster import Cluster
from tests.stand_ins.dynamo_operator import names
from tests.stand_ins.dynamo_operator.live import (
    AGG,
    RECORDED,
    Serving,
    recorded_story,
    with_argument,
)
from tests.stand_ins.dynamo_operator.operator import Operator
from tests.stand_ins.dynamo_operator.test_refusals_as_recorded import CREATED, ON_CREATION, SCHEMA, component, graph

pytestmark = pytest.mark.kubernetes


@pytest.fixture(scope="module")
def shared(dynamo_cluster: Cluster, dynamo_operator: Operator) -> Iterator[Serving]:
    with dynamo_cluster.namespace("shared") as name:
        made = Serving(dynamo_cluster, name)
        yield made
        made.reader.close()


@pytest.fixture
def agg(shared: Serving) -> Serving:
    """A namespace with the aggregated graph, ready, for what leaves its workers where they are."""
    shared.apply(shared.submitted("agg"))
    shared.wait_ready(AGG)
    return shared


# --- changes ----------------------------------------------------------------------------------------------------------


def test_a_changed_frontend_rolls_in_place(agg: Serving) -> None:
    manifest = agg.submitted("agg")
    before = agg.deployments()
    agg.apply(with_argument(manifest, 0, "round-robin", "random"))
    agg.wait_ready(AGG)
    after = agg.deployments()
    assert sorted(after) == sorted(before)
    assert [told[:3] for told in agg.story(AGG)][1:] == [told[:3] for told in recorded_story("10")][1:]
    worker = next(name for name in after if "frontend" not in name)
    assert after[worker]["metadata"]["generation"] == before[worker]["metadata"]["generation"]
    assert "--router-mode random" in str(after[f"{AGG}-frontend"])


def test_what_changes_no_pod_rolls_nothing(agg: Serving) -> None:
    manifest = agg.submitted("agg")
    before, generation = agg.deployments(), agg.graph(AGG)["metadata"]["generation"]
    agg.apply(manifest)
    config = {"data": {"config.yaml": "enable_attention_dp: false\n"}}
    agg.cluster.api.patch("v1", "ConfigMap", f"{AGG}-llm-config", config, agg.namespace)
    agg.patch(AGG, {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "x"}}})
    time.sleep(1)
    item = agg.graph(AGG)
    assert item["metadata"]["generation"] == item["status"]["observedGeneration"] == generation
    assert {name: each["metadata"]["generation"] for name, each in agg.deployments().items()} == {
        name: each["metadata"]["generation"] for name, each in before.items()
    }
    assert {told[1:3] for told in agg.story(AGG)} <= {("successful", "all_resources_are_ready")}


def test_replicas_scale_in_place(agg: Serving) -> None:
    manifest = agg.submitted("agg")
    [worker] = agg.worker_names()
    for replicas, number in ((2, "11"), (1, "12")):
        for index in (0, 1):
            component(index, replicas=replicas)(manifest)
        agg.apply(manifest)
        item = agg.wait_ready(AGG)
        assert [told[:3] for told in agg.story(AGG)][1:] == [told[:3] for told in recorded_story(number)][1:]
        counts = {name: each["readyReplicas"] for name, each in item["status"]["components"].items()}
        assert counts == {"Frontend": replicas, "TrtllmWorker": replicas}
        assert agg.worker_names() == [worker]


def test_a_restart_goes_through_the_components_one_by_one(agg: Serving) -> None:
    agg.patch(AGG, {"spec": {"restart": {"id": "r1"}}})
    item = agg.wait_ready(AGG)
    phases = [told[4] for told in agg.story(AGG)]
    assert list(dict.fromkeys(phases)) == list(dict.fromkeys(told[4] for told in recorded_story("15")))
    assert item["status"]["restart"] == {"observedID": "r1", "phase": "Completed"}
    for deployment in agg.deployments().values():
        assert deployment["spec"]["template"]["metadata"]["annotations"][names.RESTART_AT] == "r1"


# --- repairs --------------------------------------------------------------------------------------------------------


def test_scaled_and_deleted_children_are_repaired(agg: Serving) -> None:
    api, namespace = agg.cluster.api, agg.namespace
    frontend = f"{AGG}-frontend"
    api.patch("apps/v1", "Deployment", frontend, {"spec": {"replicas": 3}}, namespace)
    api.wait("the Deployment is scaled back", lambda: agg.deployments()[frontend]["spec"]["replicas"] == 1)
    agg.wait_ready(AGG)

    for api_version, kind, name in (
        ("v1", "Service", frontend),
        (names.API_VERSION, names.COMPONENT_DEPLOYMENT, frontend),
        ("v1", "ServiceAccount", names.discovery_account(AGG)),
        ("rbac.authorization.k8s.io/v1", "Role", f"{names.discovery_account(AGG)}-role"),
    ):
        uid = api.get(api_version, kind, name, namespace)["metadata"]["uid"]
        api.delete(api_version, kind, name, namespace)

        def again(what: tuple[str, str, str] = (api_version, kind, name), before: str = uid) -> bool:
            found = api.find(*what, namespace)
            return found is not None and found["metadata"]["uid"] != before

        api.wait(f"{kind} {name} is made again", again)
    agg.wait_ready(AGG)


def test_an_unready_worker_makes_the_graph_unready(agg: Serving) -> None:
    [worker] = agg.worker_names()
    with agg.cluster.behave(pods.stay_unready(), agg.namespace, **{names.SELECTOR_LABEL: worker}):
        told = f"Resources not ready: {worker}: Component deployment not ready - Available condition not true"
        item = agg.wait_told(AGG, re.escape(told))
        recorded = yaml.safe_load((RECORDED / "agg-status-worker-not-ready.yaml").read_text())["status"]
        assert item["status"]["state"] == recorded["state"]
        counts = ("replicas", "readyReplicas", "availableReplicas", "updatedReplicas")
        ours, theirs = (each["components"]["TrtllmWorker"] for each in (item["status"], recorded))
        assert [ours[count] for count in counts] == [theirs[count] for count in counts]
    agg.wait_ready(AGG)


# --- scaling adapters -------------------------------------------------------------------------------------------------


def test_a_scaling_adapter_owns_its_components_replicas(agg: Serving) -> None:
    api, namespace = agg.cluster.api, agg.namespace
    manifest = agg.submitted("agg")
    component(scalingAdapter={})(manifest)
    agg.apply(manifest)
    agg.wait_ready(AGG)
    adapter = f"{AGG}-trtllmworker"
    api.wait("the adapter", lambda: api.find(names.API_VERSION, names.SCALING_ADAPTER, adapter, namespace))
    component(replicas=2)(manifest)
    with pytest.raises(Refused, match="cannot be modified directly when scaling adapter is enabled"):
        api.apply(manifest)
    [worker] = agg.worker_names()
    scale = {"spec": {"replicas": 2}}
    api.patch(names.API_VERSION, names.SCALING_ADAPTER, adapter, scale, namespace, subresource="scale")
    api.wait("two workers", lambda: agg.deployments()[worker]["spec"]["replicas"] == 2)
    agg.wait_ready(AGG)

    def told() -> bool:
        status = api.get(names.API_VERSION, names.SCALING_ADAPTER, adapter, namespace).get("status", {})
        selector = f"{names.COMPONENT_LABEL}=TrtllmWorker,{names.GRAPH_LABEL}={AGG}"
        return status.get("replicas") == 2 and status.get("selector") == selector and "lastScaleTime" in status

    api.wait("the adapter's status", told)
    agg.patch(AGG, {"spec": {"components": without_adapter(agg.graph(AGG))}})
    agg.wait_ready(AGG)
    api.wait("no adapter", lambda: api.find(names.API_VERSION, names.SCALING_ADAPTER, adapter, namespace) is None)
    assert agg.deployments()[worker]["spec"]["replicas"] == 2


def without_adapter(item: Object) -> list[Object]:
    return [
        {key: value for key, value in entry.items() if key != "scalingAdapter"} for entry in item["spec"]["components"]
    ]


# --- admission --------------------------------------------------------------------------------------------------------

BY_SCHEMA: Mapping[str, Callable[[Object], None]] = {
    "type main": component(type="main"),
    "duplicate component names": component(name="Frontend"),
    "replicas -1": component(replicas=-1),
    "restart on create": lambda manifest: manifest["spec"].update(restart={"id": "r1"}),
    "backendFramework tensorrt": lambda manifest: manifest["spec"].update(backendFramework="tensorrt"),
    "unknown field": component(envFromSecret="hf-token-secret"),
    "component name with underscore": component(name="Trtllm_Worker"),
    "component name very long": component(name="a" * 64),
    "names equal after lowercasing": component(name="FRONTEND"),
}


@pytest.mark.parametrize("case", sorted(SCHEMA))
def test_the_schema_refuses_as_recorded(agg: Serving, case: str) -> None:
    manifest = graph("bad")
    manifest["metadata"]["namespace"] = agg.namespace
    BY_SCHEMA[case](manifest)
    with pytest.raises(Refused) as refused:
        agg.cluster.api.apply(manifest, dry_run=True)
    said = CREATED[case]["message"].replace("serving/", f"{agg.namespace}/")
    for line in re.split(r" is invalid: ?\n?\*? ?|\n\* |: failed to ", said)[1:]:
        assert line.removeprefix("<nil>: ").strip() in refused.value.message


@pytest.mark.parametrize("case", ["worker image tag latest", "sharedMemorySize bad", "no components", "multinode"])
def test_the_webhooks_are_asked_by_the_api_server(agg: Serving, case: str) -> None:
    manifest = agg.submitted("agg")
    if case == "multinode":
        component(multinode={"nodeCount": 2})(manifest)
        said = "cannot change node topology between single-node and multi-node after creation"
    else:
        ON_CREATION[case](manifest)
        said = CREATED[case]["message"].rpartition("denied the request: ")[2].partition("is invalid: ")[2]
        said = said or CREATED[case]["message"].rpartition("denied the request: ")[2]
    with pytest.raises(Refused) as refused:
        agg.cluster.api.apply(manifest)
    assert said in refused.value.message
