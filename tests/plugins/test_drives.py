"""Which drives a cache may take: on hosts as lsblk, wipefs and the kernel describe them, and on real signatures."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.gpt_oss import drive_picture, drives  # type: ignore[import-not-found,unused-ignore]

ROOT = Path(__file__).resolve().parents[2]
POINT = "/var/lib/gpt-oss"
TB = 10**12
ARRAY = "a0a0a0a0-1111-2222-3333-444444444444"
XFS = "f0f0f0f0-1111-2222-3333-444444444444"
EXT4 = {"type": "ext4", "offset": "0x438", "uuid": "b4eddc94-daa5-4c7e-ba28-f3b9b1668877", "label": "data"}
MEMBER = {"type": "linux_raid_member", "offset": "0x1000", "uuid": ARRAY, "label": "any:gpt-oss-cache"}

Picture = dict[str, Any]
Change = Callable[[Picture], None]


def by_id(number: int) -> str:
    return f"/dev/disk/by-id/nvme-SAMSUNG_MZQL21T9_SN{number:04}"


def disk(number: int, **more: Any) -> dict[str, Any]:
    name = f"nvme{number}n1"
    return {
        "name": name,
        "path": f"/dev/{name}",
        "type": "disk",
        "tran": "nvme",
        "serial": f"SN{number:04}",
        "size": 2 * TB,
        "maj:min": f"259:{number}",
        "ro": False,
        "mountpoints": [None],
        **more,
    }


def facts(number: int, **more: Any) -> dict[str, Any]:
    return {
        "wwid": f"eui.{number:016x}",
        "holders": [],
        "partitions": {},
        "signatures": [],
        "blkid": [],
        "first_byte": None,
        "busy": False,
        "open_in": [],
        "error": None,
        **more,
    }


def host() -> Picture:
    """A server that boots from a small NVMe drive and has four that nobody uses."""
    root = {"name": "nvme0n1p1", "path": "/dev/nvme0n1p1", "type": "part", "maj:min": "259:9", "mountpoints": ["/"]}
    nodes = [disk(0, size=TB // 2, children=[root]), *(disk(number) for number in (1, 2, 3, 4))]
    sysfs = {f"nvme{number}n1": facts(number) for number in range(5)}
    sysfs["nvme0n1"].update(partitions={"nvme0n1p1": []}, signatures=[{"type": "gpt"}], busy=True)
    return {
        "lsblk": nodes,
        "by_id": {by_id(number): f"/dev/nvme{number}n1" for number in range(5)},
        "mounts": [{"device": "259:9", "point": "/", "source": "/dev/nvme0n1p1"}],
        "swaps": [],
        "arrays": {},
        "sysfs": sysfs,
        "mdadm_conf": "",
        "mount_point": {
            "kind": "absent",
            "real_path": POINT,
            "entries": [],
            "in_fstab": False,
            "unit": "var-lib-gpt\\x2doss.mount",
            "unit_text": None,
            "unit_enabled": False,
            "unit_wanted": None,
        },
    }


def wish(numbers: Sequence[int] | str = (1, 2, 3, 4), **more: Any) -> Any:
    given: dict[str, Any] = {
        "drives": numbers if isinstance(numbers, str) else [by_id(number) for number in numbers],
        "level": "auto",
        "filesystem": "xfs",
        "mount_point": POINT,
        "mount_options": ["noatime"],
        "minimum_drive_bytes": TB // 10,
        "required_bytes": 70 * 10**9,
        "wipe": {},
    }
    return drives.Wish(**{**given, **more})


def record(state: str = "ready", numbers: Sequence[int] = (1, 2, 3, 4), **more: Any) -> dict[str, Any]:
    return {
        "state": state,
        "drives": [{"id": by_id(n), "serial": f"SN{n:04}", "wwid": f"eui.{n:016x}", "bytes": 2 * TB} for n in numbers],
        "level": "raid0" if len(numbers) > 1 else "single",
        "filesystem": "xfs",
        "mount_point": POINT,
        "array_uuid": ARRAY if len(numbers) > 1 else None,
        "filesystem_uuid": XFS,
        "uuids": [ARRAY, XFS],
        **more,
    }


def cached() -> Picture:
    """The same server with its cache, whole and mounted."""
    there = host()
    for number in (1, 2, 3, 4):
        there["sysfs"][f"nvme{number}n1"].update(holders=["md127"], signatures=[MEMBER])
        there["lsblk"][number]["children"] = [
            {"name": "md127", "path": "/dev/md127", "type": "raid0", "maj:min": "9:127", "mountpoints": [POINT]}
        ]
    there["sysfs"]["md127"] = facts(9, signatures=[{"type": "xfs", "uuid": XFS}])
    there["arrays"]["md127"] = {
        "state": "clean",
        "level": "raid0",
        "degraded": 0,
        "members": {f"nvme{number}n1": "in_sync" for number in (1, 2, 3, 4)},
    }
    there["mounts"].append({"device": "9:127", "point": POINT, "source": "/dev/md127"})
    there["mdadm_conf"] = drives.conf_with("", ARRAY)
    text = drives.mount_unit(POINT, "xfs", XFS, ["noatime"])
    there["mount_point"].update(kind="directory", unit_text=text, unit_wanted=text, unit_enabled=True)
    return there


# --- taken -----------------------------------------------------------------------------------------------------------


def test_four_unused_drives_become_one_stripe() -> None:
    made = drives.judge(wish(), host(), None)
    assert made.problems == []
    assert made.level == "raid0"
    assert [drive.serial for drive in made.drives] == ["SN0001", "SN0002", "SN0003", "SN0004"]
    assert made.steps == ["array", "filesystem", "assembly", "unit", "mount"]


def test_one_drive_needs_no_array() -> None:
    made = drives.judge(wish([2]), host(), None)
    assert (made.problems, made.level) == ([], "single")
    assert "array" not in made.steps


def test_auto_takes_what_is_unused_and_leaves_what_is_used() -> None:
    there = host()
    there["lsblk"][4]["mountpoints"] = ["/data"]
    made = drives.judge(wish("auto"), there, None)
    assert made.problems == []
    assert [drive.serial for drive in made.drives] == ["SN0001", "SN0002", "SN0003"]
    assert "runs from (/)" in made.left_aside[by_id(0)]
    assert "is mounted at /data" in made.left_aside[by_id(4)]


def test_auto_stops_at_a_drive_that_is_idle_but_holds_something() -> None:
    there = host()
    there["sysfs"]["nvme3n1"]["signatures"] = [EXT4]
    (problem,) = drives.judge(wish("auto"), there, None).problems
    assert "SN0003" in problem
    assert "ext4" in problem


def test_auto_on_a_host_without_unused_drives_says_why_for_each() -> None:
    there = host()
    there["lsblk"] = there["lsblk"][:1]
    (problem,) = drives.judge(wish("auto"), there, None).problems
    assert "no unused NVMe drive" in problem
    assert "runs from" in problem


# --- refused ---------------------------------------------------------------------------------------------------------


def on(number: int, **more: Any) -> Change:
    return lambda there: there["sysfs"][f"nvme{number}n1"].update(more)


def node(number: int, **more: Any) -> Change:
    return lambda there: there["lsblk"][number].update(more)


def mount_point(**more: Any) -> Change:
    return lambda there: there["mount_point"].update(more)


def partition(there: Picture) -> None:
    there["lsblk"][2]["children"] = [{"name": "nvme2n1p1", "path": "/dev/nvme2n1p1", "type": "part", "mountpoints": []}]
    there["sysfs"]["nvme2n1"]["signatures"] = [{"type": "gpt"}, {"type": "gpt"}, {"type": "PMBR"}]
    there["sysfs"]["nvme2n1"]["partitions"] = {"nvme2n1p1": []}


def swap(there: Picture) -> None:
    there["swaps"] = ["/dev/nvme2n1"]


def mounted_by_source(there: Picture) -> None:
    there["mounts"].append({"device": "0:44", "point": "/data", "source": "/dev/nvme2n1"})


def mounted_point(there: Picture) -> None:
    there["mounts"].append({"device": "8:1", "point": POINT, "source": "/dev/sda1"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (on(2, signatures=[EXT4]), ["SN0002", "ext4", "label data", "model_cache_wipe"]),
        (partition, ["nvme2n1p1", "partition table (gpt)"]),
        (on(2, signatures=[{**MEMBER, "uuid": "other"}]), ["a RAID superblock"]),
        (on(2, signatures=[{"type": "LVM2_member"}]), ["an LVM physical volume"]),
        (on(2, signatures=[{"type": "zfs_member"}] * 8), ["a ZFS label"]),
        (on(2, signatures=[{"type": "ceph_bluestore"}]), ["a Ceph OSD"]),
        (on(2, signatures=[{"type": "swap"}]), ["swap space"]),
        (on(2, blkid=["signatures of more than one format"], first_byte=0), ["more than one format (blkid)"]),
        (on(2, first_byte=81920), ["byte 81920 is set", "raw data"]),
        (on(2, error="Input/output error"), ["cannot be read: Input/output error"]),
        (on(2, holders=["dm-3"]), ["is held by dm-3"]),
        (on(2, busy=True), ["is claimed by the kernel or a program"]),
        (on(2, open_in=["qemu (process 7)"]), ["is open in qemu (process 7)"]),
        (on(2, wwid="eui.0000000000000003"), ["one drive with nvme3n1", "multipath leg"]),
        (node(2, fstype="mpath_member"), ["a path of a multipath device"]),
        (node(2, mountpoints=["/data"]), ["is mounted at /data"]),
        (mounted_by_source, ["is mounted at /data"]),
        (node(2, mountpoints=["/boot"]), ["runs from (/boot)"]),
        (swap, ["in use as swap"]),
        (node(2, ro=True), ["is read-only"]),
        (node(2, serial=None), ["has no serial number"]),
        (node(2, size=TB // 20), ["has 50000000000 bytes", "model_cache_minimum_drive_bytes"]),
        (mounted_point, ["/dev/sda1 is mounted at /var/lib/gpt-oss already"]),
        (mount_point(entries=["weights/a"]), ["is not empty (weights/a)"]),
        (mount_point(real_path="/data/gpt-oss"), ["leads to /data/gpt-oss"]),
        (mount_point(in_fstab=True), ["/etc/fstab"]),
        (mount_point(unit_text="[Mount]"), ["another systemd unit"]),
        (mount_point(kind="file"), ["is a file, not a directory"]),
    ],
)
def test_refused(change: Change, words: list[str]) -> None:
    there = host()
    change(there)
    made = drives.judge(wish(), there, None)
    assert made.steps == []
    text = "\n".join(made.problems)
    assert [word for word in words if word not in text] == []


def test_everything_is_said_at_once() -> None:
    there = host()
    on(1, signatures=[EXT4])(there)
    on(3, holders=["dm-1"])(there)
    mounted_point(there)
    text = "\n".join(drives.judge(wish(), there, None).problems)
    assert all(word in text for word in ("SN0001", "SN0003", "/dev/sda1"))


def test_the_root_disk_is_never_taken_not_even_with_its_serial_number() -> None:
    text = "\n".join(drives.judge(wish([0, 1], wipe={by_id(0): "SN0000"}), host(), None).problems)
    assert "runs from (/)" in text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"numbers": "all"}, "'all' is not understood"),
        ({"drives": ["auto", by_id(1)]}, "'auto' stands beside drives"),
        ({"drives": [by_id(1), by_id(1)]}, "is named twice"),
        ({"drives": ["/dev/nvme1n1"]}, "is not a name below /dev/disk/by-id/"),
        ({"drives": []}, "is not understood"),
        ({"level": "raid5"}, "allowed: auto, single, raid0, raid1, raid10"),
        ({"filesystem": "zfs"}, "allowed: xfs, ext4"),
        ({"numbers": [1], "level": "raid0"}, "raid0 takes 2 drives or more, there is 1"),
        ({"numbers": [1, 2], "level": "raid10"}, "raid10 takes 4 drives"),
        ({"numbers": [1, 2], "level": "single"}, "single takes one drive"),
        ({"mount_point": "/usr/lib/cache"}, "belongs to the system"),
        ({"mount_point": "/var/lib"}, "belongs to the system"),
        ({"mount_options": ["noatime,nobarrier"]}, "is not one mount option"),
        ({"minimum_drive_bytes": -1}, "model_cache_minimum_drive_bytes: -1"),
        ({"numbers": [1], "wipe": {by_id(2): "SN0002"}}, "is not one of model_cache_drives"),
    ],
)
def test_wishes_that_no_host_can_meet(given: dict[str, Any], words: str) -> None:
    text = "\n".join(drives.wish_problems(wish(given.pop("numbers", (1, 2)), **given)))
    assert words in text


def test_a_name_that_is_missing_a_partition_or_no_block_device() -> None:
    there = host()
    there["by_id"].update({by_id(7): "/dev/nvme0n1p1", by_id(8): "/dev/disk/by-id/notes", by_id(9): "/dev/nvme1n1"})
    text = "\n".join(drives.judge(wish([5, 7, 8, 1, 9]), there, None).problems)
    assert f"{by_id(5)} is not on this host" in text
    assert "is a part (/dev/nvme0n1p1)" in text
    assert "is not a block device" in text
    assert f"{by_id(9)} and {by_id(1)} are one drive" in text


def test_drives_that_together_are_too_small_for_the_model() -> None:
    (problem,) = drives.judge(wish([1, 2], level="raid1", required_bytes=3 * TB), host(), None).problems
    assert f"{3 * TB} are needed" in problem
    assert drives.judge(wish([1, 2], level="raid0", required_bytes=3 * TB), host(), None).problems == []


# --- wiping ----------------------------------------------------------------------------------------------------------


def test_a_drive_is_wiped_when_its_serial_number_is_repeated() -> None:
    there = host()
    on(2, signatures=[EXT4])(there)
    made = drives.judge(wish(wipe={by_id(2): "SN0002"}), there, None)
    assert made.problems == []
    assert [drive.serial for drive in made.wiped] == ["SN0002"]
    assert made.steps[0] == "wipe"


def test_a_drive_is_not_wiped_with_another_serial_number_or_while_it_is_used() -> None:
    there = host()
    on(2, signatures=[EXT4])(there)
    text = "\n".join(drives.judge(wish(wipe={by_id(2): "SN0003"}), there, None).problems)
    assert "has the serial number SN0002, not 'SN0003'" in text
    node(2, mountpoints=["/data"])(there)
    for drives_wished in (wish(wipe={by_id(2): "SN0002"}), wish("auto", wipe={by_id(2): "SN0002"})):
        assert "is mounted at /data" in "\n".join(drives.judge(drives_wished, there, None).problems)


# --- a cache that stands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wished", [wish(), wish("auto"), wish(wipe={by_id(1): "SN0001"})])
def test_a_whole_cache_is_left_alone(wished: Any) -> None:
    made = drives.judge(wished, cached(), record())
    assert (made.problems, made.steps) == ([], [])


def test_what_is_missing_around_a_whole_cache_is_put_back() -> None:
    there = cached()
    there["mdadm_conf"] = "MAILADDR root\n"
    there["mount_point"]["unit_enabled"] = False
    assert drives.judge(wish(), there, record()).steps == ["assembly", "unit"]
    there["mounts"].pop()
    assert drives.judge(wish(), there, record()).steps == ["assembly", "unit", "mount"]


def test_a_run_that_was_cut_after_the_filesystem_is_finished() -> None:
    assert drives.judge(wish(), cached(), record("built")).steps == ["assembly", "unit", "mount"]


@pytest.mark.parametrize(
    ("wished", "words"),
    [
        (wish((0, 1, 2, 3, 4)), "would be added; a cache is not grown"),
        (wish((1, 2, 3)), "would be taken out; a cache is not shrunk"),
        (wish((1, 2, 3, 0)), "would be replaced by"),
        (wish(level="raid10"), "was made with raid0, now raid10"),
        (wish(filesystem="ext4"), "was made with xfs, now ext4"),
    ],
)
def test_growing_replacing_and_converting_are_refused_and_a_runbook_named(wished: Any, words: str) -> None:
    text = "\n".join(drives.judge(wished, cached(), record()).problems)
    assert words in text
    assert "docs/runbooks/rebuild-cache.md" in text
    assert (ROOT / "docs/runbooks/rebuild-cache.md").is_file()


def gone(there: Picture) -> None:
    there["lsblk"].pop(3)
    del there["by_id"][by_id(3)]
    del there["sysfs"]["nvme3n1"]


def failed(there: Picture) -> None:
    there["arrays"]["md127"]["members"]["nvme3n1"] = "faulty"


def inactive(there: Picture) -> None:
    there["arrays"]["md127"]["state"] = "inactive"


def foreign(there: Picture) -> None:
    there["sysfs"]["md127"]["signatures"] = [EXT4]


def unmounted_full(there: Picture) -> None:
    there["mounts"].pop()
    there["mount_point"]["entries"] = ["weights/x"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (gone, "(serial SN0003) is gone: the cache has lost a drive"),
        (failed, "nvme3n1 is faulty"),
        (inactive, "state inactive"),
        (on(3, signatures=[EXT4]), "no longer belongs to the cache's array"),
        (foreign, "no longer holds the cache's filesystem"),
        (unmounted_full, "the cache is not mounted, and /var/lib/gpt-oss is not empty"),
    ],
)
def test_a_cache_that_is_not_whole_is_told_of_and_not_touched(change: Change, words: str) -> None:
    there = cached()
    change(there)
    for wished in (wish(), wish("auto")):
        made = drives.judge(wished, there, record())
        assert words in "\n".join(made.problems)
        assert made.steps == []


# --- builds that were cut, and rebuilds ------------------------------------------------------------------------------


def half_made() -> Picture:
    """Power went after the array was made, in the middle of mkfs."""
    there = cached()
    there["mounts"].pop()
    there["mount_point"].update(kind="absent", unit_text=None, unit_enabled=False)
    there["sysfs"]["md127"]["signatures"] = []
    for number in (1, 2, 3, 4):
        there["lsblk"][number]["children"][0]["mountpoints"] = [None]
    return there


def test_a_build_that_was_cut_begins_anew_on_its_drives() -> None:
    for wished in (wish(), wish("auto")):
        made = drives.judge(wished, half_made(), record("building"))
        assert made.problems == []
        assert [drive.serial for drive in made.drives] == ["SN0001", "SN0002", "SN0003", "SN0004"]
        assert made.steps[:2] == ["array", "filesystem"]


def test_without_its_record_a_half_made_cache_is_somebodys_data() -> None:
    assert "a RAID superblock" in "\n".join(drives.judge(wish(), half_made(), None).problems)


def test_a_record_vouches_for_its_own_uuids_and_drives_only() -> None:
    there = half_made()
    there["sysfs"]["nvme3n1"].update(signatures=[EXT4], holders=[])
    assert "ext4" in "\n".join(drives.judge(wish(), there, record("building")).problems)
    there = half_made()
    there["lsblk"][3]["serial"] = "SN9999"  # another drive in its place
    text = "\n".join(drives.judge(wish("auto"), there, record("building")).problems)
    assert "is gone since" in text


def test_a_cut_build_is_finished_on_the_drives_it_began_with() -> None:
    text = "\n".join(drives.judge(wish([1, 2]), half_made(), record("building")).problems)
    assert "name these drives again" in text


def test_bytes_without_a_format_are_ours_only_while_a_build_is_unfinished() -> None:
    there = host()
    on(1, first_byte=8192)(there)
    assert drives.judge(wish([1]), there, record("building", [1])).problems == []
    assert "is not empty" in "\n".join(drives.judge(wish([1]), there, record("ready", [1]), rebuild=True).problems)


def test_a_rebuild_takes_what_is_left_of_the_cache_and_the_new_drive() -> None:
    there = cached()
    gone(there)
    there["lsblk"].append(disk(5))
    there["sysfs"]["nvme5n1"] = facts(5)
    there["by_id"][by_id(5)] = "/dev/nvme5n1"
    for wished in (wish([1, 2, 4, 5]), wish("auto")):
        made = drives.judge(wished, there, record(), rebuild=True)
        assert made.problems == []
        assert [drive.serial for drive in made.drives] == ["SN0001", "SN0002", "SN0004", "SN0005"]
    assert drives.arrays_of(there, record()) == ["md127"]


def test_a_rebuild_touches_nothing_that_is_not_of_the_cache() -> None:
    there = cached()
    there["mounts"][-1] = {"device": "8:1", "point": POINT, "source": "/dev/sda1"}
    there["lsblk"].append({"name": "sda1", "path": "/dev/sda1", "type": "part", "maj:min": "8:1", "uuid": "x"})
    assert "/dev/sda1 is mounted" in "\n".join(drives.judge(wish(), there, record(), rebuild=True).problems)
    assert "no cache on drives to rebuild" in drives.judge(wish(), host(), None, rebuild=True).problems[0]


# --- files -----------------------------------------------------------------------------------------------------------


def test_mdadm_conf_names_the_array_once_and_keeps_the_rest() -> None:
    old = "MAILADDR root\nARRAY /dev/md/gpt-oss-cache metadata=1.2 UUID=1:2:3:4\nARRAY /dev/md/other UUID=5:6:7:8\n"
    made = drives.conf_with(old, ARRAY)
    assert made.splitlines()[:2] == ["MAILADDR root", "ARRAY /dev/md/other UUID=5:6:7:8"]
    assert made.count("gpt-oss-cache") == 1
    assert "UUID=a0a0a0a0:11112222:33334444:44444444" in made
    assert drives.conf_with(made, ARRAY) == made


def test_the_mount_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    unit = tmp_path / "var-lib-gpt\\x2doss.mount"
    unit.write_text(drives.mount_unit(POINT, "xfs", XFS, ["noatime"]))
    assert "Options=noatime,nofail" in unit.read_text()
    if not Path("/usr/bin/systemd-analyze").exists():
        pytest.skip("systemd-analyze is not installed here")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert "Unknown" not in done.stderr
    assert "ignoring" not in done.stderr


# --- the kernel's own signatures -------------------------------------------------------------------------------------


def ask(command: list[str]) -> tuple[int, str, str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[str]:
    """A blank block device of 320 MiB."""
    file = tmp_path / "drive"
    with file.open("wb") as stream:
        stream.truncate(320 * 2**20)
    try:
        made = subprocess.run(["losetup", "--find", "--show", file], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no loop device to be had here: {error}")
    device = made.stdout.strip()
    yield device
    subprocess.run(["losetup", "--detach", device], check=True)


def partition_table(device: str) -> None:
    """A master boot record with one Linux partition."""
    entry = bytes([0, 0, 2, 0, 0x83, 0, 0, 0]) + (2048).to_bytes(4, "little") + (4096).to_bytes(4, "little")
    with Path(device).open("r+b") as stream:
        stream.write(bytes(446) + entry + bytes(48) + b"\x55\xaa")


def zfs_label(device: str) -> None:
    """Uberblocks of one ZFS label, as zpool writes them: 128 KiB into the label, 1 KiB each."""
    with Path(device).open("r+b") as stream:
        for offset in range(128 * 1024, 256 * 1024, 1024):
            stream.seek(offset)
            stream.write((0x00BAB10C).to_bytes(8, sys.byteorder) + (5000).to_bytes(8, sys.byteorder))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (["mkfs.ext4", "-q"], "ext4"),
        (["mkswap"], "swap"),
        (partition_table, "dos"),
        (zfs_label, "zfs_member"),
    ],
)
def test_signatures_are_found_and_a_blank_device_has_none(loop: str, make: Any, words: str) -> None:
    size = 320 * 2**20
    assert drive_picture._wipefs(ask, [loop]) == []
    assert drive_picture.probed(ask, loop) == []
    assert drive_picture.first_byte(loop, size) == (None, None)
    if callable(make):
        make(loop)
    else:
        subprocess.run([*make, loop], check=True, capture_output=True)
    assert words in {signature["type"] for signature in drive_picture._wipefs(ask, [loop]) or []}
    assert drive_picture.first_byte(loop, size)[0] is not None


def test_bytes_at_either_end_are_seen(loop: str) -> None:
    size = 320 * 2**20
    with Path(loop).open("r+b") as stream:
        stream.seek(size - 512)
        stream.write(b"raw data" * 64)
    assert drive_picture._wipefs(ask, [loop]) == []
    assert drive_picture.first_byte(loop, size) == (size - 512, None)


def test_a_claimed_device_is_seen_as_claimed(loop: str) -> None:
    assert drive_picture.claimed(loop) is False
    held = os.open(loop, os.O_RDONLY | os.O_EXCL)
    try:
        assert drive_picture.claimed(loop) is True
    finally:
        os.close(held)


def test_a_program_that_has_a_device_open_is_seen_without_a_claim(loop: str) -> None:
    with Path(loop).open("rb") as device, subprocess.Popen(["sleep", "600"], stdin=device) as sleeper:
        try:
            assert drive_picture.claimed(loop) is False
            programs = drive_picture.opened_devices()[drive_picture.device_number(loop)]
            assert f"sleep (process {sleeper.pid})" in programs
            assert f"(process {os.getpid()})" not in " ".join(programs), "who looks does not count"
        finally:
            sleeper.kill()


@pytest.mark.skipif(shutil.which("udevadm") is None, reason="udev is not here, which is waited for")
def test_this_host_can_be_looked_at() -> None:
    there = drive_picture.take(ask, POINT, deep=True)
    assert {mount["point"] for mount in there["mounts"]} >= {"/"}
    made = drives.judge(wish([1]), there, None)
    assert f"{by_id(1)} is not on this host" in "\n".join(made.problems)


def module_parameters(**more: Any) -> dict[str, Any]:
    return {"phase": "look", "drives": [by_id(1)], "mount_point": POINT, **more}


def test_the_module_refuses_with_everything_that_is_wrong(run_module: Any, tmp_path: Path) -> None:
    damaged = tmp_path / "record.json"
    damaged.write_text("{")
    result = run_module("cache_drives", module_parameters(drives=["auto", by_id(1)], record=str(damaged)))
    assert result["failed"]
    assert "stands beside drives" in result["msg"]
    assert "is damaged" in result["msg"]
    assert result["msg"].endswith("Nothing on the host was changed.")


def test_pictures_do_not_change_while_they_are_judged() -> None:
    there = cached()
    before = copy.deepcopy(there)
    drives.judge(wish(), there, record())
    assert there == before
