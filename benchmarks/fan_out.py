"""How long a fleet takes to get weights from one host that has them, against one host alone and against rsync.

    python -m benchmarks.fan_out                                          8 hosts, links of 1 Gbit/s, 1 GiB, 3 rounds
    python -m benchmarks.fan_out --draw results/benchmarks/fan_out.json   only the picture of such a run

Each host is a network namespace with one link to a bridge, limited by tc in both directions; files lie in memory, so
that links are what is measured. Every host runs the project's own sharing program, verification against the hub's
checksums and publishing included. rsync copies from one host's daemon to all the others at once, and verifies nothing
against the hub; aria2, where it is installed, shares by a tracker that the benchmark runs for it. Everything happens in
namespaces of this process, which are gone with it, however it ends. Needs root, iproute2 (apt install iproute2 rsync
aria2) and the Python packages of requirements-dev.txt; some 14 bytes of memory for every byte shared.
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
RESULT = REPOSITORY / "results" / "benchmarks" / "fan_out.json"
PROGRAMS = REPOSITORY / "plugins" / "module_utils" / "gpt_oss"
MODEL, REVISION = "benchmark/generated", "0" * 40
PORT, RSYNC_PORT, TRACKER_PORT = 18631, 8730, 8731
MIB = 1 << 20
MOST_TIMES_ONE_HOST = 1.3  # what the project promises for 8 hosts
LONGEST_SECONDS = 400.0
CHUNK = 4 * MIB


class BenchmarkError(Exception):
    """What keeps this from being measured."""


def say(text: str) -> None:
    print(text, flush=True)


def call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchmarkError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


# -- the network -------------------------------------------------------------------------------------------------------


@dataclass
class Host:
    """One namespace: number 1 has the files. The process that keeps it is a sleeping one."""

    number: int
    directory: Path
    keeper: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        return f"host-{self.number:02d}"

    @property
    def address(self) -> str:
        return f"10.99.0.{self.number}"

    def start(self, command: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        with (self.directory / log).open("wb") as output:
            return subprocess.Popen(
                ["nsenter", f"--target={self.keeper.pid}", "--net", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.directory,
            )

    def log(self, name: str) -> str:
        return (self.directory / name).read_text(errors="replace")[-2000:]


@contextmanager
def network(count: int, megabits: int, directory: Path) -> Iterator[list[Host]]:
    """Hosts on one bridge; each link carries so much in either direction."""
    hosts = []
    call("ip", "link", "set", "lo", "up")
    call("ip", "link", "add", "switch", "type", "bridge")
    call("ip", "link", "set", "switch", "up")
    try:
        for number in range(1, count + 1):
            keeper = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
            host = Host(number, directory / f"host-{number:02d}", keeper)
            hosts.append(host)
            host.directory.mkdir()
            wait_until(lambda pid=keeper.pid: own_network(pid), "a namespace")  # type: ignore[misc]
            inside = ["nsenter", f"--target={keeper.pid}", "--net"]
            port = f"port{number}"
            call("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(keeper.pid))
            call("ip", "link", "set", port, "master", "switch", "up")
            call(*inside, "ip", "link", "set", "lo", "up")
            call(*inside, "ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            call(*inside, "ip", "link", "set", "eth0", "up")
            limit = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "20ms"]
            call("tc", "qdisc", "add", "dev", port, *limit)
            call(*inside, "tc", "qdisc", "add", "dev", "eth0", *limit)
        yield hosts
    finally:
        for host in hosts:
            host.keeper.kill()
            host.keeper.wait()
        call("ip", "link", "delete", "switch")


def own_network(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    return False


def wait_until(true: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            raise BenchmarkError(f"{what} did not come within {seconds:.0f} s")
        time.sleep(0.02)


# -- what is shared ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Content:
    """Generated files with their manifest, as a hub would give it."""

    directory: Path
    size: int

    @property
    def sums(self) -> dict[str, str]:
        manifest = json.loads((self.directory / "manifest.json").read_text())
        return {entry["path"]: entry["sha256"] for entry in manifest["files"]}


def generate(directory: Path, size: int, files: int) -> Content:
    directory.mkdir()
    entries: list[dict[str, Any]] = []
    for number in range(files):
        path = directory / f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        digest = hashlib.sha256()
        with path.open("wb") as handle:
            left = size // files
            while left:
                chunk = os.urandom(min(CHUNK, left))
                handle.write(chunk)
                digest.update(chunk)
                left -= len(chunk)
        entries.append({"path": path.name, "size": path.stat().st_size, "sha256": digest.hexdigest()})
    manifest = {"format_version": 1, "repository": MODEL, "revision": REVISION, "source": "generated", "files": entries}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return Content(directory, sum(entry["size"] for entry in entries))


def own_program(name: str, command: str, directory: Path, *more: str) -> list[str]:
    return [
        sys.executable,
        str(PROGRAMS / f"{name}.py"),
        command,
        f"--repository={MODEL}",
        f"--revision={REVISION}",
        *(f"--{place}-directory={directory / place}" for place in ("weights", "staging", "encodings")),
        "--ignore-patterns=",
        *more,
    ]


def snapshot(host: Host) -> Path:
    return host.directory / "weights" / ("models--" + MODEL.replace("/", "--")) / "snapshots" / REVISION


def fill(host: Host, content: Content) -> None:
    """Make a host one that has the verified snapshot."""
    done = subprocess.run(
        own_program("fetch_weights", "fetch", host.directory, f"--from={content.directory}"),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BenchmarkError(done.stderr)


def empty(host: Host) -> None:
    for entry in host.directory.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def sums_of(directory: Path) -> dict[str, str]:
    """Checksums of what has arrived, computed here and not by what is measured."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as handle:
            found[path.name] = hashlib.file_digest(handle, "sha256").hexdigest()
    return found


