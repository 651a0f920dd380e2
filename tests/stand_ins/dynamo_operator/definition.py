"""A definition of DynamoComponentDeployments for clusters that lack the real one: status and generations, no schema.

The real definition is not among the ones the tests have; nobody but the operator writes these objects.
"""

from __future__ import annotations

from tests.stand_ins.dynamo_operator import names
from tests.stand_ins.dynamo_operator.graph import Manifest

NAME = "dynamocomponentdeployments.nvidia.com"
OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def component_deployments() -> Manifest:
    version = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": OPEN, "status": OPEN}}},
    }
    kind = names.COMPONENT_DEPLOYMENT
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME, "annotations": {"gpt-oss.test/stand-in": "true"}},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": "dynamocomponentdeployments",
                "singular": kind.lower(),
                "shortNames": ["dcd"],
            },
            "versions": [version],
        },
    }
