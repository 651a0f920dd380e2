"""A namespace that should be serving, judged from the platform up to the answer.

    diagnose_namespace(snapshot, NamespaceSettings(...))  ->  every check

What belongs to a graph is found by following what its pods and Jobs refer to, so it needs no plan. The graph's own
status never says why it is not Ready; the pods, their events and the component deployments do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from serving_catalog.checks.cluster import (
    GPU,
    GRAPH_GROUP,
    GRAPH_LABEL,
    GRAPH_PLURAL,
    GRAPH_VERSION,
    WORKER_HASH_LABEL,
    Snapshot,
    Thing,
    age,
    claims_of,
    condition,
    config_maps_of,
    gpus_of,
    is_true,
    labels_of,
    name_of,
    pod_templates,
    pull_secrets_of,
    seconds_between,
    secrets_of,
)
from serving_catalog.checks.cluster_causes import RUNBOOKS, Cause, download_cause, serving_cause
from serving_catalog.checks.cluster_pods import (
    JOB_LABELS,
    PURPOSE_LABEL,
    TYPE_LABEL,
    WORKERS,
    NamespaceSettings,
    Why,
    component_of,
    event_time,
    events_of,
    has_ended,
    is_unscheduled,
    last_words,
    log_of,
    one_line,
    pod,
    pod_state,
    quoted,
    schedule_message,
    schedule_summary,
)
from serving_catalog.checks.cluster_prerequisites import (
    class_texts,
    cluster_access,
    default_class,
    graph_versions,
    operator_text,
)
from serving_catalog.checks.judging import at, check, finding, listed, passed, unknown
from serving_catalog.checks.models import Check, accept

# The longest name that labels and Services take; a worker's is <graph>-<component>-<8 hex>.
LONGEST_NAME = 63


def diagnose_namespace(snapshot: Snapshot, settings: NamespaceSettings) -> tuple[Check, ...]:
    """Every check, in the order from the platform to the answer."""
    access = cluster_access(snapshot, "--kubeconfig", "--context")
    if access.ok is False:
        return (access,)
    there = namespace_there(snapshot)
    if there.ok is False:
        return (access, there)
    graphs = [entry for entry in snapshot.all("DynamoGraphDeployment") if settings.name in (None, name_of(entry))]
    jobs = [entry for entry in snapshot.all("Job") if _job_of(entry, settings.name)]
    specs = [template.get("spec") or {} for thing in (*graphs, *jobs) for _, template in pod_templates(thing)]
    checks = [
        access,
        there,
        crds(snapshot),
        operator(snapshot, graphs, settings),
        webhooks(snapshot),
        *secrets(snapshot, specs),
        *claims(snapshot, specs, jobs),
        *config_maps(snapshot, specs),
        *(job(snapshot, entry, settings) for entry in jobs if purpose(entry) not in ("smoke", "benchmark")),
        *graphs_there(snapshot, graphs, settings),
    ]
    for entry in graphs:
        checks += [
            graph(snapshot, entry, settings),
            *deployments(snapshot, entry),
            *(pod(snapshot, one, settings) for one in pods_of(snapshot, entry)),
            workers(snapshot, entry),
            *kv_transfer(snapshot, entry),
            endpoint(snapshot, entry),
        ]
    checks += [job(snapshot, entry, settings) for entry in jobs if purpose(entry) in ("smoke", "benchmark")]
    checks.append(warnings(snapshot))
    return accept(checks, settings.allow_findings)


def namespace_there(snapshot: Snapshot) -> Check:
    title = "The namespace is there"
    if not snapshot.was_read("Namespace"):
        return unknown("namespace.there", title, snapshot.why_unread("Namespace"), "there")
    found = snapshot.one("Namespace", snapshot.namespace)
    if found is None:
        return finding(
            "namespace.there",
            title,
            f"--namespace: {snapshot.namespace!r} does not exist",
            listed(name_of(entry) for entry in snapshot.all("Namespace")),
            "Look in the namespace that `pulumi stack output namespace` says, and in the right cluster (--context).",
        )
    if at(found, "metadata.deletionTimestamp"):
        since = seconds_between(at(found, "metadata.deletionTimestamp"), snapshot.at)
        left = [
            str(entry.get("message")) for entry in at(found, "status.conditions") or () if entry.get("status") == "True"
        ]
        return finding(
            "namespace.there",
            title,
            f"being deleted since {age(since)}: {listed(left, 'no reason given')}",
            "there, and not being deleted",
            f"It waits for finalizers; a graph's needs the operator running: {RUNBOOKS['destroy']}.",
        )
    return passed("namespace.there", title, snapshot.namespace, "there")


# --- the platform ------------------------------------------------------------------------------------------------


def crds(snapshot: Snapshot) -> Check:
    title, expected = "The Dynamo CRDs are served", f"{GRAPH_PLURAL}.{GRAPH_GROUP} at {GRAPH_VERSION}"
    if not snapshot.was_read("APIResource"):
        return unknown("platform.crds", title, snapshot.why_unread("APIResource"), expected)
    served = graph_versions(snapshot)
    return check(
        "platform.crds",
        title,
        GRAPH_VERSION in served,
        f"served: {listed(served)}",
        expected,
        "Install the Dynamo platform (platform: install), or have it upgraded to 1.2.0 or newer: "
        f"{RUNBOOKS['change-release']}.",
    )


def operator(snapshot: Snapshot, graphs: Sequence[Thing], settings: NamespaceSettings) -> Check:
    """The operator's Deployment is available. Without it nothing that changes a graph has an effect."""
    title, expected = "The Dynamo operator runs", "its Deployment is available"
    if not snapshot.was_read("Operator"):
        return unknown("platform.operator", title, snapshot.why_unread("Operator"), expected)
    found = snapshot.all("Operator")
    if not found:
        behind = [name_of(entry) for entry in graphs if not up_to_date(entry)]
        if behind:
            return finding(
                "platform.operator",
                title,
                f"no Deployment with the chart's labels, and nobody has looked at {listed(behind)}",
                expected,
                f"Install the platform (platform: install): {RUNBOOKS['not-ready']}.",
            )
        return unknown("platform.operator", title, "no Deployment with the chart's labels", expected)
    down = [entry for entry in found if not is_true(entry, "Available")]
    seen = listed(f"{operator_text(entry)}{_why_unavailable(entry)}" for entry in down or found)
    if not down:
        return passed("platform.operator", title, seen, expected)
    states = [(one, pod_state(snapshot, one, settings)) for one in snapshot.all("OperatorPod")]
    worst = next(((one, state) for one, state in states if state.ok is False), None)
    return finding(
        "platform.operator",
        title,
        seen + (f". Because {name_of(worst[0])}: {worst[1].seen}" if worst else ""),
        expected,
        worst[1].remedy
        if worst
        else f"kubectl --namespace {at(down[0], 'metadata.namespace')} get pods, and the log of the one that fails: "
        f"{RUNBOOKS['not-ready']}.",
    )


