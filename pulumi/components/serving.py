"""The deployment: the engine's configuration and the graph that the operator makes pods of."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pulumi
from pulumi import ResourceOptions

from components.objects import content_named, kubernetes_object, registered, timeouts
from serving_catalog.graphs import GraphPlan
from serving_catalog.graphs.objects import DynamoGraphDeployment
from settings import Settings


class Serving(pulumi.ComponentResource):
    """A DynamoGraphDeployment that is Ready.

    It depends on the platform, so that on destroy the operator is there to clear the graph's finalizer, and the graph's
    pods are gone (deletion is in the foreground) before the operator is.
    """

    service: str
    graph: pulumi.CustomResource

    def __init__(
        self,
        name: str,
        *,
        plan: GraphPlan,
        settings: Settings,
        on_failure: pulumi.ResourceHookBinding,
        opts: ResourceOptions,
    ) -> None:
        super().__init__("gpt-oss:components:Serving", name, {}, opts)
        self.service = plan.frontend_service
        policies = [
            kubernetes_object(f"network-policy-{policy.name}", policy, ResourceOptions(parent=self))
            for policy in plan.network_policies
        ]
        engine_config = kubernetes_object(
            content_named("engine-config", plan.engine_config), plan.engine_config, ResourceOptions(parent=self)
        )
        self.graph = registered(
            DynamoGraphDeployment,
            "graph",
            without_free_replicas(plan.graph.manifest(), settings.replicas, settings.scaled_elsewhere),
            ResourceOptions(
                parent=self,
                depends_on=[engine_config, *policies],
                custom_timeouts=timeouts(plan.ready_within_seconds),
                hooks=on_failure,
            ),
            {
                "pulumi.com/waitFor": "condition=Ready",
                # The graph goes last, after its pods: whoever waits for it may then remove the operator.
                "pulumi.com/deletionPropagationPolicy": "foreground",
            },
        )
        self.register_outputs({"service": self.service})


def without_free_replicas(manifest: dict[str, Any], owned: Collection[str], free: Collection[str]) -> dict[str, Any]:
    """The graph without the `replicas` that are not the stack's: 1 where nobody asked for it, and all of `free`.

    A field that is not applied belongs to whoever scales the component, and never shows up as a difference; the
    operator begins with 1. `ignore_changes` would not do: the provider does not follow it into lists.
    """
    components = []
    for component in manifest["spec"]["components"]:
        unasked = component["replicas"] == 1 and component["type"] not in owned
        left_out = {"replicas"} if unasked or component["type"] in free else set()
        components.append({key: value for key, value in component.items() if key not in left_out})
    return {**manifest, "spec": {**manifest["spec"], "components": components}}
