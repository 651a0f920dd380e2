#!/usr/bin/python
"""Unused drives made into a mounted cache; drives that may hold anything are left as they are."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cache_drives
short_description: Make unused drives into one mounted filesystem, or say why not
description:
  - Looks at every drive that is asked for and says everything that speaks against it, at once; nothing is changed then.
    A drive is taken when it is proved unused, that is without a partition, filesystem, RAID, LVM, ZFS, swap or Ceph
    signature, without other bytes at either end, not mounted, not held, not claimed, not a disk the host runs from and
    not a path of a multipath device.
  - What is begun is first written to a record with the drives' serial numbers and the UUIDs that array and filesystem
    are going to have, so that a run that was cut is finished by the next one, and nothing else is ever taken for it.
  - A cache that stands is judged and left alone. No device is opened for writing then.
options:
  phase:
    description: V(look) judges and says what would be done, and which packages that takes; V(build) does it.
    type: str
    choices: [look, build]
    default: build
  drives:
    description: V(auto) for every unused NVMe drive, or names below C(/dev/disk/by-id/).
    type: raw
    required: true
  level:
    description: V(auto) is single for one drive and raid0 for several.
    type: str
    choices: [auto, single, raid0, raid1, raid10]
    default: auto
  filesystem:
    description: What to make on it.
    type: str
    choices: [xfs, ext4]
    default: xfs
  mount_point:
    description: Where it is mounted.
    type: path
    required: true
  mount_options:
    description: Mount options; C(nofail) is always one of them.
    type: list
    elements: str
    default: [noatime]
  minimum_drive_bytes:
    description: Size in bytes that each drive has at least.
    type: int
    default: 0
  required_bytes:
    description: Bytes that the filesystem must be able to hold.
    type: int
    default: 0
  wipe:
    description: Drives whose content is given up, each with its serial number.
    type: dict
    default: {}
  rebuild:
    description: Make the cache of the record anew. What is on it is lost.
    type: bool
    default: false
  record:
    description: The file that says what was begun; on another filesystem than the cache.
    type: path
    default: /var/lib/gpt-oss-drives/record.json
attributes:
  check_mode:
    support: full
    description: Judges, and says what would be done.
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Make a cache of what is unused
  cache_drives:
    drives: auto
    mount_point: /var/lib/gpt-oss
"""

RETURN = r"""
steps:
  description: What was done, or would be, in order.
  returned: always
  type: list
  elements: str
  sample: [array, filesystem, assembly, unit, mount]
drives:
  description: The cache's drives.
  returned: always
  type: list
  elements: dict
  sample: [{id: /dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_SN0001, serial: SN0001, wwid: nvme.1b36-534e, bytes: 1073741824}]
level:
  description: How they are put together.
  returned: always
  type: str
left_aside:
  description: With V(auto), drives that were not taken, each with the reason.
  returned: always
  type: dict
packages:
  description: Packages that are missing for these steps, as M(apt_set) takes them.
  returned: always
  type: list
  elements: dict
  sample: [{name: mdadm}]
problems:
  description: Everything that was found wrong.
  returned: failure
  type: list
  elements: str
"""

import fcntl
import json
import os
import shutil
import uuid
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss import drive_picture, drives
from ansible.module_utils.gpt_oss.files import read_file, write_file

ARGUMENTS: dict[str, Any] = {
    "phase": {"type": "str", "choices": ["look", "build"], "default": "build"},
    "drives": {"type": "raw", "required": True},
    "level": {"type": "str", "choices": ["auto", *drives.LEVELS], "default": "auto"},
    "filesystem": {"type": "str", "choices": list(drives.FILESYSTEMS), "default": "xfs"},
    "mount_point": {"type": "path", "required": True},
    "mount_options": {"type": "list", "elements": "str", "default": ["noatime"]},
    "minimum_drive_bytes": {"type": "int", "default": 0},
    "required_bytes": {"type": "int", "default": 0},
    "wipe": {"type": "dict", "default": {}},
    "rebuild": {"type": "bool", "default": False},
    "record": {"type": "path", "default": "/var/lib/gpt-oss-drives/record.json"},
}
_TOOLS = {"mdadm": "mdadm", "mkfs.xfs": "xfsprogs", "mkfs.ext4": "e2fsprogs"}


