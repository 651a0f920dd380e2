"""The DynamoGraphDeployment: frontend and workers as pod templates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from serving_catalog.graphs.entries import GraphToleration, OperatorRules
from serving_catalog.graphs.objects import (
    GPU_RESOURCE,
    Affinity,
    Capabilities,
    ClaimVolume,
    ConfigMap,
    ConfigMapVolume,
    Container,
    ContainerSecurity,
    DynamoGraphDeployment,
    EgressRule,
    GraphComponent,
    GraphSpec,
    HttpGet,
    IngressRule,
    LabelSelector,
    LocalReference,
    Metadata,
    NetworkPolicy,
    NetworkPolicyPeer,
    NetworkPolicyPort,
    NetworkPolicySpec,
    NodeAffinity,
    NodeSelector,
    NodeSelectorTerm,
    PodAffinity,
    PodAffinityTerm,
    PodSpec,
    PodTemplate,
    PreferredNodes,
    Probe,
    Requirement,
    ResourceNeeds,
    SeccompProfile,
    Toleration,
    Variable,
    Volume,
    VolumeMount,
    WeightedPodAffinityTerm,
)
from serving_catalog.graphs.plans import VolumeLayout
from serving_catalog.graphs.requests import GraphRequest, Rollout
from serving_catalog.graphs.workers import Chosen, Worker

CONFIGS = "/opt/dynamo/configs"
HOSTNAME = "kubernetes.io/hostname"
ARCHITECTURE = "kubernetes.io/arch"
GPU_PRODUCT = "nvidia.com/gpu.product"
GPU_PRESENT = "nvidia.com/gpu.present"
# How Kubernetes names the catalog's CPU architectures.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

# Not of the engine's own container: transfers between GPU processes ask for what this forbids.
_UNPRIVILEGED = ContainerSecurity(
    allow_privilege_escalation=False,
    capabilities=Capabilities(drop=("ALL",)),
    seccomp_profile=SeccompProfile(type="RuntimeDefault"),
)
# RDMA registers memory, which must be pinned (ai-dynamo/dynamo docs, disaggregated communication).
_MAY_PIN_MEMORY = ContainerSecurity(capabilities=Capabilities(add=("IPC_LOCK",)))


@dataclass(frozen=True)
class Parts:
    """What every object of a graph shares."""

    request: GraphRequest
    chosen: Chosen
    name: str
    image: str
    labels: Mapping[str, str]
    volume: VolumeLayout
    claim: str
    snapshot: str
    load_seconds: int
    download_seconds: int

    @property
    def operator(self) -> OperatorRules:
        return self.chosen.catalog.dynamo.operator

    @property
    def pinned_to(self) -> str | None:
        """The one node all pods go to, where the user names it."""
        return self.request.placement.node_selector.get(HOSTNAME)

    @property
    def all_on_gpu_nodes(self) -> bool:
        return self.request.placement.gpu_nodes_for_all or self.pinned_to is not None

    def metadata(self, name: str, labels: Mapping[str, str] | None = None) -> Metadata:
        return Metadata(
            name=name,
            namespace=self.request.namespace,
            labels=self.labels if labels is None else labels,
            annotations=self.request.annotations,
        )


def engine_config(parts: Parts, workers: Mapping[str, Worker]) -> ConfigMap:
    """The workers' options files. The name holds a hash of the content: a ConfigMap that changes in place rolls no pod,
    another name in the pod template does; and no two graphs share one."""
    data = {worker.entry.options_file: worker.options_text for worker in workers.values()}
    content = "\n".join(f"{name}\n{text}" for name, text in sorted(data.items()))
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    return ConfigMap(metadata=parts.metadata(f"{parts.name}-engine-{digest}"), data=data, immutable=True)


def graph(
    parts: Parts,
    workers: Mapping[str, Worker],
    frontend_environment: Mapping[str, str],
    frontend_replicas: int,
    config: ConfigMap,
) -> DynamoGraphDeployment:
    """The whole graph."""
    return DynamoGraphDeployment(
        metadata=parts.metadata(parts.name),
        spec=GraphSpec(
            backend_framework=parts.chosen.runs.framework,
            components=(
                _frontend(parts, frontend_environment, frontend_replicas),
                *(_worker(parts, worker, config) for worker in workers.values()),
            ),
        ),
    )


def _frontend(parts: Parts, environment: Mapping[str, str], replicas: int) -> GraphComponent:
    entry = parts.chosen.target.frontend
    router = parts.request.router_mode or entry.router_mode
    needs = _needs(entry.cpu, entry.memory, parts.request.resources.get("frontend", {}))
    container = Container(
        name="main",
        image=parts.image,
        command=("python3", "-m", "dynamo.frontend"),
        args=("--router-mode", router, "--http-port", str(parts.operator.frontend_port)),
        env=_variables({**_cache_environment(parts), **environment}),
        resources=needs,
        volume_mounts=(VolumeMount(name="model-cache", mount_path=parts.volume.mount, read_only=True),),
        security_context=_UNPRIVILEGED,
    )
    spec = _pod(
        parts,
        container,
        gpu=False,
        node_selector={HOSTNAME: parts.pinned_to} if parts.pinned_to is not None else {},
        affinity=_frontend_affinity(parts),
    )
    return GraphComponent(
        name=entry.name,
        type="frontend",
        replicas=replicas,
        runtime_version_override=parts.request.runtime_version,
        pod_template=PodTemplate(metadata=_pod_metadata(parts, {}), spec=spec),
    )


def _worker(parts: Parts, worker: Worker, config: ConfigMap) -> GraphComponent:
    runs, entry = parts.chosen.runs, worker.entry
    asked = parts.request.resources.get(worker.type, {})
    mounts = (
        VolumeMount(name="model-cache", mount_path=parts.volume.mount, read_only=True),
        VolumeMount(name="engine-config", mount_path=CONFIGS, read_only=True),
    )
    container = Container(
        name="main",
        image=parts.image,
        command=runs.command,
        args=(
            *(runs.model_flag, parts.snapshot),
            *("--served-model-name", parts.chosen.model.repository),
            *(runs.options_flag, f"{CONFIGS}/{entry.options_file}"),
            *worker.arguments,
        ),
        env=_variables({**_cache_environment(parts), **worker.environment}),
        resources=_needs(entry.cpu, entry.memory, asked, gpus=entry.gpus),
        security_context=_MAY_PIN_MEMORY if devices(asked) else None,
        startup_probe=_startup_probe(parts),
        liveness_probe=_liveness_probe(parts),
        volume_mounts=mounts,
    )
    spec = _pod(
        parts,
        container,
        gpu=True,
        node_selector={ARCHITECTURE: architecture(parts.chosen), **parts.request.placement.node_selector},
        affinity=_worker_affinity(parts, worker),
        volumes=(Volume(name="engine-config", config_map=ConfigMapVolume(name=config.name)),),
        before=(_wait_for_model(parts, mounts[0]),),
    )
    return GraphComponent(
        name=entry.name,
        type=worker.type,
        replicas=worker.replicas,
        shared_memory_size=entry.shared_memory,
        runtime_version_override=parts.request.runtime_version,
        pod_template=PodTemplate(
            metadata=_pod_metadata(parts, rollout_annotations(parts.request.rollout, parts.operator)), spec=spec
        ),
    )


def _wait_for_model(parts: Parts, mount: VolumeMount) -> Container:
    """Waits, within bounds, until the download has put the verified model there: all objects can be applied at once."""
    marker = f"{parts.volume.weights}/{cache_folder(parts.chosen.model.repository)}/verified"
    wanted = [f"{marker}/{parts.chosen.model.revision}.json"]
    wanted += [
        f"{parts.volume.encodings}/{parts.chosen.catalog.encodings[key].file}" for key in parts.chosen.model.encodings
    ]
    script = (
        "waited=0\n"
        f"for file in {' '.join(wanted)}; do\n"
        '  until [ -e "$file" ]; do\n'
        f'    if [ "$waited" -ge {parts.download_seconds} ]; then\n'
        '      echo "$file: not there after $waited s" >&2; exit 1\n'
        "    fi\n"
        '    if [ $((waited % 60)) -eq 0 ]; then echo "waiting for $file"; fi\n'
        "    sleep 5; waited=$((waited + 5))\n"
        "  done\n"
        "done\n"
    )
    return Container(
        name="wait-for-model",
        image=parts.image,
        command=("/bin/sh", "-c", script),
        # Said, because a namespace with a quota takes no container without.
        resources=ResourceNeeds(requests={"cpu": "10m", "memory": "64Mi"}, limits={"memory": "64Mi"}),
        volume_mounts=(mount,),
        security_context=_UNPRIVILEGED,
    )


def cache_folder(repository: str) -> str:
    """A repository's folder in the Hub's cache layout."""
    return "models--" + repository.replace("/", "--")


def _pod(
    parts: Parts,
    container: Container,
    gpu: bool,
    node_selector: Mapping[str, str],
    affinity: Affinity | None,
    volumes: Sequence[Volume] = (),
    before: Sequence[Container] = (),
) -> PodSpec:
    placement = parts.request.placement
    return PodSpec(
        init_containers=tuple(before),
        containers=(container,),
        volumes=(
            Volume(name="model-cache", persistent_volume_claim=ClaimVolume(claim_name=parts.claim)),
            *volumes,
        ),
        node_selector=node_selector,
        affinity=affinity,
        tolerations=tolerations(parts, gpu or parts.all_on_gpu_nodes),
        priority_class_name=placement.priority_class,
        scheduler_name=placement.scheduler_name,
        image_pull_secrets=tuple(LocalReference(name=name) for name in parts.request.pull_secrets),
        termination_grace_period_seconds=parts.chosen.catalog.dynamo.times.termination_seconds,
    )


def _pod_metadata(parts: Parts, annotations: Mapping[str, str]) -> Metadata:
    return Metadata(labels=parts.labels, annotations={**parts.request.annotations, **annotations})


def rollout_annotations(rollout: Rollout, operator: OperatorRules) -> dict[str, str]:
    """Set when the graph is made: adding them later is a roll of its own, and the very one that cannot finish."""
    if rollout == "in_place":
        return {operator.surge_annotation: "0", operator.unavailable_annotation: "1"}
    if rollout == "blue_green":  # the operator's own way takes a quarter of many workers away, spare GPUs or not
        return {operator.surge_annotation: "100%", operator.unavailable_annotation: "0"}
    return {operator.strategy_annotation: "Recreate"}


def _cache_environment(parts: Parts) -> dict[str, str]:
    return {
        "HF_HUB_CACHE": parts.volume.weights,
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": "/tmp/hf_modules",  # noqa: S108 - in the container; the cache is mounted read-only
        "TIKTOKEN_ENCODINGS_BASE": parts.volume.encodings,
    }


def _variables(environment: Mapping[str, str]) -> tuple[Variable, ...]:
    # Kubernetes expands $(NAME) in a value; $$ is the dollar sign itself.
    return tuple(Variable(name=name, value=value.replace("$(", "$$(")) for name, value in environment.items())


def _needs(cpu: str | None, memory: str | None, asked: Mapping[str, str], gpus: int = 0) -> ResourceNeeds | None:
    """Devices are asked for as limits too, as Kubernetes wants them; CPU and memory have none."""
    own = {name: value for name, value in (("cpu", cpu), ("memory", memory)) if value is not None}
    counted = {**devices(asked), **({GPU_RESOURCE: str(gpus)} if gpus else {})}
    requests = {**own, **asked, **counted}
    return ResourceNeeds(requests=requests, limits=counted) if requests else None


def devices(asked: Mapping[str, str]) -> dict[str, str]:
    """What is counted, such as rdma/ib."""
    return {name: value for name, value in asked.items() if name not in ("cpu", "memory")}


def _startup_probe(parts: Parts) -> Probe:
    probes = parts.chosen.catalog.dynamo.probes
    return Probe(
        http_get=HttpGet(path=probes.startup_path, port=parts.operator.system_port),
        period_seconds=probes.startup_period_seconds,
        timeout_seconds=probes.timeout_seconds,
        failure_threshold=-(-parts.load_seconds // probes.startup_period_seconds),
    )


def _liveness_probe(parts: Parts) -> Probe:
    probes = parts.chosen.catalog.dynamo.probes
    return Probe(
        http_get=HttpGet(path=probes.liveness_path, port=parts.operator.system_port),
        period_seconds=probes.liveness_period_seconds,
        timeout_seconds=probes.timeout_seconds,
        failure_threshold=probes.liveness_failures,
    )


# --- placement ---------------------------------------------------------------------------------------------------


def architecture(chosen: Chosen) -> str:
    return ARCHITECTURES[chosen.gpu.cpu_architecture]


def gpu_products(parts: Parts) -> tuple[str, ...]:
    """The values of the GPU product label that will do: the GPU's exact names, as GPU feature discovery writes them."""
    asked = parts.request.placement.gpu_products
    return asked if asked is not None else tuple(name.replace(" ", "-") for name in parts.chosen.gpu.names)


