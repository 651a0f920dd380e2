"""Defects of the published recipes, each fixed in what is rendered."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from serving_catalog import Catalog, load_catalog
from serving_catalog.graphs.objects import HttpGet
from serving_catalog.graphs.render import as_yaml
from tests.catalog.graph_fixtures import (
    TARGETS,
    TENSORRT_LLM,
    argument,
    component,
    environment,
    main,
    options,
    plan,
    workers,
)

GRAPH_LABEL = "nvidia.com/dynamo-graph-deployment-name"
TYPE_LABEL = "nvidia.com/dynamo-component-type"
HOSTNAME = "kubernetes.io/hostname"


@pytest.mark.parametrize("target", ["gb200-disagg", "b200-disagg"])
def test_prefill_and_decode_have_component_types_that_the_operator_knows(target: str) -> None:
    """`main`, as published, is admitted and then fails: only the frontend runs."""
    assert [part.type for part in plan(target).graph.spec.components] == ["frontend", "prefill", "decode"]


@pytest.mark.parametrize("release", ["1.2.0", "1.2.1", "1.3.1", "1.4.2", "1.5.1", "1.6.1"])
def test_attention_data_parallelism_on_gb200_forces_allgather(release: str) -> None:
    made = plan("gb200-agg", release=release)
    assert environment(component(made, "worker"))["TRTLLM_FORCE_COMM_METHOD"] == "ALLGATHER"


@pytest.mark.parametrize(
    ("target", "settings"),
    [("gb200-agg", ["worker.enable_attention_dp=false"]), ("gb200-disagg", []), ("b200-disagg", []), ("h200-agg", [])],
)
def test_allgather_is_forced_nowhere_else(target: str, settings: list[str]) -> None:
    for worker in workers(plan(target, *settings)):
        assert "TRTLLM_FORCE_COMM_METHOD" not in environment(worker)


def test_a_release_that_needs_no_workaround_gets_none(tmp_path: Path) -> None:
    (tmp_path / "dynamo.yml").write_text("releases: {1.6.1: {workarounds: []}}", encoding="utf-8")
    made = plan("gb200-agg", release="1.6.1", catalog=load_catalog(tmp_path))
    assert "TRTLLM_FORCE_COMM_METHOD" not in environment(component(made, "worker"))


def test_the_workaround_can_be_overridden() -> None:
    made = plan("gb200-agg", "worker.environment.TRTLLM_FORCE_COMM_METHOD=NVLINK_ONE_SIDED")
    assert environment(component(made, "worker"))["TRTLLM_FORCE_COMM_METHOD"] == "NVLINK_ONE_SIDED"


@pytest.mark.parametrize("target", ["gb200-disagg", "b200-disagg"])
def test_five_gpus_are_counted_as_five(target: str) -> None:
    benchmark = plan(target, benchmark={"run_id": "1"}).job_context.benchmark
    assert benchmark is not None
    assert (benchmark.gpus, benchmark.traffic.concurrency, benchmark.traffic.requests) == (5, 1280, 12800)


def test_as_published_is_what_the_recipe_ran() -> None:
    benchmark = plan("gb200-disagg", benchmark={"as_published": True}).job_context.benchmark
    assert benchmark is not None
    assert (benchmark.traffic.concurrency, benchmark.traffic.requests) == (1536, 15360)
    assert benchmark.gpus == 5  # figures for each GPU are right all the same
    benchmark = plan("gb200-agg", benchmark={"as_published": True}).job_context.benchmark
    assert benchmark is not None
    assert (benchmark.traffic.concurrency, benchmark.traffic.requests) == (3600, 36000)


def test_concurrency_follows_the_gpus() -> None:
    benchmark = plan("gb200-disagg", replicas={"decode": 2, "prefill": 2}, benchmark={}).job_context.benchmark
    assert benchmark is not None
    assert (benchmark.gpus, benchmark.traffic.concurrency) == (10, 2560)


def test_graphs_share_no_engine_config() -> None:
    """As published both are called llm-config: in one namespace the second overwrites the first."""
    names = [plan(target).engine_config.name for target in ("gb200-agg", "gb200-disagg")]
    assert len(set(names)) == 2
    assert all(re.fullmatch(r"gpt-oss-(dis)?agg-engine-[0-9a-f]{8}", name) for name in names)


@pytest.mark.parametrize("target", TARGETS)
def test_a_changed_engine_option_changes_the_config_maps_name_and_so_the_pods(target: str) -> None:
    kind = workers(plan(target))[-1].type
    one, other = plan(target), plan(target, f"{kind}.stream_interval=7")
    assert one.engine_config.name != other.engine_config.name
    assert one.engine_config.immutable
    for made in (one, other):
        for worker in workers(made):
            volumes = {volume.name: volume for volume in worker.pod_template.spec.volumes}
            mounted = volumes["engine-config"].config_map
            assert mounted is not None
            assert mounted.name == made.engine_config.name
    templates = [component(made, kind).pod_template for made in (one, other)]
    assert templates[0] != templates[1]


def test_what_is_not_an_engine_option_keeps_the_name() -> None:
    made = plan("gb200-agg", "worker.environment.NCCL_DEBUG=INFO", replicas={"worker": 2})
    assert made.engine_config.name == plan("gb200-agg").engine_config.name


@pytest.mark.parametrize("target", TARGETS)
def test_one_pinned_revision_is_downloaded_served_and_measured(target: str, catalog: Catalog) -> None:
    made = plan(target, benchmark={"run_id": "1"})
    revision = catalog.models["gpt-oss-120b"].revision
    assert made.model.revision == made.job_context.model.revision == revision
    snapshot = f"/model-cache/weights/models--openai--gpt-oss-120b/snapshots/{revision}"
    flag = "--model-path" if target in TENSORRT_LLM else "--model"
    assert {argument(worker, flag) for worker in workers(made)} == {snapshot}
    assert made.benchmark is not None
    for job in (made.download, made.benchmark):
        assert revision in json.dumps(job.manifest())
    others = set(re.findall(r"\b[0-9a-f]{40}\b", as_yaml(made))) - {revision}
    assert not others


@pytest.mark.parametrize("target", TARGETS)
def test_harmony_is_parsed(target: str) -> None:
    for worker in workers(plan(target)):
        assert argument(worker, "--dyn-reasoning-parser") == "gpt_oss"
        assert argument(worker, "--dyn-tool-call-parser") == "harmony"


@pytest.mark.parametrize("target", TARGETS)
def test_encodings_are_on_the_volume_for_clusters_without_egress(target: str) -> None:
    """The frontend renders Harmony too, and would fetch the vocabulary from the internet."""
    made = plan(target)
    assert [encoding.file for encoding in made.model.encodings] == ["o200k_base.tiktoken", "cl100k_base.tiktoken"]
    for part in made.graph.spec.components:
        assert environment(part)["TIKTOKEN_ENCODINGS_BASE"] == "/model-cache/encodings"
        assert environment(part)["HF_HUB_OFFLINE"] == "1"
        assert environment(part)["HF_HUB_CACHE"] == "/model-cache/weights"
        (mount,) = [mount for mount in main(part).volume_mounts if mount.name == "model-cache"]
        assert (mount.mount_path, mount.read_only) == ("/model-cache", True)


@pytest.mark.parametrize("target", TARGETS)
def test_the_token_is_in_no_serving_pod(target: str) -> None:
    manifest = json.dumps(plan(target).graph.manifest())
    assert "secretKeyRef" not in manifest
    assert "hf-token-secret" not in manifest
    assert "HF_TOKEN" not in manifest


@pytest.mark.parametrize("target", TARGETS)
def test_a_worker_has_the_time_that_a_load_takes_and_no_more(target: str) -> None:
    for seconds in (None, 2400):
        made = plan(target, load_timeout_seconds=seconds)
        for worker in workers(made):
            probe = main(worker).startup_probe
            assert probe is not None
            assert probe.http_get == HttpGet(path="/live", port=9090)
            allowed = (probe.period_seconds or 0) * (probe.failure_threshold or 0)
            assert allowed == (seconds or 3600)
            assert allowed >= 1800  # a load of thirty minutes is not broken off
        assert made.ready_within_seconds == (seconds or 3600) + 1800


def test_one_missed_answer_does_not_kill_a_loaded_worker() -> None:
    probe = main(component(plan("gb200-agg"), "worker")).liveness_probe
    assert probe is not None
    assert probe.failure_threshold == 3


@pytest.mark.parametrize("files", [True, False])
def test_the_wait_for_the_model_is_bounded(files: bool, tmp_path: Path) -> None:
    """The script as it is rendered, with the volume's path and the seconds of a sleep replaced."""
    (before,) = component(plan("gb200-agg", download_timeout_seconds=10), "worker").pod_template.spec.init_containers
    script = before.command[2].replace("/model-cache", str(tmp_path)).replace("sleep 5;", "sleep 0.01;")
    if files:
        for path in re.findall(rf"{re.escape(str(tmp_path))}\S+?(?=;|\s)", script):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).touch()
    done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == (0 if files else 1)
    assert ("not there after 10 s" in done.stderr) is not files


