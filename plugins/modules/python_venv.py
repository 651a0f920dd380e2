#!/usr/bin/python
"""A virtual environment with pinned packages; a run that finds them asks no index and starts no process."""

from __future__ import annotations

DOCUMENTATION = r"""
module: python_venv
short_description: A virtual environment with packages at pinned versions
description:
  - Reads the versions from the environment's own metadata. When all pins are met nothing else happens.
  - A new environment that could not be filled is removed again.
options:
  path:
    description: The environment's directory.
    type: path
    required: true
  requirements:
    description: Packages as C(name==version).
    type: list
    elements: str
    required: true
  constraints:
    description: Versions of the packages that these bring along, as pip constraints.
    type: list
    elements: str
    default: []
  python:
    description: Interpreter to make the environment with.
    type: path
    default: /usr/bin/python3
  index_url:
    description: Package index to use instead of the one pip knows. Given to pip by environment; it may hold a password.
    type: str
    default: ""
  wheel_directory:
    description: Directory on the host, or address of a page, with the wheels; no index is asked then.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    description: Says what would be installed.
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Install the hub's client
  python_venv:
    path: /opt/gpt-oss/venvs/huggingface_hub
    requirements: [huggingface_hub==2.4.0]
"""

RETURN = r"""
before:
  description: Versions found of the required packages.
  returned: always
  type: dict
after:
  description: Versions there now.
  returned: always
  type: dict
"""

import importlib.metadata
import os
import re
import shutil
import subprocess
from typing import Any

from ansible.module_utils.basic import AnsibleModule


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(requirements: list[str]) -> dict[str, str]:
    """Names and exact versions; anything looser is refused."""
    pins = {}
    for requirement in requirements:
        match = re.match(r"([A-Za-z0-9][\w.-]*)==([\w.!+-]+)\Z", requirement.replace(" ", ""))
        if match is None:
            raise ValueError(f"requirements: {requirement!r} is not a pinned version; allowed: name==version")
        pins[normal(match.group(1))] = match.group(2)
    return pins


def installed(path: str, names: list[str]) -> dict[str, str]:
    """The versions of these packages in the environment, from their metadata."""
    library = os.path.join(path, "lib")
    if not os.path.exists(os.path.join(path, "bin", "python")) or not os.path.isdir(library):
        return {}
    places = [os.path.join(library, entry, "site-packages") for entry in sorted(os.listdir(library))]
    found = {}
    for distribution in importlib.metadata.distributions(path=places):
        name = normal(distribution.metadata["Name"] or "")
        if name in names:
            found[name] = distribution.version
    return found


def without_password(text: str) -> str:
    """Text in which addresses have lost their user and password."""
    return re.sub(r"(https?://)[^/\s@]+@", r"\1", text)


def as_lines(versions: dict[str, str]) -> str:
    """Versions as a diff shows them."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))


def install(params: dict[str, Any]) -> None:
    """Make the environment and fill it; raises RuntimeError with pip's own words."""
    path = params["path"]
    new = not os.path.exists(os.path.join(path, "pyvenv.cfg"))
    environment = dict(os.environ, PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1", LC_ALL="C.UTF-8")
    arguments = ["--progress-bar", "off"]
    if params["wheel_directory"]:
        arguments += ["--no-index", "--find-links", params["wheel_directory"]]
    elif params["index_url"]:
        environment["PIP_INDEX_URL"] = params["index_url"]
    constraints = path.rstrip("/") + ".constraints.txt"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        if new:
            call([params["python"], "-m", "venv", "--clear", path], environment)
        with open(constraints, "w", encoding="utf-8") as handle:
            handle.write("".join(line + "\n" for line in params["constraints"]))
        pip = [os.path.join(path, "bin", "python"), "-m", "pip", "install"]
        call([*pip, *arguments, "--constraint", constraints, *params["requirements"]], environment)
    except BaseException:
        if new:
            shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        if os.path.exists(constraints):
            os.unlink(constraints)


def call(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        words = without_password(done.stdout)
        if "ensurepip is not available" in words:
            raise RuntimeError(f"{command[0]} cannot make virtual environments; install the package python3-venv")
        tail = " | ".join(line.strip() for line in words.strip().splitlines()[-6:])
        raise RuntimeError(f"{' '.join(command[1:4])} failed with status {done.returncode}: {tail}")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "requirements": {"type": "list", "elements": "str", "required": True},
            "constraints": {"type": "list", "elements": "str", "default": []},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "index_url": {"type": "str", "default": ""},
            "wheel_directory": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    os.umask(0o022)
    shown = without_password(module.params["index_url"])
    try:
        pins = parse(module.params["requirements"])
        before = installed(module.params["path"], list(pins))
        result: dict[str, Any] = {"changed": before != pins, "before": before, "after": pins}
        if module._diff and result["changed"]:
            result["diff"] = {"before": as_lines(before), "after": as_lines(pins)}
        if result["changed"] and not module.check_mode:
            install(module.params)
            result["after"] = installed(module.params["path"], list(pins))
            if result["after"] != pins:
                raise RuntimeError(f"after the installation there is {result['after']}, not {pins}")
    except (ValueError, RuntimeError, OSError) as error:
        module.params["index_url"] = shown
        module.fail_json(msg=f"{module.params['path']}: {error}")
    module.params["index_url"] = shown
    module.exit_json(**result)


if __name__ == "__main__":
    main()
