"""What the program does when it is interrupted after a failure: nothing that buries the diagnosis."""

from __future__ import annotations

import subprocess
import sys

from tests.pulumi.engine import PROGRAM

INTERRUPTED = """
import asyncio, os, signal, sys
sys.path.insert(0, sys.argv[1])
import pulumi
from components import diagnosis

diagnosis.end_quietly_when_interrupted()

pulumi.ErrorHook = lambda name, callback: callback  # as the engine calls it
pulumi.ResourceHookBinding = lambda on_error: on_error[0]

async def main():
    failed = type("Failed", (), {"failed_operation": "create"})
    assert await diagnosis.explained(lambda: "4 GPUs are missing")(failed) is False
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_interrupt_after_a_failure_says_nothing_more() -> None:
    """The language host interrupts a program whose update has failed; Python would print 30 lines of traceback."""
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(PROGRAM)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr == "error: 4 GPUs are missing\n"
    assert ended.stdout == ""
