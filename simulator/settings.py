"""What whoever starts a stand-in engine may ask of it, through SIMULATOR_* environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Fault = Literal[
    "out_of_memory",  # the GPU's memory runs out while loading: the engine's error, exit status 1
    "crash",  # something breaks while loading: a traceback, exit status 1
    "killed",  # the kernel ends the process while loading: SIGKILL, as when the host's memory ran out
    "hang",  # loading never ends: the port is bound and nothing listens
    "rank_crash",  # a rank dies while serving. TensorRT-LLM answers 503 for ever and stays; vLLM ends with status 0
    "worker_lost",  # a worker is gone and nobody noticed: /health says 200, requests wait for ever
    "no_stream",  # a request for a stream is answered in one piece
]
PREFIX = "SIMULATOR_"
# Set by the image: which engine it stands in for.
ENGINE_VARIABLES = ("SIMULATOR_ENGINE", "SIMULATOR_RELEASE")


class SettingError(ValueError):
    """A SIMULATOR_* variable that says nothing sensible."""


@dataclass(frozen=True)
class Settings:
    """How long loading takes, what goes wrong, how fast tokens come."""

    load_seconds: float = 2.0
    fail: Fault | None = None
    fail_after_seconds: float = 0.0  # for faults while serving: counted from the moment the engine is ready
    speedup: float = 10.0  # 1 is the pace of a real GPU as the mocker's model has it; 0 is no waiting at all


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings, or SettingError naming the variable, its value and what is allowed."""
    known = {"SIMULATOR_LOAD_SECONDS", "SIMULATOR_FAIL", "SIMULATOR_FAIL_AFTER_SECONDS", "SIMULATOR_SPEEDUP"}
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known and name not in ENGINE_VARIABLES:
            raise SettingError(f"{name}: no such variable; allowed: {', '.join(sorted(known))}")
    fail = environment.get("SIMULATOR_FAIL") or None
    if fail is not None and fail not in get_args(Fault):
        raise SettingError(f"SIMULATOR_FAIL: {fail!r}; allowed: {', '.join(get_args(Fault))}")
    return Settings(
        load_seconds=_number(environment, "SIMULATOR_LOAD_SECONDS", Settings.load_seconds),
        fail=fail,  # type: ignore[arg-type]  # checked above
        fail_after_seconds=_number(environment, "SIMULATOR_FAIL_AFTER_SECONDS", Settings.fail_after_seconds),
        speedup=_number(environment, "SIMULATOR_SPEEDUP", Settings.speedup),
    )


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 86400:
        raise SettingError(f"{name}: {text!r}; allowed: a number from 0 to 86399")
    return value
