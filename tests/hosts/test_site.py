"""The whole site on two hosts with different engines: from nothing to serving, changed, rebooted, broken, removed.

The tests build on one another, in the order of the file, as an operator's days do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import OpenAI

from simulator.build import images as engine_images
from simulator.build.registry import Registry
from tests.hosts import hosts, mirror
from tests.hosts.machine import REPOSITORY

pytestmark = [pytest.mark.hosts, pytest.mark.e2e]

FLEET: dict[str, dict[str, Any]] = {
    "site-trtllm": {"serving_engine": "tensorrt_llm", "serving_profile": "low_latency"},
    "site-vllm": {"serving_engine": "vllm", "serving_profile": "max_throughput_replicated", "serving_gpu_count": 4},
}
RECAP = re.compile(
    r"^(?P<host>\S+)\s+: ok=\d+\s+changed=(?P<changed>\d+)\s+unreachable=(?P<unreachable>\d+)\s+failed=(?P<failed>\d+)",
    re.M,
)


@dataclass
class Run:
    """One ansible-playbook run."""

    status: int
    output: str
    recap: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for match in RECAP.finditer(self.output):
            counts = match.groupdict()
            host = counts.pop("host")
            self.recap[host] = {key: int(value) for key, value in counts.items()}


@dataclass(frozen=True)
class Fleet:
    directory: Path

    def play(self, playbook: str, *arguments: str) -> Run:
        tools = Path(sys.executable).parent
        done = subprocess.run(
            [str(tools / "ansible-playbook"), "-i", str(self.directory / "inventory"), playbook, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "ANSIBLE_FORCE_COLOR": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(f"$ ansible-playbook {playbook} {' '.join(arguments)}\n{done.stdout}")
        return Run(done.returncode, done.stdout)

    def verdict(self, name: str) -> dict[str, Any]:
        verdict: dict[str, Any] = json.loads((self.directory / "verdicts" / f"{name}.json").read_text())
        return verdict


def finding(verdict: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    return [check for check in verdict["checks"] if check["id"].startswith(prefix) and check["ok"] is False]


def unit_run(host: str, unit: str) -> str:
    """Systemd's id of the unit's present run: a new one after every start."""
    return hosts.execute(host, "systemctl", "show", "--property=InvocationID", "--value", unit).strip()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("fleet")
    demo = REPOSITORY / "inventories" / "demo"
    inventory = directory / "inventory"
    inventory.mkdir()
    (inventory / "group_vars").symlink_to(demo / "group_vars")
    group = next(iter(yaml.safe_load((demo / "hosts.yml").read_text())))
    variables = yaml.safe_load((demo / "hosts.yml").read_text())[group]["vars"]
    variables |= {
        "test_host_file": str(REPOSITORY / "build" / "hosts" / "{{ inventory_hostname }}.json"),
        "verdict_directory": str(directory / "verdicts"),
    }
    (inventory / "hosts.yml").write_text(yaml.safe_dump({group: {"hosts": FLEET, "vars": variables}}))
    registry = Registry(f"http://{mirror.up()}:{mirror.REGISTRY_PORT}")
    for image in engine_images.images(["tensorrt_llm-1.2.1", "vllm-0.31.0"]):
        registry.push(image)
    for name in FLEET:
        hosts.up(name, hardware="h200_x4")
    yield Fleet(directory)
    for name in FLEET:
        hosts.down(name)


def test_check_mode_on_bare_hosts_changes_nothing_and_does_not_fail(fleet: Fleet) -> None:
    before = {name: hosts.execute(name, "sh", "-c", "dpkg -l | sha256sum; ls -lR /etc | sha256sum") for name in FLEET}
    run = fleet.play("site.yml", "--check", "--diff")
    assert run.status == 0
    assert before == {
        name: hosts.execute(name, "sh", "-c", "dpkg -l | sha256sum; ls -lR /etc | sha256sum") for name in FLEET
    }


def test_site_takes_bare_hosts_to_served_and_checked_endpoints(fleet: Fleet) -> None:
    run = fleet.play("site.yml")
    assert run.status == 0
    for name in FLEET:
        assert fleet.verdict(name)["ok"] is True, finding(fleet.verdict(name), "")
        assert hosts.execute(name, "systemctl", "is-enabled", "gpt-oss@0.service").strip() == "enabled"


def test_second_run_changes_nothing(fleet: Fleet) -> None:
    running = {name: unit_run(name, "gpt-oss@0.service") for name in FLEET}
    run = fleet.play("site.yml")
    assert run.status == 0
    assert {name: run.recap[name]["changed"] for name in FLEET} == dict.fromkeys(FLEET, 0)
    assert running == {name: unit_run(name, "gpt-oss@0.service") for name in FLEET}


@pytest.mark.parametrize(("name", "port"), [("site-trtllm", 8000), ("site-vllm", 8003)])
def test_openai_client_chats_and_streams(fleet: Fleet, name: str, port: int) -> None:
    client = OpenAI(base_url=f"http://{hosts.get(name).address}:{port}/v1", api_key="none", timeout=60, max_retries=0)
    model = client.models.list().data[0].id
    assert model == "openai/gpt-oss-120b"
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What limits inference speed?"}], max_tokens=32
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 32
    chunks = list(
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "And now slowly."}], max_tokens=32, stream=True
        )
    )
    assert sum(1 for chunk in chunks if chunk.choices and chunk.choices[0].delta.content) > 1


def test_change_of_plan_restarts_the_server_once_and_no_other(fleet: Fleet) -> None:
    before = {name: unit_run(name, "gpt-oss@0.service") for name in FLEET}
    change = ("-e", json.dumps({"serving_set": {"max_batch_size": 32}}), "--limit", "site-trtllm")
    run = fleet.play("playbooks/serve.yml", *change)
    assert run.status == 0
    after = {name: unit_run(name, "gpt-oss@0.service") for name in FLEET}
    assert after["site-trtllm"] != before["site-trtllm"]
    assert after["site-vllm"] == before["site-vllm"]
    starts = hosts.execute(
        "site-trtllm", "journalctl", "--no-pager", "-b", "-o", "cat", "-u", "gpt-oss@0.service", "-g", "^Started "
    )
    assert len(starts.splitlines()) == 2  # the first start, and the one for the change
    again = fleet.play("playbooks/serve.yml", *change)
    assert again.recap["site-trtllm"]["changed"] == 0
    assert unit_run("site-trtllm", "gpt-oss@0.service") == after["site-trtllm"]


def test_server_comes_back_after_a_reboot(fleet: Fleet) -> None:
    hosts.restart("site-vllm")
    run = fleet.play("playbooks/verify.yml", "--limit", "site-vllm")
    assert run.status == 0
    assert fleet.verdict("site-vllm")["ok"] is True


def test_diagnose_names_a_gpu_that_is_gone(fleet: Fleet) -> None:
    hosts.execute("site-vllm", "stand-in-fault", "gpu_gone")
    try:
        run = fleet.play("playbooks/diagnose.yml", "--limit", "site-vllm")
    finally:
        hosts.execute("site-vllm", "stand-in-fault", "none")
    assert run.status != 0
    verdict = fleet.verdict("site-vllm")
    assert verdict["ok"] is False
    assert any("gpu" in check["id"] and check["remedy"] for check in finding(verdict, ""))


def test_remove_takes_the_server_and_leaves_the_weights(fleet: Fleet) -> None:
    run = fleet.play("playbooks/remove.yml")
    assert run.status == 0
    for name in FLEET:
        assert (
            hosts.execute(name, "sh", "-c", "systemctl list-unit-files 'gpt-oss*' --no-legend | wc -l").strip() == "0"
        )
        assert hosts.execute(name, "sh", "-c", "docker ps -aq --filter name=gpt-oss- | wc -l").strip() == "0"
        assert hosts.execute(name, "sh", "-c", "ls /var/lib/gpt-oss/weights/*/snapshots | wc -l").strip() != "0"
        assert hosts.execute(name, "nvidia-smi", "--list-gpus").count("GPU ") == 4
    assert all(counts["changed"] == 0 for counts in fleet.play("playbooks/remove.yml").recap.values())


def test_remove_takes_weights_toolkit_and_driver_by_name(fleet: Fleet) -> None:
    run = fleet.play("playbooks/remove.yml", "-e", json.dumps({"remove": ["weights", "toolkit", "driver"]}))
    assert run.status == 0
    for name in FLEET:
        left = hosts.execute(
            name,
            "sh",
            "-c",
            "dpkg-query -W -f '${db:Status-Abbrev} ${Package}\\n' | grep -E '^i.*(nvidia|cuda)' || true",
        )
        assert left == ""
        assert hosts.execute(name, "sh", "-c", "find /var/lib/gpt-oss -name '*.safetensors' | wc -l").strip() == "0"
        assert "docker.io" in hosts.execute(name, "dpkg-query", "-W", "-f", "${Package}\\n")
