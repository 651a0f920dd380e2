"""The program, whole, under the mock engine: what it registers for every target, how it fails, what it says."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import cluster
import diagnose
from components.smoke_test import TESTED_ANNOTATION
from settings import STACK_ANNOTATION, read
from tests.pulumi.engine import (
    PROJECT,
    SECRET_SIGNATURE,
    Recording,
    Registration,
    engine_config,
    is_secret,
    run_program,
)

TARGETS = ("gb200-agg", "gb200-disagg", "b200-disagg", "h200-agg", "b200-agg")

CONFIG: Mapping[str, Any] = {
    "target": "gb200-agg",
    "kubeconfig": "~/.kube/config",
    "context": "gpu-cluster",
    "model_cache_storage_class": "shared-files",
    "hf_token": "hf_verysecret",
}
WAITED_FOR = (
    "PersistentVolumeClaim/claim",
    "Job/download",
    "DynamoGraphDeployment/graph",
    "Job/smoke",
    "Job/benchmark",
)


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that fits. Real ones are in tests/kubernetes."""
    monkeypatch.setattr(cluster, "problems", lambda settings, plan, catalog=None: [])
    monkeypatch.setattr(diagnose, "explain", lambda *arguments: "gpt-oss-agg: 4 GPUs are missing")


def run(**config: Any) -> Recording:
    known = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    secrets = [key for key in ("hf_token", "registry_password") if key in known]
    fault = known.pop("fault", lambda registration: None)
    return run_program(known, secrets=secrets, fault=fault)


def up(**config: Any) -> Recording:
    """What a run registered that went well; the same configuration is run once."""
    return _up(json.dumps(config, sort_keys=True))


@cache
def _up(config: str) -> Recording:
    recording = run(**json.loads(config))
    assert recording.error is None, recording.error
    return recording


def before(recording: Recording, first: str, then: str) -> bool:
    """Whether `then` waits for `first`, by itself, through what it depends on, or through its parents."""
    seen, todo = set[str](), [then]
    while todo:
        label = todo.pop()
        if label in seen or not label:
            continue
        seen.add(label)
        registration = recording[label]
        if first in registration.dependencies:
            return True
        todo += [registration.parent, *registration.dependencies]
    return False


# --- every target ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_becomes_one_stack(target: str) -> None:
    recording = up(target=target)
    assert sorted(recording.labels) == sorted(
        [
            *("cluster", "keeper", "namespace", "platform", "credentials", "model-cache", "serving", "smoke-test"),
            *("Namespace/namespace", "Namespace/platform-namespace", "Release/platform", "Secret/hf-token"),
            *("PersistentVolumeClaim/claim", "ConfigMap/programs", "Job/download", "ConfigMap/engine-config"),
            *("DynamoGraphDeployment/graph", "Job/smoke"),
        ]
    )


@pytest.mark.parametrize("target", TARGETS)
def test_outputs_are_what_one_types_next(target: str) -> None:
    recording = up(target=target, benchmark=True)
    graph = recording["DynamoGraphDeployment/graph"].manifest_name
    exported = recording.exports
    assert set(up(target=target).exports) == set(exported)
    assert exported["namespace"] == "gpt-oss"
    assert exported["deployment"] == graph
    assert exported["model"] == "openai/gpt-oss-120b"
    assert exported["url"].startswith(f"http://{graph}-frontend.gpt-oss.svc")
    assert exported["url"].endswith(":8000")
    assert f"svc/{graph}-frontend 8000:8000" in exported["port_forward"]
    assert "http://localhost:8000/v1/chat/completions" in exported["curl"]
    assert f"nvidia.com/dynamo-graph-deployment-name={graph}" in exported["watch"]
    assert exported["model_cache"] == "model-cache"
    assert exported["artifacts"] == f"/model-cache/benchmarks/{graph}/1"
    assert up(target=target).exports["artifacts"] == "/model-cache/benchmarks"
    assert not any(SECRET_SIGNATURE in json.dumps(value) for value in exported.values())


