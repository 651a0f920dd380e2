"""Roles say what they are: argument specifications and defaults agree, and the documents made from them are current."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.role_readmes import ROOT, defaults_of, documents, paragraphs, specification

ROLES = sorted(path.parent.parent for path in ROOT.glob("roles/*/tasks/main.yml"))
EVERY_ROLE = pytest.mark.parametrize("role", [pytest.param(role, id=role.name) for role in ROLES])
DOCUMENTS = documents()


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in DOCUMENTS])
def test_the_document_is_current(path: Path) -> None:
    assert path.exists(), "missing; run `make docs`"
    assert path.read_text() == DOCUMENTS[path], "out of date; run `make docs`"


@EVERY_ROLE
def test_the_role_has_a_specification_and_defaults(role: Path) -> None:
    assert (role / "meta/argument_specs.yml").is_file()
    assert (role / "meta/main.yml").is_file()


def is_template(value: Any) -> bool:
    return "{{" in str(value)


def last_resort(template: Any) -> str | None:
    """The literal at the end of `{{ another_input | default('literal') }}`."""
    match = re.search(r"\| default\('([^'()]*)'\) *\}\}$", str(template))
    return match[1] if match else None


@EVERY_ROLE
def test_defaults_and_specification_agree(role: Path) -> None:
    options = specification(role / "meta/argument_specs.yml").get("options") or {}
    defaults = defaults_of(role)
    optional = {name for name, option in options.items() if not option.get("required")}
    assert set(defaults) == optional, "required inputs have no default; all others have one"
    wrong = []
    for name, value in defaults.items():
        declared = options[name].get("default")
        if is_template(value) and "default" in options[name] and declared != last_resort(value):
            wrong.append(
                f"{name}: worked out from {value!r}, so the specification may say {last_resort(value)!r} or nothing"
            )
        if not is_template(value) and declared != value:
            wrong.append(f"{name}: {value!r} in defaults/main.yml, {declared!r} in the specification")
    assert not wrong


@EVERY_ROLE
def test_defaults_come_in_the_order_of_the_specification(role: Path) -> None:
    options = specification(role / "meta/argument_specs.yml").get("options") or {}
    defaults = defaults_of(role)
    assert list(defaults) == [name for name in options if name in defaults]


@EVERY_ROLE
def test_inputs_are_named_after_the_role_and_described(role: Path) -> None:
    for name, option in (specification(role / "meta/argument_specs.yml").get("options") or {}).items():
        assert name.startswith(f"{role.name}_")
        assert option.get("type"), name
        assert len(" ".join(paragraphs(option["description"]))) > 15, name


@EVERY_ROLE
def test_the_description_says_what_is_true_how_to_undo_and_what_a_second_run_does(role: Path) -> None:
    text = " ".join(paragraphs(specification(role / "meta/argument_specs.yml")["description"])).lower()
    repeated = any(words in text for words in ("second run", "changes nothing", "nothing has changed"))
    missing = [words for words in ("undo", "check mode") if words not in text] + ([] if repeated else ["a second run"])
    assert not missing, f"nothing about: {missing}"


@EVERY_ROLE
def test_roles_know_no_group(role: Path) -> None:
    files = [
        *role.glob("tasks/*.yml"),
        *role.glob("handlers/*.yml"),
        *role.glob("templates/*"),
        *role.glob("defaults/*.yml"),
    ]
    knows = [
        str(file.relative_to(ROOT))
        for file in files
        # `all` is every inventory's, and no group that somebody named
        if re.search(r"\bgroups\[(?!'all'\])|\bgroups\.|group_names", file.read_text())
    ]
    assert not knows
