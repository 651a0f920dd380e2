#!/usr/bin/python
"""The inference units of a host: the plan's processes run the plan, others are gone, nobody is restarted without a "
"reason."""

from __future__ import annotations

DOCUMENTATION = r"""
module: server_set
short_description: Run exactly the plan's engine processes, restarting those whose plan changed
description:
  - Puts O(files) in place first; when one of them cannot be, nothing is changed.
  - Compares the plan hash on each running container with the wanted one. A process is restarted when they differ or
    when it does not run, and at no other time; several at once restart together.
  - Units and containers of processes that are not wanted any more are stopped and removed, with their configuration.
  - After a start the units are watched for O(settle_seconds). A container that ends is an error at once, with the
    engine's last log lines and the likely cause.
options:
  processes:
    description: The wanted processes. With an empty list every process is removed.
    type: list
    elements: dict
    required: true
    suboptions:
      name: {type: str, required: true, description: The instance of C(gpt-oss@.service).}
      plan: {type: str, required: true, description: Hash of everything that its container was started with.}
  files:
    description: What the processes run with, units included; entries as those of M(file_set).
    type: list
    elements: dict
    default: []
  watchdog: {type: bool, default: true, description: Whether C(gpt-oss-watchdog@.timer) watches over each process.}
  settle_seconds: {type: float, default: 5, description: Seconds that a started container is watched for an early end.}
  configuration_directory: {type: path, default: /etc/gpt-oss, description: Where the processes' configuration lies.}
  engine_caches:
    description: Directory with a directory of compile caches for each image. Left out, no cache is removed.
    type: path
  engine_cache: {type: str, default: "", description: Which of O(engine_caches) belongs to the image that serves.}
  engine_caches_kept:
    description: How many others of O(engine_caches) stay, the last used first. The rest goes once all processes run.
    type: int
    default: 1
  socket: {type: path, default: /var/run/docker.sock, description: The daemon's socket.}
attributes:
  check_mode: {support: full, description: Says what would be started, restarted and removed.}
  diff_mode: {support: full, description: Processes and their plan hashes.}
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Run the plan
  server_set:
    processes: [{name: "0", plan: 6c1f…}]
"""

RETURN = r"""
changed_paths: {description: Files that were changed., returned: always, type: list, elements: str}
restarted: {description: Processes that were started or restarted., returned: always, type: list, elements: str}
removed: {description: Processes that were removed., returned: always, type: list, elements: str}
pruned: {description: Compile caches of earlier images that were removed., returned: always, type: list, elements: str}
cause: {description: Name of the likely cause of a failed start., returned: on failure, type: str}
log: {description: The engine's last lines., returned: on failure, type: list, elements: str}
"""

import glob
import os
import shutil
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss import docker_host as host
from ansible.module_utils.gpt_oss import engine_log
from ansible.module_utils.gpt_oss.file_entries import HIDEABLE_ENTRY_OPTIONS, FileSet

WANTS = "/etc/systemd/system/*.wants"
POLL_SECONDS = 0.25
READ_AHEAD = "gpt-oss-read-ahead.service"


class StartError(Exception):
    """A process that does not come up; carries what to tell."""

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__(report["msg"])
        self.report = report


def unit(name: str) -> str:
    return f"gpt-oss@{name}.service"


def timer(name: str) -> str:
    return f"gpt-oss-watchdog@{name}.timer"


def systemctl(*words: str, timeout: float = 1800) -> None:
    status, output = host.run(["systemctl", *words], timeout=timeout)
    if status != 0:
        raise host.DockerError(f"systemctl {' '.join(words)}: {output.strip() or status}")


