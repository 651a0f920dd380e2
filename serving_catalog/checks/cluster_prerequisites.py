"""What can be known of a cluster before anything is created in it, judged all at once.

    prerequisites(snapshot, plan, ClusterSettings(...))  ->  every check, findings among them

A finding names the key of the stack's configuration and its value, what is allowed and what to do. `said` makes one
line of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from serving_catalog.checks.cluster import (
    GPU,
    GRAPH_GROUP,
    GRAPH_LABEL,
    GRAPH_PLURAL,
    GRAPH_VERSION,
    Placement,
    Snapshot,
    Thing,
    annotations_of,
    grouped,
    labels_of,
    name_of,
    place,
    pod_templates,
    quantity,
    rooms,
    rooms_text,
)
from serving_catalog.checks.judging import at, check, finding, listed, numbers, passed, unknown
from serving_catalog.checks.models import Check, accept
from serving_catalog.checks.pod_security import ENFORCE_LABEL, LEVELS, enforced_level, violations
from serving_catalog.entries import Part
from serving_catalog.graphs.plans import GraphPlan, TokenKey

DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"

# Provisioners whose volumes with a file system are for one node, so that ReadWriteMany waits for ever.
# Source: kubernetes.io/docs/concepts/storage/persistent-volumes (access modes of each plugin) and the drivers' own
# pages: github.com/kubernetes-sigs/aws-ebs-csi-driver, .../gcp-compute-persistent-disk-csi-driver,
# .../azuredisk-csi-driver, github.com/rancher/local-path-provisioner.
ONE_NODE_PROVISIONERS = {
    "ebs.csi.aws.com": "Amazon EBS; Amazon EFS or FSx for Lustre can",
    "kubernetes.io/aws-ebs": "Amazon EBS; Amazon EFS or FSx for Lustre can",
    "pd.csi.storage.gke.io": "Google Persistent Disk; Filestore or Managed Lustre can",
    "kubernetes.io/gce-pd": "Google Persistent Disk; Filestore or Managed Lustre can",
    "disk.csi.azure.com": "Azure Disk; Azure Files or Managed Lustre can",
    "kubernetes.io/azure-disk": "Azure Disk; Azure Files or Managed Lustre can",
    "rancher.io/local-path": "a directory of one node",
    "kubernetes.io/no-provisioner": "made by hand: nothing provisions a volume for this class",
}


class ClusterSettings(Part):
    """What the user chose that the plan does not say."""

    minimum_kubernetes: str = "1.30"
    create_namespace: bool = True
    platform: Literal["install", "existing"] = "install"
    platform_namespace: str = "dynamo-system"
    platform_create_namespace: bool = True
    platform_release: str = "dynamo-platform"
    stack: str = ""  # the owner of what the program creates, as the annotation says it
    stack_annotation: str = ""  # its key; empty: ownership is not judged
    makes_token_secret: bool = False  # the program makes it, so it need not be there
    token_awaited: bool = False  # somebody else makes it, perhaps later
    made_pull_secrets: tuple[str, ...] = ()
    allow_findings: tuple[str, ...] = ()


class Permission(Part):
    """Verbs on a resource, in a namespace or in the whole cluster."""

    group: str
    resource: str
    namespace: str | None
    verbs: tuple[str, ...] = ("create", "get", "list", "watch", "patch", "delete")

    @property
    def where(self) -> str:
        name = f"{self.resource}.{self.group}" if self.group else self.resource
        return f"{name} in {self.namespace}" if self.namespace else name


# Where the objects of a plan live: kind -> (API group, resource).
_RESOURCES = {
    "Namespace": ("", "namespaces"),
    "PersistentVolumeClaim": ("", "persistentvolumeclaims"),
    "ConfigMap": ("", "configmaps"),
    "Job": ("batch", "jobs"),
    "NetworkPolicy": ("networking.k8s.io", "networkpolicies"),
    "DynamoGraphDeployment": (GRAPH_GROUP, GRAPH_PLURAL),
}


def needed_permissions(plan: GraphPlan, settings: ClusterSettings) -> tuple[Permission, ...]:
    """The least that carries the plan out: what is created, and the pods that are waited for."""
    kinds = {planned.KIND for planned in plan.objects()} - ({"Namespace"} if not settings.create_namespace else set())
    needed = [
        Permission(group=group, resource=resource, namespace=None if kind == "Namespace" else plan.namespace)
        for kind, (group, resource) in _RESOURCES.items()
        if kind in kinds
    ]
    if settings.makes_token_secret or settings.made_pull_secrets:
        needed.append(Permission(group="", resource="secrets", namespace=plan.namespace))
    needed.append(Permission(group="", resource="pods", namespace=plan.namespace, verbs=("get", "list", "watch")))
    if settings.platform == "install":
        # What the platform's chart makes beside its own Deployment; Helm keeps its record in a Secret.
        needed += [
            Permission(group=group, resource=resource, namespace=namespace, verbs=("create", "get", "patch", "delete"))
            for group, resource, namespace in (
                ("apps", "deployments", settings.platform_namespace),
                ("", "secrets", settings.platform_namespace),
                ("apiextensions.k8s.io", "customresourcedefinitions", None),
                ("rbac.authorization.k8s.io", "clusterroles", None),
                ("rbac.authorization.k8s.io", "clusterrolebindings", None),
                ("admissionregistration.k8s.io", "validatingwebhookconfigurations", None),
                ("admissionregistration.k8s.io", "mutatingwebhookconfigurations", None),
            )
        ]
    return tuple(needed)


# Judged from what the cluster shows at this moment: an autoscaler or a provisioner may know better.
_ESTIMATES = ("cluster.permissions", "storage.access_mode", "gpu.product", "gpu.capacity", "placement.jobs")


def said(found: Check) -> str:
    """A finding as one line for the person at the keyboard: key, value, allowed, what to do."""
    line = f"{found.seen}; allowed: {found.expected}. {found.remedy}"
    if found.id in _ESTIMATES:
        line += f" If you know better, as with nodes that an autoscaler makes: allow_findings: [{found.id}]."
    return line


def problems_of(checks: Iterable[Check]) -> list[str]:
    return [said(found) for found in checks if found.stops]


def prerequisites(snapshot: Snapshot, plan: GraphPlan, settings: ClusterSettings) -> tuple[Check, ...]:
    """Every check, in the order in which a person would look."""
    access = cluster_access(snapshot)
    if access.ok is False:
        return (access,)
    checks = (
        access,
        kubernetes_version(snapshot, settings),
        namespace_there(snapshot, plan, settings),
        pod_security(snapshot, plan, settings),
        permissions(snapshot, settings),
        platform_crds(snapshot, settings),
        platform_owner(snapshot, settings),
        platform_namespace(snapshot, settings),
        storage_class(snapshot, plan, settings),
        access_mode(snapshot, plan, settings),
        model_cache(snapshot, plan, settings),
        *([token_secret(snapshot, plan.token, plan.namespace, settings)] if plan.token is not None else []),
        *(pull_secret(snapshot, name, settings) for name in plan.pull_secrets),
        priority_class(snapshot, plan, settings),
        one_stack(snapshot, plan, settings),
        gpu_product(snapshot, plan),
        gpu_capacity(snapshot, plan),
        job_placement(snapshot, plan),
    )
    return accept(checks, settings.allow_findings)


# --- reaching it -------------------------------------------------------------------------------------------------


def cluster_access(snapshot: Snapshot, key: str = "kubeconfig", context_key: str = "context") -> Check:
    """The kubeconfig can be read, has the context, and the API server lets us in."""
    title = "The API server answers"
    contexts = listed(snapshot.contexts, "none in this file")
    where = f"{context_key}: {snapshot.context!r} of {snapshot.kubeconfig}"
    if snapshot.problem == "kubeconfig":
        return finding(
            "cluster.access",
            title,
            f"{key}: {snapshot.kubeconfig!r} {snapshot.message}",
            "the path of a kubeconfig file that you can read",
            f"Set {key} to where your cluster's kubeconfig lies; the ambient one is never used.",
        )
    if snapshot.problem == "context":
        return finding(
            "cluster.access",
            title,
            f"{context_key}: {snapshot.context!r} is not in {snapshot.kubeconfig}",
            contexts,
            f"Set {context_key} to one of them. The current context is never taken by itself.",
        )
    if snapshot.problem == "credentials":
        return finding(
            "cluster.access",
            title,
            f"{where} gives no credentials: {snapshot.message}",
            "credentials that the API server accepts",
            f"Try `kubectl --kubeconfig {snapshot.kubeconfig} --context {snapshot.context} version`; install the "
            "plugin or log in again as your provider says.",
        )
    if snapshot.problem == "unauthorised":
        return finding(
            "cluster.access",
            title,
            f"{where} was refused by {snapshot.server}: {snapshot.message}",
            "credentials that the API server accepts",
            "They have expired or are for another cluster: log in again and try "
            f"`kubectl --kubeconfig {snapshot.kubeconfig} --context {snapshot.context} auth whoami`.",
        )
    if snapshot.problem:
        return finding(
            "cluster.access",
            title,
            f"{where}: {snapshot.server} does not answer: {snapshot.message}",
            "an API server that answers",
            f"Is the cluster running and the network (VPN, proxy) up? Other contexts in this file: {contexts}. Try "
            f"`kubectl --kubeconfig {snapshot.kubeconfig} --context {snapshot.context} version`.",
        )
    return passed("cluster.access", title, f"{snapshot.server} {snapshot.version}", "an API server that answers")


def kubernetes_version(snapshot: Snapshot, settings: ClusterSettings) -> Check:
    found = numbers(snapshot.version.removeprefix("v"))[:2]
    least = settings.minimum_kubernetes
    if not found:
        return unknown("cluster.version", "Kubernetes is new enough", f"version {snapshot.version!r}", least)
    return check(
        "cluster.version",
        "Kubernetes is new enough",
        found >= numbers(least),
        f"context: {snapshot.context!r} runs Kubernetes {snapshot.version}",
        f"{least} or newer",
        "The Dynamo platform chart refuses older ones: upgrade the cluster or choose another context.",
    )


def permissions(snapshot: Snapshot, settings: ClusterSettings) -> Check:
    title = "What will be created is permitted"
    expected = "create, get, list, watch, patch and delete on what the stack creates"
    if snapshot.denied is None:
        return unknown("cluster.permissions", title, "not asked", expected)
    return check(
        "cluster.permissions",
        title,
        not snapshot.denied,
        f"context: {snapshot.context!r} may not {listed(snapshot.denied)}" if snapshot.denied else "permitted",
        expected,
        "Use credentials that may, or have a cluster administrator grant it"
        + (
            "; installing the platform needs an administrator (platform: existing uses one that "
            "an administrator installed)."
            if settings.platform == "install"
            else "."
        ),
    )


def namespace_there(snapshot: Snapshot, plan: GraphPlan, settings: ClusterSettings) -> Check:
    title = "The namespace is there, or will be made"
    expected = "a namespace of the cluster, or create_namespace: true"
    if not snapshot.was_read("Namespace"):
        return unknown("namespace.there", title, snapshot.why_unread("Namespace"), expected)
    found = snapshot.one("Namespace", plan.namespace)
    if found is None:
        if settings.create_namespace:
            return passed("namespace.there", title, "will be made", expected)
        others = [name_of(entry) for entry in snapshot.all("Namespace")]
        return finding(
            "namespace.there",
            title,
            f"namespace: {plan.namespace!r} does not exist",
            listed(others) if others else expected,
            f"Set create_namespace to true, or have it made: kubectl create namespace {plan.namespace}.",
        )
    if at(found, "status.phase") == "Terminating" or at(found, "metadata.deletionTimestamp"):
        return finding(
            "namespace.there",
            title,
            f"namespace: {plan.namespace!r} is being deleted",
            expected,
            "Nothing can be created in it. Wait until it is gone (docs/runbooks/kubernetes-destroy.md), or choose "
            "another name.",
        )
    if settings.create_namespace and foreign(found, settings):
        return finding(
            "namespace.there",
            title,
            f"namespace: {plan.namespace!r} exists already{owner_text(found, settings)}",
            "a namespace that is not there yet, or create_namespace: false",
            "Set create_namespace to false to use it: creating never takes over what somebody else made.",
        )
    return passed("namespace.there", title, "exists", expected)


def pod_security(snapshot: Snapshot, plan: GraphPlan, settings: ClusterSettings) -> Check:
    """Pods that the namespace's level refuses are never made, and the graph waits for them without a word."""
    id_, title = "namespace.pod_security", "The namespace admits the pods"
    planned = plan.namespace_object.metadata.labels if settings.create_namespace else {}
    if not snapshot.was_read("Namespace") and ENFORCE_LABEL not in planned:
        return unknown(id_, title, snapshot.why_unread("Namespace"), "a level that admits them")
    level = enforced_level({**labels_of(snapshot.one("Namespace", plan.namespace) or {}), **planned})
    pods = planned_pods(plan)
    refused = {name: ", ".join(faults) for name, spec in pods if (faults := violations(spec, level))}
    admitting = [each for each in LEVELS if not any(violations(spec, each) for _, spec in pods)]
    if not refused:
        return passed(id_, title, f"{ENFORCE_LABEL}: {level}", " or ".join(admitting))
    lower = (
        f"Take {ENFORCE_LABEL} out of labels"
        if ENFORCE_LABEL in planned
        else "Choose another namespace, or have its owner lower the level: "
        f"kubectl label --overwrite namespace {plan.namespace} {ENFORCE_LABEL}={admitting[-1]}"
    )
    return finding(
        id_,
        title,
        f"namespace: {plan.namespace!r} enforces the Pod Security Standard {level!r}, which refuses the pods of "
        + grouped(refused),
        f"a namespace at the level {' or '.join(admitting)}",
        f"{lower}: the engine needs what the level forbids. docs/runbooks/kubernetes-not-ready.md.",
    )


