"""A host that should be serving, judged from the hardware up to the answer.

    diagnose(survey, plan, DiagnosisSettings(...), load_catalog())  ->  every check

The same survey serves preflight; `diagnosis_survey` says what to ask the host for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from serving_catalog.checks import judging
from serving_catalog.checks.causes import likely_cause
from serving_catalog.checks.judging import Plan, at, check, finding, listed, passed, size, unknown
from serving_catalog.checks.models import Check, accept
from serving_catalog.checks.platforms import Survey, detect_platform
from serving_catalog.entries import Bytes, Part
from serving_catalog.loading import Catalog

_DAEMONS = ("docker.service", "nvidia-persistenced.service", "nvidia-fabricmanager.service")


class DiagnosisSettings(Part):
    """Where the server lies on the host, and what it must reach."""

    platform: str | None = None
    cache_directory: str = "/var/lib/gpt-oss"
    unit_prefix: str = "gpt-oss@"
    container_prefix: str = "gpt-oss-"
    address: str = "127.0.0.1"
    keep_free_bytes: Bytes = 2**30
    minimum_output_tokens_per_second: float = Field(default=0, ge=0)
    log_lines: int = Field(default=40, ge=1)
    maximum_restarts: int = Field(default=3, ge=0)
    allow_findings: tuple[str, ...] = ()


def unit_of(process: Mapping[str, Any], settings: DiagnosisSettings) -> str:
    return f"{settings.unit_prefix}{process['name']}.service"


def diagnosis_survey(plan: Plan, settings: DiagnosisSettings) -> dict[str, Any]:
    """The arguments of the one call of host_survey that answers every check."""
    model = plan["model"]
    processes = plan["processes"]
    # A wildcard address is where it listens; it is asked on the loopback.
    address = "127.0.0.1" if settings.address in ("0.0.0.0", "::", "") else settings.address  # noqa: S104 - compared
    units = [unit_of(process, settings) for process in processes]
    return {
        "sections": [
            "os",
            "architecture",
            "kernel",
            "gpus",
            "platform",
            "driver",
            "nvidia_smi",
            "fabric",
            "packages",
            "memory",
            "paths",
            "weights",
            "cache_drives",
            "docker",
            "toolkit",
            "units",
            "logs",
            "endpoints",
        ],
        "paths": [settings.cache_directory],
        "weights": {
            "directory": settings.cache_directory.rstrip("/") + "/weights",
            "repository": model["repository"],
            "revision": model["revision"],
        },
        "container_prefix": settings.container_prefix,
        "probe_containers": True,
        "units": [*_DAEMONS, *units],
        "log_units": units,
        "log_lines": settings.log_lines,
        "endpoints": [
            {
                "name": process["name"],
                "url": f"http://{f'[{address}]' if ':' in address else address}:{process['port']}",
                "health_path": process.get("health_path") or "/health",
            }
            for process in processes
        ],
    }


def diagnose(
    survey: Survey,
    plan: Plan,
    settings: DiagnosisSettings,
    catalog: Catalog,
    probes: Sequence[Check] = (),
    benchmark: Mapping[str, Any] | None = None,
) -> tuple[Check, ...]:
    """Every check. `probes` are answers of the endpoint that were judged elsewhere; `benchmark` is a run's summary."""
    checks = [
        *judging.unreadable(survey),
        judging.gpu_kind(survey, plan, catalog),
        judging.gpu_count(survey, plan, catalog),
        judging.platform(survey, settings.platform, catalog),
        gpus_answer(survey, plan, catalog),
        judging.gpu_memory(survey, plan),
        *judging.gpu_health(survey),
        driver_version(survey, catalog),
        driver_match(survey),
        driver_modules(survey, plan, catalog),
        persistence(survey),
        fabric(survey, plan, settings, catalog),
        fabric_daemons(survey, plan, settings, catalog),
        docker(survey, catalog),
        toolkit(survey, catalog),
        cdi(survey),
        cache_drives(survey),
        weights(survey),
        free_space(survey, settings),
    ]
    for process in plan["processes"]:
        checks += [
            unit(survey, process, settings),
            container(survey, process, settings),
            container_gpus(survey, process, settings),
            endpoint(survey, process),
        ]
    checks += probes
    checks.append(throughput(benchmark, settings))
    return accept(checks, settings.allow_findings)


