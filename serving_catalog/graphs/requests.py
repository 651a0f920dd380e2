"""What a user of Kubernetes asks for: a target, and everything that decides the shape of what is applied."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, JsonValue, StringConstraints, ValidationError

from serving_catalog.entries import Count, EnvironmentName, Part, Seconds, Text, Url
from serving_catalog.errors import PlanError
from serving_catalog.plans import Override

Rollout = Literal["in_place", "blue_green", "recreate"]
AccessMode = Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod", "ReadOnlyMany"]
RouterMode = Literal["round-robin", "random", "kv", "direct", "least-loaded"]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$")]


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
    """A key of a Secret in the namespace."""

    name: Text = "hf-token-secret"
    key: Annotated[str, StringConstraints(min_length=1, pattern=r"^[-._a-zA-Z0-9]+$")] = "HF_TOKEN"


class TolerationRequest(Part):
    key: Text | None = None
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class PlacementRequest(Part):
    """Where GPU pods go, beyond what the target needs of a node.

    node_selector is added to the target's own; tolerations given here replace the target's.
    """

    node_selector: Mapping[Text, str] = {}
    tolerations: tuple[TolerationRequest, ...] | None = None
    priority_class: Text | None = None
    scheduler_name: Text | None = None


class ComponentResources(Part):
    """CPU and memory of one pod. GPUs are the target's."""

    cpu: Quantity | None = None
    memory: Quantity | None = None


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
    """This target, in this namespace, with these settings. None means the target's or the catalog's default."""

    target: Text
    name: Text | None = None
    namespace: Text = "gpt-oss"
    model: Text = "gpt-oss-120b"
    release: Text | None = None
    replicas: Mapping[str, Annotated[int, Field(ge=0)]] = {}
    overrides: tuple[Override, ...] = ()
    model_cache: ModelCacheRequest = ModelCacheRequest()
    hf_token_secret: SecretKeyRequest | None = SecretKeyRequest()
    pull_secrets: tuple[Text, ...] = ()
    image: Text | None = None
    runtime_version: Text | None = None
    image_registry: Text | None = None
    tools_image: Text | None = None
    hub_endpoint: Url | None = None
    package_index: Url | None = None
    placement: PlacementRequest = PlacementRequest()
    labels: Mapping[Text, str] = {}
    annotations: Mapping[Text, str] = {}
    resources: Mapping[str, ComponentResources] = {}
    job_environment: Mapping[EnvironmentName, str] = {}
    rollout: Rollout = "in_place"
    network_policy: bool = False
    router_mode: RouterMode | None = None
    benchmark: BenchmarkRequest | None = None
    load_timeout_seconds: Seconds | None = None


def graph_request_from(values: Mapping[str, JsonValue]) -> GraphRequest:
    """A request from settings of any origin; wrong keys and types become a `PlanError`."""
    try:
        return GraphRequest.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise PlanError(
            [f"{'.'.join(map(str, e['loc']))}: {_shown(e['input'])}{e['msg']}" for e in error.errors()]
        ) from None


def _shown(value: object) -> str:
    return f"{value!r}: " if value is None or isinstance(value, str | int | float | bool | list) else ""
