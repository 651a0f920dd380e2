"""Container images in archives (docker save, OCI layout): what is in them, before a daemon is asked to load one.

Standard library only, Python 3.8 and later.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator
from typing import Any

_BROKEN = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError, ValueError, KeyError, TypeError)
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_CHUNK = 1 << 20


class ArchiveError(Exception):
    """The archive will not do; the text says why and what to do."""


class ArchivedImage:
    """One image of an archive."""

    def __init__(self, tags: list[str], architecture: str, configuration: str, layers: list[str]) -> None:
        self.tags = tags
        self.architecture = architecture
        self.configuration = configuration
        self.layers = layers

    @property
    def id(self) -> str:
        """The image's id: the digest of its configuration, which is also the file's name."""
        digest = os.path.basename(self.configuration)
        return "sha256:" + (digest[: -len(".json")] if digest.endswith(".json") else digest)


class Archive:
    """An archive that was read once, from front to back, without unpacking it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.compressed = False
        self.docker_format = False
        self.images: list[ArchivedImage] = []
        self._small: dict[str, bytes] = {}
        self._names: set[str] = set()
        try:
            self._read()
            self.images = self._docker_images() if self.docker_format else self._oci_images()
        except ArchiveError:
            raise
        except _BROKEN as error:
            raise _broken(path, error) from None
        missing = sorted({name for image in self.images for name in image.layers} - self._names)
        if missing:
            raise ArchiveError(f"{path}: is incomplete: {len(missing)} layers are missing, the first is {missing[0]}")

    def _read(self) -> None:
        with open(self.path, "rb") as stream:
            magic = stream.read(4)
        if magic == _ZSTANDARD:
            raise ArchiveError(
                f"{self.path}: is compressed with Zstandard, which not every Docker reads: unzstd it first"
            )
        with tarfile.open(self.path, "r:*") as tar:
            self.compressed = not isinstance(tar.fileobj, io.BufferedReader)
            for member in tar:
                name = os.path.normpath(member.name)
                self._names.add(name)
                # Manifests and configurations are small; layers are never read here.
                if member.isfile() and member.size < 4 << 20:
                    content = tar.extractfile(member)
                    assert content is not None
                    data = content.read()
                    if data[:1] in (b"{", b"["):
                        self._small[name] = data
        self.docker_format = "manifest.json" in self._small
        if not self.docker_format and "index.json" not in self._small:
            raise ArchiveError(
                f"{self.path}: holds neither manifest.json (docker save) nor index.json (OCI layout). A root file "
                "system "
                "(docker export) is not an image; write the archive with docker save"
            )

    def _json(self, name: str) -> Any:
        name = os.path.normpath(name)
        if name not in self._small:
            raise ArchiveError(f"{self.path}: is incomplete: {name} is missing")
        data = self._small[name]
        digest = os.path.basename(name)
        if name.startswith("blobs/sha256/") and hashlib.sha256(data).hexdigest() != digest:
            raise ArchiveError(f"{self.path}: is corrupt: {name} does not match its digest; copy the archive again")
        return json.loads(data)

    def _docker_images(self) -> list[ArchivedImage]:
        return [
            ArchivedImage(
                tags=[str(tag) for tag in entry.get("RepoTags") or []],
                architecture=str(self._json(entry["Config"]).get("architecture", "unknown")),
                configuration=os.path.normpath(entry["Config"]),
                layers=[os.path.normpath(name) for name in entry["Layers"]],
            )
            for entry in self._json("manifest.json")
        ]

    def _oci_images(self) -> list[ArchivedImage]:
        return [
            image for entry in self._json("index.json")["manifests"] for image in self._oci_entry(entry, _tags(entry))
        ]

    def _oci_entry(self, entry: dict[str, Any], tags: list[str]) -> Iterator[ArchivedImage]:
        found = self._json(_blob(entry["digest"]))
        if "manifests" in found:
            for nested in found["manifests"]:
                # An image for another machine may be listed without being there; attestations are no images.
                if _blob(nested["digest"]) in self._names and (nested.get("platform") or {}).get("os") != "unknown":
                    yield from self._oci_entry(nested, tags or _tags(nested))
            return
        configuration = _blob(found["config"]["digest"])
        yield ArchivedImage(
            tags=tags,
            architecture=str(self._json(configuration).get("architecture", "unknown")),
            configuration=configuration,
            layers=[_blob(layer["digest"]) for layer in found["layers"]],
        )

    def choose(self, name: str, architecture: str) -> ArchivedImage:
        """The image of this name for this machine, or an error that says what the archive has instead."""
        named = [image for image in self.images if any(_same(tag, name) for tag in image.tags)]
        if not named:
            tags = sorted({tag for image in self.images for tag in image.tags})
            raise ArchiveError(
                f"{self.path}: holds no image {name}; it holds {', '.join(tags) or 'images without a name'}. Take "
                "the archive "
                f"of the planned release, or give the image its name (docker tag … {name}) before docker save"
            )
        for image in named:
            if image.architecture == architecture:
                return image
        there = ", ".join(sorted({image.architecture for image in named}))
        raise ArchiveError(
            f"{self.path}: {name} is for {there}, this host is {architecture}. Write the archive on, or for, an "
            f"{architecture} "
            f"machine: docker pull --platform linux/{architecture}, then docker save"
        )

    def load_stream(self, image: ArchivedImage, name: str) -> Iterator[bytes]:
        """What a daemon's load takes: the archive; an OCI layout gets the manifest.json that older daemons ask for."""
        if self.docker_format:
            with open(self.path, "rb") as stream:
                yield from iter(lambda: stream.read(_CHUNK), b"")
            return
        manifest = json.dumps([{"Config": image.configuration, "RepoTags": [name], "Layers": image.layers}]).encode()
        with tarfile.open(self.path, "r:*") as tar:
            for member in tar:
                yield member.tobuf(tarfile.PAX_FORMAT)
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield from iter(lambda content=content: content.read(_CHUNK), b"")  # type: ignore[misc]
                    yield b"\0" * (-member.size % tarfile.BLOCKSIZE)
        added = tarfile.TarInfo("manifest.json")
        added.size = len(manifest)
        yield added.tobuf(tarfile.PAX_FORMAT) + manifest + b"\0" * (-len(manifest) % tarfile.BLOCKSIZE)
        yield b"\0" * tarfile.BLOCKSIZE * 2