def test_the_planner_s_objects_are_registered_as_they_are() -> None:
    """Components invent nothing: what is added are Pulumi's own annotations, what is left out free replicas."""
    config = {**CONFIG, "benchmark": True, "network_policy": True}
    recording = up(**config)
    plan = read(engine_config(config), {f"{PROJECT}:hf_token"}, PROJECT, "organization/gpt-oss/test")[2]
    registered = {
        (each.inputs["kind"], each.manifest_name): each.inputs
        for each in recording.registrations
        if "metadata" in each.inputs
    }
    for planned in plan.objects():
        manifest = planned.manifest()
        for component in manifest["spec"]["components"] if manifest["kind"] == "DynamoGraphDeployment" else ():
            assert component.pop("replicas") == 1
        found = registered[manifest["kind"], manifest["metadata"]["name"]]
        assert without_added_annotations(found) == floats(manifest)


def without_added_annotations(manifest: Mapping[str, Any]) -> Any:
    """A manifest without what components write into annotations."""
    text = json.dumps(
        manifest, default=lambda value: dict(value) if isinstance(value, Mapping) else list(value), sort_keys=True
    )
    plain = json.loads(text)
    for metadata in (plain["metadata"], plain.get("spec", {}).get("template", {}).get("metadata", {})):
        for key in [key for key in metadata.get("annotations", {}) if key.startswith("pulumi.com/")]:
            del metadata["annotations"][key]
        metadata.get("annotations", {}).pop(TESTED_ANNOTATION, None)
    return plain


def floats(value: Any) -> Any:
    """The engine knows only one kind of number."""
    if isinstance(value, dict):
        return {key: floats(below) for key, below in value.items()}
    if isinstance(value, list):
        return [floats(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


# --- order -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("Namespace/namespace", "Secret/hf-token"),
        ("Namespace/namespace", "PersistentVolumeClaim/claim"),
        ("Namespace/platform-namespace", "Release/platform"),
        ("Secret/hf-token", "Job/download"),
        ("PersistentVolumeClaim/claim", "Job/download"),
        ("ConfigMap/programs", "Job/download"),
        ("Job/download", "DynamoGraphDeployment/graph"),
        ("ConfigMap/engine-config", "DynamoGraphDeployment/graph"),
        ("Release/platform", "DynamoGraphDeployment/graph"),
        ("DynamoGraphDeployment/graph", "Job/smoke"),
        ("DynamoGraphDeployment/graph", "Job/benchmark"),
        ("Job/smoke", "Job/benchmark"),
    ],
)
def test_order(first: str, then: str) -> None:
    """Made in this order, and removed in the other: the operator is there until the graph is gone."""
    assert before(up(benchmark=True), first, then)


def test_weights_do_not_wait_for_the_platform() -> None:
    recording = up()
    assert not before(recording, "Release/platform", "Job/download")
    assert not before(recording, "Job/download", "Release/platform")


def test_network_policies_are_there_before_the_pods() -> None:
    recording = up(network_policy=True)
    policies = [label for label in recording.labels if label.startswith("NetworkPolicy/")]
    assert policies
    assert all(before(recording, policy, "DynamoGraphDeployment/graph") for policy in policies)


def test_every_object_has_a_component_as_its_parent() -> None:
    for each in up(benchmark=True).registrations:
        if each.type.startswith("kubernetes:"):
            assert each.parent in (
                *("namespace", "platform", "credentials", "model-cache", "serving", "smoke-test", "benchmark"),
            )


# --- one cluster -------------------------------------------------------------------------------------------------


def test_every_object_goes_through_the_configured_provider() -> None:
    for each in up(benchmark=True, network_policy=True).registrations:
        if each.type.startswith("kubernetes:"):
            assert each.provider == ("keeper" if each.retained else "cluster"), each.label


def test_the_provider_is_the_configuration_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/somewhere/else")
    monkeypatch.setenv("PULUMI_K8S_ENABLE_PATCH_FORCE", "true")
    provider = run()["cluster"].inputs
    assert provider["kubeconfig"] == "~/.kube/config"  # the provider knows ~, and the state is then right for a team
    assert provider["context"] == "gpu-cluster"
    assert provider["enableServerSideApply"] == "true"
    assert provider["enablePatchForce"] == "false"
    assert provider["upsertExistingObjects"] == "false"


