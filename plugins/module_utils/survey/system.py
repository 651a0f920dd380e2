"""The operating system, the processor, the kernel, the memory, the clock."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import time
from typing import Any

from .host import Host, first_line, key_values, names, read, read_bytes

_DPKG = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64el", "riscv64": "riscv64"}
_CUDA = {"x86_64": "x86_64", "aarch64": "sbsa"}  # `aarch64` in NVIDIA's repositories is Jetson
_SECURE_BOOT = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
_MODPROBE = (
    "/etc/modprobe.d",
    "/run/modprobe.d",
    "/usr/local/lib/modprobe.d",
    "/lib/modprobe.d",
    "/usr/lib/modprobe.d",
)
_NOUVEAU_OFF = re.compile(r"^\s*(blacklist\s+nouveau\b|install\s+nouveau\s+\S*/(true|false)\b)", re.MULTILINE)
_NOUVEAU_OFF_AT_BOOT = re.compile(
    r"(modprobe|module)[._]blacklist=(\S*,)?nouveau\b|nouveau\.modeset=0|nouveau\.blacklist"
)
_MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nouveau", "ib_umad", "mlx5_core", "mlx5_ib", "ib_core")


def operating_system(host: Host) -> dict[str, Any]:
    release = key_values(read(host.root("/etc/os-release")) or read(host.root("/usr/lib/os-release")) or "")
    name, version = release.get("ID"), release.get("VERSION_ID")
    repository = None
    if name == "debian" and version:
        repository = "debian" + version.split(".")[0]
    elif name == "ubuntu" and version:
        repository = "ubuntu" + version.replace(".", "")
    return {
        "id": name,
        "version_id": version,
        "codename": release.get("VERSION_CODENAME"),
        "name": release.get("PRETTY_NAME"),
        "repository": repository,
    }


def architecture(host: Host) -> dict[str, Any]:
    machine = first_line(host.live("sys", "kernel", "arch")) or os.uname().machine
    return {"machine": machine, "dpkg": _DPKG.get(machine), "cuda_repository": _CUDA.get(machine)}


def kernel(host: Host) -> dict[str, Any]:
    release = host.release()
    build = host.root(f"/lib/modules/{release}/build")
    headers = host.root(f"/usr/src/linux-headers-{release}")
    command_line = first_line(host.live("cmdline")) or ""
    loaded = loaded_modules(host)
    return {
        "release": release,
        "headers_installed": os.path.isdir(build) or os.path.isdir(headers),
        "headers_available": _headers_available(host, release),
        "installed": [name for name in names(host.root("/lib/modules")) if name[:1].isdigit()],
        "page_size": _page_size(host),
        "secure_boot": _secure_boot(host),
        "efi": os.path.isdir(host.sys("firmware", "efi")),
        "nouveau_loaded": "nouveau" in loaded,
        "nouveau_blacklisted": _nouveau_off(host, command_line),
        "modules": {name: name in loaded for name in _MODULES},
    }


def _headers_available(host: Host, release: str) -> bool | None:
    """Whether apt could install the running kernel's headers; None where its package lists cannot tell."""
    lists = host.root("/var/lib/apt/lists")
    read_at = [_changed_at(lists + "/" + name) for name in names(lists) if "_Packages" in name]
    answer = host.ask("apt-cache", "pkgnames", "linux-headers-" + release) if read_at else None
    if answer is None or answer.rc != 0:
        return None
    if "linux-headers-" + release in answer.out.split():
        return True
    sources = [host.root("/etc/apt/sources.list")]
    sources += [host.root("/etc/apt/sources.list.d/" + name) for name in names(host.root("/etc/apt/sources.list.d"))]
    # A source that was added since has lists that nobody has fetched.
    return None if max(map(_changed_at, sources)) > max(read_at) else False


def _changed_at(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0


def loaded_modules(host: Host) -> set[str]:
    listed = {line.split()[0] for line in (read(host.proc("modules")) or "").splitlines() if line.strip()}
    # A module that is built in, or a tree without `modules`, shows below /sys only.
    return listed | {name for name in _MODULES if os.path.isdir(host.sys("module", name))}


def _page_size(host: Host) -> int:
    # The text form, so that a recorded host has one too.
    match = re.search(r"^KernelPageSize:\s+(\d+) kB", read(host.live("self", "smaps")) or "", re.MULTILINE)
    return int(match.group(1)) * 1024 if match else os.sysconf("SC_PAGE_SIZE")


def _secure_boot(host: Host) -> bool | None:
    """True or False as the firmware says; None where it cannot be asked."""
    if not os.path.isdir(host.sys("firmware", "efi")):
        return False  # booted without UEFI
    value = read_bytes(host.sys("firmware", "efi", "efivars", _SECURE_BOOT))
    if value is None:
        # UEFI without the variable: firmware that has no Secure Boot. Without efivars nobody can tell.
        return False if names(host.sys("firmware", "efi", "efivars")) else None
    return value[-1:] == b"\x01"


def _nouveau_off(host: Host, command_line: str) -> bool:
    if _NOUVEAU_OFF_AT_BOOT.search(command_line):
        return True
    for directory in _MODPROBE:
        for name in names(host.root(directory)):
            if name.endswith(".conf") and _NOUVEAU_OFF.search(read(host.root(directory + "/" + name)) or ""):
                return True
    return False


def memory(host: Host) -> dict[str, Any]:
    sizes = {}
    for line in (read(host.live("meminfo")) or "").splitlines():
        match = re.match(r"(\w+):\s+(\d+) kB", line)
        if match:
            sizes[match.group(1)] = int(match.group(2)) * 1024
    return {
        "total_bytes": sizes.get("MemTotal"),
        "available_bytes": sizes.get("MemAvailable"),
        "swap_bytes": sizes.get("SwapTotal"),
    }


def clock(host: Host, controller_time: float | None) -> dict[str, Any]:
    now = time.time()
    return {
        "now": now,
        "synchronised": _synchronised() if host.rootfs == "/" else None,
        # Includes the time that the call took to get here: seconds, not milliseconds, are judged.
        "controller_skew_seconds": None if controller_time is None else round(now - controller_time, 1),
        "http_skew_seconds": None,  # filled from the answers of URLs
    }


def _synchronised() -> bool | None:
    """Whether the kernel says that something keeps its clock."""
    # struct timex: modes (int, padded), offset, freq, maxerror, esterror (long each), status (int), and more.
    buffer = ctypes.create_string_buffer(512)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    status = struct.unpack_from("i", buffer.raw, 40)[0]
    return not status & 0x40  # STA_UNSYNC
