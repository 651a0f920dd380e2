"""Recorded hardware for hosts without any: procfs and sysfs trees, kernel modules that load, faults on request.

A profile (profiles/*.yml) says what is on the bus and what the GPUs say of themselves. On the host it becomes
/srv/hardware: `proc` and `sys` are what the kernel would show, and change as modules are loaded and the machine
reboots; `smi` is what the stand-in nvidia-smi replays. Tools come from packages (tests/stand_ins/packages), never from
here: a host is delivered without a driver.

    stand-in-fault gpu_gone      on the host: a fault from now on; `stand-in-fault none` ends all
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
PROFILES = HERE / "profiles"
RECORDINGS = HERE / "recordings"
ON_HOST = HERE / "on_host"

# One GPU's part of `nvidia-smi`'s table: values change, the frame does not.
TABLE_ROWS = (
    "|{index:>4}  {name:<31}{persistence} |   {bus} Off | {ecc:>20} |",
    "| N/A   {temperature}C    P0{power:>24} | {memory:>22} |      0%      Default |",
    "|                                         |                        |{mig:>21} |",
)


class ProfileError(Exception):
    """A hardware profile that does not exist or does not fit its recording."""


def profiles() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.yml"))


def load(name: str) -> dict[str, Any]:
    path = PROFILES / f"{name}.yml"
    if not path.is_file():
        raise ProfileError(f"hardware {name!r} is unknown; allowed: {', '.join(profiles())}")
    profile: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return profile


def _recorded_rows(recording: Path) -> list[dict[str, str]]:
    """The CSV answers of `nvidia-smi --query-gpu`, one mapping a GPU; units are part of a column's name."""
    rows: list[dict[str, str]] = []
    header: list[str] = []
    for line in (recording / "query.txt").read_text(encoding="utf-8").splitlines():
        cells = line.split(", ")
        if cells[0] == "index":
            header = cells
        elif header and cells[0].isdigit() and len(cells) == len(header):
            index = int(cells[0])
            rows.extend({} for _ in range(index + 1 - len(rows)))
            rows[index].update(zip(header, cells, strict=True))
    return rows


def _known_fields(recording: Path) -> list[str]:
    """Every name that `nvidia-smi --help-query-gpu` lists; aliases are on the same line."""
    text = (recording / "query.txt").read_text(encoding="utf-8")
    return re.findall(r'"([A-Za-z0-9_.]+)"', text)


def _xml_value(block: str, *tags: str) -> str:
    part = block
    for tag in tags:
        found = re.search(rf"<{tag}>(.*?)</{tag}>", part, re.DOTALL)
        if found is None:
            raise ProfileError(f"the recording has no {'/'.join(tags)}")
        part = found.group(1)
    return part.strip()


def _fields(block: str, row: Mapping[str, str], gpu: Mapping[str, Any], count: int) -> dict[str, str]:
    """What --query-gpu answers, with units; `@…@` is filled in when asked, because it changes while a host runs."""
    fields = {name.split(" [")[0]: value for name, value in row.items()}
    fields |= {
        "count": str(count),
        "name": gpu["name"],
        "gpu_name": gpu["name"],
        "uuid": gpu["uuid"],
        "gpu_uuid": gpu["uuid"],
        "serial": _xml_value(block, "serial"),
        "gpu_serial": _xml_value(block, "serial"),
        "index": str(gpu["index"]),
        "pci.bus_id": gpu["bus"],
        "gpu_bus_id": gpu["bus"],
        "pci.device_id": f"0x{gpu['device_id'].upper()}10DE",
        "compute_cap": gpu["compute_capability"],
        "memory.total": f"{gpu['memory_mib']} MiB",
        "memory.free": f"{gpu['memory_mib'] - 615} MiB",
        "driver_version": "@DRIVER@",
        "gsp.mode.current": "Enabled",
        "persistence_mode": "@PERSISTENCE@",
        "fabric.state": "@FABRIC_STATE@",
        "fabric.status": "@FABRIC_STATUS@",
        "addressing_mode": gpu["addressing_mode"],
        "pstate": _xml_value(block, "performance_state"),
        "power.draw": _xml_value(block, "gpu_power_readings", "instant_power_draw"),
        "utilization.gpu": _xml_value(block, "utilization", "gpu_util"),
        "utilization.memory": _xml_value(block, "utilization", "memory_util"),
        "gpu_recovery_action": _xml_value(block, "gpu_recovery_action"),
        "ecc.errors.uncorrected.aggregate.total": "0",
        "remapped_rows.pending": _xml_value(block, "remapped_rows", "remapped_row_pending"),
        "remapped_rows.failure": _xml_value(block, "remapped_rows", "remapped_row_failure"),
        "mig.mode.pending": _xml_value(block, "mig_mode", "pending_mig"),
    }
    return fields