def require_correct(hosts: Sequence[Host], content: Content, place: Callable[[Host], Path]) -> None:
    wrong = [host.name for host in hosts if sums_of(place(host)) != content.sums]
    if wrong:
        raise BenchmarkError(f"not what was sent: {', '.join(wrong)}")


@dataclass
class Took:
    """Seconds from the start until each host was done, and what the whole cost in processor time."""

    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: float = 0.0
    sent_by_source_bytes: int = 0

    @property
    def last(self) -> float:
        return max(self.seconds.values())


def follow(hosts: Sequence[Host], done: Callable[[Host], bool], check: Callable[[], None], began: float) -> Took:
    took = Took()
    while len(took.seconds) < len(hosts):
        for host in hosts:
            if host.name not in took.seconds and done(host):
                took.seconds[host.name] = time.monotonic() - began
        check()
        if time.monotonic() - began > LONGEST_SECONDS:
            raise BenchmarkError(f"not all hosts were done after {LONGEST_SECONDS:.0f} s: {sorted(took.seconds)} were")
        time.sleep(0.02)
    return took


def sent_bytes(host: Host) -> int:
    counters = call("nsenter", f"--target={host.keeper.pid}", "--net", "cat", "/proc/net/dev")
    line = next(line for line in counters.splitlines() if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[8])


# -- what is measured --------------------------------------------------------------------------------------------------