# --- driver and fabric -------------------------------------------------------------------------------------------


def gpus_answer(survey: Survey, plan: Plan, catalog: Catalog) -> Check:
    """nvidia-smi lists every GPU of the bus, under the exact name."""
    title = "Every GPU answers nvidia-smi"
    names = catalog.gpus[str(plan["gpu"])].names
    expected = f"{plan['gpu_count']} or more, called {' or '.join(names)}"
    smi = survey.get("nvidia_smi") or {}
    if smi.get("error"):
        return finding(
            "gpu.answers",
            title,
            str(smi["error"]),
            expected,
            "Reboot, or install the running version again: docs/runbooks/driver-library-mismatch.md."
            if "mismatch" in str(smi["error"])
            else "See `dmesg | grep NVRM`; docs/runbooks/container-lost-gpus.md for one that was there before.",
        )
    if smi.get("path") is None:
        return finding(
            "gpu.answers",
            title,
            "no nvidia-smi",
            expected,
            "Install the driver: playbooks/prepare.yml --tags nvidia_driver.",
        )
    seen = [gpu["name"] for gpu in smi.get("gpus") or []]
    right = [name for name in seen if name in names]
    bus = {gpu["pci_address"] for gpu in survey.get("gpus") or []}
    lost = sorted(bus - {gpu["pci_address"] for gpu in smi.get("gpus") or []})
    counted = listed(f"{seen.count(name)}x {name}" for name in dict.fromkeys(seen))
    return check(
        "gpu.answers",
        title,
        len(right) >= int(plan["gpu_count"]) and not lost,
        counted + (f"; silent: {listed(lost)}" if lost else ""),
        expected,
        f"{listed(lost)} {'is' if len(lost) == 1 else 'are'} on the bus and does not answer: see `dmesg | grep "
        "-i xid` (79: fell off the bus), "
        "reboot, and have a card that stays silent replaced."
        if lost
        else "Set serving_gpu and serving_gpu_count to what is there.",
    )


def driver_version(survey: Survey, catalog: Catalog) -> Check:
    release = catalog.releases.nvidia_driver
    version = at(survey, "driver.running_version")
    return check(
        "driver.branch",
        "Driver branch runs the engine",
        version is not None and judging.branch_of(str(version)) >= release.minimum_branch,
        f"{version} runs" if version else "no driver runs",
        f"branch {release.minimum_branch} or newer",
        f"Run playbooks/prepare.yml --tags nvidia_driver: it installs {release.version}.",
    )


def driver_match(survey: Survey) -> Check:
    """The kernel module, the one on disk and the library are one version."""
    facts = survey.get("driver") or {}
    versions = {
        "running module": facts.get("running_version"),
        "installed module": facts.get("installed_version"),
        "library": facts.get("library_version"),
    }
    known = {name: version for name, version in versions.items() if version}
    title = "Driver, module on disk and library are one version"
    seen = listed(f"{name} {version}" for name, version in known.items())
    mismatch = "mismatch" in str(at(survey, "nvidia_smi.error") or "")
    if len(known) < 2 and not mismatch:
        return unknown("driver.match", title, seen, "one version")
    return check(
        "driver.match",
        title,
        len(set(known.values())) == 1 and not mismatch,
        seen,
        "one version",
        "A package manager moved one of them. Reboot, so that the installed module runs, or run playbooks/prepare.yml "
        "--tags nvidia_driver,nvidia_fabric: docs/runbooks/driver-library-mismatch.md.",
    )


def driver_modules(survey: Survey, plan: Plan, catalog: Catalog) -> Check:
    gpu = catalog.gpus[str(plan["gpu"])]
    is_open = at(survey, "driver.running_open")
    expected = "open" if gpu.open_modules == "required" else "open or proprietary"
    if is_open is None:
        return unknown("driver.modules", "Kernel modules drive the GPU", "no driver runs", expected)
    return check(
        "driver.modules",
        "Kernel modules drive the GPU",
        is_open or gpu.open_modules != "required",
        "open" if is_open else "proprietary",
        expected,
        "Run playbooks/prepare.yml --tags nvidia_driver with nvidia_driver_kernel_modules: open.",
    )


