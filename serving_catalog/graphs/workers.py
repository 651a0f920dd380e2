"""The workers of a graph: their engine options and variables, the target's with the operator's laid over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import yaml
from pydantic import JsonValue

from serving_catalog.entries import Engine, EngineRelease, Gpu, Model
from serving_catalog.errors import nearest
from serving_catalog.graphs.entries import (
    DynamoRelease,
    EngineOfRelease,
    GraphEngine,
    GraphTarget,
    GraphWorker,
    WorkerType,
)
from serving_catalog.loading import Catalog
from serving_catalog.memory import memory_problem, whole
from serving_catalog.overrides import Overrides, resolve_overrides, shown
from serving_catalog.plans import Override, ServeRequest
from serving_catalog.schema import EngineSchema, load_schema
from serving_catalog.settings import option_problems, rendered

BUFFER = "cache_transceiver_config.max_tokens_in_buffer"

# What the plan decides for every component, and why it cannot be set.
PLANNED_VARIABLES = {
    "HF_HUB_CACHE": "the graph reads the model cache",
    "HF_HOME": "the graph reads the model cache",
    "HF_ENDPOINT": "the graph reads the model cache; hub_endpoint is for the download",
    "HF_HUB_OFFLINE": "the graph reads verified weights only",
    "HF_TOKEN": "the graph downloads nothing; the token belongs to the download Job (hf_token_secret)",
    "TIKTOKEN_ENCODINGS_BASE": "the graph reads verified encodings only",
    "NVIDIA_VISIBLE_DEVICES": "the device plugin decides which GPUs a container sees",
    "CUDA_VISIBLE_DEVICES": "the device plugin decides which GPUs a container sees",
}


@dataclass(frozen=True)
class Chosen:
    """The catalog's entries for a request."""

    target_name: str
    target: GraphTarget
    release_name: str
    release: DynamoRelease
    inside: EngineOfRelease
    runs: GraphEngine
    engine: Engine
    gpu: Gpu
    model_name: str
    model: Model
    catalog: Catalog


@dataclass(frozen=True)
class Worker:
    """One kind of worker with everything decided. `said` holds the operator's word for each setting of theirs."""

    type: WorkerType
    entry: GraphWorker
    replicas: int
    settings: Mapping[str, JsonValue]
    environment: Mapping[str, str]
    arguments: tuple[str, ...]
    options_text: str
    said: Mapping[str, str] = field(default_factory=dict)

    def owner(self, setting: str) -> str:
        """How a message names a setting's value: as the operator said it, or where it comes from."""
        said = self.said.get(setting)
        return f"set: {said}=" if said is not None else f"{self.type}.{setting}: "


def split_overrides(overrides: Sequence[Override], chosen: Chosen) -> tuple[dict[str, list[Override]], list[str]]:
    """Overrides by component; the first word of a path says which."""
    components = ["frontend", *chosen.target.workers]
    parts: dict[str, list[Override]] = {component: [] for component in components}
    problems = []
    for override in overrides:
        component, dot, rest = override.path.partition(".")
        if component in parts and dot and rest:
            parts[component].append(Override(path=rest, value=override.value))
            continue
        example = f"{list(chosen.target.workers)[-1]}.{override.path}"
        hint = nearest(component, components) or f" (did you mean {example}?)"
        problems.append(
            f"set: {override.path}={shown(override.path, override.value)}: begins with no component of "
            f"{chosen.target_name}{hint}; allowed: {', '.join(f'{name}.…' for name in components)}"
        )
    return parts, problems


def frontend_environment(overrides: Sequence[Override], chosen: Chosen) -> tuple[dict[str, str], list[str]]:
    """The frontend's variables from overrides; it has no engine options."""
    environment: dict[str, str] = {}
    problems = []
    for override in overrides:
        if not override.path.startswith("environment."):
            problems.append(
                f"set: frontend.{override.path}={shown(override.path, override.value)}: the frontend has no engine "
                "options; allowed: frontend.environment.NAME (its router is router_mode)"
            )
    variables = [override for override in overrides if override.path.startswith("environment.")]
    resolved, found = _resolved("frontend", variables, chosen)
    environment.update(resolved.environment)
    return environment, [*problems, *found]


