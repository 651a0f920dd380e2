"""How a pod stands, from being scheduled to being Ready, and why not: in Kubernetes' words and the likely cause's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from pydantic import Field

from serving_catalog.checks.cluster import (
    COMPONENT_LABEL,
    GPU,
    Snapshot,
    Thing,
    age,
    condition,
    gpus_of,
    is_true,
    labels_of,
    name_of,
    rooms,
    rooms_text,
    seconds_between,
)
from serving_catalog.checks.cluster_causes import RUNBOOKS, Cause, download_cause, image_cause, serving_cause
from serving_catalog.checks.judging import at, listed
from serving_catalog.checks.models import Check
from serving_catalog.entries import Part, Seconds

TYPE_LABEL = "nvidia.com/dynamo-component-type"
JOB_LABELS = ("batch.kubernetes.io/job-name", "job-name")
PURPOSE_LABEL = "app.kubernetes.io/component"
WORKERS = ("worker", "prefill", "decode")


class NamespaceSettings(Part):
    """What to look at, and when slow is too slow."""

    name: str | None = None  # of the graph; None: every graph there
    load_within_seconds: Seconds = 1800  # weights of 65 GB from a shared file system, and the engine's warm-up
    log_lines: int = Field(default=3, ge=1)  # shown of what a container said last
    allow_findings: tuple[str, ...] = ()


class Why(NamedTuple):
    """How something stands. ok is None while it is on its way."""

    ok: bool | None
    seen: str
    remedy: str = ""


def component_of(pod: Thing) -> str:
    return labels_of(pod).get(COMPONENT_LABEL) or name_of(pod)


def has_ended(pod: Thing) -> bool:
    return at(pod, "status.phase") in ("Succeeded", "Failed")


def is_unscheduled(pod: Thing) -> bool:
    return not at(pod, "spec.nodeName") and not has_ended(pod)


def schedule_message(pod: Thing) -> str:
    return str((condition(pod, "PodScheduled") or {}).get("message") or "")


def pod(snapshot: Snapshot, entry: Thing, settings: NamespaceSettings) -> Check:
    state = pod_state(snapshot, entry, settings)
    component = labels_of(entry).get(COMPONENT_LABEL)
    return Check(
        id=f"pod.{name_of(entry)}",
        title=f"A pod of {component} is Ready" if component else "A pod is Ready",
        ok=state.ok,
        seen=state.seen,
        expected="scheduled, Ready",
        remedy=state.remedy,
    )


def pod_state(snapshot: Snapshot, entry: Thing, settings: NamespaceSettings) -> Why:
    """How a pod stands, from being scheduled to being Ready."""
    lived = seconds_between(at(entry, "metadata.creationTimestamp"), snapshot.at)
    if at(entry, "metadata.deletionTimestamp"):
        since = seconds_between(at(entry, "metadata.deletionTimestamp"), snapshot.at)
        if (since or 0) > 300:
            return Why(
                False,
                f"being deleted, {age(since)} longer than allowed, on {at(entry, 'spec.nodeName')}",
                f"Its node does not answer: kubectl describe node: {RUNBOOKS['not-ready']}.",
            )
        return Why(None, "being deleted")
    if is_unscheduled(entry):
        return unscheduled(snapshot, entry, lived)
    statuses = [*(at(entry, "status.initContainerStatuses") or ()), *(at(entry, "status.containerStatuses") or ())]
    for container in statuses:
        state = _container(snapshot, entry, container, settings)
        if state is not None:
            return state
    if at(entry, "status.phase") == "Failed":
        return Why(
            False,
            f"{at(entry, 'status.reason') or 'Failed'}: {at(entry, 'status.message') or 'no message'}",
            f"{RUNBOOKS['not-ready']}.",
        )
    node = at(entry, "spec.nodeName")
    if is_true(entry, "Ready") or at(entry, "status.phase") == "Succeeded":
        restarts = sum(int(container.get("restartCount") or 0) for container in statuses)
        return Why(True, f"Ready on {node}" + (f", restarted {restarts} times" if restarts else ""))
    return _not_ready(snapshot, entry, lived, settings)


def _not_ready(snapshot: Snapshot, entry: Thing, lived: float | None, settings: NamespaceSettings) -> Why:
    """Running, and not Ready: it loads, or a probe fails."""
    node = at(entry, "spec.nodeName")
    statuses = at(entry, "status.containerStatuses") or ()
    started = next((since for container in statuses if (since := at(container, "state.running.startedAt"))), None)
    running = seconds_between(started, snapshot.at) if started else lived
    lines = log_of(snapshot, entry)
    cause = serving_cause(lines)
    gates = [
        str(gate.get("conditionType"))
        for gate in at(entry, "spec.readinessGates") or ()
        if not is_true(entry, str(gate.get("conditionType")))
    ]
    if gates:
        return Why(False, f"on {node}, waits for the readiness gates {listed(gates)}", f"{RUNBOOKS['not-ready']}.")
    if cause is not None:
        return Why(False, f"on {node}, not Ready for {age(running)}: {cause[0]}{quoted(lines, settings)}", cause[1])
    was_started = all(container.get("started") for container in statuses) if statuses else False
    probe = _probe_events(snapshot, entry)
    if not statuses:
        said = events_of(snapshot, "Pod", name_of(entry))
        return Why(
            None if (lived or 0) < 300 else False,
            f"on {node} for {age(lived)}, no container yet" + (f": {said[-1]}" if said else ""),
            "" if (lived or 0) < 300 else f"The node's kubelet does not start it: {RUNBOOKS['not-ready']}.",
        )
    limit = settings.load_within_seconds
    if running is not None and running < limit and not (was_started and probe):
        return Why(
            None,
            f"on {node}, loading for {age(running)} of at most {age(limit)} as a rule{_patience_of(entry)}"
            + quoted(lines, settings),
        )
    return Why(
        False,
        f"on {node}, running for {age(running)} and not Ready"
        + (f": {probe}" if probe else f"; loading takes at most {age(limit)} as a rule{_patience_of(entry)}")
        + quoted(lines, settings),
        f"Read its log (kubectl --namespace {snapshot.namespace} logs {name_of(entry)}); a slow volume and a rank that "
        f"died look alike: {RUNBOOKS['not-ready']}.",
    )


def _patience_of(pod: Thing) -> str:
    """How long the pod's own startup probe lets it load, after which the kubelet starts it again."""
    limits = [
        int(probe.get("initialDelaySeconds") or 0)
        + int(probe.get("periodSeconds") or 10) * int(probe.get("failureThreshold") or 3)
        for container in at(pod, "spec.containers") or ()
        if (probe := container.get("startupProbe"))
    ]
    return f" (its startup probe allows {age(max(limits))})" if limits else ""


