"""What the Jobs are, for every target: restricted, bounded, placed, and the repository's own programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serving_catalog.errors import PlanError
from serving_catalog.graphs.jobs import GraphJobs, job_programs, plan_jobs
from serving_catalog.graphs.objects import Job
from serving_catalog.graphs.plans import GraphPlan
from serving_catalog.graphs.programs import FILES
from serving_catalog.loading import Catalog, load_catalog

TARGETS = sorted(load_catalog().graphs)


def all_jobs(made: GraphJobs) -> Iterator[Job]:
    assert made.benchmark is not None
    yield from (made.download, made.smoke, made.benchmark)


@pytest.mark.parametrize("target", TARGETS)
def test_every_pod_is_restricted(jobs: Callable[..., GraphJobs], target: str) -> None:
    """The Pod Security Standards' restricted profile, and what it leaves open."""
    for job in all_jobs(jobs(target, benchmark={})):
        pod: dict[str, Any] = job.manifest()["spec"]["template"]["spec"]
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["fsGroup"] == 1000
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert {next(key for key in volume if key != "name") for volume in pod["volumes"]} <= {
            "configMap",
            "emptyDir",
            "persistentVolumeClaim",
        }
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
            }
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert container["resources"]["limits"].keys() == {"memory"}
            assert "nvidia.com/gpu" not in json.dumps(container)


@pytest.mark.parametrize("target", TARGETS)
def test_every_job_is_bounded(plan: Callable[..., GraphPlan], target: str) -> None:
    planned = plan(target, benchmark={})
    made = plan_jobs(planned.job_context)
    deadlines = [job.spec.active_deadline_seconds for job in all_jobs(made)]
    assert deadlines == [
        planned.download_within_seconds,
        planned.smoke_within_seconds,
        planned.benchmark_within_seconds,
    ]
    assert [job.spec.backoff_limit for job in all_jobs(made)] == [4, 1, 0]
    for job in all_jobs(made):
        waits = [
            float(word.partition("=")[2])
            for container in (*job.spec.template.spec.init_containers, *job.spec.template.spec.containers)
            for word in container.args
            if word.startswith(("--wait=", "--timeout="))
        ]
        assert sum(waits) <= (job.spec.active_deadline_seconds or 0), "the program gives up before the Job does"


def test_the_benchmark_counts_five_gpus_as_five(jobs: Callable[..., GraphJobs]) -> None:
    found = {}
    for published in (False, True):
        made = jobs("gb200-disagg", benchmark={"as_published": published})
        assert made.benchmark is not None
        args = made.benchmark.spec.template.spec.containers[0].args
        shape = json.loads(next(word for word in args if word.startswith("--shape=")).partition("=")[2])
        found[published] = (shape["concurrency"], shape["minimum_requests"], shape["warmup_requests"])
        assert "--gpus=5" in args
    assert found == {False: ([1280], 12800, 1280), True: ([1536], 15360, 1536)}


def test_the_benchmark_has_what_the_recipe_gives_it(jobs: Callable[..., GraphJobs], catalog: Catalog) -> None:
    made = jobs("gb200-agg", benchmark={"run_id": "7"})
    assert made.benchmark is not None
    assert made.benchmark.name == "gpt-oss-agg-benchmark-7"
    pod = made.benchmark.spec.template.spec
    assert [c.name for c in (*pod.init_containers, *pod.containers)] == ["install", "wait", "benchmark"]
    args = pod.containers[0].args
    revision = catalog.models["gpt-oss-120b"].revision
    for word in (
        "--url=http://gpt-oss-agg-frontend.gpt-oss.svc:8000",
        f"--tokenizer-revision={revision}",
        "--tokenizer-cache=/model-cache/weights",
        "--workers=252",
        "--record-processors=32",
        "--dataset-entries=12800",
        "--output=/model-cache/benchmarks/gpt-oss-agg/7",
    ):
        assert word in args
    assert {v.name: v.value for v in pod.containers[0].env}["AIPERF_HTTP_CONNECTION_LIMIT"] == "252"
    assert pod.security_context is not None
    assert [(s.name, s.value) for s in pod.security_context.sysctls] == [("net.ipv4.ip_local_port_range", "1024 65000")]


