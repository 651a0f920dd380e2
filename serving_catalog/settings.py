"""Settings of a profile: paths and values, resolved for a GPU and a number of them."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from serving_catalog.entries import Profile
from serving_catalog.errors import CatalogError
from serving_catalog.schema import EngineSchema


def profile_settings(profile: Profile, architecture: str, gpus: int) -> dict[str, JsonValue]:
    """A profile's settings for a process on `gpus` GPUs of `architecture`, with every $reference resolved."""
    settings: dict[str, JsonValue] = dict(profile.settings)
    settings.update(profile.by_architecture.get(architecture, {}))
    if gpus > 1:
        settings.update(profile.several_gpus)
        settings.update(profile.several_gpus_by_architecture.get(architecture, {}))
    else:
        settings.update(profile.single_gpu)
    return {path: _resolved(value, settings, gpus) for path, value in settings.items()}


def _resolved(value: JsonValue, settings: Mapping[str, JsonValue], gpus: int) -> JsonValue:
    if not (isinstance(value, str) and value.startswith("$")):
        return value
    name = value[1:]
    if name == "gpus":
        return gpus
    if name not in settings:
        raise CatalogError(f"{value}: the profile sets no {name!r}; allowed: $gpus, or $ and another setting")
    return settings[name]


def nested(settings: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """`a.b: 1` as `{a: {b: 1}}`."""
    result: dict[str, JsonValue] = {}
    for path, value in settings.items():
        *sections, name = path.split(".")
        here = result
        for section in sections:
            below = here.setdefault(section, {})
            if not isinstance(below, dict):
                raise CatalogError(f"{path}: {section} has a value already, so nothing can be below it")
            here = below
        here[name] = value
    return result


def rendered(settings: Mapping[str, JsonValue], schema: EngineSchema) -> dict[str, JsonValue]:
    """Settings as the options file says them.

    vLLM's file holds words of a command line: `x: false` is `no-x: true` there, and some releases drop the former.
    """
    if schema.engine != "vllm":
        return nested(settings)
    result: dict[str, JsonValue] = {}
    for path, value in settings.items():
        option = schema.option(f"--{path}")
        if option is not None and option.kind in ("boolean", "switch") and value is False:
            if option.kind == "boolean":
                result[f"no-{path}"] = True
        elif value is not None:
            result[path] = value
    return result


def option_problems(settings: Mapping[str, JsonValue], schema: EngineSchema, said: Mapping[str, str]) -> list[str]:
    """What the engine itself would say of these settings. `said` holds the operator's word for those of theirs."""
    problems = []
    for error in schema.validate_options(nested(settings)):
        path = ".".join(error.location)
        setting = next((known for known in said if path == known or path.startswith(known + ".")), None)
        if setting is None:
            problems.append(f"{path}: {error.value!r}: {error.message} (from the catalog's data, or an overlay)")
        else:
            below = path.removeprefix(setting)
            problems.append(f"set: {said[setting]}{below}={error.value!r}: {error.message}")
    return problems
