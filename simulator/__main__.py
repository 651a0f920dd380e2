"""Command line of the stand-in engine; `python -m simulator --help`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from simulator.build import images, local, registry
from simulator.build.machine import REPOSITORY, BuildError, say


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m simulator", description="Images of the stand-in engine.")
    commands = root.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="make the images, and an archive of them for `docker load`")
    build.add_argument("--output", type=Path, default=REPOSITORY / "build" / "engine-images", metavar="DIR")
    push = commands.add_parser("push", help="put the images into a registry, made first where they are missing")
    push.add_argument("registry", help="such as http://10.89.77.2:5000")
    for command in (build, push):
        command.add_argument(
            "--release", action="append", default=[], help="only this one, such as tensorrt_llm-1.2.1; may be repeated"
        )
    layers = commands.add_parser("layers", help="the packed layers of one image, to be unpacked one over the other")
    layers.add_argument("release", help="such as tensorrt_llm-1.2.1")
    run = commands.add_parser("run", help="run one of the commands as a process of this machine")
    run.add_argument("release", help="such as tensorrt_llm-1.2.1 or vllm-0.31.0")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND …")
    return root


def main() -> int:
    arguments = parser().parse_args()
    started = time.monotonic()
    try:
        if arguments.command == "run":
            local.execute(arguments.release, arguments.words)
        if arguments.command == "layers":
            (image,) = images.images([arguments.release])
            print("\n".join(str(layer.packed) for layer in image.layers))
            return 0
        made = images.images(arguments.release)
        if arguments.command == "build":
            archive = arguments.output / "engine-images.tar"
            images.save(made, archive)
            listing = {
                "archive": str(archive),
                "archive_bytes": archive.stat().st_size,
                "images": [
                    {
                        "reference": image.reference,
                        "engine": image.engine,
                        "release": image.release,
                        "id": f"sha256:{image.id}",
                        "size_bytes": image.size,
                    }
                    for image in made
                ],
            }
            (arguments.output / "images.json").write_text(json.dumps(listing, indent=2) + "\n")
            print(json.dumps(listing, indent=2))
        else:
            target = registry.Registry(arguments.registry)
            for image in made:
                repository, tag = registry.repository_of(image.reference)
                print(f"{target.host}:{target.port}/{repository}:{tag} {target.push(image)}")
    except BuildError as error:
        say(f"error: {error}")
        return 1
    say(f"{time.monotonic() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
