"""What diagnosis finds on a host that should be serving, from the hardware up to the answer."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from serving_catalog import ServeRequest, load_catalog, plan_host
from serving_catalog.checks import (
    Check,
    DiagnosisSettings,
    Verdict,
    annotate,
    diagnose,
    diagnosis_survey,
    judged,
    likely_cause,
)
from tests.plugins import trees
from tests.plugins.trees import RECORDED

PLAN = plan_host(
    ServeRequest(engine="tensorrt_llm", profile="low_latency", gpu="H200", gpu_count=4), load_catalog()
).model_dump(mode="json")
SETTINGS = DiagnosisSettings()
UNIT = "gpt-oss@0.service"
BENCHMARK = {"requests": 16, "failed_requests": 0, "output_tokens_per_second": 812.4, "time_to_first_token_ms": 41.0}
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def serving(run_module: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The recorded host with four H200, and a server on it that is well."""
    tree = trees.recorded("h200-x4", tmp_path_factory.mktemp("host"))
    asked = diagnosis_survey(PLAN, SETTINGS)
    hardware = [name for name in asked["sections"] if name not in ("units", "logs", "endpoints", "docker", "toolkit")]
    asked.update(tree.arguments, sections=hardware)
    survey = run_module("host_survey", asked)["ansible_facts"]["host_survey"]
    survey["driver"].update(installed_version="580.159.04", library_version="580.159.04")
    survey["weights"].update(marker_present=True, bytes=PLAN["model"]["size_bytes"])
    survey["packages"] = dict.fromkeys(load_catalog().releases.nvidia_container_toolkit.packages, "1.19.1-1")
    survey["toolkit"] = {
        "version": "1.19.1",
        "cdi_devices": ["nvidia.com/gpu=0", "nvidia.com/gpu=all"],
        "cdi_error": None,
        "cdi_specifications": [{"path": "/var/run/cdi/nvidia.yaml", "driver_versions": ["580.159.04"]}],
    }
    survey["docker"] = {
        "installed": True,
        "version": "29.8.2",
        "cdi": {"enabled": True},
        "containers": [
            {
                "name": "gpt-oss-0",
                "image": "mirror.example:5000/nvidia/tensorrt-llm/release:1.2.1",
                "state": "running",
                "gpus_seen": [f"GPU {n}: NVIDIA H200" for n in range(4)],
                "gpu_probe": "asked",
            }
        ],
    }
    survey["units"] = {
        UNIT: {
            "load_state": "loaded",
            "active_state": "active",
            "sub_state": "running",
            "unit_file_state": "enabled",
            "restarts": 0,
            "result": "success",
        }
    }
    survey["logs"] = {UNIT: ["2026-11-21 INFO: Application startup complete."]}
    survey["endpoints"] = {
        "0": {"url": "http://127.0.0.1:8000", "health_status": 200, "models": ["openai/gpt-oss-120b"], "error": None}
    }
    annotated: dict[str, Any] = annotate(survey, load_catalog())
    return annotated


def _judge(
    survey: Mapping[str, Any], settings: DiagnosisSettings = SETTINGS, benchmark: dict[str, Any] | None = BENCHMARK
) -> dict[str, Check]:
    return {check.id: check for check in diagnose(survey, PLAN, settings, load_catalog(), (), benchmark)}


def test_a_server_that_is_well(serving: dict[str, Any]) -> None:
    checks = _judge(serving)
    assert [check.id for check in checks.values() if check.ok is False] == []
    # A guest of an HGX board runs no fabric manager of its own; its cache is a directory of the root filesystem.
    assert [check.id for check in checks.values() if check.ok is None] == ["fabric.manager", "cache.drives"]
    assert judged("h", "now", {}, checks.values()).ok


def _cache(**values: Any) -> Change:
    """A cache over two drives, whole but for `values`."""
    whole: dict[str, Any] = {
        "state": "ready",
        "level": "raid0",
        "mount_point": "/var/lib/gpt-oss",
        "drives": [
            {"id": "/dev/disk/by-id/nvme-A", "serial": "A", "name": "nvme1n1"},
            {"id": "/dev/disk/by-id/nvme-B", "serial": "B", "name": "nvme2n1"},
        ],
        "arrays": [{"name": "md127", "state": "clean", "missing": 0, "faulty": []}],
        "mounted": True,
    }
    return lambda survey: survey.update(cache_drives={**whole, **values})


_B_GONE = [
    {"id": "/dev/disk/by-id/nvme-A", "serial": "A", "name": "nvme1n1"},
    {"id": "/dev/disk/by-id/nvme-B", "serial": "B", "name": None},
]


