"""The machine beside the hosts that serves what the internet would: packages, weights, container images.

http://10.89.77.2/apt/cuda/…, /apt/libnvidia-container/…   signed apt repositories of stand-in NVIDIA packages
http://10.89.77.2:5000                                      a real container registry
http://10.89.77.2:8100                                      the stand-in hub
"""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from pathlib import Path

from serving_catalog import load_catalog
from simulator.build.machine import ARCHITECTURES, machine
from simulator.build.registry import Registry
from tests.stand_ins import packages

from . import hosts, images
from .machine import (
    CACHE,
    MIRROR_ADDRESS,
    REPOSITORY,
    HostError,
    locked,
    podman,
    require_network,
    require_tools,
    wait_until,
)

NAME = "mirror"
REGISTRY_PORT = 5000
HUB_PORT = 8100

NGINX = """\
server {
    listen 80 default_server;
    root /srv/mirror/current;
    autoindex on;
    default_type application/octet-stream;
}
"""
REGISTRY = f"""\
version: 0.1
storage:
  filesystem:
    rootdirectory: /var/lib/docker-registry
  delete:
    enabled: true
http:
  addr: :{REGISTRY_PORT}
"""
HUB_UNIT = f"""\
[Unit]
Description=Stand-in for the Hugging Face Hub

[Service]
WorkingDirectory=/srv/project
Environment=PYTHONDONTWRITEBYTECODE=1
ExecStart=/usr/bin/python3 -m tests.stand_ins.hub --host 0.0.0.0 --port {HUB_PORT}
Restart=on-failure

[Install]
WantedBy=multi-user.target
"""


def urls() -> dict[str, str]:
    """What answers when the mirror is ready."""
    return {
        "CUDA repository": f"http://{MIRROR_ADDRESS}/apt/cuda/debian12/x86_64/Release",
        "container toolkit repository": f"http://{MIRROR_ADDRESS}/apt/libnvidia-container/stable/deb/amd64/Release",
        "registry": f"http://{MIRROR_ADDRESS}:{REGISTRY_PORT}/v2/",
        "hub": f"http://{MIRROR_ADDRESS}:{HUB_PORT}/api/models/openai/gpt-oss-120b",
    }


def _answers(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def publish_packages() -> Path:
    """Build the apt repositories where their recipes changed, and let what nginx serves be the newest."""
    served = CACHE.parent / "packages"
    with locked("packages"):
        newest = packages.build(served)
        link = served / "current.new"
        link.unlink(missing_ok=True)
        link.symlink_to(newest.name)
        link.rename(served / "current")
    return served


def _restart_changed_hub(container: str) -> None:
    """The hub reads its code when it starts; the mirror stays up over changes of it."""
    digest = hashlib.sha256()
    for path in sorted((REPOSITORY / "tests/stand_ins/hub").glob("*.py")):
        digest.update(path.read_bytes())
    script = 'test "$(cat /run/hub.key 2>/dev/null)" = "$0" || { systemctl restart hub; echo "$0" > /run/hub.key; }'
    podman("exec", container, "sh", "-c", script, digest.hexdigest())


def up() -> str:
    """Start the mirror, or answer the one that runs; returns its address when everything on it answers."""
    require_tools()
    served = publish_packages()
    container = hosts.PREFIX + NAME
    with locked("mirror"):
        if not hosts.exists(container):
            tag = images.build("mirror")["mirror"]
            require_network()
            files = {
                "/usr/lib/test-host/init": hosts.INIT.read_bytes(),
                "/etc/nginx/sites-enabled/default": NGINX.encode(),
                "/etc/docker/registry/config.yml": REGISTRY.encode(),
                "/etc/systemd/system/getty@.service": b"",
                "/etc/systemd/system/ssh.service": b"",  # nobody logs in here, and it has no host keys
                "/etc/systemd/system/hub.service": HUB_UNIT.encode(),
                "/etc/systemd/system/multi-user.target.wants/hub.service": HUB_UNIT.encode(),
            }
            hosts.create(
                NAME,
                image=tag,
                address=MIRROR_ADDRESS,
                files=files,
                modes={"/usr/lib/test-host/init": 0o755},
                volumes=[
                    f"{served}:/srv/mirror:ro",
                    f"{REPOSITORY / 'tests'}:/srv/project/tests:ro",
                    f"{container}-registry:/var/lib/docker-registry",
                ],
            )
        podman("start", container)
        wait_until("the mirror to boot", lambda: hosts.booted(container), seconds=60)
        _restart_changed_hub(container)
    for what, url in urls().items():
        try:
            wait_until(f"the mirror's {what} at {url}", lambda url=url: _answers(url), seconds=60)  # type: ignore[misc]
        except HostError as error:
            raise HostError(f"{error}\n{hosts.journal(container)}") from None
    # Preflight asks for the engine's image; who serves pushes one with something in it.
    registry = Registry(f"http://{MIRROR_ADDRESS}:{REGISTRY_PORT}")
    for engine in load_catalog().engines.values():
        for release in engine.releases.values():
            registry.name(release.image, ARCHITECTURES[machine()])
    return MIRROR_ADDRESS
