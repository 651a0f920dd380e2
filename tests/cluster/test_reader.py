"""The reader before it reaches a cluster: kubeconfig, context, credentials, servers that do not answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import cluster
import diagnose
from serving_catalog.checks import Check, Verdict, judged
from serving_catalog.checks.cluster import Snapshot
from serving_catalog.checks.cluster_prerequisites import cluster_access

PROGRAM = Path(cluster.__file__).parent / "diagnose.py"


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def kubeconfig(path: Path, server: str = "https://127.0.0.1:1", user: dict[str, Any] | None = None) -> Path:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "u", "user": user or {"token": "t"}}],
        "contexts": [{"name": name, "context": {"cluster": "c", "user": "u"}} for name in ("gb200", "h200")],
        "current-context": "h200",
    }
    path.write_text(yaml.safe_dump(content))
    return path


def seen(path: Path | str, context: str = "gb200") -> Snapshot:
    return cluster.snapshot(path, context, "gpt-oss", cluster.Reads(kinds=cluster.PREREQUISITES))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        ("{[", "is not a kubeconfig"),
        ("just text", "is not a kubeconfig: it has no list of contexts"),
        ("contexts: 3", "it has no list of contexts"),
        ("\x00\x01", "is not a kubeconfig"),
    ],
)
def test_a_kubeconfig_that_is_none(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "config"
    if content is not None:
        path.write_text(content)
    found = seen(path)
    assert (found.problem, said in found.message) == ("kubeconfig", True)
    check = cluster_access(found)
    assert check.seen.startswith(f"kubeconfig: '{path}' ")


def test_a_directory_is_no_kubeconfig(tmp_path: Path) -> None:
    assert seen(tmp_path).message == "is a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_kubeconfig_that_may_not_be_read(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config")
    path.chmod(0)
    assert seen(path).message == "cannot be read by you"


def test_a_kubeconfig_without_the_contexts_cluster(tmp_path: Path) -> None:
    path = kubeconfig(tmp_path / "config")
    path.write_text(path.read_text().replace("name: c\n", "name: other\n"))
    assert seen(path).problem == "credentials"


def test_the_current_context_is_not_taken_and_the_others_are_listed(tmp_path: Path) -> None:
    found = seen(kubeconfig(tmp_path / "config"), "b200")
    assert (found.problem, found.contexts) == ("context", ("gb200", "h200"))
    check = cluster_access(found)
    assert "context: 'b200' is not in" in check.seen
    assert check.expected == "gb200, h200"


def test_nobody_listens(tmp_path: Path, closed_port: int) -> None:
    found = seen(kubeconfig(tmp_path / "config", f"https://127.0.0.1:{closed_port}"))
    assert (found.problem, found.server) == ("unreachable", f"https://127.0.0.1:{closed_port}")
    assert "refused" in found.message


def test_a_server_that_never_answers_is_given_up(
    tmp_path: Path, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(cluster, "READ_SECONDS", 0.3)
    began = time.monotonic()
    found = seen(kubeconfig(tmp_path / "config", f"https://127.0.0.1:{silent_port}"))
    assert found.problem == "unreachable"
    assert "no" in found.message
    assert time.monotonic() - began < 15


def test_a_name_that_does_not_exist(tmp_path: Path) -> None:
    found = seen(kubeconfig(tmp_path / "config", "https://nowhere.invalid"))
    assert found.problem == "unreachable"
    assert found.message


@pytest.mark.parametrize(
    ("command", "arguments", "said"),
    [
        ("no-such-cloud-auth", [], "no-such-cloud-auth is not on PATH"),
        ("sh", ["-c", "echo token has expired >&2; exit 3"], "token has expired"),
        ("sh", ["-c", "echo nonsense"], "failed to decode process output"),
    ],
)
def test_a_credential_plugin_that_fails_says_so(tmp_path: Path, command: str, arguments: list[str], said: str) -> None:
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": command, "args": arguments}
    found = seen(kubeconfig(tmp_path / "config", user={"exec": plugin}))
    assert found.problem == "credentials"
    assert said in found.message
    assert "log in again" in cluster_access(found).remedy


def test_a_credential_plugin_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PLUGIN_SECONDS", 0.2)
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sleep", "args": ["3"]}
    found = seen(kubeconfig(tmp_path / "config", user={"exec": plugin}))
    assert (found.problem, found.message) == ("credentials", "no credentials within 0 s (from sleep)")


def test_the_program_explains_a_cluster_that_is_gone(tmp_path: Path, closed_port: int) -> None:
    path = kubeconfig(tmp_path / "config", f"https://127.0.0.1:{closed_port}")
    text = diagnose.explain(path, "gb200", "gpt-oss", "gpt-oss-agg", 5400)
    assert "* cluster.access: --context: 'gb200'" in text
    assert f"--kubeconfig {path} --context gb200 --namespace gpt-oss --name gpt-oss-agg --load-within 5400" in text


def test_the_short_form_says_each_cause_once_and_consequences_last() -> None:
    def check(id_: str, ok: bool | None, seen: str, remedy: str = "") -> Check:
        return Check(id=id_, title="t", ok=ok, seen=seen, expected="e", remedy=remedy)

    verdict = judged(
        "gpt-oss",
        "now",
        {},
        [
            check("cluster.access", True, "fine"),
            check("graph.g", False, "pending. Because worker (a): no room", "make room"),
            check("pod.a", False, "no room", "make room"),
            check("pod.b", False, "no image", "push it"),
            check("pod.c", False, "no image", "push it"),
            check("pod.d", None, "loading for 3 min"),
            check("endpoint.g", False, "nobody behind it", "see above"),
            check("claim.m", False, "Pending", "bind it"),
        ],
        "namespace",
    )
    assert diagnose.short(verdict, "look").splitlines() == [
        "gpt-oss: 8 checks: 1 as expected, 6 findings, 1 not applicable",
        "* pod.b, pod.c: no image",
        "  > push it",
        "* claim.m: Pending",
        "  > bind it",
        "* graph.g: pending. Because worker (a): no room",
        "  > make room",
        "* endpoint.g: nobody behind it",
        "  > see above",
        "* pod.d: loading for 3 min",
        "Everything: look",
    ]


# --- the command -------------------------------------------------------------------------------------------------


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_command_ends_with_the_verdict_and_writes_it(tmp_path: Path, closed_port: int) -> None:
    path = kubeconfig(tmp_path / "config", f"https://127.0.0.1:{closed_port}")
    options = ("--kubeconfig", path, "--context", "gb200", "--namespace", "gpt-oss")
    written = tmp_path / "verdicts" / "gpt-oss.json"
    done = run(*options, "--output", written)
    assert done.returncode == 1
    assert "FAIL  cluster.access" in done.stdout
    verdict = Verdict.model_validate_json(written.read_text())
    assert (verdict.kind, verdict.name, verdict.ok) == ("namespace", "gpt-oss", False)
    assert [entry.name for entry in written.parent.iterdir()] == ["gpt-oss.json"]
    done = run(*options, "--format", "json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["checks"][0]["id"] == "cluster.access"
    assert run(*options, "--allow", "*").returncode == 1, "what was not seen cannot be accepted"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--kubeconfig, --context, --namespace"),
        (("--kubeconfig", "x", "--context", "y"), "--namespace"),
        (("--kubeconfig", "x", "--context", "y", "--namespace", "z", "--load-within", "0"), "allowed: 1 or more"),
        (
            ("--kubeconfig", "x", "--context", "y", "--namespace", "z", "--output", "/proc/no/file"),
            "--output: /proc/no",
        ),
    ],
)
def test_a_wrong_call_is_told_apart(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        diagnose.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
