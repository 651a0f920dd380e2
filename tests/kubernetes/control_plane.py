"""A Kubernetes control plane on loopback: etcd, kube-apiserver, kube-controller-manager, kube-scheduler, KWOK.

Started in five seconds into a directory of its own, with ports nobody uses; stopped by process id.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from . import certificates
from .api import Api, Refused, SafeLoader
from .build import KubernetesError, Programs, tied_to_us

CONTEXT = "gpt-oss-test"
SERVICE_ADDRESSES = "10.96.0.0/16"
FIRST_SERVICE_ADDRESS = "10.96.0.1"
POD_ADDRESSES = "10.244.0.0/16"
LOOPBACK = "127.0.0.1"
READY_WITHIN = 240.0  # five seconds on an idle machine
STOP_WITHIN = 8.0
KILLED_WITHIN = 60.0  # who has been killed gives its memory back first
STATE = "control-plane.json"
ALWAYS_ALLOWED = "--authorization-always-allow-paths=/healthz,/readyz,/livez"
# Pods are retried every two seconds at most, and clients are not slowed down: tests wait for both.
SCHEDULER = {
    "apiVersion": "kubescheduler.config.k8s.io/v1",
    "kind": "KubeSchedulerConfiguration",
    "leaderElection": {"leaderElect": False},
    "podInitialBackoffSeconds": 1,
    "podMaxBackoffSeconds": 2,
}
KWOK_CRDS_USED = ("Stage", "Logs", "ClusterLogs", "PortForward", "ClusterPortForward")


@dataclass
class ControlPlane:
    """A running control plane; `stop` ends it."""

    directory: Path
    kubeconfig: Path
    server: str
    version: str
    pids: dict[str, int] = field(default_factory=dict)
    _children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, repr=False)
    context: str = CONTEXT

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    def api(self) -> Api:
        return Api(self.kubeconfig, self.context)

    def ended(self) -> list[str]:
        """Programs that ended although nobody asked."""
        ended = []
        for name, pid in self.pids.items():
            child = self._children.get(name)
            if child.poll() is not None if child else not _is_ours(pid, self.directory):
                ended.append(name)
        return ended

    def stop(self) -> None:
        """End every process, last started first. Asked first, then made to: nothing here outlives its test."""
        for name in reversed(self.pids):
            child = self._children.get(name)
            _end(self.pids[name], child, self.directory)
        self.pids = {}
        self._children = {}
        (self.directory / STATE).unlink(missing_ok=True)

    def log_tails(self, lines: int = 15) -> str:
        tails = []
        for log in sorted(self.logs.glob("*.log")):
            last = log.read_text(errors="replace").splitlines()[-lines:]
            tails.append(f"--- {log}\n" + "\n".join(line[:400] for line in last))
        return "\n".join(tails)

    def _save(self) -> None:
        saved = {
            "server": self.server,
            "version": self.version,
            "kubeconfig": str(self.kubeconfig),
            "pids": self.pids,
        }
        (self.directory / STATE).write_text(json.dumps(saved, indent=2) + "\n")


def running(directory: Path) -> ControlPlane | None:
    """What an earlier process started in a directory, if any of it still runs."""
    try:
        saved = json.loads((directory / STATE).read_text())
    except FileNotFoundError:
        return None
    plane = ControlPlane(directory, Path(saved["kubeconfig"]), saved["server"], saved["version"], saved["pids"])
    return plane if len(plane.ended()) < len(plane.pids) else None


def start(programs: Programs, directory: Path, *, outlives_us: bool = False) -> ControlPlane:
    """Start everything and wait until it serves.

    With `outlives_us` the processes stay when this one ends; otherwise the kernel ends them with it, whatever happens.
    """
    for attempt in (1, 2, 3):
        try:
            return _start(programs, directory, outlives_us=outlives_us)
        except _PortTakenError:
            if attempt == 3:
                raise
    raise AssertionError("unreachable")


class _PortTakenError(KubernetesError):
    """Somebody took a port between our asking for a free one and the program's listening there."""


