"""Signed apt repositories of stand-in NVIDIA packages: real names, versions and dependencies, recorded answers.

    /apt/cuda/debian12/x86_64/                      the CUDA repository
    /apt/libnvidia-container/stable/deb/amd64/      the container toolkit's

The layout, key files included, is upstream's, so a role only gets another base URL and fingerprint.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import tempfile
from pathlib import Path

from . import driver, toolkit
from .deb import Package, Signer, repository
from .key import fingerprint

__all__ = ["build", "fingerprint", "kernel_packages"]

HERE = Path(__file__).resolve().parent
CUDA = "apt/cuda/debian12/x86_64"
TOOLKIT = "apt/libnvidia-container/stable/deb/amd64"


def _key(*more: str) -> str:
    digest = hashlib.sha256("\0".join(more).encode())
    for path in sorted([*HERE.glob("*.py"), *(HERE / "files").iterdir()]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def build(cache: Path) -> Path:
    """The directory to serve; made when its recipe is new, under a name that is its recipe's."""
    directory = cache / _key()
    if (directory / "complete").exists():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix="draft-", dir=cache))
    draft.chmod(0o755)
    signer = Signer()
    try:
        cuda = draft / CUDA
        keyring = driver.keyring(signer.public(armor=False))
        # The CUDA repository has the toolkit too, the newest alone.
        newest = toolkit.packages(toolkit.VERSIONS[-1:])
        repository(cuda, [*driver.packages(), keyring, *newest], signer, Origin="NVIDIA", Label="NVIDIA CUDA")
        (cuda / "3bf863cc.pub").write_bytes(signer.public(armor=True))
        tools = draft / TOOLKIT
        repository(
            tools, toolkit.packages(), signer, Origin="https://nvidia.github.io/libnvidia-container", Label="NVIDIA"
        )
        (draft / "apt/libnvidia-container/gpgkey").write_bytes(signer.public(armor=True))
        (draft / "complete").touch()
        draft.rename(directory)
    finally:
        signer.close()
        shutil.rmtree(draft, ignore_errors=True)
    return directory


@functools.cache
def kernel_packages(release: str) -> dict[str, bytes]:
    """A small repository of what a distribution would have for the running kernel: its headers, and DKMS."""
    headers = f"linux-headers-{release}"
    tree = f"/usr/src/{headers}"
    packages = [
        Package(
            headers,
            "1",
            files={f"{tree}/Makefile": ("# headers of the running kernel, stand-in\n", 0o644)},
            links={f"/lib/modules/{release}/build": tree},
        ),
        Package("linux-headers-amd64", "99", depends=(headers,)),
        Package(
            "dkms",
            "3.0.10-8+stand-in",
            architecture="all",
            files={"/usr/sbin/dkms": ((HERE / "files" / "dkms").read_text(encoding="utf-8"), 0o755)},
        ),
    ]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        repository(directory, packages, None)
        return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