def test_a_relative_kubeconfig_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(kubeconfig="mine/config")["cluster"].inputs["kubeconfig"] == str(tmp_path / "mine/config")


# --- credentials -------------------------------------------------------------------------------------------------


def test_the_token_stays_secret() -> None:
    recording = up()
    secret = recording["Secret/hf-token"]
    assert secret.manifest_name == "hf-token-secret"
    assert is_secret(secret.inputs["stringData"])
    assert secret.inputs["stringData"]["value"] == {"HF_TOKEN": "hf_verysecret"}
    others = [each.inputs for each in recording.registrations if each is not secret]
    assert "hf_verysecret" not in json.dumps(others, default=str)
    assert "hf_verysecret" not in "".join(recording.log)


def test_the_token_s_secret_may_have_another_name_and_key() -> None:
    secret = up(hf_token_secret="mine", hf_token_key="token")["Secret/hf-token"]
    assert secret.manifest_name == "mine"
    assert secret.inputs["stringData"]["value"] == {"token": "hf_verysecret"}


@pytest.mark.parametrize("config", [{}, {"hf_anonymous": True}, {"hf_token_awaited": True}])
def test_no_secret_is_made_without_a_token(config: dict[str, Any]) -> None:
    assert "Secret/hf-token" not in up(hf_token=None, **config).labels


def test_a_password_becomes_a_pull_secret_that_pods_use() -> None:
    recording = up(registry_password="nvapi-verysecret")
    secret = recording["Secret/registry"]
    assert secret.inputs["type"] == "kubernetes.io/dockerconfigjson"
    assert is_secret(secret.inputs["stringData"])
    login = json.loads(secret.inputs["stringData"]["value"][".dockerconfigjson"])["auths"]["nvcr.io"]
    assert login["username"] == "$oauthtoken"
    assert base64.b64decode(login["auth"]).decode() == "$oauthtoken:nvapi-verysecret"
    for label in ("Job/download", "Job/smoke"):
        pod = recording[label].inputs["spec"]["template"]["spec"]
        assert {"name": secret.manifest_name} in pod["imagePullSecrets"]
    for component in recording["DynamoGraphDeployment/graph"].inputs["spec"]["components"]:
        assert {"name": secret.manifest_name} in component["podTemplate"]["spec"]["imagePullSecrets"]


def test_the_platform_gets_the_pull_secret_too() -> None:
    recording = up(registry_password="nvapi-verysecret")
    secret = recording["Secret/platform-registry"]
    assert secret.inputs["metadata"]["namespace"] == "dynamo-system"
    assert is_secret(secret.inputs["stringData"])
    assert before(recording, "Secret/platform-registry", "Release/platform")
    values = recording["Release/platform"].inputs["values"]
    assert values["dynamo-operator"]["imagePullSecrets"] == [{"name": secret.manifest_name}]
    assert values["global"]["image"]["pullSecretNames"] == [secret.manifest_name]


# --- the model cache ---------------------------------------------------------------------------------------------


def test_the_model_cache_is_kept_and_its_namespace_with_it() -> None:
    recording = up()
    kept = {each.label for each in recording.registrations if each.retained}
    assert kept == {"PersistentVolumeClaim/claim", "Namespace/namespace"}
    assert recording["keeper"].inputs["upsertExistingObjects"] == "true"


def test_the_model_cache_goes_where_it_is_not_kept() -> None:
    recording = up(model_cache_retain=False)
    assert not [each.label for each in recording.registrations if each.retained]
    assert "keeper" not in recording.labels


def test_an_existing_claim_is_used_and_never_ours() -> None:
    recording = up(model_cache_existing=True, model_cache_storage_class=None, model_cache_claim="weights")
    assert "PersistentVolumeClaim/claim" not in recording.labels
    volumes = recording["Job/download"].inputs["spec"]["template"]["spec"]["volumes"]
    assert {"claimName": "weights"} in [volume.get("persistentVolumeClaim") for volume in volumes]


