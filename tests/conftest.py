"""Fixtures that tests of several directories share."""

from __future__ import annotations

# One control plane for the session: a fixture imported twice would be two.
from tests.kubernetes.fixtures import cluster, control_plane_programs, dynamo_cluster, namespace, restricted_namespace
from tests.kubernetes.fixtures import pytest_runtest_makereport as pytest_runtest_makereport

__all__ = ["cluster", "control_plane_programs", "dynamo_cluster", "namespace", "restricted_namespace"]
