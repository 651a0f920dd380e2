"""`make demo`: a host without anything becomes a served, checked, measured endpoint, in front of one's eyes.

    python -m tests.hosts.demo up       build what is missing, start the host, run site.yml on it, ask it, measure it
    python -m tests.hosts.demo down     remove host, mirror, network, disks, images and results

site.yml runs unchanged, against inventories/demo; what stands in for hardware and engine is around the host, not in it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from openai import OpenAI

from simulator.build import images as engine_images
from simulator.build.machine import BuildError
from simulator.build.registry import Registry

from . import hosts, images, mirror
from .machine import REPOSITORY, HostError, require_tools, say

NAME = "demo"
PORT = 8000
ENGINE = "tensorrt_llm-1.2.1"
QUESTION = "What limits the speed of a large language model on a GPU?"
RESULTS = (REPOSITORY / "results" / NAME, REPOSITORY / "verdicts" / f"{NAME}.json")


class Clock:
    """Says what begins, and at the end how long everything took."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, float]] = []
        self._began = time.monotonic()

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        say(f"\n=== {title}")
        began = time.monotonic()
        yield
        self._steps.append((title, time.monotonic() - began))

    def report(self) -> None:
        for title, seconds in [*self._steps, ("in all", time.monotonic() - self._began)]:
            print(f"  {seconds:7.1f} s  {title}")


def _play(playbook: str) -> None:
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    command = [str(tools / "ansible-playbook"), "-i", "inventories/demo", playbook]
    say(f"$ ansible-playbook {' '.join(command[1:])}")
    if subprocess.run(command, cwd=REPOSITORY, env=environment, check=False).returncode != 0:
        raise HostError(
            f"{playbook} failed; what it said is above.\n"
            f"--- the host's journal\n{hosts.journal(hosts.PREFIX + NAME)}\n"
            f"--- its containers\n{hosts.containers_log(NAME)}\n"
            f"The host is still there: `python -m tests.hosts ssh {NAME}`; `make demo-down` removes it."
        )


def _chat(address: str) -> None:
    client = OpenAI(base_url=f"http://{address}:{PORT}/v1", api_key="none", max_retries=0, timeout=60)
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": QUESTION}], max_completion_tokens=40
    )
    print(f"\nasked {model} at http://{address}:{PORT}/v1: {QUESTION}")
    print(f"answer: {answer.choices[0].message.content}")
    if answer.usage is not None:
        print(f"        {answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out")
    print("        (a simulated engine: real protocol, real command line, no sense in the words)")


def _verdict() -> None:
    path = RESULTS[1]
    verdict = json.loads(path.read_text(encoding="utf-8"))
    counts = {state: sum(check["ok"] is state for check in verdict["checks"]) for state in (True, False, None)}
    print(
        f"\nverdict: {'ok' if verdict['ok'] else 'NOT OK'}; {counts[True]} checks passed, {counts[False]} failed, "
        f"{counts[None]} do not apply; {path.relative_to(REPOSITORY)}"
    )


def up() -> None:
    clock = Clock()
    with clock.step("Tools this machine lacks"):
        require_tools()
    with clock.step("Images: host, mirror, engine"), ThreadPoolExecutor() as pool:
        machines = pool.submit(images.build, "base", "mirror")
        engine = pool.submit(engine_images.images, [ENGINE])
        machines.result()
        made = engine.result()
    with clock.step("Mirror of packages, weights and images"):
        registry = Registry(f"http://{mirror.up()}:{mirror.REGISTRY_PORT}")
        for image in made:
            registry.push(image)
    with clock.step("A host with four H200, recorded; no driver, no Docker"):
        host = hosts.up(NAME)
    with clock.step("site.yml: from nothing to served and checked"):
        _play("site.yml")
    with clock.step("A chat completion, and the verdict"):
        _chat(host.address)
        _verdict()
    with clock.step("A short AIPerf run"):
        _play("playbooks/benchmark.yml")
    print("\nresults:")
    for path in sorted(RESULTS[0].rglob("*")):
        if path.is_file() and path.suffix in (".png", ".svg", ".csv", ".json"):
            print(f"  {path.relative_to(REPOSITORY)}")
    print("\nhow long it took:")
    clock.report()
    print(
        f"\nThe endpoint: http://{host.address}:{PORT}/v1\n"
        f"  curl http://{host.address}:{PORT}/v1/models\n"
        f"  python -m tests.hosts ssh {NAME}\n"
        "  make demo-down"
    )


def down() -> None:
    """Remove the demo; what other test hosts still use stays until they are gone."""
    if shutil.which("podman") is None:
        return  # nothing was ever started here
    hosts.down(NAME)
    others = hosts.names()
    if others:
        say(f"mirror, network and images stay: {', '.join(others)} still use them")
    else:
        hosts.down_all()
        images.remove()
    for path in (*RESULTS, REPOSITORY / "build" / "engine-images"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.demo", description="The demo, up and down.")
    parser.add_argument("action", choices=("up", "down"))
    try:
        {"up": up, "down": down}[parser.parse_args().action]()
    except (HostError, BuildError) as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
