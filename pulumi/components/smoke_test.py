"""The smoke test: the deployment answers like the model it claims to be."""

from __future__ import annotations

from components.objects import kubernetes_object, timeouts

import pulumi
from pulumi import ResourceOptions
from serving_catalog.graphs import GraphPlan


class SmokeTest(pulumi.ComponentResource):
    """A Job that asks the frontend what a user would ask; its failure fails the update."""

    job: pulumi.CustomResource

    def __init__(
        self, name: str, *, plan: GraphPlan, on_failure: pulumi.ResourceHookBinding, opts: ResourceOptions
    ) -> None:
        super().__init__("gpt-oss:components:SmokeTest", name, {}, opts)
        self.job = kubernetes_object(
            "smoke",
            plan.smoke,
            ResourceOptions(parent=self, custom_timeouts=timeouts(plan.smoke_within_seconds), hooks=on_failure),
            {"pulumi.com/replaceUnready": "true"},
        )
        self.register_outputs({})
