"""Judgements that preflight and diagnosis share. Each takes what was seen and returns checks; nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from serving_catalog.checks.models import Check
from serving_catalog.checks.platforms import Survey, detect_platform, gpu_key, gpu_name
from serving_catalog.loading import Catalog

Plan = Mapping[str, Any]


def at(data: Mapping[str, Any] | None, path: str) -> Any:
    """The value at a dotted path, or None where a step is missing."""
    here: Any = data
    for step in path.split("."):
        if not isinstance(here, Mapping):
            return None
        here = here.get(step)
    return here


def passed(id: str, title: str, seen: str, expected: str) -> Check:  # noqa: A002 - the field's own name
    return Check(id=id, title=title, ok=True, seen=seen, expected=expected, remedy="")


def finding(id: str, title: str, seen: str, expected: str, remedy: str) -> Check:  # noqa: A002
    return Check(id=id, title=title, ok=False, seen=seen, expected=expected, remedy=remedy)


def unknown(id: str, title: str, seen: str, expected: str) -> Check:  # noqa: A002
    return Check(id=id, title=title, ok=None, seen=seen, expected=expected, remedy="")


def check(id: str, title: str, ok: bool | None, seen: str, expected: str, remedy: str) -> Check:  # noqa: A002
    """A check whose remedy is said only when it is needed."""
    return Check(id=id, title=title, ok=ok, seen=seen, expected=expected, remedy=remedy if ok is False else "")


def listed(items: Iterable[object], nothing: str = "none") -> str:
    return ", ".join(str(item) for item in items) or nothing


def size(count: int | None) -> str:
    """Bytes for a person, and exactly: 65.3 GB (65277000000 bytes)."""
    if count is None:
        return "unknown"
    for factor, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB")):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit} ({count} bytes)"
    return f"{count} bytes"


def numbers(version: str) -> tuple[int, ...]:
    """A version for comparing. A package's epoch and revision are left out."""
    upstream = re.sub(r"^\d+:", "", version)
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[-~+]", upstream)[0]))


def unreadable(survey: Survey) -> list[Check]:
    """A finding for every section of the survey that failed."""
    return [
        finding(
            f"survey.{section}",
            "The host can be read",
            str(message),
            f"the section {section} of host_survey is read",
            "Run the play as root (become: true). If it is, report the message: the survey met something it does "
            "not know.",
        )
        for section, message in (survey.get("errors") or {}).items()
    ]


# --- GPUs --------------------------------------------------------------------------------------------------------


def gpu_kind(survey: Survey, plan: Plan, catalog: Catalog) -> Check:
    """The GPUs are exactly the ones asked for. By name or id, never by part of a name."""
    title = "GPUs are the ones asked for"
    wanted = str(plan["gpu"])
    names = catalog.gpus[wanted].names
    expected = f"{wanted}: {' or '.join(names)}"
    gpus = survey.get("gpus") or []
    if not gpus:
        return unknown("gpu.kind", title, "no NVIDIA GPU on the PCI bus", expected)
    others = [gpu for gpu in gpus if gpu_key(gpu, catalog) != wanted]
    seen = listed(gpu_counts(survey, catalog))
    if not others:
        return passed("gpu.kind", title, seen, expected)
    there = sorted({key for gpu in gpus if (key := gpu_key(gpu, catalog)) is not None})
    return finding(
        "gpu.kind",
        title,
        seen,
        expected,
        f"Set serving_gpu to what is there ({' or '.join(there)}) and run again; the plan follows."
        if there
        else "These GPUs are not in the catalog, so nothing is known to serve on them; it knows "
        f"{listed(catalog.gpus)}.",
    )


def gpu_counts(survey: Survey, catalog: Catalog) -> list[str]:
    """`4x NVIDIA H200`, one for each kind."""
    names = [gpu_name(gpu, catalog) or f"unknown GPU 10de:{gpu.get('device_id')}" for gpu in survey.get("gpus") or []]
    return [f"{names.count(name)}x {name}" for name in dict.fromkeys(names)]


