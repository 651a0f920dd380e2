"""Old revisions of a model: which stay, which go, and when nothing is touched."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.plugins.conftest import RunModule, run_module

from .conftest import MODEL, ROOT, Fetcher, RunningHub
from .test_plays import Plays, weights_role

__all__ = ["run_module"]  # the fixture

OLDEST, OLDER, OLD, SERVED = ("1" * 40, "2" * 40, "3" * 40, "a" * 40)


class Cache:
    """A model cache with revisions as fetch_weights leaves them, and the host's processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "cache"
        self.configuration = directory / "etc"
        self.model = self.directory / "weights" / "models--openai--gpt-oss-120b"
        self.staging = self.directory / "staging" / self.model.name
        (self.directory / "staging").mkdir(parents=True)

    def bring(self, *names: str) -> None:
        for name in names:
            shard = self.snapshot(name) / "model.safetensors"
            shard.parent.mkdir(parents=True)
            shard.write_bytes(name.encode() * 100)
            marker = {
                "format_version": 1,
                "repository": MODEL,
                "revision": name,
                "source": "a hub",
                "checked_at": f"2026-01-{int(name[0], 16):02}T12:00:00Z",
                "ignore_patterns": [],
                "files": [{"path": shard.name, "size": 4000, "mtime_ns": shard.stat().st_mtime_ns, "sha256": "0" * 64}],
            }
            self.marker(name).parent.mkdir(exist_ok=True)
            self.marker(name).write_text(json.dumps(marker))

    def serve(self, name: str, process: str = "0") -> None:
        described = self.configuration / "processes" / process / "process.json"
        described.parent.mkdir(parents=True, exist_ok=True)
        described.write_text(json.dumps({"snapshot": str(self.snapshot(name))}))
        (self.model / "refs").mkdir(exist_ok=True)
        (self.model / "refs" / "main").write_text(name)

    def snapshot(self, name: str) -> Path:
        return self.model / "snapshots" / name

    def marker(self, name: str) -> Path:
        return self.model / "verified" / f"{name}.json"

    @property
    def names(self) -> list[str]:
        """Revisions that are there, each with its marker."""
        snapshots = sorted(path.name for path in (self.model / "snapshots").iterdir())
        assert snapshots == sorted(path.stem for path in (self.model / "verified").iterdir())
        return snapshots

    def arguments(self, keep: int, revision: str = SERVED) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            "repository": MODEL,
            "revision": revision,
            "keep": keep,
            "configuration_directory": str(self.configuration),
        }


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    """Three older revisions beside the one that is served."""
    made = Cache(tmp_path)
    made.bring(OLDEST, OLDER, OLD, SERVED)
    made.serve(SERVED)
    return made


@pytest.mark.parametrize(
    ("keep", "stay"), [(3, [OLDEST, OLDER, OLD]), (2, [OLDER, OLD]), (1, [OLD]), (0, []), (9, [OLDEST, OLDER, OLD])]
)
def test_the_oldest_go_and_are_listed(cache: Cache, run_module: RunModule, keep: int, stay: list[str]) -> None:
    going = [name for name in (OLDEST, OLDER, OLD) if name not in stay]
    told = run_module("model_revisions", cache.arguments(keep), check=True)
    assert cache.names == [OLDEST, OLDER, OLD, SERVED]
    done = run_module("model_revisions", cache.arguments(keep))
    assert cache.names == [*stay, SERVED]
    for result in (told, done):
        assert [entry["revision"] for entry in result["removed"]] == going
        assert result["changed"] == bool(going)
        assert result["freed_bytes"] == 4000 * len(going)
        if going:
            assert [line.split()[0] for line in result["diff"]["before"].splitlines()] == [OLDEST, OLDER, OLD, SERVED]
            assert [line.split()[0] for line in result["diff"]["after"].splitlines()] == [*stay, SERVED]
    assert not cache.staging.exists()
    again = run_module("model_revisions", cache.arguments(keep))
    assert not again["changed"]
    assert again["removed"] == []


def test_what_an_engine_process_is_set_up_with_stays(cache: Cache, run_module: RunModule) -> None:
    cache.serve(OLDEST, process="1")
    cache.serve(SERVED)
    result = run_module("model_revisions", cache.arguments(0))
    assert cache.names == [OLDEST, SERVED]
    assert result["in_use"][OLDEST] == "an engine process is set up with it"