@pytest.mark.parametrize(
    ("change", "seen", "remedy"),
    [
        (_cache(), "2 drives as raid0, mounted at /var/lib/gpt-oss", ""),
        (
            _cache(drives=_B_GONE, arrays=[], mounted=False),
            "/dev/disk/by-id/nvme-B (serial B) is gone, the array is not assembled",
            "rebuild_cache.yml",
        ),
        (
            _cache(arrays=[{"name": "md127", "state": "clean", "missing": 1, "faulty": ["nvme2n1"]}]),
            "nvme2n1 of md127 has failed, md127 lacks 1 drives; mounted",
            "rebuild_cache.yml",
        ),
        (_cache(arrays=[{"name": "md127", "state": "broken", "missing": 0, "faulty": []}]), "is broken", "rebuild"),
        (_cache(mounted=False), "nothing of it is mounted", "--tags model_cache"),
        (_cache(state="building"), "it was not finished", "--tags model_cache"),
    ],
)
def test_the_drives_of_a_cache(serving: dict[str, Any], change: Change, seen: str, remedy: str) -> None:
    survey = copy.deepcopy(serving)
    change(survey)
    found = _judge(survey)["cache.drives"]
    assert found.ok is not bool(remedy)
    assert seen in found.seen
    assert remedy in found.remedy


def _fields(section: str, **values: Any) -> Change:
    return lambda survey: survey[section].update(values)


def _gpu(index: int, **values: Any) -> Change:
    return lambda survey: survey["nvidia_smi"]["gpus"][index].update(values)


def _lost(survey: dict[str, Any]) -> None:
    del survey["nvidia_smi"]["gpus"][2]


def _states(*states: str) -> Change:
    return lambda survey: survey["fabric"].update(states=list(states))


def _container(**values: Any) -> Change:
    return lambda survey: survey["docker"]["containers"][0].update(values)


def _unit(log: str = "", **values: Any) -> Change:
    def change(survey: dict[str, Any]) -> None:
        survey["units"][UNIT].update(values)
        if log:
            survey["logs"][UNIT].append(log)

    return change


def _endpoint(**values: Any) -> Change:
    return lambda survey: survey["endpoints"]["0"].update(values)


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
WAYS = [
    ("a GPU is silent", _lost, "gpu.answers", "silent: 0000:00:08.0", "xid"),
    (
        "driver/library mismatch",
        _fields("nvidia_smi", gpus=[], error="Failed to initialize NVML: Driver/library version mismatch"),
        "gpu.answers",
        "mismatch",
        "driver-library-mismatch",
    ),
    ("no driver", _fields("driver", running_version=None), "driver.branch", "no driver", "nvidia_driver"),
    ("old branch", _fields("driver", running_version="565.57.01"), "driver.branch", "565.57.01", "580.159.04"),
    (
        "another module on disk",
        _fields("driver", installed_version="580.178.04"),
        "driver.match",
        "installed module 580.178.04",
        "Reboot",
    ),
    ("library moved", _fields("driver", library_version="580.178.04"), "driver.match", "library 580", "Reboot"),
    ("MIG", _gpu(0, mig="Enabled"), "gpu.mig", "GPU 0", "multi-instance-gpu=0"),
    ("memory errors", _gpu(1, remapped_rows_pending="Yes"), "gpu.memory_errors", "row remapping pending", "reset"),
    ("state is lost", _gpu(0, persistence_mode="Disabled"), "driver.persistence", "GPU 0", "nvidia-persistenced"),
    (
        "fabric in progress",
        _states("Completed", "Completed", "In Progress", "Completed"),
        "fabric.state",
        "3x Completed, 1x In Progress",
        "802",
    ),
    ("no Docker", _fields("docker", version=None, installed=False), "docker.version", "not installed", "docker_engine"),
    ("Docker stopped", _fields("docker", version=None), "docker.version", "not running", "journalctl --unit docker"),
    ("old Docker", _fields("docker", version="19.3.15"), "docker.version", "19.3.15", "docker_engine"),
    ("no toolkit", _fields("toolkit", version=None), "toolkit.version", "not installed", "nvidia_container_toolkit"),
    (
        "mixed toolkit",
        _fields("packages", libnvidia_container1="x", **{"libnvidia-container1": "1.17.8-1"}),
        "toolkit.version",
        "libnvidia-container1 1.17.8-1",
        "nvidia_container_toolkit",
    ),
    (
        "stale CDI",
        _fields("toolkit", cdi_specifications=[{"path": "/etc/cdi/nvidia.yaml", "driver_versions": ["570.9.1"]}]),
        "cdi.specification",
        "/etc/cdi/nvidia.yaml has 570.9.1",
        "nvidia-cdi-refresh",
    ),
    ("no CDI devices", _fields("toolkit", cdi_devices=[]), "cdi.specification", "0 devices", "nvidia-ctk cdi generate"),
    ("weights are gone", _fields("weights", marker_present=False), "weights.verified", "no marker", "weights.yml"),
    (
        "weights were touched",
        _fields("weights", problems=["model-00001.safetensors has changed since it was verified"]),
        "weights.verified",
        "has changed",
        "weights.yml",
    ),
    ("no unit", _fields("units", **{UNIT: {"load_state": "not-found"}}), f"unit.{UNIT}", "no such unit", "serve.yml"),
    (
        "the engine ran out of memory",
        _unit(OOM, active_state="activating", sub_state="auto-restart", result="exit-code", restarts=2),
        f"unit.{UNIT}",
        "likely cause: out of GPU memory",
        "out-of-memory.md",
    ),
    ("restarts", _unit(restarts=9), f"unit.{UNIT}", "9 restarts", "journalctl"),
    ("does not survive a reboot", _unit(unit_file_state="disabled"), f"unit.{UNIT}", "disabled", "systemctl enable"),
    ("no container", _fields("docker", containers=[]), "container.gpt-oss-0", "no such container", "unit"),
    ("another image", _container(image="nvcr.io/x/release:1.0.0"), "container.gpt-oss-0", "1.0.0", "serve.yml"),
    (
        "the container lost its GPUs",
        _container(gpus_seen=[], gpu_probe="Failed to initialize NVML: Unknown Error"),
        "container_gpus.gpt-oss-0",
        "Unknown Error",
        "systemctl restart",
    ),
    (
        "503 for ever",
        _endpoint(health_status=503, models=[]),
        "endpoint.0",
        "health 503",
        "503-for-ever.md",
    ),
    ("another model", _endpoint(models=["llama"]), "endpoint.0", "models llama", "port-in-use.md"),
    ("nobody answers", _endpoint(error="connection refused"), "endpoint.0", "refused", "journal"),
]


