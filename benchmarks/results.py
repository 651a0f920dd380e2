"""How a benchmark ends: its result as JSON, a report, and what it promised and did not keep."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


class BenchmarkError(Exception):
    """Something that cannot be measured; the message says why."""


def finish(
    measure: Callable[[], dict[str, Any]],
    path: Path,
    report: Callable[[dict[str, Any]], None],
    broken: Callable[[dict[str, Any]], Sequence[str]],
    *,
    check: bool,
    errors: tuple[type[Exception], ...] = (),
) -> int:
    """Measure, keep the result at `path` and report it.

    The exit status is 1 where it could not be measured (a `BenchmarkError` or one of `errors`), and with `check` where
    a promise is broken.
    """
    expected: tuple[type[Exception], ...] = (BenchmarkError, *errors)
    try:
        result = measure()
    except expected as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    report(result)
    print(f"  {path.relative_to(REPOSITORY)}")
    promises = broken(result)
    for promise in promises:
        print(f"  BROKEN: {promise}")
    return 1 if promises and check else 0
