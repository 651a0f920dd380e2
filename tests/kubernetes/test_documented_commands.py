"""Every kubectl command of README and runbooks works on a cluster that serves both TensorRT-LLM targets of GB200."""

from __future__ import annotations

import http.server
import os
import re
import shlex
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes import scenario
from tests.kubernetes.build import REPOSITORY
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.drivers import InProcess
from tests.kubernetes.scenario import TARGETS, stack_of
from tests.stand_ins.dynamo_operator.operator import Operator

pytestmark = pytest.mark.kubernetes

NAMESPACE = "gpt-oss"  # the documents' own
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs/runbooks").glob("kubernetes-*.md"))]


def _commands(document: Path) -> Iterator[str]:
    for block in re.findall(r"^```bash\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL):
        yield from (line for line in block.splitlines() if line.startswith("kubectl "))


COMMANDS = [
    pytest.param(command, id=f"{document.stem}: {command}") for document in DOCUMENTS for command in _commands(document)
]


@pytest.fixture(scope="module")
def serving(dynamo_cluster: Cluster, dynamo_operator: Operator) -> Iterator[Cluster]:
    driver = InProcess()
    for name in ("gb200-agg", "gb200-disagg"):
        stack_of(
            driver,
            dynamo_cluster,
            TARGETS[name],
            NAMESPACE,
            name=name,
            platform="existing",
            **({} if name == "gb200-agg" else {"create_namespace": False, "model_cache_existing": True}),
            **({"benchmark": True} if name == "gb200-agg" else {"hf_token_secret": "hf-token-secret"}),
        ).up()
    yield dynamo_cluster
    scenario.clean(dynamo_cluster, NAMESPACE)


def _run(cluster: Cluster, command: str, *more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
    words = [*shlex.split(command), *more]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_documents_show_kubectl_at_all() -> None:
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("command", [each for each in COMMANDS if " port-forward " in str(each.values[0])])
def test_port_forward_reaches_the_frontend(serving: Cluster, command: str) -> None:
    """Before the commands below, one of which restarts the frontend."""
    [pod] = scenario.pods_of(serving, NAMESPACE, "gpt-oss-agg", "frontend").values()
    server = http.server.HTTPServer(("127.0.0.1", 0), _Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    serving.forward(NAMESPACE, pod["metadata"]["name"], 8000, to=server.server_port)
    words = [word.replace("8000:8000", ":8000") for word in shlex.split(command)]  # any free port here
    environment = {**os.environ, "KUBECONFIG": str(serving.kubeconfig)}
    forwarding = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert forwarding.stdout is not None
        line = forwarding.stdout.readline()
        [port] = re.findall(r"127\.0\.0\.1:(\d+)", line) or pytest.fail(line + forwarding.stdout.read())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
            assert answer.read() == b"models"
    finally:
        forwarding.terminate()
        forwarding.wait(10)
        server.shutdown()


@pytest.mark.parametrize("command", [each for each in COMMANDS if " port-forward " not in str(each.values[0])])
def test_kubectl_command(serving: Cluster, command: str) -> None:
    more = ["--dry-run=server"] if command.startswith("kubectl delete ") else []
    done = _run(serving, command, *more)
    assert done.returncode == 0, done.stderr
    selects = " -l " in command and (" get " in command or " describe " in command)
    assert not (selects and "No resources found" in done.stdout + done.stderr), "the labels select nothing"


class _Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"models")

    def log_message(self, *arguments: object) -> None:
        pass
