"""Compile caches: kept apart by image, and those of earlier images go when they are superfluous."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from serving_catalog import load_catalog
from serving_catalog.docker import Layout, cache_directories
from serving_catalog.planning import plan_host
from serving_catalog.plans import Process, ServeRequest, image_key
from tests.programs import load

DIGESTS = ["registry.example.org/tensorrt-llm@sha256:" + digit * 64 for digit in "01"]


def process(engine: str) -> Process:
    request = ServeRequest(engine=engine, profile="low_latency", gpu="H200", gpu_count=4)
    return plan_host(request, load_catalog()).processes[0]


def directories(of: Process, image: str) -> dict[str, str]:
    layout = Layout(cache_directory="/var/lib/gpt-oss", configuration_directory="/etc/gpt-oss")
    return cache_directories(of.model_copy(update={"image": image}), layout)


@pytest.mark.parametrize("engine", ["tensorrt_llm", "vllm"])
def test_two_builds_of_one_tag_share_no_cache(engine: str) -> None:
    first, second = (set(directories(process(engine), image).values()) for image in DIGESTS)
    assert first
    assert not first & second
    assert all(path.startswith("/var/lib/gpt-oss/engine_caches/") for path in first | second)


@pytest.mark.parametrize(
    ("engine", "kept"),
    [("tensorrt_llm", {"triton", "cuda", "flashinfer"}), ("vllm", {"vllm", "triton", "cuda", "flashinfer"})],
)
def test_what_engines_compile_outlives_their_containers(engine: str, kept: set[str]) -> None:
    """vLLM's own cache holds torch.compile's results and its captured graphs' plans."""
    assert kept <= set(directories(process(engine), DIGESTS[0]))


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    """Compile caches of four images, used one after another."""
    for age, name in enumerate(("current", "last", "older", "oldest")):
        (tmp_path / name / "0" / "triton").mkdir(parents=True)
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    (tmp_path / "a file").touch()
    (tmp_path / "elsewhere").symlink_to("/")
    return tmp_path


def servers(caches: Path | None, kept: int = 1, current: str = "current") -> Any:
    asked = {
        "processes": [],
        "socket": "/nonexistent",
        "watchdog": False,
        "engine_caches": str(caches) if caches else None,
        "engine_cache": current,
        "engine_caches_kept": kept,
    }
    return load("plugins/modules/server_set.py").Servers(asked, False)


@pytest.mark.parametrize(
    ("kept", "superfluous"), [(0, ["last", "older", "oldest"]), (1, ["older", "oldest"]), (2, ["oldest"]), (3, [])]
)
def test_the_last_used_stay_and_the_current_one_always(caches: Path, kept: int, superfluous: list[str]) -> None:
    assert servers(caches, kept).superfluous_caches() == superfluous


def test_nothing_is_superfluous_where_the_current_image_is_not_known(caches: Path) -> None:
    assert servers(caches, current="").superfluous_caches() == []
    assert servers(None).superfluous_caches() == []
    assert servers(caches / "none").superfluous_caches() == []


def test_only_what_is_superfluous_is_removed(caches: Path) -> None:
    found = servers(caches)
    found.prune = found.superfluous_caches()
    assert found.changed
    found.apply()
    assert sorted(path.name for path in caches.iterdir()) == ["a file", "current", "elsewhere", "last"]


def test_the_name_is_the_images_and_one_part_of_a_path() -> None:
    assert image_key(DIGESTS[0]) != image_key(DIGESTS[1])
    assert "/" not in image_key(DIGESTS[0])