def _gpu_block(block: str, recorded_bus: str, recorded_uuid: str, gpu: Mapping[str, Any]) -> str:
    """The recorded XML of one GPU, told of another address, name and size where the profile has them."""
    domain, bus, rest = gpu["bus"].split(":")
    device = rest.split(".")[0]
    text = block.replace(recorded_bus, gpu["bus"]).replace(recorded_uuid, gpu["uuid"])
    changes = {
        "product_name": gpu["name"],
        "product_architecture": gpu["architecture"],
        "persistence_mode": "@PERSISTENCE@",
        "addressing_mode": gpu["addressing_mode"],
        "minor_number": str(gpu["index"]),
        "gsp_firmware_version": "@DRIVER@",
        "pci_bus": bus,
        "pci_device": device,
        "pci_domain": domain[-4:],
        "pci_device_id": f"{gpu['device_id'].upper()}10DE",
    }
    for tag, value in changes.items():
        text = re.sub(rf"<{tag}>.*?</{tag}>", f"<{tag}>{value}</{tag}>", text, count=1)
    memory = gpu["memory_mib"]
    text = re.sub(
        r"(<fb_memory_usage>.*?<total>)\d+( MiB</total>.*?<free>)\d+( MiB</free>)",
        rf"\g<1>{memory}\g<2>{memory - 615}\g<3>",
        text,
        count=1,
        flags=re.DOTALL,
    )
    return re.sub(
        r"(<fabric>\s*<state>).*?(</state>\s*<status>).*?(</status>)",
        r"\g<1>@FABRIC_STATE@\g<2>@FABRIC_STATUS@\g<3>",
        text,
        count=1,
        flags=re.DOTALL,
    )


def smi_files(profile: Mapping[str, Any]) -> dict[str, str]:
    """What nvidia-smi replays: for each GPU its fields, its XML and its rows of the table."""
    recording = RECORDINGS / profile["recording"]
    xml = (recording / "smi_q.xml").read_text(encoding="utf-8")
    blocks = re.findall(r'(\t<gpu id="([^"]+)">.*?</gpu>\n)', xml, re.DOTALL)
    rows = _recorded_rows(recording)
    known = sorted(set(_known_fields(recording)))
    files = {
        "cuda_version": _xml_value(xml, "cuda_version") + "\n",
        "known_fields": "\n".join(known) + "\n",
        "fabric_manager": ("required" if profile.get("fabric_manager") else "elsewhere") + "\n",
        "fabric_states": "{state}\n{status}\n".format(**profile["fabric"]),
    }
    for gpu in gpus(profile):
        source, recorded_bus = blocks[gpu["index"] % len(blocks)]
        row = rows[gpu["index"] % len(rows)]
        block = _gpu_block(source, recorded_bus, _xml_value(source, "uuid"), gpu)
        fields = _fields(block, row, gpu, profile["gpu_count"])
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ProfileError(f"fields that nvidia-smi does not list: {', '.join(unknown)}")
        power = f"{fields['power.draw'].split('.')[0]}W / {fields['power.limit'].split('.')[0]:>4}W"
        table = "\n".join(TABLE_ROWS).format(
            index=gpu["index"],
            name=gpu["name"],
            persistence="@ON_OFF@",
            bus=gpu["bus"],
            ecc=fields["ecc.errors.uncorrected.volatile.total"],
            temperature=fields["temperature.gpu"],
            power=power,
            memory=f"0MiB / {gpu['memory_mib']}MiB",
            mig="Disabled",
        )
        directory = f"gpus/{gpu['index']}"
        files[f"{directory}/fields"] = "".join(f"{name}={value}\n" for name, value in fields.items())
        files[f"{directory}/xml"] = block
        files[f"{directory}/table"] = table + "\n"
        files[f"{directory}/address"] = gpu["pci_address"] + "\n"
    return files


