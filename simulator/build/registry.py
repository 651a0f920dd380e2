"""Putting images into a registry, over its HTTP API: a layer that is there already is not sent again."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import json
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from simulator.build.images import Image, digest_of_manifest
from simulator.build.machine import BuildError

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


def repository_of(reference: str) -> tuple[str, str]:
    """`nvcr.io/nvidia/x:tag` as (nvidia/x, tag): a mirror keeps the path and drops the host."""
    name, _, tag = reference.rpartition(":")
    first, _, rest = name.partition("/")
    return (rest if "." in first or ":" in first else name), tag


class Registry:
    """A registry at http://ADDRESS:PORT."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise BuildError(f"{url!r}: the address of a registry looks like http://10.0.0.2:5000")
        self.host, self.port = parts.hostname, parts.port or 80

    def push(self, image: Image) -> str:
        """Returns the manifest's digest."""
        repository, tag = repository_of(image.reference)
        for layer in image.layers:
            self._blob(repository, layer.digest, layer.packed)
        self._blob(repository, f"sha256:{image.id}", image.configuration)
        content, digest = digest_of_manifest(image)
        self._ask("PUT", f"/v2/{repository}/manifests/{tag}", (201,), content, {"Content-Type": MANIFEST})
        return digest

    def name(self, reference: str, architecture: str) -> None:
        """Have an image of this name: one with nothing in it, where there is none yet."""
        repository, tag = repository_of(reference)
        manifest = f"/v2/{repository}/manifests/{tag}"
        if self._ask("HEAD", manifest, (200, 404), headers={"Accept": MANIFEST})[0] == 200:
            return
        tar = bytes(10240)
        layer = gzip.compress(tar, mtime=0)
        history = {"type": "layers", "diff_ids": [_digest(tar)]}
        told = {"architecture": architecture, "os": "linux", "config": {}, "rootfs": history}
        configuration = json.dumps(told).encode()
        for content in (layer, configuration):
            self._blob(repository, _digest(content), content)
        parts = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _described("application/vnd.docker.container.image.v1+json", configuration),
            "layers": [_described("application/vnd.docker.image.rootfs.diff.tar.gzip", layer)],
        }
        self._ask("PUT", manifest, (201,), json.dumps(parts).encode(), {"Content-Type": MANIFEST})

    def _blob(self, repository: str, digest: str, content: Path | bytes) -> None:
        status, _ = self._ask("HEAD", f"/v2/{repository}/blobs/{digest}", (200, 404))
        if status == 200:
            return
        _, location = self._ask("POST", f"/v2/{repository}/blobs/uploads/", (202,))
        where = urlsplit(urljoin(f"http://{self.host}:{self.port}/", location))
        query = f"{where.query}&digest={digest}" if where.query else f"digest={digest}"
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        if isinstance(content, bytes):
            self._ask("PUT", f"{where.path}?{query}", (201,), content, headers)
        else:
            with content.open("rb") as file:
                self._ask("PUT", f"{where.path}?{query}", (201,), file, headers)

    def _ask(
        self,
        method: str,
        path: str,
        allowed: tuple[int, ...],
        body: object = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=300)
        try:
            connection.request(method, path, body=body, headers=headers or {})  # type: ignore[arg-type]
            answer = connection.getresponse()
            said = answer.read()
        except OSError as error:
            raise BuildError(f"http://{self.host}:{self.port}{path}: {error}") from error
        finally:
            connection.close()
        if answer.status not in allowed:
            raise BuildError(
                f"{method} http://{self.host}:{self.port}{path}: status {answer.status}, expected "
                f"{' or '.join(map(str, allowed))}: {said[:300].decode(errors='replace')}"
            )
        return answer.status, answer.headers.get("Location", "")


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _described(kind: str, content: bytes) -> dict[str, str | int]:
    return {"mediaType": kind, "size": len(content), "digest": _digest(content)}
