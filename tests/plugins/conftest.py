"""Runs the project's own modules as Ansible does on a host, without the cost of a connection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ansible.module_utils
import pytest

from tests.hosts import hosts

ROOT = Path(__file__).resolve().parents[2]

# What the module wrapper does on a host: the parameters are handed over, then the module runs as a program.
WRAPPER = """
import runpy, sys
import ansible.module_utils
from ansible.module_utils import basic
ansible.module_utils.__path__.append(sys.argv[2])
basic._ANSIBLE_ARGS, basic._ANSIBLE_PROFILE = sys.stdin.buffer.read(), "legacy"
module, sys.argv = sys.argv[1], sys.argv[:1]
runpy.run_path(module, run_name="__main__")
"""

# What modules import as ansible.module_utils.gpt_oss, for tests that import it themselves.
ansible.module_utils.__path__.append(str(ROOT / "plugins/module_utils"))

RunModule = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def run_module() -> RunModule:
    """run_module(name, {parameters}, check=False, diff=True, environment={}) -> the module's result."""

    def run(
        name: str,
        parameters: Mapping[str, Any],
        *,
        check: bool = False,
        diff: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        internal = {"_ansible_check_mode": check, "_ansible_diff": diff, "_ansible_module_name": name}
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                WRAPPER,
                str(ROOT / "plugins/modules" / f"{name}.py"),
                str(ROOT / "plugins/module_utils"),
            ],
            input=json.dumps({"ANSIBLE_MODULE_ARGS": {**parameters, **internal}}),
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip().startswith("{"), f"{name} gave no result:\n{done.stdout}\n{done.stderr}"
        result: dict[str, Any] = json.loads(done.stdout)
        assert (done.returncode != 0) == bool(result.get("failed")), done.stderr
        return result

    return run


@pytest.fixture(scope="session")
def plugin_host(worker_id: str) -> Iterator[hosts.Host]:
    """One systemd host for all tests of plugins that need one, in each process that shares them."""
    host = hosts.up(f"plugins-{worker_id}", hardware=None)
    yield host
    hosts.down(host.name)
