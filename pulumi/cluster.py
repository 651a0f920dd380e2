"""Reads a live cluster once, through an explicit kubeconfig and context, and says what keeps a plan from it.

    problems(settings, plan)                          ->  one line for each thing wrong, before anything is created
    snapshot(kubeconfig, context, namespace, reads)   ->  what was seen, as plain data

Only reads, and asks what is permitted. Every request has a time-out, and values of Secrets are dropped as they arrive.
The judging is in serving_catalog/checks/cluster_prerequisites.py and cluster_diagnosis.py.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from serving_catalog.checks.cluster import (
    GRAPH_GROUP,
    GRAPH_LABEL,
    GRAPH_VERSION,
    OPERATOR_SELECTOR,
    Probe,
    Snapshot,
    is_true,
    labels_of,
    name_of,
    pod_templates,
    pull_secrets_of,
    secrets_of,
    without_values,
)
from serving_catalog.checks.cluster_diagnosis import frontend_service
from serving_catalog.checks.cluster_pods import JOB_LABELS
from serving_catalog.checks.cluster_prerequisites import (
    ClusterSettings,
    Permission,
    needed_permissions,
    prerequisites,
    problems_of,
)
from serving_catalog.entries import Part

if TYPE_CHECKING:
    from serving_catalog import Catalog
    from serving_catalog.graphs import GraphPlan
    from settings import Settings

CONNECT_SECONDS = 5.0
READ_SECONDS = 20.0
WHOLE_SECONDS = 40.0  # for everything together; what has not answered by then is unread
PLUGIN_SECONDS = 30.0  # for the kubeconfig's credential plugin, which the client itself would wait for without end
LOG_SECONDS = 8.0
PAGE = 500
LOG_LINES = 60
MOST_LOGS = 40
FRONTEND_PORT = 8000

Thing = dict[str, Any]


class ReadError(Exception):
    """The API server did not give what was asked for."""

    def __init__(self, status: int | None, message: str) -> None:
        super().__init__(message)
        self.status = status


class AccessError(Exception):
    """The cluster cannot be reached at all; `problem` is the Snapshot's."""

    def __init__(self, problem: str, message: str, contexts: Sequence[str] = (), server: str = "") -> None:
        super().__init__(message)
        self.problem, self.contexts, self.server = problem, tuple(contexts), server


class Reads(Part):
    """What to ask for."""

    kinds: tuple[str, ...]
    secrets: tuple[str, ...] = ()  # by name; with `refer`, those that pods and Jobs need as well
    graph: str | None = None
    refer: bool = False  # follow references, and read logs and the frontend's answer
    permissions: tuple[Permission, ...] | None = None


PREREQUISITES = (
    *("Namespace", "APIResource", "Operator", "StorageClass", "PriorityClass", "PersistentVolumeClaim"),
    *("DynamoGraphDeployment", "Node", "AllPods"),
)
DIAGNOSIS = (
    *("Namespace", "APIResource", "Operator", "Webhook", "StorageClass", "PersistentVolumeClaim", "ConfigMap", "Job"),
    *("DynamoGraphDeployment", "DynamoComponentDeployment", "Deployment", "Pod", "Service", "EndpointSlice", "Event"),
    *("Node", "AllPods"),
)


# --- before anything is created ----------------------------------------------------------------------------------


def problems(settings: Settings, plan: GraphPlan, catalog: Catalog | None = None) -> list[str]:
    """Everything in the cluster that keeps the plan from being carried out, one line each, or nothing."""
    chosen = cluster_settings(settings, plan, catalog)
    secrets = (*([plan.token.name] if plan.token else []), *plan.pull_secrets)
    reads = Reads(kinds=PREREQUISITES, secrets=secrets, permissions=needed_permissions(plan, chosen))
    seen = snapshot(settings.kubeconfig_path, settings.context, plan.namespace, reads)
    return problems_of(prerequisites(seen, plan, chosen))