def planned_pods(plan: GraphPlan) -> list[tuple[str, Thing]]:
    """(component or Job, pod spec) of everything that is planned."""
    return [
        (component or name_of(manifest), template.get("spec") or {})
        for manifest in (planned.manifest() for planned in plan.objects())
        for component, template in pod_templates(manifest)
    ]


def foreign(thing: Thing, settings: ClusterSettings) -> bool:
    """Whether the program's own stack did not make it."""
    return bool(settings.stack_annotation) and annotations_of(thing).get(settings.stack_annotation) != settings.stack


def owner_text(thing: Thing, settings: ClusterSettings) -> str:
    owner = annotations_of(thing).get(settings.stack_annotation, "")
    return f" and belongs to the stack {owner}" if owner else " and was not made by this stack"


# --- the platform ------------------------------------------------------------------------------------------------


def platform_crds(snapshot: Snapshot, settings: ClusterSettings) -> Check:
    title = "The Dynamo CRDs are there"
    expected = f"{GRAPH_PLURAL}.{GRAPH_GROUP} at {GRAPH_VERSION}"
    if not snapshot.was_read("APIResource"):
        return unknown("platform.crds", title, snapshot.why_unread("APIResource"), expected)
    served = graph_versions(snapshot)
    if settings.platform == "install":
        seen = f"{listed(served)} served" if served else "will be installed with the platform"
        return passed("platform.crds", title, seen, expected)
    if not served:
        return finding(
            "platform.crds",
            title,
            f"platform: existing, but the cluster has no {GRAPH_PLURAL}.{GRAPH_GROUP}",
            f"install, or a cluster with {expected}",
            "Set platform to install, or have the dynamo-platform chart installed first.",
        )
    return check(
        "platform.crds",
        title,
        GRAPH_VERSION in served,
        f"platform: existing, and it serves {GRAPH_PLURAL} at {listed(served)} only",
        expected,
        "The platform is older than 1.2.0, which serves v1beta1 first: have it upgraded.",
    )


