"""Drives for a cache: what may be taken, what a cache that stands lacks, and the steps from here to there.

    judge(wish, picture, record, rebuild)  ->  Judgement(problems, steps, drives, ...)

Pure: the picture is what the host's own tools said (drive_picture), the record what an earlier run began. Nothing is
taken that is not proved unused, or proved to be ours: recorded by serial number and wwid before the first change, and
carrying a UUID that was recorded with it. Sizes are bytes. Standard library only, Python 3.8 and later.
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

BY_ID = "/dev/disk/by-id/"
LEVELS = {"single": 1, "raid0": 2, "raid1": 2, "raid10": 4}  # and the fewest drives that each takes
FILESYSTEMS = ("xfs", "ext4")
ARRAY = "gpt-oss-cache"
RUNBOOK = "docs/runbooks/rebuild-cache.md"
# What a filesystem and the array keep for themselves; no more than this share of the drives.
OVERHEAD = 0.03
SMALLEST_FILESYSTEM = 300 * 2**20  # mkfs.xfs makes none below

_SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")
_SHARED = ("/", "/home", "/media", "/mnt", "/opt", "/root", "/srv", "/tmp", "/var", "/var/lib")  # noqa: S108 - refused
_BOOT = ("/", "/boot", "/boot/efi", "/efi", "/usr", "/var")
_SIGNATURES = {
    "linux_raid_member": "a RAID superblock",
    "LVM2_member": "an LVM physical volume",
    "zfs_member": "a ZFS label",
    "swap": "swap space",
    "ceph_bluestore": "a Ceph OSD",
    "crypto_LUKS": "an encrypted volume",
    "gpt": "a partition table (gpt)",
    "dos": "a partition table (dos)",
    "PMBR": "a partition table (protective MBR)",
    "mpath_member": "a path of a multipath device",
}


class Wish(NamedTuple):
    """What is asked for, as the role's inputs give it."""

    drives: Any  # "auto", or by-id paths
    level: str
    filesystem: str
    mount_point: str
    mount_options: list[str]
    minimum_drive_bytes: int
    required_bytes: int
    wipe: dict[str, str]


class Drive(NamedTuple):
    """A whole disk as the kernel shows it."""

    name: str
    path: str
    id: str
    serial: str
    wwid: str
    bytes: int

    @property
    def called(self) -> str:
        return f"{self.id or self.path} ({self.name}, serial {self.serial or 'unknown'})"

    @property
    def identity(self) -> tuple[str, str]:
        return self.serial, self.wwid


class Findings(NamedTuple):
    """Why a drive cannot be taken. What it holds may be given up with a wipe; that it is used, or unfit, may not."""

    unfit: list[str]
    used: list[str]
    holds: list[str]


class Judgement(NamedTuple):
    """`problems` first: where there is one, nothing is to be done."""

    problems: list[str]
    steps: list[str]  # of wipe, array, filesystem, assembly, unit, mount
    drives: list[Drive]
    level: str
    wiped: list[Drive]
    left_aside: dict[str, str]


def path_problems(path: str, name: str = "path") -> list[str]:
    """What is wrong with a directory's path itself."""
    if not path.startswith("/") or os.path.normpath(path) != (path.rstrip("/") or "/"):
        return [f"{name}: {path!r} is not a plain absolute path"]
    if path in _SHARED or any(path == top or path.startswith(top + "/") for top in _SYSTEM):
        return [f"{name}: {path} belongs to the system; choose a directory of its own, such as /var/lib/gpt-oss"]
    return []


# --- the wish by itself ----------------------------------------------------------------------------------------------


