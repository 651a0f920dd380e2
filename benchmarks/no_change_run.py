"""How long site.yml takes when there is nothing to change, on one host and on eight.

    python -m benchmarks.no_change_run               one host and eight; some fifteen minutes with warm caches
    python -m benchmarks.no_change_run --hosts 1     one host alone
    python -m benchmarks.no_change_run --keep        leave the hosts running for another measurement

Hosts are the demo's: systemd machines in containers, all on the two cores or so that the controller has as well. Runs
are repeated until nothing changes; then each measurement is taken several times, and the median is the figure. Beside
it, in the same minutes on the same host, stands what fifty `ansible.builtin.copy` tasks that change nothing take: the
cost of round trips when each file has its own task.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from benchmarks.results import BenchmarkError, finish
from simulator.build import images as engine_images
from simulator.build.registry import Registry
from tests.hosts import hosts, mirror
from tests.hosts.machine import REPOSITORY, HostError, say

PREFIX = "bench-"
ENGINE = "tensorrt_llm-1.2.1"
DEMO = REPOSITORY / "inventories" / "demo"
RESULT = REPOSITORY / "results" / "benchmarks" / "no_change_run.json"

# What the project promises (README.md).
MOST_SECONDS_ONE_HOST = 20.0
MOST_TIMES_EIGHT_HOSTS = 4.0

RECAP = re.compile(r"^(\S+) +: ok=\d+ +changed=(\d+) +unreachable=(\d+) +failed=(\d+)", re.M)
TRIPS = re.compile(r"^(\S+) +: (\d+)$", re.M)


@dataclass
class Run:
    """One ansible-playbook run."""

    seconds: float
    changed: dict[str, int]
    round_trips: dict[str, int]
    output: str = field(repr=False)


@dataclass(frozen=True)
class Fleet:
    directory: Path
    names: Sequence[str]

    def play(self, playbook: str | Path, limit: Sequence[str]) -> Run:
        tools = Path(sys.executable).parent
        command = [
            *(str(tools / "ansible-playbook"), "-i", str(self.directory / "inventory"), str(playbook)),
            *([] if set(limit) == set(self.names) else ["--limit", ",".join(limit)]),
        ]
        environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "ANSIBLE_FORCE_COLOR": "0"}
        began = time.monotonic()
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env={**environment, "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - began
        if done.returncode != 0:
            raise BenchmarkError(f"`{' '.join(command)}` ended with status {done.returncode}:\n{done.stdout[-6000:]}")
        recap = {match[1]: int(match[2]) for match in RECAP.finditer(done.stdout) if match[1] in limit}
        _, _, counted = done.stdout.partition("ROUND TRIPS")
        trips = {match[1]: int(match[2]) for match in TRIPS.finditer(counted)}
        return Run(seconds, recap, trips, done.stdout)


def written_out(host: hosts.Host) -> dict[str, Any]:
    """How the host is reached, in plain words as in an operator's inventory; the demo looks it up in a file."""
    return {
        "test_host": asdict(host),
        "ansible_host": host.address,
        "ansible_user": host.user,
        "ansible_ssh_private_key_file": host.private_key,
        "ansible_ssh_common_args": f"-o UserKnownHostsFile={host.known_hosts} -o BatchMode=yes",
    }


@contextmanager
def fleet(count: int, *, keep: bool) -> Iterator[Fleet]:
    """The demo's host, `count` times, started one after another."""
    registry = Registry(f"http://{mirror.up()}:{mirror.REGISTRY_PORT}")
    for image in engine_images.images([ENGINE]):
        registry.push(image)
    names = [f"{PREFIX}{number}" for number in range(1, count + 1)]
    for name in names:
        say(f"starting {name}")
        hosts.up(name)
    with tempfile.TemporaryDirectory() as directory:
        inventory = Path(directory) / "inventory"
        inventory.mkdir()
        (inventory / "group_vars").symlink_to(DEMO / "group_vars")
        [(group, content)] = yaml.safe_load((DEMO / "hosts.yml").read_text(encoding="utf-8")).items()
        variables = content["vars"] | {
            "test_host_file": str(REPOSITORY / "build" / "hosts" / "{{ inventory_hostname }}.json"),
            "verdict_directory": str(Path(directory) / "verdicts"),
        }
        members = {name: written_out(hosts.get(name)) for name in names}
        written = yaml.safe_dump({group: {"hosts": members, "vars": variables}})
        (inventory / "hosts.yml").write_text(written, encoding="utf-8")
        yield Fleet(Path(directory), names)
    if keep:
        say(f"left running: {', '.join(names)}; `python -m tests.hosts down NAME` removes one")
        return
    for name in names:
        hosts.down(name)


def settle(fleet: Fleet) -> list[Run]:
    """Runs until one changes nothing on any host; the last of them is not timed."""
    runs = []
    for attempt in range(1, 5):
        say(f"site.yml on {len(fleet.names)} host(s), run {attempt}")
        runs.append(fleet.play("site.yml", fleet.names))
        changed = sum(runs[-1].changed.values())
        say(f"  {runs[-1].seconds:.1f} s, {changed} changes")
        if changed == 0:
            return runs
    raise BenchmarkError(f"the fourth run still changes something:\n{runs[-1].output[-6000:]}")