def _start(programs: Programs, directory: Path, *, outlives_us: bool) -> ControlPlane:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "logs").mkdir(exist_ok=True)
    shutil.rmtree(directory / "etcd", ignore_errors=True)  # another start's data knows other ports
    client, peer, secure, manager, scheduler, kubelet = _free_ports(6)
    issued = certificates.issue(directory / "pki", addresses=[LOOPBACK, FIRST_SERVICE_ADDRESS])
    server = f"https://{LOOPBACK}:{secure}"
    kubeconfig = _write_kubeconfig(directory / "kubeconfig", server, issued)
    scheduler_config = directory / "scheduler.yaml"
    connection = {"clientConnection": {"kubeconfig": str(kubeconfig), "qps": 200, "burst": 400}}
    scheduler_config.write_text(yaml.safe_dump(SCHEDULER | connection))
    plane = ControlPlane(directory, kubeconfig, server, programs.version)
    serving = [f"--tls-cert-file={issued.server.certificate_file}", f"--tls-private-key-file={issued.server.key_file}"]
    commands: dict[str, list[str]] = {
        "etcd": [
            f"--data-dir={directory / 'etcd'}",
            f"--listen-client-urls=http://{LOOPBACK}:{client}",
            f"--advertise-client-urls=http://{LOOPBACK}:{client}",
            f"--listen-peer-urls=http://{LOOPBACK}:{peer}",
            f"--initial-advertise-peer-urls=http://{LOOPBACK}:{peer}",
            f"--initial-cluster=default=http://{LOOPBACK}:{peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        ],
        "kube-apiserver": [
            f"--etcd-servers=http://{LOOPBACK}:{client}",
            f"--bind-address={LOOPBACK}",
            f"--secure-port={secure}",
            f"--client-ca-file={issued.authority}",
            "--authorization-mode=Node,RBAC",
            f"--service-cluster-ip-range={SERVICE_ADDRESSES}",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--service-account-key-file={issued.service_account_public_key}",
            f"--service-account-signing-key-file={issued.service_account_key}",
            "--allow-privileged=true",
            "--endpoint-reconciler-type=none",
            "--enable-priority-and-fairness=false",
            "--kubelet-preferred-address-types=InternalIP",
            "--profiling=false",
            *serving,
        ],
        "kube-controller-manager": [
            f"--kubeconfig={kubeconfig}",
            f"--bind-address={LOOPBACK}",
            f"--secure-port={manager}",
            "--leader-elect=false",
            f"--root-ca-file={issued.authority}",
            f"--service-account-private-key-file={issued.service_account_key}",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
            ALWAYS_ALLOWED,
            *serving,
        ],
        "kube-scheduler": [
            f"--config={scheduler_config}",
            f"--bind-address={LOOPBACK}",
            f"--secure-port={scheduler}",
            ALWAYS_ALLOWED,
            *serving,
        ],
        "kwok": [
            f"--kubeconfig={kubeconfig}",
            f"--config={_empty(directory / 'kwok.yaml')}",
            "--manage-all-nodes=true",
            "--node-lease-duration-seconds=40",
            f"--node-ip={LOOPBACK}",
            f"--node-port={kubelet}",
            f"--server-address={LOOPBACK}:{kubelet}",
            f"--cidr={POD_ADDRESSES}",
            f"--enable-crds={','.join(KWOK_CRDS_USED)}",
            *serving,
        ],
    }

    def launch(*names: str) -> None:
        for name in names:
            _launch(plane, name, [str(programs.path(name)), *commands[name]], outlives_us=outlives_us)

    try:
        launch("etcd", "kube-apiserver")
        api = plane.api()
        _wait(plane, "kube-apiserver answers /readyz", lambda: _ready(api))
        launch("kube-controller-manager", "kube-scheduler")
        for file in programs.kwok_crds:
            definition = yaml.load(file.read_text(), Loader=SafeLoader)
            if definition["spec"]["names"]["kind"] in KWOK_CRDS_USED:
                api.apply(definition)
        kinds = [("kwok.x-k8s.io/v1alpha1", kind) for kind in KWOK_CRDS_USED]
        _wait(plane, "KWOK's kinds are served", lambda: api.serves(kinds))
        launch("kwok")
        _wait(
            plane, "the default ServiceAccount exists", lambda: api.find("v1", "ServiceAccount", "default", "default")
        )
        plane._save()
    except BaseException:
        plane.stop()
        raise
    return plane


def _launch(plane: ControlPlane, name: str, command: Sequence[str], *, outlives_us: bool) -> None:
    with (plane.logs / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=plane.directory,
            env=_environment(),
            start_new_session=True,  # a Ctrl-C at the terminal is ours to handle, in order
            preexec_fn=None if outlives_us else tied_to_us(),
        )
    plane._children[name] = child
    plane.pids[name] = child.pid
    plane._save()


def _environment() -> Mapping[str, str]:
    """Neither proxies nor somebody's KUBECONFIG: these programs talk to loopback alone."""
    kept = ("PATH", "HOME", "TMPDIR", "LANG", "TZ")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"GOGC": "400"}


def _wait(plane: ControlPlane, what: str, ready: Callable[[], Any]) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while True:
        if ended := plane.ended():
            tails = plane.log_tails()
            kind = _PortTakenError if "address already in use" in tails else KubernetesError
            raise kind(f"{what}: {', '.join(ended)} ended; logs in {plane.logs}\n{tails}")
        if ready():
            return
        if time.monotonic() > deadline:
            raise KubernetesError(f"{what}: not within {READY_WITHIN:.0f} s\n{plane.log_tails()}")
        time.sleep(0.05)


def _ready(api: Api) -> bool:
    try:
        return bool(api.request("GET", "/readyz") == "ok")
    except (OSError, Refused):
        return False


def _end(pid: int, child: subprocess.Popen[bytes] | None, directory: Path) -> None:
    if child is None and not _is_ours(pid, directory):
        return
    for number, patience in ((signal.SIGTERM, STOP_WITHIN), (signal.SIGKILL, KILLED_WITHIN)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            gone = child.poll() is not None if child else not _is_ours(pid, directory)
            if gone:
                return
            time.sleep(0.05)
    raise KubernetesError(f"process {pid} does not end; its log is in {directory / 'logs'}")


def _is_ours(pid: int, directory: Path) -> bool:
    """Whether a process id still means what we started: ids are used again."""
    command_line = Path(f"/proc/{pid}/cmdline")
    if Path("/proc/self").exists():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return str(directory) in command_line.read_text(errors="replace")
        return False
    shown = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return str(directory) in shown.stdout


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


def _empty(path: Path) -> Path:
    path.touch()
    return path


def _write_kubeconfig(path: Path, server: str, issued: certificates.Certificates) -> Path:
    def data(file: Path) -> str:
        return base64.b64encode(file.read_bytes()).decode()

    user = {
        "client-certificate-data": data(issued.administrator.certificate_file),
        "client-key-data": data(issued.administrator.key_file),
    }
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": CONTEXT,
        "clusters": [
            {"name": CONTEXT, "cluster": {"server": server, "certificate-authority-data": data(issued.authority)}}
        ],
        "users": [{"name": f"{CONTEXT}-admin", "user": user}],
        "contexts": [{"name": CONTEXT, "context": {"cluster": CONTEXT, "user": f"{CONTEXT}-admin"}}],
    }
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path
