"""Fixtures for tests that need a Kubernetes API. Known everywhere below tests/; README.md says how to use them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator

import pytest

from tests.left_out import in_one_line, leave_out

from . import build
from .cluster import BUILD, DYNAMO_CRDS, RESTRICTED, Cluster
from .cluster import start as start_cluster

# Set where a missing Go is a mistake of whoever set the machine up: .ci/run.
REQUIRED = "GPT_OSS_REQUIRE_KUBERNETES"


@pytest.fixture(scope="session")
def control_plane_programs() -> build.Programs:
    """etcd, kube-apiserver and the like, built if need be."""
    try:
        return build.build()
    except build.GoMissingError as error:
        reason = str(error)
    if os.environ.get(REQUIRED):
        pytest.fail(f"{reason} ({REQUIRED} is set)", pytrace=False)
    return leave_out(reason)


@pytest.fixture(scope="session")
def cluster(control_plane_programs: build.Programs, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The session's cluster: control plane, nodes, storage classes and, where at hand, Dynamo's definitions."""
    directory = BUILD / f"session-{os.getpid()}"
    _forget_old_sessions()
    failures_before = request.session.testsfailed
    cluster = start_cluster(control_plane_programs, directory)
    try:
        yield cluster
    finally:
        cluster.plane.stop()
        shutil.rmtree(directory / "etcd", ignore_errors=True)  # logs are what is worth keeping
        if request.session.testsfailed == failures_before:
            shutil.rmtree(directory)


def _forget_old_sessions() -> None:
    """Logs of failures are kept for a day."""
    for directory in BUILD.glob("session-*"):
        if directory.stat().st_mtime < time.time() - 86400:
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def dynamo_cluster(cluster: Cluster) -> Cluster:
    """The same cluster, for tests that create Dynamo's objects."""
    if not cluster.has_dynamo:
        leave_out(f"no Dynamo CustomResourceDefinitions in {DYNAMO_CRDS}; DYNAMO_CRDS names another directory")
    return cluster


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of this test's own."""
    with cluster.namespace() as name:
        yield name


@pytest.fixture
def restricted_namespace(cluster: Cluster) -> Iterator[str]:
    """One that admits pods of the restricted Pod Security Standard only."""
    with cluster.namespace(labels=RESTRICTED) as name:
        yield name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Failed tests show the end of the control plane's logs; tests that are left out share one line."""
    report = yield
    in_one_line(report, call)  # type: ignore[arg-type]
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and isinstance(cluster, Cluster):  # type: ignore[attr-defined]
        plane = cluster.plane
        ended = f"ended by themselves: {', '.join(plane.ended())}\n" if plane.ended() else ""
        report.sections.append((f"control plane, logs in {plane.logs}", ended + plane.log_tails(5)))  # type: ignore[attr-defined]
    return report