def share(sources: Sequence[Host], takers: Sequence[Host], content: Content, kill_half_way: bool = False) -> Took:
    """The project's own program: `sources` offer, `takers` take, verify and publish."""
    description = sources[0].directory / "description.json"
    call(*own_program("share_weights", "describe", sources[0].directory, f"--description={description}"))
    everyone = [*sources, *takers]

    def part(host: Host, command: str, *more: str) -> list[str]:
        peers = [f"--peer={other.name}={other.address}:{PORT}" for other in everyone if other is not host]
        listen = [f"--description={description}", f"--address={host.address}", f"--port={PORT}"]
        return own_program("share_weights", command, host.directory, *listen, *peers, *more)

    states = {host.name: host.directory / "progress.json" for host in everyone}
    running = []
    before = sent_bytes(sources[0])
    try:
        offers = [
            host.start(part(host, "offer", f"--progress-file={states[host.name]}"), "offer.log") for host in sources
        ]
        running += offers
        for host in sources:
            wait_until(states[host.name].exists, f"{host.name}'s offer")
        began = time.monotonic()
        usage = os.times()
        takes = {
            host.name: host.start(
                part(
                    host, "take", "--offer-afterwards", "--progress-interval=1", f"--progress-file={states[host.name]}"
                ),
                "take.log",
            )
            for host in takers
        }
        running += takes.values()

        def check() -> None:
            for host in takers:
                if takes[host.name].poll() not in (None, 0):
                    raise BenchmarkError(f"{host.name}: {host.log('take.log')}")
            if kill_half_way and offers[-1].poll() is None and half_way(states[takers[0].name]):
                offers[-1].send_signal(signal.SIGKILL)
                say(f"  {sources[-1].name} killed after {time.monotonic() - began:.1f} s")

        took = follow(takers, lambda host: snapshot(host).exists(), check, began)
        took.sent_by_source_bytes = sent_bytes(sources[0]) - before
        if kill_half_way and offers[-1].poll() is None:
            raise BenchmarkError("the source was not killed in time: it is a measurement of something else")
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(timeout=30)
    ended = os.times()
    took.cpu_seconds = sum(ended[2:4]) - sum(usage[2:4])
    require_correct(takers, content, snapshot)
    return took


def half_way(state: Path) -> bool:
    with suppress(OSError, ValueError):
        found = json.loads(state.read_text())
        return bool(found.get("bytes_total")) and found["bytes_done"] * 2 >= found["bytes_total"]
    return False


def rsync(sources: Sequence[Host], takers: Sequence[Host], content: Content) -> Took:
    """rsync from the daemon of one host to all the others at once."""
    source = sources[0]
    settings = source.directory / "rsyncd.conf"
    settings.write_text(
        f"use chroot = no\nuid = root\ngid = root\nmax connections = 0\n[weights]\npath = {snapshot(source)}\n"
    )
    daemon = ["rsync", "--daemon", "--no-detach", f"--port={RSYNC_PORT}", f"--config={settings}"]
    running = [source.start(daemon, "rsyncd.log")]
    before = sent_bytes(source)
    try:
        time.sleep(1)
        began = time.monotonic()
        usage = os.times()
        copies = {
            host.name: host.start(
                [
                    "rsync",
                    "--archive",
                    "--whole-file",
                    "--inplace",
                    f"rsync://{source.address}:{RSYNC_PORT}/weights/",
                    "copy",
                ],
                "rsync.log",
            )
            for host in takers
        }
        running += copies.values()

        def check() -> None:
            for host in takers:
                if copies[host.name].poll() not in (None, 0):
                    raise BenchmarkError(f"{host.name}: {host.log('rsync.log')}")

        took = follow(takers, lambda host: copies[host.name].poll() == 0, check, began)
        took.sent_by_source_bytes = sent_bytes(source) - before
    finally:
        for process in running:
            process.terminate()
            process.wait(timeout=30)
    ended = os.times()
    took.cpu_seconds = sum(ended[2:4]) - sum(usage[2:4])
    require_correct(takers, content, lambda host: host.directory / "copy")
    return took


