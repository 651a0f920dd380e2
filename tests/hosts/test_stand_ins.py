"""The test hosts themselves: what stands in for hardware must refuse what hardware refuses, or roles prove nothing."""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts import hosts, mirror, surroundings
from tests.hosts.machine import podman, podman_command
from tests.stand_ins import hardware
from tests.stand_ins.packages import fingerprint

pytestmark = pytest.mark.hosts

DRIVER = "580.159.04"
NEWER = "580.178.04"


@dataclass(frozen=True)
class Machine:
    name: str

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        command = [*podman_command(), "exec", "-i", hosts.PREFIX + self.name, "bash", "-s"]
        return subprocess.run(command, input=script, capture_output=True, text=True, check=False)

    def ok(self, script: str) -> str:
        done = self.run("set -euo pipefail\n" + script)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    address = mirror.up()
    name = "stand-ins"
    hosts.up(name, image="docker", hardware="h200_x4")
    machine = Machine(name)
    machine.ok(
        f"curl -fsS http://{address}/apt/cuda/debian12/x86_64/3bf863cc.pub > /etc/apt/keyrings/cuda.asc\n"
        f"curl -fsS http://{address}/apt/libnvidia-container/gpgkey > /etc/apt/keyrings/toolkit.asc\n"
        f"echo 'deb [signed-by=/etc/apt/keyrings/cuda.asc] http://{address}/apt/cuda/debian12/x86_64/ /'"
        " > /etc/apt/sources.list.d/cuda.list\n"
        "echo 'deb [signed-by=/etc/apt/keyrings/toolkit.asc] "
        f"http://{address}/apt/libnvidia-container/stable/deb/amd64 /' > /etc/apt/sources.list.d/toolkit.list\n"
        "apt-get update -qq"
    )
    yield machine
    hosts.down(name)


def install(machine: Machine, *packages: str) -> subprocess.CompletedProcess[str]:
    return machine.run(f"DEBIAN_FRONTEND=noninteractive apt-get install -y -q {' '.join(packages)}")


def test_repositories_are_signed_by_the_published_key(machine: Machine) -> None:
    shown = machine.ok("gpg --show-keys --with-colons /etc/apt/keyrings/cuda.asc")
    assert f"fpr:::::::::{fingerprint()}:" in shown
    machine.ok("cp /etc/apt/sources.list.d/cuda.list /tmp/")
    refused = machine.run(
        "sed -i 's#keyrings/cuda.asc#keyrings/absent.asc#' /etc/apt/sources.list.d/cuda.list; apt-get update -q 2>&1; "
        "mv /tmp/cuda.list /etc/apt/sources.list.d/cuda.list"
    )
    assert "NO_PUBKEY" in refused.stdout


def test_without_a_driver_there_is_no_tool_and_no_module(machine: Machine) -> None:
    assert machine.run("nvidia-smi").returncode == 127
    refused = machine.run("modprobe nvidia")
    assert refused.returncode == 1
    assert "Module nvidia not found in directory /lib/modules/" in refused.stderr
    assert machine.ok("cat /srv/hardware/sys/bus/pci/devices/*/device").split() == ["0x2335"] * 4


def test_unpinned_driver_is_the_newest_branch_and_a_lone_version_is_refused(machine: Machine) -> None:
    assert "nvidia-open (595." in machine.ok("apt-get install -s nvidia-open | grep '^Inst'")
    alone = machine.run(f"apt-get install -s nvidia-open={DRIVER}-1")
    assert alone.returncode != 0
    assert "held broken packages" in alone.stderr


def test_wrong_names_are_unknown_to_apt(machine: Machine) -> None:
    for name in ("nvidia-fabricmanager-580", "nvidia-imex-580", "libnvidia-nscq-580", "nvidia-headless-580-open"):
        assert "Unable to locate package" in machine.run(f"apt-get install -s {name}").stderr


def test_metapackages_of_cuda_bring_a_driver(machine: Machine) -> None:
    assert "cuda-drivers" in machine.ok("apt-get install -s cuda-12-8 | grep '^Inst'")
    assert "drivers" not in machine.ok("apt-get install -s cuda-toolkit-12-8 | grep '^Inst'")


def test_module_is_built_only_with_headers_and_loads_then(machine: Machine) -> None:
    assert install(machine, f"nvidia-driver-pinning-{DRIVER}").returncode == 0
    done = install(machine, "nvidia-open")
    assert done.returncode == 0
    assert "kernel headers for this kernel do not seem to be installed" in done.stdout
    assert machine.run("modprobe nvidia").returncode == 1
    assert install(machine, "linux-headers-$(uname -r)").returncode == 0
    machine.ok("dpkg-reconfigure nvidia-kernel-open-dkms")
    assert machine.run("nvidia-smi").returncode == 9  # installed, not loaded
    machine.ok("modprobe nvidia_uvm && systemctl restart nvidia-persistenced")
    assert machine.ok("modinfo -F version nvidia") == DRIVER
    assert machine.ok("dkms status").startswith(f"nvidia/{DRIVER}, ")