def plan_worker(
    kind: WorkerType, replicas: int, overrides: Sequence[Override], chosen: Chosen, kv_routing: bool
) -> tuple[Worker, list[str]]:
    """A worker's settings and variables, and everything wrong with them."""
    entry, schema = chosen.target.workers[kind], _schema(chosen)
    resolved, problems = _resolved(kind, overrides, chosen)
    said = {setting: f"{kind}.{path}" for setting, path in resolved.said.items()}
    settings, environment, wrong = _merged(entry, resolved, chosen, kv_routing, kind)
    for follower, leader in entry.follows.items():
        if leader in said and follower not in said:
            said[follower] = said[leader]
    worker = Worker(
        type=kind,
        entry=entry,
        replicas=replicas,
        settings=settings,
        environment=environment,
        arguments=(
            *chosen.runs.arguments,
            *entry.arguments,
            *(chosen.inside.kv_events_arguments if kv_routing else ()),
        ),
        options_text=yaml.safe_dump(rendered(settings, schema), sort_keys=True, default_flow_style=False),
        said=said,
    )
    problems += wrong
    problems += option_problems(settings, schema, said)
    problems += _unsupported(worker, chosen)
    problems += _length_problems(worker, chosen)
    problems += _division_problems(worker, chosen)
    if not problems:
        problems += _memory_problems(worker, chosen)
    return worker, problems


def _schema(chosen: Chosen) -> EngineSchema:
    return load_schema(chosen.target.engine, chosen.inside.option_schema.removeprefix(f"{chosen.target.engine}-"))


def _resolved(kind: str, overrides: Sequence[Override], chosen: Chosen) -> tuple[Overrides, list[str]]:
    """As on bare metal, with what Kubernetes and Dynamo decide kept from being set; messages name the component."""
    problems, allowed = [], []
    for override in overrides:
        name = override.path.removeprefix("environment.")
        reserved = {**chosen.catalog.dynamo.operator.reserved_variables, **PLANNED_VARIABLES}
        if override.path.startswith("environment.") and name in reserved:
            problems.append(
                f"set: {kind}.{override.path}={shown(name, override.value)}: cannot be set, {reserved[name]}"
            )
        else:
            allowed.append(override)
    engine = chosen.engine.model_copy(update={"managed_settings": chosen.runs.managed_settings})
    schema = _schema(chosen)
    # Messages name the engine that runs, not the listing it is checked against.
    named = schema.model_copy(update={"release": chosen.inside.version})
    resolved = resolve_overrides(allowed, engine, _bare_release(chosen), named)
    problems += [problem.replace("set: ", f"set: {kind}.", 1) for problem in resolved.problems]
    return resolved, problems


def _bare_release(chosen: Chosen) -> EngineRelease:
    """A release of the bare-metal catalog without what only its own images know."""
    some = next(iter(chosen.engine.releases.values()))
    instead = {
        variable: "set " + ", ".join(f"{path}={value}" for path, value in settings.items())
        for variable, settings in chosen.inside.replaced_environment.items()
    }
    return some.model_copy(update={"environment_sets": {}, "unread_environment": instead})


def _merged(
    entry: GraphWorker, resolved: Overrides, chosen: Chosen, kv_routing: bool, kind: str
) -> tuple[dict[str, JsonValue], dict[str, str], list[str]]:
    settings: dict[str, JsonValue] = dict(entry.settings)
    environment = {**chosen.runs.environment, **entry.environment}
    for variable, instead in chosen.inside.replaced_environment.items():
        if environment.pop(variable, None) is not None:
            settings.update(instead)
    problems = []
    if kv_routing:
        for setting, value in chosen.runs.kv_routing.settings.items():
            if resolved.settings.get(setting, value) != value:
                problems.append(
                    f"set: {kind}.{setting}={resolved.settings[setting]!r}: router_mode kv needs {value!r}; "
                    "set another router_mode, or leave it out"
                )
            settings[setting] = value
    inside = tuple(f"{path}." for path in resolved.settings)  # a section set as a whole replaces what is in it
    replaced = {old for new, old in chosen.engine.replaces.items() if new in resolved.settings}
    kept = {path: v for path, v in settings.items() if not path.startswith(inside) and path not in replaced}
    settings = {**kept, **resolved.settings}
    for follower, leader in entry.follows.items():
        if leader in resolved.settings and follower in kept and follower not in resolved.settings:
            settings[follower] = settings[leader]
    for name in chosen.release.workarounds:
        workaround = chosen.catalog.dynamo.workarounds[name]
        if (
            workaround.engine == chosen.target.engine
            and chosen.target.gpu in workaround.gpus
            and settings.get(workaround.setting) == workaround.value
        ):
            environment.update(workaround.environment)
    return settings, {**environment, **resolved.environment}, problems


def _unsupported(worker: Worker, chosen: Chosen) -> list[str]:
    return [
        f"{worker.owner(rule.setting)}{worker.settings[rule.setting]!r}: {chosen.inside.version} accepts it, "
        f"but not on {chosen.gpu.architecture}: {rule.reason}"
        for rule in chosen.engine.unsupported
        if rule.architecture == chosen.gpu.architecture and worker.settings.get(rule.setting) in rule.values
    ]