class BuildError(Exception):
    """A step did not succeed; the record stays, and the next run begins where it must."""


class CacheDrives:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        p = module.params
        self.wish = drives.Wish(
            p["drives"],
            p["level"],
            p["filesystem"],
            p["mount_point"],
            p["mount_options"],
            p["minimum_drive_bytes"],
            p["required_bytes"],
            {str(name): str(serial) for name, serial in (p["wipe"] or {}).items()},
        )
        self.record_path: str = p["record"]
        self.done: list[str] = []

    def run(self) -> None:
        problems = drives.wish_problems(self.wish)
        record = self.read_record(problems)
        if problems:
            self.refuse(problems)
        rebuild = bool(self.module.params["rebuild"])
        deep = record is None or record["state"] == "building" or rebuild
        picture = drive_picture.take(self.ask, self.wish.mount_point, deep)
        if record is not None:
            picture["mount_point"]["unit_wanted"] = self.unit_text(record)
        judgement = drives.judge(self.wish, picture, record, rebuild)
        if judgement.problems:
            self.refuse(judgement.problems)
        result: dict[str, Any] = {
            "changed": bool(judgement.steps),
            "steps": judgement.steps,
            "drives": [described(drive) for drive in judgement.drives],
            "level": judgement.level,
            "left_aside": judgement.left_aside,
            "packages": [{"name": name} for name in self.missing_packages(judgement)],
        }
        if self.module._diff and judgement.steps:
            result["diff"] = {"before": "", "after": "".join(f"{line}\n" for line in told(judgement, self.wish))}
        if self.module.params["phase"] == "build" and judgement.steps and not self.module.check_mode:
            self.build(judgement, picture, record)
            result["packages"] = []
        self.module.exit_json(**result)

    def refuse(self, problems: list[str]) -> None:
        self.module.fail_json(
            msg="; ".join(problems) + ". Nothing on the host was changed.", problems=problems, changed=False
        )

    # -- the record ----------------------------------------------------------------------------------------------------

    def read_record(self, problems: list[str]) -> dict[str, Any] | None:
        content = read_file(self.record_path)
        if content is None:
            return None
        try:
            record = json.loads(content)
            if record["state"] not in ("building", "built", "ready") or not record["drives"]:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            problems.append(
                f"{self.record_path} is damaged, so that nobody can say which drives are the cache's; bring it back"
                f" from a backup, or see {drives.RUNBOOK}"
            )
            return None
        return dict(record)

    def write_record(self, record: dict[str, Any]) -> None:
        """On the disk, and not only on its way there, before anything that relies on it is done."""
        directory = os.path.dirname(self.record_path)
        os.makedirs(directory, mode=0o755, exist_ok=True)
        write_file(self.record_path, (json.dumps(record, indent=2) + "\n").encode())
        for place in (directory, os.path.dirname(directory)):
            descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    # -- building ------------------------------------------------------------------------------------------------------

    def missing_packages(self, judgement: drives.Judgement) -> list[str]:
        needed = []
        if judgement.level != "single" and {"array", "assemble", "assembly"} & set(judgement.steps):
            needed.append("mdadm")
        if "filesystem" in judgement.steps:
            needed.append(f"mkfs.{self.wish.filesystem}")
        return [_TOOLS[tool] for tool in needed if not self.tool(tool)]

    @staticmethod
    def tool(name: str) -> str | None:
        return shutil.which(name, path="/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin")

    def build(self, judgement: drives.Judgement, picture: dict[str, Any], record: dict[str, Any] | None) -> None:
        missing = self.missing_packages(judgement)
        if missing:
            self.refuse([f"{', '.join(missing)} is not installed; apt-get install {' '.join(missing)}"])
        try:
            if "filesystem" in judgement.steps:
                record = self.make(judgement, picture, record)
            assert record is not None
            if "assemble" in judgement.steps:
                self.do(
                    ["mdadm", "--assemble", f"/dev/md/{drives.ARRAY}", f"--uuid={mdadm_uuid(record['array_uuid'])}"]
                )
            if "assembly" in judgement.steps:
                self.remember_array(record)
            if {"unit", "mount"} & set(judgement.steps):
                self.mount(record, picture["mount_point"]["unit"])
            if record["state"] != "ready":
                self.write_record({**record, "state": "ready"})
        except (BuildError, OSError) as error:
            done = f" Done so far: {', '.join(self.done)}." if self.done else ""
            self.module.fail_json(
                msg=f"{error}.{done} Run again when the cause is gone: it begins where it must.", changed=True
            )

    def make(self, judgement: drives.Judgement, picture: dict[str, Any], old: dict[str, Any] | None) -> dict[str, Any]:
        """Array and filesystem, with the UUIDs that the record gets first."""
        self.take_apart(judgement, picture, old)
        array = str(uuid.uuid4()) if judgement.level != "single" else None
        filesystem = str(uuid.uuid4())
        record: dict[str, Any] = {
            "state": "building",
            "drives": [described(drive) for drive in judgement.drives],
            "level": judgement.level,
            "filesystem": self.wish.filesystem,
            "mount_point": self.wish.mount_point,
            "array_uuid": array,
            "filesystem_uuid": filesystem,
            # Those of builds that were cut, too: their traces are ours.
            "uuids": [*(old or {}).get("uuids", []), *([array] if array else []), filesystem],
        }
        self.write_record(record)
        self.done.append("record")
        for drive in judgement.drives:
            facts = picture["sysfs"][drive.name]
            if drive in judgement.wiped or facts["signatures"] or facts["first_byte"] is not None:
                self.wipe(drive, list(facts["partitions"]))
        self.do(["udevadm", "settle", "--timeout=60"])
        top = judgement.drives[0].path
        if array:
            top = self.make_array(judgement, array)
        self.make_filesystem(top, judgement, filesystem)
        record["state"] = "built"
        self.write_record(record)
        return record

    def take_apart(self, judgement: drives.Judgement, picture: dict[str, Any], old: dict[str, Any] | None) -> None:
        """Unmount and stop what is there of an earlier cache; `judge` has proved that it is ours."""
        if old is None:
            return
        point = str(old["mount_point"])
        if any(mount["point"] == point for mount in picture["mounts"]):
            status, out, err = self.module.run_command(["umount", point])
            if status != 0:
                self.refuse(
                    [
                        f"model_cache_directory: {point} cannot be unmounted ({err.strip() or out.strip()}); stop what"
                        " uses it, such as the server (systemctl stop 'gpt-oss@*')"
                    ]
                )
            self.done.append("unmount")
        if point != self.wish.mount_point:
            name = drive_picture.unit_name(self.ask, point)
            if read_file(os.path.join(drive_picture.UNITS, name)) is not None:
                self.do(["systemctl", "disable", name])
                os.unlink(os.path.join(drive_picture.UNITS, name))
        for array in drives.arrays_of(picture, old):
            self.do(["mdadm", "--stop", f"/dev/{array}"])
            self.done.append(f"stop {array}")

    def wipe(self, drive: drives.Drive, partitions: list[str]) -> None:
        for partition in reversed(partitions):
            self.do(["wipefs", "--all", "--force", f"/dev/{partition}"])
        self.do(["wipefs", "--all", "--force", drive.path])
        descriptor = os.open(drive.path, os.O_WRONLY | os.O_EXCL | os.O_CLOEXEC)
        try:
            edge = drive_picture.EDGE
            for start in (0, max(0, drive.bytes - edge)):
                os.pwrite(descriptor, bytes(min(edge, drive.bytes)), start)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self.done.append(f"wipe {drive.name}")

    def make_array(self, judgement: drives.Judgement, array: str) -> str:
        path = f"/dev/md/{drives.ARRAY}"
        paths = [drive.path for drive in judgement.drives]
        name = ["--homehost=any", f"--name={drives.ARRAY}", f"--uuid={mdadm_uuid(array)}"]
        shape = [f"--level={judgement.level[4:]}", f"--raid-devices={len(paths)}"]
        self.do(["mdadm", "--create", path, "--run", "--metadata=1.2", *name, *shape, *paths])
        self.do(["udevadm", "settle", "--timeout=60"])
        self.done.append("array")
        return os.path.realpath(path)

    def make_filesystem(self, top: str, judgement: drives.Judgement, filesystem: str) -> None:
        chunk = int(read_file(f"/sys/block/{os.path.basename(top)}/md/chunk_size") or b"0")
        width = {"raid0": len(judgement.drives), "raid10": len(judgement.drives) // 2}.get(judgement.level, 0)
        if self.wish.filesystem == "xfs":
            stripe = ["-d", f"su={chunk},sw={width}"] if chunk and width else []
            self.do(["mkfs.xfs", "-q", "-f", "-m", f"uuid={filesystem}", *stripe, top])
        else:
            blocks = chunk // 4096
            stripe = ["-E", f"stride={blocks},stripe_width={blocks * width}"] if blocks and width else []
            self.do(["mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-U", filesystem, *stripe, top])
        self.done.append("filesystem")

    def remember_array(self, record: dict[str, Any]) -> None:
        """The array keeps its name at boot: mdadm.conf, and the copy of it that the initramfs carries."""
        path = drive_picture.MDADM_CONF
        before = (read_file(path) or b"").decode()
        after = drives.conf_with(before, record["array_uuid"])
        if after != before or record["state"] != "ready":
            if after != before:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                write_file(path, after.encode())
            if record["array_uuid"] and self.tool("update-initramfs"):
                self.do(["update-initramfs", "-u", "-k", "all"])
            self.done.append("assembly")

    def unit_text(self, record: dict[str, Any]) -> str:
        text: str = drives.mount_unit(
            record["mount_point"], record["filesystem"], record["filesystem_uuid"], self.wish.mount_options
        )
        return text

    def mount(self, record: dict[str, Any], name: str) -> None:
        path = os.path.join(drive_picture.UNITS, name)
        text = self.unit_text(record).encode()
        if read_file(path) != text:
            write_file(path, text)
        os.makedirs(record["mount_point"], mode=0o755, exist_ok=True)
        self.do(["udevadm", "settle", "--timeout=60"])
        self.do(["systemctl", "daemon-reload"])
        self.do(["systemctl", "enable", name])
        # Other options of what is mounted take a remount.
        self.do(["systemctl", "reload" if os.path.ismount(record["mount_point"]) else "start", name])
        self.done.append("mount")

    # -- tools ---------------------------------------------------------------------------------------------------------

    def ask(self, command: list[str]) -> tuple[int, str, str]:
        status, out, err = self.module.run_command(command, environ_update={"LC_ALL": "C"})
        return int(status), str(out), str(err)

    def do(self, command: list[str]) -> None:
        status, out, err = self.ask(command)
        if status != 0:
            raise BuildError(f"{' '.join(command)} failed (exit status {status}): {err.strip() or out.strip()}")


def mdadm_uuid(text: str) -> str:
    plain = text.replace("-", "")
    return ":".join(plain[start : start + 8] for start in range(0, 32, 8))


def described(drive: drives.Drive) -> dict[str, Any]:
    return {"id": drive.id or drive.path, "serial": drive.serial, "wwid": drive.wwid, "bytes": drive.bytes}


def told(judgement: drives.Judgement, wish: drives.Wish) -> list[str]:
    """The steps as a diff shows them."""
    words = {
        "wipe": "wipe " + ", ".join(drive.called for drive in judgement.wiped),
        "array": f"{judgement.level} over " + ", ".join(drive.called for drive in judgement.drives),
        "filesystem": f"{wish.filesystem} on it",
        "assemble": "assemble the array",
        "assembly": "its name at boot (mdadm.conf, initramfs)",
        "unit": "systemd mount unit",
        "mount": f"mounted at {wish.mount_point}",
    }
    return [words[step] for step in judgement.steps]


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    work = CacheDrives(module)
    try:
        with open("/run/gpt-oss-drives.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            work.run()
    except (drive_picture.LookError, OSError) as error:
        module.fail_json(msg=f"{error}. Nothing on the host was changed.")


if __name__ == "__main__":
    main()
