"""What a cluster does while the operator is down: its webhooks refuse by not answering, its finalizers hold."""

from __future__ import annotations

import time

import pytest

from tests.kubernetes.api import Refused
from tests.kubernetes.cluster import Cluster
from tests.stand_ins.dynamo_operator import names
from tests.stand_ins.dynamo_operator.fixtures import running
from tests.stand_ins.dynamo_operator.live import AGG, Serving, batch, beat
from tests.stand_ins.dynamo_operator.operator import Operator

pytestmark = pytest.mark.kubernetes


def test_without_the_operator_writes_fail_and_deletion_waits(dynamo_cluster: Cluster, namespace: str) -> None:
    operator = Operator(dynamo_cluster.kubeconfig, dynamo_cluster.context)
    operator.start()
    try:
        serving = Serving(dynamo_cluster, namespace)
        manifest = serving.submitted("agg")
        serving.apply(manifest)
        serving.wait_ready(AGG)
    finally:
        operator.stop()
    try:
        with pytest.raises(Refused, match=r"failed calling webhook .mdynamographdeployment\.kb\.io"):
            serving.apply(batch(manifest, 640))
        dynamo_cluster.api.delete(names.API_VERSION, names.GRAPH, AGG, namespace)
        time.sleep(0.5)
        item = serving.graph(AGG)
        assert item["metadata"]["finalizers"] == [names.FINALIZER]
        assert beat(item["metadata"]["generation"], item["status"])[2] == "all_resources_are_ready"
        with running(dynamo_cluster):
            serving.gone(AGG)
    finally:
        operator.unregister()
