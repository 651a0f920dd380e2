#!/usr/bin/python
"""A directory for large files: the filesystem below it judged first, then the directory and its parts made."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cache_directory
short_description: Make a directory for large files on a filesystem that can hold them
description:
  - Looks at the filesystem that the directory is on, or would be on, and reports everything that is wrong with it at
    once. Nothing is made then.
  - Never touches a block device and never mounts anything.
options:
  path:
    description: The directory.
    type: path
    required: true
  parts:
    description: Directories below it, by relative path.
    type: list
    elements: str
    default: []
  owner:
    description: Name of the owner of all of them.
    type: str
    default: root
  group:
    description: Name of the group of all of them.
    type: str
    default: root
  mode:
    description: Octal mode of all of them.
    type: str
    default: "0755"
  required_bytes:
    description: Bytes that the directory must be able to hold. What is in it already counts.
    type: int
    default: 0
  require_mount:
    description: Refuse the root filesystem. Guards against a data disk that is not mounted.
    type: bool
    default: false
  allow_network_filesystem:
    description: Accept a filesystem that other hosts may share.
    type: bool
    default: false
  procfs:
    description: Root of the process filesystem to read mounts from.
    type: path
    default: /proc
attributes:
  check_mode:
    support: full
    description: Judges the filesystem and says what would be made.
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Make the model cache
  cache_directory:
    path: /var/lib/gpt-oss
    parts: [weights, staging, encodings, engine_caches]
    required_bytes: 70000000000
"""

RETURN = r"""
filesystem:
  description: Type, mount point, device, free and total bytes of the filesystem.
  returned: always
  type: dict
used_bytes:
  description: What the directory holds already.
  returned: always
  type: int
"""

import grp
import os
import pwd
import re
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss.drives import path_problems
from ansible.module_utils.survey.host import Host
from ansible.module_utils.survey.storage import paths

MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
NO_STORE = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "squashfs", "iso9660", "erofs", "autofs")
NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "ceph",
    "9p",
    "afs",
    "lustre",
    "gpfs",
    "beegfs",
    "wekafs",
    "ocfs2",
    "gfs2",
)


def filesystem_problems(facts: dict[str, Any], params: dict[str, Any], used: int) -> list[str]:
    """What is wrong with the filesystem. Pure: facts and wishes in, findings out."""
    kind, point, path = facts["type"], facts["mount_point"], params["path"]
    problems = []
    if facts["error"]:
        return [f"{path}: {facts['error']}"]
    if not facts["is_directory"]:
        problems.append(f"{facts['existing_parent']} is not a directory")
    if kind in MEMORY:
        problems.append(f"{path} is on {kind} ({point}): weights would take up memory and be gone after a reboot")
    elif kind in NO_STORE or kind is None:
        problems.append(f"{path} is on {kind} ({point}), which holds no files")
    elif (kind in NETWORK or str(kind).startswith("fuse.")) and not params["allow_network_filesystem"]:
        problems.append(
            f"{path} is on {kind} ({point}), a network filesystem: loading takes as long as the network does, and hosts"
            " that share it get in each other's way. Choose a local disk, or allow it with"
            " model_cache_allow_network_filesystem"
        )
    if facts["read_only"]:
        problems.append(f"{path} is on {point}, which is mounted read-only")
    if params["require_mount"] and point == "/":
        problems.append(
            f"{path} is on the root filesystem, and model_cache_require_mount is set: the disk meant for it is not"
            " mounted"
        )
    required, free = params["required_bytes"], facts["free_bytes"]
    if free is not None and used + free < required:
        problems.append(
            f"{path} is too small: {required} bytes are needed, {used} are in it and {free} are free on {point},"
            f" {required - used - free} are missing"
        )
    return problems


def used_bytes(path: str) -> int:
    """What the files below a directory take up on its disk, each counted once."""
    seen = set()
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                status = os.lstat(os.path.join(directory, name))
            except FileNotFoundError:
                continue  # a download in progress renames its files
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += status.st_blocks * 512
    return total


def identity(name: str, kind: str) -> int:
    """The number of a user or group."""
    try:
        if name.isdigit():
            return int(name)
        return pwd.getpwnam(name).pw_uid if kind == "owner" else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ValueError(f"{kind}: there is no {name!r} on this host") from None


def arrange(directories: list[str], uid: int, gid: int, mode: int, *, really: bool) -> list[tuple[str, str]]:
    """Make directories and set owners and modes where they differ; what was, or would be, done."""
    done = []
    for path in directories:
        if not os.path.isdir(path):
            if os.path.lexists(path):
                raise ValueError(f"{path} is there and is not a directory")
            done.append((path, "made"))
            if really:
                os.makedirs(path)
        if os.path.isdir(path):
            status = os.stat(path)
            if (status.st_uid, status.st_gid) != (uid, gid):
                if really:
                    os.chown(path, uid, gid)
                done.append((path, f"owner {uid}:{gid}"))
            if status.st_mode & 0o7777 != mode:
                if really:
                    os.chmod(path, mode)
                done.append((path, f"mode {mode:04o}"))
    return done


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "parts": {"type": "list", "elements": "str", "default": []},
            "owner": {"type": "str", "default": "root"},
            "group": {"type": "str", "default": "root"},
            "mode": {"type": "str", "default": "0755"},
            "required_bytes": {"type": "int", "default": 0},
            "require_mount": {"type": "bool", "default": False},
            "allow_network_filesystem": {"type": "bool", "default": False},
            "procfs": {"type": "path", "default": "/proc"},
        },
        supports_check_mode=True,
    )
    params = module.params
    path = params["path"]
    problems = path_problems(path)
    if not re.match(r"0?[0-7]{3}\Z", params["mode"]):
        problems.append(f"mode: {params['mode']!r} is not an octal mode such as 0755")
    if params["required_bytes"] < 0:
        problems.append(f"required_bytes: {params['required_bytes']} is below 0")
    if problems:
        module.fail_json(msg="; ".join(problems))
    facts = paths(Host(params["procfs"], "/sys", "/", []), [path])[path]
    used = used_bytes(path) if facts["exists"] else 0
    problems = filesystem_problems(facts, params, used)
    if problems:
        module.fail_json(msg="; ".join(problems), filesystem=facts, used_bytes=used)
    result: dict[str, Any] = {"changed": False, "filesystem": facts, "used_bytes": used}
    directories = [path, *(os.path.join(path, part) for part in params["parts"])]
    try:
        uid, gid = identity(params["owner"], "owner"), identity(params["group"], "group")
        done = arrange(directories, uid, gid, int(params["mode"], 8), really=not module.check_mode)
    except (OSError, ValueError) as error:
        module.fail_json(msg=str(error), **result)
    result["changed"] = bool(done)
    if module._diff and done:
        result["diff"] = {"before": "", "after": "".join(f"{where}: {what}\n" for where, what in done)}
    module.exit_json(**result)


if __name__ == "__main__":
    main()
