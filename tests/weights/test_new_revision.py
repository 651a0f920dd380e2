"""A second revision beside the one that is served: what it costs, and that the first one keeps serving."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from tests.plugins.conftest import RunModule, run_module
from tests.stand_ins.hub import content
from tests.stand_ins.hub.server import Fault

from .conftest import MODEL, SHARD, Fetcher, RunningHub, wait_for

__all__ = ["run_module"]  # the fixture

CHANGED = "model-00000-of-00002.safetensors"


@pytest.fixture
def newer(hub: RunningHub) -> Iterator[RunningHub]:
    """The hub with another commit of the model: a changed configuration and one changed shard, the rest as before."""

    def changed(file: content.HubFile) -> content.HubFile:
        if file.path not in ("config.json", CHANGED):
            return file
        return content.HubFile(file.path, file.content[:-1] + b"!", file.lfs)

    other = content.Repository(MODEL, tuple(changed(file) for file in hub.repository.files))
    assert other.revision != hub.repository.revision
    before = hub.state.repositories[MODEL]
    yield dataclasses.replace(hub, repository=other)
    for state in (hub.state, hub.cdn):
        state.repositories[MODEL] = before


def switch(newer: RunningHub) -> None:
    """From here on the hub has the newer commit alone, and has been asked nothing."""
    newer.mend()
    for state in (newer.state, newer.cdn):
        state.repositories[MODEL] = newer.repository


@pytest.fixture
def second(fetcher: Fetcher, newer: RunningHub) -> Fetcher:
    """Fetches the newer revision into the cache that holds the older one."""
    fetcher.fetch()
    switch(newer)
    return dataclasses.replace(fetcher, hub=newer, revision=newer.repository.revision)


def complete(fetcher: Fetcher) -> None:
    found = {str(p.relative_to(fetcher.snapshot)): p.read_bytes() for p in fetcher.snapshot.rglob("*") if p.is_file()}
    assert found == {file.path: file.content for file in fetcher.hub.files}
    assert fetcher.check()["verified"] is True
    assert not fetcher.work.exists()


def test_what_the_older_revision_has_as_well_is_not_fetched_again(fetcher: Fetcher, second: Fetcher) -> None:
    result = second.fetch()
    complete(second)
    fresh = {path: len(second.hub.repository.by_path[path].content) for path in ("config.json", CHANGED)}
    assert second.hub.bytes_sent == result["transferred_bytes"] == sum(fresh.values())
    assert (second.snapshot / SHARD).stat().st_ino == (fetcher.snapshot / SHARD).stat().st_ino
    assert fetcher.check()["verified"] is True


def test_a_file_that_the_older_revision_has_damaged_is_fetched_and_not_written_over(
    fetcher: Fetcher, second: Fetcher
) -> None:
    old = fetcher.snapshot / SHARD
    before = old.stat()
    damaged = bytes(before.st_size)
    old.write_bytes(damaged)
    os.utime(old, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a drive does it, unseen
    second.fetch()
    complete(second)
    assert old.read_bytes() == damaged
    assert second.hub.bytes_of(SHARD) == before.st_size


def test_a_file_that_is_cut_never_grows_into_the_other_revisions(fetcher: Fetcher, second: Fetcher) -> None:
    """A second name of a file that is too short is given up rather than written to."""
    old = fetcher.snapshot / "config.json"
    partial = second.work / "partial" / CHANGED
    partial.parent.mkdir(parents=True)
    os.link(old, partial)
    before = old.read_bytes()
    second.fetch()
    complete(second)
    assert old.read_bytes() == before


def test_the_name_leads_to_the_older_revision_until_a_server_starts_with_the_newer(
    fetcher: Fetcher, second: Fetcher
) -> None:
    second.fetch()
    assert (second.model / "refs" / "main").read_text() == fetcher.revision
    found = snapshot_download(MODEL, cache_dir=second.directory / "weights", local_files_only=True)
    assert Path(found) == fetcher.snapshot
    second.hub.mend()
    assert second.fetch()["changed"] is False
    assert second.hub.requests == []


def test_a_name_that_leads_to_something_unverified_leads_to_what_is_verified(fetcher: Fetcher, second: Fetcher) -> None:
    fetcher.marker.unlink()
    second.fetch()
    assert (second.model / "refs" / "main").read_text() == second.revision


def test_a_disk_that_fills_up_on_the_way_leaves_the_older_revision_serving(
    fetcher: Fetcher, newer: RunningHub, small_disk: Path
) -> None:
    fetcher.directory = small_disk / "cache"
    fetcher.fetch()
    before = {path: path.stat().st_mtime_ns for path in fetcher.snapshot.rglob("*")}
    switch(newer)
    second = dataclasses.replace(fetcher, hub=newer, revision=newer.repository.revision)
    newer.break_(Fault("throttle", f"/lfs/*{CHANGED}", times=-1, bytes_per_second=200_000))
    process = second.start()
    wait_for(lambda: any((second.work / "partial").glob("*.safetensors")), "the first bytes")
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(65536))
    _, message = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "The disk filled up meanwhile" in message
    assert not second.snapshot.exists()
    assert fetcher.check()["verified"] is True
    assert {path: path.stat().st_mtime_ns for path in fetcher.snapshot.rglob("*")} == before
    assert (fetcher.model / "refs" / "main").read_text() == fetcher.revision
    (small_disk / "filler").unlink()
    newer.mend()
    second.fetch()
    complete(second)


def test_no_room_names_the_bytes_and_the_revisions_that_could_go(fetcher: Fetcher, second: Fetcher) -> None:
    oldest = "1" * 40
    shutil.copytree(fetcher.snapshot, fetcher.snapshot.with_name(oldest))
    marker = json.loads(fetcher.marker.read_text())
    fetcher.marker.with_name(f"{oldest}.json").write_text(json.dumps(marker | {"revision": oldest}))
    room = 10**15
    message = second.fails(f"--keep-free-bytes={room}")
    fresh = sum(len(second.hub.repository.by_path[path].content) for path in ("config.json", CHANGED))
    assert f"{fresh + room} bytes are needed ({fresh} to bring" in message
    assert f"these could go: {oldest} ({second.hub.size} bytes)" in message
    assert fetcher.revision not in message, "the one that is served is not offered"
    assert fetcher.check()["verified"] is True


def test_no_room_leaves_a_snapshot_that_has_to_be_checked_where_it_is(fetcher: Fetcher) -> None:
    fetcher.fetch()
    os.utime(fetcher.snapshot / SHARD)
    assert "are missing" in fetcher.fails(f"--keep-free-bytes={10**15}")
    assert (fetcher.snapshot / SHARD).is_file()


def test_an_end_between_marker_and_snapshot_is_healed_without_a_byte(fetcher: Fetcher, hub: RunningHub) -> None:
    """As a power cut leaves it that came while the snapshot was about to get its name."""
    fetcher.fetch()
    hub.mend()
    fetcher.work.mkdir(parents=True)
    fetcher.snapshot.rename(fetcher.work / "files")
    (fetcher.model / "refs" / "main").unlink()
    assert fetcher.check()["verified"] is False
    fetcher.fetch()
    fetcher.assert_complete()
    assert hub.bytes_sent == 0


def test_what_two_revisions_share_stays_when_the_older_goes(
    fetcher: Fetcher, second: Fetcher, run_module: RunModule, tmp_path: Path
) -> None:
    second.fetch()
    described = tmp_path / "etc" / "processes" / "0" / "process.json"
    described.parent.mkdir(parents=True)
    described.write_text(json.dumps({"snapshot": str(second.snapshot)}))
    (second.model / "refs" / "main").write_text(second.revision)
    arguments = {
        "directory": str(second.directory),
        "repository": MODEL,
        "revision": second.revision,
        "keep": 0,
        "configuration_directory": str(tmp_path / "etc"),
    }
    with (second.snapshot / SHARD).open("rb"):  # the server that runs has it open, under its own name
        result = run_module("model_revisions", arguments)
    assert [entry["revision"] for entry in result["removed"]] == [fetcher.revision]
    assert result["freed_bytes"] == sum(
        len(fetcher.hub.repository.by_path[path].content) for path in ("config.json", CHANGED)
    )
    complete(second)
    assert not fetcher.snapshot.exists()
    assert not fetcher.marker.exists()