def graph_versions(snapshot: Snapshot) -> list[str]:
    """Versions at which the API server serves graphs."""
    return [
        str(entry["version"])
        for entry in snapshot.all("APIResource")
        if entry.get("group") == GRAPH_GROUP and entry.get("name") == GRAPH_PLURAL
    ]


def platform_owner(snapshot: Snapshot, settings: ClusterSettings) -> Check:
    """One operator in a cluster: installed by this stack, or by somebody else and used."""
    title = "One Dynamo operator in the cluster"
    expected = "one operator: this stack's (install), or one that is there (existing)"
    if not snapshot.was_read("Operator"):
        return unknown("platform.operator", title, snapshot.why_unread("Operator"), expected)
    operators = snapshot.all("Operator")
    seen = [operator_text(entry) for entry in operators]
    if settings.platform == "existing":
        if not operators:
            # Not a finding: an operator may have been deployed without the chart, and CRDs are another check.
            return unknown("platform.operator", title, "no Deployment with the chart's labels", "an operator that runs")
        return passed("platform.operator", title, listed(seen), expected)
    others = [
        operator_text(entry)
        for entry in operators
        if helm_release(entry) != (settings.platform_namespace, settings.platform_release)
    ]
    return check(
        "platform.operator",
        title,
        not others,
        f"platform: install, but an operator runs already: {listed(others)}" if others else listed(seen, "none yet"),
        "existing, since a cluster has room for one operator" if others else expected,
        "Set platform to existing. Two operators write to the same objects and install the same cluster-wide CRDs and "
        "webhooks.",
    )


