"""Stands in for NVIDIA's platform chart: packed for Helm or installed without it, the operator beside the cluster.

The chart's values are as strict as what the catalog may say of the real one; its definitions are Dynamo's own. A pod
of KWOK's runs no operator, so `Beside` starts the stand-in one when the operator's Deployment appears, lets the
Deployment become ready only then, and ends it when the Deployment goes: whoever removes the platform before its graphs
waits for ever, as with the real one.
"""

from __future__ import annotations

import io
import json
import tarfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.kubernetes.cluster import installable

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
            add(f"crds/{file.name}", "\n---\n".join(map(json.dumps, installable(file.read_text()))))
    return archive


@contextmanager
def published(archive: Path, overlay: Path) -> Iterator[Path]:
    """A packed chart on loopback, where a catalog with this overlay looks for its releases' charts."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(archive.parent)))
    threading.Thread(target=server.serve_forever, name="charts", daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/{NAME}-{{version}}.tgz"
        overlay.mkdir(exist_ok=True)
        (overlay / "dynamo.yml").write_text(json.dumps({"chart": {"archive": address}}))
        yield overlay
    finally:
        server.shutdown()
        server.server_close()
