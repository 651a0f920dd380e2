"""Trees of /proc, /sys and / for machines that were not at hand, built from what their documentation says of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"

OS_RELEASE = {
    "debian12": 'ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
    "debian13": 'ID=debian\nVERSION_ID="13"\nVERSION_CODENAME=trixie\nPRETTY_NAME="Debian GNU/Linux 13 (trixie)"\n',
    "ubuntu2204": 'ID=ubuntu\nVERSION_ID="22.04"\nVERSION_CODENAME=jammy\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n',
    "ubuntu2404": 'ID=ubuntu\nVERSION_ID="24.04"\nVERSION_CODENAME=noble\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
    "rocky9": 'ID="rocky"\nVERSION_ID="9.6"\nPRETTY_NAME="Rocky Linux 9.6 (Blue Onyx)"\n',
}
SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


class Tree:
    """A host as files."""

    def __init__(self, base: Path) -> None:
        self.base = base

    @property
    def arguments(self) -> dict[str, Any]:
        """What makes host_survey read this tree instead of the machine it runs on."""
        return {
            "procfs": str(self.base / "proc"),
            "sysfs": str(self.base / "sys"),
            "rootfs": str(self.base / "root"),
            "tool_paths": [str(self.base / "bin")],
        }

    def write(self, path: str, content: str | bytes) -> Tree:
        file = self.base / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return self

    def tool(self, name: str, script: str) -> Tree:
        self.write(f"bin/{name}", f"#!/bin/sh\n{script}\n")
        (self.base / "bin" / name).chmod(0o755)
        return self

    def pci(self, address: str, device: str, kind: str = "030200", vendor: str = "10de") -> Tree:
        base = f"sys/bus/pci/devices/{address}"
        for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
            self.write(f"{base}/{name}", f"0x{value}\n")
        return self.write(f"{base}/numa_node", "0\n")

    def packages(self, *entries: tuple[str, str, str, str]) -> Tree:
        """(name, version, status, maintainer) each."""
        return self.write(
            "root/var/lib/dpkg/status",
            "".join(
                f"Package: {name}\nStatus: {status}\nMaintainer: {maintainer}\n"
                f"Version: {version}\nDescription: x\n y\n\n"
                for name, version, status, maintainer in entries
            ),
        )

    def gone(self, path: str) -> Tree:
        target = self.base / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        return self


def recorded(name: str, base: Path) -> Tree:
    """A copy of a recorded host that may be changed."""
    shutil.copytree(RECORDED / name, base / name)
    tree = Tree(base / name)
    if name == "h200-x4":  # its XML is shared with the stand-in hardware
        xml = RECORDED.parents[1] / "stand_ins/hardware/recordings/h200_x4/smi_q.xml"
        tree.tool("nvidia-smi", f'[ "$*" = "-q -x" ] && exec cat {xml}')
    return tree


def bare(base: Path, system: str = "ubuntu2404", machine: str = "x86_64", memory_gib: int = 1024) -> Tree:
    """A machine with nothing special in it."""
    tree = Tree(base)
    tree.write("root/etc/os-release", OS_RELEASE[system])
    tree.write("proc/sys/kernel/osrelease", "6.8.0-85-generic\n").write("proc/sys/kernel/arch", f"{machine}\n")
    tree.write("proc/meminfo", f"MemTotal: {memory_gib * 1024 * 1024} kB\nMemAvailable: 1 kB\nSwapTotal: 0 kB\n")
    tree.write("proc/cpuinfo", "flags\t\t: fpu vme\n").write("proc/modules", "").write("proc/cmdline", "quiet\n")
    tree.write(
        "proc/self/mountinfo",
        "30 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
        "31 30 8:2 / /srv rw - xfs /dev/nvme0n1 rw\n"
        "32 30 8:1 /d /data rw - ext4 /dev/sda1 rw\n",
    )
    tree.write("proc/net/tcp", "  sl  local_address rem_address   st\n")
    tree.write(SECURE_BOOT, b"\x06\x00\x00\x00\x00").write("bin/.keep", "")
    tree.write("root/usr/src/linux-headers-6.8.0-85-generic/Makefile", "")
    return tree


def hgx_h200(base: Path) -> Tree:
    """Eight SXM GPUs and the four NVSwitch bridges of their board."""
    tree = bare(base)
    for n in range(8):
        tree.pci(f"0000:{0x10 + n:02x}:00.0", "2335")
    for n in range(4):
        tree.pci(f"0000:{0x40 + n:02x}:00.0", "22a3", kind="068000")
    return tree


def hgx_b200(base: Path, *, infiniband: bool = True) -> Tree:
    """Eight GPUs; the switches show as InfiniBand functions whose VPD says SW_MNG."""
    tree = bare(base)
    for n in range(8):
        tree.pci(f"0000:{0x10 + n:02x}:00.0", "2901")
    for n, vpd in enumerate((b"\x82\x20\x00NVLink SW_MNG\x00", b"\x82\x20\x00ConnectX-7\x00")):
        address = f"0000:{0x50 + n:02x}:00.0"
        tree.pci(address, "1021", kind="020700", vendor="15b3").write(f"sys/bus/pci/devices/{address}/vpd", vpd)
        if infiniband:
            tree.write(f"sys/class/infiniband/mlx5_{n}/device/vpd", vpd)
    return tree


def gb200_tray(base: Path) -> Tree:
    tree = bare(base, machine="aarch64")
    tree.write("proc/self/smaps", "KernelPageSize:       64 kB\n")
    for n in range(4):
        tree.pci(f"000{n + 8}:01:00.0", "2941")
    return tree


def gh200(base: Path) -> Tree:
    return bare(base, machine="aarch64").pci("0009:01:00.0", "2342")


def h200_nvl(base: Path) -> Tree:
    tree = bare(base)
    for n in range(4):
        tree.pci(f"0000:{0x20 + n:02x}:00.0", "233b")
    return tree
