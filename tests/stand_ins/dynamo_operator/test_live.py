"""The stand-in operator against a real API server, scheduler and controllers: the recorded scenarios, replayed.

A scenario's story is what its statuses said, one after the other: whether the status lagged behind the spec, state,
reason, and the phase of a roll or restart. Counts of replicas on the way depend on timing and are not compared; the
objects and statuses at rest are, field by field.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import yaml

from tests.kubernetes import pods
from tests.kubernetes.api import Object, Refused
from tests.kubernetes.cluster import Cluster
from tests.stand_ins.dynamo_operator import names
from tests.stand_ins.dynamo_operator.live import (
    AGG,
    ARM,
    DISAGG,
    RECORDED,
    Serving,
    batch,
    recorded_story,
    with_argument,
)
from tests.stand_ins.dynamo_operator.operator import Operator
from tests.stand_ins.dynamo_operator.test_objects_as_recorded import comparable
from tests.stand_ins.dynamo_operator.test_refusals_as_recorded import CREATED, ON_CREATION, SCHEMA, component, graph

pytestmark = pytest.mark.kubernetes

ONE_TRAY = ("gb200-1", "cpu-1")
TWO_TRAYS = ("gb200-1", "gb200-2", "cpu-1")


@pytest.fixture
def serving(dynamo_cluster: Cluster, dynamo_operator: Operator, namespace: str) -> Serving:
    return Serving(dynamo_cluster, namespace)


# --- creation -------------------------------------------------------------------------------------------------------


def at_rest(directory: str, serving: Serving, worker_hash: str) -> dict[str, Object]:
    """The recorded objects, as they would be in this namespace and with this hash."""
    [recorded_hash] = set(
        re.findall(r"current-worker-hash-v2: (\w+)", (RECORDED / directory / "DynamoGraphDeployment.yaml").read_text())
    )
    found = {}
    for path in sorted((RECORDED / directory).glob("*.yaml")):
        text = path.read_text().replace("serving", serving.namespace).replace(recorded_hash, worker_hash)
        for item in yaml.load_all(text, yaml.CSafeLoader):
            if item["metadata"]["name"] != "default":
                found[f"{item['kind']}/{item['metadata']['name']}"] = item
    return found


def timeless(value: Any) -> Any:
    if isinstance(value, list):
        return [timeless(item) for item in value]
    if isinstance(value, dict):
        left_out = ("lastTransitionTime", "startTime", "endTime", "lastScaleTime")
        return {key: timeless(item) for key, item in value.items() if key not in left_out}
    return value


def without_arm(item: Object) -> Object:
    templates = [item["spec"][key] for key in ("template", "podTemplate") if key in item.get("spec", {})]
    for template in [*templates, *(entry["podTemplate"] for entry in item.get("spec", {}).get("components", []))]:
        pod = template.get("spec", {})
        if "tolerations" in pod:
            pod["tolerations"] = [each for each in pod["tolerations"] if each != ARM]
    return item


def without_server_fields(item: Object) -> Object:
    for field in ("creationTimestamp", "managedFields", "resourceVersion", "uid"):
        item["metadata"].pop(field, None)
    return item


@pytest.mark.parametrize(("file", "name", "number"), [("agg", AGG, "00"), ("disagg", DISAGG, "24")])
def test_a_new_graph_becomes_ready_with_the_recorded_objects(
    serving: Serving, file: str, name: str, number: str
) -> None:
    serving.apply(serving.submitted(file))
    item = serving.wait_ready(name)
    recorded = recorded_story(number)
    ready = next(index for index, told in enumerate(recorded) if told[1] == "successful")
    assert serving.story(name) == recorded[: ready + 1]  # what came after in the recording was a node's doing

    worker_hash = item["metadata"]["annotations"][names.CURRENT_WORKER_HASH]
    wanted = at_rest(f"{file}-ready", serving, worker_hash)
    for key, theirs in wanted.items():
        kind, _, object_name = key.partition("/")
        live = serving.cluster.api.get(theirs["apiVersion"], kind, object_name, serving.namespace)
        assert comparable(without_arm(without_server_fields(copy.deepcopy(live)))) == comparable(theirs), key
        if kind in (names.GRAPH, names.COMPONENT_DEPLOYMENT):
            assert timeless(live["status"]) == timeless(theirs["status"]), key
            assert live["metadata"]["finalizers"] == theirs["metadata"]["finalizers"], key
        if kind != names.GRAPH:
            annotations = live["metadata"].get("annotations", {})
            recorded_annotations = theirs["metadata"].get("annotations", {})
            applied = names.LAST_APPLIED_GENERATION
            assert annotations.get(applied) == recorded_annotations.get(applied), key
    ours = {
        left
        for left in serving.cluster.left_in(serving.namespace)
        if left.partition("/")[0] in {key.partition("/")[0] for key in wanted}
    }
    assert ours == set(wanted)


def test_agg_and_disagg_live_side_by_side(serving: Serving) -> None:
    serving.apply(serving.submitted("agg"))
    serving.apply(serving.submitted("disagg"))
    serving.wait_ready(AGG)
    serving.wait_ready(DISAGG)
    placed = serving.cluster.placed(serving.namespace)
    workers = {pod: node for pod, node in placed.items() if "worker" in pod}
    assert len(workers) == 3
    assert all(node and node.startswith("gb200") for node in workers.values())


# --- updates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "prepare", "nodes", "number"),
    [
        pytest.param("agg", None, TWO_TRAYS, "02", id="blue-green-with-a-spare-tray"),
        pytest.param("agg-v4-recreate", None, ONE_TRAY, "06", id="recreate-without-a-spare-tray"),
        pytest.param("n1", None, ONE_TRAY, "35", id="surge-0-without-a-spare-tray"),
    ],
)
def test_a_changed_argument_rolls_the_worker(
    serving: Serving, file: str, prepare: None, nodes: tuple[str, ...], number: str
) -> None:
    with serving.cluster.only(*nodes):
        manifest = serving.submitted(file)
        serving.apply(manifest)
        before = serving.wait_ready(AGG)
        old = serving.worker_names()
        size = re.search(r"--max-batch-size \d+", str(manifest))
        assert size is not None
        serving.apply(with_argument(manifest, 1, size[0], "--max-batch-size 640"))
        after = serving.wait_ready(AGG)
        assert [told[:4] for told in serving.story(AGG)][1:] == [told[:4] for told in recorded_story(number)][1:]
        assert before["metadata"]["annotations"] != after["metadata"]["annotations"]
        assert after["status"]["rollingUpdate"]["updatedComponents"] == ["TrtllmWorker"]
        serving.cluster.api.wait("the old worker is gone", lambda: len(serving.worker_names()) == 1)
        assert serving.worker_names() != old
        assert f"{AGG}-frontend" in serving.deployments()


def test_without_room_a_roll_is_stuck_and_reverting_recovers_it(serving: Serving) -> None:
    with serving.cluster.only(*ONE_TRAY):
        manifest = serving.submitted("agg")
        serving.apply(manifest)
        serving.wait_ready(AGG)
        [old] = serving.worker_names()
        serving.apply(batch(manifest, 640))
        serving.wait_told(AGG, "Rolling update in progress")
        serving.cluster.api.wait("the new worker's pod", lambda: len(serving.cluster.pods(serving.namespace)) == 3)
        serving.cluster.api.wait(
            "the stuck status", lambda: serving.graph(AGG)["status"]["components"]["TrtllmWorker"]["replicas"] == 2
        )
        stuck = serving.graph(AGG)
        time.sleep(1)
        assert serving.graph(AGG)["status"] == stuck["status"]  # it rests there
        assert [told[1:4] for told in serving.story(AGG)][1:] == [told[1:4] for told in recorded_story("03")][1:]
        assert serving.deployments()[old]["status"]["readyReplicas"] == 1  # the old worker serves on
        worker = stuck["status"]["components"]["TrtllmWorker"]
        assert (worker["readyReplicas"], worker["updatedReplicas"], len(worker["componentNames"])) == (1, 1, 2)

        serving.apply(manifest)
        back = serving.wait_ready(AGG)
        assert serving.story(AGG)[-1] == recorded_story("04")[-1]
        assert back["status"]["rollingUpdate"]["phase"] == "Completed"
        serving.cluster.api.wait("the new worker is gone", lambda: serving.worker_names() == [old])


def test_disaggregated_workers_roll_together_and_recover(serving: Serving) -> None:
    with serving.cluster.only(*TWO_TRAYS):
        manifest = serving.submitted("disagg")
        serving.apply(manifest)
        serving.wait_ready(DISAGG)
        old = serving.worker_names()
        serving.apply(with_argument(manifest, 2, "--disaggregation-mode decode", "--disaggregation-mode decode --x 1"))
        serving.cluster.api.wait(
            "prefill rolled",
            lambda: (
                serving.graph(DISAGG)["status"].get("rollingUpdate", {}).get("updatedComponents")
                == ["TrtllmPrefillWorker"]
            ),
            seconds=40,
        )
        assert [told[1:4] for told in serving.story(DISAGG)][1:] == [told[1:4] for told in recorded_story("25")][1:]
        assert len(serving.worker_names()) == 4
        serving.apply(manifest)
        serving.wait_ready(DISAGG)
        assert [told[1:4] for told in serving.story(DISAGG)][-2:] == [told[1:4] for told in recorded_story("26")][-2:]
        serving.cluster.api.wait("the new workers are gone", lambda: serving.worker_names() == old)


def test_recreate_for_a_whole_graph_rolls_both_workers_without_room(serving: Serving) -> None:
    with serving.cluster.only(*TWO_TRAYS):
        manifest = serving.submitted("disagg-rec")
        serving.apply(manifest)
        serving.wait_ready(DISAGG)
        changed = copy.deepcopy(manifest)
        for entry in changed["spec"]["components"]:
            main = entry["podTemplate"]["spec"]["containers"][0]
            main["image"] = main["image"].replace(":1.2.1", ":1.5.0")
        serving.apply(changed)
        after = serving.wait_ready(DISAGG)
        assert after["status"]["rollingUpdate"]["updatedComponents"] == ["TrtllmDecodeWorker", "TrtllmPrefillWorker"]
        assert {item["spec"]["strategy"]["type"] for item in serving.deployments().values()} == {"Recreate"}


def test_a_worker_may_become_a_decode_worker_by_a_roll(serving: Serving) -> None:
    manifest = serving.submitted("n1")
    serving.apply(manifest)
    serving.wait_ready(AGG)
    component(type="decode")(manifest)
    serving.apply(manifest)
    serving.wait_ready(AGG)
    assert [told[1:4] for told in serving.story(AGG)][1:] == [told[1:4] for told in recorded_story("36")][1:]
    serving.cluster.api.wait("the old worker is gone", lambda: len(serving.worker_names()) == 1)
    labels = serving.deployments()[serving.worker_names()[0]]["metadata"]["labels"]
    assert labels[names.SUB_TYPE_LABEL] == "decode"


def test_a_changed_frontend_rolls_in_place(serving: Serving) -> None:
    manifest = serving.submitted("agg")
    serving.apply(manifest)
    serving.wait_ready(AGG)
    before = serving.deployments()
    serving.apply(with_argument(manifest, 0, "round-robin", "random"))
    serving.wait_ready(AGG)
    after = serving.deployments()
    assert sorted(after) == sorted(before)
    assert [told[:3] for told in serving.story(AGG)][1:] == [told[:3] for told in recorded_story("10")][1:]
    worker = next(name for name in after if "frontend" not in name)
    assert after[worker]["metadata"]["generation"] == before[worker]["metadata"]["generation"]
    assert "--router-mode random" in str(after[f"{AGG}-frontend"])


def test_what_changes_no_pod_rolls_nothing(serving: Serving) -> None:
    manifest = serving.submitted("agg")
    serving.apply(manifest)
    serving.wait_ready(AGG)
    before = serving.deployments()
    serving.apply(manifest)
    config = {"data": {"config.yaml": "enable_attention_dp: false\n"}}
    serving.cluster.api.patch("v1", "ConfigMap", f"{AGG}-llm-config", config, serving.namespace)
    serving.patch(AGG, {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "x"}}})
    time.sleep(1)
    item = serving.graph(AGG)
    assert item["metadata"]["generation"] == item["status"]["observedGeneration"] == 1
    assert {name: each["metadata"]["generation"] for name, each in serving.deployments().items()} == {
        name: each["metadata"]["generation"] for name, each in before.items()
    }
    assert {told[1:3] for told in serving.story(AGG)} <= {("successful", "all_resources_are_ready")}


def test_replicas_scale_in_place(serving: Serving) -> None:
    manifest = serving.submitted("agg")
    serving.apply(manifest)
    serving.wait_ready(AGG)
    [worker] = serving.worker_names()
    for replicas, number in ((2, "11"), (1, "12")):
        for index in (0, 1):
            component(index, replicas=replicas)(manifest)
        serving.apply(manifest)
        item = serving.wait_ready(AGG)
        assert [told[:3] for told in serving.story(AGG)][1:] == [told[:3] for told in recorded_story(number)][1:]
        counts = {name: each["readyReplicas"] for name, each in item["status"]["components"].items()}
        assert counts == {"Frontend": replicas, "TrtllmWorker": replicas}
        assert serving.worker_names() == [worker]


def test_a_restart_goes_through_the_components_one_by_one(serving: Serving) -> None:
    serving.apply(serving.submitted("agg"))
    serving.wait_ready(AGG)
    serving.patch(AGG, {"spec": {"restart": {"id": "r1"}}})
    item = serving.wait_ready(AGG)
    phases = [told[4] for told in serving.story(AGG)]
    assert list(dict.fromkeys(phases)) == list(dict.fromkeys(told[4] for told in recorded_story("15")))
    assert item["status"]["restart"] == {"observedID": "r1", "phase": "Completed"}
    for deployment in serving.deployments().values():
        assert deployment["spec"]["template"]["metadata"]["annotations"][names.RESTART_AT] == "r1"


# --- repairs --------------------------------------------------------------------------------------------------------


def test_scaled_and_deleted_children_are_repaired(serving: Serving) -> None:
    api, namespace = serving.cluster.api, serving.namespace
    serving.apply(serving.submitted("agg"))
    serving.wait_ready(AGG)
    frontend = f"{AGG}-frontend"
    api.patch("apps/v1", "Deployment", frontend, {"spec": {"replicas": 3}}, namespace)
    api.wait("the Deployment is scaled back", lambda: serving.deployments()[frontend]["spec"]["replicas"] == 1)
    serving.wait_ready(AGG)

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
    serving.wait_ready(AGG)


def test_an_unready_worker_makes_the_graph_unready(serving: Serving) -> None:
    serving.apply(serving.submitted("agg"))
    serving.wait_ready(AGG)
    [worker] = serving.worker_names()
    with serving.cluster.behave(pods.stay_unready(), serving.namespace, **{names.SELECTOR_LABEL: worker}):
        told = f"Resources not ready: {worker}: Component deployment not ready - Available condition not true"
        item = serving.wait_told(AGG, re.escape(told))
        recorded = yaml.safe_load((RECORDED / "agg-status-worker-not-ready.yaml").read_text())["status"]
        assert item["status"]["state"] == recorded["state"]
        counts = ("replicas", "readyReplicas", "availableReplicas", "updatedReplicas")
        ours, theirs = (each["components"]["TrtllmWorker"] for each in (item["status"], recorded))
        assert [ours[count] for count in counts] == [theirs[count] for count in counts]
    serving.wait_ready(AGG)


# --- what never becomes ready -----------------------------------------------------------------------------------------


def test_a_worker_too_big_for_any_node_leaves_the_graph_pending_without_a_cause(serving: Serving) -> None:
    name = "gpt-oss-toobig"
    serving.apply(serving.submitted("toobig"))
    item = serving.wait_told(
        name,
        rf"Resources not ready: {name}-trtllmworker-[0-9a-f]{{8}}: "
        "Component deployment not ready - Available condition not true",
    )
    assert serving.story(name) == recorded_story("18")
    assert item["status"]["components"]["Frontend"]["readyReplicas"] == 1
    assert None in serving.cluster.placed(serving.namespace).values()


def test_a_name_too_long_and_several_nodes_fail_as_recorded(serving: Serving) -> None:
    long = serving.submitted("agg")
    long_name = long["metadata"]["name"] = "gpt-oss-aggregated-with-a-quite-long-name-here"
    serving.apply(long)
    resource = rf"{long_name}-trtllmworker-[0-9a-f]{{8}}"
    waits = "spec not yet processed: generation=1, observedGeneration=0"
    serving.wait_told(long_name, f"Resources not ready: {resource}: {waits}")
    assert serving.story(long_name) == recorded_story("37")
    [owner] = [
        item
        for item in serving.cluster.api.list(names.API_VERSION, names.COMPONENT_DEPLOYMENT, serving.namespace)
        if item["spec"]["type"] == "worker"
    ]
    serving.cluster.api.wait(
        "the component says why",
        lambda: (
            "must be no more than 63 bytes"
            in serving.cluster.api.get(
                names.API_VERSION, names.COMPONENT_DEPLOYMENT, owner["metadata"]["name"], serving.namespace
            )["status"]["conditions"][0]["message"]
        ),
    )

    several = serving.submitted("agg")
    several["metadata"]["name"] = "mn"
    component(multinode={"nodeCount": 2})(several)
    serving.apply(several)
    item = serving.wait_told("mn", "no multinode orchestrator available")
    assert item["status"]["state"] == "failed"
    assert "observedGeneration" not in item["status"]
    assert item["status"]["conditions"][0]["reason"] == "no_multinode_orchestrator_available"


# --- scaling adapters -------------------------------------------------------------------------------------------------


def test_a_scaling_adapter_owns_its_components_replicas(serving: Serving) -> None:
    api, namespace = serving.cluster.api, serving.namespace
    manifest = serving.submitted("agg")
    component(scalingAdapter={})(manifest)
    serving.apply(manifest)
    serving.wait_ready(AGG)
    adapter = f"{AGG}-trtllmworker"
    api.wait("the adapter", lambda: api.find(names.API_VERSION, names.SCALING_ADAPTER, adapter, namespace))
    component(replicas=2)(manifest)
    with pytest.raises(Refused, match="cannot be modified directly when scaling adapter is enabled"):
        api.apply(manifest)
    [worker] = serving.worker_names()
    scale = {"spec": {"replicas": 2}}
    api.patch(names.API_VERSION, names.SCALING_ADAPTER, adapter, scale, namespace, subresource="scale")
    api.wait("two workers", lambda: serving.deployments()[worker]["spec"]["replicas"] == 2)
    serving.wait_ready(AGG)

    def told() -> bool:
        status = api.get(names.API_VERSION, names.SCALING_ADAPTER, adapter, namespace).get("status", {})
        selector = f"{names.COMPONENT_LABEL}=TrtllmWorker,{names.GRAPH_LABEL}={AGG}"
        return status.get("replicas") == 2 and status.get("selector") == selector and "lastScaleTime" in status

    api.wait("the adapter's status", told)
    serving.patch(AGG, {"spec": {"components": without_adapter(serving.graph(AGG))}})
    serving.wait_ready(AGG)
    api.wait("no adapter", lambda: api.find(names.API_VERSION, names.SCALING_ADAPTER, adapter, namespace) is None)
    assert serving.deployments()[worker]["spec"]["replicas"] == 2


def without_adapter(item: Object) -> list[Object]:
    return [
        {key: value for key, value in entry.items() if key != "scalingAdapter"} for entry in item["spec"]["components"]
    ]


# --- deletion ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
def test_a_deleted_graph_leaves_the_planners_account_alone(serving: Serving, propagation: str) -> None:
    before = set(serving.cluster.left_in(serving.namespace))
    serving.apply(serving.submitted("agg"))
    serving.wait_ready(AGG)
    serving.cluster.api.delete(names.API_VERSION, names.GRAPH, AGG, serving.namespace, propagation=propagation)
    serving.gone(AGG)
    if propagation == "Foreground":
        assert not serving.deployments()
    planner = {"ServiceAccount/planner-serviceaccount", "RoleBinding/planner-serviceaccount-binding"}
    serving.cluster.api.wait(
        "what is left", lambda: set(serving.cluster.left_in(serving.namespace)) - before == planner, seconds=40
    )


def test_a_namespace_with_a_graph_goes_when_it_is_deleted(dynamo_cluster: Cluster, dynamo_operator: Operator) -> None:
    with dynamo_cluster.namespace("ending") as namespace:
        serving = Serving(dynamo_cluster, namespace)
        serving.apply(serving.submitted("agg"))
        serving.wait_ready(AGG)
    api = dynamo_cluster.api
    api.wait("the namespace is gone", lambda: api.find("v1", "Namespace", namespace) is None, seconds=60)


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
def test_the_schema_refuses_as_recorded(serving: Serving, case: str) -> None:
    manifest = graph("bad")
    manifest["metadata"]["namespace"] = serving.namespace
    BY_SCHEMA[case](manifest)
    with pytest.raises(Refused) as refused:
        serving.cluster.api.apply(manifest, dry_run=True)
    said = CREATED[case]["message"].replace("serving/", f"{serving.namespace}/")
    for line in re.split(r" is invalid: ?\n?\*? ?|\n\* |: failed to ", said)[1:]:
        assert line.removeprefix("<nil>: ").strip() in refused.value.message


@pytest.mark.parametrize("case", ["worker image tag latest", "sharedMemorySize bad", "no components", "multinode"])
def test_the_webhooks_are_asked_by_the_api_server(serving: Serving, case: str) -> None:
    manifest = serving.submitted("agg")
    if case == "multinode":
        serving.apply(manifest)
        component(multinode={"nodeCount": 2})(manifest)
        said = "cannot change node topology between single-node and multi-node after creation"
    else:
        ON_CREATION[case](manifest)
        said = CREATED[case]["message"].rpartition("denied the request: ")[2].partition("is invalid: ")[2]
        said = said or CREATED[case]["message"].rpartition("denied the request: ")[2]
    with pytest.raises(Refused) as refused:
        serving.cluster.api.apply(manifest)
    assert said in refused.value.message
