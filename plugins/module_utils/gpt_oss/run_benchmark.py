#!/usr/bin/env python3
"""Measure an OpenAI-compatible endpoint with AIPerf, one shape of traffic and one concurrency after the other.

    run_benchmark.py --aiperf /opt/aiperf/bin/aiperf --url http://127.0.0.1:8000 --model openai/gpt-oss-120b \\
        --shapes shapes.json --output results

`shapes.json` is a list of shapes as serving_catalog/data/traffic.yml has them, each with its name. The results are
benchmark.json, benchmark.csv, benchmark.png, and AIPerf's own exports of every point. It ends with status 1 when a
point failed: AIPerf failed, a request failed, or the figures make no sense. An API key is taken from OPENAI_API_KEY.
Standard library only, Python 3.8 and later; the interpreter beside AIPerf, which has matplotlib, draws the picture.

Without --aiperf it is the package of the interpreter that runs this, as in a container. With --report=line the last
line on stdout is one JSON object, whatever happened.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib.util
import inspect
import io
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

EXPORT = "profile_export_aiperf.json"
EXPORTS = (EXPORT, "profile_export_aiperf.csv", "aiperf.log")
LOG_LINES = 25
REPORTED = 1000  # characters of a message: with the rest it fits the 2048 bytes that Kubernetes keeps of a log's end
SEED = 100
# A request for N tokens, with no end of text before them, gets N; with fewer, something else was measured.
LEAST_OUTPUT = 0.9
COLUMNS = (
    "shape",
    "concurrency",
    "ok",
    "requests",
    "failed_requests",
    "seconds",
    "output_tokens_per_second",
    "output_tokens_per_second_per_user",
    "requests_per_second",
    "time_to_first_token_ms",
    "time_to_first_token_p99_ms",
    "inter_token_latency_ms",
    "inter_token_latency_p99_ms",
    "request_latency_ms",
    "request_latency_p99_ms",
    "output_tokens",
    "input_tokens",
    "problem",
)


class Shape(NamedTuple):
    """Traffic of one kind. Lengths are tokens."""

    name: str
    input_tokens: int
    output_tokens: int
    concurrency: list[int]
    requests_per_slot: int
    minimum_requests: int
    warmup_requests: int
    streaming: bool

    @classmethod
    def from_entry(cls, entry: dict[str, Any]) -> Shape:
        return cls(**{name: entry[name] for name in cls._fields})


class Point(NamedTuple):
    """One run of AIPerf."""

    shape: Shape
    concurrency: int

    @property
    def requests(self) -> int:
        return max(self.shape.minimum_requests, self.shape.requests_per_slot * self.concurrency)

    @property
    def name(self) -> str:
        return f"{self.shape.name}_{self.concurrency}"


class Target(NamedTuple):
    """What is measured, and with what."""

    aiperf: str
    urls: list[str]
    model: str
    tokenizer: str
    tokenizer_cache: str  # a Hugging Face cache that has the tokenizer; empty is the user's own, or the Hub
    timeout_seconds: float
    tokenizer_revision: str = ""  # a commit; empty is the cache's or the Hub's current one
    workers: int = 0  # processes that send requests, at most; 0 leaves it to AIPerf
    record_processors: int = 0
    dataset_entries: int = 0  # different prompts, at most; 0 is one for each request
    home: str = ""  # AIPerf's home directory; empty is the point's own


def points(shapes: list[Shape], concurrency: list[int]) -> list[Point]:
    """Every shape at each of its concurrencies, or at those given."""
    return [Point(shape, number) for shape in shapes for number in (concurrency or shape.concurrency)]


def configuration(point: Point, target: Target) -> dict[str, Any]:
    """AIPerf's configuration. In a file, so that no secret is on a command line: AIPerf fills in the variable."""
    shape = point.shape
    endpoint = {
        "urls": target.urls,
        "type": "chat",
        "streaming": shape.streaming,
        "useServerTokenCount": True,
        "timeout": target.timeout_seconds,
        "extra": {
            "max_tokens": shape.output_tokens,
            "min_tokens": shape.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
        },
    }
    if os.environ.get("OPENAI_API_KEY"):
        endpoint["apiKey"] = "${OPENAI_API_KEY}"
    lengths = {
        "isl": {"mean": shape.input_tokens, "stddev": 0},
        "osl": {"mean": shape.output_tokens, "stddev": 0},
    }
    phase = {"type": "concurrency", "concurrency": point.concurrency}
    phases: list[dict[str, Any]] = []
    if shape.warmup_requests:
        warmup = min(point.concurrency, shape.warmup_requests)
        requests = max(warmup, shape.warmup_requests)
        phases.append(
            {**phase, "name": "warmup", "requests": requests, "concurrency": warmup, "excludeFromResults": True}
        )
    phases.append({**phase, "name": "profiling", "requests": point.requests})
    entries = min(point.requests, target.dataset_entries or point.requests)
    return {
        "schemaVersion": "2.0",
        "models": [target.model],
        "endpoint": endpoint,
        "datasets": [{"name": "main", "type": "synthetic", "entries": entries, "randomSeed": SEED, "prompts": lengths}],
        "phases": phases,
    }


