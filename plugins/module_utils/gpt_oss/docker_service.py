"""The Docker daemon's configuration and restarts, decided on the host's state. Standard library only, Python 3.8 "
"and later."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from typing import Any

from ansible.module_utils.gpt_oss import docker_host as host
from ansible.module_utils.gpt_oss import engine_log
from ansible.module_utils.gpt_oss.files import StagedFile, read_file, text_diff
from ansible.module_utils.gpt_oss.json_merge import json_object, merged

UNIT = "docker.service"
CONFIGURATION = "/etc/docker/daemon.json"
VALIDATE_SINCE = "23.0.0"  # `dockerd --validate`


class Daemon:
    """The daemon as it is, what its configuration shall say, and whether that takes a restart."""

    def __init__(self, path: str, options: dict[str, Any], newer: list[str], docker: host.Docker) -> None:
        self.path = path
        self.options = options
        self.docker = docker
        self.program = shutil.which("dockerd")
        self.newer = [path, *([self.program] if self.program else []), *newer]
        self.before = read_file(path)
        self.after = self.before
        self.unit: dict[str, str] = {}
        self.reasons: list[str] = []

    def version(self) -> str:
        """Of the installed daemon, which need not be the running one."""
        assert self.program is not None
        status, output = host.run([self.program, "--version"])
        words = output.replace(",", " ").split()
        if status != 0 or "version" not in words:
            raise host.DockerError(f"{self.program} --version: {output.strip() or status}")
        return str(words[words.index("version") + 1])

    def plan(self) -> None:
        """Read and decide; changes nothing."""
        try:
            now = json_object((self.before or b"").decode("utf-8", "replace"), self.path)
        except ValueError as error:
            raise host.DockerError(str(error)) from None
        wanted = merged(now, self.options)
        if wanted != now:
            self.after = (json.dumps(wanted, indent=2, ensure_ascii=False) + "\n").encode("utf-8")
        self.unit = host.unit_properties(
            UNIT, "LoadState", "ActiveState", "UnitFileState", "ExecMainStartTimestampMonotonic"
        )
        start = host.started_at(self.unit)
        if start is not None and self.after != self.before:
            self.reasons.append(f"{self.path} changes")
        self.reasons += [f"{path} is newer than the running daemon" for path in host.newer_than(start, self.newer)]

    @property
    def runs(self) -> bool:
        return host.started_at(self.unit) is not None

    @property
    def enabled(self) -> bool:
        return self.unit.get("UnitFileState") in ("enabled", "enabled-runtime", "static", "indirect")

    @property
    def changed(self) -> bool:
        return self.after != self.before or bool(self.reasons) or not self.runs or not self.enabled

    def diff(self) -> list[dict[str, Any]]:
        shown = [text_diff(self.path, self.before, self.after)] if self.after != self.before else []
        if self.reasons or not self.runs or not self.enabled:
            now = "running, enabled" if self.enabled else "running, not enabled"
            shown.append(
                {
                    "before_header": UNIT,
                    "after_header": UNIT,
                    "before": (now if self.runs else "not running") + "\n",
                    "after": "running, enabled"
                    + (f"; restarted, because {'; '.join(self.reasons)}" if self.reasons else "")
                    + "\n",
                }
            )
        return shown

    def validate(self, version: str) -> None:
        """What the daemon itself says of the new configuration, where it can be asked."""
        if self.after == self.before or self.after is None or not host.at_least(version, VALIDATE_SINCE):
            return
        with tempfile.TemporaryDirectory() as directory:
            candidate = os.path.join(directory, "daemon.json")
            with open(candidate, "wb") as stream:
                stream.write(self.after)
            status, output = host.run([str(self.program), "--validate", "--config-file", candidate])
        if status != 0:
            raise host.DockerError(f"{self.path}: Docker {version} refuses the merged configuration: {output.strip()}")

    def servers(self) -> list[str]:
        """Inference containers that a restart would end."""
        if not self.runs:
            return []
        return sorted(found["Names"][0].lstrip("/") for found in self.docker.containers())

    def refuse_under_load(self, maintenance: bool) -> str | None:
        """What a restart does to running servers; an error when nobody has agreed to it."""
        servers = self.servers() if self.reasons else []
        if not servers:
            return None
        why = "; ".join(self.reasons)
        names = ", ".join(servers)
        if not maintenance:
            raise host.DockerError(
                f"Docker must be restarted ({why}), and {names} is serving: its requests would be cut off and its "
                "weights "
                "loaded again. Nothing was changed. Run again with docker_engine_maintenance: true when that may "
                "happen, "
                "or stop the server first: systemctl stop " + " ".join(unit_of(server) for server in servers)
            )
        return f"Docker restarts ({why}); {names} restarts with it and is away until its weights are loaded again"

    def apply(self) -> bool:
        """Put the configuration in place and bring the daemon into its state; whether it was restarted.

        When the daemon does not start, the old configuration is put back and started again.
        """
        if self.after != self.before and self.after is not None:
            os.makedirs(os.path.dirname(self.path), mode=0o755, exist_ok=True)
            StagedFile(self.path, self.after, 0o644).put()
        if not self.enabled:
            self._systemctl("enable", UNIT)
        if not self.reasons and self.runs:
            return False
        try:
            self._systemctl("restart", UNIT)
        except host.DockerError as error:
            if self.after == self.before:
                raise
            back = self._put_back()
            raise host.DockerError(f"{error}\n{back}") from None
        self.docker.info()
        return bool(self.reasons)

    def _put_back(self) -> str:
        if self.before is None:
            os.unlink(self.path)
        else:
            StagedFile(self.path, self.before, 0o644).put()
        if not self.runs:
            return f"{self.path} is as it was."
        host.run(["systemctl", "reset-failed", UNIT])
        status, _ = host.run(["systemctl", "restart", UNIT], timeout=600)
        outcome = "runs with it again" if status == 0 else "does not start with it either"
        return f"{self.path} is as it was, and Docker {outcome}."

    def _systemctl(self, *words: str) -> None:
        began = f"@{time.time():.3f}"
        status, output = host.run(["systemctl", *words], timeout=900)
        if status != 0:
            said = "\n".join(engine_log.last_lines(UNIT, lines=15, since=began))
            raise host.DockerError(f"systemctl {' '.join(words)}: {output.strip()}\nDocker's last lines:\n{said}")


def unit_of(container: str) -> str:
    return "gpt-oss@" + container[len("gpt-oss-") :] if container.startswith("gpt-oss-") else container
