"""What a cut download costs, and what a second run of the cache's roles costs on a host that has everything.

    python -m benchmarks.hub_download                 some two minutes, against the stand-in hub on loopback
    python -m benchmarks.hub_download --mebibytes 4096 --directory /mnt/nvme

Bytes that the hub sent are compared with bytes that lie in the verified files: they are equal when nothing came twice.
Weights that a run reads would be in the page cache afterwards, and would have a new access time. Both are looked at,
after every page was dropped and every access time put back; a file that is read on purpose shows that both would tell.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from benchmarks.results import BenchmarkError, finish
from tests.stand_ins.hub import content
from tests.stand_ins.hub.server import Fault, Hub, State
from tests.weights.conftest import MODEL, ROOT, SHARD, Fetcher, RunningHub

RESULT = ROOT / "results" / "benchmarks" / "hub_download.json"
SHARDS, TENSORS = 3, 3  # of the stand-in repository
MEBIBYTE = 1 << 20
DAY = 86_400 * 10**9

# What the project promises.
MOST_SECONDS_SECOND_RUN = 3.0


@contextmanager
def running_hub(mebibytes: int) -> Iterator[RunningHub]:
    """The stand-in hub with a repository of that size, large files on a port of their own."""
    tensor = mebibytes * MEBIBYTE // (SHARDS * TENSORS)
    made = content.repository(MODEL, layers=36, experts=128, shards=SHARDS, tensor_bytes=tensor)
    state, cdn_state = (State({MODEL: made}, content.encodings()) for _ in range(2))
    cdn = Hub(("127.0.0.1", 0), cdn_state)
    hub = Hub(("127.0.0.1", 0), state, cdn_port=cdn.server_address[1])
    for server in (hub, cdn):
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield RunningHub(f"http://127.0.0.1:{hub.server_address[1]}", state, cdn_state, made)
    finally:
        for server in (hub, cdn):
            server.shutdown()
            server.server_close()


# -- downloads --


def timed(fetcher: Fetcher, hub: RunningHub) -> dict[str, Any]:
    """One download to its end, verified; the hub has counted since it was mended."""
    began = time.monotonic()
    done = fetcher.run("fetch", "--attempts=3", "--workers=3", encodings=True)
    seconds = time.monotonic() - began
    if done.returncode != 0:
        raise BenchmarkError(f"the download failed: {done.stderr}")
    fetcher.assert_complete()  # every byte is what the hub has, and the marker says so
    encodings = sum(len(body) for body in hub.state.encodings.values())
    sent = hub.bytes_sent - encodings
    return {
        "seconds": round(seconds, 2),
        "file_bytes": hub.size,
        "sent_bytes": sent,
        "sent_twice_bytes": sent - hub.size,
        "verified": fetcher.check()["verified"],
    }


def cut_often(fetcher: Fetcher, hub: RunningHub, cuts: int, seed: int) -> dict[str, Any]:
    """One download of one process whose largest file is cut off that many times, at places left to chance."""
    size = len(hub.repository.by_path[SHARD].content)
    places = sorted(random.Random(seed).sample(range(1, size), cuts))  # noqa: S311 - places in a file, not secrets
    lengths = [place - before for before, place in zip([0, *places], places, strict=False)]
    hub.break_(*(Fault("cut", f"/lfs/*{SHARD}", after_bytes=length) for length in lengths))
    result = timed(fetcher, hub)
    left = sum(fault.times for fault in hub.cdn.faults)
    if left:
        raise BenchmarkError(f"{left} of {cuts} cuts did not happen")
    return {"cuts": cuts, "seed": seed, **result, "of_the_cut_file": hub.bytes_of(SHARD) - size}


def killed_often(fetcher: Fetcher, hub: RunningHub, kills: int, seed: int) -> dict[str, Any]:
    """A download whose process is killed that many times. What was on its way to a dead process is lost."""
    places = sorted(random.Random(seed).sample(range(hub.size // 20, hub.size - hub.size // 10), kills))  # noqa: S311
    slow = Fault("throttle", "/lfs/*.safetensors", times=-1, bytes_per_second=max(MEBIBYTE, hub.size // 15))
    for place in places:
        hub.cdn.faults.append(slow)
        process = fetcher.start("--workers=3")
        while staged(fetcher) < place:
            if process.poll() is not None:
                raise BenchmarkError(f"the download ended before it was killed: {process.communicate()[1]}")
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        hub.cdn.faults.clear()
    return {"kills": kills, "seed": seed, **timed(fetcher, hub)}


def staged(fetcher: Fetcher) -> int:
    return sum(path.stat().st_size for path in fetcher.work.rglob("*") if path.is_file())


# -- the second run --


class Witness:
    """Tells whether files were read: their pages in the page cache, and their access times."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def forget(self) -> None:
        """Drop every page, and put every access time a day before the last change, so that a read would set it."""
        os.sync()
        for path in self.files:
            before = path.stat()
            os.utime(path, ns=(before.st_mtime_ns - DAY, before.st_mtime_ns))
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def says(self) -> dict[str, int]:
        """Files whose access time has changed, and bytes in the page cache; in this order, as mapping is an access."""
        files = sum(path.stat().st_atime_ns != path.stat().st_mtime_ns - DAY for path in self.files)
        return {"weights_read_files": files, "weights_read_bytes": sum(map(resident_bytes, self.files))}


