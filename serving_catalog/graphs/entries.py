"""What dynamo.yml and graphs.yml may say: Dynamo's releases, and the targets that are deployed with them.

As in serving_catalog/entries.py, unknown keys are errors at every level and every entry cites its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, StringConstraints, model_validator

from serving_catalog.entries import (
    AbsolutePath,
    Count,
    EngineName,
    Entry,
    EnvironmentName,
    Part,
    Seconds,
    Settings,
    Text,
    Url,
    Version,
)

Image = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][A-Za-z0-9._/:@-]*$")]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$")]
RouterMode = Literal["round-robin", "random", "power-of-two", "least-loaded", "kv"]
WorkerType = Literal["worker", "prefill", "decode"]
Effect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


# --- dynamo.yml --------------------------------------------------------------------------------------------------


class Chart(Entry):
    """The Helm chart that installs operator and CRDs."""

    name: Text
    repository: Url
    archive: Url  # {version} is replaced
    namespace: Text
    minimum_kubernetes: Version


class OperatorRules(Entry):
    """What the operator makes of a graph, and what it refuses."""

    graph_label: Text  # every pod of a graph carries it, with the graph's name
    component_type_label: Text
    namespace_label: Text  # its value is <namespace>-<graph>
    worker_hash_digits: Count  # workers are named <graph>-<component in lower case>-<hash>
    name_limit: Count
    image_tag: Text  # a tag that says a version; others need runtimeVersionOverride
    runtime_version: Text
    surge_annotation: Text
    unavailable_annotation: Text
    strategy_annotation: Text
    reserved_variables: Mapping[EnvironmentName, Text]  # variable: who sets it
    frontend_port: Count
    system_port: Count


class ProbeTimes(Entry):
    """How a worker is watched. The startup probe lasts as long as a load may take."""

    startup_path: AbsolutePath
    startup_period_seconds: Seconds
    liveness_path: AbsolutePath
    liveness_period_seconds: Seconds
    liveness_failures: Count
    timeout_seconds: Seconds


class Times(Entry):
    """Limits of every wait."""

    load_seconds: Seconds  # from the start of a worker's container until it serves
    start_seconds: Seconds  # beside that, until every container has started: images are pulled
    download_seconds: Seconds
    endpoint_seconds: Seconds  # until the endpoint of a Ready graph answers
    smoke_seconds: Seconds
    benchmark_seconds: Seconds
    termination_seconds: Seconds


class KvRouting(Entry):
    """What the workers must do for a frontend that routes by their keys and values."""

    settings: Settings


class GraphEngine(Entry):
    """How Dynamo runs an engine in a pod."""

    framework: Literal["trtllm", "vllm"]
    image: Image  # without a tag
    command: tuple[Text, ...]
    model_flag: Text
    options_flag: Text
    arguments: tuple[Text, ...]  # of every worker: the Harmony parsers
    environment: Mapping[EnvironmentName, str]
    managed_settings: Mapping[Text, Text]  # setting: why it cannot be overridden
    tensor_parallel_setting: Text
    sequence_length_setting: Text
    kv_routing: KvRouting


class Workaround(Entry):
    """Variables that a release's engine needs on some GPUs, where a setting has a value."""

    title: Text
    engine: EngineName
    gpus: tuple[Text, ...]
    setting: Text
    value: JsonValue
    environment: Mapping[EnvironmentName, str]


class EngineOfRelease(Part):
    """The engine inside a release's image.

    option_schema names the listing that options are checked against; schema_note says how near it is.
    """

    version: Text
    option_schema: Text
    schema_note: Text | None = None
    kv_events_arguments: tuple[Text, ...] = ()
    replaced_environment: Mapping[EnvironmentName, Settings] = {}  # no longer read: the settings that do the same


class KnownIssue(Part):
    issue: Text
    engine: EngineName | None = None  # both, unless one is named


class DynamoRelease(Entry):
    date: Annotated[str, StringConstraints(pattern=r"^\d{4}-\d{2}(-\d{2})?$")]
    chart_version: Version
    image_tag: Version
    graph_versions: tuple[Literal["v1alpha1", "v1beta1"], ...]
    nats_by_default: bool  # the chart's own default of global.nats.install
    event_plane: Literal["nats", "zmq"]  # what components use with Kubernetes discovery unless told otherwise
    engines: Mapping[EngineName, EngineOfRelease]
    workarounds: tuple[Text, ...] = ()
    known_issues: tuple[KnownIssue, ...] = ()


class Dynamo(Entry):
    default_release: Text
    chart: Chart
    operator: OperatorRules
    probes: ProbeTimes
    times: Times
    tools_image: Image
    benchmark_image: Image
    engines: Mapping[EngineName, GraphEngine]
    workarounds: Mapping[Text, Workaround]
    releases: Mapping[Text, DynamoRelease]

    @model_validator(mode="after")
    def _names_resolve(self) -> Self:
        if self.default_release not in self.releases:
            raise ValueError(
                f"default_release: {self.default_release!r} is not one of releases: {', '.join(self.releases)}"
            )
        for name, release in self.releases.items():
            for workaround in release.workarounds:
                if workaround not in self.workarounds:
                    raise ValueError(
                        f"releases.{name}.workarounds: {workaround!r} is not one of: {', '.join(self.workarounds)}"
                    )
        return self


# --- graphs.yml --------------------------------------------------------------------------------------------------


class GraphToleration(Part):
    key: Text
    operator: Literal["Exists", "Equal"]
    value: str | None = None
    effect: Effect | None = None


class GraphFrontend(Entry):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9]*$")]
    replicas: Count
    router_mode: RouterMode
    cpu: Quantity | None = None
    memory: Quantity | None = None


class GraphWorker(Entry):
    """The workers of one kind. Settings are paths in the engine's own options, as in engines/*.yml."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9]*$")]
    replicas: Count
    gpus: Count  # of one pod
    options_file: Annotated[str, StringConstraints(pattern=r"^[a-z]+\.yaml$")]
    arguments: tuple[Text, ...] = ()
    settings: Settings
    follows: Mapping[Text, Text] = {}  # setting: the setting it equals unless it is overridden itself
    environment: Mapping[EnvironmentName, str] = {}
    shared_memory: Quantity
    cpu: Quantity | None = None
    memory: Quantity | None = None


class GraphTraffic(Entry):
    """The shape of a target's benchmark. Lengths are tokens.

    published_gpus: what the published recipe multiplies by, where that is not the number of GPUs.
    prompt_overhead_tokens: what the chat format adds to a prompt.
    """

    title: Text
    input_tokens: Count
    output_tokens: Count
    concurrency_per_gpu: Count
    requests_per_slot: Count
    warmup_requests_per_slot: int
    published_gpus: Count | None = None
    prompt_overhead_tokens: int


class GraphTarget(Entry):
    title: Text
    graph_name: Text
    engine: EngineName
    gpu: Text
    gpus_per_node: Count
    gpu_tolerations: tuple[GraphToleration, ...]  # of the pods with GPUs
    tolerations: tuple[GraphToleration, ...] = ()  # of every pod
    cache_size: Quantity
    frontend: GraphFrontend
    workers: Annotated[Mapping[WorkerType, GraphWorker], Field(min_length=1)]
    traffic: GraphTraffic
    notes: tuple[Text, ...] = ()