def problem(path: str, name: str, architecture: str) -> str | None:
    """Why an image cannot be had from an archive, as far as that is known without reading all of it.

    In a plain archive the layers are stepped over; of a compressed one only the beginning is read.
    """
    if not os.path.isfile(path):
        return f"{path}: there is no such archive"
    try:
        with open(path, "rb") as stream:
            compressed = stream.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00"))
        if not compressed:
            Archive(path).choose(name, architecture)
            return None
        with tarfile.open(path, "r:*") as tar:
            tar.next()
    except ArchiveError as error:
        return str(error)
    except _BROKEN as error:
        return str(_broken(path, error))
    return None


def _broken(path: str, error: Exception) -> ArchiveError:
    return ArchiveError(
        f"{path}: is no image archive, or is corrupt or cut short ({error}). Write it again with docker save, compare "
        "its sha256 with the original's, and copy it again"
    )


def _tags(entry: dict[str, Any]) -> list[str]:
    notes = entry.get("annotations") or {}
    found = notes.get("io.containerd.image.name") or notes.get("org.opencontainers.image.ref.name")
    return [str(found)] if found else []


def _blob(digest: str) -> str:
    algorithm, _, value = digest.partition(":")
    return f"blobs/{algorithm}/{value}"


def _same(tag: str, name: str) -> bool:
    """Whether a tag of an archive names the image; an OCI reference may be the bare tag."""
    return full_name(tag) == full_name(name) or ("/" not in tag and ":" not in tag and name.endswith(":" + tag))


def full_name(name: str) -> str:
    """A name as Docker completes it: registry, repository, tag."""
    registry, repository = split_registry(name)
    if not registry:
        registry = "docker.io"
        repository = repository if "/" in repository else "library/" + repository
    last = repository.rsplit("/", 1)[-1]
    return f"{registry}/{repository}" + ("" if ":" in last or "@" in last else ":latest")


def split_registry(name: str) -> tuple[str, str]:
    """The registry (empty for Docker Hub) and the rest of an image's name."""
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return ("", rest) if first in ("docker.io", "index.docker.io") else (first, rest)
    return "", name


def mirrored(name: str, mirror: str) -> str:
    """The same repository and tag at another registry; `mirror` may end in a path below which it keeps images."""
    return f"{mirror.rstrip('/')}/{split_registry(name)[1]}"


def sha256_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for chunk in iter(lambda: stream.read(_CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()
