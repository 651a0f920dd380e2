"""ansible.cfg and .ansible-lint name what is there."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
import yaml

from tests.plugins.conftest import ROOT

CONFIGURATION = configparser.ConfigParser(interpolation=None)
CONFIGURATION.read(ROOT / "ansible.cfg")

PATHS = (
    "roles_path",
    "library",
    "module_utils",
    "action_plugins",
    "lookup_plugins",
    "filter_plugins",
    "callback_plugins",
)


@pytest.mark.parametrize("key", PATHS)
def test_the_plugin_path_exists(key: str) -> None:
    assert (ROOT / CONFIGURATION["defaults"][key]).is_dir()


def test_facts_are_read_from_ansible_facts_only() -> None:
    assert CONFIGURATION["defaults"].getboolean("inject_facts_as_vars") is False


def test_lint_allows_our_own_modules_and_no_others() -> None:
    allowed = yaml.safe_load((ROOT / ".ansible-lint").read_text())["only_builtins_allow_modules"]
    ours = {file.stem for kind in ("modules", "action") for file in (ROOT / "plugins" / kind).glob("*.py")}
    assert allowed == sorted(ours)


def test_every_action_plugin_has_documentation_that_ansible_doc_can_show() -> None:
    undocumented = [
        file.stem
        for file in (ROOT / "plugins/action").glob("*.py")
        if not (ROOT / "plugins/modules" / file.name).exists()
    ]
    assert not undocumented


@pytest.mark.parametrize(
    "file", [pytest.param(file, id=file.stem) for file in sorted((ROOT / "plugins/modules").glob("*.py"))]
)
def test_a_modules_documentation_is_yaml_and_names_its_options(file: Path) -> None:
    text = file.read_text()
    documented = text.split('DOCUMENTATION = r"""')[1].split('"""')[0]
    document = yaml.safe_load(documented)
    assert document["module"] == file.stem
    assert "options" in document
    for block in ("EXAMPLES", "RETURN"):
        yaml.safe_load(text.split(f'{block} = r"""')[1].split('"""')[0])
