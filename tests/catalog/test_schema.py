"""What an engine release accepts, as strictly as the engine says it."""

from __future__ import annotations

from typing import Any

import pytest

from serving_catalog import Catalog, CatalogError
from serving_catalog.schema import EngineSchema, load_schema

GUIDE_LOW_LATENCY = {
    "enable_attention_dp": False,
    "enable_mixed_sampler": True,
    "cuda_graph_config": {"max_batch_size": 8, "enable_padding": True},
    "moe_config": {"backend": "TRTLLM"},
}


@pytest.fixture(scope="module")
def schema() -> EngineSchema:
    return load_schema("tensorrt_llm", "1.2.1")


def said(schema: EngineSchema, options: object) -> list[str]:
    return [str(error) for error in schema.validate_options(options)]


@pytest.mark.parametrize(
    ("options", "errors"),
    [
        ({}, []),
        ({"cuda_graph_config": None}, []),
        ({"kv_cache_config": {"free_gpu_memory_fraction": None}}, []),
        ({"env_overrides": {"TRTLLM_ENABLE_PDL": 1}}, []),
        ({"speculative_config": {"decoding_type": "Eagle", "max_draft_len": 3}}, []),
        (GUIDE_LOW_LATENCY, ["enable_mixed_sampler: Extra inputs are not permitted"]),
        (
            {"kv_cache_free_gpu_memory_fraction": 0.9},  # in the upstream curated latency configuration
            ["kv_cache_free_gpu_memory_fraction: Extra inputs are not permitted"],
        ),
        (
            {"cuda_graph_config": {"enable_paddin": True}},
            ["cuda_graph_config.enable_paddin: Extra inputs are not permitted"],
        ),
        (
            {"moe_config": {"backend": "TRTLMM"}},
            [
                "moe_config.backend: Input should be 'AUTO', 'CUTLASS', 'CUTEDSL', 'WIDEEP', 'TRTLLM', 'DEEPGEMM', "
                "'VANILLA' or 'TRITON'"
            ],
        ),
        (
            {"kv_cache_config": {"free_gpu_memory_fraction": 1.5}},
            ["kv_cache_config.free_gpu_memory_fraction: Input should be less than or equal to 1"],
        ),
        ({"stream_interval": 0}, ["stream_interval: Input should be greater than 0"]),
        (
            {"tensor_parallel_size": "eight"},
            ["tensor_parallel_size: Input should be a valid integer, unable to parse string as an integer"],
        ),
        (
            {"enable_attention_dp": "maybe"},
            ["enable_attention_dp: Input should be a valid boolean, unable to interpret input"],
        ),
        ({"moe_config": "TRTLLM"}, ["moe_config: Input should be a valid dictionary"]),
        ({"moe_config": None}, ["moe_config: Input should be a valid dictionary"]),
        (
            {"cuda_graph_config": {"batch_sizes": [1, "x"]}},
            ["cuda_graph_config.batch_sizes.1: Input should be a valid integer, unable to parse string as an integer"],
        ),
        ({"a": 1, "b": 2}, ["a: Extra inputs are not permitted", "b: Extra inputs are not permitted"]),
    ],
)
def test_options(schema: EngineSchema, options: dict[str, Any], errors: list[str]) -> None:
    assert said(schema, options) == errors


def test_a_list_is_no_options_file(schema: EngineSchema) -> None:
    (error,) = schema.validate_options(["enable_attention_dp"])
    assert error.message == "Input should be a valid dictionary"


def test_the_guide_s_options_are_accepted_by_the_guide_s_image() -> None:
    guide = load_schema("tensorrt_llm", "gpt-oss-dev")
    assert said(guide, GUIDE_LOW_LATENCY) == []
    assert said(guide, {"moe_config": {"backend": "AUTO"}}) == [
        "moe_config.backend: Input should be 'CUTLASS', 'CUTEDSL', 'WIDEEP', 'TRTLLM', 'DEEPGEMM', 'VANILLA' "
        "or 'TRITON'"
    ]
    assert said(guide, {"attention_dp_config": {"enable_balance": True}}) == [
        "attention_dp_config: Extra inputs are not permitted"
    ]


def test_an_error_says_where_what_and_why(schema: EngineSchema) -> None:
    (error,) = schema.validate_options({"moe_config": {"backend": "X"}})
    assert (error.location, error.type, error.value) == (("moe_config", "backend"), "literal_error", "X")


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("max_batch_size", True),
        ("kv_cache_config", True),
        ("kv_cache_config.dtype", True),
        ("kv_cache_config.dtypo", False),
        ("env_overrides.ANYTHING", True),
        ("speculative_config.max_draft_len", True),
        ("max_batch_size.more", False),
        ("enable_mixed_sampler", False),
    ],
)
def test_paths(schema: EngineSchema, path: str, known: bool) -> None:
    assert schema.knows(path) is known


@pytest.mark.parametrize(
    ("engine", "release", "name", "main"),
    [
        ("tensorrt_llm", "1.2.1", "--extra_llm_api_options", "--config"),
        ("tensorrt_llm", "1.2.1", "--tp_size", "--tensor_parallel_size"),
        ("tensorrt_llm", "1.2.1", "--moe_backend", None),
        ("tensorrt_llm", "1.2.1", "--served_model_name", None),
        ("tensorrt_llm", "gpt-oss-dev", "--config", None),
        ("tensorrt_llm", "gpt-oss-dev", "--tp_size", "--tp_size"),
        ("vllm", "0.31.0", "-tp", "--tensor-parallel-size"),
        ("vllm", "0.31.0", "--max-num-partial-prefills", None),
        ("vllm", "0.22.0", "--max-num-partial-prefills", "--max-num-partial-prefills"),
        ("vllm", "0.22.0", "--device-memory-utilization", None),
        ("vllm", "0.22.0", "--watermark", None),
    ],
)
def test_command_line(engine: str, release: str, name: str, main: str | None) -> None:
    option = load_schema(engine, release).option(name)
    assert (option.name if option is not None else None) == main


def test_every_release_has_its_schema_and_types_only_what_it_takes(catalog: Catalog) -> None:
    for engine_name, engine in catalog.engines.items():
        for name, release in engine.releases.items():
            assert release.option_schema == f"{engine_name}-{name}"
            schema = load_schema(engine_name, name)
            for flag in release.flags:
                assert flag.flag is not None
                assert schema.option(flag.flag) is not None, f"{name} has no {flag.flag}"
            for common in engine.common_settings.values():
                assert schema.knows(common.setting)


def test_no_word_is_two_options() -> None:
    for engine, release in (
        ("tensorrt_llm", "1.2.1"),
        ("tensorrt_llm", "gpt-oss-dev"),
        ("vllm", "0.31.0"),
        ("vllm", "0.22.0"),
    ):
        words = [
            word for option in load_schema(engine, release).command_line for word in (option.name, *option.aliases)
        ]
        assert len(words) == len(set(words))


def test_an_unknown_release_says_which_there_are() -> None:
    with pytest.raises(
        CatalogError, match=r"tensorrt_llm-9: no schema of this name; there are: tensorrt_llm-1\.2\.1, "
    ):
        load_schema("tensorrt_llm", "9")
