"""A machine of its own: kernel, boot, systemd, SSH, and NVMe drives that come and go.

Emulated in software where there is no KVM: every process inside starts slowly (Python: a second), so do much in few
calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

import yaml

from tests.hosts.hosts import archive
from tests.hosts.machine import REPOSITORY, locked, run
from tests.hosts.playbooks import run_playbook
from tests.ports import free_port

from .image import HOST_KEY_ALIAS, Image
from .monitor import Monitor

BUILD = REPOSITORY / "build" / "machines"
GIB = 1 << 30
PORTS = 5  # places for drives
ROOT_DISK = "/dev/disk/by-id/virtio-ROOT"
MEMORY_MIB = 1536
# Bounds, not waits: a boot takes half a minute on an idle machine with two cores, and many times that on a busy one.
BOOT_SECONDS = 1800.0
ANSWER_SECONDS = 600.0


class MachineError(Exception):
    """A machine that did not do what it was told; the message has what it said."""


@dataclass(frozen=True)
class Drive:
    """An NVMe drive, sparse on disk."""

    serial: str
    bytes: int = GIB

    @property
    def by_id(self) -> str:
        """Its name on the machine."""
        return f"/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_{self.serial}"


class Machine:
    """A running machine; its state lives until `stop`, over reboots and power cuts."""

    def __init__(self, image: Image, directory: Path) -> None:
        self._image = image
        self._directory = directory
        self._sockets = Path(tempfile.mkdtemp(prefix="machine-"))  # a socket's path has at most 107 characters
        self._held = ExitStack()
        self._drives: dict[str, Drive] = {}  # those that the machine has, or had
        self._ports: dict[str, int] = {}  # serial -> root port, of those that are plugged in
        self._qemu: subprocess.Popen[bytes] | None = None
        self._monitor: Monitor | None = None
        self._ssh_port = 0

    # -- life ----------------------------------------------------------------------------------------------------------

    @classmethod
    def start(cls, image: Image, drives: Sequence[Drive] = ()) -> Machine:
        """A fresh machine with these drives, when it has booted."""
        with locked("machines"):
            machine = cls(image, _own_directory())
            machine._held.enter_context(_locked(machine._directory))
        try:
            machine._held.enter_context(image.in_use())
            run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", image.disk, machine._overlay])
            for drive in drives:
                machine._make_drive(drive)
                machine._ports[drive.serial] = machine._free_port()
            machine.start_again()
        except BaseException:
            machine.stop()
            raise
        return machine

    def start_again(self) -> None:
        """Power on; returns when systemd has finished booting."""
        if self._qemu is not None:
            raise MachineError("the machine runs already")
        self._ssh_port = free_port()
        self._write_inventory()
        with self._console.open("ab") as log:
            self._qemu = subprocess.Popen(self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._wait_for_boot(other_than="")

    def power_cut(self) -> None:
        """Off from one instant to the next: what the machine had not written to its disks is lost."""
        self._end()

    def reboot(self) -> None:
        """A clean reboot; returns when systemd has finished booting."""
        before = self.boot_id()
        self.run("systemctl --no-block reboot")
        self._forget_connection()
        self._wait_for_boot(other_than=before)

    def stop(self) -> None:
        """Off, and everything it had is removed."""
        self._end()
        shutil.rmtree(self._sockets, ignore_errors=True)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._held.close()

    def _end(self) -> None:
        self._forget_connection()
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._qemu is not None:
            self._qemu.kill()
            self._qemu.wait()
            self._qemu = None

    @property
    def is_running(self) -> bool:
        return self._qemu is not None and self._qemu.poll() is None

    # -- drives --------------------------------------------------------------------------------------------------------

    @property
    def drives(self) -> list[Drive]:
        """Those that are plugged in."""
        return [self._drives[serial] for serial in self._ports]

    def unplug(self, serial: str) -> None:
        """Pull a drive out while the machine runs; its content stays for `plug`."""
        name = self._device(serial)
        self._qmp.ask("device_del", {"id": name})
        self._qmp.wait("DEVICE_DELETED", device=name)
        self._qmp.ask("blockdev-del", {"node-name": f"{name}-node"})
        del self._ports[serial]

    def plug(self, drive: str | Drive) -> None:
        """Put a drive in while the machine runs: one that was pulled, by its serial, or a new one."""
        if isinstance(drive, Drive):
            self._make_drive(drive)
            drive = drive.serial
        port = self._free_port()
        node, device = self._drive_arguments(drive, port)
        self._qmp.ask("blockdev-add", node)
        self._qmp.ask("device_add", device)
        self._ports[drive] = port
        wait = f"for n in $(seq 3000); do test -b {self._drives[drive].by_id} && exit 0; sleep 0.1; done; exit 1"
        self.run(wait)

    def replace_drives(self, drives: Sequence[Drive]) -> None:
        """Pull every drive and put new, blank ones in; nothing on the machine may use the old ones any more."""
        for serial in list(self._ports):
            self.unplug(serial)
        for serial in list(self._drives):
            self._file(serial).unlink()
            del self._drives[serial]
        for drive in drives:
            self.plug(drive)

    def checksum(self, serial: str) -> str:
        """SHA-256 of a drive's content, where the same bytes always give the same answer; holes count as zeros."""
        if self._qemu is not None:
            self.run("sync")
        digest = hashlib.sha256()
        for offset, block in _written_blocks(self._file(serial)):
            digest.update(offset.to_bytes(8, "big") + block)
        return digest.hexdigest()

    def _make_drive(self, drive: Drive) -> None:
        if not drive.serial.isalnum():
            raise MachineError(f"serial {drive.serial!r}: letters and digits only")
        with self._file(drive.serial).open("wb") as file:
            file.truncate(drive.bytes)
        self._drives[drive.serial] = drive

    def _file(self, serial: str) -> Path:
        return self._directory / f"drive-{serial}.raw"

    def _device(self, serial: str) -> str:
        if serial not in self._ports:
            raise MachineError(f"drive {serial} is not plugged in; these are: {', '.join(self._ports) or 'none'}")
        return f"drive-{serial}"

    def _free_port(self) -> int:
        free = sorted(set(range(PORTS)) - set(self._ports.values()))
        if not free:
            raise MachineError(f"the machine has places for {PORTS} drives")
        return free[0]

    def _drive_arguments(self, serial: str, port: int) -> tuple[dict[str, object], dict[str, object]]:
        """What QEMU is told of a drive: where its content is, and the device that has it."""
        name = f"drive-{serial}"
        node: dict[str, object] = {
            "driver": "raw",
            "node-name": f"{name}-node",
            "discard": "unmap",
            "file": {"driver": "file", "filename": str(self._file(serial))},
            # The machine below keeps its power: what the drive was given counts as written.
            "cache": {"direct": False, "no-flush": True},
        }
        device: dict[str, object] = {
            "driver": "nvme",
            "id": name,
            "serial": serial,
            "drive": f"{name}-node",
            "bus": f"port{port}",
        }
        return node, device

    # -- commands ------------------------------------------------------------------------------------------------------

    def run(self, script: str, check: bool = True, seconds: float = 1800) -> str:
        """Run a bash script as root; what it wrote to standard output (and to standard error, when it may fail)."""
        quoted = shlex.quote(script)
        wanted = f"exec bash --norc -euo pipefail -c {quoted}" if check else f"exec bash --norc -c {quoted} 2>&1"
        done = self._ssh(wanted, seconds=seconds)
        if check and done.returncode != 0:
            raise MachineError(f"`{script[:500]}` ended with status {done.returncode}:\n{_said(done)[-4000:]}")
        return done.stdout.decode(errors="replace")

    def put(self, files: Mapping[str, bytes], modes: Mapping[str, int] | None = None) -> None:
        """Write files, by their absolute paths."""
        done = self._ssh("tar -C / --no-same-owner -xf -", content=archive(files, modes))
        if done.returncode != 0:
            raise MachineError(f"files could not be written:\n{_said(done)}")

    @property
    def inventory(self) -> Path:
        """An inventory with this machine alone, named `machine`; root logs in."""
        return self._directory / "inventory.yml"

    def play(
        self,
        playbook: Path | Sequence[Mapping[str, object]],
        *flags: str,
        **variables: object,
    ) -> subprocess.CompletedProcess[str]:
        """Run a playbook, from a file or given as its plays, with extra variables; output is printed and returned."""
        if not isinstance(playbook, Path):
            content = yaml.safe_dump(list(playbook))
            playbook = self._directory / "play.yml"
            playbook.write_text(content)
        return run_playbook(
            playbook,
            self.inventory,
            variables,
            *flags,
            environment={"ANSIBLE_SSH_CONTROL_PATH_DIR": str(self._sockets), "ANSIBLE_TIMEOUT": "300"},
        )

    def boot_id(self) -> str:
        """Another one after each boot."""
        return self.run("cat /proc/sys/kernel/random/boot_id").strip()

    def journal(self, lines: int = 100) -> str:
        """The last words of the current boot."""
        return self.run(f"journalctl --no-pager --boot --lines={lines}", check=False)

    def console(self, lines: int = 40) -> str:
        """The last words of kernel and QEMU on the serial line, over all boots."""
        return "\n".join(self._console.read_text(errors="replace").splitlines()[-lines:])

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _overlay(self) -> Path:
        return self._directory / "disk.qcow2"

    @property
    def _console(self) -> Path:
        return self._directory / "console.log"

    @property
    def _qmp(self) -> Monitor:
        if self._monitor is None:
            self._monitor = Monitor(self._sockets / "qmp", ANSWER_SECONDS)
        return self._monitor

    def _command(self) -> list[str]:
        ports = [
            word
            for port in range(PORTS)
            for word in ("-device", f"pcie-root-port,id=port{port},chassis={port + 1},slot={port + 1}")
        ]
        drives: list[str] = []
        for serial, port in self._ports.items():
            node, device = self._drive_arguments(serial, port)
            drives += ["-blockdev", json.dumps(node), "-device", json.dumps(device)]
        return [
            *("setpriv", "--pdeathsig", "KILL"),  # it does not outlive whoever tests
            "qemu-system-x86_64",
            *("-nodefaults", "-no-user-config", "-display", "none"),
            *("-machine", "q35", *processor(), "-m", str(MEMORY_MIB)),
            # The kernel finds the root disk first, whatever the firmware boots from.
            *("-drive", f"if=none,id=root,format=qcow2,cache=unsafe,discard=unmap,file={self._overlay}"),
            *("-device", "virtio-blk-pci,drive=root,addr=0x2,serial=ROOT"),
            *("-drive", f"if=none,id=boot,format=raw,readonly=on,file={self._image.boot}"),
            *("-device", "virtio-blk-pci,drive=boot,addr=0x3,bootindex=0"),
            *("-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{self._ssh_port}-:22"),
            *("-device", "virtio-net-pci,netdev=net,romfile="),
            *("-device", "virtio-rng-pci"),
            *("-serial", f"file:{self._console}"),
            *("-qmp", f"unix:{self._sockets / 'qmp'},server=on,wait=off"),
            *ports,
            *drives,
        ]

    def _ssh_options(self) -> dict[str, str]:
        return {
            "BatchMode": "yes",
            "HostKeyAlias": HOST_KEY_ALIAS,
            "UserKnownHostsFile": str(self._image.known_hosts),
            "StrictHostKeyChecking": "yes",
            "KexAlgorithms": "curve25519-sha256",  # the cheapest: the machine's share of a handshake takes seconds
            "ServerAliveInterval": "10",  # a machine that reboots does not say goodbye
            "ServerAliveCountMax": "12",
        }

    def _write_inventory(self) -> None:
        options = " ".join(f"-o {name}={shlex.quote(value)}" for name, value in self._ssh_options().items())
        host = {
            "ansible_host": "127.0.0.1",
            "ansible_port": self._ssh_port,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self._image.login_key),
            "ansible_ssh_common_args": options,
            "ansible_python_interpreter": "/usr/bin/python3",
        }
        self.inventory.write_text(yaml.safe_dump({"all": {"hosts": {"machine": host}}}))

    def _ssh_command(self, *more: str, timeout: float = ANSWER_SECONDS) -> list[str]:
        options = {
            **self._ssh_options(),
            "ControlMaster": "auto",
            "ControlPersist": "600",
            "ControlPath": str(self._sockets / "ssh"),
            "ConnectTimeout": str(int(timeout)),
            "LogLevel": "ERROR",
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", "-i", str(self._image.login_key), *words, "-p", str(self._ssh_port), *more, "root@127.0.0.1"]

    def _ssh(
        self, command: str, *, content: bytes | None = None, seconds: float = 1800, timeout: float = ANSWER_SECONDS
    ) -> subprocess.CompletedProcess[bytes]:
        given: dict[str, object] = {"stdin": subprocess.DEVNULL} if content is None else {"input": content}
        # The connection that stays open in the background keeps standard error: files, not pipes that would never end.
        with tempfile.TemporaryFile() as errors:
            try:
                done = subprocess.run(  # type: ignore[call-overload]
                    [*self._ssh_command(timeout=timeout), command],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    timeout=seconds,
                    check=False,
                    **given,
                )
            except subprocess.TimeoutExpired:
                raise MachineError(f"`{command[:300]}` did not end within {seconds:.0f} s\n{self.console()}") from None
            errors.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, errors.read())

    def _forget_connection(self) -> None:
        """Close the connection that commands share; a machine that went away does not say so."""
        if (self._sockets / "ssh").exists():
            subprocess.run(self._ssh_command("-O", "exit"), capture_output=True, check=False)

    def _wait_for_boot(self, *, other_than: str) -> None:
        deadline = time.monotonic() + BOOT_SECONDS
        script = (
            "read -r boot < /proc/sys/kernel/random/boot_id; echo $boot;"
            f' test "$boot" = "{other_than}" || systemctl is-system-running --wait'
        )
        said = ""
        while time.monotonic() < deadline:
            if self._qemu is None or self._qemu.poll() is not None:
                raise MachineError(f"QEMU ended while the machine booted:\n{self.console()}")
            with contextlib.suppress(MachineError):
                answer = self._ssh(script, seconds=deadline - time.monotonic(), timeout=20)
                words = answer.stdout.decode(errors="replace").split()
                said = _said(answer)
                if len(words) == 2 and words[0] != other_than and words[1] in ("running", "degraded"):
                    return
            self._forget_connection()
            time.sleep(0.5)
        raise MachineError(f"the machine did not boot within {BOOT_SECONDS:.0f} s: {said}\n{self.console()}")


