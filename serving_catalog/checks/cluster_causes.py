"""Why a pod or a Job failed, as far as its last lines and Kubernetes' own words tell, and the runbook for it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from serving_catalog.checks.causes import likely_cause

RUNBOOKS = {
    name: f"docs/runbooks/kubernetes-{name}.md"
    for name in (
        "not-ready",
        "pvc-pending",
        "download",
        "image-pull",
        "unschedulable",
        "workers-not-discovered",
        "kv-transfer",
        "benchmark",
        "change-release",
        "rotate-token",
        "move-cluster",
        "destroy",
    )
}

Cause = tuple[str, str]  # (cause, remedy)


def _compiled(*rows: tuple[str, str, str]) -> tuple[tuple[re.Pattern[str], str, str], ...]:
    return tuple((re.compile(pattern, re.IGNORECASE), cause, remedy) for pattern, cause, remedy in rows)


# Of a download. In order: the first that matches a line is the most specific.
_DOWNLOAD = _compiled(
    (
        r"refused the token|(status|error|code|HTTP\S*):? 401|401 (client|unauthori)|unauthori[sz]ed"
        r"|invalid (user )?token",
        "the token was refused (401)",
        f"The Secret's token is wrong, expired or revoked: {RUNBOOKS['rotate-token']}.",
    ),
    (
        r"is gated|GatedRepo|(status|error|code|HTTP\S*):? 403|403 (client|forbidden)|access to model .* is restricted",
        "the token may not read the model (403)",
        f"Accept the model's terms with the token's account, or use another token: {RUNBOOKS['rotate-token']}.",
    ),
    (
        r"has no revision|does not exist, or is private|(status|error|code|HTTP\S*):? 404|404 (client|not found)"
        r"|(Entry|Revision|Repository)NotFound",
        "the hub or mirror does not have it (404)",
        "Check the mirror's address (hub_endpoint), and that it has the pinned revision of the model: "
        f"{RUNBOOKS['download']}.",
    ),
    (
        r"(status|error|code|HTTP\S*):? 429|too many requests",
        "the hub asked to slow down (429)",
        f"Set a token, which has a higher limit, or a mirror (hub_endpoint), and run again: {RUNBOOKS['download']}.",
    ),
    (
        r"is too small: \d+ bytes are needed|no space left|the disk filled up|disk quota exceeded",
        "the model cache is full",
        f"Enlarge the claim, or empty staging/ and benchmarks/ on it: {RUNBOOKS['download']}.",
    ),
    (
        r"must be writable|permission denied|read-only file system",
        "the model cache cannot be written",
        f"The volume ignores fsGroup, or is mounted read-only: see who owns its root: {RUNBOOKS['download']}.",
    ),
    (
        r"name or service not known|name resolution|getaddrinfo|failed to resolve|NameResolutionError",
        "a name is not resolved: no way out of the cluster",
        "Set a mirror inside (hub_endpoint, package_index), or let the Job's pods out through the NetworkPolicy or "
        f"proxy: {RUNBOOKS['download']}.",
    ),
    (
        r"certificate verify failed|self.signed certificate",
        "the mirror's certificate is not trusted",
        f"Give the Jobs the CA (job_environment: SSL_CERT_FILE), or use one that is signed: {RUNBOOKS['download']}.",
    ),
    (
        r"cannot be reached|broke off|connection refused|connection reset|timed? ?out|network is unreachable"
        r"|max retries exceeded|(status|error|code|HTTP\S*):? 5\d\d",
        "the hub or mirror is not reached, or breaks off",
        "Check the address (hub_endpoint), proxies (job_environment) and the NetworkPolicy, and run again: a download "
        f"goes on where it stopped: {RUNBOOKS['download']}.",
    ),
    (
        r"is damaged|cut short|sha256 should be|does not answer as a hub|were expected; is there a proxy",
        "what arrives is not what was published",
        f"A mirror or proxy serves other bytes: compare it with the hub and run again: {RUNBOOKS['download']}.",
    ),
)

# Of serving, beyond what causes.py knows of any engine.
_SERVING = _compiled(
    (
        r"intranode_combine|deep_?ep.*(illegal|error)|cudaErrorIllegalAddress",
        "the release's expert communication fails on this GPU (DeepEP)",
        "TRTLLM_FORCE_COMM_METHOD=ALLGATHER must be in the worker's environment; the catalog sets it where the release "
        f"needs it: {RUNBOOKS['change-release']}.",
    ),
    (
        r"max_?tokens_?in_?buffer|getOrAllocateBuffers|cache ?transceiver.*(error|fail|timeout|timed out)"
        r"|kv.?(cache)?.?transfer.*(error|fail|timeout|timed out)|UCX +ERROR|NIXL_ERR|nixl.*(error|fail)",
        "KV cache does not pass from prefill to decode",
        "Longest prompt against max_tokens_in_buffer, the same release on both workers, UCX between their nodes: "
        f"{RUNBOOKS['kv-transfer']}.",
    ),
    (
        r"forbidden.*(dynamoworkermetadatas|endpointslices)|(dynamoworkermetadatas|endpointslices).*forbidden",
        "discovery is not permitted to the pods",
        "The operator's discovery Role and RoleBinding are missing or were changed: "
        f"{RUNBOOKS['workers-not-discovered']}.",
    ),
    (
        r"exec format error",
        "the image is for another processor",
        "GB200 nodes are arm64: use an image with both architectures, or the target for these nodes: "
        f"{RUNBOOKS['image-pull']}.",
    ),
)

# What causes.py finds on any host, and what to do about it where there is no host to log in to.
SERVING_REMEDIES = {
    "out of GPU memory": (
        "Lower the KV cache's share or the batch size with set, and see that nothing else holds the GPU: "
        f"{RUNBOOKS['not-ready']}."
    ),
    "out of host memory": f"Raise the component's memory in resources: {RUNBOOKS['not-ready']}.",
    "port taken": f"Two containers on the host network, or a port in set: {RUNBOOKS['not-ready']}.",
    "driver and library differ": (
        "The node's driver was changed under a running container: restart the pod, or drain and reboot the node: "
        f"{RUNBOOKS['not-ready']}."
    ),
    "NVLink fabric not completed": (
        "The fabric manager (and NVLSM, IMEX) of the node must bring every GPU to Completed: cordon the node and see "
        f"{RUNBOOKS['not-ready']}."
    ),
    "the image's CUDA compatibility libraries hide the host's newer ones": (
        f"Update the node's container toolkit to 1.19 or newer (GPU operator): {RUNBOOKS['not-ready']}."
    ),
    "container toolkit missing or its device list stale": (
        "The GPU operator's toolkit or device plugin is not ready on the node: "
        f"kubectl get pods --namespace gpu-operator --output wide: {RUNBOOKS['not-ready']}."
    ),
    "weights missing": f"The download must complete first, into the same claim: {RUNBOOKS['download']}.",
    "Harmony encodings missing": (
        "The download brings them to encodings/ on the claim, and TIKTOKEN_ENCODINGS_BASE names it: "
        f"{RUNBOOKS['download']}."
    ),
    "an option that this release does not know": (
        f"Remove it from set, or choose the release that knows it: {RUNBOOKS['change-release']}."
    ),
    "image missing": f"Check release, image and image_registry: {RUNBOOKS['image-pull']}.",
    "disk full": f"Enlarge the claim or empty benchmarks/ on it: {RUNBOOKS['download']}.",
    "a GPU fell off the bus": "Cordon the node and have it looked at; a card that does it again is to be replaced.",
}


def download_cause(lines: Sequence[str]) -> Cause | None:
    """What a download's last lines point to."""
    return _first(_DOWNLOAD, lines)


