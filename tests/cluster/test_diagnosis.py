"""What a namespace's diagnosis says: of the recordings of the real operator, and of small cases made by hand."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving_catalog.checks import Check, judged
from serving_catalog.checks import cluster as clusters
from serving_catalog.checks.causes import causes
from serving_catalog.checks.cluster import Probe, Snapshot
from serving_catalog.checks.cluster_causes import RUNBOOKS, SERVING_REMEDIES, download_cause, image_cause, serving_cause
from serving_catalog.checks.cluster_diagnosis import diagnose_namespace
from serving_catalog.checks.cluster_pods import NamespaceSettings
from tests.cluster.snapshots import (
    NOW,
    OPERATOR,
    event,
    holder,
    node,
    recorded,
    storage_class,
    with_objects,
)

Thing = Any  # a Kubernetes object
WORKER = "gpt-oss-agg-trtllmworker-a2224789-5c57bb67cb-vcfbl"


def checks_of(snapshot: Snapshot, **settings: Any) -> dict[str, Check]:
    return {found.id: found for found in diagnose_namespace(snapshot, NamespaceSettings(**settings))}


def findings_of(snapshot: Snapshot, **settings: Any) -> dict[str, Check]:
    return {id_: found for id_, found in checks_of(snapshot, **settings).items() if found.stops}


# --- the recordings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["agg-ready", "disagg-ready", "agg-scaling-adapter"])
def test_a_ready_namespace_has_no_finding(case: str) -> None:
    snapshot = recorded(case)
    assert not findings_of(snapshot)
    verdict = judged("serving", NOW, {}, diagnose_namespace(snapshot, NamespaceSettings()), "namespace")
    assert (verdict.ok, verdict.kind) == (True, "namespace")


@pytest.mark.parametrize(
    ("case", "graph", "said", "runbook"),
    [
        (
            "agg-update-stuck-no-capacity",
            "gpt-oss-agg",
            [
                "rolling_update_in_progress",
                "update InProgress for 21 min",
                "no 4 free GPUs",
                "The old workers serve on",
            ],
            "change-release",
        ),
        (
            "disagg-update-stuck-no-capacity",
            "gpt-oss-disagg",
            ["TrtllmDecodeWorker pod finds no 4 free GPUs", "No set of workers is complete", "in_place"],
            "change-release",
        ),
        (
            "all-with-toobig",
            "gpt-oss-toobig",
            ["some_resources_are_not_ready", "2 Insufficient nvidia.com/gpu", "8 GPUs are not free on one node"],
            "unschedulable",
        ),
        (
            "failures-longname-multinode-nopvc",
            "nopvc",
            ['persistentvolumeclaim "absent" not found', "Make the claim absent"],
            "pvc-pending",
        ),
        (
            "failures-longname-multinode-nopvc",
            "gpt-oss-aggregated-with-a-quite-long-name-here",
            ["trtllmworker-895fd8a3 has 68 characters, 63 fit", "shorter name"],
            "not-ready",
        ),
        (
            "failures-longname-multinode-nopvc",
            "mn",
            ["failed: no_multinode_orchestrator_available", "every target of the catalog fits one node"],
            "not-ready",
        ),
    ],
)
def test_a_graph_that_is_not_ready_names_its_cause(case: str, graph: str, said: list[str], runbook: str) -> None:
    found = findings_of(recorded(case), name=graph)[f"graph.{graph}"]
    for words in said:
        assert words in f"{found.seen} {found.remedy}"
    assert RUNBOOKS[runbook] in found.remedy


def test_a_worker_that_turned_not_ready_is_named_on_its_graph() -> None:
    status = yaml.safe_load((OPERATOR / "agg-status-worker-not-ready.yaml").read_text())
    snapshot = recorded("agg-ready")
    graph: Thing = {**snapshot.all("DynamoGraphDeployment")[0], "status": status["status"]}
    graph["metadata"] = {**graph["metadata"], "generation": status["generation"]}
    pods = [_unready(pod) if pod["metadata"]["name"] == WORKER else pod for pod in snapshot.all("Pod")]
    snapshot = with_objects(
        snapshot,
        DynamoGraphDeployment=[graph],
        Pod=pods,
        Event=[event("Pod", WORKER, "Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 503")],
    )
    found = findings_of(snapshot)["graph.gpt-oss-agg"]
    assert "TrtllmWorker 0 of 1 ready" in found.seen
    assert f"TrtllmWorker ({WORKER}): on gb200-2, running for 22 min and not Ready: Unhealthy: Readiness" in found.seen


def _unready(pod: Thing) -> Thing:
    pod = copy.deepcopy(pod)
    for entry in pod["status"]["conditions"]:
        if entry["type"] in ("Ready", "ContainersReady"):
            entry["status"] = "False"
    for entry in pod["status"]["containerStatuses"]:
        entry.update(ready=False, started=True)
    return pod


def test_only_the_named_graph_is_looked_at() -> None:
    ids = checks_of(recorded("all-with-toobig"), name="gpt-oss-agg")
    assert "graph.gpt-oss-agg" in ids
    assert not any("toobig" in id_ for id_ in ids)


def test_findings_can_be_accepted_by_id_or_pattern() -> None:
    checks = checks_of(recorded("all-with-toobig"), allow_findings=("*.gpt-oss-toobig*",))
    assert all(found.accepted for found in checks.values() if found.ok is False)
    assert any(found.accepted for found in checks.values())


# --- the platform and what pods refer to -------------------------------------------------------------------------


def _operator_down(snapshot: Snapshot) -> Snapshot:
    down: Thing = copy.deepcopy(snapshot.all("Operator")[0])
    down["status"] = {"availableReplicas": 0, "conditions": [{"type": "Available", "status": "False"}]}
    return with_objects(snapshot, Operator=[down])


def _behind(snapshot: Snapshot, **metadata: Any) -> Snapshot:
    graph = copy.deepcopy(snapshot.all("DynamoGraphDeployment")[0])
    graph["metadata"].update(metadata)
    return with_objects(snapshot, DynamoGraphDeployment=[graph])


def _webhook(bundle: str) -> Thing:
    return {
        "metadata": {"name": "dynamo-validating"},
        "webhooks": [
            {
                "name": "vdynamographdeployment.kb.io",
                "clientConfig": {"service": {"name": "s", "namespace": "dynamo-system"}, "caBundle": bundle},
                "rules": [{"apiGroups": ["nvidia.com"]}],
            }
        ],
    }


def _claim(phase: str, **spec: Any) -> Thing:
    return {
        "metadata": {"name": "model-cache", "creationTimestamp": "2026-11-21T07:00:00Z"},
        "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "kwok-volume", **spec},
        "status": {"phase": phase},
    }


PENDING_POD = {
    "metadata": {"name": "consumer"},
    "spec": {"volumes": [{"persistentVolumeClaim": {"claimName": "model-cache"}}]},
    "status": {"phase": "Pending"},
}


@pytest.mark.parametrize(
    ("change", "id_", "said"),
    [
        (lambda s: with_objects(s, Namespace=[]), "namespace.there", "'serving' does not exist"),
        (
            lambda s: with_objects(
                s,
                Namespace=[
                    {
                        "metadata": {"name": "serving", "deletionTimestamp": "2026-11-21T07:10:00Z"},
                        "status": {
                            "conditions": [{"type": "x", "status": "True", "message": "Some content has finalizers"}]
                        },
                    }
                ],
            ),
            "namespace.there",
            "being deleted since 10 min: Some content has finalizers",
        ),
        (lambda s: with_objects(s, APIResource=[]), "platform.crds", "served: none"),
        (
            _operator_down,
            "platform.operator",
            "controller-manager 1.2.1 (Helm release dynamo-platform) has 0 of 1 pods",
        ),
        (
            lambda s: with_objects(_behind(s, generation=2), Operator=[]),
            "platform.operator",
            "nobody has looked at gpt-oss-agg",
        ),
        (
            lambda s: with_objects(s, Webhook=[_webhook("")]),
            "platform.webhooks",
            "no CA bundle in dynamo-validating/vdyn",
        ),
        (lambda s: with_objects(s, Secret=[]), "secret.hf-token-secret", "does not exist"),
        (lambda s: with_objects(s, ConfigMap=[]), "config.gpt-oss-agg-llm-config", "does not exist"),
        (
            lambda s: with_objects(s, PersistentVolumeClaim=[_claim("Pending", storageClassName="fast")]),
            "claim.model-cache",
            "Pending: the storage class 'fast' does not exist; there are kwok-volume",
        ),
        (
            lambda s: with_objects(s, PersistentVolumeClaim=[_claim("Pending", storageClassName=None)]),
            "claim.model-cache",
            "names no storage class, and the cluster has no default; there are kwok-volume",
        ),
        (
            lambda s: with_objects(
                s,
                PersistentVolumeClaim=[_claim("Pending")],
                Event=[event("PersistentVolumeClaim", "model-cache", "ProvisioningFailed", "quota  exceeded")],
            ),
            "claim.model-cache",
            "Pending for 20 min: ReadWriteMany of class kwok-volume from kwok.x-k8s.io/volume; "
            "ProvisioningFailed: quota exceeded",
        ),
        (
            lambda s: with_objects(
                s,
                PersistentVolumeClaim=[_claim("Pending")],
                StorageClass=[storage_class("kwok-volume", "x", binding="WaitForFirstConsumer")],
                Pod=[PENDING_POD],
            ),
            "claim.model-cache",
            "waits for a node to be chosen for consumer Pending",
        ),
        (
            lambda s: with_objects(s, PersistentVolumeClaim=[_claim("Lost", volumeName="pv-1")]),
            "claim.model-cache",
            "pv-1",
        ),
        (lambda s: with_objects(s, DynamoGraphDeployment=[]), "graph.any", "no DynamoGraphDeployment in serving"),
        (
            lambda s: _behind(s, generation=7),
            "graph.gpt-oss-agg",
            "generation 7 was not looked at yet (operator saw 1)",
        ),
        (
            lambda s: _behind(s, deletionTimestamp="2026-11-21T07:00:00Z"),
            "graph.gpt-oss-agg",
            "being deleted since 20 min; finalizers nvidia.com/finalizer",
        ),
        (lambda s: with_objects(s, Service=[]), "endpoint.gpt-oss-agg", "no Service gpt-oss-agg-frontend"),
        (lambda s: with_objects(s, EndpointSlice=[]), "endpoint.gpt-oss-agg", "no Ready pod behind it"),
        (lambda s: with_objects(s, EndpointSlice=[]), "workers.gpt-oss-agg", f"{WORKER} Ready, and behind no Service"),
    ],
)
def test_what_is_missing_around_the_graph(change: Callable[[Snapshot], Snapshot], id_: str, said: str) -> None:
    found = findings_of(change(recorded("agg-ready")))
    assert said in found[id_].seen
    assert "docs/runbooks/kubernetes-" in found[id_].remedy or id_ == "namespace.there"


def test_an_operator_that_does_not_come_up_says_why() -> None:
    pulled = {"waiting": {"reason": "ImagePullBackOff", "message": "pull access denied"}}
    container = {"name": "manager", "image": "kubernetes-operator:1.2.1", "state": pulled}
    pod = {
        "metadata": {"name": "operator-x", "creationTimestamp": "2026-11-21T07:00:00Z"},
        "spec": {"nodeName": "cpu-1", "containers": [{"name": "manager"}]},
        "status": {"phase": "Pending", "containerStatuses": [container]},
    }
    snapshot = with_objects(_operator_down(recorded("agg-ready")), OperatorPod=[pod])
    found = findings_of(snapshot)["platform.operator"]
    assert "0 of 1 pods available. Because operator-x: ImagePullBackOff of kubernetes-operator:1.2.1" in found.seen
    assert "the registry refused the pull" in found.seen
    assert RUNBOOKS["image-pull"] in found.remedy


def test_a_claim_that_waits_for_its_first_pod_is_no_finding() -> None:
    waiting = [storage_class("kwok-volume", "x", binding="WaitForFirstConsumer")]
    snapshot = with_objects(
        recorded("agg-ready"), PersistentVolumeClaim=[_claim("Pending")], StorageClass=waiting, Pod=[]
    )
    assert checks_of(snapshot)["claim.model-cache"].ok is None


def test_a_key_that_is_missing_or_empty_is_named_and_no_value_is_shown() -> None:
    snapshot = recorded("agg-ready")
    graph = copy.deepcopy(snapshot.all("DynamoGraphDeployment")[0])
    main = graph["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]
    main["env"].append({"name": "T", "valueFrom": {"secretKeyRef": {"name": "hf-token-secret", "key": "TOKEN"}}})
    snapshot = with_objects(snapshot, DynamoGraphDeployment=[graph])
    found = findings_of(snapshot)["secret.hf-token-secret"]
    assert (found.seen, found.expected) == ("has the keys HF_TOKEN", "a value at TOKEN")
    assert "aGZfeA" not in snapshot.model_dump_json()


@pytest.mark.parametrize("kind", ["Node", "Pod", "Event", "Secret", "Webhook", "Operator", "DynamoGraphDeployment"])
def test_what_may_not_be_read_is_unknown_and_no_finding(kind: str) -> None:
    checks = checks_of(with_objects(recorded("agg-ready"), **{kind: None}))
    assert not [found for found in checks.values() if found.stops]


# --- pods --------------------------------------------------------------------------------------------------------


def _worker(snapshot: Snapshot, **changes: Any) -> Snapshot:
    """The worker pod with other container state; the graph pending on it."""
    pods = []
    for pod in snapshot.all("Pod"):
        if pod["metadata"]["name"] == WORKER:
            pod = _unready(pod)
            pod["metadata"]["creationTimestamp"] = "2026-11-21T07:00:00Z"
            pod["status"]["containerStatuses"][0].update({"started": False, **changes})
        pods.append(pod)
    graph = copy.deepcopy(snapshot.all("DynamoGraphDeployment")[0])
    graph["status"]["state"] = "pending"
    graph["status"]["conditions"][0].update(status="False", reason="some_resources_are_not_ready", message="m")
    return with_objects(snapshot, Pod=pods, DynamoGraphDeployment=[graph])


def _waiting(reason: str, message: str = "", **more: Any) -> Thing:
    return {"state": {"waiting": {"reason": reason, "message": message}}, **more}


def _ended(reason: str, code: int, **more: Any) -> Thing:
    return _waiting(
        "CrashLoopBackOff", lastState={"terminated": {"reason": reason, "exitCode": code}}, restartCount=4, **more
    )


@pytest.mark.parametrize(
    ("state", "log", "events", "said", "runbook"),
    [
        (
            _waiting("ImagePullBackOff", 'Back-off pulling image "x"'),
            (),
            [event("Pod", WORKER, "Failed", 'Failed to pull image "x": unexpected status: 401 Unauthorized')],
            "the registry refused the pull",
            "image-pull",
        ),
        (
            _waiting("ErrImagePull", "no match for platform in manifest: not found"),
            (),
            [],
            "no image for this node's processor",
            "image-pull",
        ),
        (
            _waiting("CreateContainerConfigError", "couldn't find key HF_TOKEN in Secret serving/hf-token-secret"),
            (),
            [],
            "couldn't find key HF_TOKEN",
            "rotate-token",
        ),
        (
            _ended("Error", 1),
            ("loading", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
            [],
            "main on gb200-2 ended (Error, exit status 1, restarted 4 times): out of GPU memory",
            "not-ready",
        ),
        (_ended("OOMKilled", 137), (), [], "out of host memory", "not-ready"),
        (_ended("Error", 137), ("ok",), [], "killed: a failed liveness probe, memory, or the node", "not-ready"),
        (
            _ended("Error", 1),
            ("huggingface_hub.errors.LocalEntryNotFoundError: cannot find it",),
            [],
            "weights missing",
            "download",
        ),
        (
            _ended("Error", 134),
            ("terminate called", "cudaErrorIllegalAddress in intranode_combine"),
            [],
            "DeepEP",
            "change-release",
        ),
        (
            _waiting("ContainerCreating"),
            (),
            [event("Pod", WORKER, "FailedMount", 'MountVolume.SetUp failed for volume "llm-config"')],
            "FailedMount: MountVolume.SetUp failed",
            "pvc-pending",
        ),
        (
            {"state": {"running": {"startedAt": "2026-11-21T06:00:00Z"}}},
            ("Loading weights 10%",),
            [],
            "running for 80 min and not Ready; loading takes at most 30 min as a rule (its startup probe allows 2 h); "
            'last lines: "Loading weights 10%"',
            "not-ready",
        ),
    ],
)
def test_a_pod_that_is_not_ready_says_why(
    state: Thing, log: Sequence[str], events: list[Thing], said: str, runbook: str
) -> None:
    snapshot = with_objects(_worker(recorded("agg-ready"), **state), Event=events)
    snapshot = snapshot.model_copy(update={"logs": {f"{WORKER}/main": tuple(log)}})
    found = findings_of(snapshot)
    assert said in found[f"pod.{WORKER}"].seen
    assert said in found["graph.gpt-oss-agg"].seen
    assert RUNBOOKS[runbook] in found[f"pod.{WORKER}"].remedy


def test_a_load_within_its_time_is_no_finding_of_the_pod_and_the_graph_says_wait() -> None:
    running = {"state": {"running": {"startedAt": "2026-11-21T07:08:00Z"}}}
    checks = checks_of(_worker(recorded("agg-ready"), **running))
    assert checks[f"pod.{WORKER}"].ok is None
    assert (
        "loading for 12 min of at most 30 min as a rule (its startup probe allows 2 h)" in checks[f"pod.{WORKER}"].seen
    )
    assert checks["graph.gpt-oss-agg"].ok is False
    assert "loading for 12 min" in checks["graph.gpt-oss-agg"].seen
    assert "Wait" in checks["graph.gpt-oss-agg"].remedy


def test_a_load_is_as_slow_as_its_own_time_out_says() -> None:
    snapshot = _worker(recorded("agg-ready"), state={"running": {"startedAt": "2026-11-21T06:00:00Z"}})
    slow, patient = (checks_of(snapshot, load_within_seconds=limit)[f"pod.{WORKER}"] for limit in (1800, 5400))
    assert (slow.ok, patient.ok) == (False, None)
    assert "loading for 80 min of at most 90 min" in patient.seen


def test_a_pod_without_room_shows_the_nodes_and_who_holds_their_gpus() -> None:
    snapshot = with_objects(
        recorded("all-with-toobig"),
        Node=[node("gb200-1", taints=()), node("hgx", product="NVIDIA-B200", architecture="amd64", gpus=8)],
        AllPods=[holder("gb200-1", 4)],
    )
    found = findings_of(snapshot, name="gpt-oss-toobig")["graph.gpt-oss-toobig"]
    assert "gb200-1: arm64, NVIDIA-GB200, 4 GPUs of which 0 free" in found.seen
    assert "hgx: amd64, NVIDIA-B200, 8 GPUs of which 8 free, taint nvidia.com/gpu=present:NoSchedule" in found.seen


@pytest.mark.parametrize(
    ("message", "said", "helps"),
    [
        (
            "0/3 nodes are available: 3 node(s) had untolerated taint {nvidia.com/gpu: present}. preemption: 0/3 x",
            "taints without toleration: nvidia.com/gpu: present",
            "tolerations",
        ),
        ("0/3 nodes are available: 3 node(s) had untolerated taint(s).", "taints without toleration", "tolerations"),
        ("0/3 nodes are available: 3 Insufficient memory.", "too little memory", "resources"),
        (
            "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            "its claim is not bound",
            "claim",
        ),
        ("0/2 nodes are available: 2 node(s) had volume node affinity conflict.", "its volume lies where", "zone"),
        (
            "0/2 nodes are available: 2 node(s) didn't match pod anti-affinity rules.",
            "it must not share a node",
            "kubernetes-unschedulable",
        ),
    ],
)
def test_the_schedulers_words_are_explained(message: str, said: str, helps: str) -> None:
    snapshot = recorded("all-with-toobig")
    pods = copy.deepcopy(list(snapshot.all("Pod")))
    pending = next(pod for pod in pods if pod["status"]["phase"] == "Pending")
    pending["status"]["conditions"][0]["message"] = message
    found = findings_of(with_objects(snapshot, Pod=pods), name="gpt-oss-toobig")["graph.gpt-oss-toobig"]
    assert said in found.seen
    assert "preemption" not in found.seen
    assert helps in found.remedy


def test_a_pod_that_no_scheduler_looks_at() -> None:
    snapshot = recorded("all-with-toobig")
    pods = copy.deepcopy(list(snapshot.all("Pod")))
    pending = next(pod for pod in pods if pod["status"]["phase"] == "Pending")
    pending["status"]["conditions"] = []
    pending["metadata"]["creationTimestamp"] = "2026-11-21T07:00:00Z"
    pending["spec"]["schedulerName"] = "kai-scheduler"
    found = findings_of(with_objects(snapshot, Pod=pods), name="gpt-oss-toobig")["graph.gpt-oss-toobig"]
    assert "the scheduler 'kai-scheduler' says nothing" in found.seen


@pytest.mark.parametrize(
    ("message", "helps"),
    [
        ('pods "x" is forbidden: exceeded quota: gpus, requested: nvidia.com/gpu=4', "ResourceQuota"),
        ('pods "x" is forbidden: violates PodSecurity "restricted:latest"', "pod-security"),
        ("no PriorityClass with name serving was found", "priority class"),
    ],
)
def test_pods_that_cannot_even_be_created(message: str, helps: str) -> None:
    snapshot = _worker(recorded("agg-ready"))
    deployments = copy.deepcopy(list(snapshot.all("Deployment")))
    name = next(entry for entry in deployments if "worker" in entry["metadata"]["name"])
    name["status"]["conditions"].append(
        {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
    )
    found = findings_of(with_objects(snapshot, Deployment=deployments))
    assert message in found["graph.gpt-oss-agg"].seen
    assert helps in found[f"deployment.{name['metadata']['name']}"].remedy


# --- discovery and the answer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probe", "findings"),
    [
        (Probe(status=200, models=("openai/gpt-oss-120b",)), set()),
        (Probe(error="status 403: services/proxy is forbidden"), set()),
        (Probe(status=200), {"workers.gpt-oss-agg", "endpoint.gpt-oss-agg"}),
        (Probe(status=500, error="status 500"), {"endpoint.gpt-oss-agg"}),
    ],
)
def test_what_the_frontend_answers(probe: Probe, findings: set[str]) -> None:
    snapshot = recorded("agg-ready").model_copy(update={"probes": {"gpt-oss-agg-frontend": probe}})
    assert set(findings_of(snapshot)) == findings


def test_a_worker_that_the_operator_takes_for_none_is_named() -> None:
    snapshot = recorded("agg-ready")
    pods = copy.deepcopy(list(snapshot.all("Pod")))
    for pod in pods:
        pod["metadata"]["labels"].pop("nvidia.com/dynamo-discovery-enabled")
    assert WORKER in findings_of(with_objects(snapshot, Pod=pods))["workers.gpt-oss-agg"].seen


def test_workers_that_complain_of_kv_transfer_are_found_though_all_is_ready() -> None:
    snapshot = recorded("disagg-ready")
    decode = next(pod["metadata"]["name"] for pod in snapshot.all("Pod") if "decode" in pod["metadata"]["name"])
    line = "[TensorRT-LLM][WARNING] CacheTransceiver getOrAllocateBuffers: bufferCoverTargetNum:0 < targetNum:1"
    snapshot = snapshot.model_copy(update={"logs": {f"{decode}/main": ("ok", line, "ok")}})
    found = findings_of(snapshot)
    assert set(found) == {"kv_transfer.gpt-oss-disagg"}
    assert "max_tokens_in_buffer" in found["kv_transfer.gpt-oss-disagg"].remedy


# --- Jobs --------------------------------------------------------------------------------------------------------


def _job(name: str, **status: Any) -> Thing:
    return {
        "metadata": {"name": name, "creationTimestamp": "2026-11-21T07:00:00Z"},
        "spec": {"backoffLimit": 3, "activeDeadlineSeconds": 7200, "template": {"spec": {"containers": []}}},
        "status": {"startTime": "2026-11-21T07:00:00Z", **status},
    }


def _job_pod(job: str, said: str = "", phase: str = "Failed", **status: Any) -> Thing:
    ended = {"state": {"terminated": {"exitCode": 1, "reason": "Error", "message": said}}, "name": "job"}
    return {
        "metadata": {"name": f"{job}-x", "labels": {"batch.kubernetes.io/job-name": job}},
        "spec": {"nodeName": "cpu-1", "containers": [{"name": "job"}]},
        "status": {"phase": phase, "containerStatuses": [ended], **status},
    }


FAILED = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}], "failed": 4}
LATE = {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]}


@pytest.mark.parametrize(
    ("job", "pods", "ok", "said", "runbook"),
    [
        (
            _job("gpt-oss-agg-download", conditions=[{"type": "Complete", "status": "True"}]),
            [],
            True,
            "Complete",
            None,
        ),
        (
            _job("gpt-oss-agg-download", **FAILED),
            [
                _job_pod(
                    "gpt-oss-agg-download", "fetch_weights: the hub refused the token in HF_TOKEN (status 401): wrong"
                )
            ],
            False,
            "Failed (BackoffLimitExceeded), 4 tries: the token was refused (401)",
            "rotate-token",
        ),
        (
            _job("gpt-oss-agg-download", **LATE),
            [],
            False,
            "not done within 7200 s",
            "download",
        ),
        (
            _job("gpt-oss-agg-download", failed=1),
            [_job_pod("gpt-oss-agg-download", "/model-cache is too small: 65 bytes are needed (1 to bring")],
            False,
            "1 of 4 tries failed: the model cache is full",
            "download",
        ),
        (
            _job("gpt-oss-agg-download", active=1),
            [
                {
                    **_job_pod("gpt-oss-agg-download", phase="Pending"),
                    "status": {
                        "phase": "Pending",
                        "containerStatuses": [
                            {
                                "name": "job",
                                "image": "python:3.12-slim",
                                "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
                            }
                        ],
                    },
                }
            ],
            False,
            "the registry has no such image",
            "image-pull",
        ),
        (_job("gpt-oss-agg-smoke", **FAILED), [], False, "Failed (BackoffLimitExceeded)", "not-ready"),
        (
            _job("gpt-oss-agg-benchmark-1", **FAILED),
            [_job_pod("gpt-oss-agg-benchmark-1", "aiperf: 12 of 640 requests failed")],
            False,
            "12 of 640 requests failed",
            "benchmark",
        ),
        (_job("gpt-oss-agg-benchmark-1", active=1), [], None, "no pod yet", None),
    ],
)
def test_jobs(job: Thing, pods: list[Thing], ok: bool | None, said: str, runbook: str | None) -> None:
    snapshot = recorded("agg-ready")
    snapshot = with_objects(snapshot, Job=[job], Pod=[*snapshot.all("Pod"), *pods])
    found = checks_of(snapshot)[f"job.{job['metadata']['name']}"]
    assert found.ok is ok
    assert said in found.seen
    assert runbook is None or RUNBOOKS[runbook] in found.remedy


def test_a_failed_job_is_judged_by_what_the_kubelet_kept_of_its_end_before_its_log() -> None:
    """The message belongs to the end itself; a log may have been read short, or be of a container that did not fail."""
    name = "gpt-oss-agg-download"
    pod = _job_pod(name, "fetch_weights: the hub refused the token in HF_TOKEN (status 401): wrong")
    snapshot = with_objects(recorded("agg-ready"), Job=[_job(name, **FAILED)], Pod=[pod])
    snapshot = snapshot.model_copy(update={"logs": {f"{name}-x/job": ("40 % of 65 GB",)}})
    seen = checks_of(snapshot)[f"job.{name}"].seen
    assert "the token was refused (401)" in seen
    assert "40 %" not in seen


def test_a_failed_init_container_of_a_job_is_heard() -> None:
    name = "gpt-oss-agg-benchmark-1"
    failed = {"name": "install", "state": {"terminated": {"exitCode": 1, "message": "no package index answers"}}}
    quiet = {"name": "job", "state": {"waiting": {"reason": "PodInitializing"}}}
    pod = _job_pod(name, initContainerStatuses=[failed], containerStatuses=[quiet])
    snapshot = with_objects(recorded("agg-ready"), Job=[_job(name, **FAILED)], Pod=[pod])
    assert "no package index answers" in checks_of(snapshot)[f"job.{name}"].seen


def test_a_job_that_left_no_message_is_judged_by_its_log() -> None:
    name = "gpt-oss-agg-benchmark-1"
    snapshot = with_objects(recorded("agg-ready"), Job=[_job(name, **FAILED)], Pod=[_job_pod(name)])
    snapshot = snapshot.model_copy(update={"logs": {f"{name}-x/job": ("12 of 640 requests failed",)}})
    assert "12 of 640 requests failed" in checks_of(snapshot)[f"job.{name}"].seen


def test_jobs_of_another_graph_and_of_others_are_left_alone() -> None:
    jobs = [_job("gpt-oss-disagg-download", **FAILED), _job("nightly-backup", **FAILED)]
    assert not findings_of(with_objects(recorded("agg-ready"), Job=jobs), name="gpt-oss-agg")
    assert set(findings_of(with_objects(recorded("agg-ready"), Job=jobs))) == {"job.gpt-oss-disagg-download"}


def test_every_runbook_that_is_named_is_there() -> None:
    checks = Path(clusters.__file__).parent
    named = {
        name
        for path in checks.glob("cluster*.py")
        for name in re.findall(r"docs/runbooks/[a-z-]+\.md", path.read_text())
    }
    root = Path(__file__).parents[2]
    for name in {*named, *RUNBOOKS.values()}:
        assert (root / name).is_file(), name


# --- causes and events -------------------------------------------------------------------------------------------


def test_every_cause_that_hosts_know_has_a_remedy_for_a_cluster() -> None:
    assert set(SERVING_REMEDIES) == set(causes())
    for remedy in SERVING_REMEDIES.values():
        assert "playbook" not in remedy


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("fetch_weights: huggingface.co refused the token in HF_TOKEN (status 401): it is wrong", "401"),
        ("fetch_weights: x/y is gated and this token's account has no access to it", "403"),
        ("fetch_weights: hub/openai/gpt-oss-120b has no revision b5c939", "404"),
        ("fetch_weights: hub answered status 404 for model.safetensors", "404"),
        (
            "broke off at byte 401 of 4040 of model.safetensors, and 5 attempts brought nothing more: status 503",
            "reached",
        ),
        ("/model-cache/staging is too small: 65248815744 bytes are needed", "full"),
        ("/model-cache/weights/x: Permission denied. The model cache must be writable", "written"),
        ("socket.gaierror: [Errno -3] Temporary failure in name resolution", "resolved"),
        ("ssl.SSLError: certificate verify failed: self-signed certificate", "certificate"),
        ("model.safetensors from mirror is damaged: its sha256 should be a and is b", "published"),
        ("ERROR: HTTP error 429 while getting x", "429"),
    ],
)
def test_why_a_download_failed(line: str, cause: str) -> None:
    found = download_cause(("first", line, "last"))
    assert found is not None
    assert cause in found[0]


def test_lines_that_say_nothing_have_no_cause() -> None:
    assert download_cause(("40401 bytes of 65403 brought",)) is None
    assert serving_cause(("loading shard 4 of 15",)) is None
    assert image_cause("") == "the image cannot be pulled"


def test_events_are_counted_and_shown_and_conflicts_are_left_out() -> None:
    events = [
        event("Pod", "a", "FailedScheduling", "no room", "2026-11-21T07:00:00Z", count=3),
        event("Pod", "a", "FailedScheduling", "no room", "2026-11-21T07:05:00Z"),
        event(
            "DynamoGraphDeployment", "g", "Reconcile", 'Operation cannot be fulfilled on "g"', "2026-11-21T07:06:00Z"
        ),
    ]
    found = checks_of(with_objects(recorded("agg-ready"), Event=events))["events.warnings"]
    assert found.ok is None
    assert found.seen == "1 kinds, the latest: FailedScheduling (4x) Pod a: no room"
