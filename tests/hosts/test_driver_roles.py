"""What the driver, fabric and toolkit roles refuse, and what they do when the hardware is not as it should be.

Two hosts, each kept for all its cases: four H200, and an HGX B200.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.hosts import hosts, mirror
from tests.hosts.machine import REPOSITORY, podman
from tests.hosts.playbooks import run_playbook
from tests.stand_ins.packages.deb import Package, repository

pytestmark = pytest.mark.hosts

VERSION = "580.159.04"
OLDER = "570.195.03"
NEXT = "580.178.04"


@dataclass
class Bench:
    """A host and a way to run roles on it."""

    name: str
    directory: Path

    def play(
        self, *roles: str, entry: str, variables: Mapping[str, object], check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        tasks = [
            {"name": f"{role}, {entry}", "ansible.builtin.include_role": {"name": role, "tasks_from": entry}}
            for role in roles
        ]
        content = {"roles": list(roles)} if entry == "main" else {"tasks": tasks}
        playbook = self.directory / "play.yml"
        playbook.write_text(yaml.safe_dump([{"hosts": "all", "become": True, "gather_facts": False, **content}]))
        return run_playbook(
            playbook,
            REPOSITORY / "inventories/demo/scenario.ini",
            variables,
            *(["--check", "--diff"] if check else []),
            environment={"MOLECULE_PROJECT_DIRECTORY": f"/{self.name}"},  # the inventory takes the host's name from it
        )

    def applies(self, *roles: str, entry: str = "main", **variables: object) -> str:
        done = self.play(*roles, entry=entry, variables=variables)
        assert done.returncode == 0
        return " ".join((done.stdout + done.stderr).split())

    def predicts(self, *roles: str, **variables: object) -> str:
        done = self.play(*roles, entry="main", variables=variables, check=True)
        assert done.returncode == 0
        return " ".join((done.stdout + done.stderr).split())

    def refuses(self, *roles: str, says: list[str], **variables: object) -> None:
        done = self.play(*roles, entry="main", variables=variables)
        assert done.returncode != 0
        text = " ".join((done.stdout + done.stderr).split())
        missing = [word for word in says if word not in text]
        assert not missing

    def run(self, command: str, check: bool = True) -> str:
        return hosts.execute(self.name, "sh", "-c", command, check=check)

    def state(self) -> str:
        """Everything a role could have left behind."""
        return self.run(
            "dpkg-query --show; apt-mark showhold; lsmod;"
            " find /etc -newer /run/test-host/boot_id -type f | sort | xargs md5sum"
        )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], Bench]]:
    mirror.up()
    started: list[str] = []

    def start(name: str, hardware: str) -> Bench:
        started.append(name)
        hosts.up(name, hardware=hardware)
        return Bench(name, tmp_path_factory.mktemp(name))

    yield start
    for name in started:
        hosts.down(name)


@pytest.fixture(scope="module")
def h200(bench: Callable[[str, str], Bench]) -> Bench:
    return bench("driver-h200", "h200_x4")


@pytest.fixture(scope="module")
def driven(h200: Bench) -> Bench:
    """The host with a driver, of another version than the roles' own."""
    h200.applies("nvidia_driver", nvidia_driver_version=NEXT)
    return h200


@pytest.fixture(scope="module")
def settled(driven: Bench) -> Bench:
    """The host with the roles' own version."""
    driven.applies("nvidia_driver")
    return driven


@pytest.fixture(scope="module")
def b200(bench: Callable[[str, str], Bench]) -> Bench:
    return bench("driver-b200", "hgx_b200")


