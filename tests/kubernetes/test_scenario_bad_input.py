"""Bad input, from the stack's file to the live cluster: an error with key, value and what is allowed, and nothing made.

CustomResourceDefinitions that are missing with `platform: existing` are in test_scenario.py, where there are none; two
stacks with one name in test_scenario_existing.py.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes.cluster import Cluster
from tests.kubernetes.drivers import Driver, UpdateFailedError
from tests.kubernetes.scenario import TARGETS, has_gone, stack_of

pytestmark = pytest.mark.kubernetes

PLAIN = "hf_inplaintext"
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown target": ({"target": "gb200-ag"}, "target: 'gb200-ag'"),
    "unknown release": ({"release": "9.9.9"}, "release: '9.9.9'"),
    "GPU the target is not made for": ({"gpu": "H200"}, "gpu: 'H200'"),
    "no storage class": ({"model_cache_storage_class": ""}, "model_cache_storage_class: not set"),
    "storage class that is not there": ({"model_cache_storage_class": "fast"}, "model_cache_storage_class: 'fast'"),
    "one node's volume for several nodes": (
        {"model_cache_access_mode": "ReadWriteOnce"},
        "model_cache_access_mode: 'ReadWriteOnce'",
    ),
    "cache smaller than the weights": ({"model_cache_size": "10Gi"}, "model_cache_size: '10Gi'"),
    "no token": ({"hf_token_secret": "absent"}, "hf_token_secret: "),
    "token in plain text": ({"hf_token": PLAIN, "hf_token_secret": "hf-token-secret"}, "hf_token: is in plain text"),
    "secret without a key": ({"hf_token_secret": "mine", "hf_token_key": ""}, "hf_token_key: empty"),
    "no kubeconfig": ({"kubeconfig": ""}, "kubeconfig: not set"),
    "kubeconfig that is not there": ({"kubeconfig": "/nowhere/config"}, "kubeconfig: '/nowhere/config'"),
    "no context": ({"context": ""}, "context: not set"),
    "context that is not there": ({"context": "other"}, "context: 'other'"),
    "namespace that is not there": ({"create_namespace": False}, "namespace: '{namespace}' does not exist"),
    "image that the operator refuses": ({"image": "example.com/runtime:latest"}, "image: 'example.com/runtime:latest'"),
    "prompt beyond the buffer": (
        {"target": "gb200-disagg", "benchmark": True, "benchmark_traffic": {"input_tokens": 20000}},
        "benchmark_traffic: 20000 tokens in",
    ),
    "benchmark without a deployment": ({"replicas": {"worker": 0}, "benchmark": True}, "replicas.worker: 0"),
    "too few GPUs": ({"replicas": {"worker": 9}}, "6 of 9 TrtllmWorker pods (4 GPUs each) find no node"),
    "name too long": ({"name": "a" * 45}, f"name: '{'a' * 45}'"),
    "unknown key": ({"model_cache_clam": "weights"}, "model_cache_clam: no such setting"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_before_anything_is_made(
    scenario_driver: Driver, dynamo_cluster: Cluster, case: str
) -> None:
    config, said = CASES[case]
    namespace = f"refused-{secrets.token_hex(3)}"
    _is_refused(scenario_driver, dynamo_cluster, namespace, config, said.format(namespace=namespace))


def test_an_api_server_that_cannot_be_reached_is_said(
    scenario_driver: Driver, dynamo_cluster: Cluster, tmp_path: Path
) -> None:
    kubeconfig = yaml.safe_load(dynamo_cluster.kubeconfig.read_text())
    kubeconfig["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    elsewhere = tmp_path / "kubeconfig"
    elsewhere.write_text(yaml.safe_dump(kubeconfig))
    namespace = f"refused-{secrets.token_hex(3)}"
    _is_refused(scenario_driver, dynamo_cluster, namespace, {"kubeconfig": str(elsewhere)}, "https://127.0.0.1:1")


def _is_refused(driver: Driver, cluster: Cluster, namespace: str, config: dict[str, Any], said: str) -> None:
    token = {"hf_token_secret": config["hf_token_secret"]} if "hf_token_secret" in config else {}
    stack = stack_of(driver, cluster, TARGETS["gb200-agg"], namespace, platform="existing", **token)
    stack.config.update(config)
    before = _everything(cluster)
    with pytest.raises(UpdateFailedError, match="Nothing was created or changed") as refused:
        stack.up()
    text = str(refused.value)
    lines = [line for line in text.splitlines() if said in line]
    assert lines, text
    assert "allowed: " in lines[0]
    assert PLAIN not in text
    assert has_gone(cluster, namespace)
    assert _everything(cluster) == before


def _everything(cluster: Cluster) -> set[str]:
    """Namespaces and definitions: whatever a stack makes is in the one or needs the other."""
    kinds = (("v1", "Namespace"), ("apiextensions.k8s.io/v1", "CustomResourceDefinition"))
    return {item["metadata"]["uid"] for kind in kinds for item in cluster.api.list(*kind)}
