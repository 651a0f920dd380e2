#!/usr/bin/python
"""GPUs in containers: through CDI where Docker can, else through the runtime hook; and the proof that containers "
"see them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: container_gpus
short_description: Give containers the host's GPUs and prove that they see every one
description:
  - Chooses how containers get GPUs. C(cdi) where the running Docker reads CDI specifications, else C(gpus), the
    toolkit's runtime hook behind C(docker run --gpus).
  - With CDI, enables the toolkit's C(nvidia-cdi-refresh) units, or writes a specification where a toolkit has none, and
    renews a specification that is missing GPUs or is of another driver.
  - With the hook, registers the C(nvidia) runtime in the daemon's configuration, and restarts a daemon that started
    before the hook was there; never under a running inference container unless O(maintenance) is set.
  - Proves the result with the toolkit's own listing and with a container that lists the GPUs. A container proof
    that was given since boot for the same driver, toolkit, Docker and image is not repeated.
options:
  access:
    description: V(auto) chooses; the others insist.
    type: str
    choices: [auto, cdi, gpus]
    default: auto
  gpu_count:
    description: GPUs that containers must see. 0 means as many as nvidia-smi shows on the host.
    type: int
    default: 0
  proof_image:
    description: >-
      Image for the proof; C(nvidia-smi) comes from the toolkit. Left out, an image of a few MiB is made on the host
      from its own C library, so that no registry is needed.
    type: str
  proof_record:
    description: Where the last proof is kept; below /run, so that it ends with the boot.
    type: path
    default: /run/gpt-oss/gpu-proof.json
  maintenance:
    description: Whether Docker may be restarted under a running inference container.
    type: bool
    default: false
  configuration:
    description: The daemon's configuration file.
    type: path
    default: /etc/docker/daemon.json
  procfs:
    description: Where the kernel's process information is mounted.
    type: path
    default: /proc
  sysfs:
    description: Where the kernel's device information is mounted.
    type: path
    default: /sys
  socket:
    description: The daemon's socket.
    type: path
    default: /var/run/docker.sock
attributes:
  check_mode:
    support: full
    description: Reports what would change; starts no container. An absent toolkit or Docker is taken as installed.
  diff_mode: {support: full, description: The daemon's configuration.}
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Give containers the GPUs
  container_gpus:
    gpu_count: 4
"""

RETURN = r"""
mode: {description: cdi or gpus., returned: success, type: str}
reason: {description: Why that one., returned: success, type: str}
gpus: {description: GPUs that containers see., returned: when it was looked at, type: int}
proved: {description: now, before (since boot; nothing changed), returned: when it was looked at, type: str}
actions: {description: What was changed., returned: always, type: list, elements: str}
"""

import io
import json
import os
import re
import shutil
import tarfile
from typing import Any
from urllib.parse import quote

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss import docker_host as host
from ansible.module_utils.gpt_oss.docker_service import Daemon
from ansible.module_utils.gpt_oss.files import read_file, write_file
from ansible.module_utils.survey import hardware
from ansible.module_utils.survey.host import Host

