"""What the operator's webhooks answer: defaults on the way in, refusals in the recorded words. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.stand_ins.dynamo_operator import graph as graphs
from tests.stand_ins.dynamo_operator import names
from tests.stand_ins.dynamo_operator.graph import Manifest
from tests.stand_ins.dynamo_operator.status import ROLLING

# As Go's parser of quantities takes them.
QUANTITY = re.compile(r"([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)")
QUANTITY_MESSAGE = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
VERSION_TAG = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)([-+][0-9A-Za-z.+-]+)?")
VERSION_MESSAGE = "is required when the specified main container image has no parseable semantic-version tag"
FRAMEWORK_WARNING = "Changing spec.backendFramework may cause unexpected behavior"
SCALED_MESSAGE = (
    "cannot be modified directly when scaling adapter is enabled; "
    "scale or update the related DynamoGraphDeploymentScalingAdapter instead"
)


@dataclass(frozen=True)
class Cause:
    """One thing wrong with one field, as the API names it."""

    field: str
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def required(field: str, detail: str) -> Cause:
    return Cause(field, "FieldValueRequired", f"Required value: {detail}")


def forbidden(field: str, detail: str) -> Cause:
    return Cause(field, "FieldValueForbidden", f"Forbidden: {detail}")


def invalid(field: str, value: Any, detail: str) -> Cause:
    said = json.dumps(value, separators=(",", ":"))
    return Cause(field, "FieldValueInvalid", f"Invalid value: {said}: {detail}")


# --- the mutating webhook -----------------------------------------------------------------------------------------


def mutate(request: Mapping[str, Any]) -> Manifest:
    """The answer to an AdmissionRequest: stamps and missing replicas on the way in."""
    manifest = request["object"]
    components = (manifest.get("spec") or {}).get("components") or []
    for component in components:
        size = component.get("sharedMemorySize")
        if isinstance(size, str) and not QUANTITY.fullmatch(size):
            return denied(request, 400, "BadRequest", QUANTITY_MESSAGE)
    changes: list[Manifest] = []
    if request["operation"] == "CREATE":
        annotations = manifest["metadata"].get("annotations")
        if annotations is None:
            changes.append({"op": "add", "path": "/metadata/annotations", "value": {}})
        stamps = {names.ORIGIN_VERSION: names.OPERATOR_VERSION, names.WORKLOAD_PROVIDER: names.COMPONENT_PROVIDER}
        for key, value in stamps.items():
            changes.append({"op": "add", "path": f"/metadata/annotations/{pointer(key)}", "value": value})
    for index, component in enumerate(components):
        if component.get("replicas") is None:
            changes.append({"op": "add", "path": f"/spec/components/{index}/replicas", "value": 1})
    return {"uid": request["uid"], "allowed": True, "changes": changes}


def pointer(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


# --- the validating webhook ---------------------------------------------------------------------------------------


def validate(request: Mapping[str, Any]) -> Manifest:
    """The answer to an AdmissionRequest: all recorded refusals that apply, then what the stand-in does not imitate."""
    manifest = request["object"]
    if "deletionTimestamp" in manifest["metadata"]:
        return {"uid": request["uid"], "allowed": True}
    causes = list(state_causes(manifest))
    warnings: list[str] = []
    if request["operation"] == "UPDATE":
        old = request["oldObject"]
        causes += update_causes(manifest, old, request["userInfo"]["username"])
        if (manifest["spec"] or {}).get("backendFramework") != old["spec"].get("backendFramework"):
            warnings.append(FRAMEWORK_WARNING)
    if not causes:
        problems = [*graphs.unmodelled_fields(manifest), *graphs.annotation_problems(manifest)]
        causes = [forbidden("spec", f"stand-in operator: {problem}") for problem in problems]
    answer = refused(request, causes) if causes else {"uid": request["uid"], "allowed": True}
    return {**answer, "warnings": warnings} if warnings else answer


def state_causes(manifest: Manifest) -> Iterator[Cause]:
    """What is wrong with a graph whatever it was before."""
    spec = manifest.get("spec") or {}
    components = spec.get("components") or []
    if not components:
        yield required("spec.components", "must have at least one component")
    for index, component in enumerate(components):
        yield from component_causes(component, f"spec.components[{index}]")
    if "topologyConstraint" not in spec and any("topologyConstraint" in component for component in components):
        yield required("spec.topologyConstraint", "is required when any component topology constraint is set")
    yield from restart_causes(spec)


def component_causes(component: Manifest, path: str) -> Iterator[Cause]:
    if "minAvailable" in component:
        detail = "is currently supported only for Grove-backed DynamoGraphDeployment components"
        yield forbidden(f"{path}.minAvailable", detail)
    containers = ((component.get("podTemplate") or {}).get("spec") or {}).get("containers") or []
    found = [(at, item) for at, item in enumerate(containers) if item["name"] == names.MAIN]
    if not found:
        yield required(f"{path}.podTemplate.spec.containers", "is required")
        return
    at, main = found[0]
    image = main.get("image")
    if not image:
        yield required(f"{path}.podTemplate.spec.containers[{at}].image", "is required")
    elif not component.get("runtimeVersionOverride") and not has_version_tag(image):
        yield required(f"{path}.runtimeVersionOverride", VERSION_MESSAGE)


def has_version_tag(image: str) -> bool:
    tagged = image.partition("@")[0]
    tag = tagged.rpartition("/")[2].partition(":")[2]
    return VERSION_TAG.fullmatch(tag) is not None


def restart_causes(spec: Manifest) -> Iterator[Cause]:
    strategy = (spec.get("restart") or {}).get("strategy") or {}
    order = strategy.get("order") or []
    known = sorted(component["name"] for component in spec.get("components") or [])
    path = "spec.restart.strategy.order"
    if order and strategy.get("type") == "Parallel":
        yield forbidden(path, "cannot be specified when strategy is parallel")
    elif order and sorted(order) != known:
        yield invalid(path, order, "must have the same number of unique components as the deployment")


def update_causes(new: Manifest, old: Manifest, user: str) -> Iterator[Cause]:
    """What may not change, or not by this user."""
    yield from provider_causes(new["metadata"], old["metadata"])
    before = {component["name"]: component for component in old["spec"].get("components") or []}
    after = {component["name"]: component for component in new["spec"].get("components") or []}
    yield from topology_causes(set(before), set(after))
    for index, (name, component) in enumerate(after.items()):
        if name in before:
            yield from component_update_causes(component, before[name], f"spec.components[{index}]", user)
    framework = new["spec"].get("backendFramework", "")
    if framework != old["spec"].get("backendFramework", ""):
        yield invalid("spec.backendFramework", framework, "is immutable and cannot be changed after creation")
    phase = ((old.get("status") or {}).get("rollingUpdate") or {}).get("phase")
    restart = (new["spec"].get("restart") or {}).get("id", "")
    if phase in ROLLING and restart != (old["spec"].get("restart") or {}).get("id", ""):
        yield invalid("spec.restart.id", restart, f"cannot be changed while a rolling update is {phase}")


def provider_causes(new: Manifest, old: Manifest) -> Iterator[Cause]:
    was = (old.get("annotations") or {}).get(names.WORKLOAD_PROVIDER)
    becomes = (new.get("annotations") or {}).get(names.WORKLOAD_PROVIDER)
    if was is not None and becomes != was:
        yield invalid(f"metadata.annotations[{names.WORKLOAD_PROVIDER}]", becomes, "field is immutable")


def topology_causes(before: set[str], after: set[str]) -> Iterator[Cause]:
    changes = [
        f"components {what}: [{' '.join(sorted(which))}]"
        for what, which in (("added", after - before), ("removed", before - after))
        if which
    ]
    if changes:
        detail = "component topology is immutable and cannot be modified after creation: " + ", ".join(changes)
        yield forbidden("spec.components", detail)


def component_update_causes(new: Manifest, old: Manifest, path: str, user: str) -> Iterator[Cause]:
    adapted = "scalingAdapter" in new or "scalingAdapter" in old
    if adapted and user != names.OPERATOR_USER and new.get("replicas", 1) != old.get("replicas", 1):
        yield forbidden(f"{path}.replicas", SCALED_MESSAGE)
    if ("multinode" in new) != ("multinode" in old):
        detail = "cannot change node topology between single-node and multi-node after creation"
        yield invalid(f"{path}.multinode", new.get("multinode"), detail)


# --- answers --------------------------------------------------------------------------------------------------------


def denied(request: Mapping[str, Any], code: int, reason: str, message: str) -> Manifest:
    status = {"status": "Failure", "code": code, "reason": reason, "message": message}
    return {"uid": request["uid"], "allowed": False, "status": status}


def refused(request: Mapping[str, Any], causes: Iterable[Cause]) -> Manifest:
    """Invalid, with a cause for each field, as a client is told of a broken schema."""
    listed = list(causes)
    name = request.get("name") or request["object"]["metadata"].get("name", "")
    said = str(listed[0]) if len(listed) == 1 else f"[{', '.join(map(str, listed))}]"
    answer = denied(request, 422, "Invalid", f'{names.GRAPH}.{names.GROUP} "{name}" is invalid: {said}')
    answer["status"]["details"] = {
        "group": names.GROUP,
        "kind": names.GRAPH,
        "name": name,
        "causes": [{"field": each.field, "reason": each.reason, "message": each.message} for each in listed],
    }
    return answer
