"""What a test host inherits from the machine it runs on: package sources, pip's settings, certificates, proxies.

A host then installs packages the way this machine does, behind a company mirror or plainly from the internet.
Nothing here is baked into an image: it is handed over when a host starts, since it may hold credentials.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from .machine import run

SUITE = "bookworm"
DEBIAN = "http://deb.debian.org/debian"
DEBIAN_SECURITY = "http://deb.debian.org/debian-security"
SYSTEM_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")

PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
# Variables that name a certificate bundle to one tool or another.
BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO")
# How apt reaches its sources; lists of index targets, languages and hooks stay this machine's own.
APT_OPTIONS = re.compile(r"^Acquire::(https?|ftp|Retries|Check-Valid-Until|Check-Date|ForceIPv\d|Max-\w+)\b")

Files = dict[str, bytes]  # absolute path -> content


def _os_release() -> Mapping[str, str]:
    lines = Path("/etc/os-release").read_text().splitlines()
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in lines) if value}


@functools.cache
def _is_host_distribution() -> bool:
    release = _os_release()
    return release.get("ID") == "debian" and release.get("VERSION_CODENAME") == SUITE


def _one_line_source(line: str) -> bool:
    words = re.sub(r"\[[^]]*\]", "", line.split("#")[0]).split()
    return len(words) > 3 and words[0] == "deb" and words[2].startswith(SUITE)


def _stanza_fields(stanza: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for line in stanza.splitlines():
        name, separator, value = line.partition(":")
        if separator and not line.startswith((" ", "\t", "#")):
            fields[name.strip().lower()] = value.strip()
    return fields


def _deb822_source(stanza: str) -> bool:
    fields = _stanza_fields(stanza)
    return fields.get("enabled", "yes") != "no" and fields.get("suites", "").startswith(SUITE)


def apt_sources() -> Files:
    """This machine's Debian 12 sources, or the public ones where it runs something else."""
    files: Files = {}
    if _is_host_distribution():
        files["/etc/apt/sources.list"] = b""  # in case everything is in sources.list.d
        for path in (Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.list"))):
            if path.is_file():
                kept = [line for line in path.read_text().splitlines() if _one_line_source(line)]
                if kept:
                    files[str(path)] = ("\n".join(kept) + "\n").encode()
        for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
            stanzas = [stanza for stanza in re.split(r"\n\s*\n", path.read_text()) if _deb822_source(stanza)]
            if stanzas:
                files[str(path)] = ("\n\n".join(stanza.strip("\n") for stanza in stanzas) + "\n").encode()
                for keyring in {_stanza_fields(stanza).get("signed-by", "") for stanza in stanzas}:
                    if keyring.startswith("/") and Path(keyring).is_file():
                        files[keyring] = Path(keyring).read_bytes()
    if not any(files.values()):
        lines = [
            f"deb {DEBIAN} {SUITE} main",
            f"deb {DEBIAN} {SUITE}-updates main",
            f"deb {DEBIAN_SECURITY} {SUITE}-security main",
        ]
        files["/etc/apt/sources.list"] = ("\n".join(lines) + "\n").encode()
    return files


def debian_mirror() -> str:
    """Where debootstrap takes Debian from: the first source that has the whole suite."""
    for path, content in apt_sources().items():
        text = content.decode(errors="replace")
        if path.endswith(".sources"):
            for stanza in re.split(r"\n\s*\n", text):
                fields = _stanza_fields(stanza)
                if SUITE in fields.get("suites", "").split():
                    return fields["uris"].split()[0]
        elif path.endswith(".list"):
            for line in text.splitlines():
                words = re.sub(r"\[[^]]*\]", "", line).split()
                if len(words) > 2 and words[2] == SUITE:
                    return words[1]
    return DEBIAN


def apt_settings() -> Files:
    lines = []
    for line in run(["apt-config", "dump"]).stdout.splitlines():
        if APT_OPTIONS.match(line) and not line.rstrip().endswith('"";'):
            lines.append(line)
    files: Files = {"/etc/apt/apt.conf.d/60reach": ("\n".join(lines) + "\n").encode()} if lines else {}
    for path in (Path("/etc/apt/auth.conf"), *sorted(Path("/etc/apt/auth.conf.d").glob("*"))):
        if path.is_file():
            files[str(path)] = path.read_bytes()
    return files


def _bundle() -> bytes:
    """Every certificate this machine trusts: the system's, and what an environment variable adds."""
    parts = [SYSTEM_BUNDLE.read_bytes()] if SYSTEM_BUNDLE.is_file() else []
    seen = {SYSTEM_BUNDLE}
    for variable in BUNDLES:
        path = Path(os.environ.get(variable, ""))
        if path.is_file() and path.resolve() not in seen:
            seen.add(path.resolve())
            parts.append(path.read_bytes())
    return b"\n".join(parts)


def pip_settings() -> tuple[Files, tuple[Path, ...]]:
    """pip's settings as one file, and the local directories they name (mounted at the same place)."""
    sections: dict[str, dict[str, str]] = {}
    directories: list[Path] = []
    listed = run([sys.executable, "-m", "pip", "config", "list"], check=False)
    for line in listed.stdout.splitlines():
        name, _, quoted = line.partition("=")
        value = quoted[1:-1].replace("\\n", "\n") if quoted[:1] in "'\"" else quoted
        section, _, key = name.rpartition(".")
        section = "global" if section in ("", ":env:") else section
        if key in ("cert", "client-cert", "cache-dir", "require-virtualenv", "target", "user", "prefix"):
            continue
        if key == "find-links":
            for word in value.split():
                path = Path(word.removeprefix("file://"))
                if path.is_absolute() and path.is_dir():
                    directories.append(path)
            value = " ".join(word for word in value.split() if "://" in word or Path(word) in directories)
            if not value:
                continue
        sections.setdefault(section, {}).setdefault(key, value)
    sections.setdefault("global", {})["cert"] = str(SYSTEM_BUNDLE)
    text = ""
    for section, values in sections.items():
        text += f"[{section}]\n" + "".join(
            "{} = {}\n".format(key, value.strip().replace("\n", "\n    ")) for key, value in values.items()
        )
    return {"/etc/pip.conf": text.encode()}, tuple(directories)


def _reachable_from_a_host(value: str) -> bool:
    return not re.search(r"//(localhost|127\.|\[::1\])", value)


def environment() -> dict[str, str]:
    """Variables every login session and service of a host gets."""
    variables = {"LANG": "C.UTF-8"}
    for name in PROXIES:
        for spelling in (name, name.upper()):
            value = os.environ.get(spelling, "")
            if value and _reachable_from_a_host(value):
                variables[spelling] = value
    variables.update({name: str(SYSTEM_BUNDLE) for name in BUNDLES if os.environ.get(name)})
    return variables


def files() -> Files:
    """Everything a host inherits, as files."""
    variables = environment()
    pip_files, _ = pip_settings()
    inherited = {**apt_sources(), **apt_settings(), **pip_files}
    inherited[str(SYSTEM_BUNDLE)] = _bundle()
    for certificate in sorted(Path("/usr/local/share/ca-certificates").glob("**/*.crt")):
        inherited[str(certificate)] = certificate.read_bytes()
    inherited["/etc/environment"] = "".join(f'{name}="{value}"\n' for name, value in variables.items()).encode()
    inherited["/etc/systemd/system.conf.d/environment.conf"] = (
        "[Manager]\n" + "".join(f'DefaultEnvironment="{name}={value}"\n' for name, value in variables.items())
    ).encode()
    return inherited
