"""Playbooks run as an operator would run them, with this checkout's configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .machine import REPOSITORY


def run_playbook(
    playbook: Path,
    inventory: Path,
    variables: Mapping[str, object],
    *flags: str,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a playbook to its end, print what it says, and answer it; variables travel in a file, not in argv."""
    tools = Path(sys.executable).parent
    with tempfile.NamedTemporaryFile("w", suffix=".json") as given:
        json.dump(variables, given)
        given.flush()
        done = subprocess.run(
            [
                *(str(tools / "ansible-playbook"), str(playbook), "--inventory", str(inventory)),
                *("--extra-vars", f"@{given.name}", *flags),
            ],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
                "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg"),
                "ANSIBLE_FORCE_COLOR": "0",
                "ANSIBLE_NOCOLOR": "1",
                **(environment or {}),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    print(done.stdout, done.stderr)
    return done
