"""The number that a run prints is the number of times it went to the host."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.hosts import hosts
from tests.plugins.conftest import ROOT

PLAYBOOK = """
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.ping:
    - ansible.builtin.ping:
      loop: [1, 2, 3]
    - file_set:
        files: [{path: /tmp/round-trips, content: x}]
    - ansible.builtin.copy: {content: more than one trip, dest: /tmp/round-trips, mode: "0644"}
    - ansible.builtin.command: "false"
      register: result
      retries: 2
      delay: 0
      until: result is succeeded
      ignore_errors: true
    - ansible.builtin.assert: {that: true}
    - ansible.builtin.ping:
      delegate_to: localhost
      vars: {ansible_connection: local}
"""


def play(directory: Path, host: dict[str, str], *arguments: str) -> str:
    (directory / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"first": host, "second": host}}}))
    (directory / "play.yml").write_text(PLAYBOOK)
    done = subprocess.run(
        ["ansible-playbook", "-i", "hosts.yml", "play.yml", *arguments],
        cwd=directory,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.hosts
def test_every_command_that_ssh_carries_is_counted_and_nothing_else(plugin_host: hosts.Host, tmp_path: Path) -> None:
    host = {
        "ansible_host": plugin_host.address,
        "ansible_user": plugin_host.user,
        "ansible_ssh_private_key_file": plugin_host.private_key,
        "ansible_ssh_common_args": f"-o UserKnownHostsFile={plugin_host.known_hosts} -o BatchMode=yes",
    }
    output = play(tmp_path, host, "-vvvv")
    carried = output.count("SSH: EXEC")
    counts = dict(re.findall(r"^(first|second|in all) +: (\d+)", output, flags=re.MULTILINE))
    assert int(counts["in all"]) == carried > 16
    assert counts["first"] == counts["second"] == str(carried // 2)


def test_a_run_that_stays_on_the_controller_prints_nothing(tmp_path: Path) -> None:
    assert "ROUND TRIPS" not in play(tmp_path, {"ansible_connection": "local"})
