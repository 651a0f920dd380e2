"""Reads the data files, lays an operator's overlay over them and checks the whole.

The only I/O of the package is here, and it is reading.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import JsonValue, ValidationError, model_validator

from serving_catalog.entries import Encoding, Engine, Gpu, Model, Packages, Part, Platform, Releases, Traffic
from serving_catalog.errors import CatalogError, nearest
from serving_catalog.graphs.entries import Dynamo, GraphTarget

DATA = Path(__file__).parent / "data"

# An overlay may hold these, and files under engines/ and schemas/.
SINGLE_FILES = ("models", "encodings", "gpus", "platforms", "packages", "releases", "traffic", "dynamo", "graphs")

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Catalog(Part):
    """Everything the project knows about what to run."""

    models: Mapping[str, Model]
    encodings: Mapping[str, Encoding]
    gpus: Mapping[str, Gpu]
    platforms: Mapping[str, Platform]
    packages: Packages
    releases: Releases
    traffic: Mapping[str, Traffic]
    engines: Mapping[str, Engine]
    dynamo: Dynamo
    graphs: Mapping[str, GraphTarget]

    @model_validator(mode="after")
    def _names_resolve(self) -> Self:
        problems = [
            *_missing("models.{}.encodings", {n: m.encodings for n, m in self.models.items()}, self.encodings),
            *_missing("platforms.{}.gpus", {n: p.gpus for n, p in self.platforms.items()}, self.gpus),
        ]
        for engine_name, engine in self.engines.items():
            for profile, by_gpu in engine.gpu_counts.items():
                where = f"engines.{engine_name}.gpu_counts.{{}}"
                problems += _missing(where, {profile: tuple(by_gpu)}, self.gpus)
            for release_name, release in engine.releases.items():
                where = f"engines.{engine_name}.releases.{release_name}.profiles.{{}}.traffic"
                problems += _missing(where, {n: p.traffic for n, p in release.profiles.items()}, self.traffic)
        problems += [
            f"graphs.{name}.gpu: {target.gpu!r} is not one of: {', '.join(self.gpus)}"
            for name, target in self.graphs.items()
            if target.gpu not in self.gpus
        ]
        problems += _claimed_twice("name", [name for gpu in self.gpus.values() for name in gpu.names])
        problems += _claimed_twice("PCI device id", [i for gpu in self.gpus.values() for i in gpu.pci_device_ids])
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def gpu_named(self, name: str) -> str | None:
        """The catalog's key of the GPU that nvidia-smi calls exactly `name`."""
        return next((key for key, gpu in self.gpus.items() if name in gpu.names), None)

    def gpu_with_device_id(self, device_id: str) -> str | None:
        """The catalog's key of the GPU with this PCI device id (four hex digits, with or without 0x)."""
        wanted = device_id.lower().removeprefix("0x")
        return next((key for key, gpu in self.gpus.items() if wanted in gpu.pci_device_ids), None)

    def lookup(self, path: str) -> JsonValue:
        """The value at a dotted path. Keys may hold dots themselves: `engines.tensorrt_llm.releases.1.2.1.image`."""
        here: JsonValue = _dumped(self)
        words = path.split(".") if path else []
        taken: list[str] = []
        while words:
            step = next((n for n in range(len(words), 0, -1) if _holds(here, ".".join(words[:n]))), None)
            if step is None:
                known = ", ".join(str(key) for key in _keys(here)) or "nothing: it is a single value"
                hint = nearest(words[0], [str(key) for key in _keys(here)])
                raise CatalogError(
                    f"{path}: there is no {words[0]!r} in {'.'.join(taken) or 'the catalog'}{hint}; it holds: {known}"
                )
            key = ".".join(words[:step])
            here = here[int(key)] if isinstance(here, list) else here[key]  # type: ignore[index]
            taken.append(key)
            words = words[step:]
        return here


_DUMPS: dict[int, tuple[Catalog, dict[str, JsonValue]]] = {}


