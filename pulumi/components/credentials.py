"""Credentials: Secrets made from the stack's encrypted configuration. What exists already is only named in the plan."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import pulumi
import pulumi_kubernetes as kubernetes
from pulumi import ResourceOptions

from components.objects import shared_metadata
from serving_catalog.graphs import GraphPlan
from serving_catalog.graphs.objects import Metadata
from settings import Settings


class Credentials(pulumi.ComponentResource):
    """The Hugging Face token and a registry's password, where the configuration has them.

    Objects refer to the Secrets by name, which is plain.
    """

    token: pulumi.CustomResource | None = None
    registry: pulumi.CustomResource | None = None

    def __init__(self, name: str, *, plan: GraphPlan, settings: Settings, opts: ResourceOptions) -> None:
        super().__init__("gpt-oss:components:Credentials", name, {}, opts)
        child = ResourceOptions(parent=self)
        if settings.makes_token_secret and plan.token is not None:
            metadata = shared_metadata(plan, plan.token.name, plan.namespace)
            token = {plan.token.key: settings.hf_token.get_secret_value()}
            self.token = _secret("hf-token", "Opaque", metadata, token, child)
        if settings.makes_pull_secret:
            self.registry = pull_secret("registry", plan, settings, plan.namespace, child)
        self.register_outputs({})


def pull_secret(
    name: str, plan: GraphPlan, settings: Settings, namespace: str, opts: ResourceOptions
) -> pulumi.CustomResource:
    """The registry's login, in one namespace."""
    metadata = shared_metadata(plan, settings.pull_secret, namespace)
    return _secret(
        name, "kubernetes.io/dockerconfigjson", metadata, {".dockerconfigjson": docker_config(settings)}, opts
    )


def docker_config(settings: Settings) -> str:
    """The registry's login as a container runtime reads it."""
    password = settings.registry_password.get_secret_value()
    auth = base64.b64encode(f"{settings.registry_username}:{password}".encode()).decode()
    login = {"username": settings.registry_username, "password": password, "auth": auth}
    return json.dumps({"auths": {settings.registry_server: login}})


def _secret(
    name: str, kind: str, metadata: Metadata, values: Mapping[str, str], opts: ResourceOptions
) -> pulumi.CustomResource:
    """A Secret whose values are Pulumi secrets: encrypted in the state, hidden in what is printed."""
    plain: Any = metadata.model_dump(mode="json", exclude_defaults=True)
    return kubernetes.core.v1.Secret(
        name,
        metadata=plain,
        type=kind,
        string_data={key: pulumi.Output.secret(value) for key, value in values.items()},
        opts=opts,
    )
