"""Docker as its host sees it: the Engine API over the daemon's socket, versions, what containers may use.

Standard library only, Python 3.8 and later.
"""

from __future__ import annotations

import contextlib
import glob
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import time
from typing import Any
from urllib.parse import quote

SOCKET = "/var/run/docker.sock"
SNAP = "/snap/docker"
LABEL = "gpt-oss.process"
HOOK = "nvidia-container-runtime-hook"
CDI_DIRECTORIES = ("/etc/cdi", "/var/run/cdi")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class DockerError(Exception):
    """Docker cannot do what was asked; the text says why and what to do."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Docker:
    """The Engine API of the host's own daemon."""

    def __init__(self, socket_path: str = SOCKET, timeout: float = 60) -> None:
        self.socket_path = socket_path
        self.timeout = timeout  # seconds for a question; `open` has its own

    def open(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout: float | None = 60,
    ) -> http.client.HTTPResponse:
        """The response, once its status says that all is well."""
        connection = _SocketConnection(self.socket_path, timeout)
        try:
            # A daemon that has seen enough of a body answers without reading the rest of it.
            with contextlib.suppress(BrokenPipeError):
                connection.request(method, path, body=body, headers=headers or {})
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise DockerError(f"Docker does not answer on {self.socket_path}: {error}") from error
        if response.status >= 400:
            text = response.read().decode("utf-8", "replace")
            with contextlib.suppress(ValueError):
                text = str(json.loads(text)["message"])
            raise DockerError(text.strip(), response.status)
        return response

    def get(self, path: str, headers: dict[str, str] | None = None) -> Any:
        return json.loads(self.open("GET", path, headers=headers, timeout=self.timeout).read() or b"null")

    def post(self, path: str, body: dict[str, Any]) -> str:
        """What the daemon answers to a question that has a body."""
        kind = {"Content-Type": "application/json"}
        return self.open("POST", path, json.dumps(body), kind, self.timeout).read().decode("utf-8", "replace")

    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/info")
        return found

    def image(self, reference: str) -> dict[str, Any] | None:
        """An image that is on the host, by name, digest or id; None when it is not."""
        try:
            found: dict[str, Any] = self.get(f"/images/{quote(reference, safe='/:@')}/json")
        except DockerError as error:
            if error.status == 404:
                return None
            raise
        return found

    def containers(self, label: str = LABEL, everything: bool = False) -> list[dict[str, Any]]:
        filters = quote(json.dumps({"label": [label]}))
        found: list[dict[str, Any]] = self.get(f"/containers/json?all={int(everything)}&filters={filters}")
        return found


def messages(response: http.client.HTTPResponse) -> Any:
    """The JSON messages of a pull or load, one by one, as they arrive; an error among them is raised."""
    for line in response:
        if not line.strip():
            continue
        try:
            message = json.loads(line)
        except ValueError:
            raise DockerError(line.decode("utf-8", "replace").strip()) from None
        if "error" in message:
            raise DockerError(str(message["error"]).strip())
        yield message


# -- versions ----------------------------------------------------------------------------------------------------


def version_key(version: str) -> tuple[int, ...]:
    """20.10.24+dfsg1, 5:29.8.2-1~debian and 1.19.1-1 alike, as the numbers of the upstream version."""
    upstream = re.split(r"[-+~]", version.split(":", 1)[-1])[0]
    return tuple(int(part) for part in re.findall(r"\d+", upstream))


def at_least(version: str, minimum: str) -> bool:
    return version_key(version) >= version_key(minimum)


# -- what is installed -------------------------------------------------------------------------------------------


def run(command: list[str], timeout: float = 60) -> tuple[int, str]:
    """Exit status and output; 127 when there is no such program."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, check=False)
    except FileNotFoundError:
        return 127, f"{command[0]}: not found"
    except subprocess.TimeoutExpired:
        return 124, f"{' '.join(command)}: no answer within {timeout:g} s"
    return done.returncode, done.stdout.decode("utf-8", "replace")


def snap_docker(snap: str = SNAP) -> bool:
    """Docker from a snap: confined, so it sees neither /etc/docker nor the container toolkit."""
    client = shutil.which("docker")
    return os.path.isdir(snap) or (client is not None and os.path.realpath(client).startswith("/snap/"))


def installed_packages(*patterns: str) -> dict[str, str]:
    """Installed packages and their versions."""
    status, output = run(["dpkg-query", "-W", "-f", "${db:Status-Abbrev}\\t${Package}\\t${Version}\\n", *patterns])
    del status  # 1 when one of the patterns matches nothing
    rows = [line.split("\t") for line in output.splitlines() if line.count("\t") == 2]
    return {name: version for state, name, version in rows if state.startswith("ii")}


def machine() -> str:
    """The machine's architecture as images name it: amd64 or arm64."""
    name = os.uname().machine
    return _ARCHITECTURES.get(name, name)


# -- GPUs in containers ------------------------------------------------------------------------------------------


def cdi_directories(info: dict[str, Any]) -> list[str]:
    """Where this daemon looks for CDI specifications; empty when it does not know CDI or has it switched off."""
    return [str(path) for path in info.get("CDISpecDirs") or []]


def cdi_devices() -> list[str]:
    """Qualified names of the GPUs that a CDI specification on this host describes, as the toolkit lists them."""
    status, output = run(["nvidia-ctk", "cdi", "list"])
    return re.findall(r"^(nvidia\.com/gpu=\S+)$", output, flags=re.MULTILINE) if status == 0 else []


def gpu_indices(devices: list[str]) -> list[int]:
    """The GPUs among CDI devices: nvidia.com/gpu=0, not =all and not =GPU-<uuid>."""
    found = (re.fullmatch(r"nvidia\.com/gpu=(\d+)", device) for device in devices)
    return sorted({int(match.group(1)) for match in found if match})


def cdi_files(directories: list[str]) -> list[str]:
    return sorted(
        path for directory in directories for kind in ("yaml", "json") for path in glob.glob(f"{directory}/*.{kind}")
    )


# -- services ----------------------------------------------------------------------------------------------------


def unit_properties(unit: str, *names: str) -> dict[str, str]:
    """A unit's properties, as `systemctl show` prints them."""
    status, output = run(["systemctl", "show", "--property", ",".join(names), unit])
    if status != 0:
        raise DockerError(f"systemctl show {unit}: {output.strip()}")
    pairs = (line.partition("=") for line in output.splitlines())
    return {name: value for name, _, value in pairs}


def started_at(properties: dict[str, str]) -> float | None:
    """When the unit's main process started, in seconds of the monotonic clock; None when it does not run."""
    if properties.get("ActiveState") not in ("active", "reloading"):
        return None
    return int(properties.get("ExecMainStartTimestampMonotonic") or 0) / 1e6


def changed_at(path: str) -> float | None:
    """When the path's content was last put in place, on the same clock; None when it is not there.

    The inode's change time: packages carry old modification times, but nobody can backdate this one.
    """
    try:
        return os.stat(path).st_ctime - time.time() + time.monotonic()
    except FileNotFoundError:
        return None


def newer_than(start: float | None, paths: list[str]) -> list[str]:
    """Paths that changed after a service started; nothing when it does not run."""
    if start is None:
        return []
    return [path for path in paths for changed in [changed_at(path)] if changed is not None and changed > start]
