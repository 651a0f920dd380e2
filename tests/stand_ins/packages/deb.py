"""Debian packages and signed flat repositories, made with dpkg-deb, apt-ftparchive and gpg."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import key

EPOCH = str(key.CREATED)  # file times: a package is the same wherever it is built


class BuildError(Exception):
    """A package or repository could not be made."""


@dataclass(frozen=True)
class Package:
    """One binary package. `files` maps absolute paths to content and mode, `links` to what they point at."""

    name: str
    version: str
    depends: tuple[str, ...] = ()
    description: str = "stand-in"
    architecture: str = "amd64"
    fields: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, tuple[str | bytes, int]] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)  # postinst, prerm…
    conffiles: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        return f"{self.name}_{self.version.split(':')[-1]}_{self.architecture}.deb"

    def control(self) -> str:
        lines = [
            f"Package: {self.name}",
            f"Version: {self.version}",
            f"Architecture: {self.architecture}",
            "Maintainer: Stand-in <stand-in@example.invalid>",
            "Section: misc",
            "Priority: optional",
        ]
        if self.depends:
            lines.append("Depends: " + ", ".join(self.depends))
        lines += [f"{name}: {value}" for name, value in self.fields.items()]
        lines.append(f"Description: {self.description}")
        return "\n".join(lines) + "\n"


def _run(command: list[str], **environment: str) -> bytes:
    done = subprocess.run(command, capture_output=True, env={**os.environ, **environment}, check=False)
    if done.returncode != 0:
        raise BuildError(f"`{' '.join(command)[:200]}`: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def build(package: Package, directory: Path) -> Path:
    """Write the package into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / package.file_name
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        root.chmod(0o755)
        for path, (content, mode) in package.files.items():
            file = root / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content.encode() if isinstance(content, str) else content)
            file.chmod(mode)
        for path, aim in package.links.items():
            link = root / path.lstrip("/")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(aim)
        debian = root / "DEBIAN"
        debian.mkdir()
        (debian / "control").write_text(package.control())
        if package.conffiles:
            (debian / "conffiles").write_text("".join(f"{path}\n" for path in package.conffiles))
        for name, script in package.scripts.items():
            (debian / name).write_text("#!/bin/sh\nset -e\n" + script)
            (debian / name).chmod(0o755)
        command = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", scratch, str(target)]
        _run(command, SOURCE_DATE_EPOCH=EPOCH)
    return target


class Signer:
    """gpg with the derived key, in a home of its own."""

    def __init__(self) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="gpg-"))
        self._home.chmod(0o700)
        secret = self._home / "secret.gpg"
        key.write(secret)
        self._gpg("--import", str(secret))
        secret.unlink()

    def _gpg(self, *words: str) -> bytes:
        return _run(["gpg", "--homedir", str(self._home), "--batch", "--quiet", "--yes", *words])

    def public(self, *, armor: bool) -> bytes:
        return self._gpg(*(["--armor"] if armor else []), "--export", key.fingerprint())

    def sign(self, release: Path) -> None:
        common = ["--local-user", key.fingerprint(), "--digest-algo", "SHA256"]
        self._gpg(*common, "--clearsign", "--output", str(release.with_name("InRelease")), str(release))
        self._gpg(*common, "--detach-sign", "--armor", "--output", str(release.with_name("Release.gpg")), str(release))

    def close(self) -> None:
        _run(["gpgconf", "--homedir", str(self._home), "--kill", "all"])
        shutil.rmtree(self._home, ignore_errors=True)


def repository(directory: Path, packages: Iterable[Package], signer: Signer | None, **release: str) -> None:
    """A flat repository (`deb URL /`) of these packages; unsigned where there is no signer."""
    for package in packages:
        build(package, directory)
    # apt-ftparchive writes file names as they are given: run in the directory, names come out relative.
    scan = f"cd {directory} && apt-ftparchive packages . | sed 's#^Filename: \\./#Filename: #'"
    (directory / "Packages").write_bytes(_run(["sh", "-c", scan]))
    options = [word for name, value in release.items() for word in ("-o", f"APT::FTPArchive::Release::{name}={value}")]
    listed = _run(["sh", "-c", 'cd "$0" && apt-ftparchive "$@" release .', str(directory), *options])
    (directory / "Release").write_bytes(listed)
    if signer is not None:
        signer.sign(directory / "Release")
