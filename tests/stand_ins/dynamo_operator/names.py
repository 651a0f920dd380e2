"""Names, labels, annotations and messages of the real operator (1.5 line), each in one place."""

from __future__ import annotations

import hashlib

GROUP = "nvidia.com"
VERSION = "v1beta1"
API_VERSION = f"{GROUP}/{VERSION}"
GRAPH = "DynamoGraphDeployment"
COMPONENT_DEPLOYMENT = "DynamoComponentDeployment"
SCALING_ADAPTER = "DynamoGraphDeploymentScalingAdapter"

OPERATOR_VERSION = "1.5.0"
OPERATOR_USER = "system:serviceaccount:dynamo-system:dynamo-operator-controller-manager"
MANAGED_BY = "dynamo-operator"
FINALIZER = "nvidia.com/finalizer"

ORIGIN_VERSION = "nvidia.com/dynamo-operator-origin-version"
WORKLOAD_PROVIDER = "nvidia.com/workload-provider"
COMPONENT_PROVIDER = "component"
CURRENT_WORKER_HASH = "nvidia.com/current-worker-hash-v2"
LAST_APPLIED_GENERATION = "nvidia.com/last-applied-generation"
LAST_APPLIED_HASH = "nvidia.com/last-applied-hash"
RESTART_AT = "nvidia.com/restartAt"
STRATEGY = "nvidia.com/deployment-strategy"
MAX_SURGE = "nvidia.com/deployment-rolling-update-max-surge"
MAX_UNAVAILABLE = "nvidia.com/deployment-rolling-update-max-unavailable"
ENABLE_GROVE = "nvidia.com/enable-grove"

COMPONENT_LABEL = "nvidia.com/dynamo-component"
TYPE_LABEL = "nvidia.com/dynamo-component-type"
SUB_TYPE_LABEL = "nvidia.com/dynamo-sub-component-type"
GRAPH_LABEL = "nvidia.com/dynamo-graph-deployment-name"
NAMESPACE_LABEL = "nvidia.com/dynamo-namespace"
HASH_LABEL = "nvidia.com/dynamo-worker-hash"
SELECTOR_LABEL = "nvidia.com/selector"
METRICS_LABEL = "nvidia.com/metrics-enabled"
DISCOVERY_LABELS = {
    "nvidia.com/dynamo-discovery-backend": "kubernetes",
    "nvidia.com/dynamo-discovery-enabled": "true",
}

PLANNER_ACCOUNT = "planner-serviceaccount"
MAIN = "main"
WORKER_TYPES = ("worker", "prefill", "decode")
TYPES = ("frontend", *WORKER_TYPES, "planner", "epp")  # the order in which the API names them
FRAMEWORKS = ("sglang", "vllm", "trtllm")
LABEL_LIMIT = 63


def component_resource(graph: str, component: str, worker_hash: str | None) -> str:
    """The name of a component's DynamoComponentDeployment, Deployment and Service."""
    stem = f"{graph}-{component.lower()}"
    return f"{stem}-{worker_hash}" if worker_hash else stem


def discovery_account(graph: str) -> str:
    return f"{graph}-k8s-service-discovery"


def label_value(name: str) -> str:
    """A name as a label's value: beyond 63 characters its start and eight digits of its SHA-256."""
    if len(name) <= LABEL_LIMIT:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: LABEL_LIMIT - 9]}-{digest}"
