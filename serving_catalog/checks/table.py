"""Checks as a table for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from serving_catalog.checks.models import Check

_MARKS = {True: "ok", False: "FAIL", None: "-"}


def table(checks: Iterable[Check], width: int = 120) -> str:
    """One line for a check that is as expected; what was expected and the remedy below one that is not."""
    listed = tuple(checks)
    column = max((len(check.id) for check in listed), default=0)
    column = min(column, max(20, width // 3))
    indent = " " * (6 + column + 2)
    room = max(30, width - len(indent))
    lines = []
    for check in listed:
        mark = "accpt" if check.accepted else _MARKS[check.ok]
        seen = textwrap.wrap(check.seen, room, break_long_words=False, break_on_hyphens=False) or [""]
        lines.append(f"{mark:<5} {check.id:<{column}}  {seen[0]}")
        rest = seen[1:]
        if check.ok is False:
            rest += textwrap.wrap(f"expected: {check.expected}", room, break_long_words=False, break_on_hyphens=False)
            rest += textwrap.wrap(f"remedy: {check.remedy}", room, break_long_words=False, break_on_hyphens=False)
        lines += [indent + line for line in rest]
    return "\n".join(lines)


def summary(checks: Iterable[Check]) -> str:
    """`27 checks: 24 as expected, 2 findings, 1 not applicable`."""
    listed = tuple(checks)
    counts = (
        (sum(check.ok is True for check in listed), "as expected"),
        (sum(check.stops for check in listed), "findings"),
        (sum(check.accepted for check in listed), "accepted"),
        (sum(check.ok is None for check in listed), "not applicable"),
    )
    parts = [f"{count} {what if count != 1 or what != 'findings' else 'finding'}" for count, what in counts if count]
    return f"{len(listed)} checks: {', '.join(parts)}"
