"""`python -m serving_catalog graph`, for those who apply manifests themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.catalog.graph_fixtures import TARGETS, plan

REPOSITORY = Path(__file__).parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serving_catalog", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)


def documents(*words: str) -> list[dict[str, Any]]:
    done = run("graph", *words)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def kinds(found: list[dict[str, Any]]) -> list[str]:
    return [document["kind"] for document in found]


def test_the_whole_graph_as_yaml() -> None:
    found = documents("gb200-disagg", "--namespace", "serving", "--storage-class", "fast")
    assert kinds(found) == [
        "Namespace",
        "PersistentVolumeClaim",
        "ConfigMap",
        "Job",
        "ConfigMap",
        "DynamoGraphDeployment",
        "Job",
    ]
    assert {document["metadata"].get("namespace", "serving") for document in found} == {"serving"}
    assert found[1]["spec"]["storageClassName"] == "fast"
    made = plan("gb200-disagg", namespace="serving", model_cache={"storage_class": "fast"})
    assert found[5] == made.graph.manifest()


@pytest.mark.parametrize("target", TARGETS)
def test_programs_and_options_can_be_read_in_the_yaml(target: str) -> None:
    """Text of several lines is a block, whatever characters are in it and whatever the terminal takes."""
    command = [sys.executable, "-m", "serving_catalog", "graph", target, "--benchmark", "1"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, cwd=REPOSITORY, env=environment, check=True)
    text = done.stdout.decode("utf-8")
    blocks = [event for event in yaml.parse(text) if isinstance(event, yaml.ScalarEvent) and "\n" in event.value]
    assert {event.style for event in blocks} == {"|"}, [event.value[:80] for event in blocks if event.style != "|"]
    assert any(event.value.startswith("#!/usr/bin/env python3") for event in blocks)


def test_the_same_as_json() -> None:
    listed = json.loads(run("graph", "h200-agg", "--format", "json").stdout)
    assert listed["kind"] == "List"
    assert listed["items"] == documents("h200-agg")


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("prepare", ["Namespace", "PersistentVolumeClaim", "ConfigMap", "Job"]),
        ("serve", ["ConfigMap", "DynamoGraphDeployment"]),
        ("check", ["ConfigMap", "Job"]),
        ("benchmark", ["ConfigMap", "Job"]),
    ],
)
def test_one_step(step: str, expected: list[str]) -> None:
    assert kinds(documents("gb200-agg", "--step", step, "--benchmark", "1")) == expected


def test_applied_all_at_once_the_smoke_test_outlasts_download_and_load() -> None:
    def deadline(*words: str) -> int:
        (smoke,) = [d for d in documents("gb200-agg", *words) if d["metadata"]["name"] == "gpt-oss-agg-smoke"]
        return int(smoke["spec"]["activeDeadlineSeconds"])

    assert deadline() >= 7200 + 3600 + 1800
    assert deadline("--step", "check") == 1800


def test_flags_and_a_settings_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    settings = {
        "namespace": "from-the-file",
        "labels": {"team": "serving"},
        "set": {"decode.max_batch_size": 640},
        "model_cache": {"claim": "weights", "size": "150Gi"},
        "placement": {"priority_class": "high"},
    }
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    words = (
        "b200-disagg",
        "--settings",
        str(file),
        "--namespace",
        "flag",
        "--size",
        "200Gi",
        "--replicas",
        "frontend=2",
    )
    found = documents(*words, "--set", "prefill.max_batch_size=32", "--node-selector", "pool=a", "--label", "x=y")
    made = plan(
        "b200-disagg",
        "decode.max_batch_size=640",
        "prefill.max_batch_size=32",
        namespace="flag",
        labels={"x": "y"},
        model_cache={"claim": "weights", "size": "200Gi"},
        placement={"priority_class": "high", "node_selector": {"pool": "a"}},
        replicas={"frontend": 2},
    )
    (graph,) = [document for document in found if document["kind"] == "DynamoGraphDeployment"]
    assert graph == made.graph.manifest()
    assert found[1] == (made.claim.manifest() if made.claim is not None else None)


def test_the_token_is_named_or_not_needed() -> None:
    text = run("graph", "gb200-agg", "--hf-token-secret", "mine/token").stdout
    assert "name: mine" in text
    assert "key: token" in text
    assert "secretKeyRef" not in run("graph", "gb200-agg", "--no-hf-token").stdout


def test_bad_input_is_status_2_and_every_problem() -> None:
    done = run("graph", "gb200-agg", "--set", "max_batch_size=1", "--size", "1Gi", "--gpu", "GB200")
    assert done.returncode == 2
    assert done.stdout == ""
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["set", "model_cache.size"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gb200",), "target: 'gb200' is not known"),
        (("gb200-agg", "--replicas", "worker"), "replicas: 'worker' is not KEY=VALUE"),
        (("gb200-agg", "--replicas", "worker=two"), "replicas: worker='two' is not COMPONENT=NUMBER"),
        (("gb200-agg", "--label", "team"), "label: 'team' is not KEY=VALUE"),
        (("gb200-agg", "--hf-token-secret", "mine"), "hf_token_secret.key: is missing"),
        (("gb200-agg", "--step", "benchmark"), "step: 'benchmark' without a benchmark; add --benchmark RUN_ID"),
        (("gb200-agg", "--settings", "/nowhere"), "settings: '/nowhere' is not a file"),
        (("gb200-agg", "--rollout", "slow"), "invalid choice: 'slow'"),
    ],
)
def test_bad_words_are_status_2(words: tuple[str, ...], message: str) -> None:
    done = run("graph", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("placement: gb200", "placement: 'gb200': Input should be an object"),
        ("set: [worker.max_batch_size=1]", "set: ['worker.max_batch_size=1'] is not a mapping of paths to values"),
        ("nmae: x", "nmae: there is no such setting (did you mean name?)"),
        ("- x", "expected a mapping, found list"),
    ],
)
def test_bad_settings_files_are_status_2(settings: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(settings, encoding="utf-8")
    done = run("graph", "gb200-agg", "--settings", str(file), "--node-selector", "a=b")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_targets_for_kubernetes_are_listed() -> None:
    rows = json.loads(run("graphs", "--format", "json").stdout)
    assert tuple(row["target"] for row in rows) == TARGETS
    lines = run("graphs").stdout.splitlines()
    assert lines[0].split() == ["TARGET", "GPUS", "ENGINE", "WORKERS", "GRAPH", "TRAFFIC"]
    assert len(lines) == 1 + len(TARGETS)
