"""The reader, the prerequisites and diagnose.py against a real API server, scheduler and controllers."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import cluster as reader
import diagnose
import settings as program
from serving_catalog.checks import Verdict
from serving_catalog.checks.cluster import Snapshot
from serving_catalog.checks.cluster_causes import RUNBOOKS
from serving_catalog.checks.cluster_pods import NamespaceSettings
from serving_catalog.graphs import GraphPlan
from tests.kubernetes import pods
from tests.kubernetes.cluster import Cluster
from tests.stand_ins.dynamo_operator.operator import Operator

pytestmark = pytest.mark.kubernetes

STACK = "organization/gpt-oss/test"
TOKEN = "hf_not_a_real_one"


def planned(cluster: Cluster, namespace: str, stack: str = STACK, **knobs: Any) -> tuple[program.Settings, GraphPlan]:
    """Settings and plan of a stack in this cluster, as the program reads them."""
    values = {
        "kubeconfig": str(cluster.kubeconfig),
        "context": cluster.context,
        "namespace": namespace,
        "create_namespace": False,
        "target": "gb200-agg",
        "model_cache_storage_class": "shared-files",
        "platform": "existing",
        **knobs,
    }
    texts = {f"gpt-oss:{key}": value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    found, _, plan = program.read(texts, ("gpt-oss:hf_token",), "gpt-oss", stack)
    return found, plan


def problems(cluster: Cluster, namespace: str, **knobs: Any) -> list[str]:
    return reader.problems(*planned(cluster, namespace, **knobs))


def make_secret(cluster: Cluster, namespace: str, name: str = "hf-token-secret", key: str = "HF_TOKEN") -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": TOKEN},
        },
        "stringData": {key: TOKEN},
    }
    cluster.api.create(body)


def apply(cluster: Cluster, plan: GraphPlan, *, but: tuple[str, ...] = ()) -> None:
    """What the program would create, without waiting for any of it."""
    for planned_object in plan.objects():
        if planned_object.KIND not in ("Namespace", *but):
            cluster.api.create(planned_object.manifest())


def diagnosed(cluster: Cluster, namespace: str, name: str | None = None) -> dict[str, Any]:
    verdict = diagnose.verdict_of(cluster.kubeconfig, cluster.context, namespace, NamespaceSettings(name=name))
    return {check.id: check for check in verdict.checks}


@pytest.fixture(scope="module")
def furnished(dynamo_cluster: Cluster) -> Iterator[str]:
    """A namespace with a token, for tests that only look."""
    with dynamo_cluster.namespace("furnished") as name:
        make_secret(dynamo_cluster, name)
        yield name


@pytest.fixture(scope="module")
def served(dynamo_cluster: Cluster, dynamo_operator: Operator) -> Iterator[GraphPlan]:
    """A graph that is Ready, its claim bound and its Jobs complete."""
    with dynamo_cluster.namespace("served") as name:
        make_secret(dynamo_cluster, name)
        _, plan = planned(dynamo_cluster, name, rollout="blue_green")
        apply(dynamo_cluster, plan)
        ready(dynamo_cluster, name, plan.name)
        settled(dynamo_cluster, plan)
        yield plan


# --- prerequisites -----------------------------------------------------------------------------------------------


def test_a_namespace_whose_pod_security_refuses_the_pods_is_said(
    dynamo_cluster: Cluster, restricted_namespace: str
) -> None:
    make_secret(dynamo_cluster, restricted_namespace)
    [line] = problems(dynamo_cluster, restricted_namespace)
    assert f"namespace: '{restricted_namespace}' enforces the Pod Security Standard 'restricted'" in line
    assert "allowed: a namespace at the level privileged or baseline" in line


def test_a_cluster_that_has_everything_has_no_problem(dynamo_cluster: Cluster, furnished: str) -> None:
    assert problems(dynamo_cluster, furnished) == []


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        (
            {"model_cache_storage_class": "fast"},
            "model_cache_storage_class: 'fast' is not a storage class of this cluster; allowed: block (default), "
            "shared-files, shared-files-first-consumer.",
        ),
        ({"hf_token_secret": "absent"}, "hf_token_secret: the Secret 'absent' does not exist in"),
        ({"hf_token_key": "TOKEN"}, "has no key 'TOKEN'; it has HF_TOKEN; allowed: HF_TOKEN"),
        ({"namespace": "nowhere"}, "namespace: 'nowhere' does not exist; allowed: "),
        (
            {"model_cache_existing": True, "model_cache_storage_class": ""},
            "model_cache_claim: 'model-cache' does not exist in",
        ),
        ({"pull_secrets": ["ngc"]}, "pull_secrets: 'ngc' does not exist in"),
        (
            {"priority_class": "urgent"},
            "priority_class: urgent is not in this cluster; allowed: system-cluster-critical",
        ),
        (
            {"target": "gb200-agg", "replicas": {"worker": 4}},
            "1 of 4 TrtllmWorker pods (4 GPUs each) find no node",
        ),
        ({"node_selector": {"rack": "b"}}, "gb200-1, gb200-2, gb200-3: rack is not set, not b"),
        ({"create_namespace": True}, "exists already and was not made by this stack"),
        ({"hf_token": TOKEN}, "hf_token_secret: 'hf-token-secret' exists already"),
    ],
)
def test_each_problem_is_found_in_the_live_cluster(
    dynamo_cluster: Cluster, furnished: str, knobs: Mapping[str, Any], said: str
) -> None:
    found = problems(dynamo_cluster, **{"namespace": furnished, **knobs})
    assert [line for line in found if said in line], found
    assert TOKEN not in "".join(found)


def test_too_few_gpus_are_reported_from_the_live_nodes(dynamo_cluster: Cluster, namespace: str) -> None:
    make_secret(dynamo_cluster, namespace)
    holder = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "holder", "namespace": namespace},
        "spec": {
            "nodeName": "gb200-1",
            "containers": [{"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": "2"}}}],
        },
    }
    dynamo_cluster.api.create(holder)
    with dynamo_cluster.only("cpu-1", "gb200-1"):
        found = problems(dynamo_cluster, namespace)
    assert len(found) == 1
    for words in (
        "target: 'gb200-agg' needs more than is free: 1 of 1 TrtllmWorker pods (4 GPUs each) find no node",
        "gb200-1: 2 of nvidia.com/gpu free, 4 needed",
        "gb200-1: arm64, NVIDIA-GB200, 4 GPUs of which 2 free, taint nvidia.com/gpu=present:NoSchedule",
        "gb200-2, gb200-3: arm64, NVIDIA-GB200, 4 GPUs of which 4 free, taint",
        "hgx-h200-1: kubernetes.io/arch is amd64, not arm64",
        "uncordon",
    ):
        assert words in found[0]


def test_a_platform_that_is_not_there(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    # An API group that nobody serves stands for a cluster without the CRDs: the session's cluster may have them.
    monkeypatch.setattr(reader, "GRAPH_GROUP", "absent.example.com")
    seen = reader.snapshot(cluster.kubeconfig, cluster.context, "default", reader.Reads(kinds=("APIResource",)))
    assert seen.all("APIResource") == ()
    assert seen.unread == {}


def test_a_second_up_finds_its_own_objects_and_another_stack_does_not(
    dynamo_cluster: Cluster, served: GraphPlan
) -> None:
    with dynamo_cluster.only("cpu-1", _tray(dynamo_cluster, served)):
        found, plan = planned(dynamo_cluster, served.namespace, rollout="blue_green")
        assert reader.problems(found, plan) == []
        lines = reader.problems(*planned(dynamo_cluster, served.namespace, "a/b/c"))
    taken = f"name: 'gpt-oss-agg' exists already in {served.namespace} and belongs to the stack {STACK}"
    assert any(taken in line for line in lines)
    assert any("model_cache_claim: 'model-cache' exists already" in line for line in lines)


def _tray(cluster: Cluster, plan: GraphPlan) -> str:
    """The node of the worker."""
    [node] = cluster.placed(plan.namespace, "nvidia.com/dynamo-component-type=worker").values()
    assert node is not None
    return node


def ready(cluster: Cluster, namespace: str, name: str) -> None:
    def is_ready() -> bool:
        graph = cluster.api.get("nvidia.com/v1beta1", "DynamoGraphDeployment", name, namespace)
        conditions = graph.get("status", {}).get("conditions", [])
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    cluster.api.wait(f"{name} is Ready", is_ready)


# --- somebody with few permissions -------------------------------------------------------------------------------


@pytest.fixture
def guest(cluster: Cluster, namespace: str, tmp_path: Path) -> Path:
    """A kubeconfig of a ServiceAccount that may read ConfigMaps and pods of the namespace, and nothing else."""
    api = cluster.api
    api.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "guest", "namespace": namespace}})
    rules = [{"apiGroups": [""], "resources": ["configmaps", "pods"], "verbs": ["get", "list", "watch"]}]
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "guest", "namespace": namespace}}
    api.create({**role, "kind": "Role", "rules": rules})
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "guest"}
    subjects = [{"kind": "ServiceAccount", "name": "guest", "namespace": namespace}]
    api.create({**role, "kind": "RoleBinding", "roleRef": reference, "subjects": subjects})
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 600}}
    answer = api.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/guest/token", body=request)
    return kubeconfig(cluster, tmp_path / "guest", {"token": answer["status"]["token"]})


def kubeconfig(cluster: Cluster, path: Path, user: dict[str, Any]) -> Path:
    """The cluster's kubeconfig with another user."""
    content = yaml.safe_load(cluster.kubeconfig.read_text())
    for entry in content["users"]:
        entry["user"] = user
    path.write_text(yaml.safe_dump(content))
    return path


