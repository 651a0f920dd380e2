"""What can be known of a host before anything is changed, judged all at once.

    preflight(survey, plan, PreflightSettings(...), load_catalog())  ->  every check, findings among them

The survey is what host_survey returned; the plan is a HostPlan as JSON. `plan_survey` says what to ask the host for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from serving_catalog.checks import judging
from serving_catalog.checks.judging import Plan, at, check, finding, listed, passed, size, unknown
from serving_catalog.checks.models import Check, accept
from serving_catalog.checks.platforms import Survey, gpu_key
from serving_catalog.entries import Bytes, Part
from serving_catalog.loading import Catalog
from serving_catalog.plans import image_key

# The distributions that the roles' package tables know. Source: the repositories that exist for them
# (serving_catalog/data/releases.yml, packages.yml).
SYSTEMS = {"debian12": "Debian 12", "ubuntu2204": "Ubuntu 22.04", "ubuntu2404": "Ubuntu 24.04"}

# Files of the roles nvidia_driver, nvidia_container_toolkit, docker_engine: where they lie, holds are the role's own.
OUR_DRIVER = "/etc/apt/apt.conf.d/90nvidia-unattended-upgrades"
OUR_TOOLKIT = "/etc/apt/sources.list.d/libnvidia-container.sources"
OUR_DOCKER = "/etc/apt/sources.list.d/docker.sources"

# Package names that one distribution has and the other has not, of the packages a driver needs.
# Source: packages.debian.org and packages.ubuntu.com; NVIDIA's own repository uses other names than both.
UBUNTU_ONLY = re.compile(
    r"(lib)?nvidia-.*-\d{3}(-server)?(-open)?$|nvidia-.*-server(-open)?$|linux-modules-nvidia-|linux-modules-extra-|"
    r"linux-(image|headers|modules-extra)-(generic|virtual|lowlatency|kvm)|linux-(tools-)?nvidia-|ubuntu-drivers-common$"
)
DEBIAN_ONLY = re.compile(
    r"nvidia-(driver-full|open-kernel-dkms|kernel-open-dkms|kernel-dkms|kernel-support|smi|vulkan-icd)$|firmware-(misc-nonfree|nvidia-gsp)$|"
    r"linux-(image|headers)-(amd64|arm64|cloud-amd64|cloud-arm64)$|nvidia-tesla-"
)

Purpose = Literal["weights", "image", "caches", "other"]
Need = Literal["driver", "container_toolkit", "docker", "weights", "encodings", "image", "other"]


class DirectoryNeed(Part):
    """Bytes that will be written below a directory."""

    path: str
    purpose: Purpose = "other"
    bytes: Bytes = Field(description="In all; what already lies there is taken off.")


class UrlNeed(Part):
    """An address that will be asked. The words host_survey knows, such as {os_repository}, may stand in it."""

    name: str = Field(pattern=r"^[a-z0-9_.-]+$")
    url: str
    needed_for: Need = "other"
    accept: tuple[int, ...] = ()  # statuses that count as an answer beside 200 to 399; 401 for registries
    with_token: bool = False  # the hub's token is sent, so the answer says whether it is good


class PreflightSettings(Part):
    """What the operator chose that the plan does not say."""

    platform: str | None = None
    directories: tuple[DirectoryNeed, ...] = ()
    keep_free_bytes: Bytes = 2**30
    urls: tuple[UrlNeed, ...] = ()
    ports: tuple[int, ...] = ()
    minimum_memory_bytes: Bytes = 0  # the plan's own need, where it is larger
    weights_directory: str = "/var/lib/gpt-oss/weights"
    driver_version: str = ""
    driver_source: Literal["cuda_repo", "distro"] = "cuda_repo"
    driver_modules: Literal["open", "proprietary"] = "open"
    driver_packages: tuple[str, ...] = ()  # further packages the operator asks for by name
    kernel_headers: bool = True
    reboot: Literal["never", "when_needed"] = "when_needed"
    toolkit_version: str = ""
    docker_source: Literal["docker_repo", "distribution", "present"] = "docker_repo"
    image_registry: str = ""  # asked instead of the one in the image's name
    image_archive: str = ""  # loaded instead of asking a registry
    image_archive_on: Literal["controller", "host"] = "controller"
    maximum_skew_seconds: int = Field(default=60, ge=1)
    lock_timeout: float = Field(default=0, ge=0)
    allow_findings: tuple[str, ...] = ()


def plan_survey(plan: Plan, settings: PreflightSettings, caches: Iterable[str] = ()) -> dict[str, Any]:
    """The arguments of the one call of host_survey that answers every check."""
    model = plan["model"]
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
            "apt",
            "memory",
            "paths",
            "weights",
            "ports",
            "clock",
            "urls",
            "docker",
            *([] if _sent(settings) else ["image"]),
        ],
        "paths": sorted({need.path for need in settings.directories}),
        "measure": sorted(set(caches)),
        "weights": {
            "directory": settings.weights_directory,
            "repository": model["repository"],
            "revision": model["revision"],
        },
        "ports": sorted(_ports(plan, settings)),
        "urls": [need.url for need in settings.urls],
        "image": {"name": plan["image"], "registry": settings.image_registry, "archive": settings.image_archive},
    }


def _sent(settings: PreflightSettings) -> bool:
    """Whether the image comes from the controller: what is wrong with it is found there."""
    return bool(settings.image_archive) and settings.image_archive_on == "controller"


def preflight(survey: Survey, plan: Plan, settings: PreflightSettings, catalog: Catalog) -> tuple[Check, ...]:
    """Every check, in the order in which a person would look; findings that are allowed are marked so."""
    checks = [
        *judging.unreadable(survey),
        operating_system(survey),
        *architecture(survey, plan, catalog),
        judging.gpu_kind(survey, plan, catalog),
        judging.gpu_count(survey, plan, catalog),
        judging.platform(survey, settings.platform, catalog),
        judging.gpu_memory(survey, plan),
        *judging.gpu_health(survey),
        driver_branch(settings, catalog),
        driver_modules(survey, plan, settings, catalog),
        driver_source(survey, settings),
        package_names(survey, settings),
        headers(survey, settings, catalog),
        secure_boot(survey, settings),
        nouveau(survey, settings),
        reboot_pending(survey, settings),
        foreign(survey, settings),
        held(survey, settings, catalog),
        unfinished(survey),
        repositories(survey, settings, catalog),
        apt_lock(survey),
        docker(survey, settings, catalog),
        memory(survey, plan, settings),
        *disk(survey, plan, settings),
        *writable(survey, settings),
        *ports(survey, plan, settings),
        clock(survey, settings),
        *urls(survey, plan, settings, catalog),
        image(survey, plan, settings),
    ]
    return accept(checks, settings.allow_findings)


# --- the machine -------------------------------------------------------------------------------------------------


def operating_system(survey: Survey) -> Check:
    seen = at(survey, "os.name") or at(survey, "os.id") or "no /etc/os-release"
    return check(
        "os.supported",
        "Operating system is supported",
        at(survey, "os.repository") in SYSTEMS,
        str(seen),
        " or ".join(SYSTEMS.values()),
        "Install one of the supported systems: NVIDIA's repositories and the package tables are for exactly these.",
    )


def architecture(survey: Survey, plan: Plan, catalog: Catalog) -> list[Check]:
    """The processor fits the GPU, and the image was built for it."""
    machine = at(survey, "architecture.machine")
    gpu = catalog.gpus[str(plan["gpu"])]
    images = plan.get("image_architectures") or ()
    expected = ("x86_64", "aarch64") if gpu.cpu_architecture == "any" else (gpu.cpu_architecture,)
    return [
        check(
            "architecture.supported",
            "Processor fits the GPU",
            machine in expected,
            str(machine),
            " or ".join(expected),
            f"{plan['gpu']} machines have {listed(expected)} processors. Is this the right host, and serving_gpu "
            "the right GPU?",
        ),
        check(
            "architecture.image",
            "Engine image exists for this processor",
            machine in images,
            f"{plan['image']} for {listed(images)}",
            f"an image for {machine}",
            f"Choose a release whose image is built for {machine} (serving_release), or point the catalog at a "
            "mirror's image "
            "that is (serving_catalog_overlay: image and architectures of the release).",
        ),
    ]


def headers(survey: Survey, settings: PreflightSettings, catalog: Catalog) -> Check:
    """DKMS builds the module against the running kernel's headers."""
    title = "Kernel headers for the running kernel"
    release = at(survey, "kernel.release")
    expected = f"headers of {release}, installed or to be had from apt"
    if not settings.kernel_headers or settings.driver_source == "distro":
        return unknown("kernel.headers", title, "not needed with these settings", expected)
    if at(survey, "kernel.headers_installed"):
        return passed("kernel.headers", title, f"installed for {release}", expected)
    if _driver_ready(survey, settings, catalog):
        return passed("kernel.headers", title, "the wanted driver runs already", expected)
    available = at(survey, "kernel.headers_available")
    if available is None:
        return unknown("kernel.headers", title, "not installed; apt has no package lists to tell", expected)
    return check(
        "kernel.headers",
        title,
        available,
        f"not installed; linux-headers-{release} can be installed"
        if available
        else f"no linux-headers-{release} anywhere",
        expected,
        f"The archive has moved past {release}: install the current kernel (`apt-get install "
        f"linux-image-{_flavour(survey)}`) and "
        "reboot into it, or put the headers there and set nvidia_driver_kernel_headers to false.",
    )


