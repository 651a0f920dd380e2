"""Tests that cannot run here are left out, and all that have the same reason share one line of the summary."""

from __future__ import annotations

from typing import NoReturn

import pytest

_REASONS: set[str] = set()


def leave_out(reason: str) -> NoReturn:
    """Skip whatever asks for the fixture that calls this."""
    _REASONS.add(reason)
    pytest.skip(reason)


def in_one_line(report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
    """Forget which test it was that was left out: the summary joins lines that are the same."""
    if report.skipped and call.excinfo and str(call.excinfo.value) in _REASONS:
        report.longrepr = (__file__, None, f"Skipped: {call.excinfo.value}")  # type: ignore[assignment]
