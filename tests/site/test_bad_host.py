"""Hosts that cannot serve what is asked of them: the real playbooks on one systemd host, which stays as it was.

A mistake is a host of the inventory with one wrong input; all of them are the same machine. What is wrong with a
machine itself is arranged on another one, all at once. test_bad_input.py lists where each kind is tested.
"""

from __future__ import annotations

import re
import shutil
import tarfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving_catalog.loading import merged
from tests.hosts import hosts, mirror
from tests.hosts.machine import MIRROR_ADDRESS, REPOSITORY, SUBNET
from tests.site.test_bad_input import Run, play
from tests.stand_ins.hub.server import Fault, Hub, State, make_state

pytestmark = pytest.mark.hosts

TOKEN = "hf_ThisIsNobodysToken0123456789"
MODEL = "openai/gpt-oss-120b"
OVERLAY = REPOSITORY / "tests/stand_ins/hub/catalog_overlay"  # the demo's

# Everything a playbook could leave behind, but caches of Python and what systemd notes of its own.
STATE = r"""
dpkg-query --show; apt-mark showhold; lsmod
find /etc /opt /usr /boot /srv /var/lib/gpt-oss* -xdev -name __pycache__ -prune \
  -o -type d -printf '%p %y %m %U:%G\n' -o -printf '%p %y %m %U:%G %s %T@\n' | sort
"""


@dataclass(frozen=True)
class Row:
    """What is asked of the host, and the finding: its id, and what its line of the table says."""

    given: dict[str, Any]
    finding: str
    says: tuple[str, ...]


def row(given: dict[str, Any], finding: str, *says: str) -> Row:
    return Row(given, finding, says)


def overlay(name: str) -> dict[str, Any]:
    return {"serving_catalog_overlay": "{{ inventory_dir }}/" + name}


HOLD_LOCK = """
import fcntl, time
lock = open("/var/lib/dpkg/lock-frontend", "w")
fcntl.lockf(lock, fcntl.LOCK_EX)
"""

# Overlays over the catalog, by name; laid over the demo's.
OVERLAYS: dict[str, dict[str, Any]] = {
    "no_repository": {"models.yml": {"gpt-oss-120b": {"repository": "openai/gpt-oss-999b"}}},
    "no_image": {
        "engines/tensorrt_llm.yml": {"releases": {"1.2.1": {"image": "nvcr.io/nvidia/tensorrt-llm/release:9.9.9"}}}
    },
}

REFUSED: dict[str, Row] = {
    "another_gpu": row(
        {"serving_gpu": "B200", "serving_gpu_count": 4},
        "gpu.kind",
        "4x NVIDIA H200",
        "serving_gpu to what is there (H200)",
    ),
    "fewer_gpus": row(
        {"serving_gpu_count": 8}, "gpu.count", "4 (4x NVIDIA H200)", "at least 8", "serving_gpu_count to at most 4"
    ),
    "another_platform": row({"serving_platform": "hgx_h200"}, "platform.agrees", "hgx_h200", "serving_platform"),
    "distribution_without_drivers": row(
        {"nvidia_driver_source": "distro"},
        "driver.source",
        "nvidia_driver_source: distro on debian",
        "Set nvidia_driver_source to cuda_repo",
    ),
    "names_of_ubuntu": row(
        {"preflight_driver_packages": ["nvidia-headless-580-server-open"]},
        "packages.names",
        "nvidia-headless-580-server-open",
        "Ubuntu's names, which debian does not have",
    ),
    "disk": row(
        {"model_cache_directory": "/mnt/small/cache"}, "disk./mnt/small", "MB", "missing", "model_cache_directory"
    ),
    "port": row({"serving_port": 22}, "port.22", "sshd", "choose another port with serving_port"),
    "docker_absent": row(
        {"docker_engine_source": "present"}, "docker.version", "absent", "20.10.0 or newer", "docker_engine_source"
    ),
    "hub_unreachable": row(
        {"model_weights_endpoint": f"http://{MIRROR_ADDRESS}:9"}, "url.hub", "refused", "model_weights_endpoint"
    ),
    "repository_missing": row(
        overlay("no_repository"),
        "url.hub",
        "status 401",
        "The hub has no openai/gpt-oss-999b",
        "model_weights_endpoint",
    ),
    "token_refused": row(
        {"model_weights_endpoint": "{hub}", "model_weights_token": TOKEN},
        "url.hub",
        "status 401",
        "The hub refuses the token: it is wrong, expired or revoked. Correct model_weights_token (or HF_TOKEN",
    ),
    "image_missing": row(
        overlay("no_image"),
        "image.available",
        "nvidia/tensorrt-llm/release:9.9.9: the registry has no such image",
        "serving_release",
        "inference_server_image_registry",
    ),
    "image_archive_corrupt": row(
        {"inference_server_image_archive": "{corrupt}"},
        "image.available",
        "on the controller:",
        "is no image archive, or is corrupt or cut short",
        "inference_server_image_archive",
    ),
    "image_archive_missing": row(
        {"inference_server_image_archive": "/srv/nowhere.tar", "inference_server_image_archive_on": "host"},
        "image.available",
        "/srv/nowhere.tar: there is no such archive",
        "inference_server_image_archive_on",
    ),
    "weights_share_missing": row(
        {
            "model_weights_source": "directory",
            "model_weights_path": "/srv/nowhere",
            "model_weights_path_on": "host",
        },
        "url.weights_source",
        "/srv/nowhere does not exist on the host",
        "Mount or copy it there",
    ),
    "packages_missing": row(
        {"nvidia_driver_repository_url": f"http://{MIRROR_ADDRESS}/apt/nowhere"},
        "url.cuda_repository",
        "status 404",
        "nvidia_driver_repository_url",
    ),
    "registry_unreachable": row(
        {"inference_server_image_registry": f"{MIRROR_ADDRESS}:5999"},
        "url.image_registry",
        "refused",
        "inference_server_image_registry",
    ),
}


