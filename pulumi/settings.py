"""The stack's configuration, read once: every knob of Pulumi.yaml as a typed value, with everything wrong said at once.

An empty text, list or mapping, and 0 for a number, leave the choice to the serving catalog. What decides shape goes to
the planner as one `GraphRequest`; nothing here or in components/ invents a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import pulumi
from pydantic import Field, JsonValue, SecretStr, ValidationError

from serving_catalog import Catalog, CatalogError, PlanError, load_catalog, overrides_from_mapping
from serving_catalog.entries import Count, Part
from serving_catalog.errors import nearest
from serving_catalog.graphs import GraphPlan, GraphRequest, graph_request_from, plan_graph
from serving_catalog.graphs.requests import AccessMode, Rollout
from serving_catalog.graphs.words import label_problem

# Which stack an object belongs to: two stacks never share one by accident, and a kept model cache finds its own again.
STACK_ANNOTATION = "gpt-oss-on-nvidia/stack"

Names = tuple[str, ...]
Texts = Mapping[str, str]
ZeroOr = Annotated[int, Field(ge=0)]  # 0 leaves the choice to the catalog


class SettingsError(pulumi.RunError):
    """The stack cannot be carried out. `problems` holds one line for each thing wrong, and Pulumi prints just them."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("Nothing was created or changed.\n" + "\n".join(f"  {problem}" for problem in self.problems))


class Settings(Part):
    """Every knob, as Pulumi.yaml declares it: the same names, types and defaults."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = "gpt-oss"
    create_namespace: bool = True
    allow_findings: Names = ()

    target: str = ""
    gpu: str = ""
    name: str = ""
    model: str = "gpt-oss-120b"
    release: str = ""
    image: str = ""
    runtime_version: str = ""
    replicas: Mapping[str, ZeroOr] = {}
    scaled_elsewhere: Names = ()
    set: Mapping[str, JsonValue] = {}
    router_mode: str = ""
    rollout: Rollout = "in_place"
    load_timeout_seconds: ZeroOr = 0
    catalog_overlay: str = ""

    platform: Literal["install", "existing"] = "install"
    platform_namespace: str = "dynamo-system"
    platform_create_namespace: bool = True
    platform_chart: str = ""
    platform_values: Mapping[str, JsonValue] = {}
    platform_timeout_seconds: Count = 900

    hf_token: SecretStr = SecretStr("")
    hf_token_secret: str = "hf-token-secret"  # noqa: S105 - a Secret's name
    hf_token_key: str = "HF_TOKEN"  # noqa: S105 - a key's name
    hf_token_awaited: bool = False
    hf_anonymous: bool = False
    pull_secrets: Names = ()
    registry_server: str = "nvcr.io"
    registry_username: str = "$oauthtoken"
    registry_password: SecretStr = SecretStr("")

    model_cache_claim: str = "model-cache"
    model_cache_existing: bool = False
    model_cache_storage_class: str = ""
    model_cache_access_mode: AccessMode = "ReadWriteMany"
    model_cache_size: str = ""
    model_cache_retain: bool = True
    download_timeout_seconds: ZeroOr = 0
    hub_endpoint: str = ""
    encodings_url: str = ""

    gpu_products: Names = ()
    gpu_nodes_for_all: bool = False
    node_selector: Mapping[str, str] = {}
    tolerations: tuple[Mapping[str, JsonValue], ...] = ()
    priority_class: str = ""
    scheduler_name: str = ""
    resources: Mapping[str, Mapping[str, str]] = {}
    image_registry: str = ""
    tools_image: str = ""
    package_index: str = ""
    job_environment: Mapping[str, str] = {}
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    network_policy: bool = False

    smoke_probes: Names = ()
    benchmark: bool = False
    benchmark_run_id: str = "1"
    benchmark_as_published: bool = False
    benchmark_traffic: Mapping[str, ZeroOr] = {}

    @property
    def kubeconfig_path(self) -> Path:
        return Path(self.kubeconfig).expanduser().absolute()

    @property
    def provider_kubeconfig(self) -> str:
        """The path as the provider remembers it: one that begins with ~ is right on every machine of a team.

        Another one is made absolute, since the provider is a process with a directory of its own.
        """
        return self.kubeconfig if self.kubeconfig.startswith("~/") else str(self.kubeconfig_path)

    @property
    def makes_token_secret(self) -> bool:
        return bool(self.hf_token.get_secret_value())

    @property
    def makes_pull_secret(self) -> bool:
        return bool(self.registry_password.get_secret_value())

    @property
    def pull_secret(self) -> str:
        """The pull secret that registry_password becomes: the deployment's own, so that two side by side never meet."""
        return f"{self.name or self.target}-registry"

    @property
    def keeps_model_cache(self) -> bool:
        return self.model_cache_retain and not self.model_cache_existing