def tolerations(parts: Parts, gpu: bool) -> tuple[Toleration, ...]:
    """With `gpu`, of pods that go to GPU nodes. What the request says replaces the target's."""
    target, asked = parts.chosen.target, parts.request.placement.tolerations
    if not gpu:
        return tuple(_toleration(entry) for entry in target.tolerations)
    if asked is None:
        return tuple(_toleration(entry) for entry in (*target.gpu_tolerations, *target.tolerations))
    return tuple(
        Toleration(key=entry.key, operator=entry.operator, value=entry.value, effect=entry.effect) for entry in asked
    )


def _toleration(entry: GraphToleration) -> Toleration:
    return Toleration(key=entry.key, operator=entry.operator, value=entry.value, effect=entry.effect)


def _worker_affinity(parts: Parts, worker: Worker) -> Affinity | None:
    """On the target's GPUs; prefill and decode on one node where it has room, as keys and values go from one to the
    other."""
    products = gpu_products(parts)
    others = [kind for kind in parts.chosen.target.workers if kind != worker.type]
    on_gpus = near = None
    if products:
        required = NodeSelector(node_selector_terms=(_nodes(GPU_PRODUCT, "In", products),))
        on_gpus = NodeAffinity(required_during_scheduling_ignored_during_execution=required)
    if others:
        term = PodAffinityTerm(label_selector=pods_of(parts, *others), topology_key=HOSTNAME)
        preferred = (WeightedPodAffinityTerm(weight=100, pod_affinity_term=term),)
        near = PodAffinity(preferred_during_scheduling_ignored_during_execution=preferred)
    return Affinity(node_affinity=on_gpus, pod_affinity=near) if on_gpus or near else None


