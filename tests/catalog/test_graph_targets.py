"""Every target: the seed's and the recipe's values, valid for the CRD, and shaped as the graphs that were recorded."""

from __future__ import annotations

import time
from typing import Any

import pytest
import yaml

from serving_catalog import Catalog
from serving_catalog.graphs import GraphRequest, plan_graph
from serving_catalog.graphs.objects import GPU_RESOURCE, Resource
from serving_catalog.graphs.render import STEPS, as_json, as_yaml, step_objects
from tests.catalog import crd
from tests.catalog.graph_fixtures import TARGETS, argument, component, environment, main, options, plan, workers

SERVED = "openai/gpt-oss-120b"

# As the recipes have them; test_graph_defects names what is left out, and why.
DISAGGREGATED: dict[str, dict[str, Any]] = {
    "prefill.yaml": {
        "cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 9216},
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": 30},
        "disable_overlap_scheduler": True,
        "enable_attention_dp": False,
        "kv_cache_config": {"dtype": "fp8", "enable_block_reuse": False, "free_gpu_memory_fraction": 0.8},
        "max_batch_size": 64,
        "max_num_tokens": 20000,
        "max_seq_len": 9000,
        "moe_config": {"backend": "TRTLLM"},
        "moe_expert_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "print_iter_log": True,
        "stream_interval": 20,
        "tensor_parallel_size": 1,
        "trust_remote_code": True,
    },
    "decode.yaml": {
        "allreduce_strategy": "AUTO",
        "cache_transceiver_config": {"backend": "UCX", "max_tokens_in_buffer": 9216},
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": 1280},
        "disable_overlap_scheduler": False,
        "enable_attention_dp": False,
        "kv_cache_config": {"dtype": "fp8", "enable_block_reuse": False, "free_gpu_memory_fraction": 0.85},
        "max_batch_size": 1280,
        "max_num_tokens": 20000,
        "max_seq_len": 11000,
        "moe_config": {"backend": "TRTLLM"},
        "moe_expert_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "print_iter_log": True,
        "stream_interval": 20,
        "tensor_parallel_size": 4,
        "trust_remote_code": True,
    },
}
AGGREGATED: dict[str, Any] = {
    "cuda_graph_config": {"enable_padding": True, "max_batch_size": 800},
    "enable_attention_dp": True,
    "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.9},
    "max_batch_size": 800,
    "moe_config": {"backend": "CUTLASS"},
    "moe_expert_parallel_size": 4,
    "stream_interval": 20,
    "tensor_parallel_size": 4,
}


def test_the_targets_are_the_seeds_and_the_two_for_common_clusters(catalog: Catalog) -> None:
    assert tuple(catalog.graphs) == TARGETS
    assert catalog.dynamo.default_release == "1.2.1"
    shapes = {
        name: (plan(name).gpus, plan(name).gpu, [(w.type, w.replicas) for w in workers(plan(name))]) for name in TARGETS
    }
    assert shapes == {
        "gb200-agg": (4, "GB200", [("worker", 1)]),
        "gb200-disagg": (5, "GB200", [("prefill", 1), ("decode", 1)]),
        "b200-disagg": (5, "B200", [("prefill", 1), ("decode", 1)]),
        "h200-agg": (8, "H200", [("worker", 8)]),
        "b200-agg": (8, "B200", [("worker", 8)]),
    }


def test_engine_options_are_the_recipes() -> None:
    assert options(plan("gb200-agg")) == AGGREGATED
    for target in ("gb200-disagg", "b200-disagg"):
        made = plan(target)
        assert {file: options(made, file) for file in made.engine_config.data} == DISAGGREGATED


@pytest.mark.parametrize("target", ["gb200-disagg", "b200-disagg"])
def test_disaggregated_variables_are_the_recipes(target: str) -> None:
    for worker in workers(plan(target)):
        assert (
            environment(worker).items()
            >= {
                "TRTLLM_ENABLE_PDL": "1",
                "TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "True",
                "OVERRIDE_QUANT_ALGO": "W4A8_MXFP4_MXFP8",
                "NCCL_GRAPH_REGISTER": "0",
                "OMPI_MCA_coll_ucc_enable": "0",
            }.items()
        )
        assert argument(worker, "--disaggregation-mode") == worker.type
        assert worker.shared_memory_size == "80Gi"


