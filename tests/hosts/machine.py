"""The machine the test hosts run on: where things are, what is missing, and which podman flags it needs."""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = REPOSITORY / ".cache" / "hosts"
BUILD = REPOSITORY / "build" / "hosts"

NETWORK = os.environ.get("GPT_OSS_TEST_NETWORK", "gpt-oss-test")
SUBNET = ipaddress.ip_network(os.environ.get("GPT_OSS_TEST_SUBNET", "10.89.77.0/24"))
MIRROR_ADDRESS = str(SUBNET[2])
FIRST_HOST = 10  # addresses below are for the network's own machines
LABEL = "gpt-oss-test"  # on every container and volume made here, so that they can be found again

CAP_SYS_RESOURCE = 24

# The command that must exist -> packages that bring it, the first known to apt is taken.
TOOLS: Mapping[str, tuple[str, ...]] = {
    "podman": ("podman",),
    "runc": ("runc",),
    "debootstrap": ("debootstrap",),
    "iptables": ("iptables",),
    "gpg": ("gnupg",),
    "dpkg-deb": ("dpkg",),
    "apt-ftparchive": ("apt-utils",),
    "ssh": ("openssh-client",),
    "ssh-keygen": ("openssh-client",),
}
# Files that must exist for podman's networks and debootstrap's signatures -> packages.
FILES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("/usr/lib/podman/netavark", "/usr/lib/cni/bridge", "/usr/libexec/podman/netavark"): (
        "netavark",
        "containernetworking-plugins",
    ),
    ("/usr/share/keyrings/debian-archive-keyring.gpg",): ("debian-archive-keyring",),
}
WATCHES = Path("/proc/sys/fs/inotify/max_user_instances")
WATCHES_NEEDED = 1024


