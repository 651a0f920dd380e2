"""The operator's hands: requests to the API server, and a copy of what it watches there."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import urllib3
from kubernetes import client, config

from tests.stand_ins.dynamo_operator import names
from tests.stand_ins.dynamo_operator.graph import Manifest

MERGE = "application/merge-patch+json"
WATCH_SECONDS = 20
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# kind -> where its objects live
PLACES = {
    names.GRAPH: ("/apis/nvidia.com/v1beta1", "dynamographdeployments"),
    names.COMPONENT_DEPLOYMENT: ("/apis/nvidia.com/v1beta1", "dynamocomponentdeployments"),
    names.SCALING_ADAPTER: ("/apis/nvidia.com/v1beta1", "dynamographdeploymentscalingadapters"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "Service": ("/api/v1", "services"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "Secret": ("/api/v1", "secrets"),
    "Pod": ("/api/v1", "pods"),
    "Role": ("/apis/rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": ("/apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "CustomResourceDefinition": ("/apis/apiextensions.k8s.io/v1", "customresourcedefinitions"),
    "MutatingWebhookConfiguration": (
        "/apis/admissionregistration.k8s.io/v1",
        "mutatingwebhookconfigurations",
    ),
    "ValidatingWebhookConfiguration": (
        "/apis/admissionregistration.k8s.io/v1",
        "validatingwebhookconfigurations",
    ),
}


class RefusedError(Exception):
    """The API server said no."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(f"{code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message


def path_of(kind: str, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
    root, plural = PLACES[kind]
    parts = [root, *(("namespaces", namespace) if namespace else ()), plural]
    return "/".join([*parts, *([name] if name else []), *([subresource] if subresource else [])])


class Server:
    """The API server through the official client's configuration and connections, as the operator's own user."""

    def __init__(self, kubeconfig: Path, context: str) -> None:
        settings = client.Configuration()
        load: Callable[..., None] = config.load_kube_config
        load(str(kubeconfig), context=context, client_configuration=settings)
        host = urlsplit(settings.host).hostname
        if host not in LOOPBACK:
            raise ValueError(
                f"context {context!r} of {kubeconfig} is the cluster at {host}: a stand-in operator would fight the "
                f"real one there. It runs against a control plane on loopback only."
            )
        settings.connection_pool_maxsize = 32
        self._settings = settings
        self._pool: urllib3.PoolManager = client.ApiClient(settings).rest_client.pool_manager

    def request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        response = self._send(method, path, body, content_type)
        answer = json.loads(response.data)
        if response.status >= 400:
            raise RefusedError(response.status, answer.get("reason", ""), answer.get("message", ""))
        return answer

    def _send(
        self, method: str, path: str, body: Any, content_type: str, *, timeout: float = 30, stream: bool = False
    ) -> urllib3.BaseHTTPResponse:
        headers = {"Accept": "application/json", "Impersonate-User": names.OPERATOR_USER}
        headers["Impersonate-Group"] = "system:masters"
        settings: Mapping[str, Any] = self._settings.auth_settings()
        for entry in settings.values():
            headers[entry["key"]] = entry["value"]
        data = None
        if body is not None:
            headers["Content-Type"] = content_type
            data = json.dumps(body).encode()
        return self._pool.request(
            method,
            self._settings.host + path,
            body=data,
            headers=headers,
            timeout=urllib3.Timeout(connect=10, read=timeout),
            preload_content=not stream,
            retries=False,
        )

    def find(self, kind: str, namespace: str | None, name: str) -> Manifest | None:
        try:
            return kinded(kind, self.request("GET", path_of(kind, namespace, name)))
        except RefusedError as refused:
            if refused.code == 404:
                return None
            raise

    def create(self, manifest: Manifest) -> Manifest:
        path = path_of(manifest["kind"], manifest["metadata"].get("namespace"))
        return kinded(manifest["kind"], self.request("POST", path, manifest))

    def replace(self, manifest: Manifest, subresource: str | None = None) -> Manifest:
        metadata = manifest["metadata"]
        path = path_of(manifest["kind"], metadata.get("namespace"), metadata["name"], subresource)
        return kinded(manifest["kind"], self.request("PUT", path, manifest))

    def patch(self, manifest: Manifest, changes: Mapping[str, Any]) -> Manifest:
        """A merge patch of an object that must not have changed since it was read."""
        metadata = manifest["metadata"]
        body = {**changes, "metadata": {**changes.get("metadata", {}), "resourceVersion": metadata["resourceVersion"]}}
        path = path_of(manifest["kind"], metadata.get("namespace"), metadata["name"])
        return kinded(manifest["kind"], self.request("PATCH", path, body, MERGE))

    def delete(self, manifest: Manifest) -> Manifest | None:
        """Delete this very object; what is left of it when finalizers hold it."""
        metadata = manifest["metadata"]
        body = {"preconditions": {"uid": metadata["uid"]}, "propagationPolicy": "Background"}
        try:
            left = self.request("DELETE", path_of(manifest["kind"], metadata.get("namespace"), metadata["name"]), body)
        except RefusedError as refused:
            if refused.code == 404:
                return None
            raise
        return kinded(manifest["kind"], left) if "deletionTimestamp" in left.get("metadata", {}) else None

    def list(self, kind: str, selection: Mapping[str, str]) -> tuple[list[Manifest], str]:
        answer = self.request("GET", f"{path_of(kind)}?{urlencode(selection)}")
        return [kinded(kind, item) for item in answer["items"]], str(answer["metadata"]["resourceVersion"])

    def watch(self, kind: str, selection: Mapping[str, str], since: str) -> Iterator[tuple[str, Manifest]]:
        query = {**selection, "watch": "true", "resourceVersion": since, "timeoutSeconds": str(WATCH_SECONDS)}
        query["allowWatchBookmarks"] = "true"
        path = f"{path_of(kind)}?{urlencode(query)}"
        response = self._send("GET", path, None, "", timeout=WATCH_SECONDS + 10, stream=True)
        try:
            if response.status >= 400:
                raise RefusedError(response.status, "", response.data.decode(errors="replace"))
            rest = b""
            for chunk in response.stream(amt=None, decode_content=True) if response.chunked else [response.data]:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    change = json.loads(line)
                    if change["type"] == "ERROR":
                        status = change["object"]
                        raise RefusedError(status.get("code", 500), status.get("reason", ""), status.get("message", ""))
                    yield change["type"], kinded(kind, change["object"])
        finally:
            response.close()


def kinded(kind: str, item: Any) -> Manifest:
    """An object with its kind: items of a list come without."""
    root, _ = PLACES[kind]
    return {"apiVersion": root.removeprefix("/apis/").removeprefix("/api/"), "kind": kind, **item}


@dataclass(frozen=True)
class Watched:
    """Which objects of a kind are watched."""

    kind: str
    selection: Mapping[str, str]


class Copy:
    """What the API server has of one kind, as of the last change seen or written. Read without asking it."""

    def __init__(self, server: Server, watched: Watched, changed: Callable[[str, Manifest], None]) -> None:
        self._server = server
        self._watched = watched
        self._changed = changed
        self._objects: dict[tuple[str, str], Manifest] = {}
        self._gone: set[str] = set()  # uids: the answer to a write may come after the news of its object's end
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"watch {watched.kind}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def get(self, namespace: str, name: str) -> Manifest | None:
        with self._lock:
            return self._objects.get((namespace, name))

    def all(self, namespace: str, labels: Mapping[str, str] | None = None) -> list[Manifest]:
        wanted = (labels or {}).items()
        with self._lock:
            found = [item for (place, _), item in sorted(self._objects.items()) if place == namespace]
        return [item for item in found if wanted <= (item["metadata"].get("labels") or {}).items()]

    def put(self, item: Manifest) -> None:
        """Remember what a write answered, unless something newer was seen already."""
        key = key_of(item)
        with self._lock:
            known = self._objects.get(key)
            if item["metadata"]["uid"] in self._gone:
                return
            if known is None or version_of(item) > version_of(known):
                self._objects[key] = item

    def drop(self, item: Manifest) -> None:
        with self._lock:
            self._gone.add(item["metadata"]["uid"])
            known = self._objects.get(key_of(item))
            if known is not None and known["metadata"]["uid"] == item["metadata"]["uid"]:
                del self._objects[key_of(item)]

    def _follow(self) -> None:
        since: str | None = None
        while not self._stopped.is_set():
            try:
                if since is None:
                    since = self._read_all()
                for what, item in self._server.watch(self._watched.kind, self._watched.selection, since):
                    if self._stopped.is_set():
                        return
                    since = str(item["metadata"]["resourceVersion"])
                    self._take(what, item)
            except RefusedError:
                since = None  # too old, or the kind is gone for the moment: read everything again
                time.sleep(0.2)
            except (urllib3.exceptions.HTTPError, OSError):
                time.sleep(0.2)

    def _read_all(self) -> str:
        items, since = self._server.list(self._watched.kind, self._watched.selection)
        fresh = {key_of(item): item for item in items}
        with self._lock:
            gone = [item for key, item in self._objects.items() if key not in fresh]
            self._objects = fresh
        self.ready.set()
        for item in [*items, *gone]:
            self._changed(self._watched.kind, item)
        return since

    def _take(self, what: str, item: Manifest) -> None:
        if what == "BOOKMARK":
            return
        if what == "DELETED":
            self.drop(item)
        else:
            self.put(item)
        self._changed(self._watched.kind, item)


def key_of(item: Manifest) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]


def version_of(item: Manifest) -> int:
    return int(item["metadata"]["resourceVersion"])
