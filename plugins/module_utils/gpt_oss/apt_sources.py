"""apt repositories as deb822 sources with their keys: what shall be there, what is wrong, how it is fetched."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import tempfile
from typing import Any, Callable, Iterator

from ansible.module_utils.gpt_oss import openpgp

SOURCES = "/etc/apt/sources.list.d"

RunCommand = Callable[..., Any]  # AnsibleModule.run_command


class AptError(Exception):
    """Something that stops the run, said for the person at the keyboard."""


class Repository:
    """One deb822 source and its keyring."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self.name: str = wanted["name"]
        self.uris: list[str] = wanted["uris"]
        self.suites: list[str] = wanted["suites"]
        self.keyring: str = wanted["signed_by"]
        self.key_url: str | None = wanted["key_url"]
        self.fingerprints = [re.sub(r"\s", "", text).upper() for text in wanted["key_fingerprints"]]
        self.package: dict[str, Any] | None = wanted["keyring_package"]
        self._components: list[str] = wanted["components"]
        self._architectures: list[str] = wanted["architectures"]
        self.path = f"{SOURCES}/{self.name}.sources"

    def problems(self) -> Iterator[str]:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.name):
            yield f"name: {self.name!r} may hold letters, digits, '_', '-' and '.' only; apt ignores other files"
        flat = [suite.endswith("/") for suite in self.suites]
        if any(flat) and self._components:
            yield f"components: {self._components} given for the flat suite {self.suites}; leave them out"
        if not all(flat) and not self._components:
            yield f"components: missing for the suite {self.suites}; a flat repository's suite ends with '/'"
        if not self.keyring.startswith("/") or not self.keyring.endswith((".gpg", ".asc")):
            yield f"signed_by: {self.keyring!r} must be an absolute path that ends in .gpg or .asc"
        if self.key_url and self.package:
            yield "key_url and keyring_package: give one of them"
        for fingerprint in self.fingerprints:
            if not re.fullmatch(r"[0-9A-F]{40}|[0-9A-F]{64}", fingerprint):
                yield f"key_fingerprints: {fingerprint!r} is not a whole fingerprint (40 hex digits)"
        if self.package and self.package["sha256"] and not re.fullmatch(r"[0-9a-fA-F]{64}", self.package["sha256"]):
            yield f"keyring_package.sha256: {self.package['sha256']!r} is not 64 hex digits"

    def rendered(self, keyring: str | None = None) -> bytes:
        """The source file; with another keyring, for a look before the real one is there."""
        fields = {
            "Types": "deb",
            "URIs": " ".join(self.uris),
            "Suites": " ".join(self.suites),
            "Components": " ".join(self._components),
            "Architectures": " ".join(self._architectures),
            "Signed-By": keyring or self.keyring,
        }
        lines = [f"{key}: {value}" for key, value in fields.items() if value]
        return ("# Ansible managed; local changes are lost.\n" + "\n".join(lines) + "\n").encode()

    def keyring_problem(self, data: bytes | None) -> str | None:
        """Why these bytes will not do as the keyring."""
        if data is None:
            return "there is no such file"
        try:
            found = openpgp.fingerprints(data)
        except openpgp.NotAKeyError as error:
            return f"it is not an OpenPGP public key: {error}"
        strangers = [text for text in found if self.fingerprints and text not in self.fingerprints]
        if strangers:
            return f"it holds the key {', '.join(strangers)}; allowed: {', '.join(self.fingerprints)}"
        return None

    def fetch_keyring(self, run_command: RunCommand) -> tuple[bytes, bytes | None]:
        """The keyring, checked, and the package that brings it, if one does."""
        if self.package is None:
            assert self.key_url
            data = download(self.key_url)
            wrong = self.keyring_problem(data)
            if wrong:
                raise AptError(f"{self.key_url}: {wrong}")
            binary = openpgp.dearmored(data)
            return openpgp.armored(binary) if self.keyring.endswith(".asc") else binary, None
        url, wanted = self.package["url"], self.package["sha256"]
        deb = download(url)
        found = hashlib.sha256(deb).hexdigest()
        if wanted and found != wanted.lower():
            raise AptError(f"{url}: sha256 is {found}, expected {wanted}; nothing of it was installed")
        data = files_in_deb(run_command, deb, lambda path: path == self.keyring).get(self.keyring, b"")
        wrong = self.keyring_problem(data) if data else "it does not contain this file"
        if wrong:
            raise AptError(f"{self.keyring} in {url}: {wrong}")
        return data, deb


def download(url: str) -> bytes:
    import urllib.error  # imported when needed: a run that changes nothing shall not pay for it
    import urllib.request

    if not url.startswith(("http://", "https://", "file:")):
        raise AptError(f"{url}: must begin with https://, http:// or file:")
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - the scheme is checked above
            content: bytes = answer.read()
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise AptError(
            f"{url}: cannot be downloaded: {error}; check the address and the proxy, or point it to a mirror"
        ) from None
    return content


def files_in_deb(run_command: RunCommand, deb: bytes, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Files of a package whose absolute path is `wanted`, without installing it."""
    with tempfile.NamedTemporaryFile(suffix=".deb") as place:
        place.write(deb)
        place.flush()
        status, out, err = run_command(["dpkg-deb", "--fsys-tarfile", place.name], encoding=None)
    if status != 0:
        raise AptError(f"not a Debian package: {err.decode('utf-8', 'replace').strip()}")
    found = {}
    with tarfile.open(fileobj=io.BytesIO(out)) as archive:
        for member in archive:
            path = "/" + member.name.lstrip("./")
            if member.isfile() and wanted(path):
                stream = archive.extractfile(member)
                found[path] = stream.read() if stream else b""
    return found