@pytest.mark.parametrize(
    ("target", "image"),
    [
        ("gb200-agg", "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:1.2.1"),
        ("b200-disagg", "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:1.2.1"),
        ("h200-agg", "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.2.1"),
    ],
)
def test_every_component_runs_the_releases_runtime(target: str, image: str) -> None:
    made = plan(target)
    assert {main(part).image for part in made.graph.spec.components} == {image} == {made.runtime_image}


@pytest.mark.parametrize(
    ("release", "variable", "backend"),
    [
        ("1.2.1", "1", None),
        ("1.3.1", "1", None),
        ("1.4.0", None, "flashinfer_trtllm"),
        ("1.6.1", None, "flashinfer_trtllm"),
    ],
)
def test_vllm_on_blackwell_is_told_its_moe_kernels_in_the_releases_own_way(
    release: str, variable: str | None, backend: str | None
) -> None:
    made = plan("b200-agg", release=release)
    assert environment(component(made, "worker")).get("VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8") == variable
    assert options(made).get("moe-backend") == backend


@pytest.mark.parametrize("target", TARGETS)
def test_gpus_are_asked_for_where_the_target_runs(target: str, catalog: Catalog) -> None:
    made, gpu = plan(target), catalog.gpus[catalog.graphs[target].gpu]
    arch = {"aarch64": "arm64", "x86_64": "amd64"}[gpu.cpu_architecture]
    assert sum(node.pods * node.gpus_per_pod for node in made.required_nodes) == made.gpus
    for worker, node in zip(workers(made), made.required_nodes, strict=True):
        spec, resources = worker.pod_template.spec, main(worker).resources
        assert resources is not None
        assert resources.limits == {GPU_RESOURCE: str(node.gpus_per_pod)}
        assert resources.requests == resources.limits
        assert spec.node_selector["kubernetes.io/arch"] == arch
        assert spec.affinity is not None
        assert spec.affinity.node_affinity is not None
        required = spec.affinity.node_affinity.required_during_scheduling_ignored_during_execution
        assert required is not None
        (expression,) = required.node_selector_terms[0].match_expressions
        assert expression.key == "nvidia.com/gpu.product"
        assert expression.values == tuple(name.replace(" ", "-") for name in gpu.names) == node.gpu_products


@pytest.mark.skipif(not crd.available(), reason="the CRDs of Dynamo are not here (DYNAMO_CRDS)")
@pytest.mark.parametrize("rollout", ["in_place", "blue_green", "recreate"])
@pytest.mark.parametrize("target", TARGETS)
def test_graphs_are_valid_for_the_real_crd(target: str, rollout: str) -> None:
    made = plan(
        target,
        rollout=rollout,
        runtime_version="1.2.1",
        pull_secrets=["ngc"],
        labels={"team": "serving"},
        annotations={"example.com/owner": "serving"},
        resources={"frontend": {"cpu": "4", "memory": "8Gi"}},
        placement={"priority_class": "high", "scheduler_name": "other", "tolerations": [{"key": "a"}]},
    )
    assert crd.problems(made.graph.manifest()) == []


@pytest.mark.skipif(not crd.available(), reason="the CRDs of Dynamo are not here (DYNAMO_CRDS)")
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("spec", "components", 1, "type"), "main", "'main' is not one of"),
        (("spec", "components", 1, "envFromSecret"), "x", "Additional properties are not allowed ('envFromSecret'"),
        (("spec", "backendFramework"), "tensorrt", "'tensorrt' is not one of"),
        (("spec", "components", 1, "replicas"), "1", "'1' is not of type 'integer'"),
        (("spec", "components", 1, "podTemplate", "spec", "tolerations", 0, "keys"), "x", "('keys' was unexpected)"),
    ],
)
def test_the_judge_refuses(path: tuple[str | int, ...], value: object, message: str) -> None:
    manifest: Any = plan("gb200-agg").graph.manifest()
    here = manifest
    for step in path[:-1]:
        here = here[step]
    here[path[-1]] = value
    assert message in "\n".join(crd.problems(manifest))