def _flavour(survey: Survey) -> str:
    return "generic" if at(survey, "os.id") == "ubuntu" else str(at(survey, "architecture.dpkg"))


def secure_boot(survey: Survey, settings: PreflightSettings) -> Check:
    title = "Secure Boot lets the module load"
    expected = "off, or a signed module"
    state = at(survey, "kernel.secure_boot")
    if state is None:
        return unknown("kernel.secure_boot", title, "the firmware cannot be asked", expected)
    if not state:
        return passed("kernel.secure_boot", title, "off", expected)
    if at(survey, "driver.running_version"):
        return passed("kernel.secure_boot", title, "on, and the NVIDIA module runs: its key is enrolled", expected)
    if settings.driver_source == "distro" and at(survey, "os.id") == "ubuntu":
        return passed("kernel.secure_boot", title, "on; Ubuntu's own modules are signed", expected)
    return finding(
        "kernel.secure_boot",
        title,
        "on",
        expected,
        "Modules that DKMS builds are not signed for this firmware. Either turn Secure Boot off in the firmware, "
        "or enrol a machine "
        "owner key (`mokutil --import`, then confirm on the console at the next boot), or, on Ubuntu, take the "
        "signed modules with "
        "nvidia_driver_source: distro.",
    )


def nouveau(survey: Survey, settings: PreflightSettings) -> Check:
    title = "nouveau does not hold the GPUs"
    expected = "not loaded"
    if not at(survey, "kernel.nouveau_loaded"):
        off = "blacklisted" if at(survey, "kernel.nouveau_blacklisted") else "not loaded"
        return passed("kernel.nouveau", title, off, expected)
    if settings.reboot == "when_needed":
        return passed(
            "kernel.nouveau",
            title,
            "loaded; will be blacklisted, and the host rebooted",
            "not loaded, or a reboot allowed",
        )
    return finding(
        "kernel.nouveau",
        title,
        "loaded, and nvidia_driver_reboot: never",
        expected,
        "Allow the reboot (nvidia_driver_reboot: when_needed), or write `blacklist nouveau` and `options nouveau "
        "modeset=0` to "
        "/etc/modprobe.d/nouveau.conf, run `update-initramfs -u` and reboot.",
    )


