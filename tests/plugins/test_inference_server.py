"""The role inference_server's filters: files and hashes of a plan, and what on a host stands in its way."""

from __future__ import annotations

import copy
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError

from serving_catalog import load_catalog
from serving_catalog.planning import plan_host
from serving_catalog.plans import ServeRequest
from tests.programs import load

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "registry.example.org/nvidia/tensorrt-llm/release@sha256:" + "0" * 64


FILTERS = load("plugins/filter/inference_server.py")


def plan_for(profile: str = "low_latency", **more: Any) -> dict[str, Any]:
    request = ServeRequest(engine="tensorrt_llm", profile=profile, gpu="H200", gpu_count=4, **more)
    found: dict[str, Any] = plan_host(request, load_catalog()).model_dump(mode="json")
    return found


def settings(**more: Any) -> dict[str, Any]:
    return {
        "image": IMAGE,
        "cache_directory": "/var/lib/gpt-oss",
        "configuration_directory": "/etc/gpt-oss",
        "publish_address": "127.0.0.1",
        "gpu_access": "cdi",
        "ulimits": {},
        "environment": {},
        "stop_timeout_seconds": 180,
        "unit": "[Unit]\n",
        "watchdog": {"timeout_seconds": 60, "failures": 3},
        **more,
    }


def made(plan: dict[str, Any] | None = None, **more: Any) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    result = FILTERS.server_files(plan or plan_for(), settings(**more))
    files = {entry["path"]: entry for entry in result["files"]}
    assert len(files) == len(result["files"]), "a path is named twice"
    return files, {process["name"]: process["plan"] for process in result["processes"]}


def command(files: dict[str, dict[str, Any]], name: str = "0") -> list[str]:
    lines = files[f"/etc/gpt-oss/processes/{name}/start"]["content"].splitlines()
    assert lines[0] == "#!/bin/sh"
    return shlex.split(" ".join(line.rstrip("\\") for line in lines[2:]))


def test_the_command_runs_the_plan_in_the_foreground_on_the_given_image() -> None:
    plan = plan_for()
    files, plans = made(plan)
    words = command(files)
    assert words[:3] == ["exec", "docker", "run"]
    assert words[words.index(IMAGE) + 1 :] == plan["processes"][0]["argv"]
    assert {"--init", "--ipc=host", "--rm"} <= set(words)
    assert "-d" not in words
    assert "-it" not in words
    assert words[words.index("-p") + 1] == "127.0.0.1:8000:8000"
    assert f"gpt-oss.plan={plans['0']}" in words
    assert "nvidia.com/gpu=3" in words


def test_directories_are_named_before_what_lies_in_them() -> None:
    files, _ = made(plan_for("max_throughput_replicated"))
    seen: set[str] = {"/etc/gpt-oss/processes", "/var/lib/gpt-oss"}
    for path in files:
        assert str(Path(path).parent) in seen, f"{path} before its directory"
        seen.add(path)


def test_replicas_have_their_own_ports_gpus_and_caches() -> None:
    files, plans = made(plan_for("max_throughput_replicated"))
    assert sorted(plans) == ["0", "1", "2", "3"]
    commands = [command(files, name) for name in sorted(plans)]
    assert [words[words.index("-p") + 1] for words in commands] == [f"127.0.0.1:{8000 + n}:8000" for n in range(4)]
    caches = [{word for word in words if "/engine_caches/" in word} for words in commands]
    assert not caches[0] & caches[1]


CHANGES: dict[str, dict[str, Any]] = {
    "image": {"image": "other@sha256:" + "1" * 64},
    "address": {"publish_address": "0.0.0.0"},
    "gpu access": {"gpu_access": "gpus"},
    "limits": {"ulimits": {"stack": 1}},
    "environment": {"environment": {"A": "1"}},
    "unit": {"unit": "[Unit]\nDescription=other\n"},
    "stop timeout": {"stop_timeout_seconds": 10},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_a_running_server_was_started_with_changes_its_hash(change: dict[str, Any]) -> None:
    assert made()[1] != made(**change)[1]


def test_an_option_changes_the_hash_and_the_watchdog_does_not() -> None:
    plan = plan_for()
    changed = copy.deepcopy(plan)
    changed["processes"][0]["options_file"]["max_batch_size"] = 32
    assert made(plan)[1] == made(plan)[1]
    assert made(plan)[1] != made(changed)[1]
    assert made(plan)[1] == made(plan, watchdog={"timeout_seconds": 5, "failures": 9})[1]


def test_another_revision_of_the_model_changes_the_hash() -> None:
    """The command names the model alone; without this a server would go on with the weights that it has."""
    plan = plan_for()
    changed = copy.deepcopy(plan)
    changed["model"]["revision"] = "0" * 40
    assert made(plan)[1] != made(changed)[1]


def test_a_change_of_one_replica_leaves_the_hashes_of_the_others() -> None:
    plan = plan_for("max_throughput_replicated")
    changed = copy.deepcopy(plan)
    changed["processes"][2]["options_file"]["max_batch_size"] = 32
    before, after = made(plan)[1], made(changed)[1]
    assert {name for name in before if before[name] != after[name]} == {"2"}


def test_secrets_are_in_a_file_of_their_own_and_nowhere_else() -> None:
    files, _ = made(environment={"API_KEY": "hunter2"})
    holding = [path for path, entry in files.items() if "hunter2" in entry.get("content", "")]
    assert holding == ["/etc/gpt-oss/processes/0/environment"]
    assert files[holding[0]]["mode"] == "0600"
    assert files[holding[0]]["sensitive"]


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"A-B": "1"}, "inference_server_environment.A-B: is not the name"),
        ({"A": 1}, "inference_server_environment.A: 1 is not text; write it in quotes"),
        ({"A": "1\n2"}, "more than one line"),
        ({"HF_HUB_OFFLINE": "0"}, "inference_server_environment.HF_HUB_OFFLINE: is set by the role itself"),
    ],
)
def test_environment_that_cannot_work_is_refused(environment: dict[str, Any], says: str) -> None:
    with pytest.raises(AnsibleFilterError, match=says):
        made(environment=environment)


