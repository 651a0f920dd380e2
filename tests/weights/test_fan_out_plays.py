"""The role on several hosts that share: each with a cache and an address of its own, all on this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from .conftest import MODEL, ROOT, SHARD, Fetcher, RunningHub

PORT = 18631


@dataclass
class Fleet:
    """Hosts of one inventory, with the role's inputs as an operator writes them."""

    directory: Path
    hub: RunningHub
    names: tuple[str, ...] = ("gpu-01", "gpu-02", "gpu-03")

    def address(self, name: str) -> str:
        return f"127.0.70.{int(name[-2:])}"

    def cache(self, name: str) -> Fetcher:
        return Fetcher(self.directory / name, self.hub, self.hub.repository.revision)

    def inventory(self, everyone: dict[str, Any], hosts: dict[str, dict[str, Any]]) -> Path:
        named = {
            name: {
                "model_weights_directory": str(self.directory / name),
                "model_weights_peer_address": self.address(name),
                "model_weights_program_directory": str(self.directory / "libexec" / name),
                **hosts.get(name, {}),
            }
            for name in self.names
        }
        shared: dict[str, Any] = {
            "ansible_connection": "local",
            "ansible_python_interpreter": "/usr/bin/python3",
            "model_weights_model": {
                "name": "gpt-oss-120b",
                "repository": MODEL,
                "revision": self.hub.repository.revision,
                "ignore_patterns": ["original/*", "metal/*"],
                "encodings": self.hub.encodings(),
            },
            "model_weights_endpoint": self.hub.url,
            "model_weights_venv": sys.prefix,
            "model_weights_keep_free_bytes": 0,
            "model_weights_progress_seconds": 1,
            "model_weights_attempts": 1,
            "model_weights_fan_out": True,
            "model_weights_fan_out_venv": sys.prefix,
            "model_weights_fan_out_patience_seconds": 10,
            **everyone,
        }
        path = self.directory / "inventory.yml"
        path.write_text(yaml.safe_dump({"all": {"hosts": named, "vars": shared}}))
        return path

    def run(
        self,
        *options: str,
        serial: int | str = "100%",
        everyone: dict[str, Any] | None = None,
        hosts: dict[str, dict[str, Any]] | None = None,
    ) -> tuple[int, str]:
        playbook = self.directory / "play.yml"
        play = {"hosts": "all", "gather_facts": False, "serial": serial, "roles": ["model_weights"]}
        playbook.write_text(yaml.safe_dump([play]))
        environment = {
            **{name: value for name, value in os.environ.items() if name != "HF_TOKEN"},
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_LOCALHOST_WARNING": "false",
            "COLUMNS": "500",
        }
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("ansible-playbook")),
                f"--inventory={self.inventory(everyone or {}, hosts or {})}",
                str(playbook),
                *options,
            ],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout

    def put_something_in_the_way(self, name: str) -> None:
        """This host cannot keep weights."""
        path = self.cache(name).directory / "weights"
        path.parent.mkdir()
        path.write_text("a file where a directory should be")

    def assert_complete(self, *names: str) -> None:
        for name in names:
            self.cache(name).assert_complete()

    def assert_nothing_listens(self) -> None:
        for name in self.names:
            with socket.socket() as probe:
                assert probe.connect_ex((self.address(name), PORT)) != 0, f"{name} still listens"


@pytest.fixture
def fleet(tmp_path: Path, hub: RunningHub) -> Fleet:
    return Fleet(tmp_path, hub)


def downloads(hub: RunningHub) -> int:
    """How many times the hub has sent a file of the weights."""
    return hub.bytes_of(SHARD) // len(hub.repository.by_path[SHARD].content)


def test_one_host_downloads_and_all_have_it(fleet: Fleet, hub: RunningHub) -> None:
    status, output = fleet.run()
    assert status == 0, output
    fleet.assert_complete(*fleet.names)
    assert downloads(hub) == 1
    assert sum(hub.bytes_of(f.path) for f in hub.files) == sum(len(f.content) for f in hub.files)
    fleet.assert_nothing_listens()

    hub.mend()
    status, output = fleet.run()
    assert status == 0, output
    assert "changed=0" in output
    assert "changed=1" not in output
    assert hub.requests == []
    assert "Share |" not in output