def test_what_the_name_leads_to_stays(cache: Cache, run_module: RunModule) -> None:
    (cache.model / "refs" / "main").write_text(OLDER)
    result = run_module("model_revisions", cache.arguments(0))
    assert cache.names == [OLDER, SERVED]
    assert result["in_use"][OLDER] == "the model's name leads to it"


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_what_a_process_has_open_stays(cache: Cache, run_module: RunModule, how: str) -> None:
    with (cache.snapshot(OLDEST) / "model.safetensors").open("rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ)
        if how == "mapped":
            handle.close()
        result = run_module("model_revisions", cache.arguments(0))
        assert cache.names == [OLDEST, SERVED]
        assert result["in_use"][OLDEST] == "a process has it open"
        mapped.close()
    assert run_module("model_revisions", cache.arguments(0))["removed"][0]["revision"] == OLDEST


def test_check_mode_speaks_of_the_time_when_the_new_revision_serves(cache: Cache, run_module: RunModule) -> None:
    coming = "b" * 40
    told = run_module("model_revisions", cache.arguments(1, revision=coming), check=True)
    assert [entry["revision"] for entry in told["removed"]] == [OLDEST, OLDER, OLD]
    cache.bring(coming)
    cache.serve(coming)
    done = run_module("model_revisions", cache.arguments(1, revision=coming))
    assert done["removed"] == told["removed"]
    assert cache.names == [SERVED, coming]


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("not verified", "model.safetensors has changed since it was verified"),
        ("not there", f"{'b' * 40} is not verified here: there is no snapshot"),
        ("not served", f"no engine process on this host is set up with {SERVED}"),
        ("fetching", f"a fetch of {MODEL} is at work"),
    ],
)
def test_nothing_goes_before_the_new_revision_serves(cache: Cache, run_module: RunModule, why: str, words: str) -> None:
    revision = SERVED
    if why == "not verified":
        os.utime(cache.snapshot(SERVED) / "model.safetensors")
    elif why == "not there":
        revision = "b" * 40
    elif why == "not served":
        cache.serve(OLD)
    with (cache.directory / "staging" / f"{cache.model.name}.lock").open("w") as lock:
        if why == "fetching":
            fcntl.flock(lock, fcntl.LOCK_EX)
        result = run_module("model_revisions", cache.arguments(0, revision=revision))
    assert cache.names == [OLDEST, OLDER, OLD, SERVED]
    assert not result["changed"]
    assert words in result["skipped_because"]
    assert words in str(result["warnings"])


def test_what_others_put_there_is_left_alone(cache: Cache, run_module: RunModule) -> None:
    foreign = cache.snapshot("f" * 40)
    foreign.mkdir()
    (foreign / "model.safetensors").write_text("by hand")
    other = cache.model.with_name("models--openai--gpt-oss-20b")
    shutil.copytree(cache.model, other)
    half_done = cache.staging / ("c" * 40) / "partial" / "x"
    half_done.parent.mkdir(parents=True)
    half_done.write_text("half")
    run_module("model_revisions", cache.arguments(0))
    assert sorted(path.name for path in cache.snapshot("").iterdir()) == [SERVED, "f" * 40]
    assert len(list((other / "snapshots").iterdir())) == 5
    assert half_done.exists()


def test_a_removal_that_was_cut_off_is_finished(cache: Cache, run_module: RunModule) -> None:
    cache.staging.mkdir()
    cache.snapshot(OLDEST).rename(cache.staging / f"{OLDEST}.removed")  # the power went before the marker did
    cache.snapshot(OLDER).rename(cache.staging / f"{OLDER}.removed")
    cache.marker(OLDER).unlink()
    result = run_module("model_revisions", cache.arguments(1))
    assert result["changed"]
    assert cache.names == [OLD, SERVED]
    assert not cache.staging.exists()


@pytest.mark.parametrize("content", ["", "{}", "[]"])
def test_a_description_that_cannot_be_read_stops_it(cache: Cache, run_module: RunModule, content: str) -> None:
    broken = cache.configuration / "processes" / "1" / "process.json"
    broken.parent.mkdir()
    broken.write_text(content)
    result = run_module("model_revisions", cache.arguments(0))
    assert result["failed"]
    assert "nothing was removed" in result["msg"]
    assert cache.names == [OLDEST, OLDER, OLD, SERVED]


def test_a_number_below_nothing_is_refused(cache: Cache, run_module: RunModule) -> None:
    result = run_module("model_revisions", cache.arguments(-1))
    assert result["msg"] == "keep: -1 is not allowed; expected 0 or more"


# -- in a play --


def test_the_playbook_removes_only_after_the_endpoint_has_answered(
    fetcher: Fetcher, hub: RunningHub, tmp_path: Path
) -> None:
    """The tasks of playbooks/serve.yml that follow the check of the endpoint, with its answers."""
    fetcher.fetch()
    cache = Cache.__new__(Cache)
    cache.directory, cache.model, cache.configuration = fetcher.directory, fetcher.model, tmp_path / "etc"
    cache.bring(OLDEST, OLDER)
    cache.serve(fetcher.revision)
    plays = Plays(tmp_path)
    role = weights_role(
        fetcher, hub, tmp_path, model_weights_servers_directory=str(cache.configuration), model_weights_keep=1
    )
    role["model_weights_model"] |= {"encodings": []}
    after = yaml.safe_load((ROOT / "playbooks" / "serve.yml").read_text())[-1]["tasks"]

    def served(answer: dict[str, Any] | None) -> list[dict[str, Any]]:
        facts = {"serving_plan": {"model": role["model_weights_model"]}}
        facts |= {"endpoint_check": answer} if answer is not None else {}
        known = {"name": "What earlier tasks found", "ansible.builtin.set_fact": {**facts, "cacheable": True}}
        alone = {name: value for name, value in role.items() if name != "model_weights_model"}
        handed = {"name": "Inputs", "ansible.builtin.set_fact": alone}
        return [known, handed, *plays.role("model_weights", role), *after]

    for answer in (None, {"ok": False}):
        run = plays.run(served(answer))
        assert run.status == 0, run.output
        assert not run.changed
        assert cache.names == sorted([OLDEST, OLDER, fetcher.revision])
    told = plays.run(served({"ok": True}), "--check", "--diff")
    assert f"-{OLDEST} (4000 bytes" in told.output
    assert cache.names == sorted([OLDEST, OLDER, fetcher.revision])
    run = plays.run(served({"ok": True}))
    assert run.status == 0, run.output
    assert run.changed
    assert "Prune | " in run.output
    assert cache.names == sorted([OLDER, fetcher.revision])
    again = plays.run(served({"ok": True}))
    assert not again.changed
    assert "Prune | " not in again.output, "the host is asked though there is nothing to remove"
