"""Commands and links in the documents name things that exist: playbooks, tags, variables, make targets, files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RUNBOOKS = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
DOCUMENTS = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), ROOT / "simulator" / "README.md"]
)
SECTIONS = ("## Symptom", "## Check", "## Remedy", "## Undo")


def shell_commands(document: Path) -> Iterator[list[str]]:
    """Every command of the document's bash blocks, split into words; continued lines joined, comments dropped."""
    for block in re.findall(r"^```bash\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def commands_named(name: str) -> list[tuple[str, list[str]]]:
    return [
        (f"{document.relative_to(ROOT)}: {shlex.join(words)}", words)
        for document in DOCUMENTS
        for words in shell_commands(document)
        if words[0] == name
    ]


def role_names() -> set[str]:
    return {path.parent.parent.name for path in ROOT.glob("roles/*/meta/argument_specs.yml")}


def known_variables() -> set[str]:
    """Every input an operator can set: the roles' argument specs and the fleet-level ones."""
    from tests.docs.role_readmes import operator_inputs

    return operator_inputs(ROOT)


def settings_of_pulumi() -> set[str]:
    return set(yaml.safe_load((ROOT / "pulumi" / "Pulumi.yaml").read_text())["config"])


def plays_of(playbook: Path) -> Iterator[dict[str, object]]:
    for play in yaml.safe_load(playbook.read_text()):
        imported = play.get("ansible.builtin.import_playbook")
        if imported:
            yield from plays_of(playbook.parent / imported)
        else:
            yield play


def tags_of(playbook: Path) -> set[str]:
    found: set[str] = set()

    def walk(node: object) -> None:
        if isinstance(node, dict):
            tags = node.get("tags", [])
            found.update([tags] if isinstance(tags, str) else tags)
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    for play in plays_of(playbook):
        walk(play)
    return found


def options(words: list[str], *names: str) -> list[str]:
    values = []
    for position, word in enumerate(words):
        if word in names:
            values.append(words[position + 1])
        values += [
            word.removeprefix(f"{name}=") for name in names if name.startswith("--") and word.startswith(f"{name}=")
        ]
    return values


def extra_variables(words: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for value in options(words, "-e", "--extra-vars"):
        if value.startswith("@"):
            continue
        if value.startswith("{"):
            found.update(yaml.safe_load(value))
        else:
            for pair in shlex.split(value):
                name, _, given = pair.partition("=")
                found[name] = given
    return found


ANSIBLE_PLAYBOOK = commands_named("ansible-playbook")


def test_the_documents_show_playbooks_at_all() -> None:
    assert len(ANSIBLE_PLAYBOOK) > 15


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in ANSIBLE_PLAYBOOK])
def test_playbook_command(words: list[str]) -> None:
    playbooks = [
        ROOT / word for word in words[1:] if word.endswith(".yml") and "/" not in word.removeprefix("playbooks/")
    ]
    assert len(playbooks) == 1, f"names {len(playbooks)} playbooks"
    assert playbooks[0].is_file(), f"no playbook {playbooks[0].relative_to(ROOT)}"
    for value in options(words, "--tags", "-t", "--skip-tags"):
        unknown = set(value.split(",")) - tags_of(playbooks[0])
        assert not unknown, f"tags {sorted(unknown)} do not exist in {playbooks[0].name}"
    unknown_variables = set(extra_variables(words)) - known_variables()
    assert not unknown_variables, f"no such input: {sorted(unknown_variables)}"
    for inventory in options(words, "-i", "--inventory"):
        if inventory != "inventories/mine":
            assert (ROOT / inventory).is_dir(), f"no inventory {inventory}"


@pytest.mark.parametrize("words", [pytest.param(words, id=name) for name, words in commands_named("make")])
def test_make_target_exists(words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(words[1:]) <= targets


@pytest.mark.parametrize("document", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in DOCUMENTS])
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", document.read_text())
    missing = [target for target in targets if not (document.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("document", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in DOCUMENTS])
def test_variables_in_text_exist(document: Path) -> None:
    """Words in backticks that look like an input of a role or of the fleet are one, or a setting of pulumi/."""
    prefixes = ("serving_", *(f"{name}_" for name in role_names()))
    modules = {path.stem for path in ROOT.glob("plugins/*/*.py")}
    words = set(re.findall(r"`([a-z][a-z0-9_]*[a-z0-9])`", document.read_text()))
    inputs = {word for word in words if word.startswith(prefixes)} - modules - role_names() - {"serving_catalog"}
    assert not inputs - known_variables() - settings_of_pulumi()


@pytest.mark.parametrize("runbook", [pytest.param(path, id=path.stem) for path in RUNBOOKS if path.stem != "README"])
def test_runbook_has_its_four_sections_and_is_listed(runbook: Path) -> None:
    text = runbook.read_text()
    positions = [text.find(f"{section}\n") for section in SECTIONS]
    assert -1 not in positions, f"missing: {[s for s, p in zip(SECTIONS, positions, strict=True) if p < 0]}"
    assert positions == sorted(positions)
    assert f"({runbook.name})" in (runbook.parent / "README.md").read_text()


def test_every_unit_named_in_the_runbooks_is_installed_by_a_role() -> None:
    """`gpt-oss…` units that a command names come from a template of inference_server."""
    templates = {path.name.removesuffix(".j2") for path in ROOT.glob("roles/*/templates/*")}
    named = {
        match
        for document in RUNBOOKS
        for words in shell_commands(document)
        for word in words
        for match in re.findall(r"gpt-oss[a-z-]*(?:@\d*)?(?=\.service|\.timer|$|\b)", word)
        if words[0] in {"systemctl", "journalctl"} or "systemctl" in words or "journalctl" in words
    }
    for unit in named:
        stem = re.sub(r"@\d*$", "@", unit)
        assert any(template.startswith(stem) for template in templates), f"no role installs {unit}"
