"""What a test host inherits, as far as it can be told without one."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.hosts import hosts, surroundings
from tests.hosts.machine import REPOSITORY, run_flags
from tests.stand_ins import hardware
from tests.stand_ins.packages import fingerprint


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("deb http://deb.debian.org/debian bookworm main", True),
        (
            "deb [signed-by=/usr/share/keyrings/a.gpg arch=amd64] https://mirror.example/debian bookworm-updates main",
            True,
        ),
        ("deb-src http://deb.debian.org/debian bookworm main", False),
        ("# deb http://deb.debian.org/debian bookworm main", False),
        ("deb https://deb.nodesource.com/node_20.x nodistro main", False),
        ("", False),
    ],
)
def test_a_host_gets_the_distributions_sources_and_no_others(line: str, kept: bool) -> None:
    assert surroundings._one_line_source(line) is kept


@pytest.mark.parametrize(
    ("stanza", "kept"),
    [
        ("Types: deb\nURIs: http://deb.debian.org/debian\nSuites: bookworm bookworm-updates\nComponents: main", True),
        ("Types: deb\nURIs: http://deb.debian.org/debian\nSuites: bookworm\nComponents: main\nEnabled: no", False),
        ("Types: deb\nURIs: https://other.example\nSuites: stable\nComponents: main", False),
    ],
)
def test_deb822_sources_likewise(stanza: str, kept: bool) -> None:
    assert surroundings._deb822_source(stanza) is kept


def test_proxies_on_this_machine_alone_are_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:3128")
    inherited = surroundings.environment()
    assert inherited["https_proxy"] == "http://proxy.example:3128"
    assert "http_proxy" not in inherited


def test_pip_finds_certificates_and_mirror_in_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror.example/simple")
    files, _ = surroundings.pip_settings()
    text = files["/etc/pip.conf"].decode()
    assert "index-url = https://mirror.example/simple" in text
    assert f"cert = {surroundings.SYSTEM_BUNDLE}" in text


def test_demo_inventory_names_the_key_that_signs_the_stand_in_packages() -> None:
    mirrors = yaml.safe_load((REPOSITORY / "inventories/demo/group_vars/test_hosts/mirrors.yml").read_text())
    assert mirrors["nvidia_driver_keyring_fingerprints"] == [fingerprint()]
    assert mirrors["nvidia_container_toolkit_key_fingerprints"] == [fingerprint()]


@pytest.mark.parametrize("profile", hardware.profiles())
def test_profiles_describe_their_gpus_in_every_form(profile: str) -> None:
    known = hardware.load(profile)
    devices = [device for device in hardware.pci_devices(known).values() if device["class"] == "0x030200"]
    assert len(devices) == known["gpu_count"] == len(hardware.gpus(known))
    files = hardware.smi_files(known)
    for gpu in hardware.gpus(known):
        assert f"<product_name>{gpu['name']}</product_name>" in files[f"gpus/{gpu['index']}/xml"]
        assert f"name={gpu['name']}\n" in files[f"gpus/{gpu['index']}/fields"]
        assert {len(line) for line in files[f"gpus/{gpu['index']}/table"].replace("@ON_OFF@", "On ").splitlines()} == {
            91
        }


def test_unknown_hardware_names_what_is_known() -> None:
    with pytest.raises(hardware.ProfileError, match="hardware 'h300' is unknown; allowed: gb200_tray, h200_x1, "):
        hardware.load("h300")


def test_a_restarted_host_keeps_its_neighbours_entry_valid() -> None:
    assert hosts.mac_address("10.89.77.10") == "02:42:0a:59:4d:0a"


def test_containers_of_hosts_get_no_limit_above_this_machines() -> None:
    limits = [flag for flag in run_flags() if flag.startswith("--ulimit")]
    assert all(re.fullmatch(r"--ulimit=\w+=(\d+):\1", flag) for flag in limits)
