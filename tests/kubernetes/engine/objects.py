"""What the Kubernetes provider does to single objects: create, update, delete, and the waits that belong to each."""

from __future__ import annotations

import copy
import json
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.kubernetes.api import APPLY, Api, Object, Refused

from . import differences
from .values import Path as PropertyPath

CREATOR = "pulumi-kubernetes"
PREFIX = "pulumi.com/"
DEFAULT_TIMEOUT = 600.0
CLAIM_TIMEOUT = 300.0  # the provider's own, whatever the program says
LEAST_TIMEOUT = 120.0  # of what is not awaited by a condition, at any speed
KNOWN_WITHOUT_WAIT = {
    *(("v1", kind) for kind in ("Namespace", "ConfigMap", "Secret", "ServiceAccount")),
    ("networking.k8s.io/v1", "NetworkPolicy"),
    *(("rbac.authorization.k8s.io/v1", kind) for kind in ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")),
}


class ObjectError(Exception):
    """The operation did not happen."""


class NotReadyError(ObjectError):
    """The object is there, but did not become what the wait was for."""

    def __init__(self, message: str, live: Object) -> None:
        super().__init__(message)
        self.live = live


def never() -> bool:
    return False


class Objects:
    """The provider of one kubeconfig and context. `speed` shortens every wait that would run out.

    `gives_up` ends a wait for a condition as if its time had run out.
    """

    def __init__(self, inputs: Mapping[str, Any], speed: float = 1.0, gives_up: Callable[[], bool] = never) -> None:
        for needed in ("kubeconfig", "context"):
            if not inputs.get(needed):
                raise ObjectError(f"the Kubernetes provider has no {needed}: it would take the ambient one")
        self.api = Api(Path(inputs["kubeconfig"]), inputs["context"])
        self.adopts = inputs.get("upsertExistingObjects") in (True, "true")
        self._speed = speed
        self._gives_up = gives_up

    # Reading

    def read(self, inputs: Mapping[str, Any]) -> Object | None:
        metadata = inputs["metadata"]
        try:
            return self.api.find(inputs["apiVersion"], inputs["kind"], metadata["name"], metadata.get("namespace"))
        except Refused as refused:
            if refused.status == 404:  # the kind itself is gone
                return None
            raise

    def needs_rerun(self, inputs: Mapping[str, Any]) -> bool:
        """Whether `replaceUnready` applies: a Job that is to be made anew because it did not complete."""
        if inputs["kind"] != "Job" or _annotation(inputs, "replaceUnready") != "true":
            return False
        live = self.read(inputs)
        return live is not None and not _completed(live)

    # Writing

    def create(self, inputs: Mapping[str, Any], field_manager: str, timeout: float | None) -> Object:
        if "name" not in inputs.get("metadata", {}):
            raise ObjectError("has no metadata.name: this engine makes no names up")
        live = self._retried(lambda: self._post(inputs, field_manager))
        return self._await(inputs, live, timeout, created=True)

    def _post(self, inputs: Mapping[str, Any], field_manager: str) -> Object:
        resource = self.api.resource(inputs["apiVersion"], inputs["kind"])
        metadata = inputs["metadata"]
        if self.adopts:
            return self._apply(inputs, field_manager)
        query = {"fieldManager": CREATOR, "fieldValidation": "Strict"}
        answer = self.api.request("POST", resource.path(metadata.get("namespace"), None), body=inputs, query=query)
        assert isinstance(answer, dict)
        return answer

    def _apply(self, inputs: Mapping[str, Any], field_manager: str) -> Object:
        resource = self.api.resource(inputs["apiVersion"], inputs["kind"])
        metadata = inputs["metadata"]
        force = "true" if _annotation(inputs, "patchForce") == "true" else "false"
        query = {"fieldManager": field_manager, "force": force, "fieldValidation": "Strict"}
        path = resource.path(metadata.get("namespace"), metadata["name"])
        try:
            answer = self.api.request("PATCH", path, body=inputs, content_type=APPLY, query=query)
        except Refused as refused:
            if refused.reason == "Conflict":
                raise ObjectError(
                    f"server-side apply field conflict detected: the resource managed by field manager "
                    f"{field_manager!r} had an apply conflict: {refused.message}"
                ) from None
            raise
        assert isinstance(answer, dict)
        return answer

    def _retried(self, send: Callable[[], Object]) -> Object:
        """What is not found may be about to be: a namespace, a definition."""
        for pause in (0.2, 0.4, 0.8, 1.6, 3.2, None):
            try:
                return send()
            except Refused as refused:
                if refused.status != 404 or pause is None:
                    raise ObjectError(_refusal(refused)) from None
                time.sleep(pause)
        raise AssertionError

    def update(
        self, inputs: Mapping[str, Any], ignored: list[str], field_manager: str, timeout: float | None
    ) -> Object:
        live = self.read(inputs)
        if live is None:
            raise ObjectError(f"{_said(inputs)} not found")
        live = self._take_over_creation(live, field_manager)
        try:
            live = self._apply(_with_live_values(inputs, live, ignored, field_manager), field_manager)
        except Refused as refused:
            raise ObjectError(_refusal(refused)) from None
        return self._await(inputs, live, timeout, created=False)

    def _take_over_creation(self, live: Object, field_manager: str) -> Object:
        """The fields that creation set are the applier's from now on, so that it may take them away again."""
        managed = copy.deepcopy(live["metadata"].get("managedFields", []))
        ours = [each for each in managed if (each["manager"], each["operation"]) == (CREATOR, "Update")]
        if not ours or any(each["manager"] == field_manager for each in managed):
            return live
        for each in ours:
            if "subresource" not in each:
                each["manager"], each["operation"] = field_manager, "Apply"
        resource = self.api.resource(live["apiVersion"], live["kind"])
        path = resource.path(live["metadata"].get("namespace"), live["metadata"]["name"])
        patch = [
            {"op": "replace", "path": "/metadata/managedFields", "value": managed},
            {"op": "replace", "path": "/metadata/resourceVersion", "value": live["metadata"]["resourceVersion"]},
        ]
        answer = self.api.request("PATCH", path, body=patch, content_type="application/json-patch+json")
        assert isinstance(answer, dict)
        return answer

    def delete(self, inputs: Mapping[str, Any], timeout: float | None) -> None:
        metadata = inputs["metadata"]
        policy = _annotation(inputs, "deletionPropagationPolicy").capitalize() or "Foreground"
        try:
            self.api.delete(
                inputs["apiVersion"], inputs["kind"], metadata["name"], metadata.get("namespace"), propagation=policy
            )
        except Refused as refused:
            if refused.status == 404:
                return
            raise ObjectError(_refusal(refused)) from None
        deadline = time.monotonic() + self._patience(timeout or DEFAULT_TIMEOUT)
        while (live := self.read(inputs)) is not None:
            if time.monotonic() > deadline:
                held = ", ".join(live["metadata"].get("finalizers", [])) or "none"
                raise ObjectError(f"{_said(inputs)} is still there; finalizers might be preventing deletion ({held})")
            time.sleep(0.1)

    # Waiting

    def _await(self, inputs: Mapping[str, Any], live: Object, timeout: float | None, *, created: bool) -> Object:
        if _annotation(inputs, "skipAwait") == "true":
            return live
        seconds = timeout or float(_annotation(inputs, "timeoutSeconds") or DEFAULT_TIMEOUT)
        kind = (inputs["apiVersion"], inputs["kind"])
        wait_for = _annotation(inputs, "waitFor")
        problem: Callable[[Object], str]
        if wait_for:
            conditions = _conditions(wait_for)

            def problem(live: Object) -> str:
                return "; ".join(filter(None, (_unmet(live, *condition) for condition in conditions)))

        elif kind == ("batch/v1", "Job"):
            problem = _job_problem
        elif kind == ("v1", "PersistentVolumeClaim"):
            seconds = CLAIM_TIMEOUT

            def problem(live: Object) -> str:
                return self._claim_problem(live, created)

        elif kind == ("apps/v1", "Deployment"):
            problem = _deployment_problem
        elif kind in KNOWN_WITHOUT_WAIT or ("." in kind[0] and ".k8s.io/" not in kind[0]):
            return live  # a custom resource without waitFor is not awaited
        else:
            raise NotImplementedError(f"how the provider waits for {kind[0]} {kind[1]} is not known here")
        # What comes true by itself has the time that it takes; only a condition that may never come is hurried.
        if wait_for:
            return self._until(problem, inputs, live, seconds * self._speed, self._gives_up)
        return self._until(problem, inputs, live, self._patience(seconds))

    def _patience(self, seconds: float) -> float:
        return max(seconds * self._speed, min(seconds, LEAST_TIMEOUT))

    def _until(
        self,
        problem: Callable[[Object], str],
        inputs: Mapping[str, Any],
        live: Object,
        seconds: float,
        gives_up: Callable[[], bool] = never,
    ) -> Object:
        deadline = time.monotonic() + seconds
        while reason := problem(live):
            if failed := _failed(live):
                raise NotReadyError(_unready(inputs, failed), live)
            if time.monotonic() > deadline or gives_up():
                raise NotReadyError(_unready(inputs, f"timed out waiting: {reason}"), live)
            time.sleep(0.1)
            seen = self.read(inputs)
            if seen is None:
                raise ObjectError(f"{_said(inputs)} was deleted while it was awaited")
            live = seen
        return live

    def _claim_problem(self, live: Object, created: bool) -> str:
        phase = live.get("status", {}).get("phase", "Pending")
        if not created and phase == "Bound":
            return ""
        name = live["spec"].get("storageClassName")
        found = self.api.find("storage.k8s.io/v1", "StorageClass", name) if name else None
        # A claim that waits for its first consumer is awaited as Pending, even where it is bound long since.
        wanted = "Pending" if found and found.get("volumeBindingMode") == "WaitForFirstConsumer" else "Bound"
        return "" if phase == wanted else f"the claim is {phase}, awaited as {wanted}"


def new_field_manager() -> str:
    return f"{CREATOR}-{secrets.token_hex(4)}"


def _annotation(inputs: Mapping[str, Any], name: str) -> str:
    return str(inputs.get("metadata", {}).get("annotations", {}).get(PREFIX + name, ""))


def _conditions(text: str) -> list[tuple[str, str]]:
    try:
        expressions = json.loads(text)
    except json.JSONDecodeError:
        expressions = [text]
    found = []
    for expression in expressions:
        word, _, rest = str(expression).partition("=")
        if word != "condition" or not rest:
            raise NotImplementedError(
                f"waitFor {expression!r}: this engine knows condition=Type and condition=Type=Status"
            )
        name, _, status = rest.partition("=")
        found.append((name, status or "True"))
    return found


def _unmet(live: Object, name: str, wanted: str) -> str:
    """A condition counts when it speaks of the newest generation."""
    generation = live["metadata"].get("generation", 0)
    status = live.get("status", {})
    for condition in status.get("conditions") or []:
        if condition["type"].lower() == name.lower():
            observed = condition.get("observedGeneration") or status.get("observedGeneration")
            if observed is not None and observed < generation:
                return f"{name} is of generation {observed}, not yet of {generation}"
            if condition["status"].lower() == wanted.lower():
                return ""
            said = ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
            return f"condition {name} is {condition['status']}, not {wanted} ({said})"
    return f"no condition {name}"


def _completed(live: Object) -> bool:
    return not _job_problem(live)


def _job_problem(live: Object) -> str:
    status = live.get("status", {})
    complete = any(each["type"] == "Complete" and each["status"] == "True" for each in status.get("conditions") or [])
    return "" if complete and status.get("startTime") else "the Job is not complete"


def _failed(live: Object) -> str:
    if live["kind"] == "Job":
        for condition in live.get("status", {}).get("conditions") or []:
            if condition["type"] == "Failed" and condition["status"] == "True":
                return f"Job failed: {condition.get('reason', '')}: {condition.get('message', '')}"
    return ""


def _deployment_problem(live: Object) -> str:
    status, wanted = live.get("status", {}), live["spec"].get("replicas", 1)
    if status.get("observedGeneration", 0) < live["metadata"]["generation"]:
        return "the Deployment is not observed yet"
    ready = min(status.get("updatedReplicas", 0), status.get("availableReplicas", 0))
    return "" if ready >= wanted and status.get("replicas", 0) == wanted else f"{ready} of {wanted} pods are ready"


def _with_live_values(
    inputs: Mapping[str, Any], live: Object, ignored: list[str], field_manager: str
) -> dict[str, Any]:
    """What is ignored and somebody else's is left out; what is ours stays as it is. Only plain paths are known so."""
    sent = copy.deepcopy(dict(inputs))
    for text in ignored:
        path = differences.parsed(text)
        if not all(isinstance(part, str) and part != "*" for part in path):
            continue  # the provider does not see into lists either
        managers = {
            each["manager"] for each in live["metadata"].get("managedFields", []) if _owns(each["fieldsV1"], path)
        }
        holder: Any = sent
        for part in path[:-1]:
            holder = holder.get(part, {})
        if managers and field_manager not in managers:
            holder.pop(path[-1], None)
    return sent


def _owns(fields: Any, path: PropertyPath) -> bool:
    for part in path:
        fields = fields.get(f"f:{part}") if isinstance(fields, Mapping) else None
    return fields is not None


def _said(inputs: Mapping[str, Any]) -> str:
    metadata = inputs["metadata"]
    return f"{inputs['kind']} {'/'.join(filter(None, (metadata.get('namespace'), metadata['name'])))}"


def _refusal(refused: Refused) -> str:
    return f"was not successfully created or changed by the Kubernetes API server: {refused.message}"


def _unready(inputs: Mapping[str, Any], reason: str) -> str:
    return (
        f"{_said(inputs)} was successfully created, but the Kubernetes API server reported that it failed to fully "
        f"initialize or become live: {reason}"
    )
