"""The loop: what changed is read from the copies, decided by the pure part, and written back."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import logging
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import urllib3

from tests.stand_ins.dynamo_operator import definition, names, objects, rollout, status
from tests.stand_ins.dynamo_operator import graph as graphs
from tests.stand_ins.dynamo_operator.graph import Component, Graph, Manifest
from tests.stand_ins.dynamo_operator.server import Copy, RefusedError, Server, Watched, key_of
from tests.stand_ins.dynamo_operator.webhooks import REGISTERED, Webhooks

LOG = logging.getLogger("dynamo-operator")
OF_GRAPHS = {"labelSelector": names.GRAPH_LABEL}
MANAGED = {"labelSelector": f"app.kubernetes.io/managed-by={names.MANAGED_BY}"}
WATCHES = (
    Watched(names.GRAPH, {}),
    Watched(names.COMPONENT_DEPLOYMENT, {}),
    Watched(names.SCALING_ADAPTER, {}),
    Watched("Deployment", OF_GRAPHS),
    Watched("Service", OF_GRAPHS),
    Watched("Pod", {"labelSelector": names.SELECTOR_LABEL}),
    Watched("ServiceAccount", MANAGED),
    Watched("Role", MANAGED),
    Watched("RoleBinding", MANAGED),
    Watched("Secret", {"fieldSelector": "type=kubernetes.io/dockerconfigjson"}),
)
DEFINED_WITHIN = 30.0
FIRST_RETRY, LONGEST_RETRY = 0.05, 5.0
ENDED = ("Succeeded", "Failed")

Key = tuple[str, str, str]  # kind, namespace, name


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Queue:
    """Keys to look at, each once and no earlier than it is due."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._changed = threading.Condition()
        self._open = True

    def add(self, key: Key, after: float = 0.0) -> None:
        with self._changed:
            due = time.monotonic() + after
            self._due[key] = min(due, self._due.get(key, due))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._open = False
            self._changed.notify()

    def take(self) -> Key | None:
        """The next key that is due; None once closed."""
        with self._changed:
            while self._open:
                key = min(self._due, key=self._due.__getitem__, default=None)
                wait = self._due[key] - time.monotonic() if key else None
                if key and wait is not None and wait <= 0:
                    del self._due[key]
                    return key
                self._changed.wait(wait)
            return None