def cluster_settings(settings: Settings, plan: GraphPlan, catalog: Catalog | None = None) -> ClusterSettings:
    """What the judging needs to know of the stack's configuration."""
    from components.platform import RELEASE_NAME
    from settings import STACK_ANNOTATION

    chosen = ClusterSettings(
        create_namespace=settings.create_namespace,
        platform=settings.platform,
        platform_namespace=settings.platform_namespace,
        platform_create_namespace=settings.platform_create_namespace,
        platform_release=RELEASE_NAME,
        stack=plan.graph.metadata.annotations.get(STACK_ANNOTATION, ""),
        stack_annotation=STACK_ANNOTATION,
        makes_token_secret=settings.makes_token_secret,
        token_awaited=settings.hf_token_awaited,
        allow_findings=settings.allow_findings,
        made_pull_secrets=tuple(name for name in plan.pull_secrets if name not in settings.pull_secrets),
    )
    if catalog is None:
        return chosen
    return chosen.model_copy(update={"minimum_kubernetes": catalog.dynamo.chart.minimum_kubernetes})


# --- reaching the cluster ----------------------------------------------------------------------------------------


def snapshot(kubeconfig: Path | str, context: str, namespace: str, reads: Reads) -> Snapshot:
    """One pass over the cluster. Never raises for what the cluster or the kubeconfig does."""
    path = Path(kubeconfig).expanduser()
    moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    empty = Snapshot(at=moment, kubeconfig=str(kubeconfig), context=context, namespace=namespace)
    try:
        contexts = contexts_of(path)
        if context not in contexts:
            raise AccessError("context", "", contexts)
        reader = Reader(path, context, namespace, contexts)
        version = reader.enter()
    except AccessError as error:
        told = {"problem": error.problem, "message": str(error), "contexts": error.contexts, "server": error.server}
        return empty.model_copy(update=told)
    found = {"contexts": contexts, "server": reader.server, "version": version}
    return reader.read(reads, empty.model_copy(update=found))


def contexts_of(path: Path) -> tuple[str, ...]:
    """Names of the contexts in a kubeconfig file."""
    if not path.exists():
        raise AccessError("kubeconfig", "does not exist")
    if path.is_dir():
        raise AccessError("kubeconfig", "is a directory")
    try:
        content = yaml.safe_load(path.read_text())
    except PermissionError:
        raise AccessError("kubeconfig", "cannot be read by you") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise AccessError("kubeconfig", f"is not a kubeconfig: {_first_line(error)}") from None
    if not isinstance(content, dict) or not isinstance(content.get("contexts"), list):
        raise AccessError("kubeconfig", "is not a kubeconfig: it has no list of contexts")
    return tuple(str(entry["name"]) for entry in content["contexts"] if isinstance(entry, dict) and "name" in entry)


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What the client only logs: a credential plugin that fails is no error to it."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    listener, root = Listener(), logging.getLogger()
    root.addHandler(listener)
    try:
        yield lines
    finally:
        root.removeHandler(listener)


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _reason(error: BaseException) -> str:
    """The innermost cause of a failed connection, without the client's own wrapping."""
    inner: BaseException = error
    while isinstance(inner, urllib3.exceptions.MaxRetryError) and inner.reason is not None:
        inner = inner.reason
    if isinstance(inner, urllib3.exceptions.NewConnectionError):  # a time-out too, by its class
        return _first_line(str(inner).rsplit(": ", 1)[-1])
    if isinstance(inner, urllib3.exceptions.ConnectTimeoutError):
        return f"no connection within {CONNECT_SECONDS:.0f} s"
    if isinstance(inner, urllib3.exceptions.ReadTimeoutError):
        return "no answer in time"
    if isinstance(inner, ApiException):
        return _first_line(inner.reason or inner)
    return _first_line(str(inner).rsplit(": ", 1)[-1] if isinstance(inner, urllib3.exceptions.HTTPError) else inner)