class HostError(Exception):
    """Something a person has to look at; the message says what and how."""


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def run(
    command: Sequence[str | Path],
    *,
    check: bool = True,
    input_bytes: bytes | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command, keeping its output for the error that a failure becomes."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, input=input_bytes, capture_output=True, env=environment, check=False)
    except FileNotFoundError:
        raise HostError(
            f"{words[0]} is not installed; `python -m tests.hosts tools` installs what is missing"
        ) from None
    result = subprocess.CompletedProcess(
        words, done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    )
    if check and result.returncode != 0:
        said = (result.stdout + result.stderr).strip()[-4000:]
        raise HostError(f"`{' '.join(words)[:300]}` ended with status {result.returncode}:\n{said}")
    return result


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One process at a time: images and addresses are shared by everything that runs on this machine."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        yield


def wait_until(what: str, ready: Callable[[], bool], *, seconds: float) -> None:
    """Ask four times a second until it is so; an error names what was awaited."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise HostError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.25)


def missing_packages(
    tools: Mapping[str, tuple[str, ...]] = TOOLS, files: Mapping[tuple[str, ...], tuple[str, ...]] = FILES
) -> list[str]:
    """Debian or Ubuntu packages to install before a test host can start."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    absent = [packages for tool, packages in tools.items() if shutil.which(tool, path=path) is None]
    absent += [packages for names, packages in files.items() if not any(Path(file).exists() for file in names)]
    return sorted({next((name for name in names if _known_to_apt(name)), names[0]) for names in absent})


def _known_to_apt(package: str) -> bool:
    shown = run(["apt-cache", "show", "--no-all-versions", package], check=False)
    return shown.returncode == 0 and bool(shown.stdout.strip())


def require_tools() -> None:
    """Install what podman hosts need, or say the one line that does."""
    install_missing(TOOLS, FILES)
    _require_watches()


def install_missing(
    tools: Mapping[str, tuple[str, ...]], files: Mapping[tuple[str, ...], tuple[str, ...]] = FILES
) -> None:
    """Install the packages of tools and files that are not there, or say the one line that does."""
    if sys.platform != "linux" or shutil.which("apt-get") is None:
        raise HostError("test hosts need Debian or Ubuntu: apt-get was not found")
    missing = missing_packages(tools, files)
    if missing and os.geteuid() == 0:
        say(f"installing {' '.join(missing)}")
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update", "-q"], environment=quiet)
        missing = missing_packages(tools, files)  # apt knows the names only now
        run(["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing], environment=quiet)
    elif missing:
        raise HostError(f"run once: sudo apt-get install --no-install-recommends {' '.join(missing)}")
    if os.geteuid() != 0:
        raise HostError("test hosts need root (nested Docker, fixed addresses): run it with sudo")


def _require_watches() -> None:
    """Every host's systemd and every simulated engine watches files; the kernel's default is made for one machine."""
    if int(WATCHES.read_text()) >= WATCHES_NEEDED:
        return
    try:
        WATCHES.write_text(f"{WATCHES_NEEDED}\n")
    except OSError as error:
        raise HostError(f"run once: sudo sysctl fs.inotify.max_user_instances={WATCHES_NEEDED} ({error})") from None


def _capable(capability: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> capability & 1)
    return False


def limits() -> dict[str, int]:
    """Ceilings for `docker run --ulimit` inside a test host; -1 is unlimited.

    A process without CAP_SYS_RESOURCE cannot raise its hard limits, nor can anything it starts.
    """
    if _capable(CAP_SYS_RESOURCE):
        return {"memlock": -1, "stack": -1, "nofile": 1048576}
    return {
        name: hard
        for name, number in (
            ("memlock", resource.RLIMIT_MEMLOCK),
            ("stack", resource.RLIMIT_STACK),
            ("nofile", resource.RLIMIT_NOFILE),
        )
        for hard in [resource.getrlimit(number)[1]]
    }


@functools.cache
def podman_command() -> tuple[str, ...]:
    """podman, with the flags that this machine needs before the subcommand."""
    flags: list[str] = []
    if not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        flags += ["--runtime", "runc"]  # crun refuses hybrid cgroups
    if not Path("/run/systemd/system").exists():
        flags += ["--cgroup-manager", "cgroupfs"]
    return ("podman", *flags)


@functools.cache
def run_flags() -> tuple[str, ...]:
    """Flags for `podman create` of a systemd machine with Docker inside, as far as this machine needs them."""
    flags = ["--privileged"]
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        flags.append("--systemd=always")
    else:
        # Without a namespace Docker inside cannot mount its cgroups. Podman's own preparation for systemd would mount
        # the machine's whole systemd hierarchy over the namespace's, where hosts remove one another's groups.
        flags += ["--cgroupns=private", "--systemd=false", "--stop-signal=SIGRTMIN+3", "--env=container=podman"]
        flags += [f"--tmpfs={path}:rw,nosuid,nodev,mode=755" for path in ("/run", "/run/lock")]
    if not _capable(CAP_SYS_RESOURCE):
        # podman's own defaults are above the hard limits and would be refused; nproc it lowers to pid_max first.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        processes = int(Path("/proc/sys/kernel/pid_max").read_text())
        allowed = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        processes = processes if allowed == resource.RLIM_INFINITY else min(allowed, processes)
        flags += [f"--ulimit=nofile={files}:{files}", f"--ulimit=nproc={processes}:{processes}"]
    return tuple(flags)


def podman(*arguments: str | Path, check: bool = True, input_bytes: bytes | None = None) -> str:
    if input_bytes is None:
        return run([*podman_command(), *arguments], check=check).stdout
    # `podman cp -` keeps what it was given in TMPDIR, and leaves it there.
    with tempfile.TemporaryDirectory(prefix="gpt-oss-test-") as place:
        environment = {**os.environ, "TMPDIR": place}
        return run(
            [*podman_command(), *arguments], check=check, input_bytes=input_bytes, environment=environment
        ).stdout


def podman_json(*arguments: str) -> Any:
    return json.loads(podman(*arguments) or "null")


def require_network() -> None:
    with locked("network"):
        if run([*podman_command(), "network", "exists", NETWORK], check=False).returncode == 0:
            return
        made = run(
            [
                *podman_command(),
                *("network", "create", "--disable-dns", "--label", LABEL),
                *("--subnet", str(SUBNET), "--gateway", str(SUBNET[1]), NETWORK),
            ],
            check=False,
        )
        if made.returncode != 0:
            raise HostError(
                f"the network {NETWORK} could not be made with {SUBNET}: {made.stderr.strip()}\n"
                "Where these addresses are taken: GPT_OSS_TEST_SUBNET=10.123.45.0/24"
            )
