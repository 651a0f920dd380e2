"""`vllm serve`: vLLM's command line and options file, refused where vLLM refuses them.

Built on argparse, as the original is, from the tables of serving_catalog; so a wrong option gives argparse's words and
status 2, a value out of range gives pydantic's and status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from serving_catalog.schema import CommandLineOption, EngineSchema
from simulator.engine import Engine, refusal, schema_of
from simulator.serving import run

# Options whose value is a Python object that the engine parses itself; a range cannot be judged here.
CONTEXT_LENGTH = 131072
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]i?)?")
_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Parser(argparse.ArgumentParser):
    """argparse with vLLM's additions: `_` for `-` in option names, and `--config.key value` for JSON options."""

    def __init__(self, json_options: set[str]) -> None:
        super().__init__(prog="vllm serve", usage="%(prog)s [model_tag] [options]", allow_abbrev=False, add_help=True)
        self._json_options = json_options

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        return super().parse_args(self._normalised(sys.argv[1:] if args is None else args), namespace)

    def _normalised(self, words: Sequence[str]) -> list[str]:
        result: list[str] = []
        dotted: dict[str, dict[str, Any]] = {}
        pending = list(words)
        while pending:
            word = pending.pop(0)
            if not word.startswith("--"):
                result.append(word)
                continue
            name, equals, value = word.partition("=")
            name, dot, key = name.partition(".")
            name = name.replace("_", "-")
            if dot and name in self._json_options:
                text = value if equals else (pending.pop(0) if pending else "")
                here = dotted.setdefault(name, {})
                *sections, last = key.split(".")
                for section in sections:
                    here = here.setdefault(section, {})
                here[last] = _json_or_text(text)
            else:
                result.append(name + dot + key + equals + value)
        for name, value_ in dotted.items():
            result += [name, json.dumps(value_)]
        return result


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def size(text: str) -> int:
    """1k is 1000, 1K is 1024, as vLLM reads them."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"invalid size: {text!r}")
    number, suffix = match.groups()
    if suffix is None:
        return int(number) if number.isdigit() else _fail_size(text)
    return int(float(number) * _FACTORS[suffix[0]])


def _fail_size(text: str) -> NoReturn:
    raise argparse.ArgumentTypeError(f"invalid size: {text!r}")


def size_or_auto(text: str) -> int:
    return -1 if text in ("auto", "-1") else size(text)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"Value {text} cannot be converted to JSON") from None


def parser(schema: EngineSchema) -> Parser:
    """The parser of this release."""
    options = schema.command_line
    made = Parser({option.name for option in options if option.type in ("json", "any")})
    made.add_argument("model_tag", nargs="?", default=None)
    for option in options:
        _add(made, option)
    return made


def _add(made: Parser, option: CommandLineOption) -> None:
    names = [option.name, *option.aliases]
    if option.kind == "switch":
        made.add_argument(*names, action="store_true", default=argparse.SUPPRESS)
        return
    if option.kind == "boolean":
        made.add_argument(*names, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS)
        return
    types: dict[str, Any] = {"int": int, "float": float, "json": _loads, "size": size, "any": str, "str": str}
    kind = size_or_auto if option.name == "--max-model-len" else types[option.type]
    keywords: dict[str, Any] = {"type": kind, "default": argparse.SUPPRESS}
    if option.choices:
        keywords["choices"] = list(option.choices)
    if option.kind == "values":
        keywords["nargs"] = "+"
    if option.kind == "repeat":
        keywords["action"] = "append"
    made.add_argument(*names, **keywords)


def with_options_file(schema: EngineSchema, words: Sequence[str]) -> list[str]:
    """Put what --config names in front of what was typed, so that the typed wins."""
    words = list(words)
    places = [n for n, word in enumerate(words) if word == "--config" or word.startswith("--config=")]
    if len(places) > 1:
        raise AssertionError("More than one config file specified!")
    if not places:
        return words
    place = places[0]
    if words[place] == "--config":
        if place + 1 == len(words) or words[place + 1].startswith("-"):
            raise ValueError("No config file specified! Please check your command-line arguments.")
        path, length = words[place + 1], 2
    else:
        path, length = words[place].partition("=")[2], 1
    if Path(path).suffix not in (".yaml", ".yml"):
        raise ValueError(f"Config file must be of a yaml/yml type. {Path(path).suffix or path} supplied")
    typed = words[:place] + words[place + length :]
    read = options_words(schema, path)
    # `vllm serve MODEL …`: the model stays in front.
    return [typed[0], *read, *typed[1:]] if typed and not typed[0].startswith("-") else [*read, *typed]


def options_words(schema: EngineSchema, path: str) -> list[str]:
    """The options file as words of a command line."""
    with Path(path).open() as file:
        content = yaml.safe_load(file)
    if content is None:
        return []
    if not isinstance(content, dict):
        raise TypeError(f"{path}: a mapping of options was expected, found {type(content).__name__}")
    words: list[str] = []
    for key, value in content.items():
        if isinstance(value, bool):
            words += _boolean_words(schema, str(key), value)
        elif isinstance(value, list):
            words += [f"--{key}", *map(str, value)] if value else []
        elif isinstance(value, dict):
            words += [f"--{key}", json.dumps(value)]
        else:
            words += [f"--{key}", str(value)]
    return words


def _boolean_words(schema: EngineSchema, key: str, value: bool) -> list[str]:
    if value:
        return [f"--{key}"]
    option = schema.option("--" + key.replace("_", "-"))
    # Up to 0.22 a false value is dropped without a word.
    newer = tuple(map(int, schema.release.split(".")[:2])) > (0, 22)
    return [f"--no-{key}"] if newer and option is not None and option.kind == "boolean" else []


def engine_from(schema: EngineSchema, words: Sequence[str]) -> Engine:
    given = vars(parser(schema).parse_args(with_options_file(schema, words)))
    if "model" in given:
        raise ValueError(
            "With `vllm serve`, you should provide the model as a positional argument or in a config file "
            "instead of via the `--model` option."
        )
    model = given.pop("model_tag") or "Qwen/Qwen3-0.6B"
    named = {option.setting.replace("-", "_"): option for option in schema.command_line}
    judged = {
        named[name].setting: value
        for name, value in given.items()
        if name in named and named[name].kind in ("value", "switch", "boolean")
    }
    problems = schema.validate_options(judged)
    if problems:
        raise refusal("VllmConfig", problems)
    length = given.get("max_model_len")
    parallel = (given.get("tensor_parallel_size", 1), given.get("pipeline_parallel_size", 1))
    keys = given.get("api_key") or [key for key in [os.environ.get("VLLM_API_KEY")] if key]
    return Engine(
        kind="vllm",
        release=schema.release,
        model=model,
        revision=given.get("revision"),
        served_names=tuple(given.get("served_model_name") or [model]),
        host=given.get("host") or "0.0.0.0",  # noqa: S104 - vLLM's default
        port=given.get("port", 8000),
        world_size=int(parallel[0]) * int(parallel[1]) * int(given.get("data_parallel_size", 1)),
        max_batch_size=given.get("max_num_seqs") or 1024,
        max_num_tokens=given.get("max_num_batched_tokens") or 8192,
        max_seq_len=length if length and length > 0 else CONTEXT_LENGTH,
        drain_seconds=float(given.get("shutdown_timeout", 0)),
        api_keys=tuple(keys),
    )


def main() -> None:
    words = sys.argv[1:]
    if words[:1] == ["--version"] or words[:1] == ["-v"]:
        print(schema_of("vllm").release)
        return
    if words[:1] != ["serve"]:
        said = f"argument subparser: invalid choice: {words[0]!r} (choose from serve)" if words else "nothing to do"
        print(f"usage: vllm [-h] [-v] {{serve}} ...\nvllm: error: {said}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run(engine_from(schema_of("vllm"), words[1:])))


if __name__ == "__main__":
    main()
