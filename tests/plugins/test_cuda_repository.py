"""The CUDA repository of a host: its address, its key, and where a checksum is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError

from tests.programs import load

ROOT = Path(__file__).resolve().parents[2]
RELEASES = yaml.safe_load((ROOT / "serving_catalog/data/releases.yml").read_text())
NVIDIA = RELEASES["repositories"]["cuda"]
UBUNTU_CHECKSUM = RELEASES["cuda_keyring"]["checksums"]["ubuntu2404/x86_64"]


@pytest.fixture(scope="module")
def cuda_repository() -> Callable[..., dict[str, Any]]:
    found: Callable[..., dict[str, Any]] = load("plugins/filter/cuda_repository.py").cuda_repository
    return found


def survey(distribution: str | None, architecture: str) -> dict[str, Any]:
    return {
        "os": {"repository": distribution, "name": "a distribution"},
        "architecture": {"cuda_repository": architecture, "machine": architecture},
    }


@pytest.mark.parametrize(
    ("distribution", "architecture", "address"),
    [
        ("debian12", "x86_64", f"{NVIDIA}/debian12/x86_64/"),
        ("ubuntu2204", "x86_64", f"{NVIDIA}/ubuntu2204/x86_64/"),
        ("ubuntu2404", "sbsa", f"{NVIDIA}/ubuntu2404/sbsa/"),
    ],
)
def test_the_address_names_distribution_and_architecture(
    cuda_repository: Any, distribution: str, architecture: str, address: str
) -> None:
    wanted = cuda_repository(survey(distribution, architecture), RELEASES, NVIDIA)
    repository = wanted["repositories"][0]
    assert repository["uris"] == [address]
    assert repository["keyring_package"]["url"] == f"{address}cuda-keyring_1.1-1_all.deb"
    assert f"/etc/apt/sources.list.d/cuda-{distribution}-{architecture}.list" in wanted["stale_files"]


def test_a_checksum_is_taken_from_the_catalog_for_nvidias_own_address_only(cuda_repository: Any) -> None:
    def checksum(*arguments: Any, **more: Any) -> Any:
        wanted = cuda_repository(survey("ubuntu2404", "x86_64"), RELEASES, *arguments, **more)
        return wanted["repositories"][0]["keyring_package"].get("sha256")

    assert checksum(NVIDIA) == checksum(NVIDIA + "/") == UBUNTU_CHECKSUM
    assert checksum("http://mirror.example/cuda") is None
    assert checksum(NVIDIA, keyring_url="http://mirror.example/keyring.deb") is None
    assert checksum("http://mirror.example/cuda", keyring_sha256="ab" * 32) == "ab" * 32


def test_a_host_without_a_repository_is_refused(cuda_repository: Any) -> None:
    with pytest.raises(AnsibleFilterError, match="allowed: Debian 12, Ubuntu"):
        cuda_repository(survey(None, "x86_64"), RELEASES, NVIDIA)
