"""Overrides: what an operator sets is what the engine gets, in the one place where that release takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serving_catalog import Catalog, HostPlan, ServeRequest, overrides_from_mapping, plan_host
from serving_catalog.overrides import parse_overrides

Planner = Callable[..., HostPlan]


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["max_batch_size=32"], {"max_batch_size": 32}),
        (["options.max_batch_size=32"], {"max_batch_size": 32}),
        (["max_num_tokens=4096"], {"max_num_tokens": 4096}),
        (["max_seq_len=32768"], {"max_seq_len": 32768}),
        (["stream_interval=5"], {"stream_interval": 5}),
        (["kv_cache_memory_fraction=0.6"], {"kv_cache_config": {"free_gpu_memory_fraction": 0.6}}),
        (["moe_backend=AUTO"], {"moe_config": {"backend": "AUTO"}}),
        (["kv_cache_config.dtype=fp8"], {"kv_cache_config": {"free_gpu_memory_fraction": 0.75, "dtype": "fp8"}}),
        (["kv_cache_config={dtype: fp8}"], {"kv_cache_config": {"dtype": "fp8"}}),
        (["enable_chunked_prefill=true"], {"enable_chunked_prefill": True}),
        (["cuda_graph_config=null"], {"cuda_graph_config": None}),
        (
            ["cuda_graph_config.batch_sizes=[1, 2, 4]"],
            {"cuda_graph_config": {"enable_padding": True, "batch_sizes": [1, 2, 4]}},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options(plan: Planner, words: list[str], where: dict[str, Any]) -> None:
    options = plan(*words).processes[0].options_file
    assert {key: options[key] for key in where} == where


def test_cuda_graphs_follow_the_batch(plan: Planner) -> None:
    graph = plan("max_batch_size=32").processes[0].options_file["cuda_graph_config"]
    assert graph == {"max_batch_size": 32, "enable_padding": True}
    graph = (
        plan("max_batch_size=32", "cuda_graph_config.max_batch_size=16").processes[0].options_file["cuda_graph_config"]
    )
    assert graph == {"max_batch_size": 16, "enable_padding": True}


def test_the_guide_s_graphs_stay_where_the_guide_has_them(plan: Planner) -> None:
    process = plan("max_batch_size=32", release="gpt-oss-dev").processes[0]
    assert process.options_file["cuda_graph_config"] == {"max_batch_size": 8, "enable_padding": True}


def test_null_leaves_a_flag_out(plan: Planner) -> None:
    argv = plan("max_batch_size=null", profile="max_throughput", release="gpt-oss-dev").processes[0].argv
    assert "--max_batch_size" not in argv
    assert "None" not in argv


def test_false_leaves_a_switch_out(plan: Planner) -> None:
    assert "--trust_remote_code" not in plan("trust_remote_code=false", release="gpt-oss-dev").processes[0].argv
    assert "--enable-auto-tool-choice" not in plan("enable-auto-tool-choice=false", engine="vllm").processes[0].argv


def test_environment(plan: Planner) -> None:
    environment = (
        plan("environment.NCCL_DEBUG=INFO", "environment.N=2", "environment.NONE=", "environment.T=True", gpu="B200")
        .processes[0]
        .environment
    )
    assert environment == {"NCCL_GRAPH_REGISTER": "0", "NCCL_DEBUG": "INFO", "N": "2", "NONE": "", "T": "True"}
    assert plan("environment.NCCL_GRAPH_REGISTER=1", gpu="B200").processes[0].environment == {
        "NCCL_GRAPH_REGISTER": "1"
    }


def test_every_replica_gets_them(plan: Planner) -> None:
    processes = plan("max_batch_size=8", "environment.A=1", profile="max_throughput_replicated").processes
    assert {process.options_file["max_batch_size"] for process in processes} == {8}
    assert {process.environment["A"] for process in processes} == {"1"}


def test_an_inventory_s_mapping_is_the_same_as_the_words() -> None:
    words = parse_overrides(["max_batch_size=32", "moe_backend=AUTO", "environment.A=x=y", "cuda_graph_config=null"])
    mapping = {"max_batch_size": 32, "moe_backend": "AUTO", "environment.A": "x=y", "cuda_graph_config": None}
    assert overrides_from_mapping(mapping) == words


def test_a_boolean_of_an_inventory_is_written_as_programs_read_it(catalog: Catalog) -> None:
    request = ServeRequest(
        engine="vllm",
        profile="low_latency",
        gpu="H200",
        gpu_count=1,
        overrides=overrides_from_mapping({"environment.A": True, "environment.B": 2}),
    )
    assert plan_host(request, catalog).processes[0].environment == {"A": "true", "B": "2"}


def test_text_that_is_not_yaml_stays_text() -> None:
    (override,) = parse_overrides(["chat_template={x"])
    assert override.value == "{x"
