"""The one way to the cluster: kubeconfig and context of the configuration, never the ambient ones."""

from __future__ import annotations

import pulumi_kubernetes as kubernetes
from pulumi import Resource, ResourceOptions

from settings import Settings


class Cluster:
    """The providers of the stack's cluster.

    `keeper` may take over what exists, and is there for what destroy keeps: the next up takes it back. The checks
    before have seen that it is this stack's own. Without anything to keep there is none.
    """

    def __init__(self, settings: Settings) -> None:
        self.provider = _provider("cluster", settings, takes_over=False)
        self.keeper = _provider("keeper", settings, takes_over=True) if settings.keeps_model_cache else None

    def after(self, *before: Resource | None) -> ResourceOptions:
        """Options of a component that needs these first."""
        there = [resource for resource in before if resource is not None]
        return ResourceOptions(provider=self.provider, depends_on=there)


def _provider(name: str, settings: Settings, *, takes_over: bool) -> kubernetes.Provider:
    """Everything that the environment could set is said: the same stack does the same on every machine."""
    return kubernetes.Provider(
        name,
        kubeconfig=settings.provider_kubeconfig,
        context=settings.context,
        enable_server_side_apply=True,
        enable_config_map_mutable=False,
        enable_secret_mutable=False,
        enable_patch_force=False,
        delete_unreachable=False,
        skip_update_unreachable=False,
        upsert_existing_objects=takes_over,
    )
