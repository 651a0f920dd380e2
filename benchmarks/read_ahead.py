"""How fast weights are verified and read into memory, against what fio says the drive can do in the same run.

    python -m benchmarks.read_ahead --directory /var/lib/gpt-oss-benchmark     24 GB in 12 files, three rounds
    python -m benchmarks.read_ahead --draw results/benchmarks/read_ahead.json  only the picture of such a run

Needs root (caches are dropped before every measurement), fio (apt install fio), and a directory on the drive in
question; files are generated there as safetensors in the layout of a model cache, and removed at the end. Each round
measures everything in turn, so that what else happens on the machine meets all alike. Beside the project's own programs
stand `cat` and huggingface_hub's verify_repo_checksums (what `hf cache verify` calls), where that package is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.results import REPOSITORY, BenchmarkError
from tests.programs import load

RESULT = REPOSITORY / "results" / "benchmarks" / "read_ahead.json"
PROGRAMS = REPOSITORY / "plugins" / "module_utils" / "gpt_oss"
MODEL, REVISION = "benchmark/generated", "0" * 40
MIB = 1 << 20
LEAST_SHARE = 0.9  # of the drive's own speed; what the project promises
PROMISED = ("read-ahead", "verify")
FIO_SECONDS = 120  # at most, for one reading of all files

HF_VERIFY = """
import sys
from huggingface_hub import HfApi, __version__
from huggingface_hub.hf_api import RepoFile
import json

class Here(HfApi):
    # The list that the Hub would send; the rest is huggingface_hub's own.
    def list_repo_tree(self, *a, **k):
        for e in json.load(open(sys.argv[1]))["files"]:
            lfs = {"size": e["size"], "oid": e["sha256"], "pointerSize": 1}
            yield RepoFile(path=e["path"], size=e["size"], oid="", lfs=lfs)

found = Here().verify_repo_checksums(sys.argv[2], revision=sys.argv[3], cache_dir=sys.argv[4], token=False)
assert found.checked_count and not found.mismatches and not found.missing_paths, found
print(__version__)
"""


read_ahead = load("plugins/module_utils/gpt_oss/read_ahead.py")


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cache:
    """A model cache with one generated model."""

    directory: Path

    @property
    def model(self) -> Path:
        return self.directory / "weights" / ("models--" + MODEL.replace("/", "--"))

    @property
    def snapshot(self) -> Path:
        return self.model / "snapshots" / REVISION

    @property
    def marker(self) -> Path:
        return self.model / "verified" / f"{REVISION}.json"

    @property
    def files(self) -> list[Path]:
        return sorted(self.snapshot.glob("*.safetensors"))

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def drop(self) -> None:
        """Nothing of the files in memory, by the kernel's own word."""
        os.sync()
        for path in self.files:
            read_ahead.evict(path)
        Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
        left = sum(read_ahead.cached_bytes(path) for path in self.files)
        if left:
            raise BenchmarkError(f"{left} bytes of the files stay in memory; does somebody else read them?")


