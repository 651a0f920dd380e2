"""`mpirun`: the few options of Open MPI 4 that serving commands use, and its words when something is wrong.

One process is started, as `-n 1` asks. A signal reaches it as Open MPI sends it: SIGTERM, then SIGKILL when a second
has passed; so an engine started this way does not finish its requests.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from types import FrameType

GRACE_SECONDS = 1  # odls_base_sigkill_timeout
RULE = "-" * 74


def main() -> None:
    words = sys.argv[1:]
    ranks, as_root = 1, False
    while words and words[0].startswith("-"):
        word = words.pop(0)
        match word:
            case "-n" | "-np" | "--n" | "--np":
                ranks = _number(word, words)
            case "--oversubscribe" | "-oversubscribe":
                pass
            case "--allow-run-as-root" | "-allow-run-as-root":
                as_root = True
            case _:
                _stop(f"mpirun: Error: unknown option \"{word}\"\nType 'mpirun --help' for usage.")
    if os.geteuid() == 0 and not as_root:
        _stop(
            f"{RULE}\nmpirun has detected an attempt to run as root.\n\nRunning as root is *strongly* discouraged. "
            f"You can override this protection by adding the --allow-run-as-root\noption to the cmd line.\n{RULE}"
        )
    if not words:
        _stop(f"{RULE}\nmpirun could not find anything to do.\n{RULE}")
    if ranks != 1:
        _stop(f"mpirun: the stand-in starts one process, not {ranks}: engines spawn their own ranks")
    if shutil.which(words[0]) is None:
        _stop(
            f"{RULE}\nmpirun was unable to find the specified executable file, and therefore\n"
            f"did not launch the job.\n\nExecutable: {words[0]}\n{RULE}"
        )
    sys.exit(_run(words))


def _run(words: list[str]) -> int:
    child = subprocess.Popen(words)
    received: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        child.send_signal(signal.SIGTERM)
        signal.alarm(GRACE_SECONDS)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    signal.signal(signal.SIGALRM, lambda *_: child.kill())
    status = child.wait()
    if received:
        return 128 + received[0]
    if status:
        code = status if status > 0 else 128 - status
        print(
            f"{RULE}\nPrimary job  terminated normally, but 1 process returned\na non-zero exit code. "
            f"Per user-direction, the job has been aborted.\n{RULE}\n{RULE}\n"
            f"mpirun detected that one or more processes exited with non-zero status, thus causing\n"
            f"the job to be terminated. The first process to do so was:\n\n  Exit code:    {code}\n{RULE}",
            file=sys.stderr,
        )
        return code
    return 0


def _number(word: str, words: list[str]) -> int:
    if not words or not words[0].isdigit():
        _stop(f"mpirun: Error: option \"{word}\" did not have enough parameters (1)\nType 'mpirun --help' for usage.")
    return int(words.pop(0))


def _stop(message: str) -> None:
    print(message, file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
