"""What the role inference_server installs for the read-ahead: its real files, with systemd's own check of the units."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="units are checked by systemd-analyze")

PLAY = """
- hosts: localhost
  connection: local
  gather_facts: false
  roles: [inference_server]
"""
# The role puts its files in place while it runs the plan, for which it needs Docker; here they are put in place alone.
TASKS = """
- file_set:
    files: "{{ __inference_server_common_files }}"
"""


def settings(directory: Path) -> dict[str, object]:
    return {
        "inference_server_configuration_directory": f"{directory}/etc",
        "inference_server_cache_directory": "/var/lib/gpt-oss",
        "__inference_server_library": f"{directory}/lib",
        "__inference_server_units": f"{directory}/units",
        "__inference_server_survey": {"os": {"repository": "debian12"}, "docker": {"installed": True}},
        "__inference_server_made": {"files": []},
        "__inference_server_stop_timeout": 180,
    }


def install(directory: Path, **inputs: object) -> dict[str, str]:
    """Put the role's files in place; their content, by file name."""
    role = directory / "roles/inference_server"
    if not role.exists():
        for needed in (directory / "units", role / "tasks"):
            needed.mkdir(parents=True)
        for part in ("defaults", "vars", "templates", "files"):
            (role / part).symlink_to(ROOT / "roles/inference_server" / part)
        (directory / "plugins").symlink_to(ROOT / "plugins")
        (role / "tasks/main.yml").write_text(TASKS)
    play, given = directory / "play.yml", directory / "inputs.json"
    play.write_text(PLAY)
    given.write_text(json.dumps({**settings(directory), **inputs}))
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "localhost,", f"-e@{given}", str(play)]
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_ROLES_PATH": str(directory / "roles"),
        "ANSIBLE_NOCOLOR": "1",
    }
    done = subprocess.run(
        [*command, f"-eansible_python_interpreter={sys.executable}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    places = (directory / "units", directory / "lib")
    return {path.name: path.read_text() for place in places for path in place.iterdir()}


def option(unit: str, name: str) -> list[str]:
    """Every word that a unit gives an option."""
    lines = unit.replace("\\\n", " ").splitlines()
    return [word for line in lines if line.startswith(f"{name}=") for word in line.split("=", 1)[1].split()]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(
        tmp_path_factory.mktemp("installed"),
        inference_server_read_ahead_threads=4,
        inference_server_read_ahead_margin_bytes=1234,
    )


def test_every_start_of_an_engine_asks_for_it_and_none_waits_for_it(installed: dict[str, str]) -> None:
    engine = installed["gpt-oss@.service"]
    assert "gpt-oss-read-ahead.service" in option(engine, "Wants")
    for needs in ("Requires", "BindsTo", "After", "PartOf"):
        assert "gpt-oss-read-ahead.service" not in option(engine, needs), needs


def test_it_waits_for_the_cache_and_for_nothing_else(installed: dict[str, str]) -> None:
    unit = installed["gpt-oss-read-ahead.service"]
    assert option(unit, "RequiresMountsFor") == ["/var/lib/gpt-oss"]
    assert not option(unit, "After")
    assert not option(unit, "Before")
    assert option(unit, "Type") == ["exec"], "a start of it by hand returns at once"
    assert option(unit, "IOSchedulingClass") == ["idle"]


def test_it_runs_the_program_with_the_inputs(installed: dict[str, str]) -> None:
    words = option(installed["gpt-oss-read-ahead.service"], "ExecStart")
    assert words[1].endswith("/lib/read_ahead.py")
    assert words[words.index("--threads") + 1] == "4"
    assert words[words.index("--margin-bytes") + 1] == "1234"
    program = (ROOT / "plugins/module_utils/gpt_oss/read_ahead.py").read_text()
    assert installed["read_ahead.py"] == program


def test_switched_off_its_unit_goes_and_the_engines_unit_stays_the_same(
    installed: dict[str, str], tmp_path: Path
) -> None:
    before = install(tmp_path)
    assert "gpt-oss-read-ahead.service" in before
    after = install(tmp_path, inference_server_read_ahead=False)
    assert "gpt-oss-read-ahead.service" not in after
    assert after["gpt-oss@.service"] == before["gpt-oss@.service"], "no server is restarted for it"
