"""What an engine release accepts: its options file, key by key, and its command line, flag by flag.

The listings are data (serving_catalog/data/schemas). A stand-in engine builds its parser from the same tables, so that
it refuses what the engine refuses:

    schema = load_schema("tensorrt_llm", "1.2.1")
    [str(error) for error in schema.validate_options({"moe_config": {"backend": "TRTLMM"}})]
    ["moe_config.backend: Input should be 'AUTO', 'CUTLASS', …"]

Errors are pydantic's own, because the engines validate with pydantic: "Extra inputs are not permitted",
"Input should be …".

A field's type is written as one string:  TYPE[?] [CONSTRAINT…]
    TYPE        int, float, bool, str, size (an int), any, map, section, enum(A|B), list(TYPE)
    ?           null is allowed
    CONSTRAINT  >=N  <=N  >N  <N
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import SchemaValidator, core_schema
from pydantic_core import ValidationError as CoreValidationError

from serving_catalog.entries import Entry, Part
from serving_catalog.errors import CatalogError
from serving_catalog.loading import DATA, read_yaml


class SchemaError(Part):
    """One thing an engine would refuse. `type` is pydantic's name for it: extra_forbidden, literal_error, …"""

    location: tuple[str, ...]
    message: str
    type: str
    value: JsonValue = None

    def __str__(self) -> str:
        return f"{'.'.join(self.location)}: {self.message}"


class CommandLineOption(Part):
    """An option of the release's own parser, as argparse wants it.

    kind: `value` takes one value; `switch` takes none; `boolean` is --x and --no-x; `values` takes one or more;
    `repeat` may be typed again.
    type: int, float, str, json (parsed as JSON), size (a whole number, or one with a unit such as 8k), any (text that
    the engine parses itself).
    """

    name: str
    aliases: tuple[str, ...] = ()
    kind: Literal["value", "switch", "boolean", "values", "repeat"] = "value"
    type: Literal["int", "float", "str", "json", "size", "any"] = "str"
    choices: tuple[str | int, ...] = ()
    default: JsonValue = None
    range: str = ""
    deprecated: str | None = None

    @property
    def setting(self) -> str:
        """The option as a settings path: without its dashes."""
        return self.name.removeprefix("--")


class _SchemaFile(Entry):
    engine: Literal["tensorrt_llm", "vllm"]
    release: str
    based_on: str | None = None
    options: Mapping[str, str | None] = {}
    command: tuple[str, ...] = ()
    positional: str = "model"
    command_line: tuple[CommandLineOption, ...] = ()
    removed_command_line: tuple[str, ...] = ()


class EngineSchema(Part):
    """One release of one engine. `fields` holds every settings path with its type."""

    engine: str
    release: str
    source: str
    fields: Mapping[str, str]
    command_line: tuple[CommandLineOption, ...]

    def validate_options(self, options: object) -> tuple[SchemaError, ...]:
        """What the engine would refuse in this options mapping, in the order it would say so."""
        try:
            _validator(self.engine, self.release).validate_python(options)
        except CoreValidationError as error:
            return tuple(
                SchemaError(
                    location=tuple(map(str, problem["loc"])),
                    message=problem["msg"],
                    type=problem["type"],
                    value=_plain(problem["input"]),
                )
                for problem in error.errors(include_url=False)
            )
        return ()

    def knows(self, path: str) -> bool:
        return self.field(path) is not None

    def field(self, path: str) -> str | None:
        """The type of a settings path, or None. Below a free-form field everything is allowed."""
        if path in self.fields:
            return self.fields[path]
        words = path.split(".")
        for n in range(len(words) - 1, 0, -1):
            parent = self.fields.get(".".join(words[:n]))
            if parent is not None:
                return "any" if parent.rstrip("?") in ("any", "map") else None
        return "section" if any(known.startswith(path + ".") for known in self.fields) else None

    def option(self, name: str) -> CommandLineOption | None:
        """The command-line option of this name or alias."""
        return next((o for o in self.command_line if name == o.name or name in o.aliases), None)


@cache
def load_schema(engine: str, release: str) -> EngineSchema:
    """What `release` of `engine` accepts."""
    return _load(f"{engine}-{release}")


