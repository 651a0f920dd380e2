#!/usr/bin/python
"""The NVIDIA kernel module: brought into the kernel where that needs no reboot, and proved by GPUs that answer."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_state
short_description: Load the installed NVIDIA kernel module, say whether a reboot is needed, and ask every GPU
description:
  - Decides on the host's state alone, never on what an earlier task changed; a run that was interrupted anywhere is
    healed by the next one.
  - Rebuilds the initramfs when it is older than one of O(initramfs_files), loads O(modules) when no NVIDIA module and
    no nouveau is loaded, compares the running kernel module with the installed one, and asks nvidia-smi for every GPU.
  - Reboots nothing. RV(reboot_reasons) says why a reboot is needed, when it is.
options:
  version:
    description:
      - Version that the installed kernel module must have. In check mode the installed one is taken to have it already,
        because an earlier task would have seen to that.
    type: str
  modules:
    description: Kernel modules to load, the driver first.
    type: list
    elements: str
    default: [nvidia, nvidia_uvm]
  initramfs_files:
    description: Files that go into the initramfs, such as module options and blacklists.
    type: list
    elements: path
    default: []
  parameters:
    description: Values that the running module must have in C(/proc/driver/nvidia/params), by name there.
    type: dict
    default: {}
  gpu_count:
    description: GPUs that must answer; 0 means as many as the PCI bus shows.
    type: int
    default: 0
  units:
    description: Units that shall be enabled and running, by name, each with the files that must not be newer than its
      start.
    type: dict
    default: {}
  procfs:
    description: Root of procfs.
    type: path
    default: /proc
  sysfs:
    description: Root of sysfs.
    type: path
    default: /sys
attributes:
  check_mode:
    support: full
    description: Says what would be rebuilt and loaded; GPUs are asked when the installed module is the running one.
  diff_mode:
    support: full
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Bring the installed module into the kernel
  driver_state:
    initramfs_files: [/etc/modprobe.d/nouveau.conf]
    gpu_count: 8
"""

RETURN = r"""
running_version:
  description: Version of the loaded kernel module, or null.
  returned: always
  type: str
installed_version:
  description: Version of the kernel module on disk for the running kernel, or null.
  returned: always
  type: str
open_modules:
  description: Whether the installed kernel module is the open one; null when there is none.
  returned: always
  type: bool
kernel:
  description: Release of the running kernel.
  returned: always
  type: str
reboot_reasons:
  description: Why only a reboot brings the installed module into the kernel; empty when none is needed.
  returned: always
  type: list
  elements: str
gpus:
  description: What nvidia-smi says of each GPU (index, name, pci.bus_id, driver_version).
  returned: always
  type: list
  elements: dict
problems:
  description: What keeps GPUs from answering. Empty when all answer, and when a reboot has to come first.
  returned: always
  type: list
  elements: str
unsettled_units:
  description: Units that are not enabled and running with their newest files, and why.
  returned: always
  type: dict
"""

import glob
import os
import shutil
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss import gpu
from ansible.module_utils.survey import hardware
from ansible.module_utils.survey.host import Host

GPU_FIELDS = ["index", "name", "pci.bus_id", "driver_version"]


def stale_initramfs(files: list[str], boot: str = "/boot") -> list[str]:
    """Images that are older than a file they hold. Hosts without images, such as containers, have none."""
    newest = max((os.stat(path).st_mtime for path in files if os.path.exists(path)), default=0.0)
    images = [
        path for path in glob.glob(os.path.join(boot, "initrd.img-*")) if not path.endswith((".old", ".bak", "-bak"))
    ]
    return [path for path in sorted(images) if os.stat(path).st_mtime < newest]


def rebuild_initramfs(module: AnsibleModule) -> None:
    if shutil.which("update-initramfs"):
        argv = ["update-initramfs", "-u", "-k", "all"]
    elif shutil.which("dracut"):
        argv = ["dracut", "--regenerate-all", "--force"]
    else:
        module.fail_json(
            msg="The initramfs holds old module options, and neither update-initramfs nor dracut is there to rebuild"
            " it. Install initramfs-tools and run this again."
        )
    answer = gpu.ask(argv, timeout=1200)
    if answer.status != 0:
        module.fail_json(msg=f"{argv[0]} could not rebuild the initramfs: {answer.said}")


