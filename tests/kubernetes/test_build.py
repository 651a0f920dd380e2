"""Programs are built once, whole or not at all, and what is missing is said plainly."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from tests.left_out import without_tools

from . import build
from .fixtures import REQUIRED

needs_go = pytest.mark.skipif(shutil.which("go") is None, reason="go is not on PATH")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    directory.mkdir()
    monkeypatch.setattr(build, "CACHE", directory)
    return directory


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the module that a test may change."""
    copy = tmp_path / "binaries"
    shutil.copytree(build.MODULE, copy)
    monkeypatch.setattr(build, "MODULE", copy)
    return copy


def test_without_go_the_message_names_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(build.GoMissingError, match=rf"go: not found on PATH; .* Go {build.required_go()} or newer"):
        build.build()


def test_what_is_built_needs_no_go(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    (cache / build.key()).mkdir()
    monkeypatch.setenv("PATH", "")
    assert build.build().directory == cache / build.key()


@needs_go
def test_a_toolchain_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch, module: Path) -> None:
    go_mod = (module / "go.mod").read_text()
    (module / "go.mod").write_text(go_mod.replace(f"\ngo {build.required_go()}\n", "\ngo 1.99.0\n"))
    monkeypatch.setenv("GOTOOLCHAIN", "local")
    with pytest.raises(build.KubernetesError, match=r"(?s)needs 1\.99\.0 or newer.*GOTOOLCHAIN=auto"):
        build.build()


@needs_go
def test_a_build_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(build, "PROGRAMS", {"etcd": "example.invalid/nothing"})
    with pytest.raises(build.KubernetesError, match=r"example\.invalid/nothing"):
        build.build()
    assert [path.name for path in cache.iterdir()] == ["build.lock"]


@needs_go
def test_a_build_that_was_cut_is_not_taken_for_whole(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    (cache / "building-cut").mkdir()
    (cache / "building-cut" / "kube-apiserver").touch()
    assert build.programs() is None
    monkeypatch.setattr(build, "PROGRAMS", {"etcd": "example.invalid/nothing"})
    with pytest.raises(build.KubernetesError):
        build.build()
    assert not (cache / "building-cut").exists()


@needs_go
def test_a_second_process_waits_for_the_first_and_builds_nothing(cache: Path) -> None:
    found: list[build.Programs] = []
    second = threading.Thread(target=lambda: found.append(build.build()))
    with build._locked():
        second.start()
        second.join(timeout=1)
        assert second.is_alive()
        (cache / build.key()).mkdir()
    second.join(timeout=120)
    assert [programs.directory for programs in found] == [cache / build.key()]


@pytest.mark.parametrize("file", ["go.mod", "go.sum"])
def test_another_requirement_is_another_build(module: Path, file: str) -> None:
    before = build.key()
    with (module / file).open("a") as opened:
        opened.write("\n")
    assert build.key() != before


def test_every_program_is_a_tool_of_the_module() -> None:
    tools = (build.MODULE / "go.mod").read_text().split("tool (", 1)[1].split(")", 1)[0].split()
    assert sorted(tools) == sorted(build.PROGRAMS.values())


SOME = ("tests/kubernetes/test_control_plane.py", "jobs_complete or unknown_fields")


def test_without_go_tests_of_the_cluster_are_skipped_with_one_line(tmp_path: Path) -> None:
    outcomes, said = without_tools(*SOME, tmp_path, GPT_OSS_KUBERNETES_CACHE=str(tmp_path / "nothing"))
    assert outcomes == ["skipped"]
    assert "SKIPPED [2] " in said
    assert "go: not found on PATH" in said


def test_where_the_cluster_is_required_they_fail(tmp_path: Path) -> None:
    required = {REQUIRED: "1", "GPT_OSS_KUBERNETES_CACHE": str(tmp_path / "nothing")}
    outcomes, said = without_tools(*SOME, tmp_path, **required)
    assert outcomes == ["error"]
    assert "go: not found on PATH" in said
    assert f"({REQUIRED} is set)" in said
