"""What tests of drives and reboots take for granted of a test machine."""

from __future__ import annotations

import pytest

from .machine import Drive, Machine, MachineError

pytestmark = [pytest.mark.machines, pytest.mark.usefixtures("blank_drives")]


def test_it_is_a_machine_of_its_own(machine: Machine) -> None:
    told = machine.run(
        "systemctl is-system-running; uname -r; systemd-detect-virt; lsblk --nodeps --noheadings -o NAME,SERIAL -I 259"
    )
    state, kernel, virtualization, *drives = told.splitlines()
    assert state == "running"
    assert kernel.endswith("-cloud-amd64")
    assert virtualization == "qemu"
    assert sorted(line.split()[1] for line in drives) == ["SN0001", "SN0002", "SN0003", "SN0004"]


def test_ansible_reaches_it(machine: Machine) -> None:
    task = {
        "name": "Which",
        "ansible.builtin.command": "cat /etc/hostname",
        "register": "told",
        "failed_when": "told.stdout != expected",
    }
    play = {"hosts": "all", "gather_facts": False, "tasks": [task]}
    assert machine.play([play], expected="machine").returncode == 0
    assert machine.play([play], expected="another").returncode == 2


def test_a_checksum_tells_of_every_change(machine: Machine) -> None:
    drive = Drive("SN0001").by_id
    blank = machine.checksum("SN0001")
    assert blank == machine.checksum("SN0002")
    machine.run(f"echo changed | dd of={drive} bs=512 seek=1000000 conv=sync status=none")
    assert machine.checksum("SN0001") != blank
    machine.run(f"dd if=/dev/zero of={drive} bs=512 seek=1000000 count=1 status=none")
    assert machine.checksum("SN0001") == blank


def test_drives_come_and_go(machine: Machine) -> None:
    drive = Drive("SN0004").by_id
    machine.run(f"echo kept | dd of={drive} bs=512 conv=sync,fsync status=none")
    machine.unplug("SN0004")
    assert "SN0004" not in machine.run("lsblk --noheadings -o SERIAL; ls /dev/disk/by-id")
    with pytest.raises(MachineError, match="SN0004 is not plugged in"):
        machine.unplug("SN0004")
    machine.plug("SN0004")
    assert machine.run(f"head -c 5 {drive}") == "kept\n"
    machine.run(f"dd if=/dev/zero of={drive} bs=512 count=1 conv=fsync status=none")