def _why_unavailable(deployment: Thing) -> str:
    if is_true(deployment, "Available"):
        return ""
    status = deployment.get("status") or {}
    wanted = at(deployment, "spec.replicas")
    return f" has {status.get('availableReplicas', 0)} of {1 if wanted is None else wanted} pods available"


def webhooks(snapshot: Snapshot) -> Check:
    """The operator's webhooks have a certificate: without it every change of a graph is refused."""
    title, expected = "The operator's webhooks can be called", "a CA bundle in each"
    if not snapshot.was_read("Webhook"):
        return unknown("platform.webhooks", title, snapshot.why_unread("Webhook"), expected)
    ours = [
        (name_of(configuration), hook)
        for configuration in snapshot.all("Webhook")
        for hook in configuration.get("webhooks") or ()
        if any(GRAPH_GROUP in (rule.get("apiGroups") or ()) for rule in hook.get("rules") or ())
    ]
    if not ours:
        return unknown("platform.webhooks", title, "the operator has none here", expected)
    bare = sorted({f"{name}/{hook.get('name')}" for name, hook in ours if not at(hook, "clientConfig.caBundle")})
    return check(
        "platform.webhooks",
        title,
        not bare,
        f"no CA bundle in {listed(bare)}" if bare else f"{len(ours)} webhooks with a CA bundle",
        expected,
        "The operator writes it when it starts: see that it runs and restart it (kubectl rollout restart deployment): "
        f"{RUNBOOKS['not-ready']}.",
    )


# --- what pods and Jobs refer to ---------------------------------------------------------------------------------