class Servers:
    """What runs, what shall run, and the way there."""

    def __init__(self, asked: dict[str, Any], check_mode: bool) -> None:
        self.asked = asked
        self.check_mode = check_mode
        self.wanted: dict[str, dict[str, Any]] = {process["name"]: process for process in asked["processes"]}
        self.docker = host.Docker(asked["socket"])
        self.containers: dict[str, dict[str, Any]] = {}
        self.units: dict[str, dict[str, str]] = {}
        self.stale: list[str] = []
        self.restart: list[str] = []
        self.enable: list[str] = []
        self.disable: list[str] = []
        self.wake: list[str] = []
        self.prune: list[str] = []

    # -- looking ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        if self.check_mode and shutil.which("dockerd") is None:
            self.restart = list(self.wanted)  # an earlier role would have installed it
            return
        for found in self.docker.containers(everything=True):
            self.containers[found["Labels"][host.LABEL]] = found
        self.stale = sorted(self.known() - set(self.wanted))
        for name in self.wanted:
            self.units[name] = host.unit_properties(unit(name), "LoadState", "ActiveState", "NeedDaemonReload")
        self.restart = [name for name in self.wanted if not self.runs_the_plan(name)]
        timers = [timer(name) for name in self.wanted]
        on = [unit(name) for name in self.wanted] + (timers if self.asked["watchdog"] else [])
        self.enable = [name for name in on if not enabled(name)]
        self.disable = [] if self.asked["watchdog"] else [name for name in timers if enabled(name)]
        self.wake = [name for name in timers if self.asked["watchdog"] and not active(name)]
        self.prune = self.superfluous_caches()

    def known(self) -> set[str]:
        """Every process that this host has a container, an enabled unit or configuration of."""
        names = set(self.containers)
        for path in glob.glob(f"{WANTS}/gpt-oss@*.service"):
            names.add(os.path.basename(path)[len("gpt-oss@") : -len(".service")])
        directory = os.path.join(self.asked["configuration_directory"], "processes")
        if os.path.isdir(directory):
            names.update(entry.name for entry in os.scandir(directory) if entry.is_dir())
        return names

    def runs_the_plan(self, name: str) -> bool:
        found = self.containers.get(name)
        return (
            found is not None
            and found["State"] == "running"
            and found["Labels"].get("gpt-oss.plan") == self.wanted[name]["plan"]
            and self.units[name].get("ActiveState") == "active"
        )

    def superfluous_caches(self) -> list[str]:
        """Compile caches of images other than the one that serves, but for those used last."""
        directory, current = self.asked["engine_caches"], self.asked["engine_cache"]
        if not directory or not current or not os.path.isdir(directory):
            return []
        entries = [entry for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]
        others = [entry for entry in entries if entry.name != current]
        others.sort(key=lambda entry: entry.stat().st_mtime_ns, reverse=True)
        return sorted(entry.name for entry in others[self.asked["engine_caches_kept"] :])

    @property
    def changed(self) -> bool:
        return bool(self.stale or self.restart or self.enable or self.disable or self.wake or self.prune)

    def diff(self) -> dict[str, str]:
        before = {
            name: found["Labels"].get("gpt-oss.plan") for name, found in self.containers.items() if running(found)
        }
        after = {name: process["plan"] for name, process in self.wanted.items()}
        caches = "".join(f"compile caches of {name}\n" for name in self.prune)
        return {"before": _listed(before) + caches, "after": _listed(after)}

    # -- doing -----------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        for name in self.stale:
            self.remove(name)
        if self.stale_units() or self.enable:
            # Not as a matter of course: a reload takes the GPUs from containers that got them from the runtime hook.
            systemctl("daemon-reload")
        if self.disable:
            systemctl("disable", "--now", *self.disable)
        if self.enable:
            systemctl("enable", *self.enable)
        if self.restart:
            self.start()
        if self.wake:
            systemctl("start", *self.wake)
        for name in self.prune:
            shutil.rmtree(os.path.join(self.asked["engine_caches"], name))

    def stale_units(self) -> bool:
        """Whether systemd has to read units again before a start."""
        found = list(self.units.values())
        found += [host.unit_properties(READ_AHEAD, "NeedDaemonReload")] if self.restart else []
        return any(unit.get("NeedDaemonReload") == "yes" for unit in found)

    def remove(self, name: str) -> None:
        host.run(["systemctl", "disable", "--now", timer(name)])  # fails when there never was one
        systemctl("disable", "--now", unit(name))
        host.run(["systemctl", "reset-failed", unit(name)])
        if name in self.containers and self.docker.containers(f"{host.LABEL}={name}", everything=True):
            self.docker.open("DELETE", f"/containers/{self.containers[name]['Id']}?force=1")
        directory = os.path.join(self.asked["configuration_directory"], "processes", name)
        if os.path.isdir(directory):
            shutil.rmtree(directory)

    def start(self) -> None:
        units = [unit(name) for name in self.restart]
        caches = os.path.join(self.asked["engine_caches"] or "", self.asked["engine_cache"])
        if self.asked["engine_caches"] and self.asked["engine_cache"] and os.path.isdir(caches):
            os.utime(caches)  # their age is that of their last use: superfluous_caches() goes by it
        since = f"@{time.time():.3f}"
        host.run(["systemctl", "reset-failed", *units])
        status, output = host.run(["systemctl", "restart", *units], timeout=1800)
        began = time.monotonic()
        ended = self.ended(since)
        if status != 0 and ended is None:
            raise host.DockerError(f"systemctl restart {' '.join(units)}: {output.strip()}")
        while ended is None and time.monotonic() - began < self.asked["settle_seconds"]:
            time.sleep(POLL_SECONDS)
            ended = self.ended(since)
        if ended is not None:
            raise StartError(ended)

    def ended(self, since: str) -> dict[str, Any] | None:
        """The report of a process that was started and is gone again."""
        for name in self.restart:
            found = host.unit_properties(unit(name), "ActiveState", "SubState", "NRestarts", "Result", "ExecMainStatus")
            if found.get("ActiveState") == "active" and found.get("NRestarts") == "0":
                continue
            how = f"{found.get('Result')}, status {found.get('ExecMainStatus')}"
            lines = engine_log.last_lines(unit(name), since=since)
            report: dict[str, Any] = engine_log.failure(unit(name), f"did not stay up ({how})", lines)
            return report
        return None


