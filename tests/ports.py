"""Ports for the servers that tests start.

They lie below those that the kernel hands out, and each of the processes that share the tests has its own: what was
free is still free when the server binds it, seconds later.
"""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator

LOWEST = 15000
EACH = 2000  # ports of one process; eight have room below 32768


def _of_this_process() -> Iterator[int]:
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    first = LOWEST + EACH * number
    begin = random.randrange(EACH)  # another session on this machine begins elsewhere
    return itertools.cycle([*range(first + begin, first + EACH), *range(first, first + begin)])


_ports = _of_this_process()


def free_port() -> int:
    """One that nobody listens at; not the same one twice in a while."""
    for port in itertools.islice(_ports, EACH):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of {EACH} ports is free")
