"""Bad input that the controller can refuse: the real site.yml, many hosts with one mistake each, none of them asked.

The hosts' address is one where nobody listens. One host has no mistake; the run tries to reach it and fails, so this
file would notice a run that reaches for the others.

Where each kind of bad input is refused, and tested:

    unknown engine, profile, model, GPU, release      here; tests/catalog/test_rejections.py
    GPU count that is not served                      here; tests/catalog/test_rejections.py
    unknown or misspelt variable, wrong type          here; tests/plugins/test_serving_plan.py
    override unknown, out of range, set twice         here; tests/catalog/rejected_overrides.yml
    revision that is not 40 hex digits                here; tests/weights/test_fetch.py
    too little GPU memory                             here; tests/catalog/test_rejections.py
    arm64 image missing                               here; tests/catalog/test_rejections.py
    driver branch below 570                           here; tests/plugins/test_preflight_checks.py
    proprietary modules on Blackwell                  here; tests/plugins/test_preflight_checks.py
    inventory without hosts, remove of what is not    here
    GPU present differs, fewer GPUs than requested    test_bad_host.py; tests/plugins/test_preflight_checks.py
    platform declared against detected                here (another GPU's); test_bad_host.py
    Ubuntu's package names on Debian, the reverse     test_bad_host.py; tests/plugins/test_preflight_checks.py (both)
    disk too small, port taken                        test_bad_host.py; tests/weights/test_fetch.py (hub's file list)
    apt locked, held packages                         test_bad_host.py; tests/plugins/test_preflight_checks.py
    Secure Boot on, unsupported OS                    test_bad_host.py (files of the host); test_preflight_checks.py
    docker absent or too old                          test_bad_host.py; tests/plugins/test_preflight_checks.py
    hub unreachable, repository missing               test_bad_host.py; tests/weights/test_fetch.py
    bad token, checksum wrong                         test_bad_host.py; tests/weights/test_fetch.py, test_plays.py
    image missing, or for another processor           test_bad_host.py; tests/plugins/test_registry.py
    archive corrupt                                   test_bad_host.py; tests/weights/test_import.py (weights' archive)
    hosts at a time                                   test_serial.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
NOWHERE = {"ansible_host": "127.0.0.1", "ansible_port": 1}
GOOD: dict[str, Any] = {
    "serving_gpu": "H200",
    "serving_gpu_count": 4,
    "serving_engine": "tensorrt_llm",
    "serving_profile": "low_latency",
}
SECRET = "sesame-open"


@dataclass(frozen=True)
class Row:
    """A mistake, and what its one sentence says: it begins with the input, then names the value and the way out."""

    given: dict[str, Any]
    key: str
    says: tuple[str, ...]


def row(given: dict[str, Any], key: str, *says: str) -> Row:
    return Row(given, key, says)


def overridden(key: str, *says: str, **values: Any) -> Row:
    return row({"serving_set": values}, "serving_set", key, *says)


L40S = {
    "names": ["NVIDIA L40S"],
    "pci_device_ids": {"26b9": "NVIDIA L40S"},
    "memory_bytes": 48305799168,
    "architecture": "ada",
    "compute_capability": "8.9",
    "cpu_architecture": "x86_64",
    "open_modules": "recommended",
    "source": "pci.ids",
}
# Overlays over the catalog, by name; each is a directory of these files.
OVERLAYS: dict[str, dict[str, Any]] = {
    "branch": {"models.yml": {"gpt-oss-120b": {"revision": "main"}}},
    "short": {"models.yml": {"gpt-oss-120b": {"revision": "b5c939de8f754692c1647ca79fbf85e8c1e70f8"}}},
    "l40s": {
        "gpus.yml": {"L40S": L40S},
        "engines/tensorrt_llm.yml": {
            "gpu_counts": {name: {"L40S": {"counts": [1]}} for name in ("low_latency", "max_throughput")}
        },
    },
    "no_arm64": {"engines/vllm.yml": {"releases": {"0.31.0": {"architectures": ["x86_64"]}}}},
    "old_driver": {"releases.yml": {"nvidia_driver": {"branch": "565", "version": "565.57.01"}}},
    "misspelt_file": {"model.yml": {}},
    "misspelt_key": {"releases.yml": {"docker": {"verson": "29.8.2"}}},
}


def overlay(name: str) -> dict[str, Any]:
    return {"serving_catalog_overlay": "{{ inventory_dir }}/" + name}


ROWS: dict[str, Row] = {
    # what the catalog does not know
    "engine": row({"serving_engine": "sglang"}, "serving_engine", "'sglang'", "allowed: tensorrt_llm, vllm"),
    "profile": row(
        {"serving_profile": "max_througput"},
        "serving_profile",
        "'max_througput'",
        "did you mean max_throughput?",
        "allowed: low_latency, max_throughput, max_throughput_replicated",
    ),
    "model": row({"serving_model": "gpt-oss-12b"}, "serving_model", "'gpt-oss-12b'", "allowed: gpt-oss-120b, gpt-oss"),
    "gpu": row({"serving_gpu": "GH200"}, "serving_gpu", "'GH200'", "allowed: B200, GB200, H200"),
    "gpu_missing": row({"serving_gpu": None}, "serving_gpu", "is empty"),
    "release": row({"serving_release": "1.3.0"}, "serving_release", "'1.3.0'", "allowed: 1.2.1, gpt-oss-dev"),
    "release_of_the_other_engine": row(
        {"serving_release": "0.31.0"}, "serving_release", "'0.31.0'", "for engine tensorrt_llm", "allowed: 1.2.1"
    ),
    "platform_of_another_gpu": row(
        {"serving_platform": "hgx_b200"}, "serving_platform", "hgx_b200", "has B200, not H200", "allowed with H200"
    ),
    "gpu_count": row({"serving_gpu_count": 3}, "serving_gpu_count", "3 is not served for H200", "allowed: 1, 4, 8"),
    "gpu_count_negative": row({"serving_gpu_count": -1}, "serving_gpu_count", "-1", "allowed: 1, 4, 8"),
    "gpu_count_of_a_tray": row(
        {"serving_gpu": "GB200", "serving_gpu_count": 8},
        "serving_gpu_count",
        "8 is not served for GB200",
        "allowed: 1, 4",
    ),
    "gpu_memory": row(
        {**overlay("l40s"), "serving_gpu": "L40S", "serving_gpu_count": 1},
        "serving_gpu",
        "gpt-oss-120b does not fit 1 x L40S",
        "48.3 GB",
        "use more or larger GPUs, a smaller model",
    ),
    "image_for_arm64": row(
        {**overlay("no_arm64"), "serving_gpu": "GB200", "serving_engine": "vllm"},
        "serving_release",
        "0.31.0 has no image for aarch64",
        "built for: x86_64",
    ),
    # names
    "unknown_fleet_variable": row(
        {"serving_gpus": 4}, "serving_gpus", "there is no such input", "allowed: serving_gpu, serving_gpu_count"
    ),
    "misspelt_fleet_variable": row({"serving_gpu_cont": 4}, "serving_gpu_cont", "did you mean serving_gpu_count?"),
    "unknown_role_variable": row(
        {"nvidia_driver_flavour": "open"}, "nvidia_driver_flavour", "role nvidia_driver has no such input", "README.md"
    ),
    "misspelt_role_variable": row(
        {"docker_engine_mantenance": True}, "docker_engine_mantenance", "did you mean docker_engine_maintenance?"
    ),
    "misspelt_role": row(
        {"inference_servr_gpu_access": "cdi"}, "inference_servr_gpu_access", "is it inference_server_gpu_access?"
    ),
    "set_by_the_playbooks": row(
        {"nvidia_driver_gpu_count": 2}, "nvidia_driver_gpu_count", "has no effect", "playbooks/prepare.yml sets it"
    ),
    # types, choices, ranges
    "type": row({"serving_gpu_count": "four"}, "serving_gpu_count", "'four' is text", "expected a whole number"),
    "type_boolean": row({"serving_gpu_count": True}, "serving_gpu_count", "True is a boolean", "a whole number"),
    "type_of_a_role": row(
        {"nvidia_driver_reboot_timeout": "soon"}, "nvidia_driver_reboot_timeout", "'soon' is text", "a whole number"
    ),
    "type_list": row({"preflight_ports": 8080}, "preflight_ports", "8080 is a number", "expected a list"),
    "choice": row(
        {"nvidia_driver_reboot": "sometimes"}, "nvidia_driver_reboot", "'sometimes'", "allowed: never, when_needed"
    ),
    "drives_by_a_name_that_changes": row(
        {"model_cache_drives": ["/dev/nvme1n1"]}, "model_cache_drives", "'/dev/nvme1n1'", "/dev/disk/by-id/"
    ),
    "drives_of_no_known_word": row(
        {"model_cache_drives": "all"}, "model_cache_drives", "'all'", "none, auto, or a list"
    ),
    "raid_level": row({"model_cache_raid_level": "raid5"}, "model_cache_raid_level", "'raid5'", "raid0, raid1, raid10"),
    "cache_filesystem": row({"model_cache_filesystem": "zfs"}, "model_cache_filesystem", "'zfs'", "allowed: xfs, ext4"),
    "port_negative": row({"serving_port": -1}, "serving_port", "-1 is not a port", "allowed: 1 to 65535"),
    "port_too_large": row({"serving_port": 65536}, "serving_port", "65536 is not a port", "allowed: 1 to 65535"),
    "ports_of_replicas": row(
        {"serving_profile": "max_throughput_replicated", "serving_port": 65534},
        "serving_port",
        "65534 leaves no room for 4 consecutive ports",
        "allowed: 1 to 65532",
    ),
    "further_port": row({"preflight_ports": [70000]}, "preflight_ports", "70000", "allowed: 1 to 65535"),
    "negative_bytes": row({"model_weights_keep_free_bytes": -1}, "model_weights_keep_free_bytes", "-1", "0 or more"),
    "address": row({"serving_publish_address": "gpu-01"}, "serving_publish_address", "'gpu-01'", "not an IP address"),
    "relative_path": row({"model_cache_directory": "data/cache"}, "model_cache_directory", "'data/cache'", "absolute"),
    "url": row(
        {"model_weights_endpoint": "hub.example.org"}, "model_weights_endpoint", "'hub.example.org'", "https://"
    ),
    "checksum": row(
        {"inference_server_image_archive_sha256": "beef"}, "inference_server_image_archive_sha256", "'beef'", "64 hex"
    ),
    "fingerprint": row(
        {"docker_engine_key_fingerprints": ["9DC8"]},
        "docker_engine_key_fingerprints",
        "'9DC8'",
        "40 hexadecimal digits",
    ),
    # overrides
    "override_unknown": overridden(
        "max_bach_size=4: TensorRT-LLM 1.2.1 has no such option", "did you mean max_batch_size?", max_bach_size=4
    ),
    "override_below": overridden(
        "cuda_graph_config.enable_paddin=True",
        "did you mean cuda_graph_config.enable_padding?",
        **{"cuda_graph_config.enable_paddin": True},
    ),
    "override_range": overridden(
        "kv_cache_memory_fraction=1.5", "less than or equal to 1", kv_cache_memory_fraction=1.5
    ),
    "override_type": overridden("max_batch_size='many'", "integer", max_batch_size="many"),
    "override_choice": overridden("moe_backend='FAST'", "TRITON", moe_backend="FAST"),
    "override_twice": overridden(
        "max_batch_size is set twice",
        "keep one",
        **{"max_batch_size": 4, "options.max_batch_size": 8},
    ),
    "override_managed": overridden("cannot be set", **{"environment.CUDA_VISIBLE_DEVICES": "0"}),
    "override_undefined": overridden("'batch' is undefined", max_batch_size="{{ batch }}"),
    # versions
    "revision_branch": row(
        overlay("branch"), "serving_catalog_overlay", "models.gpt-oss-120b", "'main'", "not 40 lower-case hex digits"
    ),
    "revision_short": row(
        overlay("short"), "serving_catalog_overlay", "'b5c939de8f754692c1647ca79fbf85e8c1e70f8'", "pin the commit"
    ),
    "overlay_misspelt_file": row(
        overlay("misspelt_file"), "serving_catalog_overlay", "model.yml", "allowed: ", "models.yml"
    ),
    "overlay_misspelt_key": row(overlay("misspelt_key"), "serving_catalog_overlay", "docker.verson", "not permitted"),
    "overlay_missing": row(overlay("nowhere"), "serving_catalog_overlay", "nowhere", "not a directory"),
    "driver_branch": row(
        {"nvidia_driver_version": "565.57.01"}, "nvidia_driver_version", "565.57.01", "branch 570 or newer"
    ),
    "driver_branch_by_itself": row(
        {"nvidia_driver_branch": "565"}, "nvidia_driver_branch", "565 is not the branch of", "set nvidia_driver_version"
    ),
    "driver_branch_of_an_overlay": row(
        overlay("old_driver"), "serving_catalog_overlay", "565 is below 570", "nvidia_driver"
    ),
    "driver_version_not_exact": row({"nvidia_driver_version": "580"}, "nvidia_driver_version", "'580'", "580.159.04"),
    "proprietary_on_blackwell": row(
        {"serving_gpu": "B200", "nvidia_driver_kernel_modules": "proprietary"},
        "nvidia_driver_kernel_modules",
        "proprietary is not allowed; expected open",
    ),
    "proprietary_on_grace": row(
        {"serving_gpu": "GB200", "nvidia_driver_kernel_modules": "proprietary"},
        "nvidia_driver_kernel_modules",
        "proprietary is not allowed; expected open",
    ),
    "coherent_memory_without_grace": row(
        {"nvidia_driver_coherent_memory": "numa"}, "nvidia_driver_coherent_memory", "numa", "Allowed here: default"
    ),
    "docker_too_old": row(
        {"docker_engine_version": "19.03.15"}, "docker_engine_version", "19.03.15 is too old", "20.10.0 or newer"
    ),
    "toolkit_that_is_broken": row(
        {"nvidia_container_toolkit_version": "1.17.7-1"}, "nvidia_container_toolkit_version", "1.17.7-1", "1.19.1-1"
    ),
    # what belongs together
    "image_archive_missing": row(
        {"inference_server_image_archive": "/nowhere/image.tar"},
        "inference_server_image_archive",
        "'/nowhere/image.tar' is not on the controller",
        "inference_server_image_archive_on",
    ),
    "weights_archive_not_named": row(
        {"model_weights_source": "archive"}, "model_weights_path", "is not set", "model_weights_source: archive"
    ),
    "weights_server_not_named": row(
        {"model_weights_source": "http"}, "model_weights_url", "is not set", "model_weights_source: http"
    ),
    "weights_server_not_asked": row(
        {"model_weights_url": "http://mirror.example.org/gpt-oss"},
        "model_weights_url",
        "has no effect with model_weights_source: hub",
        "set model_weights_source to http",
    ),
    "weights_server_with_password": row(
        {"model_weights_source": "http", "model_weights_url": f"http://robot:{SECRET}@mirror.example.org/gpt-oss"},
        "model_weights_url",
        "http or https address of a directory, without credentials",
    ),
    "peer_that_is_not_in_the_inventory": row(
        {"model_weights_fan_out": True, "model_weights_peers": ["peer_that_is_not_in_the_inventory", "gpu-99"]},
        "model_weights_peers",
        "'gpu-99' is not in the inventory",
        "add the host to it",
    ),
    "weights_archive_missing": row(
        {"model_weights_source": "archive", "model_weights_path": "/nowhere/weights.tar"},
        "model_weights_path",
        "'/nowhere/weights.tar' is not on the controller",
    ),
    # secrets
    "secret_of_a_wrong_type": row(
        {"model_weights_token": [SECRET]}, "model_weights_token", "(hidden) is a list", "text"
    ),
    "secret_under_a_misspelt_name": row(
        {"model_weights_tokn": SECRET}, "model_weights_tokn", "did you mean model_weights_token?"
    ),
    "secret_in_an_override": overridden("environment.HF_TOKEN=***", **{"environment.HF_TOKEN": SECRET}),
    "secret_without_its_user": row(
        {"inference_server_registry_password": SECRET}, "inference_server_registry_username", "is not set", "set both"
    ),
    "secret_in_an_address": row(
        {"model_weights_index_url": f"ftp://robot:{SECRET}@pypi.example.org/simple"},
        "model_weights_index_url",
        "'ftp://***@pypi.example.org/simple'",
        "https://",
    ),
}


@dataclass(frozen=True)
class Run:
    """An ansible-playbook run: what it said, and how it ended for each host."""

    status: int
    output: str

    @property
    def failures(self) -> dict[str, dict[str, Any]]:
        found = re.finditer(r"^fatal: \[(\S+?)\]: FAILED! => (\{.*\})$", self.output, re.M)
        return {match[1]: json.loads(match[2]) for match in found}

    def reached(self) -> set[str]:
        """The hosts to which something went, or was tried to go."""
        _, _, trips = self.output.partition("ROUND TRIPS")
        counted = {match[1] for match in re.finditer(r"^(\S+) +: \d+$", trips, re.M)}
        return counted | set(re.findall(r"^fatal: \[(\S+?)\]: UNREACHABLE!", self.output, re.M))


def play(*arguments: str | Path) -> Run:
    tools = Path(sys.executable).parent
    done = subprocess.run(
        [str(tools / "ansible-playbook"), *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "ANSIBLE_FORCE_COLOR": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Run(done.returncode, done.stdout)


def write_inventory(directory: Path, hosts: dict[str, dict[str, Any]]) -> Path:
    inventory = directory / "hosts.yml"
    inventory.write_text(yaml.safe_dump({"all": {"hosts": hosts, "vars": NOWHERE}}))
    return inventory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """site.yml on one host for each row, and on one without a mistake."""
    directory = tmp_path_factory.mktemp("fleet")
    for name, files in OVERLAYS.items():
        for file, content in files.items():
            path = directory / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(content))
    hosts = {name: {**GOOD, **row.given} for name, row in ROWS.items()}
    return play("-i", write_inventory(directory, {**hosts, "flawless": GOOD}), "site.yml", "--forks", "4")


@pytest.mark.parametrize("name", ROWS)
def test_the_message_names_the_input_its_value_and_what_is_allowed(run: Run, name: str) -> None:
    failure = run.failures.get(name)
    assert failure is not None, f"{name} was not refused:\n{run.output[-3000:]}"
    assert failure["msg"].startswith(f"{name} is not touched: its inputs have one problem\n")
    (problem,) = failure["problems"]
    assert problem.startswith(f"{ROWS[name].key}: ")
    for part in ROWS[name].says:
        assert part in problem


def test_nobody_is_asked_but_the_host_without_a_mistake(run: Run) -> None:
    assert run.status != 0
    assert run.reached() == {"flawless"}
    assert not re.search(r"changed=[1-9]", run.output)


def test_no_secret_is_printed(run: Run) -> None:
    assert SECRET not in run.output


def test_every_mistake_of_a_host_is_said_at_once(tmp_path: Path) -> None:
    mistakes = {"serving_gpu_count": 3, "serving_gpu_cont": 4, "nvidia_driver_version": "565.57.01"}
    run = play("-i", write_inventory(tmp_path, {"many": {**GOOD, **mistakes}}), "site.yml", "--check")
    assert {problem.split(":")[0] for problem in run.failures["many"]["problems"]} == set(mistakes)
    assert run.reached() == set()
    assert run.status != 0


@pytest.mark.parametrize(
    "arguments", [("--inventory", "empty.yml"), ("--inventory", "nowhere.yml")], ids=["empty", "no such file"]
)
@pytest.mark.parametrize("playbook", ["site.yml", "playbooks/diagnose.yml"])
def test_an_inventory_without_hosts(tmp_path: Path, playbook: str, arguments: tuple[str, str]) -> None:
    (tmp_path / "empty.yml").write_text("all:\n  vars: {}\n")
    run = play(arguments[0], tmp_path / arguments[1], playbook)
    assert run.status != 0
    message = run.failures["localhost"]["msg"]
    assert message.startswith(f"The inventory {tmp_path / arguments[1]} names no host.")
    assert "Pass one with -i" in message


REMOVALS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "values": (
        {"remove": ["weights", "docker", "drivers"], "model_cache_directroy": "/data"},
        [
            "remove: 'docker' is not allowed; allowed: weights, toolkit, driver",
            "remove: 'drivers' is not allowed (did you mean driver?); allowed: weights, toolkit, driver",
            "model_cache_directroy: role model_cache has no such input (did you mean model_cache_directory?); its"
            " inputs: roles/model_cache/README.md",
        ],
    ),
    "no list": ({"remove": "weights"}, ["remove: 'weights' is text; expected a list of weights, toolkit, driver"]),
    "names": (
        {"remov": ["weights"], "remvoe": ["weights"]},
        [
            "remov: is it remove? Inputs begin with the name of their role, or with serving_",
            "remvoe: is it remove? Inputs begin with the name of their role, or with serving_",
        ],
    ),
}


@pytest.mark.parametrize(("said", "problems"), REMOVALS.values(), ids=REMOVALS)
def test_remove_of_what_it_does_not_know(tmp_path: Path, said: dict[str, Any], problems: list[str]) -> None:
    inventory = write_inventory(tmp_path, {"flawless": GOOD})
    run = play("-i", inventory, "playbooks/remove.yml", "-e", json.dumps(said))
    assert run.status != 0
    assert sorted(run.failures["flawless"]["problems"]) == sorted(problems)
    assert run.reached() == set()


def test_a_host_that_could_not_serve_can_be_left(tmp_path: Path) -> None:
    """What is no longer served, or not named at all, is no reason to keep a server."""
    hosts = {"retired": {**GOOD, "serving_gpu": "L40S"}, "nameless": {}, "own": {**GOOD, "remote": "origin"}}
    run = play("-i", write_inventory(tmp_path, hosts), "playbooks/remove.yml", "--tags", "always")
    assert run.status == 0, run.output


@pytest.mark.parametrize("playbook", sorted(path.name for path in (REPOSITORY / "playbooks").glob("*.yml")))
def test_every_playbook_looks_at_the_inventory_and_at_every_input_first(playbook: str) -> None:
    plays = yaml.safe_load((REPOSITORY / "playbooks" / playbook).read_text())
    if "weights.yml" in plays[0].values():  # imports a playbook that does
        plays = plays[1:]
    else:
        assert plays.pop(0)["ansible.builtin.import_playbook"] == "internal/require_hosts.yml"
    imported = [book["ansible.builtin.import_playbook"] for book in plays if "hosts" not in book]
    plays = [book for book in plays if "hosts" in book]
    for part in imported:
        if part.startswith("internal/"):  # others are judged by themselves
            plays += yaml.safe_load((REPOSITORY / "playbooks" / part).read_text())
    assert plays
    for book in plays:
        assert book["gather_facts"] is False
        # A host that cannot serve can still be left: remove.yml asks for names and types alone.
        checks = "tasks/names.yml" if playbook == "remove.yml" else "tasks/plan.yml"
        assert book["pre_tasks"][0]["ansible.builtin.import_tasks"].removeprefix("../") == checks
