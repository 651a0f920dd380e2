"""The drivers as fixtures: each test of a stack runs in process, and on the real engine where there is one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes import scenario
from tests.kubernetes.cluster import DYNAMO_CRDS, Cluster
from tests.kubernetes.drivers import Driver, InProcess, RealEngine
from tests.kubernetes.scenario import TARGETS, Target
from tests.stand_ins.dynamo_platform import pack, published
from tests.stand_ins.dynamo_platform.releases import ChartReleases

DRIVERS = ["in-process", "real-engine"]
VERSION = "1.2.1"  # the catalog's default


def _driver(name: str, directory: Path, in_process: Any) -> Driver:
    if name == "in-process":
        return in_process  # type: ignore[no-any-return]
    if reason := RealEngine.missing():
        pytest.skip(f"the real engine's half: {reason}")
    return RealEngine(directory)


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Driver:
    return _driver(request.param, tmp_path / "pulumi", InProcess())


@pytest.fixture(params=DRIVERS)
def scenario_driver(request: pytest.FixtureRequest, tmp_path: Path) -> Driver:
    """Charts included."""
    return _driver(request.param, tmp_path / "pulumi", InProcess(ChartReleases(), speed=scenario.SPEED))


@pytest.fixture(params=list(TARGETS))
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


@pytest.fixture(scope="session")
def charts(dynamo_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A catalog overlay with which the release's chart is the stand-in, fetched over HTTP like NVIDIA's."""
    directory = tmp_path_factory.mktemp("charts")
    archive = pack(VERSION, DYNAMO_CRDS.glob("*.yaml"), directory)
    with published(archive, directory / "overlay") as overlay:
        yield overlay


@pytest.fixture
def stack_namespace(dynamo_cluster: Cluster) -> Iterator[str]:
    """A name for the namespace that a stack makes; whatever is in it goes when the test ends."""
    name = f"stack-{secrets.token_hex(3)}"
    yield name
    scenario.clean(dynamo_cluster, name)