# --- reading -----------------------------------------------------------------------------------------------------


def read(
    values: Mapping[str, str], secrets: Collection[str], project: str, stack: str
) -> tuple[Settings, Catalog, GraphPlan]:
    """Settings and plan from the engine's `project:key` texts, or one error that lists everything wrong.

    `secrets` are the keys whose values are encrypted, `stack` the identity that objects carry.
    """
    settings, problems = _settings(values, secrets, project)
    catalog = catalog_of(settings)
    try:
        plan = plan_of(settings, catalog, stack)
    except SettingsError as error:
        said = {_subject(problem) for problem in problems}
        raise SettingsError([*problems, *(each for each in error.problems if _subject(each) not in said)]) from None
    if problems:
        raise SettingsError(problems)
    return settings, catalog, plan


def _subject(problem: str) -> str:
    return re.split(r"[.:]", problem, maxsplit=1)[0]


def _settings(values: Mapping[str, str], secrets: Collection[str], project: str) -> tuple[Settings, list[str]]:
    """The settings, with the default where a value is not even one, and everything wrong with them."""
    problems: list[str] = []
    typed: dict[str, Any] = {}
    for name, text in sorted(values.items()):
        namespace, _, key = name.partition(":")
        if namespace != project:
            continue
        if key not in Settings.model_fields:
            known = nearest(key, Settings.model_fields)
            problems.append(f"{key}: no such setting{known}; allowed: those in Pulumi.yaml; pulumi config rm {key}")
            continue
        secret = Settings.model_fields[key].annotation is SecretStr
        if secret and text and name not in secrets:
            problems.append(
                f"{key}: is in plain text in the stack's file; allowed: only as a secret: "
                f"pulumi config set --secret {key}, and revoke the one that was written down"
            )
        elif not secret and name in secrets:
            problems.append(
                f"{key}: is a secret, but its value is written into plain objects; "
                f"allowed: in plain text: pulumi config set {key} VALUE"
            )
        else:
            try:
                typed[key] = _parsed(key, text)
            except ValueError as error:
                problems.append(f"{key}: {text!r} is not {error}")
    try:
        settings = Settings.model_validate_json(json.dumps(typed))
    except ValidationError as error:
        problems += [_said(detail) for detail in error.errors()]
        wrong = {str(detail["loc"][0]) for detail in error.errors()}
        settings = Settings.model_validate_json(json.dumps({key: typed[key] for key in typed if key not in wrong}))
    said = {_subject(problem) for problem in problems}
    problems += [each for each in combination_problems(settings) if _subject(each) not in said]
    return settings, problems


def _parsed(key: str, text: str) -> Any:
    """A knob's text as the kind of value that it is; a ValueError says what it should be."""
    annotation: Any = Settings.model_fields[key].annotation
    kind = get_origin(annotation) or annotation
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError("true or false")
        return text == "true"
    if kind is int:
        if not re.fullmatch(r"-?\d+", text):
            raise ValueError("a whole number")
        return int(text)
    if kind is tuple:
        return _structure(text, list, "a list")
    if kind in (str, SecretStr, Literal):
        return text
    structure = _structure(text, dict, "a mapping")
    return _texts(structure) if annotation in (Texts, Mapping[str, Texts]) else structure