def reboot_pending(survey: Survey, settings: PreflightSettings) -> Check:
    """The running module is the installed one, or a reboot is allowed to make it so."""
    title = "Running driver is the installed one"
    running, installed = at(survey, "driver.running_version"), at(survey, "driver.installed_version")
    expected = "the same version, or a reboot allowed"
    if running is None or installed is None:
        return unknown("driver.running", title, "no driver runs" if running is None else f"{running} runs", expected)
    seen = f"running {running}, installed {installed}"
    return check(
        "driver.running",
        title,
        running == installed or settings.reboot == "when_needed",
        seen,
        expected,
        "Reboot the host, or allow it with nvidia_driver_reboot: when_needed.",
    )


# --- what will be installed --------------------------------------------------------------------------------------


def driver_branch(settings: PreflightSettings, catalog: Catalog) -> Check:
    release = catalog.releases.nvidia_driver
    wanted = settings.driver_version or release.version
    return check(
        "driver.branch",
        "Driver branch runs the engine",
        judging.branch_of(wanted) >= release.minimum_branch,
        f"nvidia_driver_version: {wanted}",
        f"branch {release.minimum_branch} or newer",
        f"Set nvidia_driver_version to {release.version}, or leave it out: CUDA 12.8 containers need "
        f"{release.minimum_branch}.",
    )


