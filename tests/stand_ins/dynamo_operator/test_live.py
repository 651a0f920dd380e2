"""The stand-in operator against a real API server, scheduler and controllers: the recorded scenarios, replayed.

A scenario's story is what its statuses said, one after the other: whether the status lagged behind the spec, state,
reason, and the phase of a roll or restart. Counts of replicas on the way depend on timing and are not compared; the
objects and statuses at rest are, field by field.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.kubernetes.api import Object
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
from tests.stand_ins.dynamo_operator.test_refusals_as_recorded import component

pytestmark = pytest.mark.kubernetes

ONE_TRAY = ("gb200-1", "cpu-1")
TWO_TRAYS = ("gb200-1", "gb200-2", "cpu-1")


@pytest.fixture
def serving(dynamo_cluster: Cluster, dynamo_operator: Operator, namespace: str) -> Iterator[Serving]:
    made = Serving(dynamo_cluster, namespace)
    yield made
    made.reader.close()


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


def test_new_graphs_become_ready_side_by_side_with_the_recorded_objects(serving: Serving) -> None:
    wanted: dict[str, Object] = {}
    for file, name, number in (("agg", AGG, "00"), ("disagg", DISAGG, "24")):
        serving.apply(serving.submitted(file))
        item = serving.wait_ready(name)
        recorded = recorded_story(number)
        ready = next(index for index, told in enumerate(recorded) if told[1] == "successful")
        assert serving.story(name) == recorded[: ready + 1]  # what came after in the recording was a node's doing
        worker_hash = item["metadata"]["annotations"][names.CURRENT_WORKER_HASH]
        wanted |= at_rest(f"{file}-ready", serving, worker_hash)
    for key, theirs in wanted.items():
        kind, _, name = key.partition("/")
        live = serving.cluster.api.get(theirs["apiVersion"], kind, name, serving.namespace)
        assert comparable(without_arm(without_server_fields(copy.deepcopy(live)))) == comparable(theirs), key
        if kind in (names.GRAPH, names.COMPONENT_DEPLOYMENT):
            assert timeless(live["status"]) == timeless(theirs["status"]), key
            assert live["metadata"]["finalizers"] == theirs["metadata"]["finalizers"], key
        if kind != names.GRAPH:
            applied = names.LAST_APPLIED_GENERATION
            ours, recorded_ones = (each["metadata"].get("annotations", {}) for each in (live, theirs))
            assert ours.get(applied) == recorded_ones.get(applied), key
    kinds = {key.partition("/")[0] for key in wanted}
    left = serving.cluster.left_in(serving.namespace)
    assert {key for key in left if key.partition("/")[0] in kinds} == set(wanted)
    workers = {pod: node for pod, node in serving.cluster.placed(serving.namespace).items() if "worker" in pod}
    assert len(workers) == 3
    assert all(node and node.startswith("gb200") for node in workers.values())


# --- updates --------------------------------------------------------------------------------------------------------


def compare_story(serving: Serving, name: str, number: str) -> None:
    """A roll's statuses are the recorded ones, but for what lagged behind from the time before it."""
    ours, theirs = ([told[:4] for told in story][1:] for story in (serving.story(name), recorded_story(number)))
    assert ours == theirs


def test_blue_green_needs_a_spare_tray_and_without_one_a_revert_recovers(serving: Serving) -> None:
    manifest = serving.submitted("agg")
    with serving.cluster.only(*TWO_TRAYS):
        serving.apply(manifest)
        before = serving.wait_ready(AGG)
        [first] = serving.worker_names()
        rolled = batch(manifest, 640)
        serving.apply(rolled)
        after = serving.wait_ready(AGG)
        compare_story(serving, AGG, "02")
        assert before["metadata"]["annotations"] != after["metadata"]["annotations"]
        assert after["status"]["rollingUpdate"]["updatedComponents"] == ["TrtllmWorker"]
        serving.cluster.api.wait("the old worker is gone", lambda: len(serving.worker_names()) == 1)
        [second] = serving.worker_names()
        assert second != first
        serving.cluster.api.wait("the old pod is gone", lambda: len(serving.cluster.pods(serving.namespace)) == 2)
    [tray] = [node for pod, node in serving.cluster.placed(serving.namespace).items() if "worker" in pod]
    assert tray is not None
    with serving.cluster.only(tray, "cpu-1"):
        serving.apply(batch(manifest, 512))
        serving.wait_told(AGG, "Rolling update in progress")
        serving.cluster.api.wait(
            "the stuck status", lambda: serving.graph(AGG)["status"]["components"]["TrtllmWorker"]["replicas"] == 2
        )
        stuck = serving.graph(AGG)
        time.sleep(1)
        assert serving.graph(AGG)["status"] == stuck["status"]  # it rests there
        compare_story(serving, AGG, "03")
        assert serving.deployments()[second]["status"]["readyReplicas"] == 1  # the old worker serves on
        worker = stuck["status"]["components"]["TrtllmWorker"]
        assert (worker["readyReplicas"], worker["updatedReplicas"], len(worker["componentNames"])) == (1, 1, 2)

        serving.apply(rolled)
        back = serving.wait_ready(AGG)
        assert serving.story(AGG)[-1] == recorded_story("04")[-1]
        assert back["status"]["rollingUpdate"]["phase"] == "Completed"
        serving.cluster.api.wait("the new worker is gone", lambda: serving.worker_names() == [second])


