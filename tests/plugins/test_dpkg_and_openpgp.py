"""What modules work out for themselves is what dpkg and gpg say."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.plugins import conftest  # noqa: F401 - makes the next import possible

from ansible.module_utils.gpt_oss import dpkg, openpgp  # isort: skip

VERSIONS = [
    "1.0",
    "1.0-1",
    "1.0-1~deb12u1",
    "1.0-1+b3",
    "1:0.9",
    "1.0~rc1",
    "1.0+dfsg1-1",
    "1.10-1",
    "1.9-1",
    "580.159.04-1",
    "580.159.4-1",
    "580.95.05-1",
    "5:29.8.2-1~debian.12~bookworm",
    "5:29.8.2-1~ubuntu.24.04~noble",
    "20240203",
    "1.2.3a",
    "1.2.3",
    "1.2.3-0ubuntu0.24.04.1",
    "2:1.2",
]
KEYRINGS = sorted(Path("/usr/share/keyrings").glob("debian-archive-*.gpg"))


@pytest.mark.skipif(shutil.which("dpkg") is None, reason="needs dpkg")
def test_versions_are_ordered_as_dpkg_orders_them() -> None:
    wrong = []
    for left, right in itertools.combinations(VERSIONS, 2):
        relation = {-1: "lt", 0: "eq", 1: "gt"}[(dpkg.compare(left, right) > 0) - (dpkg.compare(left, right) < 0)]
        if subprocess.run(["dpkg", "--compare-versions", left, relation, right], check=False).returncode != 0:
            wrong.append((left, relation, right))
    assert not wrong


@pytest.mark.parametrize(
    ("wanted", "version", "expected"),
    [
        ("580.159.04", "580.159.04-1", True),
        ("580.159.04", "580.159.04", True),
        ("580.159.04", "5:580.159.04-1~debian.12", True),
        ("580.159.04-1", "580.159.04-1", True),
        ("580.159.04", "580.159.040-1", False),
        ("580.159.04", "580.159.04.1-1", False),
        ("580.159.0", "580.159.04-1", False),
        ("1.19.1-1", "1.19.1-10", False),
        ("580.*", "580.159.04-1", True),
        ("580.*", "590.1-1", False),
        ("29.8.*", "5:29.8.2-1~debian.12~bookworm", True),
    ],
)
def test_a_wanted_version_fits(wanted: str, version: str, expected: bool) -> None:
    assert dpkg.matches(wanted, version) is expected


def test_the_status_file_is_read_as_dpkg_reads_it(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text(
        "Package: dpkg\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1.21\n\n"
        "Package: libc6\nStatus: install ok installed\nArchitecture: i386\nVersion: 2.36-9\n"
        "Description: x\n Version: 9\n\n"
        "Package: driver\nEssential: no\nStatus: hold ok installed\nArchitecture: all\nVersion: 580.1-1\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n\n"
        "Package: broken\nStatus: install ok half-configured\nArchitecture: amd64\nVersion: 1\n"
    )
    found = dpkg.read_packages(str(status))
    assert set(found) == {"dpkg", "libc6:i386", "driver", "gone", "broken"}
    assert found["libc6:i386"].version == "2.36-9"
    assert found["driver"].held
    assert not found["gone"].installed
    assert dpkg.interrupted(found)[0] == "broken is half-configured"


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="needs dpkg")
def test_this_machines_packages_are_those_that_dpkg_lists() -> None:
    form = "${binary:Package} ${Version} ${db:Status-Status}\\n"
    listed = subprocess.run(["dpkg-query", "-W", "-f", form], capture_output=True, text=True, check=True).stdout
    native = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()
    expected = {
        (name.removesuffix(f":{native}"), version)
        for name, version, state in (line.split(" ") for line in listed.splitlines())
        if state == "installed"
    }
    found = {(name, package.version) for name, package in dpkg.read_packages().items() if package.state == "installed"}
    assert found == expected


@pytest.mark.skipif(shutil.which("gpg") is None or not KEYRINGS, reason="needs gpg and keyrings")
@pytest.mark.parametrize("keyring", KEYRINGS, ids=lambda path: path.stem)
def test_fingerprints_are_those_that_gpg_shows(keyring: Path, tmp_path: Path) -> None:
    command = ["gpg", "--homedir", str(tmp_path), "--batch", "--with-colons", "--show-keys", str(keyring)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    fields = [line.split(":") for line in lines if line.startswith(("pub:", "sub:", "fpr:"))]
    primary = [after[9] for before, after in itertools.pairwise(fields) if before[0] == "pub"]
    data = keyring.read_bytes()
    assert openpgp.fingerprints(data) == primary
    assert openpgp.fingerprints(openpgp.armored(data)) == primary
    assert openpgp.dearmored(openpgp.armored(data)) == data


@pytest.mark.parametrize("keyring", KEYRINGS[:1], ids=lambda path: path.stem)
def test_a_key_that_is_cut_short_is_refused(keyring: Path) -> None:
    data = keyring.read_bytes()
    for length in (1, 2, 10, len(data) - 1):
        with pytest.raises(openpgp.NotAKeyError):
            openpgp.fingerprints(data[:length])
    with pytest.raises(openpgp.NotAKeyError):
        openpgp.fingerprints(b"")