class Reader:
    """Reads through one client, several requests at a time."""

    def __init__(self, path: Path, context: str, namespace: str, contexts: Sequence[str]) -> None:
        self.namespace = namespace
        settings = client.Configuration()
        failed: list[BaseException] = []

        def load() -> None:
            try:
                config.load_kube_config(  # type: ignore[no-untyped-call]
                    config_file=str(path), context=context, client_configuration=settings, persist_config=False
                )
            except Exception as error:  # whatever is in that file, or comes of its plugin
                failed.append(error)

        loader = threading.Thread(target=load, daemon=True, name="kubeconfig")
        with _heard() as lines:
            loader.start()
            loader.join(PLUGIN_SECONDS)
        hint = _plugin_hint(path, context)
        if loader.is_alive():
            raise AccessError("credentials", f"no credentials within {PLUGIN_SECONDS:.0f} s{hint}", contexts)
        if failed or lines:
            raise AccessError("credentials", _first_line(failed[0] if failed else lines[0]) + hint, contexts)
        self.server, self.contexts = str(settings.host), contexts
        if urlsplit(self.server).hostname in ("127.0.0.1", "localhost", "::1"):
            settings.proxy = None  # as kubectl does
        settings.retries = urllib3.Retry(total=1, backoff_factor=0.2, respect_retry_after_header=False)
        settings.connection_pool_maxsize = 16
        self.api = client.ApiClient(settings)

    # --- one request ---

    def request(
        self,
        path: str,
        query: Mapping[str, str | int] | None = None,
        body: Thing | None = None,
        accept: str = "application/json",
        seconds: float = READ_SECONDS,
    ) -> bytes:
        method, url, headers, sent, _ = self.api.param_serialize(
            "GET" if body is None else "POST",
            path + (f"?{urlencode(query)}" if query else ""),
            header_params={"Accept": accept, **({"Content-Type": "application/json"} if body is not None else {})},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = self.api.call_api(method, url, headers, sent, _request_timeout=(CONNECT_SECONDS, seconds))
            data = bytes(answer.read() or b"")  # type: ignore[no-untyped-call]
        except (urllib3.exceptions.HTTPError, ApiException, OSError) as error:
            raise ReadError(None, _reason(error)) from None
        status = int(answer.status)
        if status >= 300:
            raise ReadError(status, _refusal(status, data))
        return data

    def get(self, path: str, query: Mapping[str, str | int] | None = None, accept: str = "application/json") -> Thing:
        return _mapping(self.request(path, query, accept=accept))

    def items(
        self, path: str, query: Mapping[str, str | int] | None = None, accept: str = "application/json"
    ) -> list[Thing]:
        """Every object of a list, page by page."""
        found: list[Thing] = []
        more = ""
        while True:
            page = self.get(path, {**(query or {}), "limit": PAGE, **({"continue": more} if more else {})}, accept)
            found += page.get("items") or []
            more = str((page.get("metadata") or {}).get("continue") or "")
            if not more:
                return found

    # --- the pass ---

    def enter(self) -> str:
        """The server's version, once it is clear that it answers and knows us."""
        try:
            version = str(self.get("/version").get("gitVersion") or "")
            who = _mapping(
                self.request(
                    "/apis/authentication.k8s.io/v1/selfsubjectreviews",
                    body={"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"},
                )
            )
        except ReadError as error:
            if error.status in (401, 403):
                raise AccessError("unauthorised", str(error), self.contexts, self.server) from None
            if error.status == 404:
                return version  # before 1.28: the version is judged
            raise AccessError("unreachable", str(error), self.contexts, self.server) from None
        if ((who.get("status") or {}).get("userInfo") or {}).get("username") == "system:anonymous":
            raise AccessError("unauthorised", "it takes you for system:anonymous", self.contexts, self.server) from None
        return version

    def read(self, reads: Reads, empty: Snapshot) -> Snapshot:
        objects: dict[str, tuple[Thing, ...]] = {}
        unread: dict[str, str] = {}
        until = time.monotonic() + WHOLE_SECONDS
        executor = ThreadPoolExecutor(max_workers=8, thread_name_prefix="cluster")

        def gather(jobs: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
            """What answered in time; the rest is unread."""
            running: dict[Future[Any], str] = {executor.submit(job): name for name, job in jobs.items()}
            done, late = wait(running, timeout=max(0.1, until - time.monotonic()))
            answers: dict[str, Any] = {}
            for future in done:
                try:
                    answers[running[future]] = future.result()
                except ReadError as error:
                    unread[running[future]] = str(error)
            unread.update({running[future]: f"no answer within {WHOLE_SECONDS:.0f} s" for future in late})
            return answers

        try:
            first: dict[str, Callable[[], Any]] = {kind: self._lister(kind) for kind in reads.kinds}
            if not reads.refer and reads.secrets:
                first["Secret"] = lambda: self.secrets(reads.secrets)
            if reads.permissions is not None:
                needed = reads.permissions
                first["Permission"] = lambda: self.denied(needed)
            answers = gather(first)
            denied = answers.pop("Permission", None)
            objects.update(answers)
            logs: dict[str, tuple[str, ...]] = {}
            probes: dict[str, Probe] = {}
            if reads.refer:
                second = self._second(objects, reads)
                for name, answer in gather(second).items():
                    kind, _, which = name.partition(" ")
                    if kind in ("Secret", "OperatorPod"):
                        objects[kind] = answer
                    elif kind == "log":
                        logs[which] = answer
                    else:
                        probes[which] = answer
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
        return empty.model_copy(
            update={
                "objects": objects,
                "unread": {kind: why for kind, why in unread.items() if not kind.startswith("log ")},
                "logs": logs,
                "probes": probes,
                "denied": denied,
            }
        )

    def _lister(self, kind: str) -> Callable[[], tuple[Thing, ...]]:
        here = f"/api/v1/namespaces/{self.namespace}"
        apis = f"/namespaces/{self.namespace}"
        graphs = f"/apis/{GRAPH_GROUP}/{GRAPH_VERSION}{apis}"
        listers: dict[str, Callable[[], Iterable[Thing]]] = {
            "Namespace": self.namespaces,
            "APIResource": self.api_resources,
            "Operator": lambda: self.items("/apis/apps/v1/deployments", {"labelSelector": OPERATOR_SELECTOR}),
            "Webhook": self.webhooks,
            "StorageClass": lambda: self.items("/apis/storage.k8s.io/v1/storageclasses"),
            "PriorityClass": lambda: self.items("/apis/scheduling.k8s.io/v1/priorityclasses"),
            "PersistentVolumeClaim": lambda: self.items(f"{here}/persistentvolumeclaims"),
            "ConfigMap": lambda: self.items(f"{here}/configmaps", accept=_METADATA),
            "Job": lambda: self.items(f"/apis/batch/v1{apis}/jobs"),
            "DynamoGraphDeployment": lambda: self.known(f"{graphs}/dynamographdeployments"),
            "DynamoComponentDeployment": lambda: self.known(f"{graphs}/dynamocomponentdeployments"),
            "Deployment": lambda: self.items(f"/apis/apps/v1{apis}/deployments"),
            "Pod": lambda: self.items(f"{here}/pods"),
            "Service": lambda: self.items(f"{here}/services"),
            "EndpointSlice": lambda: self.items(f"/apis/discovery.k8s.io/v1{apis}/endpointslices"),
            "Event": lambda: self.items(f"{here}/events", {"fieldSelector": "type!=Normal"}),
            "Node": lambda: map(_slim_node, self.items("/api/v1/nodes")),
            "AllPods": lambda: map(
                _slim_pod,
                self.items("/api/v1/pods", {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}),
            ),
        }
        lister = listers[kind]
        return lambda: tuple(_slim(thing) for thing in lister())

    def known(self, path: str) -> list[Thing]:
        """Objects of a kind that the cluster may not know."""
        try:
            return self.items(path)
        except ReadError as error:
            if error.status == 404:
                return []
            raise

    def namespaces(self) -> list[Thing]:
        """All of them, or, where that is not permitted, the one."""
        try:
            return self.items("/api/v1/namespaces")
        except ReadError as error:
            if error.status != 403:
                raise
        try:
            return [self.get(f"/api/v1/namespaces/{self.namespace}")]
        except ReadError as error:
            if error.status == 404:
                return []
            raise

    def api_resources(self) -> list[Thing]:
        """What is served of the graphs' API group: {group, version, name}."""
        try:
            versions = [str(entry["version"]) for entry in self.get(f"/apis/{GRAPH_GROUP}").get("versions") or ()]
        except ReadError as error:
            if error.status == 404:
                return []
            raise
        return [
            {"group": GRAPH_GROUP, "version": version, "name": str(entry.get("name"))}
            for version in versions
            for entry in self.get(f"/apis/{GRAPH_GROUP}/{version}").get("resources") or ()
        ]

    def webhooks(self) -> list[Thing]:
        root = "/apis/admissionregistration.k8s.io/v1"
        return [
            entry
            for kind in ("validatingwebhookconfigurations", "mutatingwebhookconfigurations")
            for entry in self.items(f"{root}/{kind}")
        ]

    def secrets(self, names: Iterable[str]) -> tuple[Thing, ...]:
        """Names, types and keys of Secrets. Their values stay behind here."""
        found = []
        for name in dict.fromkeys(names):
            try:
                whole = self.get(f"/api/v1/namespaces/{self.namespace}/secrets/{name}")
            except ReadError as error:
                if error.status == 404:
                    continue
                raise
            found.append(without_values(whole))
        return tuple(found)

    def denied(self, needed: Sequence[Permission]) -> tuple[str, ...]:
        """Of what is needed, what is not permitted: `create and delete jobs.batch in gpt-oss`."""
        if self._may("*", "*", "*", None):
            return ()
        refused = []
        for permission in needed:
            if self._may("*", permission.group, permission.resource, permission.namespace):
                continue
            verbs = [
                verb
                for verb in permission.verbs
                if not self._may(verb, permission.group, permission.resource, permission.namespace)
            ]
            if verbs:
                refused.append(f"{' and '.join(verbs)} {permission.where}")
        return tuple(refused)

    def _may(self, verb: str, group: str, resource: str, namespace: str | None) -> bool:
        attributes = {
            "verb": verb,
            "group": group,
            "resource": resource,
            **({"namespace": namespace} if namespace else {}),
        }
        answer = _mapping(
            self.request(
                "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
                body={
                    "apiVersion": "authorization.k8s.io/v1",
                    "kind": "SelfSubjectAccessReview",
                    "spec": {"resourceAttributes": attributes},
                },
            )
        )
        return bool((answer.get("status") or {}).get("allowed"))

    # --- what the first answers lead to ---

    def _second(self, objects: Mapping[str, Sequence[Thing]], reads: Reads) -> dict[str, Callable[[], Any]]:
        graphs = [entry for entry in objects.get("DynamoGraphDeployment", ()) if reads.graph in (None, name_of(entry))]
        specs = [
            template.get("spec") or {}
            for thing in (*graphs, *objects.get("Job", ()))
            for _, template in pod_templates(thing)
        ]
        names = {*reads.secrets}
        for spec in specs:
            names |= {name for name, _ in secrets_of(spec)} | set(pull_secrets_of(spec))
        jobs: dict[str, Callable[[], Any]] = {
            "Secret": lambda: self.secrets(sorted(names)),
            "OperatorPod": lambda: self.operator_pods(objects.get("Operator", ())),
        }
        for pod, container, previous in _speakers(objects.get("Pod", ()))[:MOST_LOGS]:
            jobs[f"log {pod}/{container}"] = _bound(self.log, pod, container, previous)
        for graph in graphs:
            service = frontend_service(graph)
            if any(
                labels_of(entry).get("kubernetes.io/service-name") == service
                and any((one.get("conditions") or {}).get("ready") for one in entry.get("endpoints") or ())
                for entry in objects.get("EndpointSlice", ())
            ):
                jobs[f"probe {service}"] = _bound(self.probe, service)
        return jobs

    def operator_pods(self, operators: Iterable[Thing]) -> tuple[Thing, ...]:
        """Pods of operators that are not available; those of the others need no look."""
        down = {str(one["metadata"].get("namespace")) for one in operators if not is_true(one, "Available")}
        return tuple(
            _slim(pod)
            for namespace in sorted(down)
            for pod in self.items(
                f"/api/v1/namespaces/{namespace}/pods", {"labelSelector": "control-plane=controller-manager"}
            )
        )

    def log(self, pod: str, container: str, previous: bool) -> tuple[str, ...]:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        query: dict[str, str | int] = {
            "container": container,
            "tailLines": LOG_LINES,
            **({"previous": "true"} if previous else {}),
        }
        text = self.request(path, query, accept="*/*", seconds=LOG_SECONDS).decode("utf-8", "replace")
        return tuple(line for line in text.splitlines() if line.strip())

    def probe(self, service: str) -> Probe:
        """The frontend's own list of models, asked through the API server."""
        path = f"/api/v1/namespaces/{self.namespace}/services/http:{service}:{FRONTEND_PORT}/proxy/v1/models"
        try:
            answer = _mapping(self.request(path, seconds=LOG_SECONDS))
        except ReadError as error:
            # 403 and 503 are the API server's own: not allowed, or no way to the pods.
            status = None if error.status in (None, 403, 502, 503, 504) else error.status
            return Probe(status=status, error=str(error))
        models = tuple(str(entry.get("id")) for entry in answer.get("data") or () if isinstance(entry, dict))
        return Probe(status=200, models=models)


_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


def _bound(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


def _mapping(data: bytes) -> Thing:
    try:
        content = json.loads(data)
    except ValueError:
        raise ReadError(None, "the answer is not JSON: is a proxy or a sign-in page in between?") from None
    if not isinstance(content, dict):
        raise ReadError(None, "the answer is not an object of the API")
    return content


def _refusal(status: int, data: bytes) -> str:
    """What the API server says, or the status alone."""
    try:
        content = json.loads(data)
    except ValueError:
        content = None
    if isinstance(content, dict) and content.get("message"):
        return f"status {status}: {_first_line(content['message'])}"
    return f"status {status}"


def _plugin_hint(path: Path, context: str) -> str:
    """The context's credential plugin, and whether it is missing on this machine."""
    content = yaml.safe_load(path.read_text())
    contexts = {entry.get("name"): entry.get("context") or {} for entry in content.get("contexts") or ()}
    users = {entry.get("name"): entry.get("user") or {} for entry in content.get("users") or ()}
    command = ((users.get(contexts[context].get("user")) or {}).get("exec") or {}).get("command")
    if not command:
        return ""
    return f" (from {command})" if shutil.which(command) else f" ({command} is not on PATH)"


def _speakers(pods: Iterable[Thing]) -> list[tuple[str, str, bool]]:
    """(pod, container, whether it is the run before this one) of ours that have said something."""
    found = []
    for pod in pods:
        if GRAPH_LABEL not in labels_of(pod) and not any(label in labels_of(pod) for label in JOB_LABELS):
            continue
        status = pod.get("status") or {}
        for container in (*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())):
            state, last = container.get("state") or {}, container.get("lastState") or {}
            if "running" in state or "terminated" in state:
                found.append((name_of(pod), str(container.get("name")), False))
            elif "terminated" in last:
                found.append((name_of(pod), str(container.get("name")), True))
    return found


def _slim(thing: Thing) -> Thing:
    metadata = thing.get("metadata")
    if isinstance(metadata, dict):
        metadata.pop("managedFields", None)
    return thing


def _slim_node(node: Thing) -> Thing:
    """A node without its images and volumes."""
    metadata, spec, status = node.get("metadata") or {}, node.get("spec") or {}, node.get("status") or {}
    return {
        "metadata": {key: metadata.get(key) for key in ("name", "labels")},
        "spec": {key: spec[key] for key in ("taints", "unschedulable") if key in spec},
        "status": {
            "allocatable": status.get("allocatable") or {},
            "conditions": [entry for entry in status.get("conditions") or () if entry.get("type") == "Ready"],
            "nodeInfo": {"architecture": (status.get("nodeInfo") or {}).get("architecture")},
        },
    }


def _slim_pod(pod: Thing) -> Thing:
    """What a pod of anybody holds, and where."""
    metadata, spec = pod.get("metadata") or {}, pod.get("spec") or {}
    return {
        "metadata": {
            "name": metadata.get("name"),
            "namespace": metadata.get("namespace"),
            "labels": {key: value for key, value in (metadata.get("labels") or {}).items() if key == GRAPH_LABEL},
        },
        "spec": {
            "nodeName": spec.get("nodeName"),
            **{
                key: [{"resources": container.get("resources") or {}} for container in spec.get(key) or ()]
                for key in ("containers", "initContainers")
            },
        },
        "status": {"phase": (pod.get("status") or {}).get("phase")},
    }
