"""Systemd hosts in containers: start, stop, restart, look inside."""

from __future__ import annotations

import io
import ipaddress
import json
import re
import socket
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from . import images, surroundings
from .machine import (
    BUILD,
    CACHE,
    FIRST_HOST,
    LABEL,
    MIRROR_ADDRESS,
    NETWORK,
    SUBNET,
    HostError,
    limits,
    locked,
    podman,
    podman_command,
    podman_json,
    require_network,
    require_tools,
    run,
    run_flags,
    say,
    wait_until,
)

PREFIX = "gpt-oss-test-"
USER = "admin"
KEYS = BUILD / "ssh"
INIT = Path(__file__).with_name("init")
JOURNAL_CHATTER = re.compile(r"^\S+ +\d+ \S+ \S+ (sudo|sshd|ansible-[\w.]+|containerd)\[|^\s{20,}| level=info ")


@dataclass(frozen=True)
class Host:
    """A running test host; the same as build/hosts/NAME.json, which inventories read."""

    name: str
    address: str
    image: str
    hardware: str | None
    user: str
    private_key: str
    known_hosts: str
    mirror: str
    limits: Mapping[str, int]

    @property
    def container(self) -> str:
        return PREFIX + self.name


def _state_file(name: str) -> Path:
    return BUILD / f"{name}.json"


def require_keys() -> None:
    """One key pair to log in with, one for the hosts to show: strict host key checking stays on."""
    with locked("keys"):
        KEYS.mkdir(parents=True, exist_ok=True)
        for name in ("login", "host"):
            if not (KEYS / name).exists():
                run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"gpt-oss-test-{name}", "-f", KEYS / name])
        public = " ".join((KEYS / "host.pub").read_text().split()[:2])
        pattern = ",".join(str(address) for address in SUBNET.hosts())
        (KEYS / "known_hosts").write_text(f"{pattern} {public}\n")