def running(found: dict[str, Any]) -> bool:
    return bool(found["State"] == "running")


def enabled(name: str) -> bool:
    return bool(glob.glob(f"{WANTS}/{name}"))


def active(name: str) -> bool:
    return bool(host.unit_properties(name, "ActiveState").get("ActiveState") == "active")


def _listed(plans: dict[str, Any]) -> str:
    return "".join(f"{unit(name)} runs plan {plan}\n" for name, plan in sorted(plans.items()))


def main() -> None:
    process = {
        "name": {"type": "str", "required": True},
        "plan": {"type": "str", "required": True},
    }
    module = AnsibleModule(
        argument_spec={
            "processes": {"type": "list", "elements": "dict", "required": True, "options": process},
            "files": {"type": "list", "elements": "dict", "default": [], "options": HIDEABLE_ENTRY_OPTIONS},
            "watchdog": {"type": "bool", "default": True},
            "settle_seconds": {"type": "float", "default": 5},
            "configuration_directory": {"type": "path", "default": "/etc/gpt-oss"},
            "engine_caches": {"type": "path"},
            "engine_cache": {"type": "str", "default": ""},
            "engine_caches_kept": {"type": "int", "default": 1},
            "socket": {"type": "path", "default": host.SOCKET},
        },
        supports_check_mode=True,
        no_log=True,
    )
    files = FileSet(module, module.params["files"])
    files.hide_contents("files")
    paths = files.look_or_fail()
    diffs = files.diffs() if module._diff else []
    servers = Servers(module.params, module.check_mode)
    try:
        if paths and not module.check_mode:
            files.put_or_fail()
        servers.look()
        result = {
            "changed": bool(paths) or servers.changed,
            "changed_paths": paths,
            "restarted": servers.restart,
            "removed": servers.stale,
            "pruned": servers.prune,
        }
        if module._diff:
            result["diff"] = [*diffs, servers.diff()] if servers.changed else diffs
        if servers.changed and not module.check_mode:
            servers.apply()
    except StartError as error:
        module.fail_json(**error.report)
    except host.DockerError as error:
        module.fail_json(msg=str(error), changed=bool(paths) and not module.check_mode)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