def platform_namespace(snapshot: Snapshot, settings: ClusterSettings) -> Check:
    title, expected = "The platform's namespace is there, or will be made", "one that is there, or will be made"
    if settings.platform == "existing":
        return unknown("platform.namespace", title, "the platform is there already", expected)
    if not snapshot.was_read("Namespace"):
        return unknown("platform.namespace", title, snapshot.why_unread("Namespace"), expected)
    name = settings.platform_namespace
    found = snapshot.one("Namespace", name)
    if found is None and not settings.platform_create_namespace:
        return finding(
            "platform.namespace",
            title,
            f"platform_namespace: {name!r} does not exist",
            listed(name_of(entry) for entry in snapshot.all("Namespace")),
            f"Set platform_create_namespace to true, or have it made: kubectl create namespace {name}.",
        )
    if found is not None and settings.platform_create_namespace and foreign(found, settings):
        return finding(
            "platform.namespace",
            title,
            f"platform_namespace: {name!r} exists already{owner_text(found, settings)}",
            "a namespace that is not there yet, or platform_create_namespace: false",
            "If the Dynamo platform is in it, set platform to existing; if not, set platform_create_namespace to "
            "false.",
        )
    return passed("platform.namespace", title, "exists" if found else "will be made", expected)


def helm_release(thing: Thing) -> tuple[str, str]:
    notes = annotations_of(thing)
    return notes.get("meta.helm.sh/release-namespace", ""), notes.get("meta.helm.sh/release-name", "")