@pytest.mark.skipif(not crd.RECORDINGS.is_dir(), reason="the operator's recordings are not here (DYNAMO_RECORDINGS)")
@pytest.mark.parametrize(("target", "recorded"), [("gb200-agg", "n1"), ("gb200-disagg", "disagg")])
def test_graphs_have_the_shape_of_those_the_real_operator_took(target: str, recorded: str) -> None:
    theirs = yaml.safe_load((crd.RECORDINGS / "submitted" / f"{recorded}.yaml").read_text(encoding="utf-8"))
    ours = plan(target).graph.manifest()
    assert {key: ours[key] for key in ("apiVersion", "kind")} == {key: theirs[key] for key in ("apiVersion", "kind")}
    assert ours["metadata"]["name"] == theirs["metadata"]["name"]
    assert ours["spec"]["backendFramework"] == theirs["spec"]["backendFramework"]
    for mine, recording in zip(ours["spec"]["components"], theirs["spec"]["components"], strict=True):
        same = ("name", "type", "replicas", "sharedMemorySize")
        assert {key: mine.get(key) for key in same} == {key: recording.get(key) for key in same}
        my_pod, their_pod = mine["podTemplate"]["spec"], recording["podTemplate"]["spec"]
        mine_main, their_main = my_pod["containers"][0], their_pod["containers"][0]
        assert mine_main["image"] == their_main["image"]
        assert mine_main.get("resources") == their_main.get("resources")
        for selected, value in their_pod.get("nodeSelector", {}).items():
            assert my_pod["nodeSelector"][selected] == value
        for toleration in their_pod.get("tolerations", []):
            assert toleration in my_pod["tolerations"]
        words = [word.strip('"') for word in their_main["args"][0].split()]
        for flag in ("--router-mode", "--http-port", "--disaggregation-mode", "--served-model-name"):
            if flag in words:
                assert mine_main["args"][mine_main["args"].index(flag) + 1] == words[words.index(flag) + 1]
        noted = recording["podTemplate"].get("metadata", {}).get("annotations", {})
        assert noted.items() <= mine["podTemplate"]["metadata"].get("annotations", {}).items()


def test_objects_come_in_the_order_they_are_applied() -> None:
    made = plan("gb200-agg", network_policy=True, benchmark={"run_id": "1"})
    kinds = [resource.KIND for resource in made.objects()]
    assert kinds == [
        "Namespace",
        *["NetworkPolicy"] * 3,
        "PersistentVolumeClaim",
        "ConfigMap",
        "Job",
        "ConfigMap",
        "DynamoGraphDeployment",
        "Job",
        "Job",
    ]
    steps = [resource for step in STEPS for resource in step_objects(made, step)]
    assert {_identity(resource) for resource in steps} == {_identity(resource) for resource in made.objects()}


def _identity(resource: Resource) -> tuple[str, str]:
    return resource.KIND, resource.name


def test_every_object_is_in_the_namespace_with_the_users_labels_and_annotations() -> None:
    made = plan(
        "gb200-disagg",
        namespace="serving",
        labels={"team": "serving"},
        annotations={"example.com/owner": "me"},
        network_policy=True,
        benchmark={"run_id": "1"},
    )
    for resource in made.objects():
        metadata = resource.metadata
        assert metadata.namespace == (None if resource.KIND == "Namespace" else "serving"), resource
        assert metadata.labels["team"] == "serving", resource
        assert metadata.annotations["example.com/owner"] == "me", resource
    for part in made.graph.spec.components:
        assert part.pod_template.metadata.labels["team"] == "serving"
        assert part.pod_template.metadata.annotations["example.com/owner"] == "me"


