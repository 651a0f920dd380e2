#!/usr/bin/env python3
"""Give verified weights to the other hosts of a fleet, or take them from those: one download for any number of hosts.

    share_weights.py describe   write the metainfo of a verified snapshot: names, sizes and a checksum for each piece
    share_weights.py offer      let the fleet take the snapshot, until nobody is left who lacks a piece
    share_weights.py take       take it from the fleet, verify and publish it as fetch_weights.py does; then offer it

How it works. Hosts exchange pieces by BitTorrent (libtorrent), each with every other, so that the one that has the
files sends them about once. Whom a host talks to is given on the command line: there is no tracker, no DHT, no search
on the network and no exchange of addresses; connections from anywhere else are refused. Connections are encrypted.
The program listens on the one address that it is given, while it runs, and ends by itself: when no other host lacks
a piece for --linger seconds, or when none had one to give for --patience seconds.

Pieces come into a directory of their own below the staging directory. A file gets to where downloads lie when it is
whole, and is then compared with the checksum that the hub gave for it, like any download. What a host sends on before
that has been compared with the metainfo, piece by piece.

Needs Python 3.8 and libtorrent 2.1; fetch_weights.py lies beside it. No token is needed, and none is read.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import errno
import fcntl
import hashlib
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__:
    from . import fetch_weights as weights
else:
    import fetch_weights as weights  # type: ignore[import-not-found, no-redef]

FORMAT_VERSION = 1
SMALLEST_PIECE, LARGEST_PIECE = 256 << 10, 16 << 20
MOST_PIECES = 8192
FILES, ENCODINGS = "files", "encodings"  # the two directories of what is shared
LOOK_SECONDS = 0.25
CONNECT_SECONDS = 2.0


@dataclass(frozen=True)
class Peer:
    """Another host of the fleet: its name for people, its address for machines."""

    name: str
    address: str
    port: int


@dataclass(frozen=True)
class Sharing:
    """How a host takes part: where it listens, whom it talks to, and when it gives up."""

    address: str
    port: int
    peers: tuple[Peer, ...]
    rate_limit: int = 0  # bytes a second in each direction; 0 is no limit
    linger: float = 120.0
    patience: float = 120.0


# -- what is shared --


def piece_length(total: int) -> int:
    """Bytes in a piece: small enough to be passed on early, large enough that the metainfo stays small."""
    length = SMALLEST_PIECE
    while length < LARGEST_PIECE and total / length > MOST_PIECES:
        length *= 2
    return length


def description(request: weights.Request) -> dict[str, Any]:
    """The metainfo of a verified snapshot with its encodings, and the manifest to compare files with.

    Every file begins with a piece of its own, so that a file that is here already need not be asked for.
    """
    torrent = engine()
    manifest = weights.manifest_of(request)
    places = list(shared_files(request.layout, manifest))
    entries = [torrent.create_file_entry(name, path.stat().st_size) for name, path in places]
    length = piece_length(sum(path.stat().st_size for _, path in places))
    made = torrent.create_torrent(
        entries, length, torrent.create_torrent.v1_only | torrent.create_torrent.canonical_files
    )
    made.set_priv(True)
    made.set_creator("")
    made.set_creation_date(0)
    by_name = dict(places)
    jobs = []
    first = 0
    layout = made.files()
    for index in range(layout.num_files()):
        if layout.file_flags(index) & torrent.file_flags_t.flag_pad_file:
            continue
        path = by_name[layout.file_path(index).replace(os.sep, "/")]
        first = layout.file_offset(index) // length
        pieces = -(-layout.file_size(index) // length)
        jobs += [(first + number, path, number * length, made.piece_size(first + number)) for number in range(pieces)]
    with ThreadPoolExecutor(max_workers=max(2, min(16, os.cpu_count() or 2))) as pool:
        for index, digest in pool.map(piece_digest, jobs):
            made.set_hash(index, digest)
    content = torrent.bencode(made.generate())
    return {
        "format_version": FORMAT_VERSION,
        "metainfo": base64.b64encode(content).decode("ascii"),
        "manifest": manifest,
    }


def shared_files(layout: weights.Layout, manifest: dict[str, Any]) -> Iterator[tuple[str, Path]]:
    """Everything that is shared, under its name in the metainfo, and where a host that has it keeps it."""
    root = layout.revision
    for entry in sorted(manifest["files"], key=lambda e: str(e["path"])):
        yield f"{root}/{FILES}/{entry['path']}", layout.snapshot / entry["path"]
    for entry in sorted(manifest["encodings"], key=lambda e: str(e["file"])):
        yield f"{root}/{ENCODINGS}/{entry['file']}", layout.encodings / entry["file"]


def piece_digest(job: tuple[int, Path, int, int]) -> tuple[int, bytes]:
    """The checksum of one piece; the last one of a file is filled up with zeros."""
    index, path, offset, size = job
    with path.open("rb", buffering=0) as handle:
        content = os.pread(handle.fileno(), size, offset)
    return index, hashlib.sha1(content + bytes(size - len(content))).digest()  # noqa: S324 - BitTorrent's own


def read_description(path: Path) -> dict[str, Any]:
    """A description that another host has made."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise weights.FetchError(f"the description {path} cannot be read: {error}", "input") from None
    if not isinstance(found, dict) or found.get("format_version") != FORMAT_VERSION:
        raise weights.FetchError(f"{path} is not a description of format {FORMAT_VERSION}", "input")
    return found