def environment(target: Target, home: Path) -> dict[str, str]:
    """AIPerf's environment. With a cache at hand nothing is asked of the Hub: by id, as a path is refused offline."""
    variables = {**os.environ, "HOME": str(home), "MPLBACKEND": "Agg", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if target.tokenizer_cache:
        variables.update({"HF_HUB_CACHE": target.tokenizer_cache, "HF_HUB_OFFLINE": "1"})
    return variables


def program(aiperf: str) -> list[str]:
    """The command, or the package of this interpreter."""
    return [aiperf] if aiperf else [sys.executable, "-m", "aiperf"]


def run_point(point: Point, target: Target, directory: Path) -> dict[str, Any]:
    """Run AIPerf and judge what it says. The exports and its log end up in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in EXPORTS:  # of an earlier run: never taken for this one's
        with contextlib.suppress(FileNotFoundError):
            (directory / name).unlink()
    settings = directory / "aiperf.yaml"
    settings.write_text(json.dumps(configuration(point, target), indent=2) + "\n", encoding="utf-8")
    command = [
        *(
            *program(target.aiperf),
            "profile",
            "--config",
            str(settings),
            "--tokenizer",
            target.tokenizer,
            "--ui",
            "none",
        ),
        *(("--tokenizer-revision", target.tokenizer_revision) if target.tokenizer_revision else ()),
        *(("--workers-max", str(target.workers)) if target.workers else ()),
        *(("--record-processors", str(target.record_processors)) if target.record_processors else ()),
        *("--artifact-dir", str(directory), "--export-level", "summary"),
        # TensorRT-LLM's /metrics can be read once only; what watches the server shall not lose it.
        *("--no-server-metrics", "--no-gpu-telemetry"),
    ]
    log = directory / "aiperf.log"
    home = Path(target.home) if target.home else directory
    # AIPerf leaves its dataset and sockets among the temporary files.
    with log.open("wb") as output, tempfile.TemporaryDirectory(prefix="aiperf-") as scratch:
        variables = {**environment(target, home), "TMPDIR": scratch}
        status = run(command, variables, output, target.timeout_seconds)
    result = judge(point, directory / EXPORT, status)
    if result["problem"]:
        result["log"] = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
    return result


def run(command: list[str], variables: dict[str, str], output: Any, seconds: float) -> int:
    """The exit status; 124 when the time was up, and 127 when there is no such program."""
    if command[1:3] == ["-m", "aiperf"] and importlib.util.find_spec("aiperf") is None:
        return 127
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a connection is an open file
    try:
        process = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    except FileNotFoundError:
        return 127
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):  # AIPerf's services are processes of their own
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def judge(point: Point, export: Path, status: int) -> dict[str, Any]:
    """The figures, and what is wrong with them."""
    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(export.read_text(encoding="utf-8"))

    def figure(metric: str, statistic: str = "avg") -> float | None:
        entry = found.get(metric)
        value = entry.get(statistic) if isinstance(entry, dict) else None
        return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None

    failed = int(figure("error_request_count") or 0)
    result: dict[str, Any] = {
        "shape": point.shape.name,
        "concurrency": point.concurrency,
        "requests": int(figure("request_count") or 0),
        "failed_requests": failed,
        "seconds": figure("benchmark_duration"),
        "output_tokens_per_second": figure("output_token_throughput"),
        "output_tokens_per_second_per_user": figure("output_token_throughput_per_user"),
        "requests_per_second": figure("request_throughput"),
        "time_to_first_token_ms": figure("time_to_first_token"),
        "time_to_first_token_p99_ms": figure("time_to_first_token", "p99"),
        "inter_token_latency_ms": figure("inter_token_latency"),
        "inter_token_latency_p99_ms": figure("inter_token_latency", "p99"),
        "request_latency_ms": figure("request_latency"),
        "request_latency_p99_ms": figure("request_latency", "p99"),
        "output_tokens": figure("output_sequence_length"),
        "input_tokens": figure("input_sequence_length"),
    }
    result["problem"] = problem(point, result, status)
    said = first_error(found) if failed else ""
    result["problem"] += f": {said}" if said and result["problem"] else ""
    result["ok"] = not result["problem"]
    return result


def first_error(found: dict[str, Any]) -> str:
    """What the most frequent failure said."""
    try:
        details = max(found["error_summary"], key=lambda entry: entry["count"])["error_details"]
        return f"{details['code']} {' '.join(str(details['message']).split())[:200]}"
    except (KeyError, TypeError, ValueError):
        return ""


def problem(point: Point, result: dict[str, Any], status: int) -> str:
    """What makes a run worthless, or an empty string."""
    if status == 124:
        return "AIPerf did not end within its time"
    if status == 127:
        return "AIPerf is not installed where it was looked for"
    if status != 0:
        return f"AIPerf ended with status {status}"
    if result["requests"] == 0:
        return "no request was answered"
    if result["failed_requests"]:
        return f"{result['failed_requests']} of {result['requests'] + result['failed_requests']} requests failed"
    if result["requests"] < point.requests:
        return f"{result['requests']} of {point.requests} requests were counted"
    if not result["output_tokens_per_second"] or result["output_tokens_per_second"] <= 0:
        return "no output tokens were counted"
    length = result["output_tokens"] or 0.0
    if length < LEAST_OUTPUT * point.shape.output_tokens:
        return f"answers of {length:.0f} tokens where {point.shape.output_tokens} were asked for"
    if point.shape.streaming and not result["time_to_first_token_ms"]:
        return "no first token was timed: the answers were not streamed"
    return ""


# -- results -----------------------------------------------------------------------------------------------------


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What a verdict asks for: all requests, all failures, and the best throughput with its latency."""
    good = [result for result in results if result["ok"]]
    best = max(good, key=lambda result: result["output_tokens_per_second"], default={})
    return {
        "ok": bool(results) and len(good) == len(results),
        "points": len(results),
        "requests": sum(result["requests"] for result in results),
        "failed_requests": sum(result["failed_requests"] for result in results),
        "output_tokens_per_second": best.get("output_tokens_per_second") or 0.0,
        "time_to_first_token_ms": best.get("time_to_first_token_ms"),
        "shape": best.get("shape"),
        "concurrency": best.get("concurrency"),
    }


def table(results: list[dict[str, Any]]) -> str:
    """The results as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(results)
    return text.getvalue()


def line(result: dict[str, Any]) -> str:
    """One result for a person."""
    where = f"{result['shape']}, concurrency {result['concurrency']}"
    if result["problem"]:
        return f"{where}: {result['problem']}"
    parts = [f"{result['output_tokens_per_second']:,.0f} output tokens/s"]
    if result["output_tokens_per_second_per_user"]:
        parts.append(f"{result['output_tokens_per_second_per_user']:,.0f} for each user")
    if result["time_to_first_token_ms"]:
        parts.append(f"first token after {result['time_to_first_token_ms']:,.0f} ms")
    return f"{where}: {', '.join(parts)} ({result['requests']} requests in {result['seconds'] or 0:.1f} s)"


def write_results(directory: Path, target: Target, about: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """benchmark.json and benchmark.csv."""
    document = {
        "schema_version": 1,
        "about": about,
        "model": target.model,
        "urls": target.urls,
        "summary": summary(results),
        "results": results,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "benchmark.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (directory / "benchmark.csv").write_text(table(results), encoding="utf-8")


def draw_with(aiperf: str, directory: Path, home: str = "") -> str:
    """Draw with the interpreter beside AIPerf; what went wrong, or an empty string."""
    python = Path(aiperf).parent / "python" if aiperf else Path(sys.executable)
    # As text: inside an Ansible module this file lies in an archive.
    source = inspect.getsource(sys.modules[__name__])
    command = [str(python), "-", "--draw", str(directory)]
    home = home or str(directory)
    variables = {**os.environ, "HOME": home, "MPLBACKEND": "Agg", "MPLCONFIGDIR": str(Path(home) / ".matplotlib")}
    done = subprocess.run(
        command, env=variables, input=source.encode(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return "" if done.returncode == 0 else done.stdout.decode("utf-8", "replace").strip()[-1000:]


def draw(directory: Path) -> None:
    """benchmark.png: what all users get together, what each gets, and how long they wait, over concurrency."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    document = json.loads((directory / "benchmark.json").read_text(encoding="utf-8"))
    shapes: dict[str, list[dict[str, Any]]] = {}
    for result in document["results"]:
        if result["ok"]:
            shapes.setdefault(result["shape"], []).append(result)
    panels = (
        ("output_tokens_per_second", "Output tokens/s, all users"),
        ("output_tokens_per_second_per_user", "Output tokens/s, each user"),
        ("time_to_first_token_ms", "Time to first token, ms"),
    )
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    for number, (metric, title) in enumerate(panels, start=1):
        axes = figure.add_subplot(1, 3, number)
        for name, results in shapes.items():
            series = sorted((entry["concurrency"], entry[metric]) for entry in results if entry[metric])
            axes.plot([x for x, _ in series], [y for _, y in series], marker="o", label=name)
        axes.set(title=title, xlabel="Concurrency")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if shapes:
            axes.set_xscale("log", base=2)
            ticks = sorted({entry["concurrency"] for results in shapes.values() for entry in results})
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
    if shapes:
        figure.axes[0].legend(fontsize="small")
    about = document["about"]
    said = ", ".join(str(about[key]) for key in ("host", "engine", "release", "profile", "gpu") if about.get(key))
    figure.suptitle(f"{document['model']}: {said}" if said else document["model"])
    figure.savefig(directory / "benchmark.png", dpi=110)


def read_shapes(text: str) -> list[Shape]:
    """Shapes from JSON, or ValueError naming what is wrong."""
    entries = json.loads(text)
    if not isinstance(entries, list) or not entries:
        raise ValueError("a list of shapes was expected")
    try:
        return [Shape.from_entry(entry) for entry in entries]
    except (KeyError, TypeError) as error:
        raise ValueError(f"a shape lacks {error}; it needs {', '.join(Shape._fields)}") from None


def collect(directory: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """The files of these names that are there."""
    return {name: (directory / name).read_bytes() for name in names if (directory / name).is_file()}


def input_config(point: Point, target: Target, gpus: int, about: dict[str, Any]) -> dict[str, Any]:
    """What was measured, under the names that Dynamo's recipes use."""
    return {
        "gpu_count": gpus,
        "concurrency_per_gpu": point.concurrency / gpus,
        "total_concurrency": point.concurrency,
        "request_count": point.requests,
        "isl": point.shape.input_tokens,
        "osl": point.shape.output_tokens,
        "endpoint": target.urls[0],
        "model endpoint": target.model,
        **about,
    }


def report(directory: Path, results: list[dict[str, Any]], gpus: int, unfinished: str) -> str:
    """How it went, in one line."""
    total = summary(results)
    rate = total["output_tokens_per_second"]
    ok = total["ok"] and not unfinished
    message = unfinished or "; ".join(line(result) for result in results)
    found = {
        **total,
        "program": "run_benchmark",
        "ok": ok,
        "message": message[:REPORTED],
        "output_tokens_per_second_per_gpu": round(rate / gpus, 1) if gpus else None,
        "artifacts": str(directory),
    }
    return json.dumps(found)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure an OpenAI-compatible endpoint with AIPerf.")
    parser.add_argument("--draw", type=Path, metavar="DIR", help="only draw benchmark.png from DIR/benchmark.json")
    parser.add_argument("--aiperf", default="", help="the program, in its virtual environment")
    parser.add_argument("--url", action="append", default=[], help="may be repeated: requests take turns")
    parser.add_argument("--model", help="as /v1/models lists it")
    parser.add_argument("--tokenizer", help="a repository of the Hub; the model, unless given")
    parser.add_argument("--tokenizer-revision", default="", help="its commit")
    parser.add_argument("--tokenizer-cache", default="", help="a Hugging Face cache that has it; no network then")
    parser.add_argument("--shapes", type=Path, help="JSON file")
    parser.add_argument("--shape", action="append", default=[], metavar="JSON", help="one shape; instead of --shapes")
    parser.add_argument("--concurrency", type=int, action="append", default=[], help="instead of the shapes' own")
    parser.add_argument("--workers", type=int, default=0, help="processes that send requests, at most")
    parser.add_argument("--record-processors", type=int, default=0, help="processes that take the answers' measure")
    parser.add_argument("--dataset-entries", type=int, default=0, help="different prompts, at most")
    parser.add_argument("--gpus", type=int, default=0, help="what serves: figures for each GPU, and input_config.json")
    parser.add_argument("--about", type=json.loads, default={}, metavar="JSON", help="to be kept with the results")
    parser.add_argument("--home", default="", help="AIPerf's home directory; the results' own, unless given")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one point may take")
    parser.add_argument("--report", choices=("text", "line"), default="text", help="end with a line for programs")
    parser.add_argument("--output", type=Path, default=Path("results"))
    given = parser.parse_args()
    if given.draw:
        draw(given.draw)
        return 0
    if not given.url or not given.model or not (given.shapes or given.shape):
        parser.error("--url, --model and --shapes or --shape are needed")
    try:
        text = "[" + ",".join(given.shape) + "]" if given.shape else given.shapes.read_text(encoding="utf-8")
        shapes = read_shapes(text)
    except (OSError, ValueError) as error:
        parser.error(f"--shapes {given.shapes or given.shape}: {error}")
    tokenizer = given.tokenizer or given.model
    target = Target(
        aiperf=given.aiperf,
        urls=given.url,
        model=given.model,
        tokenizer=tokenizer,
        tokenizer_cache=given.tokenizer_cache,
        timeout_seconds=given.timeout,
        tokenizer_revision=given.tokenizer_revision,
        workers=given.workers,
        record_processors=given.record_processors,
        dataset_entries=given.dataset_entries,
        home=given.home,
    )
    # As process 1 of a container nothing ends this but what it asks for, and AIPerf must not outlive it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    directory = given.output.resolve()
    results: list[dict[str, Any]] = []
    unfinished = "stopped before it was done"
    try:
        for point in points(shapes, given.concurrency):
            measure(point, target, directory, given.gpus, given.about, results)
        write_results(directory, target, given.about, results)
        problem_drawing = draw_with(given.aiperf, directory, given.home)
        unfinished = f"no picture: {problem_drawing}" if problem_drawing else ""
    except OSError as error:
        unfinished = f"{error.filename or directory}: {error.strerror or error}"
    finally:
        if unfinished:
            print(unfinished, file=sys.stderr, flush=True)
        if given.report == "line":
            print(report(directory, results, given.gpus, unfinished), flush=True)
    return 0 if summary(results)["ok"] and not unfinished else 1


def measure(
    point: Point, target: Target, directory: Path, gpus: int, about: dict[str, Any], results: list[dict[str, Any]]
) -> None:
    """Run one point, keep its result, and tell."""
    where = directory / point.name
    print(f"{point.shape.name}, concurrency {point.concurrency}: {point.requests} requests to come", flush=True)
    if gpus:
        where.mkdir(parents=True, exist_ok=True)
        text = json.dumps(input_config(point, target, gpus, about), indent=2) + "\n"
        (where / "input_config.json").write_text(text, encoding="utf-8")
    results.append(run_point(point, target, where))
    print(line(results[-1]), flush=True)
    for said in results[-1].get("log", []):
        print(f"    {said}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
