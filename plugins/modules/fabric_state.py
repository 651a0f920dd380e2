#!/usr/bin/python
"""The state of the NVLink fabric: a gate that nothing passes before every GPU is on the fabric, with a bounded wait."""

from __future__ import annotations

DOCUMENTATION = r"""
module: fabric_state
short_description: Wait, within bounds, until every GPU is on the NVLink fabric
description:
  - Reads C(fabric.state) of every GPU, the versions of driver and fabric packages, and the fabric daemons' units. A
    daemon that runs says little (the fabric manager runs while CUDA still fails with error 802); the state of each GPU
    is what counts.
  - Loads O(modules) first, because NVLSM and the fabric manager look for them when they start.
  - While it waits, the states are printed on the controller whenever they change, and at least every 15 seconds.
options:
  states:
    description: States that a GPU may have. Anything else is waited for, then a problem.
    type: list
    elements: str
    default: [Completed]
  wait:
    description: Longest wait in seconds; 0 looks once.
    type: int
    default: 0
  waited:
    description: Seconds that earlier calls have waited already; only reported.
    type: float
    default: 0
  packages:
    description: Packages that must have the running driver's version, to the patch level.
    type: list
    elements: str
    default: []
  modules:
    description: Kernel modules that must be loaded; those that are not are loaded.
    type: list
    elements: str
    default: []
  units:
    description: Units that shall be enabled and running, by name, each with the files that must not be newer than its
      start.
    type: dict
    default: {}
  units_off:
    description: Units that shall be neither enabled nor running, where they exist.
    type: list
    elements: str
    default: []
  unexpected:
    description: Packages that this platform has no use for. One that is there is reported as a warning, and left
      alone.
    type: list
    elements: str
    default: []
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
    description: Looks once; loads nothing.
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Wait until the fabric is there
  fabric_state:
    wait: 300
    packages: [nvidia-fabricmanager]
    units: {nvidia-fabricmanager.service: []}
"""