# -- the engine --


def engine() -> Any:
    """libtorrent, or how to get it."""
    try:
        return importlib.import_module("libtorrent")
    except ImportError as error:
        raise weights.FetchError(
            f"libtorrent is not installed for {sys.executable} ({error}); it is needed to share weights in a fleet",
            "host",
        ) from None


def settings(torrent: Any, sharing: Sharing) -> dict[str, Any]:
    """An engine that talks to the hosts it is given, over TCP, encrypted, and looks for nobody else."""
    here = f"[{sharing.address}]" if ":" in sharing.address else sharing.address
    return {
        "listen_interfaces": f"{here}:{sharing.port}",
        "outgoing_interfaces": sharing.address,
        "enable_dht": False,
        "enable_lsd": False,
        "enable_upnp": False,
        "enable_natpmp": False,
        "enable_incoming_utp": False,
        "enable_outgoing_utp": False,
        "listen_system_port_fallback": False,
        "max_retry_port_bind": 0,
        "in_enc_policy": 0,  # forced
        "out_enc_policy": 0,
        "allowed_enc_level": 2,  # RC4 for the content too, not for the handshake alone
        "prefer_rc4": True,
        "upload_rate_limit": sharing.rate_limit,
        "download_rate_limit": sharing.rate_limit,
        "rate_limit_ip_overhead": False,
        "ignore_limits_on_local_network": False,
        "unchoke_slots_limit": -1,
        "connections_limit": 1000,
        "listen_queue_size": 200,
        "allow_multiple_connections_per_ip": False,
        "peer_turnover": 0,
        "min_reconnect_time": 1,
        "max_failcount": 1000,
        "peer_connect_timeout": 5,
        "connection_speed": 100,
        "handshake_client_version": "",
        "user_agent": "",
        # Few requests under way (1 MiB a connection): with long queues every host has asked the first one for most
        # pieces before others can offer them, and the first one sends each piece twice.
        "max_out_request_queue": 64,
        "max_allowed_in_request_queue": 64,
        "send_buffer_watermark": 4 << 20,
        "send_buffer_low_watermark": 1 << 20,
        "max_queued_disk_bytes": 64 << 20,
        "aio_threads": 8,
        "hashing_threads": 4,
        "alert_mask": int(torrent.alert_category.error | torrent.alert_category.status),
    }


