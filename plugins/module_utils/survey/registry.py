"""Whether an image can be had: at its registry, asked as Docker would ask, or in an archive on the host."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from ansible.module_utils.gpt_oss import image_archive

from .host import Host, names, read
from .network import explained
from .system import architecture

LOGINS = "/root/.docker/config.json"
_HUB = "registry-1.docker.io"
_HUB_LOGIN = "https://index.docker.io/v1/"
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
_LARGEST = 4 << 20  # a manifest is a few KiB
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


def login_of(name: str, username: str | None, password: str | None, logins: str = LOGINS) -> tuple[str, str] | None:
    """User and password at an image's registry: those that were given, else what `docker login` left on the host."""
    if username:
        return username, password or ""
    registry = image_archive.split_registry(name)[0] or _HUB_LOGIN
    try:
        found = (json.loads(read(logins) or "{}").get("auths") or {}).get(registry) or {}
        user, _, secret = base64.b64decode(found.get("auth", "")).decode().partition(":")
    except (ValueError, AttributeError):
        return None
    return (user, secret) if user else None


def image(host: Host, asked: dict[str, Any], there: list[str], timeout: float, proxies: Any) -> dict[str, Any]:
    """Nobody is asked for an image that is on the host. `there`: the names that Docker has."""
    name = asked["name"]
    pulled_as = image_archive.mirrored(name, asked["registry"]) if asked["registry"] else name
    facts: dict[str, Any] = {
        "name": name if asked["archive"] else pulled_as,
        "there": pulled_as in there or (bool(asked["archive"]) and name in there),
        "status": None,
        "kind": None,
        "error": None,
        "architectures": None,
    }
    if facts["there"]:
        return facts
    if asked["archive"]:
        wanted = architecture(host)["dpkg"]
        facts["error"] = image_archive.problem(host.root(asked["archive"]), name, wanted)
        facts["kind"] = "archive" if facts["error"] else None
        return facts
    login = login_of(pulled_as, asked["username"], asked["password"], host.root(LOGINS))
    registry = _Registry(host, pulled_as, asked["insecure"], login, timeout, proxies)
    try:
        facts["status"], facts["architectures"] = registry.look()
    except (OSError, ValueError, http.client.HTTPException) as error:
        facts["kind"], facts["error"] = explained(error, None)
    return facts


class _Registry:
    """The questions about one image; `insecure` is plain HTTP, as Docker speaks it with registries named so."""

    def __init__(
        self, host: Host, name: str, insecure: bool, login: tuple[str, str] | None, timeout: float, proxies: Any
    ) -> None:
        registry, _, rest = image_archive.full_name(name).partition("/")
        self._repository, self._reference = _split(rest)
        self._scheme = "http" if insecure else "https"
        self._base = "{}://{}/v2/{}".format(
            self._scheme, _HUB if registry == "docker.io" else registry, self._repository
        )
        self._login = login
        self._timeout = timeout
        self._until = time.monotonic() + 3 * timeout
        self._authorization: str | None = None
        context = ssl.create_default_context()
        certificates = "/etc/docker/certs.d/" + registry  # what Docker trusts for this registry alone
        for file in names(host.root(certificates)):
            if file.endswith(".crt"):
                context.load_verify_locations(cafile=os.path.join(host.root(certificates), file))
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler(proxies), urllib.request.HTTPSHandler(context=context)
        )

    def look(self) -> tuple[int, list[str] | None]:
        """The status of the manifest, and the architectures that it is for; None where that cannot be told."""
        address = "/manifests/" + self._reference
        status, kind, _ = self._ask("HEAD", address)
        if status in (405, 501):  # some mirrors answer GET only
            status, kind, _ = self._ask("GET", address)
        if status != 200:
            return status, None
        status, _, body = self._ask("GET", address)
        found = json.loads(body) if status == 200 else {}
        if kind in _INDEXES or "manifests" in found:
            platforms = [entry.get("platform") or {} for entry in found.get("manifests") or []]
            return 200, sorted({str(p["architecture"]) for p in platforms if p.get("os") == "linux"})
        digest = (found.get("config") or {}).get("digest")
        status, _, body = self._ask("GET", "/blobs/" + digest) if digest else (0, "", b"")
        told = json.loads(body).get("architecture") if status == 200 else None
        return 200, [str(told)] if told else None

    def _ask(self, method: str, address: str) -> tuple[int, str, bytes]:
        status, headers, body = self._once(method, self._base + address, self._authorization)
        if status == 401 and self._authorization is None:
            self._authorization = self._answer_to(headers.get("WWW-Authenticate") or "")
            if self._authorization is not None:
                status, headers, body = self._once(method, self._base + address, self._authorization)
        return status, (headers.get("Content-Type") or "").partition(";")[0].strip(), body

    def _once(self, method: str, url: str, authorization: str | None) -> tuple[int, Any, bytes]:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        request = urllib.request.Request(url, method=method)  # noqa: S310 - http or https, see above
        request.add_header("User-Agent", "host-survey")
        request.add_header("Accept", ", ".join(_INDEXES + _MANIFESTS))
        if authorization is not None:
            # Not carried on to where the registry may send us: its storage has a login of its own.
            request.add_unredirected_header("Authorization", authorization)
        try:
            with self._opener.open(request, timeout=min(self._timeout, left)) as answer:
                return answer.status, answer.headers, answer.read(_LARGEST)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, b""

    def _answer_to(self, challenge: str) -> str | None:
        """What the registry wants to see: a token from where it says, or the login itself."""
        method, _, rest = challenge.partition(" ")
        basic = "Basic " + base64.b64encode(":".join(self._login).encode()).decode() if self._login else None
        if method.lower() != "bearer":
            return basic
        told = dict(_CHALLENGE.findall(rest))
        realm = told.get("realm", "")
        if not realm.startswith("https://") and (self._scheme == "https" or not realm.startswith("http://")):
            return None  # a login is not sent in the clear because a registry says so
        query = {"scope": told.get("scope") or f"repository:{self._repository}:pull"}
        query.update({"service": told["service"]} if told.get("service") else {})
        separator = "&" if "?" in realm else "?"
        status, _, body = self._once("GET", realm + separator + urllib.parse.urlencode(query), basic)
        given = json.loads(body) if status == 200 else {}
        token = given.get("token") or given.get("access_token")
        return "Bearer " + token if token else None


def _split(name: str) -> tuple[str, str]:
    """Repository, and digest or tag."""
    repository, mark, digest = name.partition("@")
    head, slash, tail = repository.rpartition("/")
    bare, _, tag = tail.partition(":")
    return head + slash + bare, digest if mark else tag or "latest"
