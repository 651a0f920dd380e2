"""Driver, fabric daemons and CUDA toolkit as the CUDA repository for Debian 12 has them.

Several branches are there, the newest wins unless it is pinned: as upstream. What hangs together depends on exactly its
own version, so that a version asked for one package alone ends in apt's "held broken packages".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .deb import Package

FILES = Path(__file__).with_name("files")
LIBRARIES = "/usr/lib/x86_64-linux-gnu"

# Branch -> versions; 580 has two, so that an upgrade within the branch can be tried.
BRANCHES = {
    "570": ("570.195.03",),
    "580": ("580.159.04", "580.178.04"),
    "595": ("595.71.05",),
}
OPEN_LICENSE = "Dual MIT/GPL"

PERSISTENCED_UNIT = """\
[Unit]
Description=NVIDIA Persistence Daemon
Wants=syslog.target

[Service]
Type=forking
ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --verbose
ExecStopPost=/bin/rm -rf /var/run/nvidia-persistenced

[Install]
WantedBy=multi-user.target
"""
FABRIC_MANAGER_UNIT = """\
[Unit]
Description=NVIDIA fabric manager service
Wants=network-online.target
After=network-online.target

[Service]
User=root
PrivateTmp=false
Type=forking
TimeoutStartSec=720
Environment=FM_CONFIG_FILE=/usr/share/nvidia/nvswitch/fabricmanager.cfg
Environment=FM_PID_FILE=/var/run/nvidia-fabricmanager/nv-fabricmanager.pid
Environment=NVLSM_CONFIG_FILE=/usr/share/nvidia/nvlsm/nvlsm.conf
Environment=NVLSM_PID_FILE=/var/run/nvidia-fabricmanager/nvlsm.pid
PIDFile=/var/run/nvidia-fabricmanager/nv-fabricmanager.pid
ExecStartPre=/usr/bin/nvidia-fabricmanager-start.sh --mode precheck
ExecStart=/usr/bin/nvidia-fabricmanager-start.sh --mode start --fm-config-file $FM_CONFIG_FILE \
--fm-pid-file $FM_PID_FILE --nvlsm-config-file $NVLSM_CONFIG_FILE --nvlsm-pid-file $NVLSM_PID_FILE
LimitCORE=infinity

[Install]
WantedBy=multi-user.target
"""
IMEX_UNIT = """\
[Unit]
Description=NVIDIA IMEX service
Wants=network-online.target
After=network-online.target

[Service]
User=root
PrivateTmp=false
Type=forking
PIDFile=/var/run/nvidia-imex.pid
ExecStart=/usr/bin/nvidia-imex -c /etc/nvidia-imex/config.cfg
LimitCORE=infinity

[Install]
WantedBy=multi-user.target
"""
KEYRING_PIN = """\
Package: nsight-compute
Pin: origin *ubuntu.com*
Pin-Priority: -1

Package: nsight-systems
Pin: origin *ubuntu.com*
Pin-Priority: -1

