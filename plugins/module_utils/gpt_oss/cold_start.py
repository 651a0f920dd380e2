#!/usr/bin/env python3
"""What a cold start is made of: from `systemctl start` to the first token, by the engines' own words in the journal.

    python - --draw DIR < cold_start.py    draw cold_start.png from DIR/cold_start.json; needs matplotlib

Standard library only, Python 3.8 and later. Times are seconds since the epoch, as the journal has them; sizes, bytes.
"""

from __future__ import annotations

import argparse
import datetime
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

FORMAT_VERSION = 1
# In this order, and without a gap between them: together they are the whole start.
PHASES = (
    ("image", "from the start of the unit until its container runs"),
    ("program", "until the engine begins with the weights: imports, ranks, configuration"),
    ("weights", "until the weights are on the GPUs"),
    ("engine_load", "until the server says that it is ready: memory, kernels, CUDA graphs"),
    ("warm_up", "until the first token of the first request"),
)
# What engines write when they begin with the weights, and when a rank is done with them. Progress bars do not count: a
# bar is in the journal when its line ends. vLLM tells at the end how long it took (model_loader/default_loader.py);
# TensorRT-LLM tells both moments (_torch/models/checkpoints/hf/weight_loader.py, _torch/pyexecutor/model_loader.py).
BEGINS = re.compile(r"\b(Use \S+ GB for model weights|[Pp]refetching \S+ ?GB checkpoint files)")
ENDS = re.compile(r"Loading weights took (?P<seconds>[0-9.]+) seconds|Model init total -- [0-9.]+s")
READ_LINE = re.compile(
    r"^read (?P<read>[0-9.]+) GB in (?P<seconds>[0-9.]+) s \((?P<rate>[0-9.]+) GB/s\);"
    r" (?P<cached>[0-9.]+) of (?P<total>[0-9.]+) GB were in memory already"
)


class Line(NamedTuple):
    """A line of the journal."""

    at: float
    text: str


class Marks(NamedTuple):
    """Moments of one process's start. Those that its engine did not tell are None."""

    started: float
    container: float | None
    weights_begin: float | None
    weights_end: float | None
    ready: float
    first_token: float


# -- the journal -------------------------------------------------------------------------------------------------------


def read_journal(text: str) -> list[Line]:
    """Lines from `journalctl --output=json`. Progress bars rewrite a line: each of their states counts as one."""
    lines = []
    for row in text.splitlines():
        try:
            entry = json.loads(row)
            at = int(entry["__REALTIME_TIMESTAMP"]) / 1e6
        except (ValueError, KeyError, TypeError):
            continue
        message = entry.get("MESSAGE") or ""
        if isinstance(message, list):  # bytes that are no text, such as a bar's carriage returns
            message = bytes(message).decode("utf-8", "replace")
        lines += [Line(at, part.strip()) for part in re.split(r"[\r\n]", str(message)) if part.strip()]
    return lines