class Swarm:
    """The engine at work on one snapshot: its peers, its pieces and what went wrong."""

    def __init__(self, sharing: Sharing, layout: weights.Layout, told: dict[str, Any]) -> None:
        self.torrent = engine()
        self.sharing = sharing
        self.layout = layout
        self.told = told
        content = base64.b64decode(told["metainfo"])
        try:
            self.info = self.torrent.torrent_info(self.torrent.bdecode(content))
        except RuntimeError as error:
            raise weights.FetchError(f"the metainfo is not readable: {error}", "input") from None
        self.session: Any = None
        self.handle: Any = None
        self.refused = 0
        self._connect_at = 0.0

    # -- files, by their number in the metainfo --

    def names(self) -> dict[int, str]:
        """The files that count: number and name, without the padding between them."""
        files = self.info.layout()
        pad = self.torrent.file_flags_t.flag_pad_file
        prefix = len(self.layout.revision) + 1
        return {
            index: weights.safe_path(files.file_path(index)[prefix:])
            for index in range(files.num_files())
            if not files.file_flags(index) & pad
        }

    def own_place(self, name: str) -> Path:
        """Where this host keeps a file that it has verified."""
        kind, _, path = name.partition("/")
        return (self.layout.snapshot if kind == FILES else self.layout.encodings) / path

    def coming_place(self, name: str) -> Path:
        """Where a file lies while its pieces come in."""
        return self.layout.shared / self.layout.revision / name

    # -- life --

    def start(self, unwanted: Sequence[str] = (), *, complete: bool) -> None:
        """Listen, and give or take pieces; `unwanted` files are not asked for."""
        require_address(self.sharing)
        params = self.torrent.add_torrent_params()
        params.ti = self.info
        flags = self.torrent.torrent_flags
        params.flags = flags.apply_ip_filter | flags.disable_dht | flags.disable_lsd | flags.disable_pex
        params.storage_mode = self.torrent.storage_mode_t.storage_mode_sparse
        params.save_path = str(self.layout.shared)
        if complete:
            params.flags |= flags.seed_mode
            params.renamed_files = {index: str(self.own_place(name)) for index, name in self.names().items()}
        else:
            self.layout.shared.mkdir(parents=True, exist_ok=True)
            skipped = set(unwanted)
            wanted = {index for index, name in self.names().items() if name not in skipped}
            params.file_priorities = [4 if i in wanted else 0 for i in range(self.info.layout().num_files())]
        self.session = self.torrent.session(settings(self.torrent, self.sharing), 0)
        self.session.set_ip_filter(self._only_peers())
        alike = self.torrent.ip_filter()  # by default, hosts of the same network are in a class without limits
        alike.add_rule("0.0.0.0", "255.255.255.255", 0)  # noqa: S104 - nothing listens here
        alike.add_rule("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 0)
        self.session.set_peer_class_filter(alike)
        self.handle = self.session.add_torrent(params)
        if self.sharing.rate_limit:
            self.handle.set_upload_limit(self.sharing.rate_limit)
            self.handle.set_download_limit(self.sharing.rate_limit)
        self._wait_for_port()

    def _only_peers(self) -> Any:
        allowed = self.torrent.ip_filter()
        allowed.add_rule("0.0.0.0", "255.255.255.255", 1)  # noqa: S104 - everybody is refused, to begin with
        allowed.add_rule("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", 1)
        for peer in self.sharing.peers:
            allowed.add_rule(peer.address, peer.address, 0)
        return allowed

    def _wait_for_port(self) -> None:
        until = time.monotonic() + 10
        while not self.session.is_listening():
            self.look()
            if time.monotonic() > until:
                raise weights.FetchError(port_problem(self.sharing, "it did not open within 10 seconds"), "port")
            time.sleep(0.05)

    def look(self) -> Any:
        """The state of things; fails when the engine met something that it cannot get over."""
        kinds = self.torrent
        for alert in self.session.pop_alerts():
            if isinstance(alert, kinds.file_error_alert):
                name = alert.filename() if callable(alert.filename) else alert.filename
                raise OSError(alert.error.value(), alert.error.message(), str(name))
            if isinstance(alert, kinds.torrent_error_alert):
                raise weights.FetchError(f"the engine met an error: {alert.message()}", "host")
            if isinstance(alert, kinds.listen_failed_alert):
                raise weights.FetchError(port_problem(self.sharing, alert.error.message()), "port")
            if isinstance(alert, kinds.hash_failed_alert):
                self.refused += 1
                print(
                    f"a piece came damaged, number {alert.piece_index}; asking for it again",
                    file=sys.stderr,
                    flush=True,
                )
        now = time.monotonic()
        if now >= self._connect_at:
            self._connect_at = now + CONNECT_SECONDS
            self._connect()
        return self.handle.status()

    def _connect(self) -> None:
        there = {peer.ip[0] for peer in self.handle.get_peer_info()}
        for peer in self.sharing.peers:
            if peer.address not in there:
                self.handle.connect_peer((peer.address, peer.port))

    def others(self) -> dict[str, float]:
        """What every connected host has of the whole, from 0 to 1, by its name."""
        names = {peer.address: peer.name for peer in self.sharing.peers}
        ready = self.torrent.peer_info.handshake | self.torrent.peer_info.connecting
        return {
            names.get(info.ip[0], info.ip[0]): float(info.progress)
            for info in self.handle.get_peer_info()
            if not info.flags & ready
        }

    def stop(self) -> None:
        """Close every connection and the port; what has arrived is on the disk."""
        if self.session is None:
            return
        self.session.pause()
        self.session.remove_torrent(self.handle)
        until = time.monotonic() + 10
        while self.handle.is_valid() and time.monotonic() < until:
            self.session.pop_alerts()
            time.sleep(0.05)
        self.session = None  # the engine ends here, and with it its port
        self.handle = None


def require_address(sharing: Sharing) -> None:
    """Fail, in words, when the port is taken or the address is not this host's."""
    family = socket.AF_INET6 if ":" in sharing.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((sharing.address, sharing.port))
            probe.listen(1)
        except OSError as error:
            raise weights.FetchError(port_problem(sharing, error.strerror or str(error), error.errno), "port") from None


def port_problem(sharing: Sharing, reason: str, number: int | None = None) -> str:
    where = f"{sharing.address} port {sharing.port} cannot be listened on: {reason}"
    if number == errno.EADDRINUSE:
        return where + ". Another program has this port (ss -ltnp); choose another one with --port"
    if number == errno.EADDRNOTAVAIL:
        return where + ". Give an address of this host on the network that the fleet shares (--address)"
    return where


# -- taking --


class FleetSource(weights.ManifestSource):
    """The other hosts of the fleet."""

    parallel = True

    def __init__(self, request: weights.Request, sharing: Sharing, told: dict[str, Any]) -> None:
        super().__init__(request, told["manifest"], "the fleet's manifest")
        self.sharing = sharing
        self.swarm = Swarm(sharing, request.layout, told)
        self.name = "the fleet"
        self.layout = request.layout
        self.complete = False
        self.fleet: dict[str, float] = {}

    def held(self, wanted: weights.WantedFile) -> int:
        """What has come in of a file, by the room that it takes."""
        with contextlib.suppress(OSError):
            return min(wanted.size, self._coming(wanted.path).stat().st_blocks * 512)
        return 0

    def _coming(self, path: str) -> Path:
        return self.swarm.coming_place(f"{FILES}/{path}")

    def collect(self, files: Sequence[weights.WantedFile], progress: weights.Progress) -> None:
        """Take every file that is not here, and hand it over to be verified."""
        here = self._make_use_of_downloads(files)
        progress.state = "taking"
        encodings = {e.file for e in weights.encodings_missing(self.layout, self.request.encodings)}
        unwanted = [f"{FILES}/{path}" for path in here]
        unwanted += [
            n for n in self.swarm.names().values() if n.startswith(ENCODINGS) and n.split("/")[-1] not in encodings
        ]
        self.swarm.start(unwanted, complete=False)
        self._follow(progress, sum(f.size for f in files if f.path in here))
        for wanted in files:
            if wanted.path not in here:
                self._hand_over(wanted)
        # All are found here, and counted, one by one, when they are verified; those that came now were not.
        came = min(progress.transferred, sum(f.size for f in files if f.path not in here))
        progress.take_back(progress.done, progress.found + came)
        self.complete = True

    def _make_use_of_downloads(self, files: Sequence[weights.WantedFile]) -> set[str]:
        """Files that are here whole, to be verified as they are; begun ones go to where pieces come in."""
        whole = set()
        for wanted in files:
            partial, final = self.layout.partial / wanted.path, self.layout.complete / wanted.path
            if final.is_file() and not final.is_symlink() and final.stat().st_size == wanted.size:
                whole.add(wanted.path)
            elif partial.is_file() and not partial.is_symlink():
                if partial.stat().st_size == wanted.size and self._as_published(partial, wanted):
                    whole.add(wanted.path)
                elif partial.stat().st_size < wanted.size and not self._coming(wanted.path).exists():
                    self._coming(wanted.path).parent.mkdir(parents=True, exist_ok=True)
                    partial.replace(self._coming(wanted.path))
        return whole

    @staticmethod
    def _as_published(partial: Path, wanted: weights.WantedFile) -> bool:
        """Whether a whole file is right. A wrong one is removed, never written to: a server may have it open."""
        if weights.digest_of(partial, wanted)[1] == wanted.sha256:
            return True
        partial.unlink()
        return False

    def _follow(self, progress: weights.Progress, before: int) -> None:
        """Wait until everything that is wanted has come."""
        progress.already(before)
        counted = 0
        at_first: int | None = None
        last: Any = None
        moved = time.monotonic()
        while True:
            status = self.swarm.look()
            if status.state in (status.states.downloading, status.states.finished, status.states.seeding):
                done = int(status.total_wanted_done)
                if at_first is None:
                    at_first = done
                    progress.already(done)
                    counted = done
                if done > counted:
                    progress.add(done - counted)
                    counted = done
            self.fleet = self.swarm.others()
            progress.fleet = dict(self.fleet)
            if status.is_finished and at_first is not None:
                return
            heard = (status.total_payload_download, status.total_wanted_done, int(status.progress_ppm))
            now = time.monotonic()
            if heard != last:
                last, moved = heard, now
            elif now - moved >= self.sharing.patience:
                raise weights.FetchError(self._nobody(status), "unreachable")
            time.sleep(LOOK_SECONDS)

    def _nobody(self, status: Any) -> str:
        have = ", ".join(f"{name} has {100 * part:.0f} %" for name, part in sorted(self.fleet.items()))
        asked = ", ".join(f"{peer.name} ({peer.address}:{peer.port})" for peer in self.sharing.peers)
        seen = f"connected: {have}" if have else f"no connection to any of: {asked}"
        here, total = weights.human(status.total_wanted_done), weights.human(status.total_wanted)
        return (
            f"no host gave a piece for {weights.duration(self.sharing.patience)}; {here} of {total} are here and kept."
            f" {seen}. See that a host with all files runs and that the port is open between the hosts, then run again"
        )

    def _hand_over(self, wanted: weights.WantedFile) -> None:
        """Give a whole file its place among the downloads; the engine goes on giving it to others meanwhile."""
        target = self.layout.partial / wanted.path
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
        if wanted.size == 0 and not self._coming(wanted.path).exists():
            target.touch()
            return
        os.link(str(self._coming(wanted.path)), str(target))

    def read(self, wanted: weights.WantedFile, offset: int) -> Iterator[bytes]:
        raise weights.FetchError(
            f"{wanted.path} as the fleet has it does not agree with the checksum {wanted.sha256} that the hub gave: a"
            " host has changed it since it was verified. It was not published; run again to take it anew",
            "checksum",
        )

    def read_encoding(self, encoding: weights.Encoding) -> Iterator[bytes]:
        with self.swarm.coming_place(f"{ENCODINGS}/{encoding.file}").open("rb") as handle:
            yield from iter(lambda: handle.read(weights.CHUNK), b"")

    def close(self) -> None:
        """End the engine. Files that came whole stay for the next run, whatever source it has; so do pieces."""
        self.swarm.stop()
        if self.complete:
            shutil.rmtree(str(self.layout.shared), ignore_errors=True)


def take(request: weights.Request, sharing: Sharing, told: dict[str, Any], lock: int | None) -> dict[str, Any]:
    """Bring the snapshot from the fleet, verified."""
    return weights.fetch(request, lock, lambda asked: FleetSource(asked, sharing, told))


# -- offering --


def offer(
    request: weights.Request, sharing: Sharing, told: dict[str, Any], progress_file: Path | None
) -> dict[str, Any]:
    """Give the snapshot to whoever lacks a piece; ends when nobody does for a while."""
    status = weights.check(request)
    if not status["verified"]:
        raise weights.FetchError(
            "what is here is not verified and is not offered: " + "; ".join(status["problems"]), "source"
        )
    swarm = Swarm(sharing, request.layout, told)
    swarm.start(complete=True)
    stopped = threading.Event()

    def on_signal(number: int, _frame: Any) -> None:
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    sent = 0
    try:
        last = time.monotonic()
        while not stopped.is_set() and time.monotonic() - last < sharing.linger:
            sent = int(swarm.look().total_payload_upload)
            others = swarm.others()
            if any(part < 1.0 for part in others.values()):
                last = time.monotonic()
            write_state(progress_file, {"state": "offering", "sent_bytes": sent, "fleet": others})
            stopped.wait(1.0)
    finally:
        swarm.stop()
    write_state(progress_file, {"state": "ended", "sent_bytes": sent, "fleet": {}})
    return {"sent_bytes": sent}


def write_state(path: Path | None, state: dict[str, Any]) -> None:
    """Keep a state for those who look; replaced whole."""
    if path is None:
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps({**state, "pid": os.getpid(), "time": time.time()}), encoding="utf-8")
        temporary.replace(path)


