"""How many hosts a playbook takes at a time: serving_serial of an inventory, seen in the order of the hosts' turns.

The playbooks run with no more than their checks, so no host is reached.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from plugins.lookup.serving_serial import agreed
from tests.site.test_bad_input import GOOD, NOWHERE, REPOSITORY, Run, play

TRAYS = [f"tray-{number}" for number in range(1, 6)]


def inventory(directory: Path, groups: dict[str, dict[str, Any]]) -> Path:
    path = directory / "hosts.yml"
    path.write_text(yaml.safe_dump({"all": {"vars": {**GOOD, **NOWHERE}, "children": groups}}, sort_keys=False))
    return path


def group(serial: object, *hosts: str) -> dict[str, Any]:
    return {"hosts": dict.fromkeys(hosts or TRAYS), "vars": {} if serial is None else {"serving_serial": serial}}


def batches(run: Run) -> dict[str, list[list[str]]]:
    """By the play's name the hosts that were taken together, one list for each time that the play was begun."""
    plays = re.split(r"^PLAY \[(.*)\] \**$", run.output.partition("PLAY RECAP")[0], flags=re.M)[1:]
    found: dict[str, list[list[str]]] = {}
    for name, text in zip(plays[::2], plays[1::2], strict=True):
        found.setdefault(name, []).append(sorted(set(re.findall(r"^ok: \[(\S+)\]", text, re.M))))
    found.pop("Refuse an inventory without hosts")
    return found


def checks_only(path: Path, *arguments: str, playbook: str = "prepare.yml") -> Run:
    run = play("-i", path, f"playbooks/{playbook}", "--tags", "always", *arguments)
    assert run.reached() == set()
    return run


@pytest.mark.parametrize(
    ("serial", "arguments", "taken"),
    [
        (2, (), [TRAYS[:2], TRAYS[2:4], TRAYS[4:]]),
        ([1, "100%"], (), [TRAYS[:1], TRAYS[1:]]),
        ("{{ groups['rack'] | length - 2 }}", (), [TRAYS[:3], TRAYS[3:]]),
        (2, ("-e", "serving_serial=80%"), [TRAYS[:4], TRAYS[4:]]),
    ],
    ids=["number", "list", "template", "command line"],
)
def test_hosts_are_taken_as_many_at_a_time_as_the_inventory_says(
    tmp_path: Path, serial: object, arguments: tuple[str, ...], taken: list[list[str]]
) -> None:
    run = checks_only(inventory(tmp_path, {"rack": group(serial)}), *arguments)
    assert run.status == 0, run.output
    assert list(batches(run).values()) == [taken]


def test_only_the_hosts_of_the_run_count(tmp_path: Path) -> None:
    """Groups may differ; a limit leaves out the one whose number is another."""
    path = inventory(tmp_path, {"rack": group(2), "lone": group(1, "gpu-1", "gpu-2"), "new": group(None, "gpu-3")})
    run = checks_only(path, "--limit", "rack,new,!tray-1")
    assert list(batches(run).values()) == [[TRAYS[1:3], TRAYS[3:], ["gpu-3"]]]


def test_every_play_of_a_playbook_obeys(tmp_path: Path) -> None:
    run = checks_only(inventory(tmp_path, {"rack": group(3)}), playbook="serve.yml")
    taken = [TRAYS[:3], TRAYS[3:]]
    assert batches(run) == {"Fill the model cache": taken, "Serve the plan": taken}


def test_every_playbook_obeys_but_the_one_that_changes_nothing() -> None:
    for path in (REPOSITORY / "playbooks").glob("*.yml"):
        for book in yaml.safe_load(path.read_text()):
            if "hosts" in book:
                wanted = None if path.name == "diagnose.yml" else "{{ lookup('serving_serial') }}"
                assert book.get("serial") == wanted, path.name


def test_hosts_that_disagree_are_not_asked(tmp_path: Path) -> None:
    run = checks_only(inventory(tmp_path, {"rack": group(2), "lone": group("50%", "gpu-1")}))
    assert run.status != 0
    said = " ".join(run.output.split())
    assert "serving_serial: the hosts of this run do not agree: 2 (tray-1 and 4 more), 50% (gpu-1)" in said
    assert "one group after the other (--limit)" in said
    assert "such as -e serving_serial=2" in said
    assert batches(run) == {}


def test_a_number_that_is_none_ends_the_run(tmp_path: Path) -> None:
    run = checks_only(inventory(tmp_path, {"rack": group("some")}))
    assert run.status != 0
    said = " ".join(run.output.split())
    assert "serving_serial: 'some' is not allowed; expected a number such as 3, or a share such as 25%" in said
    assert batches(run) == {}


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({}, "100%"),
        ({"a": None}, "100%"),
        ({"a": 3, "b": "3", "c": None}, 3),
        ({"a": "100%"}, "100%"),
        ({"a": [1, "25%"], "b": ["1", "25%"]}, [1, "25%"]),
    ],
    ids=str,
)
def test_hosts_that_agree(given: dict[str, object], value: object) -> None:
    assert agreed(given) == value


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"a": 2, "b": 3}, "do not agree: 2 (a), 3 (b)"),
        ({"a": 0}, "'0' is not allowed"),
        ({"a": -1}, "'-1' is not allowed"),
        ({"a": "0%"}, "'0%' is not allowed"),
        ({"a": "101%"}, "'101%' is not allowed"),
        ({"a": 2.5}, "'2.5' is not allowed"),
        ({"a": [2, "some"]}, "'some' is not allowed"),
        ({"a": {"b": 1}}, "\"{'b': 1}\" is not allowed"),
    ],
    ids=str,
)
def test_what_is_no_number_of_hosts(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=r"^serving_serial: ") as refused:
        agreed(given)
    assert says in str(refused.value)
