"""What the catalog's data files may say: one frozen type for each kind of entry.

Unknown keys are errors at every level, and every entry cites where its values come from. Sizes are bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints, model_validator

Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[int, Field(ge=1)]
Text = Annotated[str, StringConstraints(min_length=1)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Fingerprint = Annotated[str, StringConstraints(pattern=r"^[0-9A-F]{40}$")]
PciDeviceId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{4}$")]
Version = Annotated[str, StringConstraints(pattern=r"^[0-9][0-9A-Za-z.+~:-]*$")]
Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+(/\S*)?$")]
AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/\S*$")]
EnvironmentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
EngineName = Literal["tensorrt_llm", "vllm"]
ProfileName = Literal["low_latency", "max_throughput", "max_throughput_replicated"]
CpuArchitecture = Literal["x86_64", "aarch64"]
OpenModules = Literal["required", "recommended"]

REVISION = re.compile(r"[0-9a-f]{40}")


class Part(BaseModel):
    """A piece of an entry: frozen, and strict about keys and types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class Entry(Part):
    """A piece of data that says where it comes from."""

    source: Text


class Encoding(Entry):
    file: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$")]
    url: Url
    sha256: Sha256
    size_bytes: Bytes


class Model(Entry):
    repository: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+$")]
    revision: str
    ignore_patterns: tuple[Text, ...]
    size_bytes: Bytes
    weights_bytes: Bytes
    replicated_bytes: Bytes
    kv_bytes_per_token: Bytes
    kv_bytes_per_token_beyond_window: Bytes
    context_length: Count
    encodings: tuple[Text, ...]

    @model_validator(mode="after")
    def _revision_is_a_commit(self) -> Self:
        if not REVISION.fullmatch(self.revision):
            raise ValueError(
                f"revision: {self.revision!r} is not 40 lower-case hex digits; pin the commit, not a branch or tag"
            )
        return self


class Gpu(Entry):
    names: Annotated[tuple[Text, ...], Field(min_length=1)]
    pci_device_ids: Mapping[PciDeviceId, Text]
    memory_bytes: Bytes
    architecture: Text
    compute_capability: Annotated[str, StringConstraints(pattern=r"^\d+\.\d+$")]
    cpu_architecture: CpuArchitecture | Literal["any"]
    open_modules: OpenModules

    @model_validator(mode="after")
    def _ids_print_known_names(self) -> Self:
        for device_id, name in self.pci_device_ids.items():
            if name not in self.names:
                raise ValueError(f"pci_device_ids.{device_id}: {name!r} is not one of names: {', '.join(self.names)}")
        return self


class Platform(Entry):
    title: Text
    gpus: tuple[Text, ...]
    gpu_names: tuple[Text, ...]
    cpu_architecture: CpuArchitecture
    gpu_count: Count | None
    nvswitch_device_ids: tuple[PciDeviceId, ...]
    fabric_manager: bool
    nvlsm: bool
    imex: bool
    open_modules: OpenModules
    components: tuple[Literal["fabric_manager", "nvlsm", "infiniband_diags", "nscq", "nvsdm", "imex"], ...]
    modules: tuple[Text, ...]
    fabric_states: tuple[Text, ...]


class PackageBucket(Entry):
    """Package names of a range of driver branches."""

    from_branch: Count
    to_branch: Count
    pinning: tuple[Text, ...]
    driver_open: tuple[Text, ...]
    driver_proprietary: tuple[Text, ...]
    fabric_manager: tuple[Text, ...]
    nscq: tuple[Text, ...]
    imex: tuple[Text, ...]
    nvsdm: tuple[Text, ...]


class BranchlessPackages(Entry):
    nvlsm: tuple[Text, ...]
    infiniband_diags: tuple[Text, ...]
    kernel_modules_extra: tuple[Text, ...]
    kernel_headers: tuple[Text, ...]
    nvsdm_architectures: tuple[Text, ...]


class Packages(Part):
    cuda_repo: tuple[PackageBucket, ...]
    distro: tuple[PackageBucket, ...]
    always: BranchlessPackages


