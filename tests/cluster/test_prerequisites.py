"""What keeps a plan from being carried out in a cluster, said before anything is created."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from serving_catalog import load_catalog
from serving_catalog.checks import Check
from serving_catalog.checks.cluster import Snapshot, grouped, place, quantity, requested
from serving_catalog.checks.cluster_prerequisites import (
    ClusterSettings,
    needed_permissions,
    pods_of,
    prerequisites,
    problems_of,
)
from serving_catalog.checks.pod_security import ENFORCE_LABEL
from serving_catalog.graphs import GraphPlan, GraphRequest, plan_graph
from serving_catalog.graphs.requests import (
    BenchmarkRequest,
    ModelCacheRequest,
    PlacementRequest,
    TolerationRequest,
)
from tests.cluster.snapshots import (
    CRDS,
    OPERATOR_DEPLOYMENT,
    holder,
    node,
    plain_node,
    storage_class,
    with_objects,
)

ANNOTATION = "gpt-oss-on-nvidia/stack"
STACK = "organization/gpt-oss/gb200"
ARM_TAINTS = (
    {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
    {"key": "kubernetes.io/arch", "value": "arm64", "effect": "NoSchedule"},
)
SETTINGS = ClusterSettings(stack=STACK, stack_annotation=ANNOTATION)


CATALOG = load_catalog()


def plan_of(target: str = "gb200-agg", **changes: Any) -> GraphPlan:
    cache_request = changes.pop("model_cache", ModelCacheRequest(storage_class="shared-files"))
    request = GraphRequest(target=target, model_cache=cache_request, annotations={ANNOTATION: STACK}, **changes)
    return plan_graph(request, CATALOG)


def owned(name: str, stack: str = STACK, **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "annotations": {ANNOTATION: stack}}, **more}


def enforcing(level: str, name: str = "gpt-oss") -> dict[str, Any]:
    """A namespace, with a level of the Pod Security Standards."""
    made = owned(name)
    made["metadata"]["labels"] = {ENFORCE_LABEL: level}
    return made


def trays(count: int = 2) -> list[dict[str, Any]]:
    return [node(f"gb200-{number}", taints=ARM_TAINTS) for number in range(1, count + 1)]


def cluster(**changes: Any) -> Snapshot:
    """A cluster where gb200-agg can be made: two free trays, a node without GPU, a class for several nodes."""
    whole = Snapshot(
        at="2026-11-21T07:20:00Z",
        kubeconfig="/home/me/.kube/config",
        context="gb200",
        contexts=("gb200", "h200"),
        server="https://gb200.example.com:6443",
        version="v1.34.2",
        namespace="gpt-oss",
        denied=(),
        objects={
            "Namespace": (owned("default"), owned("kube-system")),
            "APIResource": (),
            "Operator": (),
            "StorageClass": (
                storage_class("shared-files", "efs.csi.aws.com"),
                storage_class("disks", "ebs.csi.aws.com", True),
            ),
            "PriorityClass": ({"metadata": {"name": "serving"}},),
            "PersistentVolumeClaim": (),
            "DynamoGraphDeployment": (),
            "Secret": (owned("hf-token-secret", type="Opaque", keys=["HF_TOKEN"], empty=[]),),
            "Node": (*trays(), plain_node()),
            "AllPods": (),
        },
    )
    return with_objects(whole, **changes)


def findings(snapshot: Snapshot, plan: GraphPlan, settings: ClusterSettings = SETTINGS) -> dict[str, Check]:
    return {found.id: found for found in prerequisites(snapshot, plan, settings) if found.stops}


def test_a_cluster_that_fits_has_no_finding() -> None:
    assert not findings(cluster(), plan_of())
    assert problems_of(prerequisites(cluster(), plan_of(), SETTINGS)) == []


def test_what_may_not_be_read_is_no_finding() -> None:
    hidden = cluster(
        Namespace=None, APIResource=None, Operator=None, StorageClass=None, Secret=None, Node=None, AllPods=None,
        PersistentVolumeClaim=None, DynamoGraphDeployment=None, PriorityClass=None,
    )  # fmt: skip
    checks = prerequisites(hidden.model_copy(update={"denied": None}), plan_of(), SETTINGS)
    assert not [found for found in checks if found.stops]
    assert all("forbidden" in found.seen for found in checks if found.id in ("gpu.capacity", "storage.class"))


# --- reaching it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "message", "said"),
    [
        ("kubeconfig", "does not exist", ["kubeconfig: '/home/me/.kube/config' does not exist", "allowed: the path"]),
        ("context", "", ["context: 'gb200' is not in", "allowed: a, b"]),
        ("credentials", "exec: no aws", ["context: 'gb200'", "exec: no aws", "kubectl --kubeconfig"]),
        ("unauthorised", "status 401", ["was refused by https://gb200.example.com:6443: status 401", "log in again"]),
        ("unreachable", "no connection within 5 s", ["does not answer: no connection within 5 s", "VPN", "a, b"]),
    ],
)
def test_a_cluster_that_cannot_be_reached_is_the_only_finding(problem: str, message: str, said: list[str]) -> None:
    broken = cluster(Node=[]).model_copy(update={"problem": problem, "message": message, "contexts": ("a", "b")})
    lines = problems_of(prerequisites(broken, plan_of(), SETTINGS))
    assert len(lines) == 1
    for words in said:
        assert words in lines[0]


@pytest.mark.parametrize("level", ["privileged", "baseline"])
def test_a_namespace_that_admits_the_pods_is_no_finding(level: str) -> None:
    there = cluster(Namespace=[enforcing(level)])
    assert not findings(there, plan_of(), SETTINGS.model_copy(update={"create_namespace": False}))


# --- one wrong thing at a time -----------------------------------------------------------------------------------


def _installed(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(OPERATOR_DEPLOYMENT) | changes


@pytest.mark.parametrize(
    ("snapshot", "plan", "changes", "id_", "said"),
    [
        (
            cluster().model_copy(update={"version": "v1.29.4-eks-1"}),
            {},
            {},
            "cluster.version",
            ["context: 'gb200' runs Kubernetes v1.29.4-eks-1", "1.30 or newer"],
        ),
        (
            cluster().model_copy(update={"denied": ("create jobs.batch in gpt-oss",)}),
            {},
            {"platform": "existing"},
            "cluster.permissions",
            ["may not create jobs.batch in gpt-oss", "a cluster administrator"],
        ),
        (
            cluster(),
            {"namespace": "serving"},
            {"create_namespace": False},
            "namespace.there",
            ["namespace: 'serving' does not exist", "default, kube-system", "create_namespace to true"],
        ),
        (
            cluster(Namespace=[{"metadata": {"name": "gpt-oss"}}]),
            {},
            {},
            "namespace.there",
            ["'gpt-oss' exists already and was not made by this stack", "create_namespace to false"],
        ),
        (
            cluster(Namespace=[{**owned("gpt-oss"), "status": {"phase": "Terminating"}}]),
            {},
            {},
            "namespace.there",
            ["is being deleted", "docs/runbooks/kubernetes-destroy.md"],
        ),
        (
            cluster(Namespace=[enforcing("restricted")]),
            {},
            {"create_namespace": False},
            "namespace.pod_security",
            [
                "namespace: 'gpt-oss' enforces the Pod Security Standard 'restricted'",
                "Frontend: main: runAsNonRoot is not true; TrtllmWorker: wait-for-model",
                "at the level privileged or baseline",
                "kubectl label --overwrite namespace gpt-oss pod-security.kubernetes.io/enforce=baseline",
                "docs/runbooks/kubernetes-not-ready.md",
            ],
        ),
        (
            cluster(Namespace=[enforcing("baseline")]),
            {"resources": {"worker": {"rdma/ib": "1"}}},
            {"create_namespace": False},
            "namespace.pod_security",
            ["TrtllmWorker: main: adds the capability IPC_LOCK", "the level privileged.", "enforce=privileged"],
        ),
        (
            cluster(),
            {"labels": {ENFORCE_LABEL: "restricted"}},
            {},
            "namespace.pod_security",
            ["'gpt-oss' enforces", "Take pod-security.kubernetes.io/enforce out of labels"],
        ),
        (
            cluster(),
            {},
            {"platform": "existing"},
            "platform.crds",
            ["platform: existing, but the cluster has no dynamographdeployments.nvidia.com", "platform to install"],
        ),
        (
            cluster(APIResource=[{**CRDS[0], "version": "v1alpha1"}], Operator=[_installed()]),
            {},
            {"platform": "existing"},
            "platform.crds",
            ["serves dynamographdeployments at v1alpha1 only", "1.2.0"],
        ),
        (
            cluster(
                APIResource=CRDS,
                Operator=[
                    _installed(metadata={**OPERATOR_DEPLOYMENT["metadata"], "namespace": "nvidia", "annotations": {}})
                ],
            ),
            {},
            {},
            "platform.operator",
            ["platform: install, but an operator runs already: nvidia/dynamo-platform", "platform to existing"],
        ),
        (
            cluster(Namespace=[{"metadata": {"name": "dynamo-system"}}]),
            {},
            {},
            "platform.namespace",
            ["platform_namespace: 'dynamo-system' exists already", "platform to existing"],
        ),
        (
            cluster(),
            {},
            {"platform_create_namespace": False},
            "platform.namespace",
            ["platform_namespace: 'dynamo-system' does not exist", "platform_create_namespace to true"],
        ),
        (
            cluster(),
            {"model_cache": ModelCacheRequest(storage_class="fast")},
            {},
            "storage.class",
            ["model_cache_storage_class: 'fast' is not", "allowed: shared-files, disks (default)"],
        ),
        (
            cluster(StorageClass=[storage_class("shared-files", "x")]),
            {"model_cache": ModelCacheRequest()},
            {},
            "storage.class",
            ["model_cache_storage_class: not set, and the cluster has no default", "allowed: shared-files"],
        ),
        (
            cluster(StorageClass=[]),
            {},
            {},
            "storage.class",
            ["the cluster has no storage class", "model_cache_existing"],
        ),
        (
            cluster(),
            {"model_cache": ModelCacheRequest(storage_class="disks")},
            {},
            "storage.access_mode",
            ["'ReadWriteMany' from the storage class 'disks' (ebs.csi.aws.com), which is Amazon EBS", "(shared-files)"],
        ),
        (
            cluster(PersistentVolumeClaim=[owned("model-cache", "organization/gpt-oss/other")]),
            {},
            {},
            "claim.model-cache",
            [
                "exists already in gpt-oss and belongs to the stack organization/gpt-oss/other",
                "model_cache_existing to",
            ],
        ),
        (
            cluster(PersistentVolumeClaim=[owned("weights")]),
            {"model_cache": ModelCacheRequest(existing=True)},
            {},
            "claim.model-cache",
            ["model_cache_claim: 'model-cache' does not exist in gpt-oss", "allowed: weights"],
        ),
        (
            cluster(
                PersistentVolumeClaim=[
                    owned(
                        "model-cache",
                        spec={"accessModes": ["ReadWriteOnce"]},
                        status={"phase": "Bound", "capacity": {"storage": "50Gi"}, "accessModes": ["ReadWriteOnce"]},
                    )
                ]
            ),
            {"model_cache": ModelCacheRequest(existing=True)},
            {},
            "claim.model-cache",
            ["holds 50Gi, less than the weights", "is ReadWriteOnce, and 2 pods mount it", "allowed: at least 61Gi"],
        ),
        (
            cluster(
                PersistentVolumeClaim=[
                    owned("model-cache", status={"phase": "Lost", "accessModes": ["ReadOnlyMany"]}, spec={})
                ]
            ),
            {"model_cache": ModelCacheRequest(existing=True)},
            {},
            "claim.model-cache",
            ["is ReadOnlyMany: the download cannot write", "is Lost"],
        ),
        (
            cluster(Secret=[]),
            {},
            {},
            "secret.hf-token-secret",
            ["hf_token_secret: the Secret 'hf-token-secret' does not exist in gpt-oss", "set --secret hf_token"],
        ),
        (
            cluster(Secret=[owned("hf-token-secret", keys=["token"], empty=[])]),
            {},
            {},
            "secret.hf-token-secret",
            ["has no key 'HF_TOKEN'; it has token", "allowed: token", "hf_token_key"],
        ),
        (
            cluster(Secret=[owned("hf-token-secret", keys=["HF_TOKEN"], empty=["HF_TOKEN"])]),
            {},
            {},
            "secret.hf-token-secret",
            ["has an empty value at 'HF_TOKEN'"],
        ),
        (
            cluster(Secret=[{"metadata": {"name": "hf-token-secret"}, "keys": ["HF_TOKEN"]}]),
            {},
            {"makes_token_secret": True},
            "secret.hf-token-secret",
            ["exists already in gpt-oss and was not made by this stack", "Remove hf_token"],
        ),
        (
            cluster(),
            {"pull_secrets": ("ngc",)},
            {},
            "secret.ngc",
            ["pull_secrets: 'ngc' does not exist in gpt-oss", "create secret docker-registry ngc"],
        ),
        (
            cluster(Secret=[*cluster().all("Secret"), owned("ngc", type="Opaque", keys=[])]),
            {"pull_secrets": ("ngc",)},
            {},
            "secret.ngc",
            ["'ngc' is of type Opaque"],
        ),
        (
            cluster(),
            {"placement": PlacementRequest(priority_class="urgent")},
            {},
            "placement.priority_class",
            ["priority_class: urgent is not in this cluster", "allowed: serving"],
        ),
        (
            cluster(DynamoGraphDeployment=[owned("gpt-oss-agg", "organization/gpt-oss/other")]),
            {},
            {},
            "graph.gpt-oss-agg",
            ["name: 'gpt-oss-agg' exists already in gpt-oss and belongs to the stack organization/gpt-oss/other"],
        ),
        (
            cluster(DynamoGraphDeployment=[{"metadata": {"name": "gpt-oss-agg"}}]),
            {},
            {},
            "graph.gpt-oss-agg",
            ["and was not made by this stack"],
        ),
        (
            cluster(Node=[node("hgx", product="NVIDIA-H200", architecture="amd64", gpus=8), plain_node()]),
            {},
            {},
            "gpu.product",
            ["target: 'gb200-agg' is made for GB200, and the cluster has NVIDIA-H200", "Choose the target"],
        ),
        (
            cluster(Node=[node("bare", product="", architecture="arm64", taints=()), plain_node()]),
            {},
            {},
            "gpu.product",
            ["no node says which GPU it has (bare have some)", "GPU operator"],
        ),
        (
            cluster(Node=[plain_node()]),
            {},
            {},
            "gpu.capacity",
            ["1 of 1 TrtllmWorker pods (4 GPUs each) find no node", "Found: no node with GPUs"],
        ),
        (
            cluster(AllPods=[holder("gb200-1", 1), holder("gb200-2", 4)]),
            {},
            {},
            "gpu.capacity",
            [
                "gb200-1: 3 of nvidia.com/gpu free, 4 needed; gb200-2: 0 of nvidia.com/gpu free, 4 needed",
                "gb200-1: arm64, NVIDIA-GB200, 4 GPUs of which 3 free, taint nvidia.com/gpu=present:NoSchedule",
                "Free GPUs or add nodes",
            ],
        ),
        (
            cluster(
                Node=[node("gb200-1", taints=({"key": "team", "value": "a", "effect": "NoExecute"},)), plain_node()]
            ),
            {},
            {},
            "gpu.capacity",
            ["gb200-1: taint team=a:NoExecute is not tolerated", "tolerations"],
        ),
        (
            cluster(Node=[node("gb200-1", cordoned=True), node("gb200-2", down=True), plain_node()]),
            {},
            {},
            "gpu.capacity",
            ["gb200-1: it is cordoned", "gb200-2: it is not Ready", "uncordon"],
        ),
        (
            cluster(Node=[node("x86", architecture="amd64"), plain_node()]),
            {},
            {},
            "gpu.capacity",
            ["x86: kubernetes.io/arch is amd64, not arm64"],
        ),
        (
            cluster(),
            {"placement": PlacementRequest(node_selector={"rack": "b"})},
            {},
            "gpu.capacity",
            ["(gb200-1, gb200-2: rack is not set, not b)", "node_selector"],
        ),
        (
            cluster(),
            {"placement": PlacementRequest(tolerations=(TolerationRequest(key="nvidia.com/gpu"),))},
            {},
            "gpu.capacity",
            ["taint kubernetes.io/arch=arm64:NoSchedule is not tolerated"],
        ),
        (
            cluster(Node=trays(1)),
            {"target": "gb200-disagg"},
            {},
            "gpu.capacity",
            [
                "1 of 1 TrtllmPrefillWorker pods (1 GPUs each) find no node (gb200-1: taken by other pods of the plan)",
                "set fewer replicas",
            ],
        ),
    ],
)
def test_what_is_wrong_is_said_with_key_value_and_what_is_allowed(
    snapshot: Snapshot, plan: Mapping[str, Any], changes: Mapping[str, Any], id_: str, said: list[str]
) -> None:
    settings = SETTINGS.model_copy(update=dict(changes))
    found = findings(snapshot, plan_of(**plan), settings)
    line = problems_of([found[id_]])[0]
    for words in said:
        assert words in line
    assert "allowed: " in line
    assert len(line.splitlines()) == 1


def test_everything_wrong_is_said_at_once() -> None:
    broken = cluster(StorageClass=[], Secret=[], Node=[plain_node()])
    assert {"storage.class", "secret.hf-token-secret", "gpu.product", "gpu.capacity"} <= set(
        findings(broken, plan_of())
    )


def test_a_finding_can_be_accepted_and_the_line_says_how() -> None:
    empty = cluster(Node=[plain_node()])
    lines = problems_of(prerequisites(empty, plan_of(), SETTINGS))
    assert any(line.endswith("allow_findings: [gpu.capacity].") for line in lines)
    accepting = SETTINGS.model_copy(update={"allow_findings": ("gpu.*",)})
    assert not findings(empty, plan_of(), accepting)
    gone = empty.model_copy(update={"problem": "unreachable"})
    assert problems_of(prerequisites(gone, plan_of(), SETTINGS.model_copy(update={"allow_findings": ("*",)})))


# --- what is not a finding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("snapshot", "plan", "changes"),
    [
        # A second up: everything is there, this stack's own, and its pods hold the GPUs.
        (
            cluster(
                Namespace=[owned("gpt-oss"), owned("dynamo-system")],
                APIResource=CRDS,
                Operator=[OPERATOR_DEPLOYMENT],
                PersistentVolumeClaim=[owned("model-cache")],
                DynamoGraphDeployment=[owned("gpt-oss-agg")],
                AllPods=[holder("gb200-1", 4, "gpt-oss", "gpt-oss-agg"), holder("gb200-2", 4)],
            ),
            {},
            {"makes_token_secret": True},
        ),
        (cluster(Secret=[]), {}, {"makes_token_secret": True}),
        (cluster(Secret=[]), {}, {"token_awaited": True}),
        (cluster(Secret=[]), {"hf_token_secret": None}, {}),
        (cluster(), {"pull_secrets": ("made",)}, {"made_pull_secrets": ("made",)}),
        (cluster(), {"placement": PlacementRequest(priority_class="serving")}, {}),
        (
            cluster(StorageClass=[storage_class("any", "efs.csi.aws.com", True)]),
            {"model_cache": ModelCacheRequest()},
            {},
        ),
        (cluster(APIResource=CRDS), {}, {"platform": "existing"}),
        (
            cluster(
                PersistentVolumeClaim=[
                    {
                        "metadata": {"name": "model-cache"},
                        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}},
                        "status": {"phase": "Pending"},
                    }
                ]
            ),
            {"model_cache": ModelCacheRequest(existing=True)},
            {},
        ),
        (cluster(AllPods=[{**holder("gb200-1", 4), "status": {"phase": "Succeeded"}}, holder("gb200-2", 4)]), {}, {}),
        (cluster(Node=[*trays(2), plain_node()]), {"target": "gb200-disagg"}, {}),
    ],
)
def test_what_is_as_it_should_be(snapshot: Snapshot, plan: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    assert not findings(snapshot, plan_of(**plan), SETTINGS.model_copy(update=dict(changes)))


@pytest.mark.parametrize("target", sorted(CATALOG.graphs))
def test_every_target_fits_its_own_machines_and_no_others(target: str) -> None:
    machines = {
        "GB200": trays(2),
        "B200": [node("b200", product="NVIDIA-B200", architecture="amd64", gpus=8)],
        "H200": [node("h200", product="NVIDIA-H200", architecture="amd64", gpus=8)],
    }
    plan = plan_of(target)
    for gpu, nodes in machines.items():
        found = findings(cluster(Node=[*nodes, plain_node()]), plan)
        assert ("gpu.capacity" in found) is (gpu != plan.gpu)


def test_jobs_need_a_node_too() -> None:
    found = findings(cluster(Node=trays(2)), plan_of(benchmark=BenchmarkRequest()))
    assert "gpt-oss-agg-benchmark" in found["placement.jobs"].seen


# --- the least permissions ---------------------------------------------------------------------------------------


def test_permissions_follow_what_is_created() -> None:
    existing = ClusterSettings(create_namespace=False, platform="existing")
    asked = {one.where for one in needed_permissions(plan_of(), existing)}
    assert asked == {
        "persistentvolumeclaims in gpt-oss",
        "configmaps in gpt-oss",
        "jobs.batch in gpt-oss",
        "dynamographdeployments.nvidia.com in gpt-oss",
        "pods in gpt-oss",
    }
    more = {
        one.where for one in needed_permissions(plan_of(network_policy=True), ClusterSettings(makes_token_secret=True))
    }
    assert more - asked == {
        "namespaces",
        "secrets in gpt-oss",
        "networkpolicies.networking.k8s.io in gpt-oss",
        "deployments.apps in dynamo-system",
        "secrets in dynamo-system",
        "customresourcedefinitions.apiextensions.k8s.io",
        "clusterroles.rbac.authorization.k8s.io",
        "clusterrolebindings.rbac.authorization.k8s.io",
        "validatingwebhookconfigurations.admissionregistration.k8s.io",
        "mutatingwebhookconfigurations.admissionregistration.k8s.io",
    }


# --- the scheduler's rules, as far as they are judged here -------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("4", 4), ("500m", 0.5), ("400Gi", 400 * 2**30), ("1e3", 1000), ("1k", 1000), ("2.5G", 2.5e9), ("1Ti", 2**40)],
)
def test_quantities(text: str, value: float) -> None:
    assert float(quantity(text)) == value


def test_what_is_no_quantity_is_refused() -> None:
    with pytest.raises(ValueError, match="'lots' is not a Kubernetes quantity"):
        quantity("lots")


def test_a_pod_asks_for_its_containers_together_or_its_largest_init_container() -> None:
    spec = {
        "containers": [{"resources": {"requests": {"cpu": "1"}}}, {"resources": {"limits": {"cpu": "500m"}}}],
        "initContainers": [{"resources": {"requests": {"cpu": "3", "memory": "1Gi"}}}],
    }
    assert requested(spec) == {"cpu": 3, "memory": 2**30}


GPU_NODE = node("n", taints=({"key": "k", "value": "v", "effect": "NoSchedule"},), labels={"zone": "a", "gen": "5"})


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({}, False),
        ({"tolerations": [{"operator": "Exists"}]}, True),
        ({"tolerations": [{"key": "k", "operator": "Exists"}]}, True),
        ({"tolerations": [{"key": "k", "value": "v"}]}, True),
        ({"tolerations": [{"key": "k", "value": "w"}]}, False),
        ({"tolerations": [{"key": "k", "operator": "Exists", "effect": "NoExecute"}]}, False),
    ],
)
def test_taints_and_tolerations(spec: Mapping[str, Any], fits: bool) -> None:
    assert (place([("c", spec, 1)], [GPU_NODE], ())[0].missing == 0) is fits


@pytest.mark.parametrize(
    ("operator", "key", "values", "fits"),
    [
        ("In", "zone", ["a", "b"], True),
        ("In", "zone", ["b"], False),
        ("NotIn", "zone", ["b"], True),
        ("NotIn", "zone", ["a"], False),
        ("NotIn", "absent", ["a"], True),
        ("Exists", "zone", [], True),
        ("Exists", "absent", [], False),
        ("DoesNotExist", "absent", [], True),
        ("DoesNotExist", "zone", [], False),
        ("Gt", "gen", ["4"], True),
        ("Gt", "gen", ["5"], False),
        ("Lt", "gen", ["6"], True),
        ("Lt", "zone", ["6"], False),
    ],
)
def test_required_node_affinity(operator: str, key: str, values: list[str], fits: bool) -> None:
    terms = [{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    spec = {"affinity": affinity, "tolerations": [{"operator": "Exists"}]}
    assert (place([("c", spec, 1)], [GPU_NODE], ())[0].missing == 0) is fits


def test_pods_with_few_gpus_leave_whole_nodes_to_those_that_need_one() -> None:
    def pod(gpus: int) -> dict[str, Any]:
        return {"containers": [{"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]}

    nodes = [node("a", taints=()), node("b", taints=())]
    assert [one.missing for one in place([("small", pod(1), 2), ("large", pod(4), 1)], nodes, ())] == [0, 0]
    assert [one.missing for one in place([("small", pod(1), 4), ("large", pod(4), 2)], nodes, ())] == [0, 4]


def test_what_is_said_of_many_nodes_alike_is_said_once() -> None:
    texts = {f"n{number}": "full" for number in range(8)} | {"x": "cordoned"}
    assert grouped(texts) == "n0, n1, n2, n3, n4, n5 and 2 more: full; x: cordoned"
    assert grouped({f"n{number}": str(number) for number in range(5)}, 2) == "n0: 0; n1: 1; and 3 nodes more"


def test_memory_counts_as_well() -> None:
    spec = {"containers": [{"resources": {"requests": {"memory": "1Ti"}}}]}
    found = place([("c", spec, 1)], [node("a", taints=())], ())[0]
    assert found.refusals == {"a": "960Gi of memory free, 1024Gi needed"}


def test_the_plans_pods_are_the_graphs() -> None:
    assert [(name, count) for name, _, count in pods_of(plan_of("h200-agg"))] == [("Frontend", 1), ("VllmWorker", 8)]


def test_settings_are_typed() -> None:
    wrong: Callable[..., ClusterSettings] = ClusterSettings
    with pytest.raises(ValidationError):
        wrong(platform="maybe")
