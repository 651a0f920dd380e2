"""The Dynamo platform: the release's Helm chart. Where the operator is there already, nothing is made."""

from __future__ import annotations

from typing import Any

import pulumi
import pulumi_kubernetes as kubernetes
from pulumi import CustomTimeouts, ResourceOptions

from components.credentials import pull_secret
from components.objects import MARGIN, kubernetes_object, shared_metadata
from serving_catalog.graphs import GraphPlan
from serving_catalog.graphs.entries import Dynamo, DynamoRelease
from serving_catalog.graphs.objects import Namespace
from serving_catalog.graphs.words import mirrored
from serving_catalog.loading import merged
from settings import Settings

# Names of Services and webhooks inside the platform follow from it.
RELEASE_NAME = "dynamo-platform"

# The chart's images. Source: ai-dynamo/dynamo deploy/helm/charts/platform/components/operator/values.yaml
OPERATOR_IMAGES = {
    "manager": "nvcr.io/nvidia/ai-dynamo/kubernetes-operator",
    "kubeRbacProxy": "gcr.io/kubebuilder/kube-rbac-proxy",
}


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
            namespace = Namespace(metadata=shared_metadata(plan, settings.platform_namespace))
            before.append(kubernetes_object("platform-namespace", namespace, ResourceOptions(parent=self)))
        if settings.makes_pull_secret:
            opts = ResourceOptions(parent=self, depends_on=before[:])
            before.append(pull_secret("platform-registry", plan, settings, settings.platform_namespace, opts))
        within = f"{settings.platform_timeout_seconds + int(MARGIN.total_seconds())}s"
        self.release = kubernetes.helm.v3.Release(
            "platform",
            name=RELEASE_NAME,
            namespace=settings.platform_namespace,
            chart=settings.platform_chart or dynamo.chart.archive.format(version=release.chart_version),
            # A chart from elsewhere says its own version.
            version=None if settings.platform_chart else release.chart_version,
            values=merged(chart_values(release, settings), settings.platform_values),
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


def chart_values(release: DynamoRelease, settings: Settings) -> dict[str, Any]:
    """What the release needs, said in full: the chart's own defaults differ from release to release.

    Workers of one node and a frontend that finds them through the API server need no etcd, Grove or KAI.
    """
    values: dict[str, Any] = {
        "global": {
            "etcd": {"install": False},
            "nats": {"install": release.nats_by_default},
            "grove": {"install": False, "enabled": False},
            "kai-scheduler": {"install": False, "enabled": False},
        },
        "dynamo-operator": {"upgradeCRD": True, "discoveryBackend": "kubernetes"},
    }
    if settings.image_registry:
        images = {
            part: {"image": {"repository": mirrored(image, settings.image_registry)}}
            for part, image in OPERATOR_IMAGES.items()
        }
        values = merged(values, {"dynamo-operator": {"controllerManager": images}})
        if release.nats_by_default:
            # NATS' own chart, from 1.0 on: one registry for its images, of which only the server's is a library image.
            values = merged(values, {"global": {"image": {"registry": settings.image_registry}}})
            values = merged(values, {"nats": {"container": {"image": {"repository": "library/nats"}}}})
    if settings.makes_pull_secret:
        values = merged(values, {"dynamo-operator": {"imagePullSecrets": [{"name": settings.pull_secret}]}})
        values = merged(values, {"global": {"image": {"pullSecretNames": [settings.pull_secret]}}})
    return values
