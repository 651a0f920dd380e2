"""From a plan to the files of a host's engine processes; and what on a host stands in a plan's way."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError

from serving_catalog.docker import (
    Layout,
    cache_directories,
    docker_run,
    host_environment,
    options_text,
    process_from_data,
)
from serving_catalog.plans import Process, image_key

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def server_files(plan: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """{files: entries of file_set, processes: [{name, plan}], engine_cache: name of the image's compile caches}.

    Settings are as roles/inference_server/vars/main.yml has them.
    """
    _check_address(settings["publish_address"])
    files: list[dict[str, Any]] = []
    processes = []
    for data in plan["processes"]:
        process = process_from_data(data).model_copy(
            update={"image": settings["image"], "stop_timeout_seconds": settings["stop_timeout_seconds"]}
        )
        made, plan_hash = _files_of(process, settings, plan["model"])
        files += made
        processes.append({"name": process.name, "plan": plan_hash})
    return {
        # Processes share directories of the cache; each is named once.
        "files": list({entry["path"]: entry for entry in files}.values()),
        "processes": processes,
        "engine_cache": image_key(settings["image"]),
    }


def server_stops(plan: Mapping[str, Any]) -> list[dict[str, str]]:
    """Entries of unit_set that stop every process of a plan; first what watches over them, and would restart them."""
    names = [str(process["name"]) for process in plan["processes"]]
    units = [f"gpt-oss-watchdog@{name}.timer" for name in names] + [f"gpt-oss@{name}.service" for name in names]
    return [{"name": unit, "state": "stopped"} for unit in units]


def _files_of(
    process: Process, settings: Mapping[str, Any], model: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], str]:
    label = ("--label", f"gpt-oss.process={process.name}")
    # What it prints goes to the journal; a second copy stays small, for those who type docker logs.
    logs = ("--log-driver=local", "--log-opt=max-size=20m", "--log-opt=max-file=2")
    layout = Layout(
        cache_directory=settings["cache_directory"],
        configuration_directory=settings["configuration_directory"],
        publish_address=settings["publish_address"],
        gpu_access=settings["gpu_access"],
        container_name=f"gpt-oss-{process.name}",
        ulimits=settings["ulimits"] or None,
        extra_flags=(*label, *logs),
    )
    options = options_text(process)
    environment = _environment(process, settings["environment"])
    # The engine is told the model's name alone; which revision that is, refs/main says when it starts.
    weights = [model["repository"], model["revision"]]
    made_of = [docker_run(process, layout), options, environment, settings["unit"], weights]
    plan_hash = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
    labelled = layout.model_copy(update={"extra_flags": (*layout.extra_flags, "--label", f"gpt-oss.plan={plan_hash}")})
    directory = f"{settings['configuration_directory']}/processes/{process.name}"
    caches = cache_directories(process, layout)
    above = sorted({parent for path in caches.values() for parent in _between(settings["cache_directory"], path)})
    return [
        *({"path": path, "state": "directory"} for path in (*above, *caches.values())),
        {"path": directory, "state": "directory", "mode": "0755"},
        {"path": f"{directory}/{process.options_file_name}", "content": options, "mode": "0644"},
        {"path": f"{directory}/environment", "content": environment, "mode": "0600", "sensitive": True},
        {
            "path": f"{directory}/start",
            "content": _script(process, docker_run(process, labelled)),
            "mode": "0755",
        },
        {"path": f"{directory}/process.json", "content": _description(process, settings, model), "mode": "0644"},
    ], plan_hash


def _environment(process: Process, extra: Mapping[str, Any]) -> str:
    for name, value in extra.items():
        where = f"inference_server_environment.{name}"
        if not _NAME.fullmatch(str(name)):
            raise AnsibleFilterError(
                f"{where}: is not the name of an environment variable (letters, digits, underscore)"
            )
        if not isinstance(value, str):
            raise AnsibleFilterError(f"{where}: {value!r} is not text; write it in quotes")
        if "\n" in value:
            raise AnsibleFilterError(f"{where}: has more than one line, which docker's --env-file cannot carry")
        if name in host_environment(process):
            raise AnsibleFilterError(f"{where}: is set by the role itself, to what fits the host; remove it")
        if name in process.environment:
            raise AnsibleFilterError(
                f"{where}: is set by the plan, too (serving_set environment.{name}); set it in one place"
            )
    variables = {**process.environment, **extra}
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def _script(process: Process, words: Sequence[str]) -> str:
    """The command as a script, one flag a line: readable, and the same when run by hand."""
    command = "docker run"
    for word in words[2:]:
        starts_a_line = word.startswith("-") or word == process.image
        command += (" \\\n  " if starts_a_line else " ") + shlex.quote(word)
    return f"#!/bin/sh\n# Ansible managed. Engine process {process.name}, in the foreground.\nexec {command}\n"


def _description(process: Process, settings: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """What the check before a start and the watchdog need to know."""
    root = f"{settings['cache_directory']}/weights/models--{model['repository'].replace('/', '--')}"
    described = {
        "container": f"gpt-oss-{process.name}",
        "unit": f"gpt-oss@{process.name}.service",
        "gpus": list(process.gpus),
        "gpu_access": settings["gpu_access"],
        "marker": f"{root}/verified/{model['revision']}.json",
        "snapshot": f"{root}/snapshots/{model['revision']}",
        "address": _reachable(settings["publish_address"]),
        "port": process.port,
        "health_path": process.health_path,
        "model": process.served_model_id,
        "watchdog": settings["watchdog"],
    }
    return json.dumps(described, indent=2) + "\n"


def _between(root: str, path: str) -> list[str]:
    """Directories below `root` and above `path`."""
    parts = path[len(root) + 1 :].split("/")
    return ["/".join((root, *parts[:depth])) for depth in range(1, len(parts))]


def _check_address(address: Any) -> None:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise AnsibleFilterError(
            f"inference_server_publish_address: {address!r} is not an IP address. Allowed: 127.0.0.1 (this host "
            "only), an "
            "address of the host, 0.0.0.0 (every address)"
        ) from None


def _reachable(address: str) -> str:
    """Where the host itself reaches what is published on `address`."""
    parsed = ipaddress.ip_address(address)
    if parsed.is_unspecified:
        parsed = ipaddress.ip_address("127.0.0.1" if parsed.version == 4 else "::1")
    return str(parsed)


# -- before anything is changed ----------------------------------------------------------------------------------


def server_obstacles(survey: Mapping[str, Any], plan: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Everything on the host that keeps the plan from being served, each with its remedy. Empty means: go ahead."""
    found = _in_the_way(survey, plan, settings["publish_address"])
    machine = survey["architecture"]["machine"]
    if machine not in plan["image_architectures"]:
        found.append(
            f"{plan['image']} is published for {', '.join(plan['image_architectures'])}, this host is {machine}; "
            "choose a "
            "release (serving_release) that is published for it"
        )
    weights = survey["weights"]
    if not weights["marker_present"] or weights["problems"]:
        why = "; ".join(weights["problems"][:3]) or f"{weights['marker']} is not there"
        found.append(f"weights are missing or were never verified: {why}. Run playbooks/weights.yml")
    return found + _docker_obstacles(survey, settings)


def _docker_obstacles(survey: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    docker = survey["docker"]
    if not docker["running"]:
        state = f"does not answer ({docker['error']})" if docker["installed"] else "is absent"
        return [f"Docker {state}; run playbooks/prepare.yml --tags docker_engine"]
    version, minimum = str(docker["version"]), settings["minimum_docker"]
    if _numbers(version) < _numbers(minimum):
        return [
            f"Docker {version} is too old; {minimum} or newer is needed. Run playbooks/prepare.yml --tags docker_engine"
        ]
    access = settings["gpu_access"]
    if access == "cdi" and not (docker["cdi"]["enabled"] and survey["toolkit"]["cdi_devices"]):
        what = "lists no GPU" if docker["cdi"]["enabled"] else f"cannot be used with Docker {version}"
        return [
            f"inference_server_gpu_access: cdi, but CDI {what}; run playbooks/prepare.yml --tags "
            "nvidia_container_toolkit"
        ]
    if access == "gpus" and not survey["toolkit"]["runtime_hook"]:
        return [
            "containers get no GPUs: neither a CDI specification nor nvidia-container-runtime-hook is there; run "
            "playbooks/prepare.yml --tags nvidia_container_toolkit"
        ]
    return []


def _in_the_way(survey: Mapping[str, Any], plan: Mapping[str, Any], address: str) -> list[str]:
    """Ports that something else than our own containers holds, on an address that we need."""
    containers = [container for container in survey["docker"]["containers"] if container["state"] == "running"]
    ours = {port for container in containers for port in container["ports"]}
    found = []
    for port in sorted({process["port"] for process in plan["processes"]} - ours):
        bound = survey["ports"].get(str(port)) or {}
        blocking = [at for at in bound.get("addresses") or [] if _excludes(at, address)]
        if blocking:
            holder = bound.get("unit") or bound.get("process") or "something"
            found.append(
                f"serving_port: {port} is taken: {holder} listens on {', '.join(blocking)}. Stop it, or choose "
                "another serving_port"
            )
    return found


def _excludes(bound: str, wanted: str) -> bool:
    """Whether a socket bound to one address keeps another from being bound on the same port."""
    first, second = ipaddress.ip_address(bound), ipaddress.ip_address(wanted)
    if isinstance(first, ipaddress.IPv6Address) and first.ipv4_mapped:
        first = first.ipv4_mapped
    return first == second or first.is_unspecified or second.is_unspecified


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.split("+")[0])][:3]


class FilterModule:
    """Ansible's way to find filters."""

    def filters(self) -> dict[str, Any]:
        return {"server_files": server_files, "server_obstacles": server_obstacles, "server_stops": server_stops}
