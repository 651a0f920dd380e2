"""The demo's inventory is one host: that of the role scenarios, beside it, is read only when it is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("inventory", "hosts"), [("", ["demo"]), ("scenario.ini", ["instance"])])
def test_its_hosts(inventory: str, hosts: list[str]) -> None:
    program = Path(sys.executable).parent / "ansible-inventory"
    command: list[str | Path] = [program, "-i", ROOT / "inventories/demo" / inventory, "--graph"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split("|--")[1] for line in listed.splitlines() if "|--" in line and "@" not in line] == hosts