def test_waits_have_bounds() -> None:
    made = plan("gb200-agg", benchmark={"run_id": "1"})
    assert made.download_within_seconds == 7200
    assert made.smoke_within_seconds == 900 + 900
    assert made.benchmark_within_seconds == 900 + 7200


@pytest.mark.parametrize("target", TARGETS)
def test_tainted_gpu_nodes_are_tolerated_by_workers_and_by_no_other(target: str) -> None:
    made = plan(target)
    for worker in workers(made):
        taints = {(t.key, t.operator, t.effect) for t in worker.pod_template.spec.tolerations}
        assert ("nvidia.com/gpu", "Exists", "NoSchedule") in taints
    others = [component(made, "frontend").pod_template.spec.tolerations, made.job_context.placement.tolerations]
    assert "nvidia.com/gpu" not in {toleration.key for tolerations in others for toleration in tolerations}


def test_arm_nodes_of_clouds_are_tolerated() -> None:
    for part in plan("gb200-agg").graph.spec.components:
        (found,) = [t for t in part.pod_template.spec.tolerations if t.key == "kubernetes.io/arch"]
        assert (found.operator, found.value) == ("Equal", "arm64")
    assert "kubernetes.io/arch" not in component(plan("h200-agg"), "frontend").pod_template.model_dump_json()


