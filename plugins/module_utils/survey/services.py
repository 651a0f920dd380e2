"""systemd units, Docker and its containers, the container toolkit, the engine's last words."""

from __future__ import annotations

import http.client
import json
import os
import re
from typing import Any

from ansible.module_utils.gpt_oss.docker_host import Docker, DockerError

from .host import Host, key_values, names, read

_UNIT_FIELDS = {
    "Id": "id",
    "LoadState": "load_state",
    "ActiveState": "active_state",
    "SubState": "sub_state",
    "UnitFileState": "unit_file_state",
    "Result": "result",
    "ExecMainStatus": "exit_status",
    "NRestarts": "restarts",
    "NeedDaemonReload": "need_daemon_reload",
    "ActiveEnterTimestamp": "active_since",
    "FragmentPath": "file",
}
# Written as they are given out, so that a log can be shown to anybody.
_SECRET = re.compile(r"hf_[A-Za-z0-9]{6,}|(?<=Bearer )[A-Za-z0-9._~+/=-]{8,}")


def units(host: Host, wanted: list[str]) -> dict[str, dict[str, Any]]:
    if not wanted:
        return {}
    answer = host.ask("systemctl", "show", "--no-pager", "--property=" + ",".join(_UNIT_FIELDS), "--", *wanted)
    if answer is None or answer.rc != 0:
        return {}
    found = {}
    for name, block in zip(wanted, answer.out.strip("\n").split("\n\n")):
        told = key_values(block)
        facts: dict[str, Any] = {key: told.get(field) or None for field, key in _UNIT_FIELDS.items()}
        facts["restarts"] = int(facts["restarts"]) if (facts["restarts"] or "").isdigit() else None
        facts["need_daemon_reload"] = facts["need_daemon_reload"] == "yes"
        found[name] = facts
    return found


def logs(host: Host, wanted: list[str], lines: int) -> dict[str, list[str]]:
    """The last lines of each unit's journal, without tokens."""
    found = {}
    for unit in wanted:
        answer = host.ask("journalctl", "--no-pager", "--output=short-iso", f"--lines={lines}", "--unit=" + unit)
        text = answer.out if answer is not None and answer.rc == 0 else ""
        found[unit] = [_SECRET.sub("***", line) for line in text.splitlines() if not line.startswith("-- ")]
    return found


# --- Docker ------------------------------------------------------------------------------------------------------


def docker(host: Host, prefix: str, probe: bool, record: str) -> dict[str, Any]:
    """Docker, the image on `record`, and containers named `prefix`…; `probe` asks those for their GPUs."""
    client = host.tool("docker")
    facts: dict[str, Any] = {
        "installed": host.tool("dockerd") is not None,  # a client alone is not Docker
        "client": client,
        "running": False,
        "error": None,
        "version": None,
        "data_root": None,
        "storage_driver": None,
        "cgroup_driver": None,
        "default_runtime": None,
        "runtimes": [],
        "live_restore": None,
        "cdi": {"enabled": None, "directories": []},
        "configuration": _daemon_json(host),
        "images": [],
        "recorded_image": _recorded_image(host, record),
        "image_directory": None,
        "containers": [],
    }
    path = host.root("/var/run/docker.sock")
    if not os.path.exists(path):
        path = host.root("/run/docker.sock")
    if not os.path.exists(path):
        return facts
    facts["installed"] = True
    daemon = Docker(path, timeout=20)
    try:
        told = daemon.get("/info")
        listed = daemon.get("/containers/json?all=1")
        images = daemon.get("/images/json")
        facts.update(
            {
                "running": True,
                "version": told.get("ServerVersion"),
                "data_root": told.get("DockerRootDir"),
                "storage_driver": told.get("Driver"),
                "cgroup_driver": told.get("CgroupDriver"),
                "default_runtime": told.get("DefaultRuntime"),
                "runtimes": sorted(told.get("Runtimes") or {}),
                "live_restore": told.get("LiveRestoreEnabled"),
                "cdi": {
                    "enabled": bool(told.get("CDISpecDirs")),
                    "directories": told.get("CDISpecDirs") or [],
                },
                "images": sorted(
                    {name for image in images for key in ("RepoTags", "RepoDigests") for name in image.get(key) or []}
                ),
                "image_directory": _image_directory(told),
                "containers": [
                    _container(daemon, entry, probe)
                    for entry in listed
                    if any(name.lstrip("/").startswith(prefix) for name in entry.get("Names") or [])
                ],
            }
        )
    except (DockerError, OSError, ValueError, http.client.HTTPException) as error:
        facts["error"] = f"{path}: {error}"
    return facts