class Repositories(Entry):
    cuda: Url
    nvidia_container_toolkit: Url
    docker: Url
    huggingface: Url


class DriverRelease(Entry):
    branch: Annotated[str, StringConstraints(pattern=r"^\d{3}$")]
    version: Version
    minimum_branch: Count
    recommended_minimum_branch: Count

    @model_validator(mode="after")
    def _version_is_of_the_branch(self) -> Self:
        if not self.version.startswith(self.branch + "."):
            raise ValueError(f"version: {self.version} is not of branch {self.branch}")
        if int(self.branch) < self.minimum_branch:
            raise ValueError(f"branch: {self.branch} is below {self.minimum_branch}, the oldest that drives these GPUs")
        return self


class CudaKeyring(Entry):
    version: Version
    package: Text
    file: Text
    key_file: Text
    fingerprint: Fingerprint
    keyring: AbsolutePath
    retired_fingerprint: Fingerprint
    checksums: Mapping[Text, Sha256]


class CudaToolkit(Entry):
    version: Version
    package: Text
    forbidden_packages: tuple[Text, ...]


class ContainerToolkit(Entry):
    version: Version
    packages: tuple[Text, ...]
    avoid: tuple[Version, ...]
    key_url: Url
    fingerprint: Fingerprint
    keyring: AbsolutePath
    stale_files: tuple[AbsolutePath, ...]
    cdi_refresh_since: Version


class DockerRelease(Entry):
    version: Version
    minimum: Version
    packages: tuple[Text, ...]
    distribution_packages: tuple[Text, ...]
    conflicting_packages: tuple[Text, ...]
    key_file: Text
    fingerprint: Fingerprint
    keyring: AbsolutePath
    cdi_since: Version
    cdi_default_since: Version
    gpus_through_cdi_since: Version


class PythonTool(Entry):
    version: Version


class Releases(Part):
    repositories: Repositories
    nvidia_driver: DriverRelease
    cuda_keyring: CudaKeyring
    cuda_toolkit: CudaToolkit
    nvidia_container_toolkit: ContainerToolkit
    docker: DockerRelease
    huggingface_hub: PythonTool
    libtorrent: PythonTool
    aiperf: PythonTool


class Traffic(Entry):
    """A shape of benchmark traffic. Lengths are tokens."""

    title: Text
    input_tokens: Count
    output_tokens: Count
    concurrency: Annotated[tuple[Count, ...], Field(min_length=1)]
    requests_per_slot: Count
    minimum_requests: Count
    warmup_requests: int
    streaming: bool


# --- engines -----------------------------------------------------------------------------------------------------


class Cache(Part):
    """A directory a container fills while it starts, worth keeping between starts."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_]+$")]
    container_path: AbsolutePath
    environment: EnvironmentName | None = None


class Container(Entry):
    """How every release of an engine is run. `entrypoint` replaces the image's own and is the first word of argv."""

    entrypoint: Text | None
    port: Count
    ipc: Literal["host"]
    ulimits: Mapping[Text, int]
    weights_path: AbsolutePath
    encodings_path: AbsolutePath
    working_directory: AbsolutePath
    caches: tuple[Cache, ...]
    cache_bytes_per_process: Bytes
    host_memory_bytes_per_process: Bytes
    host_memory_bytes_per_gpu: Bytes
    stop_timeout_seconds: Seconds


class Health(Entry):
    path: AbsolutePath
    deep_path: AbsolutePath | None
    ready_within_seconds: Seconds


class MemoryUse(Entry):
    """What a process needs of a GPU beside weights and keys and values, and how it shares out what is left.

    fraction_of: `free` is what is left once weights are loaded (TensorRT-LLM), `total` the whole memory (vLLM).
    keeps_windows_whole: layers with a sliding window keep a sequence's keys and values as long as the others do.
    attention_replicated_settings: with any of these on (or above one), attention is whole on every GPU.
    """

    fraction_of: Literal["free", "total"]
    fraction_setting: Text
    fraction_default: float
    batched_tokens_setting: Text
    batched_tokens_default: Count
    sequence_length_setting: Text
    keeps_windows_whole: bool
    attention_replicated_settings: tuple[Text, ...]
    weights_factor: Annotated[float, Field(ge=1)]
    runtime_bytes: Bytes
    bytes_per_batched_token: Bytes


