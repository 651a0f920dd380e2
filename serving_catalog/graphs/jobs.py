"""The Jobs of a graph: bring the weights, ask the endpoint, measure it. And the ConfigMap with what they run.

Every pod is restricted as the Pod Security Standards mean it, runs as the user that the operator gives volumes to
(fsGroup 1000), writes to its claim and to two empty directories, and has no service account token. The last line of
each log is one JSON object; the end of a failed container's log is kept in the pod's status.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

from serving_catalog.entries import Part
from serving_catalog.graphs.objects import (
    Capabilities,
    ClaimVolume,
    ConfigMap,
    ConfigMapVolume,
    Container,
    ContainerSecurity,
    EmptyDirVolume,
    ExitCodes,
    Job,
    JobSpec,
    LocalReference,
    Metadata,
    PodCondition,
    PodFailurePolicy,
    PodFailureRule,
    PodSecurity,
    PodSpec,
    PodTemplate,
    ResourceNeeds,
    SeccompProfile,
    SecretKey,
    Sysctl,
    ValueFrom,
    Variable,
    Volume,
    VolumeMount,
)
from serving_catalog.graphs.plans import JobContext, JobPlacement, PlannedBenchmark
from serving_catalog.graphs.programs import (
    BENCHMARK,
    BENCHMARK_CONSTRAINTS,
    FETCH,
    FETCH_CONSTRAINTS,
    INSTALL,
    PROBE,
    program_texts,
)

PYTHON = "python3"
PROGRAMS_PATH = "/programs"
TOOLS_PATH = "/tools"
SCRATCH_PATH = "/tmp"  # noqa: S108 - in the container, an empty directory of its own
USER = 1000  # the runtime images' user and the operator's default fsGroup: volumes change hands once, not each time
# Of fetch_weights.py: trying again would meet the same failure (a wrong argument; the token, the revision).
HOPELESS = (2, 3)

DOWNLOAD_ATTEMPTS = 4
SMOKE_ATTEMPTS = 1
KEEP_FREE_BYTES = 1 << 30
PROGRESS_SECONDS = 30
ANSWER_SECONDS = 120
INSTALL_SECONDS = 300
LEAST_POINT_SECONDS = 60
# ai-dynamo/dynamo recipes/gpt-oss-120b/trtllm/*/perf.yaml
AIPERF_WORKERS = 252
AIPERF_RECORD_PROCESSORS = 32
AIPERF_DATASET_ENTRIES = 12800
AIPERF_CONNECTION_LIMIT = 252
# A connection for each request in flight, and closed ones linger. The recipe runs privileged to set this; it is one of
# Kubernetes' safe sysctls since 1.18 (pkg/kubelet/sysctl/safe_sysctls.go), and allowed by the restricted standard.
PORT_RANGE = Sysctl(name="net.ipv4.ip_local_port_range", value="1024 65000")

# cpu and memory asked for, and the memory limit. The download streams: what it needs does not grow with the weights.
# AIPerf 0.13.0 with 12 workers and 4 record processors: 33 processes, 1.4 GiB together. A whole run has about 290.
_RESOURCES: Mapping[str, tuple[str, str, str]] = {
    "download": ("2", "1Gi", "4Gi"),
    "smoke": ("100m", "128Mi", "512Mi"),
    "benchmark": ("8", "24Gi", "64Gi"),
}
_SCRATCH_SIZE = {"download": "1Gi", "smoke": "64Mi", "benchmark": "16Gi"}
_TOOLS_SIZE = {"download": "1Gi", "benchmark": "6Gi"}


class GraphJobs(Part):
    """What the Jobs of a graph are, ready to be applied."""

    programs: ConfigMap
    download: Job
    smoke: Job
    benchmark: Job | None


def plan_jobs(context: JobContext) -> GraphJobs:
    """Everything that a graph's Jobs need."""
    programs = job_programs(context)
    return GraphJobs(
        programs=programs,
        download=download_job(context, programs),
        smoke=smoke_job(context, programs),
        benchmark=benchmark_job(context, programs, context.benchmark) if context.benchmark is not None else None,
    )


