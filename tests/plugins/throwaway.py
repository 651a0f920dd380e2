"""This machine's root file system with a layer on top that is thrown away: real apt, real dpkg, real paths, no traces.

Needs root (mount, chroot). The layer starts with an empty apt configuration and a signed repository of tiny packages.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ansible

REPOSITORY = Path("/srv/apt-set")


class Machine:
    """A chroot; paths below are as they look from inside."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, inside: str | Path) -> Path:
        return self.root / str(inside).lstrip("/")

    def run(self, *command: str, stdin: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["chroot", self.root, *command],
            input=stdin,
            capture_output=True,
            text=True,
            check=check,
            env={
                "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "LC_ALL": "C",
                "HOME": "/root",
            },
        )

    def module(self, name: str, parameters: Mapping[str, Any], *, check: bool = False, wrapper: str) -> dict[str, Any]:
        internal = {"_ansible_check_mode": check, "_ansible_diff": True, "_ansible_module_name": name}
        done = self.run(
            "/usr/bin/env",
            "PYTHONPATH=/srv/ansible",
            "PYTHONDONTWRITEBYTECODE=1",
            "/usr/bin/python3",
            "-c",
            wrapper,
            f"/srv/plugins/modules/{name}.py",
            "/srv/plugins/module_utils",
            stdin=json.dumps({"ANSIBLE_MODULE_ARGS": {**parameters, **internal}}),
            check=False,
        )
        assert done.stdout.strip().startswith("{"), f"{name} gave no result:\n{done.stdout}\n{done.stderr}"
        result: dict[str, Any] = json.loads(done.stdout)
        assert (done.returncode != 0) == bool(result.get("failed")), done.stderr
        return result

    def selections(self) -> dict[str, str]:
        lines = self.run("dpkg", "--get-selections", "demo*").stdout.splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}

    def versions(self) -> dict[str, str]:
        form = "${db:Status-Status} ${Package} ${Version}\\n"
        lines = self.run("dpkg-query", "-W", "-f", form, "demo*", check=False).stdout.splitlines()
        return {line.split()[1]: line.split()[2] for line in lines if line.startswith("installed ")}


