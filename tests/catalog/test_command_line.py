"""`python -m serving_catalog`, as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "serving_catalog", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


PLAN = (
    "plan",
    "--engine",
    "tensorrt_llm",
    "--profile",
    "max_throughput_replicated",
    "--gpu",
    "H200",
    "--gpu-count",
    "4",
)


def test_targets_as_json() -> None:
    targets = json.loads(run("targets", "--format", "json").stdout)
    seeds = [t for t in targets if t["release"] == "gpt-oss-dev" and t["profile"] != "max_throughput_replicated"]
    assert len(seeds) == 16
    assert {t["engine"] for t in targets} == {"tensorrt_llm", "vllm"}
    assert {(t["engine"], t["release"]) for t in targets if t["default_release"]} == {
        ("tensorrt_llm", "1.2.1"),
        ("vllm", "0.31.0"),
    }
    keys = [(t["engine"], t["release"], t["profile"], t["gpu"], t["gpu_count"]) for t in targets]
    assert len(keys) == len(set(keys))


def test_targets_as_a_table() -> None:
    lines = run("targets").stdout.splitlines()
    assert lines[0].split() == ["ENGINE", "RELEASE", "PROFILE", "GPU", "GPUS", "SERVERS", "PARALLELISM", "MOE", "BATCH"]
    assert len(lines) == 1 + len(json.loads(run("targets", "--format", "json").stdout))


def test_the_document_is_current() -> None:
    document = (REPOSITORY / "docs" / "targets.md").read_text(encoding="utf-8")
    made = run("targets", "--format", "markdown").stdout
    assert document == made, "run: python -m serving_catalog targets --format markdown > docs/targets.md"


@pytest.mark.parametrize(("form", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_plan_as_data(form: str, read: Callable[[str], Any]) -> None:
    plan = read(run(*PLAN, "--port", "9000", "--set", "max_batch_size=32", "--format", form).stdout)
    assert plan["engine"] == "tensorrt_llm"
    assert [process["port"] for process in plan["processes"]] == [9000, 9001, 9002, 9003]
    for index, process in enumerate(plan["processes"]):
        assert {"image", "argv", "environment", "options_file", "docker_run", "gpus", "port"} <= set(process)
        assert process["gpus"] == [index]
        assert process["options_file"]["max_batch_size"] == 32
        assert process["docker_run"][:2] == ["docker", "run"]


def test_plan_as_a_command() -> None:
    text = run(*PLAN, "--format", "docker").stdout
    assert text.count("docker run") == 4
    assert "cat <<'EOF' > ~/.cache/gpt-oss/max_throughput_replicated.yaml" in text


def test_an_overlay(tmp_path: Path) -> None:
    (tmp_path / "models.yml").write_text(f"gpt-oss-120b: {{revision: {'a' * 40}}}", encoding="utf-8")
    plan = json.loads(run(*PLAN, "--overlay", str(tmp_path)).stdout)
    assert plan["model"]["revision"] == "a" * 40


def test_bad_input_is_status_2_and_every_problem() -> None:
    done = run("plan", "--engine", "trt", "--profile", "low_latency", "--gpu", "GH200", "--gpu-count", "4")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "serving_catalog: engine: 'trt' is not known; allowed: tensorrt_llm, vllm",
        "serving_catalog: gpu: 'GH200' is not known (did you mean H200?); allowed: B200, GB200, H200",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*PLAN, "--set", "max_batch_size"), "set: 'max_batch_size' is not path=value"),
        ((*PLAN[:-1], "four"), "argument --gpu-count: invalid int value: 'four'"),
        (PLAN[:-2], "the following arguments are required: --gpu-count"),
        ((*PLAN, "--overlay", "/nowhere"), "/nowhere: the catalog overlay is not a directory"),
        (("plans",), "invalid choice: 'plans'"),
    ],
)
def test_bad_words_are_status_2(words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_plan_hash_follows_what_must_restart_the_server() -> None:
    def plan_hash(*words: str) -> str:
        return str(json.loads(run(*PLAN, *words).stdout)["plan_hash"])

    unchanged = plan_hash()
    assert len(unchanged) == 64
    assert plan_hash() == unchanged
    assert plan_hash("--platform", "hgx_h200") == unchanged
    for change in (
        ("--set", "max_batch_size=8"),
        ("--port", "8100"),
        ("--set", "environment.A=1"),
        ("--model", "gpt-oss-20b"),
    ):
        assert plan_hash(*change) != unchanged
