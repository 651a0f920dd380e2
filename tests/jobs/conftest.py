"""Jobs as the planner renders them, run as processes against the stand-in hub and the real Dynamo frontend."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from serving_catalog.graphs.jobs import GraphJobs, plan_jobs
from serving_catalog.graphs.objects import Job
from serving_catalog.graphs.planning import plan_graph
from serving_catalog.graphs.plans import GraphPlan
from serving_catalog.graphs.programs import BENCHMARK_CONSTRAINTS, FETCH_CONSTRAINTS
from serving_catalog.graphs.requests import graph_request_from
from serving_catalog.loading import Catalog, load_catalog
from tests.stand_ins.hub import content
from tests.weights.conftest import ROOT, _servers, hub

from .dynamo import Dynamo
from .pods import Pod, Ran, Secrets
from .tools import installed

__all__ = ["_servers", "hub"]

MODEL = "openai/gpt-oss-120b"
SECRETS: Secrets = {"hf-token-secret": {"HF_TOKEN": "hf_ThisIsNobodysToken0123456789"}}


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    """The project's catalog, with the small models of the stand-in hub."""
    return load_catalog(ROOT / "tests" / "stand_ins" / "hub" / "catalog_overlay")


@pytest.fixture
def plan(catalog: Catalog) -> Callable[..., GraphPlan]:
    """plan(target, **settings): a plan for the stand-in hub's model."""

    def make(target: str = "gb200-agg", **settings: Any) -> GraphPlan:
        return plan_graph(graph_request_from({"target": target, **settings}), catalog)

    return make


@pytest.fixture
def jobs(plan: Callable[..., GraphPlan]) -> Callable[..., GraphJobs]:
    """jobs(target, context changes, **settings)."""

    def make(target: str = "gb200-agg", changes: dict[str, Any] | None = None, **settings: Any) -> GraphJobs:
        return plan_jobs(plan(target, **settings).job_context.model_copy(update=changes or {}))

    return make


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the pods' user can reach, as pytest's own cannot be."""
    path = Path(tempfile.mkdtemp(prefix="jobs-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def claim(place: Path) -> Path:
    """An empty volume, shared by the pods of a test."""
    path = place / "claim"
    path.mkdir()
    return path


@pytest.fixture(scope="session")
def fetch_tools(catalog: Catalog) -> Path:
    version = catalog.releases.huggingface_hub.version
    return installed(f"huggingface-hub=={version}", FETCH_CONSTRAINTS)


@pytest.fixture(scope="session")
def aiperf_tools(catalog: Catalog) -> Path:
    return installed(f"aiperf=={catalog.releases.aiperf.version}", BENCHMARK_CONSTRAINTS)


@pytest.fixture
def pod(place: Path, claim: Path) -> Callable[..., Pod]:
    """pod(jobs, job): the next pod of this Job, with the test's volume and Secret."""
    made: list[Pod] = []

    def make(jobs: GraphJobs, job: Job, secrets: Secrets = SECRETS, **more: Any) -> Pod:
        directory = place / f"pod-{len(made)}"
        directory.mkdir()
        made.append(Pod(job, (jobs.programs,), directory, {"model-cache": claim}, secrets, **more))
        return made[-1]

    return make


@pytest.fixture
def served_weights(claim: Path) -> Path:
    """The claim after the download: what the benchmark takes its tokenizer from."""
    content.write_cache(claim / "weights", MODEL)
    for path in [claim, *claim.rglob("*")]:
        path.chmod(0o777 if path.is_dir() else 0o644)
    return claim


@pytest.fixture(scope="session")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face cache for Dynamo's own processes."""
    path = tmp_path_factory.mktemp("hub")
    content.write_cache(path, MODEL)
    return path


@pytest.fixture(scope="session")
def aggregated(hub_cache: Path) -> Iterator[Dynamo]:
    with Dynamo(hub_cache, MODEL) as running:
        running.start_worker("agg")
        running.wait_listed()
        yield running


@pytest.fixture(scope="session")
def disaggregated(hub_cache: Path) -> Iterator[Dynamo]:
    with Dynamo(hub_cache, MODEL) as running:
        running.start_worker("prefill")
        running.start_worker("decode")
        running.wait_listed()
        yield running


def reported(ran: Ran) -> dict[str, Any]:
    """What the last line says, as `diagnose` reads it: whole in what Kubernetes keeps of a failed container's log."""
    assert len(ran.last_line.encode()) <= 2048, "cut in the pod's status"
    found: dict[str, Any] = json.loads(ran.last_line)
    assert found["ok"] is (ran.status == 0), ran.log
    return found
