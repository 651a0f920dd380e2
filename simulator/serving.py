"""Load, then serve, then leave: one stand-in engine from its command line to its exit status."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

from simulator import loading
from simulator.dynamo import Dynamo
from simulator.engine import Engine
from simulator.front import Front
from simulator.settings import SettingError, Settings, read_settings


def run(engine: Engine) -> int:
    """Returns the exit status; ends by the signal it got where the engine does so."""
    try:
        settings = read_settings()
    except SettingError as error:
        print(error, file=sys.stderr)
        return 2
    if engine.kind == "tensorrt_llm":
        # A signal while loading ends the process at once; MPI takes the ranks with it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    listener = loading.bind(engine)
    files = loading.prepare(engine)
    dynamo = Dynamo(engine, engine.model, settings)
    try:
        loading.load(engine, files, settings, dynamo.require_running)
        encodings = loading.encodings_present()
        if engine.kind == "vllm" and not encodings:
            raise loading.HarmonyError(loading.HARMONY_ERROR)  # vLLM reads them at its start
        dynamo.wait_ready(engine.served_names[0])
        received = asyncio.run(_serve(engine, dynamo, settings, encodings, listener))
    finally:
        dynamo.stop()
    if received is not None and engine.kind == "tensorrt_llm":
        # uvicorn finishes its work, puts the default handler back and raises the signal again.
        signal.signal(received, signal.SIG_DFL)
        sys.stdout.flush()
        os.kill(os.getpid(), received)
    return 0


async def _serve(
    engine: Engine, dynamo: Dynamo, settings: Settings, encodings: bool, listener: socket.socket
) -> signal.Signals | None:
    return await Front(engine, dynamo, settings, encodings).serve(listener)
