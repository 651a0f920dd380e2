"""What an engine's command line and options file come to: everything that loading and serving need to know."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from serving_catalog.schema import EngineSchema, SchemaError, load_schema

Kind = Literal["tensorrt_llm", "vllm"]
DEFAULT_RELEASE: Mapping[Kind, str] = {"tensorrt_llm": "1.2.1", "vllm": "0.31.0"}


@dataclass(frozen=True)
class Engine:
    """One server, as its command line describes it."""

    kind: Kind
    release: str
    model: str  # a repository of the Hugging Face Hub, or a directory
    revision: str | None
    served_names: tuple[str, ...]
    host: str
    port: int
    world_size: int  # GPUs it needs
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int | None = None
    drain_seconds: float | None = None  # how long requests in flight are waited for at SIGTERM; None is without limit
    iteration_statistics: bool = False
    request_metrics: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)

    def log(self, text: str) -> None:
        """A line of the engine's log, in the engine's form."""
        if self.kind == "tensorrt_llm":
            print(time.strftime("[%m/%d/%Y-%H:%M:%S] [TRT-LLM] [I] ") + text, flush=True)
        else:
            print(f"(APIServer pid={os.getpid()}) " + time.strftime("INFO %m-%d %H:%M:%S ") + text, flush=True)


def release_of(kind: Kind) -> str:
    """The release this process stands in for: the image says so."""
    return os.environ.get("SIMULATOR_RELEASE") or DEFAULT_RELEASE[kind]


def schema_of(kind: Kind) -> EngineSchema:
    return load_schema(kind, release_of(kind))


def refusal(title: str, problems: Iterable[SchemaError]) -> ValidationError:
    """The engine's own pydantic error for these problems."""
    details: list[InitErrorDetails] = []
    for problem in problems:
        # Braces in a custom message are placeholders.
        message = problem.message.replace("{", "{{").replace("}", "}}")
        kind = PydanticCustomError(problem.type, message)
        details.append(InitErrorDetails(type=kind, loc=problem.location, input=problem.value))
    return ValidationError.from_exception_data(title, details)


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`a.b: 1` as `{a: {b: 1}}`."""
    result: dict[str, Any] = {}
    for path, value in settings.items():
        *sections, name = path.split(".")
        here = result
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = value
    return result