def driver_modules(survey: Survey, plan: Plan, settings: PreflightSettings, catalog: Catalog) -> Check:
    gpu = catalog.gpus[str(plan["gpu"])]
    kinds = [gpu_key(found, catalog) for found in survey.get("gpus") or []]
    required = gpu.open_modules == "required" or any(
        catalog.gpus[kind].open_modules == "required" for kind in kinds if kind is not None
    )
    return check(
        "driver.modules",
        "Kernel modules drive the GPU",
        settings.driver_modules == "open" or not required,
        f"nvidia_driver_kernel_modules: {settings.driver_modules}",
        "open" if required else "open or proprietary",
        "Set nvidia_driver_kernel_modules to open: the proprietary modules do not drive Blackwell (`No devices "
        "were found`).",
    )


def driver_source(survey: Survey, settings: PreflightSettings) -> Check:
    system = at(survey, "os.id")
    return check(
        "driver.source",
        "Driver source exists for this distribution",
        settings.driver_source == "cuda_repo" or system == "ubuntu",
        f"nvidia_driver_source: {settings.driver_source} on {system}",
        "cuda_repo on Debian; cuda_repo or distro on Ubuntu",
        "Set nvidia_driver_source to cuda_repo: Debian's own packages stop before these GPUs.",
    )


def package_names(survey: Survey, settings: PreflightSettings) -> Check:
    """Names of the other distribution are asked of apt in vain, after half of the work is done."""
    system = at(survey, "os.id")
    foreign_names = UBUNTU_ONLY if system == "debian" else DEBIAN_ONLY
    wrong = [name for name in settings.driver_packages if foreign_names.match(name)]
    other = "Ubuntu" if system == "debian" else "Debian"
    return check(
        "packages.names",
        "Package names are this distribution's",
        not wrong,
        listed(wrong, f"{len(settings.driver_packages)} names, none of them {other}'s"),
        f"names that {system} or NVIDIA's repository has",
        f"{listed(wrong)}: {other}'s names, which {system} does not have. NVIDIA's repository calls the driver "
        "nvidia-open on both.",
    )


def foreign(survey: Survey, settings: PreflightSettings) -> Check:
    """Drivers and container tools that came another way, and would fight with ours."""
    title = "No other NVIDIA or Docker installation"
    packages = survey.get("packages") or {}
    found: list[tuple[str, str]] = []
    for entry in at(survey, "package_state.leftovers") or []:
        found.append((entry["path"], _LEFTOVERS[entry["kind"]].format(path=entry["path"])))
    distribution = at(survey, "package_state.distribution_nvidia") or []
    # Where the role has been, its packages are the ones: NVIDIA's for Debian are made from Debian's.
    ours = OUR_DRIVER in (at(survey, "package_state.upgrade_exclusions") or [])
    if settings.driver_source == "cuda_repo" and distribution and not ours:
        found.append((listed(distribution), f"`apt-get purge {' '.join(distribution)}`"))
    if settings.driver_source == "distro":
        theirs = sorted(name for name in packages if name.startswith("nvidia-driver-pinning-"))
        if theirs:
            found.append((listed(theirs), "remove the driver of NVIDIA's repository first (playbooks/remove.yml)"))
    for name in ("nvidia-docker2", "nvidia-container-runtime", "podman-docker"):
        if name in packages:
            found.append((f"{name} {packages[name]}", f"`apt-get purge {name}`"))
    return check(
        "packages.foreign",
        title,
        not found,
        listed((what for what, _ in found), "nothing"),
        "nothing that was installed another way",
        "; ".join(dict.fromkeys(remedy for _, remedy in found))
        + ". Two drivers on one host replace each other's files.",
    )


_LEFTOVERS = {
    "runfile": "the driver's .run installer left {path}: run `nvidia-uninstall --silent` and reboot",
    "cuda_runfile": "CUDA's .run installer left {path}: run it",
    "snap_docker": "Docker as a snap cannot give containers GPUs: `snap remove docker`",
}


def held(survey: Survey, settings: PreflightSettings, catalog: Catalog) -> Check:
    """Packages somebody put on hold at another version than the wanted one. The roles' own holds are not findings."""
    packages = survey.get("packages") or {}
    releases = catalog.releases
    files = {source["file"] for source in at(survey, "apt.sources") or []}
    files |= set(at(survey, "package_state.upgrade_exclusions") or [])
    docker_packages = releases.docker.packages if settings.docker_source == "docker_repo" else ()
    found = {}
    for name in survey.get("holds") or []:
        if name in releases.nvidia_container_toolkit.packages:
            wanted = settings.toolkit_version or releases.nvidia_container_toolkit.version
            ours = OUR_TOOLKIT
        elif _DRIVER.match(name):
            wanted, ours = settings.driver_version or releases.nvidia_driver.version, OUR_DRIVER
        elif name in docker_packages and name.startswith("docker-ce"):
            wanted, ours = releases.docker.version, OUR_DOCKER
        else:
            continue
        version = str(packages.get(name, "not installed"))
        if ours not in files and judging.numbers(version) != judging.numbers(wanted):
            found[name] = f"{name} {version} (wanted {wanted})"
    return check(
        "packages.held",
        "No package is held at another version",
        not found,
        listed(found.values()),
        "holds only at the versions that will be installed",
        f"Somebody wanted these kept. Ask, then `apt-mark unhold {' '.join(found)}`, or set the versions to theirs.",
    )


