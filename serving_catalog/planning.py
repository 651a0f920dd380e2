"""From a request to a plan: which processes a host runs, and with which words and options.

Everything that differs between engines and releases is data; this module only walks it.
Every problem of a request is reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

from serving_catalog.docker import guide_form, local_form
from serving_catalog.entries import Engine, EngineRelease, Gpu, Model, Profile
from serving_catalog.errors import PlanError, nearest
from serving_catalog.loading import Catalog
from serving_catalog.memory import memory_problem, whole
from serving_catalog.overrides import Overrides, resolve_overrides
from serving_catalog.plans import (
    HostPlan,
    PlannedCache,
    Process,
    ServeRequest,
    hash_of,
    planned_model,
)
from serving_catalog.schema import EngineSchema, load_schema
from serving_catalog.settings import option_problems, profile_settings, rendered


@dataclass(frozen=True)
class _Chosen:
    """The catalog's entries for a request."""

    engine: Engine
    release_name: str
    release: EngineRelease
    profile: Profile
    gpu: Gpu
    model: Model
    gpus_per_process: int


def plan_host(request: ServeRequest, catalog: Catalog) -> HostPlan:
    """Turn a request into a plan, or raise `PlanError` naming each field, its value and what is allowed."""
    chosen = _choose(request, catalog)
    schema = load_schema(request.engine, chosen.release.option_schema.removeprefix(f"{request.engine}-"))
    overrides = resolve_overrides(request.overrides, chosen.engine, chosen.release, schema)
    settings = profile_settings(chosen.profile, chosen.gpu.architecture, chosen.gpus_per_process)
    settings = _with_overrides(settings, overrides, chosen)
    environment = _environment(chosen, overrides)
    flags, options = _split(settings, chosen.release, schema)
    count = request.gpu_count // chosen.gpus_per_process
    problems = [
        *overrides.problems,
        *_port_problems(request.port, count),
        *option_problems(settings, schema, _said(overrides, chosen.release)),
        *_unsupported(settings, chosen, overrides),
        *_length_problems(request, settings, chosen, overrides),
        *_division_problems(settings, chosen.engine, overrides),
        *_said_to_both(settings, chosen.engine, environment),
        *_said_in_two_ways(chosen.engine, overrides),
    ]
    if not problems:  # with settings that are wrong themselves the sum would be too
        problems = memory_problem(request, chosen.engine, chosen.gpu, chosen.model, chosen.gpus_per_process, settings)
    if problems:
        raise PlanError(list(dict.fromkeys(problems)))
    model = planned_model(request.model, chosen.model, catalog.encodings)
    processes = tuple(
        _process(request, chosen, index, flags, options, environment, whole_host=count == 1) for index in range(count)
    )
    container = chosen.engine.container
    return HostPlan(
        engine=request.engine,
        release=chosen.release_name,
        profile=request.profile,
        gpu=request.gpu,
        gpu_count=request.gpu_count,
        platform=None if request.platform == "auto" else request.platform,
        model=model,
        image=chosen.release.image,
        image_bytes=chosen.release.image_bytes,
        image_architectures=chosen.release.architectures,
        cache_bytes=container.cache_bytes_per_process * count,
        host_memory_bytes=container.host_memory_bytes_per_process * count
        + container.host_memory_bytes_per_gpu * request.gpu_count,
        gpu_memory_bytes=chosen.gpu.memory_bytes,
        processes=processes,
        traffic=chosen.profile.traffic,
        notes=_notes(chosen, overrides),
        plan_hash=hash_of(model, processes),
    )


def _choose(request: ServeRequest, catalog: Catalog) -> _Chosen:
    problems: list[str] = []
    problems += _unknown("engine", request.engine, catalog.engines)
    problems += _unknown("gpu", request.gpu, catalog.gpus)
    problems += _unknown("model", request.model, catalog.models)
    problems += _platform_problems(request, catalog)
    engine = catalog.engines.get(request.engine)
    if engine is not None:
        release_name = request.release if request.release is not None else engine.default_release
        problems += _unknown("release", release_name, engine.releases, f"for engine {request.engine}")
        release = engine.releases.get(release_name)
        offered = release.profiles if release is not None else engine.gpu_counts
        problems += _unknown("profile", request.profile, offered, f"for engine {request.engine}")
        if not problems and request.profile in engine.gpu_counts:
            problems += _count_problems(request, engine)
    if engine is None or problems:
        raise PlanError(problems)
    gpu, counts = catalog.gpus[request.gpu], engine.gpu_counts[request.profile][request.gpu]  # type: ignore[index]
    release = engine.releases[release_name]
    if gpu.cpu_architecture != "any" and gpu.cpu_architecture not in release.architectures:
        raise PlanError(
            [
                f"release: {release_name} has no image for {gpu.cpu_architecture}, the CPU of a {request.gpu} host; "
                f"{release.image} is built for: {', '.join(release.architectures)}"
            ]
        )
    return _Chosen(
        engine=engine,
        release_name=release_name,
        release=release,
        profile=release.profiles[request.profile],  # type: ignore[index]
        gpu=gpu,
        model=catalog.models[request.model],
        gpus_per_process=counts.gpus_per_process or request.gpu_count,
    )


