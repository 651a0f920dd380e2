"""A DynamoGraphDeployment as the stand-in reads it: strict, frozen. What it does not model, it refuses by name."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from tests.stand_ins.dynamo_operator import names

Manifest = dict[str, Any]

# Fields of the real API that no recording shows at work. The stand-in would have to guess, so it says no.
NOT_MODELLED_GRAPH = ("experimental", "providerOverride", "topologyConstraint")
NOT_MODELLED_COMPONENT = (
    "compilationCache",
    "eppConfig",
    "experimental",
    "frontendSidecar",
    "minAvailable",
    "modelRef",
    "providerOverride",
    "topologyConstraint",
)
# What does not change a worker's pods, and so is left out of the workers' hash (recorded: replicas, scalingAdapter).
NOT_HASHED = frozenset({"replicas", "scalingAdapter"})
OWN_ANNOTATIONS = {
    names.STRATEGY: re.compile(r"Recreate|RollingUpdate"),
    names.MAX_SURGE: re.compile(r"\d+%?"),
    names.MAX_UNAVAILABLE: re.compile(r"\d+%?"),
    names.ENABLE_GROVE: re.compile(r"true|false"),
    names.WORKLOAD_PROVIDER: re.compile(names.COMPONENT_PROVIDER),
    names.ORIGIN_VERSION: re.compile(r".+"),
    names.CURRENT_WORKER_HASH: re.compile(r"[0-9a-f]{8}"),
}


class NotModelledError(Exception):
    """Something of the real API that the stand-in does not imitate, or an annotation that neither knows."""


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Restart(Part):
    id: str = ""
    strategy: Mapping[str, Any] = {}

    @property
    def parallel(self) -> bool:
        return self.strategy.get("type") == "Parallel"


class Component(Part):
    """One entry of spec.components. The pod template stays plain data: it is merged, not interpreted."""

    name: str
    type: str | None = None
    replicas: int | None = None
    pod_template: Manifest = {}
    shared_memory_size: str | int | None = None
    scaling_adapter: Mapping[str, Any] | None = None
    runtime_version_override: str | None = None
    multinode: Mapping[str, Any] | None = None
    global_dynamo_namespace: bool = False

    @property
    def is_worker(self) -> bool:
        return self.type in names.WORKER_TYPES

    @property
    def desired(self) -> int:
        return 1 if self.replicas is None else self.replicas

    @property
    def annotations(self) -> dict[str, str]:
        return dict((self.pod_template.get("metadata") or {}).get("annotations") or {})

    @property
    def labels(self) -> dict[str, str]:
        return dict((self.pod_template.get("metadata") or {}).get("labels") or {})

    def as_given(self) -> Manifest:
        """The entry as it was submitted."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class GraphSpec(Part):
    components: tuple[Component, ...]
    backend_framework: str | None = None
    annotations: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}
    env: tuple[Manifest, ...] = ()
    priority_class_name: str | None = None
    restart: Restart | None = None