def test_permissions_are_asked_for_before_anything_is_created(cluster: Cluster, namespace: str, guest: Path) -> None:
    found = problems(cluster, namespace, kubeconfig=str(guest))
    line = next(line for line in found if "may not" in line)
    for words in (
        f"create and patch and delete configmaps in {namespace}",
        f"create and get and list and watch and patch and delete jobs.batch in {namespace}",
        f"dynamographdeployments.nvidia.com in {namespace}",
    ):
        assert words in line
    assert "pods" not in line


def test_what_a_guest_may_not_read_is_unknown_and_the_rest_is_judged(
    cluster: Cluster, namespace: str, guest: Path
) -> None:
    verdict = diagnose.verdict_of(guest, cluster.context, namespace, NamespaceSettings())
    checks = {check.id: check for check in verdict.checks}
    assert checks["cluster.access"].ok is True
    assert checks["namespace.there"].ok is None
    assert "cannot list resource" in checks["namespace.there"].seen or "cannot get" in checks["namespace.there"].seen
    assert checks["platform.operator"].ok is None


@pytest.mark.parametrize("user", [{"token": "wrong"}, {}])
def test_credentials_that_the_api_server_refuses(cluster: Cluster, tmp_path: Path, user: dict[str, Any]) -> None:
    path = kubeconfig(cluster, tmp_path / "config", user)
    seen = reader.snapshot(path, cluster.context, "default", reader.Reads(kinds=reader.DIAGNOSIS))
    assert seen.problem == "unauthorised", seen.message