def test_a_variable_that_the_plan_sets_is_refused() -> None:
    plan = plan_for(release="gpt-oss-dev")
    with pytest.raises(AnsibleFilterError, match=r"TRTLLM_ENABLE_PDL: is set by the plan, too"):
        made(plan, environment={"TRTLLM_ENABLE_PDL": "0"})


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1:8000", "", "eth0"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(
        AnsibleFilterError, match=r"inference_server_publish_address: .* is not an IP address. Allowed: 127.0.0.1"
    ):
        made(publish_address=address)


@pytest.mark.parametrize(
    ("published", "asked"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("192.0.2.7", "192.0.2.7"), ("::", "::1")],
)
def test_the_watchdog_asks_where_the_server_is(published: str, asked: str) -> None:
    files, _ = made(publish_address=published)
    described = json.loads(files["/etc/gpt-oss/processes/0/process.json"]["content"])
    assert described["address"] == asked


# -- obstacles ---------------------------------------------------------------------------------------------------


def a_host() -> dict[str, Any]:
    """A survey of a host that is ready."""
    return {
        "architecture": {"machine": "x86_64"},
        "docker": {
            "installed": True,
            "running": True,
            "error": None,
            "version": "29.8.2",
            "cdi": {"enabled": True, "directories": ["/etc/cdi"]},
            "containers": [],
        },
        "toolkit": {"cdi_devices": ["nvidia.com/gpu=0"], "runtime_hook": "/usr/bin/nvidia-container-runtime-hook"},
        "ports": {"8000": {"listening": False, "addresses": [], "unit": None, "process": None}},
        "weights": {"marker": "/m.json", "marker_present": True, "problems": []},
    }


def obstacles(survey: dict[str, Any], address: str = "127.0.0.1", access: str = "cdi") -> list[str]:
    needs = {"publish_address": address, "gpu_access": access, "minimum_docker": "20.10.0"}
    found: list[str] = FILTERS.server_obstacles(survey, plan_for(), needs)
    return found


def changed(path: str, value: Any) -> dict[str, Any]:
    survey = a_host()
    part = survey
    *parents, last = path.split("/")
    for name in parents:
        part = part[name]
    part[last] = value
    return survey


def listening(*addresses: str, unit: str | None = "nginx.service") -> dict[str, Any]:
    return changed("ports/8000", {"listening": True, "addresses": list(addresses), "unit": unit, "process": "nginx"})


def test_a_host_that_is_ready_has_none() -> None:
    assert obstacles(a_host()) == []
    assert obstacles(a_host(), access="gpus") == []


@pytest.mark.parametrize(
    ("survey", "says"),
    [
        ({**a_host(), "docker": {**a_host()["docker"], "running": False, "installed": False}}, "Docker is absent"),
        (
            {**a_host(), "docker": {**a_host()["docker"], "running": False, "error": "refused"}},
            r"does not answer \(refused\)",
        ),
        (changed("docker/version", "19.03.15"), "Docker 19.03.15 is too old; 20.10.0 or newer"),
        (changed("toolkit/cdi_devices", []), "CDI lists no GPU"),
        (changed("docker/cdi", {"enabled": False, "directories": []}), "CDI cannot be used with Docker 29.8.2"),
        (
            changed("weights/marker_present", False),
            "weights are missing .* /m.json is not there. Run playbooks/weights.yml",
        ),
        (changed("weights/problems", ["a is missing"]), "weights are missing or were never verified: a is missing"),
        (changed("architecture/machine", "riscv64"), "published for x86_64, aarch64, this host is riscv64"),
        (listening("127.0.0.1"), "serving_port: 8000 is taken: nginx.service listens on 127.0.0.1"),
        (listening("0.0.0.0"), "serving_port: 8000 is taken"),
        (listening("::", unit=None), "serving_port: 8000 is taken: nginx listens on ::"),
    ],
)
def test_obstacle(survey: dict[str, Any], says: str) -> None:
    found = obstacles(survey)
    assert len(found) == 1
    assert re.search(says, found[0]), found[0]


def test_no_hook_is_an_obstacle_where_it_is_needed() -> None:
    survey = changed("toolkit/runtime_hook", None)
    assert obstacles(survey) == []
    assert "containers get no GPUs" in obstacles(survey, access="gpus")[0]


def test_all_obstacles_are_named_at_once() -> None:
    survey = listening("127.0.0.1")
    survey["weights"]["marker_present"] = False
    survey["docker"]["running"] = False
    assert len(obstacles(survey)) == 3


def test_another_address_of_the_same_port_is_free() -> None:
    assert obstacles(listening("192.0.2.7")) == []
    assert len(obstacles(listening("192.0.2.7"), address="0.0.0.0")) == 1
    assert len(obstacles(listening("::ffff:127.0.0.1"))) == 1


def test_our_own_container_may_hold_the_port() -> None:
    survey = listening("127.0.0.1")
    survey["docker"]["containers"] = [{"name": "gpt-oss-0", "state": "running", "ports": [8000]}]
    assert obstacles(survey) == []
