"""Snapshots for the tests: recordings of the real operator, and small ones made by hand."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from serving_catalog.checks.cluster import Snapshot, Thing, without_values

RECORDED = Path(__file__).parent / "recorded"
OPERATOR = Path(__file__).parents[1] / "stand_ins/dynamo_operator/recorded"  # what the operator itself makes
NOW = "2026-11-21T07:20:00Z"

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

CRDS = ({"group": "nvidia.com", "version": "v1beta1", "name": "dynamographdeployments"},)
OPERATOR_DEPLOYMENT: dict[str, Any] = {
    "metadata": {
        "name": "dynamo-platform-dynamo-operator-controller-manager",
        "namespace": "dynamo-system",
        "labels": {"app.kubernetes.io/version": "1.2.1", "helm.sh/chart": "dynamo-operator-1.2.1"},
        "annotations": {
            "meta.helm.sh/release-name": "dynamo-platform",
            "meta.helm.sh/release-namespace": "dynamo-system",
        },
    },
    "spec": {"replicas": 1},
    "status": {"availableReplicas": 1, "conditions": [{"type": "Available", "status": "True"}]},
}


@cache
def _objects(case: str) -> dict[str, tuple[Thing, ...]]:
    return {
        path.stem: tuple(yaml.load_all(path.read_text(), _Loader))
        for directory in (OPERATOR / case, RECORDED / case)
        for path in sorted(directory.glob("*.yaml"))
    }


def recorded(case: str, **changes: Any) -> Snapshot:
    """A recorded namespace, with a platform around it. Objects are copies: tests change them."""
    objects = copy.deepcopy(_objects(case))
    secret = {"metadata": {"name": "hf-token-secret"}, "type": "Opaque", "data": {"HF_TOKEN": "aGZfeA=="}}
    around: dict[str, tuple[Thing, ...]] = {
        "Namespace": ({"metadata": {"name": "serving"}, "status": {"phase": "Active"}},),
        "APIResource": CRDS,
        "Operator": (OPERATOR_DEPLOYMENT,),
        "Webhook": (),
        "StorageClass": (storage_class("kwok-volume", "kwok.x-k8s.io/volume"),),
        "Secret": (without_values(secret),),
        "Event": (),
        "Job": (),
    }
    whole = Snapshot(at=NOW, context="kwok", version="v1.36.4", namespace="serving", objects=around | objects)
    return with_objects(whole, **changes)


def with_objects(snapshot: Snapshot, **kinds: Any) -> Snapshot:
    """The snapshot with these kinds replaced; None: not read."""
    objects = {**copy.deepcopy(dict(snapshot.objects)), **{kind: tuple(things or ()) for kind, things in kinds.items()}}
    missing = {kind: "status 403: forbidden" for kind, things in kinds.items() if things is None}
    for kind in missing:
        del objects[kind]
    return snapshot.model_copy(update={"objects": objects, "unread": {**snapshot.unread, **missing}})


def storage_class(name: str, provisioner: str, default: bool = False, binding: str = "Immediate") -> dict[str, Any]:
    notes = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    return {
        "metadata": {"name": name, "annotations": notes},
        "provisioner": provisioner,
        "volumeBindingMode": binding,
    }


def node(
    name: str,
    *,
    product: str = "NVIDIA-GB200",
    architecture: str = "arm64",
    gpus: int = 4,
    taints: tuple[Mapping[str, str], ...] = ({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},),
    **changes: Any,
) -> dict[str, Any]:
    labels = {"kubernetes.io/arch": architecture, "kubernetes.io/hostname": name}
    if product:
        labels |= {"nvidia.com/gpu.product": product, "nvidia.com/gpu.present": "true"}
    allocatable = {"cpu": "144", "memory": "960Gi", "pods": "110", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    return {
        "metadata": {"name": name, "labels": labels | changes.get("labels", {})},
        "spec": {"taints": list(taints), **({"unschedulable": True} if changes.get("cordoned") else {})},
        "status": {
            "allocatable": allocatable | changes.get("allocatable", {}),
            "conditions": [{"type": "Ready", "status": "False" if changes.get("down") else "True"}],
        },
    }


def plain_node(name: str = "cpu-1", architecture: str = "amd64") -> dict[str, Any]:
    return node(name, product="", architecture=architecture, gpus=0, taints=())


def holder(node_name: str, gpus: int, namespace: str = "other", graph: str = "") -> dict[str, Any]:
    """A pod of somebody that holds GPUs."""
    return {
        "metadata": {
            "name": f"holder-{node_name}",
            "namespace": namespace,
            "labels": {"nvidia.com/dynamo-graph-deployment-name": graph} if graph else {},
        },
        "spec": {"nodeName": node_name, "containers": [{"resources": {"requests": {"nvidia.com/gpu": str(gpus)}}}]},
        "status": {"phase": "Running"},
    }


def event(kind: str, name: str, reason: str, message: str, at: str = NOW, **more: Any) -> dict[str, Any]:
    return {
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": at,
        "involvedObject": {"kind": kind, "name": name},
        **more,
    }
