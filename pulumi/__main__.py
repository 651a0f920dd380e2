"""gpt-oss on NVIDIA Dynamo: an empty namespace becomes a served, checked and, if asked, measured endpoint."""

import pulumi

from components.benchmark import Benchmark
from components.credentials import Credentials
from components.diagnosis import end_quietly_when_interrupted, explained
from components.model_cache import ModelCache
from components.namespace import Namespace
from components.platform import Platform
from components.providers import Cluster
from components.serving import Serving
from components.smoke_test import SmokeTest
from stack import diagnosis, outputs, read_stack

end_quietly_when_interrupted()
settings, catalog, plan = read_stack()  # refuses, before anything is created, whatever can be known to fail
cluster = Cluster(settings)
why = explained(lambda: diagnosis(settings, plan))

namespace = platform = None
if settings.create_namespace:
    namespace = Namespace("namespace", plan=plan, keeper=cluster.keeper, opts=cluster.after())
if settings.platform == "install":
    platform = Platform("platform", plan=plan, dynamo=catalog.dynamo, settings=settings, opts=cluster.after())
credentials = Credentials("credentials", plan=plan, settings=settings, opts=cluster.after(namespace))
ready = cluster.after(namespace, credentials)
cache = ModelCache("model-cache", plan=plan, keeper=cluster.keeper, on_failure=why, opts=ready)
serving = Serving("serving", plan=plan, settings=settings, on_failure=why, opts=cluster.after(platform, cache))
smoke_test = SmokeTest("smoke-test", plan=plan, on_failure=why, opts=cluster.after(serving))
if plan.benchmark is not None:
    Benchmark("benchmark", plan=plan, on_failure=why, opts=cluster.after(serving, smoke_test))

for name, value in outputs(plan).items():
    pulumi.export(name, value)