def test_a_late_host_asks_no_hub(fleet: Fleet, hub: RunningHub) -> None:
    """Hosts outside the limit have it: they are asked, give it, and stop listening."""
    status, output = fleet.run("--limit=gpu-01")
    assert status == 0, output
    hub.mend()
    status, output = fleet.run("--limit=gpu-03")
    assert status == 0, output
    fleet.assert_complete("gpu-03")
    assert not fleet.cache("gpu-02").directory.exists()
    assert hub.requests == []
    fleet.assert_nothing_listens()


def test_the_next_batch_takes_it_from_the_one_before(fleet: Fleet, hub: RunningHub) -> None:
    status, output = fleet.run(serial=1)
    assert status == 0, output
    fleet.assert_complete(*fleet.names)
    assert downloads(hub) == 1
    fleet.assert_nothing_listens()


def test_a_host_that_cannot_take_it_fails_alone(fleet: Fleet) -> None:
    fleet.put_something_in_the_way("gpu-02")
    status, output = fleet.run()
    assert status != 0
    assert "gpu-02" in output
    fleet.assert_complete("gpu-01", "gpu-03")
    fleet.assert_nothing_listens()


def test_the_next_host_brings_it_when_the_first_one_cannot(fleet: Fleet, hub: RunningHub) -> None:
    fleet.put_something_in_the_way("gpu-01")
    status, output = fleet.run()
    assert status != 0
    assert "gpu-01" in output
    fleet.assert_complete("gpu-02", "gpu-03")
    assert downloads(hub) == 1


def test_a_hub_that_cannot_be_reached_is_asked_by_two_hosts_at_most(fleet: Fleet) -> None:
    status, output = fleet.run(everyone={"model_weights_endpoint": "http://127.0.70.9:9"})
    assert status != 0
    asked = re.findall(r"^fatal: \[(\S+)\]: .*cannot be reached for the file list", output, re.M)
    assert asked == ["gpu-01", "gpu-02"]
    assert "no host of the fleet has openai/gpt-oss-120b" in " ".join(output.split())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "gpu-01": ({"model_weights_peers": ["gpu-01", "gpu-99"]}, "model_weights_peers: gpu-99 is not in the inventory"),
    "gpu-02": (
        {"model_weights_peer_address": "0.0.0.0"},
        "model_weights_peer_address: 0.0.0.0 is not one address of this host",
    ),
    "gpu-03": (
        {"model_weights_peer_address": "203.0.113.7"},
        "Give an address of this host on the network that the fleet shares",
    ),
    "gpu-04": (
        {"model_weights_peer_address": "localhost"},
        "which no other host reaches; set model_weights_peer_address",
    ),
    "gpu-05": ({"model_weights_fan_out": "sometimes"}, "model_weights_fan_out"),
}


def test_bad_input_is_told_before_anything_is_fetched(tmp_path: Path, hub: RunningHub) -> None:
    fleet = Fleet(tmp_path, hub, tuple(WRONG))
    status, output = fleet.run(hosts={name: inputs for name, (inputs, _) in WRONG.items()})
    assert status != 0
    said = dict(re.findall(r"^fatal: \[(\S+)\]: (.*)$", output, re.M))
    assert {name: words in said.get(name, "") for name, (_, words) in WRONG.items()} == dict.fromkeys(WRONG, True)
    assert hub.requests == []
    assert not any((tmp_path / name).exists() for name in WRONG)


def test_check_mode_says_what_would_be_fetched_and_shares_nothing(fleet: Fleet, hub: RunningHub) -> None:
    status, output = fleet.run("--check")
    assert status == 0, output
    assert "changed=1" in output
    assert hub.requests == []
    assert not (fleet.directory / "gpu-01").exists()
