"""How long Pulumi's side of a deployment takes: planning and registering a stack, and a second up that changes nothing.

    python -m benchmarks.kubernetes_stack                       gb200-disagg; two minutes with a built control plane
    python -m benchmarks.kubernetes_stack --target h200-agg
    python -m benchmarks.kubernetes_stack --check               end with status 1 when a promise is broken

Against a control plane on loopback of its own, with everything the scenario has: the platform's chart, the operator
beside it, nodes without containers. Modules are loaded before anything is timed; what that takes is said beside it. In
process the catalog is read once, so reading it is timed by itself, in fresh processes. The real engine is measured
where `pulumi` is on PATH: there every run loads everything anew, as for its users.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.results import BenchmarkError, finish
from tests.kubernetes import build, cluster
from tests.kubernetes.build import REPOSITORY, KubernetesError, say
from tests.kubernetes.drivers import Driver, InProcess, RealEngine, RealStack, Stack, UpdateFailedError, changed
from tests.kubernetes.scenario import PLATFORM_NAMESPACE, TARGETS, stack_of
from tests.stand_ins.dynamo_platform import pack
from tests.stand_ins.dynamo_platform.beside import Beside
from tests.stand_ins.dynamo_platform.releases import ChartReleases

RESULT = REPOSITORY / "results" / "benchmarks" / "kubernetes_stack.json"

# What the project promises.
MOST_SECONDS_PLANNED_AND_REGISTERED = 1.0
MOST_SECONDS_SECOND_UP = {True: 2.0, False: 5.0}  # in process, with the real engine

# A process of its own each time: in one, the catalog is read once. Modules are loaded before the clock starts.
PLANNING = """
import sys, time
from serving_catalog import load_catalog
from serving_catalog.graphs import GraphRequest, plan_graph
began = time.perf_counter()
plan_graph(GraphRequest(target=sys.argv[1]), load_catalog())
print(time.perf_counter() - began)
"""


def timed(repeat: int, operation: Callable[[], Any]) -> dict[str, Any]:
    def once() -> float:
        began = time.perf_counter()
        operation()
        return time.perf_counter() - began

    return _median(once() for _ in range(repeat))


def planned_anew(target: str, repeat: int) -> dict[str, Any]:
    """Seconds to read the catalog and plan the target with it."""

    def once() -> float:
        done = subprocess.run(
            [sys.executable, "-c", PLANNING, target], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        return float(done.stdout)

    return _median(once() for _ in range(repeat))


def _median(measured_seconds: Iterable[float]) -> dict[str, Any]:
    seconds = [round(each, 3) for each in measured_seconds]
    return {"seconds": round(statistics.median(seconds), 3), "all_seconds": seconds}


def unchanged(stack: Stack) -> None:
    if isinstance(stack, RealStack):
        stack.command("up", "--yes", "--skip-preview", "--expect-no-changes")
        return
    done = changed(stack.up())
    if done:
        raise BenchmarkError(f"the second up changes something, so it is no measure: {', '.join(done)}")


def measured(driver: Driver, on: cluster.Cluster, target: str, chart: Path, repeat: int) -> dict[str, Any]:
    """One stack's life: registered, up, up again, destroyed."""
    stack = stack_of(
        driver, on, TARGETS[target], "benchmark", platform_chart=str(chart), model_cache_retain=False, benchmark=True
    )
    with Beside(on, PLATFORM_NAMESPACE):
        stack.preview()
        registered = timed(repeat, stack.preview)
        say(f"{driver.name}: registered in {registered['seconds']:.2f} s")
        began = time.perf_counter()
        first = stack.up()
        first_seconds = round(time.perf_counter() - began, 1)
        say(f"{driver.name}: first up in {first_seconds:.1f} s")
        second = timed(repeat, lambda: unchanged(stack))
        say(f"{driver.name}: second up in {second['seconds']:.2f} s")
        began = time.perf_counter()
        stack.destroy()
        destroyed = round(time.perf_counter() - began, 1)
    resources = sum(step.type.startswith(("kubernetes:", "pulumi:providers:")) for step in first.steps)
    return {
        "driver": driver.name,
        "resources": resources,
        "registered": registered,
        "first_up_seconds": first_seconds,
        "second_up": second,
        "destroy_seconds": destroyed,
    }