def gpus(profile: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One mapping a GPU: the profile's common values and its own."""
    found = []
    for index, address in enumerate(profile["gpu_addresses"][: profile["gpu_count"]]):
        found.append(
            {
                **profile["gpu"],
                "index": index,
                "pci_address": address,
                "bus": f"0000{address}".upper(),
                "uuid": f"GPU-{index:08x}-0000-4000-8000-{index:012x}",
            }
        )
    return found


def pci_devices(profile: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """sysfs files of everything from NVIDIA (and its adapters) on the bus, by PCI address."""
    devices = {
        gpu["pci_address"]: {
            "vendor": "0x10de",
            "device": f"0x{gpu['device_id']}",
            "class": "0x030200",
            "subsystem_vendor": "0x10de",
            "subsystem_device": f"0x{gpu['subsystem_id']}",
            "numa_node": str(gpu.get("numa_node", -1)),
        }
        for gpu in gpus(profile)
    }
    for address in profile.get("nvswitch_addresses", []):
        devices[address] = {
            "vendor": "0x10de",
            "device": f"0x{profile['nvswitch_device_id']}",
            "class": "0x068000",
            "subsystem_vendor": "0x10de",
            "subsystem_device": "0x1796",
            "numa_node": "0",
        }
    for adapter in profile.get("infiniband", []):
        devices[adapter["pci_address"]] = {
            "vendor": "0x15b3",
            "device": "0x1021",
            "class": "0x020700",
            "subsystem_vendor": "0x15b3",
            "subsystem_device": "0x0041",
            "numa_node": "0",
        }
    return devices


def host_files(name: str, kernel: str | None = None) -> tuple[dict[str, bytes], dict[str, int]]:
    """Files of a host that has this hardware, and their modes; its kernel is this machine's, where none is named."""
    profile = load(name)
    facts = {
        "name": name,
        "title": profile["title"],
        "memory_kib": profile["memory_gib"] * 1024 * 1024,
        "page_size": profile.get("page_size", 4096),
        "secure_boot": profile.get("secure_boot", False),
        "gpus": [{key: gpu[key] for key in ("index", "pci_address", "name", "uuid", "bus")} for gpu in gpus(profile)],
        "pci": pci_devices(profile),
        "nvswitches": profile.get("nvswitch_addresses", []),
        "infiniband": [
            {**adapter, "vpd": base64.b64encode(adapter["vpd"].encode()).decode()}
            for adapter in profile.get("infiniband", [])
        ],
    }
    files: dict[str, bytes] = {"/srv/hardware/profile.json": json.dumps(facts, indent=1).encode()}
    for path, text in smi_files(profile).items():
        files[f"/srv/hardware/smi/{path}"] = text.encode()
    nvlink = RECORDINGS / profile["recording"] / "nvlink.txt"
    files["/srv/hardware/smi/nvlink"] = nvlink.read_bytes()
    modes: dict[str, int] = {}
    for source, target, mode in (
        ("hardware.py", "/usr/lib/stand-in/hardware.py", 0o644),
        ("tool", "/usr/sbin/modprobe", 0o755),
        ("tool", "/usr/sbin/modinfo", 0o755),
        ("tool", "/usr/sbin/rmmod", 0o755),
        ("tool", "/usr/sbin/lsmod", 0o755),
        ("tool", "/usr/bin/mokutil", 0o755),
        ("tool", "/usr/sbin/stand-in-fault", 0o755),
        ("tool", "/usr/lib/stand-in/modules-load", 0o755),
        ("tool", "/usr/lib/test-host/boot.d/hardware", 0o755),
        ("modules-load.conf", "/etc/systemd/system/systemd-modules-load.service.d/stand-in.conf", 0o644),
    ):
        files[target] = (ON_HOST / source).read_bytes()
        modes[target] = mode
    kernel = kernel or os.uname().release
    files["/etc/apt/sources.list.d/kernel.list"] = b"deb [trusted=yes] file:/srv/hardware/packages ./\n"
    from tests.stand_ins.packages import kernel_packages  # here, because packages read this module's recordings

    for path, content in kernel_packages(kernel).items():
        files[f"/srv/hardware/packages/{path}"] = content
    return files, modes
