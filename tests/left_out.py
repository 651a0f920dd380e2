"""Tests that cannot run here are left out, and all that have the same reason share one line of the summary."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

REPOSITORY = Path(__file__).parents[1]

_REASONS: set[str] = set()


def leave_out(reason: str) -> NoReturn:
    """Skip whatever asks for the fixture that calls this."""
    _REASONS.add(reason)
    pytest.skip(reason)


def in_one_line(report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
    """Forget which test it was that was left out: the summary joins lines that are the same."""
    if report.skipped and call.excinfo and str(call.excinfo.value) in _REASONS:
        report.longrepr = (__file__, None, f"Skipped: {call.excinfo.value}")  # type: ignore[assignment]


def without_tools(file: str, two: str, home: Path, **environment: str) -> tuple[list[str], str]:
    """What two tests of a file come to, and what pytest says of them, on a machine with nothing on PATH."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", two]
    ran = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={"PATH": "", "HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return [outcome for outcome in ("passed", "skipped", "error") if f" {outcome}" in ran.stdout], ran.stdout
