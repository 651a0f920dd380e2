"""Debian packages: what is installed, what is held, what other installers left, how apt is set up and who holds it."""

from __future__ import annotations

import fcntl
import fnmatch
import os
import re
import struct
import time
from typing import Any

from .host import Host, first_line, names, read

# What the project's roles look at. More is listed when it is asked for.
_SHOWN = re.compile(
    r"(lib)?nvidia|(lib)?cuda|docker|containerd|runc$|nvlsm|libnvsdm|datacenter-gpu-manager|infiniband-diags|rdma-core|dkms"
    r"|linux-(headers|image|modules)|podman|unattended-upgrades|python3(-apt|-venv)?$|mokutil|ca-certificates$|gnupg$|xserver-xorg-video-nvidia"
)
# The driver itself: what two sources cannot both install. Helpers such as libnvidia-egl-wayland1 come from the
# distribution with every driver.
_DRIVER = re.compile(
    r"nvidia-(driver|dkms|headless|utils|compute-utils|kernel|open-kernel|open|smi|tesla|fabricmanager)(-|$)"
    r"|nvidia-legacy|libnvidia-(compute|ml1)|libcuda1$|linux-modules-nvidia-|linux-objects-nvidia-"
)
_DISTRIBUTION_VERSION = re.compile(r"-0ubuntu0\.|~deb\d+u|\+deb\d+u|~bpo\d+")
_DISTRIBUTION_MAINTAINER = re.compile(
    r"lists\.debian\.org|lists\.ubuntu\.com|@debian\.org|@ubuntu\.com|alioth|tracker\.debian\.org"
)
_INTERESTING_SOURCE = re.compile(r"nvidia|cuda|docker|libnvidia", re.IGNORECASE)
_LOCKS = (
    "/var/lib/dpkg/lock-frontend",
    "/var/lib/dpkg/lock",
    "/var/lib/apt/lists/lock",
    "/var/cache/apt/archives/lock",
)


def packages(host: Host, wanted: list[str]) -> dict[str, Any]:
    """Facts under the keys `packages`, `holds` and `package_state`."""
    installed: dict[str, str] = {}
    holds = []
    unfinished = []
    distribution = []
    for entry in _dpkg_status(host):
        name = entry.get("Package", "")
        version = entry.get("Version", "")
        want, _, rest = entry.get("Status", "").partition(" ")
        state = rest.rpartition(" ")[2]
        if want == "hold":
            holds.append(name)
        if state in ("unpacked", "half-configured", "half-installed", "triggers-awaited"):
            unfinished.append(name)
        if state in ("installed", "unpacked", "half-configured", "triggers-pending", "triggers-awaited"):
            if _SHOWN.match(name) or any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted):
                installed[name] = version
            if _DRIVER.match(name) and _from_distribution(entry):
                distribution.append(name)
    return {
        "packages": installed,
        "holds": sorted(holds),
        "package_state": {
            "unfinished": sorted(unfinished),
            "interrupted": any(name.isdigit() for name in names(host.root("/var/lib/dpkg/updates"))),
            "distribution_nvidia": sorted(distribution),
            "leftovers": _leftovers(host),
            "unattended_upgrades": _unattended(host),
            "upgrade_exclusions": _upgrade_exclusions(host),
        },
    }


def _dpkg_status(host: Host) -> list[dict[str, str]]:
    found = []
    for block in (read(host.root("/var/lib/dpkg/status")) or "").split("\n\n"):
        entry = {}
        for line in block.splitlines():
            if line[:1] not in (" ", "\t", ""):
                key, mark, value = line.partition(":")
                if mark and key in ("Package", "Version", "Status", "Maintainer"):
                    entry[key] = value.strip()
        if entry:
            found.append(entry)
    return found


def _from_distribution(entry: dict[str, str]) -> bool:
    return bool(
        _DISTRIBUTION_VERSION.search(entry.get("Version", ""))
        or _DISTRIBUTION_MAINTAINER.search(entry.get("Maintainer", ""))
    )


def _leftovers(host: Host) -> list[dict[str, str]]:
    """What installers other than apt left behind."""
    found = []
    for path, kind in (
        ("/usr/bin/nvidia-uninstall", "runfile"),
        ("/usr/bin/nvidia-installer", "runfile"),
        ("/snap/bin/docker", "snap_docker"),
        ("/var/lib/snapd/snaps/docker", "snap_docker"),
    ):
        if os.path.lexists(host.root(path)):
            found.append({"kind": kind, "path": path})
    snaps = [name for name in names(host.root("/var/lib/snapd/snaps")) if re.match(r"docker_\d+\.snap$", name)]
    if snaps and not any(entry["kind"] == "snap_docker" for entry in found):
        found.append({"kind": "snap_docker", "path": "/var/lib/snapd/snaps/" + snaps[-1]})
    for name in names(host.root("/usr/local")):
        if re.match(r"cuda-\d+\.\d+$", name) and os.path.lexists(
            host.root("/usr/local/" + name + "/bin/cuda-uninstaller")
        ):
            found.append({"kind": "cuda_runfile", "path": "/usr/local/" + name + "/bin/cuda-uninstaller"})
    return found


