"""The commands as processes of this machine, for tests and for trying things out."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from simulator.build import packages
from simulator.build.images import COMMANDS
from simulator.build.machine import REPOSITORY, BuildError, cached, key_of


def environment(release: str) -> dict[str, str]:
    """What to add to a process's environment so that it finds this release's commands and what they run on."""
    engine, _, version = release.partition("-")
    if engine not in COMMANDS or not version:
        raise BuildError(f"{release!r}: an engine and a release, such as tensorrt_llm-1.2.1 or vllm-0.31.0")
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    path = f"{packages.python_packages(running)}:{REPOSITORY}"
    return {
        "PATH": f"{_scripts(engine, path)}:{os.environ.get('PATH', '')}",
        "SIMULATOR_ENGINE": engine,
        "SIMULATOR_RELEASE": version,
        "PYTHONUNBUFFERED": "1",
    }


def _scripts(engine: str, path: str) -> Path:
    base = Path(sys._base_executable)  # type: ignore[attr-defined]  # a virtual environment's own packages stay out
    scripts = {
        command: f'#!/bin/sh\nPYTHONPATH={path} exec {base} -m {module} "$@"\n'
        for command, module in COMMANDS[engine].items()
    }

    def write(into: Path) -> None:
        for command, text in scripts.items():
            (into / command).write_text(text)
            (into / command).chmod(0o755)

    # Made whole and left alone: another process may be reading them.
    return cached(f"commands-{engine}", key_of(*scripts, *scripts.values()), write)


def execute(release: str, words: Sequence[str]) -> NoReturn:
    """Become the command."""
    if not words:
        raise BuildError(f"name a command: {', '.join(COMMANDS.get(release.partition('-')[0], {'…': ''}))}")
    variables = {**os.environ, **environment(release)}
    try:
        os.execvpe(words[0], list(words), variables)  # noqa: S606 - replaced by the command on purpose
    except FileNotFoundError:
        raise BuildError(f"{words[0]}: no such command") from None
