"""The running stack: its settings and plan, checked against its cluster; what it says when it fails, and at the end."""

from __future__ import annotations

import pulumi

import cluster
import diagnose
from serving_catalog import Catalog
from serving_catalog.graphs import GraphPlan
from settings import Settings, SettingsError, read


def read_stack() -> tuple[Settings, Catalog, GraphPlan]:
    """The running stack's settings and plan; or one error that lists everything wrong with them or with the cluster."""
    values = {**pulumi.runtime.config.get_config_env(), **pulumi.runtime.config.CONFIG.get()}
    secrets = {key for key in values if pulumi.runtime.config.is_config_secret(key)}
    settings, catalog, plan = read(values, secrets, pulumi.get_project(), stack_identity())
    problems = cluster.problems(settings, plan, catalog)
    if problems:
        raise SettingsError(problems)
    return settings, catalog, plan


def stack_identity() -> str:
    """The running stack as `organization/project/stack`; a local backend's organization is always the same."""
    return f"{pulumi.get_organization()}/{pulumi.get_project()}/{pulumi.get_stack()}"


def diagnosis(settings: Settings, plan: GraphPlan) -> str:
    """What stands in the deployment's way, as diagnose.py says it."""
    return diagnose.explain(
        settings.kubeconfig_path, settings.context, plan.namespace, plan.name, plan.load_within_seconds
    )


def outputs(plan: GraphPlan) -> dict[str, str | list[str]]:
    """What a person needs next, in the order of use."""
    # A note on the token's Secret is for those who apply manifests by hand: the program has made it or looked at it.
    notes = [note for note in plan.notes if plan.token is None or plan.token.name not in note]
    shown: dict[str, str | list[str] | None] = {
        "namespace": plan.namespace,
        "deployment": plan.name,
        "model": plan.served_model_id,
        "url": plan.url,
        "port_forward": plan.port_forward_command,
        "curl": plan.curl_command,
        "watch": plan.watch_command,
        "model_cache": plan.claim_name,
        "artifacts": plan.artifacts or plan.job_context.volume.benchmarks,  # a directory of the model cache
        "notes": notes,
    }
    return {name: value for name, value in shown.items() if value}
