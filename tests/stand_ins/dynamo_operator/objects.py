"""What a graph becomes: pure functions from a graph, or from one of its DynamoComponentDeployments, to manifests."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.stand_ins.dynamo_operator import names
from tests.stand_ins.dynamo_operator.graph import Component, Graph, Manifest, digest

RBAC = "rbac.authorization.k8s.io"
# Annotations of a pod template that stay there: the workload objects do not carry them.
TEMPLATE_ONLY = (names.ORIGIN_VERSION, names.RESTART_AT)

FRONTEND_PORT = {"containerPort": 8000, "name": "http", "protocol": "TCP"}
WORKER_PORTS = (
    {"containerPort": 9090, "name": "system", "protocol": "TCP"},
    {"containerPort": 19090, "name": "nixl", "protocol": "TCP"},
)
DEFAULT_SHARED_MEMORY = "8Gi"


# --- what every graph gets once -----------------------------------------------------------------------------------


def owner_reference(kind: str, name: str, uid: str) -> Manifest:
    return {
        "apiVersion": names.API_VERSION,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def rbac_labels(name: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/component": "rbac",
        "app.kubernetes.io/managed-by": names.MANAGED_BY,
        "app.kubernetes.io/name": names.label_value(name),
    }


def account(namespace: str, name: str) -> Manifest:
    metadata = {"name": name, "namespace": namespace, "labels": rbac_labels(name)}
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}


def binding(namespace: str, subject: str, name: str, role_kind: str, role: str) -> Manifest:
    return {
        "apiVersion": f"{RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": name, "namespace": namespace, "labels": rbac_labels(subject)},
        "roleRef": {"apiGroup": RBAC, "kind": role_kind, "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": subject, "namespace": namespace}],
    }


def planner_objects(namespace: str) -> list[Manifest]:
    """Made for every graph, planner or not; owned by nothing, so they outlive it."""
    name = names.PLANNER_ACCOUNT
    return [
        account(namespace, name),
        binding(namespace, name, f"{name}-binding", "ClusterRole", "dynamo-operator-planner"),
    ]


def discovery_objects(graph: Graph) -> list[Manifest]:
    name = names.discovery_account(graph.name)
    watch = ["get", "list", "watch"]
    role = {
        "apiVersion": f"{RBAC}/v1",
        "kind": "Role",
        "metadata": {"name": f"{name}-role", "namespace": graph.namespace, "labels": rbac_labels(name)},
        "rules": [
            {"apiGroups": [""], "resources": ["endpoints", "pods"], "verbs": watch},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": watch},
            {
                "apiGroups": [names.GROUP],
                "resources": ["dynamoworkermetadatas"],
                "verbs": ["create", *watch, "update", "patch", "delete"],
            },
        ],
    }
    made = [
        account(graph.namespace, name),
        role,
        binding(graph.namespace, name, f"{name}-binding", "Role", f"{name}-role"),
    ]
    return [stamped(owned(item, graph)) for item in made]


def owned(manifest: Manifest, graph: Graph) -> Manifest:
    manifest["metadata"]["ownerReferences"] = [owner_reference(names.GRAPH, graph.name, graph.uid)]
    return manifest


def stamped(manifest: Manifest) -> Manifest:
    """With the hash of what is applied; the generation it leads to is known only to who applies it."""
    subject = {key: value for key, value in manifest.items() if key not in ("apiVersion", "kind", "metadata", "status")}
    annotations = manifest["metadata"].setdefault("annotations", {})
    annotations[names.LAST_APPLIED_HASH] = digest(subject)
    annotations[names.LAST_APPLIED_GENERATION] = "1"
    return manifest


# --- a component ----------------------------------------------------------------------------------------------------


def component_deployment(
    graph: Graph,
    component: Component,
    worker_hash: str,
    replicas: int | None = None,
    restart_at: str | None = None,
) -> Manifest:
    """The DynamoComponentDeployment of a component; replicas and restart_at come from a roll or restart under way."""
    spec = copy.deepcopy(component.as_given())
    spec["backendFramework"] = graph.spec.backend_framework
    spec["replicas"] = component.desired if replicas is None else replicas
    template = spec.setdefault("podTemplate", {})
    pod = template.setdefault("spec", {})
    if graph.spec.env:
        main = next(container for container in pod["containers"] if container["name"] == names.MAIN)
        main["env"] = merged_environment(graph.spec.env, main.get("env") or [])
    if graph.spec.priority_class_name is not None:
        pod.setdefault("priorityClassName", graph.spec.priority_class_name)

    labels = {
        **component.labels,
        names.COMPONENT_LABEL: component.name,
        names.NAMESPACE_LABEL: graph.dynamo_namespace,
        names.GRAPH_LABEL: graph.name,
    }
    template_labels = {**graph.spec.labels, **component.labels}
    if component.is_worker:
        labels[names.HASH_LABEL] = template_labels[names.HASH_LABEL] = worker_hash
    template_annotations = graph.annotations_of(component)
    if names.ORIGIN_VERSION in graph.annotations:
        template_annotations.setdefault(names.ORIGIN_VERSION, graph.annotations[names.ORIGIN_VERSION])
    if restart_at is not None:
        template_annotations[names.RESTART_AT] = restart_at
    template["metadata"] = without_empty({"annotations": template_annotations, "labels": template_labels})

    name = names.component_resource(graph.name, component.name, worker_hash if component.is_worker else None)
    return stamped(
        owned(
            {
                "apiVersion": names.API_VERSION,
                "kind": names.COMPONENT_DEPLOYMENT,
                "metadata": {"name": name, "namespace": graph.namespace, "labels": labels},
                "spec": spec,
            },
            graph,
        )
    )


def scaling_adapter(graph: Graph, component: Component) -> Manifest:
    metadata = {
        "name": f"{graph.name}-{component.name.lower()}",
        "namespace": graph.namespace,
        "labels": {names.COMPONENT_LABEL: component.name, names.GRAPH_LABEL: graph.name},
    }
    spec = {"dgdRef": {"name": graph.name, "componentName": component.name}, "replicas": component.desired}
    manifest = {
        "apiVersion": names.API_VERSION,
        "kind": names.SCALING_ADAPTER,
        "metadata": metadata,
        "spec": spec,
    }
    return owned(manifest, graph)


# --- a component's workload -------------------------------------------------------------------------------------------


def workload_labels(owner: Manifest) -> dict[str, str]:
    labels = {**template_of(owner, "labels"), **owner["metadata"]["labels"]}
    if owner["spec"]["type"] in ("prefill", "decode"):
        labels[names.SUB_TYPE_LABEL] = owner["spec"]["type"]
    return labels


def workload_annotations(owner: Manifest) -> dict[str, str]:
    annotations = template_of(owner, "annotations")
    return {key: value for key, value in annotations.items() if key not in TEMPLATE_ONLY}


def template_of(owner: Manifest, field: str) -> dict[str, str]:
    return dict(owner["spec"]["podTemplate"].get("metadata", {}).get(field) or {})


def is_worker(owner: Manifest) -> bool:
    return owner["spec"]["type"] in names.WORKER_TYPES


def worker_hash_of(owner: Manifest) -> str | None:
    """The generation of workers a DynamoComponentDeployment belongs to; None for a frontend."""
    found = owner["metadata"].get("labels", {}).get(names.HASH_LABEL)
    return str(found) if found is not None else None


def runtime_namespace(owner: Manifest) -> str:
    namespace = owner["metadata"]["labels"][names.NAMESPACE_LABEL]
    suffix = worker_hash_of(owner)
    return f"{namespace}-{suffix}" if suffix else str(namespace)


def workload_metadata(owner: Manifest, labels: Mapping[str, str]) -> Manifest:
    metadata = owner["metadata"]
    return without_empty(
        {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": dict(labels),
            "annotations": workload_annotations(owner),
            "ownerReferences": [
                owner_reference(names.COMPONENT_DEPLOYMENT, metadata["name"], metadata.get("uid", "")),
            ],
        }
    )


def service(owner: Manifest) -> Manifest:
    labels = owner["metadata"]["labels"]
    port = ("system", 9090) if is_worker(owner) else ("http", 8000)
    spec = {
        "ports": [{"name": port[0], "port": port[1], "protocol": "TCP", "targetPort": port[0]}],
        "selector": {
            names.COMPONENT_LABEL: labels[names.COMPONENT_LABEL],
            names.TYPE_LABEL: owner["spec"]["type"],
            names.NAMESPACE_LABEL: labels[names.NAMESPACE_LABEL],
        },
    }
    metadata = workload_metadata(owner, {**workload_labels(owner), **names.DISCOVERY_LABELS})
    return stamped({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})


def deployment(owner: Manifest, pull_secrets: Mapping[str, Sequence[str]]) -> Manifest:
    """The Deployment of a DynamoComponentDeployment. pull_secrets: registry -> the namespace's secrets for it."""
    name = owner["metadata"]["name"]
    annotations = template_of(owner, "annotations")
    annotations.pop(names.ORIGIN_VERSION, None)
    template_labels = {
        **workload_labels(owner),
        **names.DISCOVERY_LABELS,
        names.TYPE_LABEL: owner["spec"]["type"],
        names.METRICS_LABEL: "true",
        names.SELECTOR_LABEL: name,
    }
    template = {
        "metadata": without_empty({"labels": template_labels, "annotations": annotations}),
        "spec": pod_spec(owner, pull_secrets),
    }
    return stamped(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": workload_metadata(owner, workload_labels(owner)),
            "spec": {
                "replicas": owner["spec"]["replicas"],
                "selector": {"matchLabels": {names.SELECTOR_LABEL: name}},
                "strategy": strategy(annotations),
                "template": template,
            },
        }
    )


