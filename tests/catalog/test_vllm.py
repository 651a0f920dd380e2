"""vLLM: arguments as its own parser takes them, in both releases."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest

from serving_catalog import HostPlan, Process
from serving_catalog.schema import CommandLineOption, load_schema

Planner = Callable[..., HostPlan]

TARGETS = [
    (release, profile, gpu, count)
    for release in ("0.31.0", "0.22.0")
    for profile in ("low_latency", "max_throughput", "max_throughput_replicated")
    for gpu, counts in {"B200": (1, 4, 8), "GB200": (1, 4), "H200": (1, 4, 8)}.items()
    for count in counts
    if not (profile == "max_throughput_replicated" and count == 1)
]

GONE_IN_0_31 = [
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
    "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS",
    "VLLM_MXFP4_USE_MARLIN",
    "VLLM_FLASHINFER_MOE_BACKEND",
]


def parser(release: str) -> argparse.ArgumentParser:
    """The release's parser, from its table."""
    made = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    made.add_argument("model_tag")
    for option in load_schema("vllm", release).command_line:
        made.add_argument(option.name, *option.aliases, **argument(option))
    return made


def argument(option: CommandLineOption) -> dict[str, Any]:
    if option.kind == "switch":
        return {"action": "store_true"}
    if option.kind == "boolean":
        return {"action": argparse.BooleanOptionalAction}
    types = {"int": int, "size": int, "float": float}
    return {
        "type": types.get(option.type, str),
        **({"choices": option.choices} if option.choices else {}),
        **({"nargs": "+"} if option.kind == "values" else {}),
    }


def words(process: Process) -> list[str]:
    """What vLLM makes of command line and options file: it types the file's keys after the model, `true` as a flag."""
    typed = []
    for key, value in process.options_file.items():
        assert value is not False, "some releases drop `x: false` without a word"
        typed += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    assert process.argv[:2] == ("vllm", "serve")
    return [process.argv[2], *typed, *process.argv[3:]]


@pytest.mark.parametrize(("release", "profile", "gpu", "count"), TARGETS)
def test_every_target_parses(plan: Planner, release: str, profile: str, gpu: str, count: int) -> None:
    made = plan(engine="vllm", release=release, profile=profile, gpu=gpu, gpu_count=count)
    assert made.image == f"vllm/vllm-openai:v{release}"
    for process in made.processes:
        parsed, unknown = parser(release).parse_known_args(words(process))
        assert unknown == []
        assert parsed.model_tag == "openai/gpt-oss-120b"
        assert parsed.tensor_parallel_size == len(process.gpus)
        assert parsed.tool_call_parser == "openai"
        assert parsed.enable_auto_tool_choice is True
        assert parsed.reasoning_parser == "openai_gptoss"
        typed = {word.split("=")[0] for word in process.argv if word.startswith("--")}
        assert not typed & {f"--{key}" for key in process.options_file}, "nothing is set in two places"


def test_moe_backend_is_an_option_where_the_variables_are_gone(plan: Planner) -> None:
    blackwell = plan(engine="vllm", gpu="B200").processes[0]
    hopper = plan(engine="vllm", gpu="H200").processes[0]
    assert blackwell.options_file["moe-backend"] == "flashinfer_trtllm"
    assert hopper.options_file["moe-backend"] == "flashinfer_cutlass"
    assert not set(GONE_IN_0_31) & {*blackwell.environment, *hopper.environment}


def test_moe_backend_is_a_variable_where_it_is_read(plan: Planner) -> None:
    blackwell = plan(engine="vllm", release="0.22.0", gpu="B200").processes[0]
    hopper = plan(engine="vllm", release="0.22.0", gpu="H200").processes[0]
    assert blackwell.environment == {"VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8": "1"}
    assert hopper.environment == {}
    assert "moe-backend" not in blackwell.options_file


def test_choosing_the_backend_by_option_drops_the_variable(plan: Planner) -> None:
    process = plan("moe_backend=triton", engine="vllm", release="0.22.0", gpu="B200").processes[0]
    assert process.options_file["moe-backend"] == "triton"
    assert process.environment == {}


def test_prefix_caching_stays_on_and_can_be_switched_off(plan: Planner) -> None:
    assert not any("prefix-caching" in key for key in plan(engine="vllm").processes[0].options_file)
    off = plan("enable-prefix-caching=false", engine="vllm").processes[0].options_file
    assert off["no-enable-prefix-caching"] is True
    assert "enable-prefix-caching" not in off


@pytest.mark.parametrize("spelling", ["max-num-seqs", "max_num_seqs", "options.max-num-seqs", "max_batch_size"])
def test_every_spelling_of_an_option_is_that_option(plan: Planner, spelling: str) -> None:
    assert plan(f"{spelling}=7", engine="vllm").processes[0].options_file["max-num-seqs"] == 7


def test_the_image_s_entrypoint_is_replaced(plan: Planner) -> None:
    process = plan(engine="vllm").processes[0]
    run = list(process.docker_run)
    at = run.index("--entrypoint")
    assert run[at : at + 4] == ["--entrypoint", "vllm", process.image, "serve"]
