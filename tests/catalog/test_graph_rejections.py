"""Bad input for Kubernetes: key, value and what is allowed, all of it at once, before anything is created."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest

from serving_catalog import PlanError
from serving_catalog.graphs import graph_request_from
from tests.catalog.graph_fixtures import TARGETS, plan

LONG = "gpt-oss-for-the-department-of-very-long-names"

# Settings of a request, and what is said of them.
REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    (
        "gb200-ag",
        {},
        "target: 'gb200-ag' is not known (did you mean gb200-agg?); "
        "allowed: gb200-agg, gb200-disagg, b200-disagg, h200-agg, b200-agg",
    ),
    (
        "gb200-agg",
        {"release": "1.2.3"},
        "release: '1.2.3' is not known of Dynamo (did you mean 1.2.1?); allowed: 1.0.2, 1.1.0, 1.1.1, 1.2.0, 1.2.1, "
        "1.3.0, 1.3.1, 1.4.0, 1.4.1, 1.4.2, 1.5.0, 1.5.1, 1.6.0, 1.6.1",
    ),
    (
        "gb200-agg",
        {"release": "1.1.1"},
        "release: '1.1.1' serves no v1beta1 DynamoGraphDeployment; allowed: 1.2.0, 1.2.1, 1.3.0, 1.3.1, 1.4.0, 1.4.1, "
        "1.4.2, 1.5.0, 1.5.1, 1.6.0, 1.6.1",
    ),
    (
        "gb200-agg",
        {"gpu": "H200"},
        "gpu: 'H200': gb200-agg is made for GB200; allowed: GB200; targets for H200: h200-agg",
    ),
    (
        "h200-agg",
        {"gpu": "B200"},
        "gpu: 'B200': h200-agg is made for H200; allowed: H200; targets for B200: b200-disagg, b200-agg",
    ),
    ("h200-agg", {"gpu": "H100"}, "gpu: 'H100' is not known (did you mean H200?); allowed: B200, GB200, H200"),
    ("gb200-agg", {"model": "gpt-oss"}, "model: 'gpt-oss' is not known*; allowed: gpt-oss-120b, gpt-oss-20b"),
    (
        "gb200-agg",
        {"model_cache": {"access_mode": "ReadWriteOnce"}},
        "model_cache.access_mode: 'ReadWriteOnce': frontend, workers and Jobs may be on several nodes; allowed: "
        "ReadWriteMany, or name the one node for all of them with placement.node_selector kubernetes.io/hostname",
    ),
    (
        "gb200-disagg",
        {
            "model_cache": {"access_mode": "ReadWriteOnce"},
            "placement": {"node_selector": {"kubernetes.io/hostname": "tray-1"}},
        },
        "model_cache.access_mode: 'ReadWriteOnce': gb200-disagg needs 5 GB200, of which one node has 4, so its pods "
        "are on several nodes; allowed: ReadWriteMany",
    ),
    (
        "gb200-disagg",
        {"placement": {"node_selector": {"kubernetes.io/hostname": "tray-1"}}},
        "placement.node_selector: kubernetes.io/hostname='tray-1': gb200-disagg needs 5 GB200, of which one node has "
        "4; leave it out, or lower replicas",
    ),
    (
        "gb200-agg",
        {"placement": {"node_selector": {"kubernetes.io/arch": "amd64"}}},
        "placement.node_selector: kubernetes.io/arch='amd64': nodes with GB200 are arm64; leave it out",
    ),
    (
        "gb200-agg",
        {"model_cache": {"access_mode": "ReadOnlyMany"}},
        "model_cache.access_mode: 'ReadOnlyMany': the download could not write to the claim; "
        "allowed: ReadWriteMany, ReadWriteOnce on one node",
    ),
    (
        "gb200-agg",
        {"model_cache": {"access_mode": "ReadWriteOncePod"}},
        "model_cache.access_mode: 'ReadWriteOncePod': one pod alone could mount the claim; "
        "allowed: ReadWriteMany, ReadWriteOnce on one node",
    ),
    (
        "gb200-agg",
        {"model_cache": {"size": "60Gi"}},
        "model_cache.size: '60Gi': gpt-oss-120b has 65.3 GB; allowed: at least 64Gi",
    ),
    (
        "gb200-agg",
        {"model_cache": {"size": "64G"}},
        "model_cache.size: '64G': gpt-oss-120b has 65.3 GB; allowed: at least 64Gi",
    ),
    (
        "gb200-agg",
        {"model_cache": {"existing": True, "storage_class": "fast", "size": "200Gi"}},
        "model_cache.storage_class: 'fast': an existing claim has its own; leave it out, or set existing to false",
    ),
    (
        "gb200-agg",
        {"model_cache": {"claim": "Model_Cache"}},
        "model_cache.claim: 'Model_Cache' allowed: lower-case letters, digits, - and ., *",
    ),
    (
        "gb200-agg",
        {"image": "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:latest"},
        "image: 'nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:latest': its tag 'latest' says no version, and the "
        "operator refuses that; allowed: a tag such as 1.2.1 or 1.2.1-mine (a digest may follow), or set "
        "runtime_version",
    ),
    (
        "gb200-agg",
        {"runtime_version": "1.2"},
        "runtime_version: '1.2' is not a version; allowed: three numbers such as 1.2.1",
    ),
    (
        "gb200-agg",
        {"image_registry": "https://registry.example/"},
        "image_registry: 'https://registry.example/' is not a registry; allowed: HOST[[]:PORT][[]/PATH], without *",
    ),
    (
        "gb200-agg",
        {"name": LONG},
        f"name: '{LONG}' is too long: <name>-trtllmworker-<hash> (the operator's name of a worker) would have "
        f"{len(LONG) + 22} characters, of at most 63; allowed: at most 41 characters",
    ),
    (
        "gb200-disagg",
        {"name": "gpt-oss-disaggregated-for-everybody"},
        "name: 'gpt-oss-disaggregated-for-everybody' is too long: <name>-trtllmprefillworker-<hash> (the operator's "
        "name of a worker) would have 64 characters, of at most 63; allowed: at most 34 characters",
    ),
    (
        "gb200-agg",
        {"namespace": "a-namespace-with-a-name-of-more-than-fifty-characters"},
        "name: 'gpt-oss-agg' is too long: a-namespace-with-a-name-of-more-than-fifty-characters-<name> (the operator's "
        "label nvidia.com/dynamo-namespace) would have 65 characters, of at most 63; allowed: at most 9 characters",
    ),
    (
        "gb200-agg",
        {"name": "gpt-oss-agg-of-forty-one-characters-name1", "benchmark": {"run_id": "after-upgrade-2"}},
        "name: 'gpt-oss-agg-of-forty-one-characters-name1' is too long: <name>-benchmark-after-upgrade-2 would have "
        "67 characters, of at most 63; allowed: at most 37 characters",
    ),
    ("gb200-agg", {"name": "GPT"}, "name: 'GPT' allowed: lower-case letters, digits and -, *"),
    ("gb200-agg", {"name": "1gpt"}, "name: '1gpt' allowed: a letter first, as Services have"),
    ("gb200-agg", {"namespace": "a_b"}, "namespace: 'a_b' allowed: lower-case letters, digits and -, *"),
    (
        "gb200-agg",
        {"replicas": {"wroker": 2}},
        "replicas: 'wroker' is no component of gb200-agg (did you mean worker?); allowed: frontend, worker",
    ),
    (
        "gb200-agg",
        {"replicas": {"worker": 0}},
        "replicas.worker: 0: without one nothing is served; allowed: at least 1",
    ),
    (
        "gb200-agg",
        {"replicas": {"worker": 0}, "benchmark": {}},
        "replicas.worker: 0: without one a benchmark has nothing to measure; allowed: at least 1",
    ),
    (
        "gb200-agg",
        {"resources": {"decode": {"cpu": "1"}}},
        "resources: 'decode' is not known*; allowed: frontend, worker, download, smoke, benchmark",
    ),
    (
        "gb200-agg",
        {"resources": {"worker": {"memory": "0Gi"}}},
        "resources.worker.memory: '0Gi': is nothing; allowed: more than 0, or leave it out",
    ),
    (
        "gb200-agg",
        {"resources": {"worker": {"nvidia.com/gpu": "8"}}},
        "resources.worker.nvidia.com/gpu: '8': the target decides the GPUs of a pod; set replicas",
    ),
    (
        "gb200-agg",
        {"resources": {"worker": {"mem": "8Gi"}}},
        "resources.worker.mem: '8Gi': there is no such resource; allowed: cpu, memory and devices such as rdma/ib",
    ),
    (
        "gb200-agg",
        {"resources": {"smoke": {"rdma/ib": "1"}}},
        "resources.smoke.rdma/ib: '1': there is no such resource; allowed: cpu, memory",
    ),
    ("gb200-agg", {"pull_secrets": ["Ngc"]}, "pull_secrets.0: 'Ngc' allowed: lower-case letters, digits, - and ., *"),
    ("gb200-agg", {"labels": {"team": "a b"}}, "labels: team='a b': not a label's value; allowed: at most 63 letters*"),
    (
        "gb200-agg",
        {"labels": {"-x": "a"}},
        "labels: '-x': not a key; allowed: [[]example.com/]name, the name with at *",
    ),
    ("gb200-agg", {"annotations": {"a//b": ""}}, "annotations: 'a//b': not a key; allowed: *"),
    (
        "gb200-agg",
        {"labels": {"nvidia.com/selector": "x"}},
        "labels: 'nvidia.com/selector': is the project's or the operator's own; allowed: any other key",
    ),
    (
        "gb200-agg",
        {"placement": {"tolerations": [{"key": "a", "value": "b"}]}},
        "placement.tolerations.0: value 'b' with operator Exists; allowed: operator Equal, or no value",
    ),
    (
        "gb200-agg",
        {"placement": {"priority_class": "High"}},
        "placement.priority_class: 'High' allowed: lower-case letters, digits, - and ., *",
    ),
    (
        "gb200-agg",
        {"benchmark": {"as_published": True, "traffic": {"concurrency": 10}}},
        "benchmark.traffic.concurrency: 10: as_published is the published recipe's own traffic; keep one of the two",
    ),
    (
        "gb200-agg",
        {"benchmark": {"traffic": {"concurrency": 100, "requests": 50}}},
        "benchmark.traffic.requests: 50: is less than the concurrency, 100, which would never be reached; "
        "allowed: at least the concurrency",
    ),
    (
        "gb200-disagg",
        {"benchmark": {"traffic": {"input_tokens": 9100}}},
        "benchmark.traffic: 9100 tokens in and 1024 out: a prompt of 9228 tokens with 128 for the chat format is "
        "longer than prefill.cache_transceiver_config.max_tokens_in_buffer, 9216; allowed: at most 9088 input tokens, "
        "or raise it together with prefill.max_seq_len",
    ),
    (
        "gb200-disagg",
        {"benchmark": {"traffic": {"input_tokens": 8900}}},
        "benchmark.traffic: 8900 tokens in and 1024 out: a prompt of 9028 tokens with 128 for the chat format does not "
        "fit prefill.max_seq_len, 9000; allowed: at most 8871 input tokens, or raise it",
    ),
    (
        "gb200-disagg",
        {"benchmark": {"traffic": {"output_tokens": 4096}}},
        "benchmark.traffic: 8192 tokens in and 4096 out: a prompt of 8320 tokens with 128 for the chat format and an "
        "answer of 4096 do not fit decode.max_seq_len, 11000; allowed: together at most 10872 tokens, or raise it",
    ),
    (
        "gb200-agg",
        {"benchmark": {"traffic": {"input_tokens": 9000}}},
        "benchmark.traffic: 9000 tokens in and 1000 out: a prompt of 9128 tokens with 128 for the chat format is "
        "longer than worker.max_num_tokens, 8192, and prefill is not chunked; allowed: at most 8064 input tokens, or "
        "raise it",
    ),
    (
        "h200-agg",
        {"benchmark": {"traffic": {"input_tokens": 131072}}},
        "benchmark.traffic: 131072 tokens in and 1024 out: a prompt of 131200 tokens with 128 for the chat format does "
        "not fit worker.max-model-len, 131072; allowed: at most 130943 input tokens, or raise it",
    ),
]

# Engine options, and what is said of them.
OVERRIDES: list[tuple[str, tuple[str, ...], str]] = [
    (
        "gb200-disagg",
        ("max_batch_size=32",),
        "set: max_batch_size=32: begins with no component of gb200-disagg (did you mean decode.max_batch_size?); "
        "allowed: frontend.…, prefill.…, decode.…",
    ),
    (
        "gb200-disagg",
        ("prefil.max_batch_size=32",),
        "set: prefil.max_batch_size=32: begins with no component of gb200-disagg (did you mean prefill?); *",
    ),
    (
        "gb200-agg",
        ("worker.max_batch_sise=32",),
        "set: worker.max_batch_sise=32: TensorRT-LLM 1.3.0rc14 has no such option (did you mean max_batch_size?); *",
    ),
    (
        "h200-agg",
        ("worker.max-num-seq=32",),
        "set: worker.max-num-seq=32: vLLM 0.20.1 has no such option (did you mean max-num-seqs?); *",
    ),
    (
        "gb200-agg",
        ("worker.max_batch_size=0",),
        "set: worker.max_batch_size=0: Input should be greater than or equal to 1",
    ),
    (
        "gb200-agg",
        ("worker.moe_config.backend=CUTLAS",),
        "set: worker.moe_config.backend='CUTLAS': Input should be 'AUTO', 'CUTLASS', *",
    ),
    (
        "gb200-agg",
        ("worker.max_batch_size=8", "worker.max_batch_size=9"),
        "set: worker.max_batch_size is set twice: as max_batch_size and as max_batch_size; keep one",
    ),
    (
        "h200-agg",
        ("worker.max_batch_size=8", "worker.max-num-seqs=9"),
        "set: worker.max-num-seqs is set twice: as max_batch_size and as max-num-seqs; keep one",
    ),
    (
        "gb200-agg",
        ("worker.tensor_parallel_size=8",),
        "set: worker.tensor_parallel_size=8: cannot be set: tensor_parallel_size follows the target's GPUs",
    ),
    (
        "gb200-disagg",
        ("decode.num_postprocess_workers=4",),
        "set: decode.num_postprocess_workers=4: cannot be set: num_postprocess_workers has no effect in Dynamo *",
    ),
    (
        "h200-agg",
        ("worker.tool-call-parser=openai",),
        "set: worker.tool-call-parser='openai': cannot be set: tool-call-parser is Dynamo's (--dyn-tool-call-parser)",
    ),
    (
        "h200-agg",
        ("worker.moe-backend=flashinfer_trtllm",),
        "set: worker.moe-backend='flashinfer_trtllm': 0.20.1 accepts it, but not on hopper: its kernels "
        "are for Blackwell",
    ),
    (
        "gb200-agg",
        ("worker.moe_expert_parallel_size=3",),
        "set: worker.moe_expert_parallel_size=3: does not divide tensor_parallel_size, 4; allowed: 1, 2, 4",
    ),
    (
        "h200-agg",
        ("worker.max_seq_len=200000",),
        "set: worker.max_seq_len=200000: gpt-oss-120b was made for 131072 tokens; allowed: at most 131072",
    ),
    (
        "h200-agg",
        ("worker.gpu-memory-utilization=0.5",),
        "gpu: gpt-oss-120b does not fit 1 x H200 with vllm/h200-agg/worker: each GPU has 150.8 GB and needs *",
    ),
    (
        "gb200-disagg",
        ("prefill.max_seq_len=12000",),
        "prefill.cache_transceiver_config.max_tokens_in_buffer: 9216: is less than the longest prompt, 12000 tokens "
        "(prefill.max_seq_len); *",
    ),
    (
        "gb200-disagg",
        ("decode.cache_transceiver_config.max_tokens_in_buffer=4096",),
        "set: decode.cache_transceiver_config.max_tokens_in_buffer=4096: is less than the longest prompt, 9000 tokens "
        "(prefill.max_seq_len); the transfer of keys and values would deadlock under load. Raise it in prefill and "
        "decode to at least 9000, or lower prefill.max_seq_len",
    ),
    (
        "gb200-disagg",
        ("decode.max_seq_len=9000",),
        "set: decode.max_seq_len=9000: decode must hold the longest prompt, 9000 tokens (prefill.max_seq_len), and its "
        "answer; allowed: more than 9000",
    ),
    (
        "gb200-agg",
        ("worker.environment.HF_TOKEN=hf_secret",),
        "set: worker.environment.HF_TOKEN=[*][*][*]: cannot be set, the graph downloads nothing; "
        "the token belongs to the download Job (hf_token_secret)",
    ),
    (
        "gb200-agg",
        ("worker.environment.DYN_SYSTEM_PORT=1",),
        "set: worker.environment.DYN_SYSTEM_PORT=1: cannot be set, the operator sets it, and its probes depend on it",
    ),
    (
        "gb200-agg",
        ("frontend.environment.HF_HUB_OFFLINE=0",),
        "set: frontend.environment.HF_HUB_OFFLINE=0: cannot be set, the graph reads verified weights only",
    ),
    (
        "gb200-agg",
        ("worker.environment.9A=1",),
        "set: worker.environment.9A: not a variable's name; allowed: letters, digits and _, not a digit first",
    ),
    (
        "gb200-agg",
        ("frontend.router_mode=kv",),
        "set: frontend.router_mode='kv': the frontend has no engine options; allowed: frontend.environment.NAME "
        "(its router is router_mode)",
    ),
]

# What a request cannot even be read from.
VALUES: list[tuple[dict[str, Any], str]] = [
    ({"targets": "x"}, "targets: there is no such setting (did you mean target?); allowed: target, name, namespace, *"),
    (
        {"model_cache": {"storageclass": "x"}},
        "model_cache.storageclass: there is no such setting (did you mean storage_class?); "
        "allowed: claim, existing, storage_class, access_mode, size",
    ),
    (
        {"placement": {"tolerations": [{"keys": "x"}]}},
        "placement.tolerations.0.keys: there is no such setting (did you mean key?); allowed: key, operator, *",
    ),
    ({"hf_token_secret": {"name": "hf"}}, "hf_token_secret.key: is missing; it has no default"),
    ({"hf_token_secret": {"key": "HF_TOKEN"}}, "hf_token_secret.name: is missing; it has no default"),
    ({"rollout": "fast"}, "rollout: 'fast': Input should be 'in_place', 'blue_green' or 'recreate'"),
    ({"router_mode": "rr"}, "router_mode: 'rr': Input should be 'round-robin', 'random', *"),
    ({"replicas": {"worker": "2"}}, "replicas.worker: '2': Input should be a valid integer"),
    ({"model_cache": {"size": "lots"}}, "model_cache.size: 'lots': String should match pattern *"),
    ({"benchmark": {"run_id": "Run 1"}}, "benchmark.run_id: 'Run 1': String should match pattern *"),
    ({"hub_endpoint": "mirror"}, "hub_endpoint: 'mirror': String should match pattern *"),
]


def _problems(*arguments: Any, **request: Any) -> list[str]:
    with pytest.raises(PlanError) as raised:
        plan(*arguments, **request)
    return list(raised.value.problems)


@pytest.mark.parametrize(("target", "request_", "message"), REQUESTS)
def test_requests(target: str, request_: dict[str, Any], message: str) -> None:
    assert _one_says(_problems(target, **request_), message)


@pytest.mark.parametrize(("target", "settings", "message"), OVERRIDES)
def test_overrides(target: str, settings: tuple[str, ...], message: str) -> None:
    assert _one_says(_problems(target, *settings), message)


@pytest.mark.parametrize(("values", "message"), VALUES)
def test_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as raised:
        graph_request_from({"target": "gb200-agg", **values})
    assert _one_says(raised.value.problems, message)


def _one_says(problems: Any, message: str) -> bool:
    assert any(fnmatchcase(problem, message) for problem in problems), "\n".join(problems)
    return True


@pytest.mark.parametrize(
    ("image", "taken"),
    [
        ("registry.example/trtllm:1.2.1", True),
        ("registry.example/trtllm:v1.2.1", True),
        ("registry.example/trtllm:1.2.1-efa", True),
        ("registry.example/trtllm:1.5.0@sha256:" + "0" * 64, True),
        ("registry.example:5000/trtllm:1.2.1-rc.1", True),
        ("registry.example:5000/trtllm", False),
        ("registry.example/trtllm:latest", False),
        ("registry.example/trtllm:my-tag", False),
        ("registry.example/trtllm:1.2", False),
        ("registry.example/trtllm:01.2.1", False),
        ("registry.example/trtllm@sha256:" + "0" * 64, False),
    ],
)
@pytest.mark.parametrize("target", ["gb200-agg", "h200-agg"])
def test_images_are_refused_as_the_operator_refuses_them(target: str, image: str, taken: bool) -> None:
    """The cases are the recorded ones; with a version said beside it every image is taken."""
    made = plan(target, image=image, runtime_version="1.5.0")
    assert {part.runtime_version_override for part in made.graph.spec.components} == {"1.5.0"}
    if taken:
        assert plan(target, image=image).runtime_image == image
    else:
        assert _problems(target, image=image)[0].startswith(f"image: {image!r}: it")


def test_everything_wrong_is_said_at_once() -> None:
    problems = _problems(
        "gb200-disagg",
        "decode.max_batch_sise=1",
        "prefill.stream_interval=0",
        "worker.x=1",
        name="A",
        model_cache={"size": "1Gi", "access_mode": "ReadWriteOnce"},
        replicas={"decode": 0},
        benchmark={"traffic": {"input_tokens": 20000}},
    )
    for beginning in (
        "name: 'A'",
        "set: decode.max_batch_sise=1",
        "set: prefill.stream_interval=0",
        "set: worker.x=1",
        "model_cache.size: '1Gi'",
        "model_cache.access_mode: 'ReadWriteOnce'",
        "replicas.decode: 0",
        "benchmark.traffic: 20000 tokens in",
    ):
        assert any(problem.startswith(beginning) for problem in problems), problems
    assert len(problems) == len(set(problems))


@pytest.mark.parametrize("target", TARGETS)
def test_the_longest_name_that_is_allowed_is_taken(target: str) -> None:
    longest = {"gb200-agg": 41, "gb200-disagg": 34, "b200-disagg": 34, "h200-agg": 43, "b200-agg": 43}[target]
    assert plan(target, name="n" * longest, namespace="ns").name == "n" * longest
    assert "is too long" in _problems(target, name="n" * (longest + 1), namespace="ns")[0]
