"""What happens to running servers when plans, images, ports and Docker change; and what is refused while they run.

One host for all of it, prepared by the scenario of role inference_server, whose small engine stands for the real one.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving_catalog import load_catalog
from serving_catalog.planning import plan_host
from serving_catalog.plans import ServeRequest
from tests.hosts import hosts, mirror
from tests.hosts.machine import REPOSITORY

pytestmark = pytest.mark.hosts

NAME = "server-cases"
SCENARIO = REPOSITORY / "roles/inference_server/molecule/default"
IMAGE = f"nvcr.io/test/inference-server:{NAME}"
# The small engine fails at once or not at all.
SHORT = {"inference_server_settle_seconds": 2}


def plan_for(profile: str = "low_latency", **more: Any) -> dict[str, Any]:
    request = ServeRequest(engine="tensorrt_llm", profile=profile, gpu="H200", gpu_count=4)
    found: dict[str, Any] = plan_host(request, load_catalog()).model_dump(mode="json")
    return {**found, "image": IMAGE, "image_bytes": 3_000_000, **more}


class Case:
    """A host that serves, and runs of the role against it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.took = 0.0

    def play(self, playbook: Path, variables: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
        given = self.directory / "variables.json"
        given.write_text(json.dumps(variables or {}))
        tools = Path(sys.executable).parent
        environment = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "MOLECULE_PROJECT_DIRECTORY": f"/{NAME}",
        }
        inventory = REPOSITORY / "inventories/demo/scenario.ini"
        started = time.monotonic()
        done = subprocess.run(
            [str(tools / "ansible-playbook"), f"--inventory={inventory}", f"--extra-vars=@{given}", str(playbook)],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.took = time.monotonic() - started
        print(done.stdout)
        return done

    def serve(self, plan: dict[str, Any] | None = None, **inputs: Any) -> int:
        """Run the role; the number of tasks that changed something."""
        done = self.play(
            SCENARIO / "converge.yml", {"inference_server_test_plan": plan or plan_for(), **SHORT, **inputs}
        )
        assert done.returncode == 0
        return int(re.findall(r"changed=(\d+)", done.stdout)[-1])

    def refused(self, plan: dict[str, Any] | None = None, **inputs: Any) -> str:
        """Run the role, which must fail; what it says."""
        done = self.play(
            SCENARIO / "converge.yml", {"inference_server_test_plan": plan or plan_for(), **SHORT, **inputs}
        )
        assert done.returncode == 2
        messages = re.findall(r'"msg": "((?:[^"\\]|\\.)*)"', done.stdout)
        return str(json.loads(f'"{messages[-1]}"'))

    def shell(self, command: str) -> str:
        ssh = hosts.ssh_command(NAME, "sudo", "sh", "-c", f"'{command}'")
        done = subprocess.run(ssh, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert done.returncode == 0, done.stdout
        return done.stdout.strip()

    def container(self, name: str = "0") -> str:
        """The id of a process's container; another one after a restart."""
        return self.shell(f"docker ps --quiet --no-trunc --filter name=^gpt-oss-{name}$")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    mirror.up()
    hosts.up(NAME, image="docker", hardware="h200_x4")
    prepared = Case(tmp_path_factory.mktemp("case"))
    assert prepared.play(SCENARIO / "prepare.yml").returncode == 0
    prepared.serve()
    yield prepared
    hosts.down(NAME)


def test_no_change_restarts_nothing_and_a_change_restarts_once(case: Case) -> None:
    before = case.container()
    assert case.serve() == 0
    assert case.container() == before
    plan = plan_for()
    plan["processes"][0]["options_file"]["max_batch_size"] = 32
    assert case.serve(plan) == 1  # files and server, in one task
    after = case.container()
    assert after not in ("", before)
    assert case.serve(plan) == 0
    assert case.container() == after
    assert case.shell("systemctl show --property NRestarts --value gpt-oss@0") == "0"
    case.serve()


def test_a_server_that_somebody_stopped_is_started_again(case: Case) -> None:
    case.shell("systemctl stop gpt-oss@0")
    assert case.container() == ""
    assert case.serve() == 1
    assert case.container() != ""


def test_replicas_come_and_go_with_the_plan(case: Case) -> None:
    case.serve(plan_for("max_throughput_replicated"))
    assert [bool(case.container(str(number))) for number in range(4)] == [True] * 4
    case.serve()
    assert [bool(case.container(str(number))) for number in range(4)] == [True, False, False, False]
    assert case.shell("ls /etc/gpt-oss/processes") == "0"
    assert case.shell(
        "systemctl list-unit-files --state=enabled --no-legend gpt-oss* | cut -d. -f1"
    ) == "gpt-oss-watchdog@\ngpt-oss@" or (
        case.shell("ls /etc/systemd/system/multi-user.target.wants | grep gpt-oss") == "gpt-oss@0.service"
    )


def test_an_option_that_the_engine_does_not_know_is_told_with_its_own_words(case: Case) -> None:
    plan = plan_for()
    plan["processes"][0]["argv"].append("--max_batchsize")
    said = case.refused(plan)
    assert "Likely cause: the engine does not know an option" in said
    assert "Error: No such option: --max_batchsize" in said
    assert case.took < 600  # not the forty minutes that a load may take
    case.serve()


def test_memory_that_runs_out_is_told_with_the_remedy(case: Case) -> None:
    said = case.refused(inference_server_environment={"FAIL_WITH": "torch.OutOfMemoryError: CUDA out of memory."})
    assert "Likely cause: memory ran out" in said
    assert "kv_cache_memory_fraction" in said
    case.serve()


def test_a_port_that_somebody_holds_is_refused_before_anything_changes(case: Case) -> None:
    before = case.container()
    case.shell("systemd-run --unit=somebody --quiet busybox nc -l -p 8100")
    plan = copy.deepcopy(plan_for())
    plan["processes"][0]["port"] = 8100
    said = case.refused(plan)
    case.shell("systemctl stop somebody")
    assert said.startswith("serving_port: 8100 is taken: somebody.service listens on")
    assert case.container() == before
    assert "8000:8000" in case.shell("cat /etc/gpt-oss/processes/0/start")


def test_an_image_that_the_registry_does_not_have_is_refused_and_the_server_goes_on(case: Case) -> None:
    before = case.container()
    said = case.refused(plan_for(image="nvcr.io/test/no-such-image:1"))
    assert "10.89.77.2:5000/test/no-such-image:1: the registry has no such image" in said
    assert "inference_server_image_registry" in said
    assert case.container() == before


def archive_for(architecture: str, name: str) -> bytes:
    """A docker save archive of an image for some machine, small and whole."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("empty"))
    layer_digest = hashlib.sha256(layer.getvalue()).hexdigest()
    described = {
        "architecture": architecture,
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
    }
    configuration = json.dumps(described).encode()
    configuration_name = f"{hashlib.sha256(configuration).hexdigest()}.json"
    manifest = [{"Config": configuration_name, "RepoTags": [name], "Layers": ["layer.tar"]}]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, data in (
            ("layer.tar", layer.getvalue()),
            (configuration_name, configuration),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return archive.getvalue()


def test_an_image_for_another_machine_is_refused_before_it_is_pulled(case: Case) -> None:
    name = "10.89.77.2:5000/test/arm:1"
    loaded = subprocess.run(
        hosts.ssh_command(NAME, "sudo", "docker", "load"),
        input=archive_for("arm64", name),
        capture_output=True,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr
    case.shell(f"docker push --quiet {name} && docker image rm {name}")
    said = case.refused(plan_for(image="nvcr.io/test/arm:1"))
    assert "the registry has it for arm64, not for amd64" in said
    assert case.shell(f"docker images --quiet {name}") == ""


def test_too_little_room_for_an_image_is_said_in_bytes(case: Case) -> None:
    case.shell("docker tag $(docker images --quiet gpt-oss/gpu-proof) 10.89.77.2:5000/test/large:1")
    case.shell("docker push --quiet 10.89.77.2:5000/test/large:1 && docker image rm 10.89.77.2:5000/test/large:1")
    said = case.refused(plan_for(image="nvcr.io/test/large:1", image_bytes=10**15))
    assert re.search(
        r"/var/lib/docker: \d+ bytes are free, nvcr.io/test/large:1 needs 1000000000000000: \d+ are missing", said
    )


def test_archives(case: Case) -> None:
    """From the host and from the controller; a corrupt or wrong one is refused and the server goes on."""
    case.shell(
        f"docker tag $(docker inspect --format {{{{.Image}}}} gpt-oss-0) {IMAGE} && docker save --output "
        f"/var/tmp/image.tar {IMAGE} && "
        f"docker image rm {IMAGE} && chmod 644 /var/tmp/image.tar"
    )
    before = case.container()
    on_host: dict[str, Any] = {
        "inference_server_image_archive": "/var/tmp/image.tar",
        "inference_server_image_archive_on": "host",
    }

    assert "there is no such archive" in case.refused(
        **{**on_host, "inference_server_image_archive": "/var/tmp/none.tar"}
    )
    case.shell("head --bytes=1000000 /var/tmp/image.tar > /var/tmp/cut.tar")
    cut: dict[str, Any] = {**on_host, "inference_server_image_archive": "/var/tmp/cut.tar"}
    assert re.search("corrupt|incomplete", case.refused(**cut))
    assert "holds no image nvcr.io/test/other:1; it holds " + IMAGE in case.refused(
        plan_for(image="nvcr.io/test/other:1"), **on_host
    )
    wrong = case.refused(**on_host, inference_server_image_archive_sha256="0" * 64)
    assert "is corrupt or another archive" in wrong
    assert case.container() == before

    case.serve(**on_host)
    record = json.loads(case.shell("cat /etc/gpt-oss/image.json"))
    assert record["source"] == "archive /var/tmp/image.tar"
    assert record["reference"].startswith("sha256:")
    assert case.container() != before
    assert case.serve(**on_host) == 0

    fetched = case.directory / "image.tar"
    ssh = hosts.ssh_command(NAME, "cat", "/var/tmp/image.tar")
    with fetched.open("wb") as stream:
        subprocess.run(ssh, stdout=stream, check=True)
    on_controller: dict[str, Any] = {"inference_server_image_archive": str(fetched)}
    case.serve(**on_controller)
    assert case.shell("ls /var/lib/gpt-oss/staging") == ""
    assert case.serve(**on_controller) == 0
    missing = case.refused(inference_server_image_archive="/no/such/archive.tar")
    assert "is not on the controller" in missing
    case.serve()


def test_docker_is_not_restarted_under_a_server_unless_that_was_agreed(case: Case, tmp_path: Path) -> None:
    playbook = tmp_path / "docker.yml"
    playbook.write_text("- hosts: all\n  become: true\n  gather_facts: false\n  roles: [docker_engine]\n")
    options: dict[str, Any] = {
        "live-restore": True,
        "insecure-registries": ["10.89.77.2:5000"],
        "labels": ["changed=yes"],
    }
    before = case.container()
    configuration = case.shell("cat /etc/docker/daemon.json")

    refused = case.play(playbook, {"docker_engine_daemon_options": options})
    assert refused.returncode == 2
    assert "gpt-oss-0 is serving" in refused.stdout
    assert "docker_engine_maintenance: true" in refused.stdout
    assert case.container() == before
    assert case.shell("cat /etc/docker/daemon.json") == configuration

    agreed: dict[str, Any] = {"docker_engine_daemon_options": options, "docker_engine_maintenance": True}
    assert case.play(playbook, agreed).returncode == 0
    assert "changed=yes" in case.shell("docker info --format {{.Labels}}")
    deadline = time.monotonic() + 60
    while case.container() in ("", before) and time.monotonic() < deadline:
        time.sleep(1)
    assert case.container() not in ("", before)
    assert case.serve() == 0


def test_a_configuration_that_docker_does_not_start_with_is_taken_back(case: Case, tmp_path: Path) -> None:
    case.shell("systemctl stop gpt-oss@0")
    playbook = tmp_path / "docker.yml"
    playbook.write_text("- hosts: all\n  become: true\n  gather_facts: false\n  roles: [docker_engine]\n")
    configuration = case.shell("cat /etc/docker/daemon.json")
    options: dict[str, Any] = {"insecure-registries": ["10.89.77.2:5000"], "no-such-key": 1}
    done = case.play(playbook, {"docker_engine_daemon_options": options})
    assert done.returncode == 2
    assert "no-such-key" in done.stdout
    assert "Docker runs with it again" in done.stdout
    assert case.shell("cat /etc/docker/daemon.json") == configuration
    assert case.shell("systemctl is-active docker") == "active"
    case.serve()


def test_everything_can_be_removed(case: Case, tmp_path: Path) -> None:
    playbook = tmp_path / "remove.yml"
    playbook.write_text(
        "- hosts: all\n  become: true\n  gather_facts: false\n  tasks:\n"
        "    - ansible.builtin.import_role: {name: inference_server, tasks_from: remove}\n"
    )
    for changed in (2, 0):
        done = case.play(playbook)
        assert done.returncode == 0
        assert f"changed={changed}" in done.stdout
    assert case.container() == ""
    assert (
        case.shell("ls -d /etc/gpt-oss /etc/systemd/system/*gpt-oss* /usr/local/lib/gpt-oss 2> /dev/null | wc -l")
        == "0"
    )
    assert case.shell("ls /var/lib/gpt-oss/weights") != ""
