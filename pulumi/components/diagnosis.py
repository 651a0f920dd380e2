"""Why a wait ran out: asked of the cluster by the program itself, since the graph's own status never says."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable

import pulumi

WITHIN_SECONDS = 60


def explained(explain: Callable[[], str]) -> pulumi.ResourceHookBinding:
    """A binding for resources that are waited for: when one fails, `explain()` is printed with the engine's error.

    The engine calls an error hook in the program's process before it gives up. Afterwards is too late: it interrupts
    the program.
    """

    async def on_error(args: pulumi.ErrorHookArgs) -> bool:
        if args.failed_operation in ("create", "update"):
            try:
                text = await asyncio.wait_for(asyncio.to_thread(explain), WITHIN_SECONDS)
            except Exception as error:  # the engine's own error must not be lost to a diagnosis that fails
                text = f"The namespace could not be diagnosed: {error or type(error).__name__}"
            pulumi.log.error(text)
        return False

    return pulumi.ResourceHookBinding(on_error=[pulumi.ErrorHook("diagnosis", on_error)])


def end_quietly_when_interrupted() -> None:
    """The host interrupts a program whose update has failed; Python's traceback of that would bury why it failed."""
    if threading.current_thread() is threading.main_thread():  # elsewhere (tests) nobody interrupts
        signal.signal(signal.SIGINT, lambda *_: os._exit(1))
