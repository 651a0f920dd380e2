"""file_set on real files: what it writes, what it leaves alone, what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.conftest import RunModule


def snapshot(directory: Path) -> dict[str, tuple[str, int, str]]:
    """Everything below a directory: kind, mode and content or target."""
    found = {}
    for path in sorted(directory.rglob("*")):
        mode = path.lstat().st_mode
        content = str(path.readlink()) if path.is_symlink() else path.read_text() if path.is_file() else ""
        found[str(path.relative_to(directory))] = (
            "link" if path.is_symlink() else "dir" if path.is_dir() else "file",
            mode,
            content,
        )
    return found


@pytest.fixture
def a_set(tmp_path: Path) -> list[dict[str, Any]]:
    return [
        {"path": f"{tmp_path}/etc", "state": "directory", "mode": "0750"},
        {"path": f"{tmp_path}/etc/plain", "content": "one\n", "mode": "0640"},
        {"path": f"{tmp_path}/etc/secret", "content": "TOKEN=hunter2\n", "sensitive": True},
        {"path": f"{tmp_path}/etc/link", "state": "link", "target": "plain"},
        {"path": f"{tmp_path}/etc/daemon.json", "merge": "json", "content": {"a": {"b": 1}}},
        {"path": f"{tmp_path}/gone", "state": "absent"},
    ]


def test_a_first_run_makes_everything_and_a_second_run_changes_nothing(
    run_module: RunModule, tmp_path: Path, a_set: list[dict[str, Any]]
) -> None:
    (tmp_path / "gone").write_text("old\n")
    first = run_module("file_set", {"files": a_set})
    assert first["changed_paths"] == [entry["path"] for entry in a_set]
    made = snapshot(tmp_path)
    assert {name: oct(mode & 0o7777) for name, (_, mode, _) in made.items() if name != "etc/link"} == {
        "etc": "0o750",
        "etc/plain": "0o640",
        "etc/secret": "0o600",
        "etc/daemon.json": "0o644",
    }
    assert made["etc/link"][2] == "plain"
    assert json.loads(made["etc/daemon.json"][2]) == {"a": {"b": 1}}
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "etc").iterdir()}

    second = run_module("file_set", {"files": a_set})
    assert second["changed"] is False
    assert second["changed_paths"] == []
    assert second["diff"] == []
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "etc").iterdir()} == times


def test_check_mode_predicts_the_run_and_touches_nothing(
    run_module: RunModule, tmp_path: Path, a_set: list[dict[str, Any]]
) -> None:
    (tmp_path / "gone").write_text("old\n")
    before = snapshot(tmp_path)
    predicted = run_module("file_set", {"files": a_set}, check=True)
    assert snapshot(tmp_path) == before
    real = run_module("file_set", {"files": a_set})
    assert predicted["changed_paths"] == real["changed_paths"]
    assert predicted["diff"] == real["diff"]


def test_the_diff_shows_contents_and_attributes_but_never_what_is_sensitive(
    run_module: RunModule, tmp_path: Path, a_set: list[dict[str, Any]]
) -> None:
    result = run_module("file_set", {"files": a_set})
    shown = json.dumps(result)
    assert "hunter2" not in shown
    assert {"before": "", "after": "one\n"}.items() <= result["diff"][1].items()

    a_set[1]["mode"] = "0600"
    a_set[2]["content"] = "TOKEN=other-secret\n"
    changed = run_module("file_set", {"files": a_set})
    assert "hunter2" not in json.dumps(changed)
    assert "other-secret" not in json.dumps(changed)
    assert changed["changed_paths"] == [f"{tmp_path}/etc/plain", f"{tmp_path}/etc/secret"]
    assert changed["diff"][0]["before"]["mode"] == "0640"
    assert changed["diff"][0]["after"]["mode"] == "0600"


def test_a_change_of_mode_alone_keeps_the_modification_time(run_module: RunModule, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("x\n")
    os.utime(path, (1_000_000, 1_000_000))
    assert run_module("file_set", {"files": [{"path": str(path), "content": "x\n", "mode": "0600"}]})["changed"]
    assert path.stat().st_mtime == 1_000_000
    assert path.stat().st_mode & 0o777 == 0o600


def test_owner_and_mode_of_a_rewritten_file_stay_as_they_were(run_module: RunModule, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o604)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    run_module("file_set", {"files": [{"path": str(path), "content": "new"}]})
    found = path.stat()
    assert path.read_text() == "new"
    assert (found.st_mode & 0o777) == 0o604
    assert found.st_uid == (65534 if os.geteuid() == 0 else os.geteuid())


@pytest.mark.parametrize(
    ("there", "patch", "expected"),
    [
        (None, {"a": 1}, {"a": 1}),
        ("", {"a": 1}, {"a": 1}),
        ('{"keep": [1], "a": {"x": 1, "y": 2}}', {"a": {"y": 3}}, {"keep": [1], "a": {"x": 1, "y": 3}}),
        ('{"drop": 1, "keep": 2}', {"drop": None}, {"keep": 2}),
        ('{"list": [1, 2]}', {"list": [3]}, {"list": [3]}),
        ('{"a": 1}', '{"b": 2}', {"a": 1, "b": 2}),
    ],
)
def test_json_is_merged_as_rfc_7396_says(
    run_module: RunModule, tmp_path: Path, there: str | None, patch: Any, expected: Any
) -> None:
    path = tmp_path / "daemon.json"
    if there is not None:
        path.write_text(there)
    entry = {"path": str(path), "merge": "json", "content": patch}
    assert run_module("file_set", {"files": [entry]})["changed"]
    assert json.loads(path.read_text()) == expected
    assert not run_module("file_set", {"files": [entry]})["changed"]


def test_a_json_file_that_already_holds_the_values_keeps_its_formatting(run_module: RunModule, tmp_path: Path) -> None:
    path = tmp_path / "daemon.json"
    path.write_text('{"a":1,\n\n"b":   2}')
    assert not run_module("file_set", {"files": [{"path": str(path), "merge": "json", "content": {"a": 1}}]})["changed"]
    assert path.read_text() == '{"a":1,\n\n"b":   2}'


def test_nothing_is_put_in_place_when_one_validation_fails(run_module: RunModule, tmp_path: Path) -> None:
    (tmp_path / "unit.service").write_text("old\n")
    before = snapshot(tmp_path)
    for check in (True, False):
        result = run_module(
            "file_set",
            {
                "files": [
                    {"path": f"{tmp_path}/first", "content": "fine\n"},
                    {"path": f"{tmp_path}/unit.service", "content": "good\n", "validate": "grep -q good %s"},
                    {"path": f"{tmp_path}/bad.service", "content": "broken\n", "validate": "grep good %s"},
                ]
            },
            check=check,
        )
        assert result["failed"]
        assert f"{tmp_path}/bad.service: grep refused the new content (exit status 1)" in result["msg"]
        assert snapshot(tmp_path) == before


def test_the_validator_sees_the_file_under_its_own_name(run_module: RunModule, tmp_path: Path) -> None:
    (tmp_path / "check").write_text('#!/bin/sh\ntest "$(basename "$1")" = name@.service\n')
    (tmp_path / "check").chmod(0o755)
    entry = {"path": f"{tmp_path}/name@.service", "content": "x", "validate": f"{tmp_path}/check %s"}
    assert run_module("file_set", {"files": [entry]})["changed"]


def test_what_a_validator_says_about_a_sensitive_file_is_hidden(run_module: RunModule, tmp_path: Path) -> None:
    entry = {
        "path": f"{tmp_path}/x",
        "content": "hunter2\nline\n",
        "sensitive": True,
        "validate": "grep -c . /nonexistent %s",
    }
    result = run_module("file_set", {"files": [entry]})
    assert result["failed"]
    entry["validate"] = "sh -c 'cat %s; exit 3'"
    result = run_module("file_set", {"files": [entry]})
    assert result["failed"]
    assert "exit status 3" in result["msg"]
    assert "hunter2" not in json.dumps(result)


def test_a_validator_that_is_not_installed_is_an_error_but_only_a_warning_in_check_mode(
    run_module: RunModule, tmp_path: Path
) -> None:
    files = {"files": [{"path": f"{tmp_path}/x", "content": "x", "validate": "no-such-tool %s"}]}
    assert "no command 'no-such-tool'" in run_module("file_set", files)["msg"]
    predicted = run_module("file_set", files, check=True)
    assert predicted["changed"]
    assert "no-such-tool is not installed yet" in str(predicted["warnings"])


def test_a_missing_directory_is_an_error_unless_the_set_makes_it(run_module: RunModule, tmp_path: Path) -> None:
    files = [{"path": f"{tmp_path}/a/b/file", "content": "x"}]
    refused = run_module("file_set", {"files": files})
    assert f"its directory {tmp_path}/a/b does not exist" in refused["msg"]
    assert run_module("file_set", {"files": files}, check=True)["changed"]
    files += [{"path": f"{tmp_path}/a/b", "state": "directory"}, {"path": f"{tmp_path}/a", "state": "directory"}]
    assert run_module("file_set", {"files": files})["changed"]
    assert (tmp_path / "a/b/file").read_text() == "x"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "relative"}, "path must be absolute"),
        ({"path": "/tmp/../etc/x", "content": ""}, "path must be absolute and without '..'"),
        ({"path": "{d}/x", "content": "", "mode": 420}, "mode: 420 is not an octal mode in quotes"),
        ({"path": "{d}/x", "content": "", "mode": "u+x"}, "mode: 'u+x' is not an octal mode"),
        ({"path": "{d}/x", "content": "", "owner": "nobody-here"}, "there is no user 'nobody-here'"),
        ({"path": "{d}/x", "content": {"a": 1}}, "content must be text, found dict"),
        ({"path": "{d}/x"}, "does not exist, and no content is given"),
        ({"path": "{d}/x", "state": "link"}, "target is required for state 'link'"),
        ({"path": "{d}/dir", "content": ""}, "is a directory, not a file"),
        ({"path": "{d}/to-file", "content": ""}, "is a link to file, not a file"),
        ({"path": "{d}/file", "state": "directory"}, "is a file, not a directory"),
        ({"path": "{d}/file", "state": "link", "target": "x"}, "is a file; a link replaces only a link"),
        ({"path": "{d}/x", "state": "directory", "content": "x"}, "content: not used with state 'directory'"),
        ({"path": "{d}/x", "content": "", "validate": "true"}, "must hold %s exactly once"),
        ({"path": "{d}/file", "merge": "json", "content": {}}, "the file on the host is not JSON"),
        ({"path": "{d}/x", "merge": "json", "content": "[1]"}, "content must be a JSON object, found list"),
        ({"path": "/etc", "state": "absent"}, "will not remove a top-level directory"),
        ({"path": "/dev/shm", "state": "absent"}, "something is mounted at /dev/shm"),
    ],
)
def test_a_bad_entry_is_named_with_its_reason_and_the_host_stays_as_it_was(
    run_module: RunModule, tmp_path: Path, entry: dict[str, Any], message: str
) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "file").write_text("not json")
    (tmp_path / "to-file").symlink_to("file")
    before = snapshot(tmp_path)
    entry = {
        key: value.replace("{d}", str(tmp_path)) if isinstance(value, str) else value for key, value in entry.items()
    }
    result = run_module("file_set", {"files": [{"path": f"{tmp_path}/other", "content": "x"}, entry]})
    assert result["failed"]
    assert message in result["msg"]
    assert snapshot(tmp_path) == before


def test_every_problem_is_reported_at_once(run_module: RunModule, tmp_path: Path) -> None:
    files = [{"path": "a", "content": ""}, {"path": f"{tmp_path}/b"}, {"path": f"{tmp_path}/b"}]
    assert len(run_module("file_set", {"files": files})["problems"]) == 3


def test_an_unknown_key_is_an_error_that_lists_the_known_ones(run_module: RunModule, tmp_path: Path) -> None:
    result = run_module("file_set", {"files": [{"path": f"{tmp_path}/x", "contents": "x"}]})
    assert "contents" in result["msg"]
    assert "Supported parameters include" in result["msg"]


def test_a_full_disk_leaves_everything_as_it_was(run_module: RunModule, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], check=True)
    try:
        (tmp_path / "first").write_text("old")
        result = run_module(
            "file_set",
            {
                "files": [
                    {"path": f"{tmp_path}/made", "state": "directory"},
                    {"path": f"{tmp_path}/first", "content": "new"},
                    {"path": f"{tmp_path}/made/big", "content": "x" * 200_000},
                ]
            },
        )
        assert result["failed"]
        assert "No space left on device" in result["msg"]
        assert {path.name for path in tmp_path.rglob("*")} == {"first"}
        assert (tmp_path / "first").read_text() == "old"
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_directory_may_be_a_link_to_one(run_module: RunModule, tmp_path: Path) -> None:
    (tmp_path / "fast-disk").mkdir(mode=0o755)
    (tmp_path / "cache").symlink_to("fast-disk")
    entry = {"path": f"{tmp_path}/cache", "state": "directory", "mode": "0700"}
    assert run_module("file_set", {"files": [entry]})["changed"]
    assert (tmp_path / "cache").is_symlink()
    assert (tmp_path / "fast-disk").stat().st_mode & 0o777 == 0o700
    assert not run_module("file_set", {"files": [entry]})["changed"]


def test_a_directory_is_removed_with_what_is_in_it(run_module: RunModule, tmp_path: Path) -> None:
    (tmp_path / "tree/deep").mkdir(parents=True)
    (tmp_path / "tree/deep/file").write_text("x")
    entry = {"path": f"{tmp_path}/tree", "state": "absent"}
    assert run_module("file_set", {"files": [entry]})["changed"]
    assert not (tmp_path / "tree").exists()
    assert not run_module("file_set", {"files": [entry]})["changed"]
