"""The one way to the cluster: kubeconfig and context of the configuration, never the ambient ones."""

from __future__ import annotations

import pulumi_kubernetes as kubernetes

from settings import Settings


def cluster_provider(settings: Settings, name: str = "cluster", *, takes_over: bool = False) -> kubernetes.Provider:
    """A provider for the stack's cluster. One that `takes_over` updates what exists instead of refusing to create it.

    Everything that the environment could set is said here, so that the same stack does the same on every machine.
    """
    return kubernetes.Provider(
        name,
        kubeconfig=str(settings.kubeconfig_path),
        context=settings.context,
        enable_server_side_apply=True,
        enable_config_map_mutable=False,
        enable_secret_mutable=False,
        enable_patch_force=False,
        delete_unreachable=False,
        skip_update_unreachable=False,
        upsert_existing_objects=takes_over,
    )
