"""Files of the project that are no module of a package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def load(path: str) -> ModuleType:
    """The file at `path` below the project, loaded anew."""
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}_under_test", ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module there
    spec.loader.exec_module(module)
    return module