def persistence(survey: Survey) -> Check:
    title = "Driver state persists"
    gpus = at(survey, "nvidia_smi.gpus") or []
    daemon = (
        at(survey, "fabric.daemons.nvidia-persistenced")
        or (at(survey, "units") or {}).get("nvidia-persistenced.service", {}).get("active_state") == "active"
    )
    if not gpus:
        return unknown("driver.persistence", title, "no GPU answers", "the persistence daemon, or mode Enabled")
    off = [gpu["index"] for gpu in gpus if gpu.get("persistence_mode") != "Enabled"]
    return check(
        "driver.persistence",
        title,
        bool(daemon) or not off,
        "the daemon runs"
        if daemon
        else f"no daemon; mode off on GPU {listed(off)}"
        if off
        else "mode Enabled on every GPU",
        "the persistence daemon, or mode Enabled",
        "Run `systemctl enable --now nvidia-persistenced`: without it the driver forgets its state whenever "
        "nothing uses it, "
        "and every start costs seconds.",
    )


def _platform_of(survey: Survey, settings: DiagnosisSettings, catalog: Catalog) -> str | None:
    declared = None if settings.platform in (None, "", "auto") else settings.platform
    return declared or detect_platform(survey, catalog).platform


def fabric(survey: Survey, plan: Plan, settings: DiagnosisSettings, catalog: Catalog) -> Check:
    """Every GPU says of the fabric what its platform's table wants."""
    title = "NVLink fabric is ready"
    states = [str(state) for state in at(survey, "fabric.states") or []]
    platform = _platform_of(survey, settings, catalog)
    # A machine of no known platform has no switches of its own; a hypervisor may run them.
    allowed = (
        catalog.platforms[platform].fabric_states if platform is not None else ("Completed", "Not Supported", "N/A")
    )
    expected = f"{' or '.join(allowed)} on every GPU" + (f" ({platform})" if platform else "")
    if not states:
        return unknown("fabric.state", title, "no GPU answers", expected)
    wrong = [state for state in states if state not in allowed]
    return check(
        "fabric.state",
        title,
        not wrong,
        listed(f"{states.count(state)}x {state}" for state in dict.fromkeys(states)),
        expected,
        "CUDA fails with error 802 until it is. Look at `systemctl status nvidia-fabricmanager` and its journal, "
        "that its version "
        "is the driver's, and on NVLink 5 that ib_umad is loaded: docs/runbooks/fabric-not-completed.md.",
    )


def fabric_daemons(survey: Survey, plan: Plan, settings: DiagnosisSettings, catalog: Catalog) -> Check:
    """The fabric manager is there where the platform needs it, at the driver's version to the last digit."""
    title = "Fabric manager is the driver's"
    platform = _platform_of(survey, settings, catalog)
    needed = platform is not None and catalog.platforms[platform].fabric_manager
    version = at(survey, "fabric.fabric_manager_version")
    driver = at(survey, "driver.running_version")
    if not needed:
        return unknown("fabric.manager", title, f"not needed on {platform or 'this machine'}", "nothing")
    found = judging.numbers(str(version)) if version else ()
    wrong = [
        *(["not installed"] if not version else []),
        *([f"version {version}"] if version and driver and found[:3] != judging.numbers(str(driver))[:3] else []),
        *(["not running"] if not at(survey, "fabric.daemons.nv-fabricmanager") else []),
        *(
            ["nvlsm not installed"]
            if platform and catalog.platforms[platform].nvlsm and not at(survey, "fabric.nvlsm_version")
            else []
        ),
        *(
            ["ib_umad not loaded"]
            if platform and catalog.platforms[platform].nvlsm and not at(survey, "fabric.ib_umad_loaded")
            else []
        ),
    ]
    return check(
        "fabric.manager",
        title,
        not wrong,
        listed(wrong, f"{version} runs"),
        f"version {driver}, running"
        + (", with nvlsm and ib_umad" if platform and catalog.platforms[platform].nvlsm else ""),
        "Run playbooks/prepare.yml --tags nvidia_driver,nvidia_fabric: docs/runbooks/fabric-not-completed.md.",
    )


# --- containers --------------------------------------------------------------------------------------------------


