"""The hardware stand-in on a host: the kernel's side of GPUs, in files. Standard library only.

/srv/hardware/profile.json  what the machine has
/srv/hardware/faults.yml    what is wrong with it at the moment, one `- name` a line
/srv/hardware/proc, sys     what procfs and sysfs of such a machine show, now
/srv/hardware/smi           what nvidia-smi replays
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path("/srv/hardware")
PROC = ROOT / "proc"
SYS = ROOT / "sys"
SMI = ROOT / "smi"
FAULTS = ROOT / "faults.yml"
KMOD = "/bin/kmod"

FAULT_NAMES = {
    "gpu_gone": "the last GPU is not on the bus",
    "gpu_lost": "the last GPU has fallen off the bus: nvidia-smi cannot get a handle",
    "fabric_in_progress": "the NVLink fabric does not complete",
    "version_mismatch": "libraries of another version than the running module",
    "secure_boot": "Secure Boot is on (seen after a reboot)",
    "nouveau": "nouveau holds the GPUs (seen after a reboot)",
}
# Modules of the driver, which its package builds, with what they need loaded first.
DRIVER_MODULES = {
    "nvidia": [],
    "nvidia_modeset": ["nvidia"],
    "nvidia_uvm": ["nvidia"],
    "nvidia_drm": ["nvidia_modeset"],
    "nvidia_peermem": ["nvidia"],
}
# Modules of the kernel itself that matter to GPUs and that a container's kernel cannot load.
KERNEL_MODULES = {
    "mlx5_core": [],
    "ib_core": [],
    "mlx5_ib": ["mlx5_core", "ib_core"],
    "ib_umad": ["ib_core"],
    "nouveau": [],
}
MAJOR = 195
CONTROL_MINOR = 255
UVM_MAJOR = 511
PARAMETERS = {
    "ResmanDebugLevel": "4294967295",
    "ModifyDeviceFiles": "1",
    "DeviceFileUID": "0",
    "DeviceFileGID": "0",
    "DeviceFileMode": "438",
    "EnableStreamMemOPs": "0",
    "CoherentGPUMemoryMode": '""',
    "CreateImexChannel0": "0",
    "GrdmaPciTopoCheckOverride": "0",
    "OpenRmEnableUnsupportedGpus": "1",
}


def profile() -> dict[str, Any]:
    known: dict[str, Any] = json.loads((ROOT / "profile.json").read_text())
    return known


def faults() -> set[str]:
    if not FAULTS.is_file():
        return set()
    asked = set(re.findall(r"^- (\w+)\s*$", FAULTS.read_text(), re.MULTILINE))
    unknown = asked - set(FAULT_NAMES)
    if unknown:
        raise SystemExit(f"{FAULTS}: unknown fault {', '.join(sorted(unknown))}; allowed: {', '.join(FAULT_NAMES)}")
    return asked


def release() -> str:
    return os.uname().release


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# -- the machine -------------------------------------------------------------------------------------------------------


def present_gpus() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = profile()["gpus"]
    return found[:-1] if "gpu_gone" in faults() else found


def boot() -> None:
    """The machine as it is after power-on: devices on the bus, no module loaded, no device node."""
    machine = profile()
    for tree in (PROC, SYS):
        shutil.rmtree(tree, ignore_errors=True)
    for name in ("driver", "persistence", "fabric"):
        (SMI / name).unlink(missing_ok=True)
    for gone in set(machine["pci"]) - set(bus()):
        shutil.rmtree(SYS / "bus/pci/devices" / gone, ignore_errors=True)
    for address in bus():
        for name, value in machine["pci"][address].items():
            write(SYS / "bus/pci/devices" / address / name, value + "\n")
    (SYS / "module").mkdir(parents=True, exist_ok=True)
    (SYS / "class/infiniband").mkdir(parents=True, exist_ok=True)
    secure = "secure_boot" in faults() or machine["secure_boot"]
    variable = SYS / "firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    variable.parent.mkdir(parents=True, exist_ok=True)
    variable.write_bytes(b"\x06\x00\x00\x00" + (b"\x01" if secure else b"\x00"))

    total = machine["memory_kib"]
    write(
        PROC / "meminfo", f"MemTotal: {total:>15} kB\nMemAvailable: {total - 4194304:>11} kB\nSwapTotal: {0:>14} kB\n"
    )
    write(PROC / "modules", "")
    write(PROC / "cmdline", "BOOT_IMAGE=/boot/vmlinuz ro quiet\n")
    write(PROC / "sys/kernel/osrelease", release() + "\n")
    write(PROC / "self/smaps", f"KernelPageSize:        {machine['page_size'] // 1024} kB\n")
    for real in ("cpuinfo", "version", "mounts", "loadavg", "uptime", "net/tcp", "net/tcp6"):
        target = PROC / real
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(f"/proc/{real}")
    for real in ("arch", "hostname"):
        if Path(f"/proc/sys/kernel/{real}").exists():
            (PROC / "sys/kernel" / real).symlink_to(f"/proc/sys/kernel/{real}")
    for node in Path("/dev").glob("nvidia*"):
        if node.is_dir():
            shutil.rmtree(node)
        else:
            node.unlink()
    if "nouveau" in faults():
        insert("nouveau")
    publish_faults()


def bus() -> list[str]:
    """PCI addresses that are there now."""
    machine = profile()
    gone = {gpu["pci_address"] for gpu in machine["gpus"]} - {gpu["pci_address"] for gpu in present_gpus()}
    return [address for address in machine["pci"] if address not in gone]


def publish_faults() -> None:
    """Make nvidia-smi and the trees follow the faults of the moment."""
    now = faults()
    write(SMI / "faults", "".join(f"{name}\n" for name in sorted(now)))
    machine = profile()
    for gpu in machine["gpus"]:
        address = gpu["pci_address"]
        if address in bus():
            if not (SYS / "bus/pci/devices" / address).exists():
                for name, value in machine["pci"][address].items():
                    write(SYS / "bus/pci/devices" / address / name, value + "\n")
                if loaded("nvidia"):
                    bind(gpu, (SMI / "driver").read_text().strip())
        else:
            shutil.rmtree(SYS / "bus/pci/devices" / address, ignore_errors=True)
            shutil.rmtree(PROC / "driver/nvidia/gpus" / address, ignore_errors=True)
            Path(f"/dev/nvidia{gpu['index']}").unlink(missing_ok=True)


# -- kernel modules ----------------------------------------------------------------------------------------------------


def module_file(name: str, kernel: str) -> Path | None:
    """The file of a driver module on disk; its content says version and licence, where a real one has machine code."""
    path = Path("/lib/modules") / kernel / "updates/dkms" / f"{name.replace('_', '-')}.ko"
    return path if path.is_file() else None


def module_fields(name: str, kernel: str) -> dict[str, str] | None:
    name = name.replace("-", "_")
    if name in DRIVER_MODULES:
        path = module_file(name, kernel)
        if path is None:
            return None
        fields = dict(line.split("=", 1) for line in path.read_text().splitlines())
        return {"filename": str(path), **fields, "depends": ",".join(DRIVER_MODULES[name]), "name": name}
    if name in KERNEL_MODULES and (name == "nouveau" or profile()["infiniband"]):
        return {
            "filename": f"/lib/modules/{kernel}/kernel/drivers/{name}.ko",
            "license": "Dual BSD/GPL",
            "depends": ",".join(KERNEL_MODULES[name]),
            "name": name,
        }
    return None


def loaded(name: str) -> bool:
    return (SYS / "module" / name.replace("-", "_")).is_dir()


def options(name: str) -> dict[str, str]:
    """Parameters that modprobe.d gives a module."""
    found: dict[str, str] = {}
    for directory in ("/lib/modprobe.d", "/usr/lib/modprobe.d", "/etc/modprobe.d", "/run/modprobe.d"):
        for path in sorted(Path(directory).glob("*.conf")):
            for line in path.read_text(errors="replace").splitlines():
                words = line.split()
                if len(words) > 2 and words[0] == "options" and words[1].replace("-", "_") == name:
                    pairs = (word.partition("=") for word in words[2:] if "=" in word)
                    found.update({name: value for name, _, value in pairs})
    return found


def blacklisted(name: str) -> bool:
    pattern = re.compile(rf"^\s*blacklist\s+{name}\s*$", re.MULTILINE)
    places = ("/lib/modprobe.d", "/usr/lib/modprobe.d", "/etc/modprobe.d", "/run/modprobe.d")
    return any(
        pattern.search(path.read_text(errors="replace")) for place in places for path in Path(place).glob("*.conf")
    )


def insert(name: str) -> None:
    fields = module_fields(name, release()) or {"license": "GPL"}
    depends = (DRIVER_MODULES | KERNEL_MODULES).get(name, [])
    for needed in depends:
        if not loaded(needed):
            insert(needed)
    directory = SYS / "module" / name
    directory.mkdir(parents=True, exist_ok=True)
    if "version" in fields:
        write(directory / "version", fields["version"] + "\n")
    write(directory / "initstate", "live\n")
    with (PROC / "modules").open("a") as listed:
        listed.write(f"{name} 1048576 0 - Live 0x0000000000000000 (OE)\n")
    if name == "nvidia":
        driver_appears(fields)
    elif name == "nvidia_uvm":
        make_node("nvidia-uvm", UVM_MAJOR, 0)
        make_node("nvidia-uvm-tools", UVM_MAJOR, 1)
    elif name == "mlx5_ib":
        for adapter in profile()["infiniband"]:
            device = SYS / "class/infiniband" / adapter["name"] / "device"
            device.mkdir(parents=True, exist_ok=True)
            (device / "vpd").write_bytes(base64.b64decode(adapter["vpd"]))


def driver_appears(fields: dict[str, str]) -> None:
    version = fields["version"]
    kind = "UNIX Open Kernel Module" if "MIT" in fields["license"] else "UNIX Kernel Module"
    first = f"NVRM version: NVIDIA {kind} for x86_64  {version}  Release Build  (dvs-builder@)\n"
    write(PROC / "driver/nvidia/version", first + "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)\n")
    values = dict(PARAMETERS)
    for name, value in options("nvidia").items():
        short = name[len("NVreg_") :] if name.startswith("NVreg_") else name
        values[short] = f'"{value}"' if not value.isdigit() else value
    write(PROC / "driver/nvidia/params", "".join(f"{name}: {value}\n" for name, value in values.items()))
    for gpu in present_gpus():
        bind(gpu, version)
    make_node("nvidiactl", MAJOR, CONTROL_MINOR)
    for number, address in enumerate(profile()["nvswitches"]):
        write(
            PROC / "driver/nvidia-nvswitch/devices" / address, f"BIOS Version: 96.10.6F.00.01\nPhysical Id: {number}\n"
        )
        make_node(f"nvidia-nvswitch{number}", 510, number)
    write(SMI / "driver", version + "\n")
    if options("nvidia").get("NVreg_CreateImexChannel0") == "1":
        make_node("nvidia-caps-imex-channels/channel0", 509, 0)


def bind(gpu: dict[str, Any], version: str) -> None:
    address = gpu["pci_address"]
    write(
        PROC / "driver/nvidia/gpus" / address / "information",
        f"Model: \t\t {gpu['name']}\nGPU UUID: \t {gpu['uuid']}\nBus Type: \t PCIe\n"
        f"Bus Location: \t {address}\nDevice Minor: \t {gpu['index']}\nGPU Firmware: \t {version}\n",
    )
    link = SYS / "bus/pci/devices" / address / "driver"
    if not link.is_symlink():
        link.symlink_to("../../drivers/nvidia")
    make_node(f"nvidia{gpu['index']}", MAJOR, gpu["index"])


def make_node(name: str, major: int, minor: int) -> None:
    path = Path("/dev") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
        path.chmod(0o666)


def remove(name: str) -> None:
    listed = PROC / "modules"
    listed.write_text("".join(line + "\n" for line in listed.read_text().splitlines() if line.split()[0] != name))
    shutil.rmtree(SYS / "module" / name)
    if name == "nvidia":
        shutil.rmtree(PROC / "driver", ignore_errors=True)
        (SMI / "driver").unlink(missing_ok=True)
        for gpu in profile()["gpus"]:
            (SYS / "bus/pci/devices" / gpu["pci_address"] / "driver").unlink(missing_ok=True)
        for node in Path("/dev").glob("nvidia*"):
            if node.is_dir():
                shutil.rmtree(node)
            else:
                node.unlink()


def users(name: str) -> list[str]:
    """What keeps a module from being unloaded: modules above it, and the persistence daemon."""
    needed_by = [other for other, needs in (DRIVER_MODULES | KERNEL_MODULES).items() if name in needs and loaded(other)]
    if name == "nvidia" and (SMI / "persistence").exists():
        needed_by.append("nvidia-persistenced")
    return needed_by


def cannot_load(name: str, fields: dict[str, str]) -> str | None:
    if name in DRIVER_MODULES:
        if loaded("nouveau"):
            return "No such device"
        if ("secure_boot" in faults() or profile()["secure_boot"]) and not fields.get("signer"):
            return "Key was rejected by service"
        if not present_gpus():
            return "No such device"
        running = SYS / "module/nvidia/version"
        if name != "nvidia" and running.exists() and running.read_text().strip() != fields["version"]:
            return "Invalid argument"
    return None


# -- the tools ---------------------------------------------------------------------------------------------------------


def kmod(tool: str, arguments: list[str]) -> int:
    """The real tool, for everything that is not ours."""
    return subprocess.run([tool, *arguments], executable=KMOD, check=False).returncode


def modprobe(arguments: list[str]) -> int:
    ours = DRIVER_MODULES | KERNEL_MODULES
    names = [word.replace("-", "_") for word in arguments if not word.startswith("-") and "=" not in word]
    flags = [word for word in arguments if word.startswith("-")]
    mine = [name for name in names if name in ours]
    if not mine:
        return kmod("modprobe", arguments)
    if len(mine) > 1 and not {"-a", "--all", "-r", "--remove"} & set(flags):
        mine = mine[:1]  # modprobe takes further words as parameters
    dry = bool({"-n", "--dry-run", "--show"} & set(flags))
    status = 0
    for name in mine:
        if {"-r", "--remove"} & set(flags):
            if not loaded(name):
                continue
            held = [user for user in users(name) if user not in mine]
            if held:
                print(f"modprobe: FATAL: Module {name} is in use.", file=sys.stderr)
                status = 1
            elif not dry:
                for above in users(name):
                    if loaded(above):
                        remove(above)
                remove(name)
            continue
        if loaded(name):
            continue
        if blacklisted(name) and {"-b", "--use-blacklist"} & set(flags):
            continue
        fields = module_fields(name, release())
        if fields is None:
            print(f"modprobe: FATAL: Module {name} not found in directory /lib/modules/{release()}", file=sys.stderr)
            status = 1
            continue
        refused = cannot_load(name, fields)
        if refused:
            print(f"modprobe: ERROR: could not insert '{name}': {refused}", file=sys.stderr)
            status = 1
        elif not dry:
            insert(name)
    return status


def rmmod(arguments: list[str]) -> int:
    names = [word.replace("-", "_") for word in arguments if not word.startswith("-")]
    if not any(name in DRIVER_MODULES | KERNEL_MODULES for name in names):
        return kmod("rmmod", arguments)
    status = 0
    for name in names:
        if not loaded(name):
            print(f"rmmod: ERROR: Module {name} is not currently loaded", file=sys.stderr)
            status = 1
        elif users(name):
            print(f"rmmod: ERROR: Module {name} is in use by: {' '.join(users(name))}", file=sys.stderr)
            status = 1
        else:
            remove(name)
    return status


def modinfo(arguments: list[str]) -> int:
    words = list(arguments)
    kernel, field, names = release(), None, []
    while words:
        word = words.pop(0)
        if word in ("-k", "--set-version") and words:
            kernel = words.pop(0)
        elif word in ("-F", "--field") and words:
            field = words.pop(0)
        elif word.startswith("--field="):
            field = word.split("=", 1)[1]
        elif not word.startswith("-"):
            names.append(word)
    if not any(name.replace("-", "_") in DRIVER_MODULES | KERNEL_MODULES for name in names):
        return kmod("modinfo", arguments)
    status = 0
    for name in names:
        fields = module_fields(name, kernel)
        if fields is None:
            print(f"modinfo: ERROR: Module {name} not found.", file=sys.stderr)
            status = 1
        elif field is not None:
            if field in fields:
                print(fields[field])
        else:
            for key, value in fields.items():
                print(f"{key + ':':<16}{value}")
    return status


def lsmod() -> int:
    status = 0
    if Path("/proc/modules").exists():
        status = kmod("lsmod", [])
    else:
        print("Module                  Size  Used by")
    for line in (PROC / "modules").read_text().splitlines():
        name, size, count = line.split()[:3]
        print(f"{name:<24}{size:>8}  {count}")
    return status


def mokutil(arguments: list[str]) -> int:
    if arguments != ["--sb-state"]:
        print("mokutil: only --sb-state is recorded", file=sys.stderr)
        return 1
    variable = next((SYS / "firmware/efi/efivars").glob("SecureBoot-*"), None)
    if variable is None:
        print("EFI variables are not supported on this system", file=sys.stderr)
        return 1
    print("SecureBoot " + ("enabled" if variable.read_bytes()[-1:] == b"\x01" else "disabled"))
    return 0


def modules_load() -> int:
    """What udev and systemd-modules-load do at boot."""
    wanted = ["nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"] if module_file("nvidia", release()) else []
    if profile()["infiniband"]:
        wanted += ["mlx5_core", "mlx5_ib"]
    for directory in ("/usr/lib/modules-load.d", "/etc/modules-load.d", "/run/modules-load.d"):
        for path in sorted(Path(directory).glob("*.conf")):
            wanted += [line.strip() for line in path.read_text().splitlines() if line.strip() and line[0] not in "#;"]
    status = 0
    for name in wanted:
        if name.replace("-", "_") in DRIVER_MODULES | KERNEL_MODULES:
            status |= modprobe(["-b", name])
    return status


def fault(arguments: list[str]) -> int:
    if not arguments or any(name not in (*FAULT_NAMES, "none") for name in arguments):
        print("stand-in-fault NAME…: what is wrong with the hardware from now on", file=sys.stderr)
        for name, meaning in {**FAULT_NAMES, "none": "nothing is wrong"}.items():
            print(f"  {name:<20} {meaning}", file=sys.stderr)
        return 2
    FAULTS.write_text("".join(f"- {name}\n" for name in arguments if name != "none"))
    publish_faults()
    return 0


def main(argv: list[str]) -> int:
    tool = Path(argv[0]).name
    arguments = argv[1:]
    if tool == "hardware":
        boot()
        return 0
    tools = {"modprobe": modprobe, "rmmod": rmmod, "modinfo": modinfo, "mokutil": mokutil, "stand-in-fault": fault}
    if tool in tools:
        return tools[tool](arguments)
    if tool == "lsmod":
        return lsmod()
    if tool == "modules-load":
        return modules_load()
    print(f"{tool}: not a tool of the hardware stand-in", file=sys.stderr)
    return 2
