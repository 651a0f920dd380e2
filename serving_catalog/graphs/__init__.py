"""Deployments of Kubernetes: a target and settings become one validated `GraphPlan`, plain typed objects.

    plan_graph(GraphRequest(target="gb200-agg"), load_catalog())

Nothing here knows Pulumi, reads a cluster or looks at the clock.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serving_catalog.graphs.planning import plan_graph
    from serving_catalog.graphs.plans import GraphPlan, JobContext
    from serving_catalog.graphs.requests import BenchmarkRequest, GraphRequest, ModelCacheRequest, graph_request_from

__all__ = [
    "BenchmarkRequest",
    "GraphPlan",
    "GraphRequest",
    "JobContext",
    "ModelCacheRequest",
    "graph_request_from",
    "plan_graph",
]

_HOMES = {"plan_graph": "planning", "GraphPlan": "plans", "JobContext": "plans"}


def __getattr__(name: str) -> Any:
    # Loading the catalog needs the types of its data only; a play on hosts should not pay for Kubernetes' objects.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'requests')}"), name)