# -- command line --


def parse_peer(text: str) -> Peer:
    """name=address:port, the address of IPv6 in brackets."""
    name, _, where = text.rpartition("=")
    address, _, port = where.rpartition(":")
    if not name or not address or not port.isdigit():
        raise weights.FetchError(f"peer: {text!r} is not of the form name=address:port", "input")
    return Peer(name, address.strip("[]"), int(port))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line: that of fetch_weights.py where both need the same, and what is shared with whom."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("command", choices=("describe", "offer", "take"))
    parser.add_argument("--repository", required=True, help="owner/name on the hub")
    parser.add_argument("--revision", required=True, help="the commit: 40 hexadecimal digits")
    for place in ("weights", "staging", "encodings"):
        parser.add_argument(f"--{place}-directory", required=True, help="as for fetch_weights.py")
    parser.add_argument("--ignore-patterns", default="", help="files to leave out; patterns separated by spaces")
    parser.add_argument("--encodings", default="[]", help="JSON list of {file, url, sha256}")
    parser.add_argument("--keep-free-bytes", type=int, default=0, help="room to leave on the disk")
    parser.add_argument("--description", required=True, help="the file with metainfo and manifest; describe writes it")
    parser.add_argument("--address", default="", help="this host's address on the network that the fleet shares")
    parser.add_argument("--port", type=int, default=0, help="TCP port to listen on while this runs")
    parser.add_argument("--peer", action="append", default=[], help="another host, name=address:port; once for each")
    parser.add_argument("--rate-limit", type=int, default=0, help="bytes a second in each direction; 0 is no limit")
    parser.add_argument("--linger", type=float, default=120.0, help="seconds to go on when nobody lacks a piece")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds without a piece after which to give up")
    parser.add_argument("--progress-file", help="JSON file to keep the progress in")
    parser.add_argument("--progress-interval", type=float, default=10.0, help="seconds between lines of progress")
    parser.add_argument("--lock-descriptor", type=int, help="the fetch lock's open descriptor, locked by the parent")
    parser.add_argument("--share-descriptor", type=int, help="likewise, the lock of those who share")
    parser.add_argument("--offer-afterwards", action="store_true", help="take: go on as offer does")
    options = parser.parse_args(argv)
    if options.command != "describe" and (not options.address or not 0 < options.port < 65536):
        parser.error("--address and --port say where to listen; a port is a number from 1 to 65535")
    return options


