"""The programs that Jobs run: the text of real files, the same ones that Ansible's modules use, for a ConfigMap."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = REPOSITORY / "plugins" / "module_utils" / "gpt_oss"

INSTALL = "install_packages.py"
FETCH = "fetch_weights.py"
PROBE = "probe_endpoint.py"
BENCHMARK = "run_benchmark.py"
FETCH_CONSTRAINTS = "fetch_constraints.txt"
BENCHMARK_CONSTRAINTS = "benchmark_constraints.txt"

FILES: Mapping[str, Path] = {
    INSTALL: PROGRAMS / INSTALL,
    FETCH: PROGRAMS / FETCH,
    PROBE: PROGRAMS / PROBE,
    BENCHMARK: PROGRAMS / BENCHMARK,
    FETCH_CONSTRAINTS: REPOSITORY / "roles" / "model_weights" / "files" / "constraints.txt",
    BENCHMARK_CONSTRAINTS: REPOSITORY / "roles" / "benchmark" / "files" / "constraints.txt",
}


@cache
def program_texts() -> Mapping[str, str]:
    """Every file, by the name that it has in the ConfigMap."""
    return {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
