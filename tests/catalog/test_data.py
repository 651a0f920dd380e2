"""The data files: nothing unknown, everything cited, exact names; and an operator's overlay over them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import serving_catalog
from serving_catalog import Catalog, CatalogError, HostPlan, load_catalog

Planner = Callable[..., HostPlan]
OverlayWriter = Callable[[dict[str, Any]], Path]

PACKAGE = Path(serving_catalog.__file__).parent


def sources(value: object) -> list[str]:
    if isinstance(value, dict):
        own = [value["source"]] if "source" in value else []
        return own + [s for below in value.values() for s in sources(below)]
    if isinstance(value, list):
        return [s for below in value for s in sources(below)]
    return []


@pytest.mark.parametrize("file", sorted((PACKAGE / "data").rglob("*.yml")), ids=lambda file: file.stem)
def test_every_file_cites_its_sources(file: Path) -> None:
    cited = sources(yaml.safe_load(file.read_text(encoding="utf-8")))
    assert cited
    assert all(isinstance(source, str) and len(source) > 5 for source in cited)


@pytest.mark.parametrize("entry", ["models", "gpus", "platforms", "encodings", "traffic"])
def test_an_entry_without_a_source_is_refused(overlay: OverlayWriter, entry: str) -> None:
    with pytest.raises(CatalogError, match=rf"{entry}\.new\.source: Field required"):
        load_catalog(overlay({entry: {"new": {}}}))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"gpus": {"H200": {"colour": "green"}}}, "gpus.H200.colour: Extra inputs are not permitted (found 'green')"),
        (
            {"engines/vllm": {"container": {"prot": 8000}}},
            "engines.vllm.container.prot: Extra inputs are not permitted (found 8000)",
        ),
        (
            {"engines/vllm": {"releases": {"0.31.0": {"profiles": {"low_latency": {"setings": {}}}}}}},
            "engines.vllm.releases.0.31.0.profiles.low_latency.setings: Extra inputs are not permitted",
        ),
        ({"releases": {"drivers": {}}}, "releases.drivers: Extra inputs are not permitted"),
        (
            {"models": {"gpt-oss-120b": {"revision": "main"}}},
            "models.gpt-oss-120b: Value error, revision: 'main' is not 40 lower-case hex digits; "
            "pin the commit, not a branch or tag",
        ),
        (
            {"models": {"gpt-oss-120b": {"revision": "B5C939DE8F754692C1647CA79FBF85E8C1E70F8A"}}},
            "models.gpt-oss-120b: Value error, revision: 'B5C939DE8F754692C1647CA79FBF85E8C1E70F8A' is not 40 "
            "lower-case hex digits; pin the commit, not a branch or tag",
        ),
        (
            {"releases": {"nvidia_driver": {"branch": "550", "version": "550.54.15"}}},
            "releases.nvidia_driver: Value error, branch: 550 is below 570, the oldest that drives these GPUs",
        ),
        (
            {"releases": {"nvidia_driver": {"version": "595.91.07"}}},
            "releases.nvidia_driver: Value error, version: 595.91.07 is not of branch 580",
        ),
        (
            {"models": {"gpt-oss-120b": {"size_bytes": "65 GB"}}},
            "models.gpt-oss-120b.size_bytes: Input should be a valid integer (found '65 GB')",
        ),
        (
            {"models": {"gpt-oss-120b": {"encodings": ["o300k_base"]}}},
            "models.gpt-oss-120b.encodings: 'o300k_base' is not one of: o200k_base, cl100k_base",
        ),
        (
            {"platforms": {"hgx_h200": {"gpus": ["H300"]}}},
            "platforms.hgx_h200.gpus: 'H300' is not one of: B200, GB200, H200",
        ),
        (
            {"gpus": {"B200": {"names": ["NVIDIA B200", "NVIDIA H200"]}}},
            "gpus: the name NVIDIA H200 is claimed twice",
        ),
        (
            {"engines/vllm": {"default_release": "9.9.9"}},
            "engines.vllm: Value error, default_release: '9.9.9' is not one of releases: 0.31.0, 0.22.0",
        ),
        ({"engines/sglang": {}}, "engines/sglang.yml: the catalog has no file of this name; allowed: dynamo.yml, "),
        ({"gpu": {}}, "gpu.yml: the catalog has no file of this name; allowed: dynamo.yml, "),
    ],
)
def test_bad_data_is_refused(overlay: OverlayWriter, files: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError) as raised:
        load_catalog(overlay(files))
    assert message in str(raised.value)


def test_an_overlay_says_which_file_is_not_yaml(tmp_path: Path) -> None:
    (tmp_path / "gpus.yml").write_text("a: [", encoding="utf-8")
    with pytest.raises(CatalogError, match=r"gpus\.yml: not YAML"):
        load_catalog(tmp_path)
    (tmp_path / "gpus.yml").write_text("- a", encoding="utf-8")
    with pytest.raises(CatalogError, match=r"gpus\.yml: expected a mapping, found list"):
        load_catalog(tmp_path)
    with pytest.raises(CatalogError, match="the catalog overlay is not a directory"):
        load_catalog(tmp_path / "nowhere")


def test_an_overlay_merges_deeply(overlay: OverlayWriter, catalog: Catalog) -> None:
    changed = load_catalog(
        overlay(
            {
                "models": {"gpt-oss-120b": {"revision": "0" * 40, "size_bytes": 4194304}},
                "releases": {"repositories": {"cuda": "http://10.0.0.2/apt/cuda"}},
                "engines/tensorrt_llm": {"releases": {"1.2.1": {"image": "registry.example:5000/trtllm:1.2.1"}}},
            }
        )
    )
    assert changed.models["gpt-oss-120b"].revision == "0" * 40
    assert changed.models["gpt-oss-120b"].repository == "openai/gpt-oss-120b"
    assert changed.releases.repositories.cuda == "http://10.0.0.2/apt/cuda"
    assert changed.releases.repositories.docker == catalog.releases.repositories.docker
    assert changed.lookup("engines.tensorrt_llm.releases.1.2.1.image") == "registry.example:5000/trtllm:1.2.1"
    assert catalog.models["gpt-oss-120b"].revision != "0" * 40


def test_another_gpu_is_one_entry(overlay: OverlayWriter, plan: Planner) -> None:
    """An H100 served like an H200: an entry in gpus.yml and the counts that serve it."""
    h100 = {
        "names": ["NVIDIA H100 80GB HBM3"],
        "pci_device_ids": {"2330": "NVIDIA H100 80GB HBM3"},
        "memory_bytes": 85520809984,
        "architecture": "hopper",
        "compute_capability": "9.0",
        "cpu_architecture": "x86_64",
        "open_modules": "recommended",
        "source": "pci.ids",
    }
    counts = {"gpu_counts": {"low_latency": {"H100": {"counts": [4]}}}}
    made = plan(overlay=overlay({"gpus": {"H100": h100}, "engines/tensorrt_llm": counts}), gpu="H100")
    assert made.processes[0].options_file["moe_config"] == {"backend": "TRITON"}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GH200", None),
        ("H200", None),
        ("NVIDIA B200 ", None),
        ("nvidia h200", None),
        ("NVIDIA GB300", None),
    ],
)
def test_names_match_exactly(catalog: Catalog, name: str, key: str | None) -> None:
    assert catalog.gpu_named(name) == key


@pytest.mark.parametrize(
    ("device_id", "key"),
    [("2335", "H200"), ("0x2335", "H200"), ("233B", "H200"), ("2901", "B200"), ("2941", "GB200"), ("2330", None)],
)
def test_pci_ids_match_exactly(catalog: Catalog, device_id: str, key: str | None) -> None:
    assert catalog.gpu_with_device_id(device_id) == key


def test_platforms_need_the_daemons_of_their_fabric(catalog: Catalog) -> None:
    daemons = {name: (p.fabric_manager, p.nvlsm, p.imex) for name, p in catalog.platforms.items()}
    assert daemons == {
        "hgx_h200": (True, False, False),
        "hgx_b200": (True, True, False),
        "gb200_nvl72": (False, False, True),
        "gb200_nvl4": (False, False, False),
        "h200_nvl": (False, False, False),
    }


def test_blackwell_requires_open_modules(catalog: Catalog) -> None:
    for gpu in catalog.gpus.values():
        assert gpu.open_modules == ("required" if gpu.architecture == "blackwell" else "recommended")
    for platform in catalog.platforms.values():
        assert {catalog.gpus[name].open_modules for name in platform.gpus} == {platform.open_modules}


def test_package_buckets_cover_every_branch_once(catalog: Catalog) -> None:
    for buckets in (catalog.packages.cuda_repo, catalog.packages.distro):
        for branch in range(catalog.releases.nvidia_driver.minimum_branch, 700):
            assert len([b for b in buckets if b.from_branch <= branch <= b.to_branch]) == 1


@pytest.mark.parametrize(
    ("branch", "open_modules", "fabric_manager", "pinning"),
    [
        (570, ("nvidia-open-{branch}",), ("nvidia-fabricmanager-{branch}",), ()),
        (580, ("nvidia-open",), ("nvidia-fabricmanager",), ("nvidia-driver-pinning-{version}",)),
        (595, ("nvidia-open",), ("nvidia-fabricmanager",), ("nvidia-driver-pinning-{version}",)),
    ],
)
def test_package_names_follow_the_branch(
    catalog: Catalog,
    branch: int,
    open_modules: tuple[str, ...],
    fabric_manager: tuple[str, ...],
    pinning: tuple[str, ...],
) -> None:
    (bucket,) = [b for b in catalog.packages.cuda_repo if b.from_branch <= branch <= b.to_branch]
    assert (bucket.driver_open, bucket.fabric_manager, bucket.pinning) == (open_modules, fabric_manager, pinning)


def test_toolkit_packages_go_together(catalog: Catalog) -> None:
    assert set(catalog.releases.nvidia_container_toolkit.packages) == {
        "nvidia-container-toolkit",
        "nvidia-container-toolkit-base",
        "libnvidia-container-tools",
        "libnvidia-container1",
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("releases.nvidia_driver.branch", "580"),
        ("releases.cuda_toolkit.package", "cuda-toolkit-12-8"),
        ("engines.tensorrt_llm.releases.1.2.1.image", "nvcr.io/nvidia/tensorrt-llm/release:1.2.1"),
        ("engines.vllm.releases.0.22.0.architectures.1", "aarch64"),
        ("platforms.hgx_b200.nvlsm", True),
    ],
)
def test_lookup(catalog: Catalog, path: str, value: object) -> None:
    assert catalog.lookup(path) == value


def test_lookup_says_what_there_is(catalog: Catalog) -> None:
    with pytest.raises(CatalogError) as raised:
        catalog.lookup("releases.nvidia_drver.version")
    assert str(raised.value).startswith(
        "releases.nvidia_drver.version: there is no 'nvidia_drver' in releases (did you mean nvidia_driver?); it holds:"
    )
    with pytest.raises(CatalogError, match="it holds: nothing: it is a single value"):
        catalog.lookup("releases.nvidia_driver.version.major")


def test_entries_cannot_be_changed(catalog: Catalog) -> None:
    with pytest.raises(Exception, match="frozen"):
        catalog.models["gpt-oss-120b"].revision = "x"  # type: ignore[misc]


def test_the_package_is_pure() -> None:
    """No process, network or clock: the planner answers the same for the same data."""
    banned = {"subprocess", "socket", "urllib", "http", "requests", "httpx", "time", "datetime", "random", "os"}
    for file in (*PACKAGE.glob("*.py"), *PACKAGE.glob("graphs/*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {name.split(".")[0] for name in names} & banned, file.name
