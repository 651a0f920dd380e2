"""Filters are read once for a whole run, and not by the process of each task."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

FILTER = """
import os
with open(os.environ["READ_BY"], "a") as file:
    file.write(f"{os.getpid()}\\n")
class FilterModule:
    def filters(self):
        return {"doubled": lambda text: text * 2}
"""
PLAYBOOK = """
- hosts: localhost
  gather_facts: false
  tasks:
    - {ansible.builtin.assert: {that: "'ab' | doubled == 'abab'"}}
    - {ansible.builtin.assert: {that: "'cd' | doubled is search('dc')"}}
    - {ansible.builtin.assert: {that: "'ef' | doubled is match('ef')"}}
"""
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("enabled", "readers"), [("loaded_once", 1), ("round_trips", 3)])
def test_files_of_filters_are_read_by_the_controller_alone(tmp_path: Path, enabled: str, readers: int) -> None:
    (tmp_path / "filters").mkdir()
    (tmp_path / "filters" / "doubled.py").write_text(FILTER)
    (tmp_path / "play.yml").write_text(PLAYBOOK)
    subprocess.run(
        ["ansible-playbook", "-i", "localhost,", "--connection", "local", "play.yml"],
        cwd=tmp_path,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_CALLBACKS_ENABLED": enabled,
            "ANSIBLE_FILTER_PLUGINS": str(tmp_path / "filters"),
            "READ_BY": str(tmp_path / "read_by"),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(set((tmp_path / "read_by").read_text().split())) == readers