# -- refused before anything is changed ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"nvidia_driver_version": "550.163.01"}, ["550.163.01", "branch 570 or later", "Set nvidia_driver_version"]),
        ({"nvidia_driver_branch": "595"}, [f"{VERSION} with nvidia_driver_branch: 595", "whose first number is"]),
        ({"nvidia_driver_version": "580"}, ["nvidia_driver_version: 580", "an exact version such as"]),
        ({"nvidia_driver_source": "distro"}, ["nvidia_driver_source: distro", "Use nvidia_driver_source: cuda_repo"]),
        ({"nvidia_driver_source": "run_file"}, ["nvidia_driver_source", "run_file", "cuda_repo, distro"]),
        (
            {"nvidia_driver_coherent_memory": "driver"},
            ["nvidia_driver_coherent_memory: driver is for Grace", "Allowed here: default"],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_input_that_cannot_serve_is_refused(h200: Bench, variables: dict[str, str], says: list[str]) -> None:
    before = h200.state()
    h200.refuses("nvidia_driver", says=says, **variables)
    assert h200.state() == before


def test_proprietary_modules_are_refused_on_blackwell(b200: Bench) -> None:
    before = b200.state()
    b200.refuses(
        "nvidia_driver",
        says=["nvidia_driver_kernel_modules: proprietary", "NVIDIA B200", "Allowed: open"],
        nvidia_driver_kernel_modules="proprietary",
    )
    assert b200.state() == before


# -- one driver, kept -------------------------------------------------------------------------------------------------


def test_a_reboot_that_is_needed_and_forbidden_stops_with_both_versions(driven: Bench) -> None:
    boot = driven.run("cat /proc/sys/kernel/random/boot_id")
    driven.refuses(
        "nvidia_driver",
        says=["reboot required", f"running kernel module is {NEXT}", f"installed one is {VERSION}"],
        nvidia_driver_reboot="never",
    )
    assert driven.run("cat /proc/sys/kernel/random/boot_id") == boot

    # The next run goes on where that one stopped: it reboots, once, and then there is nothing left to do.
    driven.applies("nvidia_driver")
    assert driven.run("cat /proc/sys/kernel/random/boot_id") != boot
    assert VERSION in driven.run("cat /srv/hardware/proc/driver/nvidia/version")
    assert driven.run("apt-mark showhold").split() == ["nvidia-open"]
    assert "changed=0" in driven.applies("nvidia_driver")


def test_what_an_interrupted_run_left_is_finished(settled: Bench) -> None:
    settled.run(
        "systemctl stop nvidia-persistenced; rmmod nvidia_uvm; rmmod nvidia; apt-mark unhold nvidia-open;"
        " rm /etc/modprobe.d/nvidia-blacklist-nouveau.conf; "
        " sed -i '/^Package: nvidia-open$/,/^$/s/^Status: .*/Status: install ok unpacked/' /var/lib/dpkg/status",
        check=False,
    )
    settled.applies("nvidia_driver")
    assert "changed=0" in settled.applies("nvidia_driver")
    assert settled.run("systemctl is-active nvidia-persistenced").strip() == "active"
    assert settled.run("dpkg-query --show --showformat='${Status}' nvidia-open") == "hold ok installed"


@pytest.mark.parametrize(
    ("fault", "variables", "says"),
    [
        ("none", {"nvidia_driver_gpu_count": 8}, ["4 of 8 GPUs answer", "the PCI bus shows 4"]),
        ("gpu_lost", {}, ["The driver does not serve every GPU", "0000:00:09.0"]),
        ("gpu_gone", {"nvidia_driver_gpu_count": 4}, ["3 of 4 GPUs answer"]),
        ("version_mismatch", {}, ["Driver/library version mismatch", "docs/runbooks/driver-library-mismatch.md"]),
    ],
)
def test_gpus_that_do_not_answer_stop_the_run(
    settled: Bench, fault: str, variables: dict[str, int], says: list[str]
) -> None:
    settled.run(f"stand-in-fault {fault}")
    try:
        settled.refuses("nvidia_driver", says=says, **variables)
    finally:
        settled.run("stand-in-fault none")


# -- fabric ------------------------------------------------------------------------------------------------------------


def test_a_fabric_manager_without_a_use_is_reported_and_left_alone(settled: Bench) -> None:
    settled.run(f"apt-get install --yes --quiet nvidia-fabricmanager={VERSION}-1")
    out = settled.applies("nvidia_fabric")
    assert f"nvidia-fabricmanager {VERSION}-1 is installed, but this platform has no use for it" in out
    assert "changed=0" in out
    settled.run("apt-get purge --yes --quiet nvidia-fabricmanager")


def test_fabric_daemons_of_another_version_than_the_driver_are_refused(settled: Bench) -> None:
    settled.refuses(
        "nvidia_fabric",
        says=[f"nvidia_fabric_version: {NEXT} is not the running driver's, which is {VERSION}", "patch level"],
        nvidia_fabric_version=NEXT,
    )


@pytest.fixture(scope="module")
def fabric(b200: Bench) -> Bench:
    b200.applies("nvidia_driver", "nvidia_fabric")
    return b200


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"nvidia_fabric_platform": "hgx_h200"}, ["hgx_h200 is declared", "looks like hgx_b200", "Allowed here: auto"]),
        ({"nvidia_fabric_platform": "dgx"}, ["nvidia_fabric_platform", "dgx", "hgx_b200"]),
        ({"nvidia_fabric_imex_nodes": ["192.0.2.1"]}, ["192.0.2.1 is for GB200 NVL72 trays", "an empty list"]),
    ],
    ids=["other platform", "unknown platform", "imex"],
)
def test_a_platform_that_the_host_is_not_is_refused(
    fabric: Bench, variables: dict[str, object], says: list[str]
) -> None:
    before = fabric.state()
    fabric.refuses("nvidia_fabric", says=says, **variables)
    assert fabric.state() == before