def serving_cause(lines: Sequence[str]) -> Cause | None:
    """What an engine's last lines point to."""
    found = _first(_SERVING, lines)
    if found is not None:
        return found
    known = likely_cause(lines)
    return (known[0], SERVING_REMEDIES[known[0]]) if known is not None else None


def _first(table: Sequence[tuple[re.Pattern[str], str, str]], lines: Sequence[str]) -> Cause | None:
    """The cause of the last line that any matches."""
    for line in reversed(lines):
        for pattern, cause, remedy in table:
            if pattern.search(line):
                return cause, remedy
    return None


def image_cause(message: str) -> str:
    """What the kubelet's words about an image point to."""
    for pattern, cause in (
        (r"\b401\b|unauthori[sz]ed|authentication required|\b403\b|denied|forbidden", "the registry refused the pull"),
        (
            r"no match(ing manifest)? for platform|no matching manifest|exec format",
            "no image for this node's processor",
        ),
        (r"not found|manifest unknown|does not exist|\b404\b", "the registry has no such image"),
        (r"toomanyrequests|\b429\b|rate limit", "the registry limits pulls"),
        (
            r"no such host|i/o timeout|connection refused|deadline exceeded|network is unreachable|TLS|x509",
            "the registry is not reached",
        ),
        (r"no space left", "the node's disk is full"),
        (r"InvalidImageName|couldn't parse image|invalid reference format", "the image's name is not valid"),
    ):
        if re.search(pattern, message, re.IGNORECASE):
            return cause
    return "the image cannot be pulled"