def load(module: AnsibleModule, names: list[str]) -> None:
    for name in names:
        answer = gpu.ask(["modprobe", name])
        if answer.status != 0:
            log = gpu.ask(["dmesg", "--level=emerg,alert,crit,err,warn"]).out.splitlines()
            told = [line for line in log if "nvidia" in line.lower() or "NVRM" in line][-5:]
            module.fail_json(
                msg=f"The kernel refused the module {name}: {answer.said}."
                + (" The kernel's log says: " + " | ".join(told) if told else "")
                + " With Secure Boot on, the module must be signed with an enrolled key."
            )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "version": {"type": "str"},
            "modules": {"type": "list", "elements": "str", "default": ["nvidia", "nvidia_uvm"]},
            "initramfs_files": {"type": "list", "elements": "path", "default": []},
            "parameters": {"type": "dict", "default": {}},
            "gpu_count": {"type": "int", "default": 0},
            "units": {"type": "dict", "default": {}},
            "procfs": {"type": "path", "default": "/proc"},
            "sysfs": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=True,
    )
    asked: dict[str, Any] = module.params
    host = Host(asked["procfs"], asked["sysfs"])
    done: list[str] = []

    stale = stale_initramfs(asked["initramfs_files"])
    if stale:
        done.append("rebuild {}".format(", ".join(stale)))
        if not module.check_mode:
            rebuild_initramfs(module)

    on_disk, licence = gpu.installed_module()
    installed = asked["version"] or on_disk if module.check_mode else on_disk
    installed_open = None if licence is None else "MIT" in licence or "GPL" in licence
    driver = hardware.driver(host)
    running = driver["running_version"]
    nouveau = gpu.module_loaded(host, "nouveau")
    if installed and not nouveau:
        missing = [name for name in asked["modules"] if not gpu.module_loaded(host, name)]
        if running is None or (missing and running == installed):
            done.append("load {}".format(", ".join(missing or asked["modules"])))
            if not module.check_mode:
                load(module, missing or asked["modules"])
                driver = hardware.driver(host)
                running = driver["running_version"]

    wanted = {str(name): str(value) for name, value in asked["parameters"].items()}
    reasons = gpu.reboot_reasons(
        running,
        installed,
        driver["running_open"],
        installed_open,
        nouveau,
        wanted,
        gpu.driver_parameters(host),
    )
    rows: list[dict[str, str]] = []
    problems: list[str] = []
    if installed is None:
        problems.append(
            f"there is no nvidia kernel module for the running kernel {os.uname().release}: its headers were missing"
            " when the module was built (dkms status tells), or it was built for another kernel than the one that runs"
        )
    elif asked["version"] and installed != asked["version"]:
        problems.append(
            f"the kernel module on disk is {installed}, the packages are {asked['version']}: dkms status tells which"
            " build failed"
        )
    elif running is not None and not reasons:
        rows, complaint = gpu.query_gpus(GPU_FIELDS)
        on_bus = [device["pci_address"] for device in hardware.gpus(host)]
        problems = gpu.gpu_problems(rows, complaint, on_bus, asked["gpu_count"], running)
    elif running is None and not reasons and not module.check_mode:
        problems.append(f"the kernel module {installed} is installed but not loaded")

    states = gpu.unit_states(sorted(asked["units"]))
    unsettled = {name: gpu.unit_unsettled(states.get(name, {}), files or []) for name, files in asked["units"].items()}

    module.exit_json(
        ansible_facts={
            "driver_state": {"running_version": running, "installed_version": on_disk, "gpu_count": len(rows)}
        },
        changed=bool(done),
        diff={"prepared": "".join(f"+ {step}\n" for step in done)} if done else {},
        done=done,
        kernel=os.uname().release,
        running_version=running,
        installed_version=on_disk,
        open_modules=installed_open,
        reboot_reasons=reasons,
        gpus=rows,
        problems=problems,
        unsettled_units={name: why for name, why in unsettled.items() if why},
    )


if __name__ == "__main__":
    main()