def _nodes(key: str, operator: Literal["In", "NotIn"], values: tuple[str, ...]) -> NodeSelectorTerm:
    return NodeSelectorTerm(match_expressions=(Requirement(key=key, operator=operator, values=values),))


def pods_of(parts: Parts, *types: str) -> LabelSelector:
    """The graph's pods of these types, by the labels that the operator sets."""
    expressions = (Requirement(key=parts.operator.component_type_label, operator="In", values=types),) if types else ()
    return LabelSelector(match_labels={parts.operator.graph_label: parts.name}, match_expressions=expressions)


def _frontend_affinity(parts: Parts) -> Affinity:
    """Apart from each other and off the GPU nodes where that can be: never a reason to serve nothing."""
    apart = PodAffinityTerm(label_selector=pods_of(parts, "frontend"), topology_key=HOSTNAME)
    off = PreferredNodes(weight=50, preference=_nodes(GPU_PRESENT, "NotIn", ("true",)))
    return Affinity(
        node_affinity=NodeAffinity(preferred_during_scheduling_ignored_during_execution=(off,)),
        pod_anti_affinity=PodAffinity(
            preferred_during_scheduling_ignored_during_execution=(
                WeightedPodAffinityTerm(weight=100, pod_affinity_term=apart),
            )
        ),
    )


