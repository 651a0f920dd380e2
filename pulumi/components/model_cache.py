"""The model cache: a claim, and the Job that fills it once."""

from __future__ import annotations

import pulumi
import pulumi_kubernetes as kubernetes
from pulumi import ResourceOptions

from components.objects import content_named, kept, kubernetes_object, timeouts
from serving_catalog.graphs import GraphPlan


class ModelCache(pulumi.ComponentResource):
    """The claim, made or used, with verified weights and encodings on it."""

    claim: pulumi.CustomResource | None = None
    programs: pulumi.CustomResource
    download: pulumi.CustomResource

    def __init__(
        self,
        name: str,
        *,
        plan: GraphPlan,
        keeper: kubernetes.Provider | None,
        on_failure: pulumi.ResourceHookBinding,
        opts: ResourceOptions,
    ) -> None:
        super().__init__("gpt-oss:components:ModelCache", name, {}, opts)
        if plan.claim is not None:
            # Of a WaitForFirstConsumer class, the provider waits for a claim to be Pending. One that is taken back is
            # bound long since, and the wait would run out. The download waits for the volume anyway.
            unawaited = {"pulumi.com/skipAwait": "true"} if keeper is not None else None
            self.claim = kubernetes_object("claim", plan.claim, kept(self, keeper, on_failure), unawaited)
        programs = content_named("programs", plan.programs)
        self.programs = kubernetes_object(programs, plan.programs, ResourceOptions(parent=self))
        self.download = kubernetes_object(
            "download",
            plan.download,
            ResourceOptions(
                parent=self,
                depends_on=[*([self.claim] if self.claim is not None else []), self.programs],
                custom_timeouts=timeouts(plan.download_within_seconds),
                hooks=on_failure,
            ),
            # A download that failed is made anew by the next up, and goes on where it was.
            {"pulumi.com/replaceUnready": "true"},
        )
        self.register_outputs({"claim": plan.claim_name})
