"""A control plane with machines, storage and Dynamo's definitions on it, and what tests do with such a cluster."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from . import control_plane, nodes
from .api import Api, Object, Refused, SafeLoader
from .build import REPOSITORY, KubernetesError, Programs
from .control_plane import ControlPlane
from .pods import Behaviour

BUILD = REPOSITORY / "build" / "kubernetes"
STAGES = Path(__file__).parent / "kwok"
DYNAMO_CRDS = Path(os.environ.get("DYNAMO_CRDS", REPOSITORY.parent / "shared" / "data" / "dynamo-crds"))
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@dataclass
class Cluster:
    """What the `cluster` fixture hands to tests."""

    plane: ControlPlane
    has_dynamo: bool
    api: Api = field(init=False)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1), repr=False)

    def __post_init__(self) -> None:
        self.api = self.plane.api()

    @property
    def kubeconfig(self) -> Path:
        return self.plane.kubeconfig

    @property
    def context(self) -> str:
        return self.plane.context

    # Namespaces

    @contextmanager
    def namespace(self, prefix: str = "test", *, labels: Mapping[str, str] | None = None) -> Iterator[str]:
        """A namespace of one's own; its pods are gone, and their GPUs free, when the block ends."""
        name = f"{prefix}-{secrets.token_hex(3)}"
        self.create_namespace(name, labels=labels)
        try:
            yield name
        finally:
            self.remove_namespace(name)

    def create_namespace(self, name: str, *, labels: Mapping[str, str] | None = None) -> None:
        metadata = {"name": name, "labels": dict(labels or {})}
        self.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        # A pod is refused before this one exists.
        self.api.wait(
            f"ServiceAccount default in {name}", lambda: self.api.find("v1", "ServiceAccount", "default", name)
        )

    def remove_namespace(self, name: str) -> None:
        """Delete it; wait for its pods alone, since the rest takes five seconds and more and is in nobody's way."""
        self.api.delete("v1", "Namespace", name)
        # Nothing new can be made there any more. The controller manager would come to the pods in five seconds, and let
        # go of a Job's pod that has no node in twenty.
        for pod in self.pods(name):
            if pod["metadata"].get("finalizers"):
                with suppress(Refused):
                    self.api.patch("v1", "Pod", pod["metadata"]["name"], {"metadata": {"finalizers": None}}, name)
        now = {"gracePeriodSeconds": 0, "propagationPolicy": "Background"}
        self.api.request("DELETE", f"/api/v1/namespaces/{name}/pods", body=now)
        self.api.wait(f"pods of {name} are gone", lambda: not self.api.list("v1", "Pod", name))

    def left_in(self, namespace: str) -> list[str]:
        """Everything in a namespace but what every namespace has, as Kind/name: what a destroy left behind."""
        found = []
        for resource in self._listable():
            for item in self.api.request("GET", resource[1].format(namespace=namespace))["items"]:
                found.append(f"{resource[0]}/{item['metadata']['name']}")
        own = {"ServiceAccount/default", "ConfigMap/kube-root-ca.crt"}
        return sorted(name for name in found if name not in own and not name.startswith("Event/"))

    def _listable(self) -> list[tuple[str, str]]:
        roots = ["/api/v1"] + [
            f"/apis/{version['groupVersion']}"
            for group in self.api.request("GET", "/apis")["groups"]
            for version in [group["preferredVersion"]]
        ]
        listable = []
        for root in roots:
            for entry in self.api.request("GET", root)["resources"]:
                if entry["namespaced"] and "list" in entry["verbs"] and "/" not in entry["name"]:
                    listable.append((entry["kind"], root + "/namespaces/{namespace}/" + entry["name"]))
        return listable

    # Machines

    @contextmanager
    def only(self, *names: str) -> Iterator[None]:
        """Leave just these nodes schedulable, so that a test decides whether there is a spare one."""
        self._cordon({name for name in nodes.NODES if name not in names})
        try:
            yield
        finally:
            self._cordon(set())

    @contextmanager
    def another(self, machine: nodes.Machine) -> Iterator[str]:
        """One more machine of a kind, so that there is a spare one."""
        name = f"spare-{machine.instance_type}"
        nodes.add(self.api, {name: machine})
        try:
            yield name
        finally:
            self.api.delete("v1", "Node", name)

    def _cordon(self, names: set[str]) -> None:
        for name in nodes.NODES:
            self.api.patch("v1", "Node", name, {"spec": {"unschedulable": name in names or None}})

        def settled() -> bool:
            taints = {
                name: {taint["key"] for taint in self.api.get("v1", "Node", name)["spec"].get("taints", [])}
                for name in nodes.NODES
            }
            return all(("node.kubernetes.io/unschedulable" in keys) == (name in names) for name, keys in taints.items())

        self.api.wait(f"nodes {', '.join(sorted(names)) or '-'} are cordoned", settled)

    # Pods

    def pods(self, namespace: str, labels: str = "") -> list[Object]:
        return self.api.list("v1", "Pod", namespace, labels=labels)

    def placed(self, namespace: str, labels: str = "") -> dict[str, str | None]:
        """Pod -> node, None while it has none."""
        return {pod["metadata"]["name"]: pod["spec"].get("nodeName") for pod in self.pods(namespace, labels)}

    @contextmanager
    def behave(self, behaviour: Behaviour, namespace: str, **labels: str) -> Iterator[None]:
        """Pods of a namespace with these labels do this for the block, those that run already too; then they recover.

        A label's underscores stand for what Python's names cannot have: give such keys as `**{"job-name": "x"}`.
        """
        name = f"behaviour-{secrets.token_hex(4)}"
        self.api.create(behaviour.stage(name, namespace, labels))
        self._await_stages()
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        try:
            self._touch(namespace, selector)
            yield
        finally:
            self.api.delete("kwok.x-k8s.io/v1alpha1", "Stage", name)
            self._await_stages()
            self._touch(namespace, selector)

    def _touch(self, namespace: str, labels: str) -> None:
        """KWOK looks at a pod when the pod changes, not when a stage does."""
        for pod in self.pods(namespace, labels):
            mark = {"metadata": {"annotations": {"gpt-oss.test/touched": secrets.token_hex(4)}}}
            with suppress(Refused):  # it may be gone by now
                self.api.patch("v1", "Pod", pod["metadata"]["name"], mark, namespace)

    def _await_stages(self) -> None:
        """Until KWOK knows every stage made or deleted so far: it learns of them in order, so one more tells."""
        name = f"canary-{secrets.token_hex(4)}"
        answered = {"jq": {"key": '.metadata.annotations["answered"]', "operator": "DoesNotExist"}}
        named = {"jq": {"key": ".metadata.name", "operator": "In", "values": [name]}}
        stage: Object = {
            "apiVersion": "kwok.x-k8s.io/v1alpha1",
            "kind": "Stage",
            "metadata": {"name": name},
            "spec": {
                "resourceRef": {"apiGroup": "v1", "kind": "PersistentVolume"},
                "weight": 1,
                "selector": {"matchExpressions": [named, answered]},
                "steps": [{"patch": {"root": "metadata", "template": 'annotations: {answered: "yes"}'}}],
            },
        }
        canary: Object = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": "1"},
                "accessModes": ["ReadWriteOnce"],
                "storageClassName": "none",
                "csi": {"driver": "canary.gpt-oss.test", "volumeHandle": name},
            },
        }
        self.api.create(stage)
        self.api.create(canary)
        try:

            def seen() -> bool:
                mark = {"metadata": {"annotations": {"asked": secrets.token_hex(4)}}}
                live = self.api.patch("v1", "PersistentVolume", name, mark)
                return "answered" in live["metadata"]["annotations"]

            self.api.wait("KWOK knows the new stages", seen)
        finally:
            self.api.delete("v1", "PersistentVolume", name)
            self.api.delete("kwok.x-k8s.io/v1alpha1", "Stage", name)

    def write_log(self, namespace: str, pod: str, lines: Sequence[str]) -> None:
        """What `kubectl logs` shows of a pod, whatever the container; without it a pod has said nothing."""
        directory = self.plane.directory / "container-logs" / namespace
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / f"{pod}.log"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
        file.write_text("".join(f"{now} stdout F {line}\n" for line in lines))
        spec = {"logs": [{"logsFile": str(file), "previousLogsFile": str(file), "follow": False}]}
        metadata = {"name": pod, "namespace": namespace}
        self._kubelet({"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "Logs", "metadata": metadata, "spec": spec})

    def forward(self, namespace: str, pod: str, port: int, *, to: int) -> None:
        """`kubectl port-forward` to this pod's port reaches a port of loopback."""
        target = {"address": control_plane.LOOPBACK, "port": to}
        spec = {"forwards": [{"ports": [port], "target": target}]}
        metadata = {"name": pod, "namespace": namespace}
        self._kubelet(
            {"apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "PortForward", "metadata": metadata, "spec": spec}
        )

    def _kubelet(self, manifest: Object) -> None:
        self.api.apply(manifest)
        time.sleep(0.3)  # KWOK's server reads such objects from a watch and tells nobody when it has

    def events(self, namespace: str) -> list[str]:
        """ "Kind/name reason: message", oldest first."""
        listed = self.api.list("v1", "Event", namespace)
        listed.sort(key=lambda event: event["metadata"]["creationTimestamp"])
        return [
            f"{event['involvedObject']['kind']}/{event['involvedObject']['name']} {event['reason']}: {event['message']}"
            for event in listed
        ]


def start(programs: Programs, directory: Path, *, outlives_us: bool = False) -> Cluster:
    """A control plane with everything on it."""
    plane = control_plane.start(programs, directory, outlives_us=outlives_us)
    try:
        api = plane.api()
        kinds = install_dynamo_definitions(api)  # the server takes its time with them
        furnish(api, plane.directory)
        api.wait("Dynamo's kinds are served", lambda: api.serves(kinds), seconds=control_plane.READY_WITHIN)
        return Cluster(plane, has_dynamo=bool(kinds))
    except TimeoutError as error:
        ended = f"{', '.join(plane.ended())} ended\n" if plane.ended() else ""
        plane.stop()
        raise KubernetesError(f"{error}; logs in {plane.logs}\n{ended}{plane.log_tails()}") from None
    except BaseException:
        plane.stop()
        raise


def attach(directory: Path) -> Cluster | None:
    """The cluster that an earlier `up` left running in a directory, whole."""
    plane = control_plane.running(directory)
    if plane is None:
        return None
    if ended := plane.ended():
        raise KubernetesError(
            f"{', '.join(ended)} ended by itself; logs in {plane.logs}; `python -m tests.kubernetes down` ends the rest"
        )
    return Cluster(plane, has_dynamo=bool(plane.api().find(*DYNAMO_DEFINITION)))


DYNAMO_DEFINITION = (
    "apiextensions.k8s.io/v1",
    "CustomResourceDefinition",
    "dynamographdeployments.nvidia.com",
)


def furnish(api: Api, directory: Path) -> None:
    for file in sorted(STAGES.glob("*.yaml")):
        for entry in yaml.safe_load_all(file.read_text()):
            api.apply(entry)
    silence = directory / "container-logs" / "silence.log"
    silence.parent.mkdir(parents=True, exist_ok=True)
    silence.touch()
    api.apply(
        {
            "apiVersion": "kwok.x-k8s.io/v1alpha1",
            "kind": "ClusterLogs",
            "metadata": {"name": "silence"},
            "spec": {"logs": [{"logsFile": str(silence), "previousLogsFile": str(silence), "follow": False}]},
        }
    )
    nodes.add(api, nodes.NODES)


def install_dynamo_definitions(api: Api) -> list[tuple[str, str]]:
    """Dynamo's CustomResourceDefinitions that are not there, as `installable`. Answers the kinds they all bring."""
    kinds = []
    for file in sorted(DYNAMO_CRDS.glob("*.yaml")):
        for definition in installable(file.read_text()):
            if api.find(definition["apiVersion"], definition["kind"], definition["metadata"]["name"]) is None:
                api.create(definition)
            spec = definition["spec"]
            kinds += [(f"{spec['group']}/{each['name']}", spec["names"]["kind"]) for each in spec["versions"]]
    return kinds


def installable(text: str) -> list[Object]:
    """A file's definitions, without what a cluster of ours cannot do with.

    The webhook that would convert is the real operator's: while nobody answers it, every read of a graph fails. And
    descriptions are three quarters of a definition: they validate nothing, and take the API server seconds each time.
    """
    definitions: list[Object] = list(yaml.load_all(text, Loader=SafeLoader))
    for definition in definitions:
        definition["spec"].pop("conversion", None)
        for version in definition["spec"]["versions"]:
            _drop_descriptions(version["schema"]["openAPIV3Schema"])
    return definitions


def _drop_descriptions(schema: Any) -> None:
    """`properties` has names of fields for keys: one of them may be called description."""
    if isinstance(schema, dict):
        if isinstance(schema.get("description"), str):
            del schema["description"]
        for key, value in schema.items():
            for below in value.values() if key == "properties" else [value]:
                _drop_descriptions(below)
    elif isinstance(schema, list):
        for each in schema:
            _drop_descriptions(each)


def remove(directory: Path) -> bool:
    """Stop what runs in a directory; whether something did."""
    plane = control_plane.running(directory)
    if plane is None:
        return False
    plane.stop()
    return True


__all__ = ["BUILD", "DYNAMO_CRDS", "RESTRICTED", "Behaviour", "Cluster", "KubernetesError", "attach", "remove", "start"]
