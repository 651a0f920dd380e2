"""Fixtures that tests of several directories share."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

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

# Files that take longest. Where several processes share the tests between them, these are begun first. Stories of a
# stack, shared one by one, follow the files of the same marker that stay together.
LONGEST = (
    "tests/jobs/test_benchmark.py",
    "tests/simulator/test_lifecycle.py",
    "tests/weights/test_plays.py",
    "tests/weights/test_fan_out_plays.py",
    "tests/weights/test_fan_out.py",
    "tests/simulator/test_probe.py",
    "tests/simulator/test_command_lines.py",
    "tests/jobs/test_smoke.py",
    "tests/jobs/test_download.py",
    "tests/weights/test_fetch.py",
    "tests/plugins/test_apt_set.py",
    "tests/machines/test_machine.py",  # short, and before the drivers on their machine
    "tests/machines/test_cache_life.py",
    "tests/machines/test_nvidia_driver.py",
    "tests/machines/test_drives.py",
    "tests/kubernetes/test_scenario.py",
    "tests/kubernetes/test_control_plane.py",
    "tests/stand_ins/dynamo_operator/test_live.py",
    "tests/cluster/test_live.py",
    "tests/kubernetes/test_drivers.py",
    "tests/kubernetes/test_documented_commands.py",
    "tests/stand_ins/dynamo_operator/test_without_operator.py",
    "tests/stand_ins/dynamo_operator/test_live_in_place.py",
    "tests/kubernetes/test_manifests.py",
    "tests/kubernetes/test_scenario_bad_input.py",
    "tests/kubernetes/test_scenario_existing.py",
    "tests/kubernetes/test_scenario_trouble.py",
    "tests/kubernetes/test_scenario_blue_green.py",
    "tests/hosts/test_roles.py",
    "tests/hosts/test_driver_roles.py",
    "tests/hosts/test_server_cases.py",
    "tests/site/test_bad_host.py",
)
# The others' tests stay together, with what their module's fixtures have started.
TEST_BY_TEST = {
    name for name in LONGEST if ("test_scenario" in name and "bad_input" not in name) or name.endswith("/test_roles.py")
}


class Shared(LoadFileScheduling):  # type: ignore[misc]  # of a class without types
    """Files, or single tests of some files, for processes that share them."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return nodeid if file in TEST_BY_TEST else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Shared:
    return Shared(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With one process the order stays as it is written."""
    if getattr(config, "workerinput", None) is not None:
        ranks = {config.rootpath / name: rank for rank, name in enumerate(LONGEST)}
        items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
