#!/usr/bin/python3
"""What systemd asks about an engine process.

    process.py check NAME   before a start: are weights and GPUs there? Their revision becomes the current one, and a
                            container that was left behind is removed
    process.py watch NAME   at intervals: does the server still answer? Restarts it after several failures in a row

Standard library only, Python 3.8 and later.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

CONFIGURATION = Path(os.environ.get("GPT_OSS_CONFIGURATION", "/etc/gpt-oss"))
STATE = Path(os.environ.get("GPT_OSS_STATE", "/run/gpt-oss"))
# What the server sends for our own questions in one interval is far below this, what it sends to users far above.
OWN_TRAFFIC_BYTES = 16384


def output(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    return done.returncode, done.stdout.decode("utf-8", "replace").strip()


# -- before a start ----------------------------------------------------------------------------------------------


def weights_problem(process: dict[str, Any]) -> str:
    """Names, sizes and times against the marker; no weights are read."""
    try:
        files: list[dict[str, Any]] = json.loads(Path(process["marker"]).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        return f"weights are missing: {process['marker']} is not there. Run playbooks/weights.yml"
    for entry in files:
        path = Path(process["snapshot"]) / entry["path"]
        try:
            found = path.stat()
        except OSError:
            return f"weights are missing: {path}. Run playbooks/weights.yml"
        if found.st_size != entry["size"]:
            sizes = f"{found.st_size} bytes, {entry['size']} were verified"
            return f"weights of {path} are cut: {sizes}. Run playbooks/weights.yml"
        if found.st_mtime_ns != entry["mtime_ns"]:
            return f"weights of {path} have changed since they were verified. Run playbooks/weights.yml"
    return ""


def revision_problem(process: dict[str, Any]) -> str:
    """Lets the model's name lead to the revision that this process was planned with; others may lie beside it."""
    snapshot = Path(process["snapshot"])
    current = snapshot.parent.parent / "refs" / "main"
    staged = current.with_name(f".main.{os.getpid()}")
    try:
        if current.is_file() and current.read_text(encoding="utf-8") == snapshot.name:
            return ""
        current.parent.mkdir(exist_ok=True)
        staged.write_text(snapshot.name, encoding="utf-8")
        staged.replace(current)
    except OSError as error:
        return f"{current} must name {snapshot.name}, and cannot be written: {error.strerror}"
    return ""


def gpus_problem(process: dict[str, Any]) -> str:
    if process["gpu_access"] != "cdi":
        return ""
    _, listed = output("nvidia-ctk", "cdi", "list")
    missing = [gpu for gpu in process["gpus"] if not re.search(rf"^nvidia\.com/gpu={gpu}$", listed, flags=re.MULTILINE)]
    if not missing:
        return ""
    return (
        f"no CDI specification of GPU {', '.join(map(str, missing))}: try "
        "systemctl restart nvidia-cdi-refresh.service, then nvidia-ctk cdi list"
    )


def check(process: dict[str, Any]) -> int:
    for problem in (weights_problem(process), revision_problem(process), gpus_problem(process)):
        if problem:
            print(problem, file=sys.stderr)
            return 1
    # Left behind when the client that ran it was killed, or Docker was restarted beneath it.
    status, said = output("docker", "rm", "--force", process["container"])
    if status != 0 and "No such container" not in said:
        print(f"docker rm --force {process['container']}: {said}", file=sys.stderr)
        return 1
    return 0


# -- while it serves ---------------------------------------------------------------------------------------------


def ask(process: dict[str, Any], method: str, path: str, timeout: float, body: bytes | None = None) -> int:
    """The status of the answer, once all of it has come."""
    connection = http.client.HTTPConnection(process["address"], process["port"], timeout=timeout)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def healthy(process: dict[str, Any]) -> bool:
    try:
        return ask(process, "GET", process["health_path"], timeout=10) == 200
    except (OSError, http.client.HTTPException):
        return False


def one_token(process: dict[str, Any]) -> str:
    """Empty when the server made a token (or refused in good order), "slow" when time ran out, else what is wrong."""
    question = json.dumps({"model": process["model"], "prompt": "1", "max_tokens": 1}).encode()
    try:
        status = ask(process, "POST", "/v1/completions", process["watchdog"]["timeout_seconds"], question)
    except TimeoutError:
        return "slow"
    except (OSError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    # A server that rejects the question is alive; one that answers 5xx, or no longer knows its model, is not serving.
    return f"HTTP {status}" if status >= 500 or status == 404 else ""


def sent_bytes(process: dict[str, Any]) -> int:
    """What the container has sent over its network so far."""
    status, pid = output("docker", "inspect", "--format", "{{.State.Pid}}", process["container"])
    if status != 0:
        return 0
    try:
        lines = Path(f"/proc/{pid}/net/dev").read_text(encoding="ascii").splitlines()[2:]
    except OSError:
        return 0
    pairs = (line.partition(":") for line in lines)
    return sum(int(numbers.split()[8]) for name, _, numbers in pairs if name.strip() != "lo")


def judge(state: dict[str, Any], problem: str, sent: int) -> str:
    """Takes one answer into the state; says in a word what it means: well, busy or failed."""
    before, state["sent"] = state.get("sent", 0), sent
    if problem == "slow" and sent - before > OWN_TRAFFIC_BYTES:
        problem = "busy"  # it had no time for us, but it had for others
    state["failures"] = 0 if problem in ("", "busy") else state.get("failures", 0) + 1
    return problem if problem == "busy" else "failed" if problem else "well"


def watch(name: str, process: dict[str, Any]) -> int:
    _, shown = output("systemctl", "show", "--property", "ActiveState,InvocationID", process["unit"])
    properties = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    if properties.get("ActiveState") != "active":
        return 0  # stopped by somebody, or systemd is at it already
    path = STATE / f"watchdog-{name}.json"
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        state = {}
    if state.get("invocation") != properties.get("InvocationID"):
        state = {"invocation": properties.get("InvocationID"), "ready": False, "failures": 0}
    status = 0
    if not state["ready"]:
        # Never restart what is still loading: until it was ready once, it has not failed.
        state["ready"] = healthy(process)
        state["sent"] = sent_bytes(process)
        print("ready" if state["ready"] else "still loading")
    else:
        problem = one_token(process)
        meaning = judge(state, problem, sent_bytes(process))
        limit = process["watchdog"]["failures"]
        if meaning != "well":
            print(f"{meaning}: {problem}; {state['failures']} of {limit} failures in a row")
        if state["failures"] >= limit:
            print(f"restarting {process['unit']}: it runs, but made no token {limit} times in a row ({problem})")
            status, said = output("systemctl", "restart", "--no-block", process["unit"])
            if said:
                print(said)
            state = {}
    STATE.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps(state), encoding="utf-8")
    staged.replace(path)
    return status


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in ("check", "watch"):
        print(__doc__, file=sys.stderr)
        return 2
    what, name = arguments
    described = CONFIGURATION / "processes" / name / "process.json"
    process: dict[str, Any] = json.loads(described.read_text(encoding="utf-8"))
    return check(process) if what == "check" else watch(name, process)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
