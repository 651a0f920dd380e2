"""Where a host's files are and how its tools are asked."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

_SYSTEM_PATHS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


class Answer:
    """What a command said. `rc` is None when it could not be run or did not end in time."""

    def __init__(self, rc: int | None, out: str, err: str) -> None:
        self.rc = rc
        self.out = out
        self.err = err

    @property
    def complaint(self) -> str:
        """The first line that says what went wrong."""
        for text in (self.err, self.out):
            for line in text.splitlines():
                if line.strip():
                    return line.strip()
        return f"no output, exit status {self.rc}"


class Host:
    """A host seen through the roots of its file systems, so that a recorded one can be read like a real one.

    Tools are looked up in `tool_paths` and, for a real root, on PATH: a recorded tree never gets the answers of the
    machine that reads it.
    """

    def __init__(
        self,
        procfs: str = "/proc",
        sysfs: str = "/sys",
        rootfs: str = "/",
        tool_paths: list[str] | tuple[str, ...] = (),
    ) -> None:
        self.procfs = procfs
        self.sysfs = sysfs
        self.rootfs = rootfs
        searched = list(tool_paths)
        if rootfs == "/":
            searched += [path for path in os.environ.get("PATH", "").split(":") if path]
            searched += [path for path in _SYSTEM_PATHS if path not in searched]
        self._search = ":".join(searched)
        self._asked: dict[tuple[str, ...], Answer | None] = {}

    def proc(self, *parts: str) -> str:
        return os.path.join(self.procfs, *parts)

    def live(self, *parts: str) -> str:
        """A file of the host as it runs: its processes, sockets and mounts.

        A recorded tree of hardware has none. On the host itself they are read from /proc then.
        """
        recorded = self.proc(*parts)
        if self.rootfs != "/" or os.path.exists(recorded):
            return recorded
        return os.path.join("/proc", *parts)

    def processes(self) -> list[str]:
        """The ids of the processes that run."""
        recorded = [name for name in names(self.procfs) if name.isdigit()]
        if recorded or self.rootfs != "/":
            return recorded
        return [name for name in names("/proc") if name.isdigit()]

    def sys(self, *parts: str) -> str:
        return os.path.join(self.sysfs, *parts)

    def root(self, path: str) -> str:
        """A path of the host, as this process reaches it."""
        return path if self.rootfs == "/" else os.path.join(self.rootfs, path.lstrip("/"))

    def release(self) -> str:
        """The running kernel's release."""
        return first_line(self.live("sys", "kernel", "osrelease")) or os.uname().release

    def tool(self, name: str) -> str | None:
        return shutil.which(name, path=self._search) if self._search else None

    def ask(self, *argv: str, timeout: float = 30) -> Answer | None:
        """The answer of a tool, asked once; None where the host does not have it."""
        if argv not in self._asked:
            self._asked[argv] = self._run(argv, timeout)
        return self._asked[argv]

    def _run(self, argv: tuple[str, ...], timeout: float) -> Answer | None:
        path = self.tool(argv[0])
        if path is None:
            return None
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}
        environment["LC_ALL"] = "C"
        environment["PATH"] = ":".join([self._search, os.environ.get("PATH", ""), *_SYSTEM_PATHS])  # for scripts
        try:
            done = subprocess.run(
                [path] + list(argv[1:]),  # noqa: RUF005 - read by Python 3.8 too, and plain
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=environment,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Answer(None, "", "{} did not answer within {:g} s".format(" ".join(argv), timeout))
        except OSError as error:
            return Answer(None, "", f"{path}: {error}")
        return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def read(path: str) -> str | None:
    """A file's text, or None where there is none to read."""
    data = read_bytes(path)
    return None if data is None else data.decode("utf-8", "replace")


def read_bytes(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def first_line(path: str) -> str | None:
    text = read(path)
    if text is None:
        return None
    return text.splitlines()[0].strip() if text.strip() else ""


def names(directory: str) -> list[str]:
    """The sorted names in a directory; none where there is no directory."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def key_values(text: str, separator: str = "=") -> dict[str, str]:
    """`KEY=value` lines, without the quotes."""
    found = {}
    for line in text.splitlines():
        key, mark, value = line.partition(separator)
        if mark and not key.lstrip().startswith("#"):
            found[key.strip()] = value.strip().strip("\"'")
    return found


def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparing: 580.159.04 -> (580, 159, 4)."""
    return tuple(int(number) for number in re.findall(r"\d+", version))
