"""The drivers' pure parts: configuration, durations, when an object differs, and what a real engine needs."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.api import Object
from tests.kubernetes.drivers import RealEngine, UpdateFailedError
from tests.kubernetes.engine import differences, programs
from tests.kubernetes.engine.deployment import seconds
from tests.kubernetes.engine.state import Entry, State

PROGRAM = Path(__file__).parent / "programs" / "objects"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("objects", "text", "must be of type 'array'"),
        ("kubeconfig", 5, ""),
    ],
)
def test_configuration_has_the_declared_types(key: str, value: Any, said: str) -> None:
    project = programs.Project(PROGRAM)
    given = {"kubeconfig": "file", "context": "context", key: value}
    if said:
        with pytest.raises(UpdateFailedError, match=said):
            project.config(given)
    else:
        assert project.config(given)[f"objects:{key}"] == json.dumps(value)


def test_configuration_without_a_default_is_required() -> None:
    with pytest.raises(UpdateFailedError, match="missing required configuration variable 'context'"):
        programs.Project(PROGRAM).config({"kubeconfig": "file"})


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("1h30m", 5400), ("2h", 7200), ("1.5m", 90)])
def test_durations(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize(
    ("old", "live", "new", "paths"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, {"a": 1}, []),  # what the server adds is its own
        ({"a": 1}, {"a": 2}, {"a": 1}, ["spec.a"]),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1}, ["spec.b"]),
        ({"cpu": "1000m"}, {"cpu": "1"}, {"cpu": "1000m"}, []),
        ({"cpu": "1000m"}, {"cpu": "1"}, {"cpu": "2"}, ["spec.cpu"]),
        ({"list": [{"x": 1}]}, {"list": [{"x": 1, "y": 2}]}, {"list": [{"x": 1}]}, []),
        ({"list": [{"x": 1}]}, {"list": [{"x": 1}]}, {"list": [{"x": 1}, {"x": 2}]}, ["spec.list"]),
        ({}, {}, {"empty": {}}, ["spec.empty"]),
    ],
)
def test_differences(old: Any, live: Any, new: Any, paths: list[str]) -> None:
    def whole(spec: Any) -> Object:
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}

    found = differences.differences(whole(old), whole(live), whole(new))
    assert [".".join(map(str, path)) for path in found] == paths


def test_quantities_of_custom_resources_are_compared_as_written() -> None:
    def whole(value: str) -> Object:
        return {"apiVersion": "gpt-oss.test/v1", "kind": "Widget", "metadata": {"name": "x"}, "spec": {"cpu": value}}

    assert differences.differences(whole("1000m"), whole("1"), whole("1000m")) == [("spec", "cpu")]


def test_what_is_ignored_stays_as_it_was() -> None:
    old = {"spec": {"parts": [{"name": "a", "count": 3}, {"name": "b"}]}}
    new = {"spec": {"parts": [{"name": "a", "count": 1}, {"name": "b", "count": 2}]}}
    kept = differences.keep_ignored(["spec.parts[*].count"], old, new)
    assert kept == {"spec": {"parts": [{"name": "a", "count": 3}, {"name": "b"}]}}


def test_what_is_deleted_together_needs_nothing_of_one_another() -> None:
    def entry(name: str, *needs: str, parent: str = "") -> Entry:
        return Entry(name, "type", name, custom=True, parent=parent, provider="cluster", dependencies=frozenset(needs))

    made = [
        Entry("cluster", "pulumi:providers:kubernetes", "cluster", custom=True),
        entry("component"),
        entry("namespace", parent="component"),
        entry("platform"),
        entry("claim", "namespace"),
        entry("config", "namespace"),
        entry("graph", "config", "claim", "platform"),
        entry("smoke", "graph"),
    ]
    state = State({each.urn: each for each in made})
    rounds = [sorted(each.name for each in round_) for round_ in state.reversed_rounds(state.entries)]
    assert rounds == [["smoke"], ["graph"], ["claim", "config"], ["namespace"], ["component", "platform"], ["cluster"]]
    some = [sorted(each.name for each in round_) for round_ in state.reversed_rounds({"smoke", "config", "claim"})]
    assert some == [["claim", "config", "smoke"]], "what stays needs none of them"


def test_what_is_missing_of_the_real_engine_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, home = tmp_path / "programs", tmp_path / "home"
    plugin = home / "plugins" / f"resource-kubernetes-v{importlib.metadata.version('pulumi-kubernetes')}"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PULUMI_HOME", str(home))

    def put(file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o755)

    assert RealEngine.missing() == "no `pulumi` on PATH"
    put(programs / "pulumi")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pulumi").symlink_to(programs / "pulumi")
    said = RealEngine.missing() or ""
    assert f"no pulumi-language-python beside {programs / 'pulumi'}" in said
    assert f"no {plugin} (pulumi plugin install resource kubernetes" in said
    put(programs / "pulumi-language-python")
    put(programs / "pulumi-language-python-exec")
    put(plugin.with_name("resource-kubernetes-v4.0.0") / "pulumi-resource-kubernetes")  # not the program's version
    said = RealEngine.missing() or ""
    assert said.startswith(f"no {plugin} ")
    put(plugin / "pulumi-resource-kubernetes")
    assert RealEngine.missing() is None
    plugin.with_name(f"{plugin.name}.partial").touch()  # while it is being installed
    assert RealEngine.missing() == said