@pytest.mark.parametrize(("change", "id_", "seen", "remedy"), [row[1:] for row in WAYS], ids=[row[0] for row in WAYS])
def test_what_is_wrong(serving: dict[str, Any], change: Change, id_: str, seen: str, remedy: str) -> None:
    survey = copy.deepcopy(serving)
    change(survey)
    checks = _judge(survey)
    assert checks[id_].ok is False
    assert seen in checks[id_].seen
    assert remedy in checks[id_].remedy
    assert not judged("h", "now", {}, checks.values()).ok


@pytest.mark.parametrize(
    ("benchmark", "floor", "ok"),
    [
        (None, 0, None),
        (BENCHMARK, 0, True),
        (BENCHMARK, 1000, False),
        ({**BENCHMARK, "failed_requests": 1}, 0, False),
        ({**BENCHMARK, "requests": 0}, 0, False),
        ({**BENCHMARK, "output_tokens_per_second": 0}, 0, False),
    ],
)
def test_throughput(serving: dict[str, Any], benchmark: dict[str, Any] | None, floor: float, ok: bool | None) -> None:
    settings = SETTINGS.model_copy(update={"minimum_output_tokens_per_second": floor})
    assert _judge(serving, settings, benchmark)["throughput.run"].ok is ok


# --- fabric, by platform -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "state", "ok"),
    [
        ("hgx_h200", "Completed", True),
        ("hgx_h200", "Not Supported", False),
        ("hgx_h200", "In Progress", False),
        ("h200_nvl", "Not Supported", True),
        ("h200_nvl", "N/A", True),
        ("h200_nvl", "In Progress", False),
        ("gb200_nvl72", "Completed", True),
        ("gb200_nvl72", "Not Supported", False),
        ("gb200_nvl4", "Not Supported", True),
    ],
)
def test_fabric_states_by_platform(serving: dict[str, Any], platform: str, state: str, ok: bool) -> None:
    survey = copy.deepcopy(serving)
    survey["fabric"]["states"] = [state] * 4
    assert _judge(survey, SETTINGS.model_copy(update={"platform": platform}))["fabric.state"].ok is ok


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, ""),
        ({"fabric_manager_version": None}, "not installed"),
        ({"fabric_manager_version": "580.159.03-1"}, "version 580.159.03-1"),
        ({"daemons": {"nv-fabricmanager": False}}, "not running"),
        ({"nvlsm_version": None}, "nvlsm not installed"),
        ({"ib_umad_loaded": False}, "ib_umad not loaded"),
    ],
)
def test_fabric_manager_on_nvlink_5(serving: dict[str, Any], change: dict[str, Any], wrong: str) -> None:
    survey = copy.deepcopy(serving)
    survey["fabric"].update(
        fabric_manager_version="580.159.04-1",
        nvlsm_version="2025.10.11-1",
        ib_umad_loaded=True,
        daemons={"nv-fabricmanager": True},
    )
    survey["fabric"].update(change)
    found = _judge(survey, SETTINGS.model_copy(update={"platform": "hgx_b200"}))["fabric.manager"]
    assert found.ok is not bool(wrong)
    assert wrong in found.seen


