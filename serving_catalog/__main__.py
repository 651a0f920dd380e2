"""The catalog on the command line: `targets`, `plan` for a host, `graph` for a namespace of Kubernetes."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from serving_catalog import (
    CatalogError,
    PlanError,
    ServeRequest,
    load_catalog,
    overrides_from_mapping,
    parse_overrides,
    plan_host,
)
from serving_catalog.docker import paste
from serving_catalog.graphs import graph_request_from, plan_graph
from serving_catalog.graphs.listing import as_table as graphs_as_table
from serving_catalog.graphs.listing import list_graphs
from serving_catalog.graphs.render import STEPS, as_json, as_yaml
from serving_catalog.loading import read_yaml
from serving_catalog.targets import as_markdown, as_table, list_targets

# Bad input, as argparse has it too.
BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was asked for; 0, or 2 with every problem on standard error."""
    asked = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # what YAML and JSON are in, whatever the terminal's own is
    try:
        print({"targets": _targets, "plan": _plan, "graphs": _graphs, "graph": _graph}[asked.command](asked), end="")
    except PlanError as error:
        for problem in error.problems:
            print(f"serving_catalog: {problem}", file=sys.stderr)
        return BAD_INPUT
    except CatalogError as error:
        print(f"serving_catalog: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def _targets(asked: argparse.Namespace) -> str:
    catalog = load_catalog(asked.overlay)
    targets = list_targets(catalog)
    if asked.format == "json":
        return json.dumps([target.model_dump(mode="json") for target in targets], indent=2) + "\n"
    if asked.format == "markdown":
        return as_markdown(targets, catalog)
    return as_table(targets) + "\n"


def _plan(asked: argparse.Namespace) -> str:
    catalog = load_catalog(asked.overlay)
    plan = plan_host(
        ServeRequest(
            engine=asked.engine,
            profile=asked.profile,
            gpu=asked.gpu,
            gpu_count=asked.gpu_count,
            platform=asked.platform,
            model=asked.model,
            release=asked.release,
            overrides=parse_overrides(asked.set),
            port=asked.port,
        ),
        catalog,
    )
    if asked.format == "docker":
        return paste(plan)
    data = plan.model_dump(mode="json")
    if asked.format == "yaml":
        return str(yaml.safe_dump(data, sort_keys=False))
    return json.dumps(data, indent=2) + "\n"


def _graphs(asked: argparse.Namespace) -> str:
    rows = list_graphs(load_catalog(asked.overlay))
    if asked.format == "json":
        return json.dumps([row.model_dump(mode="json") for row in rows], indent=2) + "\n"
    return graphs_as_table(rows) + "\n"


def _graph(asked: argparse.Namespace) -> str:
    catalog = load_catalog(asked.overlay)
    values = _settings_file(asked.settings)
    values["target"] = asked.target
    for path, value in _graph_settings(asked).items():
        *sections, name = path.split(".")
        here: Any = values
        for section in sections:
            here = here.setdefault(section, {}) if isinstance(here, dict) else here
        if isinstance(here, dict):  # what is no mapping is refused with the request
            here[name] = value
    options = values.pop("set", None) or {}
    if not isinstance(options, dict):
        raise PlanError([f"set: {options!r} is not a mapping of paths to values, such as worker.max_batch_size: 64"])
    values["overrides"] = [
        override.model_dump() for override in (*overrides_from_mapping(options), *parse_overrides(asked.set))
    ]
    request = graph_request_from(values)
    if asked.step is None and request.endpoint_wait_seconds is None:
        # Applied all at once, the smoke test is there before the model is.
        times = catalog.dynamo.times
        load = request.load_timeout_seconds or times.load_seconds
        download = request.download_timeout_seconds or times.download_seconds
        wait = download + load + times.start_seconds + times.endpoint_seconds
        request = request.model_copy(update={"endpoint_wait_seconds": wait})
    plan = plan_graph(request, catalog)
    if asked.step == "benchmark" and plan.benchmark is None:
        raise PlanError(["step: 'benchmark' without a benchmark; add --benchmark RUN_ID"])
    return as_yaml(plan, asked.step) if asked.format == "yaml" else as_json(plan, asked.step)


def _settings_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    if not file.is_file():
        raise PlanError([f"settings: {str(file)!r} is not a file"])
    return read_yaml(file)


def _graph_settings(asked: argparse.Namespace) -> dict[str, Any]:
    """What was said on the command line, by its path in a GraphRequest."""
    said: dict[str, Any] = {
        "name": asked.name,
        "namespace": asked.namespace,
        "model": asked.model,
        "gpu": asked.gpu,
        "release": asked.release,
        "replicas": _counts(asked.replicas) or None,
        "model_cache.claim": asked.claim,
        "model_cache.existing": True if asked.existing_claim else None,
        "model_cache.storage_class": asked.storage_class,
        "model_cache.access_mode": asked.access_mode,
        "model_cache.size": asked.size,
        "pull_secrets": asked.pull_secret or None,
        "image_registry": asked.image_registry,
        "tools_image": asked.tools_image,
        "hub_endpoint": asked.hub_endpoint,
        "encodings_url": asked.encodings_url,
        "package_index": asked.package_index,
        "placement.node_selector": _pairs("node-selector", asked.node_selector) or None,
        "labels": _pairs("label", asked.label) or None,
        "annotations": _pairs("annotation", asked.annotation) or None,
        "rollout": asked.rollout,
        "network_policy": True if asked.network_policy else None,
        "router_mode": asked.router_mode,
        "benchmark.run_id": asked.benchmark,
        "benchmark.as_published": True if asked.as_published else None,
    }
    values = {path: value for path, value in said.items() if value is not None}
    if asked.no_hf_token:
        values["hf_token_secret"] = None
    elif asked.hf_token_secret is not None:
        name, _, key = asked.hf_token_secret.partition("/")
        values["hf_token_secret"] = {"name": name, **({"key": key} if key else {})}
    return values


def _pairs(flag: str, words: Sequence[str]) -> dict[str, str]:
    wrong = [word for word in words if "=" not in word]
    if wrong:
        raise PlanError([f"{flag}: {word!r} is not KEY=VALUE" for word in wrong])
    return dict(word.split("=", 1) for word in words)


def _counts(words: Sequence[str]) -> dict[str, int]:
    pairs = _pairs("replicas", words)
    wrong = {component: count for component, count in pairs.items() if not count.isdigit()}
    if wrong:
        raise PlanError(
            [f"replicas: {c}={n!r} is not COMPONENT=NUMBER, for example worker=2" for c, n in wrong.items()]
        )
    return {component: int(count) for component, count in pairs.items()}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serving_catalog", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    overlay = argparse.ArgumentParser(add_help=False)
    overlay.add_argument(
        "--overlay",
        type=Path,
        metavar="DIR",
        help="directory with files named as in serving_catalog/data; they are merged over it",
    )
    targets = commands.add_parser("targets", parents=[overlay], help="list every target")
    targets.add_argument("--format", choices=("table", "json", "markdown"), default="table")
    plan = commands.add_parser("plan", parents=[overlay], help="print the plan of one host")
    plan.add_argument("--engine", required=True, help="tensorrt_llm or vllm")
    plan.add_argument("--profile", required=True, help="low_latency, max_throughput or max_throughput_replicated")
    plan.add_argument("--gpu", required=True, help="B200, GB200 or H200")
    plan.add_argument("--gpu-count", required=True, type=int, help="GPUs of the host that serve")
    plan.add_argument("--platform", help="what the host is, for example hgx_h200; only checked against the rest")
    plan.add_argument("--model", default="gpt-oss-120b", help="default: %(default)s")
    plan.add_argument("--release", help="release of the engine; default: the engine's")
    plan.add_argument("--port", type=int, default=8000, help="first port on the host; default: %(default)s")
    plan.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="override a setting, for example max_batch_size=32 or environment.NCCL_DEBUG=INFO; may be repeated",
    )
    plan.add_argument("--format", choices=("json", "yaml", "docker"), default="json")
    graphs = commands.add_parser("graphs", parents=[overlay], help="list every target for Kubernetes")
    graphs.add_argument("--format", choices=("table", "json"), default="table")
    _add_graph(commands.add_parser("graph", parents=[overlay], help="print the Kubernetes manifests of one target"))
    return parser