def _image_directory(told: dict[str, Any]) -> str | None:
    """Where images lie: Docker's own directory, or containerd's where its image store is in use."""
    if any("io.containerd.snapshotter" in str(value) for pair in told.get("DriverStatus") or [] for value in pair):
        return "/var/lib/containerd"
    directory: str | None = told.get("DockerRootDir")
    return directory


def _recorded_image(host: Host, path: str) -> dict[str, Any] | None:
    """Under which name the host has its engine's image, and what containers are started from."""
    try:
        record = json.loads(read(host.root(path)) or "null")
        return {"name": str(record["name"]), "reference": str(record["reference"])}
    except (ValueError, KeyError, TypeError):
        return None


def _daemon_json(host: Host) -> Any:
    text = read(host.root("/etc/docker/daemon.json"))
    try:
        return json.loads(text) if text and text.strip() else None
    except ValueError as error:
        return {"error": str(error)}


def _container(daemon: Docker, entry: dict[str, Any], probe: bool) -> dict[str, Any]:
    told = daemon.get("/containers/{}/json".format(entry["Id"]))
    state = told.get("State") or {}
    asked = told.get("HostConfig") or {}
    requests = asked.get("DeviceRequests") or []
    facts: dict[str, Any] = {
        "name": (told.get("Name") or "").lstrip("/"),
        "id": entry["Id"][:12],
        "image": (told.get("Config") or {}).get("Image"),
        "image_id": told.get("Image"),
        "labels": (told.get("Config") or {}).get("Labels") or {},
        "state": state.get("Status"),
        "exit_code": state.get("ExitCode"),
        "out_of_memory": state.get("OOMKilled"),
        "error": state.get("Error") or None,
        "started_at": state.get("StartedAt"),
        "restart_count": told.get("RestartCount"),
        "ports": sorted({port["PublicPort"] for port in entry.get("Ports") or [] if port.get("PublicPort")}),
        "gpu_requests": [
            {
                "driver": request.get("Driver") or "",
                "count": request.get("Count"),
                "devices": request.get("DeviceIDs") or [],
            }
            for request in requests
        ],
        "runtime": asked.get("Runtime"),
        "gpus_seen": None,
        "gpu_probe": None,
    }
    if probe and facts["state"] == "running":
        facts["gpus_seen"], facts["gpu_probe"] = _gpus_inside(daemon, entry["Id"])
    return facts


def _gpus_inside(daemon: Docker, container: str) -> tuple[list[str] | None, str]:
    """What the container's own nvidia-smi lists; (None, why) where it cannot be asked."""
    wanted = {"AttachStdout": True, "AttachStderr": True, "Tty": True, "Cmd": ["nvidia-smi", "--list-gpus"]}
    created = json.loads(daemon.post(f"/containers/{container}/exec", wanted))
    said = daemon.post("/exec/{}/start".format(created["Id"]), {"Detach": False, "Tty": True})
    code = daemon.get("/exec/{}/json".format(created["Id"])).get("ExitCode")
    if code in (126, 127):
        return None, "the container has no nvidia-smi"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if code != 0:
        return [], lines[0] if lines else f"nvidia-smi ended with {code}"
    return [line for line in lines if line.startswith("GPU ")], "asked"


# --- container toolkit -------------------------------------------------------------------------------------------


def toolkit(host: Host) -> dict[str, Any]:
    version = host.ask("nvidia-ctk", "--version")
    match = re.search(r"version (\S+)", version.out) if version is not None else None
    facts: dict[str, Any] = {
        "path": host.tool("nvidia-ctk"),
        "version": match.group(1) if match else None,
        "runtime_hook": host.tool("nvidia-container-runtime-hook"),
        "cdi_devices": [],
        "cdi_error": None,
        "cdi_specifications": _specifications(host),
    }
    if version is not None:
        listed = host.ask("nvidia-ctk", "cdi", "list")
        if listed is not None and listed.rc == 0:
            facts["cdi_devices"] = [line.strip() for line in listed.out.splitlines() if "/gpu=" in line]
        elif listed is not None:
            facts["cdi_error"] = listed.complaint
    return facts


def _specifications(host: Host) -> list[dict[str, Any]]:
    """CDI specifications of GPUs, with the driver version whose files they hand to containers."""
    found = []
    seen = set()
    for directory in ("/etc/cdi", "/var/run/cdi", "/run/cdi"):
        real = os.path.realpath(host.root(directory))
        if real in seen:
            continue
        seen.add(real)
        for name in names(real):
            text = read(os.path.join(real, name)) if name.endswith((".yaml", ".json")) else None
            if text and "nvidia.com/gpu" in text:
                versions = sorted(set(re.findall(r"lib(?:cuda|nvidia-ml)\.so\.(\d+\.\d+(?:\.\d+)?)", text)))
                found.append({"path": directory + "/" + name, "driver_versions": versions})
    return found