def operator_text(thing: Thing) -> str:
    """`dynamo-system/dynamo-platform-dynamo-operator-controller-manager 1.2.1 (Helm release dynamo-platform)`."""
    version = labels_of(thing).get("app.kubernetes.io/version", "")
    release = helm_release(thing)[1]
    text = f"{at(thing, 'metadata.namespace')}/{name_of(thing)}"
    return text + (f" {version}" if version else "") + (f" (Helm release {release})" if release else "")


# --- storage -----------------------------------------------------------------------------------------------------


def storage_class(snapshot: Snapshot, plan: GraphPlan, settings: ClusterSettings) -> Check:
    title = "The storage class is there"
    if plan.claim is None:
        return unknown("storage.class", title, "the claim exists already", "any")
    if not snapshot.was_read("StorageClass"):
        return unknown("storage.class", title, snapshot.why_unread("StorageClass"), "a storage class of the cluster")
    classes = class_texts(snapshot)
    name = plan.claim.spec.storage_class_name
    if name is None:
        default = default_class(snapshot)
        return check(
            "storage.class",
            title,
            default is not None,
            f"default: {default}"
            if default
            else "model_cache_storage_class: not set, and the cluster has no default storage class",
            listed(classes, "none: the cluster has no storage class"),
            "Set model_cache_storage_class to one of them, shared between nodes and fast enough to load from."
            if classes
            else "Have a storage class made by whoever runs the cluster, or fill a claim by hand and set "
            "model_cache_existing.",
        )
    return check(
        "storage.class",
        title,
        snapshot.one("StorageClass", name) is not None,
        f"model_cache_storage_class: {name!r} is not a storage class of this cluster"
        if snapshot.one("StorageClass", name) is None
        else f"model_cache_storage_class: {name}",
        listed(classes, "none: the cluster has no storage class"),
        "Set model_cache_storage_class to one of them."
        if classes
        else "Have a storage class made by whoever runs the cluster, or fill a claim by hand and set "
        "model_cache_existing.",
    )


def class_texts(snapshot: Snapshot) -> list[str]:
    return [
        name_of(entry) + (" (default)" if annotations_of(entry).get(DEFAULT_CLASS) == "true" else "")
        for entry in snapshot.all("StorageClass")
    ]


def default_class(snapshot: Snapshot) -> str | None:
    """The class a claim without one gets: the newest of the default ones, as the API server chooses."""
    defaults = [entry for entry in snapshot.all("StorageClass") if annotations_of(entry).get(DEFAULT_CLASS) == "true"]
    newest = max(defaults, key=lambda entry: str(at(entry, "metadata.creationTimestamp")), default=None)
    return name_of(newest) if newest is not None else None


def mounting_pods(plan: GraphPlan) -> int:
    """How many pods of the graph mount the model cache."""
    manifest = plan.graph.manifest()
    replicas = _replicas(manifest)
    return sum(
        replicas[component]
        for component, template in pod_templates(manifest)
        if any(
            at(volume, "persistentVolumeClaim.claimName") == plan.claim_name
            for volume in at(template, "spec.volumes") or ()
        )
    )


def access_mode(snapshot: Snapshot, plan: GraphPlan, settings: ClusterSettings) -> Check:
    """Hints from the class's provisioner: some volumes are never for several nodes."""
    title = "The storage class can do the access mode"
    if plan.claim is None:
        return unknown("storage.access_mode", title, "the claim exists already", "any")
    modes = plan.claim.spec.access_modes
    name = plan.claim.spec.storage_class_name or default_class(snapshot)
    found = snapshot.one("StorageClass", name) if name else None
    if found is None:
        return unknown("storage.access_mode", title, "the class was not read", "a class for several nodes")
    provisioner = str(found.get("provisioner"))
    why = ONE_NODE_PROVISIONERS.get(provisioner)
    if why is None or "ReadWriteMany" not in modes:
        return passed("storage.access_mode", title, f"{listed(modes)} from {provisioner}", f"{listed(modes)}")
    candidates = [
        name_of(entry)
        for entry in snapshot.all("StorageClass")
        if str(entry.get("provisioner")) not in ONE_NODE_PROVISIONERS
    ]
    return finding(
        "storage.access_mode",
        title,
        f"model_cache_access_mode: 'ReadWriteMany' from the storage class {name!r} ({provisioner}), which is {why}",
        f"a class for several nodes ({listed(candidates, 'this cluster has none')})",
        "Set model_cache_storage_class to such a class, or model_cache_access_mode to ReadWriteOnce where one pod "
        "mounts it.",
    )