def measured(fleet: Fleet, playbook: str | Path, limit: Sequence[str], repeat: int) -> dict[str, Any]:
    runs = []
    for _ in range(repeat):
        run = fleet.play(playbook, limit)
        if any(run.changed.values()):
            raise BenchmarkError(f"{playbook} changed something, so it is no measure:\n{run.output[-6000:]}")
        runs.append(run)
    seconds = [round(run.seconds, 2) for run in runs]
    return {
        "hosts": len(limit),
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "round_trips": runs[-1].round_trips,
    }


def peer_playbook(directory: Path, tasks: int) -> Path:
    """As many files, each with a task of its own, which is how most roles are written."""
    copies = [
        {
            "name": f"File {number}",
            "ansible.builtin.copy": {
                "content": f"{number}\n",
                "dest": f"/etc/benchmark-peer/{number}.conf",
                "mode": "0644",
            },
        }
        for number in range(tasks)
    ]
    made = {
        "name": "Directory",
        "ansible.builtin.file": {"path": "/etc/benchmark-peer", "state": "directory", "mode": "0755"},
    }
    play = {"name": "Fifty files", "hosts": "all", "become": True, "gather_facts": False, "tasks": [made, *copies]}
    path = directory / "peer.yml"
    path.write_text(yaml.safe_dump([play], sort_keys=False), encoding="utf-8")
    return path


def benchmark(sizes: Sequence[int], repeat: int, tasks: int, *, keep: bool) -> dict[str, Any]:
    with fleet(max(sizes), keep=keep) as hosts_:
        first = settle(hosts_)
        peer = peer_playbook(hosts_.directory, tasks)
        one = hosts_.names[:1]
        hosts_.play(peer, one)
        result: dict[str, Any] = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {"cores": len(os.sched_getaffinity(0)), "processor": platform.machine()},
            "first_run_seconds": round(first[0].seconds, 1),
            "runs_until_unchanged": len(first),
            "no_change": [measured(hosts_, "site.yml", hosts_.names[:size], repeat) for size in sizes],
            "peer": {"copy_tasks": tasks, **measured(hosts_, peer, one, repeat)},
        }
        hosts.execute(one[0], "rm", "-r", "/etc/benchmark-peer")
    by_size = {entry["hosts"]: entry["seconds"] for entry in result["no_change"]}
    if 1 in by_size:
        result["ratio_to_peer"] = round(by_size[1] / result["peer"]["seconds"], 2)
        result["ratio_to_one_host"] = {size: round(seconds / by_size[1], 2) for size, seconds in by_size.items()}
    return result


def report(result: dict[str, Any]) -> None:
    machine = result["machine"]
    print(
        f"site.yml with nothing to change, controller and hosts on {machine['cores']} cores ({machine['processor']}):"
    )
    for entry in result["no_change"]:
        trips = sorted(set(entry["round_trips"].values()))
        spread = str(trips[0]) if len(trips) == 1 else f"{trips[0]} to {trips[-1]}"
        ratio = result.get("ratio_to_one_host", {}).get(entry["hosts"])
        beside = f", {ratio:.2f} times one host" if ratio and entry["hosts"] > 1 else ""
        print(f"  {entry['hosts']:2} host(s)  {entry['seconds']:6.1f} s{beside}; {spread} round trips each")
    peer = result["peer"]
    print(f"  for comparison, {peer['copy_tasks']} copy tasks that change nothing, one host: {peer['seconds']:.1f} s")
    if "ratio_to_peer" in result:
        print(f"  one host, compared with those tasks: {result['ratio_to_peer']:.2f}")


def kept(result: dict[str, Any]) -> list[str]:
    """Promises that this result breaks."""
    broken = []
    by_size = {entry["hosts"]: entry["seconds"] for entry in result["no_change"]}
    if by_size.get(1, 0) > MOST_SECONDS_ONE_HOST:
        broken.append(f"one host took {by_size[1]:.1f} s; at most {MOST_SECONDS_ONE_HOST:.0f} s were promised")
    ratio = result.get("ratio_to_one_host", {}).get(8, 0)
    if ratio > MOST_TIMES_EIGHT_HOSTS:
        broken.append(f"eight hosts took {ratio:.2f} times one; at most {MOST_TIMES_EIGHT_HOSTS:.0f} were promised")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.no_change_run", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 8], help="how many hosts to measure (default: 1 8)")
    parser.add_argument("--repeat", type=int, default=3, help="times to measure each; the median counts")
    parser.add_argument("--peer-tasks", type=int, default=50, help="copy tasks to compare with")
    parser.add_argument("--keep", action="store_true", help="leave the hosts running")
    parser.add_argument("--check", action="store_true", help="end with status 1 when a promise is broken")
    arguments = parser.parse_args()
    return finish(
        lambda: benchmark(arguments.hosts, arguments.repeat, arguments.peer_tasks, keep=arguments.keep),
        RESULT,
        report,
        kept,
        check=arguments.check,
        errors=(HostError,),
    )


if __name__ == "__main__":
    sys.exit(main())