_DRIVER = re.compile(r"(lib)?nvidia-(?!container)|libnvsdm|nvlsm$|cuda-drivers|linux-modules-nvidia")


def unfinished(survey: Survey) -> Check:
    """Packages in the middle of something. What the roles install, they finish: a cut run is healed by the next."""
    half = at(survey, "package_state.unfinished") or []
    others = [name for name in half if not _INSTALLED_BY_ROLES.match(name)]
    seen = listed(half, "an interrupted run" if at(survey, "package_state.interrupted") else "nothing unfinished")
    return check(
        "packages.unfinished",
        "dpkg has finished what it began",
        not others,
        f"{seen}; the roles finish it" if half and not others else seen,
        "nothing unfinished",
        "Run `dpkg --configure -a`, then `apt-get --fix-broken install`, and look why it stopped (/var/log/dpkg.log).",
    )


_INSTALLED_BY_ROLES = re.compile(
    r"(lib)?nvidia-|libnvsdm|nvlsm|(lib)?cuda|dkms$|linux-headers-|docker|containerd|infiniband-diags"
)


def repositories(survey: Survey, settings: PreflightSettings, catalog: Catalog) -> Check:
    """Files that earlier guides left in sources.list.d and that stop apt, or bring another distribution's packages."""
    removed = set(catalog.releases.nvidia_container_toolkit.stale_files)
    wanted = at(survey, "os.repository")
    found: list[tuple[str, str]] = []
    for conflict in at(survey, "apt.conflicts") or []:
        files = [file for file in conflict["files"] if file not in removed and not _cuda_list(file)]
        # Ours replaces the ones the roles know; what stays must agree with itself.
        if conflict["conflicting"] and len(files) > 1:
            found.append(
                (f"{conflict['uri']} in {listed(files)} with different Signed-By", f"keep one of {listed(files)}")
            )
    for source in at(survey, "apt.sources") or []:
        match = re.search(r"/compute/cuda/repos/([a-z0-9]+)/", source["uri"] + "/")
        if match and wanted and match.group(1) != wanted and match.group(1) != "wsl-ubuntu":
            found.append((f"{source['uri']} ({source['file']}) is not for {wanted}", f"remove {source['file']}"))
        if "nvidia.github.io/nvidia-docker" in source["uri"] and source["file"] not in removed:
            found.append((f"{source['uri']} ({source['file']}) is a dead repository", f"remove {source['file']}"))
    return check(
        "apt.sources",
        "apt sources do not contradict each other",
        not found,
        listed((what for what, _ in found), "no leftovers that matter"),
        "one file for each repository, and only this distribution's",
        "; ".join(dict.fromkeys(remedy for _, remedy in found)) + ".",
    )


def _cuda_list(path: str) -> bool:
    """The list that the cuda-keyring package writes; role nvidia_driver takes it away."""
    return re.fullmatch(r"/etc/apt/sources\.list\.d/cuda(-[a-z0-9]+-[a-z0-9_]+)?\.list", path) is not None


def apt_lock(survey: Survey) -> Check:
    holders = at(survey, "apt.lock_holders") or []
    pids = sorted({holder["pid"] for holder in holders})
    return check(
        "apt.lock",
        "Nobody else is installing packages",
        not holders,
        listed(f"{holder['lock']} held by {holder['pid']} ({holder['command']})" for holder in holders)
        if holders
        else "free",
        "free",
        f"Wait until it has finished (preflight_apt_lock_timeout, or `tail --pid={pids[0] if pids else 0} -f "
        "/dev/null`), or stop unattended upgrades with `systemctl stop apt-daily.timer apt-daily-upgrade.timer"
        " unattended-upgrades.service`.",
    )