@dataclass(frozen=True)
class Machine:
    """A test host, and inventories in which it has many names."""

    name: str
    directory: Path

    def inventory(self, names: dict[str, dict[str, Any]]) -> Path:
        directory = self.directory / "inventory"
        demo = REPOSITORY / "inventories" / "demo"
        if not directory.exists():
            directory.mkdir()
            (directory / "group_vars").symlink_to(demo / "group_vars")
            for name, files in OVERLAYS.items():
                shutil.copytree(OVERLAY, directory / name)
                for file, content in files.items():
                    both = merged(yaml.safe_load((OVERLAY / file).read_text()), content)
                    (directory / name / file).write_text(yaml.safe_dump(both))
        [(group, content)] = yaml.safe_load((demo / "hosts.yml").read_text()).items()
        variables = content["vars"] | {
            "test_host_file": str(REPOSITORY / "build/hosts" / f"{self.name}.json"),
            "verdict_directory": str(self.directory / "verdicts"),
        }
        path = directory / "hosts.yml"
        path.write_text(yaml.safe_dump({group: {"hosts": names, "vars": variables}}))
        return path

    def play(self, playbook: str, names: dict[str, dict[str, Any]], *arguments: str) -> Run:
        run = play("-i", self.inventory(names), playbook, *arguments)
        print(run.output)
        return run

    def run(self, script: str) -> str:
        return hosts.execute(self.name, "sh", "-c", script)

    def state(self) -> list[str]:
        return self.run(STATE).splitlines()


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Machine]]:
    mirror.up()
    started: list[str] = []

    def start(name: str) -> Machine:
        started.append(name)
        hosts.up(name, hardware="h200_x4")
        return Machine(name, tmp_path_factory.mktemp(name))

    yield start
    for name in started:
        hosts.down(name)


@pytest.fixture(scope="module")
def machine(start: Callable[[str], Machine]) -> Machine:
    machine = start("bad-host")
    machine.run("mkdir /mnt/small && mount -t tmpfs -o size=1m small /mnt/small")
    return machine


@pytest.fixture(scope="module")
def hub() -> Iterator[tuple[str, State]]:
    """A hub of our own: the mirror's has other users."""
    state = make_state()
    server = Hub(("0.0.0.0", 0), state)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"http://{SUBNET[1]}:{server.server_address[1]}", state
    server.shutdown()
    server.server_close()


# -- found by preflight, before anything is changed -------------------------------------------------------------------


@dataclass(frozen=True)
class Refusals:
    run: Run
    before: list[str]
    after: list[str]