class Graph(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    namespace: str
    uid: str
    generation: int
    annotations: Mapping[str, str]
    spec: GraphSpec

    @property
    def dynamo_namespace(self) -> str:
        return f"{self.namespace}-{self.name}"

    @property
    def current_hash(self) -> str | None:
        return self.annotations.get(names.CURRENT_WORKER_HASH)

    @property
    def workers(self) -> tuple[Component, ...]:
        return tuple(component for component in self.spec.components if component.is_worker)

    @property
    def multinode(self) -> bool:
        return any(component.multinode is not None for component in self.spec.components)

    def annotations_of(self, component: Component) -> dict[str, str]:
        """A component's annotations: its own first, then the graph's spec.annotations."""
        return {**self.spec.annotations, **component.annotations}


def read(manifest: Manifest) -> Graph:
    """The graph in a manifest. Raises NotModelledError for what the stand-in does not imitate."""
    refuse_unmodelled(manifest)
    metadata = manifest["metadata"]
    try:
        spec = GraphSpec.model_validate(manifest["spec"])
    except ValidationError as error:
        where = "; ".join(f"spec.{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise NotModelledError(f"stand-in operator: cannot read {where}") from None
    return Graph(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata.get("uid", ""),
        generation=metadata.get("generation", 1),
        annotations=metadata.get("annotations") or {},
        spec=spec,
    )


def refuse_unmodelled(manifest: Manifest) -> None:
    problems = [*unmodelled_fields(manifest), *annotation_problems(manifest)]
    if problems:
        raise NotModelledError("stand-in operator: " + "; ".join(problems))


def unmodelled_fields(manifest: Manifest) -> Iterator[str]:
    spec = manifest.get("spec") or {}
    for field in NOT_MODELLED_GRAPH:
        if field in spec:
            yield f"spec.{field} is not modelled"
    for index, component in enumerate(spec.get("components") or []):
        for field in NOT_MODELLED_COMPONENT:
            if field in component:
                yield f"spec.components[{index}].{field} is not modelled"
        if component.get("type") in ("planner", "epp"):
            yield f"spec.components[{index}].type {component['type']!r} is not modelled"


def annotation_problems(manifest: Manifest) -> Iterator[str]:
    """Annotations of the operator's own prefix that it does not know, and values that it cannot mean."""
    spec = manifest.get("spec") or {}
    places = [("metadata", manifest["metadata"]), ("spec", spec)]
    for index, component in enumerate(spec.get("components") or []):
        template = component.get("podTemplate") or {}
        places.append((f"spec.components[{index}].podTemplate.metadata", template.get("metadata") or {}))
    for where, holder in places:
        annotations: Mapping[str, str] = holder.get("annotations") or {}
        for key, value in annotations.items():
            if not key.startswith(f"{names.GROUP}/"):
                continue
            pattern = OWN_ANNOTATIONS.get(key)
            if pattern is None:
                yield f"{where}.annotations[{key}] is not an annotation it knows: {', '.join(sorted(OWN_ANNOTATIONS))}"
            elif not pattern.fullmatch(value) and key != names.WORKLOAD_PROVIDER:
                yield f"{where}.annotations[{key}]: {value!r} does not match {pattern.pattern}"
        if annotations.get(names.MAX_SURGE) in ("0", "0%") and annotations.get(names.MAX_UNAVAILABLE) in ("0", "0%"):
            yield f"{where}.annotations: maxSurge and maxUnavailable may not both be 0"


def reconcile_problem(graph: Graph) -> str | None:
    """What was recorded as admitted, but not at work: the graph fails instead of being guessed at."""
    if graph.spec.backend_framework is None:
        return "stand-in operator: spec.backendFramework is not set and detecting it is not modelled"
    for index, component in enumerate(graph.spec.components):
        if component.type is None:
            return f"stand-in operator: spec.components[{index}] without type is not modelled"
        if component.global_dynamo_namespace:
            return f"stand-in operator: spec.components[{index}].globalDynamoNamespace is not modelled"
    return None


def worker_hash(graph: Graph) -> str:
    """Eight hexadecimal digits of everything that changes any worker's pods: one hash for all workers of a graph.

    The digits are not the real operator's; what changes them, and what does not, is.
    """
    workers = {
        component.name: {key: value for key, value in component.as_given().items() if key not in NOT_HASHED}
        for component in graph.workers
    }
    for worker in workers.values():
        metadata = worker.get("podTemplate", {}).get("metadata")
        if not metadata:  # an empty block says nothing
            worker.get("podTemplate", {}).pop("metadata", None)
    subject = {
        "backendFramework": graph.spec.backend_framework,
        "annotations": dict(graph.spec.annotations),
        "labels": dict(graph.spec.labels),
        "env": list(graph.spec.env),
        "priorityClassName": graph.spec.priority_class_name,
        "workers": workers,
    }
    return digest(subject)[:8]


def digest(subject: object) -> str:
    return hashlib.sha256(json.dumps(subject, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