def strategy(annotations: Mapping[str, str]) -> Manifest:
    if annotations.get(names.STRATEGY) == "Recreate":
        return {"type": "Recreate"}
    return {
        "type": "RollingUpdate",
        "rollingUpdate": {
            "maxSurge": int_or_percent(annotations.get(names.MAX_SURGE, "25%")),
            "maxUnavailable": int_or_percent(annotations.get(names.MAX_UNAVAILABLE, "25%")),
        },
    }


def int_or_percent(value: str) -> int | str:
    return value if value.endswith("%") else int(value)


def pod_spec(owner: Manifest, pull_secrets: Mapping[str, Sequence[str]]) -> Manifest:
    spec = owner["spec"]
    given: Manifest = copy.deepcopy(spec["podTemplate"].get("spec") or {})
    containers = given.pop("containers", [])
    user_main = next(container for container in containers if container["name"] == names.MAIN)
    main = merge_container(base_container(owner), user_main)
    pod: Manifest = {"restartPolicy": "Always", "terminationGracePeriodSeconds": 60, **given}
    pod.setdefault("securityContext", {"fsGroup": 1000})
    graph = owner["metadata"]["labels"][names.GRAPH_LABEL]
    if not pod.get("serviceAccountName"):
        pod["serviceAccountName"] = names.discovery_account(graph)
    add_shared_memory(pod, main, spec.get("sharedMemorySize"))
    pod["containers"] = [main, *(container for container in containers if container["name"] != names.MAIN)]
    pod["volumes"] = ordered_volumes(pod.get("volumes") or [], main.get("volumeMounts") or [])
    secrets = list(pod.get("imagePullSecrets") or [])
    for container in pod["containers"]:
        for name in pull_secrets.get(registry(container.get("image", "")), ()):
            if {"name": name} not in secrets:
                secrets.append({"name": name})
    if secrets:
        pod["imagePullSecrets"] = secrets
    return pod


