#!/usr/bin/python
"""One host's part when a fleet shares verified weights: looked at, begun in the background, ended."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_share
short_description: Give verified weights to the other hosts of a fleet, or take them from those
description:
  - V(look) says whether the snapshot is here and verified, how much of it has begun to arrive, and which address of
    this host the fleet can use. It changes nothing.
  - V(describe) writes the checksum of every piece of the verified snapshot, once, and returns them.
  - V(offer) and V(take) start the sharing program in the background. It listens on the one address, for the hosts in
    O(peers) alone, and ends by itself when nobody lacks a piece any more, or when no piece comes. Follow what is taken
    with the module P(model_snapshot#module), C(phase=wait).
  - V(stop) ends the program and with it the open port. What is being taken is not disturbed.
options:
  phase:
    description: What to do.
    type: str
    choices: [look, describe, offer, take, stop]
    required: true
  directory:
    description: The model cache.
    type: path
    required: true
  repository:
    description: The model's name on the hub, C(owner/name).
    type: str
    required: true
  revision:
    description: The commit, 40 hexadecimal digits.
    type: str
    required: true
  ignore_patterns:
    description: Files left out.
    type: list
    elements: str
    default: []
  encodings:
    description: Vocabulary files that belong to the model, each with C(file), C(url) and C(sha256).
    type: list
    elements: dict
    default: []
  address:
    description: This host's address, or a name that it resolves to one, on the network that the fleet shares.
    type: str
    default: ""
  port:
    description: TCP port to listen on while weights are shared.
    type: int
    default: 18631
  peers:
    description: The other hosts, each with C(name), C(address) and C(port).
    type: list
    elements: dict
    default: []
  description:
    description: What V(describe) returned on a host that has the snapshot.
    type: dict
    default: {}
  rate_limit:
    description: Bytes a second that this host sends at most, and takes at most; 0 is no limit.
    type: int
    default: 0
  linger:
    description: Seconds after which the program ends when nobody lacks a piece.
    type: int
    default: 120
  patience:
    description: Seconds without a new piece after which taking is given up.
    type: int
    default: 120
  keep_free_bytes:
    description: Room to leave on the disk.
    type: int
    default: 0
  progress_interval:
    description: Seconds between lines of progress in the program's log.
    type: int
    default: 10
  python:
    description: Interpreter that has libtorrent.
    type: path
    default: /usr/bin/python3
  program_directory:
    description: Where the programs are kept on the host.
    type: path
    default: /opt/gpt-oss/libexec
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Begin to take the weights from the fleet
  model_share:
    phase: take
    directory: /var/lib/gpt-oss
    repository: openai/gpt-oss-120b
    revision: b5c939de8f754692c1647ca79fbf85e8c1e70f8a
    ignore_patterns: [original/*, metal/*]
    address: 10.0.0.12
    peers: [{name: gpu-01, address: 10.0.0.11, port: 18631}]
    description: "{{ described.description }}"
    python: /opt/gpt-oss/venvs/libtorrent/bin/python
"""

RETURN = r"""
model:
  description: The model and revision this host looked for; hosts with the same one can share.
  returned: with V(look)
  type: str
verified:
  description: Whether the snapshot is here and verified.
  returned: with V(look)
  type: bool
held_bytes:
  description: Room that files take which have begun to arrive.
  returned: with V(look)
  type: int
address:
  description: The address of this host that the fleet can use.
  returned: with V(look)
  type: str
port:
  description: The port it will listen on.
  returned: with V(look)
  type: int
description:
  description: Metainfo and manifest of the snapshot.
  returned: with V(describe)
  type: dict
"""

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss import fetch_weights as weights
from ansible.module_utils.gpt_oss import share_weights as sharing
from ansible.module_utils.gpt_oss.background import install, last_lines, locked, read_state

PROGRAMS = ("fetch_weights.py", "share_weights.py")
START_SECONDS = 60.0
STOP_SECONDS = 30.0


def own_address(given: str) -> str:
    """The address to listen on, or a failure naming what was given and what is allowed."""
    try:
        literal = ipaddress.ip_address(given)
    except ValueError:
        return resolved(given)
    if literal.is_unspecified or literal.is_multicast:
        raise weights.FetchError(
            f"model_weights_peer_address: {given} is not one address of this host; allowed is an address that the other"
            " hosts of the fleet reach, not a wildcard",
            "input",
        )
    return str(literal)


