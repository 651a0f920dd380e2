"""Fetching from a hub: what is brought, what is left behind when it goes wrong, what a second run costs."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import signal
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from huggingface_hub import snapshot_download

from tests.stand_ins.hub.server import Fault

from .conftest import MODEL, SHARD, TOKEN, Fetcher, RunningHub, wait_for


def partial_bytes(fetcher: Fetcher) -> int:
    """Bytes under way. A file that is finished while they are counted moves on."""
    found = 0
    for path in (fetcher.work / "partial").rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size if path.is_file() else 0
    return found


# -- the ordinary run --


def test_brings_everything_but_the_other_copies(fetcher: Fetcher, hub: RunningHub) -> None:
    result = fetcher.fetch(encodings=True)
    fetcher.assert_complete()
    assert (
        result["transferred_bytes"]
        == hub.size
        == hub.bytes_sent - sum(len(body) for body in hub.state.encodings.values())
    )
    assert not [r for r in hub.requests if "original" in r["path"] or "metal" in r["path"]]
    for encoding in hub.encodings():
        body = (fetcher.directory / "encodings" / encoding["file"]).read_bytes()
        assert hashlib.sha256(body).hexdigest() == encoding["sha256"]


def test_an_engine_offline_finds_the_model_by_its_name(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher.fetch()
    found = snapshot_download(MODEL, cache_dir=fetcher.directory / "weights", local_files_only=True)
    assert Path(found) == fetcher.snapshot


def test_marker_lists_every_file_with_size_time_and_checksum(fetcher: Fetcher, hub: RunningHub) -> None:
    fetcher.fetch()
    marker = json.loads(fetcher.marker.read_text())
    assert marker["repository"] == MODEL
    assert marker["revision"] == hub.repository.revision
    by_path = {entry["path"]: entry for entry in marker["files"]}
    assert set(by_path) == {file.path for file in hub.files}
    for file in hub.files:
        status = (fetcher.snapshot / file.path).stat()
        assert by_path[file.path]["sha256"] == file.sha256
        assert (by_path[file.path]["size"], by_path[file.path]["mtime_ns"]) == (status.st_size, status.st_mtime_ns)
        assert status.st_mode & 0o777 == 0o644
    assert by_path["config.json"]["git_sha1"] == hub.repository.by_path["config.json"].git_oid


def test_second_run_asks_nobody(fetcher: Fetcher, hub: RunningHub) -> None:
    fetcher.fetch(encodings=True)
    hub.mend()
    assert fetcher.fetch(encodings=True)["changed"] is False
    assert hub.requests == []


def test_check_reads_no_weights(fetcher: Fetcher) -> None:
    fetcher.fetch()
    shard = fetcher.snapshot / SHARD
    before = shard.stat()
    shard.write_bytes(bytes(before.st_size))
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fetcher.check()["verified"] is True, "content was read, or something else than name, size and time"


def test_token_goes_to_the_hub_and_not_to_the_cdn(fetcher: Fetcher, hub: RunningHub) -> None:
    fetcher.environment["HF_TOKEN"] = TOKEN
    hub.state.tokens[TOKEN] = []
    fetcher.fetch()
    assert all(r["authenticated"] for r in hub.state.requests)
    assert hub.cdn.requests
    assert not any(r["authenticated"] for r in hub.cdn.requests)


def test_no_token_of_the_host_is_used(fetcher: Fetcher, hub: RunningHub, tmp_path: Path) -> None:
    (tmp_path / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / ".cache" / "huggingface" / "token").write_text(TOKEN)
    fetcher.environment |= {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / ".cache" / "huggingface")}
    fetcher.environment["HF_HUB_OFFLINE"] = "1"  # a setting for servers must not stop the fetch either
    fetcher.fetch()
    assert not any(r["authenticated"] for r in hub.requests)


# -- cut, slow and broken connections --


def test_a_cut_costs_no_byte_twice(fetcher: Fetcher, hub: RunningHub) -> None:
    hub.break_(Fault("cut", f"/lfs/*{SHARD}", after_bytes=300_001), Fault("cut", f"/lfs/*{SHARD}", after_bytes=77))
    fetcher.fetch()
    fetcher.assert_complete()
    assert hub.bytes_of(SHARD) == len(hub.repository.by_path[SHARD].content)


def test_the_next_run_goes_on_where_this_one_was_cut(fetcher: Fetcher, hub: RunningHub) -> None:
    hub.break_(Fault("cut", f"/lfs/*{SHARD}", after_bytes=500_000))
    hub.break_(Fault("status", f"/lfs/*{SHARD}", times=-1))
    message = fetcher.fails("--attempts=1")
    assert "broke off at byte 500000" in message
    fetcher.assert_nothing_visible()
    hub.state.faults.clear()
    hub.cdn.faults.clear()
    result = fetcher.fetch()
    fetcher.assert_complete()
    assert result["found_bytes"] > 0
    assert hub.bytes_sent == hub.size


def test_twenty_random_cuts_end_in_a_verified_copy(fetcher: Fetcher, hub: RunningHub) -> None:
    chance = random.Random(20)
    hub.break_(*(Fault("cut", "/lfs/*.safetensors", after_bytes=chance.randrange(1, 200_000)) for _ in range(20)))
    fetcher.environment["ATTEMPTS"] = "3"
    fetcher.fetch()
    fetcher.assert_complete()
    assert hub.bytes_sent == hub.size
    assert all(fault.times == 0 for fault in hub.cdn.faults)


def test_a_server_that_cannot_resume_is_read_from_the_start(fetcher: Fetcher, hub: RunningHub) -> None:
    path = "config.json"
    partial = fetcher.work / "partial" / path
    partial.parent.mkdir(parents=True)
    partial.write_bytes(hub.repository.by_path[path].content[:100])
    fetcher.fetch()
    fetcher.assert_complete()


def test_a_busy_hub_and_a_silent_one_are_asked_again(fetcher: Fetcher, hub: RunningHub) -> None:
    hub.break_(
        Fault("status", "/api/*", status=503),
        Fault("status", "*config.json", status=429),
        Fault("hang", f"/lfs/*{SHARD}", after_bytes=1000, seconds=4),
    )
    fetcher.fetch("--timeout=1")
    fetcher.assert_complete()


def test_progress_can_be_followed(fetcher: Fetcher, hub: RunningHub, tmp_path: Path) -> None:
    hub.break_(Fault("throttle", "/lfs/*.safetensors", times=-1, bytes_per_second=250_000))
    progress = tmp_path / "progress.json"
    process = fetcher.start(f"--progress-file={progress}", "--progress-interval=1")
    states = []

    def saw_the_middle() -> bool:
        with contextlib.suppress(OSError):
            states.append(json.loads(progress.read_text()))
        return bool(states) and 0 < states[-1]["bytes_done"] < states[-1]["bytes_total"]

    wait_for(saw_the_middle)
    _, lines = process.communicate(timeout=120)
    assert states[-1]["bytes_total"] == hub.size
    assert json.loads(progress.read_text())["state"] == "done"
    assert "MiB of 3.2 MiB" in lines
    assert "/s" in lines
    assert "left" in lines


# -- damage --


def test_a_damaged_file_is_named_removed_and_alone_fetched_again(fetcher: Fetcher, hub: RunningHub) -> None:
    hub.break_(Fault("corrupt", f"/lfs/*{SHARD}", after_bytes=123_456))
    message = fetcher.fails()
    assert SHARD in message
    assert hub.repository.by_path[SHARD].sha256 in message
    fetcher.assert_nothing_visible()
    assert not (fetcher.work / "partial" / SHARD).exists()
    hub.mend()
    fetcher.fetch()
    fetcher.assert_complete()
    assert hub.bytes_sent == len(hub.repository.by_path[SHARD].content)


def test_small_files_are_verified_too(fetcher: Fetcher, hub: RunningHub) -> None:
    hub.break_(Fault("corrupt", "*/resolve/*/config.json"))
    message = fetcher.fails()
    assert "config.json" in message
    assert hub.repository.by_path["config.json"].git_oid in message


def test_a_damaged_encoding_is_refused(fetcher: Fetcher, hub: RunningHub) -> None:
    hub.break_(Fault("corrupt", "/encodings/o200k*"))
    assert "o200k_base.tiktoken" in fetcher.fails(encodings=True)
    fetcher.assert_nothing_visible()
    assert not (fetcher.directory / "encodings" / "o200k_base.tiktoken").exists()


def test_a_sign_in_page_is_not_taken_for_a_file(fetcher: Fetcher, hub: RunningHub) -> None:
    hub.break_(Fault("html", f"/lfs/*{SHARD}", times=-1))
    assert "sign-in page" in fetcher.fails()
    fetcher.assert_nothing_visible()
    hub.mend()
    hub.break_(Fault("html", "/api/*", times=-1))
    assert "sign-in page" in fetcher.fails()


# -- ends in the middle --


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_end_in_the_middle_leaves_nothing_visible(fetcher: Fetcher, hub: RunningHub, how: signal.Signals) -> None:
    hub.break_(Fault("throttle", "/lfs/*.safetensors", times=-1, bytes_per_second=150_000))
    process = fetcher.start()
    wait_for(lambda: partial_bytes(fetcher) > 100_000)
    process.send_signal(how)
    _, words = process.communicate(timeout=120)
    assert process.returncode != 0
    if how is signal.SIGTERM:
        assert "stopped by signal 15" in words
    fetcher.assert_nothing_visible()
    hub.mend()
    assert fetcher.fetch()["found_bytes"] > 100_000
    fetcher.assert_complete()


def test_two_fetches_of_one_model_do_not_meet(fetcher: Fetcher, hub: RunningHub) -> None:
    hub.break_(Fault("throttle", "/lfs/*.safetensors", times=-1, bytes_per_second=20_000))
    first = fetcher.start()
    wait_for(lambda: partial_bytes(fetcher) > 0)
    assert "another fetch of openai/gpt-oss-120b is at work" in fetcher.fails()
    hub.hurry()
    first.communicate(timeout=120)
    fetcher.assert_complete()


# -- repairs --


def test_a_changed_file_takes_the_snapshot_out_of_sight_and_is_mended(fetcher: Fetcher, hub: RunningHub) -> None:
    fetcher.fetch()
    hub.mend()
    (fetcher.snapshot / SHARD).write_bytes(b"something else")
    assert "has changed since it was verified" in fetcher.check()["problems"][0]
    fetcher.fetch()
    fetcher.assert_complete()
    assert hub.bytes_sent == len(hub.repository.by_path[SHARD].content), "only the changed file is fetched"


def test_a_file_of_the_right_size_and_the_wrong_content_is_mended(fetcher: Fetcher, hub: RunningHub) -> None:
    fetcher.fetch()
    hub.mend()
    shard = fetcher.snapshot / SHARD
    size = shard.stat().st_size
    with shard.open("rb") as as_a_server_has_it:
        before = as_a_server_has_it.read()
        shard.write_bytes(bytes(size))
        fetcher.fetch()
        as_a_server_has_it.seek(0)
        assert len(as_a_server_has_it.read()) == len(before), "an open file was cut under its reader"
    fetcher.assert_complete()
    assert hub.bytes_sent == size


@pytest.mark.parametrize("what", ["marker", "added", "missing", "link", "ref", "touched"])
def test_whatever_disagrees_with_the_marker_is_found_and_put_right(
    fetcher: Fetcher, hub: RunningHub, what: str
) -> None:
    fetcher.fetch()
    hub.mend()
    shard = fetcher.snapshot / SHARD
    if what == "marker":
        fetcher.marker.unlink()
    elif what == "added":
        (fetcher.snapshot / "added.py").write_text("import os")
    elif what == "missing":
        (fetcher.snapshot / "config.json").unlink()
    elif what == "link":
        shard.rename(fetcher.directory / "elsewhere")
        shard.symlink_to(fetcher.directory / "elsewhere")
    elif what == "ref":
        (fetcher.model / "refs" / "main").write_text("0" * 40)
    else:
        os.utime(shard)
    assert fetcher.check()["verified"] is False
    fetcher.fetch()
    fetcher.assert_complete()
    if what in ("marker", "added", "ref", "touched"):
        assert hub.bytes_sent == 0, "what is here and right is not fetched again"


def test_half_done_downloads_of_other_revisions_go_only_when_asked(fetcher: Fetcher) -> None:
    other = fetcher.work.with_name("1" * 40) / "partial" / "x"
    other.parent.mkdir(parents=True)
    other.write_text("half")
    fetcher.fetch()
    assert other.exists()
    (fetcher.snapshot / "added").write_text("")
    fetcher.fetch("--remove-stale-staging")
    assert not other.exists()


# -- refusals --


def no_file_was_asked_for(hub: RunningHub) -> bool:
    return not [r for r in hub.requests if "/resolve/" in r["path"] or "/lfs/" in r["path"]]


@pytest.mark.parametrize("revision", ["main", "v1", "7E5832491EAAF4EE41F1A28FD647FB042775CDA9", "abc123", "0" * 41])
def test_a_revision_that_is_not_a_commit_is_refused(fetcher: Fetcher, hub: RunningHub, revision: str) -> None:
    fetcher.revision = revision
    message = fetcher.fails()
    assert f"revision: '{revision}' is not a pinned commit" in message
    assert "40 lower-case hexadecimal digits" in message
    assert hub.requests == []
    assert not fetcher.directory.exists()


def test_a_revision_that_the_hub_does_not_have(fetcher: Fetcher) -> None:
    fetcher.revision = "0" * 40
    assert f"has no revision {'0' * 40}" in fetcher.fails()
    fetcher.assert_nothing_visible()


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_repository_that_does_not_exist(fetcher: Fetcher, hub: RunningHub, token: str) -> None:
    fetcher.repository = "openai/gpt-oss-999b"
    if token:
        fetcher.environment["HF_TOKEN"] = token
        hub.state.tokens[token] = []
    message = fetcher.fails()
    assert f"{hub.url}/openai/gpt-oss-999b does not exist, or is private" in message
    assert TOKEN not in message


def test_a_wrong_token_is_named_and_never_shown(fetcher: Fetcher, hub: RunningHub, tmp_path: Path) -> None:
    fetcher.environment["HF_TOKEN"] = TOKEN
    hub.state.tokens["hf_another"] = []
    message = fetcher.fails(f"--progress-file={tmp_path / 'progress'}")
    assert "refused the token in HF_TOKEN (status 401)" in message
    assert TOKEN not in message
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_gated_model_says_what_to_do(fetcher: Fetcher, hub: RunningHub, token: str) -> None:
    hub.state.gated.add(MODEL)
    if token:
        hub.state.tokens[token] = []
        fetcher.environment["HF_TOKEN"] = token
    message = fetcher.fails()
    assert "is gated" in message
    assert "HF_TOKEN" in message
    assert ("no token was given" in message) == (not token)
    hub.state.tokens[TOKEN] = [MODEL]
    fetcher.environment["HF_TOKEN"] = TOKEN
    fetcher.fetch()
    fetcher.assert_complete()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://hub.invalid"])
def test_a_hub_that_is_not_there_is_named(fetcher: Fetcher, url: str) -> None:
    fetcher.environment["HF_ENDPOINT"] = url
    message = fetcher.fails("--attempts=2")
    assert f"{url} cannot be reached" in message
    fetcher.assert_nothing_visible()


@pytest.mark.parametrize("url", ["hub.example", "ftp://hub.example", "https://user:pw@hub.example"])
def test_an_endpoint_that_is_no_address_is_refused(fetcher: Fetcher, url: str) -> None:
    fetcher.environment["HF_ENDPOINT"] = url
    assert "endpoint: " in fetcher.fails()


def test_a_disk_that_is_too_small_is_found_before_the_first_byte(fetcher: Fetcher, hub: RunningHub) -> None:
    room = 10**15
    message = fetcher.fails(f"--keep-free-bytes={room}")
    assert f"{hub.size + room} bytes are needed" in message
    assert "are missing" in message
    assert no_file_was_asked_for(hub)
    fetcher.assert_nothing_visible()


# -- real small and read-only filesystems --


def test_a_disk_that_fills_up_meanwhile_keeps_what_has_arrived(
    fetcher: Fetcher, hub: RunningHub, small_disk: Path
) -> None:
    fetcher.directory = small_disk
    hub.break_(Fault("throttle", "/lfs/*.safetensors", times=-1, bytes_per_second=300_000))
    process = fetcher.start()
    wait_for(lambda: partial_bytes(fetcher) > 200_000)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as handle:
        while True:
            handle.write(bytes(65536))
    _, message = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "No space left on device. The disk filled up meanwhile" in message
    assert "Traceback" not in message
    fetcher.assert_nothing_visible()
    filler.unlink()
    hub.mend()
    assert fetcher.fetch()["found_bytes"] > 200_000
    fetcher.assert_complete()


def test_a_filesystem_too_small_for_the_model(fetcher: Fetcher, hub: RunningHub, small_disk: Path) -> None:
    fetcher.directory = small_disk
    (small_disk / "other").write_bytes(bytes(4_000_000))
    message = fetcher.fails()
    assert f"{hub.size} bytes are needed" in message
    assert no_file_was_asked_for(hub)


def test_a_read_only_cache_is_a_clear_error(fetcher: Fetcher, small_disk: Path) -> None:
    fetcher.directory = small_disk
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    message = fetcher.fails()
    assert "Read-only file system" in message
    assert "must be writable" in message


def test_a_filesystem_without_locks_is_refused(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No such filesystem can be mounted here: Lustre without -o flock answers so."""

    def flock(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(program.fcntl, "flock", flock)
    layout = program.Layout(tmp_path, tmp_path, tmp_path, MODEL, "0" * 40)
    with pytest.raises(program.FetchError, match=r"has no locks .*Lustre: -o flock") as refused:
        program.try_lock(0, layout)
    assert refused.value.kind in program.PERMANENT


def test_nothing_can_be_put_right_by_another_run(fetcher: Fetcher, hub: RunningHub) -> None:
    hub.state.tokens["hf_another"] = []
    fetcher.environment["HF_TOKEN"] = TOKEN
    assert fetcher.run("fetch").returncode == 3
    hub.mend()
    hub.break_(Fault("status", "/api/*", times=-1))
    assert fetcher.run("fetch", "--attempts=1").returncode == 1
