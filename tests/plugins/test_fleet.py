"""Who does what when a fleet shares weights."""

from __future__ import annotations

from typing import Any

from plugins.filter.fleet import fan_out, unknown_hosts

MODEL = "openai/gpt-oss-120b@abc without"


def look(verified: bool = False, held: int = 0, model: str = MODEL, number: int = 1) -> dict[str, Any]:
    found = {"model": model, "verified": verified, "held_bytes": held, "address": f"10.0.0.{number}", "port": 18631}
    return {"__model_weights_share": found}


def test_the_one_with_the_most_of_it_brings_it() -> None:
    hosts = {"a": look(), "b": look(held=5), "c": look(held=3)}
    plan = fan_out(list(hosts), hosts, "c")
    assert (plan["bringer"], plan["source"], plan["lacking"]) == ("b", "", ["a", "b", "c"])


def test_the_first_one_brings_it_when_all_have_nothing() -> None:
    hosts = {"b": look(), "a": look()}
    assert fan_out(["b", "a"], hosts, "a")["bringer"] == "b"


def test_nobody_brings_what_somebody_has() -> None:
    hosts = {"a": look(), "b": look(verified=True, number=2)}
    plan = fan_out(list(hosts), hosts, "a")
    assert (plan["bringer"], plan["source"], plan["holders"], plan["lead"]) == ("", "b", ["b"], "a")
    assert plan["peers"]["b"] == {"name": "b", "address": "10.0.0.2", "port": 18631}


def test_hosts_with_another_model_have_no_part() -> None:
    hosts = {"a": look(), "b": look(verified=True, model="openai/gpt-oss-20b@def without")}
    plan = fan_out(list(hosts), hosts, "a")
    assert (plan["bringer"], plan["participants"]) == ("a", ["a"])
    assert fan_out(list(hosts), hosts, "b")["holders"] == ["b"]


def test_hosts_outside_the_run_give_it_when_nobody_inside_has_it() -> None:
    asked = [
        {"item": "x", **look(verified=True, number=7)["__model_weights_share"]},
        {"item": "y", "unreachable": True},
        {"item": "z", "failed": True, "msg": "no such directory"},
    ]
    hosts = {"a": {**look(), "__model_weights_elsewhere": {"results": asked}}, "b": look(number=2)}
    plan = fan_out(list(hosts), hosts, "b")
    assert (plan["source"], plan["elsewhere"], plan["bringer"]) == ("x", ["x"], "")
    assert set(plan["peers"]) == {"a", "b", "x"}
    assert plan["unreachable"] == ["y"]


def test_a_host_that_is_lost_has_no_part() -> None:
    hosts = {"a": look(held=9), "b": look()}
    assert fan_out(["b"], hosts, "b")["bringer"] == "b"


def test_a_skipped_look_is_none() -> None:
    assert fan_out(["a"], {"a": {"__model_weights_share": {"skipped": True}}}, "a")["participants"] == []


def test_names_that_the_inventory_lacks() -> None:
    assert unknown_hosts(["a", "q", "p"], ["a", "b"]) == ["p", "q"]
