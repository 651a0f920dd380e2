"""Dynamo's definitions as they are installed: smaller, and as strict."""

from __future__ import annotations

import json

from tests.kubernetes.cluster import installable


def test_definitions_lose_words_and_their_webhook_and_nothing_else() -> None:
    size = {"type": "integer", "minimum": 1}
    schema = {
        "description": "a widget",
        "type": "object",
        "required": ["description"],
        "properties": {
            "description": {"description": "a field of this name", "type": "string"},
            "parts": {"type": "array", "items": {"description": "one part", "anyOf": [{"description": "a", **size}]}},
        },
    }
    definition = {
        "metadata": {"name": "widgets.example.com"},
        "spec": {
            "group": "example.com",
            "conversion": {"strategy": "Webhook"},
            "versions": [{"name": "v1", "schema": {"openAPIV3Schema": schema}}],
        },
    }
    [found] = installable(json.dumps(definition))
    assert found["metadata"] == definition["metadata"]
    assert found["spec"] == {
        "group": "example.com",
        "versions": [
            {
                "name": "v1",
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "required": ["description"],
                        "properties": {
                            "description": {"type": "string"},
                            "parts": {"type": "array", "items": {"anyOf": [size]}},
                        },
                    }
                },
            }
        ],
    }
