"""What to run: the serving catalog and its planner.

Data in serving_catalog/data, laid under an operator's overlay, turned into one validated plan for a host:

    plan_host(ServeRequest(engine="tensorrt_llm", profile="low_latency", gpu="H200", gpu_count=4), load_catalog())

and for Kubernetes into the objects of a namespace:

    plan_graph(GraphRequest(target="gb200-agg"), load_catalog())

Nothing here starts a process, reads the network or looks at the clock; the only I/O is reading the data files.
"""

from serving_catalog.docker import Layout, docker_run
from serving_catalog.errors import CatalogError, PlanError
from serving_catalog.graphs.planning import plan_graph
from serving_catalog.graphs.plans import GraphPlan
from serving_catalog.graphs.requests import GraphRequest, graph_request_from
from serving_catalog.loading import Catalog, load_catalog
from serving_catalog.overrides import overrides_from_mapping, parse_overrides
from serving_catalog.planning import plan_host
from serving_catalog.plans import HostPlan, Override, Process, ServeRequest, request_from

__all__ = [
    "Catalog",
    "CatalogError",
    "GraphPlan",
    "GraphRequest",
    "HostPlan",
    "Layout",
    "Override",
    "PlanError",
    "Process",
    "ServeRequest",
    "docker_run",
    "graph_request_from",
    "load_catalog",
    "overrides_from_mapping",
    "parse_overrides",
    "plan_graph",
    "plan_host",
    "request_from",
]
