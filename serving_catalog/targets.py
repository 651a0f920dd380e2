"""Every target the catalog serves: engine, release, profile, GPU and number of GPUs. docs/targets.md is made here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pydantic import JsonValue

from serving_catalog.entries import Engine, EngineRelease, Part
from serving_catalog.graphs.listing import as_markdown as graphs_as_markdown
from serving_catalog.loading import Catalog
from serving_catalog.planning import plan_host
from serving_catalog.plans import HostPlan, ServeRequest


class Target(Part):
    """One row: what to ask for, and in short what it becomes."""

    engine: str
    release: str
    default_release: bool
    profile: str
    gpu: str
    gpu_count: int
    processes: int
    gpus_per_process: int
    ports: tuple[int, ...]
    parallelism: str
    moe_backend: str
    max_batch_size: int | None
    image: str


def list_targets(catalog: Catalog) -> tuple[Target, ...]:
    """Every target of the catalog, each planned for the default model."""
    return tuple(_target(catalog, request) for request in requests(catalog))


def requests(catalog: Catalog) -> Iterator[ServeRequest]:
    """The request of every target, in the order of the data files."""
    for engine_name, engine in catalog.engines.items():
        for release_name, release in engine.releases.items():
            for profile in release.profiles:
                for gpu, served in engine.gpu_counts.get(profile, {}).items():
                    for count in served.counts:
                        yield ServeRequest(
                            engine=engine_name, release=release_name, profile=profile, gpu=gpu, gpu_count=count
                        )


def _target(catalog: Catalog, request: ServeRequest) -> Target:
    plan = plan_host(request, catalog)
    engine = catalog.engines[plan.engine]
    values = plan_settings(plan, engine.releases[plan.release])
    batch = values.get(engine.common_settings["max_batch_size"].setting)
    backend = values.get(engine.common_settings["moe_backend"].setting)
    return Target(
        engine=plan.engine,
        release=plan.release,
        default_release=plan.release == engine.default_release,
        profile=plan.profile,
        gpu=plan.gpu,
        gpu_count=plan.gpu_count,
        processes=len(plan.processes),
        gpus_per_process=len(plan.processes[0].gpus),
        ports=tuple(process.port for process in plan.processes),
        parallelism=_parallelism(values),
        moe_backend=backend if isinstance(backend, str) else _backend_by_variable(plan, engine),
        max_batch_size=batch if isinstance(batch, int) else None,
        image=plan.image,
    )


def plan_settings(plan: HostPlan, release: EngineRelease) -> dict[str, JsonValue]:
    """Every setting of a plan's first process by its path, from the command line and the options file alike."""
    process = plan.processes[0]
    values = dict(_flattened(process.options_file))
    for flag in release.flags:
        if flag.setting is not None and flag.flag in process.argv:
            word = "true" if flag.switch else process.argv[process.argv.index(flag.flag) + 1]
            values[flag.setting] = True if flag.switch else int(word) if word.isdigit() else word
    return values


def _flattened(options: Mapping[str, JsonValue], prefix: str = "") -> Iterator[tuple[str, JsonValue]]:
    for key, value in options.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _parallelism(values: Mapping[str, JsonValue]) -> str:
    """TP4/EP4, or DEP4 for attention data parallelism with expert parallelism."""
    tensor = values.get("tensor_parallel_size", values.get("tensor-parallel-size", 1))
    expert = values.get("moe_expert_parallel_size")
    if values.get("enable_attention_dp") is True and tensor != 1:
        return f"DEP{tensor}"
    return f"TP{tensor}" if expert in (None, 1) else f"TP{tensor}/EP{expert}"


def _backend_by_variable(plan: HostPlan, engine: Engine) -> str:
    sets = engine.releases[plan.release].environment_sets
    variables = [name for name in plan.processes[0].environment if name in sets]
    return variables[0] if variables else "the engine's choice"


def as_table(targets: Sequence[Target]) -> str:
    """Aligned columns for a terminal."""
    rows = [("ENGINE", "RELEASE", "PROFILE", "GPU", "GPUS", "SERVERS", "PARALLELISM", "MOE", "BATCH")]
    rows += [
        (
            target.engine,
            target.release,
            target.profile,
            target.gpu,
            str(target.gpu_count),
            str(target.processes),
            target.parallelism,
            target.moe_backend,
            _batch(target),
        )
        for target in targets
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _batch(target: Target) -> str:
    return str(target.max_batch_size) if target.max_batch_size is not None else "the engine's default"


_MARKDOWN_HEAD = """\
# Targets

<!-- Generated by `python -m serving_catalog targets --format markdown`; a test keeps it current.
     Change serving_catalog/data instead. -->

Every combination the catalog serves. This prints the plan of one, and with `--format docker` the command to paste:

    python -m serving_catalog plan --engine tensorrt_llm --profile low_latency --gpu H200 --gpu-count 4

* *Servers*: engine processes on the host, on consecutive ports from `serving_port`.
* *Parallelism*: `TPn` tensor parallel over n GPUs, `EPn` expert parallel, `DEPn` attention data parallel with expert
  parallel over n GPUs.
* *Batch*: requests in one batch of one rank.
"""


def as_markdown(targets: Sequence[Target], catalog: Catalog) -> str:
    """docs/targets.md."""
    parts = [_MARKDOWN_HEAD]
    for name, engine in catalog.engines.items():
        parts.append(f"## {engine.title} (`{name}`)\n")
        for release_name, release in engine.releases.items():
            default = ", the default" if release_name == engine.default_release else ""
            parts.append(f"### Release `{release_name}`{default}\n\nImage `{release.image}`.\n")
            for profile_name, profile in release.profiles.items():
                parts.append(f"**`{profile_name}`**: {profile.title}.\n")
                rows = [
                    f"| {t.gpu_count} x {t.gpu} | {t.processes} | {t.parallelism} | {t.moe_backend} | {_batch(t)} |"
                    for t in targets
                    if (t.engine, t.release, t.profile) == (name, release_name, profile_name)
                ]
                parts.append(
                    "\n".join(["| GPUs | Servers | Parallelism | MoE | Batch |", "|---|---|---|---|---|", *rows]) + "\n"
                )
    parts.append(graphs_as_markdown(catalog))
    parts.append(_models(catalog))
    parts.append(_gpus(catalog))
    return "\n".join(parts)


def _models(catalog: Catalog) -> str:
    rows = [
        f"| `{name}` | [{m.repository}](https://huggingface.co/{m.repository}/tree/{m.revision}) | `{m.revision}` "
        f"| {m.size_bytes / 1e9:.1f} GB | {m.context_length} |"
        for name, m in catalog.models.items()
    ]
    head = ["## Models\n", "| Model | Repository | Revision | Download | Context |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows]) + "\n"


def _gpus(catalog: Catalog) -> str:
    rows = [
        f"| {key} | {', '.join(gpu.names)} | {', '.join(f'10de:{i}' for i in gpu.pci_device_ids)} "
        f"| {gpu.memory_bytes // 2**20} MiB | {gpu.architecture} | {gpu.cpu_architecture} "
        f"| {', '.join(name for name, p in catalog.platforms.items() if key in p.gpus)} |"
        for key, gpu in catalog.gpus.items()
    ]
    head = [
        "## GPUs\n",
        "| GPU | Name | PCI id | Memory | Architecture | CPU | Platforms |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"