def _length_problems(worker: Worker, chosen: Chosen) -> list[str]:
    setting = chosen.runs.sequence_length_setting
    length = whole(worker.settings.get(setting), 0)
    if length <= chosen.model.context_length:
        return []
    return [
        f"{worker.owner(setting)}{length}: {chosen.model_name} was made for {chosen.model.context_length} tokens; "
        f"allowed: at most {chosen.model.context_length}"
    ]


def _division_problems(worker: Worker, chosen: Chosen) -> list[str]:
    problems = []
    for part, total in chosen.engine.divides.items():
        value, of = worker.settings.get(part), worker.settings.get(total)
        if isinstance(value, int) and isinstance(of, int) and value > 0 and of % value != 0:
            divisors = ", ".join(str(n) for n in range(1, of + 1) if of % n == 0)
            problems.append(f"{worker.owner(part)}{value}: does not divide {total}, {of}; allowed: {divisors}")
    return problems


def _memory_problems(worker: Worker, chosen: Chosen) -> list[str]:
    request = ServeRequest(
        engine=chosen.target.engine,
        profile=f"{chosen.target_name}/{worker.type}",
        gpu=chosen.target.gpu,
        gpu_count=worker.entry.gpus,
        model=chosen.model_name,
    )
    return memory_problem(request, chosen.engine, chosen.gpu, chosen.model, worker.entry.gpus, worker.settings)


# --- how long a prompt may be ------------------------------------------------------------------------------------


def transfer_problems(workers: Mapping[str, Worker], chosen: Chosen) -> list[str]:
    """Disaggregated: a prompt that prefill takes must fit both transfer buffers, and decode must be able to go on.

    A buffer that is smaller than a prompt deadlocks the workers under load, after hours of good service.
    """
    if "prefill" not in workers or "decode" not in workers:
        return []
    setting = chosen.runs.sequence_length_setting
    prefill, decode = workers["prefill"], workers["decode"]
    longest, answer = _length(prefill, chosen), _length(decode, chosen)
    problems = []
    for worker in (prefill, decode):
        buffer = worker.settings.get(BUFFER)
        if isinstance(buffer, int) and buffer < longest:
            problems.append(
                f"{worker.owner(BUFFER)}{buffer}: is less than the longest prompt, {longest} tokens "
                f"(prefill.{setting}); the transfer of keys and values would deadlock under load. "
                f"Raise it in prefill and decode to at least {longest}, or lower prefill.{setting}"
            )
    if answer <= longest:
        problems.append(
            f"{decode.owner(setting)}{answer}: decode must hold the longest prompt, {longest} tokens "
            f"(prefill.{setting}), and its answer; allowed: more than {longest}"
        )
    return problems


def prompt_problems(
    prompt: int, output: int, said: str, overhead: int, workers: Mapping[str, Worker], chosen: Chosen
) -> list[str]:
    """Whether a benchmark's requests can be served at all. `said` is where the lengths come from."""
    problems = []
    prompt += overhead
    first = workers.get("prefill") or workers["worker"]
    last = workers.get("decode") or first
    setting = chosen.runs.sequence_length_setting
    with_format = f"{prompt} tokens with {overhead} for the chat format"
    for worker in {worker.type: worker for worker in (first, last)}.values():
        buffer = worker.settings.get(BUFFER)
        if isinstance(buffer, int) and prompt > buffer:
            problems.append(
                f"{said}: a prompt of {with_format} is longer than {worker.type}.{BUFFER}, {buffer}; "
                f"allowed: at most {buffer - overhead} input tokens, or raise it together with prefill.{setting}"
            )
    limit = _length(first, chosen)
    if prompt + 1 > limit:
        problems.append(
            f"{said}: a prompt of {with_format} does not fit {first.type}.{setting}, {limit}; "
            f"allowed: at most {limit - 1 - overhead} input tokens, or raise it"
        )
    limit = _length(last, chosen)
    if prompt + output > limit:
        problems.append(
            f"{said}: a prompt of {with_format} and an answer of {output} do not fit {last.type}.{setting}, {limit}; "
            f"allowed: together at most {limit - overhead} tokens, or raise it"
        )
    memory = chosen.engine.memory
    batch = whole(first.settings.get(memory.batched_tokens_setting), memory.batched_tokens_default)
    chunked = any(first.settings.get(name) is True for name in ("enable_chunked_prefill", "enable-chunked-prefill"))
    if not chunked and prompt > batch:
        problems.append(
            f"{said}: a prompt of {with_format} is longer than {first.type}.{memory.batched_tokens_setting}, {batch}, "
            f"and prefill is not chunked; allowed: at most {batch - overhead} input tokens, or raise it"
        )
    return problems


def _length(worker: Worker, chosen: Chosen) -> int:
    longest = chosen.model.context_length
    return min(whole(worker.settings.get(chosen.runs.sequence_length_setting), longest), longest)
