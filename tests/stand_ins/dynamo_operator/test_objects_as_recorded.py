"""The stand-in operator makes the objects that the real one was recorded making, field by field.

LEFT_OUT is the whole list of what is not compared, with the reason.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.stand_ins.dynamo_operator import graph as graphs
from tests.stand_ins.dynamo_operator import names, objects, status

RECORDED = Path(__file__).parent / "recorded"

LEFT_OUT = {
    "the digits of worker hashes": "the real hash is over Go's serialization; what changes it is tested instead",
    f"the value of {names.LAST_APPLIED_HASH}": "the same, over every object; that the annotation is there is compared",
    f"the value of {names.LAST_APPLIED_GENERATION}": "counts an object's edits; test_live.py compares it after each",
    "nvidia.com/dcd-spec": "the conversion webhook's copy of v1alpha1, which the stand-in does not serve",
    "metadata.finalizers of DynamoComponentDeployments": "put there by the loop, not by what makes the object",
    "deployment.kubernetes.io/revision, status, clusterIP, generation": "made by Kubernetes, not by the operator",
    "Secret mpi-run-ssh-secret": "made for multi-node graphs, which end as failed here as they did there",
    "ServiceAccount default": "made by Kubernetes",
}
RECORDED_KINDS = (names.COMPONENT_DEPLOYMENT, "Deployment", "Service", "ServiceAccount", "Role", "RoleBinding")


def load(directory: str, kind: str) -> list[dict[str, Any]]:
    path = RECORDED / directory / f"{kind}.yaml"
    if not path.exists():
        return []
    return [item for item in yaml.load_all(path.read_text(), yaml.CSafeLoader) if item]


def recorded_graph(directory: str, name: str) -> dict[str, Any]:
    return next(item for item in load(directory, names.GRAPH) if item["metadata"]["name"] == name)


def comparable(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest without what is left out."""
    item = copy.deepcopy(manifest)
    item.pop("status", None)
    metadata = item["metadata"]
    metadata.pop("generation", None)
    if item["kind"] == names.COMPONENT_DEPLOYMENT:
        metadata.pop("finalizers", None)
    for owner in metadata.get("ownerReferences", []):
        owner.pop("uid", None)
    annotations = metadata.get("annotations", {})
    for key in ("nvidia.com/dcd-spec", "deployment.kubernetes.io/revision"):
        annotations.pop(key, None)
    for key in (names.LAST_APPLIED_HASH, names.LAST_APPLIED_GENERATION):
        if key in annotations:
            annotations[key] = "(left out)"
    if not annotations:
        metadata.pop("annotations", None)
    if item["kind"] == "Service":
        for key in ("clusterIP", "clusterIPs"):
            item["spec"].pop(key, None)
    return item


def with_server_defaults(manifest: dict[str, Any]) -> dict[str, Any]:
    """What the API server adds to a Deployment and a Service: the recordings were read back from it."""
    item = copy.deepcopy(manifest)
    if item["kind"] == "Service":
        for key, value in {
            "internalTrafficPolicy": "Cluster",
            "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack",
            "sessionAffinity": "None",
            "type": "ClusterIP",
        }.items():
            item["spec"].setdefault(key, value)
    if item["kind"] == "Deployment":
        item["spec"].setdefault("progressDeadlineSeconds", 600)
        item["spec"].setdefault("revisionHistoryLimit", 10)
        pod = item["spec"]["template"]["spec"]
        pod.setdefault("dnsPolicy", "ClusterFirst")
        pod.setdefault("schedulerName", "default-scheduler")
        pod["serviceAccount"] = pod["serviceAccountName"]
        for volume in pod["volumes"]:
            if "configMap" in volume:
                volume["configMap"].setdefault("defaultMode", 420)
        for container in pod["containers"]:
            container.setdefault("imagePullPolicy", "IfNotPresent")
            container.setdefault("resources", {})
            container.setdefault("terminationMessagePath", "/dev/termination-log")
            container.setdefault("terminationMessagePolicy", "File")
            for variable in container["env"]:
                if "fieldRef" in variable.get("valueFrom", {}):
                    variable["valueFrom"]["fieldRef"].setdefault("apiVersion", "v1")
            for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
                if probe in container:
                    container[probe].setdefault("successThreshold", 1)
                    container[probe]["httpGet"].setdefault("scheme", "HTTP")
    return item


