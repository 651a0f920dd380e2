"""Kubernetes objects as typed, frozen data: the API's field names in snake case, `.manifest()` for the API's own form.

A field that equals its default is left out of the manifest: the API server has the same default, or none. So `False`
and `{}` are said exactly where they are passed and differ from the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Quantities = Mapping[str, str]  # such as {"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": "4"}

GPU_RESOURCE = "nvidia.com/gpu"


class KubernetesPart(BaseModel):
    """A piece of an object: frozen, strict about names and types, written in camel case."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        protected_namespaces=(),
        alias_generator=to_camel,
        populate_by_name=True,
    )


class Metadata(KubernetesPart):
    name: str | None = None
    namespace: str | None = None
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}


class Resource(KubernetesPart):
    """A whole object, with what says which kind it is."""

    API_VERSION: ClassVar[str]
    KIND: ClassVar[str]

    metadata: Metadata

    @property
    def name(self) -> str:
        assert self.metadata.name is not None
        return self.metadata.name

    def manifest(self) -> dict[str, Any]:
        """The object as the API server takes it: plain JSON data."""
        body = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return {"apiVersion": self.API_VERSION, "kind": self.KIND, **body}


# --- pods --------------------------------------------------------------------------------------------------------


class SecretKey(KubernetesPart):
    name: str
    key: str
    optional: bool | None = None


class FieldReference(KubernetesPart):
    field_path: str


class ValueFrom(KubernetesPart):
    secret_key_ref: SecretKey | None = None
    field_ref: FieldReference | None = None


class Variable(KubernetesPart):
    """An environment variable: a value, or where it comes from."""

    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class ContainerPort(KubernetesPart):
    name: str
    container_port: int
    protocol: Literal["TCP", "UDP"] = "TCP"


class VolumeMount(KubernetesPart):
    name: str
    mount_path: str
    read_only: bool = False
    sub_path: str | None = None


class ResourceNeeds(KubernetesPart):
    requests: Quantities = {}
    limits: Quantities = {}


class Capabilities(KubernetesPart):
    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()


class SeccompProfile(KubernetesPart):
    type: Literal["RuntimeDefault", "Unconfined", "Localhost"]


class ContainerSecurity(KubernetesPart):
    allow_privilege_escalation: bool | None = None
    capabilities: Capabilities | None = None
    read_only_root_filesystem: bool | None = None
    run_as_non_root: bool | None = None
    run_as_user: int | None = None
    run_as_group: int | None = None
    seccomp_profile: SeccompProfile | None = None


class Sysctl(KubernetesPart):
    name: str
    value: str


class PodSecurity(KubernetesPart):
    run_as_non_root: bool | None = None
    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None
    fs_group_change_policy: Literal["OnRootMismatch", "Always"] | None = None
    seccomp_profile: SeccompProfile | None = None
    sysctls: tuple[Sysctl, ...] = ()


class HttpGet(KubernetesPart):
    path: str
    port: int | str


class Probe(KubernetesPart):
    http_get: HttpGet | None = None
    initial_delay_seconds: int | None = None
    period_seconds: int | None = None
    timeout_seconds: int | None = None
    success_threshold: int | None = None
    failure_threshold: int | None = None


class Container(KubernetesPart):
    name: str
    image: str | None = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    working_dir: str | None = None
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: tuple[Variable, ...] = ()
    ports: tuple[ContainerPort, ...] = ()
    resources: ResourceNeeds | None = None
    startup_probe: Probe | None = None
    readiness_probe: Probe | None = None
    liveness_probe: Probe | None = None
    security_context: ContainerSecurity | None = None
    termination_message_policy: Literal["File", "FallbackToLogsOnError"] | None = None
    volume_mounts: tuple[VolumeMount, ...] = ()


class KeyToPath(KubernetesPart):
    key: str
    path: str
    mode: int | None = None


class ConfigMapVolume(KubernetesPart):
    name: str
    default_mode: int | None = None
    items: tuple[KeyToPath, ...] = ()


class ClaimVolume(KubernetesPart):
    claim_name: str
    read_only: bool = False


class EmptyDirVolume(KubernetesPart):
    medium: Literal["Memory"] | None = None
    size_limit: str | None = None


class Volume(KubernetesPart):
    name: str
    config_map: ConfigMapVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None
    empty_dir: EmptyDirVolume | None = None


