"""The benchmark: the target's traffic, from inside the cluster. Opt-in; another run id runs it again."""

from __future__ import annotations

import pulumi
from pulumi import ResourceOptions

from components.objects import kubernetes_object, timeouts
from serving_catalog.graphs import GraphPlan


class Benchmark(pulumi.ComponentResource):
    """A Job that measures with AIPerf and leaves its artifacts on the model cache."""

    artifacts: str
    job: pulumi.CustomResource

    def __init__(
        self, name: str, *, plan: GraphPlan, on_failure: pulumi.ResourceHookBinding, opts: ResourceOptions
    ) -> None:
        super().__init__("gpt-oss:components:Benchmark", name, {}, opts)
        assert plan.benchmark is not None
        assert plan.benchmark_within_seconds is not None
        assert plan.artifacts is not None
        self.artifacts = plan.artifacts
        self.job = kubernetes_object(
            "benchmark",
            plan.benchmark,
            ResourceOptions(parent=self, custom_timeouts=timeouts(plan.benchmark_within_seconds), hooks=on_failure),
            {"pulumi.com/replaceUnready": "true"},
        )
        self.register_outputs({"artifacts": self.artifacts})