def _probe_events(snapshot: Snapshot, entry: Thing) -> str:
    said = [
        text for text in events_of(snapshot, "Pod", name_of(entry)) if "probe failed" in text or "Unhealthy" in text
    ]
    return said[-1] if said else ""


_IMAGE_REASONS = (
    "ImagePullBackOff",
    "ErrImagePull",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
)


def _container(snapshot: Snapshot, entry: Thing, container: Thing, settings: NamespaceSettings) -> Why | None:
    """What is wrong with a container, or None."""
    waiting = at(container, "state.waiting") or {}
    reason, message = str(waiting.get("reason") or ""), str(waiting.get("message") or "")
    name, node = str(container.get("name")), at(entry, "spec.nodeName")
    if reason in _IMAGE_REASONS:
        said = [text for text in events_of(snapshot, "Pod", name_of(entry)) if "pull" in text.lower()]
        # The back-off's own message says nothing; the first event of the pull does.
        words = " ".join([message, *said])
        detail = next((text for text in reversed(said) if "Failed to pull" in text), message)
        return Why(
            False,
            f"{reason} of {container.get('image')} on {node}: {image_cause(words)}" + (f": {detail}" if detail else ""),
            f"Check release, image_registry and pull_secrets: {RUNBOOKS['image-pull']}.",
        )
    if reason in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"):
        secret = "secret" in message.lower()
        cause = serving_cause([message])
        return Why(
            False,
            f"{reason} on {node}: {message}",
            f"Make the Secret or key it names: {RUNBOOKS['rotate-token']}."
            if secret
            else cause[1]
            if cause
            else f"{RUNBOOKS['not-ready']}.",
        )
    ended = at(container, "state.terminated") or (at(container, "lastState.terminated") if reason else None) or {}
    if reason == "CrashLoopBackOff" or (ended and int(ended.get("exitCode") or 0) != 0):
        return _crashed(snapshot, entry, container, ended, settings)
    if reason in ("ContainerCreating", "PodInitializing"):
        said = [
            text
            for text in events_of(snapshot, "Pod", name_of(entry))
            if any(
                word in text for word in ("FailedMount", "FailedAttach", "FailedCreatePodSandBox", "FailedMapVolume")
            )
        ]
        if said:
            volume = "Sandbox" not in said[-1]
            return Why(
                False,
                f"{reason} on {node}: {said[-1]}",
                f"{RUNBOOKS['pvc-pending'] if volume else RUNBOOKS['not-ready']}.",
            )
        if reason == "ContainerCreating":
            return Why(None, f"{name} is being created on {node} (its image may be pulled: tens of GB)")
    return None


