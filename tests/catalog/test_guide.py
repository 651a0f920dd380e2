"""Release gpt-oss-dev is the published guide, word for word.

The expectations are typed from "Running a High Performance GPT-OSS-120B Inference Server with TensorRT-LLM",
not taken from the catalog.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable

import pytest
import yaml

from serving_catalog import HostPlan, Process

Planner = Callable[..., HostPlan]

LOW_LATENCY_COMMAND = """
mpirun -n 1 --oversubscribe --allow-run-as-root
trtllm-serve  openai/gpt-oss-120b
  --host 0.0.0.0
  --port 8000
  --backend pytorch
  --tp_size {n}
  --ep_size {n}
  --trust_remote_code
  --extra_llm_api_options low_latency.yaml
  --kv_cache_free_gpu_memory_fraction 0.75
"""

MAX_THROUGHPUT_COMMAND = """
mpirun -n 1 --oversubscribe --allow-run-as-root
trtllm-serve  openai/gpt-oss-120b
  --host 0.0.0.0
  --port 8000
  --backend pytorch
  --tp_size {n}
  --ep_size {n}
  --max_batch_size 640
  --trust_remote_code
  --extra_llm_api_options max_throughput.yaml
  --kv_cache_free_gpu_memory_fraction 0.9
"""

LOW_LATENCY_OPTIONS = """
enable_attention_dp: false
enable_mixed_sampler: true
cuda_graph_config:
    max_batch_size: 8
    enable_padding: true
moe_config:
    backend: {moe}
"""

MAX_THROUGHPUT_OPTIONS = """
enable_attention_dp: true
cuda_graph_config:
    max_batch_size: 640
    enable_padding: true
stream_interval: 10
moe_config:
    backend: {moe}
"""

DOCKER_FLAGS = """
docker run --rm --ipc=host -it
  --ulimit stack=67108864
  --ulimit memlock=-1
  --gpus all
  -p 8000:8000
  -e TRTLLM_ENABLE_PDL=1
  -e TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL=True
  -v ~/.cache:/root/.cache:rw
"""

IMAGE = "nvcr.io/nvidia/tensorrt-llm/release:gpt-oss-dev"

HARDWARE = [("B200", 1), ("GB200", 1), ("H200", 1), ("B200", 8), ("H200", 8), ("GB200", 4), ("B200", 4), ("H200", 4)]

PROFILES = {
    "low_latency": (LOW_LATENCY_COMMAND, LOW_LATENCY_OPTIONS, "TRTLLM"),
    "max_throughput": (MAX_THROUGHPUT_COMMAND, MAX_THROUGHPUT_OPTIONS, "CUTLASS"),
}

TARGETS = [(profile, gpu, count) for profile in PROFILES for gpu, count in HARDWARE]


def test_there_are_sixteen_targets() -> None:
    assert len(set(TARGETS)) == 16


@pytest.mark.parametrize(("profile", "gpu", "count"), TARGETS)
class TestTarget:
    def process(self, plan: Planner, profile: str, gpu: str, count: int) -> Process:
        made = plan(profile=profile, gpu=gpu, gpu_count=count, release="gpt-oss-dev")
        (process,) = made.processes
        return process

    def test_command(self, plan: Planner, profile: str, gpu: str, count: int) -> None:
        command = PROFILES[profile][0].format(n=count)
        assert list(self.process(plan, profile, gpu, count).argv) == shlex.split(command)

    def test_options_file(self, plan: Planner, profile: str, gpu: str, count: int) -> None:
        _, options, moe = PROFILES[profile]
        # "It is highly recommended to set moe_config.backend to TRITON" on H200.
        expected = yaml.safe_load(options.format(moe="TRITON" if gpu == "H200" else moe))
        process = self.process(plan, profile, gpu, count)
        assert process.options_file == expected
        assert list(process.options_file) == list(expected), "the guide's order"
        assert process.options_file_name == f"{profile}.yaml"

    def test_docker_flags(self, plan: Planner, profile: str, gpu: str, count: int) -> None:
        process = self.process(plan, profile, gpu, count)
        flags = shlex.split(DOCKER_FLAGS)
        # Added to the guide: where the options file is, and what the guide types inside the container.
        assert list(process.docker_run) == [*flags, "-w", process.working_directory, IMAGE, *process.argv]

    def test_uses_every_gpu_and_the_guides_port(self, plan: Planner, profile: str, gpu: str, count: int) -> None:
        process = self.process(plan, profile, gpu, count)
        assert process.gpus == tuple(range(count))
        assert (process.port, process.container_port) == (8000, 8000)
