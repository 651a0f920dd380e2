"""What an operator sets beside the profile: `--set path=value`, or the inventory's `serving_set`.

max_batch_size=64                                a name every engine understands (engines/*.yml, common_settings)
kv_cache_config.free_gpu_memory_fraction=0.8     a path in the engine's own schema
options.kv_cache_config.dtype=fp8                the same, said explicitly
environment.NCCL_DEBUG=INFO                      a variable in the container
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import JsonValue

from serving_catalog.entries import Engine, EngineRelease
from serving_catalog.errors import PlanError, nearest
from serving_catalog.plans import Override
from serving_catalog.schema import EngineSchema

_SECRET = re.compile(r"(^|[_.-])(key|token|secret|password|credentials?)($|[_.-])", re.IGNORECASE)

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# The role sets these for every container, from what is on the host.
_RESERVED_VARIABLES = {
    "HF_HUB_OFFLINE": "the server reads verified weights only",
    "TIKTOKEN_ENCODINGS_BASE": "the server reads verified encodings only",
    "NVIDIA_VISIBLE_DEVICES": "the plan decides which GPUs a process sees",
    "CUDA_VISIBLE_DEVICES": "the plan decides which GPUs a process sees",
    "HF_TOKEN": "the server downloads nothing; the token belongs to model_weights",
}


@dataclass
class Overrides:
    """Overrides, resolved to the engine's own settings and the container's environment.

    `said` holds the operator's own word for each; `problems` what could not be resolved.
    """

    settings: dict[str, JsonValue] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def parse_overrides(arguments: Iterable[str]) -> tuple[Override, ...]:
    """`path=value` words; the value is YAML, so 64 is a number and true is a boolean."""
    parsed, problems = [], []
    for argument in arguments:
        path, equals, text = argument.partition("=")
        if not equals or not path:
            problems.append(f"set: {argument!r} is not path=value, for example max_batch_size=64")
            continue
        value: object = text
        if not path.startswith("environment."):  # a variable's value is the text as it stands
            try:
                value = yaml.safe_load(text) if text else ""
            except yaml.YAMLError:
                value = text
        parsed.append(Override(path=path.strip(), value=_json_value(value)))
    if problems:
        raise PlanError(problems)
    return tuple(parsed)


def overrides_from_mapping(mapping: Mapping[str, Any]) -> tuple[Override, ...]:
    """An inventory's `serving_set`: paths and values."""
    return tuple(Override(path=str(path), value=_json_value(value)) for path, value in mapping.items())


def resolve_overrides(
    overrides: Sequence[Override], engine: Engine, release: EngineRelease, schema: EngineSchema
) -> Overrides:
    """Every override as one engine setting or variable, with everything wrong with them."""
    result, said = Overrides(), dict[str, str]()
    problems = result.problems
    for override in overrides:
        target, problem = _target(override, engine, release, schema)
        if problem is not None:
            problems.append(problem)
            continue
        if target in said:
            problems.append(
                f"set: {target.removeprefix('options.')} is set twice: "
                f"as {said[target]} and as {override.path}; keep one"
            )
            continue
        said[target] = override.path
        if target.startswith("environment."):
            result.environment[target.removeprefix("environment.")] = _variable_value(override.value)
        else:
            result.settings[target.removeprefix("options.")] = override.value
            result.said[target.removeprefix("options.")] = override.path
    problems += _set_by_both(result, release, said)
    problems += _set_above_and_below(result)
    return result


def shown(path: str, value: JsonValue) -> str:
    """A value as messages repeat it; what may be a secret is not repeated."""
    return "***" if _SECRET.search(path) else repr(value)


def _target(override: Override, engine: Engine, release: EngineRelease, schema: EngineSchema) -> tuple[str, str | None]:
    path = override.path
    if path.startswith("environment."):
        return path, _variable_problem(path.removeprefix("environment."), override.value, release)
    common = engine.common_settings.get(path)
    setting = common.setting if common is not None else path.removeprefix("options.")
    setting = _canonical(setting, engine, schema)
    head = setting.split(".")[0]
    if setting in engine.managed_settings or head in engine.managed_settings:
        reason = engine.managed_settings.get(setting) or engine.managed_settings[head]
        return path, f"set: {path}={shown(path, override.value)}: cannot be set: {setting} {reason}"
    if not schema.knows(setting):
        known = [*engine.common_settings, *schema.fields]
        return path, (
            f"set: {path}={shown(path, override.value)}: {engine.title} {schema.release} has no such option"
            f"{nearest(setting, known)}; "
            f"allowed: {', '.join(engine.common_settings)}, environment.NAME, or a path in its own options"
        )
    return f"options.{setting}", None


def _canonical(setting: str, engine: Engine, schema: EngineSchema) -> str:
    """The release's own spelling: `--max-num-seqs`, `max_num_seqs` and `no-enable-x` are spellings of one option."""
    bare = setting.removeprefix("--")
    if schema.engine != "vllm" or schema.knows(bare):
        return bare
    dashed = bare.replace("_", "-")
    option = schema.option(f"--{dashed}")
    return option.setting if option is not None else bare


def _variable_problem(name: str, value: JsonValue, release: EngineRelease) -> str | None:
    if not _VARIABLE.fullmatch(name):
        return f"set: environment.{name}: not a variable's name; allowed: letters, digits and _, not a digit first"
    if name in _RESERVED_VARIABLES:
        return f"set: environment.{name}={shown(name, value)}: cannot be set, {_RESERVED_VARIABLES[name]}"
    if name in release.unread_environment:
        instead = release.unread_environment[name]
        return f"set: environment.{name}={shown(name, value)}: this release does not read it; {instead}"
    if isinstance(value, dict | list):
        return f"set: environment.{name}={shown(name, value)}: a variable's value is text or a number"
    if "\n" in _variable_value(value):
        return f"set: environment.{name}: a variable's value is one line"
    return None


def _variable_value(value: JsonValue) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):  # as YAML and most programs write it; quote it in an inventory to have it otherwise
        return "true" if value else "false"
    return str(value)


def _set_by_both(result: Overrides, release: EngineRelease, said: dict[str, str]) -> list[str]:
    return [
        f"set: {setting} is set twice: as {said[f'options.{setting}']} and by environment.{variable}; keep one"
        for variable, setting in release.environment_sets.items()
        if variable in result.environment and setting in result.settings
    ]


def _set_above_and_below(result: Overrides) -> list[str]:
    return [
        f"set: {below} is set twice: on its own and inside {above}; keep one"
        for above in result.settings
        for below in result.settings
        if below.startswith(above + ".")
    ]


def _json_value(value: object) -> JsonValue:
    """YAML dates and the like as the text they were."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    return str(value)
