"""Fixtures that tests of several directories share."""

from __future__ import annotations

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
