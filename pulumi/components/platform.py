"""The Dynamo platform: the release's Helm chart. Where the operator is there already, nothing is made."""

from __future__ import annotations

from typing import Any

import pulumi_kubernetes as kubernetes
from components.objects import MARGIN, kubernetes_object
from settings import Settings

import pulumi
from pulumi import CustomTimeouts, ResourceOptions
from serving_catalog.graphs import GraphPlan
from serving_catalog.graphs.entries import Dynamo, DynamoRelease
from serving_catalog.graphs.objects import Namespace
from serving_catalog.loading import merged

# Names of Services and webhooks inside the platform follow from it.
RELEASE_NAME = "dynamo-platform"

OPERATOR_IMAGE = "nvcr.io/nvidia/ai-dynamo/kubernetes-operator"


class Platform(pulumi.ComponentResource):
    """Operator and CRDs, at the version that goes with the runtime image.

    A Release, not a Chart: the chart's hooks make CRDs and webhook certificates, and a Chart drops hooks. CRDs stay
    when the release goes, as Helm leaves them: other namespaces' graphs would go with them.
    """

    release: kubernetes.helm.v3.Release

    def __init__(
        self,
        name: str,
        *,
        plan: GraphPlan,
        dynamo: Dynamo,
        settings: Settings,
        opts: ResourceOptions,
    ) -> None:
        super().__init__("gpt-oss:components:Platform", name, {}, opts)
        release = dynamo.releases[plan.release]
        before: list[pulumi.Resource] = []
        if settings.platform_create_namespace:
            metadata = plan.namespace_object.metadata.model_copy(update={"name": settings.platform_namespace})
            namespace = Namespace(metadata=metadata)
            before.append(kubernetes_object("platform-namespace", namespace, ResourceOptions(parent=self)))
        within = f"{settings.platform_timeout_seconds + int(MARGIN.total_seconds())}s"
        self.release = kubernetes.helm.v3.Release(
            "platform",
            name=RELEASE_NAME,
            namespace=settings.platform_namespace,
            chart=settings.platform_chart or dynamo.chart.archive.format(version=release.chart_version),
            # A chart from elsewhere says its own version.
            version=None if settings.platform_chart else release.chart_version,
            values=merged(chart_values(release, settings.image_registry), settings.platform_values),
            atomic=True,
            cleanup_on_fail=True,
            wait_for_jobs=True,
            skip_await=False,
            max_history=5,
            timeout=settings.platform_timeout_seconds,
            opts=ResourceOptions(
                parent=self,
                depends_on=before,
                custom_timeouts=CustomTimeouts(create=within, update=within, delete=within),
            ),
        )
        self.register_outputs({"release": self.release.name})


def chart_values(release: DynamoRelease, image_registry: str) -> dict[str, Any]:
    """What the release needs, said in full: the chart's own defaults differ from release to release.

    Workers of one node and a frontend that finds them through the API server need no etcd, Grove or KAI.
    """
    operator: dict[str, Any] = {"upgradeCRD": True, "discoveryBackend": "kubernetes"}
    if image_registry:
        path = OPERATOR_IMAGE.partition("/")[2]
        operator["controllerManager"] = {"manager": {"image": {"repository": f"{image_registry.rstrip('/')}/{path}"}}}
    return {
        "global": {
            "etcd": {"install": False},
            "nats": {"install": release.nats_by_default},
            "grove": {"install": False, "enabled": False},
            "kai-scheduler": {"install": False, "enabled": False},
        },
        "dynamo-operator": operator,
    }