def model_cache(snapshot: Snapshot, plan: GraphPlan, settings: ClusterSettings) -> Check:
    title = "The model cache's claim"
    id_ = f"claim.{plan.claim_name}"
    if not snapshot.was_read("PersistentVolumeClaim"):
        return unknown(id_, title, snapshot.why_unread("PersistentVolumeClaim"), "read")
    found = snapshot.one("PersistentVolumeClaim", plan.claim_name)
    claims = [name_of(entry) for entry in snapshot.all("PersistentVolumeClaim")]
    if plan.claim is not None:
        if found is not None and foreign(found, settings):
            return finding(
                id_,
                title,
                f"model_cache_claim: {plan.claim_name!r} exists already in {plan.namespace}"
                + owner_text(found, settings),
                "a name that is free, or model_cache_existing: true",
                "Set model_cache_existing to true to use it, or model_cache_claim to another name.",
            )
        return passed(id_, title, "exists" if found else "will be made", "made by this stack")
    if found is None:
        return finding(
            id_,
            title,
            f"model_cache_claim: {plan.claim_name!r} does not exist in {plan.namespace}, and model_cache_existing is "
            "true",
            listed(claims, "none there; model_cache_existing: false makes one"),
            "Set model_cache_claim to one of them, or model_cache_existing to false.",
        )
    wrong, remedies = _claim_faults(found, plan)
    return check(
        id_,
        title,
        not wrong,
        f"model_cache_claim: {plan.claim_name!r} {listed(wrong)}" if wrong else "exists and fits",
        f"at least {plan.model.size_bytes / 2**30:.0f}Gi, for the {mounting_pods(plan)} pods that mount it",
        " ".join(remedies),
    )


def _claim_faults(claim: Thing, plan: GraphPlan) -> tuple[list[str], list[str]]:
    wrong, remedies = [], []
    status = claim.get("status") or {}
    size = (status.get("capacity") or {}).get("storage") or at(claim, "spec.resources.requests.storage")
    modes = status.get("accessModes") or at(claim, "spec.accessModes") or ()
    if size is not None and quantity(size) < plan.model.size_bytes:
        wrong.append(f"holds {size}, less than the weights of {plan.model.name}")
        remedies.append("Have it enlarged (kubectl patch, where the class allows expansion) or use a larger one.")
    pods = mounting_pods(plan)
    if not {"ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"} & set(modes):
        wrong.append(f"is {listed(modes)}: the download cannot write to it")
        remedies.append("Use a claim that can be written to.")
    elif "ReadWriteMany" not in modes and pods > 1:
        wrong.append(f"is {listed(modes)}, and {pods} pods mount it, on several nodes perhaps")
        remedies.append("Use a claim with ReadWriteMany.")
    if status.get("phase") == "Lost":
        wrong.append("is Lost: its volume is gone")
        remedies.append("docs/runbooks/kubernetes-pvc-pending.md.")
    return wrong, remedies


# --- secrets and classes -----------------------------------------------------------------------------------------


def token_secret(snapshot: Snapshot, token: TokenKey, namespace: str, settings: ClusterSettings) -> Check:
    title = "The Hugging Face token"
    name, key = token.name, token.key
    id_ = f"secret.{name}"
    if not snapshot.was_read("Secret"):
        return unknown(id_, title, snapshot.why_unread("Secret"), f"key {key}")
    found = snapshot.one("Secret", name)
    if settings.makes_token_secret:
        if found is not None and foreign(found, settings):
            return finding(
                id_,
                title,
                f"hf_token_secret: {name!r} exists already in {namespace}{owner_text(found, settings)}",
                "a name that is free, or no token in the configuration",
                "Remove hf_token from the configuration to use the Secret that is there, or set "
                "hf_token_secret to another name.",
            )
        return passed(id_, title, "exists" if found else "will be made", f"key {key}")
    if found is None and settings.token_awaited:
        return unknown(id_, title, "not there yet; the download waits for it", f"key {key}")
    if found is None:
        return finding(
            id_,
            title,
            f"hf_token_secret: the Secret {name!r} does not exist in {namespace}",
            f"a Secret there with the key {key}, or a token in the configuration",
            f"`pulumi config set --secret hf_token <token>` has the program make it; or make it "
            f"yourself: kubectl --namespace {namespace} create secret generic {name} --from-file={key}=<file "
            "with the token>.",
        )
    keys = [str(entry) for entry in found.get("keys") or ()]
    empty = key in (found.get("empty") or ())
    return check(
        id_,
        title,
        key in keys and not empty,
        f"hf_token_secret: the Secret {name!r} has "
        + (f"an empty value at {key!r}" if empty else f"no key {key!r}; it has {listed(keys)}")
        if key not in keys or empty
        else f"{name} has the key {key}",
        f"a value at the key {key}" if empty or not keys else listed(keys),
        "Set hf_token_key to the key that holds the token, or add it: docs/runbooks/kubernetes-rotate-token.md.",
    )