def gpu_count(survey: Survey, plan: Plan, catalog: Catalog) -> Check:
    wanted = int(plan["gpu_count"])
    found = sum(1 for gpu in survey.get("gpus") or [] if gpu_key(gpu, catalog) == plan["gpu"])
    total = len(survey.get("gpus") or [])
    # GPUs of another kind are another finding; what counts here is how many there are at all.
    enough = found if found else total
    return check(
        "gpu.count",
        "Enough GPUs on the PCI bus",
        enough >= wanted,
        f"{enough} ({listed(gpu_counts(survey, catalog))})",
        f"at least {wanted}",
        f"Set serving_gpu_count to at most {enough}, or find the missing ones: "
        "`lspci -d 10de:` lists what the bus sees, and a card that is not there is off, unplugged or passed to "
        "another machine."
        if enough
        else "No NVIDIA GPU is on the bus: check that this is the right host, that the cards have power and that "
        "a virtual "
        "machine has them passed through.",
    )


def gpu_health(survey: Survey) -> list[Check]:
    """Memory errors, MIG and GPUs that ask for a reset, where a driver can be asked."""
    gpus = at(survey, "nvidia_smi.gpus") or []
    if not gpus:
        why = at(survey, "nvidia_smi.error") or "no driver answers yet"
        return [
            unknown("gpu.memory_errors", "No uncorrected memory errors", why, "0 on every GPU"),
            unknown("gpu.mig", "MIG is off", why, "Disabled on every GPU"),
        ]
    wrong = [
        f"GPU {gpu['index']}: {listed(complaints)}"
        for gpu in gpus
        if (
            complaints := [
                *([f"{gpu['ecc_uncorrected_volatile']} uncorrected"] if gpu.get("ecc_uncorrected_volatile") else []),
                *(["row remapping pending"] if gpu.get("remapped_rows_pending") == "Yes" else []),
                *(["row remapping failed"] if gpu.get("remapped_rows_failure") == "Yes" else []),
                *([f"asks for: {gpu['recovery_action']}"] if gpu.get("recovery_action") else []),
            ]
        )
    ]
    split = [f"GPU {gpu['index']}" for gpu in gpus if gpu.get("mig") == "Enabled"]
    return [
        check(
            "gpu.memory_errors",
            "No uncorrected memory errors",
            not wrong,
            listed(wrong, f"0 on {len(gpus)} GPUs"),
            "0 on every GPU, no row remapping pending",
            "Stop the server and reset the GPU (`nvidia-smi --gpu-reset`) or reboot: that remaps the rows. A GPU "
            "whose errors "
            "come back, or whose remapping failed, is to be replaced.",
        ),
        check(
            "gpu.mig",
            "MIG is off",
            not split,
            f"Enabled on {listed(split)}" if split else f"off on {len(gpus)} GPUs",
            "Disabled on every GPU",
            "A plan is for whole GPUs. Stop what uses them and run `nvidia-smi --multi-instance-gpu=0`, then "
            "reset them or "
            "reboot.",
        ),
    ]


def gpu_memory(survey: Survey, plan: Plan) -> Check:
    title = "GPU memory is what the plan was made for"
    wanted = int(plan.get("gpu_memory_bytes") or 0)
    sizes = [gpu["memory_total_bytes"] for gpu in at(survey, "nvidia_smi.gpus") or [] if gpu.get("memory_total_bytes")]
    if not sizes or not wanted:
        return unknown("gpu.memory", title, "no driver answers yet", size(wanted))
    # Firmware versions differ in how much they keep for themselves; a smaller card, a MIG slice or a vGPU differs more.
    return check(
        "gpu.memory",
        title,
        min(sizes) >= wanted * 0.97,
        f"smallest {size(min(sizes))}",
        f"{size(wanted)} on every GPU",
        "Another program, MIG or a vGPU profile takes part of the card, or it is another model. The plan's batch "
        "sizes do not "
        "fit; serve on the whole GPU.",
    )


