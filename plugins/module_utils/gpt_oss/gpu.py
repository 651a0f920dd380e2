"""What the kernel, the tools and systemd say about GPUs. Standard library only, Python 3.8 and later.

What the survey reads is read by the survey's own functions; here is what changes while a role works, and the judging,
which takes what was read and does nothing else.
"""

from __future__ import annotations

import os
import subprocess
import time
from typing import NamedTuple

from ansible.module_utils.gpt_oss import dpkg
from ansible.module_utils.survey.host import Host, key_values, read
from ansible.module_utils.survey.system import loaded_modules

TOOL_TIMEOUT = 120  # seconds; a GPU that hangs makes nvidia-smi hang


class Answer(NamedTuple):
    """What a command said. The status is None when it could not be run or did not end in time."""

    status: int | None
    out: str
    err: str

    @property
    def said(self) -> str:
        return (self.err.strip() or self.out.strip() or "(nothing)")[-2000:]


def ask(argv: list[str], timeout: float = TOOL_TIMEOUT) -> Answer:
    """Run a command in the C locale; never raises for what the command does."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            env=dict(os.environ, LC_ALL="C"),
        )
    except FileNotFoundError:
        return Answer(None, "", f"{argv[0]} is not installed")
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"{argv[0]} did not answer within {timeout:.0f} seconds")
    return Answer(done.returncode, done.stdout, done.stderr)


# -- kernel ------------------------------------------------------------------------------------------------------------


def module_loaded(host: Host, name: str) -> bool:
    """Whether a module is in the kernel, built in or loaded."""
    name = name.replace("-", "_")
    return name in loaded_modules(host) or os.path.isdir(host.sys("module", name))


def driver_parameters(host: Host) -> dict[str, str]:
    """The loaded module's parameters, as /proc/driver/nvidia/params lists them; strings without their quotes."""
    found: dict[str, str] = key_values(read(host.proc("driver", "nvidia", "params")) or "", ":")
    return found


def installed_module() -> tuple[str | None, str | None]:
    """Version and licence of the nvidia module on disk for the running kernel; (None, None) when there is none."""
    answer = ask(["modinfo", "nvidia"])
    fields = key_values(answer.out, ":") if answer.status == 0 else {}
    return fields.get("version"), fields.get("license")


# -- tools -------------------------------------------------------------------------------------------------------------


def query_gpus(fields: list[str]) -> tuple[list[dict[str, str]], str | None]:
    """One mapping for each GPU that nvidia-smi lists, and what it complained about, if it did."""
    answer = ask(["nvidia-smi", "--query-gpu=" + ",".join(fields), "--format=csv,noheader"])
    rows, odd = [], []
    for line in answer.out.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(fields):
            rows.append(dict(zip(fields, cells)))
        elif line.strip():
            odd.append(line.strip())
    complaint = None
    if answer.status != 0 or odd:
        complaint = answer.err.strip() or "; ".join(odd) or f"nvidia-smi ended with status {answer.status}"
    return rows, complaint


