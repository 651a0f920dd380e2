"""The control plane's programs, built once from Go's module proxy and kept in .cache/kubernetes/<key>."""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MODULE = Path(__file__).parent / "binaries"
CACHE = Path(os.environ.get("GPT_OSS_KUBERNETES_CACHE", REPOSITORY / ".cache" / "kubernetes")).absolute()

# Program -> package of `tool` in binaries/go.mod.
PROGRAMS: Mapping[str, str] = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kwok": "sigs.k8s.io/kwok/cmd/kwok",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
}
KWOK_MODULE = "sigs.k8s.io/kwok"
KWOK_CRDS = "kwok-crds"  # beside the programs: stages, logs and port forwards are objects that tests create
STAMPED = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
# Profile-guided optimisation would compile every package once more for each program.
GO_BUILD = ("build", "-mod=readonly", "-buildvcs=false", "-pgo=off", "-trimpath")

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class KubernetesError(Exception):
    """Something a person has to look at; the message says what and how."""


class GoMissingError(KubernetesError):
    """Nothing is built yet, and there is no Go to build with."""


@dataclass(frozen=True)
class Programs:
    """A directory with one version of everything."""

    directory: Path
    version: str  # of Kubernetes

    def path(self, program: str) -> Path:
        return self.directory / program

    @property
    def kwok_crds(self) -> list[Path]:
        return sorted((self.directory / KWOK_CRDS).glob("*.yaml"))


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def required_version(module: str) -> str:
    """The version of a module that go.mod asks for."""
    found = re.search(rf"^\t?(?:require )?{re.escape(module)} (v[0-9]\S*)", _go_mod(), re.MULTILINE)
    if found is None:
        raise KubernetesError(f"{MODULE / 'go.mod'}: no requirement on {module}")
    return found.group(1)


def required_go() -> str:
    found = re.search(r"^go ([0-9.]+)$", _go_mod(), re.MULTILINE)
    if found is None:
        raise KubernetesError(f"{MODULE / 'go.mod'}: no `go` line")
    return found.group(1)


def key() -> str:
    """What the programs are made of. A newer compiler alone is no reason to build again."""
    made_of = [
        _go_mod(),
        (MODULE / "go.sum").read_text(),
        repr((PROGRAMS, GO_BUILD, STAMPED)),
        inspect.getsource(_linker_flags),
        inspect.getsource(_build_into),
        f"{platform.system()}/{platform.machine()}",
    ]
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]


def programs() -> Programs | None:
    """What is built already, or None. The directory has its name only when everything is in it."""
    directory = CACHE / key()
    return Programs(directory, required_version("k8s.io/kubernetes")) if directory.is_dir() else None


def build() -> Programs:
    """Build what is missing; five minutes on two cores the first time, nothing afterwards."""
    if done := programs():
        return done
    go = _go()
    with _locked():
        if done := programs():  # another process built it while this one waited
            return done
        for cut in CACHE.glob("building-*"):
            shutil.rmtree(cut)
        finished = CACHE / key()  # of what is built now, whoever edits it meanwhile
        directory = Path(tempfile.mkdtemp(prefix="building-", dir=CACHE))
        directory.chmod(0o755)
        try:
            _build_into(directory, go)
            directory.rename(finished)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
    return Programs(finished, required_version("k8s.io/kubernetes"))


def _build_into(directory: Path, go: str) -> None:
    version = required_version("k8s.io/kubernetes")
    started = time.monotonic()
    for number, (program, package) in enumerate(PROGRAMS.items(), start=1):
        say(f"building {program} for Kubernetes {version} ({number} of {len(PROGRAMS)})")
        _run_go(go, *GO_BUILD, "-ldflags", _linker_flags(version), "-o", str(directory / program), package)
    listed = json.loads(_run_go(go, "list", "-mod=readonly", "-m", "-json", KWOK_MODULE))
    definitions = Path(listed["Dir"]) / "kustomize" / "crd" / "bases"
    (directory / KWOK_CRDS).mkdir()
    for definition in sorted(definitions.glob("*.yaml")):
        (directory / KWOK_CRDS / definition.name).write_bytes(definition.read_bytes())
    say(f"built in {time.monotonic() - started:.0f} s")


def _linker_flags(version: str) -> str:
    """Without the stamp /version answers v0.0.0-master+$Format, which no client can parse."""
    major, minor, _ = version.removeprefix("v").split(".", 2)
    values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    stamps = [f"-X {package}.{name}={value}" for package in STAMPED for name, value in values.items()]
    return " ".join(["-s", "-w", *stamps])


def _go_mod() -> str:
    return (MODULE / "go.mod").read_text()


def _go() -> str:
    """Path of a Go that can build go.mod, itself or by fetching the toolchain that go.mod names."""
    go = shutil.which("go")
    if go is None:
        raise GoMissingError(
            f"go: not found on PATH; the control plane is built with Go {required_go()} or newer (https://go.dev/dl)"
        )
    found = _run_go(go, "env", "GOVERSION", directory=Path(tempfile.gettempdir())).strip().removeprefix("go")
    numbers = [int(number) for number in re.findall(r"[0-9]+", found)[:2]]
    if numbers < [1, 21]:
        raise KubernetesError(
            f"go: {go} is {found}; allowed: {required_go()} or newer, or 1.21 or newer with a module proxy "
            "that serves golang.org/toolchain"
        )
    try:
        _run_go(go, "list", "-mod=readonly", "-m")  # reads go.mod, and so its `go` line
    except KubernetesError as error:
        raise KubernetesError(
            f"go: {go} is {found} and could not get a newer one; {MODULE / 'go.mod'} needs {required_go()} or newer. "
            "Install it from https://go.dev/dl, or let Go fetch it: GOTOOLCHAIN=auto and a GOPROXY that has it.\n"
            f"{error}"
        ) from None
    return go


def _run_go(go: str, *arguments: str, directory: Path | None = None) -> str:
    # A distribution's go.env may say `local`; a person's own GOTOOLCHAIN is left alone.
    environment = {"GOTOOLCHAIN": "auto", **os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
    process = subprocess.Popen(
        [go, *arguments],
        cwd=directory or MODULE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=tied_to_us(),
    )
    try:
        output, errors = process.communicate()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.returncode != 0:
        said = "\n".join(line for line in errors.splitlines() if not line.startswith("go: downloading"))
        raise KubernetesError(
            f"`go {' '.join(arguments[:2])} …` ended with status {process.returncode}:\n{said[-4000:]}"
        )
    return output


def tied_to_us() -> Callable[[], None] | None:
    """For `preexec_fn`: the kernel ends the child when this process ends, whatever ends it. Linux alone can."""
    if _LIBC is None:
        return None
    parent = os.getpid()

    def tie() -> None:  # runs in the child, between fork and exec
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return tie


@contextmanager
def _locked() -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "build.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        yield
