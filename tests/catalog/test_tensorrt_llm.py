"""TensorRT-LLM 1.2.1, the default: what that release accepts, and what its newest guidance prefers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serving_catalog import HostPlan
from serving_catalog.schema import load_schema

Planner = Callable[..., HostPlan]

TARGETS = [
    (profile, gpu, count)
    for profile in ("low_latency", "max_throughput")
    for gpu, counts in {"B200": (1, 4, 8), "GB200": (1, 4), "H200": (1, 4, 8)}.items()
    for count in counts
]


@pytest.mark.parametrize(("profile", "gpu", "count"), TARGETS)
def test_command_is_the_release_s_own(plan: Planner, profile: str, gpu: str, count: int) -> None:
    made = plan(profile=profile, gpu=gpu, gpu_count=count)
    (process,) = made.processes
    assert made.release == "1.2.1"
    assert process.image == "nvcr.io/nvidia/tensorrt-llm/release:1.2.1"
    assert list(process.argv) == [
        "trtllm-serve",
        "openai/gpt-oss-120b",
        "--host",
        "0.0.0.0",
        "--port",
        "8000",
        "--config",
        f"{profile}.yaml",
    ]


@pytest.mark.parametrize(("profile", "gpu", "count"), TARGETS)
def test_options_are_accepted_and_follow_the_guidance(plan: Planner, profile: str, gpu: str, count: int) -> None:
    (process,) = plan(profile=profile, gpu=gpu, gpu_count=count).processes
    options = process.options_file
    assert load_schema("tensorrt_llm", "1.2.1").validate_options(options) == ()
    assert "enable_mixed_sampler" not in options
    assert options["tensor_parallel_size"] == options["moe_expert_parallel_size"] == count
    assert options["cuda_graph_config"] == {"max_batch_size": options["max_batch_size"], "enable_padding": True}
    assert options["moe_config"] == {"backend": "TRITON" if gpu == "H200" else "TRTLLM"}


@pytest.mark.parametrize(("count", "attention_dp"), [(1, False), (4, True), (8, True)])
def test_throughput_spreads_attention_over_several_gpus_only(plan: Planner, count: int, attention_dp: bool) -> None:
    (process,) = plan(profile="max_throughput", gpu="B200", gpu_count=count).processes
    assert process.options_file["enable_attention_dp"] is attention_dp
    assert ("attention_dp_config" in process.options_file) is attention_dp


def test_low_latency_streams_every_token_and_keeps_the_responses_store(plan: Planner) -> None:
    made = plan(profile="low_latency")
    assert "stream_interval" not in made.processes[0].options_file
    assert "num_postprocess_workers" not in made.processes[0].options_file
    assert made.notes == ()


def test_throughput_says_that_the_responses_store_is_off(plan: Planner) -> None:
    made = plan(profile="max_throughput")
    assert made.processes[0].options_file["num_postprocess_workers"] == 4
    assert "Responses API" in made.notes[0]
    assert plan("num_postprocess_workers=0", profile="max_throughput").notes == ()


def test_variables_that_became_defaults_are_not_set(plan: Planner) -> None:
    assert plan(gpu="H200").processes[0].environment == {}
    assert plan(gpu="B200", gpu_count=1).processes[0].environment == {}
    assert plan(gpu="B200", gpu_count=4).processes[0].environment == {"NCCL_GRAPH_REGISTER": "0"}


def test_every_setting_is_in_one_place(plan: Planner) -> None:
    """What one release types and another writes to its file is never in both."""
    for release, typed in {"gpt-oss-dev": True, "1.2.1": False}.items():
        (process,) = plan(
            "max_batch_size=32", "max_num_tokens=4096", "max_seq_len=8192", profile="max_throughput", release=release
        ).processes
        for name, value in {"max_batch_size": 32, "max_num_tokens": 4096, "max_seq_len": 8192}.items():
            assert (f"--{name}" in process.argv) is typed
            assert (name in process.options_file) is not typed
            if typed:
                assert process.argv[process.argv.index(f"--{name}") + 1] == str(value)


@pytest.mark.parametrize(
    ("gpu", "count", "gpus", "parallelism"),
    [
        ("H200", 4, [(0,), (1,), (2,), (3,)], (1, False)),
        ("H200", 8, [(n,) for n in range(8)], (1, False)),
        ("B200", 4, [(0, 1), (2, 3)], (2, True)),
        ("B200", 8, [(0, 1), (2, 3), (4, 5), (6, 7)], (2, True)),
        ("GB200", 4, [(0, 1), (2, 3)], (2, True)),
    ],
)
def test_replicas_split_the_host(
    plan: Planner, gpu: str, count: int, gpus: list[Any], parallelism: tuple[int, bool]
) -> None:
    made = plan(profile="max_throughput_replicated", gpu=gpu, gpu_count=count, port=9000)
    assert [process.gpus for process in made.processes] == gpus
    assert [process.name for process in made.processes] == [str(n) for n in range(len(gpus))]
    assert [process.port for process in made.processes] == list(range(9000, 9000 + len(gpus)))
    assert {process.container_port for process in made.processes} == {8000}
    size, attention_dp = parallelism
    for process in made.processes:
        assert process.options_file["tensor_parallel_size"] == size
        assert process.options_file["moe_expert_parallel_size"] == size
        assert process.options_file["enable_attention_dp"] is attention_dp


def test_replicas_need_memory_and_caches_each(plan: Planner) -> None:
    one, four = plan(profile="max_throughput"), plan(profile="max_throughput_replicated")
    assert four.cache_bytes == 4 * one.cache_bytes
    assert four.host_memory_bytes > one.host_memory_bytes


def test_gpt_oss_20b_is_served_too(plan: Planner) -> None:
    made = plan(model="gpt-oss-20b", gpu_count=1)
    assert "openai/gpt-oss-20b" in made.processes[0].argv
    assert made.processes[0].served_model_id == "openai/gpt-oss-20b"
    assert made.model.size_bytes < 14e9


def test_model_says_all_a_download_needs(plan: Planner) -> None:
    model = plan().model
    assert model.repository == "openai/gpt-oss-120b"
    assert len(model.revision) == 40
    assert model.ignore_patterns == ("original/*", "metal/*")
    assert {encoding.file for encoding in model.encodings} == {"o200k_base.tiktoken", "cl100k_base.tiktoken"}
