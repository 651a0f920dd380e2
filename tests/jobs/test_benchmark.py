"""The benchmark Job: AIPerf with the recipe's flags, scaled down, against the real Dynamo frontend."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serving_catalog.graphs.jobs import GraphJobs
from tests.ports import free_port
from tests.stand_ins.hub import content

from .conftest import MODEL, reported
from .dynamo import Dynamo
from .pods import Pod, Ran

# The recipe: 10 requests and one warm-up request for each slot, as many prompts as requests.
SMALL = {"input_tokens": 128, "output_tokens": 16, "concurrency": 4, "requests": 40, "warmup_requests": 4}


@pytest.fixture
def benchmark(
    jobs: Callable[..., GraphJobs], pod: Callable[..., Pod], served_weights: Path, aiperf_tools: Path
) -> Callable[..., Pod]:
    """benchmark(url, target, **traffic): the Job's pod, with AIPerf at hand as after an installation."""

    def make(url: str, target: str = "gb200-agg", wait: int = 60, **traffic: Any) -> Pod:
        asked = {"run_id": "t1", "traffic": SMALL | traffic}
        made = jobs(target, {"url": url, "endpoint_wait_seconds": wait}, benchmark=asked)
        assert made.benchmark is not None
        # The recipe's 252 processes are for a machine with as many threads; AIPerf takes no more than there are slots.
        assert "--workers=252" in made.benchmark.spec.template.spec.containers[0].args
        fewer = {"--record-processors=32": "--record-processors=1"}
        return pod(made, made.benchmark, empty={"tools": aiperf_tools}, replaced=fewer)

    return make


@pytest.fixture
def doomed(hub_cache: Path) -> Iterator[Dynamo]:
    """A deployment of one test, which may break it."""
    with Dynamo(hub_cache, MODEL) as running:
        running.start_worker("agg")
        running.wait_listed()
        yield running


def sessions() -> list[tuple[int, int, int]]:
    """Parent, session and identifier of every process that runs."""
    listed = subprocess.run(["ps", "-eo", "ppid=,sess=,pid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [(int(parent), int(session), int(pid)) for parent, session, pid, state in rows if state[0] != "Z"]


@pytest.mark.parametrize(("target", "running"), [("gb200-agg", "aggregated"), ("gb200-disagg", "disaggregated")])
def test_a_run_leaves_its_artifacts_on_the_volume(
    benchmark: Callable[..., Pod], target: str, running: str, claim: Path, request: pytest.FixtureRequest
) -> None:
    pod = benchmark(request.getfixturevalue(running).url, target)
    ran = pod.run(seconds=600)
    assert [(r.name, r.status) for r in ran] == [("install", 0), ("wait", 0), ("benchmark", 0)], ran[-1].log
    assert reported(ran[0])["installed"] is False
    found = reported(ran[-1])
    assert (found["requests"], found["failed_requests"]) == (40, 0)
    gpus = 4 if target == "gb200-agg" else 5
    assert found["output_tokens_per_second_per_gpu"] == pytest.approx(found["output_tokens_per_second"] / gpus, abs=0.1)

    results = claim / "benchmarks" / target.replace("gb200", "gpt-oss") / "t1"
    assert found["artifacts"] == str(results)
    document = json.loads((results / "benchmark.json").read_text())
    assert document["about"]["target"] == target
    assert document["summary"]["ok"] is True
    [row] = csv.DictReader((results / "benchmark.csv").open())
    assert (row["concurrency"], row["requests"], float(row["output_tokens"])) == ("4", "40", 16.0)
    assert (results / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    point = results / f"{target}_4"
    config = json.loads((point / "input_config.json").read_text())
    assert (config["gpu_count"], config["total_concurrency"], config["concurrency_per_gpu"]) == (gpus, 4, 4 / gpus)
    assert (config["request_count"], config["isl"], config["osl"], config["model endpoint"]) == (40, 128, 16, MODEL)
    for name in ("aiperf.yaml", "aiperf.log", "profile_export_aiperf.json", "profile_export_aiperf.csv"):
        assert (point / name).stat().st_size > 0
    sent = json.loads((point / "aiperf.yaml").read_text())
    assert sent["endpoint"]["extra"]["ignore_eos"] is True
    assert [(phase["name"], phase["requests"]) for phase in sent["phases"]] == [("warmup", 4), ("profiling", 40)]
    assert not list(results.rglob(".cache")), "caches are the pod's own, not results"


def test_a_dead_endpoint_fails_before_aiperf_starts(benchmark: Callable[..., Pod], claim: Path) -> None:
    ran = benchmark(f"http://127.0.0.1:{free_port()}", wait=2).run()
    assert [(r.name, r.status) for r in ran] == [("install", 0), ("wait", 1)], ran[-1].log
    assert "connection refused" in reported(ran[-1])["message"]
    assert not (claim / "benchmarks").exists()


def test_it_fails_when_aiperf_fails(benchmark: Callable[..., Pod], aggregated: Dynamo, claim: Path) -> None:
    shutil.rmtree(claim / "weights")  # no tokenizer, and no network to get one
    ran = benchmark(aggregated.url).run(seconds=600)[-1]
    assert (ran.name, ran.status) == ("benchmark", 1), ran.log
    found = reported(ran)
    assert "AIPerf ended with status" in found["message"]
    assert found["requests"] == 0
    assert content.repositories()[MODEL].revision in ran.stderr, "AIPerf's own last words are in the log"


def test_it_fails_when_requests_fail(benchmark: Callable[..., Pod], doomed: Dynamo) -> None:
    pod = benchmark(doomed.url, output_tokens=200, requests=400)
    *before, container = (*pod.spec.init_containers, *pod.spec.containers)
    for earlier in before:
        assert pod.run_container(earlier).status == 0
    process = pod.start(container)
    log = pod.volumes["model-cache"] / "benchmarks" / "gpt-oss-agg" / "t1" / "gb200-agg_4" / "logs" / "aiperf.log"
    until = time.monotonic() + 300
    while process.poll() is None and not (log.is_file() and "rofiling" in log.read_text()):
        assert time.monotonic() < until
        time.sleep(0.2)
    doomed.kill("agg")
    stdout, stderr = process.communicate(timeout=600)
    ran = Ran("benchmark", process.returncode, stdout, stderr)
    assert ran.status == 1, ran.log
    found = reported(ran)
    assert found["failed_requests"] > 0 or "AIPerf" in found["message"], found


def test_a_pod_that_is_deleted_takes_aiperf_with_it(benchmark: Callable[..., Pod], aggregated: Dynamo) -> None:
    pod = benchmark(aggregated.url, requests=4000)
    process = pod.start(pod.spec.containers[0])
    until = time.monotonic() + 300
    started: set[int] = set()
    while len(started) < 4:  # AIPerf is in a session of its own, with its services
        assert time.monotonic() < until, process.poll()
        own = {pid for parent, _, pid in sessions() if parent == process.pid}
        started = {pid for _, session, pid in sessions() if session in own}
        time.sleep(0.2)
    process.terminate()
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 143, stderr
    found = json.loads(stdout.strip().splitlines()[-1])
    assert (found["ok"], found["message"]) == (False, "stopped before it was done")
    until = time.monotonic() + 60  # all are killed at once; a process with much memory takes a moment to be gone
    while left := [pid for _, session, pid in sessions() if session in own]:
        assert time.monotonic() < until, left
        time.sleep(0.2)
