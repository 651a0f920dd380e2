#!/usr/bin/python
"""Many systemd units in one call: one look at all of them, then only the steps that are missing."""

from __future__ import annotations

DOCUMENTATION = r"""
module: unit_set
short_description: Bring many systemd units to their states in one call
description:
  - One C(systemctl show) tells the state of all units; a run that changes nothing does no more.
  - systemd reads its files again only when it says that one of them has changed (C(NeedDaemonReload)), because a
    needless daemon-reload takes the GPUs away from containers that were started without CDI.
  - A unit that is running, but was started before one of its files was written, can be found and restarted
    (O(units[].restart_when_newer)). That needs no memory of an earlier task, so that a run which was cut between
    writing the file and restarting the unit is completed by the next one.
options:
  units:
    description: The units, in the order in which they are started.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name of the unit; C(.service) is assumed. Instances of templates are units like others.
        type: str
        required: true
      enabled:
        description: Whether the unit starts at boot. Left out, that stays as it is.
        type: bool
      state:
        description: V(restarted) restarts always. Left out, a running unit keeps running, a stopped one stays stopped.
        type: str
        choices: [started, stopped, restarted]
      masked:
        description: Whether the unit is masked, so that nothing can start it. Left out, that stays as it is.
        type: bool
      restart_when_newer:
        description: Files on the host. If the unit is running and one of them was written after it was started, it is
          restarted. A file that is missing is not newer.
        type: list
        elements: path
        default: []
  daemon_reload:
    description: V(auto) reloads when the files of one of the units, drop-ins included, are not the ones systemd has
      read.
    type: str
    choices: [auto, always, never]
    default: auto
notes:
  - In check mode a unit that does not exist is taken as one that an earlier task would have made. In a real run it is
    an error.
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Run a server on each half of the host
  unit_set:
    units:
      - name: gpt-oss@0
        enabled: true
        state: started
        restart_when_newer: [/etc/systemd/system/gpt-oss@.service, /etc/gpt-oss/processes/0/environment]
      - name: gpt-oss@1
        enabled: true
        state: started
        restart_when_newer: [/etc/systemd/system/gpt-oss@.service, /etc/gpt-oss/processes/1/environment]
      - {name: nvidia-imex, enabled: false, state: stopped, masked: true}
"""

RETURN = r"""
states:
  description: The units as they are after the call (in check mode, as they are now).
  returned: always
  type: dict
  sample: {gpt-oss@0.service: {load: loaded, active: active, sub: running, enabled: enabled, result: success}}
actions:
  description: The systemctl commands that were run, or would be.
  returned: always
  type: list
  elements: str
restarted:
  description: Units that were restarted, each with the reason.
  returned: always
  type: dict
  sample: {gpt-oss@0.service: /etc/gpt-oss/processes/0/environment is newer}
journal:
  description: The last lines of the journal of each unit that failed.
  returned: failure
  type: dict
"""

import os
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

_SUFFIXES = (".service", ".socket", ".timer", ".path", ".mount", ".target", ".slice", ".automount", ".swap", ".scope")
_PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "NeedDaemonReload",
    "DropInPaths",
    "InactiveExitTimestampMonotonic",
    "Result",
)
# Where systemd looks for drop-ins, the first one wins among files of one name.
_DROP_IN_PLACES = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
)
# Nothing to enable, or enabled through something else: systemctl is-enabled is content with these, too.
_AS_GOOD_AS_ENABLED = ("enabled", "static", "indirect", "alias", "generated", "transient")
_NOT_ENABLED = ("", "disabled", "static", "indirect", "generated", "transient", "masked", "masked-runtime", "bad")

ARGUMENTS: dict[str, Any] = {
    "units": {
        "type": "list",
        "elements": "dict",
        "required": True,
        "options": {
            "name": {"type": "str", "required": True},
            "enabled": {"type": "bool"},
            "state": {"type": "str", "choices": ["started", "stopped", "restarted"]},
            "masked": {"type": "bool"},
            "restart_when_newer": {"type": "list", "elements": "path", "default": []},
        },
    },
    "daemon_reload": {"type": "str", "choices": ["auto", "always", "never"], "default": "auto"},
}


