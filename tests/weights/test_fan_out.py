"""The real sharing program: hosts are addresses of this machine, each with a cache of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from .conftest import PROGRAM, SHARD, TOKEN, Fetcher, RunningHub

SHARE = PROGRAM.with_name("share_weights.py")
PORT = 18632
SLOW = 400_000  # bytes a second: the files take some eight seconds


@dataclass
class Swarm:
    """Hosts by their number; number 1 has the files."""

    directory: Path
    hub: RunningHub
    filled: Fetcher
    size: int = 4
    patience: int = 60
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    @staticmethod
    def address(number: int) -> str:
        return f"127.0.71.{number}"

    def cache(self, number: int) -> Fetcher:
        return Fetcher(self.directory / f"host-{number}", self.hub, self.hub.repository.revision)

    @property
    def description(self) -> Path:
        return self.directory / "description.json"

    def progress(self, number: int) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.directory / f"progress-{number}.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def command(self, command: str, number: int, *more: str, peers: tuple[int, ...] = ()) -> list[str]:
        cache = self.cache(number)
        places = [f"--{part}-directory={cache.directory / part}" for part in ("weights", "staging", "encodings")]
        talk = [
            f"--address={self.address(number)}",
            f"--port={PORT}",
            f"--progress-file={self.directory / f'progress-{number}.json'}",
            f"--patience={self.patience}",
            "--linger=120",
            *(f"--peer=host-{n}={self.address(n)}:{PORT}" for n in peers or range(1, self.size + 1) if n != number),
        ]
        return [
            sys.executable,
            str(SHARE),
            command,
            f"--repository={cache.repository}",
            f"--revision={cache.revision}",
            *places,
            "--ignore-patterns=original/* metal/*",
            f"--encodings={json.dumps(self.hub.encodings())}",
            f"--description={self.description}",
            *(talk if command != "describe" else []),
            *more,
        ]

    def start(self, command: str, number: int, *more: str, peers: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command(command, number, *more, peers=peers),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def fill(self, number: int = 1) -> None:
        """As if this host had downloaded it: a copy of one that did, with its times."""
        shutil.copytree(self.filled.directory, self.cache(number).directory)

    def describe(self, number: int = 1) -> None:
        subprocess.run(self.command("describe", number), check=True, timeout=150)

    def offer(self, number: int, *more: str, peers: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        process = self.start("offer", number, *more, peers=peers)
        self.wait(lambda: self.progress(number).get("state") == "offering", f"host {number} to offer", process)
        return process

    def take(self, number: int, *more: str, peers: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        return self.start("take", number, *more, peers=peers)

    def wait(self, true: Any, what: str, process: subprocess.Popen[str] | None = None) -> None:
        until = time.monotonic() + 150
        while not true():
            assert process is None or process.poll() is None, process.communicate()
            assert time.monotonic() < until, f"waited in vain for {what}"
            time.sleep(0.05)

    def arrived(self, number: int) -> int:
        return int(self.progress(number).get("bytes_transferred", 0))

    def ends_well(self, *processes: subprocess.Popen[str]) -> list[dict[str, Any]]:
        results = []
        for process in processes:
            output, errors = process.communicate(timeout=150)
            assert process.returncode == 0, errors
            results.append(json.loads(output))
        return results

    def ends_when_told(self, *processes: subprocess.Popen[str]) -> list[dict[str, Any]]:
        for process in processes:
            process.terminate()
        return self.ends_well(*processes)

    def done(self, **takers: subprocess.Popen[str]) -> list[dict[str, Any]]:
        """Wait until hosts that go on offering have it all, then end them."""
        for name, process in takers.items():
            number = int(name[-1])
            self.wait(lambda n=number: self.progress(n).get("state") == "done", f"{name} to have it", process)
        return self.ends_when_told(*takers.values())

    def assert_complete(self, *numbers: int) -> None:
        for number in numbers:
            self.cache(number).assert_complete()
            encodings = self.cache(number).directory / "encodings"
            assert {p.name for p in encodings.iterdir()} == {e["file"] for e in self.hub.encodings()}

    def assert_silent(self) -> None:
        for number in range(1, self.size + 1):
            with socket.socket() as probe:
                assert probe.connect_ex((self.address(number), PORT)) != 0, f"host {number} still listens"


@pytest.fixture(scope="module")
def filled(_servers: RunningHub, tmp_path_factory: pytest.TempPathFactory) -> Fetcher:
    """A cache that was filled by a download."""
    _servers.mend()
    cache = Fetcher(tmp_path_factory.mktemp("filled") / "cache", _servers, _servers.repository.revision)
    cache.environment["IGNORE_PATTERNS"] = "original/* metal/*"
    cache.fetch(encodings=True)
    return cache


@pytest.fixture
def swarm(tmp_path: Path, hub: RunningHub, filled: Fetcher) -> Iterator[Swarm]:
    made = Swarm(tmp_path, hub, filled)
    made.fill()
    made.describe()
    yield made
    for process in made.running:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def test_all_take_it_at_once_and_nobody_listens_afterwards(swarm: Swarm) -> None:
    source = swarm.offer(1, f"--rate-limit={SLOW}")  # whoever takes is faster with the others' help
    results = swarm.done(**{f"host{n}": swarm.take(n, "--offer-afterwards") for n in (2, 3, 4)})
    swarm.assert_complete(2, 3, 4)
    assert all(r["changed"] and r["transferred_bytes"] >= swarm.hub.size for r in results)
    assert swarm.hub.requests == []
    assert swarm.ends_when_told(source)[0]["sent_bytes"] < 3 * swarm.hub.size, "the takers gave nothing to each other"
    swarm.assert_silent()


def test_it_goes_on_when_a_source_is_lost(swarm: Swarm) -> None:
    swarm.fill(4)
    swarm.hub.mend()
    lost = swarm.offer(4)
    swarm.offer(1)
    takers = {f"host{n}": swarm.take(n, f"--rate-limit={SLOW}", "--offer-afterwards") for n in (2, 3)}
    swarm.wait(lambda: swarm.arrived(2) > swarm.hub.size // 3, "a third", takers["host2"])
    assert not swarm.cache(2).snapshot.exists()
    lost.kill()
    swarm.done(**takers)
    swarm.assert_complete(2, 3)
    assert swarm.hub.requests == []


def test_what_arrived_is_kept_when_the_only_source_is_lost_and_taken_from_there_later(swarm: Swarm) -> None:
    source = swarm.offer(1)
    swarm.patience = 6
    taker = swarm.take(2, f"--rate-limit={SLOW}")
    swarm.wait(lambda: swarm.arrived(2) > swarm.hub.size // 3, "a third", taker)
    source.kill()
    _, errors = taker.communicate(timeout=150)
    assert taker.returncode == 1
    assert "no host gave a piece for 6 s" in errors
    assert "are here and kept" in errors
    swarm.cache(2).assert_nothing_visible()
    swarm.offer(1)
    swarm.patience = 60
    again = swarm.take(2)
    result = swarm.ends_well(again)[0]
    assert result["found_bytes"] > swarm.hub.size // 5
    assert result["found_bytes"] + result["transferred_bytes"] <= swarm.hub.size * 1.2
    swarm.assert_complete(2)


def test_a_killed_taker_goes_on(swarm: Swarm) -> None:
    swarm.offer(1)
    taker = swarm.take(2, f"--rate-limit={SLOW}")
    swarm.wait(lambda: swarm.arrived(2) > swarm.hub.size // 3, "a third", taker)
    taker.send_signal(signal.SIGKILL)
    taker.wait()
    swarm.cache(2).assert_nothing_visible()
    result = swarm.ends_well(swarm.take(2))[0]
    assert result["found_bytes"] > swarm.hub.size // 5
    swarm.assert_complete(2)


def test_a_late_host_takes_it_from_one_that_took_it(swarm: Swarm) -> None:
    source = swarm.offer(1)
    swarm.ends_well(swarm.take(2))
    swarm.ends_when_told(source)
    swarm.offer(2)
    swarm.ends_well(swarm.take(3))
    swarm.assert_complete(3)
    assert swarm.hub.requests == []


def test_bytes_that_changed_on_a_source_are_never_published(swarm: Swarm) -> None:
    """Changed before the pieces were described: only the hub's checksum can tell."""
    shard = swarm.cache(1).snapshot / SHARD
    status = shard.stat()
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(content)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    swarm.describe()
    swarm.offer(1)
    taker = swarm.take(2)
    _, errors = taker.communicate(timeout=150)
    assert taker.returncode == 1
    assert f"{SHARD} as the fleet has it does not agree with the checksum" in errors
    swarm.cache(2).assert_nothing_visible()


