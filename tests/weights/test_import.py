"""Weights without a way to the hub: from a directory or an archive, to the same verified state."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import SHARD, Fetcher, RunningHub


@pytest.fixture
def bundle(fetcher: Fetcher, tmp_path: Path) -> Path:
    """An archive made on a machine with a way to the hub; that machine's cache is moved away."""
    fetcher.fetch(encodings=True)
    archive = tmp_path / "gpt-oss-120b.tar"
    done = fetcher.run("bundle", f"--output={archive}", encodings=True)
    assert done.returncode == 0, done.stderr
    shutil.move(fetcher.directory, tmp_path / "connected")
    return archive


@pytest.fixture
def alone(fetcher: Fetcher, hub: RunningHub, bundle: Path) -> Fetcher:
    """A host that reaches no hub and has no client for one."""
    hub.mend()
    fetcher.python = (*fetcher.python, "-S")
    fetcher.environment["HF_ENDPOINT"] = "http://hub.invalid"
    return fetcher


def unpacked(bundle: Path, where: Path) -> Path:
    with tarfile.open(bundle) as archive:
        archive.extractall(where, filter="data")
    return where


def same_but_origin(one: Path, other: Path) -> bool:
    def facts(path: Path) -> Any:
        marker = json.loads(path.read_text())
        return [(e["path"], e["size"], e["sha256"]) for e in marker["files"]], marker["ignore_patterns"]

    return bool(facts(one) == facts(other))


@pytest.mark.parametrize("how", ["archive", "compressed", "directory", "cache"])
def test_ends_in_the_same_verified_state(
    alone: Fetcher, bundle: Path, tmp_path: Path, how: str, hub: RunningHub
) -> None:
    source: Path = bundle
    more: list[str] = []
    if how == "compressed":
        source = tmp_path / "bundle.tar.gz"
        with tarfile.open(source, "w:gz") as archive:
            for path in unpacked(bundle, tmp_path / "plain").iterdir():
                archive.add(path, path.name)
    elif how == "directory":
        source = unpacked(bundle, tmp_path / "plain")
    elif how == "cache":  # somebody's Hugging Face cache with a manifest beside it, encodings in place
        source = tmp_path / "connected" / "weights"
        shutil.copytree(tmp_path / "connected" / "encodings", source / "encodings")
        more = [f"--manifest={unpacked(bundle, tmp_path / 'plain') / 'manifest.json'}"]
    alone.fetch(f"--from={source}", *more, encodings=True)
    alone.assert_complete()
    assert hub.requests == []
    there = tmp_path / "connected" / "weights" / alone.model.name / "verified" / f"{alone.revision}.json"
    assert same_but_origin(alone.marker, there)
    assert (alone.directory / "encodings" / "o200k_base.tiktoken").is_file()
    assert alone.fetch(encodings=True)["changed"] is False


def test_without_a_client_the_remedy_is_named(alone: Fetcher) -> None:
    message = alone.fails()
    assert "huggingface_hub is not installed" in message
    assert "--from a directory or archive" in message


