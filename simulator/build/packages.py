"""The Python packages that the stand-in engine runs on, without what it never imports."""

from __future__ import annotations

import inspect
import shutil
import sys
from pathlib import Path

from simulator.build import machine
from simulator.build.machine import BuildError, cached, key_of, run

REQUIREMENTS = Path(__file__).parents[1] / "requirements.txt"
GLIBC_MINOR = 36  # of Debian 12: wheels for a newer C library do not run in the image
KEPT_MODELS = ("auto", "gpt_oss")  # of the several hundred that transformers knows
NEEDLESS_SUFFIXES = (".pyi", ".pyx", ".pxd", ".a", ".c", ".h", ".cpp", ".hpp")


def python_packages(version: str) -> Path:
    """The directory of packages for this version of Python, such as 3.11."""
    made_of = [inspect.getsource(sys.modules[__name__]), REQUIREMENTS.read_text(), version, machine.machine()]
    return cached(f"packages-{version}", key_of(*made_of), lambda into: _install(into, version))


def _install(into: Path, version: str) -> None:
    machine.say(f"installing the stand-in engine's Python packages (Python {version})")
    name = machine.machine()
    platforms = [f"manylinux_2_{minor}_{name}" for minor in range(GLIBC_MINOR, 4, -1)]
    platforms += [f"manylinux2014_{name}", "any"]
    run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary=:all:"),
            *("--implementation", "cp", "--python-version", version, "--disable-pip-version-check"),
            *(f"--platform={name}" for name in platforms),
            *("--target", into, "--requirement", REQUIREMENTS),
        ],
        PIP_ROOT_USER_ACTION="ignore",
    )
    _prune(into)


def _prune(tree: Path) -> None:
    models = tree / "transformers" / "models"
    if not all((models / name).is_dir() for name in KEPT_MODELS):
        raise BuildError(f"{models}: not the layout this was written for; look at KEPT_MODELS in {__file__}")
    for directory in models.iterdir():
        if directory.is_dir() and directory.name not in KEPT_MODELS:
            shutil.rmtree(directory)
    for directory in [path for path in tree.rglob("tests") if path.is_dir()]:
        shutil.rmtree(directory, ignore_errors=True)  # one may lie in another
    shutil.rmtree(tree / "bin", ignore_errors=True)
    for information in tree.glob("*.dist-info"):
        for path in information.iterdir():  # importlib.metadata reads these two; the rest is licences and bills
            if path.is_dir() and path.name == "sboms":
                shutil.rmtree(path)
    for path in tree.rglob("*"):
        if path.suffix in NEEDLESS_SUFFIXES and path.is_file():
            path.unlink()