def test_a_cluster_of_gpu_nodes_alone_can_be_used() -> None:
    made = plan("h200-agg", placement={"gpu_nodes_for_all": True}, benchmark={})
    tolerated = {t.key for t in component(made, "frontend").pod_template.spec.tolerations}
    assert "nvidia.com/gpu" in tolerated
    placement = made.job_context.benchmark_placement
    assert "nvidia.com/gpu" in {t.key for t in placement.tolerations}
    assert placement.affinity is not None
    assert placement.affinity.pod_anti_affinity is None


@pytest.mark.parametrize("target", TARGETS)
def test_frontends_keep_apart_by_labels_that_the_operator_sets(target: str) -> None:
    """As published the rule selects <graph>-frontend, a value that no pod has."""
    made = plan(target, replicas={"frontend": 2})
    affinity = component(made, "frontend").pod_template.spec.affinity
    assert affinity is not None
    assert affinity.pod_anti_affinity is not None
    (term,) = affinity.pod_anti_affinity.preferred_during_scheduling_ignored_during_execution
    assert term.pod_affinity_term.topology_key == HOSTNAME
    assert term.pod_affinity_term.label_selector.match_labels == {GRAPH_LABEL: made.name}
    (kind,) = term.pod_affinity_term.label_selector.match_expressions
    assert (kind.key, kind.values) == (TYPE_LABEL, ("frontend",))