def _structure(text: str, kind: type, said: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = text
    if not isinstance(value, kind):
        raise ValueError(f"{said}: write it into the stack's file, or use pulumi config set --path")
    return value


def _texts(value: Any) -> Any:
    """Scalars as the text they were: `pulumi config set --path` makes 16 and true of "16" and "true"."""
    if isinstance(value, dict):
        return {key: _texts(below) for key, below in value.items()}
    return json.dumps(value) if isinstance(value, bool | int | float) else value


def _said(detail: Any) -> str:
    path = ".".join(map(str, detail["loc"]))
    value = detail["input"]
    shown = f"{value!r}: " if isinstance(value, str | int | float | bool) and "token" not in path else ""
    if detail["type"] == "literal_error":
        return f"{path}: {value!r} is not allowed; allowed: {detail['ctx']['expected'].replace(chr(39), '')}"
    return f"{path}: {shown}{detail['msg'][0].lower()}{detail['msg'][1:]}"


# --- what goes together ------------------------------------------------------------------------------------------


def combination_problems(settings: Settings) -> list[str]:
    """Everything that can be said without the catalog or a cluster."""
    return [
        *_cluster(settings),
        *_replicas(settings),
        *_platform(settings),
        *_token(settings),
        *_registry(settings),
        *_model_cache(settings),
        *_benchmark(settings),
        *_in_plain_text("job_environment", settings.job_environment),
        *_in_plain_text("platform_values", settings.platform_values),
    ]


# Names of values that nobody should read: HF_TOKEN, apiKey, registryPassword; not existingSecretName.
_SECRET_NAME = re.compile(r"(^|[_.-]|(?<=[a-z]))(token|password|passwd|secret|api_?key)$", re.IGNORECASE)


def _in_plain_text(path: str, value: object) -> Iterator[str]:
    """What would stand in pods, in Helm's release or in the state for everybody to read."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            if isinstance(below, str) and below and _SECRET_NAME.search(key):
                yield (
                    f"{path}.{key}: is in plain text (value not shown); allowed: nothing secret: hf_token and "
                    "registry_password take theirs encrypted, others belong into a Secret that you name"
                )
            yield from _in_plain_text(f"{path}.{key}", below)
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _in_plain_text(f"{path}.{index}", below)


def _cluster(settings: Settings) -> Iterator[str]:
    if not settings.kubeconfig:
        yield (
            "kubeconfig: not set; allowed: the path of a kubeconfig file, such as ~/.kube/config; "
            "the ambient one is never used"
        )
    elif "\n" in settings.kubeconfig or settings.kubeconfig.lstrip().startswith("{"):
        yield "kubeconfig: holds the contents of a file; allowed: the file's path"
    if not settings.context:
        yield (
            "context: not set; allowed: a context of the kubeconfig (kubectl config get-contexts); "
            "the current one is never used"
        )
    if not settings.namespace:
        yield "namespace: empty; allowed: the name of a namespace"


def _replicas(settings: Settings) -> Iterator[str]:
    for name in settings.scaled_elsewhere:
        if name in settings.replicas:
            count = settings.replicas[name]
            yield f"replicas.{name}: {count} is set with {name} in scaled_elsewhere; allowed: one of them"


def _platform(settings: Settings) -> Iterator[str]:
    if settings.platform == "existing":
        for key in ("platform_chart", "platform_values"):
            if getattr(settings, key):
                yield f"{key}: is set with platform: existing, which installs nothing; allowed: platform: install"
        return
    wrong = label_problem(settings.platform_namespace)
    if wrong is not None:
        yield f"platform_namespace: {settings.platform_namespace!r} {wrong}"
    both_made = settings.platform_create_namespace and settings.create_namespace
    if both_made and settings.platform_namespace == settings.namespace:
        yield (
            f"platform_namespace: {settings.platform_namespace!r} is the namespace of the deployment as well; "
            "allowed: another one, or platform_create_namespace: false"
        )


def _token(settings: Settings) -> Iterator[str]:
    token = settings.hf_token.get_secret_value()
    if any(not "!" <= letter <= "~" for letter in token):
        yield "hf_token: holds white space or unprintable letters (value not shown); allowed: the token alone"
    if settings.hf_anonymous and token:
        yield "hf_anonymous: true, but hf_token is set; allowed: one of them"
    if settings.hf_anonymous:
        return
    if not settings.hf_token_secret:
        yield "hf_token_secret: empty; allowed: the name of the Secret with the token, or hf_anonymous: true without"
    if not settings.hf_token_key:
        yield (
            f"hf_token_key: empty, but the Secret {settings.hf_token_secret} is read by one; "
            "allowed: the name of the key that holds the token, such as HF_TOKEN"
        )
    if settings.hf_token_awaited and token:
        yield "hf_token_awaited: true, but hf_token is set and makes the Secret; allowed: one of them"


def _registry(settings: Settings) -> Iterator[str]:
    if settings.makes_pull_secret:
        for key in ("registry_server", "registry_username"):
            if not getattr(settings, key):
                yield f"{key}: empty, but registry_password is set; allowed: what the password is for"


def _model_cache(settings: Settings) -> Iterator[str]:
    if settings.model_cache_existing:
        for key in ("model_cache_storage_class", "model_cache_size"):
            if getattr(settings, key):
                yield (
                    f"{key}: {getattr(settings, key)!r} is set with model_cache_existing: true, whose claim has its "
                    f"own; allowed: empty (pulumi config rm {key})"
                )
    elif not settings.model_cache_storage_class:
        yield (
            "model_cache_storage_class: not set; allowed: a class of the cluster (kubectl get storageclass) that can "
            f"{settings.model_cache_access_mode}, or model_cache_existing: true"
        )


def _benchmark(settings: Settings) -> Iterator[str]:
    if settings.benchmark:
        return
    for key, default in (("benchmark_as_published", False), ("benchmark_traffic", {}), ("benchmark_run_id", "1")):
        if getattr(settings, key) != default:
            yield f"{key}: is set, but benchmark is false; allowed: with benchmark: true"


# --- planning ----------------------------------------------------------------------------------------------------

PLACEMENT = ("node_selector", "tolerations", "gpu_products", "gpu_nodes_for_all", "priority_class", "scheduler_name")

# What gpu_products says where nodes carry no label of their GPU.
ANY_PRODUCT = ("any",)

# The planner's names for what a knob says, where they differ.
PLANNER_NAMES = {
    "overrides": "set",
    "hf_token_secret.name": "hf_token_secret",
    "hf_token_secret.key": "hf_token_key",
    **{
        f"model_cache.{name}": f"model_cache_{name}"
        for name in ("claim", "existing", "storage_class", "access_mode", "size")
    },
    **{f"placement.{name}": name for name in PLACEMENT},
    "benchmark.run_id": "benchmark_run_id",
    "benchmark.as_published": "benchmark_as_published",
    "benchmark.traffic": "benchmark_traffic",
}


def catalog_of(settings: Settings) -> Catalog:
    try:
        return load_catalog(settings.catalog_overlay or None)
    except CatalogError as error:
        raise SettingsError([f"catalog_overlay: {error}"]) from None


def plan_of(settings: Settings, catalog: Catalog, stack: str) -> GraphPlan:
    """What the stack applies. A `SettingsError` speaks of the knobs, not of the planner's own names."""
    if not settings.target:
        raise SettingsError([f"target: not set; allowed: {', '.join(catalog.graphs)}"])
    try:
        plan = plan_graph(request_of(settings, stack), catalog)
    except PlanError as error:
        raise SettingsError([_in_knobs(problem) for problem in error.problems]) from None
    types = [component.type for component in plan.graph.spec.components]
    unknown = [name for name in settings.scaled_elsewhere if name not in types]
    if unknown:
        raise SettingsError(
            f"scaled_elsewhere: {name!r} is no component of {settings.target}{nearest(name, types)}; "
            f"allowed: {', '.join(types)}"
            for name in unknown
        )
    return plan


def request_of(settings: Settings, stack: str) -> GraphRequest:
    """The knobs that decide shape, as the planner takes them."""
    values = {
        key: getattr(settings, key)
        for key in (
            *(
                "target",
                "gpu",
                "name",
                "namespace",
                "model",
                "release",
                "image",
                "runtime_version",
                "replicas",
                "router_mode",
            ),
            *("rollout", "load_timeout_seconds", "hub_endpoint", "resources", "image_registry", "tools_image"),
            *("package_index", "job_environment", "labels", "network_policy", "download_timeout_seconds"),
            *("encodings_url", "smoke_probes"),
        )
    }
    cache = {
        name: getattr(settings, f"model_cache_{name}")
        for name in ("claim", "existing", "storage_class", "access_mode", "size")
    }
    placement = {name: getattr(settings, name) for name in PLACEMENT}
    token = {"name": settings.hf_token_secret, "key": settings.hf_token_key}
    benchmark = {
        "run_id": settings.benchmark_run_id,
        "as_published": settings.benchmark_as_published,
        "traffic": settings.benchmark_traffic,
    }
    request = graph_request_from(
        _given(
            {
                **values,
                "model_cache": _given(cache),
                "placement": _given(placement) | ({"gpu_products": ()} if settings.gpu_products == ANY_PRODUCT else {}),
                "pull_secrets": (*settings.pull_secrets, *([settings.pull_secret] * settings.makes_pull_secret)),
                "annotations": {**settings.annotations, STACK_ANNOTATION: stack},
                "benchmark": _given(benchmark) if settings.benchmark else None,
            }
        )
        | {"hf_token_secret": None if settings.hf_anonymous else token}
    )
    return request.model_copy(update={"overrides": overrides_from_mapping(settings.set)})


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the user said; the rest is the catalog's choice."""
    return {key: value for key, value in values.items() if value or value is False}


def _in_knobs(problem: str) -> str:
    """The planner's sentence with the configuration's names."""
    for name, knob in PLANNER_NAMES.items():
        anywhere = "." in name  # a bare word may stand in a sentence as itself
        problem = re.sub(rf"{'' if anywhere else '^'}(?<![\w.]){re.escape(name)}(?!\w)", knob, problem)
    return problem
