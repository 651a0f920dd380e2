"""Credentials: Secrets made from the stack's encrypted configuration. What exists already is only named in the plan."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping

import pulumi_kubernetes as kubernetes
from settings import Settings

import pulumi
from pulumi import ResourceOptions
from serving_catalog.graphs import GraphPlan


class Credentials(pulumi.ComponentResource):
    """The Hugging Face token and a registry's password, where the configuration has them.

    Their values are Pulumi secrets: encrypted in the state, hidden in what is printed. Objects refer to the Secrets by
    name, which is plain.
    """

    secrets: tuple[pulumi.CustomResource, ...]

    def __init__(
        self,
        name: str,
        *,
        plan: GraphPlan,
        settings: Settings,
        opts: ResourceOptions,
    ) -> None:
        super().__init__("gpt-oss:components:Credentials", name, {}, opts)
        labels = plan.namespace_object.metadata.labels
        annotations = plan.namespace_object.metadata.annotations
        made: list[pulumi.CustomResource] = []

        def secret(resource: str, kind: str, secret_name: str, values: Mapping[str, str]) -> None:
            made.append(
                kubernetes.core.v1.Secret(
                    resource,
                    metadata={
                        "name": secret_name,
                        "namespace": plan.namespace,
                        "labels": labels,
                        "annotations": annotations,
                    },
                    type=kind,
                    string_data={key: pulumi.Output.secret(value) for key, value in values.items()},
                    opts=ResourceOptions(parent=self),
                )
            )

        if settings.makes_token_secret:
            assert plan.token is not None
            token = settings.hf_token.get_secret_value()
            secret("hf-token", "Opaque", plan.token.name, {plan.token.key: token})
        if settings.makes_pull_secret:
            config = docker_config(settings)
            secret("registry", "kubernetes.io/dockerconfigjson", settings.pull_secret, {".dockerconfigjson": config})
        self.secrets = tuple(made)
        self.register_outputs({})


def docker_config(settings: Settings) -> str:
    """The registry's login as a container runtime reads it."""
    password = settings.registry_password.get_secret_value()
    auth = base64.b64encode(f"{settings.registry_username}:{password}".encode()).decode()
    login = {"username": settings.registry_username, "password": password, "auth": auth}
    return json.dumps({"auths": {settings.registry_server: login}})
