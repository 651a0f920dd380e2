"""Registers what the configuration lists, in its order: manifests, with the options of Pulumi that tests are about."""

import asyncio

import pulumi
import pulumi_kubernetes as kubernetes
from pulumi import CustomTimeouts, ResourceOptions

KINDS = {
    "ConfigMap": kubernetes.core.v1.ConfigMap,
    "Secret": kubernetes.core.v1.Secret,
    "Namespace": kubernetes.core.v1.Namespace,
    "PersistentVolumeClaim": kubernetes.core.v1.PersistentVolumeClaim,
    "Job": kubernetes.batch.v1.Job,
    "Deployment": kubernetes.apps.v1.Deployment,
}

config = pulumi.Config()
kubeconfig, context = config.require("kubeconfig"), config.require("context")
provider = kubernetes.Provider("cluster", kubeconfig=kubeconfig, context=context)
keeper = kubernetes.Provider("keeper", kubeconfig=kubeconfig, context=context, upsert_existing_objects=True)


async def explain(args: pulumi.ErrorHookArgs) -> bool:
    pulumi.log.error(await asyncio.to_thread(lambda: f"why {args.name} could not be {args.failed_operation}d"))
    return False


hooks = pulumi.ResourceHookBinding(on_error=[pulumi.ErrorHook("explain", explain)])
made: dict[str, pulumi.Resource] = {}
for entry in config.require_object("objects"):
    manifest = dict(entry["manifest"])
    name, kind = entry.get("name", manifest["metadata"]["name"]), manifest.pop("kind")
    options = ResourceOptions(
        provider=keeper if entry.get("adopt") else None if entry.get("ambient") else provider,
        depends_on=[made[each] for each in entry.get("after", [])],
        retain_on_delete=entry.get("retain", False),
        ignore_changes=entry.get("ignore", []),
        custom_timeouts=CustomTimeouts(create=entry["within"], update=entry["within"]) if "within" in entry else None,
        hooks=hooks,
    )
    if entry.get("password"):
        manifest["string_data"] = {"password": config.require_secret("password")}
    api_version = manifest.pop("apiVersion")
    if kind in KINDS:
        made[name] = KINDS[kind](name, **manifest, opts=options)
    else:
        made[name] = kubernetes.apiextensions.CustomResource(
            name, api_version=api_version, kind=kind, **manifest, opts=options
        )
pulumi.export("made", list(made))
if config.get("password"):
    pulumi.export("password", config.require_secret("password"))
