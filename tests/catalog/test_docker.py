"""`docker run`: the form for a unit, and the form to paste."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving_catalog import HostPlan, Layout, docker_run
from serving_catalog.docker import paste

Planner = Callable[..., HostPlan]

LAYOUT = Layout(cache_directory="/var/lib/gpt-oss", configuration_directory="/etc/gpt-oss", container_name="gpt-oss-0")


def test_a_unit_s_command(plan: Planner) -> None:
    process = plan(gpu_count=1).processes[0]
    caches = "/var/lib/gpt-oss/engine_caches/nvcr.io_nvidia_tensorrt-llm_release_1.2.1/0"
    assert list(docker_run(process, LAYOUT)) == [
        "docker", "run", "--rm", "--name", "gpt-oss-0", "--init", "--pull=never", "--ipc=host",
        "--stop-timeout", "180", "--ulimit", "stack=67108864", "--ulimit", "memlock=-1",
        "--device", "nvidia.com/gpu=0", "-p", "127.0.0.1:8000:8000",
        "--env-file", "/etc/gpt-oss/processes/0/environment",
        "-e", "HF_HUB_OFFLINE=1", "-e", "TIKTOKEN_ENCODINGS_BASE=/root/.cache/encodings",
        "-e", "TRITON_CACHE_DIR=/root/.triton/cache", "-e", "TORCHINDUCTOR_CACHE_DIR=/root/.cache/torchinductor",
        "-e", "CUDA_CACHE_PATH=/root/.nv/ComputeCache",
        "-v", "/var/lib/gpt-oss/weights:/root/.cache/huggingface/hub:ro",
        "-v", "/var/lib/gpt-oss/encodings:/root/.cache/encodings:ro",
        "-v", f"{caches}/triton:/root/.triton/cache:rw",
        "-v", f"{caches}/flashinfer:/root/.cache/flashinfer:rw",
        "-v", f"{caches}/torchinductor:/root/.cache/torchinductor:rw",
        "-v", f"{caches}/cuda:/root/.nv/ComputeCache:rw",
        "-v", "/etc/gpt-oss/processes/0/low_latency.yaml:/root/.cache/gpt-oss/low_latency.yaml:ro",
        "-w", "/root/.cache/gpt-oss", "nvcr.io/nvidia/tensorrt-llm/release:1.2.1",
        "trtllm-serve", "openai/gpt-oss-120b", "--host", "0.0.0.0", "--port", "8000", "--config", "low_latency.yaml",
    ]  # fmt: skip


def test_values_an_operator_sets_never_reach_the_command_line(plan: Planner) -> None:
    process = plan("environment.VLLM_API_KEY=sesame", engine="vllm").processes[0]
    assert process.environment["VLLM_API_KEY"] == "sesame"
    assert not any("sesame" in word for word in docker_run(process, LAYOUT))


@pytest.mark.parametrize(
    ("layout", "present", "absent"),
    [
        ({"gpu_access": "gpus"}, ["--gpus", '"device=2,3"'], ["--device"]),
        ({"gpu_access": "cdi"}, ["--device", "nvidia.com/gpu=2", "--device", "nvidia.com/gpu=3"], ["--gpus"]),
        ({"publish_address": "0.0.0.0"}, ["-p", "0.0.0.0:8001:8000"], []),
        ({"publish_address": "fd00::1"}, ["-p", "[fd00::1]:8001:8000"], []),
        ({"ulimits": {"stack": 1024}}, ["--ulimit", "stack=1024"], ["memlock=-1"]),
        ({"ulimits": {}}, ["--ipc=host"], ["--ulimit"]),
        ({"interactive": True}, ["-it"], []),
        ({"init": False}, [], ["--init"]),
        ({"extra_environment": {"A": "b"}}, ["-e", "A=b"], []),
        ({"extra_flags": ["--cpuset-cpus=0-3"]}, ["--cpuset-cpus=0-3"], []),
    ],
)
def test_layouts(plan: Planner, layout: dict[str, Any], present: list[str], absent: list[str]) -> None:
    """From plain data, as a filter hands it over."""
    made = json.loads(plan(profile="max_throughput_replicated", gpu="B200").model_dump_json())
    base = {"cache_directory": "/cache", "configuration_directory": "/conf"}
    words = list(docker_run(made["processes"][1], {**base, **layout}))
    assert any(words[n : n + len(present)] == present for n in range(len(words)))
    assert not set(absent) & set(words)


def test_an_unknown_layout_key_is_an_error(plan: Planner) -> None:
    with pytest.raises(ValueError, match="publish_adress"):
        docker_run(
            plan().processes[0], {"cache_directory": "/c", "configuration_directory": "/e", "publish_adress": ""}
        )


def test_replicas_share_nothing_they_write(plan: Planner) -> None:
    processes = plan(profile="max_throughput_replicated").processes
    mounts = [{word for word in docker_run(process, LAYOUT) if word.endswith(":rw")} for process in processes]
    assert len(set.union(*mounts)) == sum(map(len, mounts))


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"release": "gpt-oss-dev", "profile": "max_throughput"},
        {"profile": "max_throughput_replicated", "gpu": "B200"},
        {"engine": "vllm", "gpu_count": 8},
        {"engine": "vllm", "profile": "max_throughput_replicated"},
    ],
    ids=str,
)
def test_the_paste_form_runs_as_it_is(plan: Planner, tmp_path: Path, request_: dict[str, Any]) -> None:
    """Pasted into a real shell: the options files are where the containers look, and docker gets the plan's words."""
    made = plan("environment.GREETING=it's $HOME", **request_)
    recorder = tmp_path / "bin" / "docker"
    recorder.parent.mkdir()
    recorder.write_text(
        '#!/bin/sh\nprintf "%s\\0" docker "$@" >> "$RECORD"; printf "\\n" >> "$RECORD"\n', encoding="utf-8"
    )
    recorder.chmod(0o755)
    environment = {
        "HOME": str(tmp_path),
        "PATH": f"{recorder.parent}:{os.environ['PATH']}",
        "RECORD": str(tmp_path / "record"),
    }
    subprocess.run(["bash", "-euc", paste(made)], check=True, env=environment)
    calls = [call.rstrip("\0").split("\0") for call in (tmp_path / "record").read_text(encoding="utf-8").splitlines()]
    expected = [
        [word.replace("~/", f"{tmp_path}/", 1) if word.startswith("~/") else word for word in process.docker_run]
        for process in made.processes
    ]
    if len(expected) > 1:
        expected = [["-d" if word == "-it" else word for word in words] for words in expected]
    assert calls == expected
    for process in made.processes:
        written = tmp_path / ".cache" / "gpt-oss" / process.options_file_name
        assert yaml.safe_load(written.read_text(encoding="utf-8")) == process.options_file
