"""Why an engine ended, as far as its last lines tell."""

from __future__ import annotations

import re
from collections.abc import Sequence

# In order: the first that matches is the most specific. (pattern, cause, remedy)
_CAUSES = tuple(
    (re.compile(pattern, re.IGNORECASE), cause, remedy)
    for pattern, cause, remedy in (
        (
            r"cuda out of memory|outofmemoryerror|cudaerrormemoryallocation|no available memory for the cache blocks|"
            r"free memory on device .* less than desired",
            "out of GPU memory",
            "Lower the KV-cache fraction or the batch size with serving_set, and see what else uses the GPU "
            "(nvidia-smi): "
            "docs/runbooks/out-of-memory.md.",
        ),
        (
            r"oom-kill|out of memory: killed|OOMKilled",
            "out of host memory",
            "The kernel ended it: weights pass through memory while they load. Free memory, or use fewer processes.",
        ),
        (
            r"address already in use|port is already allocated|failed to bind host port",
            "port taken",
            "Stop what listens there or set serving_port: docs/runbooks/port-in-use.md.",
        ),
        (
            r"driver/library version mismatch",
            "driver and library differ",
            "Reboot, or install the running version again: docs/runbooks/driver-library-mismatch.md.",
        ),
        (
            r"error 802|cudaerrorsystemnotready|system not yet initialized",
            "NVLink fabric not completed",
            "The fabric manager (and NVLSM) must bring every GPU to Completed: docs/runbooks/fabric-not-completed.md.",
        ),
        (
            r"error 803|unsupported display driver / cuda driver combination",
            "the image's CUDA compatibility libraries hide the host's newer ones",
            "Use a container toolkit of 1.19 or newer, which chooses between them.",
        ),
        (
            r"could not select device driver|unresolvable cdi devices|nvidia-container-cli|"
            r"libnvidia-ml\.so.*(not found|cannot open)|unknown or invalid runtime name: nvidia",
            "container toolkit missing or its device list stale",
            "Run playbooks/prepare.yml --tags nvidia_container_toolkit; after a driver change restart "
            "nvidia-cdi-refresh.",
        ),
        (
            r"localentrynotfounderror|offlinemodeisenabled|"
            r"(no such file|not found).*(safetensors|snapshots|config\.json)|does not appear to have a file named",
            "weights missing",
            "Run playbooks/weights.yml: only a verified snapshot is mounted.",
        ),
        (
            r"error downloading or loading vocab file|o200k_base|tiktoken.*(connection|resolve)",
            "Harmony encodings missing",
            "Run playbooks/weights.yml, which brings o200k_base and cl100k_base.",
        ),
        (
            r"unrecognized arguments|no such option|extra inputs are not permitted|got an unexpected "
            "keyword|invalid choice|"
            r"validation error",
            "an option that this release does not know",
            "Remove it from serving_set, or choose the release that knows it (serving_release).",
        ),
        (
            r"manifest unknown|no such image|pull access denied|unable to find image",
            "image missing",
            "Check inference_server_image_registry and the release's image, or load an archive.",
        ),
        (
            r"no space left on device",
            "disk full",
            "docs/runbooks/disk-full.md.",
        ),
        (
            r"xid.*\b(79|fallen off the bus)|fallen off the bus",
            "a GPU fell off the bus",
            "Reboot; a card that does it again is to be replaced.",
        ),
    )
)


def likely_cause(lines: Sequence[str]) -> tuple[str, str] | None:
    """(cause, remedy) of the last line that any cause matches, or None."""
    for line in reversed(lines):
        for pattern, cause, remedy in _CAUSES:
            if pattern.search(line):
                return cause, remedy
    return None


def causes() -> tuple[str, ...]:
    """Every cause that may be named."""
    return tuple(cause for _, cause, _ in _CAUSES)