def secrets(snapshot: Snapshot, specs: Iterable[Thing]) -> list[Check]:
    """Secrets that pods need, and their keys; never a value."""
    needed: dict[str, set[str]] = {}
    registry: set[str] = set()
    for spec in specs:
        for name, key in secrets_of(spec):
            needed.setdefault(name, set()).update([key] if key else [])
        registry.update(pull_secrets_of(spec))
    checks = []
    for name in sorted(needed):
        keys = sorted(needed[name])
        id_, title, expected = f"secret.{name}", "A Secret that pods need", f"a value at {listed(keys, 'some key')}"
        if not snapshot.was_read("Secret"):
            checks.append(unknown(id_, title, snapshot.why_unread("Secret"), expected))
            continue
        found = snapshot.one("Secret", name)
        there = [str(entry) for entry in (found or {}).get("keys") or ()]
        empty = set((found or {}).get("empty") or ())
        wrong = [key for key in keys if key not in there or key in empty]
        checks.append(
            check(
                id_,
                title,
                found is not None and not wrong,
                "does not exist"
                if found is None
                else f"has the keys {listed(there)}" + (f"; empty: {listed(sorted(empty))}" if empty else ""),
                expected,
                f"Make it, or point the stack at the Secret and key that exist: {RUNBOOKS['rotate-token']}.",
            )
        )
    for name in sorted(registry):
        id_, title, expected = f"secret.{name}", "Registry credentials", "type kubernetes.io/dockerconfigjson"
        if not snapshot.was_read("Secret"):
            checks.append(unknown(id_, title, snapshot.why_unread("Secret"), expected))
            continue
        found = snapshot.one("Secret", name)
        checks.append(
            check(
                id_,
                title,
                found is not None
                and found.get("type") in ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg"),
                "does not exist" if found is None else f"type {found.get('type')}",
                expected,
                f"Images that need it cannot be pulled: {RUNBOOKS['image-pull']}.",
            )
        )
    return checks


def claims(snapshot: Snapshot, specs: Iterable[Thing], jobs: Sequence[Thing]) -> list[Check]:
    names = list(dict.fromkeys(name for spec in specs for name in claims_of(spec)))
    return [claim(snapshot, name) for name in names]


def claim(snapshot: Snapshot, name: str) -> Check:
    """The claim is bound; if not, why its volume does not come."""
    id_, title, expected = f"claim.{name}", "The claim is bound", "Bound"
    if not snapshot.was_read("PersistentVolumeClaim"):
        return unknown(id_, title, snapshot.why_unread("PersistentVolumeClaim"), expected)
    found = snapshot.one("PersistentVolumeClaim", name)
    runbook = RUNBOOKS["pvc-pending"]
    if found is None:
        others = listed(name_of(entry) for entry in snapshot.all("PersistentVolumeClaim"))
        return finding(
            id_,
            title,
            f"does not exist; claims here: {others}",
            expected,
            f"Pods that mount it stay Pending. Name one that exists with model_cache_claim, or make it: {runbook}.",
        )
    phase = at(found, "status.phase")
    class_name = at(found, "spec.storageClassName")
    modes = listed(at(found, "spec.accessModes") or ())
    if phase == "Bound":
        size = at(found, "status.capacity.storage")
        return passed(id_, title, f"Bound: {size}, {modes}, class {class_name or 'none'}", expected)
    said = events_of(snapshot, "PersistentVolumeClaim", name)
    last = f"; {said[-1]}" if said else ""
    if phase == "Lost":
        return finding(
            id_, title, f"Lost: its volume {at(found, 'spec.volumeName')} is gone{last}", expected, f"{runbook}."
        )
    found_class = snapshot.one("StorageClass", class_name) if class_name else None
    classes = listed(class_texts(snapshot))
    if class_name and found_class is None and snapshot.was_read("StorageClass"):
        return finding(
            id_,
            title,
            f"{phase}: the storage class {class_name!r} does not exist; there are {classes}{last}",
            expected,
            f"Set the storage class to one of them; a claim's class cannot be changed, so it is made anew: {runbook}.",
        )
    if class_name is None and snapshot.was_read("StorageClass") and default_class(snapshot) is None:
        return finding(
            id_,
            title,
            f"{phase}: it names no storage class, and the cluster has no default; there are {classes}{last}",
            expected,
            f"Set the storage class: {runbook}.",
        )
    if found_class is not None and found_class.get("volumeBindingMode") == "WaitForFirstConsumer":
        consumers = [
            entry
            for entry in snapshot.all("Pod")
            if name in claims_of(entry.get("spec") or {}) and not has_ended(entry)
        ]
        if not consumers:
            return unknown(
                id_,
                title,
                f"{phase}: the class {class_name} waits for the first pod that mounts it, and there is none yet",
                expected,
            )
        states = listed(f"{name_of(entry)} {at(entry, 'status.phase')}" for entry in consumers)
        return finding(
            id_,
            title,
            f"{phase}: the class {class_name} waits for a node to be chosen for {states}{last}",
            expected,
            f"The pod must be schedulable first (its own check says why it is not): {runbook}.",
        )
    provisioner = str((found_class or {}).get("provisioner") or "nobody")
    return finding(
        id_,
        title,
        f"{phase} for {age(seconds_between(at(found, 'metadata.creationTimestamp'), snapshot.at))}: "
        f"{modes} of class {class_name or default_class(snapshot)} from {provisioner}{last or '; no event says why'}",
        expected,
        f"The provisioner cannot make it, or none runs: {runbook}.",
    )