def resolved(name: str) -> str:
    """What this host takes a name for; a loopback address is of no use to others."""
    remedy = "set model_weights_peer_address to this host's address on the network that the fleet shares"
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise weights.FetchError(
            f"model_weights_peer_address: {name!r} cannot be resolved here ({error.strerror}); {remedy}", "input"
        ) from None
    usable = sorted(a for a in found if not ipaddress.ip_address(a.split("%")[0]).is_loopback and "%" not in a)
    if not usable:
        raise weights.FetchError(
            f"model_weights_peer_address: {name!r} is {', '.join(sorted(found))} here, which no other host reaches;"
            f" {remedy}",
            "input",
        )
    return next((a for a in usable if ":" not in a), usable[0])


class Share:
    """This host's part: the two locks, the programs and their files."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params
        base = params["directory"]
        self.request = weights.make_request(
            {
                "repository": params["repository"],
                "revision": params["revision"],
                "weights_directory": os.path.join(base, "weights"),
                "staging_directory": os.path.join(base, "staging"),
                "encodings_directory": os.path.join(base, "encodings"),
                "ignore_patterns": params["ignore_patterns"],
                "encodings": params["encodings"],
            }
        )
        self.layout = self.request.layout
        side = self.layout.staging / self.layout.folder
        self.lock = self.layout.staging / (self.layout.folder + ".share.lock")
        self.described = side / (self.layout.revision + ".share.json")
        # What is taken is followed as any fetch is: these two have the names that model_snapshot looks for.
        self.taking = side / (self.layout.revision + ".progress.json")
        self.taking_log = side / (self.layout.revision + ".log")
        self.offering = side / (self.layout.revision + ".offer.json")
        self.offering_log = side / (self.layout.revision + ".offer.log")

    # -- looking --

    def look(self) -> dict[str, Any]:
        status = weights.check(self.request)
        address = own_address(self.params["address"])
        if not self.at_work():
            sharing.require_address(sharing.Sharing(address, self.params["port"], ()))
        patterns = " ".join(sorted(self.params["ignore_patterns"]))
        return {
            "model": f"{self.layout.repository}@{self.layout.revision} without {patterns}",
            "verified": status["verified"],
            "held_bytes": self.held_bytes(),
            "address": address,
            "port": self.params["port"],
        }

    def held_bytes(self) -> int:
        held = 0
        for directory, _, names in os.walk(str(self.layout.work)):
            for name in names:
                with contextlib.suppress(OSError):
                    held += os.lstat(os.path.join(directory, name)).st_blocks * 512
        return held

    def at_work(self) -> bool:
        """Whether the program is running here."""
        if not self.lock.exists():
            return False
        handle = locked(self.lock)
        if handle is None:
            return True
        os.close(handle)
        return False

    def own_lock(self) -> int:
        handle: int | None = locked(self.lock)
        if handle is None:
            raise weights.FetchError("another play has just begun to share weights on this host", "busy")
        return handle

    # -- the program --

    def install(self) -> Path:
        """Put the programs on the host; they are this module's own other half."""
        installed: list[Path] = [install(name, self.params["program_directory"]) for name in PROGRAMS]
        return installed[1]

    def command(self, command: str, *more: str) -> list[str]:
        params, layout = self.params, self.layout
        return [
            params["python"],
            str(self.install()),
            command,
            f"--repository={layout.repository}",
            f"--revision={layout.revision}",
            f"--weights-directory={layout.weights}",
            f"--staging-directory={layout.staging}",
            f"--encodings-directory={layout.encodings}",
            "--ignore-patterns=" + " ".join(params["ignore_patterns"]),
            "--encodings=" + json.dumps(params["encodings"]),
            f"--description={self.described}",
            *more,
        ]

    def takes_part(self) -> list[str]:
        params = self.params
        address = own_address(params["address"])
        return [
            f"--address={address}",
            f"--port={params['port']}",
            f"--rate-limit={params['rate_limit']}",
            f"--linger={params['linger']}",
            f"--patience={params['patience']}",
            *(f"--peer={peer['name']}={bracketed(peer['address'])}:{peer['port']}" for peer in params["peers"]),
        ]

    def describe(self) -> dict[str, Any]:
        """The description, made anew when what is here is not what it describes."""
        manifest = weights.manifest_of(self.request)
        with contextlib.suppress(weights.FetchError):
            found = sharing.read_description(self.described)
            if found.get("manifest") == manifest:
                return {"changed": False, "description": found}
        self.described.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            self.command("describe"), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd="/"
        )
        if done.returncode != 0:
            raise weights.FetchError(done.stderr.strip() or f"describing ended with status {done.returncode}")
        return {"changed": True, "description": sharing.read_description(self.described)}

    def offer(self) -> dict[str, Any]:
        """Let the fleet take the snapshot; a program that offers already is replaced, for its peers may be others."""
        self.stop()
        handle = self.own_lock()
        try:
            self.keep_description()
            self.start(self.command("offer", *self.takes_part()), self.offering, self.offering_log, handle, None)
            self.wait_for("offering", self.offering, self.offering_log, handle)
        finally:
            os.close(handle)
        return {"changed": False}

    def take(self) -> dict[str, Any]:
        """Begin to take the snapshot, unless a fetch is at work."""
        status = weights.check(self.request)
        if status["verified"]:
            return {"changed": False, "attached": False}
        self.layout.staging.mkdir(parents=True, exist_ok=True)
        fetching = locked(self.layout.lock)
        if fetching is None:
            return {"changed": True, "attached": True}
        try:
            self.stop()
            handle = self.own_lock()
            try:
                self.keep_description()
                command = self.command(
                    "take",
                    *self.takes_part(),
                    "--offer-afterwards",
                    f"--keep-free-bytes={self.params['keep_free_bytes']}",
                    f"--progress-interval={self.params['progress_interval']}",
                    f"--lock-descriptor={fetching}",
                )
                self.start(command, self.taking, self.taking_log, handle, fetching)
            finally:
                os.close(handle)
        finally:
            os.close(fetching)
        return {"changed": True, "attached": False}

    def keep_description(self) -> None:
        weights.write_atomically(self.described, json.dumps(self.params["description"]))

    def start(self, command: list[str], state: Path, log: Path, handle: int, fetching: int | None) -> None:
        """Start the program in the background; it inherits the locks, so there is no moment without an owner."""
        with contextlib.suppress(FileNotFoundError):
            state.unlink()
        environment = dict(os.environ, PYTHONUNBUFFERED="1")
        environment.pop("HF_TOKEN", None)
        inherited = tuple(number for number in (handle, fetching) if number is not None)
        descriptor = os.open(str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            process = subprocess.Popen(
                [*command, f"--progress-file={state}", f"--share-descriptor={handle}"],
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                cwd="/",
                env=environment,
                pass_fds=inherited,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(process.pid).encode("ascii"), 0)

    def wait_for(self, wanted: str, state: Path, log: Path, handle: int) -> None:
        """Wait until the program says that it is at work."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            found = read_state(state)
            if found.get("state") == wanted:
                return
            if found.get("state") == "failed":
                raise weights.FetchError(str(found.get("message")))
            with contextlib.suppress(OSError, ValueError):
                pid = int(os.pread(handle, 20, 0))
                if os.waitpid(pid, os.WNOHANG) != (0, 0):
                    break
            time.sleep(0.1)
        raise weights.FetchError(f"the sharing program did not begin: {tail(log)}")

    def stop(self) -> dict[str, Any]:
        """End the program, and with it the port. While it takes something, it is left alone."""
        if not self.at_work():
            return {"changed": False}
        fetching = locked(self.layout.lock) if self.layout.lock.exists() else None
        if fetching is None and self.layout.lock.exists():
            return {"changed": False}
        if fetching is not None:
            os.close(fetching)
        pid = int(self.lock.read_text(encoding="ascii") or 0)
        until = time.monotonic() + STOP_SECONDS
        while self.at_work():
            if time.monotonic() > until:
                raise weights.FetchError(
                    f"the sharing program (process {pid}) does not end; look at {self.offering_log}"
                )
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            time.sleep(0.2)
        self.tidy()
        return {"changed": False}

    def tidy(self) -> None:
        for leftover in (self.offering, self.offering_log):
            with contextlib.suppress(FileNotFoundError):
                leftover.unlink()


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def tail(path: Path) -> str:
    try:
        return last_lines(path) or "its log is empty"
    except OSError:
        return "it wrote no log"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "phase": {"type": "str", "choices": ["look", "describe", "offer", "take", "stop"], "required": True},
            "directory": {"type": "path", "required": True},
            "repository": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "ignore_patterns": {"type": "list", "elements": "str", "default": []},
            "encodings": {"type": "list", "elements": "dict", "default": []},
            "address": {"type": "str", "default": ""},
            "port": {"type": "int", "default": 18631},
            "peers": {"type": "list", "elements": "dict", "default": []},
            "description": {"type": "dict", "default": {}},
            "rate_limit": {"type": "int", "default": 0},
            "linger": {"type": "int", "default": 120},
            "patience": {"type": "int", "default": 120},
            "keep_free_bytes": {"type": "int", "default": 0},
            "progress_interval": {"type": "int", "default": 10},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "program_directory": {"type": "path", "default": "/opt/gpt-oss/libexec"},
        },
    )
    os.umask(0o022)
    try:
        share = Share(module.params)
        result = getattr(share, module.params["phase"])()
    except weights.FetchError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=weights.os_error(error))
    module.exit_json(**{"changed": False, **result})


if __name__ == "__main__":
    main()
