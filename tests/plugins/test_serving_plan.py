"""serving_plan as a playbook runs it: one run, one host for each mistake."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.plugins.conftest import ROOT

GOOD: dict[str, Any] = {
    "serving_gpu": "H200",
    "serving_gpu_count": 4,
    "serving_engine": "tensorrt_llm",
    "serving_profile": "low_latency",
}

# Each case: what the host's inventory says besides GOOD (None takes an input away), and what the message must say.
MISTAKES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "missing": (
        {"serving_gpu": None, "serving_engine": None},
        ["serving_gpu: is not set", "serving_engine: is not set"],
    ),
    "count": ({"serving_gpu_count": 3}, ["serving_gpu_count: 3 is not served for H200", "allowed: 1, 4, 8"]),
    "count_type": ({"serving_gpu_count": "four"}, ["serving_gpu_count: 'four' is text; expected a whole number"]),
    "gpu": ({"serving_gpu": "H20O"}, ["serving_gpu: 'H20O' is not known (did you mean H200?)", "allowed: B200"]),
    "engine": ({"serving_engine": "vlm"}, ["serving_engine: 'vlm' is not known", "tensorrt_llm"]),
    "profile": ({"serving_profile": "low-latency"}, ["serving_profile: 'low-latency'", "did you mean low_latency?"]),
    "model": ({"serving_model": "gpt-oss-12b"}, ["serving_model: 'gpt-oss-12b' is not known", "gpt-oss-120b"]),
    "release": ({"serving_release": "0.9"}, ["serving_release: '0.9' is not known", "1.2.1"]),
    "release_number": ({"serving_release": 1.2}, ["serving_release: 1.2 is a number; expected text", 'example "1.2"']),
    "platform": ({"serving_platform": "hgx_h20"}, ["serving_platform: 'hgx_h20'", "hgx_h200"]),
    "port": ({"serving_port": 70000}, ["serving_port: 70000"]),
    "address": ({"serving_publish_address": "gpu-01"}, ["serving_publish_address: 'gpu-01' is not an IP address"]),
    "set_type": ({"serving_set": "max_batch_size=3"}, ["serving_set: 'max_batch_size=3' is text; expected a mapping"]),
    "set_unknown": ({"serving_set": {"max_bach_size": 3}}, ["serving_set: ", "max_bach_size", "max_batch_size"]),
    "overlay": (
        {"serving_catalog_overlay": "/nowhere"},
        ["serving_catalog_overlay: /nowhere: the catalog overlay is not"],
    ),
    "overlay_relative": (
        {"serving_catalog_overlay": "catalog"},
        ["not an absolute path; write '{{ inventory_dir }}/catalog'"],
    ),
    "misspelt_fleet": (
        {"serving_profil": "x"},
        ["serving_profil: there is no such input (did you mean serving_profile?)"],
    ),
    "misspelt_role": (
        {"nvidia_driver_rebot": "never"},
        ["nvidia_driver_rebot: role nvidia_driver has no such input (did you mean nvidia_driver_reboot?)"],
    ),
    "misspelt_prefix": ({"nvidia_drivr_version": "580"}, ["nvidia_drivr_version: is it nvidia_driver_version?"]),
    "choice": (
        {"nvidia_driver_reboot": "sometimes"},
        ["nvidia_driver_reboot: 'sometimes' is not allowed", "when_needed"],
    ),
    "boolean": (
        {"model_cache_require_mount": "perhaps"},
        ["model_cache_require_mount: 'perhaps' is text; expected true or false"],
    ),
    "float_version": (
        {"cuda_toolkit_version": 12.10},
        ["cuda_toolkit_version: 12.1 is a number; expected text: write it in quotes"],
    ),
    "list": (
        {"nvidia_driver_keyring_fingerprints": "ABC"},
        ["nvidia_driver_keyring_fingerprints: 'ABC' is text; expected a list"],
    ),
    "secret": ({"model_weights_token": ["hf_sesame"]}, ["model_weights_token: (hidden) is a list; expected text"]),
    "handed_over": (
        {"inference_server_publish_address": "10.0.0.1"},
        ["inference_server_publish_address: has no effect in an inventory", "set serving_publish_address"],
    ),
    "plan_by_hand": ({"inference_server_plan": {}}, ["inference_server_plan: has no effect in an inventory"]),
    "undefined": (
        {"docker_engine_daemon_options": "{{ nothing }}"},
        ["docker_engine_daemon_options: 'nothing' is undefined"],
    ),
    "many": (
        {"serving_gpu_count": 3, "nvidia_driver_reboot": "x", "serving_prot": 1},
        ["serving_gpu_count", "nvidia_driver_reboot", "serving_prot"],
    ),
}

FINE: dict[str, dict[str, Any]] = {
    "plain": {},
    "unrelated": {"my_port": 1, "nvidia": "x", "site": {"a": 1}, "serves": 2, "benchmarks": 3, "ansible_user": "x"},
    "templated": {"how_many": 2, "serving_gpu_count": "{{ how_many * 4 }}", "serving_serial": "50%"},
    "known_later": {"nvidia_fabric_timeout": "{{ ansible_facts.later }}"},
    "overlay": {"serving_catalog_overlay": "{{ inventory_dir }}/overlay"},
    "text_numbers": {"serving_gpu_count": "8", "serving_port": "9000", "model_cache_require_mount": "yes"},
    "overrides": {"serving_set": {"max_batch_size": 16, "environment.NCCL_DEBUG": "INFO"}},
}

PLAYBOOK = """
- hosts: all
  gather_facts: false
  tasks:
    - block:
        - serving_plan:
          register: result
      rescue:
        - ansible.builtin.set_fact:
            result: "{{ ansible_failed_result }}"
    - ansible.builtin.copy:
        dest: "{{ playbook_dir }}/{{ inventory_hostname }}.json"
        content: "{{ dict(result=result, plan=ansible_facts['serving_plan'] | default(none)) | to_json }}"
        mode: "0644"
