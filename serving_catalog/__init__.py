"""What to run: the serving catalog and its planner.

Data in serving_catalog/data, laid under an operator's overlay, turned into one validated plan for a host:

    plan_host(ServeRequest(engine="tensorrt_llm", profile="low_latency", gpu="H200", gpu_count=4), load_catalog())

and for Kubernetes, in serving_catalog.graphs, into the objects of a namespace.

Nothing here starts a process, reads the network or looks at the clock; the only I/O is reading the data files.
"""

from serving_catalog.docker import Layout, docker_run
from serving_catalog.errors import CatalogError, PlanError
from serving_catalog.loading import Catalog, load_catalog
from serving_catalog.overrides import overrides_from_mapping, parse_overrides
from serving_catalog.planning import plan_host
from serving_catalog.plans import HostPlan, Override, Process, ServeRequest, request_from

__all__ = [
    "Catalog",
    "CatalogError",
    "HostPlan",
    "Layout",
    "Override",
    "PlanError",
    "Process",
    "ServeRequest",
    "docker_run",
    "load_catalog",
    "overrides_from_mapping",
    "parse_overrides",
    "plan_host",
    "request_from",
]