def generate(cache: Cache, gigabytes: float, count: int) -> None:
    """Safetensors files of random bytes, each MiB stamped with its place, and the marker that a fetch leaves."""
    size = int(gigabytes * 1e9 / count)
    free = shutil.disk_usage(cache.directory).free
    if free < size * count + (2 << 30):
        raise BenchmarkError(f"{cache.directory}: {free} bytes are free, {size * count + (2 << 30)} are needed")
    cache.snapshot.mkdir(parents=True)
    cache.marker.parent.mkdir()
    pool = os.urandom(64 * MIB)

    def one(number: int) -> dict[str, Any]:
        path = cache.snapshot / f"model-{number:05}-of-{count:05}.safetensors"
        header = json.dumps({"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        header += b" " * (-len(header) % 8)
        digest = hashlib.sha256()
        with path.open("wb", buffering=0) as out:
            for piece in (len(header).to_bytes(8, "little") + header,):
                digest.update(piece)
                out.write(piece)
            for at in range(0, size, MIB):
                start = (at * 7 + number * 4099) % (len(pool) - MIB)
                piece = number.to_bytes(8, "little") + at.to_bytes(8, "little") + pool[start : start + MIB - 16]
                piece = piece[: size - at]
                digest.update(piece)
                out.write(piece)
            os.fsync(out.fileno())
        status = path.stat()
        return {
            "path": path.name,
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "sha256": digest.hexdigest(),
        }

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as workers:
        entries = list(workers.map(one, range(1, count + 1)))
    marker = {"format_version": 1, "repository": MODEL, "revision": REVISION, "ignore_patterns": [], "files": entries}
    cache.marker.write_text(json.dumps(marker), encoding="utf-8")
    process = cache.directory / "etc" / "processes" / "0" / "process.json"
    process.parent.mkdir(parents=True)
    described = {"marker": str(cache.marker), "snapshot": str(cache.snapshot), "address": "127.0.0.1", "port": 1}
    process.write_text(json.dumps({**described, "health_path": "/health"}), encoding="utf-8")


# -- what is measured --------------------------------------------------------------------------------------------------


def run(command: Sequence[str | Path], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        raise BenchmarkError(f"{command[0]} ended with {done.returncode}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def fio(program: str, files: Sequence[Path], jobs: int, *, direct: bool) -> float:
    """Bytes a second: every file read once from its start to its end, `jobs` of them at a time, by several readers."""
    # The pieces that the read-ahead takes: a file is shared among readers, each with its own part.
    size = sum(path.stat().st_size for path in files)
    parts = max(1, jobs // len(files))
    words = [program, "--readonly", "--output-format=json", "--rw=read", "--group_reporting", "--invalidate=1"]
    words += ["--direct=1", "--ioengine=io_uring", "--iodepth=16", "--bs=1M"] if direct else ["--direct=0", "--bs=4M"]
    words += ["--thread", f"--runtime={FIO_SECONDS}", "--bwavgtime=500"]
    for path in files:
        share = path.stat().st_size // parts // MIB * MIB
        for part in range(parts):
            words += [f"--name={path.name}-{part}", f"--filename={path}", f"--offset={part * share}", f"--size={share}"]
    found = json.loads(run(words))
    readings = [job["read"] for job in found["jobs"]]
    seconds = max(reading["runtime"] for reading in readings) / 1000
    done = sum(int(reading["io_bytes"]) for reading in readings)
    if done < 0.95 * size and seconds < FIO_SECONDS - 1:
        raise BenchmarkError(f"fio read {done} of {size} bytes")
    return float(done / seconds)


@dataclass(frozen=True)
class Measure:
    """Something that reads all files once; `operation` may say its own bytes a second, otherwise the clock does."""

    name: str
    operation: Callable[[], float | None]
    every_round: bool = True


def measures(cache: Cache, fio_program: str, threads: Sequence[int], with_hub: bool) -> list[Measure]:
    files = cache.files
    most = max(threads)
    ahead: list[str | Path] = [
        sys.executable,
        PROGRAMS / "read_ahead.py",
        f"--configuration={cache.directory / 'etc'}",
        "--margin-bytes=0",
    ]
    verify: list[str | Path] = [
        *(sys.executable, PROGRAMS / "fetch_weights.py", "verify", f"--repository={MODEL}", f"--revision={REVISION}"),
        *(f"--{part}-directory={cache.directory / part}" for part in ("weights", "staging", "encodings")),
    ]

    def bring(count: int) -> None:
        said = run([*ahead, f"--threads={count}"])
        if "read 0.00 GB" in said or "skipped" in said:
            raise BenchmarkError(f"the read-ahead read nothing: {said}")
        missing = cache.size - sum(read_ahead.cached_bytes(path) for path in files)
        if missing:
            raise BenchmarkError(f"{missing} bytes are not in memory after the read-ahead")

    def checksums() -> None:
        run([*verify, f"--workers={most}"])

    def concatenate() -> None:
        run(["sh", "-c", 'exec cat "$@" > /dev/null', "cat", *files])

    def hub() -> None:
        script: list[str | Path] = [
            sys.executable,
            "-c",
            HF_VERIFY,
            cache.marker,
            MODEL,
            REVISION,
            cache.directory / "weights",
        ]
        run(script, {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"})

    found = [
        Measure("fio, direct", lambda: fio(fio_program, files, most, direct=True)),
        *(Measure(f"read-ahead, {count} threads", lambda count=count: bring(count)) for count in threads),  # type: ignore[misc]
        Measure("fio, buffered", lambda: fio(fio_program, files, most, direct=False)),
        Measure(f"verify, {most} workers", checksums),
        Measure("cat", concatenate),
    ]
    if with_hub:
        found.append(Measure("huggingface_hub verify", hub, every_round=False))
    return found


def measured(cache: Cache, everything: Sequence[Measure], rounds: int) -> dict[str, list[float]]:
    """GB/s by name, a figure a round."""
    figures: dict[str, list[float]] = {entry.name: [] for entry in everything}
    for number in range(rounds):
        for entry in everything:
            if number and not entry.every_round:
                continue
            cache.drop()
            began = time.monotonic()
            rate = entry.operation()
            seconds = time.monotonic() - began
            figures[entry.name].append(round((rate or cache.size / seconds) / 1e9, 3))
            print(f"round {number + 1}: {entry.name}: {figures[entry.name][-1]:.2f} GB/s ({seconds:.1f} s)", flush=True)
    return figures


def judged(figures: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and their shares of the drive's own speed, which is that of the faster of fio's ways."""
    medians = {name: statistics.median(values) for name, values in figures.items()}
    drive = max(value for name, value in medians.items() if name.startswith("fio"))
    shares = {name: round(value / drive, 3) for name, value in medians.items() if not name.startswith("fio")}
    return {
        "gigabytes_per_second": medians,
        "drive_gigabytes_per_second": drive,
        "share_of_drive": shares,
        "ok": all(share >= LEAST_SHARE for name, share in shares.items() if name.startswith(PROMISED)),
    }


def hub_version() -> str:
    done = subprocess.run(
        [sys.executable, "-c", "import huggingface_hub as h; print(h.__version__); h.HfApi.verify_repo_checksums"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def benchmark(arguments: argparse.Namespace) -> dict[str, Any]:
    program = shutil.which(str(arguments.fio))
    if program is None:
        raise BenchmarkError(f"--fio: {arguments.fio} is not on this machine; apt install fio")
    if os.geteuid() != 0:
        raise BenchmarkError("dropping caches needs root")
    directory = arguments.directory / "read-ahead-benchmark"
    directory.mkdir(parents=True)  # never one that is there
    cache = Cache(directory)
    try:
        began = time.monotonic()
        generate(cache, arguments.gigabytes, arguments.files)
        size = cache.size
        seconds = time.monotonic() - began
        print(f"generated {size / 1e9:.1f} GB in {seconds:.0f} s ({size / seconds / 1e9:.2f} GB/s)", flush=True)
        version = hub_version()
        everything = measures(cache, program, arguments.threads, bool(version))
        figures = measured(cache, everything, arguments.rounds)
        device = run(["df", "--output=source,fstype", directory]).splitlines()[-1].split()
    finally:
        shutil.rmtree(directory)
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "name": arguments.machine,
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            "drive": device[0],
            "filesystem": device[1],
            "fio": run([program, "--version"]).strip(),
            "huggingface_hub": version,
        },
        "bytes": size,
        "files": arguments.files,
        "all_gigabytes_per_second": figures,
        **judged(figures),
    }


def draw(result: dict[str, Any], picture: Path) -> None:
    """A bar for each, in order of measurement, with every round as a dot; the drive's own speed as a line."""
    from matplotlib.figure import Figure

    figures: dict[str, list[float]] = result["all_gigabytes_per_second"]
    figure = Figure(figsize=(9, 0.5 * len(figures) + 1.6), layout="constrained")
    axes = figure.add_subplot()
    for row, (name, values) in enumerate(figures.items()):
        colour = "tab:gray" if name.startswith("fio") else "tab:green" if "," in name else "tab:orange"
        middle = statistics.median(values)
        axes.barh(row, middle, color=colour, alpha=0.75)
        axes.plot(values, [row] * len(values), "k.", markersize=4)
        axes.text(middle * 0.02, row, f"{middle:.2f}", va="center", color="white")
    axes.axvline(LEAST_SHARE * result["drive_gigabytes_per_second"], color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(figures)), list(figures))
    axes.invert_yaxis()
    axes.set_xlabel("GB/s; dotted: 90 % of the drive's own speed; dots: single rounds")
    machine = result["machine"]
    axes.set_title(
        f"{result['bytes'] / 1e9:.0f} GB in {result['files']} files: {machine['name']}, {machine['cores']} cores"
    )
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.read_ahead", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--directory", type=Path, help="on the drive to measure")
    parser.add_argument("--gigabytes", type=float, default=24, help="what is generated (default: 24)")
    parser.add_argument("--files", type=int, default=12, help="in how many files (default: 12)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[16], help="of the read-ahead, each measured")
    parser.add_argument("--fio", default="fio", help="the program")
    parser.add_argument("--machine", default=platform.node(), help="what to call it in the picture")
    parser.add_argument("--output", type=Path, default=RESULT, help=f"default: {RESULT.relative_to(REPOSITORY)}")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="only draw the picture of a recorded run, beside it")
    parser.add_argument("--check", action="store_true", help="end with status 1 where a promise is broken")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(json.loads(arguments.draw.read_text(encoding="utf-8")), arguments.draw.with_suffix(".png"))
        return 0
    if arguments.directory is None:
        parser.error("--directory: name one on the drive to measure")
    try:
        result = benchmark(arguments)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"\nthe drive: {result['drive_gigabytes_per_second']:.2f} GB/s; of that")
    for name, share in result["share_of_drive"].items():
        print(f"  {name}: {100 * share:.0f} %")
    print(f"  {arguments.output}")
    if importlib.util.find_spec("matplotlib") is not None:
        draw(result, arguments.output.with_suffix(".png"))
    return 1 if arguments.check and not result["ok"] else 0


if __name__ == "__main__":
    sys.exit(main())