def _unknown(field: str, value: str, known: Iterable[str], of: str = "") -> list[str]:
    names = list(known)
    if value in names:
        return []
    where = f" {of}" if of else ""
    return [f"{field}: {value!r} is not known{where}{nearest(value, names)}; allowed: {', '.join(names)}"]


def _platform_problems(request: ServeRequest, catalog: Catalog) -> list[str]:
    if request.platform is None:
        return []
    unknown = _unknown("platform", request.platform, ["auto", *catalog.platforms])
    if unknown or request.platform == "auto" or request.gpu not in catalog.gpus:
        return unknown
    platform = catalog.platforms[request.platform]
    problems = []
    if request.gpu not in platform.gpus:
        fitting = [name for name, other in catalog.platforms.items() if request.gpu in other.gpus]
        problems.append(
            f"platform: {request.platform} ({platform.title}) has {', '.join(platform.gpus)}, not {request.gpu}; "
            f"allowed with {request.gpu}: {', '.join(['auto', *fitting])}"
        )
    elif platform.gpu_count is not None and request.gpu_count > platform.gpu_count:
        problems.append(
            f"gpu_count: {request.gpu_count} is more than the {platform.gpu_count} GPUs of {request.platform} "
            f"({platform.title})"
        )
    return problems


def _count_problems(request: ServeRequest, engine: Engine) -> list[str]:
    by_gpu = engine.gpu_counts[request.profile]  # type: ignore[index]
    served = f"{request.engine}/{request.profile}"
    if request.gpu not in by_gpu:
        return [f"gpu: {request.gpu} is not served with {served}; allowed: {', '.join(by_gpu)}"]
    counts = by_gpu[request.gpu].counts
    if request.gpu_count in counts:
        return []
    remedy = ""
    per_process = by_gpu[request.gpu].gpus_per_process
    if per_process is not None and 1 <= request.gpu_count <= per_process:
        remedy = " (nothing to split into replicas: use max_throughput)"
    return [
        f"gpu_count: {request.gpu_count} is not served for {request.gpu} with {served}; "
        f"allowed: {', '.join(map(str, counts))}{remedy}"
    ]


def _with_overrides(settings: dict[str, JsonValue], overrides: Overrides, chosen: _Chosen) -> dict[str, JsonValue]:
    """Overrides win; a setting that follows another follows it, unless it is overridden itself."""
    inside = tuple(
        f"{path}." for path in overrides.settings
    )  # a section set as a whole replaces what the profile says in it
    replaced = {old for new, old in chosen.engine.replaces.items() if new in overrides.settings}
    kept = {p: value for p, value in settings.items() if not p.startswith(inside) and p not in replaced}
    result = {**kept, **overrides.settings}
    for follower, leader in chosen.release.follows.items():
        if leader in overrides.settings and follower in kept and follower not in overrides.settings:
            result[follower] = result[leader]
    return result


def _said(overrides: Overrides, release: EngineRelease) -> dict[str, str]:
    """The operator's word for every setting that is theirs, or follows one that is."""
    followers = {
        follower: overrides.said[leader] for follower, leader in release.follows.items() if leader in overrides.said
    }
    return {**followers, **overrides.said}


def _environment(chosen: _Chosen, overrides: Overrides) -> dict[str, str]:
    release, architecture = chosen.release, chosen.gpu.architecture
    environment = dict(release.environment)
    environment.update(release.environment_by_architecture.get(architecture, {}))
    if chosen.gpus_per_process > 1:
        environment.update(release.environment_several_gpus_by_architecture.get(architecture, {}))
    for variable, setting in release.environment_sets.items():
        if setting in overrides.settings:  # the operator decided it with the option: the variable would decide it twice
            environment.pop(variable, None)
    return {**environment, **overrides.environment}


def _split(
    settings: Mapping[str, JsonValue], release: EngineRelease, schema: EngineSchema
) -> tuple[dict[str, JsonValue], dict[str, JsonValue]]:
    """What is typed and what goes to the options file. Nothing is in both."""
    typed = {flag.setting for flag in release.flags if flag.setting is not None}
    flags = {path: value for path, value in settings.items() if path in typed}
    return flags, rendered({path: value for path, value in settings.items() if path not in typed}, schema)


def _argv(
    request: ServeRequest, chosen: _Chosen, flags: Mapping[str, JsonValue], options_file_name: str
) -> tuple[str, ...]:
    known = {"host": "0.0.0.0", "port": str(chosen.engine.container.port), "options_file": options_file_name}  # noqa: S104 - inside the container
    words = [*chosen.release.launcher, chosen.model.repository]
    for flag in chosen.release.flags:
        name = [flag.flag] if flag.flag is not None else []
        if flag.value is not None:
            words += [*name, known[flag.value]]
        elif flag.literal is not None:
            words += [*name, flag.literal]
        elif flag.switch:
            words += name if flag.setting is None or flags.get(flag.setting) is True else []
        elif flag.setting is not None and flags.get(flag.setting) is not None:
            words += [*name, _word(flags[flag.setting])]
    return tuple(words)