def _add_graph(graph: argparse.ArgumentParser) -> None:
    graph.add_argument("target", metavar="TARGET", help="for example gb200-agg; `graphs` lists them")
    graph.add_argument("--format", choices=("yaml", "json"), default="yaml")
    graph.add_argument("--step", choices=STEPS, help="only what one step applies; default: everything")
    graph.add_argument(
        "--settings",
        type=Path,
        metavar="FILE",
        help="YAML with any setting of a GraphRequest, and `set` with engine options; flags win over it",
    )
    add = graph.add_argument
    add("--name", help="of the graph; default: the target's")
    add("--namespace", help="default: gpt-oss")
    add("--model", help="default: gpt-oss-120b")
    add("--gpu", help="what the cluster has; only checked against the target")
    add("--release", help="of Dynamo; default: the catalog's")
    add("--replicas", action="append", default=[], metavar="COMPONENT=N", help="for example worker=2; may be repeated")
    add("--claim", help="of the model cache; default: model-cache")
    add("--existing-claim", action="store_true", help="the claim is there already")
    add("--storage-class")
    add("--access-mode", help="default: ReadWriteMany")
    add("--size", help="of the model cache, for example 200Gi")
    add("--hf-token-secret", metavar="NAME/KEY", help="default: hf-token-secret/HF_TOKEN")
    add("--no-hf-token", action="store_true", help="the download needs no token, as from a mirror")
    add("--pull-secret", action="append", default=[], metavar="NAME", help="may be repeated")
    add("--image-registry", metavar="HOST", help="where every image comes from instead")
    add("--tools-image", help="of the Jobs")
    add("--hub-endpoint", metavar="URL", help="a mirror of the Hugging Face Hub")
    add(
        "--encodings-url", metavar="URL", help="a directory with Harmony's vocabularies, for clusters without a way out"
    )
    add("--package-index", metavar="URL", help="a mirror of PyPI, for the Jobs' tools")
    add("--node-selector", action="append", default=[], metavar="KEY=VALUE", help="of GPU pods; may be repeated")
    add("--label", action="append", default=[], metavar="KEY=VALUE", help="of all objects; may be repeated")
    add("--annotation", action="append", default=[], metavar="KEY=VALUE", help="of all objects; may be repeated")
    add(
        "--rollout", choices=("in_place", "blue_green", "recreate"), help="default: in_place, which needs no spare GPUs"
    )
    add("--network-policy", action="store_true")
    add("--router-mode")
    add("--benchmark", metavar="RUN_ID", help="add a benchmark; another id runs it again")
    add("--as-published", action="store_true", help="with the published recipe's own count of GPUs")
    add(
        "--set",
        action="append",
        default=[],
        metavar="COMPONENT.PATH=VALUE",
        help="override an engine option, for example prefill.max_batch_size=32 or worker.environment.NCCL_DEBUG=INFO; "
        "may be repeated",
    )


if __name__ == "__main__":
    sys.exit(main())