# --- what is read ------------------------------------------------------------------------------------------------


def test_secrets_are_read_without_their_values(cluster: Cluster, furnished: str) -> None:
    reads = reader.Reads(kinds=("Namespace",), secrets=("hf-token-secret", "absent"))
    seen = reader.snapshot(cluster.kubeconfig, cluster.context, furnished, reads)
    assert [entry["keys"] for entry in seen.all("Secret")] == [["HF_TOKEN"]]
    text = seen.model_dump_json()
    assert TOKEN not in text
    assert base64.b64encode(TOKEN.encode()).decode() not in text


def test_lists_are_read_to_their_end(cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PAGE", 2)
    names = {f"map-{number}" for number in range(5)}
    for name in names:
        cluster.api.create(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace}}
        )
    seen = reader.snapshot(cluster.kubeconfig, cluster.context, namespace, reader.Reads(kinds=("ConfigMap", "Node")))
    assert names <= {entry["metadata"]["name"] for entry in seen.all("ConfigMap")}
    assert all("data" not in entry for entry in seen.all("ConfigMap"))
    assert len(seen.all("Node")) == 6


# --- the diagnosis -----------------------------------------------------------------------------------------------


def settled(cluster: Cluster, plan: GraphPlan) -> None:
    def complete() -> bool:
        jobs = cluster.api.list("batch/v1", "Job", plan.namespace)
        return all(
            any(each["type"] == "Complete" for each in job.get("status", {}).get("conditions", [])) for job in jobs
        )

    cluster.api.wait("Jobs are complete", complete)


