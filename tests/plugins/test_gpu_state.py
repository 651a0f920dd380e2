"""driver_state and fabric_state: on small /proc and /sys trees, with tools that say what the case needs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

VERSION = "580.159.04"
OLDER = "570.211.01"
NVRM = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@)\n"


class Machine:
    """A host in a directory: trees that the kernel would show, and tools on the PATH."""

    def __init__(self, root: Path, gpus: int = 4) -> None:
        self.proc, self.sys, self.bin = root / "proc", root / "sys", root / "bin"
        self.log = root / "modprobe.log"
        for directory in (self.proc, self.sys / "module", self.bin):
            directory.mkdir(parents=True)
        (self.proc / "modules").write_text("")
        self.addresses = [f"0000:00:0{6 + index}.0" for index in range(gpus)]
        for address in self.addresses:
            device = self.sys / "bus/pci/devices" / address
            device.mkdir(parents=True)
            for name, value in (("vendor", "0x10de"), ("device", "0x2335"), ("class", "0x030200")):
                (device / name).write_text(value + "\n")
        self.on_disk(None)
        self.smi([])
        self.tool("systemctl", "exit 1")

    def tool(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def runs(self, version: str, parameters: str = 'CoherentGPUMemoryMode: ""\n') -> None:
        (self.proc / "driver/nvidia").mkdir(parents=True, exist_ok=True)
        (self.proc / "driver/nvidia/version").write_text(NVRM.format(version))
        (self.proc / "driver/nvidia/params").write_text(parameters)
        for name in ("nvidia", "nvidia_uvm"):
            (self.sys / "module" / name).mkdir(exist_ok=True)

    def on_disk(self, version: str | None, modprobe: str = "", licence: str = "Dual MIT/GPL") -> None:
        if version is None:
            self.tool("modinfo", "echo 'modinfo: ERROR: Module nvidia not found.' >&2; exit 1")
        else:
            self.tool("modinfo", f"echo 'version:        {version}'; echo 'license:        {licence}'")
        loads = [
            f'echo "$1" >> {self.log}',
            f"mkdir -p {self.proc}/driver/nvidia {self.sys}/module/$1",
            f"[ $1 != nvidia ] || echo '{NVRM.format(version).strip()}' > {self.proc}/driver/nvidia/version",
        ]
        self.tool("modprobe", modprobe or "\n".join(loads))

    def smi(self, rows: list[str], status: int = 0, complaint: str = "") -> None:
        lines = "\n".join(f"echo '{row}'" for row in rows)
        self.tool("nvidia-smi", f"{lines}\n[ -z '{complaint}' ] || echo '{complaint}' >&2\nexit {status}")

    def smi_answers(self, version: str = VERSION, count: int | None = None) -> None:
        addresses = self.addresses[:count]
        self.smi([f"{i}, NVIDIA H200, 0000{a.upper()}, {version}" for i, a in enumerate(addresses)])

    @property
    def loaded(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def state(machine: Machine, run_module: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def run(module: str = "driver_state", check: bool = False, **parameters: Any) -> dict[str, Any]:
        parameters = {"procfs": str(machine.proc), "sysfs": str(machine.sys), **parameters}
        path = f"{machine.bin}:/usr/bin:/bin"
        return run_module(module, parameters, check=check, environment={"PATH": path})

    return run


def test_a_module_that_is_not_loaded_is_loaded_without_a_reboot(machine: Machine, state: Any) -> None:
    machine.on_disk(VERSION)
    machine.smi_answers()
    first = state(version=VERSION)
    assert first["changed"]
    assert machine.loaded == ["nvidia", "nvidia_uvm"]
    assert (first["running_version"], first["reboot_reasons"], first["problems"]) == (VERSION, [], [])
    second = state(version=VERSION)
    assert not second["changed"]
    assert machine.loaded == ["nvidia", "nvidia_uvm"]


def test_check_mode_loads_nothing_and_says_so(machine: Machine, state: Any) -> None:
    result = state(check=True, version=VERSION)
    assert result["changed"]
    assert result["done"] == ["load nvidia, nvidia_uvm"]
    assert machine.loaded == []


def test_a_running_module_that_is_not_the_installed_one_needs_a_reboot(machine: Machine, state: Any) -> None:
    machine.runs(OLDER)
    machine.on_disk(VERSION)
    result = state(version=VERSION)
    assert result["reboot_reasons"] == [f"the running kernel module is {OLDER}, the installed one is {VERSION}"]
    assert not result["changed"]
    assert machine.loaded == []


def test_the_other_flavour_of_the_same_version_needs_a_reboot(machine: Machine, state: Any) -> None:
    machine.runs(VERSION)
    machine.on_disk(VERSION, licence="NVIDIA")
    reasons = state(version=VERSION)["reboot_reasons"]
    assert reasons == ["the running kernel module is the open one, the installed one is proprietary"]


def test_nouveau_needs_a_reboot(machine: Machine, state: Any) -> None:
    (machine.sys / "module/nouveau").mkdir()
    machine.on_disk(VERSION)
    assert state(version=VERSION)["reboot_reasons"] == [
        f"nouveau holds the GPUs, the installed kernel module is {VERSION}"
    ]
    assert machine.loaded == []


def test_a_module_option_that_differs_needs_a_reboot(machine: Machine, state: Any) -> None:
    machine.runs(VERSION)
    machine.on_disk(VERSION)
    wanted = {"CoherentGPUMemoryMode": "driver"}
    assert "CoherentGPUMemoryMode '', wanted is 'driver'" in state(parameters=wanted)["reboot_reasons"][0]
    machine.runs(VERSION, 'CoherentGPUMemoryMode: "driver"\n')
    assert state(parameters=wanted)["reboot_reasons"] == []


def test_a_module_that_was_not_built_is_told_with_the_kernel(machine: Machine, state: Any) -> None:
    result = state(version=VERSION)
    assert f"no nvidia kernel module for the running kernel {os.uname().release}" in result["problems"][0]


def test_a_module_of_another_version_than_the_packages_is_told(machine: Machine, state: Any) -> None:
    machine.runs(OLDER)
    machine.on_disk(OLDER)
    assert f"the kernel module on disk is {OLDER}, the packages are {VERSION}" in state(version=VERSION)["problems"][0]


def test_a_kernel_that_refuses_the_module_is_quoted(machine: Machine, state: Any) -> None:
    machine.on_disk(VERSION, modprobe="echo 'Key was rejected by service' >&2; exit 1")
    result = state(version=VERSION)
    assert result["failed"]
    assert "Key was rejected by service" in result["msg"]
    assert "Secure Boot" in result["msg"]


def test_a_gpu_that_does_not_answer_is_named(machine: Machine, state: Any) -> None:
    machine.runs(VERSION)
    machine.on_disk(VERSION)
    machine.smi_answers(count=3)
    assert state()["problems"] == ["3 of 4 GPUs answer; silent: 0000:00:09.0"]


def test_fewer_gpus_on_the_bus_than_asked_for(machine: Machine, state: Any) -> None:
    machine.runs(VERSION)
    machine.on_disk(VERSION)
    machine.smi_answers()
    assert state(gpu_count=8)["problems"] == ["4 of 8 GPUs answer; the PCI bus shows 4"]
    assert state(gpu_count=4)["problems"] == []


def test_what_nvidia_smi_complains_about_is_told(machine: Machine, state: Any) -> None:
    machine.runs(VERSION)
    machine.on_disk(VERSION)
    machine.smi([], status=18, complaint="Failed to initialize NVML: Driver/library version mismatch")
    problems = state()["problems"]
    assert problems[0] == "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch"
    assert problems[1].startswith("0 of 4 GPUs answer")


def test_a_unit_that_is_down_is_reported(machine: Machine, state: Any) -> None:
    machine.runs(VERSION)
    machine.on_disk(VERSION)
    machine.smi_answers()
    name = "nvidia-persistenced.service"
    assert state(units={name: []})["unsettled_units"] == {name: "is unknown to systemd"}
    drop_in = machine.proc.parent / "start.conf"
    drop_in.write_text("")
    os.utime(drop_in, (time.time() - 30, time.time() - 30))
    started = int((time.clock_gettime(time.CLOCK_MONOTONIC) - 60) * 1e6)
    lines = ["LoadState=loaded", "ActiveState=active", "UnitFileState=enabled", "NeedDaemonReload=no"]
    machine.tool(
        "systemctl", "\n".join(f"echo '{line}'" for line in [*lines, f"InactiveExitTimestampMonotonic={started}"])
    )
    assert state(units={name: []})["unsettled_units"] == {}
    assert "runs since before" in state(units={name: [str(drop_in)]})["unsettled_units"][name]


# -- fabric ------------------------------------------------------------------------------------------------------------


def fabric_rows(*states: str) -> list[str]:
    return [f"{index}, {state}, N/A" for index, state in enumerate(states)]


def test_a_completed_fabric_passes_at_once(machine: Machine, state: Any) -> None:
    machine.runs(VERSION)
    machine.smi(fabric_rows(*["Completed"] * 4))
    result = state("fabric_state", wait=30)
    assert (result["ready"], result["problems"], result["summary"]) == (True, [], "4 Completed")
    assert result["waited"] < 30


def test_a_fabric_in_progress_fails_in_bounded_time_and_names_gpus(machine: Machine, state: Any) -> None:
    machine.runs(VERSION)
    machine.smi(fabric_rows("Completed", "In Progress", "Completed", "In Progress"))
    begun = time.monotonic()
    result = state("fabric_state", wait=3)
    assert 2 <= time.monotonic() - begun < 60
    assert not result["ready"]
    assert "2 Completed, 2 In Progress (GPU 1, 3)" in result["problems"][-1]
    assert "802" in result["problems"][-1]


def test_a_fabric_that_completes_while_waiting_passes(machine: Machine, state: Any) -> None:
    machine.runs(VERSION)
    count = machine.proc.parent / "count"
    rows = "\n".join(f'echo "{i}, $state, N/A"' for i in range(4))
    machine.tool(
        "nvidia-smi",
        f"echo x >> {count}; state=Completed; [ $(wc -l < {count}) -gt 2 ] || state='In Progress'\n{rows}",
    )
    assert state("fabric_state", wait=30)["ready"]


@pytest.mark.parametrize("cell", ["Not Supported", "[Not Supported]", "N/A", "[N/A]"])
def test_not_supported_is_healthy_only_where_it_is_allowed(machine: Machine, state: Any, cell: str) -> None:
    machine.runs(VERSION)
    machine.smi(fabric_rows(cell, cell, cell, cell))
    assert not state("fabric_state")["ready"]
    assert state("fabric_state", states=["Completed", "Not Supported", "N/A"])["ready"]


def test_a_kernel_module_that_does_not_load_is_the_likely_cause(machine: Machine, state: Any) -> None:
    machine.runs(VERSION)
    machine.smi(fabric_rows(*["In Progress"] * 4))
    machine.tool("modprobe", "echo 'modprobe: FATAL: Module ib_umad not found' >&2; exit 1")
    problems = state("fabric_state", modules=["ib_umad"])["problems"]
    assert "the kernel module ib_umad" in problems[0]
    assert "linux-modules-extra" in problems[0]


def test_without_a_driver_there_is_no_fabric(machine: Machine, state: Any) -> None:
    result = state("fabric_state", wait=60)
    assert result["problems"] == ["no NVIDIA kernel module is loaded; the driver comes before its fabric"]
    assert result["final"]
    assert result["waited"] < 5


def test_a_missing_daemon_does_not_wait(machine: Machine, state: Any) -> None:
    machine.runs(VERSION)
    machine.smi(fabric_rows(*["In Progress"] * 4))
    result = state("fabric_state", wait=60, packages=["nvidia-fabricmanager"])
    assert result["problems"][0] == "nvidia-fabricmanager is not installed"
    assert result["waited"] < 5
