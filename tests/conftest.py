"""Fixtures that tests of several directories share."""

from __future__ import annotations

import pytest

# One control plane for the session: a fixture imported twice would be two.
from tests.kubernetes.fixtures import cluster, control_plane_programs, dynamo_cluster, namespace, restricted_namespace
from tests.kubernetes.fixtures import pytest_runtest_makereport as pytest_runtest_makereport
from tests.stand_ins.dynamo_operator.fixtures import dynamo_operator

__all__ = [
    "cluster",
    "control_plane_programs",
    "dynamo_cluster",
    "dynamo_operator",
    "namespace",
    "restricted_namespace",
]

# Files that take longest. Where several processes share the files between them, these are begun first.
LONGEST = (
    "jobs/test_benchmark.py",
    "simulator/test_lifecycle.py",
    "weights/test_plays.py",
    "simulator/test_probe.py",
    "simulator/test_command_lines.py",
    "jobs/test_smoke.py",
    "jobs/test_download.py",
    "weights/test_fetch.py",
    "plugins/test_apt_set.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With one process the order stays as it is written."""
    if getattr(config, "workerinput", None) is None:
        return
    ranks = {config.rootpath / "tests" / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