def test_a_tray_of_a_rack_runs_no_fabric_manager(serving: dict[str, Any]) -> None:
    assert _judge(serving, SETTINGS.model_copy(update={"platform": "gb200_nvl72"}))["fabric.manager"].ok is None


# --- GPUs, containers --------------------------------------------------------------------------------------------


def test_gpu_names_are_compared_whole(serving: dict[str, Any]) -> None:
    survey = copy.deepcopy(serving)
    for gpu in survey["nvidia_smi"]["gpus"]:
        gpu["name"] = "NVIDIA GH200 480GB"
    assert _judge(survey)["gpu.answers"].ok is False


def test_a_container_without_nvidia_smi_is_known_by_what_it_was_started_with(serving: dict[str, Any]) -> None:
    survey = copy.deepcopy(serving)
    container = survey["docker"]["containers"][0]
    container.update(gpus_seen=None, gpu_probe="the container has no nvidia-smi", gpu_requests=[{"driver": "cdi"}])
    assert _judge(survey)["container_gpus.gpt-oss-0"].ok is None
    container.update(gpu_requests=[], runtime="runc")
    assert _judge(survey)["container_gpus.gpt-oss-0"].ok is False


def test_without_cdi_the_runtime_hook_is_no_finding(serving: dict[str, Any]) -> None:
    survey = copy.deepcopy(serving)
    survey["docker"]["cdi"] = {"enabled": False}
    survey["toolkit"]["cdi_specifications"] = []
    assert _judge(survey)["cdi.specification"].ok is None


def test_every_replica_is_judged() -> None:
    request = ServeRequest(engine="tensorrt_llm", profile="max_throughput_replicated", gpu="H200", gpu_count=8)
    plan = plan_host(request, load_catalog()).model_dump(mode="json")
    names = [process["name"] for process in plan["processes"]]
    assert len(names) > 1
    checks = {check.id for check in diagnose({}, plan, SETTINGS, load_catalog())}
    assert {f"endpoint.{name}" for name in names} <= checks
    assert {f"unit.gpt-oss@{name}.service" for name in names} <= checks
    asked = diagnosis_survey(plan, SETTINGS.model_copy(update={"address": "0.0.0.0"}))
    assert [entry["url"] for entry in asked["endpoints"]] == [
        f"http://127.0.0.1:{process['port']}" for process in plan["processes"]
    ]


def test_the_verdict_of_a_real_host_reads_and_judges_the_same(serving: dict[str, Any]) -> None:
    verdict = Verdict.model_validate_json((RECORDED / "h200-x1/verdict.json").read_text())
    found = json.loads((RECORDED / "h200-x1/found.json").read_text())
    plan = plan_host(
        ServeRequest(engine="tensorrt_llm", profile="low_latency", gpu="H200", gpu_count=1), load_catalog()
    ).model_dump(mode="json")
    hardware = ("gpu.", "driver.branch", "driver.modules", "platform.")
    now = {check.id: check.ok for check in diagnose(found, plan, SETTINGS, load_catalog())}
    then = {check.id: check.ok for check in verdict.checks}
    assert {i: ok for i, ok in now.items() if i.startswith(hardware)} == {
        i: ok for i, ok in then.items() if i.startswith(hardware)
    }
    assert not verdict.ok


# --- why an engine ended -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (OOM, "out of GPU memory"),
        ("ValueError: No available memory for the cache blocks.", "out of GPU memory"),
        ("docker: Error: Bind for 0.0.0.0:8000 failed: port is already allocated.", "port taken"),
        ("huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files", "weights missing"),
        ('docker: Error: could not select device driver "" with capabilities: [[gpu]].', "container toolkit missing"),
        ("trtllm-serve: error: unrecognized arguments: --foo", "an option that this release does not know"),
        ("moe_config.backend\n  Extra inputs are not permitted", "an option that this release does not know"),
        ("RuntimeError: CUDA error 802: system not yet initialized", "NVLink fabric not completed"),
        ("openai_harmony.HarmonyError: error downloading or loading vocab file", "Harmony encodings missing"),
        ("OSError: [Errno 28] No space left on device", "disk full"),
        ("NVRM: Xid (PCI:0000:1b:00): 79, GPU has fallen off the bus.", "a GPU fell off the bus"),
    ],
)
def test_likely_causes(line: str, cause: str) -> None:
    found = likely_cause(["INFO: loading", line, "INFO: goodbye"])
    assert found is not None
    assert found[0].startswith(cause)
    assert found[1]


def test_no_cause_is_made_up() -> None:
    assert likely_cause(["INFO: loading weights", "Killed"]) is None
