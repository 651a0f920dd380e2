"""Where there can be no machines, their tests say so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.hosts.machine import REPOSITORY

from .conftest import REQUIRED

OUTCOMES: Mapping[str, tuple[Mapping[str, str], list[str], list[str]]] = {
    "skipped, with one line": ({}, ["skipped"], ["SKIPPED [2] ", "test machines need QEMU"]),
    "failed where they are required": ({REQUIRED: "1"}, ["error"], ["test machines need QEMU", f"({REQUIRED} is set)"]),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_without_qemu_tests_of_machines_are(tmp_path: Path, case: str) -> None:
    more, outcomes, words = OUTCOMES[case]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/machines/test_machine.py"]
    ran = subprocess.run(
        [*command, "-k", "of_its_own or come_and_go"],
        cwd=REPOSITORY,
        env={"PATH": "", "HOME": str(tmp_path), **more},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert [outcome for outcome in ("passed", "skipped", "error") if f" {outcome}" in ran.stdout] == outcomes
    for word in words:
        assert word in ran.stdout
