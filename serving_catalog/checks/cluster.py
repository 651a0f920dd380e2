"""What one pass over a live cluster saw, as plain data, and how to look things up in it.

Objects are as the API server gives them, in its own field names; secrets come without their values. pulumi/cluster.py
fills a `Snapshot`; cluster_prerequisites.py and cluster_diagnosis.py judge it. Nothing here asks a cluster anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from pydantic import Field

from serving_catalog.checks.judging import at
from serving_catalog.entries import Part

Thing = Mapping[str, Any]  # a Kubernetes object

# Labels that the operator puts on what it makes for a graph; seen on its own objects.
GRAPH_LABEL = "nvidia.com/dynamo-graph-deployment-name"
COMPONENT_LABEL = "nvidia.com/dynamo-component"
WORKER_HASH_LABEL = "nvidia.com/dynamo-worker-hash"
GRAPH_GROUP, GRAPH_VERSION, GRAPH_PLURAL = "nvidia.com", "v1beta1", "dynamographdeployments"

# Labels of the operator's own Deployment. Source: deploy/helm/charts/platform/components/operator/templates/
# deployment.yaml and _helpers.tpl of ai-dynamo/dynamo.
OPERATOR_SELECTOR = "app.kubernetes.io/part-of=dynamo-operator,control-plane=controller-manager"


class Probe(Part):
    """What the frontend answered, asked through the API server."""

    status: int | None = None
    models: tuple[str, ...] = ()
    error: str = ""


class Snapshot(Part):
    """What one pass saw. `objects` has the kinds that were asked for, `unread` those that could not be read."""

    at: str = Field(description="When, in UTC: 2026-11-21T08:00:00Z.")
    kubeconfig: str = ""
    context: str = ""
    contexts: tuple[str, ...] = ()
    server: str = ""
    problem: str = Field(default="", description="Why there is nothing to see: kubeconfig, unreachable, unauthorised.")
    message: str = Field(default="", description="What was said, where there is a problem.")
    version: str = Field(default="", description="The API server's: v1.36.4.")
    namespace: str = ""
    objects: Mapping[str, tuple[Thing, ...]] = {}
    unread: Mapping[str, str] = Field(default={}, description="Kinds that could not be read, and why.")
    logs: Mapping[str, tuple[str, ...]] = Field(default={}, description="Last lines, by pod/container.")
    probes: Mapping[str, Probe] = Field(default={}, description="By Service.")
    denied: tuple[str, ...] | None = Field(default=None, description="Verbs and resources that are not permitted.")

    def all(self, kind: str) -> tuple[Thing, ...]:
        return self.objects.get(kind, ())

    def was_read(self, kind: str) -> bool:
        return kind in self.objects and kind not in self.unread

    def one(self, kind: str, name: str) -> Thing | None:
        return next((thing for thing in self.all(kind) if name_of(thing) == name), None)

    def why_unread(self, kind: str) -> str:
        return self.unread.get(kind, "not read")


def name_of(thing: Thing) -> str:
    return str(at(thing, "metadata.name") or "")


def labels_of(thing: Thing) -> Mapping[str, str]:
    return (thing.get("metadata") or {}).get("labels") or {}


def annotations_of(thing: Thing) -> Mapping[str, str]:
    return (thing.get("metadata") or {}).get("annotations") or {}


def without_values(secret: Thing) -> dict[str, Any]:
    """A Secret as it may be looked at: name, owner, type and the names of its keys."""
    values = secret.get("data") or {}
    # This annotation holds the values once more.
    hidden = "kubectl.kubernetes.io/last-applied-configuration"
    return {
        "metadata": {
            "name": name_of(secret),
            "labels": dict(labels_of(secret)),
            "annotations": {key: value for key, value in annotations_of(secret).items() if key != hidden},
        },
        "type": secret.get("type"),
        "keys": sorted(values),
        "empty": sorted(key for key, value in values.items() if not value),
    }


def condition(thing: Thing, kind: str) -> Thing | None:
    """The condition of this type."""
    found = (thing.get("status") or {}).get("conditions") or ()
    return next((entry for entry in found if entry.get("type") == kind), None)


def is_true(thing: Thing, kind: str) -> bool:
    return (condition(thing, kind) or {}).get("status") == "True"


def seconds_between(earlier: str | None, later: str | None) -> float | None:
    """Seconds from one time of the API to another; None where either is missing."""
    if not earlier or not later:
        return None
    return (_time(later) - _time(earlier)).total_seconds()


def _time(text: str) -> datetime:
    moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def age(seconds: float | None) -> str:
    """`42 s`, `17 min`, `5 h`, `3 days`."""
    if seconds is None:
        return "unknown"
    for limit, unit, factor in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / factor:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


_SUFFIXES = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{unit: Decimal(1024) ** power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
}
_QUANTITY = re.compile(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([numkMGTPE]i?|Ki)?")


def quantity(text: object) -> Decimal:
    """A Kubernetes quantity as a number: 400Gi, 500m, 4, 1e3."""
    match = _QUANTITY.fullmatch(str(text).strip())
    if match is None:
        raise ValueError(f"{text!r} is not a Kubernetes quantity")
    return Decimal(match.group(1)) * _SUFFIXES[match.group(2) or ""]


# --- references --------------------------------------------------------------------------------------------------


def pod_templates(thing: Thing) -> Iterator[tuple[str, Thing]]:
    """(component, pod template) of a graph; ("", template) of a Job or Deployment."""
    spec = thing.get("spec") or {}
    if "components" in spec:
        for component in spec["components"] or ():
            yield str(component.get("name")), component.get("podTemplate") or {}
    elif spec.get("template"):
        yield "", spec["template"]


def claims_of(pod_spec: Thing) -> list[str]:
    """Names of the claims that a pod mounts."""
    return [
        str(claim["claimName"])
        for volume in pod_spec.get("volumes") or ()
        if (claim := volume.get("persistentVolumeClaim"))
    ]


def config_maps_of(pod_spec: Thing) -> list[str]:
    """Names of the ConfigMaps that a pod cannot start without."""
    named = [volume["configMap"] for volume in pod_spec.get("volumes") or () if volume.get("configMap")]
    named += [source["configMapRef"] for source in _environment_sources(pod_spec) if source.get("configMapRef")]
    named += [value["configMapKeyRef"] for value in _values_from(pod_spec) if value.get("configMapKeyRef")]
    return list(dict.fromkeys(str(entry["name"]) for entry in named if not entry.get("optional")))


def secrets_of(pod_spec: Thing) -> list[tuple[str, str | None]]:
    """(secret, key) that a pod cannot start without; no key where the whole Secret is taken."""
    found: list[tuple[str, str | None]] = []
    for value in _values_from(pod_spec):
        reference = value.get("secretKeyRef")
        if reference and not reference.get("optional"):
            found.append((str(reference["name"]), str(reference["key"])))
    for source in _environment_sources(pod_spec):
        reference = source.get("secretRef")
        if reference and not reference.get("optional"):
            found.append((str(reference["name"]), None))
    return list(dict.fromkeys(found))


def pull_secrets_of(pod_spec: Thing) -> list[str]:
    return [str(entry["name"]) for entry in pod_spec.get("imagePullSecrets") or ()]


def containers_of(pod_spec: Thing) -> list[Thing]:
    return [*(pod_spec.get("initContainers") or ()), *(pod_spec.get("containers") or ())]


def _environment_sources(pod_spec: Thing) -> list[Thing]:
    return [source for container in containers_of(pod_spec) for source in container.get("envFrom") or ()]


def _values_from(pod_spec: Thing) -> list[Thing]:
    return [
        variable["valueFrom"]
        for container in containers_of(pod_spec)
        for variable in container.get("env") or ()
        if variable.get("valueFrom")
    ]


# --- nodes -------------------------------------------------------------------------------------------------------

GPU = "nvidia.com/gpu"
PRODUCT_LABEL = "nvidia.com/gpu.product"
ARCHITECTURE_LABEL = "kubernetes.io/arch"


def requested(pod_spec: Thing) -> dict[str, Decimal]:
    """What a pod asks for: its containers together, or its largest init container."""

    def of(container: Thing) -> dict[str, Decimal]:
        resources = container.get("resources") or {}
        # An extended resource may be given as a limit alone; the API server copies limits to requests.
        both = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        return {name: quantity(value) for name, value in both.items()}

    together: dict[str, Decimal] = {}
    for container in pod_spec.get("containers") or ():
        for name, value in of(container).items():
            together[name] = together.get(name, Decimal(0)) + value
    for container in pod_spec.get("initContainers") or ():
        for name, value in of(container).items():
            together[name] = max(together.get(name, Decimal(0)), value)
    return together


def gpus_of(pod_spec: Thing) -> int:
    return int(requested(pod_spec).get(GPU, 0))


def tolerated(taint: Thing, tolerations: Sequence[Thing]) -> bool:
    for toleration in tolerations:
        if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
            continue
        key = toleration.get("key")
        if key and key != taint.get("key"):
            continue
        operator = toleration.get("operator") or "Equal"
        if operator == "Exists" or (key and (toleration.get("value") or "") == (taint.get("value") or "")):
            return True
    return False


def taint_text(taint: Thing) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint.get('key')}{value}:{taint.get('effect')}"


def untolerated(node: Thing, pod_spec: Thing) -> list[str]:
    """Taints that keep the pod off the node. A cordon is told apart, it is no property of the pod."""
    tolerations = pod_spec.get("tolerations") or ()
    return [
        taint_text(taint)
        for taint in (node.get("spec") or {}).get("taints") or ()
        if taint.get("effect") in ("NoSchedule", "NoExecute")
        and taint.get("key") != "node.kubernetes.io/unschedulable"
        and not tolerated(taint, tolerations)
    ]


def mismatches(node: Thing, pod_spec: Thing) -> list[str]:
    """Why the node's labels do not fit the pod's node selector and required affinity."""
    labels = labels_of(node)
    wrong = [
        f"{key} is {labels.get(key, 'not set')}, not {value}"
        for key, value in (pod_spec.get("nodeSelector") or {}).items()
        if labels.get(key) != value
    ]
    terms = at(pod_spec, "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms")
    if terms:
        failed = [_term_mismatches(node, term) for term in terms]
        if all(failed):
            closest: list[str] = min(failed, key=len)
            wrong += closest
    return list(dict.fromkeys(wrong))


def _term_mismatches(node: Thing, term: Thing) -> list[str]:
    labels = labels_of(node)
    fields = {"metadata.name": name_of(node)}
    wrong = []
    for values, entries in ((labels, term.get("matchExpressions")), (fields, term.get("matchFields"))):
        for entry in entries or ():
            key, wanted = str(entry["key"]), [str(value) for value in entry.get("values") or ()]
            if not _matches(values.get(key), str(entry["operator"]), wanted):
                wrong.append(f"{key} is {values.get(key, 'not set')}, not {_wanted(str(entry['operator']), wanted)}")
    return wrong


def _matches(value: str | None, operator: str, wanted: Sequence[str]) -> bool:
    if operator == "In":
        return value in wanted
    if operator == "NotIn":
        return value not in wanted
    if operator == "Exists":
        return value is not None
    if operator == "DoesNotExist":
        return value is None
    if value is None or not value.lstrip("-").isdigit() or len(wanted) != 1:
        return False
    return int(value) > int(wanted[0]) if operator == "Gt" else int(value) < int(wanted[0])


def _wanted(operator: str, wanted: Sequence[str]) -> str:
    words = {"In": "", "NotIn": "other than ", "Exists": "set", "DoesNotExist": "absent", "Gt": "> ", "Lt": "< "}
    return words.get(operator, f"{operator} ") + " or ".join(wanted)


class NodeRoom(Part):
    """A node as a scheduler sees it for one resource. Busy is what other pods on it ask for."""

    name: str
    architecture: str
    product: str
    gpus: int
    busy: int
    ready: bool
    cordoned: bool
    taints: tuple[str, ...]

    @property
    def free(self) -> int:
        return max(0, self.gpus - self.busy)

    def __str__(self) -> str:
        """`arm64, NVIDIA-GB200, 4 GPUs of which 0 free, taint nvidia.com/gpu:NoSchedule, cordoned`."""
        words = [self.architecture, self.product or "no product label", f"{self.gpus} GPUs of which {self.free} free"]
        words += [f"taint {taint}" for taint in self.taints]
        words += ["cordoned"] if self.cordoned else []
        words += [] if self.ready else ["not Ready"]
        return ", ".join(words)


def grouped(texts: Mapping[str, str], most: int = 12) -> str:
    """`a, b: this; c: that`: what is said of many nodes alike is said once, and not of hundreds."""
    by_text: dict[str, list[str]] = {}
    for name, text in sorted(texts.items()):
        by_text.setdefault(text, []).append(name)
    parts = []
    for text, names in list(by_text.items())[:most]:
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        parts.append(f"{shown}: {text}")
    if len(by_text) > most:
        parts.append(f"and {sum(len(names) for names in list(by_text.values())[most:])} nodes more")
    return "; ".join(parts)


def rooms_text(there: Iterable[NodeRoom]) -> str:
    return grouped({room.name: str(room) for room in there}) or "no node with GPUs"


def busy_on(pods: Iterable[Thing]) -> dict[str, dict[str, Decimal]]:
    """What the pods ask for together, by node. Pods that have ended ask for nothing."""
    busy: dict[str, dict[str, Decimal]] = {}
    for pod in pods:
        node = at(pod, "spec.nodeName")
        if not node or at(pod, "status.phase") in ("Succeeded", "Failed"):
            continue
        here = busy.setdefault(node, {})
        for name, value in requested(pod.get("spec") or {}).items():
            here[name] = here.get(name, Decimal(0)) + value
        here["pods"] = here.get("pods", Decimal(0)) + 1
    return busy


def rooms(nodes: Iterable[Thing], pods: Iterable[Thing]) -> list[NodeRoom]:
    """The nodes with GPUs, and how many are free when the given pods hold what they ask for."""
    busy = busy_on(pods)
    found = []
    for node in nodes:
        allocatable = ((node.get("status") or {}).get("allocatable") or {}).get(GPU)
        labels = labels_of(node)
        if allocatable is None and PRODUCT_LABEL not in labels:
            continue
        found.append(
            NodeRoom(
                name=name_of(node),
                architecture=architecture_of(node),
                product=labels.get(PRODUCT_LABEL, ""),
                gpus=int(quantity(allocatable or 0)),
                busy=int(busy.get(name_of(node), {}).get(GPU, 0)),
                ready=is_true(node, "Ready"),
                cordoned=bool(at(node, "spec.unschedulable")),
                taints=tuple(
                    taint_text(taint)
                    for taint in (node.get("spec") or {}).get("taints") or ()
                    if taint.get("key") != "node.kubernetes.io/unschedulable"
                ),
            )
        )
    return sorted(found, key=lambda room: room.name)


def architecture_of(node: Thing) -> str:
    return str(labels_of(node).get(ARCHITECTURE_LABEL) or at(node, "status.nodeInfo.architecture") or "unknown")


class Placement(Part):
    """Where the pods of one component would go, and why other nodes take none."""

    component: str
    gpus_per_pod: int
    wanted: int
    placed: int
    refusals: Mapping[str, str]  # node -> why it takes none of these pods

    @property
    def missing(self) -> int:
        return self.wanted - self.placed


def place(pods: Sequence[tuple[str, Thing, int]], nodes: Sequence[Thing], others: Iterable[Thing]) -> list[Placement]:
    """Whether (component, pod spec, replicas) fit on the nodes beside the other pods, those with most GPUs first.

    An estimate of the scheduler's answer: selectors, required affinity, taints, cordons and resources; nothing else.
    """
    busy = busy_on(others)
    free = {
        name_of(node): {
            resource: quantity(value) - busy.get(name_of(node), {}).get(resource, Decimal(0))
            for resource, value in ((node.get("status") or {}).get("allocatable") or {}).items()
        }
        for node in nodes
    }
    before = {name: dict(values) for name, values in free.items()}
    placements = []
    for component, spec, replicas in sorted(pods, key=lambda entry: -gpus_of(entry[1])):
        wanted = {**requested(spec), "pods": Decimal(1)}
        refusals = {name_of(node): ", ".join(reasons) for node in nodes if (reasons := _refusals(node, spec))}
        candidates = [name for name in free if name not in refusals]
        if GPU in wanted:
            # Of nodes without GPUs nobody expects anything.
            refusals = {name: why for name, why in refusals.items() if before[name].get(GPU)}
        placed = 0
        for _ in range(replicas):
            fitting = [name for name in candidates if not _scarce(free[name], wanted)]
            if not fitting:
                break
            # The node with the fewest free GPUs that has enough: whole nodes stay whole for pods that need one.
            best = min(fitting, key=lambda name: (free[name].get(GPU, Decimal(0)), name))
            for resource, value in wanted.items():
                if resource in free[best]:
                    free[best][resource] -= value
            placed += 1
        if placed < replicas:
            refusals |= {
                name: _scarce(before[name], wanted) or "taken by other pods of the plan"
                for name in candidates
                if _scarce(free[name], wanted)
            }
        placements.append(
            Placement(
                component=component,
                gpus_per_pod=gpus_of(spec),
                wanted=replicas,
                placed=placed,
                refusals=refusals,
            )
        )
    return placements


def _refusals(node: Thing, spec: Thing) -> list[str]:
    return [
        *mismatches(node, spec),
        *(f"taint {taint} is not tolerated" for taint in untolerated(node, spec)),
        *(["it is cordoned"] if at(node, "spec.unschedulable") else []),
        *([] if is_true(node, "Ready") else ["it is not Ready"]),
    ]


def _scarce(free: Mapping[str, Decimal], wanted: Mapping[str, Decimal]) -> str:
    """`0 of nvidia.com/gpu free, 4 needed`, or nothing."""
    return ", ".join(
        f"{_plain(free.get(resource, Decimal(0)), resource)} of {resource} free, {_plain(value, resource)} needed"
        for resource, value in wanted.items()
        # A node says nothing of pods in some tests and on some providers; a missing device is missing.
        if value > free.get(resource, Decimal(0)) and (resource in free or resource != "pods")
    )


def _plain(value: Decimal, resource: str) -> str:
    if resource in ("memory", "ephemeral-storage"):
        return f"{float(value) / 2**30:.0f}Gi"
    return f"{max(value, Decimal(0)):f}"
