"""The `docker run` of a process: the form an operator pastes and the form a systemd unit runs, from one truth."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import yaml

from serving_catalog.entries import Part
from serving_catalog.plans import HostPlan, Process

# In both forms the image's user is root and the cache is where the Hugging Face tools look for it.
PASTE_CACHE = ("~/.cache", "/root/.cache")


class Layout(Part):
    """Where a host keeps what a container mounts, and how it is exposed.

    Without a layout, docker_run gives the paste form.
    """

    cache_directory: str
    configuration_directory: str
    publish_address: str = "127.0.0.1"
    gpu_access: Literal["gpus", "cdi"] = "cdi"
    interactive: bool = False
    init: bool = True
    remove: bool = True
    container_name: str | None = None
    ulimits: Mapping[str, int] | None = None
    extra_environment: Mapping[str, str] = {}
    extra_flags: tuple[str, ...] = ()


def docker_run(
    process: Process | Mapping[str, Any], layout: Layout | Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """The argument vector of `docker run …`, ending with the image and what runs in it."""
    process = process if isinstance(process, Process) else process_from_data(process)
    if layout is None:
        return process.docker_run
    layout = layout if isinstance(layout, Layout) else Layout.model_validate_json(json.dumps(layout))
    configuration = f"{layout.configuration_directory}/processes/{process.name}"
    options = f"{configuration}/{process.options_file_name}:{process.working_directory}/{process.options_file_name}:ro"
    words = ["docker", "run"]
    words += ["--rm"] if layout.remove else []
    words += ["--name", layout.container_name] if layout.container_name else []
    words += ["--init"] if layout.init else []
    words += ["-it"] if layout.interactive else []
    # The image is on the host already, by digest or from an archive: a start asks no registry.
    words += ["--pull=never", f"--ipc={process.ipc}", "--stop-timeout", str(process.stop_timeout_seconds)]
    words += _ulimits(process.ulimits if layout.ulimits is None else layout.ulimits)
    words += _gpus(process.gpus, layout.gpu_access)
    words += ["-p", f"{_bracketed(layout.publish_address)}:{process.port}:{process.container_port}"]
    # Values an operator sets may be secrets: they travel in a file that only root reads, never on the command line.
    words += ["--env-file", f"{configuration}/environment"]
    words += _environment({**host_environment(process), **layout.extra_environment})
    words += ["-v", f"{layout.cache_directory}/weights:{process.weights_container_path}:ro"]
    words += ["-v", f"{layout.cache_directory}/encodings:{process.encodings_container_path}:ro"]
    for name, directory in cache_directories(process, layout).items():
        path = next(cache.container_path for cache in process.caches if cache.name == name)
        words += ["-v", f"{directory}:{path}:rw"]
    words += ["-v", options, "-w", process.working_directory, *layout.extra_flags]
    return (*words, *_image_and_argv(process))


def host_environment(process: Process) -> dict[str, str]:
    """What a container is told of a prepared host: weights and vocabularies are there, nothing is to be fetched."""
    caches = {cache.environment: cache.container_path for cache in process.caches if cache.environment}
    return {"HF_HUB_OFFLINE": "1", "TIKTOKEN_ENCODINGS_BASE": process.encodings_container_path, **caches}


def cache_directories(process: Process, layout: Layout) -> dict[str, str]:
    """Host directories of a process's compile caches, by cache name."""
    root = f"{layout.cache_directory}/engine_caches/{process.image_key}/{process.name}"
    return {cache.name: f"{root}/{cache.name}" for cache in process.caches}


def guide_form(process: Process, whole_host: bool) -> tuple[str, ...]:
    """The guide's own flags in its order, then where the options file is, and the command the guide types inside."""
    words = ["docker", "run", "--rm", f"--ipc={process.ipc}", "-it", *_ulimits(process.ulimits)]
    words += ["--gpus", "all"] if whole_host else _gpus(process.gpus, "gpus")
    words += ["-p", f"{process.port}:{process.container_port}", *_environment(process.environment)]
    words += ["-v", ":".join((*PASTE_CACHE, "rw")), "-w", process.working_directory]
    return (*words, *_image_and_argv(process))


def local_form(process: Process, whole_host: bool) -> tuple[str, ...]:
    """A server to try on one's own machine: reachable from it alone, stopped with Ctrl-C."""
    words = ["docker", "run", "--rm", "--init", f"--ipc={process.ipc}", "-it", *_ulimits(process.ulimits)]
    words += ["--gpus", "all"] if whole_host else _gpus(process.gpus, "gpus")
    words += ["-p", f"127.0.0.1:{process.port}:{process.container_port}", *_environment(process.environment)]
    words += ["-v", ":".join((*PASTE_CACHE, "rw")), "-w", process.working_directory]
    return (*words, *_image_and_argv(process))


def paste(plan: HostPlan) -> str:
    """A script one can paste: it writes every options file where the containers look for it, then starts them."""
    directory = plan.processes[0].working_directory.replace(PASTE_CACHE[1], PASTE_CACHE[0], 1)
    parts = [f"mkdir -p {directory}"]
    several = len(plan.processes) > 1
    written: dict[str, str] = {}
    for process in plan.processes:
        text = options_text(process)
        if written.get(process.options_file_name) != text:
            parts.append(f"cat <<'EOF' > {directory}/{process.options_file_name}\n{text}EOF")
            written[process.options_file_name] = text
        words = list(process.docker_run)
        if several:  # each in the background, or the first would keep the terminal
            words[words.index("-it")] = "-d"
        parts.append(_shell(words))
    return "\n".join(parts) + "\n"


def options_text(process: Process) -> str:
    """The options file's text."""
    return str(yaml.safe_dump(dict(process.options_file), sort_keys=False, default_flow_style=False))


def process_from_data(data: Mapping[str, Any]) -> Process:
    """A process from a plan's JSON."""
    return Process.model_validate_json(json.dumps({key: value for key, value in data.items() if key != "image_key"}))


def _shell(words: Sequence[str]) -> str:
    """One flag a line. `~` stays bare, so that the shell expands it."""
    flags, lines = list(words[2:]), ["docker run"]
    while flags and flags[0].startswith("-"):
        take = 2 if flags[0] in _TAKES_A_VALUE else 1
        lines.append("  " + " ".join(_quoted(word) for word in flags[:take]))
        del flags[:take]
    lines.append("  " + " ".join(_quoted(word) for word in flags))
    return " \\\n".join(lines)


_TAKES_A_VALUE = {"--ulimit", "--gpus", "-p", "-e", "-v", "-w", "--entrypoint", "--device"}


def _quoted(word: str) -> str:
    return f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word)


def _image_and_argv(process: Process) -> tuple[str, ...]:
    if process.entrypoint is None:
        return (process.image, *process.argv)
    return ("--entrypoint", process.entrypoint, process.image, *process.argv[1:])


def _ulimits(ulimits: Mapping[str, int]) -> list[str]:
    return [word for name, value in ulimits.items() for word in ("--ulimit", f"{name}={value}")]


def _environment(environment: Mapping[str, str]) -> list[str]:
    return [word for name, value in environment.items() for word in ("-e", f"{name}={value}")]


def _gpus(gpus: Sequence[int], access: str) -> list[str]:
    if access == "cdi":
        return [word for gpu in gpus for word in ("--device", f"nvidia.com/gpu={gpu}")]
    # The inner quotes are Docker's: the value is CSV, and a bare comma would end it.
    return ["--gpus", f'"device={",".join(map(str, gpus))}"']


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address
