"""The test cluster does what tests of other directories rely on."""

from __future__ import annotations

import http.server
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from . import build, control_plane, nodes, pods
from .api import Object, Refused
from .cluster import Cluster

pytestmark = pytest.mark.kubernetes

TOLERATE_GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
TOLERATE_ARM = {"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"}


def pod_spec(*, gpus: int = 0, **more: Any) -> Object:
    limits = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    container = {"name": "main", "image": "registry.example/engine:1", "resources": {"limits": limits}}
    return {"containers": [container], **more}


def deployment(namespace: str, name: str, spec: Object, *, replicas: int = 1) -> Object:
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def job(namespace: str, name: str, *, backoff: int = 0) -> Object:
    spec = pod_spec(restartPolicy="Never")
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"backoffLimit": backoff, "template": {"spec": spec}},
    }


def claim(namespace: str, name: str, storage_class: str | None, mode: str) -> Object:
    spec: Object = {"accessModes": [mode], "resources": {"requests": {"storage": "100Gi"}}}
    if storage_class:
        spec["storageClassName"] = storage_class
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def condition(live: Object, kind: str) -> Object | None:
    return next((each for each in live.get("status", {}).get("conditions", []) if each["type"] == kind), None)


def ready_pods(cluster: Cluster, namespace: str, labels: str = "") -> list[str]:
    found = cluster.pods(namespace, labels)
    return [pod["metadata"]["name"] for pod in found if (condition(pod, "Ready") or {}).get("status") == "True"]