def loading() -> float:
    """What a fresh interpreter needs before a program's first line."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import pulumi, pulumi_kubernetes, kubernetes"], check=True)
    return round(time.perf_counter() - began, 2)


def benchmark(target: str, repeat: int) -> dict[str, Any]:
    planned = planned_anew(target, repeat)
    drivers: list[Driver] = [InProcess(ChartReleases())]
    with tempfile.TemporaryDirectory() as directory:
        if RealEngine.missing() is None:
            drivers.append(RealEngine(Path(directory) / "pulumi"))
        running = cluster.start(build.build(), Path(directory) / "cluster")
        try:
            if not running.has_dynamo:
                raise BenchmarkError(f"no Dynamo CustomResourceDefinitions in {cluster.DYNAMO_CRDS}")
            chart = pack("1.2.1", cluster.DYNAMO_CRDS.glob("*.yaml"), Path(directory))
            stacks = [measured(driver, running, target, chart, repeat) for driver in drivers]
        finally:
            running.plane.stop()
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": len(os.sched_getaffinity(0)), "processor": platform.machine()},
        "target": target,
        "loading_seconds": loading(),
        "catalog_read_and_planned": planned,
        "stacks": stacks,
    }


def report(result: dict[str, Any]) -> None:
    machine = result["machine"]
    cores = f"{machine['cores']} cores ({machine['processor']})"
    print(f"A stack of {result['target']}, its control plane on the same {cores}:")

    def line(what: str, seconds: float, most: float | None = None) -> None:
        print(f"  {what:44} {seconds:6.2f} s" + (f" (at most {most:.0f} s)" if most else ""))

    line("catalog read, and planned", result["catalog_read_and_planned"]["seconds"])
    line("not in the figures: loading Pulumi's modules", result["loading_seconds"])
    for stack in result["stacks"]:
        in_process = stack["driver"] == InProcess().name
        print(f"  {stack['driver']}, {stack['resources']} resources:")
        registered, second = stack["registered"]["seconds"], stack["second_up"]["seconds"]
        line(
            "  checked, planned and registered", registered, MOST_SECONDS_PLANNED_AND_REGISTERED if in_process else None
        )
        line("  first up", stack["first_up_seconds"])
        line("  second up, nothing to change", second, MOST_SECONDS_SECOND_UP[in_process])
        line("  destroy", stack["destroy_seconds"])
    if RealEngine.missing():
        print(f"  real engine: not measured, {RealEngine.missing()}")


def kept(result: dict[str, Any]) -> list[str]:
    """Promises that this result breaks."""
    broken = []
    for stack in result["stacks"]:
        in_process = stack["driver"] == InProcess().name
        registered, second = stack["registered"]["seconds"], stack["second_up"]["seconds"]
        if in_process and registered > MOST_SECONDS_PLANNED_AND_REGISTERED:
            broken.append(
                f"planning and registering took {registered:.2f} s; at most "
                f"{MOST_SECONDS_PLANNED_AND_REGISTERED:.0f} s were promised"
            )
        most = MOST_SECONDS_SECOND_UP[in_process]
        if second > most:
            broken.append(f"{stack['driver']}: a second up took {second:.2f} s; at most {most:.0f} s were promised")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kubernetes_stack", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--target", choices=sorted(TARGETS), default="gb200-disagg")
    parser.add_argument("--repeat", type=int, default=5, help="times to measure each; the median counts")
    parser.add_argument("--check", action="store_true", help="end with status 1 when a promise is broken")
    arguments = parser.parse_args()
    return finish(
        lambda: benchmark(arguments.target, arguments.repeat),
        RESULT,
        report,
        kept,
        check=arguments.check,
        errors=(KubernetesError, UpdateFailedError),
    )


if __name__ == "__main__":
    sys.exit(main())
