"""What the scenario's stories share: a target's expectations, its stack's configuration, and how its pods are told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from tests.kubernetes import nodes
from tests.kubernetes.api import Object, Refused
from tests.kubernetes.build import REPOSITORY
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.drivers import Driver, InProcess, InProcessStack, Stack
from tests.kubernetes.engine import Outcome
from tests.kubernetes.engine.objects import never

SPEED = 0.2  # an hour's patience with a deployment becomes twelve minutes
PROGRAM = REPOSITORY / "pulumi"
TOKEN = "hf_scenarioscenarioscenarioscenario"
PLATFORM_NAMESPACE = "dynamo-system"
GRAPH = ("nvidia.com/v1beta1", "DynamoGraphDeployment")
GRAPH_LABEL = "nvidia.com/dynamo-graph-deployment-name"
TYPE_LABEL = "nvidia.com/dynamo-component-type"
DEFINITION = ("apiextensions.k8s.io/v1", "CustomResourceDefinition")


@dataclass(frozen=True)
class Target:
    """What must come true for a target, said without asking the catalog."""

    name: str
    graph: str
    machine: nodes.Machine
    workers: Mapping[str, int]  # component type -> pods
    gpus: Mapping[str, int]  # component type -> GPUs of a pod
    option: tuple[str, Any]  # an engine option of a worker, and another value
    changed: str  # component type whose pods the option is for
    just_enough: tuple[str, ...]  # GPU nodes without which the target does not fit
    smaller: Mapping[str, int] = field(default_factory=dict)  # replicas with which it fits twice

    @property
    def gpu_nodes(self) -> set[str]:
        return {name for name, machine in nodes.NODES.items() if machine is self.machine}


TARGETS = {
    target.name: target
    for target in (
        Target(
            name="gb200-agg",
            graph="gpt-oss-agg",
            machine=nodes.GB200_TRAY,
            workers={"worker": 1},
            gpus={"worker": 4},
            option=("worker.max_batch_size", 512),
            changed="worker",
            just_enough=("gb200-1",),
        ),
        Target(
            name="gb200-disagg",
            graph="gpt-oss-disagg",
            machine=nodes.GB200_TRAY,
            workers={"prefill": 1, "decode": 1},
            gpus={"prefill": 1, "decode": 4},
            option=("decode.max_batch_size", 1024),
            changed="decode",
            just_enough=("gb200-1", "gb200-2"),
        ),
        Target(
            name="b200-disagg",
            graph="gpt-oss-disagg",
            machine=nodes.HGX_B200,
            workers={"prefill": 1, "decode": 1},
            gpus={"prefill": 1, "decode": 4},
            option=("decode.max_batch_size", 1024),
            changed="decode",
            just_enough=("hgx-b200-1",),
        ),
        Target(
            name="b200-agg",
            graph="gpt-oss-agg",
            machine=nodes.HGX_B200,
            workers={"worker": 8},
            gpus={"worker": 1},
            option=("worker.max-num-seqs", 128),
            changed="worker",
            just_enough=("hgx-b200-1",),
            smaller={"worker": 2},
        ),
        Target(
            name="h200-agg",
            graph="gpt-oss-agg",
            machine=nodes.HGX_H200,
            workers={"worker": 8},
            gpus={"worker": 1},
            option=("worker.max-num-seqs", 128),
            changed="worker",
            just_enough=("hgx-h200-1",),
            smaller={"worker": 2},
        ),
    )
}


@overload
def stack_of(
    driver: InProcess, cluster: Cluster, target: Target, namespace: str, *, name: str | None = None, **config: Any
) -> InProcessStack: ...


@overload
def stack_of(
    driver: Driver, cluster: Cluster, target: Target, namespace: str, *, name: str | None = None, **config: Any
) -> Stack: ...


def stack_of(
    driver: Driver, cluster: Cluster, target: Target, namespace: str, *, name: str | None = None, **config: Any
) -> Stack:
    """A stack with what a user has to say, and what a test says besides."""
    token = {} if {"hf_token_secret", "hf_anonymous"} & set(config) else {"hf_token": TOKEN}
    said = {
        "kubeconfig": str(cluster.kubeconfig),
        "context": cluster.context,
        "namespace": namespace,
        "target": target.name,
        **({} if config.get("model_cache_existing") else {"model_cache_storage_class": "shared-files"}),
        **config,
    }
    return driver.stack(PROGRAM, name or f"{target.name}-{namespace}", said, token)


@contextmanager
def impatient(driver: Driver, stack: Stack, directory: Path, stuck: Callable[[], bool]) -> Iterator[None]:
    """Within the block a graph that is not Ready is given up sooner, by a stack with load_timeout_seconds of a minute.

    Where the engine is ours, as soon as the graph is stuck; elsewhere the catalog leaves images no time: three minutes
    are left.
    """
    if isinstance(driver, InProcess):
        driver.gives_up = stuck
        try:
            yield
        finally:
            driver.gives_up = never
        return
    overlay = directory / "impatient"
    overlay.mkdir(exist_ok=True)
    (overlay / "dynamo.yml").write_text("times: {start_seconds: 1}\n")
    stack.config["catalog_overlay"] = str(overlay)
    try:
        yield
    finally:
        del stack.config["catalog_overlay"]


# --- what is there ---------------------------------------------------------------------------------------------------


def pods_of(cluster: Cluster, namespace: str, graph: str, kind: str = "") -> dict[str, Object]:
    """The graph's pods that are not on their way out, by UID."""
    labels = f"{GRAPH_LABEL}={graph}" + (f",{TYPE_LABEL}={kind}" if kind else "")
    return {
        pod["metadata"]["uid"]: pod
        for pod in cluster.pods(namespace, labels)
        if "deletionTimestamp" not in pod["metadata"]
    }