def job_programs(context: JobContext) -> ConfigMap:
    """The programs as they lie in the repository. Named by their content: a change is another object."""
    data = program_texts()
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:8]
    return ConfigMap(metadata=_metadata(context, f"{context.graph}-programs-{digest}"), data=data, immutable=True)


def download_job(context: JobContext, programs: ConfigMap) -> Job:
    """Weights and encodings onto the claim. What is there and verified costs no request, not even for the tools."""
    fetch = _fetch_arguments(context)
    install = _install(
        context,
        "download",
        "huggingface-hub",
        FETCH_CONSTRAINTS,
        ("--unless", PYTHON, f"{PROGRAMS_PATH}/{FETCH}", "check", *fetch),
        needs_claim=True,
    )
    token = () if context.token is None else (_secret("HF_TOKEN", context.token.name, context.token.key),)
    endpoint = () if context.hub_endpoint is None else (Variable(name="HF_ENDPOINT", value=context.hub_endpoint),)
    download = _container(
        context,
        "download",
        "download",
        (PYTHON, f"{PROGRAMS_PATH}/{FETCH}"),
        (
            "fetch",
            *fetch,
            f"--keep-free-bytes={KEEP_FREE_BYTES}",
            f"--progress-interval={PROGRESS_SECONDS}",
            # Another graph's download of the same weights: this one finds them done.
            f"--lock-wait={context.download_within_seconds}",
            "--report=line",
        ),
        env=(Variable(name="PYTHONPATH", value=TOOLS_PATH), *endpoint, *token),
        mounts=(_tools(), _claim(context)),
    )
    return _job(
        context,
        "download",
        f"{context.graph}-download",
        programs,
        init=(install,),
        main=download,
        placement=context.placement,
        attempts=DOWNLOAD_ATTEMPTS,
        within_seconds=context.download_within_seconds,
        hopeless=True,
    )


def smoke_job(context: JobContext, programs: ConfigMap) -> Job:
    """What a user would ask first. Standard library only: nothing is installed, nothing is written."""
    return _job(
        context,
        "smoke",
        f"{context.graph}-smoke",
        programs,
        init=(),
        main=_probe(context, "smoke", "smoke", context.smoke_probes),
        placement=context.placement,
        attempts=SMOKE_ATTEMPTS,
        within_seconds=context.smoke_within_seconds,
    )


def benchmark_job(context: JobContext, programs: ConfigMap, benchmark: PlannedBenchmark) -> Job:
    """AIPerf against the frontend. It waits for the endpoint, runs once, and fails when AIPerf or a request does."""
    traffic = benchmark.traffic
    shape = {
        "name": traffic.name,
        "input_tokens": traffic.input_tokens,
        "output_tokens": traffic.output_tokens,
        "concurrency": [traffic.concurrency],
        "requests_per_slot": 0,
        "minimum_requests": traffic.requests,
        "warmup_requests": traffic.warmup_requests,
        "streaming": traffic.streaming,
    }
    about = {
        "graph": context.graph,
        "target": context.target,
        "run": benchmark.run_id,
        "aiperf": context.requirements["aiperf"],
    }
    left = benchmark.within_seconds - context.endpoint_wait_seconds - INSTALL_SECONDS
    measure = _container(
        context,
        "benchmark",
        "benchmark",
        (PYTHON, f"{PROGRAMS_PATH}/{BENCHMARK}"),
        (
            f"--url={context.url}",
            f"--model={context.served_model_id}",
            f"--tokenizer={context.model.repository}",
            f"--tokenizer-revision={context.model.revision}",
            f"--tokenizer-cache={context.volume.weights}",
            f"--shape={_json(shape)}",
            f"--workers={AIPERF_WORKERS}",
            f"--record-processors={AIPERF_RECORD_PROCESSORS}",
            f"--dataset-entries={AIPERF_DATASET_ENTRIES}",
            f"--gpus={benchmark.gpus}",
            f"--about={_json(about)}",
            f"--home={SCRATCH_PATH}",
            f"--timeout={max(LEAST_POINT_SECONDS, left)}",
            f"--output={benchmark.artifacts}",
            "--report=line",
        ),
        env=(
            Variable(name="PYTHONPATH", value=TOOLS_PATH),
            Variable(name="AIPERF_HTTP_CONNECTION_LIMIT", value=str(AIPERF_CONNECTION_LIMIT)),
        ),
        mounts=(_tools(), _claim(context)),
        image=context.benchmark_image,
    )
    wait = _probe(context, "benchmark", "wait", ("health", "model", "completion"))
    install = _install(context, "benchmark", "aiperf", BENCHMARK_CONSTRAINTS, image=context.benchmark_image)
    return _job(
        context,
        "benchmark",
        f"{context.graph}-benchmark-{benchmark.run_id}",
        programs,
        init=(install, wait),
        main=measure,
        placement=context.benchmark_placement,
        attempts=0,
        within_seconds=benchmark.within_seconds,
        sysctls=(PORT_RANGE,),
    )


