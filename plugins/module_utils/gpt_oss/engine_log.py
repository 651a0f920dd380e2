"""What an engine's last words mean. Standard library only, Python 3.8 and later."""

from __future__ import annotations

import re
import subprocess
from typing import Any, NamedTuple


class Cause(NamedTuple):
    """A likely cause, and what to do about it."""

    name: str
    title: str
    remedy: str


# The first that matches wins: the specific ones stand before those whose words also appear in other failures.
_CAUSES: tuple[tuple[str, Cause], ...] = (
    (
        r"port is already allocated|address already in use|failed to bind|bind for \S+ failed",
        Cause(
            "port_in_use",
            "the port is in use",
            "find out by whom with ss --listening --tcp --processes --numeric, stop it, or choose another serving_port",
        ),
    ),
    (
        r"weights are missing|not verified|weights of \S+ are|is not a local folder|LocalEntryNotFoundError"
        r"|outgoing traffic has been disabled|cannot find the requested files in the (disk|local) cache"
        r"|does not appear to have a file named|No such file or directory: .*(safetensors|config\.json)",
        Cause(
            "missing_weights",
            "weights are missing from the model cache",
            "fill the cache with playbooks/weights.yml, and check that model_cache_directory is the same for all roles",
        ),
    ),
    (
        r"could not select device driver|unresolvable CDI devices|CDI device injection failed"
        r"|unknown or invalid runtime|nvidia-container-cli: "
        r"|nvidia-container-runtime-hook|failed to inject CDI|no CDI specification of"
        r"|libcuda\.so\.1: cannot open",
        Cause(
            "missing_toolkit",
            "containers get no GPUs: the NVIDIA Container Toolkit or its CDI specification is missing or stale",
            "run playbooks/prepare.yml --tags docker_engine,nvidia_container_toolkit",
        ),
    ),
    (
        r"out of memory|OutOfMemoryError|cudaErrorMemoryAllocation|Cannot allocate memory"
        r"|No available memory for the cache"
        r"|less than desired GPU memory utilization|(exit|status)[ =]+(code )?137|Killed process",
        Cause(
            "out_of_memory",
            "memory ran out, on a GPU or on the host",
            "see who uses the GPUs (nvidia-smi), then lower the KV cache's share with serving_set: "
            "{kv_cache_memory_fraction: 0.7}, or the batch; docs/runbooks/out-of-memory.md",
        ),
    ),
    (
        r"No such option|unrecognized arguments|Extra inputs are not permitted|unexpected keyword argument"
        r"|invalid choice"
        r"|Input should be|is not a valid|Invalid value for|validation errors? for|got an unexpected extra argument"
        r"|ambiguous option",
        Cause(
            "unknown_option",
            "the engine does not know an option, or not this value of it",
            "compare serving_set with python -m serving_catalog plan; an option may belong to another release "
            "(serving_release)",
        ),
    ),
    (
        r"manifest unknown|No such image|pull access denied|exec format error|executable file not found"
        r"|Unable to find image|exec \S+ failed: No such file"
        r"|no matching manifest|image operating system|does not match the detected host platform",
        Cause(
            "bad_image",
            "the image is missing, for another machine, or not this engine's",
            "run playbooks/serve.yml --tags inference_server to have it again; check serving_release and "
            "inference_server_image_registry",
        ),
    ),
    (
        r"cannot assign requested address",
        Cause(
            "publish_address",
            "the host has no such address to publish on",
            "set serving_publish_address to an address of the host, 127.0.0.1 or 0.0.0.0",
        ),
    ),
    (
        r"error setting rlimit|operation not permitted.*rlimit",
        Cause(
            "limits",
            "the host does not allow the container's limits",
            "set inference_server_ulimits to what the host allows, such as {stack: 67108864}",
        ),
    ),
    (
        r"CUDA error.*(802|803|804)|system not yet initialized|unsupported display driver|forward compatibility"
        r"|driver/library version mismatch|no CUDA-capable device|Failed to initialize NVML",
        Cause(
            "driver",
            "the driver, its library or the fabric is not ready",
            "run playbooks/diagnose.yml; docs/runbooks/fabric-not-completed.md and driver-library-mismatch.md",
        ),
    ),
    (
        r"No space left on device",
        Cause(
            "disk_full",
            "the disk is full",
            "free space below the model cache and Docker's root; docs/runbooks/disk-full.md",
        ),
    ),
)


def likely_cause(text: str) -> Cause | None:
    """The likely cause that an engine's log, or Docker's own words, point to."""
    for pattern, cause in _CAUSES:
        if re.search(pattern, text, flags=re.IGNORECASE):
            return cause
    return None


def last_lines(unit: str, lines: int = 40, since: str | None = None) -> list[str]:
    """The unit's last journal lines, without times and names."""
    # What a program says just before it ends is still on its way.
    subprocess.run(["journalctl", "--sync"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    command = ["journalctl", "--unit", unit, "--output", "cat", "--no-pager", "--lines", str(lines)]
    command += ["--since", since] if since else []
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False
    )
    return [line for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]


def failure(unit: str, what: str, lines: list[str]) -> dict[str, Any]:
    """A failed start, as a message for people and as data."""
    cause = likely_cause("\n".join(lines))
    said = "\n".join(f"  {line}" for line in lines[-20:]) or "  (nothing)"
    message = f"{unit} {what}."
    if cause:
        message += f" Likely cause: {cause.title}. What to do: {cause.remedy}."
    return {
        "msg": f"{message}\nThe engine's last lines:\n{said}",
        "unit": unit,
        "cause": cause.name if cause else None,
        "log": lines,
    }
