"""Counts how often a run went over to a host: round trips are what a run costs."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import connection_loader

DOCUMENTATION = r"""
name: round_trips
type: aggregate
short_description: Prints the number of remote round trips of each host
description:
  - Counts each command and file transfer that a connection carries to a host, whichever action, loop or retry caused
    it. Local connections are not counted. With pipelining a module is one round trip.
author: gpt-oss on NVIDIA
"""

_COUNTED = ("exec_command", "put_file", "fetch_file")


class CallbackModule(CallbackBase):
    """Every connection that a worker opens is watched; workers report through a file that they inherit."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "round_trips"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._began = time.monotonic()
        self._record = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - lives as long as the run
        watch_connections(self._note)

    def _note(self, host: str) -> None:
        os.write(self._record.fileno(), f"{host}\n".encode())  # appended as a whole, so that workers do not mix

    def v2_playbook_on_stats(self, stats: Any) -> None:
        self._record.seek(0)
        counts = Counter(line.decode() for line in self._record.read().splitlines())
        if not counts:
            return
        self._display.banner("ROUND TRIPS")
        width = max(map(len, counts))
        for host, number in sorted(counts.items()):
            self._display.display(f"{host:<{width}} : {number}")
        seconds = time.monotonic() - self._began
        self._display.display(f"{'in all':<{width}} : {counts.total()} in {seconds:.1f} s")


def watch_connections(note: Callable[[str], None]) -> None:
    """Have `note` called with the host's name for everything that goes over a connection.

    Workers are forked from this process and so inherit the change. Only the public methods of connections are wrapped.
    """
    get = connection_loader.get_with_context

    def watched_get(*arguments: Any, **options: Any) -> Any:
        found = get(*arguments, **options)
        connection = found.object
        if connection is not None and getattr(connection, "transport", "local") != "local":
            for name in _COUNTED:
                setattr(connection, name, _counted(connection, getattr(connection, name), note))
        return found

    connection_loader.get_with_context = watched_get


def _counted(connection: Any, method: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        # A worker is made for one host; a delegated task counts for the host that it is done for.
        host = getattr(multiprocessing.current_process(), "_host", None)
        note(host.get_name() if host is not None else str(connection.get_option("remote_addr")))
        return method(*arguments, **options)

    return call
