"""What the Pod Security Standards refuse of the pods that are planned here, as the API server's admission judges it.

    violations(pod_spec, "restricted")  ->  ("main: runAsNonRoot is not true", …)

Judges what a plan's pods can say: security contexts. Their volumes are of kinds that every level admits, and host
namespaces, host ports and privileged containers are nothing that a plan can ask for.
Source: kubernetes.io/docs/concepts/security/pod-security-standards; policy/check_*.go of k8s.io/pod-security-admission.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from serving_catalog.checks.cluster import Thing, containers_of
from serving_catalog.checks.judging import at

Level = Literal["privileged", "baseline", "restricted"]
LEVELS: tuple[Level, ...] = ("privileged", "baseline", "restricted")  # each admits less than the one before
ENFORCE_LABEL = "pod-security.kubernetes.io/enforce"

_BASELINE_CAPABILITIES = frozenset(
    {"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"}
    | {"NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"}
)
_RESTRICTED_CAPABILITIES = frozenset({"NET_BIND_SERVICE"})


def enforced_level(labels: Mapping[str, str]) -> Level:
    """The level that a namespace's labels enforce; the server takes a word that it does not know for the strictest.

    A level that the whole API server enforces is in its configuration, which nobody can read from outside.
    """
    said = labels.get(ENFORCE_LABEL, "privileged")
    return next((level for level in LEVELS if level == said), "restricted")


def violations(pod_spec: Thing, level: Level) -> tuple[str, ...]:
    """What the level refuses of a pod, by container."""
    if level == "privileged":
        return ()
    pod = pod_spec.get("securityContext") or {}
    found = []
    for container in containers_of(pod_spec):
        own = container.get("securityContext") or {}
        found += [f"{container.get('name')}: {fault}" for fault in _faults(pod, own, level)]
    return tuple(found)


def _faults(pod: Thing, own: Thing, level: Level) -> Iterator[str]:
    strict = level == "restricted"
    added = set(at(own, "capabilities.add") or ())
    refused = sorted(added - (_RESTRICTED_CAPABILITIES if strict else _BASELINE_CAPABILITIES))
    if refused:
        yield f"adds the capability {', '.join(refused)}"
    seccomp = at(own, "seccompProfile.type") or at(pod, "seccompProfile.type")
    if seccomp == "Unconfined" or (strict and seccomp is None):
        yield f"seccompProfile is {seccomp or 'not set'}"
    if not strict:
        return
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if "ALL" not in (at(own, "capabilities.drop") or ()):
        yield "does not drop ALL capabilities"
    if _said(pod, own, "runAsNonRoot") is not True:
        yield "runAsNonRoot is not true"
    if _said(pod, own, "runAsUser") == 0:
        yield "runAsUser is 0"


def _said(pod: Thing, own: Thing, field: str) -> object:
    """A container's own word, or the pod's."""
    return pod.get(field) if own.get(field) is None else own[field]