def benchmark_affinity(parts: Parts) -> Affinity:
    """A load generator takes CPU from whatever it shares a node with: not on GPU nodes, not beside a worker."""
    apart = PodAffinityTerm(label_selector=pods_of(parts, *parts.chosen.target.workers), topology_key=HOSTNAME)
    off = _nodes(GPU_PRESENT, "NotIn", ("true",))
    if parts.all_on_gpu_nodes:
        return Affinity(
            node_affinity=NodeAffinity(
                preferred_during_scheduling_ignored_during_execution=(PreferredNodes(weight=100, preference=off),)
            )
        )
    return Affinity(
        node_affinity=NodeAffinity(
            required_during_scheduling_ignored_during_execution=NodeSelector(node_selector_terms=(off,))
        ),
        pod_anti_affinity=PodAffinity(required_during_scheduling_ignored_during_execution=(apart,)),
    )


# --- network -----------------------------------------------------------------------------------------------------


def network_policies(parts: Parts) -> tuple[NetworkPolicy, ...]:
    """Workers hear their own graph, and anyone in the cluster who reads their metrics; the frontend its one port."""
    anywhere = NetworkPolicyPeer(namespace_selector=LabelSelector())
    own = NetworkPolicyPeer(pod_selector=pods_of(parts))

    def policy(name: str, selected: LabelSelector, *rules: IngressRule) -> NetworkPolicy:
        return NetworkPolicy(
            metadata=parts.metadata(f"{parts.name}-{name}"),
            spec=NetworkPolicySpec(pod_selector=selected, policy_types=("Ingress",), ingress=rules),
        )

    return (
        policy(
            "frontend",
            pods_of(parts, "frontend"),
            IngressRule(sources=(anywhere,), ports=(NetworkPolicyPort(port=parts.operator.frontend_port),)),
            IngressRule(sources=(own,)),
        ),
        policy(
            "workers",
            pods_of(parts, *parts.chosen.target.workers),
            IngressRule(sources=(own,)),
            IngressRule(sources=(anywhere,), ports=(NetworkPolicyPort(port=parts.operator.system_port),)),
        ),
        NetworkPolicy(
            metadata=parts.metadata(f"{parts.name}-jobs"),
            spec=NetworkPolicySpec(
                pod_selector=LabelSelector(
                    match_labels={"app.kubernetes.io/instance": parts.name},
                    match_expressions=(Requirement(key="batch.kubernetes.io/job-name", operator="Exists"),),
                ),
                policy_types=("Ingress", "Egress"),
                egress=(EgressRule(),),
            ),
        ),
    )
