"""Images of test hosts, made from Debian packages alone: no registry is needed.

An image is named by what it is made of, so a changed recipe is built again and an unchanged one never.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from . import surroundings
from .machine import CACHE, LABEL, HostError, locked, podman, podman_command, require_tools, run, say

NAME = "localhost/gpt-oss-host"

# A freshly delivered server: what a cloud image has, and nothing from NVIDIA or Docker.
BASE_PACKAGES = (
    "systemd,systemd-sysv,dbus,kmod,iproute2,iptables,procps,pciutils,openssh-server,sudo,ca-certificates,curl,gnupg,"
    "python3,python3-venv,xz-utils,busybox-static"
)
EXTRA_PACKAGES = {
    "base": (),
    "docker": ("docker.io",),
    "mirror": ("docker-registry", "nginx-light"),
}
BASE_FILES = {
    "/etc/hostname": "",
    "/etc/machine-id": "",
    "/etc/apt/apt.conf.d/50lean": 'APT::Install-Recommends "false";\nAcquire::Languages "none";\n',
    "/etc/dpkg/dpkg.cfg.d/lean": "force-unsafe-io\npath-exclude=/usr/share/doc/*\npath-exclude=/usr/share/man/*\n",
    "/etc/ssh/sshd_config.d/test-host.conf": (
        "HostKey /etc/ssh/ssh_host_ed25519_key\nPasswordAuthentication no\nUseDNS no\n"
        "MaxSessions 100\nMaxStartups 100:30:200\n"
    ),
    "/etc/sudoers.d/admin": "admin ALL=(ALL) NOPASSWD: ALL\n",
}
MASKED = (
    "console-getty.service",
    "systemd-udevd.service",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "e2scrub_all.timer",
)


@dataclass(frozen=True)
class Recipe:
    """One image: its variant and the key of everything it is made of."""

    variant: str

    @property
    def key(self) -> str:
        data = repr((self.variant, BASE_PACKAGES, EXTRA_PACKAGES[self.variant], BASE_FILES, MASKED))
        steps = [inspect.getsource(step) for step in (debootstrap, settle_units, _bootstrap, _install, _import)]
        made_of = [data, *steps, time.strftime("%Y-%m")]  # and once a month, for the distribution's updates
        return hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]

    @property
    def tag(self) -> str:
        return f"{NAME}:{surroundings.SUITE}" + ("" if self.variant == "base" else f"-{self.variant}")


def _image_key(tag: str) -> str:
    shown = run(
        [*podman_command(), "image", "inspect", "--format", f'{{{{index .Config.Labels "{LABEL}.key"}}}}', tag],
        check=False,
    )
    return shown.stdout.strip() if shown.returncode == 0 else ""


def put(tree: Path, path: str, content: bytes) -> None:
    """Write a file of the tree; its path is the one that the host will see."""
    target = tree / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)


def in_tree(tree: Path, *command: str) -> None:
    """Run a command of the tree's own, with this machine's proxies."""
    quiet = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    run(["chroot", tree, *command], environment={**quiet, **surroundings.environment()})


def debootstrap(tree: Path, packages: str) -> None:
    """A small Debian with these packages, named with commas between them."""
    command = ["debootstrap", "--variant=minbase", f"--include={packages}"]
    run(
        [*command, surroundings.SUITE, tree, surroundings.debian_mirror()],
        environment={**os.environ, "LC_ALL": "C.UTF-8"},
    )


def settle_units(tree: Path, masked: Iterable[str]) -> None:
    """Mask units that a test host can do without, and boot to a system without graphics."""
    links = dict.fromkeys(masked, "/dev/null") | {"default.target": "/lib/systemd/system/multi-user.target"}
    for unit, target in links.items():
        (tree / "etc/systemd/system" / unit).unlink(missing_ok=True)
        (tree / "etc/systemd/system" / unit).symlink_to(target)


def _bootstrap(tree: Path) -> None:
    debootstrap(tree, BASE_PACKAGES)
    for path, text in BASE_FILES.items():
        put(tree, path, text.encode())
    (tree / "etc/sudoers.d/admin").chmod(0o440)
    in_tree(tree, "useradd", "--create-home", "--shell", "/bin/bash", "admin")
    settle_units(tree, MASKED)
    for key in (tree / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    shutil.rmtree(tree / "var/lib/apt/lists")
    _install(tree, ())


def _install(tree: Path, packages: tuple[str, ...]) -> None:
    """Add packages without starting anything, with this machine's package sources for the duration.

    The package lists stay: a delivered server has some.
    """
    lent = {path: (tree / path.lstrip("/")) for path in surroundings.files()}
    before: dict[str, bytes | None] = {
        path: target.read_bytes() if target.is_file() else None for path, target in lent.items()
    }
    put(tree, "/usr/sbin/policy-rc.d", b"#!/bin/sh\nexit 101\n")
    (tree / "usr/sbin/policy-rc.d").chmod(0o755)
    resolver = tree / "etc/resolv.conf"
    resolver.unlink(missing_ok=True)
    resolver.write_bytes(Path("/etc/resolv.conf").read_bytes())
    run(["mount", "--bind", "/proc", tree / "proc"])
    try:
        for path, content in surroundings.files().items():
            put(tree, path, content)
        in_tree(tree, "apt-get", "update", "-q")
        if packages:
            in_tree(tree, "apt-get", "install", "-q", "-y", "--no-install-recommends", *packages)
        in_tree(tree, "apt-get", "clean")
    finally:
        run(["umount", tree / "proc"])
        (tree / "usr/sbin/policy-rc.d").unlink()
        resolver.unlink()
        for path, own in before.items():
            lent[path].unlink(missing_ok=True)
            if own is not None:
                lent[path].write_bytes(own)


def _import(tree: Path, recipe: Recipe) -> None:
    say(f"importing {recipe.tag}")
    packed = subprocess.Popen(
        ["tar", "-C", str(tree), "--numeric-owner", "--exclude=./proc/*", "--exclude=./sys/*", "-c", "."],
        stdout=subprocess.PIPE,
    )
    change = ["--change", f"LABEL {LABEL}.key={recipe.key}", "--change", "ENV container=podman"]
    imported = subprocess.run(
        [*podman_command(), "import", "-q", *change, "-", recipe.tag],
        stdin=packed.stdout,
        capture_output=True,
        check=False,
    )
    if packed.wait() != 0 or imported.returncode != 0:
        raise HostError(f"{recipe.tag} could not be imported: {imported.stderr.decode(errors='replace').strip()}")


def with_tree(work: Callable[[Path], None]) -> None:
    """Do something with an empty directory that is gone afterwards."""
    CACHE.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="tree-", dir=CACHE))
    directory.chmod(0o755)
    try:
        work(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def build(*variants: str) -> dict[str, str]:
    """Make the images that are missing or out of date; answers variant -> tag."""
    recipes = [Recipe(variant) for variant in dict.fromkeys(variants or EXTRA_PACKAGES)]
    for recipe in recipes:
        if recipe.variant not in EXTRA_PACKAGES:
            raise HostError(f"image {recipe.variant}: unknown; allowed: {', '.join(EXTRA_PACKAGES)}")
    if all(_image_key(recipe.tag) == recipe.key for recipe in recipes):
        return {recipe.variant: recipe.tag for recipe in recipes}
    require_tools()
    with locked("images"):
        for recipe in recipes:
            if _image_key(recipe.tag) == recipe.key:
                continue
            started = time.monotonic()

            def make(tree: Path, recipe: Recipe = recipe) -> None:
                if recipe.variant == "base":
                    say(f"building {recipe.tag} from {surroundings.debian_mirror()}")
                    _bootstrap(tree)
                else:
                    say(f"building {recipe.tag}")
                    _unpack_base(tree)
                    _install(tree, EXTRA_PACKAGES[recipe.variant])
                _import(tree, recipe)

            if recipe.variant != "base":
                _require_base()
            with_tree(make)
            say(f"{recipe.tag}: {time.monotonic() - started:.0f} s")
    return {recipe.variant: recipe.tag for recipe in recipes}


def _require_base() -> None:
    base = Recipe("base")
    if _image_key(base.tag) == base.key:
        return

    def make(tree: Path) -> None:
        say(f"building {base.tag} from {surroundings.debian_mirror()}")
        _bootstrap(tree)
        _import(tree, base)

    with_tree(make)


def _unpack_base(tree: Path) -> None:
    """The base image's own files; variants add packages to them."""
    container = podman("create", Recipe("base").tag, "/bin/true").strip()
    try:
        exported = subprocess.Popen([*podman_command(), "export", container], stdout=subprocess.PIPE)
        unpacked = subprocess.run(
            ["tar", "-C", str(tree), "--numeric-owner", "-xp"], stdin=exported.stdout, check=False
        )
        if exported.wait() != 0 or unpacked.returncode != 0:
            raise HostError("the base image could not be unpacked")
    finally:
        podman("rm", container)


def remove() -> None:
    """Remove every image made here."""
    for variant in EXTRA_PACKAGES:
        run([*podman_command(), "image", "rm", "--force", Recipe(variant).tag], check=False)