@pytest.mark.parametrize("target", TARGETS)
def test_the_benchmark_shares_no_node_with_gpus_or_workers(target: str) -> None:
    made = plan(target, benchmark={"run_id": "1"})
    affinity = made.job_context.benchmark_placement.affinity
    assert affinity is not None
    assert affinity.node_affinity is not None
    required = affinity.node_affinity.required_during_scheduling_ignored_during_execution
    assert required is not None
    (expression,) = required.node_selector_terms[0].match_expressions
    assert (expression.key, expression.operator, expression.values) == ("nvidia.com/gpu.present", "NotIn", ("true",))
    assert affinity.pod_anti_affinity is not None
    (term,) = affinity.pod_anti_affinity.required_during_scheduling_ignored_during_execution
    assert term.label_selector.match_labels == {GRAPH_LABEL: made.name}
    assert set(term.label_selector.match_expressions[0].values) == {worker.type for worker in workers(made)}


@pytest.mark.parametrize("target", TARGETS)
def test_watching_selects_by_a_label_that_the_operator_sets(target: str) -> None:
    made = plan(target)
    assert f"-l {GRAPH_LABEL}={made.name} " in made.watch_command


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        (
            "in_place",
            {
                "nvidia.com/deployment-rolling-update-max-surge": "0",
                "nvidia.com/deployment-rolling-update-max-unavailable": "1",
            },
        ),
        ("recreate", {"nvidia.com/deployment-strategy": "Recreate"}),
        (
            "blue_green",
            {
                "nvidia.com/deployment-rolling-update-max-surge": "100%",
                "nvidia.com/deployment-rolling-update-max-unavailable": "0",
            },
        ),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_updates_finish_without_a_spare_tray_from_the_first_apply_on(
    target: str, rollout: str, expected: dict[str, str]
) -> None:
    made = plan(target, rollout=rollout)
    for worker in workers(made):
        assert worker.pod_template.metadata.annotations == expected
    assert not component(made, "frontend").pod_template.metadata.annotations


def test_updates_are_in_place_by_default() -> None:
    assert plan("gb200-agg").graph.manifest() == plan("gb200-agg", rollout="in_place").graph.manifest()


@pytest.mark.parametrize("target", TARGETS)
def test_a_worker_has_time_to_finish_its_answers(target: str) -> None:
    for part in plan(target).graph.spec.components:
        assert part.pod_template.spec.termination_grace_period_seconds == 180


@pytest.mark.parametrize("target", TARGETS)
def test_programs_are_started_without_a_shell(target: str) -> None:
    """As published /bin/sh is the first process, and keeps SIGTERM from the engine."""
    for part in plan(target).graph.spec.components:
        assert main(part).command[:2] == ("python3", "-m")


@pytest.mark.parametrize("file", ["prefill.yaml", "decode.yaml"])
def test_options_without_effect_are_left_out(file: str) -> None:
    found = options(plan("gb200-disagg"), file)
    assert "num_postprocess_workers" not in found
    assert "attention_dp_config" not in found


@pytest.mark.parametrize("target", TARGETS)
def test_no_option_is_said_twice(target: str) -> None:
    """Which of the two wins changed between releases: everything is in the file."""
    for worker in workers(plan(target)):
        flags = [word for word in main(worker).args if word.startswith("--")]
        assert not {"--tensor-parallel-size", "--max-batch-size", "--free-gpu-memory-fraction"} & set(flags)
        assert len(flags) == len(set(flags))


@pytest.mark.parametrize("target", ["gb200-disagg", "b200-disagg"])
def test_the_longest_prompt_fits_the_transfer_buffers(target: str) -> None:
    made = plan(target)
    prefill, decode = options(made, "prefill.yaml"), options(made, "decode.yaml")
    for side in (prefill, decode):
        assert side["cache_transceiver_config"]["max_tokens_in_buffer"] >= prefill["max_seq_len"]
    assert decode["max_seq_len"] > prefill["max_seq_len"]


def test_lengths_can_be_raised_together() -> None:
    made = plan(
        "b200-disagg",
        "prefill.max_seq_len=33000",
        "prefill.max_num_tokens=40000",
        "decode.max_seq_len=36000",
        "prefill.cache_transceiver_config.max_tokens_in_buffer=33000",
        "decode.cache_transceiver_config.max_tokens_in_buffer=33000",
        benchmark={"traffic": {"input_tokens": 32000, "output_tokens": 2000}},
    )
    assert options(made, "prefill.yaml")["max_seq_len"] == 33000