def test_replay_is_the_recording(machine: Machine) -> None:
    recording = (hardware.RECORDINGS / "h200_x4" / "smi_q.xml").read_text()
    replayed = machine.ok("nvidia-smi -q -x")
    clock = re.compile(r"<timestamp>.*?</timestamp>")
    assert clock.sub("", replayed).split() == clock.sub("", recording).split()
    assert len(ElementTree.fromstring(replayed).findall("gpu")) == 4
    query = (hardware.RECORDINGS / "h200_x4" / "query.txt").read_text().splitlines()
    fields = re.sub(r" \[\w+\]", "", query[4]).replace(" ", "")
    assert machine.ok(f"nvidia-smi --query-gpu={fields} --format=csv").splitlines() == query[4:9]
    assert machine.ok("nvidia-smi -L").splitlines() == query[:4]


@pytest.mark.parametrize(
    "words", ["--query-gpu=no.such.field --format=csv", "--nonsense", "--query-gpu=index", "--format=csv", "-x"]
)
def test_what_nvidia_smi_does_not_know_is_an_error(machine: Machine, words: str) -> None:
    assert machine.run(f"nvidia-smi {words}").returncode == 2


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("version_mismatch", 18, "Driver/library version mismatch"),
        ("gpu_lost", 15, "GPU is lost"),
        ("gpu_gone", 0, "GPU 2: NVIDIA H200"),
        ("fabric_in_progress", 0, "GPU 3: NVIDIA H200"),
    ],
)
def test_faults_show_and_pass(machine: Machine, fault: str, status: int, said: str) -> None:
    machine.ok(f"stand-in-fault {fault}")
    try:
        listed = machine.run("nvidia-smi -L")
        states = machine.run("nvidia-smi --query-gpu=fabric.state --format=csv,noheader").stdout.split("\n")
    finally:
        machine.ok("stand-in-fault none")
    assert (listed.returncode, said in listed.stdout) == (status, True)
    assert (fault == "gpu_gone") == (status == 0 and "GPU 3" not in listed.stdout)
    assert (fault == "fabric_in_progress") == (states[0] == "In Progress")
    assert machine.ok("nvidia-smi -L").count("\n") == 3
    assert machine.ok("nvidia-smi --query-gpu=fabric.state --format=csv,noheader").split() == ["Completed"] * 4


def test_container_has_the_gpus_it_asked_for_and_no_others(machine: Machine) -> None:
    assert install(machine, *(f"{name}=1.19.1-1" for name in TOOLKIT)).returncode == 0
    machine.ok("systemctl restart docker; mkdir -p /tmp/root/bin; cp /bin/busybox /tmp/root/bin/plain")
    machine.ok("tar -C /tmp/root -c . | docker import - probe:1")
    run = "docker run --rm"
    assert machine.ok(f"{run} --gpus all probe:1 nvidia-smi -L").count("GPU ") == 4
    assert machine.ok(f"{run} --gpus '\"device=1,3\"' probe:1 nvidia-smi -L").split("\n")[0].startswith("GPU 1:")
    without = machine.run(f"{run} probe:1 nvidia-smi -L")
    assert without.returncode == 127
    assert "executable file not found" in without.stderr
    assert "nvidia.com/gpu=all" in machine.ok("nvidia-ctk cdi list")
    machine.ok("stand-in-fault version_mismatch")
    try:
        broken = machine.run(f"{run} --gpus all probe:1 nvidia-smi -L")
    finally:
        machine.ok("stand-in-fault none")
    assert broken.returncode != 0
    assert "driver/library version mismatch" in broken.stderr


TOOLKIT = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)


def test_upgrade_needs_a_reboot_and_a_reboot_loads_it(machine: Machine) -> None:
    boot = machine.ok("cat /proc/sys/kernel/random/boot_id")
    assert install(machine, f"nvidia-driver-pinning-{NEWER}").returncode == 0
    assert install(machine, "nvidia-open").returncode == 0
    assert machine.run("nvidia-smi").returncode == 18
    hosts.restart(machine.name)
    assert machine.ok("cat /proc/sys/kernel/random/boot_id") != boot
    assert machine.ok("head -n 1 /srv/hardware/proc/driver/nvidia/version").split("  ")[1] == NEWER
    assert machine.ok("nvidia-smi --query-gpu=driver_version --format=csv,noheader").split() == [NEWER] * 4
    assert "probe" in machine.ok("docker images")


def test_modules_of_a_secure_boot_host_are_refused(machine: Machine) -> None:
    machine.ok("stand-in-fault secure_boot")
    try:
        hosts.restart(machine.name)
        assert machine.ok("mokutil --sb-state") == "SecureBoot enabled"
        assert "Key was rejected by service" in machine.run("modprobe nvidia").stderr
    finally:
        machine.ok("stand-in-fault none")
        hosts.restart(machine.name)
    machine.ok("nvidia-smi")


def test_what_is_put_into_a_host_leaves_no_copy_here(machine: Machine) -> None:
    before = set(Path("/var/tmp").iterdir())
    files = hosts.archive({"/tmp/put": b"there"})
    podman("cp", "-", f"{hosts.PREFIX}{machine.name}:/", input_bytes=files)
    assert hosts.execute(machine.name, "cat", "/tmp/put") == "there"
    assert set(Path("/var/tmp").iterdir()) <= before


def test_host_inherits_how_this_machine_reaches_packages(machine: Machine) -> None:
    for path, content in surroundings.apt_sources().items():
        if content and path.endswith((".list", ".sources")):
            assert machine.ok(f"cat {path}").split() == content.decode(errors="replace").split()
    assert (
        surroundings.environment().items()
        <= dict(line.partition("=")[::2] for line in machine.ok("sed 's/\"//g' /etc/environment").splitlines()).items()
    )
