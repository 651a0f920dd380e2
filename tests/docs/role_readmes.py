"""Writes roles/*/README.md and docs/inputs.md from the argument specifications.

    python -m tests.docs.role_readmes            write them
    python -m tests.docs.role_readmes --check    say which ones are out of date, and end with 1 if any is

It lives with the tests of the documents, because it is a tool for contributors: nothing that an operator runs needs it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
GENERATED = "<!-- Generated from {source} by `make docs`; edit that file instead. -->"
_KINDS = {
    "str": "text",
    "path": "path",
    "bool": "true or false",
    "int": "whole number",
    "float": "number",
    "list": "list",
    "dict": "mapping",
    "raw": "any",
}
_MARKUP = re.compile(r"\b([CVOBIMEP])\(((?:[^()]|\([^()]*\))*)\)")
_CATALOG = re.compile(r"""^\{\{ *lookup\( *['"]serving_catalog['"] *, *['"]([^'"]+)['"] *\) *\}\}$""")


def documents(root: Path = ROOT) -> dict[Path, str]:
    """Every generated document with the text it should have."""
    found = {}
    for source in sorted(root.glob("roles/*/meta/argument_specs.yml")):
        role = source.parents[1]
        found[role / "README.md"] = role_readme(role, root)
    found[root / "docs/inputs.md"] = inputs_page(root)
    return found


def specification(source: Path) -> dict[str, Any]:
    main: dict[str, Any] = yaml.safe_load(source.read_text())["argument_specs"]["main"]
    return main


def defaults_of(role: Path) -> dict[str, Any]:
    file = role / "defaults/main.yml"
    return yaml.safe_load(file.read_text()) or {} if file.exists() else {}


def role_readme(role: Path, root: Path = ROOT) -> str:
    source = role / "meta/argument_specs.yml"
    spec = specification(source)
    lines = [GENERATED.format(source=source.relative_to(root)), f"# {role.name}", f"{spec['short_description']}."]
    lines += paragraphs(spec["description"])
    lines += used_by(role.name, root)
    options = spec.get("options") or {}
    lines += ["## Inputs"] if options else ["## Inputs", "None."]
    defaults = defaults_of(role)
    for name, option in options.items():
        lines += option_section(name, option, defaults.get(name, option.get("default")), name in defaults)
    return "\n\n".join(lines) + "\n"


def inputs_page(root: Path = ROOT) -> str:
    source = root / "playbooks/vars/inputs.yml"
    spec = specification(source)
    lines = [GENERATED.format(source=source.relative_to(root)), "# Inputs", *paragraphs(spec["description"])]
    lines.append("Each role has inputs of its own, which begin with its name:")
    roles = sorted(path.parents[1] for path in root.glob("roles/*/meta/argument_specs.yml"))
    listed = []
    for role in roles:
        summary = specification(role / "meta/argument_specs.yml")["short_description"]
        listed.append(f"- [{role.name}](../roles/{role.name}/README.md): {summary}")
    lines += ["\n".join(listed)] if listed else []
    lines.append(
        "Every variable of a host that begins with the name of a role, or as `serving_*` is checked before anything"
        " else: a name that does not exist, a wrong type or a value that is not allowed ends the run before the host is"
        " touched."
    )
    for name, option in spec["options"].items():
        lines += option_section(name, option, option.get("default"), "default" in option)
    return "\n\n".join(lines) + "\n"


def used_by(role: str, root: Path) -> list[str]:
    """The playbooks that run the role, and how to run it alone."""
    playbooks = [
        path.relative_to(root)
        for path in sorted((root / "playbooks").glob("*.yml"))
        if re.search(rf"^ *- role: {role}$", path.read_text(), flags=re.MULTILINE)
    ]
    if not playbooks:
        return []
    names = ", ".join(f"`{path}`" for path in playbooks)
    command = f"ansible-playbook -i inventories/mine {playbooks[0]} --tags {role}"
    return [f"It is part of {names}. Alone:", f"```bash\n{command}\n```"]


def option_section(name: str, option: Mapping[str, Any], default: Any, has_default: bool) -> list[str]:
    kind = _KINDS[option.get("type", "str")]
    if option.get("elements"):
        kind += f" of {_KINDS[option['elements']]}"
    facts = [kind]
    if option.get("choices"):
        facts.append("one of " + ", ".join(f"`{choice}`" for choice in option["choices"]))
    facts.append("required." if option.get("required") else described_default(default, has_default))
    lines = [
        f"### `{name}`",
        f"*{facts[0]}*; " + "; ".join(facts[1:]) + (" Kept out of logs." if option.get("no_log") else ""),
    ]
    lines += paragraphs(option["description"])
    members = list(member_lines(option.get("options") or {}, 0))
    return [*lines, "\n".join(members)] if members else lines


def member_lines(options: Mapping[str, Any], depth: int) -> Iterator[str]:
    for name, option in options.items():
        facts = [_KINDS[option.get("type", "str")], *(["required"] if option.get("required") else [])]
        text = " ".join(paragraphs(option["description"]))
        yield f"{'  ' * depth}- `{name}` ({', '.join(facts)}): {text}"
        yield from member_lines(option.get("options") or {}, depth + 1)


def described_default(default: Any, has_default: bool) -> str:
    if not has_default:
        return "no default."
    if isinstance(default, str):
        catalog = _CATALOG.match(default)
        if catalog:
            return f"default: `{catalog[1]}` of the serving catalog."
        if "{{" in default:
            return f"default: `{' '.join(default.split())}`."
        return f"default `{default}`." if default else "empty by default."
    if default in ([], {}):
        return "empty by default."
    catalogs = [_CATALOG.match(str(item)) for item in default] if isinstance(default, list) else []
    if catalogs and all(catalogs):
        return "default: " + ", ".join(f"`{match[1]}`" for match in catalogs if match) + " of the serving catalog."
    return f"default `{json.dumps(default, ensure_ascii=False)}`."


def paragraphs(description: str | list[str]) -> list[str]:
    """Ansible's documentation markup as Markdown, a paragraph each."""
    texts = [description] if isinstance(description, str) else description
    return [_MARKUP.sub(_markdown, " ".join(text.split())) for text in texts]


def _markdown(match: re.Match[str]) -> str:
    kind, text = match.groups()
    return {"B": f"**{text}**", "I": f"*{text}*"}.get(kind, f"`{text}`")


@cache
def handed_over() -> dict[str, tuple[str, str]]:
    """Inputs that the playbooks set themselves, as the action plugin serving_plan sees them."""
    file = ROOT / "plugins/action/serving_plan.py"
    spec = importlib.util.spec_from_file_location("serving_plan_action", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, tuple[str, str]] = module.handed_over()
    return found


def operator_inputs(root: Path = ROOT) -> set[str]:
    """Every variable that an inventory or the command line may set."""
    sources = [root / "playbooks/vars/inputs.yml", *root.glob("roles/*/meta/argument_specs.yml")]
    return {name for source in sources for name in specification(source).get("options") or {}}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.docs.role_readmes", description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a document is out of date")
    arguments = parser.parse_args()
    stale = {path: text for path, text in documents().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)} {'is out of date; run `make docs`' if arguments.check else 'written'}")
        if not arguments.check:
            path.write_text(text)
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