@pytest.fixture(scope="module")
def refusals(machine: Machine, hub: tuple[str, State]) -> Refusals:
    url, state = hub
    state.reset()
    state.tokens = {"hf_somebody": [MODEL]}
    corrupt = machine.directory / "image.tar"
    corrupt.write_bytes(b"\x1f\x8b not an archive")
    places = {"{hub}": url, "{corrupt}": str(corrupt)}
    given = {
        name: {key: places.get(value, value) if isinstance(value, str) else value for key, value in row.given.items()}
        for name, row in REFUSED.items()
    }
    before = machine.state()
    run = machine.play("site.yml", given)
    return Refusals(run, before, machine.state())


def finding(message: str, id_: str) -> str:
    """A finding of preflight's table in one line, without the table's folding."""
    lines = message.splitlines()
    print(message)
    start = next((number for number, line in enumerate(lines) if id_ in line), None)
    assert start is not None, f"no finding {id_}"
    return " ".join(" ".join(lines[start:]).split())


@pytest.mark.parametrize("name", REFUSED)
def test_preflight_names_what_is_in_the_way(refusals: Refusals, name: str) -> None:
    failure = refusals.run.failures[name]
    assert failure["findings"] == [REFUSED[name].finding]
    assert f"Preflight stops before anything is changed on {name}: " in failure["msg"]
    said = finding(failure["msg"], REFUSED[name].finding)
    for part in REFUSED[name].says:
        assert part in said


def test_a_host_that_is_refused_stays_as_it_was(refusals: Refusals) -> None:
    assert refusals.run.status != 0
    assert refusals.after == refusals.before
    assert not re.search(r"changed=[1-9]|unreachable=[1-9]", refusals.run.output)
    assert TOKEN not in refusals.run.output


# -- passes by itself -------------------------------------------------------------------------------------------------


# Installs until preflight is seen to wait, or for ever.
FIRST_BOOT = """
import pathlib, subprocess
pathlib.Path("/run/first-boot").touch()
journal = ["journalctl", "--identifier=ansible-host_survey", "--output=cat"]
while b"lock_timeout=300" not in subprocess.run(journal, capture_output=True).stdout:
    time.sleep(0.2)
time.sleep(1)
"""


@pytest.mark.parametrize(("waits", "stops"), [(2, True), (300, False)], ids=["too long", "in time"])
def test_a_first_boot_that_installs_packages_is_waited_for(machine: Machine, waits: int, stops: bool) -> None:
    machine.run(f"rm -f /run/first-boot; systemd-run --quiet --unit=first-boot python3 -c '{HOLD_LOCK}{FIRST_BOOT}'")
    machine.run("until test -e /run/first-boot; do sleep 0.1; done")
    given = {"busy": {"preflight_apt_lock_timeout": waits}}
    run = machine.play("playbooks/prepare.yml", given, "--tags", "preflight")
    machine.run("systemctl stop first-boot || true")
    assert f"busy: waiting up to {waits} s, because packages are being installed: /var/lib/dpkg/lock" in run.output
    assert (run.status != 0) is stops
    if stops:
        assert run.failures["busy"]["findings"] == ["apt.lock"]
        assert "python3" in finding(run.failures["busy"]["msg"], "apt.lock")


# -- found while the weights are brought: nothing becomes visible ------------------------------------------------------


@dataclass(frozen=True)
class Fetch:
    """Something wrong with the hub, and what is said of it."""

    given: dict[str, Any]
    says: tuple[str, ...]
    fault: Fault | None = None


FETCHES: dict[str, Fetch] = {
    "token": Fetch(
        {"model_weights_token": TOKEN},
        ("refused the token in model_weights_token (HF_TOKEN)", "wrong, expired or revoked"),
    ),
    "checksum": Fetch(
        {"model_weights_attempts": 1},
        ("model-00002-of-00002.safetensors", "sha256"),
        Fault("corrupt", "*/model-00002-of-00002.safetensors", times=-1),
    ),
}


def system(machine: Machine) -> list[str]:
    """The machine but for the project's own directories: the cache, and the hub's client in its virtual environment."""
    return [line for line in machine.state() if not line.startswith(("/var/lib/gpt-oss", "/opt/gpt-oss"))]