def wish_problems(wish: Wish) -> list[str]:
    """What is wrong whatever the host is like."""
    problems = path_problems(wish.mount_point, "model_cache_directory")
    if wish.level not in ("auto", *LEVELS):
        problems.append(f"model_cache_raid_level: {wish.level!r} is not known; allowed: auto, {', '.join(LEVELS)}")
    if wish.filesystem not in FILESYSTEMS:
        problems.append(f"model_cache_filesystem: {wish.filesystem!r} is not known; allowed: {', '.join(FILESYSTEMS)}")
    for name in ("minimum_drive_bytes", "required_bytes"):
        if getattr(wish, name) < 0:
            problems.append(f"model_cache_{name}: {getattr(wish, name)} is below 0; allowed: 0 or more bytes")
    problems += [
        f"model_cache_mount_options: {option!r} is not one mount option; allowed: words such as noatime, without commas"
        for option in wish.mount_options
        if not re.fullmatch(r"[A-Za-z0-9_.:=/+-]+", option)
    ]
    drives = wish.drives
    if drives == "auto":
        return problems
    if drives == "none":
        return [*problems, "model_cache_drives: none leaves nothing to make a cache of; name drives, or set auto"]
    expected = "allowed: none, auto, or a list of /dev/disk/by-id/ paths"
    if not isinstance(drives, list) or not drives:
        return [*problems, f"model_cache_drives: {drives!r} is not understood; {expected}"]
    if any(word in drives for word in ("auto", "none")):
        word = "auto" if "auto" in drives else "none"
        return [*problems, f"model_cache_drives: {word!r} stands beside drives in a list; {expected}, not both"]
    for drive in drives:
        if not isinstance(drive, str) or not re.fullmatch(re.escape(BY_ID) + r"[^/\s]+", drive):
            problems.append(
                f"model_cache_drives: {drive!r} is not a name below {BY_ID}; other names change from boot to boot."
                f" `ls -l {BY_ID}` shows them"
            )
    problems += [f"model_cache_drives: {d} is named twice" for d in sorted({d for d in drives if drives.count(d) > 1})]
    problems += [
        f"model_cache_wipe: {name} is not one of model_cache_drives; name it there too, or remove it here"
        for name in sorted(wish.wipe)
        if name not in drives
    ]
    return problems + (count_problems(wish.level, len(drives)) if not problems else [])


def count_problems(level: str, count: int) -> list[str]:
    """Too few drives for a level, or too many."""
    if level == "auto":
        return []
    if level == "single" and count > 1:
        return [
            f"model_cache_raid_level: single takes one drive, {count} are there; choose raid0, or name one drive in"
            " model_cache_drives"
        ]
    if count < LEVELS[level]:
        return [f"model_cache_raid_level: {level} takes {LEVELS[level]} drives or more, there is {count or 'none'}"]
    return []


def level_of(level: str, count: int) -> str:
    return level if level != "auto" else "single" if count == 1 else "raid0"


def usable_bytes(level: str, sizes: list[int]) -> int:
    """What the drives hold together at least, once array and filesystem have taken their part."""
    if not sizes:
        return 0
    raw = {
        "single": sizes[0],
        "raid0": sum(sizes),
        "raid1": min(sizes),
        "raid10": min(sizes) * len(sizes) // 2,
    }[level]
    return int(raw * (1 - OVERHEAD))


# --- the host --------------------------------------------------------------------------------------------------------