def kubectl(cluster: Cluster, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = ["kubectl", f"--kubeconfig={cluster.kubeconfig}", f"--context={cluster.context}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=check)


# The server and its nodes


def test_the_server_says_which_version_it_is(cluster: Cluster) -> None:
    version = cluster.api.request("GET", "/version")
    assert version["gitVersion"] == build.required_version("k8s.io/kubernetes")
    assert (version["major"], version["minor"]) == ("1", "36")


@pytest.mark.parametrize("name", nodes.NODES)
def test_nodes_are_ready_with_their_gpus_architecture_and_taints(cluster: Cluster, name: str) -> None:
    machine = nodes.NODES[name]
    node = cluster.api.get("v1", "Node", name)
    assert node["status"]["allocatable"].get("nvidia.com/gpu", "0") == str(machine.gpus)
    assert node["status"]["nodeInfo"]["architecture"] == machine.architecture
    assert node["metadata"]["labels"]["kubernetes.io/arch"] == machine.architecture
    assert {taint["key"] for taint in node["spec"].get("taints", [])} == {taint["key"] for taint in machine.taints}
    assert nodes.is_ready(node)


def test_unknown_fields_are_refused(cluster: Cluster, namespace: str) -> None:
    wrong = deployment(namespace, "x", pod_spec(nodeSelectors={}))
    with pytest.raises(Refused, match="unknown field") as refused:
        cluster.api.create(wrong)
    assert refused.value.status == 400


# Scheduling

PLACES: Mapping[str, tuple[Object, Sequence[str | None]]] = {
    "nothing asked: the only node without a taint": (pod_spec(), ["cpu-1"]),
    "GPUs without a toleration: nowhere": (pod_spec(gpus=1), [None]),
    "arm64 without its toleration: nowhere": (
        pod_spec(gpus=4, nodeSelector={"kubernetes.io/arch": "arm64"}, tolerations=[TOLERATE_GPU]),
        [None],
    ),
    "arm64 and both tolerations: a tray": (
        pod_spec(gpus=4, nodeSelector={"kubernetes.io/arch": "arm64"}, tolerations=[TOLERATE_GPU, TOLERATE_ARM]),
        ["gb200-1", "gb200-2", "gb200-3"],
    ),
    "eight GPUs of a product": (
        pod_spec(gpus=8, nodeSelector={"nvidia.com/gpu.product": "NVIDIA-H200"}, tolerations=[TOLERATE_GPU]),
        ["hgx-h200-1"],
    ),
    "more GPUs than a tray has": (
        pod_spec(gpus=8, nodeSelector={"kubernetes.io/arch": "arm64"}, tolerations=[TOLERATE_GPU, TOLERATE_ARM]),
        [None],
    ),
}


@pytest.mark.parametrize("case", PLACES)
def test_pods_land_where_they_should_and_nowhere_else(cluster: Cluster, namespace: str, case: str) -> None:
    spec, allowed = PLACES[case]
    cluster.api.create(deployment(namespace, "x", spec))

    def decided() -> list[str | None]:
        placed = list(cluster.placed(namespace).values())
        pending = [condition(pod, "PodScheduled") for pod in cluster.pods(namespace)]
        unschedulable = any(each and each.get("reason") == "Unschedulable" for each in pending)
        return placed if unschedulable or any(placed) else []

    placed = cluster.api.wait("the scheduler decided", decided)
    assert len(placed) == 1
    assert placed[0] in allowed


def test_trays_fill_up_and_one_more_waits_for_gpus(cluster: Cluster, namespace: str) -> None:
    spec = pod_spec(gpus=4, nodeSelector={"kubernetes.io/arch": "arm64"}, tolerations=[TOLERATE_GPU, TOLERATE_ARM])
    cluster.api.create(deployment(namespace, "full", spec, replicas=4))
    cluster.api.wait("three pods are ready", lambda: len(ready_pods(cluster, namespace)) == 3)
    placed = sorted(cluster.placed(namespace).values(), key=str)
    assert placed == [None, "gb200-1", "gb200-2", "gb200-3"]
    waiting = next(pod for pod in cluster.pods(namespace) if not pod["spec"].get("nodeName"))
    why = cluster.api.wait(
        "the scheduler says why",
        lambda: (
            condition(cluster.api.get("v1", "Pod", waiting["metadata"]["name"], namespace), "PodScheduled") or {}
        ).get("message"),
    )
    assert "Insufficient nvidia.com/gpu" in why


def test_only_leaves_no_other_node(cluster: Cluster, namespace: str) -> None:
    spec = pod_spec(gpus=4, nodeSelector={"kubernetes.io/arch": "arm64"}, tolerations=[TOLERATE_GPU, TOLERATE_ARM])
    with cluster.only("gb200-2", "cpu-1"):
        cluster.api.create(deployment(namespace, "x", spec, replicas=2))
        cluster.api.wait("one pod is ready", lambda: len(ready_pods(cluster, namespace)) == 1)
        assert set(cluster.placed(namespace).values()) == {"gb200-2", None}
    cluster.api.wait("the other one is too", lambda: len(ready_pods(cluster, namespace)) == 2)


# What pods do


def test_jobs_complete(cluster: Cluster, namespace: str) -> None:
    cluster.api.create(job(namespace, "works"))
    cluster.api.wait("Complete", lambda: condition(cluster.api.get("batch/v1", "Job", "works", namespace), "Complete"))


def test_a_job_fails_as_told_and_only_that_job(cluster: Cluster, namespace: str) -> None:
    with cluster.behave(pods.fail(3, "no space left on device"), namespace, **{"job-name": "breaks"}):
        cluster.api.create(job(namespace, "breaks"))
        cluster.api.create(job(namespace, "works"))

        def live(name: str) -> Object:
            return cluster.api.get("batch/v1", "Job", name, namespace)

        failed = cluster.api.wait("Failed", lambda: condition(live("breaks"), "Failed"))
        assert failed["reason"] == "BackoffLimitExceeded"
        cluster.api.wait("the other one completes", lambda: condition(live("works"), "Complete"))
        [pod] = cluster.pods(namespace, "job-name=breaks")
        ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
        assert (ended["exitCode"], ended["message"]) == (3, "no space left on device")
    cluster.api.create(job(namespace, "again"))
    cluster.api.wait("Complete", lambda: condition(cluster.api.get("batch/v1", "Job", "again", namespace), "Complete"))


WAITING = {
    "stay_unready": (pods.stay_unready(), "Running", None, "Unhealthy: Readiness probe failed"),
    "image_cannot_be_pulled": (pods.image_cannot_be_pulled(), "Pending", "ImagePullBackOff", "Failed to pull image"),
    "crash": (
        pods.crash(137, reason="OOMKilled"),
        "Running",
        "CrashLoopBackOff",
        "Back-off restarting failed container",
    ),
}


@pytest.mark.parametrize("case", WAITING)
def test_pods_that_do_not_become_ready_recover_when_the_test_lets_them(
    cluster: Cluster, namespace: str, case: str
) -> None:
    behaviour, phase, reason, event = WAITING[case]
    with cluster.behave(behaviour, namespace, app="x"):
        cluster.api.create(deployment(namespace, "x", pod_spec()))

        def stuck() -> Object | None:
            return next((pod for pod in cluster.pods(namespace) if pod["status"].get("containerStatuses")), None)

        pod = cluster.api.wait("the pod has a status", stuck)
        assert pod["status"]["phase"] == phase
        assert (condition(pod, "Ready") or {})["status"] == "False"
        assert pod["status"]["containerStatuses"][0]["state"].get("waiting", {}).get("reason") == reason
        cluster.api.wait("an event says so", lambda: any(event in line for line in cluster.events(namespace)))
        assert ready_pods(cluster, namespace) == []
    cluster.api.wait("the pod recovers", lambda: ready_pods(cluster, namespace))


def test_pods_that_were_ready_can_stop_being_so(cluster: Cluster, namespace: str) -> None:
    cluster.api.create(deployment(namespace, "x", pod_spec()))
    cluster.api.wait("ready", lambda: ready_pods(cluster, namespace))
    with cluster.behave(pods.stay_unready(), namespace, app="x"):
        cluster.api.wait("unready", lambda: not ready_pods(cluster, namespace))
    cluster.api.wait("ready again", lambda: ready_pods(cluster, namespace))


# Storage


def phase(cluster: Cluster, namespace: str, name: str) -> str:
    return str(cluster.api.get("v1", "PersistentVolumeClaim", name, namespace)["status"]["phase"])


def test_shared_files_are_bound_at_once(cluster: Cluster, namespace: str) -> None:
    cluster.api.create(claim(namespace, "cache", "shared-files", "ReadWriteMany"))
    cluster.api.wait("Bound", lambda: phase(cluster, namespace, "cache") == "Bound")
    live = cluster.api.get("v1", "PersistentVolumeClaim", "cache", namespace)
    volume = live["spec"]["volumeName"]
    cluster.api.delete("v1", "PersistentVolumeClaim", "cache", namespace)
    cluster.api.wait("the volume goes too", lambda: cluster.api.find("v1", "PersistentVolume", volume) is None)


@pytest.mark.parametrize("storage_class", ["shared-files-first-consumer", None])
def test_some_classes_wait_for_the_first_pod(cluster: Cluster, namespace: str, storage_class: str | None) -> None:
    cluster.api.create(claim(namespace, "cache", storage_class, "ReadWriteOnce"))
    cluster.api.wait(
        "the controller waits", lambda: any("WaitForFirstConsumer" in line for line in cluster.events(namespace))
    )
    assert phase(cluster, namespace, "cache") == "Pending"
    volume = {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}
    cluster.api.create(deployment(namespace, "x", pod_spec(volumes=[volume])))
    cluster.api.wait("Bound", lambda: phase(cluster, namespace, "cache") == "Bound")
    cluster.api.wait("its pod is ready", lambda: ready_pods(cluster, namespace))


def test_block_storage_refuses_to_be_shared(cluster: Cluster, namespace: str) -> None:
    cluster.api.create(claim(namespace, "cache", "block", "ReadWriteMany"))
    volume = {"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}
    cluster.api.create(deployment(namespace, "x", pod_spec(volumes=[volume])))
    cluster.api.wait("it says why", lambda: any("ProvisioningFailed" in line for line in cluster.events(namespace)))
    assert phase(cluster, namespace, "cache") == "Pending"


# kubectl


def test_kubectl_shows_logs(cluster: Cluster, namespace: str) -> None:
    cluster.api.create(deployment(namespace, "x", pod_spec()))
    [pod] = cluster.api.wait("ready", lambda: ready_pods(cluster, namespace))
    assert kubectl(cluster, "logs", "-n", namespace, pod).stdout == ""
    cluster.write_log(namespace, pod, ["loading shard 1 of 2", "loading shard 2 of 2"])
    shown = kubectl(cluster, "logs", "-n", namespace, "deployment/x", "--tail=1")
    assert shown.stdout == "loading shard 2 of 2\n"


@pytest.fixture
def endpoint() -> Iterator[int]:
    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "7")
            self.end_headers()
            self.wfile.write(b"healthy")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_kubectl_forwards_a_services_port_to_loopback(cluster: Cluster, namespace: str, endpoint: int) -> None:
    cluster.api.create(deployment(namespace, "front", pod_spec()))
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "front", "namespace": namespace},
        "spec": {"selector": {"app": "front"}, "ports": [{"port": 8000}]},
    }
    cluster.api.create(service)
    [pod] = cluster.api.wait("ready", lambda: ready_pods(cluster, namespace))
    cluster.forward(namespace, pod, 8000, to=endpoint)
    command = ["kubectl", f"--kubeconfig={cluster.kubeconfig}", f"--context={cluster.context}"]
    forward = subprocess.Popen(
        [*command, "port-forward", "-n", namespace, "service/front", ":8000"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert forward.stdout is not None
        told = re.search(r"127\.0\.0\.1:([0-9]+) ->", forward.stdout.readline())
        assert told is not None
        with urllib.request.urlopen(f"http://127.0.0.1:{told.group(1)}/health", timeout=20) as answer:
            assert answer.read() == b"healthy"
    finally:
        forward.terminate()
        forward.wait()


def test_what_a_destroy_left_behind_is_found(cluster: Cluster, namespace: str) -> None:
    assert cluster.left_in(namespace) == []
    cluster.api.create(claim(namespace, "cache", "block", "ReadWriteOnce"))
    assert cluster.left_in(namespace) == ["PersistentVolumeClaim/cache"]


# Starting and stopping

# A shell in the background lets its children ignore Ctrl-C; at a keyboard they do not.
SESSION = """
import signal, sys, time
from pathlib import Path
from tests.kubernetes import build, control_plane
signal.signal(signal.SIGINT, signal.default_int_handler)
plane = control_plane.start(build.build(), Path(sys.argv[1]))
try:
    print(*plane.pids.values(), flush=True)
    time.sleep(600)
finally:
    plane.stop()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_no_process_outlives_its_session(cluster: Cluster, tmp_path: Path, how: signal.Signals) -> None:
    session = subprocess.Popen(
        [sys.executable, "-c", SESSION, str(tmp_path)], cwd=build.REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert session.stdout is not None
    pids = [int(pid) for pid in session.stdout.readline().split()]
    assert len(pids) == 5
    session.send_signal(how)
    session.wait(timeout=120)
    _wait_gone(pids)
    assert cluster.api.request("GET", "/readyz") == "ok"  # nobody else's were ended


def test_a_port_that_somebody_took_meanwhile_is_no_failure(
    control_plane_programs: build.Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = control_plane._free_ports
    asked: list[int] = []

    with socket.create_server((control_plane.LOOPBACK, 0)) as taken:

        def ports(count: int) -> list[int]:
            asked.append(count)
            chosen = choose(count)
            return [taken.getsockname()[1], *chosen[1:]] if len(asked) == 1 else chosen

        monkeypatch.setattr(control_plane, "_free_ports", ports)
        plane = control_plane.start(control_plane_programs, tmp_path)
        try:
            assert len(asked) == 2
            assert plane.api().request("GET", "/readyz") == "ok"
        finally:
            plane.stop()


def test_a_person_starts_finds_and_ends_it(cluster: Cluster, tmp_path: Path) -> None:
    def command(word: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "tests.kubernetes", f"--directory={tmp_path}", word]
        return subprocess.run(line, cwd=build.REPOSITORY, capture_output=True, text=True, timeout=180, check=False)

    assert command("status").returncode == 1
    started = command("up")
    try:
        assert started.returncode == 0, started.stderr
        kubeconfig = command("kubeconfig").stdout.strip()
        assert f"export KUBECONFIG={kubeconfig}" in started.stdout
        shown = subprocess.run(
            ["kubectl", f"--kubeconfig={kubeconfig}", "get", "nodes", "-o", "name"], capture_output=True, text=True
        )
        assert shown.stdout.split() == [f"node/{name}" for name in sorted(nodes.NODES)]
        again = command("up")
        assert again.stdout == started.stdout
        pids = [int(pid) for pid in re.findall(r"^  \S+ +([0-9]+)$", command("status").stdout, re.MULTILINE)]
        assert len(pids) == 5
        assert all(_alive(pid) for pid in pids)
    finally:
        ended = command("down")
    assert ended.returncode == 0
    _wait_gone(pids)
    assert "nothing runs" in command("down").stderr
    assert cluster.api.request("GET", "/readyz") == "ok"


def _wait_gone(pids: list[int]) -> None:
    """A process that has been ended gives its memory back first."""
    deadline = time.monotonic() + 60
    while alive := [pid for pid in pids if _alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] == "Z")