def resident_bytes(path: Path) -> int:
    """How much of a file is in the page cache, as mincore(2) says."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    status = library.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found)
    library.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    if status != 0:
        raise BenchmarkError(f"mincore: {os.strerror(ctypes.get_errno())}")
    return sum(page & 1 for page in found) * mmap.PAGESIZE


def second_run(fetcher: Fetcher, hub: RunningHub, repeat: int) -> dict[str, Any]:
    """Both roles on the filled cache, with a local connection; the first run makes directories and is not counted."""
    playbook = write_playbook(fetcher, hub)
    play(playbook)
    weights = sorted(fetcher.snapshot.rglob("*.safetensors"))
    witness = Witness(weights)
    hub.mend()
    witness.forget()
    if any(witness.says().values()):
        raise BenchmarkError(f"{fetcher.directory}: pages cannot be dropped there; choose a disk with --directory")
    witness.forget()
    seconds = []
    for _ in range(repeat):
        began = time.monotonic()
        output = play(playbook)
        seconds.append(round(time.monotonic() - began, 2))
        if "changed=0" not in output:
            raise BenchmarkError(f"a second run changed something:\n{output[-3000:]}")
    read = witness.says()
    witness.forget()
    weights[0].read_bytes()
    if not all(witness.says().values()):
        raise BenchmarkError("a file was read and left no trace; the filesystem is mounted with noatime?")
    return {
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "empty_play_seconds": round(empty_play(playbook.parent), 2),
        "weights_bytes": sum(path.stat().st_size for path in weights),
        **read,
        "hub_requests": len(hub.requests),
    }


def write_playbook(fetcher: Fetcher, hub: RunningHub) -> Path:
    model = {
        "name": "gpt-oss-120b",
        "repository": MODEL,
        "revision": fetcher.revision,
        "ignore_patterns": ["original/*", "metal/*"],
        "encodings": hub.encodings(),
    }
    variables = {
        "model_cache_directory": str(fetcher.directory),
        "model_cache_required_bytes": hub.size,
        "model_weights_model": model,
        "model_weights_endpoint": hub.url,
        "model_weights_program_directory": str(fetcher.directory.parent / "libexec"),
    }
    roles = ["model_cache", "model_weights"]
    both = {"name": "Both roles", "hosts": "all", "gather_facts": False, "vars": variables, "roles": roles}
    path = fetcher.directory.parent / "play.yml"
    path.write_text(yaml.safe_dump([both], sort_keys=False), encoding="utf-8")
    return path


def empty_play(directory: Path) -> float:
    """Seconds of a play that only asks the host for a ping: what Ansible itself takes."""
    path = directory / "empty.yml"
    task = {"name": "Ping", "ansible.builtin.ping": {}}
    path.write_text(yaml.safe_dump([{"name": "Empty", "hosts": "all", "gather_facts": False, "tasks": [task]}]))
    began = time.monotonic()
    play(path)
    return time.monotonic() - began


def play(playbook: Path) -> str:
    tools = Path(sys.executable).parent
    done = subprocess.run(
        [str(tools / "ansible-playbook"), "--inventory=here,", "--connection=local", str(playbook)],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BenchmarkError(f"{playbook.name} ended with status {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


# -- all of it --


def benchmark(mebibytes: int, cuts: int, kills: int, seed: int, repeat: int, directory: str | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cores": len(os.sched_getaffinity(0)), "processor": platform.machine()},
        "load": round(os.getloadavg()[0], 1),
    }
    with running_hub(mebibytes) as hub, tempfile.TemporaryDirectory(dir=directory) as place:

        def fetcher(name: str) -> Fetcher:
            hub.mend()
            return Fetcher(Path(place) / name / "cache", hub, hub.repository.revision)

        whole = fetcher("whole")
        result["uncut"] = timed(whole, hub)
        result["second_run"] = second_run(whole, hub, repeat)
        result["cut"] = cut_often(fetcher("cut"), hub, cuts, seed)
        result["killed"] = killed_often(fetcher("killed"), hub, kills, seed)
    return result


def report(result: dict[str, Any]) -> None:
    uncut, cut, killed, second = (result[part] for part in ("uncut", "cut", "killed", "second_run"))
    rate = uncut["file_bytes"] / uncut["seconds"] / 1e6
    print(f"{uncut['file_bytes'] / MEBIBYTE:.0f} MiB from the stand-in hub on loopback, load {result['load']}:")
    print(f"  uncut                 {uncut['seconds']:7.1f} s ({rate:.0f} MB/s, verified); {again(uncut)}")
    print(f"  cut {cut['cuts']:2} times          {cut['seconds']:7.1f} s; {again(cut)}")
    print(f"  killed {killed['kills']:2} times       {killed['seconds']:7.1f} s for the rest; {again(killed)}")
    print(
        f"  second run, both roles{second['seconds']:7.1f} s (an empty play {second['empty_play_seconds']:.1f} s);"
        f" {second['weights_read_bytes']} of {second['weights_bytes']} bytes of weights read"
    )


def again(result: dict[str, Any]) -> str:
    return f"{result['sent_bytes']} bytes sent for {result['file_bytes']}, {result['sent_twice_bytes']} twice"


def broken_promises(result: dict[str, Any]) -> list[str]:
    found = [
        f"{part}: {result[part]['sent_twice_bytes']} bytes came twice; none were promised"
        for part in ("uncut", "cut")
        if result[part]["sent_twice_bytes"]
    ]
    second = result["second_run"]
    if second["seconds"] > MOST_SECONDS_SECOND_RUN:
        found.append(f"a second run took {second['seconds']} s; at most {MOST_SECONDS_SECOND_RUN:.0f} s were promised")
    if second["weights_read_bytes"] or second["weights_read_files"] or second["hub_requests"]:
        found.append("a second run read weights or asked the hub; neither was promised")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hub_download", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--mebibytes", type=int, default=256, help="size of the model's shards (default: 256)")
    parser.add_argument("--cuts", type=int, default=20, help="cuts in one download (default: 20)")
    parser.add_argument("--kills", type=int, default=5, help="times that the process is killed (default: 5)")
    parser.add_argument("--seed", type=int, default=20, help="for the places of cuts and kills (default: 20)")
    parser.add_argument("--repeat", type=int, default=5, help="second runs; the median counts (default: 5)")
    parser.add_argument("--directory", help="where the caches are made; on a disk (default: for temporary files)")
    parser.add_argument("--check", action="store_true", help="end with status 1 when a promise is broken")
    given = parser.parse_args()
    return finish(
        lambda: benchmark(given.mebibytes, given.cuts, given.kills, given.seed, given.repeat, given.directory),
        RESULT,
        report,
        broken_promises,
        check=given.check,
    )


if __name__ == "__main__":
    sys.exit(main())
