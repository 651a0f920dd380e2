"""Programs that go on when a module has ended: put on the host, known by a lock, followed by a file and a log.

Standard library only, Python 3.8 and later.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pkgutil
from pathlib import Path
from typing import Any

from ansible.module_utils.gpt_oss import fetch_weights as weights


def install(name: str, directory: str) -> Path:
    """Put a program on the host; it is the other half of the module that calls."""
    content = pkgutil.get_data("ansible.module_utils.gpt_oss", name)
    assert content is not None
    path = Path(directory) / name
    if not path.exists() or path.read_bytes() != content:
        weights.write_atomically(path, content.decode("utf-8"))
        path.chmod(0o755)
    return path


def locked(path: Path) -> int | None:
    """The lock's descriptor, or nothing while somebody holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(str(path), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        raise
    return handle


def read_state(path: Path) -> dict[str, Any]:
    """What the program says of itself; empty until it has said something."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def last_lines(log: Path) -> str:
    """The end of a log in one line; empty where the log is."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(lines[-5:])
