"""What the catalog renders is what the API server takes: its own schema, admission, and Dynamo's definitions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import yaml

from serving_catalog import load_catalog
from serving_catalog.checks.cluster_prerequisites import planned_pods
from serving_catalog.checks.pod_security import ENFORCE_LABEL, LEVELS, Level, violations
from serving_catalog.graphs import GraphPlan, graph_request_from, plan_graph

from .api import Object, Refused
from .cluster import Cluster

pytestmark = pytest.mark.kubernetes

CATALOG = load_catalog()
TARGETS = sorted(CATALOG.graphs)
GRAPH = "DynamoGraphDeployment"

# Everything that puts another field into a manifest.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "as the target says": {},
    "no downtime": {"rollout": "blue_green"},
    "everything stopped first": {"rollout": "recreate"},
    "benchmark": {"benchmark": {"run_id": "7"}},
    "what a cluster may ask for": {
        "model_cache": {"storage_class": "shared-files", "size": "200Gi"},
        "pull_secrets": ["registry"],
        "image_registry": "mirror.example:5000",
        "hub_endpoint": "https://hub.example",
        "package_index": "https://packages.example/simple",
        "placement": {
            "node_selector": {"pool": "inference"},
            "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "gpt-oss", "effect": "NoSchedule"}],
            "priority_class": "system-cluster-critical",
            "scheduler_name": "default-scheduler",
        },
        "labels": {"team": "inference"},
        "annotations": {"example.com/owner": "inference"},
        "network_policy": True,
        "benchmark": {"run_id": "mirror"},
    },
    "a cache that is there, no token": {"model_cache": {"existing": True}, "hf_token_secret": None},
}


def plan(target: str, namespace: str, **settings: Any) -> GraphPlan:
    return plan_graph(graph_request_from({"target": target, "namespace": namespace, **settings}), CATALOG)


def namespaced(made: GraphPlan) -> list[Object]:
    """Every object but the namespace: tests are given theirs."""
    return [entry for entry in (resource.manifest() for resource in made.objects()) if entry["kind"] != "Namespace"]


def subset(wanted: Any, live: Any, path: str = "") -> list[str]:
    """What of a manifest did not arrive. The server adds defaults; it may leave nothing out and change nothing."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        missing = [f"{path}.{key}: missing" for key in wanted if key not in live and wanted[key] not in ({}, [], None)]
        return missing + [p for key in wanted if key in live for p in subset(wanted[key], live[key], f"{path}.{key}")]
    if isinstance(wanted, list) and isinstance(live, list) and len(wanted) == len(live):
        return [p for n, pair in enumerate(zip(wanted, live, strict=True)) for p in subset(*pair, f"{path}[{n}]")]
    return [] if wanted == live else [f"{path}: {wanted!r} became {live!r}"]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("target", TARGETS)
def test_the_server_takes_every_object(dynamo_cluster: Cluster, namespace: str, target: str, settings: str) -> None:
    for manifest in namespaced(plan(target, namespace, **SETTINGS[settings])):
        tried = dynamo_cluster.api.create(manifest, dry_run=True)
        assert subset(manifest, tried) == [], f"{manifest['kind']}/{manifest['metadata']['name']}"


@pytest.mark.parametrize("target", TARGETS)
def test_a_restricted_namespace_takes_them_and_jobs_run_apart_from_the_gpus(
    dynamo_cluster: Cluster, restricted_namespace: str, target: str
) -> None:
    cache = {"storage_class": "shared-files", "size": "200Gi"}
    made = plan(target, restricted_namespace, model_cache=cache, benchmark={"run_id": "1"}, network_policy=True)
    manifests = namespaced(made)
    for manifest in manifests:
        dynamo_cluster.api.create(manifest)
    jobs = [manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "Job"]
    assert len(jobs) == 3

    def succeeded() -> bool:
        live = [dynamo_cluster.api.get("batch/v1", "Job", name, restricted_namespace) for name in jobs]
        return all(each.get("status", {}).get("succeeded") for each in live)

    dynamo_cluster.api.wait("download, smoke test and benchmark succeed", succeeded)
    assert set(dynamo_cluster.placed(restricted_namespace).values()) == {"cpu-1"}