def _crashed(snapshot: Snapshot, entry: Thing, container: Thing, ended: Thing, settings: NamespaceSettings) -> Why:
    name, node = str(container.get("name")), at(entry, "spec.nodeName")
    lines = log_of(snapshot, entry, name) or str(ended.get("message") or "").splitlines()
    why, restarts = str(ended.get("reason") or "ended"), int(container.get("restartCount") or 0)
    code = ended.get("exitCode")
    words = f"{why}, exit status {code}" if code is not None else why
    if why == "OOMKilled":
        cause: Cause | None = serving_cause(["OOMKilled"])
    else:
        download = labels_of(entry).get(PURPOSE_LABEL, "") == "download" or "-download" in name_of(entry)
        cause = download_cause(lines) if download else serving_cause(lines)
    if cause is None and code == 137:
        cause = (
            "killed: a failed liveness probe, memory, or the node",
            f"See its events (kubectl describe pod) for which: {RUNBOOKS['not-ready']}.",
        )
    return Why(
        False,
        f"{name} on {node} ended ({words}"
        + (f", restarted {restarts} times" if restarts else "")
        + ")"
        + (f": {cause[0]}" if cause else "")
        + quoted(lines, settings),
        cause[1]
        if cause
        else f"kubectl --namespace {snapshot.namespace} logs {name_of(entry)} --previous: {RUNBOOKS['not-ready']}.",
    )


def schedule_summary(message: str) -> str:
    """The scheduler's message without what it says of preemption."""
    first = re.split(r",?\s*(?:no new claims to deallocate|preemption:)", message)[0]
    return re.sub(r"\. not found$", "", first.strip()).rstrip(".,")


def unscheduled(snapshot: Snapshot, entry: Thing, lived: float | None) -> Why:
    """Why no node takes a pod, in the scheduler's words, and what helps."""
    scheduled = condition(entry, "PodScheduled") or {}
    message = str(scheduled.get("message") or "")
    spec = entry.get("spec") or {}
    if scheduled.get("reason") == "SchedulingGated":
        gates = listed(str(gate.get("name")) for gate in spec.get("schedulingGates") or ())
        return Why(False, f"not scheduled: gates {gates}", "Whoever set the gates removes them (a queue, often).")
    if not message:
        if (lived or 0) < 60:
            return Why(None, f"not scheduled yet, {age(lived)} old")
        return Why(
            False,
            f"not scheduled for {age(lived)}, and the scheduler {spec.get('schedulerName')!r} says nothing",
            f"No scheduler of this name runs, or it queues the pod: see scheduler_name: {RUNBOOKS['unschedulable']}.",
        )
    causes, steps, runbook = _schedule_causes(message, spec)
    there = ""
    if gpus_of(spec) and snapshot.was_read("Node") and runbook == RUNBOOKS["unschedulable"]:
        others = snapshot.all("AllPods") or snapshot.all("Pod")
        there = f". Nodes: {rooms_text(rooms(snapshot.all('Node'), others))}"
    return Why(
        False,
        f"not scheduled: {schedule_summary(message)}" + (f" ({', '.join(causes)})" if causes else "") + there,
        " ".join([*steps, f"{runbook}."]),
    )


