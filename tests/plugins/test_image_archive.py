"""Image archives as docker save and OCI tools write them, read before a daemon is asked to load one."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from ansible.module_utils.gpt_oss import image_archive as archives  # isort: skip

NAME = "nvcr.io/nvidia/tensorrt-llm/release:1.2.1"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


def docker_save(architecture: str = "amd64", tags: tuple[str, ...] = (NAME,)) -> dict[str, bytes]:
    """What docker save wrote before version 25."""
    layer = b"layer" * 1000
    configuration = json.dumps({"architecture": architecture, "os": "linux"}).encode()
    manifest = [{"Config": f"{digest(configuration)}.json", "RepoTags": list(tags), "Layers": ["abc/layer.tar"]}]
    return {
        "abc/layer.tar": layer,
        f"{digest(configuration)}.json": configuration,
        "manifest.json": json.dumps(manifest).encode(),
    }


def oci_layout(architectures: tuple[str, ...] = ("amd64",), name: str = NAME) -> dict[str, bytes]:
    """What skopeo, buildah and docker buildx write: no manifest.json, perhaps several platforms."""
    files: dict[str, bytes] = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}

    def blob(data: bytes) -> dict[str, Any]:
        files[f"blobs/sha256/{digest(data)}"] = data
        return {"digest": f"sha256:{digest(data)}", "size": len(data)}

    manifests = []
    for architecture in architectures:
        configuration = blob(json.dumps({"architecture": architecture, "os": "linux"}).encode())
        layers = [blob(f"layer for {architecture}".encode() * 100)]
        manifest = blob(json.dumps({"config": configuration, "layers": layers}).encode())
        manifests.append({**manifest, "platform": {"architecture": architecture, "os": "linux"}})
    index = blob(json.dumps({"manifests": manifests}).encode())
    entry = {**index, "annotations": {"io.containerd.image.name": name}}
    files["index.json"] = json.dumps({"manifests": [entry]}).encode()
    return files


def test_docker_save_is_read_and_streamed_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "image.tar", docker_save())
    archive = archives.Archive(str(path))
    image = archive.choose(NAME, "amd64")
    assert image.architecture == "amd64"
    assert b"".join(archive.load_stream(image, NAME)) == path.read_bytes()


def test_a_compressed_archive_is_read_too(tmp_path: Path) -> None:
    path = write(tmp_path / "image.tar", docker_save())
    packed = tmp_path / "image.tar.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert archives.Archive(str(packed)).choose(NAME, "amd64").tags == [NAME]


def test_an_oci_layout_gets_the_manifest_that_older_dockers_ask_for(tmp_path: Path) -> None:
    files = oci_layout(("arm64", "amd64"))
    archive = archives.Archive(str(write(tmp_path / "image.tar", files)))
    image = archive.choose(NAME, "amd64")
    streamed = b"".join(archive.load_stream(image, NAME))
    with tarfile.open(fileobj=io.BytesIO(streamed)) as tar:
        held = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    manifest = json.loads(held.pop("manifest.json"))
    assert held == files
    assert manifest[0]["RepoTags"] == [NAME]
    assert json.loads(held[manifest[0]["Config"]])["architecture"] == "amd64"
    assert [held[layer] for layer in manifest[0]["Layers"]] == [b"layer for amd64" * 100]


@pytest.mark.parametrize("tag", ["1.2.1", NAME])
def test_an_oci_reference_may_be_the_bare_tag(tmp_path: Path, tag: str) -> None:
    archive = archives.Archive(str(write(tmp_path / "image.tar", oci_layout(name=tag))))
    assert archive.choose(NAME, "amd64").tags == [tag]


def test_docker_hub_names_are_completed_before_they_are_compared(tmp_path: Path) -> None:
    path = write(tmp_path / "image.tar", docker_save(tags=("docker.io/vllm/vllm-openai:v0.31.0",)))
    assert archives.Archive(str(path)).choose("vllm/vllm-openai:v0.31.0", "amd64")


def broken(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / "image.tar"
    if kind == "cut short":
        path.write_bytes(write(path, docker_save()).read_bytes()[:3000])
    elif kind == "cut short, compressed":
        path.write_bytes(gzip.compress(write(path, docker_save()).read_bytes())[:100])
    elif kind == "no archive":
        path.write_text("<html>404</html>")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "zstd":
        path.write_bytes(b"\x28\xb5\x2f\xfd" + b"0" * 100)
    elif kind == "root file system":
        write(path, {"bin/sh": b"#!"})
    elif kind == "layer missing":
        write(path, {name: data for name, data in docker_save().items() if not name.endswith("layer.tar")})
    else:
        assert kind == "blob changed"
        files = oci_layout()
        manifest = next(name for name, data in files.items() if b'"config"' in data)
        write(path, {**files, manifest: files[manifest].replace(b"size", b"Size")})
    return path


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("cut short", "corrupt or cut short"),
        ("cut short, compressed", "corrupt or cut short"),
        ("no archive", "is no image archive"),
        ("empty", "is no image archive"),
        ("zstd", "unzstd it first"),
        ("root file system", "docker export"),
        ("layer missing", "1 layers are missing, the first is abc/layer.tar"),
        ("blob changed", "does not match its digest"),
    ],
)
def test_a_broken_archive_is_refused(tmp_path: Path, kind: str, says: str) -> None:
    with pytest.raises(archives.ArchiveError, match=says):
        archives.Archive(str(broken(tmp_path, kind)))


def test_a_wrong_name_names_what_is_there(tmp_path: Path) -> None:
    archive = archives.Archive(str(write(tmp_path / "image.tar", docker_save(tags=("example.org/other:2",)))))
    with pytest.raises(archives.ArchiveError, match=r"holds no image nvcr.io.*it holds example.org/other:2"):
        archive.choose(NAME, "amd64")


def test_another_architecture_is_named(tmp_path: Path) -> None:
    archive = archives.Archive(str(write(tmp_path / "image.tar", docker_save("amd64"))))
    with pytest.raises(archives.ArchiveError, match=r"is for amd64, this host is arm64.*--platform linux/arm64"):
        archive.choose(NAME, "arm64")


@pytest.mark.parametrize(
    ("name", "mirror", "expected"),
    [
        (NAME, "registry.example.org", "registry.example.org/nvidia/tensorrt-llm/release:1.2.1"),
        (NAME, "10.0.0.1:5000/ngc/", "10.0.0.1:5000/ngc/nvidia/tensorrt-llm/release:1.2.1"),
        ("vllm/vllm-openai:v0.31.0", "mirror.local", "mirror.local/vllm/vllm-openai:v0.31.0"),
        ("docker.io/vllm/vllm-openai:v0.31.0", "mirror.local", "mirror.local/vllm/vllm-openai:v0.31.0"),
    ],
)
def test_a_mirror_replaces_the_registry_only(name: str, mirror: str, expected: str) -> None:
    assert archives.mirrored(name, mirror) == expected
