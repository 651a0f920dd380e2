"""GPUs on the PCI bus, the driver, what nvidia-smi says, the NVLink fabric."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

from .host import Answer, Host, first_line, key_values, names, read, read_bytes, version_key
from .system import loaded_modules

_NVIDIA = "0x10de"
_MELLANOX = "0x15b3"
_GPU_CLASSES = ("0300", "0302")  # VGA and 3D controllers
_BRIDGE_CLASS = "0680"  # NVSwitch
_SWITCH_MANAGEMENT = b"SW_MNG"  # in the VPD of the InfiniBand function that manages NVLink 5 switches
_NO_VALUE = ("", "N/A", "[N/A]", "None")


def gpus(host: Host) -> list[dict[str, Any]]:
    """The GPUs on the bus: seen with and without a driver."""
    found = []
    for device in _pci_devices(host):
        if device["class"] in _GPU_CLASSES:
            address = device["pci_address"]
            told = key_values(read(host.proc("driver", "nvidia", "gpus", address, "information")) or "", ":")
            name = told.get("Model")
            device["name"] = name if name and "Unknown" not in name else None
            device["driver"] = _target_name(host.sys("bus", "pci", "devices", address, "driver"))
            device["numa_node"] = _number(first_line(host.sys("bus", "pci", "devices", address, "numa_node")))
            found.append(device)
    return found


def platform(host: Host) -> dict[str, Any]:
    """What tells platforms apart, read in the order of the fabric manager's own start script."""
    management = _management(host, host.sys("class", "infiniband"), "device/vpd")
    if not management:
        # Before mlx5_ib is loaded there is no InfiniBand device, but its PCI function says the same.
        management = _management(host, host.sys("bus", "pci", "devices"), "vpd", _MELLANOX)
    switches = names(host.proc("driver", "nvidia-nvswitch", "devices"))
    bridges = [device for device in _pci_devices(host) if device["class"] == _BRIDGE_CLASS]
    if management:
        switch = "nvlink5"
    elif switches or bridges:  # the bridges show before there is a driver
        switch = "nvswitch"
    else:
        switch = "none"
    return {
        "switch": switch,
        "switch_management": management,
        "nvswitches": switches,
        "bridges": [{"pci_address": b["pci_address"], "device_id": b["device_id"]} for b in bridges],
        "hypervisor": "hypervisor" in _cpu_flags(host),
    }


def _management(host: Host, devices: str, vpd: str, vendor: str | None = None) -> list[str]:
    """The devices that manage NVLink 5 switches."""
    found = []
    for name in names(devices):
        path = os.path.join(devices, name)
        if vendor is not None and (first_line(os.path.join(path, "vendor")) or "").lower() != vendor:
            continue
        if _SWITCH_MANAGEMENT in (read_bytes(os.path.join(path, vpd)) or b""):
            found.append(name)
    return found


def _cpu_flags(host: Host) -> list[str]:
    match = re.search(r"^flags\s*:\s*(.*)$", read(host.live("cpuinfo")) or "", re.MULTILINE)
    return match.group(1).split() if match else []


def _pci_devices(host: Host) -> list[dict[str, Any]]:
    """NVIDIA's devices."""
    found = []
    for address in names(host.sys("bus", "pci", "devices")):
        path = host.sys("bus", "pci", "devices", address)
        if (first_line(os.path.join(path, "vendor")) or "").lower() == _NVIDIA:
            kind = (first_line(os.path.join(path, "class")) or "").lower().replace("0x", "")
            device = (first_line(os.path.join(path, "device")) or "").lower().replace("0x", "")
            found.append({"pci_address": address, "device_id": device, "class": kind[:4]})
    return found


def _target_name(link: str) -> str | None:
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    try:
        return int(text) if text else None
    except ValueError:
        return None


def driver(host: Host) -> dict[str, Any]:
    """The driver that runs, and the one that the next start would load."""
    stated = read(host.proc("driver", "nvidia", "version")) or ""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)?)", stated)
    running = match.group(1) if match else first_line(host.sys("module", "nvidia", "version")) or None
    module = _installed_module(host)
    dkms = _dkms(host)
    installed = module.get("version")
    if installed is None and dkms:
        installed = dkms[-1]["version"]
    license_name = module.get("license")
    open_running = ("Open Kernel Module" in stated) if stated else None
    return {
        "running_version": running,
        "running_open": open_running,
        "installed_version": installed,
        "installed_open": ("GPL" in license_name) if license_name else None,
        "license": license_name,
        "library_version": _library_version(host),
        "dkms": dkms,
        "devices": sorted(name for name in names(host.root("/dev")) if re.match(r"nvidia\d+$|nvidiactl$", name)),
    }


def _installed_module(host: Host) -> dict[str, str]:
    answer = host.ask("modinfo", "-k", host.release(), "nvidia")
    return key_values(answer.out, ":") if answer is not None and answer.rc == 0 else {}


def _dkms(host: Host) -> list[dict[str, Any]]:
    """NVIDIA modules known to DKMS, oldest first, with the kernels they are built for."""
    found = []
    for module in ("nvidia", "nvidia-open"):
        base = host.root("/var/lib/dkms/" + module)
        for version in names(base):
            if re.match(r"\d+\.\d+(\.\d+)?$", version):
                built = [name for name in names(os.path.join(base, version)) if name not in ("source", "build", "log")]
                found.append({"module": module, "version": version, "kernels": built})
    return sorted(found, key=lambda entry: version_key(entry["version"]))