def test_a_fabric_that_does_not_complete_fails_in_bounded_time(fabric: Bench) -> None:
    fabric.run("stand-in-fault fabric_in_progress")
    try:
        begun = time.monotonic()
        fabric.refuses(
            "nvidia_fabric",
            says=["8 In Progress (GPU 0, 1, 2, 3, 4, 5, 6, 7)", "error 802", "docs/runbooks/fabric-not-completed.md"],
            nvidia_fabric_timeout=4,
        )
        assert time.monotonic() - begun < 150
    finally:
        fabric.run("stand-in-fault none")


def test_a_fabric_manager_that_was_stopped_is_started_again(fabric: Bench) -> None:
    fabric.run("systemctl disable --now nvidia-fabricmanager; rmmod ib_umad")
    fabric.applies("nvidia_fabric")
    assert fabric.run("systemctl is-active nvidia-fabricmanager").strip() == "active"
    assert "changed=0" in fabric.applies("nvidia_fabric")


def test_the_fabric_follows_the_driver_to_another_version(fabric: Bench) -> None:
    fabric.applies("nvidia_driver", "nvidia_fabric", nvidia_driver_version=NEXT)
    assert NEXT in fabric.run("dpkg-query --show nvidia-fabricmanager")
    assert fabric.run("systemctl is-active nvidia-fabricmanager").strip() == "active"


# -- toolkit and removal -----------------------------------------------------------------------------------------------


def test_a_toolkit_that_would_bring_a_driver_is_refused(settled: Bench, tmp_path: Path) -> None:
    odd = Package("cuda-toolkit-12-8", "12.9.9-1", depends=("libnvidia-nscq",), architecture="all")
    repository(tmp_path, [odd], None)
    settled.run("mkdir -p /srv/odd")
    podman("cp", f"{tmp_path}/.", f"{hosts.PREFIX}{settled.name}:/srv/odd")
    settled.run(
        "echo 'deb [trusted=yes] file:/srv/odd ./' > /etc/apt/sources.list.d/odd.list;"
        "printf 'Package: cuda-toolkit-*\\nPin: version 12.9.9-1\\nPin-Priority: 990\\n' > /etc/apt/preferences.d/odd;"
        "apt-get update --quiet"
    )
    try:
        before = settled.run("dpkg-query --show")
        settled.refuses(
            "cuda_toolkit", says=["cuda-toolkit-12-8 would bring a driver: libnvidia-nscq. Nothing was changed"]
        )
        assert settled.run("dpkg-query --show") == before
    finally:
        settled.run(
            "rm -r /srv/odd /etc/apt/sources.list.d/odd.list /etc/apt/preferences.d/odd; apt-get update --quiet"
        )


def test_check_mode_knows_what_an_older_branch_takes_along(settled: Bench) -> None:
    """The newer branch's packages are held, and where the older one is, preferences say which versions go together."""
    before = settled.state()
    predicted = settled.predicts("nvidia_driver", nvidia_driver_version=OLDER)
    assert settled.state() == before
    assert f"nvidia-open-570 {OLDER}" in predicted
    assert "nvidia-open: held on this host" not in predicted
    settled.applies("nvidia_driver", nvidia_driver_version=OLDER)
    assert settled.run("dpkg-query --show --showformat '${Version}' nvidia-open-570").startswith(OLDER)
    settled.applies("nvidia_driver")  # and back


def test_what_was_installed_can_be_removed(settled: Bench) -> None:
    settled.applies("cuda_toolkit")
    settled.applies("cuda_toolkit", "nvidia_fabric", "nvidia_driver", entry="remove")
    left = settled.run("dpkg-query --show --showformat='${Package} ${db:Status-Status}\\n' | grep -v ' config-files$'")
    assert [name for name in left.split() if name.startswith(("nvidia-", "libnvidia-", "cuda-toolkit"))] == []
    assert settled.run("apt-mark showhold") == ""
    assert settled.run("find /etc -newer /run/test-host/boot_id -name '*nvidia*' -type f; ls /etc/profile.d") == ""