# --- containers --------------------------------------------------------------------------------------------------


def _fetch_arguments(context: JobContext) -> tuple[str, ...]:
    """What says which weights, and where. The same for looking and for fetching."""
    model, volume = context.model, context.volume
    encodings = [{"file": e.file, "url": e.url, "sha256": e.sha256} for e in model.encodings]
    return (
        f"--repository={model.repository}",
        f"--revision={model.revision}",
        f"--weights-directory={volume.weights}",
        f"--staging-directory={volume.staging}",
        f"--encodings-directory={volume.encodings}",
        f"--ignore-patterns={' '.join(model.ignore_patterns)}",
        f"--encodings={_json(encodings)}",
    )


def _install(
    context: JobContext,
    job: str,
    package: str,
    constraints: str,
    unless: tuple[str, ...] = (),
    needs_claim: bool = False,
    image: str | None = None,
) -> Container:
    index = () if context.package_index is None else (Variable(name="PIP_INDEX_URL", value=context.package_index),)
    return _container(
        context,
        job,
        "install",
        (PYTHON, f"{PROGRAMS_PATH}/{INSTALL}"),
        (
            f"{package}=={context.requirements[package]}",
            f"--target={TOOLS_PATH}",
            f"--constraints={PROGRAMS_PATH}/{constraints}",
            *unless,
        ),
        env=index,
        mounts=(_tools(), *((_claim(context, read_only=True),) if needs_claim else ())),
        image=image,
    )


def _probe(context: JobContext, job: str, name: str, probes: Iterable[str]) -> Container:
    return _container(
        context,
        job,
        name,
        (PYTHON, f"{PROGRAMS_PATH}/{PROBE}"),
        (
            f"--url={context.url}",
            f"--model={context.served_model_id}",
            f"--name={context.graph}",
            "--place=kubernetes",
            f"--probes={','.join(probes)}",
            f"--wait={context.endpoint_wait_seconds}",
            f"--answer-timeout={ANSWER_SECONDS}",
            "--report=line",
        ),
    )


def _container(
    context: JobContext,
    job: str,
    name: str,
    command: tuple[str, ...],
    args: tuple[str, ...],
    env: tuple[Variable, ...] = (),
    mounts: tuple[VolumeMount, ...] = (),
    image: str | None = None,
) -> Container:
    own = {variable.name for variable in env}
    common = {"HOME": SCRATCH_PATH, "PYTHONUNBUFFERED": "1", **context.environment}
    return Container(
        name=name,
        image=image or context.image,
        working_dir=SCRATCH_PATH,
        command=command,
        args=args,
        env=(*(Variable(name=key, value=value) for key, value in common.items() if key not in own), *env),
        resources=_resources(context, job),
        security_context=ContainerSecurity(
            allow_privilege_escalation=False,
            capabilities=Capabilities(drop=("ALL",)),
            read_only_root_filesystem=True,
            run_as_non_root=True,
        ),
        # A failed container's last lines, the JSON object among them, are in the pod's status.
        termination_message_policy="FallbackToLogsOnError",
        volume_mounts=(
            VolumeMount(name="programs", mount_path=PROGRAMS_PATH, read_only=True),
            VolumeMount(name="scratch", mount_path=SCRATCH_PATH),
            *mounts,
        ),
    )


