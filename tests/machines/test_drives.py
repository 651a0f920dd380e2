"""Drives that hold something are never touched; those that may be taken become caches, whatever comes in between.

Each play costs tens of seconds here, so a test asks for several things at once.
"""

from __future__ import annotations

import threading

import pytest

from .caches import BY_ID, DRIVES, OWN, POINT, SERIALS, cache, forget, state
from .machine import ROOT_DISK, Drive, Machine

pytestmark = [pytest.mark.machines, pytest.mark.usefixtures("blank_drives")]

ASSEMBLY = "/run/udev/rules.d/64-md-raid-assembly.rules"
# The real mkfs, stopped for good once the superblock on the device says that mkfs is in progress.
STOPPED_MKFS = """#!/usr/bin/python3
import ctypes, os, sys, time

TRACE_ME, TO_NEXT_SYSCALL = 0, 24
ptrace = ctypes.CDLL(None).ptrace
ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
child = os.fork()
if child == 0:
    ptrace(TRACE_ME, 0, None, None)
    os.execv("/usr/sbin/mkfs.xfs", ["mkfs.xfs", *sys.argv[1:]])
stopped = True
while stopped:
    _, status = os.waitpid(child, 0)
    stopped = os.WIFSTOPPED(status)
    with open(sys.argv[-1], "rb") as device:
        start = device.read(512)
    if start[:4] == b"XFSB" and start[126] == 1:
        os.close(os.open("/run/half-way", os.O_CREAT))
        time.sleep(3600)
    ptrace(TO_NEXT_SYSCALL, child, None, None)
sys.exit(os.waitstatus_to_exitcode(status))
"""


# --- what holds something is not touched -----------------------------------------------------------------------------


def test_drives_that_hold_something_are_refused_and_left_as_they_are(machine: Machine) -> None:
    first, second, third, fourth = BY_ID
    machine.run(
        # As on a host without mdadm: nobody assembles what an old superblock asks for.
        f"mkdir -p /run/udev/rules.d; : > {ASSEMBLY}; udevadm control --reload\n"
        f"mkfs.ext4 -q -L precious {first}\n"
        f"echo 'start=2048' | sfdisk --quiet --label gpt {second}\n"
        f"mdadm --create /dev/md/old --run --level=1 --raid-devices=2 {third} missing --metadata=1.2 2>/dev/null\n"
        "mdadm --stop /dev/md/old 2>/dev/null\n"
        f"pvcreate -q {fourth} >/dev/null; vgcreate -q vg-test {fourth} >/dev/null\n"
        "udevadm settle"
    )
    before = [machine.checksum(serial) for serial in SERIALS]
    done = cache(machine, model_cache_drives="auto")
    assert done.returncode != 0
    for words in (
        "serial SN0001) holds ext4",
        "label precious",
        "serial SN0002) has partitions (",
        "holds a partition table (gpt)",
        "serial SN0003) holds a RAID superblock",
        "serial SN0004) holds an LVM physical volume",
        "Nothing on the host was changed.",
    ):
        assert words in done.stdout
    assert [machine.checksum(serial) for serial in SERIALS] == before
    assert state(machine)["record"] == "none"
    assert machine.run(f"vgs --noheadings -o vg_name; rm {ASSEMBLY}; udevadm control --reload").strip() == "vg-test"