def package_versions(names: list[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    known = dpkg.read_packages() if names else {}
    return {name: known[name].version for name in names if name in known and known[name].installed}


def upstream(version: str) -> str:
    """A package version without epoch and Debian revision: 1:580.159.04-1 is 580.159.04."""
    return version.split(":", 1)[-1].split("-", 1)[0]


# -- systemd -----------------------------------------------------------------------------------------------------------

_UNIT_PROPERTIES = "LoadState,ActiveState,UnitFileState,NeedDaemonReload,Result,InactiveExitTimestampMonotonic"


def unit_states(names: list[str]) -> dict[str, dict[str, str]]:
    """systemd's view of some units, by the name that was asked for."""
    if not names:
        return {}
    answer = ask(["systemctl", "show", "--property=" + _UNIT_PROPERTIES, "--", *names])
    blocks = [key_values(block) for block in answer.out.strip("\n").split("\n\n")]
    return dict(zip(names, blocks))


def unit_unsettled(unit: dict[str, str], files: list[str]) -> str | None:
    """Why a unit that shall be enabled and running is not so yet, or None. `files` must not be newer than its start.

    Judges as unit_set does, so that unit_set is called only where it finds something to do.
    """
    if unit.get("LoadState") != "loaded":
        return "is {}".format(unit.get("LoadState") or "unknown to systemd")
    if unit.get("ActiveState") != "active":
        return "is {} ({})".format(unit.get("ActiveState"), unit.get("Result"))
    if unit.get("UnitFileState") not in ("enabled", "static", "indirect", "alias", "generated", "transient"):
        return "is not enabled"
    if unit.get("NeedDaemonReload") == "yes":
        return "changed on disk"
    age = time.clock_gettime(time.CLOCK_MONOTONIC) - int(unit.get("InactiveExitTimestampMonotonic") or 0) / 1e6
    for path in files:
        if os.path.exists(path) and time.time() - os.stat(path).st_mtime < age:
            return f"runs since before {path} was written"
    return None


# -- judging -----------------------------------------------------------------------------------------------------------


def reboot_reasons(
    running: str | None,
    installed: str | None,
    running_open: bool | None,
    installed_open: bool | None,
    nouveau: bool,
    wanted_parameters: dict[str, str],
    parameters: dict[str, str],
) -> list[str]:
    """Why only a reboot brings the installed module, with its options, into the kernel; empty when nothing does."""
    if installed is None:
        return []
    reasons = []
    if running is not None and running != installed:
        reasons.append(f"the running kernel module is {running}, the installed one is {installed}")
    elif running is not None and None not in (running_open, installed_open) and running_open != installed_open:
        flavour = {True: "open", False: "proprietary"}
        reasons.append(
            f"the running kernel module is the {flavour[bool(running_open)]} one, the installed one is"
            f" {flavour[bool(installed_open)]}"
        )
    if running is None and nouveau:
        reasons.append(f"nouveau holds the GPUs, the installed kernel module is {installed}")
    if running is not None:
        for name, value in sorted(wanted_parameters.items()):
            if name in parameters and parameters[name] != value:
                reasons.append(f"the running kernel module has {name} {parameters[name]!r}, wanted is {value!r}")
    return reasons


def gpu_problems(
    gpus: list[dict[str, str]], complaint: str | None, on_bus: list[str], expected: int, driver: str
) -> list[str]:
    """What keeps GPUs from answering; empty when every one does. `expected` 0 means as many as the PCI bus shows."""
    problems = []
    if complaint:
        problems.append(f"nvidia-smi: {complaint}")
    wanted = expected or len(on_bus)
    if wanted == 0:
        problems.append("the PCI bus shows no NVIDIA GPU")
    elif len(gpus) < wanted:
        answering = {_short(gpu["pci.bus_id"]) for gpu in gpus}
        silent = [address for address in on_bus if _short(address) not in answering]
        problems.append(
            f"{len(gpus)} of {wanted} GPUs answer"
            + (f"; silent: {', '.join(silent)}" if silent else f"; the PCI bus shows {len(on_bus)}")
        )
    for gpu in gpus:
        if gpu["driver_version"] != driver:
            problems.append(
                "GPU {}: nvidia-smi reports driver {}, the running kernel module is {}".format(
                    gpu["index"], gpu["driver_version"], driver
                )
            )
    return problems


def _short(address: str) -> str:
    """nvidia-smi writes the PCI domain with eight digits, the kernel with four."""
    domain, _, rest = address.lower().partition(":")
    return domain.lstrip("0").rjust(4, "0") + ":" + rest


def fabric_state_of(cell: str) -> str:
    """Completed, In Progress, Not Supported…; nvidia-smi puts some answers in brackets."""
    return cell.strip().strip("[]").strip()