def docker(survey: Survey, settings: PreflightSettings, catalog: Catalog) -> Check:
    """A Docker that stays must be new enough; one that is missing or old is installed, unless that was ruled out."""
    title = "Docker can run GPU containers"
    minimum = catalog.releases.docker.minimum
    version = at(survey, "docker.version")
    expected = f"{minimum} or newer"
    if settings.docker_source != "present":
        if at(survey, "docker.error"):
            return finding(
                "docker.version",
                title,
                str(at(survey, "docker.error")),
                "a Docker that answers, or none",
                "Look at `journalctl --unit docker` and repair or purge it: a daemon that is there and does not "
                "answer is not "
                "replaced.",
            )
        seen = (
            f"{version}, {settings.docker_source} decides" if version else f"to be installed ({settings.docker_source})"
        )
        return passed("docker.version", title, seen, expected)
    if version is None:
        return finding(
            "docker.version",
            title,
            "absent"
            if not at(survey, "docker.installed")
            else str(at(survey, "docker.error") or "installed, not running"),
            expected,
            "Install it, or let the role do so (docker_engine_source: docker_repo), or start it: `systemctl start "
            "docker`.",
        )
    return check(
        "docker.version",
        title,
        judging.numbers(str(version)) >= judging.numbers(minimum),
        str(version),
        expected,
        "Upgrade it, or let the role do so (docker_engine_source: docker_repo).",
    )


# --- room --------------------------------------------------------------------------------------------------------


def memory(survey: Survey, plan: Plan, settings: PreflightSettings) -> Check:
    wanted = max(int(plan.get("host_memory_bytes") or 0), settings.minimum_memory_bytes)
    found = survey.get("memory_bytes")
    if found is None:
        return unknown("memory.size", "Enough memory", "not read", size(wanted))
    return check(
        "memory.size",
        "Enough memory",
        found >= wanted,
        size(found),
        f"{size(wanted)} or more",
        f"{size(wanted - found)} missing: weights pass through memory while they load. Use a larger host, or "
        "fewer processes.",
    )


def disk(survey: Survey, plan: Plan, settings: PreflightSettings) -> list[Check]:
    """Everything that will be written, by file system; what is there already is taken off."""
    needs = []
    for need in settings.directories:
        directory = need.path
        if need.purpose == "image":
            directory = at(survey, "docker.image_directory") or need.path
        needs.append((str(directory), max(0, need.bytes - _there(survey, plan, need)), need.purpose))
    inputs = "model_cache_directory or Docker's data-root"
    return judging.disk_space(survey, needs, settings.keep_free_bytes, inputs)


def _there(survey: Survey, plan: Plan, need: DirectoryNeed) -> int:
    """Bytes of a need that are on the host already."""
    if need.purpose == "weights":
        staged = sum(v for path, v in (survey.get("sizes") or {}).items() if "/staging/" in path)
        return need.bytes if _weights_there(survey) else min(need.bytes, staged)
    if need.purpose == "image":
        return need.bytes if _image_there(survey, plan) else 0
    if need.purpose == "caches":
        kept = tuple(f"/engine_caches/{name}" for name in _cache_names(survey, plan))
        sizes: dict[str, int] = survey.get("sizes") or {}
        return min(need.bytes, sum(v for path, v in sizes.items() if path.endswith(kept)))
    return 0


def _cache_names(survey: Survey, plan: Plan) -> set[str]:
    """Directories of the compile caches of the plan's image: by its name, and by what the host has it as."""
    names = {image_key(plan["image"])}
    recorded = at(survey, "docker.recorded_image")
    if recorded and recorded["name"] == plan["image"]:
        names.add(image_key(recorded["reference"]))
    return names


def _weights_there(survey: Survey) -> bool:
    return bool(at(survey, "weights.marker_present")) and not at(survey, "weights.problems")


def _image_there(survey: Survey, plan: Plan) -> bool:
    return bool(at(survey, "image.there")) or plan["image"] in (at(survey, "docker.images") or [])


def writable(survey: Survey, settings: PreflightSettings) -> list[Check]:
    checks = []
    for path in dict.fromkeys(need.path for need in settings.directories):
        facts = (survey.get("paths") or {}).get(path)
        if facts is None:
            continue
        wrong = (
            f"{facts['existing_parent']} is not a directory"
            if not facts["is_directory"]
            else f"{facts['mount_point']} is mounted read-only"
            if facts["read_only"]
            else ""
        )
        checks.append(
            check(
                f"path.{path}",
                f"{path} can be written",
                not wrong,
                wrong or f"on {facts['type']}",
                "a directory, or a place for one, on a file system that takes writes",
                "Move what is in the way, or remount it writable (a file system that turned read-only has "
                "errors: see dmesg).",
            )
        )
    return checks


