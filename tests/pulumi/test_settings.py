"""Settings: every knob typed as Pulumi.yaml declares it, and every refusal says key, value and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import SecretStr

from serving_catalog import Catalog
from serving_catalog.graphs import GraphPlan
from settings import Settings, SettingsError, read, request_of
from tests.pulumi.engine import PROGRAM, PROJECT, engine_config

TARGETS = ("gb200-agg", "gb200-disagg", "b200-disagg", "h200-agg", "b200-agg")

ENOUGH: Mapping[str, Any] = {
    "target": "gb200-agg",
    "kubeconfig": "~/.kube/config",
    "context": "gpu-cluster",
    "model_cache_storage_class": "shared-files",
}


def declared() -> dict[str, dict[str, Any]]:
    """The knobs of Pulumi.yaml; what belongs to the engine or to a provider has another namespace."""
    project = yaml.safe_load((PROGRAM / "Pulumi.yaml").read_text())
    return {key: knob for key, knob in project["config"].items() if ":" not in key}


def planned(secrets: tuple[str, ...] = (), **config: Any) -> tuple[Settings, Catalog, GraphPlan]:
    values = engine_config({**ENOUGH, **config})
    return read(values, {f"{PROJECT}:{key}" for key in secrets}, PROJECT, "organization/gpt-oss/test")


def settings(secrets: tuple[str, ...] = (), **config: Any) -> Settings:
    return planned(secrets, **config)[0]


def problems(secrets: tuple[str, ...] = (), **config: Any) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        planned(secrets, **config)
    return caught.value.problems


# --- Pulumi.yaml and settings.py are one -------------------------------------------------------------------------

KINDS = {str: "string", SecretStr: "string", Literal: "string", bool: "boolean", int: "integer", tuple: "array"}


@pytest.mark.parametrize("name", sorted({*declared(), *Settings.model_fields}))
def test_a_knob_is_the_same_in_both(name: str) -> None:
    knob, field = declared()[name], Settings.model_fields[name]
    annotation: Any = field.annotation
    assert knob["type"] == KINDS.get(get_origin(annotation) or annotation, "object")
    default = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
    assert knob["default"] == json.loads(json.dumps(default))
    assert knob["description"].rstrip()
    if knob["type"] == "array":
        assert knob["items"]["type"] == ("string" if get_args(annotation)[0] is str else "object")


def test_knobs_stand_in_the_same_order() -> None:
    assert list(declared()) == list(Settings.model_fields)


def test_the_engine_s_defaults_are_the_program_s() -> None:
    """The engine hands over every default of Pulumi.yaml as text; they read as if nothing had been said."""
    said = {
        key: str(knob["default"]).lower() if isinstance(knob["default"], bool) else knob["default"]
        for key, knob in declared().items()
    }
    assert settings(**{**said, **ENOUGH}) == settings()


def test_nothing_ambient_is_used() -> None:
    config = yaml.safe_load((PROGRAM / "Pulumi.yaml").read_text())["config"]
    assert config["pulumi:disable-default-providers"] == ["kubernetes"]
    assert config["kubernetes:strictMode"] == {"value": "true"}


@pytest.mark.parametrize("target", TARGETS)
def test_stack_files_choose_their_target_and_hold_no_secret(target: str) -> None:
    text = (PROGRAM / f"Pulumi.{target}.yaml").read_text()
    config = yaml.safe_load(text)["config"]
    assert config[f"{PROJECT}:target"] == target
    assert "secure" not in text
    for key in ("kubeconfig", "context", "model_cache_storage_class", "hf_token"):
        assert key in text, f"{key}: the user must set it, so the file says so"
    assert set(config) <= {f"{PROJECT}:{key}" for key in Settings.model_fields}
    assert planned(**{key.partition(":")[2]: value for key, value in config.items()})[2].target == target


def test_there_is_a_stack_file_for_each_target() -> None:
    assert {file.name.split(".")[1] for file in PROGRAM.glob("Pulumi.*.yaml")} == {*TARGETS}


# --- reading -----------------------------------------------------------------------------------------------------


def test_texts_become_values() -> None:
    read = settings(
        create_namespace=False,
        platform_timeout_seconds=60,
        replicas={"worker": 2},
        pull_secrets=["a", "b"],
        node_selector={"zone": "a", "pool": 7, "spot": False},
        resources={"worker": {"cpu": 16}},
        set={"worker.max_batch_size": 64},
    )
    assert read.create_namespace is False
    assert read.platform_timeout_seconds == 60
    assert read.replicas == {"worker": 2}
    assert read.pull_secrets == ("a", "b")
    assert read.node_selector == {"zone": "a", "pool": "7", "spot": "false"}
    assert read.resources == {"worker": {"cpu": "16"}}
    assert read.set == {"worker.max_batch_size": 64}


def test_other_projects_and_providers_keys_are_not_ours() -> None:
    values = {**engine_config(ENOUGH), "aws:region": "eu-1", "kubernetes:strictMode": "true"}
    assert read(values, (), PROJECT, "organization/gpt-oss/test")[0] == settings()


def test_a_secret_is_not_shown() -> None:
    read = settings(("hf_token",), hf_token="hf_verysecret")
    assert "hf_verysecret" not in repr(read)
    assert read.hf_token.get_secret_value() == "hf_verysecret"


def test_what_is_not_said_is_left_to_the_catalog() -> None:
    request = request_of(settings(), "organization/gpt-oss/test")
    said = {"target", "namespace", "model", "model_cache", "annotations", "hf_token_secret", "rollout"}
    assert request.model_fields_set - {"overrides", "placement", "network_policy"} == said


# --- refusals ----------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "unknown key",
        {"model_cache_storage_clas": "x"},
        "model_cache_storage_clas: no such setting (did you mean model_cache_storage_class?)",
    ),
    ("not a boolean", {"create_namespace": "yes"}, "create_namespace: 'yes' is not true or false"),
    ("not a number", {"load_timeout_seconds": "1h"}, "load_timeout_seconds: '1h' is not a whole number"),
    ("negative", {"load_timeout_seconds": -1}, "load_timeout_seconds: -1: input should be greater than or equal to 0"),
    ("not a mapping", {"replicas": "2"}, "replicas: '2' is not a mapping: write it"),
    ("not a list", {"pull_secrets": "ngc"}, "pull_secrets: 'ngc' is not a list: write it"),
    ("unknown platform", {"platform": "helm"}, "platform: 'helm' is not allowed; allowed: install or existing"),
    (
        "unknown rollout",
        {"rollout": "canary"},
        "rollout: 'canary' is not allowed; allowed: in_place, blue_green or recreate",
    ),
    (
        "unknown access mode",
        {"model_cache_access_mode": "RWX"},
        "model_cache_access_mode: 'RWX' is not allowed; allowed: ReadWriteMany",
    ),
    ("no kubeconfig", {"kubeconfig": ""}, "kubeconfig: not set; allowed: the path of a kubeconfig file"),
    (
        "kubeconfig's contents",
        {"kubeconfig": "apiVersion: v1\nkind: Config"},
        "kubeconfig: holds the contents of a file",
    ),
    ("no context", {"context": ""}, "context: not set; allowed: a context of the kubeconfig"),
    ("no namespace", {"namespace": ""}, "namespace: empty; allowed:"),
    (
        "chart, none installed",
        {"platform": "existing", "platform_chart": "a.tgz"},
        "platform_chart: is set with platform: existing",
    ),
    (
        "values, none installed",
        {"platform": "existing", "platform_values": {"a": 1}},
        "platform_values: is set with platform: existing",
    ),
    (
        "one namespace made twice",
        {"namespace": "dynamo-system"},
        "platform_namespace: 'dynamo-system' is the namespace of the deployment as well",
    ),
    (
        "counted twice",
        {"replicas": {"worker": 2}, "scaled_elsewhere": ["worker"]},
        "replicas.worker: 2 is set with worker in scaled_elsewhere",
    ),
    ("secret without name", {"hf_token_secret": ""}, "hf_token_secret: empty; allowed:"),
    (
        "secret without key",
        {"hf_token_secret": "mine", "hf_token_key": ""},
        "hf_token_key: empty, but the Secret mine is read by one",
    ),
    (
        "no storage class",
        {"model_cache_storage_class": ""},
        "model_cache_storage_class: not set; allowed: a class of the cluster",
    ),
    (
        "class of an existing claim",
        {"model_cache_existing": True},
        "model_cache_storage_class: 'shared-files' is set with model_cache_existing: true",
    ),
    (
        "benchmark's knobs alone",
        {"benchmark_as_published": True},
        "benchmark_as_published: is set, but benchmark is false",
    ),
    ("run id alone", {"benchmark_run_id": "2"}, "benchmark_run_id: is set, but benchmark is false"),
]


@pytest.mark.parametrize(("config", "said"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused(config: dict[str, Any], said: str) -> None:
    (problem,) = problems(**config)
    assert problem.startswith(said)
    assert "\n" not in problem


def test_a_token_in_plain_text_is_refused_and_not_repeated() -> None:
    (problem,) = problems(hf_token="hf_verysecret")
    assert problem.startswith("hf_token: is in plain text in the stack's file; allowed: only as a secret:")
    assert "hf_verysecret" not in problem


def test_a_password_in_plain_text_is_refused_and_not_repeated() -> None:
    (problem,) = problems(registry_password="verysecret")
    assert problem.startswith("registry_password: is in plain text")
    assert "verysecret" not in problem


def test_a_secret_where_none_is_kept_is_refused() -> None:
    (problem,) = problems(("namespace",), namespace="hidden")
    assert problem.startswith("namespace: is a secret, but its value is written into plain objects")
    assert "hidden" not in problem


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"job_environment": {"HF_TOKEN": "verysecret"}}, "job_environment.HF_TOKEN"),
        ({"job_environment": {"MY_API_KEY": "verysecret"}}, "job_environment.MY_API_KEY"),
        (
            {"platform_values": {"dynamo-operator": {"dynamo": {"dockerRegistry": {"password": "verysecret"}}}}},
            "platform_values.dynamo-operator.dynamo.dockerRegistry.password",
        ),
        ({"platform_values": {"nats": [{"authToken": "verysecret"}]}}, "platform_values.nats.0.authToken"),
    ],
)
def test_other_secrets_in_plain_text_are_refused_and_not_repeated(config: dict[str, Any], key: str) -> None:
    (problem,) = problems(**config)
    assert problem.startswith(f"{key}: is in plain text (value not shown); allowed:")
    assert "verysecret" not in problem


@pytest.mark.parametrize(
    "config",
    [
        {"job_environment": {"HTTPS_PROXY": "http://proxy:3128", "TOKENIZERS_PARALLELISM": "false"}},
        {"platform_values": {"dynamo-operator": {"imagePullSecrets": [{"name": "ngc"}], "x": {"secretName": "y"}}}},
    ],
)
def test_names_of_secrets_are_no_secrets(config: dict[str, Any]) -> None:
    settings(**config)


@pytest.mark.parametrize("token", ["hf_a\n", " hf_a", "hf a", "hf_\u00fc"])
def test_a_token_is_one_word(token: str) -> None:
    (problem,) = problems(("hf_token",), hf_token=token)
    assert problem == "hf_token: holds white space or unprintable letters (value not shown); allowed: the token alone"


@pytest.mark.parametrize("key", ["hf_anonymous", "hf_token_awaited"])
def test_one_source_of_the_token(key: str) -> None:
    (problem,) = problems(("hf_token",), hf_token="hf_a", **{key: True})
    assert problem.startswith(f"{key}: true, but hf_token is set")


def test_a_password_is_for_a_registry() -> None:
    (problem,) = problems(("registry_password",), registry_password="x", registry_server="")
    assert problem.startswith("registry_server: empty, but registry_password is set")


def test_everything_wrong_is_said_at_once() -> None:
    found = problems(
        kubeconfig="",
        context="",
        create_namespace="yes",
        hf_token="hf_a",
        model_cache_storage_class="",
        plattform="x",
        release="9.9.9",
        rollout="canary",
    )
    assert [problem.partition(":")[0] for problem in found] == [
        *("create_namespace", "hf_token", "plattform", "rollout"),
        *("kubeconfig", "context", "model_cache_storage_class", "release"),
    ]


# --- what the planner refuses, in the words of the configuration -------------------------------------------------

PLANNER_REFUSES: list[tuple[str, dict[str, Any], str]] = [
    ("no target", {"target": ""}, "target: "),
    ("unknown target", {"target": "gb200-ag"}, "target: 'gb200-ag'"),
    ("unknown release", {"release": "9.9.9"}, "release: '9.9.9'"),
    ("GPU the target is not made for", {"gpu": "H200"}, "gpu: "),
    ("cache too small", {"model_cache_size": "10Gi"}, "model_cache_size: "),
    ("not a size", {"model_cache_size": "much"}, "model_cache_size: "),
    ("one node's volume for several nodes", {"model_cache_access_mode": "ReadWriteOnce"}, "model_cache_access_mode: "),
    ("image the operator refuses", {"image": "example.com/runtime:latest"}, "image: "),
    ("name too long", {"name": "a" * 45}, "name: "),
    (
        "prompt beyond the buffer",
        {"target": "gb200-disagg", "benchmark": True, "benchmark_traffic": {"input_tokens": 20000}},
        "benchmark_traffic",
    ),
    ("unknown option", {"set": {"worker.max_batch_siz": 1}}, "set"),
    ("unknown component", {"replicas": {"wroker": 2}}, "replicas"),
    ("nothing served", {"replicas": {"worker": 0}}, "replicas.worker: 0"),
    (
        "benchmark without a deployment",
        {"replicas": {"worker": 0}, "benchmark": True},
        "replicas.worker: 0: without one a benchmark",
    ),
    ("fewer than none", {"replicas": {"worker": -1}}, "replicas.worker: -1"),
    ("unknown component, scaled elsewhere", {"scaled_elsewhere": ["wroker"]}, "scaled_elsewhere: 'wroker'"),
    ("unknown traffic", {"benchmark": True, "benchmark_traffic": {"inputs": 1}}, "benchmark_traffic.inputs"),
    ("bad run id", {"benchmark": True, "benchmark_run_id": "Run 2"}, "benchmark_run_id: 'Run 2'"),
    ("bad toleration", {"tolerations": [{"kye": "a"}]}, "tolerations.0.kye"),
]


@pytest.mark.parametrize(
    ("config", "said"), [case[1:] for case in PLANNER_REFUSES], ids=[case[0] for case in PLANNER_REFUSES]
)
def test_the_planner_s_refusals_name_knobs(config: dict[str, Any], said: str) -> None:
    found = problems(**config)
    assert any(problem.startswith(said) for problem in found), found
    assert not any(word in problem for problem in found for word in ("model_cache.", "benchmark.", "placement."))


def test_contributors_have_what_users_have() -> None:
    """The program is tested with the versions that `pulumi install` takes."""

    def pins(file: str) -> set[str]:
        return {line for line in (PROGRAM / file).read_text().splitlines() if "==" in line}

    assert pins("requirements.txt")
    assert pins("requirements.txt") <= pins("../requirements-dev.txt")