@contextlib.contextmanager
def throwaway_machine(directory: Path, root_of_project: Path) -> Iterator[Machine]:
    """A chroot on a fresh layer over /, gone afterwards."""
    mounted: list[Path] = []

    def mount(*arguments: str | Path) -> None:
        target = Path(arguments[-1])
        target.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", *arguments], check=True)
        mounted.append(target)

    try:
        mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", directory)
        for name in ("upper", "work", "root"):
            (directory / name).mkdir()
        root = directory / "root"
        layers = f"lowerdir=/,upperdir={directory}/upper,workdir={directory}/work"
        mount("-t", "overlay", "overlay", "-o", layers, root)
        # Devices of its own: were /dev lent, whoever cleans up after a killed test would empty this machine's.
        mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", root / "dev")
        mount("-t", "devpts", "-o", "newinstance,ptmxmode=0666", "devpts", root / "dev/pts")
        for name, minor in {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}.items():
            os.mknod(root / "dev" / name, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
            (root / "dev" / name).chmod(0o666)
        for name, link in {"fd": "/proc/self/fd", "ptmx": "pts/ptmx"}.items():
            (root / "dev" / name).symlink_to(link)
        mount("-t", "proc", "proc", root / "proc")
        mount("-t", "tmpfs", "tmpfs", root / "tmp")
        mount("-t", "tmpfs", "tmpfs", root / "srv")
        machine = Machine(root)
        mount("--bind", "-o", "ro", root_of_project / "plugins", root / "srv/plugins")
        mount("--bind", "-o", "ro", Path(ansible.__file__).parent, root / "srv/ansible/ansible")
        for name in ("sources.list.d", "preferences.d", "apt.conf.d"):
            shutil.rmtree(root / "etc/apt" / name, ignore_errors=True)
            (root / "etc/apt" / name).mkdir(parents=True)
        (root / "etc/apt/sources.list").write_text("")
        shutil.rmtree(root / "var/lib/apt/lists", ignore_errors=True)
        (root / "var/lib/apt/lists/partial").mkdir(parents=True)
        yield machine
    finally:
        for target in reversed(mounted):
            subprocess.run(["umount", "--recursive", "--lazy", target], check=True)


def build_package(
    machine: Machine,
    name: str,
    version: str,
    *,
    where: Path = REPOSITORY,
    files: Mapping[str, str | bytes] | None = None,
    **fields: str,
) -> Path:
    """A package that dpkg accepts, with nothing in it but what is asked for."""
    tree = machine.path("/srv/build")
    shutil.rmtree(tree, ignore_errors=True)
    (tree / "DEBIAN").mkdir(parents=True)
    scripts = {key: fields.pop(key) for key in ("postinst", "prerm") if key in fields}
    control = {
        "Package": name,
        "Version": version,
        "Architecture": "all",
        "Maintainer": "tests <tests@example.invalid>",
        "Description": "for a test",
        **{key.replace("_", "-").title(): value for key, value in fields.items()},
    }
    (tree / "DEBIAN/control").write_text("".join(f"{key}: {value}\n" for key, value in control.items()))
    for script, text in scripts.items():
        (tree / "DEBIAN" / script).write_text(text)
        (tree / "DEBIAN" / script).chmod(0o755)
    for path, content in (files or {}).items():
        (tree / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        (tree / path.lstrip("/")).write_bytes(content.encode() if isinstance(content, str) else content)
    settings = [path for path in files or {} if path.startswith("/etc/")]
    if settings:
        (tree / "DEBIAN/conffiles").write_text("".join(f"{path}\n" for path in settings))
    machine.path(where).mkdir(parents=True, exist_ok=True)
    target = where / f"{name}_{version.replace(':', '%3a')}_all.deb"
    machine.run("dpkg-deb", "--build", "--root-owner-group", "-Zgzip", "/srv/build", str(target))
    return target


def index(machine: Machine, key: str, where: Path = REPOSITORY) -> None:
    """Packages, Release and its signature for a flat repository."""
    stanzas = []
    for deb in sorted(machine.path(where).glob("*.deb")):
        content = deb.read_bytes()
        control = machine.run("dpkg-deb", "--field", str(where / deb.name)).stdout
        sums = f"Filename: ./{deb.name}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}\n"
        stanzas.append(control + sums)
    packages = "\n".join(stanzas).encode()
    machine.path(where / "Packages").write_bytes(packages)
    machine.path(where / "Packages.gz").write_bytes(gzip.compress(packages))
    date = machine.run("date", "-Ru").stdout.strip().replace("+0000", "UTC")
    sums = ""
    for name in ("Packages", "Packages.gz"):
        content = machine.path(where / name).read_bytes()
        sums += f" {hashlib.sha256(content).hexdigest()} {len(content)} {name}\n"
    machine.path(where / "Release").write_text(f"Origin: tests\nDate: {date}\nSHA256:\n{sums}")
    machine.path(where / "InRelease").unlink(missing_ok=True)
    machine.run(
        "gpg",
        "--homedir",
        "/srv/gnupg",
        "--batch",
        "--local-user",
        key,
        "--clearsign",
        "--output",
        f"{where}/InRelease",
        f"{where}/Release",
    )


def make_key(machine: Machine, name: str) -> str:
    """A signing key; its public half lies at /srv/NAME.asc and /srv/NAME.gpg. Returns the fingerprint."""
    home = machine.path("/srv/gnupg")
    home.mkdir(mode=0o700, exist_ok=True)
    gpg = ("gpg", "--homedir", "/srv/gnupg", "--batch", "--quiet")
    machine.run(
        *gpg, "--passphrase", "", "--quick-generate-key", f"{name} <{name}@example.invalid>", "ed25519", "sign", "never"
    )
    listing = machine.run(*gpg, "--with-colons", "--list-keys", name).stdout
    fingerprint = next(line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr:"))
    machine.run(*gpg, "--armor", "--output", f"/srv/{name}.asc", "--export", fingerprint)
    machine.run(*gpg, "--output", f"/srv/{name}.gpg", "--export", fingerprint)
    return fingerprint


def as_root() -> bool:
    return (
        os.geteuid() == 0 and shutil.which("apt-get", path=os.environ["PATH"]) is not None and sys.platform == "linux"
    )
