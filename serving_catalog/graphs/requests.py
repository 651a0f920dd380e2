"""What a user of Kubernetes asks for: a target, and everything that decides the shape of what is applied."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, JsonValue, StringConstraints, ValidationError

from serving_catalog.entries import Count, EnvironmentName, Part, Seconds, Text, Url
from serving_catalog.errors import PlanError, nearest
from serving_catalog.graphs.entries import Effect, Quantity, RouterMode
from serving_catalog.plans import Override

Rollout = Literal["in_place", "blue_green", "recreate"]
AccessMode = Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod", "ReadOnlyMany"]


Probe = Literal["health", "model", "completion", "stream", "reasoning", "tool_call"]


class ModelCacheRequest(Part):
    """The claim that holds weights, encodings and benchmark results. None: as the target says.

    existing: the claim is there already; storage class, access mode and size are then its owner's.
    """

    claim: Text = "model-cache"
    existing: bool = False
    storage_class: Text | None = None
    access_mode: AccessMode = "ReadWriteMany"
    size: Quantity | None = None


class SecretKeyRequest(Part):
    """A key of a Secret in the namespace. Neither is guessed: the wrong key is found out only when a Job fails."""

    name: Text
    key: Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$")]


class TolerationRequest(Part):
    key: Text | None = None
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Effect | None = None


class PlacementRequest(Part):
    """Where pods go, beyond what the target needs of a node.

    node_selector is added to the GPU pods' own; tolerations given here replace the target's.
    gpu_products: values of the node label nvidia.com/gpu.product that will do; empty where nodes have no such label.
    gpu_nodes_for_all: frontend and Jobs may run on the GPU nodes too, for clusters that have no others.
    """

    node_selector: Mapping[Text, str] = {}
    tolerations: tuple[TolerationRequest, ...] | None = None
    gpu_products: tuple[Text, ...] | None = None
    gpu_nodes_for_all: bool = False
    priority_class: Text | None = None
    scheduler_name: Text | None = None


class TrafficRequest(Part):
    """Traffic instead of the target's own. Lengths are tokens."""

    input_tokens: Count | None = None
    output_tokens: Count | None = None
    concurrency: Count | None = None
    requests: Count | None = None
    warmup_requests: Annotated[int, Field(ge=0)] | None = None


class BenchmarkRequest(Part):
    """A benchmark of the deployment. Another run_id runs it again.

    as_published: the traffic of the published recipe, with its count of GPUs (6 for 5).
    """

    run_id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,14}[a-z0-9])?$")] = "1"
    traffic: TrafficRequest = TrafficRequest()
    as_published: bool = False


class GraphRequest(Part):
    """This target, in this namespace, with these settings. None means the target's or the catalog's default.

    gpu is only checked against the target's.
    resources are of one pod of a component or Job: cpu, memory and, of workers, devices other than GPUs. Without one
    such as rdma/ib, prefill hands keys and values to decode over TCP.
    endpoint_wait_seconds: how long smoke test and benchmark wait for the endpoint; the default is for a graph that is
    Ready already.
    encodings_url: a directory with the encodings, in place of their own addresses.
    """

    target: Text
    name: Text | None = None
    namespace: Text = "gpt-oss"
    model: Text = "gpt-oss-120b"
    gpu: Text | None = None
    release: Text | None = None
    replicas: Mapping[str, Annotated[int, Field(ge=0)]] = {}
    overrides: tuple[Override, ...] = ()
    model_cache: ModelCacheRequest = ModelCacheRequest()
    hf_token_secret: SecretKeyRequest | None = SecretKeyRequest(name="hf-token-secret", key="HF_TOKEN")
    pull_secrets: tuple[Text, ...] = ()
    image: Text | None = None
    runtime_version: Text | None = None
    image_registry: Text | None = None
    tools_image: Text | None = None
    hub_endpoint: Url | None = None
    encodings_url: Url | None = None
    package_index: Url | None = None
    placement: PlacementRequest = PlacementRequest()
    labels: Mapping[Text, str] = {}
    annotations: Mapping[Text, str] = {}
    resources: Mapping[str, Mapping[str, Quantity]] = {}
    job_environment: Mapping[EnvironmentName, str] = {}
    rollout: Rollout = "in_place"
    network_policy: bool = False
    router_mode: RouterMode | None = None
    benchmark: BenchmarkRequest | None = None
    load_timeout_seconds: Seconds | None = None
    download_timeout_seconds: Seconds | None = None
    endpoint_wait_seconds: Seconds | None = None
    smoke_probes: Annotated[tuple[Probe, ...], Field(min_length=1)] = ("health", "model", "completion", "stream")


def graph_request_from(values: Mapping[str, JsonValue]) -> GraphRequest:
    """A request from settings of any origin; wrong keys and types become a `PlanError`."""
    try:
        return GraphRequest.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise PlanError([_problem(e["type"], e["loc"], e["input"], e["msg"]) for e in error.errors()]) from None


def _problem(kind: str, location: tuple[int | str, ...], value: object, message: str) -> str:
    path = ".".join(map(str, location))
    if kind == "extra_forbidden":
        known = _fields(location[:-1])
        return f"{path}: there is no such setting{nearest(str(location[-1]), known)}; allowed: {', '.join(known)}"
    if kind == "missing":
        return f"{path}: is missing; it has no default"
    return f"{path}: {_shown(value)}{message}"


def _fields(location: tuple[int | str, ...]) -> list[str]:
    """The names that a part of the request takes."""
    part: type[Part] = GraphRequest
    for word in location:
        inner = _PARTS.get(str(word))
        if inner is not None:
            part = inner
    return list(part.model_fields)


_PARTS: Mapping[str, type[Part]] = {
    "model_cache": ModelCacheRequest,
    "hf_token_secret": SecretKeyRequest,
    "placement": PlacementRequest,
    "tolerations": TolerationRequest,
    "benchmark": BenchmarkRequest,
    "traffic": TrafficRequest,
    "overrides": Override,
}


def _shown(value: object) -> str:
    return f"{value!r}: " if value is None or isinstance(value, str | int | float | bool | list) else ""
