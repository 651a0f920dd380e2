"""The disk that test machines start from: Debian 12 with its cloud kernel, bootable, kept by what it is made of."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path

from tests.hosts import images, surroundings
from tests.hosts.machine import CACHE as HOSTS_CACHE
from tests.hosts.machine import HostError, install_missing, locked, run, say

CACHE = HOSTS_CACHE.parent / "machines"
TOOLS = {
    "qemu-system-x86_64": ("qemu-system-x86",),
    "qemu-img": ("qemu-utils",),
    "debootstrap": ("debootstrap",),
    "mkfs.ext4": ("e2fsprogs",),
    "setpriv": ("util-linux",),
    "ssh": ("openssh-client",),
    "ssh-keygen": ("openssh-client",),
}
FILES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("/usr/share/keyrings/debian-archive-keyring.gpg",): ("debian-archive-keyring",)
}

# What roles install for drives is here already: a machine reaches no mirror, and unpacking is slow without KVM.
PACKAGES = (
    "systemd,systemd-sysv,dbus,udev,kmod,iproute2,procps,pciutils,openssh-server,sudo,ca-certificates,gnupg,"
    "python3,python3-apt,initramfs-tools,busybox,zstd,linux-image-cloud-amd64,grub-pc-bin,"
    "e2fsprogs,xfsprogs,dosfstools,fdisk,mdadm,lvm2,nvme-cli"
)
DISK_BYTES = 6 << 30  # sparse
ADDRESS, GATEWAY = "10.0.2.15", "10.0.2.2"  # of QEMU's user networking; the second is the machine below
ADDRESS_UNIT = f"""\
[Unit]
Description=The address that QEMU expects the machine to have
DefaultDependencies=no
Before=network.target network-online.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=ip link set eth0 up
ExecStart=ip address replace {ADDRESS}/24 dev eth0
ExecStart=ip route replace default via {GATEWAY}

