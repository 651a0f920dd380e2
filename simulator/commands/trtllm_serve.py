"""`trtllm-serve`: TensorRT-LLM's command line and options file, refused where TensorRT-LLM refuses them.

Built on click, as the original is, from the tables of serving_catalog; so a wrong option gives click's words and
status 2, a wrong key in the options file gives pydantic's and status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import yaml

from serving_catalog.schema import CommandLineOption, EngineSchema
from simulator.engine import Engine, nested, refusal, schema_of
from simulator.loading import visible_gpus
from simulator.serving import run

# Options that are not settings of the model: they belong to the server, or to parts that are not simulated.
SERVER_OPTIONS = {
    *(
        "config",
        "extra_llm_api_options",
        "host",
        "port",
        "log_level",
        "tool_parser",
        "chat_template",
        "metadata_server_config_file",
    ),
    *("server_role", "disagg_cluster_uri", "custom_module_dirs", "media_io_kwargs", "custom_tokenizer"),
    *("fail_fast_on_attention_window_too_large", "backend", "otlp_traces_endpoint"),
}
RENAMED = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "cp_size": "context_parallel_size",
    "ep_size": "moe_expert_parallel_size",
    "cluster_size": "moe_cluster_parallel_size",
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "kv_cache_free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
}
SUB_COMMANDS = ("disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve", "serve")


class DefaultGroup(click.Group):
    """`trtllm-serve MODEL …` is `trtllm-serve serve MODEL …`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in SUB_COMMANDS:
            args = ["serve", *args]
        return super().resolve_command(ctx, args)


def _option(option: CommandLineOption) -> click.Option:
    # The first long name gives the parameter's name, as in click itself.
    names = [option.name, *option.aliases]
    types: dict[str, Any] = {"int": click.INT, "float": click.FLOAT}
    kind: Any = (
        click.Choice([str(c) for c in option.choices]) if option.choices else types.get(option.type, click.STRING)
    )
    if option.kind == "switch":
        return click.Option([*names], is_flag=True, default=False)
    if option.kind == "boolean":
        positive, negative = option.name, "--no-" + option.name.removeprefix("--")
        return click.Option([f"{positive}/{negative}"], default=bool(option.default))
    return click.Option(names, type=kind, default=option.default, multiple=option.kind == "repeat", show_default=True)


def command(schema: EngineSchema) -> click.Group:
    """The command line of this release."""
    group = DefaultGroup("trtllm-serve", params=[], no_args_is_help=True)
    group.context_settings["ignore_unknown_options"] = True  # they are the sub-command's to judge
    serve = click.Command(
        "serve",
        params=[click.Argument(["model"], type=str), *(_option(option) for option in schema.command_line)],
        callback=_serve(schema),
        help="Running an OpenAI API compatible server. MODEL: model name | HF checkpoint path | TensorRT engine path",
    )
    group.add_command(serve)
    for name in SUB_COMMANDS[:-1]:
        group.add_command(click.Command(name, callback=_not_simulated(name), context_settings=_ANYTHING))
    return group


_ANYTHING: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True}


def _not_simulated(name: str) -> Callable[..., None]:
    def refuse() -> None:
        raise click.ClickException(f"the stand-in engine has only `serve`, not `{name}`")

    return refuse


def _serve(schema: EngineSchema) -> Callable[..., None]:
    def serve(model: str, **given: Any) -> None:
        sys.exit(run(engine_from(schema, model, given)))

    return serve


def engine_from(schema: EngineSchema, model: str, given: dict[str, Any]) -> Engine:
    """Join command line and options file as 1.2 does: the file wins, and only kv_cache_config is joined key by key."""
    if visible_gpus() == 0:
        raise ValueError("No GPU devices found on the node")
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name not in SERVER_OPTIONS and value is not None:
            settings[RENAMED.get(name, name)] = value
    merged = nested(settings)
    path = given.get("config") or given.get("extra_llm_api_options")
    if path is not None:
        extra = read_options(path)
        section = extra.get("kv_cache_config")
        if isinstance(section, dict):
            extra["kv_cache_config"] = {**merged.get("kv_cache_config", {}), **section}
        merged.update(extra)
    problems = schema.validate_options({"model": model, **merged})
    if problems:
        raise refusal("TorchLlmArgs", problems)
    _require_consistent(merged)
    parallel = [
        merged.get(key) or 1 for key in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    ]
    world = int(parallel[0]) * int(parallel[1]) * int(parallel[2])
    directory = Path(model).is_dir()
    return Engine(
        kind="tensorrt_llm",
        release=schema.release,
        model=model,
        revision=merged.get("revision"),
        served_names=(Path(model).name if directory else model,),
        host=given["host"],
        port=given["port"],
        world_size=world,
        max_batch_size=merged.get("max_batch_size") or 2048,
        max_num_tokens=merged.get("max_num_tokens") or 8192,
        max_seq_len=merged.get("max_seq_len"),
        iteration_statistics=bool(merged.get("enable_iter_perf_stats")),
        request_metrics=bool(merged.get("return_perf_metrics")),
    )


def read_options(path: str) -> dict[str, Any]:
    """The options file; what the engine's own reader says of a bad one."""
    with Path(path).open() as file:
        content = yaml.safe_load(file)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise TypeError(f"{path}: 'dict' object expected, found '{type(content).__name__}'")
    return content


def _require_consistent(settings: dict[str, Any]) -> None:
    graphs = settings.get("cuda_graph_config") or {}
    sizes, largest = graphs.get("batch_sizes"), graphs.get("max_batch_size")
    if sizes and largest and largest != max(sizes):
        raise ValueError(
            "CudaGraphConfig.batch_sizes and max_batch_size disagree: "
            f"max_batch_size is {largest}, the largest of batch_sizes is {max(sizes)}"
        )


def main() -> None:
    command(schema_of("tensorrt_llm")).main(prog_name="trtllm-serve")


if __name__ == "__main__":
    main()