def _resources(context: JobContext, job: str) -> ResourceNeeds:
    """What was asked for, or our own. No limit of the processor: it would only make the run longer."""
    cpu, memory, limit = _RESOURCES[job]
    asked = context.resources.get(job, {})
    return ResourceNeeds(
        requests={"cpu": asked.get("cpu", cpu), "memory": asked.get("memory", memory)},
        limits={"memory": asked.get("memory", limit)},
    )


def _tools() -> VolumeMount:
    return VolumeMount(name="tools", mount_path=TOOLS_PATH)


def _claim(context: JobContext, read_only: bool = False) -> VolumeMount:
    return VolumeMount(name="model-cache", mount_path=context.volume.mount, read_only=read_only)


def _secret(variable: str, name: str, key: str) -> Variable:
    return Variable(name=variable, value_from=ValueFrom(secret_key_ref=SecretKey(name=name, key=key)))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


# --- the Job -----------------------------------------------------------------------------------------------------


def _metadata(context: JobContext, name: str | None, component: str | None = None) -> Metadata:
    more = {} if component is None else {"app.kubernetes.io/component": component}
    return Metadata(
        name=name,
        namespace=context.namespace if name is not None else None,
        labels={**context.labels, **more},
        annotations=context.annotations,
    )


def _job(
    context: JobContext,
    kind: str,
    name: str,
    programs: ConfigMap,
    *,
    init: tuple[Container, ...],
    main: Container,
    placement: JobPlacement,
    attempts: int,
    within_seconds: int,
    hopeless: bool = False,
    sysctls: tuple[Sysctl, ...] = (),
) -> Job:
    mounted = {mount.name for container in (*init, main) for mount in container.volume_mounts}
    volumes = (
        Volume(name="programs", config_map=ConfigMapVolume(name=programs.name)),
        Volume(name="scratch", empty_dir=EmptyDirVolume(size_limit=_SCRATCH_SIZE[kind])),
        Volume(name="tools", empty_dir=EmptyDirVolume(size_limit=_TOOLS_SIZE.get(kind))),
        Volume(name="model-cache", persistent_volume_claim=ClaimVolume(claim_name=context.claim)),
    )
    # An eviction or a drained node says nothing of the work: it counts for no attempt.
    rules = [PodFailureRule(action="Ignore", on_pod_conditions=(PodCondition(type="DisruptionTarget"),))]
    if hopeless:
        codes = ExitCodes(container_name=main.name, operator="In", values=HOPELESS)
        rules.append(PodFailureRule(action="FailJob", on_exit_codes=codes))
    return Job(
        metadata=_metadata(context, name, kind),
        spec=JobSpec(
            backoff_limit=attempts,
            pod_failure_policy=PodFailurePolicy(rules=tuple(rules)),
            active_deadline_seconds=within_seconds,
            completions=1,
            parallelism=1,
            template=PodTemplate(
                metadata=_metadata(context, None, kind),
                spec=PodSpec(
                    containers=(main,),
                    init_containers=init,
                    volumes=tuple(volume for volume in volumes if volume.name in mounted),
                    restart_policy="Never",
                    automount_service_account_token=False,
                    enable_service_links=False,
                    node_selector=placement.node_selector,
                    affinity=placement.affinity,
                    tolerations=placement.tolerations,
                    priority_class_name=placement.priority_class,
                    scheduler_name=placement.scheduler_name,
                    image_pull_secrets=tuple(LocalReference(name=secret) for secret in context.pull_secrets),
                    security_context=PodSecurity(
                        run_as_non_root=True,
                        run_as_user=USER,
                        run_as_group=USER,
                        fs_group=USER,
                        fs_group_change_policy="OnRootMismatch",
                        seccomp_profile=SeccompProfile(type="RuntimeDefault"),
                        sysctls=sysctls,
                    ),
                ),
            ),
        ),
    )