def make_sharing(options: argparse.Namespace) -> Sharing:
    return Sharing(
        address=options.address,
        port=options.port,
        peers=tuple(parse_peer(text) for text in options.peer),
        rate_limit=options.rate_limit,
        linger=options.linger,
        patience=options.patience,
    )


def make_request(options: argparse.Namespace) -> weights.Request:
    values = dict(vars(options))
    for place in ("weights_directory", "staging_directory", "encodings_directory"):
        values[place] = str(Path(values[place]).absolute())
    values["ignore_patterns"] = options.ignore_patterns.split()
    try:
        values["encodings"] = json.loads(options.encodings)
    except ValueError as error:
        raise weights.FetchError(f"encodings: not JSON: {error}", "input") from None
    return weights.make_request(values)


def run(options: argparse.Namespace) -> dict[str, Any]:
    request = make_request(options)
    path = Path(options.description)
    if options.command == "describe":
        weights.write_atomically(path, json.dumps(description(request)))
        return {}
    if options.share_descriptor is not None:
        fcntl.flock(options.share_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    sharing, told = make_sharing(options), read_description(path)
    if options.command == "offer":
        return offer(request, sharing, told, request.progress_file)
    found = take(request, sharing, told, options.lock_descriptor)
    if options.offer_afterwards:
        try:
            found.update(offer(request, sharing, told, None))
        except (weights.FetchError, OSError) as error:  # what was taken is here and verified
            print(f"share_weights: it is here, but not offered to others: {error}", file=sys.stderr, flush=True)
    return found


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    os.environ.pop("HF_TOKEN", None)
    os.umask(0o022)
    try:
        found = run(options)
    except weights.FetchError as error:
        print(f"share_weights: {error}", file=sys.stderr, flush=True)
        write_failure(options, str(error))
        return weights.HOPELESS if error.kind in weights.PERMANENT else weights.FAILED
    except OSError as error:
        message = weights.os_error(error)
        print(f"share_weights: {message}", file=sys.stderr, flush=True)
        write_failure(options, message)
        return weights.FAILED
    print(json.dumps(found, indent=1))
    return 0


def write_failure(options: argparse.Namespace, message: str) -> None:
    if options.progress_file:
        write_state(Path(options.progress_file), {"state": "failed", "message": message})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