def config_maps(snapshot: Snapshot, specs: Iterable[Thing]) -> list[Check]:
    names = list(dict.fromkeys(name for spec in specs for name in config_maps_of(spec)))
    checks = []
    for name in names:
        id_, title = f"config.{name}", "A ConfigMap that pods mount"
        if not snapshot.was_read("ConfigMap"):
            checks.append(unknown(id_, title, snapshot.why_unread("ConfigMap"), "there"))
            continue
        found = snapshot.one("ConfigMap", name)
        checks.append(
            check(
                id_,
                title,
                found is not None,
                "there" if found else "does not exist",
                "there",
                f"Pods that mount it do not start. Run pulumi up again, with --refresh if it was deleted by hand: "
                f"{RUNBOOKS['not-ready']}.",
            )
        )
    return checks


# --- Jobs --------------------------------------------------------------------------------------------------------


def purpose(job: Thing) -> str:
    """download, smoke or benchmark, by label or by name."""
    labelled = labels_of(job).get(PURPOSE_LABEL, "")
    for word in ("download", "smoke", "benchmark"):
        if word in labelled or re.search(rf"(^|-){word}(-|$)", name_of(job)):
            return word
    return "job"


def _job_of(job: Thing, graph_name: str | None) -> bool:
    """Whether a Job is one of ours: of this graph, or of any."""
    if purpose(job) == "job":
        return False
    if graph_name is None:
        return True
    return name_of(job).startswith(f"{graph_name}-") or graph_name in labels_of(job).values()


def job(snapshot: Snapshot, entry: Thing, settings: NamespaceSettings) -> Check:
    what = purpose(entry)
    title = {"download": "The download", "smoke": "The smoke test", "benchmark": "The benchmark"}[what]
    state = job_state(snapshot, entry, what, settings)
    return Check(
        id=f"job.{name_of(entry)}", title=title, ok=state.ok, seen=state.seen, expected="Complete", remedy=state.remedy
    )


def job_state(snapshot: Snapshot, entry: Thing, what: str, settings: NamespaceSettings) -> Why:
    runbook = RUNBOOKS.get(what, RUNBOOKS["not-ready"])
    status = entry.get("status") or {}
    if is_true(entry, "Complete"):
        took = seconds_between(status.get("startTime"), status.get("completionTime"))
        return Why(True, f"Complete after {age(took)}")
    pods = sorted(_pods_of_job(snapshot, entry), key=lambda one: str(at(one, "metadata.creationTimestamp")))
    failed = condition(entry, "Failed") or condition(entry, "FailureTarget")
    if failed and failed.get("status") == "True":
        reason = str(failed.get("reason"))
        if reason == "DeadlineExceeded":
            limit = at(entry, "spec.activeDeadlineSeconds")
            lines = last_words(snapshot, pods)
            cause = _cause(what, lines)
            return Why(
                False,
                f"Failed: not done within {limit} s{quoted(lines, settings)}" + (f" ({cause[0]})" if cause else ""),
                cause[1]
                if cause
                else "Too slow, or it never started: see its pod, and give it more time or a nearer mirror: "
                f"{runbook}.",
            )
        lines = last_words(snapshot, pods)
        cause = _cause(what, lines)
        return Why(
            False,
            f"Failed ({reason}), {status.get('failed', 0)} tries"
            + (f": {cause[0]}" if cause else "")
            + quoted(lines, settings),
            cause[1] if cause else f"kubectl --namespace {snapshot.namespace} logs job/{name_of(entry)}: {runbook}.",
        )
    if at(entry, "spec.suspend"):
        return Why(None, "suspended")
    current = next((one for one in reversed(pods) if not has_ended(one)), None)
    tries = int(status.get("failed") or 0)
    if tries:
        lines = last_words(snapshot, [one for one in pods if at(one, "status.phase") == "Failed"])
        cause = _cause(what, lines)
        return Why(
            False,
            f"{tries} of {int(at(entry, 'spec.backoffLimit') or 0) + 1} tries failed"
            + (f": {cause[0]}" if cause else "")
            + quoted(lines, settings),
            cause[1] if cause else f"It is tried again by itself; if it fails again: {runbook}.",
        )
    if current is not None:
        state = pod_state(snapshot, current, settings)
        if state.ok is False:
            return Why(False, f"{name_of(current)}: {state.seen}", state.remedy)
        lines = log_of(snapshot, current)
        since = age(seconds_between(status.get("startTime"), snapshot.at))
        return Why(None, f"running for {since}{quoted(lines, settings)}")
    said = events_of(snapshot, "Job", name_of(entry))
    if said:
        return Why(False, f"no pod: {said[-1]}", f"{runbook}.")
    return Why(None, "no pod yet")