def docker(survey: Survey, catalog: Catalog) -> Check:
    minimum = catalog.releases.docker.minimum
    version = at(survey, "docker.version")
    installed = bool(at(survey, "docker.installed"))
    absent = at(survey, "docker.error") or ("not running" if installed else "not installed")
    look = "Look at `journalctl --unit docker`, then run" if installed else "Run"
    return check(
        "docker.version",
        "Docker runs",
        version is not None and judging.numbers(str(version)) >= judging.numbers(minimum),
        f"{version} runs" if version else str(absent),
        f"{minimum} or newer, running",
        f"{look} playbooks/prepare.yml --tags docker_engine.",
    )


def toolkit(survey: Survey, catalog: Catalog) -> Check:
    release = catalog.releases.nvidia_container_toolkit
    packages = survey.get("packages") or {}
    versions = {name: packages.get(name) for name in release.packages}
    present = {name: version for name, version in versions.items() if version}
    mixed = len(set(present.values())) > 1
    avoided = sorted(set(present.values()) & set(release.avoid))
    tool = at(survey, "toolkit.version")
    return check(
        "toolkit.version",
        "Container toolkit is complete",
        tool is not None and not mixed and not avoided,
        listed(f"{name} {version}" for name, version in present.items())
        if mixed
        else f"nvidia-ctk {tool or 'is not installed'}",
        f"nvidia-ctk, its packages at one version{f', not {listed(release.avoid)}' if release.avoid else ''}",
        "Run playbooks/prepare.yml --tags nvidia_container_toolkit.",
    )


def cdi(survey: Survey) -> Check:
    """The CDI specification names files of the driver that runs."""
    title = "CDI specification is the running driver's"
    driver = at(survey, "driver.running_version")
    specifications = at(survey, "toolkit.cdi_specifications") or []
    devices = at(survey, "toolkit.cdi_devices") or []
    expected = f"devices of driver {driver}"
    if not at(survey, "docker.cdi.enabled"):
        return unknown("cdi.specification", title, "Docker has no CDI here; the runtime hook hands out GPUs", expected)
    old = [
        f"{entry['path']} has {listed(entry['driver_versions'])}"
        for entry in specifications
        if driver and entry["driver_versions"] and driver not in entry["driver_versions"]
    ]
    missing = not specifications or not devices
    return check(
        "cdi.specification",
        title,
        not old and not missing,
        listed(old) if old else str(at(survey, "toolkit.cdi_error") or f"{len(devices)} devices"),
        expected,
        "Run `systemctl restart nvidia-cdi-refresh.service` (or `nvidia-ctk cdi generate "
        "--output=/var/run/cdi/nvidia.yaml`) and "
        "restart the server: a specification goes stale with every driver or MIG change.",
    )


def unit(survey: Survey, process: Mapping[str, Any], settings: DiagnosisSettings) -> Check:
    name = unit_of(process, settings)
    facts = (survey.get("units") or {}).get(name) or {}
    title = f"{name} runs"
    expected = f"enabled, active, at most {settings.maximum_restarts} restarts"
    if not facts or facts.get("load_state") == "not-found":
        return finding(f"unit.{name}", title, "no such unit", expected, "Run playbooks/serve.yml.")
    restarts = facts.get("restarts") or 0
    good = (
        facts.get("active_state") == "active"
        and facts.get("unit_file_state") in ("enabled", "enabled-runtime", "static", "generated")
        and restarts <= settings.maximum_restarts
    )
    seen = (
        f"{facts.get('unit_file_state')}, {facts.get('active_state')} ({facts.get('sub_state')}), {restarts} restarts"
    )
    if good:
        return passed(f"unit.{name}", title, seen, expected)
    if facts.get("result") not in (None, "success"):
        seen += f", last result {facts['result']}"
    lines = (survey.get("logs") or {}).get(name) or []
    cause = likely_cause(lines)
    if cause is not None:
        seen += f"; likely cause: {cause[0]}"
    if lines:
        seen += f"; last line: {lines[-1].strip()[:300]}"
    disabled = facts.get("active_state") == "active" and facts.get("unit_file_state") == "disabled"
    remedy = (
        f"`systemctl enable {name}`, or run playbooks/serve.yml."
        if disabled
        else (
            cause[1]
            if cause is not None
            else f"Read `journalctl --unit {name} --lines 200`, then run playbooks/serve.yml."
        )
    )
    return finding(f"unit.{name}", title, seen, expected, remedy)