Package: *
Pin: release l=NVIDIA CUDA
Pin-Priority: 600
"""
# What a pinning package pins.
PINNED = (
    "cuda-drivers* firmware-nvidia-gsp libcuda1 libcudadebugger1 libnvcuvid1 libnvidia-* libnvsdm* nvidia-driver* "
    "nvidia-fabricmanager* nvidia-imex* nvidia-kernel-* nvidia-modprobe nvidia-open* nvidia-persistenced "
    "nvidia-settings nvidia-smi nvidia-xconfig xserver-xorg-video-nvidia"
)


def text(name: str, **values: str) -> str:
    content = (FILES / name).read_text(encoding="utf-8")
    for key, value in values.items():
        content = content.replace(f"@{key}@", value)
    return content


def _library(name: str, version: str) -> tuple[dict[str, tuple[str, int]], dict[str, str]]:
    real = f"{LIBRARIES}/lib{name}.so.{version}"
    links = {f"{LIBRARIES}/lib{name}.so.1": f"lib{name}.so.{version}"}
    return {real: (f"stand-in for lib{name} {version}\n", 0o644)}, links


def _enabled_at_install(unit: str) -> dict[str, str]:
    """What debhelper writes for a unit that starts with its package."""
    return {
        "postinst": (
            f'if [ "$1" = configure ] && [ -d /run/systemd/system ]; then\n'
            f"    systemctl daemon-reload\n    systemctl enable --quiet {unit}\n"
            f"    systemctl restart {unit} || true\nfi\n"
        ),
        "prerm": f'if [ "$1" = remove ] && [ -d /run/systemd/system ]; then systemctl stop {unit}; fi\n',
        "postrm": (
            f'if [ "$1" = purge ]; then systemctl disable --quiet {unit} || true; fi\n'
            "[ ! -d /run/systemd/system ] || systemctl daemon-reload\n"
        ),
    }


def _kernel_module(name: str, version: str, full: str, license_name: str, other: str) -> Package:
    return Package(
        name,
        full,
        depends=("dkms (>= 3.0.3)", f"nvidia-kernel-support (= {full})", f"firmware-nvidia-gsp (= {full})"),
        description="NVIDIA kernel module, built where it is installed",
        fields={"Conflicts": other, "Provides": f"nvidia-kernel-dkms-any (= {full})"},
        files={
            f"/usr/src/nvidia-{version}/dkms.conf": (f'PACKAGE_NAME="nvidia"\nPACKAGE_VERSION="{version}"\n', 0o644)
        },
        scripts={
            "postinst": text("dkms-postinst", VERSION=version, LICENSE=license_name),
            "prerm": text("dkms-prerm", VERSION=version),
        },
    )


def driver_set(version: str) -> Iterator[Package]:
    """Everything that must be at one version, from one branch."""
    full = f"{version}-1"
    branch = version.split(".", maxsplit=1)[0]
    same = f"(= {full})"
    ml_files, ml_links = _library("nvidia-ml", version)
    cuda_files, cuda_links = _library("cuda", version)
    jit_files, jit_links = _library("nvidia-ptxjitcompiler", version)
    yield Package(
        "firmware-nvidia-gsp", full, files={f"/lib/firmware/nvidia/{version}/gsp_ga10x.bin": ("stand-in\n", 0o644)}
    )
    yield Package("nvidia-kernel-support", full, depends=("nvidia-modprobe",))
    yield _kernel_module("nvidia-kernel-open-dkms", version, full, OPEN_LICENSE, "nvidia-kernel-dkms")
    yield _kernel_module("nvidia-kernel-dkms", version, full, "NVIDIA", "nvidia-kernel-open-dkms")
    yield Package("libnvidia-ml1", full, files=ml_files, links=ml_links)
    yield Package("libcuda1", full, files=cuda_files, links=cuda_links)
    yield Package("libnvidia-ptxjitcompiler1", full, files=jit_files, links=jit_links)
    yield Package(
        "nvidia-modprobe", full, files={"/usr/bin/nvidia-modprobe": ("#!/bin/sh\nexec modprobe nvidia\n", 0o755)}
    )
    yield Package(
        "nvidia-persistenced",
        full,
        files={
            "/usr/bin/nvidia-persistenced": (text("nvidia-persistenced", VERSION=version), 0o755),
            "/lib/systemd/system/nvidia-persistenced.service": (PERSISTENCED_UNIT, 0o644),
        },
        scripts=_enabled_at_install("nvidia-persistenced.service")
        | {
            "preinst": (
                "getent passwd nvidia-persistenced > /dev/null || useradd --system --no-create-home "
                "--home-dir /var/run/nvidia-persistenced --shell /usr/sbin/nologin nvidia-persistenced\n"
            )
        },
    )
    yield Package(
        "nvidia-driver-cuda",
        full,
        depends=(
            *(f"{name} {same}" for name in ("libcuda1", "libnvidia-ml1", "libnvidia-ptxjitcompiler1")),
            f"nvidia-persistenced {same}",
            f"nvidia-kernel-dkms-any {same}",
        ),
        description="NVIDIA driver CUDA integration components",
        files={"/usr/bin/nvidia-smi": (text("nvidia-smi", VERSION=version), 0o755)},
    )
    yield Package("nvidia-driver-libs", full)
    yield Package(
        "nvidia-driver",
        full,
        depends=(f"nvidia-driver-libs {same}", f"nvidia-kernel-dkms-any {same}", f"nvidia-modprobe {same}"),
    )
    open_set = (f"nvidia-driver {same}", f"nvidia-driver-cuda {same}", f"nvidia-kernel-open-dkms {same}")
    closed_set = (f"nvidia-driver {same}", f"nvidia-driver-cuda {same}", f"nvidia-kernel-dkms {same}")
    yield Package(
        "nvidia-open", full, depends=open_set, architecture="all", description="NVIDIA driver, open kernel modules"
    )
    yield Package(
        "cuda-drivers", full, depends=closed_set, architecture="all", description="NVIDIA driver, proprietary modules"
    )
    if int(branch) < 590:
        yield Package(f"nvidia-open-{branch}", full, depends=(f"nvidia-open {same}",), architecture="all")
        yield Package(f"cuda-drivers-{branch}", full, depends=(f"cuda-drivers {same}",), architecture="all")


def fabric_set(version: str) -> Iterator[Package]:
    """Fabric manager, NSCQ, NVSDM and IMEX: with the branch in their names before 580."""
    full = f"{version}-1"
    branch = version.split(".", maxsplit=1)[0]
    suffix = f"-{branch}" if int(branch) < 580 else ""
    nscq_files, nscq_links = _library("nvidia-nscq", version)
    nvsdm_files, nvsdm_links = _library("nvsdm", version)
    yield Package(
        f"nvidia-fabricmanager{suffix}",
        full,
        files={
            "/usr/bin/nv-fabricmanager": (text("nv-fabricmanager", VERSION=version), 0o755),
            "/usr/bin/nvidia-fabricmanager-start.sh": (text("nvidia-fabricmanager-start.sh"), 0o755),
            "/usr/share/nvidia/nvswitch/fabricmanager.cfg": ("LOG_LEVEL=4\nFABRIC_MODE=0\nDAEMONIZE=1\n", 0o644),
            "/lib/systemd/system/nvidia-fabricmanager.service": (FABRIC_MANAGER_UNIT, 0o644),
        },
    )
    yield Package(f"libnvidia-nscq{suffix}", full, files=nscq_files, links=nscq_links)
    yield Package(f"libnvsdm{suffix}", full, files=nvsdm_files, links=nvsdm_links)
    yield Package(
        f"nvidia-imex{suffix}",
        full,
        files={
            "/usr/bin/nvidia-imex": (text("daemon", NAME="nvidia-imex", VERSION=version), 0o755),
            "/usr/bin/nvidia-imex-ctl": (f'#!/bin/sh\necho "Connectivity Table Legend: (stand-in {version})"\n', 0o755),
            "/etc/nvidia-imex/config.cfg": ("LOG_LEVEL=4\nDAEMONIZE=1\n", 0o644),
            "/etc/nvidia-imex/nodes_config.cfg": ("", 0o644),
            "/lib/systemd/system/nvidia-imex.service": (IMEX_UNIT, 0o644),
        },
        conffiles=("/etc/nvidia-imex/config.cfg", "/etc/nvidia-imex/nodes_config.cfg"),
    )


def pinning(name: str, version: str, pattern: str) -> Package:
    path = "/etc/apt/preferences.d/nvidia-driver-pinning"
    return Package(
        name,
        version,
        architecture="all",
        description="Pins the NVIDIA driver set",
        fields={
            "Provides": "nvidia-driver-pinning",
            "Conflicts": "nvidia-driver-pinning",
            "Replaces": "nvidia-driver-pinning",
        },
        files={path: (f"Package: {PINNED}\nPin: version {pattern}\nPin-Priority: 1000\n", 0o644)},
    )


def cuda_toolkit(release: str, version: str, compiler: str) -> Iterator[Package]:
    """cuda-toolkit-12-8 and the packages beside it that bring a driver."""
    dashed = release.replace(".", "-")
    home = f"/usr/local/cuda-{release}"
    major = release.split(".", maxsplit=1)[0]
    yield Package(f"cuda-cudart-{dashed}", f"{version}-1")
    yield Package(f"cuda-libraries-{dashed}", f"{version}-1", depends=(f"cuda-cudart-{dashed}",))
    yield Package(
        f"cuda-nvcc-{dashed}",
        f"{compiler}-1",
        files={f"{home}/bin/nvcc": (text("nvcc", RELEASE=release, VERSION=compiler), 0o755)},
    )
    priority = f"1{release.replace('.', '')}"
    alternatives = (
        'if [ "$1" = configure ]; then\n'
        f"    update-alternatives --install /usr/local/cuda cuda {home} {priority}\n"
        f"    update-alternatives --install /usr/local/cuda-{major} cuda-{major} {home} {priority}\n"
        "fi\n"
    )
    undo = (
        f'if [ "$1" = remove ]; then\n    update-alternatives --remove cuda {home}\n'
        f"    update-alternatives --remove cuda-{major} {home}\nfi\n"
    )
    yield Package(
        f"cuda-toolkit-{dashed}",
        f"{version}-1",
        depends=(f"cuda-nvcc-{dashed} (>= {compiler})", f"cuda-libraries-{dashed} (>= {version})"),
        files={f"{home}/version.json": (f'{{"cuda": {{"name": "CUDA SDK", "version": "{version}"}}}}\n', 0o644)},
        scripts={"postinst": alternatives, "prerm": undo},
    )
    yield Package(
        f"cuda-runtime-{dashed}", f"{version}-1", depends=(f"cuda-libraries-{dashed}", "cuda-drivers (>= 570.124.06)")
    )
    yield Package(f"cuda-demo-suite-{dashed}", f"{version}-1", depends=(f"cuda-runtime-{dashed}",))
    yield Package(
        f"cuda-{dashed}",
        f"{version}-1",
        depends=(
            f"cuda-runtime-{dashed} (>= {version})",
            f"cuda-toolkit-{dashed} (>= {version})",
            f"cuda-demo-suite-{dashed}",
        ),
    )


def keyring(public_key: bytes) -> Package:
    source = (
        "deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] "
        "https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/ /\n"
    )
    source_path = "/etc/apt/sources.list.d/cuda-debian12-x86_64.list"
    pin_path = "/etc/apt/preferences.d/cuda-repository-pin-600"
    return Package(
        "cuda-keyring",
        "1.1-1",
        architecture="all",
        description="GPG keyring for the CUDA repository",
        files={
            "/usr/share/keyrings/cuda-archive-keyring.gpg": (public_key, 0o644),
            source_path: (source, 0o644),
            pin_path: (KEYRING_PIN, 0o644),
        },
        conffiles=(source_path, pin_path),
    )


def packages() -> Iterator[Package]:
    """The CUDA repository's packages, but for the keyring."""
    for branch, versions in BRANCHES.items():
        for version in versions:
            yield from driver_set(version)
            yield from fabric_set(version)
            if int(branch) >= 580:
                yield pinning(f"nvidia-driver-pinning-{version}", f"{version}-1", f"{version}-*")
        if int(branch) >= 580:
            yield pinning(f"nvidia-driver-pinning-{branch}", f"{branch}-1", f"{branch}.*")
    yield Package(
        "nvlsm",
        "2025.06.4-1",
        files={
            "/opt/nvidia/nvlsm/sbin/nvlsm": (text("daemon", NAME="nvlsm", VERSION="2025.06.4"), 0o755),
            "/usr/share/nvidia/nvlsm/nvlsm.conf": ("# NVLink subnet manager\n", 0o644),
        },
        links={"/usr/bin/nvlsm": "/opt/nvidia/nvlsm/sbin/nvlsm"},
    )
    yield from cuda_toolkit("12.8", "12.8.1", "12.8.93")
    yield from cuda_toolkit("13.0", "13.0.2", "13.0.88")
    yield Package("cuda-toolkit", "13.0.2-1", depends=("cuda-toolkit-13-0 (>= 13.0.2)",))
    yield Package("cuda", "13.0.2-1", depends=("cuda-13-0 (>= 13.0.2)",))
