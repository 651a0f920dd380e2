"""docs/settings.md says what Pulumi.yaml says; tests/pulumi holds Pulumi.yaml and the program together."""

from __future__ import annotations

import yaml

from tests.docs.settings_page import PAGE, SOURCE, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_every_knob_is_on_the_page() -> None:
    knobs = [key for key in yaml.safe_load(SOURCE.read_text(encoding="utf-8"))["config"] if ":" not in key]
    assert knobs
    for knob in knobs:
        assert page().count(f"| `{knob}` |") == 1
