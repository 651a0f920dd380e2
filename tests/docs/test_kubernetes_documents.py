"""What the documents say of Pulumi and kubectl exists: settings, subcommands, outputs, options, stacks, manifests."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import diagnose
from serving_catalog import load_catalog, parse_overrides
from serving_catalog.__main__ import main as catalog_command
from serving_catalog.checks.cluster_causes import RUNBOOKS
from serving_catalog.graphs import GraphRequest, plan_graph

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "pulumi/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
KNOBS = {
    name.removeprefix("gpt-oss:"): knob
    for name, knob in yaml.safe_load((ROOT / "pulumi/Pulumi.yaml").read_text())["config"].items()
    if not name.startswith(("pulumi:", "kubernetes:"))
}
SUBCOMMANDS = {"up", "preview", "destroy", "install", "login", "stack", "config"}  # of the Pulumi CLI
FLAGS = {"--secret", "--path", "--refresh", "--diff", "--show-urns", "--stack", "--local"}


def commands(document: Path, program: str) -> Iterator[list[str]]:
    """Commands of the bash blocks and those quoted in the text, as words."""
    text = document.read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in [*"\n".join(blocks).replace("\\\n", " ").splitlines(), *re.findall(r"`([^`\n]+)`", rest)]:
        if line.startswith(f"{program} "):
            yield shlex.split(line, comments=True)


def all_commands(program: str) -> list[object]:
    found = {
        f"{document.relative_to(ROOT)}: {shlex.join(words)}": words
        for document in DOCUMENTS
        for words in commands(document, program)
    }
    return [pytest.param(words, id=name) for name, words in found.items()]


def first_name(path: str) -> str:
    return re.split(r"[.\[]", path)[0]


@pytest.mark.parametrize("words", all_commands("pulumi"))
def test_pulumi_command(words: list[str]) -> None:
    flags = {word for word in words if word.startswith("--")}
    assert flags <= FLAGS
    assert words[1] in SUBCOMMANDS
    rest = [word for word in words[2:] if word not in flags]
    if words[1] == "config":
        assert rest[0] in ("set", "rm")
        name = first_name(rest[1])
        if name == "NAME":  # stands for any
            return
        assert name in KNOBS
        assert ("--path" in flags) == (name != rest[1]), "a path into a setting needs --path, a setting does not"
        if rest[0] == "set":
            secret = "as a secret" in KNOBS[name]["description"]
            assert secret == ("--secret" in flags)
            assert (len(rest) == 3) != secret, "a secret is asked for; anything else has its value on the line"
        if rest[0] == "set" and name == rest[1] and KNOBS[name]["type"] in ("boolean", "integer"):
            assert isinstance(yaml.safe_load(rest[2]), bool if KNOBS[name]["type"] == "boolean" else int)
    elif words[1] == "stack" and rest and rest[0] == "init":
        assert (ROOT / f"pulumi/Pulumi.{rest[1]}.yaml").is_file()
    elif words[1] == "stack" and rest:
        assert rest[0] == "output"
        assert not rest[1:] or f'"{rest[1]}"' in (ROOT / "pulumi/stack.py").read_text()


@pytest.mark.parametrize("runbook", [pytest.param(path, id=path.stem) for path in DOCUMENTS])
def test_engine_options_that_a_document_sets_can_be_planned_together(runbook: Path) -> None:
    settings = {
        match.group(1): words[-1]
        for words in commands(runbook, "pulumi")
        if words[1:3] == ["config", "set"]
        for match in [re.fullmatch(r'set\["(.+)"\]', words[-2])]
        if match
    }
    if not settings:
        return
    target = "gb200-disagg" if any(path.startswith(("prefill.", "decode.")) for path in settings) else "gb200-agg"
    overrides = parse_overrides([f"{path}={value}" for path, value in settings.items()])
    plan_graph(GraphRequest(target=target, overrides=overrides), load_catalog())


@pytest.mark.parametrize("words", all_commands("python"))
def test_python_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if words[1:4] == ["-m", "serving_catalog", "graph"]:
        assert catalog_command(["gb200-agg" if word == "TARGET" else word for word in words[3:]]) == 0
    elif words[1] == "pulumi/diagnose.py":
        # No such cluster here: a verdict that says so. An option that does not exist would end the program.
        assert diagnose.main(words[2:]) == 1


def test_every_runbook_that_a_verdict_names_exists() -> None:
    assert [path for path in RUNBOOKS.values() if not (ROOT / path).is_file()] == []


def test_verdicts_name_no_other_kubernetes_runbook() -> None:
    there = {f"docs/runbooks/{path.name}" for path in (ROOT / "docs/runbooks").glob("kubernetes-*.md")}
    assert there == set(RUNBOOKS.values())