[Install]
WantedBy=sysinit.target network-online.target
"""
# Each hook of the initramfs is hundreds of processes, and those are slow here. The root filesystem is a plain disk's;
# drives and arrays take udev, kmod and mdadm.
HOOKS_LEFT_OUT = ("amd64_microcode", "dmsetup", "fsck", "keymap", "lvm2", "resume", "thermal")
LEFT_OUT = (
    "/usr/share/doc/*",
    "/usr/share/man/*",
    *(f"/usr/share/initramfs-tools/hooks/{hook}" for hook in HOOKS_LEFT_OUT),
)
# There before anything is unpacked: the initramfs is made once, small enough to be loaded fast.
EARLY_FILES = {
    "/etc/dpkg/dpkg.cfg.d/lean": "force-unsafe-io\n" + "".join(f"path-exclude={path}\n" for path in LEFT_OUT),
    "/etc/initramfs-tools/conf.d/machine": "MODULES=list\nBUSYBOX=n\nCOMPRESS=zstd\nCOMPRESSLEVEL=1\n",
    "/etc/initramfs-tools/modules": "virtio_pci\nvirtio_blk\nvirtio_net\next4\nnvme\n",
}
FILES_INSIDE = {
    "/etc/hostname": "machine\n",
    "/etc/hosts": "127.0.0.1 localhost machine\n",
    "/etc/machine-id": "",
    "/etc/resolv.conf": "",
    "/etc/apt/sources.list": "",
    "/etc/apt/apt.conf.d/50lean": 'APT::Install-Recommends "false";\nAcquire::Languages "none";\n',
    "/etc/ssh/sshd_config.d/test-machine.conf": (
        "HostKey /etc/ssh/ssh_host_ed25519_key\nPasswordAuthentication no\nUseDNS no\nUsePAM no\n"
    ),
    "/etc/systemd/system/address.service": ADDRESS_UNIT,
    # A starved machine is slow, not broken.
    "/etc/systemd/system.conf.d/patience.conf": (
        "[Manager]\nDefaultTimeoutStartSec=30min\nDefaultTimeoutStopSec=5min\n"
    ),
}
# Nothing here needs them, and each costs a second or more of a boot.
MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dev-hugepages.mount",
    "dev-mqueue.mount",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty@.service",
    "lvm2-monitor.service",
    "modprobe@configfs.service",
    "modprobe@dm_mod.service",
    "modprobe@drm.service",
    "modprobe@efi_pstore.service",
    "modprobe@fuse.service",
    "modprobe@loop.service",
    "nvmf-autoconnect.service",
    "proc-sys-fs-binfmt_misc.automount",
    "serial-getty@.service",
    "sys-fs-fuse-connections.mount",
    "sys-kernel-config.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "systemd-binfmt.service",
    "systemd-update-utmp-runlevel.service",
    "systemd-update-utmp.service",
)
# GRUB reads the machine's own kernel and initramfs, so that a new initramfs counts at the next boot.
# Watchdogs would take a starved machine for a broken one. Where QEMU translates, it finds what it translated again by
# address: with addresses that differ from process to process, each start takes four times as long.
KERNEL_ARGUMENTS = (
    "root=/dev/vda rw console=ttyS0 8250.nr_uarts=1 net.ifnames=0"
    " norandmaps mitigations=off audit=0 apparmor=0 selinux=0 no_timer_check cryptomgr.notests nowatchdog"
    " rcupdate.rcu_cpu_stall_suppress=1 systemd.service_watchdogs=no udev.event_timeout=1800"
    " quiet"
)
GRUB = f"""\
set root=(hd1)
linux /vmlinuz {KERNEL_ARGUMENTS}
initrd /initrd.img
boot
"""


class UnavailableError(Exception):
    """Test machines cannot be had here; the message says why, in a line."""


@dataclass(frozen=True)
class Image:
    """Files that every machine shares and none writes to."""

    directory: Path

    @property
    def disk(self) -> Path:
        """The root filesystem, without a partition table."""
        return self.directory / "disk.raw"

    @property
    def boot(self) -> Path:
        """A disk with GRUB alone."""
        return self.directory / "boot.raw"

    @property
    def login_key(self) -> Path:
        return self.directory / "login"

    @property
    def known_hosts(self) -> Path:
        """One line, for the name HOST_KEY_ALIAS."""
        return self.directory / "known_hosts"

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """As long as this lasts, no newer image removes this one."""
        directory = os.open(self.directory, os.O_RDONLY)
        try:
            flock(directory, LOCK_SH)
            yield
        finally:
            os.close(directory)


HOST_KEY_ALIAS = "test-machine"


def _key() -> str:
    data = repr((PACKAGES, DISK_BYTES, EARLY_FILES, FILES_INSIDE, MASKED, GRUB))
    steps = [inspect.getsource(step) for step in (_make_tree, _make_keys, _make_disks, images.debootstrap)]
    made_of = [data, *steps, time.strftime("%Y-%m")]  # and once a month, for the distribution's updates
    return hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]


def _make_keys(directory: Path) -> None:
    """One pair to log in with, one for the machine to show: strict host key checking stays on."""
    for name in ("login", "host"):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"test-machine-{name}", "-f", directory / name])
    public = " ".join((directory / "host.pub").read_text().split()[:2])
    (directory / "known_hosts").write_text(f"{HOST_KEY_ALIAS} {public}\n")


def _make_tree(tree: Path, keys: Path) -> None:
    for path, text in EARLY_FILES.items():
        images.put(tree, path, text.encode())
    images.debootstrap(tree, PACKAGES)
    for path, text in FILES_INSIDE.items():
        images.put(tree, path, text.encode())
    for key in (tree / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    for path, key_file, mode in (
        ("etc/ssh/ssh_host_ed25519_key", "host", 0o600),
        ("etc/ssh/ssh_host_ed25519_key.pub", "host.pub", 0o644),
        ("root/.ssh/authorized_keys", "login.pub", 0o600),
    ):
        images.put(tree, path, (keys / key_file).read_bytes())
        (tree / path).chmod(mode)
    (tree / "root/.ssh").chmod(0o700)
    images.in_tree(tree, "systemctl", "enable", "--quiet", "address.service")
    images.settle_units(tree, MASKED)
    images.in_tree(tree, "apt-get", "clean")
    shutil.rmtree(tree / "var/lib/apt/lists")


def _make_disks(tree: Path, directory: Path) -> None:
    grub = "/usr/lib/grub/i386-pc"
    images.put(tree, "/tmp/grub.cfg", GRUB.encode())
    modules = ("biosdisk", "ext2", "linux")
    images.in_tree(
        tree, *("grub-mkimage", "-O", "i386-pc", "-o", "/tmp/core.img", "-p", "/", "-c", "/tmp/grub.cfg", *modules)
    )
    boot = (tree / grub.lstrip("/") / "boot.img").read_bytes() + (tree / "tmp/core.img").read_bytes()
    (directory / "boot.raw").write_bytes(boot.ljust(1 << 20, b"\0"))
    for name in ("grub.cfg", "core.img"):
        (tree / "tmp" / name).unlink()
    disk = directory / "disk.raw"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    run(["mkfs.ext4", "-q", "-F", "-d", tree, disk])


def require_tools() -> None:
    """Install QEMU and the like where they are missing, or say why there are no machines here."""
    if platform.machine() != "x86_64":
        raise UnavailableError(f"test machines need an x86-64 machine below them; this one is {platform.machine()}")
    try:
        install_missing(TOOLS, FILES)
    except HostError as error:
        raise UnavailableError(f"test machines need QEMU: {' '.join(str(error).split())[:300]}") from None


def build() -> Image:
    """The image, made if what it is made of has changed."""
    image = Image(CACHE / _key())
    with locked("machine-image"):
        require_tools()
        if image.disk.exists():
            return image
        CACHE.mkdir(parents=True, exist_ok=True)
        say(f"building a test machine from {surroundings.debian_mirror()}")
        started = time.monotonic()
        draft = Path(tempfile.mkdtemp(prefix="draft-", dir=CACHE))
        try:
            _make_keys(draft)

            def make(tree: Path) -> None:
                _make_tree(tree, draft)
                _make_disks(tree, draft)

            images.with_tree(make)
            draft.rename(image.directory)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        _remove_old(image)
        say(f"test machine: {time.monotonic() - started:.0f} s")
    return image


def _remove_old(newest: Image) -> None:
    """Older images, and what a build that was killed left; those that a machine runs from stay."""
    for directory in CACHE.iterdir():
        if directory == newest.directory:
            continue
        lock = os.open(directory, os.O_RDONLY)
        try:
            flock(lock, LOCK_EX | LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)