def flat(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every device of an lsblk tree."""
    found: list[dict[str, Any]] = []
    for node in nodes:
        found += [node, *flat(node.get("children") or [])]
    return found


def disks(picture: dict[str, Any]) -> dict[str, Drive]:
    """Whole disks by kernel name."""
    ids: dict[str, list[str]] = {}
    for link, target in sorted(picture["by_id"].items()):
        ids.setdefault(target, []).append(link)
    found = {}
    for node in picture["lsblk"]:
        if node.get("type") == "disk":
            name = str(node["name"])
            path = str(node.get("path") or "/dev/" + name)
            found[name] = Drive(
                name,
                path,
                _best(ids.get(path, [])),
                str(node.get("serial") or "").strip(),
                str((picture["sysfs"].get(name) or {}).get("wwid") or node.get("wwn") or ""),
                int(node.get("size") or 0),
            )
    return found


def _best(links: list[str]) -> str:
    """The name that a person would choose: model and serial, not a number, and the shorter of two."""
    return min(
        links, key=lambda link: (bool(re.search(r"/(wwn|nvme-(eui|uuid|nvme)\b)", link)), len(link), link), default=""
    )


def nvme(node: dict[str, Any]) -> bool:
    return node.get("type") == "disk" and (node.get("tran") == "nvme" or str(node["name"]).startswith("nvme"))


def mounted_at(picture: dict[str, Any], node: dict[str, Any]) -> list[str]:
    """Where a device, or what lies on it, is mounted."""
    below = flat([node])
    numbers = {str(child.get("maj:min")) for child in below}
    paths = {str(child.get("path")) for child in below}
    points = {m["point"] for m in picture["mounts"] if m["device"] in numbers or m["source"] in paths}
    for child in below:
        points |= {str(p) for p in [*(child.get("mountpoints") or []), child.get("mountpoint")] if p and p != "[SWAP]"}
    return sorted(points)


def signature_words(signature: dict[str, Any]) -> str:
    kind = str(signature.get("type"))
    words = _SIGNATURES.get(kind, f"{kind} (a filesystem or another format)")
    told = [f"{key} {signature[key]}" for key in ("label", "uuid") if signature.get(key)]
    return words + (f", {', '.join(told)}" if told else "")


def findings_of(drive: Drive, node: dict[str, Any], picture: dict[str, Any], ours: Ours) -> Findings:
    """Everything that keeps a drive from being taken."""
    unfit, used, holds = [], [], []
    facts = picture["sysfs"].get(drive.name) or {}
    if node.get("ro"):
        unfit.append("is read-only")
    if not drive.serial:
        unfit.append("has no serial number by which it could be known again")
    twins = [d for d in disks(picture).values() if drive.wwid and d.wwid == drive.wwid and d.name != drive.name]
    if twins:
        unfit.append(f"is one drive with {', '.join(d.name for d in twins)} (wwid {drive.wwid}): a multipath leg")
    below = flat(node.get("children") or [])
    points = [point for point in mounted_at(picture, node) if not ours.mounted(drive, point)]
    if any(point in _BOOT for point in points):
        unfit.append(f"is a disk that the host runs from ({', '.join(p for p in points if p in _BOOT)})")
    elif points:
        used.append(f"is mounted at {', '.join(points)}")
    swaps = sorted({str(child.get("path")) for child in flat([node])} & set(picture["swaps"]))
    if swaps:
        used.append(f"is in use as swap ({', '.join(swaps)})")
    if any(child.get("type") == "mpath" for child in below) or node.get("fstype") == "mpath_member":
        unfit.append("is a path of a multipath device")
    holders = [holder for holder in facts.get("holders") or [] if not ours.held(drive, holder, picture)]
    holders += [h for part in facts.get("partitions") or {} for h in (facts["partitions"][part] or [])]
    if holders:
        used.append(f"is held by {', '.join(sorted(set(holders)))}")
    if facts.get("busy") and not (points or swaps or holders or facts.get("holders")) and not ours.mine(drive):
        used.append("is claimed by the kernel or a program, although nothing is mounted from it")
    if facts.get("open_in"):
        used.append(f"is open in {', '.join(facts['open_in'])}")
    if facts.get("error"):
        unfit.append(f"cannot be read: {facts['error']}")
    partitions = [str(child["name"]) for child in below if child.get("type") == "part"]
    if partitions:
        holds.append(f"has partitions ({', '.join(partitions)})")
    signatures = [s for s in facts.get("signatures") or [] if not ours.signature(drive, s)]
    holds += list(dict.fromkeys(f"holds {signature_words(signature)}" for signature in signatures))
    holds += [f"holds {text} (blkid)" for text in facts.get("blkid") or [] if not facts.get("signatures")]
    if not facts.get("signatures") and facts.get("first_byte") is not None and not ours.unfinished(drive):
        holds.append(
            f"is not empty: byte {facts['first_byte']} is set, though no format is recognised; it may be raw data"
        )
    return Findings(unfit, used, holds)


class Ours:
    """What of the host the record proves to be this cache's, and may be made anew."""

    def __init__(self, record: dict[str, Any] | None, rebuild: bool, mount_point: str) -> None:
        self.record = record or {}
        self.building = self.record.get("state") == "building"
        self.open = bool(record) and (self.building or rebuild)
        self.mount_point = self.record.get("mount_point", mount_point)
        self.uuids = {str(uuid) for uuid in self.record.get("uuids") or []}

    def mine(self, drive: Drive) -> bool:
        """Whether the drive is one of the record's, and the cache may be made anew."""
        known = {(str(entry["serial"]), str(entry["wwid"])) for entry in self.record.get("drives") or []}
        return self.open and drive.identity in known

    def signature(self, drive: Drive, signature: dict[str, Any]) -> bool:
        return self.mine(drive) and str(signature.get("uuid") or "") in self.uuids

    def unfinished(self, drive: Drive) -> bool:
        """A build that was cut leaves bytes that no format owns yet; only then, and only on the drives it named."""
        return self.mine(drive) and self.building

    def held(self, drive: Drive, holder: str, picture: dict[str, Any]) -> bool:
        """Held by an array, and the drive carries the superblock of ours."""
        return self.mine(drive) and holder.startswith("md") and self._carries(drive, picture)

    def mounted(self, drive: Drive, point: str) -> bool:
        return self.mine(drive) and point == self.mount_point

    def _carries(self, drive: Drive, picture: dict[str, Any]) -> bool:
        facts = picture["sysfs"].get(drive.name) or {}
        return any(self.signature(drive, signature) for signature in facts.get("signatures") or [])


# --- the judgement ---------------------------------------------------------------------------------------------------


def judge(wish: Wish, picture: dict[str, Any], record: dict[str, Any] | None, rebuild: bool = False) -> Judgement:
    """What is wrong, all of it; or else what is to be done, in order."""
    if rebuild and record is None:
        said = "there is no cache on drives to rebuild on this host: no earlier run made one; run site.yml"
        return _refused([f"model_cache_rebuild: {said}"])
    if record and record["state"] != "building" and not rebuild:
        return standing(wish, picture, record)
    return building(wish, picture, record, rebuild)


def _refused(problems: list[str], left_aside: dict[str, str] | None = None) -> Judgement:
    return Judgement(problems, [], [], "", [], left_aside or {})


def building(wish: Wish, picture: dict[str, Any], record: dict[str, Any] | None, rebuild: bool) -> Judgement:
    """A cache to be made: the first time, after a cut, or anew."""
    ours = Ours(record, rebuild, wish.mount_point)
    there = disks(picture)
    nodes = {str(node["name"]): node for node in picture["lsblk"]}
    problems = mount_problems(wish, picture, record if rebuild or ours.building else None)
    chosen, unknown = _named(wish, picture, there)
    problems += unknown
    problems += _other_drives(wish, chosen, record, there) if ours.building and not rebuild else []
    if wish.drives == "auto":
        ordered = sorted(
            there.values(), key=lambda drive: (drive.id, drive.name)
        )  # kernel names change from boot to boot
        mine = [drive for drive in ordered if ours.mine(drive)]
        chosen = mine if ours.building and not rebuild else [drive for drive in ordered if nvme(nodes[drive.name])]
    permitted, wrong = _permitted(wish, picture, there)
    problems += wrong
    taken: list[Drive] = []
    wiped: list[Drive] = []
    left_aside: dict[str, str] = {}
    for drive in chosen:
        found = findings_of(drive, nodes[drive.name], picture, ours)
        small = _small(wish, drive)
        idle = [*found.holds] if drive.name not in permitted else []
        aside = [*found.unfit, *found.used, *small]
        if wish.drives == "auto" and aside and drive.name not in permitted and not ours.mine(drive):
            left_aside[drive.id or drive.path] = "; ".join(aside)
            continue
        problems += [f"model_cache_drives: {drive.called} {what}" for what in aside]
        problems += [f"model_cache_drives: {drive.called} {what}. {_give_up(drive)}" for what in idle]
        taken.append(drive)
        wiped += [drive] if found.holds and drive.name in permitted else []
    if wish.drives == "auto" and not taken:
        seen = "; ".join(f"{name} {why}" for name, why in left_aside.items()) or "there is none"
        problems.append(f"model_cache_drives: auto found no unused NVMe drive on this host: {seen}")
    problems += _size_problems(wish, taken) if not unknown and taken else []
    level = level_of(wish.level, len(taken))
    if problems:
        return _refused(problems, left_aside)
    steps = [
        *(["wipe"] if wiped else []),
        *(["array"] if level != "single" else []),
        "filesystem",
        "assembly",
        "unit",
        "mount",
    ]
    return Judgement([], steps, taken, level, wiped, left_aside)


def _named(wish: Wish, picture: dict[str, Any], there: dict[str, Drive]) -> tuple[list[Drive], list[str]]:
    """The drives of the list, and what is wrong with their names."""
    if wish.drives == "auto":
        return [], []
    by_path = {drive.path: drive for drive in there.values()}
    kinds = {str(node.get("path")): str(node.get("type")) for node in flat(picture["lsblk"])}
    chosen: list[Drive] = []
    problems = []
    names: dict[str, str] = {}
    for name in wish.drives:
        target = picture["by_id"].get(name)
        if target is None:
            seen = ", ".join(sorted(d.id for d in there.values() if d.id)) or "none"
            problems.append(f"model_cache_drives: {name} is not on this host; there are: {seen}")
        elif target in names:
            problems.append(f"model_cache_drives: {name} and {names[target]} are one drive ({target})")
        elif target in by_path:
            names[target] = name
            chosen.append(by_path[target]._replace(id=name))
        elif target in kinds:
            problems.append(f"model_cache_drives: {name} is a {kinds[target]} ({target}), not a whole drive")
        else:
            problems.append(f"model_cache_drives: {name} ({target}) is not a block device")
    return chosen, problems


def _permitted(wish: Wish, picture: dict[str, Any], there: dict[str, Drive]) -> tuple[set[str], list[str]]:
    """Kernel names of the drives whose content is given up, and what is wrong with that input."""
    by_path = {drive.path: drive for drive in there.values()}
    permitted, problems = set(), []
    for name, serial in sorted(wish.wipe.items()):
        drive = by_path.get(picture["by_id"].get(name, ""))
        if drive is None:
            problems.append(f"model_cache_wipe: {name} is not a drive of this host; remove it from the input")
        elif not drive.serial or drive.serial != str(serial):
            problems.append(
                f"model_cache_wipe: {name} has the serial number {drive.serial or '(none)'}, not {serial!r}; nothing is"
                " wiped unless the input repeats the number of the drive that is there"
            )
        else:
            permitted.add(drive.name)
    return permitted, problems


def arrays_of(picture: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """The arrays that hold drives of the record which carry one of its UUIDs."""
    known = {(str(entry["serial"]), str(entry["wwid"])) for entry in record["drives"]}
    found = set()
    for drive in disks(picture).values():
        facts = picture["sysfs"].get(drive.name) or {}
        if drive.identity in known and {s.get("uuid") for s in facts.get("signatures") or []} & set(record["uuids"]):
            found |= {holder for holder in facts.get("holders") or [] if holder.startswith("md")}
    return sorted(found)


def _is_cache(picture: dict[str, Any], record: dict[str, Any], mount: dict[str, str]) -> bool:
    """Whether it is the record's cache that is mounted; a device that is gone can only have been it."""
    if mount["point"] != record["mount_point"]:
        return False
    node = next((n for n in flat(picture["lsblk"]) if str(n.get("maj:min")) == mount["device"]), None)
    if node is None:
        return True
    signatures = (picture["sysfs"].get(str(node["name"])) or {}).get("signatures") or []
    uuids = {str(node.get("uuid")), *(str(signature.get("uuid")) for signature in signatures)}
    return bool(uuids & set(record["uuids"])) or str(node["name"]) in arrays_of(picture, record)


def _small(wish: Wish, drive: Drive) -> list[str]:
    least = max(wish.minimum_drive_bytes, SMALLEST_FILESYSTEM if wish.level == "single" else 0)
    if drive.bytes >= least:
        return []
    return [f"has {drive.bytes} bytes, model_cache_minimum_drive_bytes asks for {least}"]


def _give_up(drive: Drive) -> str:
    return (
        "Nothing on it is touched. To give up what is on it, set model_cache_wipe:"
        f" {{{drive.id or drive.path}: {drive.serial}}}"
    )


def _size_problems(wish: Wish, drives: list[Drive]) -> list[str]:
    problems = count_problems(wish.level, len(drives))
    if problems:
        return problems
    level = level_of(wish.level, len(drives))
    usable = usable_bytes(level, [drive.bytes for drive in drives])
    if usable < max(wish.required_bytes, SMALLEST_FILESYSTEM):
        return [
            f"model_cache_drives: {len(drives)} drives as {level} hold {usable} bytes, {wish.required_bytes} are needed"
            " for the model and its caches; take more or larger drives"
        ]
    return []


def _other_drives(wish: Wish, chosen: list[Drive], record: dict[str, Any] | None, there: dict[str, Drive]) -> list[str]:
    """A build that was cut is finished on the drives that it began with."""
    begun = {(str(e["serial"]), str(e["wwid"])): str(e["id"]) for e in (record or {}).get("drives") or []}
    present = {drive.identity for drive in there.values()}
    wanted = {drive.identity for drive in chosen} if wish.drives != "auto" else set(begun)
    gone = [name for identity, name in begun.items() if identity not in present]
    if gone:
        return [f"model_cache_drives: a build was cut, and {', '.join(gone)} is gone since: {_rebuild_words()}"]
    if wanted != set(begun):
        return [
            f"model_cache_drives: a build on {', '.join(begun.values())} was cut; name these drives again so that it is"
            f" finished, or begin anew: {_rebuild_words()}"
        ]
    return []


def _rebuild_words() -> str:
    return f"playbooks/rebuild_cache.yml, {RUNBOOK}"


def mount_problems(wish: Wish, picture: dict[str, Any], record: dict[str, Any] | None) -> list[str]:
    """What keeps the cache from being mounted where it is wanted. `record` where what is mounted there may be ours."""
    point = wish.mount_point
    problems = []
    if picture["mount_point"]["real_path"] != point:
        problems.append(
            f"model_cache_directory: {point} leads to {picture['mount_point']['real_path']} through a symbolic link;"
            " name the real path"
        )
    there = [m for m in picture["mounts"] if m["point"] == point]
    ours = bool(there) and record is not None and _is_cache(picture, record, there[-1])
    if there and not ours:
        problems.append(f"model_cache_directory: {there[-1]['source']} is mounted at {point} already; unmount it first")
    elif not there and picture["mount_point"]["entries"]:
        entries = picture["mount_point"]["entries"]
        problems.append(
            f"model_cache_directory: {point} is not empty ({', '.join(entries[:5])}); drives mounted over it would hide"
            " that. Move it away, or choose another directory"
        )
    if picture["mount_point"]["kind"] not in ("absent", "directory"):
        problems.append(f"model_cache_directory: {point} is a {picture['mount_point']['kind']}, not a directory")
    if picture["mount_point"]["in_fstab"]:
        problems.append(f"model_cache_directory: /etc/fstab mounts something at {point}; remove that line first")
    if picture["mount_point"]["unit_text"] is not None and record is None:
        problems.append(f"model_cache_directory: another systemd unit mounts something at {point}; remove it first")
    return problems


# --- a cache that stands ---------------------------------------------------------------------------------------------


def standing(wish: Wish, picture: dict[str, Any], record: dict[str, Any]) -> Judgement:
    """A cache that was made: whole and as wished, or refused. It is neither grown nor repaired."""
    there = disks(picture)
    present = {drive.identity: drive for drive in there.values()}
    entries = {(str(entry["serial"]), str(entry["wwid"])): entry for entry in record["drives"]}
    drives = [present[identity]._replace(id=str(e["id"])) for identity, e in entries.items() if identity in present]
    problems = [
        f"model_cache_drives: {entry['id']} (serial {entry['serial']}) is gone: the cache has lost a drive."
        f" Rebuild it: {_rebuild_words()}"
        for identity, entry in entries.items()
        if identity not in present
    ]
    problems += _changed(wish, picture, record, there)
    wanted_level = level_of(wish.level, len(record["drives"]))
    for name, wanted in (
        ("raid_level", wanted_level),
        ("filesystem", wish.filesystem),
        ("directory", wish.mount_point),
    ):
        kept = record[{"raid_level": "level", "directory": "mount_point"}.get(name, name)]
        if kept != wanted:
            problems.append(
                f"model_cache_{name}: the cache was made with {kept}, now {wanted} is asked for; it is not converted."
                f" Rebuild it: {_rebuild_words()}"
            )
    if problems:
        return _refused(problems)
    problems, assembled, mounted = _whole(picture, record, drives)
    if problems:
        return _refused(problems)
    state = picture["mount_point"]
    steps = [
        *(["assemble"] if not assembled else []),
        *(["assembly"] if record["level"] != "single" and not _conf_right(picture, record) else []),
        *(["unit"] if state["unit_text"] != state["unit_wanted"] or not state["unit_enabled"] else []),
        *(["mount"] if not mounted else []),
    ]
    if record["state"] != "ready":
        steps = [*(["assemble"] if not assembled else []), "assembly", "unit", "mount"]
    spare = {}
    nodes = {str(node["name"]): node for node in picture["lsblk"]}
    if wish.drives == "auto":
        spare = {
            drive.id or drive.path: "is not part of the cache; a cache is not grown but rebuilt: " + _rebuild_words()
            for drive in there.values()
            if nvme(nodes[drive.name]) and drive.identity not in entries and not nodes[drive.name].get("children")
            if not mounted_at(picture, nodes[drive.name]) and drive.bytes >= wish.minimum_drive_bytes
        }
    return Judgement([], steps, drives, str(record["level"]), [], spare)


def _changed(wish: Wish, picture: dict[str, Any], record: dict[str, Any], there: dict[str, Drive]) -> list[str]:
    """Growing, shrinking and replacing, refused."""
    if wish.drives == "auto":
        return []
    kept = {(str(entry["serial"]), str(entry["wwid"])): str(entry["id"]) for entry in record["drives"]}
    names = set(kept.values())
    by_path = {drive.path: drive for drive in there.values()}
    wanted = {name: by_path.get(picture["by_id"].get(name, "")) for name in wish.drives}
    new = sorted(n for n, drive in wanted.items() if (drive is None or drive.identity not in kept) and n not in names)
    known = {drive.identity for drive in wanted.values() if drive is not None}
    left = sorted(name for identity, name in kept.items() if identity not in known and name not in wanted)
    problems = []
    if new and not left:
        problems.append(f"model_cache_drives: {', '.join(new)} would be added; a cache is not grown")
    elif new:
        problems.append(
            f"model_cache_drives: {', '.join(left)} would be replaced by {', '.join(new)}; a cache is not repaired"
        )
    elif left:
        problems.append(f"model_cache_drives: {', '.join(left)} would be taken out; a cache is not shrunk")
    return [f"{problem}. Rebuild it: {_rebuild_words()}" for problem in problems]


def _whole(picture: dict[str, Any], record: dict[str, Any], drives: list[Drive]) -> tuple[list[str], bool, bool]:
    """What is wrong with array and filesystem; whether it is assembled; whether it is mounted."""
    point = str(record["mount_point"])
    arrays = {holder for d in drives for holder in (picture["sysfs"].get(d.name) or {}).get("holders") or []}
    lost = f"Rebuild the cache: {_rebuild_words()}"
    if record["level"] != "single":
        bare = [
            d.called
            for d in drives
            if record["array_uuid"] not in [s.get("uuid") for s in picture["sysfs"][d.name].get("signatures") or []]
        ]
        if bare:
            return (
                [f"model_cache_drives: {', '.join(bare)} no longer belongs to the cache's array. {lost}"],
                False,
                False,
            )
        if not arrays:
            return mount_problems_standing(picture, point, None), False, False
        if len(arrays) > 1:
            return [f"model_cache_drives: the array is in pieces ({', '.join(sorted(arrays))}). {lost}"], False, False
        array = arrays.pop()
        facts = picture["arrays"].get(array) or {}
        failed = [
            f"{name} is {state}" for name, state in sorted((facts.get("members") or {}).items()) if "faulty" in state
        ]
        missing = int(facts.get("degraded") or 0)
        if facts.get("state") in (None, "broken", "inactive", "clear") or failed or missing:
            seen = "; ".join([f"state {facts.get('state')}", *failed, *([f"{missing} missing"] if missing else [])])
            return [f"model_cache_drives: the array {array} is not whole ({seen}). {lost}"], True, False
        top = array
    else:
        top = drives[0].name
    signatures = (picture["sysfs"].get(top) or {}).get("signatures") or []
    if record["filesystem_uuid"] not in [signature.get("uuid") for signature in signatures]:
        return [f"model_cache_drives: {top} no longer holds the cache's filesystem. {lost}"], True, False
    problems = mount_problems_standing(picture, point, top)
    mounted = any(m["point"] == point for m in picture["mounts"])
    return problems, True, mounted


def mount_problems_standing(picture: dict[str, Any], point: str, top: str | None) -> list[str]:
    """What else is where the cache belongs. `top` is the kernel name of the device that holds it."""
    mounts = [m for m in picture["mounts"] if m["point"] == point]
    number = next((str(n.get("maj:min")) for n in flat(picture["lsblk"]) if n.get("name") == top), None)
    if mounts:
        if mounts[-1]["device"] != number:
            return [f"model_cache_directory: {mounts[-1]['source']} is mounted at {point}, not the cache; unmount it"]
        return []
    elsewhere = [m["point"] for m in picture["mounts"] if number and m["device"] == number]
    if elsewhere:
        return [f"model_cache_directory: the cache is mounted at {', '.join(elsewhere)}, not at {point}; unmount it"]
    if picture["mount_point"]["entries"]:
        return [
            f"model_cache_directory: the cache is not mounted, and {point} is not empty"
            f" ({', '.join(picture['mount_point']['entries'][:5])}); move that away, then run again"
        ]
    return []


def array_line(uuid: str) -> str:
    """The line of mdadm.conf that gives the array its name at boot."""
    plain = uuid.replace("-", "")
    return f"ARRAY /dev/md/{ARRAY} metadata=1.2 UUID={':'.join(plain[i : i + 8] for i in range(0, 32, 8))}"


def conf_with(text: str, uuid: str | None) -> str:
    """mdadm.conf with the array's line, where there is an array, and without an earlier one of the same name."""
    lines = [line for line in text.splitlines() if not re.match(rf"\s*ARRAY\s+/dev/md/{re.escape(ARRAY)}\s", line)]
    return "".join(f"{line}\n" for line in [*lines, *([array_line(uuid)] if uuid else [])])


def _conf_right(picture: dict[str, Any], record: dict[str, Any]) -> bool:
    return array_line(str(record["array_uuid"])) in (picture["mdadm_conf"] or "").splitlines()


def mount_unit(mount_point: str, filesystem: str, uuid: str, options: list[str]) -> str:
    """The unit that mounts the cache; `nofail` keeps a host without it booting."""
    words = list(dict.fromkeys([*options, "nofail"]))
    return f"""\
# Written by the role model_cache; changes are overwritten.
[Unit]
Description=Model cache

[Mount]
What=/dev/disk/by-uuid/{uuid}
Where={mount_point}
Type={filesystem}
Options={",".join(words)}

[Install]
WantedBy=local-fs.target
"""