class Unit:
    """One unit: what is wanted, and what systemd says."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        name = wanted["name"]
        self.name: str = name if name.endswith(_SUFFIXES) else name + ".service"
        self.wanted = wanted
        self.seen: dict[str, str] = {}

    @property
    def exists(self) -> bool:
        return self.seen["LoadState"] not in ("not-found", "bad-setting", "error")

    @property
    def masked(self) -> bool:
        return self.seen["LoadState"] == "masked"

    @property
    def running(self) -> bool:
        """Running or on the way; a unit that waits for its next automatic restart is neither."""
        state = self.seen["ActiveState"]
        return state in ("active", "reloading") or (state == "activating" and self.seen["SubState"] != "auto-restart")

    @property
    def stopped(self) -> bool:
        return self.seen["ActiveState"] in ("inactive", "failed")

    @property
    def stale(self) -> bool:
        """Whether its files on disk are not the ones that systemd has read.

        systemd compares times, but lists directories only when it reloads: a first drop-in escapes NeedDaemonReload.
        """
        if self.seen["NeedDaemonReload"] == "yes":
            return True
        names = {self.name}
        if "@" in self.name:
            prefix, _, rest = self.name.partition("@")
            names.add(f"{prefix}@.{rest.rpartition('.')[2]}")
        there: dict[str, str] = {}
        for place in _DROP_IN_PLACES:
            for name in sorted(names, key=len, reverse=True):  # an instance's own before the template's
                directory = f"{place}/{name}.d"
                for file in os.listdir(directory) if os.path.isdir(directory) else []:
                    if file.endswith(".conf"):
                        there.setdefault(file, f"{directory}/{file}")
        read = {os.path.realpath(path) for path in self.seen["DropInPaths"].split()}
        missing = [path for path in there.values() if os.path.realpath(path) not in read]
        gone = [path for path in read if not os.path.exists(path)]
        return self.exists and bool(missing or gone)

    def newer_file(self) -> str | None:
        """A file that was written after the unit began to start.

        Ages are compared, not times of day: the clock may have been set since the unit was started at boot.
        """
        started = int(self.seen["InactiveExitTimestampMonotonic"] or 0) / 1e6
        if not started:
            return None
        age = time.clock_gettime(time.CLOCK_MONOTONIC) - started
        for path in self.wanted["restart_when_newer"]:
            try:
                written = os.stat(path).st_mtime
            except (FileNotFoundError, NotADirectoryError):
                continue
            if time.time() - written < age:
                return str(path)
        return None

    def state(self) -> dict[str, str]:
        keys = {
            "load": "LoadState",
            "active": "ActiveState",
            "sub": "SubState",
            "enabled": "UnitFileState",
            "result": "Result",
        }
        return {short: self.seen[key] for short, key in keys.items()}


class UnitSet:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.units = [Unit(wanted) for wanted in module.params["units"]]
        self.actions: list[str] = []
        self.restarted: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        names = [unit.name for unit in self.units]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            self.module.fail_json(msg=f"units: {', '.join(twice)} is named twice")
        self.look()
        before = {unit.name: unit.state() for unit in self.units}
        self.reload()
        self.refuse_missing()
        self.mask_and_enable()
        self.stop_and_start()
        if self.actions and not self.module.check_mode:
            self.look()
            self.refuse_unmet()
        after = {unit.name: unit.state() for unit in self.units}
        result: dict[str, Any] = {
            "changed": bool(self.actions),
            "states": after,
            "actions": self.actions,
            "restarted": self.restarted,
        }
        if self.module._diff and self.actions:
            shown = self.expected(before) if self.module.check_mode else after
            restarts = "".join(f"{name}: restarted, {why}\n" for name, why in self.restarted.items())
            result["diff"] = {"before": described(before), "after": described(shown) + restarts}
        return result

    # -- looking -------------------------------------------------------------------------------------------------

    def look(self) -> None:
        names = [unit.name for unit in self.units]
        status, out, err = self.module.run_command(
            ["systemctl", "show", f"--property={','.join(_PROPERTIES)}", "--", *names], environ_update={"LC_ALL": "C"}
        )
        blocks = out.strip("\n").split("\n\n")
        if status != 0 or len(blocks) != len(self.units):
            self.module.fail_json(
                msg=f"systemd cannot be asked (exit status {status}): {err.strip() or out.strip()}. This needs root, on"
                " a host that was booted with systemd",
                actions=self.actions,
            )
        for unit, block in zip(self.units, blocks):
            unit.seen = dict.fromkeys(_PROPERTIES, "")
            unit.seen.update(line.split("=", 1) for line in block.splitlines() if "=" in line)

    def refuse_missing(self) -> None:
        missing = [unit for unit in self.units if not unit.exists and self.needed(unit)]
        if self.module.check_mode:
            for unit in missing:
                self.module.warn(f"{unit.name}: does not exist so far; an earlier task may make it in a real run")
        elif missing:
            said = [f"{unit.name} ({unit.seen['LoadState']})" for unit in missing]
            self.module.fail_json(
                msg=f"{', '.join(said)}: no such unit on this host. Nothing was started or stopped; check its name, and"
                " that its package or unit file is installed",
                changed=bool(self.actions),
                actions=self.actions,
            )

    @staticmethod
    def needed(unit: Unit) -> bool:
        """Whether something is asked of it that a unit which does not exist cannot satisfy."""
        return bool(unit.wanted["enabled"] or unit.wanted["state"] in ("started", "restarted"))

    # -- deciding and doing ---------------------------------------------------------------------------------------

    def reload(self) -> None:
        mode = self.module.params["daemon_reload"]
        if mode == "always" or (mode == "auto" and any(unit.stale for unit in self.units)):
            self.systemctl("daemon-reload")
            if not self.module.check_mode:
                self.look()

    def mask_and_enable(self) -> None:
        self.systemctl("unmask", [u for u in self.units if u.wanted["masked"] is False and u.masked])
        self.systemctl("enable", [u for u in self.units if u.wanted["enabled"] is True and not self.is_enabled(u)])
        disable = [
            u for u in self.units if u.wanted["enabled"] is False and u.seen["UnitFileState"] not in _NOT_ENABLED
        ]
        self.systemctl("disable", disable)

    @staticmethod
    def is_enabled(unit: Unit) -> bool:
        return unit.seen["UnitFileState"] in _AS_GOOD_AS_ENABLED

    def stop_and_start(self) -> None:
        stop, start, restart = [], [], []
        for unit in self.units:
            wanted = unit.wanted["state"]
            newer = unit.newer_file() if unit.running and wanted != "stopped" else None
            if wanted == "stopped" and not unit.stopped:
                stop.append(unit)
            elif wanted == "restarted" or newer:
                restart.append(unit)
                self.restarted[unit.name] = f"{newer} is newer" if newer else "it was asked for"
            elif wanted == "started" and not unit.running:
                start.append(unit)
        self.systemctl("stop", stop)
        self.systemctl("mask", [unit for unit in self.units if unit.wanted["masked"] is True and not unit.masked])
        # A unit that has used up its attempts is not started otherwise; somebody has just asked for it.
        failed = [unit for unit in start + restart if unit.seen["ActiveState"] == "failed"]
        if failed and not self.module.check_mode:
            self.module.run_command(["systemctl", "reset-failed", "--", *[unit.name for unit in failed]])
        self.systemctl("restart", restart)
        self.systemctl("start", start)

    def systemctl(self, verb: str, units: list[Unit] | None = None) -> None:
        if units is not None and not units:
            return
        names = [unit.name for unit in units or []]
        self.actions.append(" ".join([verb, *names]))
        if self.module.check_mode:
            return
        command = ["systemctl", "--no-ask-password", verb, *(["--", *names] if names else [])]
        status, out, err = self.module.run_command(command, environ_update={"LC_ALL": "C"})
        if status != 0:
            self.fail(
                f"systemctl {verb} {' '.join(names)} failed (exit status {status}): {(err.strip() or out.strip())}",
                names,
            )

    # -- judging -------------------------------------------------------------------------------------------------------

    def refuse_unmet(self) -> None:
        for unit in self.units:
            if unit.wanted["state"] in ("started", "restarted") and unit.seen["ActiveState"] == "failed":
                self.fail(
                    f"{unit.name} was started and has failed at once (result: {unit.seen['Result']})", [unit.name]
                )

    def fail(self, message: str, names: list[str]) -> None:
        self.look()
        broken = [unit.name for unit in self.units if unit.name in names and not unit.running]
        journal = {}
        for name in broken:
            _, out, _ = self.module.run_command(
                ["journalctl", "--no-pager", "--quiet", "--output=cat", "--lines=30", f"--unit={name}"]
            )
            journal[name] = out.splitlines()
        tails = [f"{name}: {' | '.join(lines[-5:])}" for name, lines in journal.items() if lines]
        self.module.fail_json(
            msg=". ".join([message, *tails]),
            changed=True,
            actions=self.actions,
            states={unit.name: unit.state() for unit in self.units},
            journal=journal,
        )

    # -- showing ---------------------------------------------------------------------------------------------------

    def expected(self, before: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        """What check mode shows as the result."""
        after = {name: dict(state) for name, state in before.items()}
        for unit in self.units:
            state = after[unit.name]
            if unit.wanted["masked"] is not None:
                state["load"] = "masked" if unit.wanted["masked"] else "loaded"
            if unit.wanted["enabled"] is not None and self.needs(unit, "enable", "disable"):
                state["enabled"] = "enabled" if unit.wanted["enabled"] else "disabled"
            if unit.wanted["state"] is not None:
                state["active"] = "inactive" if unit.wanted["state"] == "stopped" else "active"
        return after

    def needs(self, unit: Unit, *verbs: str) -> bool:
        return any(action.split()[0] in verbs and unit.name in action.split() for action in self.actions)


def described(states: dict[str, dict[str, str]]) -> str:
    return "".join(
        f"{name}: {state['load']}, {state['active']}, {state['enabled'] or 'no unit file'}\n"
        for name, state in states.items()
    )


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    module.exit_json(**UnitSet(module).run())


if __name__ == "__main__":
    main()
