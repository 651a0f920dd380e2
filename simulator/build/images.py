"""Images as Docker keeps them: one layer with everything, one small layer for each engine, one configuration for each release."""

from __future__ import annotations

import gzip
import hashlib
import inspect
import io
import json
import shutil
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_catalog import load_catalog
from simulator.build import debian, machine, packages
from simulator.build.machine import ARCHITECTURES, REPOSITORY, cached, key_of

HOME = "opt/simulator"
EPOCH = "2026-01-01T00:00:00Z"
COMMANDS = {
    "tensorrt_llm": {"trtllm-serve": "simulator.commands.trtllm_serve", "mpirun": "simulator.commands.mpirun"},
    "vllm": {"vllm": "simulator.commands.vllm"},
}
# What the real images start with: NVIDIA's prints a banner, then runs the command; vLLM's takes the model.
NVIDIA_ENTRYPOINT = "opt/nvidia/nvidia_entrypoint.sh"
NVIDIA_ENTRYPOINT_TEXT = """#!/bin/bash
echo "== Stand-in for TensorRT-LLM ${SIMULATOR_RELEASE}: the command line, the endpoints, and no model =="
if [ -z "${NVIDIA_VISIBLE_DEVICES}" ]; then
    echo "WARNING: The NVIDIA Driver was not detected.  GPU functionality will not be available."
fi
exec "$@"
"""
ENTRYPOINTS = {"tensorrt_llm": [f"/{NVIDIA_ENTRYPOINT}"], "vllm": ["vllm", "serve"]}
WORKING_DIRECTORIES = {"tensorrt_llm": "/app/tensorrt_llm", "vllm": "/vllm-workspace"}
SOURCES = ("simulator", "serving_catalog")
LEFT_OUT = ("__pycache__", "build", "README.md", ".mypy_cache", ".ruff_cache")


@dataclass(frozen=True)
class Layer:
    """A tar archive and its compressed form, with their digests."""

    plain: Path
    packed: Path
    diff_id: str
    digest: str

    @property
    def size(self) -> int:
        return self.plain.stat().st_size


@dataclass(frozen=True)
class Image:
    """One tag, with its configuration and layers."""

    reference: str
    engine: str
    release: str
    configuration: bytes
    layers: tuple[Layer, ...]

    @property
    def id(self) -> str:
        return hashlib.sha256(self.configuration).hexdigest()

    @property
    def size(self) -> int:
        return sum(layer.size for layer in self.layers)


def images(only: Iterable[str] = ()) -> list[Image]:
    """An image for every engine release of the catalog, or for some of them, named like tensorrt_llm-1.2.1."""
    wanted = set(only)
    base = base_layer()
    small: dict[str, Layer] = {}
    result: list[Image] = []
    known: list[str] = []
    for engine, entry in load_catalog().engines.items():
        for release, details in entry.releases.items():
            known.append(f"{engine}-{release}")
            if wanted and known[-1] not in wanted:
                continue
            if engine not in small:
                small[engine] = engine_layer(engine)
            layers = (base, small[engine])
            configuration = _configuration(engine, release, layers)
            result.append(Image(details.image, engine, release, configuration, layers))
    unknown = wanted - set(known)
    if unknown:
        raise machine.BuildError(f"{', '.join(sorted(unknown))}: no such release; allowed: {', '.join(known)}")
    return result


def base_layer() -> Layer:
    """Debian's Python, Dynamo, and what they need. Made once a month, or when a pin changes."""
    made_of = [debian.made_of(), packages.REQUIREMENTS.read_text(), inspect.getsource(packages), _packing()]
    return _layer("base", key_of(*made_of), _base_tree)


def engine_layer(engine: str) -> Layer:
    """The commands of one engine and their sources."""
    sources = {name: (REPOSITORY / name).read_bytes() for name in _source_files()}
    made_of = [engine, _packing(), *(f"{name}\0{hashlib.sha256(text).hexdigest()}" for name, text in sources.items())]

    def make(tree: Path) -> None:
        for name, content in sources.items():
            _write(tree / HOME / name, content)
        for command, module in COMMANDS[engine].items():
            _write(tree / "usr/local/bin" / command, command_script(module).encode(), executable=True)
        (tree / WORKING_DIRECTORIES[engine].lstrip("/")).mkdir(parents=True)
        if engine == "tensorrt_llm":
            _write(tree / NVIDIA_ENTRYPOINT, NVIDIA_ENTRYPOINT_TEXT.encode(), executable=True)

    return _layer(f"engine-{engine}", key_of(*made_of), make)


def command_script(module: str) -> str:
    path = f"/{HOME}/packages:/{HOME}"
    return f'#!/bin/sh\nPYTHONPATH={path} exec /usr/bin/python{debian.PYTHON} -m {module} "$@"\n'


