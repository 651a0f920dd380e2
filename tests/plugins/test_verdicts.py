"""The form of a verdict, its documentation, and the actions that make one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from serving_catalog.checks import Check, Verdict, accept, judged, summary, table
from tests.plugins import trees

ROOT = Path(__file__).resolve().parents[2]
GOOD = Check(id="a.b", title="t", ok=True, seen="s", expected="e", remedy="")
BAD = Check(id="c.d", title="t", ok=False, seen="s", expected="e", remedy="do it")
NOT = Check(id="e.f", title="t", ok=None, seen="s", expected="e", remedy="")


@pytest.mark.parametrize(
    ("checks", "ok"), [((), True), ((GOOD, NOT), True), ((GOOD, BAD), False), (accept((GOOD, BAD), ["c.*"]), True)]
)
def test_a_verdict_follows_from_its_checks(checks: tuple[Check, ...], ok: bool) -> None:
    verdict = judged("host", "2026-11-21T08:00:00Z", {"gpu": "H200"}, checks)
    assert (verdict.ok, verdict.kind) == (ok, "host")
    assert Verdict.model_validate_json(verdict.model_dump_json()) == verdict


@pytest.mark.parametrize(
    "changes",
    [
        {"ok": True},  # against a finding
        {"kind": "cluster"},
        {"schema_version": 2},
        {"unknown": 1},
        {"checks": [{**BAD.model_dump(), "remedy": ""}]},
        {"checks": [{**GOOD.model_dump(), "accepted": True}]},
        {"checks": [BAD.model_dump(), BAD.model_dump()]},
        {"checks": [{**BAD.model_dump(), "id": "no-area"}]},
    ],
)
def test_what_is_not_a_verdict(changes: dict[str, Any]) -> None:
    content = json.loads(judged("host", "now", {}, [BAD]).model_dump_json())
    with pytest.raises(ValidationError):
        Verdict.model_validate_json(json.dumps({**content, **changes}))


def test_the_document_holds_the_schema_and_every_key() -> None:
    text = (ROOT / "docs/verdict.md").read_text()
    written = re.search(r"```json schema\n(.*?)```", text, re.DOTALL)
    assert written is not None
    assert json.loads(written.group(1)) == Verdict.model_json_schema()
    example = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    assert example is not None
    assert not Verdict.model_validate_json(example.group(1)).ok
    for model in (Check, Verdict):
        for name, field in model.model_fields.items():
            assert f"| `{name}` | {field.description} |" in text


def test_the_document_names_every_check() -> None:
    text = (ROOT / "docs/verdict.md").read_text()
    for name in sorted(_ids()):
        assert f"| `{name}` |" in text, name
    of_hosts = ("disk", "path", "port", "url", "unit", "container", "container_gpus", "endpoint", "survey")
    of_namespaces = ("claim", "secret", "config", "graph", "deployment", "pod", "workers", "kv_transfer", "job")
    for area in (*of_hosts, *of_namespaces):
        assert f"| `{area}.<" in text, area


def _ids() -> set[str]:
    """Ids of fixed checks: the first argument of the functions that make checks."""
    found: set[str] = set()
    for module in ("judging", "preflight", "diagnosis", "cluster_prerequisites", "cluster_diagnosis", "cluster_pods"):
        code = (ROOT / f"serving_catalog/checks/{module}.py").read_text()
        found |= set(re.findall(r'(?:check|passed|finding|unknown)\(\s*"([a-z_]+\.[a-z_]+)"', code))
    assert len(found) > 30
    return found


def test_the_table_shows_what_to_do_and_keeps_its_width() -> None:
    wide = BAD.model_copy(update={"seen": "word " * 60, "remedy": "step " * 60})
    text = table([GOOD, wide, NOT], width=100)
    assert max(len(line) for line in text.splitlines()) <= 100
    assert text.splitlines()[0].startswith("ok    a.b")
    assert "expected: e" in text
    assert "remedy: step step" in text
    assert summary([GOOD, wide, NOT]) == "3 checks: 1 as expected, 1 finding, 1 not applicable"


# --- the actions, through Ansible itself -------------------------------------------------------------------------

REQUEST = {
    "serving_gpu": "H200",
    "serving_gpu_count": 4,
    "serving_engine": "tensorrt_llm",
    "serving_profile": "low_latency",
}
PREFLIGHT = [
    {
        "ansible.builtin.import_role": {"name": "preflight"},
        "vars": {"preflight_plan": "{{ ansible_facts['serving_plan'] }}"},
    }
]


def _play(tmp_path: Path, tasks: list[dict[str, Any]], variables: dict[str, Any], *options: str) -> tuple[int, str]:
    plan = {"serving_plan": None}
    play = {"hosts": "all", "gather_facts": False, "tasks": [plan, *tasks]}
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    (tmp_path / "vars.json").write_text(json.dumps({**REQUEST, **variables}))
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "ansible-playbook"),
            "--inventory=tray-01,",
            "--connection=local",
            f"--extra-vars=@{tmp_path / 'vars.json'}",
            f"--extra-vars=ansible_python_interpreter={sys.executable}",
            *options,
            str(tmp_path / "play.yml"),
        ],
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_LOCAL_TEMP": str(tmp_path / "tmp")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def _recorded(tmp_path: Path, prefix: str = "") -> dict[str, Any]:
    tree = trees.recorded("h200-x4", tmp_path / "host")
    return {f"{prefix}procfs": str(tree.base / "proc"), f"{prefix}sysfs": str(tree.base / "sys")}


@pytest.mark.parametrize("options", [(), ("--check", "--diff")])
def test_preflight_stops_with_every_finding(tmp_path: Path, options: tuple[str, ...]) -> None:
    variables = {
        **_recorded(tmp_path, "preflight_"),
        "serving_gpu": "B200",
        "serving_gpu_count": 8,
        "preflight_minimum_memory_bytes": 2**60,
        "preflight_urls": [{"name": "mirror", "url": "http://127.0.0.1:1/"}],
    }
    code, said = _play(tmp_path, PREFLIGHT, variables, *options)
    assert code == 2
    for id_ in ("gpu.kind", "gpu.count", "memory.size", "url.mirror"):
        assert re.search(rf"FAIL +{re.escape(id_)} ", said), id_
    assert "4x NVIDIA H200" in said
    assert "Set serving_gpu to what is there (H200)" in said
    assert "changed=0" in said


def test_preflight_lets_through_what_the_operator_accepts(tmp_path: Path) -> None:
    variables = {
        **_recorded(tmp_path, "preflight_"),
        "preflight_urls": [{"name": "mirror", "url": "http://127.0.0.1:1/"}],
        "preflight_directories": [],
        "preflight_allow_findings": ["*"],
    }
    show = {"ansible.builtin.debug": {"msg": "{{ ansible_facts['host_survey'].gpus | map(attribute='gpu') | list }}"}}
    code, said = _play(tmp_path, [*PREFLIGHT, show], variables)
    assert code == 0, said
    assert "accpt url.mirror" in said
    assert said.count("H200") >= 4


def test_preflight_names_an_input_that_is_wrong(tmp_path: Path) -> None:
    variables = {
        **_recorded(tmp_path, "preflight_"),
        "preflight_urls": [{"name": "mirror", "url": "x", "acept": [401]}],
    }
    code, said = _play(tmp_path, PREFLIGHT, variables)
    assert code == 2
    assert "acept" in said


@pytest.mark.parametrize(
    ("fail", "options", "code", "written"), [(False, (), 0, True), (True, (), 2, True), (True, ("--check",), 2, False)]
)
def test_a_verdict_is_written_and_decides_the_exit_status(
    tmp_path: Path, fail: bool, options: tuple[str, ...], code: int, written: bool
) -> None:
    task = {
        "verdict": {
            "plan": "{{ ansible_facts['serving_plan'] }}",
            "directory": str(tmp_path / "verdicts"),
            "fail": fail,
            "probes": [{"id": "endpoint.chat", "title": "t", "ok": True, "seen": "s", "expected": "e", "remedy": ""}],
            "benchmark": {"requests": 4, "failed_requests": 0, "output_tokens_per_second": 10.5},
            **_recorded(tmp_path),
        }
    }
    status, said = _play(tmp_path, [task], {}, *options)
    assert status == code, said
    assert re.search(r"^ok +gpu.count +4 \(4x NVIDIA H200\)", said, re.MULTILINE)
    assert re.search(r"^FAIL +unit.gpt-oss@0.service", said, re.MULTILINE)
    file = tmp_path / "verdicts/tray-01.json"
    assert file.exists() is written
    if written:
        verdict = Verdict.model_validate_json(file.read_text())
        assert (verdict.name, verdict.ok, verdict.request["gpu"]) == ("tray-01", False, "H200")
        checks = {check.id: check.ok for check in verdict.checks}
        assert (checks["gpu.kind"], checks["endpoint.chat"], checks["throughput.run"]) == (True, True, True)
        assert [path.name for path in file.parent.iterdir()] == ["tray-01.json"]


def test_two_calls_of_host_survey_add_up(tmp_path: Path) -> None:
    where = _recorded(tmp_path)
    tasks = [
        {"host_survey": {"sections": ["gpus", "memory"], **where}},
        {"host_survey": {"sections": ["platform", "architecture"], **where}},
        {
            "ansible.builtin.assert": {
                "that": [
                    "ansible_facts['host_survey'].gpus | length == 4",
                    "ansible_facts['host_survey'].gpus[0].name == 'NVIDIA H200'",
                    "ansible_facts['host_survey'].memory_bytes == 540092137472",
                    "ansible_facts['host_survey'].platform.detected is none",
                    "'memory' in ansible_facts['host_survey'].sections",
                ]
            }
        },
    ]
    code, said = _play(tmp_path, tasks, {})
    assert code == 0, said