@pytest.mark.parametrize("name", FETCHES)
def test_weights_that_cannot_be_had_or_trusted_never_become_visible(
    machine: Machine, hub: tuple[str, State], name: str
) -> None:
    url, state = hub
    state.reset()
    state.tokens = {"hf_somebody": [MODEL]}
    fault = FETCHES[name].fault
    state.faults = [fault] if fault is not None else []
    before = system(machine)
    run = machine.play("playbooks/weights.yml", {name: {"model_weights_endpoint": url, **FETCHES[name].given}})
    assert run.status != 0
    message = " ".join(run.failures[name]["msg"].split())
    for part in FETCHES[name].says:
        assert part in message
    assert TOKEN not in run.output
    assert machine.run("ls /var/lib/gpt-oss/weights/*/snapshots 2>/dev/null || true") == ""
    assert system(machine) == before


# -- found when the image is brought: no server is touched ----------------------------------------------------------


@pytest.fixture(scope="module")
def prepared(machine: Machine) -> Machine:
    """The host with everything but a server."""
    for playbook in ("playbooks/prepare.yml", "playbooks/weights.yml"):
        run = machine.play(playbook, {"flawless": {}}, "--skip-tags", "cuda_toolkit")
        assert run.status == 0
    return machine


@pytest.mark.parametrize("name", ["missing", "corrupt", "of_a_root_file_system"])
def test_an_image_that_cannot_be_had_changes_no_server(prepared: Machine, tmp_path: Path, name: str) -> None:
    archive = tmp_path / "image.tar"
    given: dict[str, Any] = {"inference_server_image_archive": str(archive)}
    says: tuple[str, ...]
    if name == "missing":
        given = overlay("no_image")
        says = ("release:9.9.9", "inference_server_image_registry")
    elif name == "corrupt":
        archive.write_bytes(b"\x1f\x8b not an archive")
        says = (str(archive), "is no image archive, or is corrupt or cut short", "docker save")
    else:
        with tarfile.open(archive, "w") as tar:
            tar.add(__file__, "etc/passwd")
        says = (str(archive), "docker save")
    containers = "docker images --quiet; docker ps --all --quiet"
    before, had = prepared.state(), prepared.run(containers)
    run = prepared.play("playbooks/serve.yml", {name: given})
    assert run.status != 0
    message = " ".join(run.failures[name]["msg"].split())
    for part in says:
        assert part in message
    assert prepared.state() == before
    assert prepared.run(containers) == had


# -- wrong with the machine itself: all of it said at once ----------------------------------------------------------

ARRANGE = r"""
set -eu
systemd-run --quiet --unit=squatter python3 -m http.server 8000
systemd-run --quiet --unit=installer python3 -c 'HOLD_LOCKtime.sleep(3600)'
sed -i 's/^VERSION_ID=.*/VERSION_ID="13"/; s/^VERSION_CODENAME=.*/VERSION_CODENAME=trixie/' /usr/lib/os-release
until ss --listening --tcp --numeric --no-header 'sport = :8000' | grep --quiet 8000; do sleep 0.1; done
"""
HELD = r"""
set -eu
directory=$(mktemp -d)
mkdir $directory/DEBIAN
printf '%s\n' 'Package: nvidia-container-toolkit-base' 'Version: 1.13.5-1' 'Architecture: amd64' 'Maintainer: a <b@c>' \
  'Description: an older one' > $directory/DEBIAN/control
dpkg-deb --build $directory $directory.deb
dpkg --install $directory.deb
apt-mark hold nvidia-container-toolkit-base
"""
"""What somebody else left on the host."""


def test_everything_wrong_with_a_host_is_said_at_once(start: Callable[[str], Machine]) -> None:
    name = "neglected-host"
    machine = start(name)
    machine.run("stand-in-fault secure_boot")
    hosts.restart(name)  # the firmware's setting shows itself after a reboot
    machine.run(HELD)
    machine.run(ARRANGE.replace("HOLD_LOCK", HOLD_LOCK))
    before = machine.state()
    run = machine.play("site.yml", {name: {}}, "--diff")
    assert run.status != 0
    failure = run.failures[name]
    assert {"apt.lock", "packages.held", "port.8000", "kernel.secure_boot", "os.supported"} <= set(failure["findings"])
    said = " ".join(failure["msg"].split())
    for part in (
        "/var/lib/dpkg/lock-frontend held by",
        "nvidia-container-toolkit-base 1.13.5-1 (wanted 1.19.1-1)",
        "apt-mark unhold nvidia-container-toolkit-base",
        "unit squatter.service",
        "mokutil --import",
        "Debian 12 or Ubuntu 22.04 or Ubuntu 24.04",
    ):
        assert part in said
    assert machine.state() == before