def _word(value: JsonValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _process(
    request: ServeRequest,
    chosen: _Chosen,
    index: int,
    flags: Mapping[str, JsonValue],
    options: Mapping[str, JsonValue],
    environment: Mapping[str, str],
    whole_host: bool,
) -> Process:
    container, health, release = chosen.engine.container, chosen.engine.health, chosen.release
    options_file_name = f"{request.profile}.yaml"
    first = index * chosen.gpus_per_process
    process = Process(
        name=str(index),
        image=release.image,
        entrypoint=container.entrypoint,
        argv=_argv(request, chosen, flags, options_file_name),
        environment=environment,
        options_file=options,
        options_file_name=options_file_name,
        docker_run=(),
        gpus=tuple(range(first, first + chosen.gpus_per_process)),
        port=request.port + index,
        container_port=container.port,
        ulimits=container.ulimits,
        ipc=container.ipc,
        served_model_id=chosen.model.repository,
        health_path=health.path,
        deep_health_path=health.deep_path,
        ready_within_seconds=release.ready_within_seconds or health.ready_within_seconds,
        stop_timeout_seconds=container.stop_timeout_seconds,
        working_directory=container.working_directory,
        caches=tuple(
            PlannedCache(name=cache.name, container_path=cache.container_path, environment=cache.environment)
            for cache in container.caches
        ),
        weights_container_path=container.weights_path,
        encodings_container_path=container.encodings_path,
    )
    form = guide_form if release.paste == "guide" else local_form
    return process.model_copy(update={"docker_run": form(process, whole_host)})


def _notes(chosen: _Chosen, overrides: Overrides) -> tuple[str, ...]:
    """The profile's notes, without those about a setting the operator decided."""
    return tuple(note for note in chosen.profile.notes if note.split(":")[0] not in overrides.settings)


def _port_problems(port: int, count: int) -> list[str]:
    if 1 <= port <= 65536 - count:
        return []
    wanted = "is not a port" if count == 1 else f"leaves no room for {count} consecutive ports"
    return [f"port: {port} {wanted}; allowed: 1 to {65536 - count}"]


def _unsupported(settings: Mapping[str, JsonValue], chosen: _Chosen, overrides: Overrides) -> list[str]:
    """Values the engine's schema accepts and the GPU cannot run."""
    return [
        f"{_owner(rule.setting, overrides)}{settings[rule.setting]!r}: {chosen.release_name} accepts it, "
        f"but not on {chosen.gpu.architecture}: {rule.reason}"
        for rule in chosen.engine.unsupported
        if rule.architecture == chosen.gpu.architecture and settings.get(rule.setting) in rule.values
    ]


def _length_problems(
    request: ServeRequest, settings: Mapping[str, JsonValue], chosen: _Chosen, overrides: Overrides
) -> list[str]:
    setting = chosen.engine.memory.sequence_length_setting
    length = whole(settings.get(setting), 0)
    if length <= chosen.model.context_length:
        return []
    return [
        f"{_owner(setting, overrides)}{length}: {request.model} was made for {chosen.model.context_length} tokens; "
        f"allowed: at most {chosen.model.context_length}"
    ]


def _division_problems(settings: Mapping[str, JsonValue], engine: Engine, overrides: Overrides) -> list[str]:
    problems = []
    for part, total in engine.divides.items():
        value, of = settings.get(part), settings.get(total)
        if isinstance(value, int) and isinstance(of, int) and value > 0 and of % value != 0:
            divisors = ", ".join(str(n) for n in range(1, of + 1) if of % n == 0)
            problems.append(f"{_owner(part, overrides)}{value}: does not divide {total}, {of}; allowed: {divisors}")
    return problems


def _owner(setting: str, overrides: Overrides) -> str:
    return f"set: {overrides.said[setting]}=" if setting in overrides.said else f"{setting}: "


def _said_in_two_ways(engine: Engine, overrides: Overrides) -> list[str]:
    return [
        f"set: {overrides.said[new]} and {overrides.said[old]} say the same in two ways; keep one"
        for new, old in engine.replaces.items()
        if new in overrides.said and old in overrides.said
    ]


def _said_to_both(settings: Mapping[str, JsonValue], engine: Engine, environment: Mapping[str, str]) -> list[str]:
    """Variables that are set for the container and again inside the engine's options."""
    option = engine.environment_setting
    inside = settings.get(option) if option is not None else None
    if not isinstance(inside, dict):
        inside = {p.removeprefix(f"{option}."): v for p, v in settings.items() if p.startswith(f"{option}.")}
    return [
        f"set: {name} is set twice: as environment.{name} and in {option}; keep one"
        for name in inside
        if name in environment
    ]