def test_pieces_of_a_corrupt_source_are_not_taken(swarm: Swarm) -> None:
    """Changed after the pieces were described: the source notices, and gives what is right."""
    swarm.fill(4)
    shard = swarm.cache(4).snapshot / SHARD
    status = shard.stat()
    content = bytes(len(shard.read_bytes()))
    shard.chmod(0o644)
    shard.write_bytes(content)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    swarm.start("offer", 4)
    swarm.offer(1)
    swarm.ends_well(swarm.take(2))
    swarm.assert_complete(2)


def test_files_of_a_cut_download_are_not_taken_again(swarm: Swarm) -> None:
    """Whole files and the beginning of one, as a cut download from the hub leaves them."""
    partial = swarm.cache(2).work / "partial"
    whole = 0
    for file in swarm.hub.files:
        if file.path == SHARD:
            continue
        target = partial / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content)
        whole += len(file.content)
    shard = swarm.hub.repository.by_path[SHARD].content
    (partial / SHARD).write_bytes(shard[: len(shard) // 2])
    source = swarm.offer(1)
    result = swarm.ends_well(swarm.take(2))[0]
    swarm.assert_complete(2)
    assert result["found_bytes"] >= whole
    encodings = sum(p.stat().st_size for p in (swarm.cache(1).directory / "encodings").iterdir())
    assert swarm.ends_when_told(source)[0]["sent_bytes"] <= len(shard) * 0.6 + encodings + 300_000


def test_a_full_disk_is_told_and_nothing_is_visible(swarm: Swarm, small_disk: Path) -> None:
    (small_disk / "full").write_bytes(bytes(4_500_000))
    (swarm.directory / "host-2").symlink_to(small_disk)
    swarm.offer(1)
    taker = swarm.take(2)
    _, errors = taker.communicate(timeout=150)
    assert taker.returncode == 1
    assert "is too small" in errors
    assert "are missing" in errors
    swarm.cache(2).assert_nothing_visible()


def test_a_disk_that_fills_up_meanwhile_is_told(swarm: Swarm, small_disk: Path) -> None:
    (swarm.directory / "host-2").symlink_to(small_disk)
    swarm.offer(1)
    taker = swarm.take(2, f"--rate-limit={SLOW}")
    swarm.wait(lambda: swarm.arrived(2) > 200_000, "the beginning", taker)
    with (small_disk / "full").open("wb") as other, contextlib.suppress(OSError):
        while True:
            other.write(bytes(65536))
            other.flush()
    _, errors = taker.communicate(timeout=150)
    assert taker.returncode == 1
    assert "No space left" in errors
    swarm.cache(2).assert_nothing_visible()


def test_a_stranger_is_not_answered(swarm: Swarm) -> None:
    swarm.offer(1, peers=(1, 2))
    swarm.patience = 5
    stranger = swarm.take(3, peers=(1,))
    _, errors = stranger.communicate(timeout=150)
    assert stranger.returncode == 1
    assert "no connection to any of: host-1" in errors
    swarm.patience = 60
    swarm.ends_well(swarm.take(2, peers=(1, 2)))
    swarm.assert_complete(2)


def test_nothing_readable_goes_over_the_line(swarm: Swarm) -> None:
    """Neither the handshake nor the content: a plain BitTorrent greeting gets no answer."""
    swarm.offer(1, peers=(1, 2))
    described = json.loads(swarm.description.read_text())
    assert b"announce" not in json.dumps(described).encode()
    with socket.socket() as plain:
        plain.bind((swarm.address(2), 0))
        plain.settimeout(10)
        plain.connect((swarm.address(1), PORT))
        plain.sendall(b"\x13BitTorrent protocol" + bytes(48))
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(1) == b""


def test_one_address_is_listened_on_and_no_other(swarm: Swarm) -> None:
    source = swarm.offer(1)
    opened = [str(fd.readlink()) for fd in Path(f"/proc/{source.pid}/fd").iterdir()]
    sockets = {name for name in opened if name.startswith("socket")}
    inodes = {name[8:-1] for name in sockets}
    listening = [
        line.split()[1]
        for table in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/{source.pid}/net/{table}").read_text().splitlines()[1:]
        if line.split()[9] in inodes and line.split()[3] in ("0A", "07")
    ]
    own = bytes(reversed(socket.inet_aton(swarm.address(1)))).hex().upper() + f":{PORT:04X}"
    assert set(listening) == {own}


def test_a_token_in_the_environment_is_not_kept(swarm: Swarm) -> None:
    swarm.offer(1)
    taker = subprocess.Popen(
        swarm.command("take", 2),
        env={**os.environ, "HF_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = taker.communicate(timeout=150)
    assert taker.returncode == 0, errors
    assert TOKEN not in output + errors
    for path in (swarm.directory / "host-2").rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--address=203.0.113.7"], "Give an address of this host on the network that the fleet shares"),
        (["--peer=nobody"], "is not of the form name=address:port"),
        (["--description=/nonexistent"], "the description /nonexistent cannot be read"),
    ],
)
def test_wrong_arguments_are_told(swarm: Swarm, more: list[str], words: str) -> None:
    taker = swarm.take(2, *more)
    _, errors = taker.communicate(timeout=150)
    assert taker.returncode in (1, 3)
    assert words in errors
    assert "Traceback" not in errors
    swarm.cache(2).assert_nothing_visible()


def test_a_port_that_is_taken_is_told(swarm: Swarm) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((swarm.address(2), PORT))
        other.listen(1)
        taker = swarm.take(2)
        _, errors = taker.communicate(timeout=150)
    assert taker.returncode == 1
    assert f"{swarm.address(2)} port {PORT} cannot be listened on: Address already in use" in errors