def test_drives_in_use_unfit_or_misnamed_are_refused_and_left_as_they_are(machine: Machine) -> None:
    small = Drive("SN0005", 400 << 20)
    forget(machine, [*DRIVES, small])
    first, second, third, fourth = BY_ID
    label = "(0x00bab10c).to_bytes(8, 'little') + (5000).to_bytes(8, 'little')"
    notes = "/dev/disk/by-id/notes"
    twin = machine.run(
        f"mkfs.xfs -q {first}; mkdir -p /mnt/other; mount {first} /mnt/other; echo kept > /mnt/other/file\n"
        f"umount /mnt/other; mount -o ro {first} /mnt/other\n"
        f"mkswap -q {second} >/dev/null; swapon {second}\n"
        f"python3 -c \"f = open('{third}', 'r+b'); "
        f'[(f.seek(at), f.write({label})) for at in range(2**17, 2**18, 1024)]"\n'
        f"touch {notes}; mkdir {POINT}; touch {POINT}/model; udevadm settle\n"
        f"systemd-run --quiet --unit=reader sh -c 'exec sleep infinity < {small.by_id}'\n"
        f"find -L /dev/disk/by-id -samefile {fourth} -not -path {fourth} -print -quit"
    ).strip()
    serials = (*SERIALS, small.serial)
    before = [machine.checksum(serial) for serial in serials]
    done = cache(
        machine,
        model_cache_drives=[*BY_ID, small.by_id, twin, ROOT_DISK, notes],
        model_cache_wipe={first: "SN0001", third: "SN9999", ROOT_DISK: "ROOT"},
    )
    assert done.returncode != 0
    for words in (
        "serial SN0001) is mounted at /mnt/other",
        "serial SN0002) is in use as swap",
        "serial SN0003) holds a ZFS label",
        f"{third} has the serial number SN0003, not 'SN9999'",
        f"serial SN0005) has {small.bytes} bytes",
        "is open in sleep (process ",
        f"{twin} and {fourth} are one drive",
        f"{ROOT_DISK} (vda, serial ROOT) is a disk that the host runs from (/)",
        f"{notes} ({notes}) is not a block device",
        f"{POINT} is not empty (model)",
        "Nothing on the host was changed.",
    ):
        assert words in done.stdout
    assert [machine.checksum(serial) for serial in serials] == before
    machine.run(f"systemctl stop reader; rm {notes}")
    assert machine.run(f"cat /mnt/other/file; ls -A {POINT}").split() == ["kept", "model"]


# --- cuts ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_initramfs")
def test_a_power_cut_in_the_middle_of_mkfs_is_healed_by_the_next_run(machine: Machine) -> None:
    forget(machine)
    machine.put({f"{OWN}mkfs.xfs": STOPPED_MKFS.encode()}, modes={f"{OWN}mkfs.xfs": 0o755})
    cut = threading.Thread(target=cache, args=(machine,), kwargs={"model_cache_drives": BY_ID[:2]})
    cut.start()
    machine.run("for n in $(seq 12000); do test -e /run/half-way && exit 0; sleep 0.1; done; exit 1")
    machine.power_cut()
    cut.join()
    machine.start_again()
    machine.run(f"rm -f {OWN}mkfs.xfs")
    seen = state(machine)
    assert (seen["filesystem"], seen["record"], seen["arrays"]) == ("none", "building", "1")
    in_progress = machine.run("od --address-radix=n --format=u1 --skip-bytes=126 --read-bytes=1 /dev/md/*")
    assert in_progress.strip() == "1"  # mkfs had begun, and would have set it to 0 at its end
    done = cache(machine, model_cache_drives=BY_ID[:2])
    assert done.returncode == 0
    seen = state(machine)
    assert (seen["filesystem"].split()[0], seen["record"]) == ("xfs", "ready")
    assert "sunit=128    swidth=256 blks" in machine.run(f"xfs_info {POINT}")


@pytest.mark.usefixtures("no_initramfs")
def test_two_drives_mirror_each_other_with_ext4_and_a_wiped_one_among_them(machine: Machine) -> None:
    forget(machine)
    # A mirror's first copy would take longer than the rest.
    machine.run(f"mkfs.xfs -q {BY_ID[1]}; udevadm settle; echo 100 > /proc/sys/dev/raid/speed_limit_max")
    done = cache(
        machine,
        model_cache_drives=BY_ID[:2],
        model_cache_raid_level="raid1",
        model_cache_filesystem="ext4",
        model_cache_wipe={BY_ID[1]: "SN0002"},
    )
    assert done.returncode == 0
    assert state(machine)["filesystem"].split()[0] == "ext4"
    assert "raid1" in machine.run("cat /proc/mdstat")