def _cause(what: str, lines: Sequence[str]) -> Cause | None:
    if what == "download":
        return download_cause(lines)
    found = serving_cause(lines)
    if what == "benchmark" and found is None and lines:
        return None
    return found


def _pods_of_job(snapshot: Snapshot, job: Thing) -> list[Thing]:
    return [
        entry
        for entry in snapshot.all("Pod")
        if any(labels_of(entry).get(label) == name_of(job) for label in JOB_LABELS)
    ]


# --- the graph ---------------------------------------------------------------------------------------------------


def up_to_date(graph: Thing) -> bool:
    """Whether the operator has looked at the graph as it is now."""
    ready = condition(graph, "Ready") or {}
    seen = at(graph, "status.observedGeneration")
    seen = ready.get("observedGeneration") if seen is None else seen
    return seen is not None and seen == at(graph, "metadata.generation")


def graphs_there(snapshot: Snapshot, graphs: Sequence[Thing], settings: NamespaceSettings) -> list[Check]:
    """A finding where there is no graph to look at."""
    if graphs:
        return []
    id_, title = f"graph.{settings.name or 'any'}", "The deployment is Ready"
    if not snapshot.was_read("DynamoGraphDeployment"):
        return [unknown(id_, title, snapshot.why_unread("DynamoGraphDeployment"), "Ready")]
    others = [name_of(entry) for entry in snapshot.all("DynamoGraphDeployment")]
    return [
        finding(
            id_,
            title,
            f"no DynamoGraphDeployment{f' {settings.name}' if settings.name else ''} in {snapshot.namespace}"
            + (f"; there are {listed(others)}" if others else ""),
            "there, and Ready",
            "Run pulumi up: it is made after the download. If that stopped before, the check of its Job says why: "
            f"{RUNBOOKS['not-ready']}.",
        )
    ]


def pods_of(snapshot: Snapshot, graph: Thing) -> list[Thing]:
    """The graph's pods, frontend first."""
    found = [entry for entry in snapshot.all("Pod") if labels_of(entry).get(GRAPH_LABEL) == name_of(graph)]
    found = [entry for entry in found if not any(label in labels_of(entry) for label in JOB_LABELS)]
    return sorted(found, key=lambda entry: (labels_of(entry).get(TYPE_LABEL) != "frontend", name_of(entry)))


def components_text(graph: Thing) -> str:
    """`Frontend 1 of 1, TrtllmWorker 0 of 1 ready`."""
    status = at(graph, "status.components") or {}
    parts = [
        f"{name} {entry.get('readyReplicas', 0)} of {entry.get('replicas', 0)}"
        for name, entry in sorted(status.items())
    ]
    return f"{', '.join(parts)} ready" if parts else ""


def graph(snapshot: Snapshot, entry: Thing, settings: NamespaceSettings) -> Check:
    state = graph_state(snapshot, entry, settings)
    return Check(
        id=f"graph.{name_of(entry)}",
        title="The deployment is Ready",
        ok=state.ok,
        seen=state.seen,
        expected="Ready at its newest generation",
        remedy=state.remedy,
    )