def told(cluster: Cluster, namespace: str, check: str, words: str) -> dict[str, Any]:
    """The checks once one of them says this: events, conditions and the operator's status come one after the other."""

    def said() -> dict[str, Any] | None:
        checks = diagnosed(cluster, namespace)
        return checks if check in checks and words in checks[check].seen else None

    found: dict[str, Any] = cluster.api.wait(f"{check} says {words!r}", said)
    return found


def test_a_served_namespace_is_ok_and_the_command_says_so(
    dynamo_cluster: Cluster, served: GraphPlan, tmp_path: Path
) -> None:
    cluster, plan = dynamo_cluster, served
    done = subprocess.run(
        [
            *(sys.executable, diagnose.__file__, "--kubeconfig", str(cluster.kubeconfig), "--context", cluster.context),
            *("--namespace", plan.namespace, "--name", plan.name, "--output", str(tmp_path / "v.json")),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = Verdict.model_validate_json((tmp_path / "v.json").read_text())
    checks = {check.id: check for check in verdict.checks}
    assert verdict.ok
    for id_ in ("platform.crds", "secret.hf-token-secret", "claim.model-cache", f"graph.{plan.name}"):
        assert checks[id_].ok is True, checks[id_]
    assert checks[f"job.{plan.name}-download"].seen.startswith("Complete after")
    assert checks[f"workers.{plan.name}"].seen == "1 of 1 workers"
    assert TOKEN not in done.stdout + verdict.model_dump_json()


def test_a_change_without_a_spare_tray(dynamo_cluster: Cluster, served: GraphPlan) -> None:
    with dynamo_cluster.only("cpu-1", _tray(dynamo_cluster, served)):
        knobs: dict[str, Any] = {"rollout": "blue_green", "set": {"worker.max_batch_size": 512}}
        _, changed = planned(dynamo_cluster, served.namespace, **knobs)
        dynamo_cluster.api.create(changed.engine_config.manifest())
        dynamo_cluster.api.apply(changed.graph.manifest())

        def stuck() -> Any:
            found = diagnosed(dynamo_cluster, served.namespace)[f"graph.{served.name}"]
            return found if "finds no 4 free GPUs" in found.seen else None

        found = dynamo_cluster.api.wait("the roll is stuck", stuck)
    assert "The old workers serve on." in found.remedy
    assert RUNBOOKS["change-release"] in found.remedy


def test_pods_without_room(dynamo_cluster: Cluster, dynamo_operator: Operator, namespace: str) -> None:
    make_secret(dynamo_cluster, namespace)
    _, plan = planned(dynamo_cluster, namespace)
    with dynamo_cluster.only("cpu-1"):
        apply(dynamo_cluster, plan)
        checks = told(dynamo_cluster, namespace, f"graph.{plan.name}", "not scheduled: 0/6")
        text = diagnose.explain(dynamo_cluster.kubeconfig, dynamo_cluster.context, namespace, plan.name)
    graph = checks[f"graph.{plan.name}"]
    assert "not scheduled: 0/6 nodes are available: " in graph.seen
    assert "nodes are cordoned" in graph.seen
    assert "arm64, NVIDIA-GB200, 4 GPUs of which 4 free" in graph.seen
    assert RUNBOOKS["unschedulable"] in graph.remedy
    assert f"* graph.{plan.name}: pending: some_resources_are_not_ready" in text
    assert len(text.splitlines()) < 30


def test_a_storage_class_that_is_missing_and_a_secret_that_is_missing(
    dynamo_cluster: Cluster, dynamo_operator: Operator, namespace: str
) -> None:
    _, plan = planned(dynamo_cluster, namespace, model_cache_storage_class="fast")
    apply(dynamo_cluster, plan)
    checks = told(dynamo_cluster, namespace, f"graph.{plan.name}", "its claim is not bound")
    assert "the storage class 'fast' does not exist; there are block (default)" in checks["claim.model-cache"].seen
    assert checks["secret.hf-token-secret"].seen == "does not exist"
    assert "its claim is not bound" in checks[f"graph.{plan.name}"].seen
    assert RUNBOOKS["pvc-pending"] in checks[f"graph.{plan.name}"].remedy


def test_an_operator_of_somebody_else_that_does_not_come_up(dynamo_cluster: Cluster, furnished: str) -> None:
    labels = {"control-plane": "controller-manager", "app.kubernetes.io/part-of": "dynamo-operator"}
    manager = {"name": "manager", "image": "nvcr.io/nvidia/ai-dynamo/kubernetes-operator:1.2.1"}
    with dynamo_cluster.namespace("platform") as platform:
        spec = {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"nodeSelector": {"no": "such"}, "containers": [manager]},
            },
        }
        metadata = {"name": "theirs", "namespace": platform, "labels": labels}
        body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
        dynamo_cluster.api.create(body)
        found = problems(dynamo_cluster, furnished, platform="install")
        assert any(f"platform: install, but an operator runs already: {platform}/theirs" in line for line in found)

        def why() -> Any:
            check = diagnosed(dynamo_cluster, furnished)["platform.operator"]
            return check if "not scheduled: 0/6" in check.seen else None

        check = dynamo_cluster.api.wait("the diagnosis says why", why)
        assert f"{platform}/theirs has 0 of 1 pods available. Because theirs-" in check.seen
        assert RUNBOOKS["unschedulable"] in check.remedy


