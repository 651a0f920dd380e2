"""Manifests for kubectl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import yaml

from serving_catalog.graphs.objects import Resource
from serving_catalog.graphs.plans import GraphPlan

Step = Literal["prepare", "serve", "check", "benchmark"]
STEPS: tuple[Step, ...] = ("prepare", "serve", "check", "benchmark")

_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def step_objects(plan: GraphPlan, step: Step | None) -> Iterator[Resource]:
    """The objects of one step, or all. A step waits for the one before."""
    if step is None:
        yield from plan.objects()
    elif step == "prepare":
        yield plan.namespace_object
        yield from plan.network_policies
        if plan.claim is not None:
            yield plan.claim
        yield plan.programs
        yield plan.download
    elif step == "serve":
        yield plan.engine_config
        yield plan.graph
    elif step == "check":
        yield plan.programs
        yield plan.smoke
    elif plan.benchmark is not None:
        yield plan.programs
        yield plan.benchmark


def as_yaml(plan: GraphPlan, step: Step | None = None) -> str:
    """One YAML document an object, and how to apply them."""
    documents = [_document(resource.manifest()) for resource in step_objects(plan, step)]
    return _head(plan) + "".join(f"---\n{document}" for document in documents)


def as_json(plan: GraphPlan, step: Step | None = None) -> str:
    """A v1 List."""
    items = [resource.manifest() for resource in step_objects(plan, step)]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2) + "\n"


def _head(plan: GraphPlan) -> str:
    """What a reader of the file must know. Server-side, because the CRD is too large for kubectl's annotation."""
    lines = [
        f"{plan.target}: {plan.served_model_id} on {plan.gpus} x {plan.gpu}, Dynamo {plan.release}",
        "kubectl apply --server-side --field-manager gpt-oss -f -",
        f"watch: {plan.watch_command}",
        f"reach: {plan.port_forward_command}",
        *plan.notes,
    ]
    return "".join(f"# {line}\n" for line in lines)


def _document(manifest: dict[str, Any]) -> str:
    return str(yaml.dump(manifest, Dumper=_Text, sort_keys=False, width=120, allow_unicode=True))


class _Text(_Dumper):  # type: ignore[misc]
    """Writes text of several lines as a block, so that programs and options can be read."""


def _text(dumper: Any, value: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Text.add_representer(str, _text)
