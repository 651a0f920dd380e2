"""Revisions of a model in a cache: which are there, which are in use, and taking away what nobody needs.

Only a revision with a marker of fetch_weights counts: what somebody else has put into the cache is not touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ansible.module_utils.gpt_oss import fetch_weights as weights

REMOVED = ".removed"  # ends the name of a snapshot that is out of sight and being deleted


@dataclass(frozen=True)
class Revision:
    """One revision that was verified here; `size` in bytes, `checked_at` as its marker has it."""

    name: str
    size: int
    checked_at: str


def revisions(layout: weights.Layout) -> list[Revision]:
    """Every revision of the model with a marker, the one verified longest ago first."""
    found = []
    for path in layout.marker.parent.glob("*.json"):
        marker = weights.read_marker(replace(layout, revision=path.stem)) or {}
        size = sum(int(entry["size"]) for entry in marker.get("files", []))
        found.append(Revision(path.stem, size, str(marker.get("checked_at", ""))))
    return sorted(found, key=lambda revision: (revision.checked_at, revision.name))


def others(layout: weights.Layout) -> list[str]:
    """Names of the revisions that are here besides this one, and of those whose removal was cut off."""
    names = {path.stem for path in layout.marker.parent.glob("*.json")}
    names |= {path.name[: -len(REMOVED)] for path in leftovers(layout)}
    return sorted(names - {layout.revision})


def leftovers(layout: weights.Layout) -> list[Path]:
    """Snapshots whose removal was cut off."""
    return sorted(layout.work.parent.glob("*" + REMOVED))


def installed(configuration_directory: str) -> set[Path]:
    """The snapshots that this host's engine processes were planned with, running or not."""
    found = set()
    for path in Path(configuration_directory, "processes").glob("*/process.json"):
        # One that cannot be read might name anything: that is for a person to look at.
        found.add(Path(json.loads(path.read_text(encoding="utf-8"))["snapshot"]).resolve())
    return found


def opened(snapshots: Iterable[Path], procfs: str = "/proc") -> set[Path]:
    """Those of the snapshots with a file that a process has open or mapped, in a container or not.

    A file that another revision has as well stays on the disk, and open, under its other name: it is not asked about.
    """
    owner = {}
    for snapshot in snapshots:
        for path in snapshot.rglob("*"):
            status = path.lstat()
            if status.st_nlink == 1:
                owner[status.st_dev, status.st_ino] = snapshot
    inodes = {str(inode): snapshot for (_, inode), snapshot in owner.items()}
    found = set()
    for process in Path(procfs).glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    status = descriptor.stat()
                    if (status.st_dev, status.st_ino) in owner:
                        found.add(owner[status.st_dev, status.st_ino])
        with contextlib.suppress(OSError):
            found |= set(_mapped((process / "maps").read_text(errors="replace"), inodes))
    return found


def _mapped(maps: str, inodes: dict[str, Path]) -> Iterator[Path]:
    """Snapshots with a mapped file. Some filesystems show another device there than stat does: the name decides."""
    for line in maps.splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[4] in inodes:
            snapshot = inodes[words[4]]
            if any(path.name == os.path.basename(words[5]) for path in snapshot.rglob("*")):
                yield snapshot


def freed(snapshots: Iterable[Path]) -> int:
    """Bytes that no name leads to any more when these snapshots are gone."""
    names: dict[tuple[int, int], int] = {}
    total = 0
    for path in (path for snapshot in snapshots for path in snapshot.rglob("*") if not path.is_dir()):
        status = path.lstat()
        key = (status.st_dev, status.st_ino)
        names[key] = names.get(key, 0) + 1
        total += status.st_size if names[key] == status.st_nlink else 0
    return total


def choose(found: Sequence[Revision], needed: Iterable[str], keep: int) -> list[Revision]:
    """What may go, oldest first: all but the needed ones and the newest `keep` of the others."""
    spare = [revision for revision in found if revision.name not in set(needed)]
    return spare[: max(0, len(spare) - keep)]


def remove(layout: weights.Layout, name: str) -> None:
    """Take a revision out of sight at once, then delete it. A cut in between is finished by the next call."""
    gone = replace(layout, revision=name)
    if gone.snapshot.exists():
        layout.work.parent.mkdir(parents=True, exist_ok=True)
        gone.snapshot.rename(layout.work.parent / (name + REMOVED))
        weights.sync_directory(gone.snapshot.parent)
    with contextlib.suppress(FileNotFoundError):
        gone.marker.unlink()
    sweep(layout)


def sweep(layout: weights.Layout) -> None:
    """Delete what an earlier removal left."""
    for path in leftovers(layout):
        shutil.rmtree(str(path))
    with contextlib.suppress(OSError):  # another revision is half-done there, or there is no such directory
        layout.work.parent.rmdir()


def listed(found: Iterable[Revision]) -> str:
    """Lines of a diff."""
    return "".join(f"{r.name} ({r.size} bytes, verified {r.checked_at})\n" for r in found)


def described(revision: Revision) -> dict[str, Any]:
    """For a play's result."""
    return {"revision": revision.name, "bytes": revision.size, "checked_at": revision.checked_at}
