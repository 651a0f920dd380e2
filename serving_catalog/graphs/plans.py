"""What is applied to a namespace: the objects, in order, and the facts about them that a tool or a person needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from serving_catalog.entries import Part
from serving_catalog.graphs.objects import (
    Affinity,
    ConfigMap,
    DynamoGraphDeployment,
    Job,
    Namespace,
    NetworkPolicy,
    PersistentVolumeClaim,
    Resource,
    Toleration,
)
from serving_catalog.plans import PlannedModel


class VolumeLayout(Part):
    """What lies where on the model cache: the layout a host has, below one mount."""

    mount: str = "/model-cache"
    weights: str = "/model-cache/weights"
    staging: str = "/model-cache/staging"
    encodings: str = "/model-cache/encodings"
    benchmarks: str = "/model-cache/benchmarks"


class JobPlacement(Part):
    """Where a Job's pod goes."""

    node_selector: Mapping[str, str] = {}
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] = ()
    priority_class: str | None = None
    scheduler_name: str | None = None


class TokenKey(Part):
    """The Secret and its key that hold the Hugging Face token. Only the download reads it."""

    name: str
    key: str


class PlannedTraffic(Part):
    """One point of a benchmark. Lengths are tokens."""

    name: str
    title: str
    input_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    warmup_requests: int
    streaming: bool


class PlannedBenchmark(Part):
    """A benchmark run. gpus is what per-GPU figures divide by."""

    run_id: str
    gpus: int
    traffic: PlannedTraffic
    within_seconds: int  # the wait for the endpoint included
    artifacts: str  # directory on the model cache


class JobContext(Part):
    """Everything the Jobs of a graph are made from."""

    graph: str
    target: str
    namespace: str
    labels: Mapping[str, str]  # of every object and pod, and enough to select them
    annotations: Mapping[str, str]
    image: str
    benchmark_image: str
    pull_secrets: tuple[str, ...]
    requirements: Mapping[str, str]  # what may be installed, package: exact version (huggingface-hub, aiperf)
    environment: Mapping[str, str]  # proxies and the like, for the containers of every Job
    model: PlannedModel
    served_model_id: str
    claim: str
    volume: VolumeLayout
    token: TokenKey | None
    hub_endpoint: str | None
    package_index: str | None
    placement: JobPlacement
    benchmark_placement: JobPlacement  # apart from the GPU nodes and the graph's pods
    resources: Mapping[str, Mapping[str, str]]  # download, smoke, benchmark: cpu and memory the user asks for
    url: str  # of the frontend, inside the cluster
    gpus: int
    benchmark: PlannedBenchmark | None
    download_within_seconds: int
    endpoint_wait_seconds: int  # how long smoke test and benchmark wait for the endpoint before they begin
    smoke_within_seconds: int  # the wait included
    smoke_probes: tuple[str, ...]


class RequiredNodes(Part):
    """What one component's pods need of the cluster."""

    component: str
    pods: int
    gpus_per_pod: int
    architectures: tuple[str, ...]  # as kubernetes.io/arch says it: arm64, amd64
    gpu_products: tuple[str, ...]  # values of nvidia.com/gpu.product, exact; empty: no GPU
    node_selector: Mapping[str, str]
    tolerations: tuple[Toleration, ...]


class GraphPlan(Part):
    """Everything a namespace gets, and how to use it."""

    target: str
    release: str
    name: str
    namespace: str
    engine: str
    model: PlannedModel
    served_model_id: str
    gpu: str
    gpus: int
    runtime_image: str
    tools_image: str
    components: tuple[str, ...]
    required_nodes: tuple[RequiredNodes, ...]

    namespace_object: Namespace
    claim: PersistentVolumeClaim | None
    claim_name: str
    token: TokenKey | None
    pull_secrets: tuple[str, ...]
    programs: ConfigMap
    download: Job
    engine_config: ConfigMap
    graph: DynamoGraphDeployment
    smoke: Job
    benchmark: Job | None
    network_policies: tuple[NetworkPolicy, ...]
    job_context: JobContext

    frontend_service: str
    url: str
    port_forward_command: str
    curl_command: str
    watch_command: str
    artifacts: str | None
    load_within_seconds: int  # from the start of a worker's container until it serves
    ready_within_seconds: int  # that, and the pulls of images before it
    download_within_seconds: int
    smoke_within_seconds: int
    benchmark_within_seconds: int | None
    notes: tuple[str, ...]

    def objects(self) -> Iterator[Resource]:
        """Every object, in the order they are applied."""
        yield self.namespace_object
        yield from self.network_policies
        if self.claim is not None:
            yield self.claim
        yield self.programs
        yield self.download
        yield self.engine_config
        yield self.graph
        yield self.smoke
        if self.benchmark is not None:
            yield self.benchmark
