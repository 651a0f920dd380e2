"""The stand-in's webhooks refuse what the real ones were recorded refusing, in the same words, and admit the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.stand_ins.dynamo_operator import admission, names
from tests.stand_ins.dynamo_operator import graph as graphs

RECORDED = Path(__file__).parent / "recorded"
Change = Callable[[dict[str, Any]], None]


def cases(file: str) -> dict[str, dict[str, Any]]:
    return {case["case"]: case for case in yaml.safe_load((RECORDED / file).read_text())}


CREATED = cases("invalid-messages.yaml")
UPDATED = cases("invalid-update-messages.yaml")


def kubectl_says(response: dict[str, Any]) -> str:
    """A refusal as `kubectl` prints it: by causes when there are any, else the message."""
    said = "".join(f"Warning: {warning}\n" for warning in response.get("warnings", []))
    status = response["status"]
    if status["reason"] != "Invalid":
        denied = 'Error from server: admission webhook "mdynamographdeployment.kb.io" denied the request: '
        return f"{said}{denied}{status['message']}"
    details = status["details"]
    causes = [f"{cause['field']}: {cause['message']}" for cause in details["causes"]]
    listed = causes[0] if len(causes) == 1 else "\n* " + "\n* ".join(causes)
    return f'{said}The {details["kind"]} "{details["name"]}" is invalid: {listed}'


def graph(name: str, file: str = "agg") -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load((RECORDED / "submitted" / f"{file}.yaml").read_text())
    manifest["metadata"]["name"] = name
    return manifest


def component(index: int = 1, **fields: Any) -> Change:
    return lambda manifest: manifest["spec"]["components"][index].update(fields)


def image(value: str | None, index: int = 1) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        main = manifest["spec"]["components"][index]["podTemplate"]["spec"]["containers"][0]
        main.pop("image") if value is None else main.update(image=value)

    return change


def container_name(manifest: dict[str, Any]) -> None:
    manifest["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]["name"] = "engine"


def spec(**fields: Any) -> Change:
    return lambda manifest: manifest["spec"].update(fields)


def without(field: str) -> Change:
    return lambda manifest: manifest["spec"].pop(field)


def without_type(manifest: dict[str, Any]) -> None:
    manifest["spec"]["components"][1].pop("type")


def both(*changes: Change) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        for each in changes:
            each(manifest)

    return change


def only(*kept: int) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        manifest["spec"]["components"] = [manifest["spec"]["components"][index] for index in kept]

    return change


def added(name: str) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        manifest["spec"]["components"].append(copy.deepcopy(manifest["spec"]["components"][1]) | {"name": name})

    return change


def annotation(key: str, value: str | None) -> Change:
    def change(manifest: dict[str, Any]) -> None:
        annotations = manifest["metadata"].setdefault("annotations", {})
        annotations.pop(key) if value is None else annotations.update({key: value})

    return change


RUNTIME = "nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime"
# What each recorded case changed in the aggregated graph. Cases that the API server's own schema refuses before any
# webhook is asked are not here but in SCHEMA; test_live.py submits those.
ON_CREATION: dict[str, Change] = {
    "worker image tag latest": image(f"{RUNTIME}:latest"),
    "frontend image tag latest": image(f"{RUNTIME}:latest", 0),
    "worker image digest": image(f"{RUNTIME}@sha256:{'0' * 64}"),
    "worker tag+digest": image(f"{RUNTIME}:1.5.0@sha256:{'0' * 64}"),
    "worker image without tag": image(RUNTIME),
    "worker tag my-tag": image(f"{RUNTIME}:my-tag"),
    "worker tag 1.2.1-efa": image(f"{RUNTIME}:1.2.1-efa"),
    "worker tag 1.2": image(f"{RUNTIME}:1.2"),
    "latest + runtimeVersionOverride 1.5.0": both(
        image(f"{RUNTIME}:latest"), component(runtimeVersionOverride="1.5.0")
    ),
    "no type": without_type,
    "no components": spec(components=[]),
    "no image": image(None),
    "container name not main": container_name,
    "two frontends": component(type="frontend"),
    "replicas 0 worker": component(replicas=0),
    "no backendFramework": without("backendFramework"),
    "sharedMemorySize bad": component(sharedMemorySize="80 gigabytes"),
    "minAvailable 1 (no grove)": component(minAvailable=1),
    "multinode 2 (no grove, no lws)": component(multinode={"nodeCount": 2}),
    "name 60 chars": lambda manifest: manifest["metadata"].update(name="a" * 60),
    "topologyConstraint (no grove)": component(topologyConstraint={"packDomain": "rack"}),
    "prefill only + frontend": component(type="prefill"),
    "only frontend": only(0),
    "disagg decode + prefill without frontend": only(1),
}
SCHEMA = {
    "type main",
    "duplicate component names",
    "replicas -1",
    "restart on create",
    "backendFramework tensorrt",
    "unknown field",
    "component name with underscore",
    "component name very long",
    "names equal after lowercasing",
}
# Which volume clashed in the recorded case is not known.
UNKNOWN = {"dgd shm volume clash"}

ON_UPDATE: dict[str, Change] = {
    "update: change component type worker->decode": component(type="decode"),
    "update: rename component": component(name="Worker2"),
    "update: remove component": only(0),
    "update: add component": added("Extra"),
    "update: backendFramework": spec(backendFramework="vllm"),
    "update: workload-provider annotation": annotation(names.WORKLOAD_PROVIDER, "grove"),
    "update: remove workload-provider annotation": annotation(names.WORKLOAD_PROVIDER, None),
    "update: remove origin-version annotation": annotation(names.ORIGIN_VERSION, None),
    "update: change origin-version annotation": annotation(names.ORIGIN_VERSION, "1.6.0"),
    "update: remove worker-hash annotation": annotation(names.CURRENT_WORKER_HASH, None),
    "update: remove finalizer": lambda manifest: manifest["metadata"].pop("finalizers"),
    "update: enable-grove annotation": annotation(names.ENABLE_GROVE, "true"),
    "update: image latest": image(f"{RUNTIME}:latest"),
    "update: multinode": component(multinode={"nodeCount": 2}),
    "update: scalingAdapter": component(scalingAdapter={}),
    "update: sharedMemorySize": component(sharedMemorySize="64Gi"),
    "update: restart cleared": lambda manifest: manifest["spec"].pop("restart", None),
    "update: globalDynamoNamespace": component(globalDynamoNamespace=True),
}


def answers(manifest: dict[str, Any], old: dict[str, Any] | None = None, user: str = "someone") -> dict[str, Any]:
    """The webhooks' answer to a graph being created, or updated: the first refusal, or the last admission."""
    request = {
        "uid": "1",
        "name": manifest["metadata"]["name"],
        "operation": "UPDATE" if old else "CREATE",
        "object": manifest,
        "oldObject": old,
        "userInfo": {"username": user},
    }
    mutated = admission.mutate(request)
    return admission.validate(request) if mutated["allowed"] else mutated


