"""Dynamo's releases and the targets as data: complete, cited, and checked like the rest of the catalog."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serving_catalog import Catalog, CatalogError, load_catalog
from serving_catalog.graphs.words import mirrored, size_of, tag_of
from serving_catalog.schema import load_schema
from tests.catalog.graph_fixtures import TARGETS, options, plan

OverlayWriter = Callable[[dict[str, Any]], Path]

# ai-dynamo/dynamo docs/fern/components/releases.data.ts, and the extras of the wheels.
PINS = {
    "1.0.2": ("1.3.0rc5.post1", "0.16.0"),
    "1.1.0": ("1.3.0rc11", "0.19.0"),
    "1.1.1": ("1.3.0rc11", "0.19.0"),
    "1.2.0": ("1.3.0rc14", "0.20.1"),
    "1.2.1": ("1.3.0rc14", "0.20.1"),
    "1.3.0": ("1.3.0rc19", "0.23.0"),
    "1.3.1": ("1.3.0rc19", "0.23.0"),
    "1.4.0": ("1.3.0rc22", "0.26.0"),
    "1.4.1": ("1.3.0rc22", "0.26.0"),
    "1.4.2": ("1.3.0rc22", "0.26.0"),
    "1.5.0": ("1.3.0rc25", "0.28.0"),
    "1.5.1": ("1.3.0rc25", "0.28.0"),
    "1.6.0": ("1.3.0rc29", "0.31.0"),
    "1.6.1": ("1.3.0rc29", "0.31.0"),
}


def test_releases_hold_the_engines_that_upstream_pins(catalog: Catalog) -> None:
    assert {
        name: (release.engines["tensorrt_llm"].version, release.engines["vllm"].version)
        for name, release in catalog.dynamo.releases.items()
    } == PINS


def test_a_release_is_one_version_for_chart_and_images(catalog: Catalog) -> None:
    for name, release in catalog.dynamo.releases.items():
        assert release.chart_version == release.image_tag == name


def test_what_changed_between_releases_is_known(catalog: Catalog) -> None:
    releases = catalog.dynamo.releases
    assert [name for name, release in releases.items() if release.nats_by_default][-1] == "1.3.1"
    assert [name for name, release in releases.items() if release.event_plane == "nats"][-1] == "1.2.1"
    assert next(name for name, release in releases.items() if "v1beta1" in release.graph_versions) == "1.2.0"
    assert [name for name, release in releases.items() if "allgather" not in release.workarounds] == ["1.0.2"]


def test_an_option_listing_of_another_release_is_said_to_be_one(catalog: Catalog) -> None:
    for release in catalog.dynamo.releases.values():
        for engine, inside in release.engines.items():
            listing = load_schema(engine, inside.option_schema.removeprefix(f"{engine}-"))
            assert (inside.schema_note is None) == (listing.release == inside.version)


def test_plans_say_how_near_the_listing_is() -> None:
    assert any("checked against TensorRT-LLM 1.2.1, the nearest" in note for note in plan("gb200-agg").notes)
    assert not any("checked against" in note for note in plan("h200-agg", release="1.6.1").notes)


@pytest.mark.parametrize("release", [name for name in PINS if name >= "1.2"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_is_planned_with_every_release_that_serves_graphs(target: str, release: str) -> None:
    made = plan(target, release=release)
    assert made.release == release
    assert made.runtime_image.endswith(f":{release}")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"dynamo": {"default_release": "9.9.9"}}, "default_release: '9.9.9' is not one of releases: 1.0.2"),
        (
            {"dynamo": {"releases": {"1.6.1": {"workarounds": ["x"]}}}},
            "releases.1.6.1.workarounds: 'x' is not one of: allgather",
        ),
        ({"graphs": {"gb200-agg": {"gpu": "GB300"}}}, "graphs.gb200-agg.gpu: 'GB300' is not one of: B200, GB200, H200"),
        ({"graphs": {"gb200-agg": {"gpus": 4}}}, "graphs.gb200-agg.gpus: Extra inputs are not permitted"),
        (
            {"graphs": {"gb200-agg": {"workers": {"main": {}}}}},
            "graphs.gb200-agg.workers.main.[key]: Input should be 'worker', 'prefill' or 'decode'",
        ),
    ],
)
def test_bad_data_is_refused(overlay: OverlayWriter, files: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError) as raised:
        load_catalog(overlay(files))
    assert message in str(raised.value)


def test_another_release_is_one_entry(overlay: OverlayWriter, catalog: Catalog) -> None:
    newer = catalog.dynamo.releases["1.6.1"].model_dump(mode="json")
    newer.update(chart_version="1.7.0", image_tag="1.7.0", source="a release to come")
    made = plan("gb200-agg", release="1.7.0", catalog=load_catalog(overlay({"dynamo": {"releases": {"1.7.0": newer}}})))
    assert made.runtime_image == "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:1.7.0"


def test_another_target_is_one_entry(overlay: OverlayWriter, catalog: Catalog) -> None:
    """Half a tray with the seed's options: two GPUs of a GB200 tray."""
    half = catalog.graphs["gb200-agg"].model_dump(mode="json")
    half.update(graph_name="gpt-oss-half", source="ours")
    half["workers"]["worker"]["gpus"] = 2
    half["workers"]["worker"]["settings"].update(tensor_parallel_size=2, moe_expert_parallel_size=2)
    made = plan("gb200-half", catalog=load_catalog(overlay({"graphs": {"gb200-half": half}})))
    assert (made.name, made.gpus, options(made)["tensor_parallel_size"]) == ("gpt-oss-half", 2, 2)


@pytest.mark.parametrize(
    ("quantity", "size"),
    [("100Gi", 100 * 2**30), ("1.5Ti", int(1.5 * 2**40)), ("65G", 65 * 10**9), ("123", 123), ("2000m", 2)],
)
def test_quantities(quantity: str, size: int) -> None:
    assert size_of(quantity) == size


@pytest.mark.parametrize(
    ("image", "mirror", "expected"),
    [
        ("nvcr.io/nvidia/x:1", "registry:5000", "registry:5000/nvidia/x:1"),
        ("python:3.12-slim", "registry", "registry/library/python:3.12-slim"),
        ("bitnami/x:1", "registry", "registry/bitnami/x:1"),
        ("localhost/x:1", "registry/path", "registry/path/x:1"),
        ("host:5000/a/b@sha256:0", "registry", "registry/a/b@sha256:0"),
        ("python:3.12-slim", None, "python:3.12-slim"),
    ],
)
def test_mirrored_images_keep_their_path(image: str, mirror: str | None, expected: str) -> None:
    assert mirrored(image, mirror) == expected


@pytest.mark.parametrize(
    ("image", "tag"),
    [("a/b:1.2.1", "1.2.1"), ("host:5000/a", ""), ("a@sha256:00", ""), ("a:1@sha256:00", "1"), ("host:5000/a:x", "x")],
)
def test_tags_are_read_as_the_operator_reads_them(image: str, tag: str) -> None:
    assert tag_of(image) == tag
