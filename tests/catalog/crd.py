"""The CustomResourceDefinition as a judge: strict, as the API server is with fields it does not know."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

REPOSITORY = Path(__file__).parents[2]
CRDS = Path(os.environ.get("DYNAMO_CRDS", REPOSITORY.parent / "shared" / "data" / "dynamo-crds"))
GRAPHS = CRDS / "nvidia.com_dynamographdeployments.yaml"
RECORDINGS = Path(os.environ.get("DYNAMO_RECORDINGS", REPOSITORY.parent / "shared" / "data" / "dynamo-operator"))


def available() -> bool:
    return GRAPHS.is_file()


def problems(manifest: dict[str, Any]) -> list[str]:
    """What the schema of the manifest's own version refuses."""
    version = manifest["apiVersion"].partition("/")[2]
    found = _validator(version).iter_errors(manifest)
    return sorted(f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found)


@cache
def _validator(version: str) -> Draft202012Validator:
    definition = yaml.load(GRAPHS.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (served,) = [entry for entry in definition["spec"]["versions"] if entry["name"] == version and entry["served"]]
    schema = _strict(served["schema"]["openAPIV3Schema"])
    # The API server knows these itself.
    schema["properties"].update({"metadata": {"type": "object"}, "apiVersion": {"type": "string"}})
    return Draft202012Validator(schema)


def _strict(schema: Any) -> Any:
    """A structural schema as JSON schema: fields it does not name are errors, unless it says that they are kept."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {
        key: {name: _strict(below) for name, below in value.items()} if key == "properties" else _strict(value)
        for key, value in schema.items()
        if not key.startswith("x-kubernetes-") and key not in ("nullable", "format", "default", "description")
    }
    if schema.get("x-kubernetes-int-or-string"):
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    if "properties" in schema and "additionalProperties" not in schema:
        strict["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return strict