def _ports(plan: Plan, settings: PreflightSettings) -> set[int]:
    return {int(process["port"]) for process in plan.get("processes") or ()} | set(settings.ports)


def ports(survey: Survey, plan: Plan, settings: PreflightSettings) -> list[Check]:
    """Each port is free, or taken by the very server that will be replaced."""
    ours = {
        port: container["name"]
        for container in at(survey, "docker.containers") or []
        if container.get("state") == "running"
        for port in container.get("ports") or []
    }
    checks = []
    for port in sorted(_ports(plan, settings)):
        facts = (survey.get("ports") or {}).get(str(port)) or {}
        title = f"Port {port} is free"
        if port in ours:
            checks.append(passed(f"port.{port}", title, f"published by our container {ours[port]}", "free, or our own"))
            continue
        who = facts.get("process") or "an unknown process"
        where = listed(facts.get("addresses") or ())
        unit = f", unit {facts['unit']}" if facts.get("unit") else ""
        checks.append(
            check(
                f"port.{port}",
                title,
                not facts.get("listening"),
                f"{who} (pid {facts.get('pid')}{unit}) listens on {where}" if facts.get("listening") else "free",
                "free, or our own",
                f"Stop {facts.get('unit') or who}, or choose another port with serving_port "
                "(docs/runbooks/port-in-use.md).",
            )
        )
    return checks


# --- around it ---------------------------------------------------------------------------------------------------


def clock(survey: Survey, settings: PreflightSettings) -> Check:
    title = "Clock is right"
    limit = settings.maximum_skew_seconds
    expected = f"within {limit} s"
    skew, against = at(survey, "clock.http_skew_seconds"), "the servers' Date"
    if skew is None:
        skew, against = at(survey, "clock.controller_skew_seconds"), "the controller"
    if skew is None:
        return unknown("clock.skew", title, "nothing to compare with", expected)
    kept = {True: "synchronised", False: "not synchronised", None: "synchronisation unknown"}
    return check(
        "clock.skew",
        title,
        abs(skew) <= limit,
        f"{abs(skew):g} s {'ahead of' if skew >= 0 else 'behind'} {against}, {kept[at(survey, 'clock.synchronised')]}",
        expected,
        "Synchronise it (`timedatectl set-ntp true`, or chrony with your own servers): TLS and apt refuse what "
        "is not valid yet.",
    )


def urls(survey: Survey, plan: Plan, settings: PreflightSettings, catalog: Catalog) -> list[Check]:
    """Every address that will be asked answers. What is on the host already asks nobody."""
    checks = []
    for need in settings.urls:
        answer = (survey.get("urls") or {}).get(need.url)
        id_, title = f"url.{need.name}", f"{need.name.replace('_', ' ')} can be reached"
        address = (answer or {}).get("url", need.url)
        expected = f"an answer from {address}"
        if answer is None:
            checks.append(unknown(id_, title, "not asked", expected))
            continue
        status = answer.get("status")
        good = status is not None and (200 <= status < 400 or status in need.accept)
        through = f" through {answer['proxy']}" if answer.get("proxy") else ""
        seen = (f"status {status}" if status is not None else str(answer.get("error"))) + through
        if not good and _satisfied(need.needed_for, survey, plan, settings, catalog):
            checks.append(unknown(id_, title, f"{seen}; not needed, it is on the host already", expected))
            continue
        checks.append(check(id_, title, good, seen, expected, _url_remedy(need, answer, address, plan)))
    return checks