def unschedulable(cluster: Cluster, namespace: str, graph: str, kind: str) -> bool:
    """Whether the scheduler has said of such a pod that there is no place for it."""
    return _says(pods_of(cluster, namespace, graph, kind), "PodScheduled", "Unschedulable")


def unready(cluster: Cluster, namespace: str, graph: str, kind: str) -> bool:
    """Whether a kubelet has said of such a pod that its containers run and are not ready."""
    return _says(pods_of(cluster, namespace, graph, kind), "Ready", "ContainersNotReady")


def _says(pods: Mapping[str, Object], condition: str, reason: str) -> bool:
    return any(
        (each["type"], each.get("reason")) == (condition, reason)
        for pod in pods.values()
        for each in pod["status"].get("conditions", [])
    )


def gpus_of(pod: Object) -> int:
    return sum(int(each.get("resources", {}).get("limits", {}).get(nodes.GPU, 0)) for each in pod["spec"]["containers"])


def mounted_config(pods: Mapping[str, Object]) -> set[str]:
    """Names of the ConfigMaps that pods mount."""
    return {
        volume["configMap"]["name"]
        for pod in pods.values()
        for volume in pod["spec"].get("volumes", [])
        if "configMap" in volume
    }


def ready(cluster: Cluster, namespace: str, graph: str) -> Object:
    """The graph's Ready condition; of an older generation, it is unknown."""
    live = cluster.api.get(*GRAPH, graph, namespace)
    found: Object = next(each for each in live["status"]["conditions"] if each["type"] == "Ready")
    observed = found.get("observedGeneration", live["status"].get("observedGeneration"))
    return found if observed == live["metadata"]["generation"] else {**found, "status": "Unknown"}


def jobs(cluster: Cluster, namespace: str) -> dict[str, Object]:
    return {job["metadata"]["name"]: job for job in cluster.api.list("batch/v1", "Job", namespace)}


def uids(items: Mapping[str, Object]) -> dict[str, str]:
    return {name: item["metadata"]["uid"] for name, item in items.items()}


def left_in(cluster: Cluster, namespace: str) -> list[str]:
    """What a destroy left, but for what the operator puts into every namespace it serves and never takes away."""
    operators = {"ServiceAccount/planner-serviceaccount", "RoleBinding/planner-serviceaccount-binding"}
    return [name for name in cluster.left_in(namespace) if name not in operators]


def has_gone(cluster: Cluster, namespace: str) -> bool:
    return cluster.api.find("v1", "Namespace", namespace) is None


def remove_definitions(cluster: Cluster) -> None:
    """A cluster that never heard of Dynamo."""
    names = [
        each["metadata"]["name"]
        for each in cluster.api.list(*DEFINITION)
        if each["spec"]["group"] == "nvidia.com" or each["spec"]["group"].endswith(".nvidia.com")
    ]
    for name in names:
        cluster.api.delete(*DEFINITION, name)
    cluster.api.wait(
        f"{', '.join(names)} are gone", lambda: not any(cluster.api.find(*DEFINITION, name) for name in names)
    )


def clean(cluster: Cluster, *namespaces: str) -> None:
    """Whatever a failed test left, finalizers that nobody will clear included."""
    for namespace in namespaces:
        if cluster.api.find("v1", "Namespace", namespace) is None:
            continue
        for kind in ("DynamoGraphDeployment", "DynamoComponentDeployment"):
            with suppress(Refused):  # the kind may be gone
                for item in cluster.api.list(GRAPH[0], kind, namespace):
                    name = item["metadata"]["name"]
                    cluster.api.delete(GRAPH[0], kind, name, namespace)
                    with suppress(Refused):
                        cluster.api.patch(GRAPH[0], kind, name, {"metadata": {"finalizers": None}}, namespace)
        cluster.remove_namespace(namespace)


# --- doing something meanwhile ---------------------------------------------------------------------------------------


@dataclass
class Running:
    """An operation in another thread."""

    outcome: Outcome | None = None
    error: BaseException | None = None

    def result(self) -> Outcome:
        if self.error:
            raise self.error
        assert self.outcome is not None
        return self.outcome


@contextmanager
def meanwhile(operation: Callable[[], Outcome]) -> Iterator[Running]:
    """The operation runs beside the block, and has ended when the block has."""
    running = Running()

    def body() -> None:
        try:
            running.outcome = operation()
        except BaseException as error:
            running.error = error

    thread = threading.Thread(target=body, name="operation")
    thread.start()
    try:
        yield running
    finally:
        thread.join()