def graph_state(snapshot: Snapshot, entry: Thing, settings: NamespaceSettings) -> Why:
    ready = condition(entry, "Ready") or {}
    deleted = at(entry, "metadata.deletionTimestamp")
    if deleted:
        since = seconds_between(deleted, snapshot.at)
        return Why(
            False,
            f"being deleted since {age(since)}; finalizers {listed(at(entry, 'metadata.finalizers') or ())}",
            f"The operator removes its finalizer; without it the graph stays for ever: {RUNBOOKS['destroy']}.",
        )
    reason, message = str(ready.get("reason") or ""), str(ready.get("message") or "")
    if at(entry, "status.state") == "failed":
        hint = (
            "No component may span nodes without Grove or LeaderWorkerSet: every target of the catalog fits one node. "
            if reason == "no_multinode_orchestrator_available"
            else ""
        )
        return Why(False, f"failed: {reason}: {message}", f"{hint}{RUNBOOKS['not-ready']}.")
    generation, seen = at(entry, "metadata.generation"), at(entry, "status.observedGeneration")
    if not up_to_date(entry):
        return Why(
            False,
            f"generation {generation} was not looked at yet (operator saw {seen if seen is not None else 'none'})",
            f"The operator is down or busy; platform.operator says which: {RUNBOOKS['not-ready']}.",
        )
    if ready.get("status") == "True":
        return Why(True, f"Ready, generation {generation}; {components_text(entry)}")
    blame = _blame(snapshot, entry, settings)
    parts = [f"{at(entry, 'status.state') or 'no state'}: {reason or 'no reason'}", components_text(entry)]
    said = "; ".join(part for part in parts if part)
    if reason == "rolling_update_in_progress":
        return _roll(snapshot, entry, said, blame)
    if blame is not None:
        return Why(False, f"{said}. Because {blame.seen}", blame.remedy)
    return Why(False, f"{said}. {message}", f"{RUNBOOKS['not-ready']}.")


def _roll(snapshot: Snapshot, entry: Thing, said: str, blame: Why | None) -> Why:
    started = at(entry, "status.rollingUpdate.startTime")
    phase = str(at(entry, "status.rollingUpdate.phase") or "")
    since = f"update {phase} for {age(seconds_between(started, snapshot.at))}" if started else f"update {phase}"
    pods = [one for one in pods_of(snapshot, entry) if labels_of(one).get(WORKER_HASH_LABEL)]
    stuck = [one for one in pods if is_unscheduled(one) and f"Insufficient {GPU}" in schedule_message(one)]
    new = {labels_of(one).get(WORKER_HASH_LABEL) for one in stuck}
    old = [one for one in pods if not is_unscheduled(one) and labels_of(one).get(WORKER_HASH_LABEL) not in new]
    serving = _complete_set(entry, pods)
    service = (
        "The old workers serve on." if serving else "No set of workers is complete, old or new: requests fail or wait."
    )
    if stuck and old:
        return Why(
            False,
            f"{said}; {since}. Because the new {listed(sorted({component_of(one) for one in stuck}))} pod finds no "
            f"{gpus_of(stuck[0].get('spec') or {})} free GPUs while the old one keeps its own: "
            f"{schedule_summary(schedule_message(stuck[0]))}",
            f"{service} Free a node, or go back to the former settings (it recovers at once) and set rollout to "
            f"in_place, which needs no spare node: {RUNBOOKS['change-release']}.",
        )
    if blame is not None and blame.ok is False:
        return Why(False, f"{said}; {since}. Because {blame.seen}", blame.remedy)
    return Why(
        False,
        f"{said}; {since}" + (f". {blame.seen}" if blame else ""),
        f"The new workers load. {service} {RUNBOOKS['change-release']}.",
    )


def _complete_set(graph: Thing, pods: Sequence[Thing]) -> bool:
    """Whether workers of one hash, which find each other, have a Ready pod of every worker component."""
    wanted = {
        str(component.get("name"))
        for component in at(graph, "spec.components") or ()
        if component.get("type") in WORKERS and component.get("replicas") != 0
    }
    ready: dict[str, set[str]] = {}
    for one in pods:
        if is_true(one, "Ready"):
            ready.setdefault(str(labels_of(one).get(WORKER_HASH_LABEL)), set()).add(component_of(one))
    return any(wanted <= there for there in ready.values())


def _blame(snapshot: Snapshot, entry: Thing, settings: NamespaceSettings) -> Why | None:
    """What keeps the graph from being Ready: refused by the API server, then the first pod that stands worst."""
    for found in _refused(snapshot, entry):
        return found
    for short in deployments(snapshot, entry):
        return Why(False, f"{short.id.removeprefix('deployment.')}: {short.seen}", short.remedy)
    states = [(one, pod_state(snapshot, one, settings)) for one in pods_of(snapshot, entry)]
    for wanted in (False, None):
        for one, state in states:
            if state.ok is wanted:
                return Why(state.ok, f"{component_of(one)} ({name_of(one)}): {state.seen}", state.remedy or _patience())
    return None


def _patience() -> str:
    return f"Wait, and look again; if it takes longer than usual: {RUNBOOKS['not-ready']}."