def flip(path: Path, at: int = 5000) -> None:
    body = bytearray(path.read_bytes())
    body[at] ^= 0xFF
    path.write_bytes(body)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: flip(d / SHARD), "is damaged: its sha256 should be"),
        (lambda d: (d / SHARD).write_bytes(b"short"), "is cut short"),
        (lambda d: (d / SHARD).unlink(), f"has no file {SHARD}"),
        (lambda d: (d / "manifest.json").unlink(), "manifest.json cannot be read"),
        (lambda d: (d / "manifest.json").write_text("{"), "is not JSON"),
        (lambda d: edit(d / "manifest.json", lambda m: m.update(format_version=9)), "not a manifest of format 1"),
        (lambda d: edit(d / "manifest.json", lambda m: m.update(revision="0" * 40)), "revision is '000"),
        (lambda d: edit(d / "manifest.json", lambda m: m.update(repository="a/b")), "repository is 'a/b'"),
        (lambda d: edit(d / "manifest.json", lambda m: m.update(files=[])), "lists no file"),
        (lambda d: edit(d / "manifest.json", lambda m: m["files"][0].update(sha256="x")), "has no size or no sha256"),
        (lambda d: edit(d / "manifest.json", lambda m: m["files"][0].update(path="../../etc/passwd")), "plain path"),
        (lambda d: edit(d / "manifest.json", lambda m: m["files"][0].update(path="/etc/passwd")), "plain path"),
        (lambda d: flip(d / "encodings" / "o200k_base.tiktoken", 10), "o200k_base.tiktoken"),
    ],
)
def test_a_source_that_is_not_right_is_refused(
    alone: Fetcher, bundle: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    source = unpacked(bundle, tmp_path / "source")
    damage(source)
    assert words in alone.fails(f"--from={source}", encodings=True)
    alone.assert_nothing_visible()


@pytest.mark.parametrize("after", [SHARD, "config.json", "manifest.json"])
def test_an_archive_that_was_cut_between_two_files_is_refused(alone: Fetcher, bundle: Path, after: str) -> None:
    """No file in it is short; that others are gone is known before the first of them is copied."""
    with tarfile.open(bundle) as archive:
        member = archive.getmember(after)
    blocks = -(-member.size // tarfile.BLOCKSIZE)
    bundle.write_bytes(bundle.read_bytes()[: member.offset_data + blocks * tarfile.BLOCKSIZE])
    assert "is not a whole tar archive: it has no end mark. Copy it again" in alone.fails(f"--from={bundle}")
    alone.assert_nothing_visible()
    assert not list(alone.work.rglob("*.safetensors"))


@pytest.mark.parametrize("source", ["directory", "archive"])
@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_file_that_is_missing_or_short_is_known_before_the_first_is_copied(
    alone: Fetcher, bundle: Path, tmp_path: Path, source: str, harm: str
) -> None:
    directory = unpacked(bundle, tmp_path / "source")
    smallest = directory / "special_tokens_map.json"
    if harm == "missing":
        smallest.unlink()
    else:
        smallest.write_text("{")
    given = directory
    if source == "archive":
        given = tmp_path / "again.tar"
        with tarfile.open(given, "w") as archive:
            for path in directory.iterdir():
                archive.add(path, path.name)
    message = alone.fails(f"--from={given}", encodings=True)
    assert ("has no file special_tokens_map.json" if harm == "missing" else "it has 1 bytes") in message
    assert not list(alone.work.rglob("*.safetensors"))


@pytest.mark.parametrize("how", ["cut", "noise", "empty", "absent", "damaged"])
def test_an_archive_that_is_not_whole_is_refused(alone: Fetcher, bundle: Path, how: str) -> None:
    if how == "cut":
        bundle.write_bytes(bundle.read_bytes()[:2_000_000])
    elif how == "noise":
        bundle.write_bytes(b"not an archive" * 1000)
    elif how == "empty":
        bundle.write_bytes(b"")
    elif how == "absent":
        bundle.unlink()
    else:
        flip(bundle, 1_000_000)
    message = alone.fails(f"--from={bundle}", encodings=True)
    expected = {"absent": "does not exist", "damaged": "is damaged"}.get(how, "is not a whole tar archive")
    assert expected in message
    assert str(bundle) in message
    alone.assert_nothing_visible()


def test_only_verified_weights_are_bundled(fetcher: Fetcher, tmp_path: Path) -> None:
    fetcher.fetch()
    (fetcher.snapshot / SHARD).write_bytes(b"changed")
    done = fetcher.run("bundle", f"--output={tmp_path / 'x.tar'}")
    assert done.returncode == 1
    assert "is not verified here" in done.stderr
    assert not list(tmp_path.glob("x.tar*"))
