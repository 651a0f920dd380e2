"""The stand-in operator for tests that need one. Known everywhere below tests/."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.kubernetes.cluster import Cluster
from tests.stand_ins.dynamo_operator import names

if TYPE_CHECKING:
    from tests.stand_ins.dynamo_operator.operator import Operator


@contextmanager
def running(cluster: Cluster) -> Iterator[Operator]:
    """An operator for the block; what is being deleted when it ends is let go of first."""
    # The official client takes a second to import; tests without a cluster need not wait for it.
    from tests.stand_ins.dynamo_operator.operator import Operator

    operator = Operator(cluster.kubeconfig, cluster.context)
    operator.start()
    try:
        yield operator
        kinds = (names.GRAPH, names.COMPONENT_DEPLOYMENT)

        def leaving() -> list[str]:
            return [
                item["metadata"]["name"]
                for kind in kinds
                for item in cluster.api.list(names.API_VERSION, kind)
                if "deletionTimestamp" in item["metadata"]
            ]

        cluster.api.wait("deleted graphs are gone", lambda: not leaving())
    finally:
        operator.stop()
        operator.unregister()


@pytest.fixture(scope="module")
def dynamo_operator(dynamo_cluster: Cluster) -> Iterator[Operator]:
    """A running stand-in operator, its webhooks registered; a fresh one for each module of tests."""
    with running(dynamo_cluster) as operator:
        yield operator
