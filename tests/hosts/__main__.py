"""Command line of the test hosts; `python -m tests.hosts --help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict

from tests.stand_ins.hardware import ProfileError
from tests.stand_ins.packages.deb import BuildError

from . import hosts, images, mirror
from .machine import HostError, limits, require_tools, say


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m tests.hosts", description="Systemd hosts in containers, for tests.")
    commands = root.add_subparsers(dest="command", required=True)
    commands.add_parser("tools", help="install what the machine lacks, or say the one line that does")
    build = commands.add_parser("build", help="make the images that are missing or out of date")
    build.add_argument("variant", nargs="*", choices=[*images.EXTRA_PACKAGES, []], default=[])
    up = commands.add_parser("up", help="start a host; a running one is left as it is")
    up.add_argument("name")
    up.add_argument("--image", default="base", choices=[name for name in images.EXTRA_PACKAGES if name != "mirror"])
    up.add_argument("--hardware", default="h200_x4", help="a profile of tests/stand_ins/hardware/profiles, or none")
    commands.add_parser("mirror", help="start the machine that serves packages, weights and images")
    for name, text in (
        ("restart", "reboot a host"),
        ("logs", "the journal of a host and the logs of its containers"),
        ("show", "a host's address, key and limits as JSON"),
    ):
        commands.add_parser(name, help=text).add_argument("name")
    ssh = commands.add_parser("ssh", help="log in, or run one command")
    ssh.add_argument("name")
    ssh.add_argument("words", nargs=argparse.REMAINDER)
    down = commands.add_parser("down", help="remove a host with its disks")
    down.add_argument("name", nargs="?")
    down.add_argument("--all", action="store_true", help="every host, the mirror and the network")
    down.add_argument("--images", action="store_true", help="with --all: the images as well")
    commands.add_parser("list", help="the hosts there are")
    commands.add_parser("limits", help="ceilings for docker run --ulimit inside the hosts, as JSON")
    return root


def main() -> int:
    arguments = parser().parse_args()
    started = time.monotonic()
    try:
        match arguments.command:
            case "tools":
                require_tools()
            case "build":
                images.build(*arguments.variant)
            case "up":
                hardware = None if arguments.hardware == "none" else arguments.hardware
                host = hosts.up(arguments.name, image=arguments.image, hardware=hardware)
                say(f"{host.name}: {host.address}, {time.monotonic() - started:.1f} s")
            case "mirror":
                print(mirror.up())
            case "restart":
                hosts.restart(arguments.name)
                say(f"{arguments.name}: up again after {time.monotonic() - started:.1f} s")
            case "logs":
                print(hosts.journal(hosts.PREFIX + arguments.name, 300))
                print(hosts.containers_log(arguments.name, 300))
            case "show":
                print(json.dumps(asdict(hosts.get(arguments.name)), indent=2))
            case "ssh":
                command = hosts.ssh_command(arguments.name, *arguments.words)
                os.execvp(command[0], command)
            case "down" if arguments.all:
                hosts.down_all()
                if arguments.images:
                    images.remove()
            case "down" if arguments.name:
                hosts.down(arguments.name)
            case "down":
                raise HostError("down: name a host, or --all")
            case "list":
                for name in hosts.names():
                    host = hosts.get(name)
                    print(f"{name:24} {host.address:16} {host.image:8} {host.hardware or '-'}")
            case "limits":
                print(json.dumps(limits()))
    except (HostError, ProfileError, BuildError) as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