def processor() -> tuple[str, ...]:
    """The real one where the kernel below lends it, or else a plain one in software.

    One, without the newer instructions: in emulation a second one makes each change of a page table wait for both, and
    wide instructions are many narrow ones; a process starts three times as fast, and more. Some virtual machines have a
    /dev/kvm without the processor's support for it, and that one hangs.
    """
    supported = re.search(r"^flags\b.*\b(vmx|svm)\b", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    if supported and os.access("/dev/kvm", os.R_OK | os.W_OK):
        return ("-accel", "kvm", "-cpu", "host", "-smp", "2")
    return ("-accel", "tcg,tb-size=512", "-cpu", "qemu64", "-smp", "1")


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    return (done.stdout + done.stderr).decode(errors="replace").strip()


def _own_directory() -> Path:
    """A place for one machine; what machines left whose tests were killed is removed."""
    BUILD.mkdir(parents=True, exist_ok=True)
    for directory in BUILD.iterdir():
        with contextlib.suppress(BlockingIOError, FileNotFoundError), _locked(directory):
            shutil.rmtree(directory, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix="machine-", dir=BUILD))


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold a directory; BlockingIOError where somebody else does."""
    held = os.open(directory, os.O_RDONLY)
    try:
        flock(held, LOCK_EX | LOCK_NB)
        yield
    finally:
        os.close(held)


def _written_blocks(path: Path, size: int = 1 << 20) -> Iterator[tuple[int, bytes]]:
    """Blocks of a sparse file that are not all zeros, with their offsets in bytes; holes are not read."""
    zeros = bytes(size)
    with path.open("rb", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        offset = 0
        while offset < end:
            try:
                data = os.lseek(file.fileno(), offset, os.SEEK_DATA)
            except OSError:  # only a hole is left
                return
            offset = data - data % size
            file.seek(offset)
            block = file.read(size)
            if block != zeros[: len(block)]:
                yield offset, block
            offset += size