def base_container(owner: Manifest) -> Manifest:
    """What the operator gives a main container of its own accord; the user's fields win over it."""
    labels = owner["metadata"]["labels"]
    kind = owner["spec"]["type"]
    environment: dict[str, str | Manifest] = {
        "DYN_COMPONENT": kind,
        "DYN_DISCOVERY_BACKEND": "kubernetes",
        "DYN_NAMESPACE": labels[names.NAMESPACE_LABEL],
        "DYN_PARENT_DGD_K8S_NAME": labels[names.GRAPH_LABEL],
        "DYN_PARENT_DGD_K8S_NAMESPACE": owner["metadata"]["namespace"],
        "POD_NAME": {"fieldRef": {"fieldPath": "metadata.name"}},
        "POD_NAMESPACE": {"fieldRef": {"fieldPath": "metadata.namespace"}},
        "POD_UID": {"fieldRef": {"fieldPath": "metadata.uid"}},
    }
    if is_worker(owner):
        environment |= {
            "DYN_FORWARDPASS_METRIC_PORT": "20380",
            "DYN_HEALTH_CHECK_ENABLED": "false",
            "DYN_NAMESPACE_WORKER_SUFFIX": labels[names.HASH_LABEL],
            "DYN_SYSTEM_ENABLED": "true",
            "DYN_SYSTEM_PORT": "9090",
            "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
            "NIXL_TELEMETRY_ENABLE": "n",
            "NIXL_TELEMETRY_EXPORTER": "prometheus",
            "NIXL_TELEMETRY_PROMETHEUS_PORT": "19090",
        }
        container: Manifest = {
            "ports": [dict(port) for port in WORKER_PORTS],
            "livenessProbe": probe("/live", "system", period=5, timeout=4, failures=1),
            "readinessProbe": probe("/health", "system", period=10, timeout=4, failures=3),
            "startupProbe": probe("/live", "system", period=10, timeout=5, failures=720),
        }
    else:
        environment |= {
            "DYNAMO_PORT": "8000",
            "DYN_HTTP_PORT": "8000",
            "DYN_NAMESPACE_PREFIX": labels[names.NAMESPACE_LABEL],
        }
        container = {
            "command": ["python3"],
            "args": ["-m", "dynamo.frontend"],
            "ports": [dict(FRONTEND_PORT)],
            "livenessProbe": probe("/live", "http", period=10, timeout=1, failures=3, delay=15),
            "readinessProbe": probe("/health", "http", period=10, timeout=3, failures=3, delay=10),
        }
    container["name"] = names.MAIN
    container["env"] = [
        {"name": name, "value": value} if isinstance(value, str) else {"name": name, "valueFrom": value}
        for name, value in environment.items()
    ]
    return container