def _refused(snapshot: Snapshot, graph: Thing) -> list[Why]:
    """What the operator could not create for a component."""
    found = []
    for entry in snapshot.all("DynamoComponentDeployment"):
        if labels_of(entry).get(GRAPH_LABEL) != name_of(graph):
            continue
        available = condition(entry, "Available") or {}
        message = str(available.get("message") or "")
        if available.get("status") == "True" or "Failed to reconcile" not in message:
            continue
        if len(name_of(entry)) > LONGEST_NAME or "no more than 63" in message:
            found.append(
                Why(
                    False,
                    f"the name {name_of(entry)} has {len(name_of(entry))} characters, {LONGEST_NAME} fit",
                    f"Choose a shorter name: {len(name_of(entry)) - LONGEST_NAME} characters less: "
                    f"{RUNBOOKS['not-ready']}.",
                )
            )
        else:
            found.append(Why(False, f"{name_of(entry)}: {message}", f"{RUNBOOKS['not-ready']}."))
    return found


def deployments(snapshot: Snapshot, graph: Thing) -> list[Check]:
    """Findings where pods cannot even be created: a quota, pod security, a missing priority class."""
    checks = []
    for entry in snapshot.all("Deployment"):
        if labels_of(entry).get(GRAPH_LABEL) != name_of(graph):
            continue
        failure = condition(entry, "ReplicaFailure")
        if failure is None or failure.get("status") != "True":
            continue
        message = str(failure.get("message"))
        hint = next(
            (
                hint
                for word, hint in (
                    ("exceeded quota", "Have the namespace's ResourceQuota raised, or use fewer replicas"),
                    ("violates PodSecurity", "Have the namespace's pod-security level lowered for the runtime's pods"),
                    ("PriorityClass", "Set placement's priority class to one that exists"),
                    ("serviceaccount", "The operator makes it: see that it runs"),
                )
                if word.lower() in message.lower()
            ),
            "Make what is asked for possible",
        )
        checks.append(
            finding(
                f"deployment.{name_of(entry)}",
                "Pods can be created",
                f"{failure.get('reason')}: {message}",
                "its pods exist",
                f"{hint}: {RUNBOOKS['not-ready']}.",
            )
        )
    return checks


# --- discovery and the answer ------------------------------------------------------------------------------------


def _ready_endpoints(snapshot: Snapshot, service: str) -> list[str]:
    """Pods behind a Service that take traffic."""
    return [
        str(at(endpoint, "targetRef.name") or listed(endpoint.get("addresses") or ()))
        for entry in snapshot.all("EndpointSlice")
        if labels_of(entry).get("kubernetes.io/service-name") == service
        for endpoint in entry.get("endpoints") or ()
        if at(endpoint, "conditions.ready") is not False
    ]


def frontend_service(graph: Thing) -> str:
    """The Service a client talks to: stable, while workers' names change with every roll."""
    name = next(
        (
            str(entry["name"])
            for entry in at(graph, "spec.components") or ()
            if entry.get("type") == "frontend" and entry.get("name")
        ),
        "Frontend",
    )
    return f"{name_of(graph)}-{name.lower()}"


def workers(snapshot: Snapshot, graph: Thing) -> Check:
    """The frontend finds the workers that are Ready."""
    id_, title = f"workers.{name_of(graph)}", "The frontend finds the workers"
    expected = "every Ready worker behind its Service, and a model at /v1/models"
    pods = [one for one in pods_of(snapshot, graph) if labels_of(one).get(TYPE_LABEL) in WORKERS]
    ready = [one for one in pods if is_true(one, "Ready")]
    if not ready:
        return unknown(id_, title, "no worker is Ready yet", expected)
    runbook = RUNBOOKS["workers-not-discovered"]
    hidden = [name_of(one) for one in ready if labels_of(one).get("nvidia.com/dynamo-discovery-enabled") != "true"]
    if hidden:
        return finding(
            id_,
            title,
            f"{listed(hidden)} carry no nvidia.com/dynamo-discovery-enabled: the operator takes them for no workers",
            expected,
            f"Their component's type must be worker, prefill or decode: {runbook}.",
        )
    probe = snapshot.probes.get(frontend_service(graph))
    if probe is not None and probe.status == 200 and not probe.models:
        return finding(
            id_,
            title,
            f"{len(ready)} workers are Ready, and the frontend lists no model",
            expected,
            "Same release and DYN_NAMESPACE on both, and the discovery Role in place? Restart the frontend pod: "
            f"{runbook}.",
        )
    if snapshot.was_read("EndpointSlice"):
        behind = {
            str(at(endpoint, "targetRef.name"))
            for entry in snapshot.all("EndpointSlice")
            for endpoint in entry.get("endpoints") or ()
            if at(endpoint, "conditions.ready") is not False
        }
        lost = [name_of(one) for one in ready if name_of(one) not in behind]
        if lost:
            return finding(
                id_,
                title,
                f"{listed(lost)} Ready, and behind no Service",
                expected,
                f"The operator makes a Service for each component: {runbook}.",
            )
    models = f"; models {listed(probe.models)}" if probe is not None and probe.models else ""
    return passed(id_, title, f"{len(ready)} of {len(pods)} workers{models}", expected)


