"""The catalog on the command line: `python -m serving_catalog targets`, `python -m serving_catalog plan …`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from serving_catalog import CatalogError, PlanError, ServeRequest, load_catalog, parse_overrides, plan_host
from serving_catalog.docker import paste
from serving_catalog.targets import as_markdown, as_table, list_targets

# Bad input, as argparse has it too.
BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was asked for; 0, or 2 with every problem on standard error."""
    asked = _parser().parse_args(arguments)
    try:
        print(_targets(asked) if asked.command == "targets" else _plan(asked), end="")
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
    return parser


if __name__ == "__main__":
    sys.exit(main())
