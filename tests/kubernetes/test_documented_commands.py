"""Every kubectl command of README and runbooks works on a cluster that serves both TensorRT-LLM targets of GB200.

And what they configure with Pulumi passes the checks against that cluster, command by command.
"""

from __future__ import annotations

import copy
import http.server
import itertools
import os
import re
import shlex
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes import nodes, scenario
from tests.kubernetes.build import REPOSITORY
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.drivers import InProcess, InProcessStack
from tests.kubernetes.scenario import TARGETS, stack_of
from tests.stand_ins.dynamo_operator.operator import Operator

pytestmark = pytest.mark.kubernetes

NAMESPACE = "gpt-oss"  # the documents' own
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs/runbooks").glob("kubernetes-*.md"))]


def _commands(document: Path, program: str = "kubectl") -> Iterator[str]:
    for block in re.findall(r"^```bash\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL):
        yield from (line for line in block.splitlines() if line.startswith(f"{program} "))


COMMANDS = [
    pytest.param(command, id=f"{document.stem}: {command}") for document in DOCUMENTS for command in _commands(document)
]


@pytest.fixture(scope="module")
def stacks(dynamo_cluster: Cluster, dynamo_operator: Operator) -> Iterator[dict[str, InProcessStack]]:
    driver, made = InProcess(), {}
    for name in ("gb200-agg", "gb200-disagg"):
        made[name] = stack = stack_of(
            driver,
            dynamo_cluster,
            TARGETS[name],
            NAMESPACE,
            name=name,
            platform="existing",
            **({} if name == "gb200-agg" else {"create_namespace": False, "model_cache_existing": True}),
            **({"benchmark": True} if name == "gb200-agg" else {"hf_token_secret": "hf-token-secret"}),
        )
        stack.up()
    yield made
    scenario.clean(dynamo_cluster, NAMESPACE)


@pytest.fixture(scope="module")
def serving(dynamo_cluster: Cluster, stacks: Mapping[str, InProcessStack]) -> Cluster:
    return dynamo_cluster


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


OWN_TRAY = replace(
    nodes.GB200_TRAY,
    instance_type="own-tray",
    gpu_labels={**(nodes.GB200_TRAY.gpu_labels or {}), "pool": "gb200"},
    taints=({"key": "dedicated", "value": "serving", "effect": "NoSchedule"},),
)


@pytest.mark.parametrize("document", [pytest.param(each, id=each.stem) for each in DOCUMENTS])
def test_what_a_document_configures_passes_the_checks(
    serving: Cluster, stacks: Mapping[str, InProcessStack], document: Path
) -> None:
    """Each `up` as a preview: it asks the cluster the same, and the deployment stays for the next document."""
    stack = _copy(stacks["gb200-disagg" if document.stem == "kubernetes-kv-transfer" else "gb200-agg"])
    theirs = {key: stack.config[key] for key in ("kubeconfig", "context")}
    previews = 0
    with serving.another(nodes.GB200_TRAY), serving.another(OWN_TRAY):
        for command in _commands(document, "pulumi"):
            words = shlex.split(command, comments=True)[1:]
            if words[:2] == ["stack", "init"]:
                stack = stack_of(stack.driver, serving, TARGETS[words[2]], "another-place", platform="existing")
                del stack.config["model_cache_storage_class"]  # the document says it
                stack.secrets.clear()
            elif words[0] == "config":
                _configure(stack, words[1:])
                stack.config |= theirs  # those of a document are somebody else's
            elif words[0] in ("up", "preview"):
                stack.preview()
                previews += 1
    assert previews or "pulumi up" not in document.read_text()


def _copy(stack: InProcessStack) -> InProcessStack:
    return replace(
        stack,
        config=copy.deepcopy(stack.config),
        secrets=dict(stack.secrets),
        state=copy.deepcopy(stack.state),
    )


def _configure(stack: InProcessStack, words: list[str]) -> None:
    """`pulumi config set` and `rm`: with --path the value is a number or a truth value where it looks like one."""
    flags = {word for word in words if word.startswith("--")}
    operation, key, *value = [word for word in words if word not in flags]
    path = (
        [name or word for name, word in re.findall(r'\["([^"]+)"\]|([^.\[\]]+)', key)] if "--path" in flags else [key]
    )
    if "--secret" in flags:
        stack.secrets[key] = "hf_typed" if key == "hf_token" else "typed"
        return
    holder: Any = stack.config
    for name, below in itertools.pairwise(path):
        holder = _entered(holder, name, [] if below.isdigit() else {})
    if operation == "rm":
        del holder[path[-1]]
    else:
        _entered(holder, path[-1], None)
        holder[int(path[-1]) if isinstance(holder, list) else path[-1]] = yaml.safe_load(value[0])


def _entered(holder: Any, name: str, empty: Any) -> Any:
    """What is there under a name or a number; it begins as `empty`."""
    if isinstance(holder, list):
        if int(name) == len(holder):
            holder.append(empty)
        return holder[int(name)]
    return holder.setdefault(name, empty)


class _Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"models")

    def log_message(self, *arguments: object) -> None:
        pass