def probe(path: str, port: str, *, period: int, timeout: int, failures: int, delay: int | None = None) -> Manifest:
    made: Manifest = {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }
    if delay is not None:
        made["initialDelaySeconds"] = delay
    return made


def merge_container(base: Manifest, given: Manifest) -> Manifest:
    """The user's container over the base one: lists and probes replace, the environment merges by name."""
    merged = {**base, **{key: value for key, value in given.items() if value not in (None, [], {}, "")}}
    merged["env"] = merged_environment(base["env"], given.get("env") or [])
    return merged


def merged_environment(first: Iterable[Manifest], second: Iterable[Manifest]) -> list[Manifest]:
    by_name = {variable["name"]: variable for variable in (*first, *second)}
    return [by_name[name] for name in sorted(by_name)]


def add_shared_memory(pod: Manifest, main: Manifest, size: Any) -> None:
    """A /dev/shm of the asked size; 0 asks for none."""
    if size is not None and str(size) == "0":
        return
    volume = {
        "name": "shared-memory",
        "emptyDir": {"medium": "Memory", "sizeLimit": DEFAULT_SHARED_MEMORY if size is None else size},
    }
    pod["volumes"] = [*(pod.get("volumes") or []), volume]
    main["volumeMounts"] = [*(main.get("volumeMounts") or []), {"name": "shared-memory", "mountPath": "/dev/shm"}]


def ordered_volumes(volumes: Sequence[Manifest], mounts: Sequence[Manifest]) -> list[Manifest]:
    """Volumes in the order of the main container's mounts; a mount without a volume is a claim of that name."""
    by_name = {volume["name"]: volume for volume in volumes}
    ordered: dict[str, Manifest] = {}
    for mount in mounts:
        name = mount["name"]
        ordered.setdefault(name, by_name.get(name) or {"name": name, "persistentVolumeClaim": {"claimName": name}})
    for volume in volumes:
        ordered.setdefault(volume["name"], volume)
    return list(ordered.values())


def registry(image: str) -> str:
    first, slash, _ = image.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else "docker.io"


def without_empty(mapping: Mapping[str, Any]) -> Manifest:
    return {key: value for key, value in mapping.items() if value not in (None, {}, [])}
