"""The benchmark's judgement, on AIPerf's own exports of a good run and of one whose engine died, and its module."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plugins.filter.benchmark import traffic_shapes
from plugins.module_utils.gpt_oss import run_benchmark
from plugins.module_utils.gpt_oss.run_benchmark import Point, Shape, Target, judge, points, summary

RECORDED = Path(__file__).with_name("recorded")
SHORT = Shape("short", 128, 64, [2, 8], 2, 8, 1, True)
GOOD = Point(SHORT, 8)
LONG = Point(Shape("long", 128, 200, [4], 60, 8, 1, True), 4)


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / name).read_text())
    return found


def judged(tmp_path: Path, export: dict[str, Any] | None, status: int = 0, point: Point = GOOD) -> dict[str, Any]:
    if export is not None:
        (tmp_path / run_benchmark.EXPORT).write_text(json.dumps(export))
    return judge(point, tmp_path / run_benchmark.EXPORT, status)


def test_a_good_run(tmp_path: Path) -> None:
    result = judged(tmp_path, recorded("aiperf_good.json"))
    assert (result["ok"], result["problem"]) == (True, "")
    assert (result["requests"], result["failed_requests"], result["output_tokens"]) == (16, 0, 64)
    assert result["output_tokens_per_second"] == pytest.approx(3702.7, abs=0.1)
    assert run_benchmark.line(result).startswith(
        "short, concurrency 8: 3,703 output tokens/s, 1,197 for each user, first"
    )


def test_a_run_whose_engine_died(tmp_path: Path) -> None:
    result = judged(tmp_path, recorded("aiperf_rank_died.json"), point=LONG)
    assert result["problem"].startswith("204 of 240 requests failed: 503 ")
    assert "The engine is dead" in result["problem"]


def changed(**metrics: Any) -> dict[str, Any]:
    return {**recorded("aiperf_good.json"), **metrics}


@pytest.mark.parametrize(
    ("export", "status", "problem"),
    [
        (None, 1, "AIPerf ended with status 1"),
        (None, 124, "AIPerf did not end within its time"),
        (None, 127, "AIPerf is not installed where it was looked for"),
        (None, 0, "no request was answered"),
        (changed(request_count={"avg": 0.0}), 0, "no request was answered"),
        (changed(request_count={"avg": 9.0}), 0, "9 of 16 requests were counted"),
        (changed(output_token_throughput={"avg": 0.0}), 0, "no output tokens were counted"),
        (changed(output_token_throughput={"avg": float("nan")}), 0, "no output tokens were counted"),
        (changed(output_sequence_length={"avg": 12.0}), 0, "answers of 12 tokens where 64 were asked for"),
        (changed(time_to_first_token=None), 0, "no first token was timed: the answers were not streamed"),
        (recorded("aiperf_good.json"), 1, "AIPerf ended with status 1"),
    ],
)
def test_a_worthless_run(export: dict[str, Any] | None, status: int, problem: str, tmp_path: Path) -> None:
    result = judged(tmp_path, export, status)
    assert (result["ok"], result["problem"]) == (False, problem)


def test_points_and_their_requests() -> None:
    assert [(point.concurrency, point.requests) for point in points([SHORT], [])] == [(2, 8), (8, 16)]
    assert [point.name for point in points([SHORT], [1])] == ["short_1"]


def test_the_summary_is_of_the_best_point_and_of_all_failures(tmp_path: Path) -> None:
    good = judged(tmp_path, recorded("aiperf_good.json"))
    bad = judged(tmp_path, recorded("aiperf_rank_died.json"), point=LONG)
    assert summary([good])["ok"] is True
    both = summary([good, bad])
    assert (both["ok"], both["requests"], both["failed_requests"], both["shape"]) == (False, 52, 204, "short")
    assert summary([]) == {**summary([]), "ok": False, "output_tokens_per_second": 0.0}


def test_no_secret_is_in_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    target = Target("aiperf", ["http://127.0.0.1:1"], "m", "m", "", 60)
    text = json.dumps(run_benchmark.configuration(GOOD, target))
    assert "s3cret" not in text
    assert '"apiKey": "${OPENAI_API_KEY}"' in text


def test_unknown_shapes_are_refused() -> None:
    with pytest.raises(Exception, match="benchmark_shapes: shrt; allowed: long, short"):
        traffic_shapes(["shrt"], {"short": {}, "long": {}})
    with pytest.raises(Exception, match="benchmark_shapes: empty"):
        traffic_shapes([], {"short": {}})


# --- The role: real calls of the module, with a program that leaves what AIPerf left ---

Play = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Measure with module benchmark_run on this machine; the export and status are what the program leaves."""
    program = tmp_path / "venv" / "bin" / "aiperf"
    program.parent.mkdir(parents=True)
    (program.parent / "python").symlink_to(sys.executable)

    def run(export: str, status: int = 0, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        program.write_text(
            "#!/bin/sh\n"
            'while [ "$1" != --artifact-dir ]; do shift; done\n'
            f'cp {RECORDED / export} "$2/{run_benchmark.EXPORT}"\n'
            f"echo a last line; exit {status}\n"
        )
        program.chmod(0o755)
        task = {
            "benchmark_run": {
                "aiperf": str(program),
                "urls": ["http://127.0.0.1:1"],
                "model": "openai/gpt-oss-120b",
                "tokenizer": "openai/gpt-oss-120b",
                "directory": str(tmp_path / "work"),
                "results_directory": str(tmp_path / "results"),
                "about": {"engine": "tensorrt_llm"},
                "shapes": [dict(SHORT._asdict(), concurrency=[8])],
                **more,
            },
        }
        book = [{"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [task]}]
        (tmp_path / "play.yml").write_text(json.dumps(book))
        repository = Path(__file__).parents[2]
        variables = {**os.environ, "ANSIBLE_CONFIG": str(repository / "ansible.cfg")}
        variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = ["ansible-playbook", "-i", "localhost,", str(tmp_path / "play.yml"), *words]
        command += ["-e", f"ansible_python_interpreter={sys.executable}"]
        return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=repository, timeout=120)

    return run


def test_what_aiperf_leaves_among_temporary_files_is_removed(tmp_path: Path) -> None:
    program = tmp_path / "aiperf"
    program.write_text(
        "#!/bin/sh\n"
        'mkdir "${TMPDIR:-/tmp}/aiperf_mmap_1" && echo "$TMPDIR"\n'
        'while [ "$1" != --artifact-dir ]; do shift; done\n'
        f'cp {RECORDED / "aiperf_good.json"} "$2/{run_benchmark.EXPORT}"\n'
    )
    program.chmod(0o755)
    target = Target(str(program), ["http://127.0.0.1:1"], "openai/gpt-oss-120b", "openai/gpt-oss-120b", "", 30.0)
    run_benchmark.run_point(Point(SHORT, 8), target, tmp_path / "work")
    directory = (tmp_path / "work" / "aiperf.log").read_text().strip()
    assert directory
    assert not Path(directory).exists()


def test_results_come_back_as_json_and_csv_even_without_a_picture(play: Play, tmp_path: Path) -> None:
    done = play("aiperf_good.json")
    # The interpreter beside the program has no matplotlib, so there is no picture, and that is said.
    assert done.returncode == 2, done.stdout
    assert "No module named 'matplotlib'" in done.stdout
    assert "localhost: short, concurrency 8: 3,703 output tokens/s" in done.stdout
    results = tmp_path / "results" / "localhost"
    document = json.loads((results / "benchmark.json").read_text())
    assert document["about"] == {"engine": "tensorrt_llm", "host": "localhost"}
    assert document["summary"]["requests"] == 16
    rows = list(csv.DictReader((results / "benchmark.csv").open()))
    assert [(row["shape"], row["concurrency"], row["ok"]) for row in rows] == [("short", "8", "True")]
    assert (results / "short_8" / run_benchmark.EXPORT).is_file()
    assert (results / "short_8" / "aiperf.log").read_text() == "a last line\n"


def test_a_failed_run_fails_and_says_why(play: Play) -> None:
    done = play("aiperf_rank_died.json", 0)
    said = " ".join(done.stdout.split())
    assert done.returncode == 2
    assert "short, concurrency 8: 204 of 240 requests failed: 503" in said
    assert "a last line" in said


def test_a_failure_can_be_left_to_a_verdict(play: Play) -> None:
    done = play("aiperf_good.json", 3, fail=False)
    assert done.returncode == 0, done.stdout
    assert "AIPerf ended with status 3" in done.stdout


def test_nothing_is_measured_in_check_mode(play: Play, tmp_path: Path) -> None:
    done = play("aiperf_good.json", 0, "--check")
    assert done.returncode == 0, done.stdout
    assert not (tmp_path / "results").exists()
    assert not (tmp_path / "work").exists()
