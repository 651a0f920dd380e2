"""Writes docs/settings.md, the knobs of the Pulumi program, from pulumi/Pulumi.yaml.

python -m tests.docs.settings_page            write it
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/settings.md"
SOURCE = ROOT / "pulumi/Pulumi.yaml"

_HEAD = """\
<!-- Generated from pulumi/Pulumi.yaml by `make docs`; edit that file instead. -->

# Settings of the Pulumi program

Set them with `pulumi config set NAME VALUE`, in the stack's file (`pulumi/Pulumi.<stack>.yaml`), or, where there is
structure, with `pulumi config set --path 'replicas.worker' 2`. An empty text, list or mapping, and 0 for a number,
leave the choice to the serving catalog. Secrets are taken only as secrets: `pulumi config set --secret hf_token`.

A name that does not exist, a value of another type or a combination that cannot work ends `pulumi preview` and
`pulumi up` before anything is created, with everything wrong said at once.
"""
_KINDS = {
    "string": "text",
    "boolean": "true or false",
    "integer": "whole number",
    "array": "list",
    "object": "mapping",
}


def page(source: Path = SOURCE) -> str:
    """The whole page."""
    text = source.read_text(encoding="utf-8")
    knobs: dict[str, dict[str, Any]] = yaml.safe_load(text)["config"]
    parts = [_HEAD]
    for line in text.splitlines():
        section = re.fullmatch(r"  # --- (.+?) -+", line)
        name = re.fullmatch(r"  ([a-z_]+):", line)
        if section:
            title = section[1].removeprefix("the ")
            parts.append(
                f"\n## {title[0].upper()}{title[1:]}\n\n| name | is | default | |\n| --- | --- | --- | --- |\n"
            )
        elif name and name[1] in knobs:
            parts.append(_row(name[1], knobs[name[1]]))
    return "".join(parts)


def _row(name: str, knob: dict[str, Any]) -> str:
    default = knob["default"]
    shown = "" if default in ("", [], {}) else f"`{str(default).lower() if isinstance(default, bool) else default}`"
    described = str(knob["description"]).replace("|", "\\|")
    described = re.sub(r"<([a-z]+)>", r"&lt;\1&gt;", described)
    return f"| `{name}` | {_KINDS[knob['type']]} | {shown} | {described} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
