"""Whether a model fits: what a process needs of each GPU, and what the GPU has. Bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import JsonValue

from serving_catalog.entries import Engine, Gpu, Model
from serving_catalog.plans import ServeRequest


def memory_problem(
    request: ServeRequest, engine: Engine, gpu: Gpu, model: Model, gpus: int, settings: Mapping[str, JsonValue]
) -> list[str]:
    """A sentence with the numbers when weights, working memory and one request of full length do not fit each GPU."""
    use = engine.memory
    replicated = any(_is_on(settings.get(name)) for name in use.attention_replicated_settings)
    sharers = 1 if replicated else gpus
    weights = int(
        use.weights_factor * (model.replicated_bytes / sharers + (model.weights_bytes - model.replicated_bytes) / gpus)
    )
    working = use.runtime_bytes + use.bytes_per_batched_token * whole(
        settings.get(use.batched_tokens_setting), use.batched_tokens_default
    )
    length = min(whole(settings.get(use.sequence_length_setting), model.context_length), model.context_length)
    per_token = model.kv_bytes_per_token if use.keeps_windows_whole else model.kv_bytes_per_token_beyond_window
    wanted = per_token * length // sharers
    fraction = _number(settings.get(use.fraction_setting), use.fraction_default)
    if use.fraction_of == "free":
        available = int((gpu.memory_bytes - weights - working) * fraction)
        share = f"{fraction:g} of the rest"
    else:
        available = int(gpu.memory_bytes * fraction) - weights - working
        share = f"within {fraction:g} of the memory"
    if available >= wanted:
        return []
    return [
        f"gpu: {request.model} does not fit {gpus} x {request.gpu} with {request.engine}/{request.profile}: "
        f"each GPU has {_gb(gpu.memory_bytes)} and needs {_gb(weights)} for weights, {_gb(working)} to work in and, "
        f"{share}, {_gb(wanted)} for the keys and values of one request of {length} tokens, "
        f"where {_gb(max(available, 0))} is left; "
        f"use more or larger GPUs, a smaller model, or lower max_seq_len or max_num_tokens"
    ]


def _is_on(value: JsonValue) -> bool:
    return value is True or (isinstance(value, int) and not isinstance(value, bool) and value > 1)


def whole(value: JsonValue, default: int) -> int:
    """A setting that is a number, also when an inventory wrote it as text, as the engines read it."""
    return int(value) if isinstance(value, int | float | str) and _is_number(value) else default


def _number(value: JsonValue, default: float) -> float:
    return float(value) if isinstance(value, int | float | str) and _is_number(value) else default


def _is_number(value: float | str) -> bool:
    return not isinstance(value, bool) and re.fullmatch(r"\d+(\.\d+)?", str(value)) is not None


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
