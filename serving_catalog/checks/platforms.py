"""Which machine this is: what a survey saw, read with the catalog's eyes.

A GPU is known by its exact name or PCI device id. GB200 holds the letters B200, and is another machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serving_catalog.entries import Part
from serving_catalog.loading import Catalog

Survey = Mapping[str, Any]


class Detection(Part):
    """The platform that fits, or all that may; and why, in one sentence."""

    platform: str | None
    candidates: tuple[str, ...]
    reason: str


def gpu_key(gpu: Mapping[str, Any], catalog: Catalog) -> str | None:
    """The catalog's key of a GPU of a survey: by the name the driver gives it, else by its PCI device id."""
    name = gpu.get("name")
    return (catalog.gpu_named(name) if name else None) or catalog.gpu_with_device_id(str(gpu.get("device_id")))


def gpu_name(gpu: Mapping[str, Any], catalog: Catalog) -> str | None:
    """The name nvidia-smi gives, or would give once there is a driver."""
    if gpu.get("name"):
        return str(gpu["name"])
    key = gpu_key(gpu, catalog)
    return catalog.gpus[key].pci_device_ids.get(str(gpu["device_id"])) if key is not None else None


def detect_platform(survey: Survey, catalog: Catalog) -> Detection:
    """The platform whose GPUs, processor and switches are the ones that were seen."""
    gpus = survey.get("gpus") or []
    found = survey.get("platform") or {}
    machine = (survey.get("architecture") or {}).get("machine")
    switch = found.get("switch", "none")
    names = sorted({gpu_name(gpu, catalog) or f"10de:{gpu.get('device_id')}" for gpu in gpus})
    seen = f"{_counted(gpus, catalog)}, {_SWITCHES[switch]}, {machine}"
    if not gpus:
        return Detection(platform=None, candidates=(), reason="no NVIDIA GPU on the PCI bus")
    candidates = tuple(
        key
        for key, platform in catalog.platforms.items()
        if set(names) <= set(platform.gpu_names)
        and machine == platform.cpu_architecture
        and switch == ("nvlink5" if platform.nvlsm else "nvswitch" if platform.fabric_manager else "none")
    )
    if len(candidates) > 1:
        candidates = _by_fabric(candidates, survey, catalog)
    if len(candidates) == 1:
        return Detection(platform=candidates[0], candidates=candidates, reason=seen)
    if candidates:
        return Detection(platform=None, candidates=candidates, reason=f"{seen}: fits {' and '.join(candidates)}")
    guest = "; a virtual machine, whose switches may belong to the hypervisor" if found.get("hypervisor") else ""
    return Detection(platform=None, candidates=(), reason=f"{seen}: fits no platform of the catalog{guest}")


_SWITCHES = {
    "nvlink5": "NVLink 5 switch management on InfiniBand",
    "nvswitch": "NVSwitch bridges",
    "none": "no NVSwitch",
}


def _counted(gpus: list[Mapping[str, Any]], catalog: Catalog) -> str:
    names = [gpu_name(gpu, catalog) or f"unknown GPU 10de:{gpu.get('device_id')}" for gpu in gpus]
    return ", ".join(f"{names.count(name)}x {name}" for name in sorted(set(names)))


def _by_fabric(candidates: tuple[str, ...], survey: Survey, catalog: Catalog) -> tuple[str, ...]:
    """Machines that look alike on the bus differ in what their GPUs say of the fabric, once there is a driver."""
    states = set((survey.get("fabric") or {}).get("states") or [])
    if not states:
        return candidates
    switched = "Completed" in states or "In Progress" in states
    return tuple(key for key in candidates if catalog.platforms[key].imex == switched)


def annotate(survey: dict[str, Any], catalog: Catalog) -> dict[str, Any]:
    """The survey with what only the catalog knows: names of GPUs without a driver, and the platform."""
    annotated = dict(survey)
    if survey.get("gpus") is not None:
        annotated["gpus"] = [
            {**gpu, "gpu": gpu_key(gpu, catalog), "name": gpu_name(gpu, catalog)} for gpu in survey["gpus"]
        ]
    if survey.get("platform") is not None and survey.get("gpus") is not None and survey.get("architecture") is not None:
        detection = detect_platform(survey, catalog)
        annotated["platform"] = {
            **survey["platform"],
            "detected": detection.platform,
            "candidates": list(detection.candidates),
            "reason": detection.reason,
        }
    return annotated