def _base_tree(tree: Path) -> None:
    machine.say("unpacking Debian's packages for the stand-in image")
    debian.unpack(tree)
    shutil.copytree(packages.python_packages(debian.PYTHON), tree / HOME / "packages", symlinks=True)
    debian.compile_all(tree, f"usr/lib/python{debian.PYTHON}", f"{HOME}/packages")


def _source_files() -> list[str]:
    found = []
    for name in SOURCES:
        for path in sorted((REPOSITORY / name).rglob("*")):
            relative = path.relative_to(REPOSITORY)
            if path.is_file() and not any(part in LEFT_OUT for part in relative.parts):
                found.append(str(relative))
    return found


def _write(path: Path, content: bytes, executable: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o755 if executable else 0o644)


def _packing() -> str:
    return inspect.getsource(_pack) + inspect.getsource(_anonymous)


def _layer(name: str, key: str, make: Any) -> Layer:
    def build(into: Path) -> None:
        tree = into / "tree"
        tree.mkdir()
        make(tree)
        _pack(tree, into)
        shutil.rmtree(tree)

    directory = cached(name, key, build)
    digests = json.loads((directory / "digests.json").read_text())
    return Layer(directory / "layer.tar", directory / "layer.tar.gz", digests["diff_id"], digests["digest"])


def _pack(tree: Path, into: Path) -> None:
    """The tree as layer.tar and layer.tar.gz: the same bytes for the same files, whoever packs them and when."""
    with tarfile.open(into / "layer.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(tree.rglob("*")):
            tar.add(path, str(path.relative_to(tree)), recursive=False, filter=_anonymous)
    plain, packed = hashlib.sha256(), hashlib.sha256()
    buffer = io.BytesIO()
    with (into / "layer.tar").open("rb") as source, (into / "layer.tar.gz").open("wb") as target:
        # Level 1: the archive is read once or twice, on this machine.
        with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=1, mtime=0) as compressed:
            while chunk := source.read(1 << 20):
                plain.update(chunk)
                compressed.write(chunk)
                packed.update(buffer.getvalue())
                target.write(buffer.getvalue())
                buffer.seek(0)
                buffer.truncate()
        packed.update(buffer.getvalue())
        target.write(buffer.getvalue())
    digests = {"diff_id": f"sha256:{plain.hexdigest()}", "digest": f"sha256:{packed.hexdigest()}"}
    (into / "digests.json").write_text(json.dumps(digests))


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def _configuration(engine: str, release: str, layers: tuple[Layer, ...]) -> bytes:
    configuration = {
        "architecture": ARCHITECTURES[machine.machine()],
        "os": "linux",
        "created": EPOCH,
        "config": {
            "Env": [
                "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "PYTHONUTF8=1",
                "PYTHONUNBUFFERED=1",
                f"SIMULATOR_ENGINE={engine}",
                f"SIMULATOR_RELEASE={release}",
            ],
            "Entrypoint": ENTRYPOINTS[engine],
            "WorkingDir": WORKING_DIRECTORIES[engine],
            "Labels": {"org.opencontainers.image.description": f"Stand-in for {engine} {release}: no model, no GPU code"},
        },
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        "history": [{"created": EPOCH, "created_by": f"python -m simulator build ({layer.plain.parent.name})"} for layer in layers],
    }
    return json.dumps(configuration, sort_keys=True, separators=(",", ":")).encode()


def save(made: list[Image], archive: Path) -> None:
    """An archive for `docker load` and `podman load`. A layer that several images share is in it once."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    scratch = archive.with_name(archive.name + ".new")
    manifest: list[dict[str, Any]] = []
    seen: set[str] = set()
    with tarfile.open(scratch, "w", format=tarfile.PAX_FORMAT) as tar:
        for image in made:
            for layer in image.layers:
                name = layer.diff_id.removeprefix("sha256:")
                if name not in seen:
                    seen.add(name)
                    tar.add(layer.plain, f"{name}/layer.tar", filter=_anonymous)
            _add(tar, f"{image.id}.json", image.configuration)
            paths = [f"{layer.diff_id.removeprefix('sha256:')}/layer.tar" for layer in image.layers]
            manifest.append({"Config": f"{image.id}.json", "RepoTags": [image.reference], "Layers": paths})
        _add(tar, "manifest.json", json.dumps(manifest).encode())
    scratch.rename(archive)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    tar.addfile(entry, io.BytesIO(content))


def digest_of_manifest(image: Image) -> tuple[bytes, str]:
    """The image's manifest as a registry keeps it, and its digest."""
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "size": len(image.configuration),
            "digest": f"sha256:{image.id}",
        },
        "layers": [
            {
                "mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip",
                "size": layer.packed.stat().st_size,
                "digest": layer.digest,
            }
            for layer in image.layers
        ],
    }
    content = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    return content, "sha256:" + hashlib.sha256(content).hexdigest()