class Operator:
    """A running stand-in operator. `start` returns once its webhooks are registered and it has seen everything."""

    def __init__(self, kubeconfig: Path, context: str) -> None:
        self._server = Server(kubeconfig, context)
        self._queue = Queue()
        self._copies = {watched.kind: Copy(self._server, watched, self._on_change) for watched in WATCHES}
        self._retries: dict[Key, float] = {}
        self._webhooks: Webhooks | None = None
        self._thread = threading.Thread(target=self._run, name="dynamo-operator", daemon=True)

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._define()
        self._webhooks = Webhooks()
        for registration in self._webhooks.registrations():
            self._register(registration)
        for held in self._copies.values():
            held.start()
        for kind, held in self._copies.items():
            if not held.ready.wait(DEFINED_WITHIN):
                raise TimeoutError(f"the API server did not list {kind} within {DEFINED_WITHIN:.0f} s")
        self._thread.start()

    def stop(self) -> None:
        """As when its pod dies: its webhooks stay registered and fail, its finalizers stay."""
        self._queue.close()
        for held in self._copies.values():
            held.stop()
        if self._thread.is_alive():
            self._thread.join()
        if self._webhooks is not None:
            self._webhooks.stop()

    def unregister(self) -> None:
        """Take its webhooks out of the cluster, so that graphs can be written without it."""
        for (kind, name, _), _ in REGISTERED:
            present = self._server.find(kind, None, name)
            if present is not None:
                self._server.delete(present)

    def _define(self) -> None:
        for kind in (names.GRAPH, names.SCALING_ADAPTER):
            name = f"{kind.lower()}s.{names.GROUP}"
            if self._server.find("CustomResourceDefinition", None, name) is None:
                raise LookupError(f"the cluster has no CustomResourceDefinition {name}: install Dynamo's first")
        if self._server.find("CustomResourceDefinition", None, definition.NAME) is None:
            self._server.create(definition.component_deployments())
        deadline = time.monotonic() + DEFINED_WITHIN
        while True:
            present = self._server.find("CustomResourceDefinition", None, definition.NAME) or {}
            if status.is_true((present.get("status") or {}).get("conditions") or [], "Established"):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{definition.NAME} was not established within {DEFINED_WITHIN:.0f} s")
            time.sleep(0.05)

    def _register(self, registration: Manifest) -> None:
        present = self._server.find(registration["kind"], None, registration["metadata"]["name"])
        if present is None:
            self._server.create(registration)
        else:
            self._server.replace({**present, "webhooks": registration["webhooks"]})

    # --- the queue ------------------------------------------------------------------------------------------------

    def _on_change(self, kind: str, item: Manifest) -> None:
        namespace, name = key_of(item)
        labels = item["metadata"].get("labels") or {}
        if kind in (names.GRAPH, names.COMPONENT_DEPLOYMENT, names.SCALING_ADAPTER):
            self._queue.add((kind, namespace, name))
        if kind == names.GRAPH:
            for adapter in self._copies[names.SCALING_ADAPTER].all(namespace, {names.GRAPH_LABEL: name}):
                self._queue.add((names.SCALING_ADAPTER, namespace, adapter["metadata"]["name"]))
        if kind in (names.COMPONENT_DEPLOYMENT, names.SCALING_ADAPTER, "Pod") and names.GRAPH_LABEL in labels:
            self._queue.add((names.GRAPH, namespace, labels[names.GRAPH_LABEL]))
        for owner in item["metadata"].get("ownerReferences") or []:
            if kind in ("Deployment", "Service") and owner["kind"] == names.COMPONENT_DEPLOYMENT:
                self._queue.add((names.COMPONENT_DEPLOYMENT, namespace, owner["name"]))
            if kind in ("ServiceAccount", "Role", "RoleBinding") and owner["kind"] == names.GRAPH:
                self._queue.add((names.GRAPH, namespace, owner["name"]))

    def _run(self) -> None:
        passes = {
            names.GRAPH: self._graph_pass,
            names.COMPONENT_DEPLOYMENT: self._component_pass,
            names.SCALING_ADAPTER: self._adapter_pass,
        }
        while (key := self._queue.take()) is not None:
            kind, namespace, name = key
            manifest = self._copies[kind].get(namespace, name)
            if manifest is None:
                self._retries.pop(key, None)
                continue
            try:
                passes[kind](manifest)
                self._retries.pop(key, None)
            except RefusedError as refused:
                # A conflict is nothing but an older copy; anything else may take longer to change.
                self._again(key, FIRST_RETRY if refused.code == 409 else None, refused)
            except (urllib3.exceptions.HTTPError, OSError) as error:
                self._again(key, None, error)
            except Exception:
                LOG.exception("%s %s/%s", kind, namespace, name)
                self._again(key, LONGEST_RETRY, None)

    def _again(self, key: Key, after: float | None, error: Exception | None) -> None:
        if after is None:
            after = self._retries[key] = min(LONGEST_RETRY, 2 * self._retries.get(key, FIRST_RETRY))
        LOG.info("%s %s/%s again in %.2f s: %s", *key, after, error)
        self._queue.add(key, after)

    # --- writing --------------------------------------------------------------------------------------------------

    def _keep(self, manifest: Manifest) -> Manifest:
        self._copies[manifest["kind"]].put(manifest)
        return manifest

    def _with_finalizer(self, manifest: Manifest) -> Manifest:
        finalizers = manifest["metadata"].get("finalizers") or []
        if names.FINALIZER in finalizers:
            return manifest
        changes = {"metadata": {"finalizers": [*finalizers, names.FINALIZER]}}
        return self._keep(self._server.patch(manifest, changes))

    def _release(self, manifest: Manifest) -> None:
        finalizers = manifest["metadata"].get("finalizers") or []
        if names.FINALIZER not in finalizers:
            return
        left = [finalizer for finalizer in finalizers if finalizer != names.FINALIZER]
        try:
            self._keep(self._server.patch(manifest, {"metadata": {"finalizers": left}}))
        except RefusedError as refused:
            if refused.code != 404:
                raise

    def _write_status(self, manifest: Manifest, wanted: Manifest) -> Manifest:
        if (manifest.get("status") or {}) == wanted:
            return manifest
        return self._keep(self._server.replace({**manifest, "status": wanted}, "status"))

    def _create(self, desired: Manifest) -> Manifest:
        try:
            return self._keep(self._server.create(desired))
        except RefusedError as refused:
            if refused.reason == "AlreadyExists":  # not seen yet, or somebody else's: the next pass knows of it
                present = self._server.find(desired["kind"], *key_of(desired))
                if present is not None:
                    self._keep(present)
            raise

    def _sync(self, desired: Manifest) -> Manifest:
        """Make an object as desired: when it is missing, when what is desired changed, when somebody edited it."""
        namespace, name = key_of(desired)
        present = self._copies[desired["kind"]].get(namespace, name)
        if present is None:
            return self._create(desired)
        if "deletionTimestamp" in present["metadata"]:
            return present  # made again once it is gone
        wanted = desired["metadata"].get("annotations") or {}
        had = present["metadata"].get("annotations") or {}
        generation = present["metadata"].get("generation")
        if names.LAST_APPLIED_HASH not in wanted:
            return present  # made once, then left alone
        applied = (had.get(names.LAST_APPLIED_HASH), had.get(names.LAST_APPLIED_GENERATION))
        as_wanted = (wanted[names.LAST_APPLIED_HASH], str(generation) if generation else "1")
        if applied == as_wanted:
            return present
        updated = overlaid(present, desired)
        updated["metadata"]["annotations"][names.LAST_APPLIED_GENERATION] = str((generation or 0) + 1)
        answered = self._server.replace(updated)
        actual = str(answered["metadata"].get("generation") or 1)
        if actual != answered["metadata"]["annotations"][names.LAST_APPLIED_GENERATION]:
            annotations = {names.LAST_APPLIED_GENERATION: actual}
            answered = self._server.patch(answered, {"metadata": {"annotations": annotations}})
        return self._keep(answered)

    # --- graphs ---------------------------------------------------------------------------------------------------

    def _graph_pass(self, manifest: Manifest) -> None:
        if "deletionTimestamp" in manifest["metadata"]:
            self._release(manifest)
            return
        manifest = self._with_finalizer(manifest)
        try:
            graph = graphs.read(manifest)
            problem = graphs.reconcile_problem(graph)
        except graphs.NotModelledError as error:
            problem = str(error)
        if problem is not None:
            self._fail(manifest, "failed_to_reconcile_the_resources", problem)
            return
        desired = graphs.worker_hash(graph)
        if graph.current_hash is None:
            manifest = self._set_hash(manifest, desired)
            graph = graphs.read(manifest)
        try:
            outcome, manifest = self._reconcile(graph, manifest, desired)
        except RefusedError as refused:
            if refused.code == 409 or "being terminated" in refused.message:
                raise
            message = f"failed to reconcile Dynamo components deployments: {refused.message}"
            self._fail(manifest, "failed_to_reconcile_the_resources", message)
            raise
        previous = manifest.get("status") or {}
        self._write_status(manifest, status.graph_status(graph, previous, outcome, now()))

    def _set_hash(self, manifest: Manifest, worker_hash: str) -> Manifest:
        changes = {"metadata": {"annotations": {names.CURRENT_WORKER_HASH: worker_hash}}}
        return self._keep(self._server.patch(manifest, changes))

    def _fail(self, manifest: Manifest, reason: str, message: str) -> None:
        metadata, previous = manifest["metadata"], manifest.get("status") or {}
        ready = status.condition("Ready", "False", reason, message, metadata.get("generation", 1))
        conditions = status.merged_conditions(previous.get("conditions") or [], [ready], now())
        self._write_status(manifest, {**previous, "conditions": conditions, "state": status.FAILED})

    def _reconcile(self, graph: Graph, manifest: Manifest, desired: str) -> tuple[status.Outcome, Manifest]:
        previous = manifest.get("status") or {}
        step = rollout.advance(graph, previous.get("rollingUpdate"), desired, self._owners(graph), now())
        if step.complete:
            for owner in rollout.old_workers(self._owners(graph), desired):
                left = self._server.delete(owner)
                if left is None:
                    self._copies[names.COMPONENT_DEPLOYMENT].drop(owner)
                else:
                    self._keep(left)
            if graph.current_hash != desired:
                manifest = self._set_hash(manifest, desired)
        for item in (*objects.planner_objects(graph.namespace), *objects.discovery_objects(graph)):
            self._sync(item)
        if graph.multinode:
            reason = "no_multinode_orchestrator_available"
            return status.failure(reason, "no multinode orchestrator available"), manifest

        restart = self._restart(graph, previous.get("restart") or {}, desired)
        targets = rollout.targets(graph, desired, self._owners(graph), self._busy(graph))
        owners = [
            self._sync_component(graph, component, desired, targets, restart) for component in graph.spec.components
        ]
        old = rollout.old_workers(self._owners(graph), desired) if targets.old else []
        for owner in old:
            wanted = targets.old.get(owner["metadata"]["name"])
            if wanted is not None and owner["spec"]["replicas"] != wanted:
                self._keep(self._server.patch(owner, {"spec": {"replicas": wanted}}))
        for component in graph.spec.components:
            self._sync_adapter(graph, component)
        ready = status.readiness(owners, old)
        outcome = status.Outcome(ready.state, ready.reason, ready.message, ready.components, step.status, restart)
        return outcome, manifest

    def _owners(self, graph: Graph) -> list[Manifest]:
        """The graph's DynamoComponentDeployments, those of a graph of that name before it left aside."""
        found = self._copies[names.COMPONENT_DEPLOYMENT].all(graph.namespace, {names.GRAPH_LABEL: graph.name})
        return [owner for owner in found if controller_uid(owner) == graph.uid]

    def _busy(self, graph: Graph) -> frozenset[str]:
        pods = self._copies["Pod"].all(graph.namespace, {names.GRAPH_LABEL: graph.name})
        return frozenset(
            pod["metadata"]["labels"][names.SELECTOR_LABEL]
            for pod in pods
            if (pod.get("status") or {}).get("phase") not in ENDED
        )

    def _resource_name(self, graph: Graph, component: Component, worker_hash: str) -> str:
        return names.component_resource(graph.name, component.name, worker_hash if component.is_worker else None)

    def _restart(self, graph: Graph, previous: Mapping[str, Any], desired: str) -> Manifest | None:
        owners = {owner["metadata"]["name"]: owner for owner in self._owners(graph)}
        ready = {}
        for component in graph.spec.components:
            owner = owners.get(self._resource_name(graph, component, desired))
            ready[component.name] = owner is not None and status.not_ready_reason(owner) is None
        return status.next_restart(graph, previous, ready)

    def _sync_component(
        self,
        graph: Graph,
        component: Component,
        desired: str,
        targets: rollout.Targets,
        restart: Mapping[str, Any] | None,
    ) -> Manifest:
        name = self._resource_name(graph, component, desired)
        present = self._copies[names.COMPONENT_DEPLOYMENT].get(graph.namespace, name)
        existing = objects.template_of(present, "annotations").get(names.RESTART_AT) if present else None
        restart_at = status.restart_annotation(graph, restart, component.name, existing)
        replicas = targets.new.get(component.name)
        return self._sync(objects.component_deployment(graph, component, desired, replicas, restart_at))

    def _sync_adapter(self, graph: Graph, component: Component) -> None:
        wanted = objects.scaling_adapter(graph, component)
        held = self._copies[names.SCALING_ADAPTER]
        present = held.get(graph.namespace, wanted["metadata"]["name"])
        if component.scaling_adapter is not None and present is None:
            self._create(wanted)
        if component.scaling_adapter is None and present is not None and controller_uid(present) == graph.uid:
            self._server.delete(present)
            held.drop(present)

    # --- components -----------------------------------------------------------------------------------------------

    def _component_pass(self, owner: Manifest) -> None:
        if "deletionTimestamp" in owner["metadata"]:
            self._release(owner)
            return
        owner = self._with_finalizer(owner)
        if not (owner.get("status") or {}).get("conditions"):
            conditions = status.merged_conditions([], status.starting(), now())
            owner = self._write_status(owner, {**(owner.get("status") or {}), "conditions": conditions})
        try:
            deployment = self._sync(objects.deployment(owner, self._pull_secrets(owner["metadata"]["namespace"])))
            self._sync(objects.service(owner))
        except RefusedError as refused:
            if refused.code == 409 or "being terminated" in refused.message:
                raise
            said = f"failed to create or update the deployment: create or update deployment: {refused.message}"
            previous = owner["status"]["conditions"]
            conditions = status.merged_conditions(previous, status.component_failed(said), now())
            self._write_status(owner, {**owner["status"], "conditions": conditions})
            raise
        self._write_status(owner, status.component_status(owner, deployment, now()))

    def _pull_secrets(self, namespace: str) -> dict[str, list[str]]:
        """registry -> names of the namespace's pull secrets that hold credentials for it."""
        found: dict[str, list[str]] = {}
        for secret in self._copies["Secret"].all(namespace):
            try:
                content = json.loads(base64.b64decode(secret["data"][".dockerconfigjson"]))
            except (binascii.Error, ValueError, KeyError):
                continue  # the kubelet ignores a broken one too
            for address in content.get("auths") or {}:
                host = address.removeprefix("https://").removeprefix("http://").partition("/")[0]
                found.setdefault(host, []).append(secret["metadata"]["name"])
        return found

    # --- scaling adapters -----------------------------------------------------------------------------------------

    def _adapter_pass(self, adapter: Manifest) -> None:
        """The adapter's replicas become the component's; the adapter reports the component's."""
        if "deletionTimestamp" in adapter["metadata"]:
            return
        reference = adapter["spec"]["dgdRef"]
        namespace = adapter["metadata"]["namespace"]
        manifest = self._copies[names.GRAPH].get(namespace, reference["name"])
        if manifest is None or "deletionTimestamp" in manifest["metadata"]:
            return
        components = copy.deepcopy(manifest["spec"]["components"])
        component = next((item for item in components if item["name"] == reference["componentName"]), None)
        if component is None or "scalingAdapter" not in component:
            return
        previous = adapter.get("status") or {}
        wanted = {**previous, "replicas": component.get("replicas", 1)}
        wanted["selector"] = status.selector_of(reference["name"], reference["componentName"])
        if adapter["spec"]["replicas"] != component.get("replicas", 1):
            component["replicas"] = wanted["replicas"] = adapter["spec"]["replicas"]
            self._keep(self._server.patch(manifest, {"spec": {"components": components}}))
            wanted["lastScaleTime"] = now()
        self._write_status(adapter, wanted)


def controller_uid(item: Manifest) -> str | None:
    owners = item["metadata"].get("ownerReferences") or []
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), None)


def overlaid(present: Manifest, desired: Manifest) -> Manifest:
    """The present object with all that is desired; what Kubernetes or others put beside it stays."""
    result = copy.deepcopy(present)
    for key, value in desired.items():
        if key not in ("apiVersion", "kind", "metadata"):
            result[key] = {**present[key], **value} if desired["kind"] == "Service" else copy.deepcopy(value)
    for key in ("labels", "annotations"):
        result["metadata"][key] = {
            **(present["metadata"].get(key) or {}),
            **(desired["metadata"].get(key) or {}),
        }
    result.pop("status", None)
    return result