def test_a_download_that_is_refused(dynamo_cluster: Cluster, namespace: str) -> None:
    make_secret(dynamo_cluster, namespace)
    _, plan = planned(dynamo_cluster, namespace)
    words = "fetch_weights: huggingface.co refused the token in HF_TOKEN (status 401): it is wrong, expired or revoked"
    label = {"batch.kubernetes.io/job-name": f"{plan.name}-download"}
    with dynamo_cluster.behave(pods.fail(message=words), namespace, **label):
        apply(dynamo_cluster, plan, but=("DynamoGraphDeployment",))

        def tried() -> bool:
            job = dynamo_cluster.api.get("batch/v1", "Job", f"{plan.name}-download", namespace)
            return bool(job.get("status", {}).get("failed"))

        dynamo_cluster.api.wait("the download has failed once", tried)
        found = diagnosed(dynamo_cluster, namespace)[f"job.{plan.name}-download"]
    assert (
        "tries failed: the token was refused (401)" in found.seen or "tries: the token was refused (401)" in found.seen
    )
    assert RUNBOOKS["rotate-token"] in found.remedy


def test_a_worker_that_crashes_with_its_last_words(
    dynamo_cluster: Cluster, dynamo_operator: Operator, namespace: str
) -> None:
    make_secret(dynamo_cluster, namespace)
    _, plan = planned(dynamo_cluster, namespace)
    with dynamo_cluster.behave(pods.crash(), namespace, **{"nvidia.com/dynamo-component-type": "worker"}):
        apply(dynamo_cluster, plan)

        def crashed() -> str | None:
            for pod in dynamo_cluster.pods(namespace, "nvidia.com/dynamo-component-type=worker"):
                if "CrashLoopBackOff" in json.dumps(pod.get("status")):
                    return str(pod["metadata"]["name"])
            return None

        name = dynamo_cluster.api.wait("the worker has crashed", crashed)
        dynamo_cluster.write_log(
            namespace, str(name), ["loading", "RuntimeError: CUDA error 802: system not yet initialized"]
        )
        checks = diagnosed(dynamo_cluster, namespace)
    assert "NVLink fabric not completed" in checks[f"pod.{name}"].seen
    assert "error 802: system not yet initialized" in checks[f"graph.{plan.name}"].seen
    assert RUNBOOKS["not-ready"] in checks[f"pod.{name}"].remedy


def test_a_namespace_that_is_not_there(cluster: Cluster) -> None:
    checks = diagnosed(cluster, "nowhere")
    assert checks["namespace.there"].ok is False
    assert "'nowhere' does not exist" in checks["namespace.there"].seen
    assert list(checks) == ["cluster.access", "namespace.there"]


def test_snapshots_are_plain_data(cluster: Cluster, furnished: str) -> None:
    reads = reader.Reads(kinds=reader.DIAGNOSIS, refer=True)
    seen = reader.snapshot(cluster.kubeconfig, cluster.context, furnished, reads)
    assert not seen.problem
    assert Snapshot.model_validate_json(seen.model_dump_json()) == seen
