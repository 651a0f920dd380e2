"""What the operator knows of the cluster stays right, in whatever order answers and news arrive."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stand_ins.dynamo_operator import names, server


def item(uid: str, version: int, **metadata: Any) -> dict[str, Any]:
    place = {"namespace": "serving", "name": "x", "uid": uid, "resourceVersion": str(version)}
    return {"kind": names.COMPONENT_DEPLOYMENT, "metadata": {**place, **metadata}}


DELETED = "deleted"
CASES: dict[str, tuple[list[Any], str | None]] = {
    "newer-news-wins": ([item("a", 2), item("a", 3)], "3"),
    "an-older-answer-is-ignored": ([item("a", 3), item("a", 2)], "3"),
    "an-answer-after-the-end-brings-nothing-back": ([item("a", 2), (DELETED, item("a", 4)), item("a", 3)], None),
    "a-successor-outlives-its-predecessors-end": ([item("a", 2), item("b", 5), (DELETED, item("a", 4))], "5"),
    "a-successor-comes-after-the-end": ([item("a", 2), (DELETED, item("a", 4)), item("b", 5)], "5"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_copy_is_of_the_newest_object(case: str) -> None:
    arrivals, version = CASES[case]
    watched = server.Watched(names.COMPONENT_DEPLOYMENT, {})
    held = server.Copy(None, watched, lambda *_: None)  # type: ignore[arg-type]  # nothing is asked before it starts
    for arrival in arrivals:
        if isinstance(arrival, tuple):
            held.drop(arrival[1])
        else:
            held.put(arrival)
    found = held.get("serving", "x")
    assert (found["metadata"]["resourceVersion"] if found else None) == version
