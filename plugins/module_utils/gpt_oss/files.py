"""Files on the host: staged beside their place, put there in one step. Standard library only, Python 3.8 and later."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from typing import Any


class StagedFile:
    """Content that waits, complete and synced, in the directory it is meant for; `put` renames it into place."""

    def __init__(self, path: str, content: bytes, mode: int, uid: int = -1, gid: int = -1) -> None:
        self.path = path
        descriptor, self._staged = tempfile.mkstemp(
            prefix="." + os.path.basename(path) + ".", dir=os.path.dirname(path)
        )
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
                stream.flush()
                if uid != -1 or gid != -1:
                    os.fchown(stream.fileno(), uid, gid)
                os.fchmod(stream.fileno(), mode)
                os.fsync(stream.fileno())
        except BaseException:
            self.discard()
            raise

    def put(self) -> None:
        os.replace(self._staged, self.path)

    def discard(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._staged)


def write_file(path: str, content: bytes, mode: int = 0o644) -> None:
    """The whole file or, after a failure, the one that was there."""
    staged = StagedFile(path, content, mode)
    try:
        staged.put()
    except BaseException:
        staged.discard()
        raise


def read_file(path: str) -> bytes | None:
    """The content, or None when there is no such file."""
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def kind_of(path: str) -> str:
    """absent, file, directory, link or other; a link is not followed."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "absent"
    if stat.S_ISLNK(mode):
        return "link"
    if stat.S_ISDIR(mode):
        return "directory"
    return "file" if stat.S_ISREG(mode) else "other"


def as_text(content: bytes | None) -> str:
    """Content as a diff shows it."""
    if content is None:
        return ""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return f"({len(content)} bytes that are not text)\n"


def text_diff(path: str, before: bytes | None, after: bytes | None) -> dict[str, Any]:
    return {
        "before_header": path if before is not None else path + " (absent)",
        "after_header": path if after is not None else path + " (absent)",
        "before": as_text(before),
        "after": as_text(after),
    }
