"""Property values as they travel between a program and its engine: plain JSON, secrets and what is not known yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import json_format, struct_pb2

SIGNATURE = "4dabf18193072939515e22adb298388d"
SECRET = "1b47061264138c4ac30d75fd1eb44270"
UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"

Path = tuple[str | int, ...]


def read(struct: struct_pb2.Struct) -> tuple[dict[str, Any], frozenset[Path]]:
    """Values without their wrapping, and where the secrets among them are."""
    secrets: set[Path] = set()
    value = _read(json_format.MessageToDict(struct), (), secrets)
    assert isinstance(value, dict)
    return value, frozenset(secrets)


def _read(value: Any, path: Path, secrets: set[Path]) -> Any:
    if isinstance(value, dict):
        kind = value.get(SIGNATURE)
        if kind == SECRET:
            secrets.add(path)
            return _read(value["value"], path, secrets)
        if kind is not None:
            raise NotImplementedError(f"{_said(path)}: a value of the kind {kind}; this engine knows secrets alone")
        return {key: _read(each, (*path, key), secrets) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_read(each, (*path, index), secrets) for index, each in enumerate(value)]
    # Numbers travel as doubles.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def write(value: Mapping[str, Any], secrets: frozenset[Path] = frozenset()) -> struct_pb2.Struct:
    return json_format.ParseDict(_wrapped(value, (), secrets), struct_pb2.Struct())


def _wrapped(value: Any, path: Path, secrets: frozenset[Path]) -> Any:
    if isinstance(value, Mapping):
        inner: Any = {key: _wrapped(each, (*path, key), secrets) for key, each in value.items()}
    elif isinstance(value, list | tuple):
        inner = [_wrapped(each, (*path, index), secrets) for index, each in enumerate(value)]
    else:
        inner = value
    return {SIGNATURE: SECRET, "value": inner} if path in secrets else inner


def has_unknown(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(has_unknown(each) for each in value.values())
    if isinstance(value, list | tuple):
        return any(has_unknown(each) for each in value)
    return bool(value == UNKNOWN)


def hidden(value: Any, secrets: frozenset[Path], path: Path = ()) -> Any:
    """As a state file shows it: `[secret]` in place of what is one."""
    if path in secrets:
        return "[secret]"
    if isinstance(value, Mapping):
        return {key: hidden(each, secrets, (*path, key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(each, secrets, (*path, index)) for index, each in enumerate(value)]
    return value


def at(value: Any, path: Sequence[str | int]) -> Any:
    """What lies at a path; a `LookupError` when nothing does."""
    for part in path:
        if isinstance(part, str) and not isinstance(value, Mapping):
            raise LookupError(_said(tuple(path)))
        value = value[part]
    return value


def _said(path: Path) -> str:
    return ".".join(map(str, path)) or "."