def _dumped(catalog: Catalog) -> dict[str, JsonValue]:
    """The catalog as plain data, made once: lookups come by the dozen."""
    known = _DUMPS.get(id(catalog))
    if known is None or known[0] is not catalog:
        known = (catalog, catalog.model_dump(mode="json"))
        _DUMPS[id(catalog)] = known
    return known[1]


def _keys(value: JsonValue) -> list[str]:
    if isinstance(value, dict):
        return list(value)
    if isinstance(value, list):
        return [str(index) for index in range(len(value))]
    return []


def _holds(value: JsonValue, key: str) -> bool:
    return key in _keys(value)


def _missing(where: str, asked: Mapping[str, tuple[str, ...]], known: Mapping[str, object]) -> list[str]:
    return [
        f"{where.format(owner)}: {name!r} is not one of: {', '.join(known)}"
        for owner, names in asked.items()
        for name in names
        if name not in known
    ]


def _claimed_twice(what: str, values: list[str]) -> list[str]:
    return [f"gpus: the {what} {value} is claimed twice" for value in sorted(set(values)) if values.count(value) > 1]


def load_catalog(overlay: Path | str | None = None) -> Catalog:
    """The catalog, with the files of `overlay` deep-merged over the data (mappings merge, everything else replaces)."""
    return _load(Path(overlay).resolve() if overlay is not None else None)


@cache
def _own_data() -> Mapping[str, Any]:
    raw: dict[str, Any] = {name: read_yaml(DATA / f"{name}.yml") for name in SINGLE_FILES}
    raw["engines"] = {file.stem: read_yaml(file) for file in sorted((DATA / "engines").glob("*.yml"))}
    return raw


@cache
def _load(overlay: Path | None) -> Catalog:
    raw: dict[str, Any] = {**_own_data(), "engines": {**_own_data()["engines"]}}
    origin = "serving_catalog/data"
    if overlay is not None:
        origin = f"{origin} with {overlay}"
        for keys, file in _overlay_files(overlay):
            target = raw
            for key in keys[:-1]:
                target = target[key]
            target[keys[-1]] = merged(target.get(keys[-1], {}), read_yaml(file))
    try:
        # Through JSON, because strict validation takes lists for tuples only there.
        return Catalog.model_validate_json(json.dumps(raw))
    except ValidationError as error:
        problems = [f"  {'.'.join(map(str, e['loc']))}: {e['msg']}{_shown(e['input'])}" for e in error.errors()]
        raise CatalogError(f"{origin}: {len(problems)} problem(s)\n" + "\n".join(problems)) from None


def _shown(value: object) -> str:
    return f" (found {value!r})" if isinstance(value, str | int | float | bool) else ""


def _overlay_files(overlay: Path) -> Iterator[tuple[tuple[str, ...], Path]]:
    if not overlay.is_dir():
        raise CatalogError(f"{overlay}: the catalog overlay is not a directory")
    known = {f"{name}.yml" for name in SINGLE_FILES} | {f"engines/{file.name}" for file in DATA.glob("engines/*.yml")}
    for file in sorted(overlay.rglob("*")):
        if file.is_dir() or file.name.startswith(".") or file.suffix == ".md":
            continue
        relative = file.relative_to(overlay)
        if str(relative) not in known:
            raise CatalogError(f"{file}: the catalog has no file of this name; allowed: {', '.join(sorted(known))}")
        yield relative.with_suffix("").parts, file


def merged(base: Any, over: Any) -> Any:
    """`over` laid over `base`: mappings merge key by key, anything else replaces."""
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        return {**base, **{key: merged(base[key], value) if key in base else value for key, value in over.items()}}
    return over


def read_yaml(file: Path) -> dict[str, Any]:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 - the safe loader, in C where there is one
    except yaml.YAMLError as error:
        raise CatalogError(f"{file}: not YAML: {error}") from None
    if not isinstance(content, dict):
        raise CatalogError(f"{file}: expected a mapping, found {type(content).__name__}")
    return content