# --- the platform ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("release", "nats"), [("1.2.1", True), ("1.4.2", False)])
def test_the_release_s_chart_with_every_choice_said(release: str, nats: bool) -> None:
    chart = up(release=release)["Release/platform"].inputs
    assert chart["version"] == release
    assert chart["chart"] == f"https://helm.ngc.nvidia.com/nvidia/ai-dynamo/charts/dynamo-platform-{release}.tgz"
    assert chart["name"] == "dynamo-platform"
    assert chart["namespace"] == "dynamo-system"
    assert chart["atomic"] is True
    assert chart["cleanupOnFail"] is True
    assert chart["waitForJobs"] is True
    assert chart["skipAwait"] is False
    assert chart["values"] == {
        "global": {
            "etcd": {"install": False},
            "nats": {"install": nats},
            "grove": {"install": False, "enabled": False},
            "kai-scheduler": {"install": False, "enabled": False},
        },
        "dynamo-operator": {"upgradeCRD": True, "discoveryBackend": "kubernetes"},
    }


def test_the_chart_may_come_from_a_mirror_with_values_of_one_s_own() -> None:
    chart = up(
        platform_chart="./dynamo-platform.tgz",
        platform_values={"dynamo-operator": {"imagePullSecrets": [{"name": "ngc"}]}},
        image_registry="registry.example.com/mirror",
    )["Release/platform"].inputs
    assert chart["chart"] == "./dynamo-platform.tgz"
    assert "version" not in chart
    operator = chart["values"]["dynamo-operator"]
    assert operator["imagePullSecrets"] == [{"name": "ngc"}]
    assert operator["upgradeCRD"] is True
    images = {part: said["image"]["repository"] for part, said in operator["controllerManager"].items()}
    assert images == {
        "manager": "registry.example.com/mirror/nvidia/ai-dynamo/kubernetes-operator",
        "kubeRbacProxy": "registry.example.com/mirror/kubebuilder/kube-rbac-proxy",
    }
    assert chart["values"]["global"]["image"]["registry"] == "registry.example.com/mirror"  # NATS' own chart
    assert chart["values"]["nats"]["container"]["image"]["repository"] == "library/nats"


def test_an_existing_platform_is_left_alone() -> None:
    labels = up(platform="existing").labels
    assert not {"platform", "Release/platform", "Namespace/platform-namespace"} & {*labels}


def test_an_existing_namespace_is_left_alone() -> None:
    recording = up(create_namespace=False)
    assert "Namespace/namespace" not in recording.labels
    assert "DynamoGraphDeployment/graph" in recording.labels


# --- waiting -----------------------------------------------------------------------------------------------------


def seconds(text: str) -> int:
    assert text.endswith("s"), text
    return int(text[:-1])


def test_the_graph_is_waited_for_and_removed_after_its_pods() -> None:
    graph = up()["DynamoGraphDeployment/graph"]
    assert graph.annotations["pulumi.com/waitFor"] == "condition=Ready"
    assert graph.annotations["pulumi.com/deletionPropagationPolicy"] == "foreground"
    assert seconds(graph.create_within) >= 3600  # a load takes 15 to 30 minutes, after the images are there
    assert graph.create_within == graph.update_within


def test_a_load_may_be_given_less_time() -> None:
    longer, shorter = (
        seconds(up(load_timeout_seconds=limit)["DynamoGraphDeployment/graph"].create_within) for limit in (3600, 600)
    )
    assert longer - shorter >= 3000


@pytest.mark.parametrize("label", ["Job/download", "Job/smoke", "Job/benchmark"])
def test_the_cluster_gives_up_on_a_job_before_pulumi_does(label: str) -> None:
    job = up(benchmark=True)[label]
    assert seconds(job.create_within) > job.inputs["spec"]["activeDeadlineSeconds"]
    assert job.annotations["pulumi.com/replaceUnready"] == "true"