def journal(unit: str, since: float) -> list[Line]:
    """What a unit has printed since a moment."""
    subprocess.run(["journalctl", "--sync"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    command = [
        "journalctl",
        f"--unit={unit}",
        f"--since=@{since:.6f}",
        "--output=json",
        "--all",
        "--no-pager",
        "--quiet",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return read_journal(done.stdout.decode("utf-8", "replace"))


def weights_times(lines: list[Line]) -> tuple[float | None, float | None]:
    """When the engine began with the weights, and when its last rank was done with them."""
    begins = [line.at for line in lines if BEGINS.search(line.text)]
    ends = []
    for line in lines:
        found = ENDS.search(line.text)
        if found:
            ends.append(line.at)
            begins += [line.at - float(found.group("seconds"))] if found.group("seconds") else []
    return min(begins, default=None), max(ends, default=None)


def read_ahead_of(lines: list[Line]) -> dict[str, Any] | None:
    """What the read-ahead said at its end, or why it did nothing."""
    for line in reversed(lines):
        found = READ_LINE.match(line.text)
        if found:
            values = {name: float(value) for name, value in found.groupdict().items()}
            return {
                "bytes": int(values["read"] * 1e9),
                "bytes_in_memory_before": int(values["cached"] * 1e9),
                "seconds": values["seconds"],
                "bytes_per_second": int(values["rate"] * 1e9),
                "stopped": line.text.partition("stopped: ")[2],
            }
        if line.text.startswith("skipped: "):
            return {"bytes": 0, "skipped": line.text[len("skipped: ") :]}
    return None


def container_time(text: str) -> float | None:
    """Docker's RFC 3339 time with nanoseconds; the year 1 stands for never."""
    found = re.match(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)$", text.strip())
    if not found or found.group(1).startswith("0001"):
        return None
    zone = "+00:00" if found.group(3) == "Z" else found.group(3)
    return datetime.datetime.fromisoformat(found.group(1) + zone).timestamp() + float(found.group(2) or 0)


# -- the split ---------------------------------------------------------------------------------------------------------


def split(marks: Marks) -> dict[str, float]:
    """Seconds of each phase. One whose end nobody told is left out, and its time counts to the next."""
    moments = (marks.container, marks.weights_begin, marks.weights_end, marks.ready, marks.first_token)
    phases = {}
    before = marks.started
    for (name, _), moment in zip(PHASES, moments):
        if moment is None:
            continue
        # Clocks of different programs: a moment is never before the one that it follows.
        moment = max(moment, before)
        phases[name] = round(moment - before, 3)
        before = moment
    return phases


def result(
    about: dict[str, Any],
    marks: dict[str, Marks],
    size: int,
    drive: dict[str, Any],
    read_ahead: dict[str, Any] | None,
) -> dict[str, Any]:
    """The document: `size` are the weights of one process."""
    processes = {}
    for name, found in sorted(marks.items()):
        phases = split(found)
        seconds = phases.get("weights")
        processes[name] = {
            "phases": phases,
            "seconds": round(found.first_token - found.started, 3),
            "weights_bytes_per_second": int(size / seconds) if seconds else None,
        }
    slowest = max(processes, key=lambda name: float(processes[name]["seconds"]))  # type: ignore[arg-type]
    return {
        "schema_version": FORMAT_VERSION,
        "about": about,
        "seconds": processes[slowest]["seconds"],
        "weights_bytes": size,
        "drive": drive,
        "read_ahead": read_ahead,
        "processes": processes,
    }


def line(found: dict[str, Any]) -> str:
    """The result in one line, for people."""
    slowest = max(found["processes"].values(), key=lambda process: float(process["seconds"]))
    parts = [f"{name.replace('_', ' ')} {seconds:.1f} s" for name, seconds in slowest["phases"].items()]
    said = f"first token after {found['seconds']:.1f} s: {', '.join(parts)}"
    ahead = found["read_ahead"] or {}
    if ahead.get("bytes_per_second"):
        said += f"; read ahead at {ahead['bytes_per_second'] / 1e9:.2f} GB/s"
        if found["drive"].get("bytes_per_second"):
            said += f" of the drive's {found['drive']['bytes_per_second'] / 1e9:.2f}"
    return said


# -- the drive ---------------------------------------------------------------------------------------------------------


def fio_command(files: list[tuple[str, int]], most_bytes: int, most_seconds: int, *, direct: bool) -> list[str]:
    """fio over existing files: it only reads, and is bounded in bytes and seconds. The largest eight, side by side."""
    chosen = sorted(files, key=lambda entry: entry[1], reverse=True)[:8]
    words = ["fio", "--readonly", "--rw=read", "--bs=1M", "--output-format=json", "--group_reporting", "--thread"]
    words += [f"--runtime={most_seconds}", "--invalidate=1"]
    words += ["--direct=1", "--ioengine=libaio", "--iodepth=16"] if direct else ["--direct=0", "--ioengine=psync"]
    for number, (path, size) in enumerate(chosen):
        # A colon separates file names in fio.
        name = path.replace(":", "\\:")
        share = max(1, min(size, most_bytes // len(chosen)))
        words += [f"--name=weights-{number}", f"--filename={name}", f"--size={share}"]
    return words


def fio_result(text: str, way: str) -> dict[str, Any]:
    """What fio's JSON says the drive can do. Notes may stand before the JSON."""
    found = json.loads(text[text.index("{") :])
    readings = [job["read"] for job in found["jobs"]]
    size = sum(int(reading["io_bytes"]) for reading in readings)
    seconds = max(float(reading["runtime"]) for reading in readings) / 1000
    return {
        "bytes": size,
        "seconds": round(seconds, 3),
        "bytes_per_second": int(size / seconds) if seconds else None,
        "way": way,
        "program": found.get("fio version", "fio"),
    }


def drive_speed(files: list[tuple[str, int]], most_bytes: int, most_seconds: int) -> dict[str, Any]:
    """Bytes a second that fio reads, past the page cache where the file system can do that; or what it said instead."""
    said = ""
    for way in ("direct", "buffered"):
        command = fio_command(files, most_bytes, most_seconds, direct=way == "direct")
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=most_seconds + 60,
                check=False,
            )
        except FileNotFoundError:
            return {"problem": "fio is not installed"}
        except subprocess.TimeoutExpired:
            return {"problem": f"fio did not end within {most_seconds + 60} s"}
        if done.returncode == 0:
            return fio_result(done.stdout.decode("utf-8", "replace"), way)
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-500:]
    return {"problem": said or "fio failed without a word"}


# -- the picture -------------------------------------------------------------------------------------------------------


def draw_with(python: str, directory: Path) -> str:
    """Draw with an interpreter that has matplotlib; what went wrong, or an empty string."""
    # As text: inside an Ansible module this file lies in an archive.
    source = inspect.getsource(sys.modules[__name__])
    variables = {
        **os.environ,
        "HOME": str(directory),
        "MPLBACKEND": "Agg",
        "MPLCONFIGDIR": str(directory / ".matplotlib"),
    }
    try:
        done = subprocess.run(
            [python, "-", "--draw", str(directory)],
            env=variables,
            input=source.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except OSError as error:
        return f"{python}: {error.strerror}"
    return "" if done.returncode == 0 else done.stdout.decode("utf-8", "replace").strip()[-1000:]


def draw(directory: Path) -> None:
    """cold_start.png: a stacked bar for each process, and one for the read-ahead beside what the drive can do."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    found = json.loads((directory / "cold_start.json").read_text(encoding="utf-8"))
    processes = found["processes"]
    ahead = found["read_ahead"] or {}
    rows = [f"process {name}" for name in processes]
    figure = Figure(figsize=(10, 0.6 * (len(rows) + bool(ahead.get("seconds"))) + 1.8), layout="constrained")
    axes = figure.add_subplot()
    left = [0.0] * len(rows)
    for name, text in PHASES:
        widths = [float(process["phases"].get(name, 0)) for process in processes.values()]
        axes.barh(rows, widths, left=left, label=f"{name.replace('_', ' ')}: {text}")
        for row, width in enumerate(widths):
            if width > 0.04 * float(found["seconds"]):
                axes.text(left[row] + width / 2, row, f"{width:.1f}", ha="center", va="center", color="white")
        left = [start + width for start, width in zip(left, widths)]
    if ahead.get("seconds"):
        axes.barh(["read-ahead"], [ahead["seconds"]], color="lightgray")
        said = f"{ahead['bytes_per_second'] / 1e9:.2f} GB/s"
        if found["drive"].get("bytes_per_second"):
            said += f", fio {found['drive']['bytes_per_second'] / 1e9:.2f} GB/s"
        axes.text(0, len(rows), " " + said, va="center")
    axes.invert_yaxis()
    axes.set_xlabel("seconds since systemctl start")
    about = found["about"]
    named = ", ".join(str(about[key]) for key in ("host", "engine", "release", "profile", "gpu") if about.get(key))
    axes.set_title(f"Cold start, first token after {found['seconds']:.1f} s{': ' + named if named else ''}")
    figure.legend(loc="outside lower left", fontsize="x-small")
    figure.savefig(directory / "cold_start.png", dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the picture of a cold start.")
    parser.add_argument("--draw", type=Path, metavar="DIR", required=True, help="where cold_start.json is")
    draw(parser.parse_args().draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