def made(directory: str, name: str, worker_hash: str, pull_secrets: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """What the stand-in makes of the recorded graph, by kind and name."""
    graph = graphs.read(recorded_graph(directory, name))
    items = [*objects.planner_objects(graph.namespace), *objects.discovery_objects(graph)]
    if not graph.multinode:
        restarted = graph.spec.restart.id if graph.spec.restart else None
        for component in graph.spec.components:
            owner = objects.component_deployment(graph, component, worker_hash, restart_at=restarted)
            items += [owner, objects.service(owner)]
            if len(owner["metadata"]["name"]) <= names.LABEL_LIMIT:  # else the API server refuses the Deployment
                items.append(objects.deployment(owner, pull_secrets))
            if component.scaling_adapter is not None:
                items.append(objects.scaling_adapter(graph, component))
    return {f"{item['kind']}/{item['metadata']['name']}": comparable(with_server_defaults(item)) for item in items}


def recorded(directory: str, name: str, worker_hash: str) -> dict[str, dict[str, Any]]:
    """What the real operator made for the graph, with its workers of that generation."""
    found = {}
    for kind in (*RECORDED_KINDS, names.SCALING_ADAPTER):
        for item in load(directory, kind):
            metadata = item["metadata"]
            labels = metadata.get("labels", {})
            if metadata["name"] == "default" or labels.get(names.HASH_LABEL, worker_hash) != worker_hash:
                continue
            ours = metadata["name"].startswith((f"{name}-k8s", names.PLANNER_ACCOUNT))
            if ours or labels.get(names.GRAPH_LABEL) == name:
                found[f"{kind}/{metadata['name']}"] = comparable(item)
    return found


@pytest.mark.parametrize(
    ("directory", "name", "worker_hash", "pull_secrets"),
    [
        ("agg-ready", "gpt-oss-agg", "a2224789", {}),
        ("disagg-ready", "gpt-oss-disagg", "10f1671f", {}),
        ("agg-update-stuck-no-capacity", "gpt-oss-agg", "537815d6", {}),
        ("disagg-update-stuck-no-capacity", "gpt-oss-disagg", "fe774efe", {}),
        ("agg-scaling-adapter", "gpt-oss-agg", "5d0f2cb2", {}),
        ("all-with-toobig", "gpt-oss-agg", "5d0f2cb2", {}),
        ("all-with-toobig", "gpt-oss-toobig", "68be83cb", {}),
        ("failures-longname-multinode-nopvc", "nopvc", "98d5848e", {"nvcr.io": ["ngc-pull"]}),
        ("failures-longname-multinode-nopvc", "mn", "acae6c8c", {"nvcr.io": ["ngc-pull"]}),
        (
            "failures-longname-multinode-nopvc",
            "gpt-oss-aggregated-with-a-quite-long-name-here",
            "895fd8a3",
            {"nvcr.io": ["ngc-pull"]},
        ),
    ],
)
def test_the_objects_of_a_graph_are_the_recorded_ones(
    directory: str, name: str, worker_hash: str, pull_secrets: dict[str, list[str]]
) -> None:
    ours, theirs = made(directory, name, worker_hash, pull_secrets), recorded(directory, name, worker_hash)
    too_long = f"Service/{names.component_resource(name, 'TrtllmWorker', worker_hash)}"
    if len(too_long) > names.LABEL_LIMIT + len("Service/"):
        ours.pop(too_long)  # never reached: its Deployment is refused first
    assert sorted(ours) == sorted(theirs)
    for key, item in theirs.items():
        if item["kind"] == names.SCALING_ADAPTER:
            item["spec"]["replicas"] = ours[key]["spec"]["replicas"]  # scaled by hand when it was recorded
        assert ours[key] == item, key


@pytest.mark.parametrize(
    "directory",
    [
        "agg-ready",
        "disagg-ready",
        "agg-update-stuck-no-capacity",
        "disagg-update-stuck-no-capacity",
        "agg-scaling-adapter",
    ],
)
def test_the_status_of_a_component_is_the_recorded_one(directory: str) -> None:
    deployments = {item["metadata"]["name"]: item for item in load(directory, "Deployment")}
    owners = load(directory, names.COMPONENT_DEPLOYMENT)
    assert owners
    for owner in owners:
        assert status.component_status(owner, deployments[owner["metadata"]["name"]], "never") == owner["status"]