RETURN = r"""
driver_version:
  description: Version of the loaded kernel module, or null.
  returned: always
  type: str
packages:
  description: Versions of those of the asked packages that are installed.
  returned: always
  type: dict
gpus:
  description: index, fabric.state and fabric.status of every GPU.
  returned: always
  type: list
  elements: dict
ready:
  description: Whether every GPU has one of the wanted states.
  returned: always
  type: bool
waited:
  description: Seconds spent waiting.
  returned: always
  type: float
unsettled_units:
  description: Units that are not enabled and running with their newest files, and why.
  returned: always
  type: dict
problems:
  description: What is wrong, most likely cause first; empty when the fabric is ready and every version is right.
  returned: always
  type: list
  elements: str
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss import gpu
from ansible.module_utils.survey import hardware
from ansible.module_utils.survey.host import Host

FIELDS = ["index", "fabric.state", "fabric.status"]
PAUSE = 1.0  # seconds between two looks; nvidia-smi itself takes about as long


def summary(rows: list[dict[str, str]]) -> str:
    """GPUs by state, such as `6 Completed, 2 In Progress (GPU 3, 5)`."""
    by_state: dict[str, list[str]] = {}
    for row in rows:
        by_state.setdefault(gpu.fabric_state_of(row["fabric.state"]), []).append(row["index"])
    parts = []
    for state, indices in sorted(by_state.items()):
        parts.append(
            f"{len(indices)} {state}" + ("" if state == "Completed" else " (GPU {})".format(", ".join(indices)))
        )
    return ", ".join(parts) or "no GPU answers"


def is_ready(rows: list[dict[str, str]], states: list[str]) -> bool:
    return bool(rows) and all(gpu.fabric_state_of(row["fabric.state"]) in states for row in rows)


def version_problems(driver: str | None, packages: dict[str, str], wanted: list[str]) -> list[str]:
    """Fabric daemons refuse a driver of another patch level."""
    problems = []
    for name in wanted:
        if name not in packages:
            problems.append(f"{name} is not installed")
        elif driver is not None and gpu.upstream(packages[name]) != driver:
            problems.append(
                f"{name} is {gpu.upstream(packages[name])}, the running driver is {driver}; they must be the same to"
                " the patch level"
            )
    return problems


def gate_problems(
    rows: list[dict[str, str]], states: list[str], complaint: str | None, causes: list[str], waited: float
) -> list[str]:
    """What a fabric that is not ready means, its likely causes first."""
    if is_ready(rows, states) and not complaint:
        return []
    wanted = " or ".join(states)
    text = f"after {waited:.0f} s the NVLink fabric is not ready: {summary(rows)}; wanted: {wanted} on every GPU"
    if complaint:
        text += f"; nvidia-smi: {complaint}"
    text += ". CUDA programs would fail with error 802 (system not yet initialized)"
    if not causes:
        found = {gpu.fabric_state_of(row["fabric.state"]) for row in rows}
        if "In Progress" in found:
            causes = [
                "no cause is visible on this host: where a fabric manager runs here, its log is"
                " /var/log/fabricmanager.log; where none does, the fabric is managed from outside (switch trays, or the"
                " machine that hands these GPUs to this one), or the platform is declared wrongly and needs one"
            ]
    return [*causes, text]


def unit_log(name: str) -> str:
    lines = (
        gpu.ask(["journalctl", "--unit", name, "--lines", "5", "--no-pager", "--output", "cat"])
        .out.strip()
        .splitlines()
    )
    return " | ".join(lines)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "states": {"type": "list", "elements": "str", "default": ["Completed"]},
            "wait": {"type": "int", "default": 0},
            "waited": {"type": "float", "default": 0.0},
            "packages": {"type": "list", "elements": "str", "default": []},
            "modules": {"type": "list", "elements": "str", "default": []},
            "units": {"type": "dict", "default": {}},
            "units_off": {"type": "list", "elements": "str", "default": []},
            "unexpected": {"type": "list", "elements": "str", "default": []},
            "procfs": {"type": "path", "default": "/proc"},
            "sysfs": {"type": "path", "default": "/sys"},
        },
        supports_check_mode=True,
    )
    asked: dict[str, Any] = module.params
    host = Host(asked["procfs"], asked["sysfs"])
    causes: list[str] = []

    missing = [name for name in asked["modules"] if not gpu.module_loaded(host, name)]
    if missing and not module.check_mode:
        for name in missing:
            answer = gpu.ask(["modprobe", name])
            if answer.status != 0:
                causes.append(
                    f"the kernel module {name}, which NVLSM needs, could not be loaded: {answer.said}"
                    " (Ubuntu keeps it in linux-modules-extra-<kernel>)"
                )

    driver = hardware.driver(host)["running_version"]
    found = gpu.package_versions([*asked["packages"], *asked["unexpected"]])
    wrong_versions = version_problems(driver, found, asked["packages"])
    if driver is None:
        wrong_versions.insert(0, "no NVIDIA kernel module is loaded; the driver comes before its fabric")

    start = time.monotonic()
    deadline = start + (0 if module.check_mode else asked["wait"])
    states = gpu.unit_states([*sorted(asked["units"]), *asked["units_off"]])
    rows, complaint = ([], None) if driver is None else gpu.query_gpus(FIELDS)
    before = summary(rows)
    # Wrong versions do not mend by waiting, and a change of state is worth telling at once.
    while (
        not is_ready(rows, asked["states"])
        and summary(rows) == before
        and not wrong_versions
        and time.monotonic() + PAUSE <= deadline
    ):
        time.sleep(PAUSE)
        rows, complaint = gpu.query_gpus(FIELDS)
    waited = asked["waited"] + time.monotonic() - start

    unsettled = {name: gpu.unit_unsettled(states.get(name, {}), files or []) for name, files in asked["units"].items()}
    for name, why in unsettled.items():
        if why:
            log = unit_log(name) if states.get(name, {}).get("ActiveState") == "failed" else ""
            causes.append(f"{name} {why}" + (f"; its log ends: {log}" if log else ""))
    for name in asked["units_off"]:
        state = states.get(name, {})
        on = state.get("ActiveState") == "active" or state.get("UnitFileState") == "enabled"
        unsettled[name] = "is on" if on else None

    for name in asked["unexpected"]:
        if name in found:
            module.warn(f"{name} {found[name]} is installed, but this platform has no use for it; it was left alone")

    module.exit_json(
        changed=bool(missing),
        driver_version=driver,
        packages=found,
        gpus=rows,
        summary=summary(rows),
        ready=is_ready(rows, asked["states"]),
        waited=round(waited, 1),
        loaded=missing,
        unsettled_units={name: why for name, why in unsettled.items() if why},
        final=bool(wrong_versions),
        problems=[
            *wrong_versions,
            *(gate_problems(rows, asked["states"], complaint, causes, waited) if driver is not None else []),
        ],
    )


if __name__ == "__main__":
    main()