class CommonSetting(Entry):
    """A name every engine understands, and what this one calls it."""

    setting: Text
    title: Text


class Unsupported(Entry):
    """Values that an engine accepts and that cannot work on an architecture."""

    architecture: Text
    setting: Text
    values: Annotated[tuple[str | int | bool, ...], Field(min_length=1)]
    reason: Text


class Flag(Part):
    """A word of the command line. Exactly one of the four, in the order they are typed."""

    flag: Text | None = None
    setting: Text | None = None  # the value of this engine setting; left out when the plan has none
    literal: Text | None = None  # this value
    value: Literal["host", "port", "options_file"] | None = None  # something the planner knows
    switch: bool = False  # no value: typed when the setting is true (or always, without a setting)


class GpuCounts(Part):
    """GPUs on a host that a profile serves, and how many of them one process takes (null: all)."""

    counts: Annotated[tuple[Count, ...], Field(min_length=1)]
    gpus_per_process: Count | None = None


Settings = Mapping[str, JsonValue]


class Profile(Entry):
    """Engine settings of a profile, as `setting path: value`.

    A value that starts with $ is another setting's value; $gpus is the number of GPUs of the process.
    Later groups win: settings, by_architecture, several_gpus or single_gpu.
    """

    title: Text
    settings: Settings
    by_architecture: Mapping[Text, Settings] = {}
    several_gpus: Settings = {}
    several_gpus_by_architecture: Mapping[Text, Settings] = {}
    single_gpu: Settings = {}
    notes: tuple[Text, ...] = ()
    traffic: tuple[Text, ...]


class EngineRelease(Entry):
    """One release of an engine, and its command-line dialect."""

    image: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][A-Za-z0-9._/:@-]*$")]
    image_bytes: Bytes
    architectures: tuple[CpuArchitecture, ...]
    launcher: tuple[Text, ...]
    flags: tuple[Flag, ...]
    option_schema: Text
    follows: Mapping[Text, Text] = {}  # setting: the setting it equals unless it is overridden itself
    environment: Mapping[EnvironmentName, str]
    environment_by_architecture: Mapping[Text, Mapping[EnvironmentName, str]] = {}
    environment_several_gpus_by_architecture: Mapping[Text, Mapping[EnvironmentName, str]] = {}
    environment_sets: Mapping[EnvironmentName, Text] = {}  # variable: the setting it decides
    unread_environment: Mapping[EnvironmentName, Text] = {}  # variable: what to use instead
    paste: Literal["guide", "local"]
    ready_within_seconds: Seconds | None = None
    profiles: Mapping[ProfileName, Profile]


class Engine(Entry):
    title: Text
    default_release: Text
    container: Container
    health: Health
    memory: MemoryUse
    common_settings: Mapping[Text, CommonSetting]
    managed_settings: Mapping[Text, Text]  # setting: why it cannot be overridden
    environment_setting: Text | None = None  # the option that is a mapping of environment variables
    unsupported: tuple[Unsupported, ...] = ()
    divides: Mapping[Text, Text] = {}  # setting: the setting it must divide
    replaces: Mapping[Text, Text] = {}  # setting: the other way to say the same, which a plan then leaves out
    gpu_counts: Mapping[ProfileName, Mapping[Text, GpuCounts]]
    releases: Mapping[Text, EngineRelease]

    @model_validator(mode="after")
    def _default_release_exists(self) -> Self:
        if self.default_release not in self.releases:
            raise ValueError(
                f"default_release: {self.default_release!r} is not one of releases: {', '.join(self.releases)}"
            )
        return self
