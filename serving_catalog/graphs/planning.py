"""From a request to a plan: which objects a namespace gets.

Everything that differs between targets, releases and engines is data. Every problem of a request is reported at once,
before anything is created.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from serving_catalog.errors import PlanError, nearest
from serving_catalog.graphs.components import (
    ARCHITECTURE,
    HOSTNAME,
    Parts,
    architecture,
    benchmark_affinity,
    cache_folder,
    engine_config,
    gpu_products,
    graph,
    network_policies,
    tolerations,
)
from serving_catalog.graphs.jobs import plan_jobs
from serving_catalog.graphs.objects import (
    GPU_RESOURCE,
    ClaimSpec,
    Metadata,
    Namespace,
    PersistentVolumeClaim,
    ResourceNeeds,
)
from serving_catalog.graphs.plans import (
    GraphPlan,
    JobContext,
    JobPlacement,
    PlannedBenchmark,
    PlannedTraffic,
    RequiredNodes,
    TokenKey,
    VolumeLayout,
)
from serving_catalog.graphs.requests import BenchmarkRequest, GraphRequest
from serving_catalog.graphs.words import (
    image_problem,
    keys_problems,
    label_problem,
    labels_problems,
    mirrored,
    size_of,
    subdomain_problem,
)
from serving_catalog.graphs.workers import (
    Chosen,
    Worker,
    frontend_environment,
    plan_worker,
    prompt_problems,
    split_overrides,
    transfer_problems,
)
from serving_catalog.loading import Catalog
from serving_catalog.plans import PlannedModel, planned_model

API_VERSION = "v1beta1"
_OWN_LABELS = {"app.kubernetes.io/name": "gpt-oss", "app.kubernetes.io/managed-by": "gpt-oss-on-nvidia"}
_INSTANCE = "app.kubernetes.io/instance"
# Beside weights and encodings: results of benchmarks, and the file system's own.
_CACHE_MARGIN = 1.05
JOBS = ("download", "smoke", "benchmark")


def plan_graph(request: GraphRequest, catalog: Catalog) -> GraphPlan:
    """Turn a request into a plan, or raise `PlanError` naming each field, its value and what is allowed."""
    chosen = _choose(request, catalog)
    target, dynamo = chosen.target, catalog.dynamo
    name = request.name or target.graph_name
    image = _runtime_image(request, chosen)
    problems = [
        *_name_problems(request, name, chosen),
        *_label_problems(request),
        *_replica_problems(request, chosen),
        *_resource_problems(request, chosen),
        *_image_problems(request, image, chosen),
        *_secret_problems(request),
    ]
    overrides, wrong = split_overrides(request.overrides, chosen)
    variables, frontend_wrong = frontend_environment(overrides["frontend"], chosen)
    problems += [*wrong, *frontend_wrong]
    kv_routing = (request.router_mode or target.frontend.router_mode) == "kv"
    workers: dict[str, Worker] = {}
    for kind, entry in target.workers.items():
        replicas = request.replicas.get(kind, entry.replicas)
        workers[kind], wrong = plan_worker(kind, replicas, overrides[kind], chosen, kv_routing)
        problems += wrong
    problems += transfer_problems(workers, chosen)
    problems += _cache_problems(request, workers, chosen)
    problems += _node_problems(request, workers, chosen)
    benchmark, wrong = _benchmark(request, name, workers, chosen)
    problems += wrong
    if problems:
        raise PlanError(list(dict.fromkeys(problems)))

    volume = VolumeLayout()
    model = planned_model(chosen.model_name, chosen.model, catalog.encodings)
    if request.encodings_url is not None:
        base = request.encodings_url.rstrip("/")
        moved = tuple(e.model_copy(update={"url": f"{base}/{e.file}"}) for e in model.encodings)
        model = model.model_copy(update={"encodings": moved})
    parts = Parts(
        request=request,
        chosen=chosen,
        name=name,
        image=image,
        labels={**_OWN_LABELS, _INSTANCE: name, **request.labels},
        volume=volume,
        claim=request.model_cache.claim,
        snapshot=f"{volume.weights}/{cache_folder(model.repository)}/snapshots/{model.revision}",
        load_seconds=request.load_timeout_seconds or dynamo.times.load_seconds,
        download_seconds=request.download_timeout_seconds or dynamo.times.download_seconds,
    )
    config = engine_config(parts, workers)
    context = _job_context(parts, model, workers, benchmark)
    jobs = plan_jobs(context)
    service = f"{name}-{target.frontend.name.lower()}"
    return GraphPlan(
        target=request.target,
        release=chosen.release_name,
        name=name,
        namespace=request.namespace,
        engine=target.engine,
        model=model,
        served_model_id=model.repository,
        gpu=target.gpu,
        gpus=_gpus(workers),
        runtime_image=image,
        tools_image=context.image,
        components=(target.frontend.name, *(worker.entry.name for worker in workers.values())),
        required_nodes=tuple(_required_nodes(parts, worker) for worker in workers.values()),
        namespace_object=Namespace(metadata=_shared_metadata(request, request.namespace, inside=False)),
        claim=_claim(request, chosen),
        claim_name=parts.claim,
        token=context.token,
        pull_secrets=request.pull_secrets,
        programs=jobs.programs,
        download=jobs.download,
        engine_config=config,
        graph=graph(parts, workers, variables, request.replicas.get("frontend", target.frontend.replicas), config),
        smoke=jobs.smoke,
        benchmark=jobs.benchmark,
        network_policies=network_policies(parts) if request.network_policy else (),
        job_context=context,
        frontend_service=service,
        url=context.url,
        port_forward_command=(
            f"kubectl port-forward --namespace {request.namespace} svc/{service} "
            f"{dynamo.operator.frontend_port}:{dynamo.operator.frontend_port}"
        ),
        curl_command=(
            f"curl http://localhost:{dynamo.operator.frontend_port}/v1/chat/completions "
            "-H 'Content-Type: application/json' "
            f'-d \'{{"model":"{model.repository}","messages":[{{"role":"user","content":'
            '"Write a one-sentence readiness check."}],"max_tokens":64}\''
        ),
        watch_command=(f"kubectl get pods --namespace {request.namespace} -l {dynamo.operator.graph_label}={name} -w"),
        artifacts=benchmark.artifacts if benchmark is not None else None,
        load_within_seconds=parts.load_seconds,
        ready_within_seconds=parts.load_seconds + dynamo.times.start_seconds,
        download_within_seconds=parts.download_seconds,
        smoke_within_seconds=context.smoke_within_seconds,
        benchmark_within_seconds=benchmark.within_seconds if benchmark is not None else None,
        notes=_notes(request, chosen),
    )


# --- the catalog's entries ---------------------------------------------------------------------------------------


def _choose(request: GraphRequest, catalog: Catalog) -> Chosen:
    dynamo = catalog.dynamo
    problems = _unknown("target", request.target, catalog.graphs)
    problems += _unknown("model", request.model, catalog.models)
    release_name = request.release or dynamo.default_release
    problems += _unknown("release", release_name, dynamo.releases, "of Dynamo")
    release = dynamo.releases.get(release_name)
    if release is not None and API_VERSION not in release.graph_versions:
        serving = [name for name, other in dynamo.releases.items() if API_VERSION in other.graph_versions]
        problems.append(
            f"release: {release_name!r} serves no {API_VERSION} DynamoGraphDeployment; allowed: {', '.join(serving)}"
        )
    target = catalog.graphs.get(request.target)
    if request.gpu is not None and target is not None and request.gpu != target.gpu:
        fitting = [name for name, other in catalog.graphs.items() if other.gpu == request.gpu]
        problems += _unknown("gpu", request.gpu, catalog.gpus) or [
            f"gpu: {request.gpu!r}: {request.target} is made for {target.gpu}; allowed: {target.gpu}"
            + (f"; targets for {request.gpu}: {', '.join(fitting)}" if fitting else "")
        ]
    if target is None or release is None or problems:
        raise PlanError(problems)
    return Chosen(
        target_name=request.target,
        target=target,
        release_name=release_name,
        release=release,
        inside=release.engines[target.engine],
        runs=dynamo.engines[target.engine],
        engine=catalog.engines[target.engine],
        gpu=catalog.gpus[target.gpu],
        model_name=request.model,
        model=catalog.models[request.model],
        catalog=catalog,
    )


def _unknown(field: str, value: str, known: Iterable[str], of: str = "") -> list[str]:
    names = list(known)
    if value in names:
        return []
    where = f" {of}" if of else ""
    return [f"{field}: {value!r} is not known{where}{nearest(value, names)}; allowed: {', '.join(names)}"]


def _runtime_image(request: GraphRequest, chosen: Chosen) -> str:
    image = request.image or f"{chosen.runs.image}:{chosen.release.image_tag}"
    return mirrored(image, request.image_registry)


def _notes(request: GraphRequest, chosen: Chosen) -> tuple[str, ...]:
    notes = [*chosen.target.notes]
    if chosen.inside.schema_note is not None:
        notes.append(f"options of {chosen.engine.title} {chosen.inside.version}: {chosen.inside.schema_note}")
    notes += [
        f"Dynamo {chosen.release_name}: {known.issue}"
        for known in chosen.release.known_issues
        if known.engine in (None, chosen.target.engine)
    ]
    if request.hf_token_secret is not None:
        secret = request.hf_token_secret
        notes.append(
            "the download reads the token from a Secret that must be there: kubectl create secret generic "
            f"{secret.name} --namespace {request.namespace} --from-literal={secret.key}=..."
        )
    return tuple(notes)


# --- problems ----------------------------------------------------------------------------------------------------


def _name_problems(request: GraphRequest, name: str, chosen: Chosen) -> list[str]:
    """The operator makes names and labels of the graph's name; its webhook does not check them, the graph hangs."""
    problems = []
    operator = chosen.catalog.dynamo.operator
    wrong = label_problem(request.namespace, operator.name_limit)
    if wrong is not None:
        problems.append(f"namespace: {request.namespace!r} {wrong}")
    shape = label_problem(name, operator.name_limit)
    if shape is not None or not name[:1].isalpha():
        problems.append(f"name: {name!r} {shape or 'allowed: a letter first, as Services have'}")
        return problems
    components = [worker.name for worker in chosen.target.workers.values()]
    longest = max(components, key=len)
    made = {
        f"<name>-{longest.lower()}-<hash> (the operator's name of a worker)": len(longest)
        + operator.worker_hash_digits
        + 2,
        f"{request.namespace}-<name> (the operator's label {operator.namespace_label})": len(request.namespace) + 1,
        "<name>-engine-<hash>": len("-engine-") + 8,
        "<name>-download": len("-download"),
    }
    if request.benchmark is not None:
        made[f"<name>-benchmark-{request.benchmark.run_id}"] = len(f"-benchmark-{request.benchmark.run_id}")
    for pattern, more in made.items():
        if len(name) + more > operator.name_limit:
            problems.append(
                f"name: {name!r} is too long: {pattern} would have {len(name) + more} characters, of at most "
                f"{operator.name_limit}; allowed: at most {operator.name_limit - more} characters"
            )
    return problems