def existing() -> dict[str, Any]:
    manifest = graph("gpt-oss-agg")
    manifest["metadata"]["finalizers"] = [names.FINALIZER]
    manifest["metadata"]["annotations"] = {
        names.WORKLOAD_PROVIDER: names.COMPONENT_PROVIDER,
        names.ORIGIN_VERSION: names.OPERATOR_VERSION,
        names.CURRENT_WORKER_HASH: "a2224789",
    }
    return manifest


def check(response: dict[str, Any], recorded: dict[str, Any]) -> None:
    assert response["allowed"] is (recorded["rc"] == 0), response
    if recorded["rc"]:
        assert kubectl_says(response) == recorded["message"]


def test_every_recorded_case_is_accounted_for() -> None:
    assert set(ON_CREATION) | SCHEMA | UNKNOWN == set(CREATED)
    assert set(ON_UPDATE) == set(UPDATED)


@pytest.mark.parametrize("case", ON_CREATION)
def test_a_graph_is_refused_on_creation_as_recorded(case: str) -> None:
    manifest = graph("bad")
    ON_CREATION[case](manifest)
    check(answers(manifest), CREATED[case])


@pytest.mark.parametrize("case", ON_UPDATE)
def test_a_change_is_refused_as_recorded(case: str) -> None:
    old = existing()
    new = copy.deepcopy(old)
    ON_UPDATE[case](new)
    check(answers(new, old), UPDATED[case])


def test_replicas_of_an_adapted_component_are_changed_by_the_operator_alone() -> None:
    old = existing()
    component(scalingAdapter={})(old)
    new = copy.deepcopy(old)
    component(replicas=2)(new)
    assert not answers(new, old)["allowed"]
    assert "Forbidden: cannot be modified directly" in kubectl_says(answers(new, old))
    assert answers(new, old, user=names.OPERATOR_USER)["allowed"]


def test_a_graph_gets_stamps_and_missing_replicas() -> None:
    manifest = graph("gpt-oss-agg", "norep")
    request = {"uid": "1", "operation": "CREATE", "object": manifest}
    assert admission.mutate(request)["changes"] == [
        {"op": "add", "path": "/metadata/annotations", "value": {}},
        {
            "op": "add",
            "path": "/metadata/annotations/nvidia.com~1dynamo-operator-origin-version",
            "value": "1.5.0",
        },
        {"op": "add", "path": "/metadata/annotations/nvidia.com~1workload-provider", "value": "component"},
        {"op": "add", "path": "/spec/components/0/replicas", "value": 1},
        {"op": "add", "path": "/spec/components/1/replicas", "value": 1},
    ]


def own(key: str, value: str) -> Change:
    return component(
        podTemplate={
            "metadata": {"annotations": {key: value}},
            "spec": graph("x")["spec"]["components"][1]["podTemplate"]["spec"],
        }
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (component(type="planner"), "spec.components[1].type 'planner' is not modelled"),
        (component(modelRef={"name": "x"}), "spec.components[1].modelRef is not modelled"),
        (spec(experimental={}), "spec.experimental is not modelled"),
        (own("nvidia.com/deployment-stratgy", "Recreate"), "is not an annotation it knows"),
        (own(names.STRATEGY, "recreate"), "'recreate' does not match Recreate|RollingUpdate"),
        (own(names.MAX_SURGE, "none"), "'none' does not match"),
        (annotation("nvidia.com/enable-groove", "false"), "is not an annotation it knows"),
        (spec(annotations={names.MAX_SURGE: "0", names.MAX_UNAVAILABLE: "0"}), "may not both be 0"),
    ],
)
def test_what_the_stand_in_does_not_imitate_it_refuses_by_name(change: Change, said: str) -> None:
    manifest = graph("strict")
    change(manifest)
    response = answers(manifest)
    assert not response["allowed"]
    assert said in kubectl_says(response)
    manifest["metadata"]["namespace"] = "serving"
    with pytest.raises(graphs.NotModelledError):
        graphs.read(manifest)


@pytest.mark.parametrize("case", ["no type", "no backendFramework", "update: globalDynamoNamespace"])
def test_what_was_admitted_but_never_seen_at_work_fails_when_it_is_reconciled(case: str) -> None:
    manifest = graph("strict")
    (ON_CREATION | ON_UPDATE)[case](manifest)
    assert answers(manifest)["allowed"]
    assert "stand-in operator" in str(graphs.reconcile_problem(graphs.read(manifest)))