WRONG: Mapping[str, tuple[Any, str]] = {
    "component type main": (lambda spec: spec["components"][1].update(type="main"), 'Unsupported value: "main"'),
    "unknown field": (
        lambda spec: spec["components"][1].update(replica=2),
        'unknown field "spec.components[1].replica"',
    ),
    "the older version's map of services": (lambda spec: spec.update(services={}), 'unknown field "spec.services"'),
    "another engine": (lambda spec: spec.update(backendFramework="triton"), 'Unsupported value: "triton"'),
    "a component twice": (
        lambda spec: spec["components"].append(deepcopy(spec["components"][1])),
        "Duplicate value",
    ),
    "a number of replicas that is none": (lambda spec: spec["components"][1].update(replicas="two"), "replicas"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_graphs_are_refused(dynamo_cluster: Cluster, namespace: str, case: str) -> None:
    change, words = WRONG[case]
    manifest = plan("gb200-disagg", namespace).graph.manifest()
    assert dynamo_cluster.api.create(manifest, dry_run=True)
    change(manifest["spec"])
    with pytest.raises(Refused) as refused:
        dynamo_cluster.api.create(manifest)
    assert words in refused.value.message
    assert refused.value.status in (400, 422)


def test_a_privileged_job_would_be_refused(dynamo_cluster: Cluster, restricted_namespace: str) -> None:
    """So the restricted namespace of the tests above is one that judges."""
    pod = plan("gb200-agg", restricted_namespace).smoke.manifest()["spec"]["template"]["spec"]
    pod["containers"][0]["securityContext"] = {"privileged": True}
    single = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "namespace": restricted_namespace}}
    with pytest.raises(Refused, match='violates PodSecurity "restricted'):
        dynamo_cluster.api.create(single | {"spec": pod})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("target", TARGETS)
def test_pod_security_is_judged_as_the_server_does(dynamo_cluster: Cluster, target: str, level: Level) -> None:
    """Pod by pod, also where workers ask for a device and may pin memory for it."""
    pinning = {"resources": {"decode" if "disagg" in target else "worker": {"rdma/ib": "1"}}}
    with dynamo_cluster.namespace(labels={ENFORCE_LABEL: level}) as namespace:
        for settings in ({}, pinning):
            for name, spec in planned_pods(plan(target, namespace, **settings)):
                said, foreseen = refusal(dynamo_cluster, namespace, spec), " ".join(violations(spec, level))
                if not foreseen:
                    assert said == "", name
                    continue
                assert f'violates PodSecurity "{level}' in said, name
                words = ("runAsNonRoot", "allowPrivilegeEscalation", "capabilit", "seccompProfile")
                assert [word in foreseen for word in words] == [word in said for word in words], f"{name}: {said}"


def refusal(cluster: Cluster, namespace: str, spec: Any) -> str:
    """What the API server says to a pod; nothing when it would take it."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "namespace": namespace}, "spec": spec}
    try:
        cluster.api.create(pod, dry_run=True)
    except Refused as refused:
        return refused.message
    return ""


@pytest.mark.parametrize("target", ["gb200-disagg", "h200-agg"])
def test_kubectl_applies_what_the_command_line_prints(dynamo_cluster: Cluster, target: str) -> None:
    with dynamo_cluster.namespace() as namespace:
        command = [sys.executable, "-m", "serving_catalog", "graph", target, "--namespace", namespace]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        kubectl = ["kubectl", f"--kubeconfig={dynamo_cluster.kubeconfig}", f"--context={dynamo_cluster.context}"]
        for _ in ("made", "unchanged"):
            applied = subprocess.run(
                [*kubectl, "apply", "--server-side", "--validate=strict", "-f", "-", "-o", "json"],
                input=printed,
                capture_output=True,
                text=True,
                check=False,
            )
            assert applied.returncode == 0, applied.stderr
        kinds = [entry["kind"] for entry in json.loads(applied.stdout)["items"]]
        assert kinds == [entry["kind"] for entry in yaml.safe_load_all(printed) if entry]
        live = dynamo_cluster.api.list("nvidia.com/v1beta1", GRAPH, namespace)
        assert [each["metadata"]["generation"] for each in live] == [1]
