"""QEMU's own control channel: commands and the events that answer them (QMP, JSON lines on a socket)."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MonitorError(Exception):
    """QEMU refused a command, or an event did not come."""


class Monitor:
    """One connection to one QEMU."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(seconds)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("r", encoding="utf-8")
        self._events: list[dict[str, Any]] = []
        self._read()  # the greeting
        self.ask("qmp_capabilities")

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def _read(self) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise MonitorError("QEMU did not answer in time") from None
        if not line:
            raise MonitorError("QEMU has ended")
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(self, command: str, arguments: Mapping[str, object] | None = None) -> Any:
        """Run a command; what it returns."""
        message = {"execute": command, "arguments": dict(arguments or {})}
        self._socket.sendall(json.dumps(message).encode() + b"\n")
        while True:
            answer = self._read()
            if "event" in answer:
                self._events.append(answer)
            elif "error" in answer:
                raise MonitorError(f"{command} {message['arguments']}: {answer['error']['desc']}")
            else:
                return answer["return"]

    def wait(self, event: str, **data: object) -> None:
        """Until QEMU tells of an event with these data, at most as long as the connection waits for an answer."""

        def is_it(told: dict[str, Any]) -> bool:
            return bool(told["event"] == event and data.items() <= told.get("data", {}).items())

        while not any(is_it(told) for told in self._events):
            told = self._read()
            if "event" in told:
                self._events.append(told)
        self._events = [told for told in self._events if not is_it(told)]
