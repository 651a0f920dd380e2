"""A small typed client of the Kubernetes API: objects are dictionaries, a refusal is `Refused`."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import yaml

# JSON as the API server answers it.
Object = dict[str, Any]

# The faster of the safe ones: definitions are large.
SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
FIELD_MANAGER = "gpt-oss-test"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"


class Refused(Exception):  # noqa: N818 - reads as what happened
    """The API server said no."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class Resource:
    """Where objects of a kind live."""

    group_version: str
    plural: str
    namespaced: bool

    def path(self, namespace: str | None, name: str | None, subresource: str | None = None) -> str:
        root = f"/apis/{self.group_version}" if "/" in self.group_version else f"/api/{self.group_version}"
        place = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        parts = [root + place, self.plural, *([name] if name else []), *([subresource] if subresource else [])]
        return "/".join(parts)


class Api:
    """One connection per thread; safe to share."""

    def __init__(self, kubeconfig: Path, context: str) -> None:
        server, self._tls = _credentials(kubeconfig, context)
        self._host = urlsplit(server).netloc
        self._connections = threading.local()
        self._kinds: dict[tuple[str, str], Resource] = {}

    # Requests

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Any:
        """One request; answers the decoded body, or text where it is none of JSON."""
        target = path + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        headers = {"Accept": "application/json"} | ({"Content-Type": content_type} if data is not None else {})
        status, kind, answer = self._send(method, target, data, headers)
        decoded = json.loads(answer) if kind.startswith("application/json") else answer.decode(errors="replace")
        if status >= 400:
            refusal = decoded if isinstance(decoded, dict) else {"message": decoded}
            raise Refused(status, str(refusal.get("reason", "")), str(refusal.get("message", "")))
        return decoded

    def _send(self, method: str, target: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, str, bytes]:
        kept: http.client.HTTPSConnection | None = getattr(self._connections, "one", None)
        self._connections.one = None  # kept again only after an exchange that went well
        connection = kept or self._connection(60)
        try:
            answer = _exchange(connection, method, target, data, headers)
        except (http.client.RemoteDisconnected, ConnectionError, ssl.SSLEOFError):
            connection.close()
            if kept is None:
                raise
            connection = self._connection(60)  # the server ended an idle connection: once more with a fresh one
            answer = _exchange(connection, method, target, data, headers)
        self._connections.one = connection
        return answer

    def _connection(self, seconds: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._host, context=self._tls, timeout=seconds)

    def resource(self, api_version: str, kind: str) -> Resource:
        """Where a kind lives; asks the server, since definitions come and go."""
        known = self._kinds.get((api_version, kind))
        if known is None:
            root = f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"
            try:
                served = self.request("GET", root)["resources"]
            except Refused as refused:
                if refused.status != 404:
                    raise
                served = []
            for entry in served:
                if "/" not in entry["name"]:
                    found = Resource(api_version, entry["name"], entry["namespaced"])
                    self._kinds[api_version, entry["kind"]] = found
            known = self._kinds.get((api_version, kind))
        if known is None:
            raise Refused(404, "NotFound", f"the server serves no kind {kind} in {api_version}")
        return known

    def serves(self, kinds: Iterable[tuple[str, str]]) -> bool:
        """Whether objects of these (API version, kind) can be listed: a definition is not at once."""
        try:
            for api_version, kind in kinds:
                self.request("GET", self.resource(api_version, kind).path(None, None), query={"limit": "1"})
        except Refused:
            return False
        return True

    # Objects

    def get(self, api_version: str, kind: str, name: str, namespace: str | None = None) -> Object:
        return self._object(self.request("GET", self.resource(api_version, kind).path(namespace, name)))

    def find(self, api_version: str, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """Like `get`, None when there is none."""
        try:
            return self.get(api_version, kind, name, namespace)
        except Refused as refused:
            if refused.status == 404:
                return None
            raise

    def list(
        self, api_version: str, kind: str, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> list[Object]:
        query = {"labelSelector": labels} if labels else {}
        query |= {"fieldSelector": fields} if fields else {}
        answer = self.request("GET", self.resource(api_version, kind).path(namespace, None), query=query)
        # Items of a list come without their kind.
        return [{"apiVersion": api_version, "kind": kind, **item} for item in answer["items"]]

    def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """POST with strict field validation: a field the server does not know is refused, as `kubectl` does."""
        path, _ = self._place(manifest, with_name=False)
        return self._object(self.request("POST", path, body=manifest, query=_write_options(dry_run)))

    def apply(self, manifest: Mapping[str, Any], *, dry_run: bool = False, force: bool = True) -> Object:
        """Server-side apply as `FIELD_MANAGER`."""
        path, _ = self._place(manifest)
        query = _write_options(dry_run) | {"force": "true" if force else "false"}
        return self._object(self.request("PATCH", path, body=manifest, content_type=APPLY, query=query))

    def patch(
        self,
        api_version: str,
        kind: str,
        name: str,
        changes: Mapping[str, Any],
        namespace: str | None = None,
        *,
        subresource: str | None = None,
    ) -> Object:
        """A JSON merge patch."""
        path = self.resource(api_version, kind).path(namespace, name, subresource)
        return self._object(self.request("PATCH", path, body=changes, content_type=MERGE, query=_write_options(False)))

    def replace(self, manifest: Mapping[str, Any], *, subresource: str | None = None) -> Object:
        """PUT: the object as given, refused when somebody changed it meanwhile."""
        path, _ = self._place(manifest, subresource=subresource)
        return self._object(self.request("PUT", path, body=manifest, query=_write_options(False)))

    def delete(
        self, api_version: str, kind: str, name: str, namespace: str | None = None, *, propagation: str = "Background"
    ) -> None:
        """Ask for deletion; an object that is gone already is fine."""
        path = self.resource(api_version, kind).path(namespace, name)
        try:
            self.request("DELETE", path, body={"propagationPolicy": propagation})
        except Refused as refused:
            if refused.status != 404:
                raise

    def watch(
        self, api_version: str, kind: str, namespace: str | None = None, *, since: str, seconds: float
    ) -> Iterator[tuple[str, Object]]:
        """Changes after a resource version, as (ADDED|MODIFIED|DELETED, object), for a bounded time."""
        path = self.resource(api_version, kind).path(namespace, None)
        query = {"watch": "true", "resourceVersion": since, "timeoutSeconds": str(max(1, round(seconds)))}
        connection = self._connection(seconds + 10)
        try:
            connection.request("GET", f"{path}?{urlencode(query)}", headers={"Accept": "application/json"})
            response = connection.getresponse()
            if response.status >= 400:
                refusal = json.loads(response.read())
                raise Refused(response.status, refusal.get("reason", ""), refusal.get("message", ""))
            while line := response.readline():
                change = json.loads(line)
                if change["type"] == "ERROR":
                    status = change["object"]
                    raise Refused(status.get("code", 500), status.get("reason", ""), status.get("message", ""))
                yield change["type"], change["object"]
        finally:
            connection.close()

    def wait(self, what: str, ready: Callable[[], Any], *, seconds: float = 180) -> Any:
        """Ask ten times a second until the answer is true, and answer it; an error names what was awaited."""
        deadline = time.monotonic() + seconds
        while not (answer := ready()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds:.0f} s; last answer: {answer!r}")
            time.sleep(0.1)
        return answer

    def _place(
        self, manifest: Mapping[str, Any], *, with_name: bool = True, subresource: str | None = None
    ) -> tuple[str, Resource]:
        resource = self.resource(manifest["apiVersion"], manifest["kind"])
        name = manifest["metadata"]["name"] if with_name else None
        return resource.path(manifest["metadata"].get("namespace"), name, subresource), resource

    @staticmethod
    def _object(answer: Any) -> Object:
        if not isinstance(answer, dict):
            raise TypeError(f"the API server answered {answer!r} where an object was expected")
        return answer


def _write_options(dry_run: bool) -> dict[str, str]:
    options = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
    return options | ({"dryRun": "All"} if dry_run else {})


def _exchange(
    connection: http.client.HTTPSConnection, method: str, target: str, data: bytes | None, headers: dict[str, str]
) -> tuple[int, str, bytes]:
    connection.request(method, target, body=data, headers=headers)
    response = connection.getresponse()
    return response.status, response.getheader("Content-Type", ""), response.read()


def _credentials(kubeconfig: Path, context: str) -> tuple[str, ssl.SSLContext]:
    config = yaml.safe_load(kubeconfig.read_text())
    chosen = _named(config["contexts"], context)["context"]
    cluster = _named(config["clusters"], chosen["cluster"])["cluster"]
    user = _named(config["users"], chosen["user"])["user"]
    tls = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
    with tempfile.TemporaryDirectory() as directory:  # ssl reads a client's certificate from files only
        pair = {}
        for part in ("certificate", "key"):
            pair[part] = Path(directory) / part
            pair[part].touch(mode=0o600)
            pair[part].write_bytes(base64.b64decode(user[f"client-{part}-data"]))
        tls.load_cert_chain(pair["certificate"], pair["key"])
    return cluster["server"], tls


def _named(entries: Any, name: str) -> Any:
    return next(entry for entry in entries if entry["name"] == name)