def _unattended(host: Host) -> bool:
    """Whether packages are upgraded without anybody asking."""
    for name in names(host.root("/etc/apt/apt.conf.d")):
        text = read(host.root("/etc/apt/apt.conf.d/" + name)) or ""
        if re.search(r'^\s*APT::Periodic::Unattended-Upgrade\s+"?([1-9]|always)', text, re.MULTILINE):
            return True
    return False


def _upgrade_exclusions(host: Host) -> list[str]:
    """The files that keep unattended upgrades away from NVIDIA's packages."""
    found = []
    for name in names(host.root("/etc/apt/apt.conf.d")):
        path = "/etc/apt/apt.conf.d/" + name
        text = read(host.root(path)) or ""
        if "Package-Blacklist" in text and "nvidia" in text:
            found.append(path)
    return found


# --- apt ---------------------------------------------------------------------------------------------------------


def apt(host: Host) -> dict[str, Any]:
    sources = _sources(host)
    return {
        "sources": [source for source in sources if _INTERESTING_SOURCE.search(source["uri"] + source["file"])],
        "conflicts": _conflicts(sources),
        "lock_holders": _lock_holders(host),
    }


def _sources(host: Host) -> list[dict[str, Any]]:
    files = ["/etc/apt/sources.list"]
    files += ["/etc/apt/sources.list.d/" + name for name in names(host.root("/etc/apt/sources.list.d"))]
    found: list[dict[str, Any]] = []
    for path in files:
        text = read(host.root(path)) or ""
        if path.endswith(".list"):
            found += _one_line_sources(path, text)
        elif path.endswith(".sources"):
            found += _deb822_sources(path, text)
    return found


_ONE_LINE = re.compile(r"^(deb|deb-src)\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)")


def _one_line_sources(path: str, text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        match = _ONE_LINE.match(line.strip())
        if match and match.group(1) == "deb":
            options = dict(option.split("=", 1) for option in (match.group("options") or "").split() if "=" in option)
            found.append(_source(path, match.group("uri"), match.group("suite"), options.get("signed-by")))
    return found


def _deb822_sources(path: str, text: str) -> list[dict[str, Any]]:
    found = []
    for block in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        key = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t"):
                fields[key] = fields.get(key, "") + " " + line.strip()
            else:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        if fields.get("enabled", "yes").lower() in ("no", "false", "0") or "deb" not in fields.get("types", "").split():
            continue
        signed_by = fields.get("signed-by")
        if signed_by is not None and "BEGIN PGP" in signed_by:
            signed_by = "(key in the file)"
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                found.append(_source(path, uri, suite, signed_by))
    return found


def _source(path: str, uri: str, suite: str, signed_by: str | None) -> dict[str, Any]:
    return {"file": path, "uri": uri.rstrip("/"), "suite": suite, "signed_by": signed_by}


def _conflicts(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same repository with different keys: apt refuses to read any source then."""
    by_repository: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for source in sources:
        by_repository.setdefault((source["uri"], source["suite"]), []).append(source)
    found = []
    for (uri, suite), same in sorted(by_repository.items()):
        if len(same) > 1 and _INTERESTING_SOURCE.search(uri):
            keys = sorted({source["signed_by"] or "" for source in same})
            found.append(
                {
                    "uri": uri,
                    "suite": suite,
                    "files": sorted({source["file"] for source in same}),
                    "signed_by": keys,
                    "conflicting": len(keys) > 1,
                }
            )
    return found


def wait_for_locks(host: Host, seconds: float) -> None:
    """Wait until nobody installs packages any more; the locks are only asked about, not taken."""
    until = time.monotonic() + seconds
    while _lock_holders(host) and time.monotonic() < until:
        time.sleep(0.5)


def _lock_holders(host: Host) -> list[dict[str, Any]]:
    found = []
    for path in _LOCKS:
        pid = _holder(host.root(path))
        if pid is not None:
            command = (read(host.live(str(pid), "cmdline")) or "").replace("\0", " ").strip()
            found.append({"lock": path, "pid": pid, "command": command or first_line(host.live(str(pid), "comm"))})
    return found


def _holder(path: str) -> int | None:
    """The process that holds a lock; the lock is only asked about, not taken."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # struct flock of 64-bit Linux: type, whence, (padding) start, length, pid.
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack("hhqqi4x", fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK else pid