def _schedule_causes(message: str, spec: Thing) -> tuple[list[str], list[str], str]:
    """(causes, what helps, runbook) of the scheduler's message, the decisive one first."""
    causes, steps = [], []
    runbook = RUNBOOKS["unschedulable"]
    missing = re.search(r'persistentvolumeclaim "([^"]+)" not found', message)
    if missing:
        return (
            [f"the claim {missing.group(1)} does not exist"],
            [f"Make the claim {missing.group(1)}, or name the one that exists."],
            RUNBOOKS["pvc-pending"],
        )
    if "unbound immediate PersistentVolumeClaims" in message:
        return ["its claim is not bound"], ["The claim's own check says why."], RUNBOOKS["pvc-pending"]
    if "volume node affinity conflict" in message or "available persistent volumes to bind" in message:
        causes.append("its volume lies where no fitting node is")
        steps.append("Use a storage class that reaches the GPU nodes (shared, or in their zone).")
        runbook = RUNBOOKS["pvc-pending"]
    if f"Insufficient {GPU}" in message:
        causes.append(f"{gpus_of(spec)} GPUs are not free on one node")
        steps.append("Free GPUs, add a node, or lower replicas.")
    for resource in re.findall(r"Insufficient (cpu|memory|ephemeral-storage|pods)", message):
        causes.append(f"too little {resource}")
        steps.append(f"Ask for less {resource} in resources, or use larger nodes.")
    if "untolerated taint" in message:
        taints = listed(dict.fromkeys(re.findall(r"untolerated taint(?:\(s\))? \{([^}]*)\}", message)), "")
        causes.append(f"taints without toleration{f': {taints}' if taints else ''}")
        steps.append("Add them to tolerations.")
    if "were unschedulable" in message:
        causes.append("nodes are cordoned")
        steps.append("kubectl uncordon those that are fit to serve.")
    if "didn't match Pod's node affinity/selector" in message:
        selector = ", ".join(f"{key}={value}" for key, value in (spec.get("nodeSelector") or {}).items())
        causes.append(f"node selector or affinity{f' ({selector})' if selector else ''} fits other nodes only")
        if not steps:
            steps.append("Compare the target's architecture and GPU with the nodes' labels.")
    if "anti-affinity" in message:
        causes.append("it must not share a node with another pod")
    return causes, steps, runbook


# --- events and logs ---------------------------------------------------------------------------------------------


def event_time(event: Thing) -> str:
    series = at(event, "series.lastObservedTime")
    return str(
        series or event.get("lastTimestamp") or event.get("eventTime") or at(event, "metadata.creationTimestamp") or ""
    )


def events_of(snapshot: Snapshot, kind: str, name: str) -> list[str]:
    """`FailedMount: Unable to attach …`, oldest first; warnings only."""
    found = [
        event
        for event in snapshot.all("Event")
        if event.get("type") != "Normal"
        and at(event, "involvedObject.kind") == kind
        and at(event, "involvedObject.name") == name
    ]
    return [f"{event.get('reason')}: {one_line(event.get('message'))}" for event in sorted(found, key=event_time)]


def one_line(text: object, longest: int = 300) -> str:
    line = " ".join(str(text or "").split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def log_of(snapshot: Snapshot, pod: Thing, container: str | None = None) -> tuple[str, ...]:
    """The last lines of a pod: of the container, or of the first that said something."""
    if container is not None:
        return snapshot.logs.get(f"{name_of(pod)}/{container}", ())
    names = [str(entry.get("name")) for entry in at(pod, "spec.containers") or ()]
    return next((lines for name in names if (lines := snapshot.logs.get(f"{name_of(pod)}/{name}"))), ())


def last_words(snapshot: Snapshot, pods: Sequence[Thing]) -> tuple[str, ...]:
    """What the newest pod said last: what the kubelet kept of its end, or else its log."""
    for entry in reversed(pods):
        lines = _kept_words(entry) or log_of(snapshot, entry)
        if lines:
            return lines
    return ()


def _kept_words(pod: Thing) -> tuple[str, ...]:
    """The termination message of a pod's container, of one that failed where there is one."""
    ends = [
        at(container, "state.terminated") or at(container, "lastState.terminated") or {}
        for container in (
            *(at(pod, "status.initContainerStatuses") or ()),
            *(at(pod, "status.containerStatuses") or ()),
        )
    ]
    ends.sort(key=lambda end: not end.get("exitCode"))
    return next((tuple(str(end["message"]).splitlines()) for end in ends if end.get("message")), ())


def quoted(lines: Sequence[str], settings: NamespaceSettings) -> str:
    said = [one_line(line, 200) for line in lines if line.strip()][-settings.log_lines :]
    return f'; last lines: "{" | ".join(said)}"' if said else ""
