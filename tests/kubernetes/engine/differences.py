"""When a Kubernetes object differs from what the program says now, and whether it then has to be replaced.

The provider compares the new inputs with the live object of the last operation, cut to the shape of the old inputs
(pulumi-kubernetes 4.32, provider/pkg/provider: Diff, pruneLiveState, diff.go's table of properties that force a new
object). So a value that the API server writes differently shows up as a difference every time; quantities of the
server's own kinds are the exception, which the provider puts into one form first.
"""

from __future__ import annotations

import base64
import copy
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from .values import Path, at

_IDENTITY = (("metadata", "name"), ("metadata", "namespace"))
_IMMUTABLE: Mapping[tuple[str, str], tuple[tuple[str, ...], ...]] = {
    ("v1", "ConfigMap"): (("data",), ("binaryData",)),
    ("v1", "Secret"): (("type",), ("stringData",), ("data",)),
    ("v1", "PersistentVolumeClaim"): (
        *(("spec", "accessModes"), ("spec", "selector"), ("spec", "storageClassName"), ("spec", "volumeName")),
    ),
    ("batch/v1", "Job"): (
        *(("spec", "completions"), ("spec", "parallelism"), ("spec", "selector"), ("spec", "template")),
    ),
    ("apps/v1", "Deployment"): (("spec", "selector"),),
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): (("roleRef",),),
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding"): (("roleRef",),),
}
_SUFFIXES = (
    {"m": Decimal("0.001"), "": Decimal(1)}
    | {
        f"{letter}{i}": Decimal(base) ** power
        for i, base in (("", 1000), ("i", 1024))
        for power, letter in enumerate("kMGTPE", start=1)
    }
    | {"Ki": Decimal(1024)}
)
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|[kMGTPE]|[KMGTPE]i)?")


def differences(old_inputs: Mapping[str, Any], live: Mapping[str, Any], new_inputs: Mapping[str, Any]) -> list[Path]:
    """Where the new inputs differ from the live object, as far as the old inputs spoke of it."""
    native = "." not in str(new_inputs["apiVersion"]).partition("/")[0] or ".k8s.io/" in new_inputs["apiVersion"]
    old_inputs, new_inputs = _normal(old_inputs, native), _normal(new_inputs, native)
    return list(_compare(_cut(live, old_inputs), new_inputs, (), native))


def replacing(inputs: Mapping[str, Any], paths: list[Path]) -> list[Path]:
    """Those of the paths whose change needs a new object."""
    fixed = (*_IDENTITY, *_IMMUTABLE.get((inputs["apiVersion"], inputs["kind"]), ()))
    return [path for path in paths if any(path[: len(prefix)] == prefix for prefix in fixed)]


def without(paths: list[Path], ignored: list[str]) -> list[Path]:
    """Paths that are not ignored."""
    prefixes = [parsed(text) for text in ignored]
    return [path for path in paths if not any(_covers(prefix, path) for prefix in prefixes)]


def keep_ignored(ignored: list[str], old_inputs: Mapping[str, Any], new_inputs: dict[str, Any]) -> dict[str, Any]:
    """The new inputs with what the program is to ignore as it was."""
    inputs = copy.deepcopy(new_inputs)
    for text in ignored:
        for path in _expanded(parsed(text), old_inputs, new_inputs):
            _put(inputs, path, old_inputs)
    return inputs


def parsed(text: str) -> Path:
    """`spec.components[*].replicas` as a path; `[*]` stays the text `*`."""
    parts: list[str | int] = []
    for name, index in re.findall(r"([^.\[\]]+)|\[([^\]]*)\]", text):
        if name:
            parts.append(name)
        elif index.isdecimal():
            parts.append(int(index))
        else:
            parts.append(index.strip('"'))
    return tuple(parts)


def _covers(prefix: Path, path: Path) -> bool:
    return len(prefix) <= len(path) and all(
        want in (have, "*") for want, have in zip(prefix, path[: len(prefix)], strict=True)
    )


def _expanded(path: Path, *values: Mapping[str, Any]) -> set[Path]:
    found: set[Path] = set()
    for value in values:
        reached: list[tuple[Path, Any]] = [((), value)]
        for part in path:
            further: list[tuple[Path, Any]] = []
            for before, here in reached:
                if part == "*" and isinstance(here, list):
                    further += [((*before, index), each) for index, each in enumerate(here)]
                elif part == "*" and isinstance(here, Mapping):
                    further += [((*before, key), each) for key, each in here.items()]
                elif isinstance(here, Mapping):
                    further.append(((*before, part), here.get(str(part))))
                elif isinstance(here, list) and isinstance(part, int) and part < len(here):
                    further.append(((*before, part), here[part]))
            reached = further
        found |= {before for before, _ in reached}
    return found


def _put(inputs: dict[str, Any], path: Path, old_inputs: Mapping[str, Any]) -> None:
    """Make a path of the inputs what it was in the old ones, if there is still a place for it."""
    try:
        holder = at(inputs, path[:-1])
    except LookupError:
        return
    try:
        holder[path[-1]] = copy.deepcopy(at(old_inputs, path))
    except LookupError:
        if isinstance(holder, dict):
            holder.pop(path[-1], None)


def _normal(inputs: Mapping[str, Any], native: bool) -> dict[str, Any]:
    """Secrets keep their strings as data, as the API server does; empty labels are none."""
    changed = dict(inputs)
    if native:
        changed["metadata"] = {key: value for key, value in inputs["metadata"].items() if value != {}}
    if (inputs["apiVersion"], inputs["kind"]) == ("v1", "Secret") and "stringData" in changed:
        strings = changed.pop("stringData")
        data = {key: base64.b64encode(value.encode()).decode() for key, value in strings.items()}
        changed["data"] = {**changed.get("data", {}), **data}
    return changed


def _cut(live: Any, shape: Any) -> Any:
    if isinstance(live, Mapping) and isinstance(shape, Mapping):
        return {key: _cut(live[key], shape[key]) for key in live if key in shape}
    if isinstance(live, list) and isinstance(shape, list):
        return [_cut(one, other) for one, other in zip(live, shape, strict=False)]
    return live


def _compare(old: Any, new: Any, path: Path, native: bool) -> Iterator[Path]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            if key not in old or key not in new:
                yield (*path, key)
            else:
                yield from _compare(old[key], new[key], (*path, key), native)
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield path
        for index, (one, other) in enumerate(zip(old, new, strict=False)):
            yield from _compare(one, other, (*path, index), native)
    elif old != new and not (native and _same_quantity(old, new)):
        yield path


def _same_quantity(one: Any, other: Any) -> bool:
    first, second = _quantity(one), _quantity(other)
    return first is not None and first == second


def _quantity(value: Any) -> Decimal | None:
    found = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    return Decimal(found[1]) * _SUFFIXES[found[2] or ""] if found else None
