"""The smoke test: the deployment answers like the model it claims to be."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pulumi
from pulumi import ResourceOptions

from components.objects import registered, timeouts
from serving_catalog.graphs import GraphPlan
from serving_catalog.graphs.objects import Job

TESTED_ANNOTATION = "gpt-oss-on-nvidia/tested"


class SmokeTest(pulumi.ComponentResource):
    """A Job that asks the frontend what a user would ask; its failure fails the update."""

    job: pulumi.CustomResource

    def __init__(
        self, name: str, *, plan: GraphPlan, on_failure: pulumi.ResourceHookBinding, opts: ResourceOptions
    ) -> None:
        super().__init__("gpt-oss:components:SmokeTest", name, {}, opts)
        self.job = registered(
            Job,
            "smoke",
            testing(plan),
            ResourceOptions(parent=self, custom_timeouts=timeouts(plan.smoke_within_seconds), hooks=on_failure),
            {"pulumi.com/replaceUnready": "true"},
        )
        self.register_outputs({})


def testing(plan: GraphPlan) -> dict[str, Any]:
    """The Job, with the deployment that it tests in its pods' annotations: another deployment is another test."""
    tested = hashlib.sha256(json.dumps(plan.graph.manifest()["spec"], sort_keys=True).encode()).hexdigest()[:8]
    manifest = plan.smoke.manifest()
    template = manifest["spec"]["template"]
    annotations = {**template["metadata"].get("annotations", {}), TESTED_ANNOTATION: tested}
    metadata = {**template["metadata"], "annotations": annotations}
    return {**manifest, "spec": {**manifest["spec"], "template": {**template, "metadata": metadata}}}
