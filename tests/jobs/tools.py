"""The packages that Jobs install, kept on this machine: the Jobs' own installer puts them there once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from fcntl import LOCK_EX, flock
from pathlib import Path

from serving_catalog.graphs.jobs import USER
from serving_catalog.graphs.programs import FILES, INSTALL
from simulator.build.machine import key_of

from .pods import image_python

OWN_CACHE = Path(__file__).parents[2] / ".cache" / "jobs"
SHARED_CACHE = Path("/var/cache/gpt-oss-jobs")
# How this machine gets to a package index. In a cluster: job_environment and package_index.
INDEX_VARIABLES = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_")


def index_environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(INDEX_VARIABLES)}


def cache_for(user: int | None) -> Path:
    """The repository's own; another one where its place is closed to the pods' user, as root's home is."""
    OWN_CACHE.mkdir(parents=True, exist_ok=True)
    if user is None or subprocess.run(["test", "-x", OWN_CACHE], user=user, check=False).returncode == 0:
        return OWN_CACHE
    SHARED_CACHE.mkdir(mode=0o755, parents=True, exist_ok=True)
    return SHARED_CACHE


def installed(requirement: str, constraints: str) -> Path:
    """A directory that the installer has filled, as a pod's /tools is after its first container."""
    python, as_user = image_python(USER)
    cache = cache_for(USER if as_user else None)
    said = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout
    package, _, _ = requirement.partition("==")
    wanted = cache / f"{package}-{key_of(requirement, FILES[constraints].read_text(), said)}"
    with (cache / f"{package}.lock").open("w") as lock:
        flock(lock, LOCK_EX)
        if not wanted.is_dir():
            print(f"installing {requirement} for the Jobs' tests", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix=f"{package}.new-", dir=cache) as scratch:
                tools = Path(scratch, "tools")
                command = [str(python), str(FILES[INSTALL]), requirement, f"--target={tools}"]
                command.append(f"--constraints={FILES[constraints]}")
                environment = {**index_environment(), "PATH": os.environ["PATH"], "HOME": scratch}
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
                assert done.returncode == 0, done.stdout + done.stderr
                tools.rename(wanted)
        for old in cache.glob(f"{package}-*"):
            if old != wanted and old.is_dir():
                shutil.rmtree(old)
    return wanted
