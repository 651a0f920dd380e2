"""Nodes of the test cluster: machines as clouds and GPU feature discovery describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .api import Api, Object

GPU = "nvidia.com/gpu"
GPU_TAINT = {"key": GPU, "value": "present", "effect": "NoSchedule"}
# GKE puts this one on every arm64 node: https://cloud.google.com/kubernetes-engine/docs/how-to/prepare-arm-workloads-for-deployment
ARM_TAINT = {"key": "kubernetes.io/arch", "value": "arm64", "effect": "NoSchedule"}


@dataclass(frozen=True)
class Machine:
    """One kind of machine."""

    instance_type: str
    architecture: str
    cpus: int
    memory: str
    gpus: int = 0
    gpu_labels: Mapping[str, str] | None = None
    taints: tuple[Mapping[str, str], ...] = ()


def _gpu_labels(product: str, machine: str, memory_mib: int, family: str, compute: str, count: int) -> dict[str, str]:
    """Labels as GPU feature discovery derives them from NVML (NVIDIA/k8s-device-plugin, docs/gpu-feature-discovery)."""
    major, minor = compute.split(".")
    return {
        f"{GPU}.present": "true",
        f"{GPU}.product": product,
        f"{GPU}.machine": machine,
        f"{GPU}.memory": str(memory_mib),
        f"{GPU}.family": family,
        f"{GPU}.compute.major": major,
        f"{GPU}.compute.minor": minor,
        f"{GPU}.count": str(count),
        f"{GPU}.replicas": "1",
        f"{GPU}.sharing-strategy": "none",
        f"{GPU}.mode": "compute",
        "nvidia.com/mig.capable": "true",
        "nvidia.com/cuda.driver-version.full": "580.95.05",
        "nvidia.com/cuda.driver-version.major": "580",
        "nvidia.com/cuda.runtime-version.full": "13.0",
    }


GB200_TRAY = Machine(
    instance_type="gb200-tray",
    architecture="arm64",
    cpus=144,
    memory="960Gi",
    gpus=4,
    gpu_labels=_gpu_labels("NVIDIA-GB200", "GB200-NVL", 189471, "blackwell", "10.0", 4)
    # cluster UUID and clique of the NVLink domain: trays of one rack share it
    | {f"{GPU}.clique": "7f6e5d4c-3b2a-4190-8f7e-6d5c4b3a2910.1"},
    taints=(GPU_TAINT, ARM_TAINT),
)
HGX_B200 = Machine(
    instance_type="hgx-b200",
    architecture="amd64",
    cpus=224,
    memory="2048Gi",
    gpus=8,
    gpu_labels=_gpu_labels("NVIDIA-B200", "HGX-B200", 183359, "blackwell", "10.0", 8),
    taints=(GPU_TAINT,),
)
HGX_H200 = Machine(
    instance_type="hgx-h200",
    architecture="amd64",
    cpus=192,
    memory="2048Gi",
    gpus=8,
    gpu_labels=_gpu_labels("NVIDIA-H200", "HGX-H200", 143771, "hopper", "9.0", 8),
    taints=(GPU_TAINT,),
)
CPU = Machine(instance_type="general-purpose", architecture="amd64", cpus=32, memory="128Gi")

# What every session's cluster has. `Cluster.only` takes away the trays that a test would find to spare.
NODES: Mapping[str, Machine] = {
    "cpu-1": CPU,
    "gb200-1": GB200_TRAY,
    "gb200-2": GB200_TRAY,
    "gb200-3": GB200_TRAY,
    "hgx-b200-1": HGX_B200,
    "hgx-h200-1": HGX_H200,
}


def manifest(name: str, machine: Machine) -> Object:
    capacity = {"cpu": str(machine.cpus), "memory": machine.memory, "ephemeral-storage": "1Ti", "pods": "110"}
    if machine.gpus:
        capacity[GPU] = str(machine.gpus)
    labels = {
        "kubernetes.io/arch": machine.architecture,
        "kubernetes.io/os": "linux",
        "kubernetes.io/hostname": name,
        "node.kubernetes.io/instance-type": machine.instance_type,
        "topology.kubernetes.io/region": "test",
        "topology.kubernetes.io/zone": "test-a",
        **(machine.gpu_labels or {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": [dict(taint) for taint in machine.taints]},
        "status": {
            "capacity": capacity,
            "allocatable": dict(capacity),
            "nodeInfo": {
                "architecture": machine.architecture,
                "operatingSystem": "linux",
                "osImage": "Ubuntu 24.04.3 LTS",
                "kernelVersion": "6.8.0-87-generic",
                "kubeletVersion": "v1.36.4",
                "containerRuntimeVersion": "containerd://2.1.4",
                "bootID": "",
                "machineID": "",
                "systemUUID": "",
                "kubeProxyVersion": "",
            },
        },
    }


def is_ready(node: Mapping[str, Any]) -> bool:
    conditions = {each["type"]: each["status"] for each in node.get("status", {}).get("conditions", [])}
    waiting = [taint for taint in node["spec"].get("taints", []) if taint["key"].startswith("node.kubernetes.io/not-")]
    return conditions.get("Ready") == "True" and not waiting


def add(api: Api, nodes: Mapping[str, Machine]) -> None:
    """Create nodes and wait until the scheduler may use them."""
    for name, machine in nodes.items():
        if api.find("v1", "Node", name) is None:
            api.create(manifest(name, machine))
    api.wait(
        f"nodes {', '.join(nodes)} are Ready",
        lambda: all(is_ready(api.get("v1", "Node", name)) for name in nodes),
    )
