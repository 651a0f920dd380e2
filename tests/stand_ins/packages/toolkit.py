"""The four packages of the NVIDIA Container Toolkit, in several versions."""

from __future__ import annotations

from collections.abc import Iterator

from .deb import Package
from .driver import LIBRARIES, text

VERSIONS = ("1.17.7", "1.19.1", "1.20.0")

REFRESH_SERVICE = """\
[Unit]
Description=Refresh NVIDIA CDI specification file
ConditionPathExists=|/usr/bin/nvidia-smi
ConditionPathExists=|/usr/sbin/nvidia-smi
ConditionPathExists=/usr/bin/nvidia-ctk

[Service]
Type=oneshot
Environment=NVIDIA_CTK_CDI_OUTPUT_FILE_PATH=/var/run/cdi/nvidia.yaml
EnvironmentFile=-/etc/nvidia-container-toolkit/nvidia-cdi-refresh.env
ExecCondition=/usr/bin/grep -qE '/nvidia.ko' /lib/modules/%v/modules.dep
ExecStart=/usr/bin/nvidia-ctk cdi generate
CapabilityBoundingSet=CAP_SYS_MODULE CAP_SYS_ADMIN CAP_MKNOD

[Install]
WantedBy=multi-user.target
"""
REFRESH_PATH = """\
[Unit]
Description=Trigger CDI refresh on NVIDIA driver install / uninstall events

[Path]
PathChanged=/lib/modules/%v/modules.dep
PathChanged=/lib/modules/%v/modules.dep.bin

[Install]
WantedBy=multi-user.target
"""
BASE_POSTINST = """\
if [ "$1" = configure ]; then
    /usr/bin/nvidia-ctk --quiet config --config-file=/etc/nvidia-container-runtime/config.toml --in-place
    if [ -d /run/systemd/system ] && [ -e /lib/systemd/system/nvidia-cdi-refresh.path ]; then
        systemctl daemon-reload
        for unit in nvidia-cdi-refresh.path nvidia-cdi-refresh.service; do
            systemctl enable --quiet --now $unit || echo "Warning: Failed to enable $unit" >&2
        done
    fi
fi
"""
BASE_PRERM = """\
if [ "$1" = remove ] && [ -e /lib/systemd/system/nvidia-cdi-refresh.path ]; then
    systemctl disable --quiet --now nvidia-cdi-refresh.path nvidia-cdi-refresh.service || true
fi
"""


def packages(versions: tuple[str, ...] = VERSIONS) -> Iterator[Package]:
    for version in versions:
        full = f"{version}-1"
        base_files: dict[str, tuple[str | bytes, int]] = {
            "/usr/bin/nvidia-ctk": (text("nvidia-ctk", VERSION=version), 0o755),
            "/usr/bin/nvidia-container-runtime": (text("nvidia-container-runtime", VERSION=version), 0o755),
        }
        if version >= "1.18":
            base_files["/lib/systemd/system/nvidia-cdi-refresh.service"] = (REFRESH_SERVICE, 0o644)
            base_files["/lib/systemd/system/nvidia-cdi-refresh.path"] = (REFRESH_PATH, 0o644)
        yield Package(
            "libnvidia-container1",
            full,
            files={f"{LIBRARIES}/libnvidia-container.so.{version}": ("stand-in\n", 0o644)},
            links={f"{LIBRARIES}/libnvidia-container.so.1": f"libnvidia-container.so.{version}"},
        )
        yield Package(
            "libnvidia-container-tools",
            full,
            depends=(f"libnvidia-container1 (>= {full})",),
            files={"/usr/bin/nvidia-container-cli": (text("nvidia-container-cli", VERSION=version), 0o755)},
        )
        yield Package(
            "nvidia-container-toolkit-base",
            full,
            depends=("python3",),
            files=base_files,
            scripts={"postinst": BASE_POSTINST, "prerm": BASE_PRERM},
            fields={"Breaks": "nvidia-container-runtime (<= 3.5.0-1)"},
        )
        yield Package(
            "nvidia-container-toolkit",
            full,
            depends=(f"nvidia-container-toolkit-base (= {full})", f"libnvidia-container-tools (>= {full})"),
            files={
                "/usr/bin/nvidia-container-runtime-hook": (
                    text("nvidia-container-runtime-hook", VERSION=version),
                    0o755,
                )
            },
            links={"/usr/bin/nvidia-container-toolkit": "nvidia-container-runtime-hook"},
        )