def image(survey: Survey, plan: Plan, settings: PreflightSettings) -> Check:
    """The image is where it will be taken from, and for this processor. Whether the registry can be reached at all is
    another check's."""
    id_, title = "image.available", "Engine image can be had"
    facts = survey.get("image") or {}
    architecture = at(survey, "architecture.dpkg")
    name = facts.get("name") or plan["image"]
    expected = f"{name} for {architecture}"
    if _image_there(survey, plan):
        return passed(id_, title, "on the host already", expected)
    if settings.image_archive:
        wrong = facts.get("error")
        return check(
            id_,
            title,
            not wrong,
            str(wrong or f"in {settings.image_archive}, as far as it was looked into"),
            expected,
            f"Set inference_server_image_archive to a whole archive of {plan['image']}, and "
            "inference_server_image_archive_on to where it lies (docs/runbooks/air-gap.md).",
        )
    status, there = facts.get("status"), facts.get("architectures")
    if status == 200:
        return check(
            id_,
            title,
            there is None or architecture in there,
            f"{name} for {listed(there or ['a processor that it does not name'])}",
            expected,
            "Mirror the image with all its platforms, or choose a release whose image is built for this processor "
            "(serving_release).",
        )
    if status in (401, 403, 404):
        missing = "the registry has no such image" if status == 404 else "the registry denies it, or has no such image"
        return finding(
            id_,
            title,
            f"{name}: {missing} (status {status})",
            expected,
            "Check serving_release and inference_server_image_registry"
            + ("" if status == 404 else ", inference_server_registry_username and inference_server_registry_password")
            + ", or load an archive (inference_server_image_archive).",
        )
    return unknown(id_, title, facts.get("error") or (f"status {status}" if status else "not asked"), expected)


def _satisfied(need: Need, survey: Survey, plan: Plan, settings: PreflightSettings, catalog: Catalog) -> bool:
    packages = survey.get("packages") or {}
    if need == "driver":
        return _driver_ready(survey, settings, catalog)
    if need == "container_toolkit":
        wanted = settings.toolkit_version or catalog.releases.nvidia_container_toolkit.version
        names = catalog.releases.nvidia_container_toolkit.packages
        return all(judging.numbers(str(packages.get(name, ""))) == judging.numbers(wanted) for name in names)
    if need == "docker":
        found = packages.get("docker-ce")
        return found is not None and judging.numbers(str(found)) == judging.numbers(catalog.releases.docker.version)
    if need in ("weights", "encodings"):
        return _weights_there(survey)
    if need == "image":
        return _image_there(survey, plan)
    return False


def _driver_ready(survey: Survey, settings: PreflightSettings, catalog: Catalog) -> bool:
    wanted = settings.driver_version or catalog.releases.nvidia_driver.version
    running, installed = at(survey, "driver.running_version"), at(survey, "driver.installed_version")
    # A driver that something else provides has no module on this disk.
    return bool(running) and installed in (None, running) and running == wanted


def _url_remedy(need: UrlNeed, answer: Mapping[str, Any], address: str, plan: Plan) -> str:
    general = {
        "driver": "nvidia_driver_repository_url",
        "container_toolkit": "nvidia_container_toolkit_repository_url",
        "docker": "docker_engine_repository_url",
        "weights": "model_weights_endpoint or model_weights_source, or model_weights_url",
        "encodings": "model_weights_encodings_url",
        "image": "inference_server_image_registry or inference_server_image_archive",
        "other": "the address",
    }[need.needed_for]
    status = answer.get("status")
    model = f"{plan['model']['repository']} at {plan['model']['revision']}"
    given = "model_weights_token (or HF_TOKEN where Ansible runs)"
    said = {
        # Without a token the hub says the same of what is missing and of what is private.
        (401, False): f"The hub has no {model}, or shows it only with a token: check the repository, set {given}",
        (403, False): f"The hub shows {model} only with a token: set {given}",
        (401, True): f"The hub refuses the token: it is wrong, expired or revoked. Correct {given}; a model that is "
        "open to everybody needs none",
        (403, True): f"The token may not read {model}: accept the model's terms, or correct {given}",
        (404, True): f"The hub has no {model} that the token may read",
        (404, False): f"The hub has no {model}",
    }
    meant = said.get((int(status or 0), need.with_token)) if need.needed_for == "weights" else None
    if meant is not None:
        return f"{meant}; or use a mirror ({general}, docs/runbooks/air-gap.md). Asked: {address}"
    first = {
        "dns": "Give the host a resolver that knows the name (/etc/resolv.conf)",
        "tls": "Install the certificate authority that signs it (a TLS-inspecting proxy has its own) in "
        "/usr/local/share/ca-certificates and run update-ca-certificates; check the clock",
        "timeout": "Open the way through the firewall, or set the proxy (https_proxy)",
        "refused": "Check the address and that its server runs",
        "proxy": "Have the proxy allow it, or name it in no_proxy",
        "missing": "Mount or copy it there",
    }.get(
        str(answer.get("kind")),
        f"The server answers {answer.get('status')}: check the address and the access to it"
        if answer.get("status") is not None
        else "Open the way to it",
    )
    return f"{first}; or use a mirror ({general}, docs/runbooks/air-gap.md). Asked: {address}"
