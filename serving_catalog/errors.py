"""Errors for the person at the keyboard: the key, its value, what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class CatalogError(Exception):
    """The data files, or an overlay over them, are not a catalog."""


class PlanError(Exception):
    """A request that cannot be planned. `problems` holds one sentence for each thing wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def nearest(word: str, known: Iterable[str]) -> str:
    """A `(did you mean …?)` where something similar is known."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.75)
    return f" (did you mean {close[0]}?)" if close else ""
