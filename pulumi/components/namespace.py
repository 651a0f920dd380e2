"""The namespace, where the stack makes it."""

from __future__ import annotations

import pulumi
import pulumi_kubernetes as kubernetes
from pulumi import ResourceOptions

from components.objects import kept, kubernetes_object
from serving_catalog.graphs import GraphPlan


class Namespace(pulumi.ComponentResource):
    """The namespace. Deleting it would delete the claim inside, so it is kept with a claim that is."""

    namespace: pulumi.CustomResource

    def __init__(
        self, name: str, *, plan: GraphPlan, keeper: kubernetes.Provider | None, opts: ResourceOptions
    ) -> None:
        super().__init__("gpt-oss:components:Namespace", name, {}, opts)
        self.namespace = kubernetes_object("namespace", plan.namespace_object, kept(self, keeper))
        self.register_outputs({"name": plan.namespace})
