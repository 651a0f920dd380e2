"""Every role's molecule scenario on a systemd host of its own, and the proof that its verify can fail.

The scenario's order is in .config/molecule/config.yml: a first run in check mode, the run, a second run that changes
nothing, verify. Then break.yml undoes the role's result by hand, and verify has to notice.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import hosts
from tests.hosts.machine import REPOSITORY, locked

ROLES = sorted(path.parents[2].name for path in REPOSITORY.glob("roles/*/molecule/default/molecule.yml"))

pytestmark = pytest.mark.hosts


def test_every_role_has_a_scenario() -> None:
    assert sorted(path.name for path in (REPOSITORY / "roles").iterdir() if path.is_dir()) == ROLES


def _molecule(role: str, state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """One molecule command in a role, with this interpreter's own tools first on PATH."""
    tools = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "NO_COLOR": "1",
        "MOLECULE_EPHEMERAL_DIRECTORY": str(state),
        "MOLECULE_COMMAND_BORDERS": "false",
        "ANSIBLE_FORCE_COLOR": "0",
    }
    environment.pop("VIRTUAL_ENV", None)
    done = subprocess.run(
        [str(tools / "molecule"), *words],
        cwd=REPOSITORY / "roles" / role,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(f"$ molecule {' '.join(words)}\n{done.stdout}")
    return done


@pytest.mark.parametrize("role", ROLES)
def test_role(role: str, shown_hosts: list[str], tmp_path: Path) -> None:
    host = role.replace("_", "-")
    shown_hosts.append(host)
    scenario = REPOSITORY / "roles" / role / "molecule" / "default"
    assert (scenario / "break.yml").is_file(), (
        f"{role}: molecule/default/break.yml undoes the role's result; it is missing"
    )
    with locked(f"role-{role}"):  # its host is named after it
        # A scenario that was aborted has left its host, and its state, for which molecule would leave out `create`.
        hosts.down(host)
        _run_scenario(role, tmp_path)


def _run_scenario(role: str, state: Path) -> None:
    done = _molecule(role, state, "test", "--destroy=never")
    assert done.returncode == 0, "the scenario failed; its output is above"
    broken = _molecule(role, state, "side-effect")
    assert broken.returncode == 0, "break.yml failed; its output is above"
    noticed = _molecule(role, state, "verify")
    assert noticed.returncode != 0, "verify passed although break.yml had undone the role's result"
    assert "UNREACHABLE!" not in noticed.stdout
    assert "failed=1" in noticed.stdout, "verify ended, but not with a check that failed"
    assert _molecule(role, state, "destroy").returncode == 0
