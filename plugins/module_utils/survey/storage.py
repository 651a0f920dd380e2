"""File systems below the directories that will be used, and the model's weights."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from .host import Host, first_line, names, read


def paths(host: Host, wanted: list[str]) -> dict[str, dict[str, Any]]:
    mounts = _mounts(host)
    return {path: _path(host, path, mounts) for path in wanted}


def _path(host: Host, path: str, mounts: list[dict[str, str]]) -> dict[str, Any]:
    existing = os.path.normpath(path)
    while not os.path.lexists(host.root(existing)) and existing != "/":
        existing = os.path.dirname(existing)
    real = host.root(existing)
    resolved = os.path.realpath(real) if host.rootfs == "/" else existing
    mount = _mount_of(resolved, mounts)
    facts: dict[str, Any] = {
        "exists": existing == os.path.normpath(path),
        "existing_parent": existing,
        "is_directory": os.path.isdir(real),
        "mount_point": mount.get("mount_point"),
        "type": mount.get("type"),
        "device": mount.get("device"),
        "read_only": "ro" in mount.get("options", "").split(","),
        "writable": os.access(real, os.W_OK),
        "filesystem": _filesystem(mount),
        "free_bytes": None,
        "total_bytes": None,
        "free_inodes": None,
        "error": None,
    }
    try:
        size = os.statvfs(real)
    except OSError as error:
        facts["error"] = str(error)
        return facts
    facts["free_bytes"] = size.f_bavail * size.f_frsize
    facts["total_bytes"] = size.f_blocks * size.f_frsize
    # File systems that make inodes as they go say 0 of 0.
    facts["free_inodes"] = size.f_favail if size.f_files else None
    facts["read_only"] = facts["read_only"] or bool(size.f_flag & os.ST_RDONLY)
    return facts


def _filesystem(mount: dict[str, str]) -> str | None:
    """One name for one store of bytes: two mounts of a device share it."""
    device = mount.get("device", "")
    return device if device.startswith("/dev/") else mount.get("mount_point")


def _mounts(host: Host) -> list[dict[str, str]]:
    found = []
    for line in (read(host.live("self", "mountinfo")) or "").splitlines():
        before, mark, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if mark and len(left) >= 6 and len(right) >= 2:
            found.append(
                {
                    "mount_point": _unescaped(left[4]),
                    "options": left[5],
                    "type": right[0],
                    "device": _unescaped(right[1]),
                }
            )
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _mount_of(path: str, mounts: list[dict[str, str]]) -> dict[str, str]:
    best: dict[str, str] = {}
    for mount in mounts:
        point = mount["mount_point"]
        inside = point == "/" or path == point or path.startswith(point + "/")
        if inside and len(point) >= len(best.get("mount_point", "")):  # of equal ones the later is on top
            best = mount
    return best


def sizes(host: Host, wanted: list[str]) -> dict[str, int]:
    """Bytes that the files below each directory take; 0 where there is none. `DIR/*` is each directory in DIR."""
    found = {}
    for directory in (each for one in wanted for each in _directories(host, one)):
        total = 0
        for base, _, files in os.walk(host.root(directory)):
            for name in files:
                try:
                    total += os.lstat(os.path.join(base, name)).st_blocks * 512
                except OSError:  # gone since it was listed
                    continue
        found[directory] = total
    return found


def _directories(host: Host, wanted: str) -> list[str]:
    if not wanted.endswith("/*"):
        return [wanted]
    inside = [wanted[:-1] + name for name in names(host.root(wanted[:-2]))]
    return [path for path in inside if os.path.isdir(host.root(path))]


def cache_drives(host: Host, record_path: str) -> dict[str, Any] | None:
    """The cache that was made of drives, as its record has it and as it is; None where none was made."""
    text = read(host.root(record_path))
    if text is None:
        return None
    record = json.loads(text)
    blocks = {name: _identity(host, name) for name in names(host.sys("block"))}
    drives = []
    for entry in record["drives"]:
        name = next((n for n, known in blocks.items() if entry["wwid" if entry["wwid"] else "serial"] in known), None)
        drives.append({"id": entry["id"], "serial": entry["serial"], "name": name})
    present = [str(drive["name"]) for drive in drives if drive["name"]]
    arrays = sorted({h for n in present for h in names(host.sys("block", n, "holders")) if h.startswith("md")})
    mount = next((m for m in reversed(_mounts(host)) if m["mount_point"] == record["mount_point"]), None)
    source = os.path.basename(os.path.realpath(mount["device"])) if mount else None
    return {
        "state": record["state"],
        "level": record["level"],
        "mount_point": record["mount_point"],
        "drives": drives,
        "arrays": [_array(host, name) for name in arrays],
        "mounted": source is not None and source in (arrays if record["level"] != "single" else present),
    }


def _identity(host: Host, name: str) -> set[str]:
    files = (("wwid",), ("device", "wwid"), ("device", "serial"))
    return {line for line in (first_line(host.sys("block", name, *file)) for file in files) if line}


def _array(host: Host, name: str) -> dict[str, Any]:
    base = host.sys("block", name, "md")
    degraded = first_line(base + "/degraded") or "0"
    members = {m[4:]: first_line(f"{base}/{m}/state") or "" for m in names(base) if m.startswith("dev-")}
    return {
        "name": name,
        "state": first_line(base + "/array_state"),
        "missing": int(degraded) if degraded.isdigit() else 0,
        "faulty": sorted(member for member, state in members.items() if "faulty" in state),
    }


def weights(host: Host, directory: str, repository: str, revision: str) -> dict[str, Any]:
    """Whether the verified snapshot is there. Compares names, sizes and times with its marker; reads no weights."""
    model = directory.rstrip("/") + "/models--" + repository.replace("/", "--")
    snapshot = model + "/snapshots/" + revision
    marker_path = model + "/verified/" + revision + ".json"
    facts: dict[str, Any] = {
        "snapshot": snapshot,
        "snapshot_exists": os.path.isdir(host.root(snapshot)),
        "marker": marker_path,
        "marker_present": False,
        "problems": [],
        "bytes": 0,
        "current_revision": first_line(host.root(model + "/refs/main")),
        "other_revisions": [name for name in names(host.root(model + "/snapshots")) if name != revision],
    }
    text = read(host.root(marker_path))
    if text is None:
        return facts
    facts["marker_present"] = True
    for name, marked in _marked_files(text):
        try:
            found = os.stat(os.path.join(host.root(snapshot), name))
        except OSError:
            facts["problems"].append(f"{name} is missing")
            continue
        facts["bytes"] += found.st_size
        if (found.st_size, found.st_mtime_ns) != (marked.get("size"), marked.get("mtime_ns")):
            facts["problems"].append(f"{name} has changed since it was verified")
    if not facts["bytes"] and not facts["problems"]:
        facts["problems"].append(f"{marker_path} names no files")
    return facts


def _marked_files(text: str) -> list[tuple[str, dict[str, Any]]]:
    try:
        files = json.loads(text)["files"]
        return [(entry["path"], entry) for entry in files]
    except (ValueError, KeyError, TypeError):
        return []