def _library_version(host: Host) -> str | None:
    found = []
    for directory in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64"):
        for name in names(host.root(directory)):
            match = re.match(r"libnvidia-ml\.so\.(\d+\.\d+(?:\.\d+)?)$", name)
            if match:
                found.append(match.group(1))
    return max(found, key=version_key) if found else None


def nvidia_smi(host: Host) -> dict[str, Any]:
    """What nvidia-smi says of the driver and of every GPU."""
    answer = host.ask("nvidia-smi", "-q", "-x", timeout=90)
    facts: dict[str, Any] = {
        "path": host.tool("nvidia-smi"),
        "error": None,
        "driver_version": None,
        "cuda_version": None,
        "gpus": [],
    }
    if answer is None:
        return facts
    if answer.rc != 0:
        facts["error"] = _smi_complaint(answer)
        return facts
    try:
        log = ElementTree.fromstring(answer.out)  # noqa: S314 - the host's own nvidia-smi
    except ElementTree.ParseError as error:
        facts["error"] = f"nvidia-smi -q -x did not print XML: {error}"
        return facts
    facts["driver_version"] = _text(log, "driver_version")
    facts["cuda_version"] = _text(log, "cuda_version")
    facts["gpus"] = [_smi_gpu(index, gpu) for index, gpu in enumerate(log.findall("gpu"))]
    return facts


def _smi_complaint(answer: Answer) -> str:
    # "Failed to initialize NVML: ..." comes on stdout.
    for line in (answer.out + "\n" + answer.err).splitlines():
        if "NVML" in line or "No devices" in line or "ERR" in line or "couldn't communicate" in line:
            return line.strip()
    return answer.complaint


def _text(element: ElementTree.Element, path: str) -> str | None:
    found = element.findtext(path)
    return None if found is None or found.strip() in _NO_VALUE else found.strip()


def _mebibytes(text: str | None) -> int | None:
    match = re.match(r"(\d+) MiB$", text or "")
    return int(match.group(1)) * 1024 * 1024 if match else None


def _smi_gpu(index: int, gpu: ElementTree.Element) -> dict[str, Any]:
    return {
        "index": index,
        "pci_address": _short_address(gpu.get("id") or ""),
        "name": _text(gpu, "product_name"),
        "uuid": _text(gpu, "uuid"),
        "memory_total_bytes": _mebibytes(_text(gpu, "fb_memory_usage/total")),
        "memory_used_bytes": _mebibytes(_text(gpu, "fb_memory_usage/used")),
        "persistence_mode": _text(gpu, "persistence_mode"),
        "addressing_mode": _text(gpu, "addressing_mode"),
        "compute_mode": _text(gpu, "compute_mode"),
        "mig": _text(gpu, "mig_mode/current_mig"),
        "ecc": _text(gpu, "ecc_mode/current_ecc"),
        "ecc_uncorrected_volatile": _uncorrected(gpu),
        "remapped_rows_pending": _text(gpu, "remapped_rows/remapped_row_pending"),
        "remapped_rows_failure": _text(gpu, "remapped_rows/remapped_row_failure"),
        "recovery_action": _text(gpu, "gpu_recovery_action"),
        "virtualization": _text(gpu, "gpu_virtualization_mode/virtualization_mode"),
        "fabric_state": gpu.findtext("fabric/state"),
        "fabric_status": gpu.findtext("fabric/status"),
        "processes": [
            {"pid": _number(p.findtext("pid")), "name": p.findtext("process_name")}
            for p in gpu.findall("processes/process_info")
        ],
    }


def _short_address(address: str) -> str:
    """nvidia-smi writes eight digits of PCI domain, sysfs four."""
    domain, mark, rest = address.lower().partition(":")
    return domain[-4:] + mark + rest


def _uncorrected(gpu: ElementTree.Element) -> int | None:
    volatile = gpu.find("ecc_errors/volatile")
    if volatile is None:
        return None
    counts = [_number(field.text) for field in volatile if "uncorrectable" in field.tag or field.tag.endswith("_unc")]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def fabric(host: Host, installed: dict[str, str]) -> dict[str, Any]:
    """The NVLink fabric: what each GPU says of it, and the daemons that make it."""
    told = nvidia_smi(host)
    modules = loaded_modules(host)
    running = _process_names(host)
    return {
        "states": [gpu["fabric_state"] for gpu in told["gpus"]],
        "fabric_manager_version": _package_version(installed, r"nvidia-fabricmanager(-\d+)?$"),
        "nvlsm_version": _package_version(installed, r"nvlsm$"),
        "imex_version": _package_version(installed, r"nvidia-imex(-\d+)?$"),
        "ib_umad_loaded": "ib_umad" in modules,
        # The kernel keeps fifteen characters of a name.
        "daemons": {
            name: name[:15] in running for name in ("nv-fabricmanager", "nvlsm", "nvidia-imex", "nvidia-persistenced")
        },
        "imex_nodes": [
            line.strip()
            for line in (read(host.root("/etc/nvidia-imex/nodes_config.cfg")) or "").splitlines()
            if line.strip() and not line.lstrip().startswith("#")
        ],
    }


def _process_names(host: Host) -> set[str]:
    found = set()
    for name in host.processes():
        comm = first_line(host.live(name, "comm"))
        if comm:
            found.add(comm)
    return found


def _package_version(installed: dict[str, str], pattern: str) -> str | None:
    for name in sorted(installed):
        if re.match(pattern, name):
            return installed[name]
    return None