def aria2(sources: Sequence[Host], takers: Sequence[Host], content: Content) -> Took:
    """aria2 with the same pieces and encryption; it finds peers by a tracker only, so there is one."""
    torrent = importlib.import_module("libtorrent")
    source = sources[0]
    entries = [
        torrent.create_file_entry(f"copy/{path.name}", path.stat().st_size)
        for path in sorted(snapshot(source).glob("*.safetensors"))
    ]
    made = torrent.create_torrent(entries, 256 << 10, torrent.create_torrent.v1_only)
    link = source.directory / "copy"
    shutil.copytree(snapshot(source), link)
    torrent.set_piece_hashes(made, str(source.directory))
    made.add_tracker(f"http://{source.address}:{TRACKER_PORT}/announce")
    torrent_file = source.directory / "weights.torrent"
    torrent_file.write_bytes(torrent.bencode(made.generate()))
    options = [
        "--enable-dht=false",
        "--bt-enable-lpd=false",
        "--bt-require-crypto=true",
        "--bt-min-crypto-level=arc4",
        f"--listen-port={PORT}",
        "--file-allocation=none",
        "--bt-max-peers=0",
        "--max-upload-limit=0",
        "--summary-interval=0",
        "--seed-ratio=0.0",
        "--bt-tracker-interval=2",
    ]
    command = ["aria2c", *options, "--dir=.", str(torrent_file)]
    own = [sys.executable, "-m", "benchmarks.fan_out", "--tracker", source.address]
    running = [
        subprocess.Popen(["nsenter", f"--target={source.keeper.pid}", "--net", *own], cwd=REPOSITORY),
        source.start([*command, "--check-integrity=true"], "aria2.log"),
    ]
    before = sent_bytes(source)
    try:
        wait_until(lambda: "Verification finished successfully" in source.log("aria2.log"), "aria2's source", 120)
        began = time.monotonic()
        usage = os.times()
        takes = {host.name: host.start(command, "aria2.log") for host in takers}
        running += takes.values()

        def check() -> None:
            for host in takers:
                if takes[host.name].poll() is not None:
                    raise BenchmarkError(f"{host.name}: {host.log('aria2.log')}")

        took = follow(
            takers, lambda host: "Seeding is about to begin" in host.log("aria2.log") or seeds(host), check, began
        )
        took.sent_by_source_bytes = sent_bytes(source) - before
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(timeout=30)
        shutil.rmtree(link)
    ended = os.times()
    took.cpu_seconds = sum(ended[2:4]) - sum(usage[2:4])
    require_correct(takers, content, lambda host: host.directory / "copy")
    return took


def seeds(host: Host) -> bool:
    return re.search(r"Download complete|SEED\(", host.log("aria2.log")) is not None


