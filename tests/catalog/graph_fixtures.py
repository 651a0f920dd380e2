"""What the tests of graphs share."""

from __future__ import annotations

from typing import Any

import yaml

from serving_catalog import Catalog, load_catalog, parse_overrides
from serving_catalog.graphs import GraphPlan, graph_request_from, plan_graph
from serving_catalog.graphs.objects import Container, GraphComponent

TARGETS = ("gb200-agg", "gb200-disagg", "b200-disagg", "h200-agg", "b200-agg")
TENSORRT_LLM = ("gb200-agg", "gb200-disagg", "b200-disagg")


def plan(target: str, *settings: str, catalog: Catalog | None = None, **request: Any) -> GraphPlan:
    """Plan a target; `settings` are `component.path=value` words as on the command line."""
    overrides = [override.model_dump() for override in parse_overrides(settings)]
    values: dict[str, Any] = {"target": target, "overrides": overrides, **request}
    wanted = graph_request_from(values)
    return plan_graph(wanted, catalog if catalog is not None else load_catalog())


def component(made: GraphPlan, kind: str) -> GraphComponent:
    (found,) = [part for part in made.graph.spec.components if part.type == kind]
    return found


def workers(made: GraphPlan) -> list[GraphComponent]:
    return [part for part in made.graph.spec.components if part.type != "frontend"]


def main(part: GraphComponent) -> Container:
    (container,) = part.pod_template.spec.containers
    assert container.name == "main"
    return container


def environment(part: GraphComponent) -> dict[str, str]:
    return {variable.name: variable.value or "" for variable in main(part).env}


def argument(part: GraphComponent, flag: str) -> str:
    words = main(part).args
    return words[words.index(flag) + 1]


def options(made: GraphPlan, file: str = "config.yaml") -> dict[str, Any]:
    loaded = yaml.safe_load(made.engine_config.data[file])
    assert isinstance(loaded, dict)
    return loaded
