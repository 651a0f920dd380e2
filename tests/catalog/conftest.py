"""What the catalog's tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving_catalog import Catalog, HostPlan, ServeRequest, load_catalog, parse_overrides, plan_host

Planner = Callable[..., HostPlan]
Overlay = Callable[[dict[str, Any]], Path]


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return load_catalog()


@pytest.fixture
def plan(catalog: Catalog) -> Planner:
    """Plan a request; `settings` are `path=value` words as on the command line."""

    def planner(*settings: str, overlay: Path | None = None, **request: Any) -> HostPlan:
        values = {"engine": "tensorrt_llm", "profile": "low_latency", "gpu": "H200", "gpu_count": 4, **request}
        used = catalog if overlay is None else load_catalog(overlay)
        return plan_host(ServeRequest(overrides=parse_overrides(settings), **values), used)

    return planner


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    """Write files of an overlay directory, by name without `.yml`."""

    def write(files: dict[str, Any]) -> Path:
        for name, content in files.items():
            file = tmp_path / f"{name}.yml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(yaml.safe_dump(content), encoding="utf-8")
        return tmp_path

    return write
