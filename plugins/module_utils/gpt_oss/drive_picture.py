"""What a host's tools and kernel say of its drives, as `drives.judge` takes it. Opens devices for reading alone.

Standard library only, Python 3.8 and later.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from typing import Any, Callable

from ansible.module_utils.gpt_oss.drives import BY_ID, disks, flat
from ansible.module_utils.gpt_oss.files import kind_of, read_file

Ask = Callable[[Any], Any]  # a command -> its exit status, what it said, what it complained of

UNITS = "/etc/systemd/system"
MDADM_CONF = "/etc/mdadm/mdadm.conf"
EDGE = 2**20  # bytes at either end that must be empty


class LookError(Exception):
    """A tool that everything rests on did not answer."""


def take(ask: Ask, mount_point: str, deep: bool) -> dict[str, Any]:
    """The picture. `deep` also proves drives empty, which reads a little of each that has no signature."""
    # What udev has not finished telling would be missing from lsblk.
    ask(["udevadm", "settle", "--timeout=30"])
    status, out, err = ask(["lsblk", "--json", "--output-all", "--bytes"])
    if status != 0:
        raise LookError(f"lsblk gave no answer (exit status {status}): {err.strip()}")
    tree = json.loads(out)["blockdevices"]
    picture: dict[str, Any] = {
        "lsblk": tree,
        "by_id": by_id(),
        "mounts": mounts(_text("/proc/self/mountinfo")),
        "swaps": [os.path.realpath(line.split()[0]) for line in _text("/proc/swaps").splitlines()[1:] if line.strip()],
        "arrays": {},
        "sysfs": {},
        "mdadm_conf": _text(MDADM_CONF),
        "mount_point": mount_facts(ask, mount_point),
    }
    nodes = {str(n["name"]): n for n in flat(tree) if n.get("type") == "disk" or str(n["name"]).startswith("md")}
    for name in nodes:
        picture["sysfs"][name] = block_facts(name)
        if os.path.isdir(f"/sys/block/{name}/md"):
            picture["arrays"][name] = array_facts(name)
    _add_signatures(ask, picture, nodes)
    if deep:
        opened = opened_devices()
        for drive in disks(picture).values():
            facts = picture["sysfs"][drive.name]
            facts["busy"] = claimed(drive.path)
            facts["open_in"] = opened.get(device_number(drive.path), [])
            if drive.bytes and not facts["signatures"] and not facts["error"] and not facts["holders"]:
                facts["blkid"] = probed(ask, drive.path)
                facts["first_byte"], facts["error"] = first_byte(drive.path, drive.bytes)
    return picture


def by_id() -> dict[str, str]:
    """The device behind each name that says what it is."""
    if not os.path.isdir(BY_ID):
        return {}
    return {BY_ID + name: os.path.realpath(BY_ID + name) for name in sorted(os.listdir(BY_ID))}


def mounts(mountinfo: str) -> list[dict[str, str]]:
    found = []
    for line in mountinfo.splitlines():
        before, mark, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if mark and len(left) >= 5 and len(right) >= 2:
            source = _plain(right[1])
            found.append(
                {
                    "device": left[2],
                    "point": _plain(left[4]),
                    "source": os.path.realpath(source) if source.startswith("/dev/") else source,
                }
            )
    return found


def _plain(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def mount_facts(ask: Ask, path: str) -> dict[str, Any]:
    """What is where the cache belongs."""
    name = unit_name(ask, path)
    fstab = [line.split() for line in _text("/etc/fstab").splitlines() if not line.lstrip().startswith("#")]
    unit = read_file(os.path.join(UNITS, name))
    return {
        "kind": kind_of(path),
        "real_path": os.path.realpath(path),
        "entries": [] if os.path.ismount(path) else files_below(path),
        "in_fstab": any(len(words) > 1 and _plain(words[1]).rstrip("/") == path for words in fstab),
        "unit": name,
        "unit_text": None if unit is None else unit.decode(errors="replace"),
        "unit_enabled": os.path.lexists(os.path.join(UNITS, "local-fs.target.wants", name)),
        "unit_wanted": None,
    }


def unit_name(ask: Ask, path: str) -> str:
    status, out, err = ask(["systemd-escape", "--path", "--suffix=mount", path])
    if status != 0:
        raise LookError(f"systemd-escape gave no name for {path} (exit status {status}): {err.strip()}")
    return str(out).strip()


def files_below(path: str) -> list[str]:
    """The first files below a directory; directories alone hide nothing when something is mounted over them."""
    found = []
    for directory, _, names in os.walk(path):
        found += [os.path.relpath(os.path.join(directory, name), path) for name in sorted(names)]
        if len(found) >= 5:
            break
    return found[:5]


def block_facts(name: str) -> dict[str, Any]:
    base = f"/sys/block/{name}"
    partitions = [entry for entry in _names(base) if os.path.isfile(f"{base}/{entry}/partition")]
    return {
        "wwid": _text(f"{base}/wwid").strip() or _text(f"{base}/device/wwid").strip(),
        "holders": _names(f"{base}/holders"),
        "partitions": {entry: _names(f"{base}/{entry}/holders") for entry in partitions},
        "signatures": [],
        "blkid": [],
        "first_byte": None,
        "busy": False,
        "open_in": [],
        "error": None,
    }


def array_facts(name: str) -> dict[str, Any]:
    base = f"/sys/block/{name}/md"
    members = {entry[4:]: _text(f"{base}/{entry}/state").strip() for entry in _names(base) if entry.startswith("dev-")}
    degraded = _text(f"{base}/degraded").strip()
    return {
        "state": _text(f"{base}/array_state").strip() or None,
        "level": _text(f"{base}/level").strip(),
        "degraded": int(degraded) if degraded.isdigit() else 0,
        "members": members,
    }


def _add_signatures(ask: Ask, picture: dict[str, Any], nodes: dict[str, dict[str, Any]]) -> None:
    paths = {
        name: str(node.get("path") or "/dev/" + name) for name, node in nodes.items() if int(node.get("size") or 0)
    }
    answer = _wipefs(ask, list(paths.values())) if paths else []
    for name, path in paths.items() if answer is None else []:
        alone = _wipefs(ask, [path])
        if alone is None:
            picture["sysfs"][name]["error"] = "wipefs cannot look at it"
        picture["sysfs"][name]["signatures"] = alone or []
    for signature in answer or []:
        picture["sysfs"][str(signature["device"])]["signatures"].append(signature)


def _wipefs(ask: Ask, paths: list[str]) -> list[dict[str, Any]] | None:
    status, out, _ = ask(["wipefs", "--no-act", "--json", *paths])
    if status != 0:
        return None
    return list(json.loads(out)["signatures"]) if out.strip() else []


def probed(ask: Ask, path: str) -> list[str]:
    """What libblkid makes of the content: nothing, something, or several things at once."""
    status, out, _ = ask(["blkid", "--probe", "--output", "export", path])
    if status == 8:
        return ["signatures of more than one format"]
    words = [line for line in out.splitlines() if line.startswith(("TYPE=", "PTTYPE=", "LABEL="))]
    return [", ".join(words)] if words else []


def claimed(path: str) -> bool:
    """Whether the kernel or a program has the device to itself. Opens it for reading; nothing is written."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EBUSY
    return False


def device_number(path: str) -> int | None:
    """The number of a block device; None where there is none."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_rdev if stat.S_ISBLK(facts.st_mode) else None


def opened_devices() -> dict[int | None, list[str]]:
    """Programs, other than this one, that have block devices open, by the device's number. None needs to claim it."""
    found: dict[int | None, list[str]] = {}
    for process in (name for name in _names("/proc") if name.isdigit() and int(name) != os.getpid()):
        numbers = {device_number(f"/proc/{process}/fd/{descriptor}") for descriptor in _names(f"/proc/{process}/fd")}
        for number in numbers - {None}:
            found.setdefault(number, []).append(f"{_text(f'/proc/{process}/comm').strip()} (process {process})")
    return found


def first_byte(path: str, size: int) -> tuple[int | None, str | None]:
    """Offset of the first byte near either end that is not 0, and what kept it from being read."""
    try:
        with open(path, "rb", buffering=0) as device:
            for start in dict.fromkeys((0, max(0, size - EDGE))):
                device.seek(start)
                content = device.read(EDGE)
                rest = content.lstrip(b"\0")
                if rest:
                    return start + len(content) - len(rest), None
    except OSError as error:
        return None, str(error)
    return None, None


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""