def test_recreate_needs_no_spare_tray(serving: Serving) -> None:
    with serving.cluster.only(*ONE_TRAY):
        manifest = serving.submitted("agg-v4-recreate")
        serving.apply(manifest)
        serving.wait_ready(AGG)
        serving.apply(with_argument(manifest, 1, "--max-batch-size ", "--max-batch-size 1"))
        serving.wait_ready(AGG)
        compare_story(serving, AGG, "06")


def test_surge_0_needs_no_spare_tray_and_a_worker_may_become_a_decode_worker(serving: Serving) -> None:
    with serving.cluster.only(*ONE_TRAY):
        manifest = serving.submitted("n1")
        serving.apply(manifest)
        serving.wait_ready(AGG)
        manifest = batch(manifest, 640)
        serving.apply(manifest)
        serving.wait_ready(AGG)
        compare_story(serving, AGG, "35")
        component(type="decode")(manifest)
        serving.apply(manifest)
        serving.wait_ready(AGG)
        compare_story(serving, AGG, "36")
        serving.cluster.api.wait("the old worker is gone", lambda: len(serving.worker_names()) == 1)
        labels = serving.deployments()[serving.worker_names()[0]]["metadata"]["labels"]
        assert labels[names.SUB_TYPE_LABEL] == "decode"


def test_disaggregated_workers_roll_together(serving: Serving) -> None:
    """Stuck half done for want of a tray, reverted, and rolled after all with Recreate for the whole graph."""
    with serving.cluster.only(*TWO_TRAYS):
        manifest = serving.submitted("disagg")
        serving.apply(manifest)
        serving.wait_ready(DISAGG)
        old = serving.worker_names()
        serving.apply(with_argument(manifest, 2, "--disaggregation-mode decode", "--disaggregation-mode decode --x 1"))

        def updated() -> Any:
            return serving.graph(DISAGG)["status"].get("rollingUpdate", {}).get("updatedComponents")

        serving.cluster.api.wait("prefill rolled", lambda: updated() == ["TrtllmPrefillWorker"])
        compare_story(serving, DISAGG, "25")
        assert len(serving.worker_names()) == 4

        serving.apply(manifest)
        serving.wait_ready(DISAGG)
        assert serving.story(DISAGG)[-2:] == recorded_story("26")[-2:]
        serving.cluster.api.wait("the new workers are gone", lambda: serving.worker_names() == old)

        recreated = serving.submitted("disagg-rec")
        serving.apply(recreated)  # the annotation rolls them too
        serving.wait_ready(DISAGG)
        for entry in recreated["spec"]["components"]:
            main = entry["podTemplate"]["spec"]["containers"][0]
            main["image"] = main["image"].replace(":1.2.1", ":1.5.0")
        serving.apply(recreated)
        after = serving.wait_ready(DISAGG)
        assert after["status"]["rollingUpdate"]["updatedComponents"] == ["TrtllmDecodeWorker", "TrtllmPrefillWorker"]
        serving.cluster.api.wait("the old workers are gone", lambda: len(serving.worker_names()) == 2)
        assert not set(serving.worker_names()) & set(old)
        assert {item["spec"]["strategy"]["type"] for item in serving.deployments().values()} == {"Recreate"}


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
        "what is left", lambda: set(serving.cluster.left_in(serving.namespace)) - before == planner
    )


def test_a_namespace_with_a_graph_goes_when_it_is_deleted(dynamo_cluster: Cluster, dynamo_operator: Operator) -> None:
    with dynamo_cluster.namespace("ending") as namespace:
        serving = Serving(dynamo_cluster, namespace)
        serving.apply(serving.submitted("agg"))
        serving.wait_ready(AGG)
    api = dynamo_cluster.api
    api.wait("the namespace is gone", lambda: api.find("v1", "Namespace", namespace) is None)