def test_every_wait_has_a_limit() -> None:
    for each in up(benchmark=True).registrations:
        if each.type.startswith(("kubernetes:batch/", "kubernetes:nvidia.com/", "kubernetes:helm.sh/")):
            assert seconds(each.create_within) > 0, each.label
            assert seconds(each.update_within) > 0, each.label


def test_another_deployment_is_tested_anew() -> None:
    first, same, other = (
        up(**config)["Job/smoke"].inputs["spec"] for config in ({}, {}, {"set": {"worker.stream_interval": 7}})
    )
    assert first == same
    assert first["template"] != other["template"]


# --- replicas ----------------------------------------------------------------------------------------------------


def replicas(recording: Recording) -> dict[str, Any]:
    components = recording["DynamoGraphDeployment/graph"].inputs["spec"]["components"]
    return {component["type"]: component.get("replicas") for component in components}


def test_a_single_pod_is_left_to_who_scales_it() -> None:
    assert replicas(up(target="gb200-disagg")) == {"frontend": None, "prefill": None, "decode": None}


def test_what_is_asked_for_is_kept() -> None:
    assert replicas(up(target="gb200-disagg", replicas={"prefill": 2, "decode": 1})) == {
        "frontend": None,
        "prefill": 2,
        "decode": 1,
    }


def test_what_another_controller_counts_is_left_out() -> None:
    kept, left = (replicas(up(target="h200-agg", scaled_elsewhere=names)) for names in ([], ["worker"]))
    assert kept["worker"] > 1
    assert left["worker"] is None


# --- labels, annotations -----------------------------------------------------------------------------------------


def test_labels_and_annotations_are_on_every_object() -> None:
    recording = up(benchmark=True, network_policy=True, labels={"team": "inference"}, annotations={"owner": "me"})
    for each in recording.registrations:
        if "metadata" in each.inputs:
            assert each.inputs["metadata"]["labels"]["team"] == "inference", each.label
            assert each.annotations["owner"] == "me", each.label
            assert each.annotations[STACK_ANNOTATION] == "organization/gpt-oss/test", each.label


# --- failing -----------------------------------------------------------------------------------------------------


def fails(label: str) -> Any:
    def fault(registration: Registration) -> str | None:
        return "timed out waiting for the condition" if registration.label == label else None

    return fault


@pytest.mark.parametrize("label", WAITED_FOR)
def test_a_wait_that_runs_out_says_why(label: str) -> None:
    recording = run(benchmark=True, fault=fails(label))
    assert recording.error is not None
    assert "gpt-oss-agg: 4 GPUs are missing" in recording.log


def test_a_slow_load_is_judged_by_the_stacks_own_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose, "explain", lambda *arguments: f"asked with {arguments[2:]}")
    recording = run(load_timeout_seconds=5400, fault=fails("DynamoGraphDeployment/graph"))
    assert "asked with ('gpt-oss', 'gpt-oss-agg', 5400)" in recording.log


def test_a_diagnosis_that_fails_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(*arguments: object) -> str:
        raise ConnectionError("the API server went away")

    monkeypatch.setattr(diagnose, "explain", explain)
    recording = run(fault=fails("DynamoGraphDeployment/graph"))
    assert "timed out waiting for the condition" in str(recording.error)
    assert "The namespace could not be diagnosed: the API server went away" in recording.log


def test_what_waits_for_the_failed_is_not_made() -> None:
    labels = run(benchmark=True, fault=fails("Job/download")).labels
    assert not {"DynamoGraphDeployment/graph", "Job/smoke", "Job/benchmark"} & {*labels}


def test_an_unfit_cluster_stops_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["target: 'gb200-agg' needs 4 GB200; allowed: …", "context: 'gpu-cluster' …"]
    monkeypatch.setattr(cluster, "problems", lambda *arguments: said)
    recording = run()
    assert recording.registrations == []
    assert all(problem in str(recording.error) for problem in said)


def test_bad_settings_stop_everything_without_asking_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "problems", lambda *arguments: pytest.fail("the cluster was asked"))
    recording = run(context="", target="gb200")
    assert recording.registrations == []
    assert "context: not set" in str(recording.error)
