"""Where there can be no machines, their tests say so."""

from __future__ import annotations

from pathlib import Path

from tests.left_out import without_tools

from .conftest import REQUIRED

SOME = ("tests/machines/test_machine.py", "of_its_own or come_and_go")


def test_without_qemu_tests_of_machines_are_skipped_with_one_line(tmp_path: Path) -> None:
    outcomes, said = without_tools(*SOME, tmp_path)
    assert outcomes == ["skipped"]
    assert "SKIPPED [2] " in said
    assert "test machines need QEMU" in said


def test_where_machines_are_required_they_fail(tmp_path: Path) -> None:
    outcomes, said = without_tools(*SOME, tmp_path, **{REQUIRED: "1"})
    assert outcomes == ["error"]
    assert "test machines need QEMU" in said
    assert f"({REQUIRED} is set)" in said