def _label_problems(request: GraphRequest) -> list[str]:
    placement = request.placement
    problems = labels_problems("labels", request.labels)
    problems += keys_problems("annotations", request.annotations)
    problems += labels_problems("placement.node_selector", placement.node_selector)
    for field, keys in (("labels", request.labels), ("annotations", request.annotations)):
        problems += [
            f"{field}: {key!r}: is the project's or the operator's own; allowed: any other key"
            for key in keys
            if key in _OWN_LABELS or key == _INSTANCE or key.startswith("nvidia.com/")
        ]
    for index, entry in enumerate(placement.tolerations or ()):
        where = f"placement.tolerations.{index}"
        if entry.operator == "Exists" and entry.value:
            problems.append(
                f"{where}: value {entry.value!r} with operator Exists; allowed: operator Equal, or no value"
            )
        if entry.operator == "Equal" and entry.key is None:
            problems.append(f"{where}: operator Equal needs a key; allowed: operator Exists to tolerate everything")
    for field, value in (("priority_class", placement.priority_class), ("scheduler_name", placement.scheduler_name)):
        wrong = subdomain_problem(value) if value is not None else None
        if wrong is not None:
            problems.append(f"placement.{field}: {value!r} {wrong}")
    return problems


def _replica_problems(request: GraphRequest, chosen: Chosen) -> list[str]:
    components = ["frontend", *chosen.target.workers]
    problems = []
    for component, count in request.replicas.items():
        if component not in components:
            problems.append(
                f"replicas: {component!r} is no component of {request.target}{nearest(component, components)}; "
                f"allowed: {', '.join(components)}"
            )
        elif count < 1:
            without = "a benchmark has nothing to measure" if request.benchmark is not None else "nothing is served"
            problems.append(f"replicas.{component}: {count}: without one {without}; allowed: at least 1")
    return problems


