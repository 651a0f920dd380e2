"""Runs a rendered Job's pod as processes of this machine: the containers' own command, arguments and environment.

What a kubelet adds is added here, and no more: mounts become directories, a Secret's key becomes a variable, the
group of the volumes is the pod's fsGroup, and as root the processes run as the pod's user. This machine's Python
stands in for the image's; nothing else of this machine's environment is seen.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from serving_catalog.graphs.objects import ConfigMap, Container, Job, PodSpec

Secrets = Mapping[str, Mapping[str, str]]


class ContainerConfigError(Exception):
    """What a kubelet reports as CreateContainerConfigError or FailedMount: the container never starts."""


@cache
def image_python(user: int) -> tuple[Path, bool]:
    """The interpreter that stands in for the image's, and whether it can run as another user."""
    if os.geteuid() == 0:
        system = Path("/usr/bin/python3")
        check = "import sys; assert sys.version_info >= (3, 10); import pip"
        tried = subprocess.run([system, "-c", check], user=user, group=user, capture_output=True, check=False)
        if tried.returncode == 0:
            return system, True
    return Path(sys._base_executable), False  # type: ignore[attr-defined]


@dataclass
class Ran:
    """A container that has ended."""

    name: str
    status: int
    stdout: str
    stderr: str

    @property
    def log(self) -> str:
        return self.stdout + self.stderr

    @property
    def last_line(self) -> str:
        return self.stdout.strip().splitlines()[-1] if self.stdout.strip() else ""


@dataclass
class Pod:
    """One pod of a Job. `claims` and `empty` are the directories that volumes are; `empty` is made where it lacks."""

    job: Job
    config_maps: tuple[ConfigMap, ...]
    directory: Path
    claims: Mapping[str, Path]
    secrets: Secrets = field(default_factory=dict)
    empty: dict[str, Path] = field(default_factory=dict)
    replaced: Mapping[str, str] = field(default_factory=dict)  # in arguments: addresses that only a cluster has

    def __post_init__(self) -> None:
        security = self.spec.security_context
        assert security is not None
        assert security.run_as_user is not None
        assert security.run_as_non_root
        self.user = security.run_as_user
        self.python, self.as_user = image_python(self.user)
        self.volumes = {volume.name: self._directory(volume.name) for volume in self.spec.volumes}
        image = self.directory / "image"
        image.mkdir(parents=True, exist_ok=True)
        for name in ("python3", "python"):
            if not (image / name).exists():
                (image / name).symlink_to(self.python)
        if self.as_user:
            for path in self.volumes.values():
                os.chown(path, -1, security.fs_group or -1)
                path.chmod(0o2775)

    @property
    def spec(self) -> PodSpec:
        return self.job.spec.template.spec

    def _directory(self, name: str) -> Path:
        volume = next(volume for volume in self.spec.volumes if volume.name == name)
        if volume.persistent_volume_claim is not None:
            return self.claims[volume.persistent_volume_claim.claim_name]
        path = self.empty.get(name, self.directory / name)
        path.mkdir(parents=True, exist_ok=True)
        if volume.config_map is not None:
            wanted = volume.config_map.name
            found = [entry for entry in self.config_maps if entry.name == wanted]
            if not found:
                raise ContainerConfigError(f'configmap "{wanted}" not found')
            for key, text in found[0].data.items():
                (path / key).write_text(text)
        else:
            assert volume.empty_dir is not None
        return path

    def run(self, seconds: float = 300) -> list[Ran]:
        """Every container in its order, until one fails."""
        ran: list[Ran] = []
        for container in (*self.spec.init_containers, *self.spec.containers):
            ran.append(self.run_container(container, seconds))
            if ran[-1].status != 0:
                break
        return ran

    def run_container(self, container: Container, seconds: float = 300) -> Ran:
        process = self.start(container)
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            raise AssertionError(f"{container.name} did not end within {seconds} s:\n{stdout}\n{stderr}") from None
        self._assert_nothing_read_only_was_changed(container)
        return Ran(container.name, process.returncode, stdout, stderr)

    def start(self, container: Container) -> subprocess.Popen[str]:
        assert container.security_context is not None
        assert container.security_context.read_only_root_filesystem
        self._before = {name: _state(self.volumes[name]) for name in self._read_only(container)}
        paths = {mount.mount_path: self.volumes[mount.name] for mount in container.volume_mounts}
        command = [self._mapped(word, paths) for word in (*container.command, *container.args)]
        environment = {"PATH": f"{self.directory / 'image'}:/usr/local/bin:/usr/bin:/bin"}
        environment |= {v.name: self._mapped(self._value(v), paths) for v in container.env}
        process: subprocess.Popen[str] = subprocess.Popen(
            command,
            cwd=self._mapped(container.working_dir or "/", paths),
            env=environment,
            executable=shutil.which(command[0], path=environment["PATH"]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            umask=0o022,
            **({"user": self.user, "group": self.user, "extra_groups": []} if self.as_user else {}),  # type: ignore[call-overload]
        )
        return process

    def _value(self, variable: Any) -> str:
        if variable.value is not None:
            return str(variable.value)
        reference = variable.value_from.secret_key_ref if variable.value_from is not None else None
        if reference is None:
            raise ContainerConfigError(f"{variable.name}: neither a value nor a Secret's key")
        if reference.name not in self.secrets:
            raise ContainerConfigError(f'secret "{reference.name}" not found')
        if reference.key not in self.secrets[reference.name]:
            raise ContainerConfigError(f"couldn't find key {reference.key} in Secret {reference.name}")
        return self.secrets[reference.name][reference.key]

    def _mapped(self, text: str, paths: Mapping[str, Path]) -> str:
        for cluster, here in self.replaced.items():
            text = text.replace(cluster, here)
        either = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
        # A whole path: at the start or after what separates words, and up to a slash or the word's end.
        return re.sub(rf"(?:(?<=^)|(?<=[=:,\"' ]))({either})(?=[/:,\"' ]|$)", lambda m: str(paths[m[1]]), text)

    def _read_only(self, container: Container) -> list[str]:
        writable = {mount.name for mount in container.volume_mounts if not mount.read_only}
        return [mount.name for mount in container.volume_mounts if mount.name not in writable]

    def _assert_nothing_read_only_was_changed(self, container: Container) -> None:
        for name in self._read_only(container):
            assert _state(self.volumes[name]) == self._before[name], f"{container.name} wrote to {name}, read-only"


def _state(path: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) for p in sorted(path.rglob("*")) if not p.is_dir()}
