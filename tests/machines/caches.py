"""Caches on the drives of a test machine: made by the role, looked at, forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

from .machine import GIB, Drive, Machine

POINT = "/var/lib/gpt-oss"
RECORD = "/var/lib/gpt-oss-drives/record.json"
MOUNT = r"var-lib-gpt\x2doss.mount"
SERIALS = ("SN0001", "SN0002", "SN0003", "SN0004")
DRIVES = tuple(Drive(serial, 2 * GIB) for serial in SERIALS)
BY_ID = [drive.by_id for drive in DRIVES]
SMALL: dict[str, object] = {"model_cache_required_bytes": 10**9, "model_cache_minimum_drive_bytes": GIB}
ROLE: Sequence[dict[str, object]] = [{"hosts": "all", "gather_facts": False, "become": True, "roles": ["model_cache"]}]

OWN = "/usr/local/sbin/"  # found before the system's
FORGET = rf"""
umount {POINT} /mnt/other 2>/dev/null || true
swapoff -a
vgchange -an vg-test >/dev/null 2>&1 || true
mdadm --stop --scan 2>/dev/null || true
rm -rf /etc/systemd/system/{{,local-fs.target.wants/}}'{MOUNT}' {POINT} {Path(RECORD).parent}
sed -i '/gpt-oss-cache/d' /etc/mdadm/mdadm.conf
systemctl daemon-reload
"""


def forget(machine: Machine, drives: Sequence[Drive] = DRIVES) -> None:
    """A host that never had a cache, and these blank drives."""
    machine.run(FORGET)
    machine.replace_drives(drives)


def cache(machine: Machine, *flags: str, **inputs: object) -> CompletedProcess[str]:
    """Run the role."""
    return machine.play(ROLE, *flags, **{**SMALL, **inputs})


def state(machine: Machine) -> dict[str, str]:
    """What the host says of its cache."""
    told = machine.run(
        f"findmnt --noheadings --output FSTYPE,OPTIONS {POINT} || echo none\n"
        f"systemctl show --property=UnitFileState --value '{MOUNT}'\n"
        f'python3 -c \'import json; print(json.load(open("{RECORD}"))["state"])\' 2>/dev/null || echo none\n'
        "grep -c ^md /proc/mdstat || true\n"
    ).splitlines()
    return dict(zip(("filesystem", "unit", "record", "arrays"), told, strict=True))