def test_what_graphs_share_names_no_graph() -> None:
    """Aggregated and disaggregated stand side by side in one namespace: they apply the same claim and namespace."""
    one, other = plan("gb200-agg"), plan("gb200-disagg")
    assert one.claim is not None
    assert other.claim is not None
    assert one.claim.manifest() == other.claim.manifest()
    assert one.namespace_object.manifest() == other.namespace_object.manifest()
    apart = [{_identity(resource) for resource in made.objects()} for made in (one, other)]
    assert apart[0] & apart[1] == {("PersistentVolumeClaim", "model-cache"), ("Namespace", "gpt-oss")}


@pytest.mark.parametrize("registry", ["registry.example:5000", "registry.example/mirror"])
def test_every_image_comes_from_the_mirror(registry: str) -> None:
    made = plan("h200-agg", image_registry=registry, tools_image="python:3.12-slim", benchmark={"run_id": "1"})
    assert made.runtime_image == f"{registry}/nvidia/ai-dynamo/vllm-runtime:1.2.1"
    assert made.tools_image == f"{registry}/library/python:3.12-slim"
    images = [
        line.split("image:")[1].strip()
        for line in as_yaml(made).splitlines()
        if line.strip().startswith(("image:", "- image:"))
    ]
    assert images
    assert all(image.startswith(f"{registry}/") for image in images)


def test_manifests_hold_no_nulls_and_read_back(catalog: Catalog) -> None:
    made = plan("gb200-disagg", network_policy=True, benchmark={"run_id": "1"})
    documents = list(yaml.safe_load_all(as_yaml(made)))
    assert documents == [resource.manifest() for resource in made.objects()]
    assert "null" not in as_json(made)


def test_the_same_request_gives_the_same_bytes() -> None:
    assert as_yaml(plan("h200-agg")) == as_yaml(plan("h200-agg"))


def test_commands_a_person_types_are_the_seeds() -> None:
    made = plan("gb200-agg", namespace="serving")
    assert made.frontend_service == "gpt-oss-agg-frontend"
    assert made.port_forward_command == "kubectl port-forward --namespace serving svc/gpt-oss-agg-frontend 8000:8000"
    assert made.url == "http://gpt-oss-agg-frontend.serving.svc:8000"
    assert '"model":"openai/gpt-oss-120b"' in made.curl_command
    assert made.served_model_id == SERVED


def test_overrides_reach_the_file_the_variables_and_what_follows_them() -> None:
    made = plan(
        "gb200-disagg",
        "decode.max_batch_size=640",
        "prefill.max_batch_size=32",
        "decode.kv_cache_memory_fraction=0.7",
        "decode.environment.NCCL_DEBUG=INFO",
        "frontend.environment.DYN_LOG=debug",
    )
    decode, prefill = options(made, "decode.yaml"), options(made, "prefill.yaml")
    assert (decode["max_batch_size"], decode["cuda_graph_config"]["max_batch_size"]) == (640, 640)
    assert (prefill["max_batch_size"], prefill["cuda_graph_config"]["max_batch_size"]) == (32, 30)
    assert decode["kv_cache_config"]["free_gpu_memory_fraction"] == 0.7
    assert environment(component(made, "decode"))["NCCL_DEBUG"] == "INFO"
    assert "NCCL_DEBUG" not in environment(component(made, "prefill"))
    assert environment(component(made, "frontend"))["DYN_LOG"] == "debug"


def test_key_value_routing_is_one_setting() -> None:
    made = plan("gb200-agg", router_mode="kv")
    assert argument(component(made, "frontend"), "--router-mode") == "kv"
    assert options(made)["kv_cache_config"]["enable_block_reuse"] is True
    assert "--publish-events-and-metrics" in main(component(made, "worker")).args
    assert "--publish-kv-events" in main(component(plan("gb200-agg", router_mode="kv", release="1.6.1"), "worker")).args