def platform(survey: Survey, declared: str | None, catalog: Catalog) -> Check:
    """The platform that was declared is the one that is there."""
    title = "Platform is the one declared"
    found = detect_platform(survey, catalog)
    asked = None if declared in (None, "", "auto") else declared
    if not survey.get("gpus"):
        return unknown("platform.agrees", title, found.reason, asked or "any (serving_platform: auto)")
    if asked is None:
        gpus = survey.get("gpus") or []
        missing = _switches_missing(survey, catalog)
        if missing:
            return finding(
                "platform.agrees",
                title,
                found.reason,
                f"the switches of {missing}",
                f"{len(gpus)} GPUs of this kind talk through switches, and none shows on the bus. Check the "
                "baseboard's power and "
                "`lspci | grep -i nvidia`; on a virtual machine whose hypervisor runs the fabric, set "
                "preflight_allow_findings to [platform.agrees].",
            )
        return passed("platform.agrees", title, found.reason, "any (serving_platform: auto)")
    ok = asked in found.candidates
    return check(
        "platform.agrees",
        title,
        ok,
        found.reason if ok else f"{found.platform or 'no known platform'} ({found.reason})",
        asked,
        f"Set serving_platform to {found.platform or 'auto'}, or look for what is missing: a platform that is "
        "declared is never "
        "replaced by a guess, because the wrong fabric daemons leave every CUDA program with error 802.",
    )


def _switches_missing(survey: Survey, catalog: Catalog) -> str | None:
    """The platform whose switches ought to be there: its number of GPUs on bare metal, and no switch."""
    gpus = survey.get("gpus") or []
    if at(survey, "platform.switch") != "none" or at(survey, "platform.hypervisor"):
        return None
    names = {gpu_name(gpu, catalog) for gpu in gpus}
    for key, entry in catalog.platforms.items():
        if entry.fabric_manager and entry.gpu_count == len(gpus) and names <= set(entry.gpu_names):
            return key
    return None


# --- shared with the diagnosis -----------------------------------------------------------------------------------


def disk_space(
    survey: Survey, needs: Sequence[tuple[str, int, str]], keep_free: int, inputs: str = "the directories"
) -> list[Check]:
    """Whether each file system holds all that will be put on it, together. `needs`: directory, bytes, what for."""
    by_filesystem: dict[str, list[tuple[str, int, str]]] = {}
    for directory, count, purpose in needs:
        facts = at(survey, "paths") or {}
        name = (facts.get(directory) or {}).get("filesystem") or directory
        by_filesystem.setdefault(str(name), []).append((directory, count, purpose))
    checks = []
    for wanted in by_filesystem.values():
        facts = survey["paths"].get(wanted[0][0]) or {} if survey.get("paths") else {}
        place = facts.get("mount_point") or wanted[0][0]
        id_ = f"disk.{place}"
        title = f"Space on {place}"
        total = sum(count for _, count, _ in wanted) + (keep_free if any(count for _, count, _ in wanted) else 0)
        parts = listed(f"{size(count)} for {purpose} in {directory}" for directory, count, purpose in wanted if count)
        expected = f"{size(total)} free: {parts}" if total else "nothing more is needed"
        free = facts.get("free_bytes")
        if free is None:
            checks.append(unknown(id_, title, facts.get("error") or "not read", expected))
            continue
        inodes = facts.get("free_inodes")
        scarce = inodes is not None and inodes < 10_000 and total > 0
        checks.append(
            check(
                id_,
                title,
                free >= total and not scarce,
                f"{size(free)} free on {facts.get('device')} ({facts.get('type')})"
                + (f", {inodes} inodes" if scarce else ""),
                expected,
                f"{size(total - free)} missing. Free it (docs/runbooks/disk-full.md), mount a larger file system "
                f"there, or move {inputs}."
                if free < total
                else "The file system has too few inodes left: remove small files or make a new one.",
            )
        )
    return checks


def branch_of(version: str) -> int:
    match = re.match(r"\d+", version)
    return int(match.group()) if match else 0