def archive(files: Mapping[str, bytes], modes: Mapping[str, int] | None = None) -> bytes:
    """Files as a tar archive for `podman cp`."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path, content in sorted(files.items()):
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size = len(content)
            entry.mode = (modes or {}).get(path, 0o644)
            entry.mtime = int(time.time())
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _host_files(name: str) -> tuple[dict[str, bytes], dict[str, int]]:
    files = dict(surroundings.files())
    files["/usr/lib/test-host/init"] = INIT.read_bytes()
    files["/etc/ssh/ssh_host_ed25519_key"] = (KEYS / "host").read_bytes()
    files["/etc/ssh/ssh_host_ed25519_key.pub"] = (KEYS / "host.pub").read_bytes()
    for home in ("/root", f"/home/{USER}"):
        files[f"{home}/.ssh/authorized_keys"] = (KEYS / "login.pub").read_bytes()
    files["/etc/hostname"] = f"{name}\n".encode()
    # The consoles and the kernel's log are the outer machine's.
    files["/etc/systemd/system/getty@.service"] = b""
    files["/etc/systemd/journald.conf.d/container.conf"] = b"[Journal]\nReadKMsg=no\n"
    modes = {"/usr/lib/test-host/init": 0o755, "/etc/ssh/ssh_host_ed25519_key": 0o600}
    for path in files:
        if path.startswith("/etc/apt/auth.conf"):
            modes[path] = 0o600
    return files, modes


def exists(container: str) -> bool:
    return run([*podman_command(), "container", "exists", container], check=False).returncode == 0


def _addresses_in_use() -> set[str]:
    taken = set()
    names = podman("ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}").split()
    for name in names:
        shown = podman_json("inspect", name)
        wanted = shown[0]["Config"]["Labels"].get(f"{LABEL}.address")
        if wanted:
            taken.add(wanted)
    return taken


def free_address() -> str:
    taken = _addresses_in_use()
    for number in range(FIRST_HOST, SUBNET.num_addresses - 1):
        if str(SUBNET[number]) not in taken:
            return str(SUBNET[number])
    raise HostError(f"no address left in {SUBNET}: `python -m tests.hosts down --all` frees them")


def mac_address(address: str) -> str:
    """The same for an address for ever: neighbours need not learn a new one when a host restarts."""
    return "02:42:" + ":".join(f"{byte:02x}" for byte in ipaddress.ip_address(address).packed)


def create(
    name: str,
    *,
    image: str,
    address: str,
    files: Mapping[str, bytes],
    modes: Mapping[str, int],
    volumes: Sequence[str] = (),
) -> None:
    """Create (not start) a systemd container with a fixed address and files put into it."""
    container = PREFIX + name
    podman(
        "create",
        *("--name", container, "--hostname", name, "--label", LABEL, "--label", f"{LABEL}.address={address}"),
        *("--network", NETWORK, "--ip", address, "--mac-address", mac_address(address), "--restart", "always"),
        "--shm-size=4g",  # as on a machine: engines with several ranks talk through it
        *run_flags(),
        *(f"--volume={volume}" for volume in volumes),
        image,
        "/usr/lib/test-host/init",
    )
    podman("cp", "-", f"{container}:/", input_bytes=archive(files, modes))


def up(name: str, *, image: str = "base", hardware: str | None = "h200_x4") -> Host:
    """Start a host, or answer the one that runs already."""
    if name in ("mirror",) or not name.replace("-", "").isalnum():
        raise HostError(f"name {name!r}: letters, digits and dashes, and not 'mirror'")
    if exists(PREFIX + name) and _state_file(name).exists():
        host = get(name)
        if (host.image, host.hardware) != (image, hardware):
            raise HostError(
                f"{name} runs already with image {host.image} and hardware {host.hardware}; take it down first"
            )
        podman("start", host.container)
        _wait(host, failed_units_are_errors=False)
        return host
    require_tools()
    tag = images.build(image)[image]
    require_network()
    require_keys()
    files, modes = _host_files(name)
    if hardware is not None:
        from tests.stand_ins.hardware import host_files  # the stand-in is one kind of hardware; hosts work without it

        hardware_files, hardware_modes = host_files(hardware)
        files.update(hardware_files)
        modes.update(hardware_modes)
    pip_cache = CACHE.parent / "pip"
    pip_cache.mkdir(parents=True, exist_ok=True)
    _, directories = surroundings.pip_settings()
    volumes = [
        f"{PREFIX}{name}-docker:/var/lib/docker",
        f"{pip_cache}:/root/.cache/pip",
        *(f"{path}:{path}:ro" for path in directories),
    ]
    with locked("addresses"):
        _forget(name)
        host = Host(
            name=name,
            address=free_address(),
            image=image,
            hardware=hardware,
            user=USER,
            private_key=str(KEYS / "login"),
            known_hosts=str(KEYS / "known_hosts"),
            mirror=MIRROR_ADDRESS,
            limits=limits(),
        )
        podman("volume", "create", "--label", LABEL, f"{PREFIX}{name}-docker")
        create(name, image=tag, address=host.address, files=files, modes=modes, volumes=volumes)
        BUILD.mkdir(parents=True, exist_ok=True)
        _state_file(name).write_text(json.dumps(asdict(host), indent=2) + "\n")
    podman("start", host.container)
    _wait(host)
    return host


def get(name: str) -> Host:
    if not _state_file(name).exists():
        raise HostError(f"{name}: no such host; running: {', '.join(names()) or 'none'}")
    return Host(**json.loads(_state_file(name).read_text()))


def names() -> list[str]:
    return sorted(path.stem for path in BUILD.glob("*.json") if exists(PREFIX + path.stem))


def answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except OSError:
        return False


def booted(container: str, *, failed_units_are_errors: bool = True) -> bool:
    state = run([*podman_command(), "exec", container, "systemctl", "is-system-running"], check=False).stdout.strip()
    if state == "degraded" and failed_units_are_errors:
        failed = run(
            [*podman_command(), "exec", container, "systemctl", "--failed", "--no-legend", "--plain"], check=False
        )
        raise HostError(f"{container} came up with failed units:\n{failed.stdout}")
    return state in ("running", "degraded")


def _wait(host: Host, *, failed_units_are_errors: bool = True) -> None:
    try:
        wait_until(
            f"{host.name} to boot",
            lambda: booted(host.container, failed_units_are_errors=failed_units_are_errors),
            seconds=90,
        )
        wait_until(f"{host.name} to answer SSH at {host.address}", lambda: answers(host.address, 22), seconds=20)
    except HostError as error:
        raise HostError(f"{error}\n{journal(host.container)}") from None


def restart(name: str) -> Host:
    """Reboot: everything running ends, disks stay, volatile state (and a loaded driver) is gone.

    Units may fail afterwards: that is what some tests are about.
    """
    host = get(name)
    podman("restart", "--time", "30", host.container)
    _wait(host, failed_units_are_errors=False)
    return host


def journal(container: str, lines: int = 60) -> str:
    """The last words of a host, for whoever has to find out why; logins and Ansible's own notes are left out."""
    if not exists(container):
        return f"{container} does not exist"
    read = run(
        [*podman_command(), "exec", container, "journalctl", "--no-pager", "-b", "-n", str(lines * 20)], check=False
    )
    if read.returncode != 0:
        return run([*podman_command(), "logs", "--tail", str(lines), container], check=False).stdout
    told = [line[:300] for line in read.stdout.splitlines() if not JOURNAL_CHATTER.search(line)]
    return "\n".join(told[-lines:]) + "\n"


def containers_log(name: str, lines: int = 60) -> str:
    """The logs of the Docker containers inside a host."""
    script = (
        "command -v docker >/dev/null || exit 0; docker ps -a; for c in $(docker ps -aq); do "
        f'echo "--- $(docker inspect -f {{{{.Name}}}} $c)"; docker logs --tail {lines} $c 2>&1; done'
    )
    return run([*podman_command(), "exec", PREFIX + name, "sh", "-c", script], check=False).stdout


def execute(name: str, *command: str, check: bool = True) -> str:
    return run([*podman_command(), "exec", PREFIX + name, *command], check=check).stdout


def _forget(name: str) -> None:
    container = PREFIX + name
    if exists(container):
        podman("rm", "--force", "--time", "2", container)
    run([*podman_command(), "volume", "rm", "--force", f"{container}-docker"], check=False)
    _state_file(name).unlink(missing_ok=True)


def down(name: str) -> None:
    """Remove a host with its disks."""
    with locked("addresses"):
        _forget(name)
    say(f"{name}: removed")


def down_all() -> None:
    """Remove every host, the mirror, their volumes and the network."""
    with locked("addresses"):
        for container in podman("ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}").split():
            _forget(container.removeprefix(PREFIX))
        for volume in podman("volume", "ls", "--filter", f"label={LABEL}", "--format", "{{.Name}}").split():
            podman("volume", "rm", "--force", volume)
    with locked("network"):
        run([*podman_command(), "network", "rm", "--force", NETWORK], check=False)


def ssh_command(name: str, *command: str) -> list[str]:
    host = get(name)
    return [
        "ssh",
        *("-i", host.private_key, "-o", f"UserKnownHostsFile={host.known_hosts}", "-o", "BatchMode=yes"),
        f"{host.user}@{host.address}",
        *command,
    ]