def kv_transfer(snapshot: Snapshot, graph: Thing) -> list[Check]:
    """Whether workers of a disaggregated graph complain about passing KV cache on."""
    pods = [one for one in pods_of(snapshot, graph) if labels_of(one).get(TYPE_LABEL) in ("prefill", "decode")]
    if not pods:
        return []
    id_, title = f"kv_transfer.{name_of(graph)}", "KV cache passes from prefill to decode"
    expected = "no complaint in the workers' logs"
    logs = {name_of(one): log_of(snapshot, one) for one in pods}
    if not any(logs.values()):
        return [unknown(id_, title, "no log was read", expected)]
    for name, lines in logs.items():
        for line in reversed(lines):
            cause = serving_cause([line])
            if cause is not None and RUNBOOKS["kv-transfer"] in cause[1]:
                return [finding(id_, title, f"{name}: {line.strip()[:300]}", expected, cause[1])]
    return [passed(id_, title, f"{len(pods)} workers", expected)]


def endpoint(snapshot: Snapshot, graph: Thing) -> Check:
    """The frontend's Service has pods behind it, and answers."""
    service = frontend_service(graph)
    id_, title = f"endpoint.{name_of(graph)}", f"Service {service} answers"
    expected = "a Ready frontend behind it, and the model at /v1/models"
    if not snapshot.was_read("Service") or not snapshot.was_read("EndpointSlice"):
        return unknown(id_, title, snapshot.why_unread("Service"), expected)
    if snapshot.one("Service", service) is None:
        return finding(
            id_,
            title,
            f"no Service {service}",
            expected,
            f"The operator makes it with the frontend: see graph.{name_of(graph)} and platform.operator: "
            f"{RUNBOOKS['not-ready']}.",
        )
    behind = _ready_endpoints(snapshot, service)
    if not behind:
        return finding(
            id_,
            title,
            "no Ready pod behind it",
            expected,
            f"The frontend's pod is not Ready, its own check says why: {RUNBOOKS['not-ready']}.",
        )
    probe = snapshot.probes.get(service)
    if probe is None or (probe.status is None and probe.error):
        # Asked through the API server, which may not be allowed to, or not reach pods: not the service's fault.
        how = f", not asked ({probe.error})" if probe is not None else ""
        return passed(id_, title, f"{listed(behind)} behind it{how}", expected)
    return check(
        id_,
        title,
        probe.status == 200 and bool(probe.models),
        f"status {probe.status}, models {listed(probe.models)}" + (f": {probe.error}" if probe.error else ""),
        expected,
        f"The frontend runs and has no model to serve: {RUNBOOKS['workers-not-discovered']}.",
    )


# --- events ------------------------------------------------------------------------------------------------------


def warnings(snapshot: Snapshot) -> Check:
    """Warning events, for reading: by themselves they are no finding, what they are about is."""
    title, expected = "Warning events", "none that last"
    if not snapshot.was_read("Event"):
        return unknown("events.warnings", title, snapshot.why_unread("Event"), expected)
    counted: dict[tuple[str, str], int] = {}
    for event in sorted(snapshot.all("Event"), key=event_time):
        message = one_line(event.get("message"), 120)
        # Two writers at once; the operator tries again by itself.
        if event.get("type") == "Normal" or "Operation cannot be fulfilled" in message:
            continue
        key = (
            str(event.get("reason")),
            f"{at(event, 'involvedObject.kind')} {at(event, 'involvedObject.name')}: {message}",
        )
        counted[key] = counted.pop(key, 0) + int(event.get("count") or 1)
    if not counted:
        return passed("events.warnings", title, "none", expected)
    latest = list(counted.items())[-5:]
    text = "; ".join(f"{reason} ({count}x) {message}" for (reason, message), count in reversed(latest))
    return unknown("events.warnings", title, f"{len(counted)} kinds, the latest: {text}", expected)