def test_only_the_download_knows_the_token(jobs: Callable[..., GraphJobs]) -> None:
    made = jobs(benchmark={}, hf_token_secret={"name": "mine", "key": "token"})
    referring = [
        (job.name, container.name, variable.name, variable.value_from.secret_key_ref)
        for job in all_jobs(made)
        for container in (*job.spec.template.spec.init_containers, *job.spec.template.spec.containers)
        for variable in container.env
        if variable.value_from is not None and variable.value_from.secret_key_ref is not None
    ]
    assert [(job, container, name, (key.name, key.key)) for job, container, name, key in referring] == [
        ("gpt-oss-agg-download", "download", "HF_TOKEN", ("mine", "token"))
    ]


def test_mirrors_reach_the_containers_that_use_them(jobs: Callable[..., GraphJobs]) -> None:
    made = jobs(
        benchmark={},
        hub_endpoint="https://hub.example.com",
        encodings_url="https://files.example.com/harmony/",
        package_index="https://index.example.com/simple",
        image_registry="registry.example.com/mirror",
        pull_secrets=["pull"],
        job_environment={"HTTPS_PROXY": "http://proxy:3128"},
    )
    for job in all_jobs(made):
        pod = job.spec.template.spec
        assert [reference.name for reference in pod.image_pull_secrets] == ["pull"]
        for container in (*pod.init_containers, *pod.containers):
            env = {variable.name: variable.value for variable in container.env}
            assert container.image is not None
            assert container.image.startswith("registry.example.com/mirror/")
            assert env["HTTPS_PROXY"] == "http://proxy:3128"
            index = "https://index.example.com/simple" if container.name == "install" else None
            assert env.get("PIP_INDEX_URL") == index
            assert env.get("HF_ENDPOINT") == ("https://hub.example.com" if container.name == "download" else None)

    fetch = next(word for word in made.download.spec.template.spec.containers[0].args if "tiktoken" in word)
    assert '"url":"https://files.example.com/harmony/o200k_base.tiktoken"' in fetch


def test_the_benchmark_has_a_compiler_for_what_has_no_wheel_on_arm64(jobs: Callable[..., GraphJobs]) -> None:
    images = [[c.image for c in job.spec.template.spec.containers] for job in all_jobs(jobs(benchmark={}))]
    slim, whole = "docker.io/library/python:3.12-slim", "docker.io/library/python:3.12"
    assert images == [[slim], [slim], [whole]]
    mine = [job.spec.template.spec.containers[0].image for job in all_jobs(jobs(benchmark={}, tools_image="mine:1"))]
    assert mine == ["mine:1"] * 3


def test_what_the_smoke_test_asks_is_a_setting(plan: Callable[..., GraphPlan]) -> None:
    asked = ["health", "model", "reasoning", "tool_call"]
    args = plan(smoke_probes=asked).smoke.spec.template.spec.containers[0].args
    assert "--probes=health,model,reasoning,tool_call" in args
    with pytest.raises(PlanError, match="smoke_probes"):
        plan(smoke_probes=["health", "poetry"])


def test_resources_that_are_asked_for_are_given(jobs: Callable[..., GraphJobs]) -> None:
    made = jobs(resources={"download": {"memory": "8Gi"}, "smoke": {"cpu": "1"}})
    needs = [job.spec.template.spec.containers[0].resources for job in (made.download, made.smoke)]
    assert [(n.requests, n.limits) for n in needs if n] == [
        ({"cpu": "2", "memory": "8Gi"}, {"memory": "8Gi"}),
        ({"cpu": "1", "memory": "128Mi"}, {"memory": "512Mi"}),
    ]


def test_the_programs_are_the_repositorys_own_files(plan: Callable[..., GraphPlan]) -> None:
    programs = job_programs(plan().job_context)
    assert {name: path.read_text() for name, path in FILES.items()} == programs.data
    assert programs.immutable
    assert sum(len(text.encode()) for text in programs.data.values()) < 1_000_000, "a ConfigMap holds 1 MiB"


def test_other_programs_are_another_config_map(plan: Callable[..., GraphPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    context = plan().job_context
    before = job_programs(context).name
    monkeypatch.setattr("serving_catalog.graphs.jobs.program_texts", lambda: {"fetch_weights.py": "changed"})
    assert job_programs(context).name != before
    assert plan_jobs(context).download.spec.template.spec.volumes[0].config_map is not None


def test_agg_and_disagg_share_nothing_but_the_claim(jobs: Callable[..., GraphJobs]) -> None:
    both = [jobs(target, benchmark={}) for target in ("gb200-agg", "gb200-disagg")]
    names = [{made.programs.name, *(job.name for job in all_jobs(made))} for made in both]
    assert not names[0] & names[1]