def _container_of(survey: Survey, process: Mapping[str, Any], settings: DiagnosisSettings) -> Mapping[str, Any] | None:
    wanted = f"{settings.container_prefix}{process['name']}"
    return next((c for c in at(survey, "docker.containers") or [] if c.get("name") == wanted), None)


def container(survey: Survey, process: Mapping[str, Any], settings: DiagnosisSettings) -> Check:
    name = f"{settings.container_prefix}{process['name']}"
    facts = _container_of(survey, process, settings)
    title = f"Container {name} runs the planned image"
    expected = f"{process['image']}, running"
    if facts is None:
        return finding(
            f"container.{name}",
            title,
            "no such container",
            expected,
            "Start its unit; see what unit.* says of why it ended.",
        )
    # The registry of a mirror may stand before it; name and tag, or digest, are the plan's.
    same = _image_name(str(facts.get("image"))) == _image_name(str(process["image"])) or "@sha256:" in str(
        facts.get("image")
    )
    return check(
        f"container.{name}",
        title,
        facts.get("state") == "running" and same,
        f"{facts.get('image')}, {facts.get('state')}"
        + (", out of memory" if facts.get("out_of_memory") else "")
        + (f", {facts['error']}" if facts.get("error") else ""),
        expected,
        "Run playbooks/serve.yml."
        if facts.get("state") == "running"
        else "See the unit's journal (unit.*) for why it ended.",
    )


def _image_name(image: str) -> str:
    return image.rpartition("/")[2]


def container_gpus(survey: Survey, process: Mapping[str, Any], settings: DiagnosisSettings) -> Check:
    """The container sees its GPUs: asked inside, because a daemon-reload takes them away from a running one."""
    name = f"{settings.container_prefix}{process['name']}"
    title = f"Container {name} sees its GPUs"
    facts = _container_of(survey, process, settings)
    wanted = len(process.get("gpus") or ())
    expected = f"{wanted} GPUs"
    if facts is None or facts.get("state") != "running":
        return unknown(f"container_gpus.{name}", title, "it does not run", expected)
    seen = facts.get("gpus_seen")
    if seen is None:
        # An image without nvidia-smi: what it was started with is all that can be known.
        asked = bool(facts.get("gpu_requests")) or facts.get("runtime") == "nvidia"
        return check(
            f"container_gpus.{name}",
            title,
            None if asked else False,
            f"{facts.get('gpu_probe')}; " + ("started with GPUs" if asked else "started without GPUs"),
            expected,
            "Run playbooks/serve.yml: the container was started by something else, without GPUs.",
        )
    return check(
        f"container_gpus.{name}",
        title,
        len(seen) >= wanted,
        f"{len(seen)} GPUs" + ("" if seen else f": {facts.get('gpu_probe')}"),
        expected,
        f"`systemctl restart {unit_of(process, settings)}`: only a new container gets them back. Docker with CDI "
        "keeps it from "
        "coming back: docs/runbooks/container-lost-gpus.md.",
    )


# --- what is served ----------------------------------------------------------------------------------------------


def weights(survey: Survey) -> Check:
    title = "Weights are verified"
    facts = survey.get("weights")
    if facts is None:
        return unknown("weights.verified", title, "not asked", "a verified snapshot")
    problems = facts.get("problems") or []
    good = bool(facts.get("marker_present")) and not problems
    seen = (
        f"{size(facts.get('bytes'))} in {facts.get('snapshot')}"
        if good
        else listed(problems, f"no marker {facts.get('marker')}")
    )
    return check(
        "weights.verified",
        title,
        good,
        seen,
        "a snapshot with its marker, files as they were when they were verified",
        "Run playbooks/weights.yml: it completes, verifies and publishes the snapshot.",
    )


