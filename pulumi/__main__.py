"""gpt-oss on NVIDIA Dynamo: an empty namespace becomes a served, checked and, if asked, measured endpoint."""

import pulumi
from pulumi import Resource, ResourceOptions

from components.benchmark import Benchmark
from components.credentials import Credentials
from components.diagnosis import explained
from components.model_cache import ModelCache
from components.namespace import Namespace
from components.platform import Platform
from components.providers import cluster_provider
from components.serving import Serving
from components.smoke_test import SmokeTest
from stack import diagnosis, outputs, read_stack

settings, catalog, plan = read_stack()  # refuses, before anything is created, whatever can be known to fail

provider = cluster_provider(settings)
keeper = cluster_provider(settings, "keeper", takes_over=True) if settings.keeps_model_cache else None
on_failure = explained(lambda: diagnosis(settings, plan))


def after(*before: Resource | None) -> ResourceOptions:
    return ResourceOptions(provider=provider, depends_on=[resource for resource in before if resource is not None])


namespace = Namespace("namespace", plan=plan, keeper=keeper, opts=after()) if settings.create_namespace else None
platform = (
    Platform("platform", plan=plan, dynamo=catalog.dynamo, settings=settings, opts=after())
    if settings.platform == "install"
    else None
)
credentials = Credentials("credentials", plan=plan, settings=settings, opts=after(namespace))
cache = ModelCache("model-cache", plan=plan, keeper=keeper, on_failure=on_failure, opts=after(namespace, credentials))
serving = Serving(
    "serving",
    plan=plan,
    owned_replicas=settings.replicas,
    free_replicas=settings.scaled_elsewhere,
    on_failure=on_failure,
    opts=after(platform, cache),
)
smoke_test = SmokeTest("smoke-test", plan=plan, on_failure=on_failure, opts=after(serving))
if plan.benchmark is not None:
    Benchmark("benchmark", plan=plan, on_failure=on_failure, opts=after(serving, smoke_test))

for name, value in outputs(plan).items():
    pulumi.export(name, value)
