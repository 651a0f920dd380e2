"""Every target for Kubernetes and every release of Dynamo, as tables. docs/targets.md ends with them."""

from __future__ import annotations

from serving_catalog.entries import Part
from serving_catalog.graphs.planning import API_VERSION, plan_graph
from serving_catalog.graphs.requests import BenchmarkRequest, GraphRequest
from serving_catalog.loading import Catalog


class GraphRow(Part):
    """One target in short, with its defaults."""

    target: str
    title: str
    graph: str
    engine: str
    gpu: str
    gpus: int
    workers: str
    image: str
    input_tokens: int
    output_tokens: int
    concurrency: int


def list_graphs(catalog: Catalog) -> tuple[GraphRow, ...]:
    """Every target, each planned with its defaults."""
    return tuple(_row(name, catalog) for name in catalog.graphs)


def _row(name: str, catalog: Catalog) -> GraphRow:
    plan = plan_graph(GraphRequest(target=name, benchmark=BenchmarkRequest()), catalog)
    target, benchmark = catalog.graphs[name], plan.job_context.benchmark
    assert benchmark is not None
    return GraphRow(
        target=name,
        title=target.title,
        graph=plan.name,
        engine=plan.engine,
        gpu=plan.gpu,
        gpus=plan.gpus,
        workers=", ".join(f"{worker.replicas} x {kind} TP{worker.gpus}" for kind, worker in target.workers.items()),
        image=plan.runtime_image,
        input_tokens=benchmark.traffic.input_tokens,
        output_tokens=benchmark.traffic.output_tokens,
        concurrency=benchmark.traffic.concurrency,
    )


def as_table(rows: tuple[GraphRow, ...]) -> str:
    """Aligned columns for a terminal."""
    head = ("TARGET", "GPUS", "ENGINE", "WORKERS", "GRAPH", "TRAFFIC")
    lines = [
        head,
        *(
            (
                row.target,
                f"{row.gpus} x {row.gpu}",
                row.engine,
                row.workers,
                row.graph,
                f"{row.input_tokens}/{row.output_tokens} at {row.concurrency}",
            )
            for row in rows
        ),
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def as_markdown(catalog: Catalog) -> str:
    """The part of docs/targets.md that is about Kubernetes."""
    dynamo = catalog.dynamo
    parts = [
        "## Kubernetes\n",
        "What `pulumi up` and `python -m serving_catalog graph TARGET` deploy with NVIDIA Dynamo. "
        "Settings are overridden with\n`--set COMPONENT.PATH=VALUE`, for example `--set worker.max_batch_size=640`.\n",
        "| Target | GPUs | Engine | Workers | Benchmark |",
        "|---|---|---|---|---|",
        *(
            f"| `{row.target}` | {row.gpus} x {row.gpu} | {catalog.engines[row.engine].title} | {row.workers} "
            f"| {row.input_tokens} in, {row.output_tokens} out, {row.concurrency} at once |"
            for row in list_graphs(catalog)
        ),
        "",
    ]
    for name, target in catalog.graphs.items():
        parts.append(f"**`{name}`**: {target.title}.\n")
        parts += ["| Component | Setting | Value |", "|---|---|---|"]
        for kind, worker in target.workers.items():
            parts += [f"| {kind} | `{path}` | `{_shown(value)}` |" for path, value in sorted(worker.settings.items())]
            parts += [f"| {kind} | `environment.{key}` | `{value}` |" for key, value in worker.environment.items()]
        parts.append("")
    parts += [
        "### Releases of Dynamo\n",
        f"The default is `{dynamo.default_release}`. Graphs are {API_VERSION}: releases without it cannot be chosen.\n",
        "| Release | Date | TensorRT-LLM | vLLM | Graphs | NATS by default | Workarounds |",
        "|---|---|---|---|---|---|---|",
        *(_release(name, catalog) for name in dynamo.releases),
    ]
    return "\n".join(parts) + "\n"


def _release(name: str, catalog: Catalog) -> str:
    release = catalog.dynamo.releases[name]
    columns = (
        f"`{name}`",
        release.date,
        release.engines["tensorrt_llm"].version,
        release.engines["vllm"].version,
        ", ".join(release.graph_versions),
        "yes" if release.nats_by_default else "no",
        ", ".join(_workaround(catalog, key) for key in release.workarounds) or "-",
    )
    return f"| {' | '.join(columns)} |"


def _workaround(catalog: Catalog, key: str) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in catalog.dynamo.workarounds[key].environment.items())


def _shown(value: object) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)
