"""The smoke Job against the real Dynamo frontend: what passes, and what it must catch."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from plugins.module_utils.gpt_oss.probe_endpoint import REMEDIES
from serving_catalog.graphs.jobs import GraphJobs
from tests.ports import free_port
from tests.weights.conftest import ROOT, wait_for

from .conftest import MODEL, reported
from .dynamo import Dynamo
from .pods import Pod, Ran


@pytest.fixture
def smoke(jobs: Callable[..., GraphJobs], pod: Callable[..., Pod]) -> Callable[..., Ran]:
    """smoke(url, target, **context changes): the Job's last container."""

    def run(url: str, target: str = "gb200-agg", **changes: Any) -> Ran:
        made = jobs(target, {"url": url, **changes})
        return pod(made, made.smoke).run()[-1]

    return run


@pytest.fixture
def lonely(hub_cache: Path) -> Iterator[Dynamo]:
    """A frontend whose workers are the test's."""
    with Dynamo(hub_cache, MODEL) as running:
        running.wait_answering()
        yield running


def failed(ran: Ran) -> dict[str, dict[str, Any]]:
    """The checks that failed, by probe."""
    assert ran.status == 1, ran.log
    assert "Traceback" not in ran.log
    return {check["id"].split(".")[-1]: check for check in reported(ran)["checks"] if check["ok"] is False}


@pytest.mark.parametrize(("target", "running"), [("gb200-agg", "aggregated"), ("gb200-disagg", "disaggregated")])
def test_a_deployment_that_serves_passes(
    smoke: Callable[..., Ran], target: str, running: str, request: pytest.FixtureRequest
) -> None:
    ran = smoke(request.getfixturevalue(running).url, target)
    assert ran.status == 0, ran.log
    found = reported(ran)
    graph = target.replace("gb200", "gpt-oss")
    assert [check["id"] for check in found["checks"]] == [
        f"endpoint.{graph}.{probe}" for probe in ("health", "model", "completion", "stream")
    ]
    assert all(check["ok"] for check in found["checks"])


def test_nothing_is_installed_or_mounted_for_it(jobs: Callable[..., GraphJobs]) -> None:
    spec = jobs().smoke.spec.template.spec
    assert spec.init_containers == ()
    assert {volume.name for volume in spec.volumes} == {"programs", "scratch"}


def test_it_waits_for_workers_that_come_late(smoke: Callable[..., Ran], lonely: Dynamo) -> None:
    lonely.start_worker("agg")  # takes seconds, in which the frontend's health is 200 already
    ran = smoke(lonely.url)
    assert ran.status == 0, ran.log


def test_a_frontend_without_workers_fails_within_its_time(smoke: Callable[..., Ran], lonely: Dynamo) -> None:
    started = time.monotonic()
    wrong = failed(smoke(lonely.url, endpoint_wait_seconds=3))
    assert time.monotonic() - started < 120  # it is given 3 s; the default is many minutes
    assert list(wrong) == ["health"]
    assert "status 200, models listed: none" in wrong["health"]["seen"]
    assert "kubernetes-workers-not-discovered.md" in wrong["health"]["remedy"]


def test_decode_without_prefill_fails(smoke: Callable[..., Ran], lonely: Dynamo) -> None:
    lonely.start_worker("decode")
    wrong = failed(smoke(lonely.url, "gb200-disagg", endpoint_wait_seconds=15))
    assert wrong, "nobody can prefill"


def test_nobody_answers(smoke: Callable[..., Ran]) -> None:
    wrong = failed(smoke(f"http://127.0.0.1:{free_port()}", endpoint_wait_seconds=2))
    assert "connection refused" in wrong["health"]["seen"]


def test_a_service_that_is_not_there(smoke: Callable[..., Ran]) -> None:
    wrong = failed(smoke("http://gpt-oss-agg-frontend.nowhere.invalid:8000", endpoint_wait_seconds=2))
    assert "name" in wrong["health"]["seen"].lower()


def test_another_model(smoke: Callable[..., Ran], aggregated: Dynamo) -> None:
    wrong = failed(smoke(aggregated.url, served_model_id="openai/gpt-oss-20b", endpoint_wait_seconds=2))
    assert wrong["health"]["seen"].startswith(f"status 200, models listed: {MODEL}")


def test_workers_that_die_after_they_were_discovered(smoke: Callable[..., Ran], lonely: Dynamo) -> None:
    lonely.start_worker("agg")
    lonely.wait_listed()
    lonely.kill("agg")  # its lease is still good: the model stays listed for a while
    wrong = failed(smoke(lonely.url, endpoint_wait_seconds=5))
    assert wrong


def test_every_remedy_leads_to_a_page_that_is_there() -> None:
    pages = {page for remedy in REMEDIES["kubernetes"].values() for page in re.findall(r"docs/\S+\.md", remedy)}
    assert len(pages) > 3
    assert [page for page in pages if not (ROOT / page).is_file()] == []


@pytest.mark.parametrize("probe", ["reasoning", "tool_call"])
def test_an_engine_without_harmony_is_caught_where_asked_for(
    smoke: Callable[..., Ran], aggregated: Dynamo, probe: str
) -> None:
    wrong = failed(smoke(aggregated.url, smoke_probes=("health", "model", probe)))
    assert list(wrong) == [probe]
    assert "parsers gpt_oss and harmony" in wrong[probe]["remedy"]


def test_a_pod_that_is_deleted_ends_at_once(jobs: Callable[..., GraphJobs], pod: Callable[..., Pod]) -> None:
    made = jobs(changes={"url": f"http://127.0.0.1:{free_port()}"})
    process = pod(made, made.smoke).start(made.smoke.spec.template.spec.containers[0])
    wait_for(lambda: handles(process.pid, signal.SIGTERM), "the program's start")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler of its own for the signal: before that, any process would end by it."""
    caught = re.search(r"^SigCgt:\t([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