class Toleration(KubernetesPart):
    key: str | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class Requirement(KubernetesPart):
    """One line of a label selector. The operators of nodes (Gt, Lt) are not needed here."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()


class LabelSelector(KubernetesPart):
    match_labels: Mapping[str, str] = {}
    match_expressions: tuple[Requirement, ...] = ()


class NodeSelectorTerm(KubernetesPart):
    match_expressions: tuple[Requirement, ...] = ()


class NodeSelector(KubernetesPart):
    node_selector_terms: tuple[NodeSelectorTerm, ...]


class PreferredNodes(KubernetesPart):
    weight: Annotated[int, Field(ge=1, le=100)]
    preference: NodeSelectorTerm


class NodeAffinity(KubernetesPart):
    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: tuple[PreferredNodes, ...] = ()


class PodAffinityTerm(KubernetesPart):
    label_selector: LabelSelector
    topology_key: str


class WeightedPodAffinityTerm(KubernetesPart):
    weight: Annotated[int, Field(ge=1, le=100)]
    pod_affinity_term: PodAffinityTerm


class PodAffinity(KubernetesPart):
    """Pods to be near to, or (as pod_anti_affinity) apart from."""

    required_during_scheduling_ignored_during_execution: tuple[PodAffinityTerm, ...] = ()
    preferred_during_scheduling_ignored_during_execution: tuple[WeightedPodAffinityTerm, ...] = ()


class Affinity(KubernetesPart):
    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class LocalReference(KubernetesPart):
    name: str


class PodSpec(KubernetesPart):
    containers: tuple[Container, ...]
    init_containers: tuple[Container, ...] = ()
    volumes: tuple[Volume, ...] = ()
    restart_policy: Literal["Always", "OnFailure", "Never"] | None = None
    service_account_name: str | None = None
    automount_service_account_token: bool | None = None
    enable_service_links: bool | None = None
    node_selector: Mapping[str, str] = {}
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] = ()
    priority_class_name: str | None = None
    scheduler_name: str | None = None
    image_pull_secrets: tuple[LocalReference, ...] = ()
    security_context: PodSecurity | None = None
    termination_grace_period_seconds: int | None = None


class PodTemplate(KubernetesPart):
    metadata: Metadata = Metadata()
    spec: PodSpec


# --- objects -----------------------------------------------------------------------------------------------------


class Namespace(Resource):
    API_VERSION = "v1"
    KIND = "Namespace"


class ConfigMap(Resource):
    API_VERSION = "v1"
    KIND = "ConfigMap"

    data: Mapping[str, str]
    immutable: bool | None = None


class ClaimSpec(KubernetesPart):
    access_modes: tuple[str, ...]
    storage_class_name: str | None = None
    resources: ResourceNeeds


class PersistentVolumeClaim(Resource):
    API_VERSION = "v1"
    KIND = "PersistentVolumeClaim"

    spec: ClaimSpec


class ExitCodes(KubernetesPart):
    operator: Literal["In", "NotIn"]
    values: tuple[int, ...]
    container_name: str | None = None


class PodCondition(KubernetesPart):
    type: str
    status: Literal["True", "False", "Unknown"] = "True"


class PodFailureRule(KubernetesPart):
    """What a Job does about a failed pod: exactly one of the two says which pods."""

    action: Literal["FailJob", "Ignore", "Count"]
    on_exit_codes: ExitCodes | None = None
    on_pod_conditions: tuple[PodCondition, ...] = ()


class PodFailurePolicy(KubernetesPart):
    rules: tuple[PodFailureRule, ...]


class JobSpec(KubernetesPart):
    backoff_limit: int | None = None
    pod_failure_policy: PodFailurePolicy | None = None
    active_deadline_seconds: int | None = None
    completions: int | None = None
    parallelism: int | None = None
    ttl_seconds_after_finished: int | None = None
    template: PodTemplate


class Job(Resource):
    API_VERSION = "batch/v1"
    KIND = "Job"

    spec: JobSpec


class NetworkPolicyPort(KubernetesPart):
    protocol: Literal["TCP", "UDP"] = "TCP"
    port: int | None = None
    end_port: int | None = None


class IpBlock(KubernetesPart):
    cidr: str
    # "except" is a word of Python.
    excluded: tuple[str, ...] = Field(default=(), alias="except")


class NetworkPolicyPeer(KubernetesPart):
    pod_selector: LabelSelector | None = None
    namespace_selector: LabelSelector | None = None
    ip_block: IpBlock | None = None


class IngressRule(KubernetesPart):
    # "from" is a word of Python.
    sources: tuple[NetworkPolicyPeer, ...] = Field(default=(), alias="from")
    ports: tuple[NetworkPolicyPort, ...] = ()


class EgressRule(KubernetesPart):
    to: tuple[NetworkPolicyPeer, ...] = ()
    ports: tuple[NetworkPolicyPort, ...] = ()


class NetworkPolicySpec(KubernetesPart):
    pod_selector: LabelSelector
    policy_types: tuple[Literal["Ingress", "Egress"], ...]
    ingress: tuple[IngressRule, ...] = ()
    egress: tuple[EgressRule, ...] = ()


class NetworkPolicy(Resource):
    API_VERSION = "networking.k8s.io/v1"
    KIND = "NetworkPolicy"

    spec: NetworkPolicySpec


class GraphComponent(KubernetesPart):
    """One component of a graph: its pods are made of `pod_template`, with the program in the container `main`."""

    name: str
    type: Literal["frontend", "worker", "prefill", "decode"]
    replicas: Annotated[int, Field(ge=0)]
    shared_memory_size: str | None = None
    runtime_version_override: str | None = None
    pod_template: PodTemplate


class GraphSpec(KubernetesPart):
    backend_framework: Literal["trtllm", "vllm"]
    components: tuple[GraphComponent, ...]
    annotations: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}


class DynamoGraphDeployment(Resource):
    API_VERSION = "nvidia.com/v1beta1"
    KIND = "DynamoGraphDeployment"

    spec: GraphSpec
