"""Both drivers do the same with the same program: what they make, replace, refuse, wait for, keep and say."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes import pods
from tests.kubernetes.api import Object
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.drivers import Driver, InProcess, Stack, UpdateFailedError, changed
from tests.kubernetes.engine import objects

PROGRAM = Path(__file__).parent / "programs" / "objects"
WIDGET = "widgets.gpt-oss.test"
PASSWORD = "correct horse battery staple"

pytestmark = pytest.mark.kubernetes


def stack_of(driver: Driver, cluster: Cluster, *entries: dict[str, Any], password: str = "") -> Stack:
    config = {"kubeconfig": str(cluster.kubeconfig), "context": cluster.context, "objects": list(entries)}
    return driver.stack(PROGRAM, "dev", config, {"password": password} if password else {})


def config_map(namespace: str, name: str = "text", **data: str) -> Object:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data or {"word": "one"}}


def job(namespace: str, name: str = "work", word: str = "one", **annotations: str) -> Object:
    container = {"name": "main", "image": "example.com/tool:1", "command": ["work", word]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "annotations": {f"pulumi.com/{key}": value for key, value in annotations.items()},
        },
        "spec": {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", "containers": [container]}}},
    }


def claim(namespace: str, storage_class: str = "shared-files") -> Object:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "cache", "namespace": namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": storage_class,
            "resources": {"requests": {"storage": "1000Mi"}},
        },
    }


def widget(namespace: str, *, wait: bool = True, size: int = 1) -> Object:
    annotations = {"annotations": {"pulumi.com/waitFor": "condition=Ready"}} if wait else {}
    return {
        "apiVersion": "gpt-oss.test/v1",
        "kind": "Widget",
        "metadata": {"name": "widget", "namespace": namespace, **annotations},
        "spec": {"size": size, "parts": [{"name": "a", "color": "red"}]},
    }


@pytest.fixture(scope="module")
def widgets(cluster: Cluster) -> Iterator[None]:
    """A kind with conditions."""
    opened = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": opened, "status": opened}}},
    }
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": WIDGET},
        "spec": {
            "group": "gpt-oss.test",
            "scope": "Namespaced",
            "names": {"kind": "Widget", "listKind": "WidgetList", "plural": "widgets", "singular": "widget"},
            "versions": [version],
        },
    }
    place = ("apiextensions.k8s.io/v1", "CustomResourceDefinition", WIDGET)
    cluster.api.create(definition)

    def established() -> bool:
        conditions = cluster.api.get(*place).get("status", {}).get("conditions") or []
        return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)

    cluster.api.wait(f"{WIDGET} is established", established)
    yield
    cluster.api.delete(*place)


def say_ready(cluster: Cluster, namespace: str, generation: int, status: str = "True") -> None:
    condition = {"type": "Ready", "status": status, "reason": "because", "observedGeneration": generation}
    cluster.api.patch(
        "gpt-oss.test/v1", "Widget", "widget", {"status": {"conditions": [condition]}}, namespace, subresource="status"
    )


def uid(cluster: Cluster, namespace: str, kind: str, name: str, api_version: str = "v1") -> str:
    return str(cluster.api.get(api_version, kind, name, namespace)["metadata"]["uid"])


# --- create, leave alone, change, replace, delete -------------------------------------------------------------------


def test_a_second_up_changes_nothing(driver: Driver, cluster: Cluster, namespace: str) -> None:
    stack = stack_of(
        driver,
        cluster,
        {"manifest": config_map(namespace)},
        {"manifest": claim(namespace)},
        {"manifest": job(namespace), "after": ["text", "cache"]},
    )
    first = stack.up()
    assert changed(first) == ["create cache", "create text", "create work"]
    assert first.outputs["made"] == ["text", "cache", "work"]
    assert changed(stack.up()) == []
    assert changed(stack.preview()) == []


def test_a_preview_makes_nothing(driver: Driver, cluster: Cluster, namespace: str) -> None:
    stack = stack_of(driver, cluster, {"manifest": config_map(namespace)})
    assert changed(stack.preview()) == ["create text"]
    assert "ConfigMap/text" not in cluster.left_in(namespace)


def test_data_of_a_config_map_is_replaced_and_its_labels_are_not(
    driver: Driver, cluster: Cluster, namespace: str
) -> None:
    entry: dict[str, Any] = {"manifest": config_map(namespace)}
    stack = stack_of(driver, cluster, entry)
    stack.up()
    before = uid(cluster, namespace, "ConfigMap", "text")

    entry["manifest"]["metadata"]["labels"] = {"kept": "yes"}
    stack.config["objects"] = [entry]
    assert changed(stack.up()) == ["update text"]
    assert uid(cluster, namespace, "ConfigMap", "text") == before

    stack.config["objects"] = [{"manifest": config_map(namespace, word="two")}]
    assert changed(stack.up()) == ["replace text"]
    assert uid(cluster, namespace, "ConfigMap", "text") != before
    assert "labels" not in cluster.api.get("v1", "ConfigMap", "text", namespace)["metadata"]


def test_what_the_program_no_longer_names_is_deleted(driver: Driver, cluster: Cluster, namespace: str) -> None:
    stack = stack_of(
        driver, cluster, {"manifest": config_map(namespace, "one")}, {"manifest": config_map(namespace, "two")}
    )
    stack.up()
    stack.config["objects"] = [{"manifest": config_map(namespace, "two")}]
    assert changed(stack.up()) == ["delete one"]
    assert cluster.left_in(namespace) == ["ConfigMap/two"]


def test_destroy_goes_backwards_and_leaves_what_is_kept(driver: Driver, cluster: Cluster, namespace: str) -> None:
    stack = stack_of(
        driver,
        cluster,
        {"manifest": config_map(namespace, "first")},
        {"manifest": config_map(namespace, "second"), "after": ["first"], "retain": True},
        {"manifest": config_map(namespace, "third"), "after": ["second"]},
    )
    stack.up()
    destroyed = stack.destroy()
    gone = [step.name for step in destroyed.steps if step.type.endswith(":ConfigMap") and step.operation == "delete"]
    assert gone == ["third", "first"]
    assert cluster.left_in(namespace) == ["ConfigMap/second"]


def test_another_template_makes_a_job_run_again(driver: Driver, cluster: Cluster, namespace: str) -> None:
    stack = stack_of(driver, cluster, {"manifest": job(namespace)})
    stack.up()
    before = uid(cluster, namespace, "Job", "work", "batch/v1")
    stack.config["objects"] = [{"manifest": job(namespace, word="two")}]
    assert changed(stack.up()) == ["replace work"]
    assert uid(cluster, namespace, "Job", "work", "batch/v1") != before


def test_refresh_forgets_what_is_gone_and_up_makes_it_again(driver: Driver, cluster: Cluster, namespace: str) -> None:
    stack = stack_of(driver, cluster, {"manifest": config_map(namespace)})
    stack.up()
    cluster.api.delete("v1", "ConfigMap", "text", namespace)
    stack.refresh()
    assert changed(stack.up()) == ["create text"]


def test_what_a_failed_update_has_replaced_is_in_the_way_of_going_back(
    driver: Driver, cluster: Cluster, namespace: str
) -> None:
    """So a program gives what it may go back to a name of its own."""

    def entries(name: str, *more: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"name": "text", "manifest": config_map(namespace, name)}, *more]

    stack = stack_of(driver, cluster, *entries("one"))
    stack.up()
    refused = {"manifest": config_map(namespace, "Not-A-Name"), "after": ["text"]}
    stack.config["objects"] = entries("two", refused)
    with pytest.raises(UpdateFailedError, match="Not-A-Name"):
        stack.up()
    assert {"ConfigMap/one", "ConfigMap/two"} <= set(cluster.left_in(namespace))

    stack.config["objects"] = entries("one")
    with pytest.raises(UpdateFailedError, match="already exists"):
        stack.up()
    stack.config["objects"] = entries("two")
    stack.up()
    assert cluster.left_in(namespace) == ["ConfigMap/two"]


# --- what exists, what belongs to others -----------------------------------------------------------------------------


def test_what_exists_is_refused(driver: Driver, cluster: Cluster, namespace: str) -> None:
    cluster.api.create(config_map(namespace))
    with pytest.raises(UpdateFailedError, match="already exists"):
        stack_of(driver, cluster, {"manifest": config_map(namespace)}).up()


def test_what_exists_is_taken_over_on_request(driver: Driver, cluster: Cluster, namespace: str) -> None:
    cluster.api.create(config_map(namespace))
    before = uid(cluster, namespace, "ConfigMap", "text")
    stack = stack_of(driver, cluster, {"manifest": config_map(namespace, word="one"), "adopt": True})
    with pytest.raises(UpdateFailedError, match="conflict"):
        stack_of(driver, cluster, {"manifest": config_map(namespace, word="other"), "adopt": True}).up()
    stack.up()
    assert uid(cluster, namespace, "ConfigMap", "text") == before


def test_a_field_of_another_controller_is_a_conflict_until_it_is_left_out(
    driver: Driver, cluster: Cluster, namespace: str, widgets: None
) -> None:
    stack = stack_of(driver, cluster, {"manifest": widget(namespace, wait=False)})
    stack.up()
    cluster.api.patch("gpt-oss.test/v1", "Widget", "widget", {"spec": {"size": 7}}, namespace)
    assert changed(stack.up()) == []  # nobody looked

    stack.config["objects"] = [{"manifest": widget(namespace, wait=False, size=3)}]
    with pytest.raises(UpdateFailedError, match="conflict"):
        stack.up()

    free = widget(namespace, wait=False)
    del free["spec"]["size"]
    free["spec"]["parts"] = [{"name": "a", "color": "blue"}]
    stack.config["objects"] = [{"manifest": free}]
    assert changed(stack.up()) == ["update widget"]
    live = cluster.api.get("gpt-oss.test/v1", "Widget", "widget", namespace)
    assert live["spec"] == {"size": 7, "parts": [{"name": "a", "color": "blue"}]}


def test_the_ambient_cluster_is_never_used(driver: Driver, cluster: Cluster, namespace: str) -> None:
    with pytest.raises(UpdateFailedError, match="provider"):
        stack_of(driver, cluster, {"manifest": config_map(namespace), "ambient": True}).up()
    assert cluster.left_in(namespace) == []


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_a_failed_job_fails_the_update_and_says_why(driver: Driver, cluster: Cluster, namespace: str) -> None:
    entries: list[dict[str, Any]] = [
        {"manifest": job(namespace, replaceUnready="true")},
        {"manifest": config_map(namespace, "later"), "after": ["work"]},
    ]
    stack = stack_of(driver, cluster, *entries)
    with cluster.behave(pods.fail(), namespace, **{"job-name": "work"}):
        with pytest.raises(UpdateFailedError, match=r"BackoffLimitExceeded|backoff limit") as failed:
            stack.up()
        assert "why work could not be created" in str(failed.value)
    assert "ConfigMap/later" not in cluster.left_in(namespace)

    again = stack.up()
    assert changed(again) == ["create later", "replace work"]
    assert changed(stack.up()) == []


def test_a_condition_counts_for_the_newest_generation_only(
    driver: Driver, cluster: Cluster, namespace: str, widgets: None
) -> None:
    entry: dict[str, Any] = {"manifest": widget(namespace), "within": "2s"}
    stack = stack_of(driver, cluster, entry)
    with pytest.raises(UpdateFailedError, match=r"timed out|initialize or become live"):
        stack.up()
    say_ready(cluster, namespace, generation=1)
    assert changed(stack.up()) == ["update widget"]  # made, but never seen ready: it is waited for again
    assert changed(stack.up()) == []

    stack.config["objects"] = [{"manifest": widget(namespace, size=2), "within": "2s"}]
    with pytest.raises(UpdateFailedError):
        stack.up()
    say_ready(cluster, namespace, generation=2)
    stack.up()


def test_a_claim_that_waits_for_its_first_consumer_is_not_waited_for(
    driver: Driver, cluster: Cluster, namespace: str
) -> None:
    stack = stack_of(driver, cluster, {"manifest": claim(namespace, "shared-files-first-consumer")})
    stack.up()
    assert cluster.api.get("v1", "PersistentVolumeClaim", "cache", namespace)["status"]["phase"] == "Pending"
    assert changed(stack.up()) == []  # 1000Mi is the same size however the server writes it


# --- secrets ---------------------------------------------------------------------------------------------------------


def test_secrets_are_nowhere_in_plain_text(driver: Driver, cluster: Cluster, namespace: str) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "password", "namespace": namespace}}
    stack = stack_of(driver, cluster, {"manifest": secret, "password": True}, password=PASSWORD)
    done = stack.up()
    encoded = base64.b64encode(PASSWORD.encode()).decode()
    assert cluster.api.get("v1", "Secret", "password", namespace)["data"] == {"password": encoded}
    for text in (stack.export(), done.text):
        assert PASSWORD not in text
        assert encoded not in text
    assert "password" in done.secret_outputs
    assert changed(stack.up()) == []


# --- what only the engine in process can be asked -------------------------------------------------------------------


def test_a_claim_bound_long_since_is_awaited_as_pending_by_the_provider(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the provider does (4.32, await/awaiters.go): a claim that is taken over must therefore not be awaited."""
    manifest = claim(namespace, "shared-files-first-consumer")
    cluster.api.create(manifest)
    consumer = job(namespace)
    spec = consumer["spec"]["template"]["spec"]
    spec["volumes"] = [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}]
    cluster.api.create(consumer)
    cluster.api.wait(
        "the claim is bound",
        lambda: cluster.api.get("v1", "PersistentVolumeClaim", "cache", namespace)["status"]["phase"] == "Bound",
    )
    driver = InProcess()
    monkeypatch.setattr(objects, "CLAIM_TIMEOUT", 2.0)
    with pytest.raises(UpdateFailedError, match="the claim is Bound, awaited as Pending"):
        stack_of(driver, cluster, {"manifest": manifest, "adopt": True}).up()
    manifest["metadata"]["annotations"] = {"pulumi.com/skipAwait": "true"}
    stack_of(driver, cluster, {"manifest": manifest, "adopt": True}).up()