"""


def ansible_playbook(directory: Path, hosts: dict[str, dict[str, Any]], *arguments: str) -> str:
    inventory = {"all": {"hosts": hosts, "vars": {"ansible_connection": "local"}}}
    (directory / "hosts.yml").write_text(yaml.safe_dump(inventory))
    (directory / "play.yml").write_text(PLAYBOOK)
    done = subprocess.run(
        ["ansible-playbook", "-i", "hosts.yml", "play.yml", *arguments],
        cwd=directory,  # not the project's directory: plugin paths are relative to ansible.cfg
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    directory = tmp_path_factory.mktemp("plans")
    (directory / "overlay").mkdir()
    (directory / "overlay/releases.yml").write_text("nvidia_driver: {version: 580.1.2}\n")
    hosts = {
        **{f"bad-{name}": {**GOOD, **changes} for name, (changes, _) in MISTAKES.items()},
        **{f"fine-{name}": {**GOOD, **changes} for name, changes in FINE.items()},
    }
    for variables in hosts.values():
        for name in [name for name, value in variables.items() if value is None]:
            del variables[name]
    output = ansible_playbook(directory, hosts, "-v", "--forks", "2")

    def of(host: str) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads((directory / f"{host}.json").read_text())
        return {**answer, "output": output}

    return of


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_value_and_what_is_allowed(
    outcome: Callable[[str], dict[str, Any]], name: str
) -> None:
    answer = outcome(f"bad-{name}")
    assert answer["plan"] is None
    message = answer["result"]["msg"]
    assert message.startswith(f"bad-{name} is not touched: its inputs have ")
    for part in MISTAKES[name][1]:
        assert part in message
    expected = {"missing": 2, "many": 3}.get(name, 1)
    assert len(answer["result"]["problems"]) == expected, message


@pytest.mark.parametrize("name", FINE)
def test_what_is_right_or_unrelated_is_planned(outcome: Callable[[str], dict[str, Any]], name: str) -> None:
    answer = outcome(f"fine-{name}")
    assert not answer["result"].get("failed"), answer["result"]["msg"]
    assert not answer["result"]["changed"]
    assert answer["plan"]["gpu_count"] == int({"templated": 8, "text_numbers": 8}.get(name, 4))


def test_the_plan_is_the_one_that_the_command_line_prints(outcome: Callable[[str], dict[str, Any]]) -> None:
    words = "plan --engine tensorrt_llm --profile low_latency --gpu H200 --gpu-count 4 --format json"
    printed = subprocess.run(
        ["python", "-m", "serving_catalog", *words.split()], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert outcome("fine-plain")["plan"] == json.loads(printed.stdout)


def test_overrides_and_ports_reach_the_plan(outcome: Callable[[str], dict[str, Any]]) -> None:
    [process] = outcome("fine-overrides")["plan"]["processes"]
    assert process["environment"]["NCCL_DEBUG"] == "INFO"
    assert "16" in str([*process["argv"], process["options_file"]])
    assert outcome("fine-text_numbers")["plan"]["processes"][0]["port"] == 9000


def test_a_secret_is_never_shown(outcome: Callable[[str], dict[str, Any]]) -> None:
    assert "hf_sesame" not in outcome("bad-secret")["output"]


def test_the_lookup_reads_the_same_overlay(tmp_path: Path) -> None:
    (tmp_path / "overlay").mkdir()
    (tmp_path / "overlay/releases.yml").write_text("nvidia_driver: {version: 580.1.2}\n")
    version = "{{ lookup('serving_catalog', 'releases.nvidia_driver.version') }}"
    template = f"{version} {{{{ lookup('serving_catalog', 'releases.docker') | type_debug }}}}"
    for overlay, expected in ((None, "580.159.04 dict"), ("{{ inventory_dir }}/overlay", "580.1.2 dict")):
        variables = {"serving_catalog_overlay": overlay} if overlay else {}
        (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"h": variables}}}))
        done = subprocess.run(
            ["ansible", "-i", "hosts.yml", "h", "-m", "ansible.builtin.debug", "-a", json.dumps({"msg": template})],
            cwd=tmp_path,
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert expected in done.stdout, done.stdout + done.stderr


def test_the_lookup_names_the_nearest_path(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            "ansible",
            "localhost",
            "-m",
            "ansible.builtin.debug",
            "-a",
            "msg={{ lookup('serving_catalog', 'releases.dokker') }}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "releases.dokker: there is no 'dokker' in releases (did you mean docker?)" in done.stdout + done.stderr