def cache_drives(survey: Survey) -> Check:
    """The drives that the cache was made of are all there, their array is whole, and it is mounted."""
    title = "The cache's drives are whole"
    facts = survey.get("cache_drives")
    if not facts:
        return unknown("cache.drives", title, "the cache is a directory, not made of drives", "every drive, mounted")
    point, drives, arrays = facts["mount_point"], facts["drives"], facts["arrays"]
    gone = [f"{drive['id']} (serial {drive['serial']}) is gone" for drive in drives if not drive["name"]]
    array = arrays[0] if len(arrays) == 1 else None
    striped = facts["level"] != "single"
    broken = [
        *([f"{member} of {array['name']} has failed" for member in array["faulty"]] if array else []),
        *([f"{array['name']} is {array['state']}"] if array and array["state"] in (None, "inactive", "broken") else []),
        *([f"{array['name']} lacks {array['missing']} drives"] if array and array["missing"] and not gone else []),
        *(["the array is not assembled"] if striped and not arrays else []),
        *(["the array is in pieces"] if len(arrays) > 1 else []),
    ]
    unready = [
        *(["it was not finished"] if facts["state"] != "ready" else []),
        *([f"nothing of it is mounted at {point}"] if not facts["mounted"] else []),
    ]
    wrong = [*gone, *broken, *unready]
    remedy = (
        "Rebuild the cache with playbooks/rebuild_cache.yml: docs/runbooks/drive-lost.md."
        if gone or broken
        else "Run playbooks/prepare.yml --tags model_cache: it finishes and mounts the cache."
    )
    mounted = f"mounted at {point}" if facts["mounted"] else "not mounted"
    seen = listed(wrong) + (f"; {mounted}" if gone or broken else "")
    return check(
        "cache.drives",
        title,
        not wrong,
        seen if wrong else f"{len(drives)} drives as {facts['level']}, {mounted}",
        f"{len(drives)} drives as {facts['level']}, mounted at {point}",
        remedy,
    )


def free_space(survey: Survey, settings: DiagnosisSettings) -> Check:
    facts = (survey.get("paths") or {}).get(settings.cache_directory) or {}
    free = facts.get("free_bytes")
    title = f"Space left below {settings.cache_directory}"
    if free is None:
        return unknown("disk.free", title, str(facts.get("error") or "not read"), size(settings.keep_free_bytes))
    return check(
        "disk.free",
        title,
        free >= settings.keep_free_bytes,
        f"{size(free)} on {facts.get('mount_point')}",
        f"{size(settings.keep_free_bytes)} or more",
        "docs/runbooks/disk-full.md says what may be deleted.",
    )


def endpoint(survey: Survey, process: Mapping[str, Any]) -> Check:
    """The server is healthy and serves the planned model."""
    facts = (survey.get("endpoints") or {}).get(process["name"]) or {}
    id_ = f"endpoint.{process['name']}"
    title = f"Port {process['port']} serves the model"
    expected = f"health 200, model {process['served_model_id']}"
    if not facts:
        return unknown(id_, title, "not asked", expected)
    if facts.get("error"):
        return finding(
            id_,
            title,
            f"{facts['url']}: {facts['error']}",
            expected,
            "If unit.* runs it is still loading (docs/runbooks/slow-or-stuck-load.md); if it does not, its "
            "journal says why.",
        )
    status, models = facts.get("health_status"), facts.get("models") or []
    good = status == 200 and process["served_model_id"] in models
    return check(
        id_,
        title,
        good,
        f"health {status}, models {listed(models)}",
        expected,
        "Another server or model answers on this port: docs/runbooks/port-in-use.md."
        if status == 200
        else "It loads, or a rank has died and it stays so: docs/runbooks/503-for-ever.md.",
    )


def throughput(benchmark: Mapping[str, Any] | None, settings: DiagnosisSettings) -> Check:
    """A short run came back whole, and fast enough where a floor was given."""
    title = "A short run is answered"
    floor = settings.minimum_output_tokens_per_second
    expected = f"no failed request, {floor:g} output tokens a second or more" if floor else "no failed request"
    if not benchmark:
        return unknown("throughput.run", title, "no run was asked for", expected)
    rate = float(benchmark.get("output_tokens_per_second") or 0)
    errors = int(benchmark.get("failed_requests") or 0)
    requests = int(benchmark.get("requests") or 0)
    ttft = benchmark.get("time_to_first_token_ms")
    return check(
        "throughput.run",
        title,
        errors == 0 and requests > 0 and rate >= floor and rate > 0,
        f"{requests} requests, {errors} failed, {rate:.1f} output tokens a second"
        + (f", first token after {float(ttft):.0f} ms" if ttft is not None else ""),
        expected,
        "Failed requests: the server's journal names them. Slow: look for another user of the GPUs (nvidia-smi), "
        "for clocks held "
        "down by power or heat (nvidia-smi -q -d PERFORMANCE), and at the profile's options.",
    )