SPECIFICATION = "/etc/cdi/nvidia.yaml"
REFRESH = "nvidia-cdi-refresh"
RUNTIME = {"runtimes": {"nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []}}}
OWN_IMAGE = "gpt-oss/gpu-proof"


class Access:
    """How containers get GPUs on this host."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.asked: dict[str, Any] = module.params
        self.docker = host.Docker(self.asked["socket"])
        self.info = self.docker.info()
        self.actions: list[str] = []
        self.diff: list[dict[str, Any]] = []
        self.directories = host.cdi_directories(self.info)
        self.expected = self.asked["gpu_count"] or self._on_the_host()
        self.driver = hardware.driver(Host(self.asked["procfs"], self.asked["sysfs"]))["running_version"]

    def _on_the_host(self) -> int:
        status, output = host.run(["nvidia-smi", "-L"], timeout=120)
        found = len(re.findall(r"^GPU \d+:", output, flags=re.MULTILINE))
        if status != 0 or not found:
            raise host.DockerError(
                f"nvidia-smi -L shows no GPU on the host: {output.strip() or status}. Role nvidia_driver comes first"
            )
        return found

    def mode(self) -> tuple[str, str]:
        version = self.info.get("ServerVersion", "")
        if self.asked["access"] == "gpus":
            return "gpus", "asked for"
        if self.directories:
            return "cdi", f"Docker {version} reads CDI specifications from {', '.join(self.directories)}"
        if self.asked["access"] == "cdi":
            raise host.DockerError(
                f"nvidia_container_toolkit_access: cdi is not possible: Docker {version} does not read CDI "
                "specifications. "
                "Take Docker 28.2 or newer, or 25 with features.cdi in docker_engine_daemon_options; or leave it at "
                "auto"
            )
        return "gpus", f"Docker {version} reads no CDI specifications"

    # -- CDI -------------------------------------------------------------------------------------------------------

    def through_cdi(self) -> None:
        units = [f"{REFRESH}.path", f"{REFRESH}.service"]
        states = {name: host.unit_properties(name, "LoadState", "UnitFileState", "ActiveState") for name in units}
        has_refresh = all(state.get("LoadState") == "loaded" for state in states.values())
        if has_refresh:
            off = [name for name, state in states.items() if state.get("UnitFileState") != "enabled"]
            if off:
                self.do(f"enable {', '.join(off)}", ["systemctl", "enable", *off])
            if states[units[0]].get("ActiveState") != "active":
                self.do(f"start {units[0]}", ["systemctl", "start", units[0]])
        why = self.stale()
        if why and has_refresh:
            self.do(f"renew the CDI specification: {why}", ["systemctl", "restart", units[1]])
        elif why:
            os.makedirs(os.path.dirname(SPECIFICATION), exist_ok=True)
            self.do(f"write {SPECIFICATION}: {why}", ["nvidia-ctk", "cdi", "generate", f"--output={SPECIFICATION}"])
        if not self.module.check_mode:
            why = self.stale()
            if why:
                raise host.DockerError(
                    f"nvidia-ctk cdi list: {why}, although the specification was renewed. See journalctl --unit "
                    f"{REFRESH}.service, and whether nvidia-smi shows every GPU"
                )

    def stale(self) -> str | None:
        """Why the specifications need to be renewed, if they do."""
        listed = host.gpu_indices(host.cdi_devices())
        if not listed:
            return "no GPU is specified"
        if len(listed) != self.expected:
            return f"{len(listed)} GPUs are specified, {self.expected} are expected"
        for path in host.cdi_files(self.directories):
            text = (read_file(path) or b"").decode("utf-8", "replace")
            of = set(re.findall(r"\.so\.(\d{3}\.\d+(?:\.\d+)?)\b", text)) if "nvidia.com/gpu" in text else set()
            if self.driver and of and self.driver not in of:
                return f"{path} is of driver {', '.join(sorted(of))}, {self.driver} runs"
        return None

    # -- hook ------------------------------------------------------------------------------------------------------

    def through_hook(self) -> None:
        hook = shutil.which(host.HOOK)
        if hook is None:
            raise host.DockerError(
                f"{host.HOOK} is not on this host, and this Docker knows no CDI; package nvidia-container-toolkit "
                "brings it"
            )
        daemon = Daemon(self.asked["configuration"], RUNTIME, [hook], self.docker)
        daemon.plan()
        daemon.validate(str(self.info.get("ServerVersion", "0")))
        notice = daemon.refuse_under_load(self.asked["maintenance"])
        if notice:
            self.module.warn(notice)
        if not daemon.changed:
            return
        self.diff = daemon.diff()
        self.actions.append("; ".join(daemon.reasons) or f"write {daemon.path}")
        if not self.module.check_mode:
            daemon.apply()
            self.info = self.docker.info()

    # -- proof -----------------------------------------------------------------------------------------------------

    def listing(self, mode: str) -> None:
        """The toolkit's own account."""
        if mode == "cdi":
            return  # stale() has asked nvidia-ctk cdi list
        status, output = host.run(["nvidia-container-cli", "list"], timeout=120)
        devices = set(re.findall(r"^/dev/nvidia(\d+)$", output, flags=re.MULTILINE))
        if status != 0 or len(devices) != self.expected:
            raise host.DockerError(
                f"nvidia-container-cli list shows {len(devices)} GPUs, {self.expected} are expected. It says: "
                f"{output.strip()[-500:] or status}"
            )

    def fingerprint(self, mode: str, image: str) -> dict[str, Any]:
        """Everything that a proof depends on. Equal since boot means: already proved."""
        unit = host.unit_properties("docker.service", "ExecMainStartTimestampMonotonic")
        boot = read_file("/proc/sys/kernel/random/boot_id") or b""
        specifications = host.cdi_files(self.directories) if mode == "cdi" else []
        return {
            "mode": mode,
            "image": image,
            "gpus": self.expected,
            "docker": self.info.get("ServerVersion"),
            "docker_started": unit.get("ExecMainStartTimestampMonotonic"),
            "boot": boot.decode().strip(),
            "driver": self.driver,
            "toolkit": host.installed_packages("nvidia-container-toolkit*", "libnvidia-container*"),
            "specifications": {path: os.stat(path).st_mtime_ns for path in specifications},
        }

    def prove(self, mode: str) -> str:
        image = self.asked["proof_image"] or own_image_name()
        wanted = self.fingerprint(mode, image)
        if read_file(self.asked["proof_record"]) == _record(wanted):
            return "before"
        if not self.asked["proof_image"]:
            self.make_own_image(image)
        elif self.docker.image(image) is None:
            self.pull(image)
        self.run_proof(mode, image)
        os.makedirs(os.path.dirname(self.asked["proof_record"]), exist_ok=True)
        write_file(self.asked["proof_record"], _record(wanted))
        return "now"

    def run_proof(self, mode: str, image: str) -> None:
        gpus = ["--device", "nvidia.com/gpu=all"] if mode == "cdi" else ["--gpus", "all"]
        # The hook injects nvidia-smi only where the container asks for utilities.
        asks = ["--env", "NVIDIA_DRIVER_CAPABILITIES=utility"]
        command = ["docker", "run", "--rm", "--pull=never", "--network=none", *gpus, *asks, image, "nvidia-smi", "-L"]
        status, output = host.run(command, timeout=300)
        seen = len(re.findall(r"^GPU \d+:", output, flags=re.MULTILINE))
        if status != 0 or seen != self.expected:
            raise host.DockerError(
                f"a container sees {seen} GPUs, {self.expected} are expected. {' '.join(command)} says: "
                f"{output.strip()[-1500:] or status}"
            )

    def pull(self, image: str) -> None:
        asked = f"/images/create?fromImage={quote(image, safe='')}"
        if ":" not in image.rsplit("/", 1)[-1] and "@" not in image:
            asked += "&tag=latest"
        try:
            for _ in host.messages(self.docker.open("POST", asked, timeout=None)):
                pass
        except host.DockerError as error:
            raise host.DockerError(
                f"nvidia_container_toolkit_proof_image: {image} cannot be pulled: {error}. Leave it out to use an "
                "image that "
                "needs no registry"
            ) from None

    def make_own_image(self, image: str) -> None:
        if self.docker.image(image) is not None:
            return
        repository, _, tag = image.partition(":")
        asked = f"/images/create?fromSrc=-&repo={quote(repository, safe='')}&tag={quote(tag, safe='')}"
        for _ in host.messages(self.docker.open("POST", asked, c_library(), {"Content-Type": "application/x-tar"})):
            pass

    # -- common ----------------------------------------------------------------------------------------------------

    def do(self, what: str, command: list[str]) -> None:
        self.actions.append(what)
        if self.module.check_mode:
            return
        status, output = host.run(command, timeout=300)
        if status != 0:
            raise host.DockerError(f"{' '.join(command)}: {output.strip()[-1500:] or status}")


def _record(fingerprint: dict[str, Any]) -> bytes:
    return (json.dumps(fingerprint, indent=2, sort_keys=True) + "\n").encode()


def own_image_name() -> str:
    version = host.installed_packages("libc6").get("libc6", "unknown")
    return f"{OWN_IMAGE}:{re.sub(r'[^A-Za-z0-9_.-]', '_', version)}"


def c_library() -> bytes:
    """A root file system with the host's C library and nothing else: what nvidia-smi needs to run."""
    status, listing = host.run(["dpkg", "-L", "libc6"])
    if status != 0:
        raise host.DockerError(f"dpkg -L libc6: {listing.strip()}")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for directory in (
            "dev",
            "etc",
            "proc",
            "run",
            "sys",
            "tmp",
            "usr",
            "usr/bin",
            "usr/lib",
            "usr/lib64",
            "usr/sbin",
        ):
            entry = tarfile.TarInfo(directory)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name in ("bin", "lib", "lib64", "sbin"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(entry)
        # The toolkit looks at this file to learn where libraries belong.
        tar.addfile(tarfile.TarInfo("etc/debian_version"))
        done: set[str] = set()
        for path in listing.splitlines():
            inside = path.lstrip("/")
            inside = inside if inside.startswith("usr/") else f"usr/{inside}"
            if (
                ".so" in os.path.basename(path)
                and os.path.isfile(path)
                and inside not in done
                and "/gconv/" not in path
            ):
                done.add(inside)
                tar.add(os.path.realpath(path), arcname=inside, recursive=False)
    return packed.getvalue()


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "access": {"type": "str", "choices": ["auto", "cdi", "gpus"], "default": "auto"},
            "gpu_count": {"type": "int", "default": 0},
            "proof_image": {"type": "str"},
            "proof_record": {"type": "path", "default": "/run/gpt-oss/gpu-proof.json"},
            "maintenance": {"type": "bool", "default": False},
            "configuration": {"type": "path", "default": "/etc/docker/daemon.json"},
            "procfs": {"type": "path", "default": "/proc"},
            "sysfs": {"type": "path", "default": "/sys"},
            "socket": {"type": "path", "default": host.SOCKET},
        },
        supports_check_mode=True,
    )
    if module.check_mode and not (shutil.which("nvidia-ctk") and shutil.which("dockerd")):
        module.exit_json(changed=True, actions=["give containers the GPUs"], mode=None, reason="not installed yet")
    try:
        access = Access(module)
        mode, reason = access.mode()
        if mode == "cdi":
            access.through_cdi()
        else:
            access.through_hook()
        result: dict[str, Any] = {"mode": mode, "reason": reason, "actions": access.actions}
        if not module.check_mode:
            access.listing(mode)
            result.update(proved=access.prove(mode), gpus=access.expected)
    except host.DockerError as error:
        module.fail_json(msg=str(error))
    if module._diff and access.diff:
        result["diff"] = access.diff
    module.exit_json(changed=bool(access.actions), **result)


if __name__ == "__main__":
    main()
