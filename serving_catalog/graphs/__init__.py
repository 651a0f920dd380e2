"""Deployments of Kubernetes: a target and settings become one validated `GraphPlan`, plain typed objects.

Nothing here knows Pulumi, reads a cluster or looks at the clock.
"""

from serving_catalog.graphs.plans import GraphPlan, JobContext
from serving_catalog.graphs.requests import BenchmarkRequest, GraphRequest, ModelCacheRequest, graph_request_from

__all__ = [
    "BenchmarkRequest",
    "GraphPlan",
    "GraphRequest",
    "JobContext",
    "ModelCacheRequest",
    "graph_request_from",
]
