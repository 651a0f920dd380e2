"""What a request asks for and what a plan says. Plans are plain data: roles and components only carry them out."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Literal

from pydantic import JsonValue, ValidationError, computed_field

from serving_catalog.entries import Encoding, Model, Part
from serving_catalog.errors import PlanError


class Override(Part):
    """One `--set path=value`."""

    path: str
    value: JsonValue


class ServeRequest(Part):
    """This model, on this GPU, so many of them, for this profile. None means the catalog's default."""

    engine: str
    profile: str
    gpu: str
    gpu_count: int
    platform: str | None = None
    model: str = "gpt-oss-120b"
    release: str | None = None
    overrides: tuple[Override, ...] = ()
    port: int = 8000


def request_from(values: Mapping[str, JsonValue]) -> ServeRequest:
    """A request from an inventory or any other mapping; wrong keys and types become a `PlanError`."""
    try:
        return ServeRequest.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise PlanError(
            [f"{'.'.join(map(str, e['loc']))}: {_shown(e['input'])}{e['msg']}" for e in error.errors()]
        ) from None


def _shown(value: object) -> str:
    return f"{value!r}: " if value is None or isinstance(value, str | int | float | bool | list) else ""


class PlannedEncoding(Part):
    file: str
    url: str
    sha256: str
    size_bytes: int


class PlannedModel(Part):
    name: str
    repository: str
    revision: str
    size_bytes: int
    ignore_patterns: tuple[str, ...]
    context_length: int
    encodings: tuple[PlannedEncoding, ...]


def planned_model(name: str, model: Model, encodings: Mapping[str, Encoding]) -> PlannedModel:
    """A model with everything that must be brought for it."""
    return PlannedModel(
        name=name,
        repository=model.repository,
        revision=model.revision,
        size_bytes=model.size_bytes,
        ignore_patterns=model.ignore_patterns,
        context_length=model.context_length,
        encodings=tuple(
            PlannedEncoding(
                file=encodings[key].file,
                url=encodings[key].url,
                sha256=encodings[key].sha256,
                size_bytes=encodings[key].size_bytes,
            )
            for key in model.encodings
        ),
    )


class PlannedCache(Part):
    name: str
    container_path: str
    environment: str | None


class Process(Part):
    """One engine process on one host: a container that is a systemd instance of the same name."""

    name: str
    image: str
    entrypoint: str | None
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    options_file: Mapping[str, JsonValue]
    options_file_name: str
    docker_run: tuple[str, ...]
    gpus: tuple[int, ...]
    port: int
    container_port: int
    ulimits: Mapping[str, int]
    ipc: Literal["host"]
    served_model_id: str
    health_path: str
    deep_health_path: str | None
    ready_within_seconds: int
    stop_timeout_seconds: int
    working_directory: str
    caches: tuple[PlannedCache, ...]
    weights_container_path: str
    encodings_container_path: str

    @computed_field  # type: ignore[prop-decorator]
    @property
    def image_key(self) -> str:
        """The image as one path component: compile caches of different images never meet."""
        return image_key(self.image)


class HostPlan(Part):
    """Everything a host serves."""

    engine: str
    release: str
    profile: str
    gpu: str
    gpu_count: int
    platform: str | None
    model: PlannedModel
    image: str
    image_bytes: int
    image_architectures: tuple[str, ...]
    cache_bytes: int
    host_memory_bytes: int
    gpu_memory_bytes: int
    processes: tuple[Process, ...]
    traffic: tuple[str, ...]
    notes: tuple[str, ...]
    plan_hash: str


def image_key(image: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", image)


def hash_of(model: PlannedModel, processes: tuple[Process, ...]) -> str:
    """Changes when, and only when, something changes for which a running server must be restarted."""
    restarts = {
        "model": [model.repository, model.revision],
        "processes": [
            process.model_dump(
                mode="json",
                exclude={
                    # How it is shown, asked and waited for; the container is the same.
                    "docker_run",
                    "health_path",
                    "deep_health_path",
                    "ready_within_seconds",
                    "stop_timeout_seconds",
                    "served_model_id",
                },
            )
            for process in processes
        ],
    }
    return hashlib.sha256(json.dumps(restarts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
