"""What preflight finds: a row for each thing that can be in the way, on the recorded host with four H200."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from serving_catalog import ServeRequest, load_catalog, plan_host
from serving_catalog.checks import (
    Check,
    DirectoryNeed,
    PreflightSettings,
    UrlNeed,
    annotate,
    plan_survey,
    preflight,
    table,
)
from serving_catalog.plans import image_key
from tests.plugins import trees
from tests.plugins.trees import RECORDED

GIB = 2**30
PLAN = plan_host(
    ServeRequest(engine="tensorrt_llm", profile="low_latency", gpu="H200", gpu_count=4), load_catalog()
).model_dump(mode="json")
SETTINGS = PreflightSettings(
    directories=(
        DirectoryNeed(path="/var/lib/gpt-oss", bytes=PLAN["model"]["size_bytes"], purpose="weights"),
        DirectoryNeed(path="/var/lib/docker", bytes=PLAN["image_bytes"], purpose="image"),
    ),
    urls=(
        UrlNeed(name="hub", url="https://hub/", needed_for="weights"),
        UrlNeed(name="registry", url="https://registry/v2/", needed_for="image", accept=(401,)),
    ),
)
DIGEST = "nvcr.io/nvidia/tensorrt-llm@sha256:00ff"
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def healthy(run_module: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A survey in which nothing is in the way: the recorded host, with room, and addresses that answer."""
    tree = trees.recorded("h200-x4", tmp_path_factory.mktemp("host"))
    tree.write("root/usr/src/linux-headers-6.8.0/Makefile", "")
    tree.write("proc/self/mountinfo", "30 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    asked = {**plan_survey(PLAN, SETTINGS), **tree.arguments, "urls": [], "controller_time": 0}
    survey = run_module("host_survey", asked)["ansible_facts"]["host_survey"]
    for facts in survey["paths"].values():
        facts["free_bytes"] = 500 * GIB
    survey["clock"].update(controller_skew_seconds=0.4)
    survey["urls"] = {"https://hub/": _answer(200), "https://registry/v2/": _answer(401)}
    annotated: dict[str, Any] = annotate(survey, load_catalog())
    return annotated


def _answer(status: int | None, kind: str = "", error: str = "") -> dict[str, Any]:
    return {"url": "https://x/", "status": status, "kind": kind, "error": error, "proxy": None}


def _judge(
    survey: Mapping[str, Any], settings: PreflightSettings = SETTINGS, plan: Mapping[str, Any] = PLAN
) -> dict[str, Check]:
    return {check.id: check for check in preflight(survey, plan, settings, load_catalog())}


def _findings(checks: Mapping[str, Check]) -> list[str]:
    return [check.id for check in checks.values() if check.ok is False]


def _set(path: str, value: Any) -> Change:
    def change(survey: dict[str, Any]) -> None:
        *steps, last = path.split("/")
        here: Any = survey
        for step in steps:
            here = here[int(step) if isinstance(here, list) else step]
        here[last] = value

    return change


def test_a_host_without_anything_in_the_way(healthy: dict[str, Any]) -> None:
    checks = _judge(healthy)
    assert _findings(checks) == []
    assert sum(check.ok is True for check in checks.values()) >= 25


def _gpus(device_id: str, count: int, name: str | None = None) -> Change:
    def change(survey: dict[str, Any]) -> None:
        gpus = [{"pci_address": f"0000:{n:02x}:00.0", "device_id": device_id, "name": name} for n in range(count)]
        survey.update(gpus=gpus, nvidia_smi={"gpus": [], "error": None, "path": None})

    return change


def _leftover(kind: str, path: str) -> Change:
    return _set("package_state/leftovers", [{"kind": kind, "path": path}])


def _lock(survey: dict[str, Any]) -> None:
    survey["apt"]["lock_holders"] = [
        {"lock": "/var/lib/dpkg/lock-frontend", "pid": 4711, "command": "unattended-upgrade"}
    ]


def _hold(name: str, version: str) -> Change:
    def change(survey: dict[str, Any]) -> None:
        survey["packages"][name] = version
        survey["holds"] = [name]

    return change


def _sources(*entries: tuple[str, str, str]) -> Change:
    def change(survey: dict[str, Any]) -> None:
        survey["apt"]["sources"] = [
            {"file": f"/etc/apt/sources.list.d/{file}", "uri": uri, "suite": "/", "signed_by": key}
            for file, uri, key in entries
        ]
        survey["apt"]["conflicts"] = [
            {
                "uri": entries[0][1],
                "suite": "/",
                "files": [source["file"] for source in survey["apt"]["sources"]],
                "signed_by": [key for _, _, key in entries],
                "conflicting": len({key for _, _, key in entries}) > 1,
            }
        ]

    return change


def _free(gib: int) -> Change:
    def change(survey: dict[str, Any]) -> None:
        for facts in survey["paths"].values():
            facts["free_bytes"] = gib * GIB

    return change


def _port(survey: dict[str, Any]) -> None:
    taken = {"listening": True, "addresses": ["0.0.0.0"], "pid": 99, "process": "nginx", "unit": "nginx.service"}
    survey["ports"]["8000"] = taken


def _path(path: str, field: str, value: bool) -> Change:
    def change(survey: dict[str, Any]) -> None:
        survey["paths"][path][field] = value

    return change


CUDA = "https://developer.download.nvidia.com/compute/cuda/repos"
TOOLKIT = "https://nvidia.github.io/libnvidia-container/stable/deb/amd64"
WAYS = [
    # what is wrong; the finding's id; what `seen` and `remedy` must hold
    ("unsupported OS", _set("os/repository", "debian13"), "os.supported", "", "supported systems"),
    ("RHEL", _set("os/repository", None), "os.supported", "", "supported systems"),
    ("arm64 host for H200", _set("architecture/machine", "aarch64"), "architecture.supported", "aarch64", "right host"),
    ("another GPU", _gpus("2901", 4), "gpu.kind", "4x NVIDIA B200", "serving_gpu to what is there (B200)"),
    (
        "GH200 is not an H200",
        _gpus("2342", 4, "NVIDIA GH200 480GB"),
        "gpu.kind",
        "NVIDIA GH200 480GB",
        "not in the catalog",
    ),
    ("fewer GPUs", _gpus("2335", 3), "gpu.count", "3 (3x NVIDIA H200)", "at most 3"),
    ("no GPU", _gpus("2335", 0), "gpu.count", "0", "No NVIDIA GPU is on the bus"),
    (
        "GPU with too little memory",
        _set("nvidia_smi/gpus/2/memory_total_bytes", 80 * GIB),
        "gpu.memory",
        "85.9 GB",
        "vGPU",
    ),
    ("MIG", _set("nvidia_smi/gpus/1/mig", "Enabled"), "gpu.mig", "GPU 1", "--multi-instance-gpu=0"),
    (
        "memory errors",
        _set("nvidia_smi/gpus/3/ecc_uncorrected_volatile", 7),
        "gpu.memory_errors",
        "7 uncorrected",
        "reset",
    ),
    ("Secure Boot", None, "kernel.secure_boot", "on", "mokutil"),
    ("headers gone from the archive", None, "kernel.headers", "no linux-headers-6.8.0", "reboot into it"),
    (
        ".run driver",
        _leftover("runfile", "/usr/bin/nvidia-uninstall"),
        "packages.foreign",
        "nvidia-uninstall",
        "nvidia-uninstall --silent",
    ),
    (
        "snap Docker",
        _leftover("snap_docker", "/snap/bin/docker"),
        "packages.foreign",
        "/snap/bin/docker",
        "snap remove docker",
    ),
    (
        "Ubuntu's driver",
        _set("package_state/distribution_nvidia", ["nvidia-utils-580-server"]),
        "packages.foreign",
        "nvidia-utils-580-server",
        "purge",
    ),
    (
        "nvidia-docker2",
        _set("packages/nvidia-docker2", "2.13.0-1"),
        "packages.foreign",
        "nvidia-docker2",
        "purge nvidia-docker2",
    ),
    (
        "driver held at another version",
        _hold("nvidia-open", "570.133.20-1"),
        "packages.held",
        "570.133.20",
        "apt-mark unhold nvidia-open",
    ),
    (
        "toolkit held",
        _hold("libnvidia-container1", "1.17.7-1"),
        "packages.held",
        "1.17.7-1",
        "apt-mark unhold libnvidia-container1",
    ),
    (
        "half-configured",
        _set("package_state/unfinished", ["bash", "dkms"]),
        "packages.unfinished",
        "bash",
        "dpkg --configure",
    ),
    (
        "two keys",
        _sources(("mine.list", f"{CUDA}/ubuntu2404/x86_64", "/a"), ("x.list", f"{CUDA}/ubuntu2404/x86_64", "/b")),
        "apt.sources",
        "different Signed-By",
        "keep one",
    ),
    (
        "another distribution's repository",
        _sources(("old.list", f"{CUDA}/debian12/x86_64", "/a")),
        "apt.sources",
        "not for ubuntu2404",
        "remove /etc/apt/sources.list.d/old.list",
    ),
    ("apt locked", _lock, "apt.lock", "4711 (unattended-upgrade)", "systemctl stop"),
    (
        "Docker that does not answer",
        _set("docker/error", "/var/run/docker.sock: refused"),
        "docker.version",
        "refused",
        "journalctl",
    ),
    ("too little memory", _set("memory_bytes", 32 * GIB), "memory.size", "34.4 GB", "missing"),
    ("disk too small", _free(50), "disk./", "53.7 GB", "missing"),
    (
        "read-only file system",
        _path("/var/lib/gpt-oss", "read_only", True),
        "path./var/lib/gpt-oss",
        "read-only",
        "remount",
    ),
    (
        "a file in the way",
        _path("/var/lib/docker", "is_directory", False),
        "path./var/lib/docker",
        "not a directory",
        "Move",
    ),
    ("port taken", _port, "port.8000", "nginx (pid 99, unit nginx.service)", "serving_port"),
    ("clock", _set("clock/controller_skew_seconds", -4000.0), "clock.skew", "4000 s behind", "timedatectl"),
    (
        "hub unreachable",
        _set("urls", {"https://hub/": _answer(None, "dns", "the name does not resolve")}),
        "url.hub",
        "does not resolve",
        "model_weights_endpoint",
    ),
    (
        "inspecting proxy",
        _set("urls", {"https://hub/": _answer(None, "tls", "the certificate is not accepted")}),
        "url.hub",
        "certificate",
        "update-ca-certificates",
    ),
    (
        "registry refuses",
        _set("urls", {"https://registry/v2/": _answer(403)}),
        "url.registry",
        "status 403",
        "inference_server_image_registry",
    ),
    ("a section was not read", _set("errors", {"gpus": "OSError: x"}), "survey.gpus", "OSError", "root"),
]


@pytest.mark.parametrize(("change", "id_", "seen", "remedy"), [row[1:] for row in WAYS], ids=[row[0] for row in WAYS])
def test_what_is_in_the_way(healthy: dict[str, Any], change: Change | None, id_: str, seen: str, remedy: str) -> None:
    survey = copy.deepcopy(healthy)
    if change is None:  # matters while no driver runs
        survey["driver"]["running_version"] = None
        survey["kernel"].update(secure_boot=True, headers_installed=False, headers_available=False)
    else:
        change(survey)
    found = _judge(survey)[id_]
    assert found.ok is False
    assert seen in found.seen
    assert remedy in found.remedy
    assert found.expected


@pytest.mark.parametrize(
    ("settings", "id_", "seen", "remedy"),
    [
        ({"driver_version": "565.57.01"}, "driver.branch", "565.57.01", "580.159.04"),
        ({"platform": "hgx_h200"}, "platform.agrees", "no NVSwitch", "serving_platform"),
        ({"platform": "gb200_nvl72"}, "platform.agrees", "4x NVIDIA H200", "serving_platform"),
        ({"driver_packages": ("linux-headers-amd64",)}, "packages.names", "linux-headers-amd64", "Debian's names"),
        ({"docker_source": "present"}, "docker.version", "absent", "docker_engine_source: docker_repo"),
        ({"minimum_memory_bytes": 2**41}, "memory.size", "540.1 GB", "missing"),
    ],
)
def test_what_was_asked_for_and_cannot_be(
    healthy: dict[str, Any], settings: dict[str, Any], id_: str, seen: str, remedy: str
) -> None:
    asked = SETTINGS.model_copy(update=settings)
    found = _judge(healthy, asked)[id_]
    assert found.ok is False
    assert seen in found.seen
    assert remedy in found.remedy


def _on_debian(survey: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(survey)
    changed["os"].update(id="debian", version_id="12", repository="debian12", name="Debian GNU/Linux 12 (bookworm)")
    return changed


def test_ubuntus_names_on_debian(healthy: dict[str, Any]) -> None:
    wanted = SETTINGS.model_copy(
        update={"driver_packages": ("nvidia-headless-580-server-open", "linux-modules-extra-6.1", "nvidia-open")}
    )
    found = _judge(_on_debian(healthy), wanted)["packages.names"]
    assert found.ok is False
    assert found.seen == "nvidia-headless-580-server-open, linux-modules-extra-6.1"


def test_ubuntus_driver_source_on_debian(healthy: dict[str, Any]) -> None:
    distro = SETTINGS.model_copy(update={"driver_source": "distro"})
    assert _judge(_on_debian(healthy), distro)["driver.source"].ok is False
    assert _judge(healthy, distro)["driver.source"].ok is True


def test_docker_that_stays_and_is_too_old(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy(healthy)
    survey["docker"].update(running=True, installed=True, version="19.3.15")
    stays = SETTINGS.model_copy(update={"docker_source": "present"})
    assert _judge(survey, stays)["docker.version"].ok is False
    assert _judge(survey)["docker.version"].ok is True  # the role will replace it


def test_proprietary_modules_on_blackwell(healthy: dict[str, Any]) -> None:
    request = ServeRequest(engine="tensorrt_llm", profile="low_latency", gpu="B200", gpu_count=4)
    plan = plan_host(request, load_catalog()).model_dump(mode="json")
    proprietary = SETTINGS.model_copy(update={"driver_modules": "proprietary"})
    found = _judge(healthy, proprietary, plan)["driver.modules"]
    assert found.ok is False
    assert "nvidia_driver_kernel_modules" in found.remedy
    assert _judge(healthy, proprietary)["driver.modules"].ok is True  # Hopper runs with both


def test_an_image_without_arm64(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy(healthy)
    survey["architecture"]["machine"] = "aarch64"
    plan = {**PLAN, "image_architectures": ["x86_64"]}
    found = _judge(survey, SETTINGS, plan)["architecture.image"]
    assert found.ok is False
    assert PLAN["image"] in found.seen
    assert "serving_release" in found.remedy


@pytest.mark.parametrize(("reboot", "ok"), [("when_needed", True), ("never", False)])
def test_nouveau_is_in_the_way_only_where_no_reboot_is_allowed(healthy: dict[str, Any], reboot: str, ok: bool) -> None:
    survey = copy.deepcopy(healthy)
    survey["kernel"]["nouveau_loaded"] = True
    survey["driver"]["installed_version"] = "580.178.04"
    checks = _judge(survey, SETTINGS.model_copy(update={"reboot": reboot}))
    assert checks["kernel.nouveau"].ok is ok
    assert checks["driver.running"].ok is ok


def test_secure_boot_with_ubuntus_signed_modules(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy(healthy)
    survey["kernel"]["secure_boot"] = True
    assert _judge(survey)["kernel.secure_boot"].ok is True  # the module runs: its key is enrolled
    survey["driver"]["running_version"] = None
    assert _judge(survey)["kernel.secure_boot"].ok is False
    distro = SETTINGS.model_copy(update={"driver_source": "distro"})
    assert _judge(survey, distro)["kernel.secure_boot"].ok is True
    survey["kernel"]["secure_boot"] = None
    assert _judge(survey)["kernel.secure_boot"].ok is None


def test_eight_sxm_gpus_on_bare_metal_need_their_switches(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy(healthy)
    _gpus("2335", 8)(survey)
    assert _judge(survey)["platform.agrees"].ok is True  # a guest: its switches are the hypervisor's
    survey["platform"]["hypervisor"] = False
    assert _judge(survey)["platform.agrees"].ok is False


# --- the hub and the registry ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "with_token", "remedy"),
    [
        (
            401,
            False,
            "The hub has no openai/gpt-oss-120b at b5c939de8f754692c1647ca79fbf85e8c1e70f8a, or shows it only",
        ),
        (404, False, "The hub has no openai/gpt-oss-120b at b5c939de"),
        (
            401,
            True,
            "The hub refuses the token: it is wrong, expired or revoked. Correct model_weights_token (or HF_TOKEN",
        ),
        (403, True, "The token may not read openai/gpt-oss-120b"),
        (404, True, "that the token may read"),
        (503, True, "The server answers 503"),
    ],
)
def test_what_the_hub_says_of_token_and_repository(
    healthy: dict[str, Any], status: int, with_token: bool, remedy: str
) -> None:
    survey = {**healthy, "urls": {"https://hub/": _answer(status)}}
    hub = UrlNeed(name="hub", url="https://hub/", needed_for="weights", with_token=with_token)
    found = _judge(survey, SETTINGS.model_copy(update={"urls": (hub,)}))["url.hub"]
    assert found.ok is False
    assert remedy in found.remedy
    assert "model_weights_endpoint or model_weights_source" in found.remedy


def _image(**facts: Any) -> dict[str, Any]:
    nothing = {"there": False, "status": None, "kind": None, "error": None, "architectures": None}
    return {"image": {"name": "mirror:5000/nvidia/release:1.2.1", **nothing, **facts}}


@pytest.mark.parametrize(
    ("facts", "ok", "says"),
    [
        ({"there": True}, True, "on the host already"),
        ({"status": 200, "architectures": ["amd64", "arm64"]}, True, "for amd64, arm64"),
        ({"status": 200}, True, "a processor that it does not name"),
        ({"status": 200, "architectures": ["arm64"]}, False, "mirror:5000/nvidia/release:1.2.1 for arm64"),
        ({"status": 404}, False, "the registry has no such image (status 404)"),
        ({"status": 401}, False, "the registry denies it, or has no such image"),
        ({"status": 403}, False, "the registry denies it, or has no such image"),
        ({"status": 503}, None, "status 503"),
        ({"kind": "refused", "error": "connection refused"}, None, "connection refused"),
    ],
    ids=str,
)
def test_an_image_at_its_registry(healthy: dict[str, Any], facts: dict[str, Any], ok: bool | None, says: str) -> None:
    found = _judge({**healthy, **_image(**facts)})["image.available"]
    assert found.ok is ok
    assert says in found.seen
    assert found.expected == "mirror:5000/nvidia/release:1.2.1 for amd64"


def test_an_image_that_a_mirror_gave_needs_no_space(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy({**healthy, **_image(there=True)})
    for facts in survey["paths"].values():
        facts["free_bytes"] = PLAN["model"]["size_bytes"] + 2 * GIB
    assert _findings(_judge(survey)) == []


def test_an_archive_that_will_not_do(healthy: dict[str, Any]) -> None:
    sent = SETTINGS.model_copy(update={"image_archive": "/srv/image.tar"})
    found = _judge({**healthy, "image": {"error": "on the controller: /srv/image.tar: is corrupt"}}, sent)
    assert found["image.available"].ok is False
    assert found["image.available"].seen == "on the controller: /srv/image.tar: is corrupt"
    assert "inference_server_image_archive_on" in found["image.available"].remedy
    assert _judge({**healthy, "image": {"error": None}}, sent)["image.available"].ok is True
    assert "image" not in plan_survey(PLAN, sent)["sections"]  # looked into where it lies
    on_host = sent.model_copy(update={"image_archive_on": "host"})
    assert plan_survey(PLAN, on_host)["image"]["archive"] == "/srv/image.tar"
    assert "image" in plan_survey(PLAN, on_host)["sections"]


# --- disk: added up, and what is there taken off -----------------------------------------------------------------


def test_directories_on_one_file_system_are_added_up(healthy: dict[str, Any]) -> None:
    need = PLAN["model"]["size_bytes"] + PLAN["image_bytes"] + SETTINGS.keep_free_bytes
    survey = copy.deepcopy(healthy)
    for facts in survey["paths"].values():
        facts["free_bytes"] = need - 1
    found = _judge(survey)["disk./"]
    assert found.ok is False
    assert found.remedy.startswith("1 bytes missing")
    # Each alone would fit; apart, both do.
    survey["paths"]["/var/lib/docker"].update(filesystem="/dev/nvme0n1", mount_point="/var/lib/docker")
    checks = _judge(survey)
    assert checks["disk./"].ok is True
    assert checks["disk./var/lib/docker"].ok is True


def test_what_is_there_already_needs_no_space_and_no_network(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy(healthy)
    for facts in survey["paths"].values():
        facts["free_bytes"] = GIB // 2
    survey["urls"] = {url: _answer(None, "dns", "no") for url in survey["urls"]}
    assert {"disk./", "url.hub", "url.registry"} <= set(_findings(_judge(survey)))
    survey["weights"].update(marker_present=True, problems=[], bytes=PLAN["model"]["size_bytes"])
    survey["docker"]["images"] = [PLAN["image"]]
    checks = _judge(survey)
    assert _findings(checks) == []
    assert checks["url.hub"].ok is None


def test_a_download_that_was_cut_counts(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy(healthy)
    survey["sizes"] = {"/var/lib/gpt-oss/staging/m/r": 60 * 10**9}
    for facts in survey["paths"].values():
        facts["free_bytes"] = 55 * 10**9
    assert _judge(survey)["disk./"].ok is True


@pytest.mark.parametrize(
    ("kept", "recorded", "counts"),
    [
        (image_key(PLAN["image"]), None, True),
        ("nvcr.io_nvidia_tensorrt-llm_sha256_00ff", {"name": PLAN["image"], "reference": DIGEST}, True),
        ("nvcr.io_nvidia_tensorrt-llm_sha256_00ff", None, False),
        ("nvcr.io_nvidia_tensorrt-llm_sha256_00ff", {"name": "another:1", "reference": DIGEST}, False),
    ],
)
def test_compile_caches_of_the_plans_image_count_and_those_of_others_do_not(
    healthy: dict[str, Any], kept: str, recorded: dict[str, str] | None, counts: bool
) -> None:
    survey = copy.deepcopy(healthy)
    survey["weights"].update(marker_present=True, problems=[], bytes=PLAN["model"]["size_bytes"])
    survey["docker"] |= {"images": [PLAN["image"]], "recorded_image": recorded}
    survey["sizes"] = {f"/var/lib/gpt-oss/engine_caches/{kept}": PLAN["cache_bytes"]}
    for facts in survey["paths"].values():
        facts["free_bytes"] = 2 * GIB
    need = DirectoryNeed(path="/var/lib/gpt-oss", bytes=PLAN["cache_bytes"], purpose="caches")
    settings = SETTINGS.model_copy(update={"directories": (*SETTINGS.directories, need)})
    assert _judge(survey, settings)["disk./"].ok is counts


def test_images_are_measured_where_docker_keeps_them(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy(healthy)
    survey["docker"]["image_directory"] = "/srv/docker"
    survey["paths"]["/srv/docker"] = {
        **survey["paths"]["/var/lib/docker"],
        "filesystem": "/dev/nvme0n1",
        "mount_point": "/srv",
        "free_bytes": GIB,
    }
    assert _findings(_judge(survey)) == ["disk./srv"]


# --- holds, ports, sources that are our own ----------------------------------------------------------------------


def test_the_roles_own_holds_are_not_findings(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy(healthy)
    _hold("nvidia-open", "580.159.04-1")(survey)
    assert _judge(survey)["packages.held"].ok is True  # held at the wanted version
    newer = SETTINGS.model_copy(update={"driver_version": "580.178.04"})
    assert _judge(survey, newer)["packages.held"].ok is False
    survey["package_state"]["upgrade_exclusions"] = ["/etc/apt/apt.conf.d/90nvidia-unattended-upgrades"]
    assert _judge(survey, newer)["packages.held"].ok is True  # held by role nvidia_driver
    assert _judge({**survey, "holds": ["libcublas-13-0"]}, newer)["packages.held"].ok is True  # not ours to change


def test_a_run_that_was_cut_is_healed_by_the_next(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy(healthy)
    survey["package_state"].update(unfinished=["nvidia-dkms-open", "docker-ce"], interrupted=True)
    assert _judge(survey)["packages.unfinished"].ok is True


def test_the_roles_own_driver_is_not_foreign(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy(healthy)
    survey["package_state"].update(
        distribution_nvidia=["nvidia-kernel-open-dkms"],
        upgrade_exclusions=["/etc/apt/apt.conf.d/90nvidia-unattended-upgrades"],
    )
    assert _judge(survey)["packages.foreign"].ok is True


def test_our_own_server_may_hold_its_port(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy(healthy)
    _port(survey)
    survey["ports"]["8000"]["process"] = "docker-proxy"
    survey["docker"]["containers"] = [{"name": "gpt-oss-0", "state": "running", "ports": [8000]}]
    assert _judge(survey)["port.8000"].ok is True


def test_files_that_the_roles_replace_are_not_findings(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy(healthy)
    _sources(("libnvidia-container.list", TOOLKIT, "/a"), ("libnvidia-container.sources", TOOLKIT, "/b"))(survey)
    assert _judge(survey)["apt.sources"].ok is True
    cuda = f"{CUDA}/ubuntu2404/x86_64"
    _sources(("cuda-ubuntu2404-x86_64.list", cuda, "/a"), ("nvidia-cuda.sources", cuda, "/b"))(survey)
    assert _judge(survey)["apt.sources"].ok is True


# --- what the operator accepts -----------------------------------------------------------------------------------


def test_a_finding_can_be_accepted_by_id_or_pattern(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy(healthy)
    survey["memory_bytes"] = GIB
    survey["urls"] = {url: _answer(None, "dns", "no") for url in survey["urls"]}
    allowed = SETTINGS.model_copy(update={"allow_findings": ("memory.size", "url.*")})
    checks = _judge(survey, allowed)
    assert _findings(checks) == ["memory.size", "url.hub", "url.registry"]
    assert not any(check.stops for check in checks.values())
    assert all(checks[name].accepted for name in _findings(checks))
    assert "accpt memory.size" in table(checks.values())


def test_all_findings_come_at_once(healthy: dict[str, Any]) -> None:
    survey = copy.deepcopy(healthy)
    for change in (_gpus("2901", 2), _lock, _port, _free(1), _set("memory_bytes", 1), _set("os/repository", None)):
        change(survey)
    wanted = {"os.supported", "gpu.kind", "gpu.count", "apt.lock", "memory.size", "disk./", "port.8000"}
    checks = _judge(survey)
    assert wanted <= set(_findings(checks))
    text = table([check for check in checks.values() if check.stops])
    assert all(f"FAIL  {name}" in text for name in wanted)
    assert text.count("remedy:") == len(_findings(checks))


def test_what_preflight_found_on_a_real_host(run_module: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """The recorded host with one H200 has no network and too small a disk; everything else was as expected."""
    found = json.loads((RECORDED / "h200-x1/preflight.json").read_text())
    plan = plan_host(
        ServeRequest(engine="tensorrt_llm", profile="low_latency", gpu="H200", gpu_count=1), load_catalog()
    ).model_dump(mode="json")
    tree = trees.recorded("h200-x1", tmp_path)
    tree.write("proc/self/mountinfo", "30 1 254:0 / / rw - ext4 /dev/vda rw\n")
    asked = {**plan_survey(plan, SETTINGS), **tree.arguments, "urls": [], "controller_time": 0}
    survey = run_module("host_survey", asked)["ansible_facts"]["host_survey"]
    for facts in survey["paths"].values():
        facts["free_bytes"] = found["free_bytes"]
    survey["clock"]["controller_skew_seconds"] = found["controller_skew_seconds"]
    urls = [UrlNeed(name=name.removeprefix("url."), url=name) for name in found["findings"] if name.startswith("url.")]
    survey["urls"] = {need.url: _answer(None, "dns", "the name does not resolve") for need in urls}
    checks = _judge(annotate(survey, load_catalog()), SETTINGS.model_copy(update={"urls": tuple(urls)}), plan)
    assert _findings(checks) == found["findings"]