def pull_secret(snapshot: Snapshot, name: str, settings: ClusterSettings) -> Check:
    id_, title = f"secret.{name}", "Registry credentials"
    expected = "a Secret of type kubernetes.io/dockerconfigjson"
    if not snapshot.was_read("Secret"):
        return unknown(id_, title, snapshot.why_unread("Secret"), expected)
    if name in settings.made_pull_secrets:
        return passed(id_, title, "will be made", expected)
    found = snapshot.one("Secret", name)
    kind = found.get("type") if found else None
    return check(
        id_,
        title,
        kind in ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg"),
        f"pull_secrets: {name!r} "
        + ("does not exist" if found is None else f"is of type {kind}")
        + f" in {snapshot.namespace}"
        if kind not in ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")
        else f"{kind}",
        expected,
        f"Make it: kubectl --namespace {snapshot.namespace} create secret docker-registry {name} --docker-server=… "
        "--docker-username=… --docker-password=…, or take it out of the list.",
    )


def priority_class(snapshot: Snapshot, plan: GraphPlan, settings: ClusterSettings) -> Check:
    """The API server refuses pods of a class that is not there, and says so only in an event."""
    title = "The priority class is there"
    names = sorted(
        {
            str(name)
            for _, template in pod_templates(plan.graph.manifest())
            if (name := at(template, "spec.priorityClassName"))
        }
    )
    if not names:
        return passed("placement.priority_class", title, "none is asked for", "none")
    if not snapshot.was_read("PriorityClass"):
        return unknown("placement.priority_class", title, snapshot.why_unread("PriorityClass"), listed(names))
    missing = [name for name in names if snapshot.one("PriorityClass", name) is None]
    return check(
        "placement.priority_class",
        title,
        not missing,
        f"priority_class: {listed(missing)} is not in this cluster" if missing else listed(names),
        listed(name_of(entry) for entry in snapshot.all("PriorityClass")),
        "Set priority_class to one of them, or leave it out.",
    )


def one_stack(snapshot: Snapshot, plan: GraphPlan, settings: ClusterSettings) -> Check:
    title = "No other stack serves under this name"
    id_ = f"graph.{plan.name}"
    if not snapshot.was_read("DynamoGraphDeployment"):
        return unknown(id_, title, snapshot.why_unread("DynamoGraphDeployment"), "free, or this stack's own")
    found = snapshot.one("DynamoGraphDeployment", plan.name)
    if found is None or not foreign(found, settings):
        return passed(id_, title, "this stack's own" if found else "free", "free, or this stack's own")
    others = [name_of(entry) for entry in snapshot.all("DynamoGraphDeployment")]
    return finding(
        id_,
        title,
        f"name: {plan.name!r} exists already in {plan.namespace}{owner_text(found, settings)}",
        f"a name that is free there (taken: {listed(others)})",
        "Set name or namespace to another one, or destroy the other stack first.",
    )


# --- GPUs --------------------------------------------------------------------------------------------------------


def gpu_product(snapshot: Snapshot, plan: GraphPlan) -> Check:
    """Some node has a GPU that the target is made for."""
    title = "GPUs are the ones the target is made for"
    allowed = sorted({product for need in plan.required_nodes for product in need.gpu_products})
    if not snapshot.was_read("Node"):
        return unknown("gpu.product", title, snapshot.why_unread("Node"), listed(allowed))
    if not allowed:
        return passed("gpu.product", title, "any", "any")
    there = rooms(snapshot.all("Node"), ())
    products = sorted({room.product for room in there if room.product})
    unlabelled = [room.name for room in there if not room.product]
    fitting = [room for room in there if room.product in allowed]
    if fitting:
        return passed("gpu.product", title, listed(products), " or ".join(allowed))
    if products:
        remedy = (
            "Choose the target for the GPUs that are there (python -m serving_catalog targets), or another context. "
            "Where they are the right ones under another name, such as when they are shared, say it in gpu_products."
        )
    else:
        remedy = (
            "The NVIDIA GPU operator's feature discovery sets the label, and its device plugin the GPUs: install it. "
            "Nodes without the label are used with gpu_products: [any] and a node_selector."
        )
    return finding(
        "gpu.product",
        title,
        f"target: {plan.target!r} is made for {plan.gpu}, and the cluster has {listed(products)}"
        if products
        else f"target: {plan.target!r}, and no node says which GPU it has"
        + (f" ({listed(unlabelled)} have some)" if unlabelled else ""),
        f"nodes whose label nvidia.com/gpu.product is {' or '.join(allowed)}",
        remedy,
    )