def _load(name: str) -> EngineSchema:
    file = DATA / "schemas" / f"{name}.yml"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in (DATA / "schemas").glob("*.yml")))
        raise CatalogError(f"{name}: no schema of this name; there are: {known}")
    content = _parsed(file)
    fields: dict[str, str] = {}
    command_line: dict[str, CommandLineOption] = {}
    if content.based_on is not None:
        base = _load(content.based_on)
        fields.update(base.fields)
        command_line.update({option.name: option for option in base.command_line})
    for path, kind in content.options.items():
        if kind is None:  # gone in this release, with everything below it
            for known in [p for p in fields if p == path or p.startswith(path + ".")]:
                del fields[known]
        else:
            fields[path] = kind
    for gone in content.removed_command_line:
        command_line.pop(gone, None)
    command_line.update({option.name: option for option in content.command_line})
    if content.engine == "vllm":  # its options file holds the command line's long options, and nothing else
        fields = {option.setting: _as_field(option) for option in command_line.values() if option.name.startswith("--")}
    return EngineSchema(
        engine=content.engine,
        release=content.release,
        source=content.source,
        fields=fields,
        command_line=tuple(command_line.values()),
    )


def _parsed(file: Path) -> _SchemaFile:
    try:
        return _SchemaFile.model_validate_json(json.dumps(read_yaml(file)))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CatalogError(f"{file}: {problems}") from None


def _as_field(option: CommandLineOption) -> str:
    if option.kind in ("switch", "boolean"):
        return "bool"
    if option.kind in ("values", "repeat"):
        return "any"
    if option.choices and option.type == "str":
        return f"enum({'|'.join(map(str, option.choices))})"
    named = {"json": "any", "any": "any"}.get(option.type, option.type)
    return named if named == "any" else f"{named} {option.range}".strip()


@cache
def _validator(engine: str, release: str) -> SchemaValidator:
    return SchemaValidator(_tree(load_schema(engine, release).fields))


def _tree(fields: Mapping[str, str]) -> core_schema.CoreSchema:
    """A closed mapping whose sections are closed mappings."""
    leaves: dict[str, core_schema.CoreSchema] = {}
    sections: dict[str, dict[str, str]] = {}
    nullable: set[str] = set()
    for path, kind in fields.items():
        head, _, rest = path.partition(".")
        if rest:
            sections.setdefault(head, {})[rest] = kind
        elif kind.rstrip("?") == "section":
            sections.setdefault(head, {})
            if kind.endswith("?"):
                nullable.add(head)
        else:
            leaves[head] = _leaf(kind)
    for head, below in sections.items():
        section = _tree(below)
        leaves[head] = core_schema.nullable_schema(section) if head in nullable else section
    return core_schema.typed_dict_schema(
        {name: core_schema.typed_dict_field(schema, required=False) for name, schema in leaves.items()},
        extra_behavior="forbid",
    )


_FIELD = re.compile(r"(?P<kind>\w+)(?:\((?P<of>.*)\))?(?P<null>\?)?(?P<limits>(?: (?:>=|<=|>|<)-?[0-9.]+)*)")


def _leaf(text: str) -> core_schema.CoreSchema:
    match = _FIELD.fullmatch(text)
    if match is None:
        raise CatalogError(f"{text!r} is not a field type: TYPE[?] [>=N] [<=N] [>N] [<N]")
    kind, of, limits = match["kind"], match["of"], match["limits"].split()
    schema: core_schema.CoreSchema
    if kind in ("int", "float"):
        schema = _number(kind, limits)
    elif kind == "size":  # argparse reads 8k as well; a plan counts in whole numbers
        schema = _number("int", limits)
    elif kind == "bool":
        schema = core_schema.bool_schema()
    elif kind == "str":
        schema = core_schema.str_schema()
    elif kind == "enum":
        schema = core_schema.literal_schema(list(of.split("|")))
    elif kind in ("list", "set"):
        schema = core_schema.list_schema(_leaf(of))
    elif kind == "map":
        schema = core_schema.dict_schema()
    elif kind == "any":
        schema = core_schema.any_schema()
    else:
        raise CatalogError(f"{text!r}: {kind!r} is not a field type")
    return core_schema.nullable_schema(schema) if match["null"] else schema


def _number(kind: str, limits: list[str]) -> core_schema.CoreSchema:
    names = {">=": "ge", "<=": "le", ">": "gt", "<": "lt"}
    bounds: dict[str, Any] = {}
    for limit in limits:
        sign = limit[:2] if limit[1] == "=" else limit[:1]
        bounds[names[sign]] = (int if kind == "int" else float)(limit[len(sign) :])
    return core_schema.int_schema(**bounds) if kind == "int" else core_schema.float_schema(**bounds)


_PLAIN: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)


def _plain(value: object) -> JsonValue:
    try:
        return _PLAIN.validate_python(value)
    except ValidationError:
        return str(value)
