"""The reboot path of role nvidia_driver, on a machine that reboots: boot loader, initramfs, kernel, systemd.

The driver's packages are stand-ins, from a repository that this process serves; a new version of them needs a reboot
once an older one runs. The tests go on where the one before stopped, as an operator would, and leave the machine with
a driver: no others come after these.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.hosts.machine import CACHE
from tests.stand_ins import hardware, packages

from .image import GATEWAY
from .machine import Machine

pytestmark = [pytest.mark.machines, pytest.mark.usefixtures("machine")]

OLD = "580.159.04"
NEW = "580.178.04"
MODULE_VERSION = "sed -n 's/.*x86_64 *\\([0-9.]*\\) .*/\\1/p' /srv/hardware/proc/driver/nvidia/version"
# The hardware's side of a boot, before anything loads modules.
BOOT_UNIT = """\
[Unit]
DefaultDependencies=no
After=systemd-remount-fs.service
Before=systemd-modules-load.service

[Service]
Type=oneshot
ExecStart=/usr/lib/test-host/boot.d/hardware

[Install]
WantedBy=sysinit.target
"""
# Making an initramfs asks modprobe a hundred times, and Python starts slowly here.
MODPROBE = """\
#!/bin/sh
case "$*" in *nvidia* | *nouveau* | *mlx5* | *ib_*) exec /usr/lib/stand-in/modprobe "$@" ;; esac
exec /usr/lib/stand-in/kmod/modprobe "$@"
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing: apt says what it could not get."""


@pytest.fixture(scope="module")
def repository() -> Iterator[str]:
    """The CUDA repository, as the machine reaches it."""
    served = packages.build(CACHE.parent / "packages")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(served))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{GATEWAY}:{server.server_port}/apt/cuda"
        server.shutdown()


class Bench:
    """A machine with recorded GPUs, and runs of the role on it."""

    def __init__(self, machine: Machine, repository: str) -> None:
        self.machine = machine
        self.inputs = {
            "nvidia_driver_repository_url": repository,
            "nvidia_driver_keyring_fingerprints": [packages.fingerprint()],
            "nvidia_driver_procfs": "/srv/hardware/proc",
            "nvidia_driver_sysfs": "/srv/hardware/sys",
        }

    def role(self, **variables: object) -> tuple[int, str]:
        """Run it, and a task behind it; the exit status, and what was said."""
        after = {
            "name": "The play goes on",
            "ansible.builtin.copy": {"dest": "/root/after", "content": "{{ nvidia_driver_version }}\n", "mode": "0644"},
        }
        play = {"hosts": "all", "gather_facts": False, "roles": ["nvidia_driver"], "post_tasks": [after]}
        done = self.machine.play([play], **self.inputs, **variables)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    def versions(self) -> list[str]:
        """Of the running module, of the package, and of the run whose play went on to its end."""
        return self.machine.run(
            f"{MODULE_VERSION}; dpkg-query --show --showformat='${{Version}}\\n' nvidia-open; cat /root/after"
        ).split()

    def boots(self) -> list[str]:
        """The identity of every boot of this machine so far."""
        return self.machine.run("journalctl --list-boots --no-pager | awk '$1 ~ /^-?[0-9]+$/ { print $2 }'").split()


@pytest.fixture(scope="module")
def bench(session_machine: Machine, repository: str) -> Bench:
    machine = session_machine
    files, modes = hardware.host_files("h200_x4", kernel=machine.run("uname -r").strip())
    files["/etc/systemd/system/stand-in-hardware.service"] = BOOT_UNIT.encode()
    files["/usr/lib/stand-in/modprobe"] = files["/usr/sbin/modprobe"]
    files["/usr/sbin/modprobe"] = MODPROBE.encode()
    machine.put(files, {**modes, "/usr/lib/stand-in/modprobe": 0o755})
    machine.run(
        "mkdir /usr/lib/stand-in/kmod; ln -s /bin/kmod /usr/lib/stand-in/kmod/modprobe;"
        " systemctl enable --quiet --now stand-in-hardware.service; apt-get update --quiet"
    )
    return Bench(machine, repository)


def test_a_first_driver_is_loaded_without_a_reboot(bench: Bench) -> None:
    boot = bench.machine.boot_id()
    status, said = bench.role(nvidia_driver_version=OLD)
    assert status == 0, said
    assert bench.versions() == [OLD, f"{OLD}-1", OLD]
    assert bench.machine.boot_id() == boot


def test_a_reboot_that_is_needed_and_forbidden_stops_with_both_versions(bench: Bench) -> None:
    boot = bench.machine.boot_id()
    status, said = bench.role(nvidia_driver_version=NEW, nvidia_driver_reboot="never")
    assert status == 2
    assert f"reboot required: the running kernel module is {OLD}, the installed one is {NEW}" in said
    assert "nvidia_driver_reboot: never forbids it here" in said
    assert bench.machine.boot_id() == boot
    assert bench.versions() == [OLD, f"{NEW}-1", OLD]  # the play did not go on


def test_the_reboot_that_is_allowed_happens_once_and_the_play_goes_on(bench: Bench) -> None:
    before = bench.boots()
    status, said = bench.role(nvidia_driver_version=NEW)
    assert status == 0, said
    assert bench.versions() == [NEW, f"{NEW}-1", NEW]
    assert bench.boots()[:-1] == before


def test_a_second_run_reboots_nothing_and_changes_nothing(bench: Bench) -> None:
    boot = bench.machine.boot_id()
    status, said = bench.role(nvidia_driver_version=NEW)
    assert status == 0, said
    assert re.search(r"changed=0 .*failed=0", said)
    assert bench.machine.boot_id() == boot


def test_the_blacklist_is_in_the_initramfs_that_was_booted(bench: Bench) -> None:
    listed = bench.machine.run("lsinitramfs /boot/initrd.img-$(uname -r) | grep modprobe.d/nvidia")
    assert "etc/modprobe.d/nvidia-blacklist-nouveau.conf" in listed