def _resource_problems(request: GraphRequest, chosen: Chosen) -> list[str]:
    components = ["frontend", *chosen.target.workers]
    known = [*components, *JOBS]
    problems = []
    for component, asked in request.resources.items():
        if component not in known:
            problems.append(
                f"resources: {component!r} is not known{nearest(component, known)}; allowed: {', '.join(known)}"
            )
            continue
        devices = component in chosen.target.workers
        for name, value in asked.items():
            where = f"resources.{component}.{name}"
            if name == GPU_RESOURCE:
                problems.append(f"{where}: {value!r}: the target decides the GPUs of a pod; set replicas")
            elif name not in ("cpu", "memory") and not ("/" in name and devices):
                more = " and devices such as rdma/ib" if devices else ""
                problems.append(f"{where}: {value!r}: there is no such resource; allowed: cpu, memory{more}")
            elif float(re.sub("[A-Za-z]+$", "", value)) == 0:
                problems.append(f"{where}: {value!r}: is nothing; allowed: more than 0, or leave it out")
    return problems


def _image_problems(request: GraphRequest, image: str, chosen: Chosen) -> list[str]:
    operator = chosen.catalog.dynamo.operator
    problems = []
    version = request.runtime_version
    if version is not None and not re.fullmatch(operator.runtime_version, version):
        problems.append(f"runtime_version: {version!r} is not a version; allowed: three numbers such as 1.2.1")
    if version is None:
        wrong = image_problem(image, operator.image_tag)
        if wrong is not None:
            problems.append(
                f"image: {image!r}: {wrong}; allowed: a tag such as {chosen.release.image_tag} "
                f"or {chosen.release.image_tag}-mine (a digest may follow), or set runtime_version"
            )
    registry = request.image_registry
    if registry is not None and not re.fullmatch(
        r"[a-z0-9][A-Za-z0-9.-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._/-]*)?", registry
    ):
        problems.append(
            f"image_registry: {registry!r} is not a registry; allowed: HOST[:PORT][/PATH], without https:// "
            "and without a slash at the end"
        )
    return problems


