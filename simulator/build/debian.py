"""A root directory with Python and little else, unpacked from Debian packages.

apt resolves and checks signatures with state of its own, so this machine's packages are neither asked nor touched; the
packages are unpacked and not configured, which is all that a container with one process needs.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from simulator.build import machine
from simulator.build.machine import ARCHITECTURES, BuildError, run

PACKAGES = ("base-files", "bash", "coreutils", "dash", "grep", "libpython3.11-stdlib", "procps", "python3.11", "sed")
LIBRARIES = ("libgcc-s1", "libstdc++6", "zlib1g")
PYTHON = "3.11"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
NEEDLESS = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian", "usr/share/bug")
MERGED = ("bin", "sbin", "lib", "lib64")


def made_of() -> str:
    """Everything the tree depends on, and the month, for the distribution's updates."""
    return inspect.getsource(sys.modules[__name__]) + machine.machine() + time.strftime("%Y-%m")


def unpack(tree: Path) -> None:
    """Fill `tree`."""
    for name in MERGED:
        (tree / "usr" / name).mkdir(parents=True)
        (tree / name).symlink_to(f"usr/{name}")
    with tempfile.TemporaryDirectory(prefix="simulator-apt-") as scratch:
        archives = _download(Path(scratch))
        for archive in archives:  # in one directory: not two at a time
            run(["dpkg-deb", "--extract", archive, tree])
    for name in NEEDLESS:
        machine.run(["rm", "-rf", tree / name])
    _finish(tree)


def _download(scratch: Path) -> list[Path]:
    from tests.hosts import surroundings  # how this machine reaches Debian, mirrors and proxies included

    for name in ("state/lists/partial", "cache/archives/partial", "sources.list.d"):
        (scratch / name).mkdir(parents=True)
    (scratch / "status").touch()
    for path, content in surroundings.apt_sources().items():
        if path.endswith((".list", ".sources")) and content:
            (scratch / "sources.list.d" / Path(path).name).write_bytes(content)
    configuration = {
        "Dir::State": scratch / "state",
        "Dir::State::status": scratch / "status",
        "Dir::Cache": scratch / "cache",
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": scratch / "sources.list.d",
        "Dir::Etc::Trusted": KEYRING,
        "APT::Architecture": ARCHITECTURES[machine.machine()],
        "APT::Architectures": ARCHITECTURES[machine.machine()],
        "APT::Sandbox::User": "root",
        "APT::Update::Post-Invoke-Success": "",
        "Acquire::Languages": "none",
        "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled": "false",
    }
    flags = [f"-o={key}={value}" for key, value in configuration.items()]
    run(["apt-get", "-qq", *flags, "update"], DEBIAN_FRONTEND="noninteractive")
    run(
        ["apt-get", "-qq", "-y", "--no-install-recommends", "--download-only", *flags, "install", *PACKAGES, *LIBRARIES],
        DEBIAN_FRONTEND="noninteractive",
    )
    archives = sorted((scratch / "cache/archives").glob("*.deb"))
    if not archives:
        raise BuildError(f"apt downloaded nothing for {', '.join(PACKAGES)}")
    return archives


def _finish(tree: Path) -> None:
    """What the packages' own scripts would have written, as far as it is needed."""
    (tree / "etc").mkdir(exist_ok=True)
    (tree / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/bin/sh\n")
    (tree / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    for name, mode in (("root", 0o700), ("tmp", 0o1777), ("run", 0o755), ("proc", 0o755), ("sys", 0o755), ("dev", 0o755)):
        (tree / name).mkdir(exist_ok=True)
        (tree / name).chmod(mode)
    for link, target in (("usr/bin/python3", f"python{PYTHON}"), ("usr/bin/sh", "dash")):
        if not (tree / link).exists() and not (tree / link).is_symlink():
            (tree / link).symlink_to(target)


def compile_all(tree: Path, *directories: str) -> None:
    """Byte code beside the sources: a container starts from a fresh copy every time, and would compile every time."""

    def compile_one(directory: str) -> None:
        python = f"/usr/bin/python{PYTHON}"
        # One process each: compileall's own workers need /dev/shm, which the tree has not.
        run(["chroot", tree, python, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", f"/{directory}"])

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, directories))
