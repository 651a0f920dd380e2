"""Stands in for NVIDIA's platform chart: packed for Helm or installed without it, the operator beside the cluster.

The chart's values are as strict as what the catalog may say of the real one; its definitions are Dynamo's own. A pod
of KWOK's runs no operator, so `Beside` starts the stand-in one when the operator's Deployment appears, lets the
Deployment become ready only then, and ends it when the Deployment goes: whoever removes the platform before its graphs
waits for ever, as with the real one.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

CHART = Path(__file__).parent / "chart"
NAME = "dynamo-platform"


def pack(version: str, definitions: Iterable[Path], directory: Path) -> Path:
    """The chart as a .tgz of this version, with these files of CustomResourceDefinitions."""
    archive = directory / f"{NAME}-{version}.tgz"
    with tarfile.open(archive, "w:gz") as packed:

        def add(path: str, text: str) -> None:
            content = text.encode()
            entry = tarfile.TarInfo(f"{NAME}/{path}")
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))

        for file in sorted(CHART.rglob("*")):
            if file.is_file():
                text = file.read_text()
                if file.name == "Chart.yaml":
                    text = text.replace("version: 0.0.0", f"version: {version}\nappVersion: {version}", 1)
                add(str(file.relative_to(CHART)), text)
        for file in definitions:
            add(f"crds/{file.name}", file.read_text())
    return archive