def _secret_problems(request: GraphRequest) -> list[str]:
    names = {f"pull_secrets.{index}": name for index, name in enumerate(request.pull_secrets)}
    if request.hf_token_secret is not None:
        names["hf_token_secret.name"] = request.hf_token_secret.name
    return [
        f"{field}: {name!r} {wrong}" for field, name in names.items() if (wrong := subdomain_problem(name)) is not None
    ]


def _cache_problems(request: GraphRequest, workers: Mapping[str, Worker], chosen: Chosen) -> list[str]:
    cache, problems = request.model_cache, []
    for field, value in (("claim", cache.claim), ("storage_class", cache.storage_class)):
        wrong = subdomain_problem(value) if value is not None else None
        if wrong is not None:
            problems.append(f"model_cache.{field}: {value!r} {wrong}")
    if cache.existing:
        said = {"storage_class": cache.storage_class, "size": cache.size}
        problems += [
            f"model_cache.{field}: {value!r}: an existing claim has its own; leave it out, or set existing to false"
            for field, value in said.items()
            if value is not None
        ]
    needed = int(chosen.model.size_bytes * _CACHE_MARGIN)
    if cache.size is not None and size_of(cache.size) < needed:
        problems.append(
            f"model_cache.size: {cache.size!r}: {request.model} has {chosen.model.size_bytes / 1e9:.1f} GB; "
            f"allowed: at least {-(-needed // 2**30)}Gi"
        )
    return problems + _access_problems(request, workers, chosen)