class Tracker(http.server.BaseHTTPRequestHandler):
    """As much of a BitTorrent tracker as aria2 needs."""

    peers: dict[str, int]

    def do_GET(self) -> None:
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        self.peers[self.client_address[0]] = int(query["port"][0])
        others = b"".join(
            socket.inet_aton(address) + struct.pack("!H", port)
            for address, port in self.peers.items()
            if address != self.client_address[0]
        )
        body = b"d8:intervali2e5:peers%d:%se" % (len(others), others)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing to say."""


def run_tracker(address: str) -> None:
    Tracker.peers = {}
    http.server.ThreadingHTTPServer((address, TRACKER_PORT), Tracker).serve_forever()


# -- rounds ------------------------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    directory = Path(tempfile.mkdtemp(prefix="gpt-oss-fan-out-"))
    call("mount", "-t", "tmpfs", "-o", "size=90%", "none", str(directory))
    try:
        return measured(arguments, directory)
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=False)
        directory.rmdir()


def measured(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    say(f"making {arguments.size >> 20} MiB in {arguments.files} files")
    content = generate(directory / "content", arguments.size, arguments.files)
    found: dict[str, list[Took]] = {}
    with network(arguments.hosts + 2, arguments.megabits, directory) as hosts:
        first, second, takers = hosts[0], hosts[1], hosts[2:]
        fill(first, content)
        fill(second, content)
        kinds: list[tuple[str, Callable[[], Took]]] = [
            ("one host", lambda: share([first], takers[:1], content)),
            ("fleet", lambda: share([first], takers, content)),
            ("fleet, source killed", lambda: share([first, second], takers, content, kill_half_way=True)),
            ("rsync, one host", lambda: rsync([first], takers[:1], content)),
            ("rsync, fleet", lambda: rsync([first], takers, content)),
        ]
        if shutil.which("aria2c"):
            kinds.append(("aria2, fleet", lambda: aria2([first], takers, content)))
        for number in range(arguments.rounds):
            for name, kind in kinds:
                if arguments.only and name not in arguments.only:
                    continue
                if number and name.startswith("rsync, fleet"):
                    continue  # links full for minutes: once shows it
                took = kind()
                found.setdefault(name, []).append(took)
                sent = took.sent_by_source_bytes / content.size
                used = f"{took.cpu_seconds:.0f} s of processor time"
                say(f"  {name}: {took.last:.1f} s; the source sent it {sent:.2f} times; {used}")
                for host in takers:
                    empty(host)
    return report(arguments, content, found)


def report(arguments: argparse.Namespace, content: Content, found: dict[str, list[Took]]) -> dict[str, Any]:
    medians = {name: statistics.median(took.last for took in runs) for name, runs in found.items()}
    wire = content.size * 8 / (arguments.megabits * 1e6)
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "kernel": platform.release()},
        "hosts": arguments.hosts,
        "megabits_per_second": arguments.megabits,
        "bytes": content.size,
        "seconds_of_the_wire_alone": round(wire, 2),
        "encrypted": True,
        "seconds": {name: round(value, 2) for name, value in medians.items()},
        "times_one_host": round(medians["fleet"] / medians["one host"], 3)
        if {"fleet", "one host"} <= set(medians)
        else None,
        "rounds": {
            name: [
                {
                    "last_seconds": round(took.last, 2),
                    "seconds": {host: round(value, 2) for host, value in sorted(took.seconds.items())},
                    "sent_by_source_bytes": took.sent_by_source_bytes,
                    "cpu_seconds": round(took.cpu_seconds, 1),
                }
                for took in runs
            ]
            for name, runs in found.items()
        },
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def draw(result: dict[str, Any], path: Path) -> None:
    """A bar for each way, and the line that was promised."""
    from matplotlib.figure import Figure

    names = list(result["seconds"])
    figure = Figure(figsize=(8, 0.6 * len(names) + 1.6), layout="constrained")
    axes = figure.subplots()
    colours = ["#76b900" if not name.startswith(("rsync", "aria2")) else "#9a9a9a" for name in names]
    bars = axes.barh(names, [result["seconds"][name] for name in names], color=colours)
    axes.bar_label(bars, fmt="%.1f s", padding=3)
    axes.invert_yaxis()
    if "one host" in result["seconds"]:
        promised = MOST_TIMES_ONE_HOST * result["seconds"]["one host"]
        axes.axvline(promised, color="black", linestyle="--", linewidth=1)
        axes.annotate(f"{MOST_TIMES_ONE_HOST} times one host", (promised, -0.62), fontsize=8, annotation_clip=False)
    size, hosts, rate = result["bytes"] / (1 << 30), result["hosts"], result["megabits_per_second"] / 1000
    axes.set_xlabel(f"seconds until the last of {hosts} hosts has {size:g} GiB, links of {rate:g} Gbit/s")
    axes.margins(x=0.12)
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--hosts", type=int, default=8, help="hosts that take the files")
    parser.add_argument("--megabits", type=int, default=1000, help="Mbit/s of every link, in either direction")
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes to share")
    parser.add_argument("--files", type=int, default=4, help="files they are in")
    parser.add_argument("--rounds", type=int, default=3, help="times everything is measured; the median counts")
    parser.add_argument("--only", action="append", help="measure this alone; may be repeated")
    parser.add_argument("--output", type=Path, default=RESULT, help="the JSON; the picture lies beside it")
    parser.add_argument("--draw", type=Path, metavar="JSON", help="draw the picture of an earlier run and end")
    parser.add_argument("--check", action="store_true", help="end with status 1 where the promise is broken")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tracker", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    if arguments.tracker:
        run_tracker(arguments.tracker)
    if arguments.draw:
        draw(json.loads(arguments.draw.read_text()), arguments.draw.with_suffix(".png"))
        return 0
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter", "rsync") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        say("not measured: " + ("this needs root" if not missing else f"{', '.join(missing)} is not installed"))
        return 2
    if not arguments.inside:  # everything that is made there is gone when this process is, however it ends
        private = ["unshare", "--net", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
        return subprocess.call(
            [*private, sys.executable, "-m", "benchmarks.fan_out", "--inside", *argv], cwd=REPOSITORY
        )
    try:
        result = measure(arguments)
    except BenchmarkError as error:
        say(f"not measured: {error}")
        return 1
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") is not None:
        draw(result, arguments.output.with_suffix(".png"))
    times = result["times_one_host"]
    if times is not None:
        say(f"{arguments.hosts} hosts take {times} times as long as one; promised: at most {MOST_TIMES_ONE_HOST}")
    return 1 if arguments.check and (times or 0) > MOST_TIMES_ONE_HOST else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