def test_replicas_resources_and_placement_are_the_users() -> None:
    made = plan(
        "gb200-agg",
        replicas={"worker": 2, "frontend": 3},
        resources={"worker": {"cpu": "32", "memory": "256Gi"}},
        placement={
            "node_selector": {"pool": "gb200"},
            "tolerations": [{"key": "dedicated", "operator": "Equal", "value": "llm", "effect": "NoSchedule"}],
            "gpu_products": [],
            "priority_class": "serving",
            "scheduler_name": "kai-scheduler",
        },
    )
    worker, spec = component(made, "worker"), component(made, "worker").pod_template.spec
    assert (made.gpus, worker.replicas, component(made, "frontend").replicas) == (8, 2, 3)
    resources = main(worker).resources
    assert resources is not None
    assert resources.requests == {"cpu": "32", "memory": "256Gi", GPU_RESOURCE: "4"}
    assert spec.node_selector == {"kubernetes.io/arch": "arm64", "pool": "gb200"}
    assert spec.affinity is None
    assert [toleration.key for toleration in spec.tolerations] == ["dedicated"]
    assert (spec.priority_class_name, spec.scheduler_name) == ("serving", "kai-scheduler")


def test_prefill_and_decode_are_near_each_other_where_a_node_has_room() -> None:
    made = plan("b200-disagg")
    for kind, other in (("prefill", "decode"), ("decode", "prefill")):
        affinity = component(made, kind).pod_template.spec.affinity
        assert affinity is not None
        assert affinity.pod_affinity is not None
        assert not affinity.pod_affinity.required_during_scheduling_ignored_during_execution
        (term,) = affinity.pod_affinity.preferred_during_scheduling_ignored_during_execution
        (expression,) = term.pod_affinity_term.label_selector.match_expressions
        assert (expression.values, term.pod_affinity_term.topology_key) == ((other,), "kubernetes.io/hostname")


def test_workers_may_ask_for_rdma() -> None:
    made = plan("b200-disagg", resources={"prefill": {"rdma/ib": "1"}, "decode": {"rdma/ib": "4", "cpu": "16"}})
    decode = main(component(made, "decode"))
    assert decode.resources is not None
    assert decode.resources.limits == {"rdma/ib": "4", GPU_RESOURCE: "4"}
    assert decode.resources.requests == {"rdma/ib": "4", "cpu": "16", GPU_RESOURCE: "4"}
    assert decode.security_context is not None
    assert decode.security_context.capabilities is not None
    assert decode.security_context.capabilities.add == ("IPC_LOCK",)
    assert main(component(plan("b200-disagg"), "decode")).security_context is None


def test_one_node_for_everything_may_use_a_volume_of_one_node() -> None:
    made = plan(
        "h200-agg",
        model_cache={"access_mode": "ReadWriteOnce", "storage_class": "local-path"},
        placement={"node_selector": {"kubernetes.io/hostname": "dgx-1"}},
    )
    assert made.claim is not None
    assert made.claim.spec.access_modes == ("ReadWriteOnce",)
    frontend = component(made, "frontend").pod_template.spec
    assert frontend.node_selector == {"kubernetes.io/hostname": "dgx-1"}
    assert "nvidia.com/gpu" in {toleration.key for toleration in frontend.tolerations}
    assert made.job_context.placement.node_selector == {"kubernetes.io/hostname": "dgx-1"}


def test_an_existing_claim_is_not_made() -> None:
    made = plan("gb200-agg", model_cache={"claim": "weights", "existing": True})
    assert made.claim is None
    volume = component(made, "worker").pod_template.spec.volumes[0].persistent_volume_claim
    assert volume is not None
    assert volume.claim_name == "weights"


def test_planning_every_target_takes_well_under_a_second(catalog: Catalog) -> None:
    for target in TARGETS:  # schemas are read once
        plan_graph(GraphRequest(target=target), catalog)
    begun = time.process_time()
    for target in TARGETS:
        plan_graph(GraphRequest(target=target), catalog)
    assert time.process_time() - begun < 1