def _node_problems(request: GraphRequest, workers: Mapping[str, Worker], chosen: Chosen) -> list[str]:
    """Nodes that cannot exist: pods would stay Pending for ever."""
    selector, problems = request.placement.node_selector, []
    needed = architecture(chosen)
    if selector.get(ARCHITECTURE, needed) != needed:
        problems.append(
            f"placement.node_selector: {ARCHITECTURE}={selector[ARCHITECTURE]!r}: nodes with {chosen.target.gpu} are "
            f"{needed}; leave it out"
        )
    gpus, of_node = _gpus(workers), chosen.target.gpus_per_node
    if HOSTNAME in selector and gpus > of_node:
        problems.append(
            f"placement.node_selector: {HOSTNAME}={selector[HOSTNAME]!r}: {request.target} needs {gpus} "
            f"{chosen.target.gpu}, of which one node has {of_node}; leave it out, or lower replicas"
        )
    return problems


def _access_problems(request: GraphRequest, workers: Mapping[str, Worker], chosen: Chosen) -> list[str]:
    """Download, frontend, workers and benchmark mount the claim, wherever they are."""
    mode, pinned = request.model_cache.access_mode, request.placement.node_selector.get(HOSTNAME)
    if mode == "ReadWriteMany":
        return []
    if mode != "ReadWriteOnce":
        why = {
            "ReadWriteOncePod": "one pod alone could mount the claim",
            "ReadOnlyMany": "the download could not write to the claim",
        }[mode]
        return [f"model_cache.access_mode: {mode!r}: {why}; allowed: ReadWriteMany, ReadWriteOnce on one node"]
    gpus, of_node = _gpus(workers), chosen.target.gpus_per_node
    if gpus > of_node:
        return [
            f"model_cache.access_mode: {mode!r}: {request.target} needs {gpus} {chosen.target.gpu}, of which one node "
            f"has {of_node}, so its pods are on several nodes; allowed: ReadWriteMany"
        ]
    if pinned is None:
        return [
            f"model_cache.access_mode: {mode!r}: frontend, workers and Jobs may be on several nodes; allowed: "
            f"ReadWriteMany, or name the one node for all of them with placement.node_selector {HOSTNAME}"
        ]
    return []


# --- objects -----------------------------------------------------------------------------------------------------


def _shared_metadata(request: GraphRequest, name: str, inside: bool) -> Metadata:
    """Of what several graphs share: no label of one graph, or they would take it from each other."""
    return Metadata(
        name=name,
        namespace=request.namespace if inside else None,
        labels={**_OWN_LABELS, **request.labels},
        annotations=request.annotations,
    )


def _claim(request: GraphRequest, chosen: Chosen) -> PersistentVolumeClaim | None:
    cache = request.model_cache
    if cache.existing:
        return None
    return PersistentVolumeClaim(
        metadata=_shared_metadata(request, cache.claim, inside=True),
        spec=ClaimSpec(
            access_modes=(cache.access_mode,),
            storage_class_name=cache.storage_class,
            resources=ResourceNeeds(requests={"storage": cache.size or chosen.target.cache_size}),
        ),
    )


def _gpus(workers: Mapping[str, Worker]) -> int:
    return sum(worker.replicas * worker.entry.gpus for worker in workers.values())


def _required_nodes(parts: Parts, worker: Worker) -> RequiredNodes:
    return RequiredNodes(
        component=worker.entry.name,
        pods=worker.replicas,
        gpus_per_pod=worker.entry.gpus,
        architectures=(architecture(parts.chosen),),
        gpu_products=gpu_products(parts),
        node_selector=parts.request.placement.node_selector,
        tolerations=tolerations(parts, gpu=True),
    )


