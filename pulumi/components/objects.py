"""The plan's objects as Pulumi resources: what is registered is the plan's own manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pulumi
import pulumi_kubernetes as kubernetes
from pulumi import CustomTimeouts, ResourceOptions

from serving_catalog.graphs import GraphPlan
from serving_catalog.graphs.objects import (
    ConfigMap,
    DynamoGraphDeployment,
    Job,
    Metadata,
    Namespace,
    NetworkPolicy,
    PersistentVolumeClaim,
    Resource,
)

_MAKERS: Mapping[type[Resource], Callable[..., pulumi.CustomResource]] = {
    Namespace: kubernetes.core.v1.Namespace,
    PersistentVolumeClaim: kubernetes.core.v1.PersistentVolumeClaim,
    ConfigMap: kubernetes.core.v1.ConfigMap,
    Job: kubernetes.batch.v1.Job,
    NetworkPolicy: kubernetes.networking.v1.NetworkPolicy,
    DynamoGraphDeployment: kubernetes.apiextensions.CustomResource,
}

# The cluster gives up first and says why; Pulumi's own wait is only the net below.
MARGIN = timedelta(minutes=2)


def kubernetes_object(
    name: str, planned: Resource, opts: ResourceOptions, annotations: Mapping[str, str] | None = None
) -> pulumi.CustomResource:
    """Register a planned object. `annotations` are Pulumi's own words, which the plan does not know."""
    return registered(type(planned), name, planned.manifest(), opts, annotations)


def registered(
    kind: type[Resource],
    name: str,
    manifest: Mapping[str, Any],
    opts: ResourceOptions,
    annotations: Mapping[str, str] | None = None,
) -> pulumi.CustomResource:
    body = {key: value for key, value in manifest.items() if key not in ("apiVersion", "kind")}
    if annotations:
        metadata = body["metadata"]
        body["metadata"] = {**metadata, "annotations": {**metadata.get("annotations", {}), **annotations}}
    if kind is DynamoGraphDeployment:
        body |= {"api_version": manifest["apiVersion"], "kind": manifest["kind"]}
    return _MAKERS[kind](name, **body, opts=opts)


def content_named(name: str, planned: ConfigMap) -> str:
    """A ConfigMap's resource name, with the hash of its content: other content, another resource.

    If one resource were replaced, the old object would still be there after an update that failed, to be deleted by
    the next one: which could not go back to it, since it exists.
    """
    assert planned.metadata.name is not None
    return f"{name}-{planned.metadata.name.rpartition('-')[2]}"


def shared_metadata(plan: GraphPlan, name: str, namespace: str | None = None) -> Metadata:
    """Labels and annotations as every object of the plan has them, for an object that the plan does not know."""
    return plan.namespace_object.metadata.model_copy(update={"name": name, "namespace": namespace})


def timeouts(seconds: int) -> CustomTimeouts:
    """How long creating and changing may take."""
    text = f"{seconds + int(MARGIN.total_seconds())}s"
    return CustomTimeouts(create=text, update=text)


def kept(
    parent: pulumi.Resource, keeper: kubernetes.Provider | None, hooks: pulumi.ResourceHookBinding | None = None
) -> ResourceOptions:
    """Options of a child that destroy leaves and the next up takes back, where there is a keeper."""
    if keeper is None:
        return ResourceOptions(parent=parent, hooks=hooks)
    return ResourceOptions(parent=parent, hooks=hooks, provider=keeper, retain_on_delete=True)