def gpu_capacity(snapshot: Snapshot, plan: GraphPlan) -> Check:
    """Every pod of the graph finds a node, beside what others hold. The graph's own pods hold nothing here."""
    title = "Enough free GPUs for the plan"
    expected = listed(
        f"{need.pods}x {need.component} with {need.gpus_per_pod} GPUs each" for need in plan.required_nodes if need.pods
    )
    for kind in ("Node", "AllPods"):
        if not snapshot.was_read(kind):
            return unknown("gpu.capacity", title, snapshot.why_unread(kind), expected)
    others = [pod for pod in snapshot.all("AllPods") if not _own(pod, plan)]
    nodes = snapshot.all("Node")
    short = [entry for entry in place(pods_of(plan), nodes, others) if entry.missing]
    seen = rooms_text(rooms(nodes, others))
    if not short:
        return passed("gpu.capacity", title, seen, expected)
    return finding(
        "gpu.capacity",
        title,
        f"target: {plan.target!r} needs more than is free: {_missing(short)}. Found: {seen}",
        expected,
        _what_helps(short),
    )


def job_placement(snapshot: Snapshot, plan: GraphPlan) -> Check:
    """Each Job finds a node, one at a time: a cluster of tainted GPU nodes alone has none for them."""
    title = "The Jobs find a node"
    expected = "a node for each of download, smoke test and benchmark"
    for kind in ("Node", "AllPods"):
        if not snapshot.was_read(kind):
            return unknown("placement.jobs", title, snapshot.why_unread(kind), expected)
    nodes = snapshot.all("Node")
    jobs = [planned for planned in (plan.download, plan.smoke, plan.benchmark) if planned is not None]
    short = [
        entry
        for planned in jobs
        for _, template in pod_templates(planned.manifest())
        for entry in place([(planned.name, template.get("spec") or {}, 1)], nodes, snapshot.all("AllPods"))
        if entry.missing
    ]
    return check(
        "placement.jobs",
        title,
        not short,
        f"target: {plan.target!r} has Jobs without a node: {_missing(short)}" if short else f"{len(jobs)} Jobs",
        expected,
        _what_helps(short),
    )


def pods_of(plan: GraphPlan) -> list[tuple[str, Thing, int]]:
    """(component, pod spec, replicas) of the graph."""
    manifest = plan.graph.manifest()
    replicas = _replicas(manifest)
    return [(name, template.get("spec") or {}, replicas[name]) for name, template in pod_templates(manifest)]


def _replicas(manifest: Thing) -> dict[str, int]:
    """Pods of each component; one where the graph leaves the number to the operator or to another controller."""
    return {entry["name"]: int(entry.get("replicas", 1)) for entry in manifest["spec"]["components"]}


def _own(pod: Thing, plan: GraphPlan) -> bool:
    return at(pod, "metadata.namespace") == plan.namespace and labels_of(pod).get(GRAPH_LABEL) == plan.name


def _missing(short: Sequence[Placement]) -> str:
    parts = []
    for entry in short:
        gpus = f" ({entry.gpus_per_pod} GPUs each)" if entry.gpus_per_pod else ""
        part = f"{entry.missing} of {entry.wanted} {entry.component} pods{gpus} find no node"
        if entry.refusals:
            part += f" ({grouped(entry.refusals)})"
        parts.append(part)
    return ", and ".join(parts)


def _what_helps(short: Sequence[Placement]) -> str:
    reasons = " ".join(why for entry in short for why in entry.refusals.values())
    steps = []
    if f"of {GPU} free" in reasons or "taken by other pods" in reasons:
        steps.append("Free GPUs or add nodes, or set fewer replicas.")
    if "taint " in reasons:
        for_all = any(not entry.gpus_per_pod for entry in short)
        steps.append(
            "Add a node without taints for frontend and Jobs, or let them onto the GPU nodes: gpu_nodes_for_all."
            if for_all
            else "Tolerate the taints with tolerations."
        )
    if "cordoned" in reasons:
        steps.append("Uncordon nodes that are fit to serve (kubectl uncordon).")
    if "of cpu free" in reasons or "of memory free" in reasons:
        steps.append("Ask for less cpu or memory with resources.")
    if not steps:
        steps.append("Compare the target and node_selector with the nodes' labels.")
    return " ".join([*steps, "docs/runbooks/kubernetes-unschedulable.md."])