def _benchmark(
    request: GraphRequest, name: str, workers: Mapping[str, Worker], chosen: Chosen
) -> tuple[PlannedBenchmark | None, list[str]]:
    asked, entry, times = request.benchmark, chosen.target.traffic, chosen.catalog.dynamo.times
    if asked is None:
        return None, []
    problems = _published_problems(asked)
    traffic, gpus = asked.traffic, _gpus(workers)
    factor = entry.published_gpus if asked.as_published and entry.published_gpus is not None else gpus
    concurrency = traffic.concurrency or entry.concurrency_per_gpu * factor
    warmup = traffic.warmup_requests
    planned = PlannedTraffic(
        name=request.target,
        title=entry.title if traffic.input_tokens is None and traffic.output_tokens is None else "as asked for",
        input_tokens=traffic.input_tokens or entry.input_tokens,
        output_tokens=traffic.output_tokens or entry.output_tokens,
        concurrency=concurrency,
        requests=traffic.requests or concurrency * entry.requests_per_slot,
        warmup_requests=concurrency * entry.warmup_requests_per_slot if warmup is None else warmup,
        streaming=True,
    )
    if planned.requests < concurrency:
        problems.append(
            f"benchmark.traffic.requests: {planned.requests}: is less than the concurrency, {concurrency}, "
            "which would never be reached; allowed: at least the concurrency"
        )
    said = (
        f"benchmark.traffic: {planned.input_tokens} tokens in and {planned.output_tokens} out"
        if traffic.input_tokens is not None or traffic.output_tokens is not None
        else f"benchmark: the target's {entry.title}"
    )
    problems += prompt_problems(
        planned.input_tokens, planned.output_tokens, said, entry.prompt_overhead_tokens, workers, chosen
    )
    wait = request.endpoint_wait_seconds or times.endpoint_seconds
    return (
        PlannedBenchmark(
            run_id=asked.run_id,
            gpus=gpus,
            traffic=planned,
            within_seconds=wait + times.benchmark_seconds,
            artifacts=f"{VolumeLayout().benchmarks}/{name}/{asked.run_id}",
        ),
        problems,
    )


def _published_problems(asked: BenchmarkRequest) -> list[str]:
    if not asked.as_published:
        return []
    return [
        f"benchmark.traffic.{field}: {value}: as_published is the published recipe's own traffic; keep one of the two"
        for field, value in asked.traffic.model_dump().items()
        if value is not None
    ]


def _job_context(
    parts: Parts, model: PlannedModel, workers: Mapping[str, Worker], benchmark: PlannedBenchmark | None
) -> JobContext:
    request, catalog = parts.request, parts.chosen.catalog
    times, secret = catalog.dynamo.times, request.hf_token_secret
    service = f"{parts.name}-{parts.chosen.target.frontend.name.lower()}"
    wait = request.endpoint_wait_seconds or times.endpoint_seconds
    placement = JobPlacement(
        node_selector={HOSTNAME: parts.pinned_to} if parts.pinned_to is not None else {},
        tolerations=tolerations(parts, parts.all_on_gpu_nodes),
        priority_class=request.placement.priority_class,
        scheduler_name=request.placement.scheduler_name,
    )
    return JobContext(
        graph=parts.name,
        target=request.target,
        namespace=request.namespace,
        labels=parts.labels,
        annotations=request.annotations,
        image=mirrored(request.tools_image or catalog.dynamo.tools_image, request.image_registry),
        benchmark_image=mirrored(request.tools_image or catalog.dynamo.benchmark_image, request.image_registry),
        pull_secrets=request.pull_secrets,
        requirements={
            "huggingface-hub": catalog.releases.huggingface_hub.version,
            "aiperf": catalog.releases.aiperf.version,
        },
        environment=request.job_environment,
        model=model,
        served_model_id=model.repository,
        claim=parts.claim,
        volume=parts.volume,
        token=TokenKey(name=secret.name, key=secret.key) if secret is not None else None,
        hub_endpoint=request.hub_endpoint,
        package_index=request.package_index,
        placement=placement,
        benchmark_placement=placement.model_copy(update={"affinity": benchmark_affinity(parts)}),
        resources={job: asked for job, asked in request.resources.items() if job in JOBS},
        url=f"http://{service}.{request.namespace}.svc:{catalog.dynamo.operator.frontend_port}",
        gpus=_gpus(workers),
        benchmark=benchmark,
        download_within_seconds=parts.download_seconds,
        endpoint_wait_seconds=wait,
        smoke_within_seconds=wait + times.smoke_seconds,
        smoke_probes=request.smoke_probes,
    )
