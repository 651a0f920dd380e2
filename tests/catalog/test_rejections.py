"""Bad input: the message names the key, the value and what is allowed, and everything wrong is said at once."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving_catalog import (
    HostPlan,
    PlanError,
    ServeRequest,
    load_catalog,
    overrides_from_mapping,
    plan_host,
    request_from,
)

Planner = Callable[..., HostPlan]
OverlayWriter = Callable[[dict[str, Any]], Path]

REQUESTS = [
    (
        {"engine": "tensorrtllm"},
        "engine: 'tensorrtllm' is not known (did you mean tensorrt_llm?); allowed: tensorrt_llm, vllm",
    ),
    (
        {"profile": "max_througput"},
        "profile: 'max_througput' is not known for engine tensorrt_llm (did you mean max_throughput?); "
        "allowed: low_latency, max_throughput, max_throughput_replicated",
    ),
    ({"gpu": "GH200"}, "gpu: 'GH200' is not known (did you mean H200?); allowed: B200, GB200, H200"),
    ({"gpu": "h200"}, "gpu: 'h200' is not known (did you mean H200?); allowed: B200, GB200, H200"),
    (
        {"model": "gpt-oss-12b"},
        "model: 'gpt-oss-12b' is not known (did you mean gpt-oss-120b?); allowed: gpt-oss-120b, gpt-oss-20b",
    ),
    (
        {"release": "1.3.0"},
        "release: '1.3.0' is not known for engine tensorrt_llm; allowed: 1.2.1, gpt-oss-dev",
    ),
    (
        {"gpu": "B200", "gpu_count": 3},
        "gpu_count: 3 is not served for B200 with tensorrt_llm/low_latency; allowed: 1, 4, 8",
    ),
    (
        {"gpu": "GB200", "gpu_count": 8},
        "gpu_count: 8 is not served for GB200 with tensorrt_llm/low_latency; allowed: 1, 4",
    ),
    (
        {"gpu_count": 0},
        "gpu_count: 0 is not served for H200 with tensorrt_llm/low_latency; allowed: 1, 4, 8",
    ),
    (
        {"profile": "max_throughput_replicated", "gpu_count": 1},
        "gpu_count: 1 is not served for H200 with tensorrt_llm/max_throughput_replicated; allowed: 4, 8 "
        "(nothing to split into replicas: use max_throughput)",
    ),
    (
        {"platform": "hgx_b300"},
        "platform: 'hgx_b300' is not known (did you mean hgx_b200?); "
        "allowed: auto, hgx_h200, hgx_b200, gb200_nvl72, gb200_nvl4, h200_nvl",
    ),
    (
        {"platform": "hgx_b200"},
        "platform: hgx_b200 (HGX or DGX B200) has B200, not H200; allowed with H200: auto, hgx_h200, h200_nvl",
    ),
    ({"port": 0}, "port: 0 is not a port; allowed: 1 to 65535"),
    (
        {"profile": "max_throughput_replicated", "port": 65533},
        "port: 65533 leaves no room for 4 consecutive ports; allowed: 1 to 65532",
    ),
]


@pytest.mark.parametrize(("request_", "message"), REQUESTS, ids=[str(request) for request, _ in REQUESTS])
def test_request(plan: Planner, request_: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as raised:
        plan(**request_)
    assert raised.value.problems == (message,)


GOOD: dict[str, Any] = {"engine": "vllm", "profile": "low_latency", "gpu": "H200", "gpu_count": 4}

OVERRIDES = yaml.safe_load((Path(__file__).parent / "rejected_overrides.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", OVERRIDES, ids=[" ".join(case["set"]) for case in OVERRIDES])
def test_override(plan: Planner, case: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as raised:
        plan(*case["set"], **case.get("request", {}))
    (problem,) = raised.value.problems
    assert fnmatchcase(problem, case["message"]), problem


def test_a_secret_is_not_repeated(plan: Planner) -> None:
    with pytest.raises(PlanError) as raised:
        plan("api-key=sesame", "environment.HF_TOKEN=hf_sesame", "hf_token=hf_sesame", engine="vllm")
    assert len(raised.value.problems) == 3
    assert "sesame" not in str(raised.value)
    secret = overrides_from_mapping({"environment.MY_PASSWORD": ["sesame"]})
    with pytest.raises(PlanError, match=r"environment\.MY_PASSWORD=\*\*\*: a variable's value is text or a number"):
        plan_host(request_from(GOOD).model_copy(update={"overrides": secret}), load_catalog())


def test_a_word_that_is_not_path_and_value(plan: Planner) -> None:
    with pytest.raises(PlanError, match=r"set: 'max_batch_size' is not path=value, for example max_batch_size=64"):
        plan("max_batch_size")


def test_every_problem_is_said_at_once(plan: Planner) -> None:
    with pytest.raises(PlanError) as raised:
        plan("max_bach_size=3", "stream_interval=0", "moe_backend=X", port=70000)
    assert [problem.split(":")[0] for problem in raised.value.problems] == ["set", "port", "set", "set"]
    with pytest.raises(PlanError) as raised:
        plan(engine="x", gpu="y", model="z", platform="w")
    assert [problem.split(":")[0] for problem in raised.value.problems] == ["engine", "gpu", "model", "platform"]


def test_wrong_types_and_keys_of_a_request() -> None:
    assert request_from(GOOD).gpu_count == 4
    with pytest.raises(PlanError) as raised:
        request_from({**GOOD, "gpu_count": "four", "gpus": 3, "engine": None})
    assert set(raised.value.problems) == {
        "engine: None: Input should be a valid string",
        "gpu_count: 'four': Input should be a valid integer",
        "gpus: 3: Extra inputs are not permitted",
    }


L40S = {
    "L40S": {
        "names": ["NVIDIA L40S"],
        "pci_device_ids": {"26b9": "NVIDIA L40S"},
        "memory_bytes": 48305799168,
        "architecture": "ada",
        "compute_capability": "8.9",
        "cpu_architecture": "x86_64",
        "open_modules": "recommended",
        "source": "pci.ids",
    }
}
H100 = {
    "H100": {
        "names": ["NVIDIA H100 80GB HBM3"],
        "pci_device_ids": {"2330": "NVIDIA H100 80GB HBM3"},
        "memory_bytes": 85520809984,
        "architecture": "hopper",
        "compute_capability": "9.0",
        "cpu_architecture": "x86_64",
        "open_modules": "recommended",
        "source": "pci.ids",
    }
}


def served(gpu: str, counts: list[int]) -> dict[str, Any]:
    by_gpu = {gpu: {"counts": counts}}
    return {"gpu_counts": {"low_latency": by_gpu, "max_throughput": by_gpu}}


def test_a_gpu_with_too_little_memory(plan: Planner, overlay: OverlayWriter) -> None:
    directory = overlay(
        {"gpus": {**L40S, **H100}, "engines/tensorrt_llm": served("L40S", [1]), "engines/vllm": served("H100", [1, 2])}
    )
    with pytest.raises(PlanError) as raised:
        plan(overlay=directory, gpu="L40S", gpu_count=1)
    (problem,) = raised.value.problems
    assert problem.startswith("gpu: gpt-oss-120b does not fit 1 x L40S with tensorrt_llm/low_latency: ")
    for number in ("has 48.3 GB", "65.2 GB for weights", "131072 tokens", "0.0 GB is left"):
        assert number in problem
    assert problem.endswith("use more or larger GPUs, a smaller model, or lower max_seq_len or max_num_tokens")
    assert plan(overlay=directory, gpu="L40S", gpu_count=1, model="gpt-oss-20b").gpu == "L40S"

    # One card of 80 GB runs out of memory as its users report; two do not, and neither does one with short requests.
    vllm = {"overlay": directory, "engine": "vllm", "gpu": "H100"}
    with pytest.raises(PlanError, match="does not fit 1 x H100 with vllm/low_latency"):
        plan(gpu_count=1, **vllm)
    assert plan(gpu_count=2, **vllm).gpu_count == 2
    assert plan("kv_cache_memory_fraction=0.95", "max_num_tokens=1024", "max_seq_len=16384", gpu_count=1, **vllm)


def test_a_memory_fraction_that_leaves_no_room_for_one_request(plan: Planner) -> None:
    with pytest.raises(PlanError, match=r"0.05 of the rest, 9.7 GB for the keys and values"):
        plan("kv_cache_memory_fraction=0.05", gpu_count=1)


def test_an_image_that_is_not_built_for_the_host_s_processor(plan: Planner, overlay: OverlayWriter) -> None:
    directory = overlay({"engines/vllm": {"releases": {"0.31.0": {"architectures": ["x86_64"]}}}})
    with pytest.raises(PlanError) as raised:
        plan(overlay=directory, engine="vllm", gpu="GB200")
    assert raised.value.problems == (
        "release: 0.31.0 has no image for aarch64, the CPU of a GB200 host; "
        "vllm/vllm-openai:v0.31.0 is built for: x86_64",
    )
    assert plan(overlay=directory, engine="vllm", gpu="B200").gpu == "B200"


def test_planning_does_not_change_the_catalog(plan: Planner) -> None:
    before = load_catalog().model_dump_json()
    plan("max_batch_size=3", "environment.X=1")
    with pytest.raises(PlanError):
        plan("max_batch_size=x")
    assert load_catalog().model_dump_json() == before
    assert (
        plan_host(ServeRequest(engine="tensorrt_llm", profile="low_latency", gpu="H200", gpu_count=4), load_catalog())
        .processes[0]
        .environment
        == {}
    )
