"""Roles' inputs, judged before any host is asked.

    input_problems({"nvidia_driver_version": "565.57.01", ...}, types, plan, load_catalog(), exists, hosts)

A role refuses the same things, but its turn comes when other roles have changed the host already. Values arrive as the
inventory gives them, their types checked. What only the host can tell (its distribution, its packages) is preflight's.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from serving_catalog.checks.judging import Plan, branch_of, numbers
from serving_catalog.checks.models import Check
from serving_catalog.checks.preflight import PreflightSettings, driver_branch, driver_modules
from serving_catalog.loading import Catalog

Inputs = Mapping[str, Any]

# What a name says about its value, and how to say what is expected; an empty text stands for the input's own default.
_FORMS: tuple[tuple[str, str, str], ...] = (
    (r"_sha256$", r"[0-9a-fA-F]{64}", "64 hexadecimal digits"),
    (r"_fingerprints$", r"[0-9a-fA-F]{40}", "40 hexadecimal digits, without spaces"),
    (
        r"^(?!model_weights_url$).*_(url|endpoint)$",
        r"(https?|file)://\S+",
        "an address that begins with http://, https:// or file://",
    ),
    (
        r"^model_weights_url$",
        r"https?://[^/\s@?#]+(/[^\s?#]*)?",
        "the http or https address of a directory, without credentials or a query",
    ),
    (r"^model_cache_drives$", r"none|auto|/dev/disk/by-id/[^/\s]+", "none, auto, or a list of /dev/disk/by-id/ names"),
    (r"^model_cache_mode$", r"0?[0-7]{3}", "an octal mode, such as '0755'"),
    (r"^model_weights_(huggingface_hub|libtorrent)_version$", r"\d+(\.\d+)+", "an exact version, such as 1.2.3"),
    (r"^docker_engine_version$", r"\d+\.\d+\.\d+", "an exact version, such as {docker}"),
    (r"^nvidia_container_toolkit_version$", r"\d+\.\d+\.\d+-\d+", "an exact version, such as {toolkit}"),
    (r"^nvidia_(driver|fabric)_version$", r"\d{3}\.\d+(\.\d+)?", "an exact version, such as {driver}"),
    (r"^cuda_toolkit_version$", r"\d+\.\d+", "a release without its patch level, such as {cuda}"),
    (r"^serving_serial$", r"[1-9]\d*|(100|[1-9]\d?)%", "a number such as 3, or a share such as 25%"),
)
# Paths that may be the controller's, by the input that says where they are.
_WHERE = {
    "inference_server_image_archive": "inference_server_image_archive_on",
    "model_weights_path": "model_weights_path_on",
    "model_weights_manifest": "model_weights_path_on",
}


def input_problems(
    given: Inputs,
    types: Mapping[str, str],
    plan: Plan | None,
    catalog: Catalog,
    exists: Callable[[str], bool],
    hosts: Collection[str],
) -> list[str]:
    """One sentence for everything that is wrong with what an inventory gives to the roles.

    `types` says of each role's input what it is, `exists` whether a path is on the controller, `hosts` are the
    inventory's. `plan` is None where the request could not be planned.
    """
    problems = [
        problem
        for name, value in sorted(given.items())
        if value is not None
        for problem in (*_form(name, value, catalog), *_range(name, value, types.get(name)), *_path(name, given, types))
    ]
    if not problems:  # what follows reads versions, and would repeat what is wrong with them
        problems += [*_driver(given, plan, catalog), *_versions(given, catalog), *_together(given, exists)]
        problems += _peers(given, hosts)
    return problems


# --- each value by itself --------------------------------------------------------------------------------------------


def _form(name: str, value: Any, catalog: Catalog) -> Iterator[str]:
    items = value if isinstance(value, list) else [value]
    releases = catalog.releases
    examples = {
        "driver": releases.nvidia_driver.version,
        "cuda": releases.cuda_toolkit.version,
        "toolkit": releases.nvidia_container_toolkit.version,
        "docker": releases.docker.version,
    }
    for names, form, expected in _FORMS:
        if re.search(names, name):
            for item in items:
                if item != "" and not re.fullmatch(form, str(item)):
                    yield f"{name}: {_shown(item)} is not allowed; expected {expected.format(**examples)}"
    if name == "nvidia_fabric_imex_nodes":
        yield from (f"{name}: {item!r} is not an IP address" for item in items if not _is_address(item))


def _range(name: str, value: Any, kind: str | None) -> Iterator[str]:
    """No number that a role takes (seconds, bytes, counts) is negative."""
    if name == "preflight_ports":
        yield from (
            f"{name}: {port} is not a port; allowed: 1 to 65535" for port in value if not 1 <= int(port) <= 65535
        )
    elif kind in ("int", "float") and float(value) < 0:
        yield f"{name}: {value} is not allowed; expected 0 or more"


def _path(name: str, given: Inputs, types: Mapping[str, str]) -> Iterator[str]:
    """A path on a host is absolute."""
    path = str(given[name])
    if types.get(name) == "path" and path and not path.startswith("/") and not _on_controller(name, given):
        yield f"{name}: {path!r} is not an absolute path; expected one on the host, such as '/srv/{path}'"


def _on_controller(name: str, given: Inputs) -> bool:
    return name in _WHERE and (given.get(_WHERE[name]) or "controller") == "controller"


def _shown(value: object) -> str:
    """A value as messages repeat it: the password in an address is not repeated."""
    return repr(re.sub(r"//[^/@\s]+@", "//***@", str(value)))


def _is_address(value: Any) -> bool:
    try:
        ipaddress.ip_address(str(value))
    except ValueError:
        return False
    return True


# --- what the catalog and the plan say -------------------------------------------------------------------------------


def _driver(given: Inputs, plan: Plan | None, catalog: Catalog) -> Iterator[str]:
    version = str(given.get("nvidia_driver_version") or catalog.releases.nvidia_driver.version)
    settings = PreflightSettings(
        driver_version=version, driver_modules=given.get("nvidia_driver_kernel_modules") or "open"
    )
    yield from _said(driver_branch(settings, catalog))
    branch = str(given.get("nvidia_driver_branch") or branch_of(version))
    if branch != str(branch_of(version)):
        yield (
            f"nvidia_driver_branch: {branch} is not the branch of nvidia_driver_version {version}; leave it out, or set"
            f" nvidia_driver_version to a version that begins with {branch}."
        )
    if plan is None:
        return
    yield from _said(driver_modules({}, plan, settings, catalog))
    memory = str(given.get("nvidia_driver_coherent_memory") or "default")
    grace = catalog.gpus[str(plan["gpu"])].cpu_architecture == "aarch64"
    if memory != "default" and not (grace and branch_of(version) >= 580):
        yield (
            f"nvidia_driver_coherent_memory: {memory} is for Grace hosts (GB200) with driver branch 580 or newer; this"
            f" is {plan['gpu']} with {version}. Allowed here: default"
        )


def _said(check: Check) -> Iterator[str]:
    """A check of preflight as a sentence; `seen` begins with the input's name."""
    if check.ok is False:
        yield f"{check.seen} is not allowed; expected {check.expected}. {check.remedy}"


def _versions(given: Inputs, catalog: Catalog) -> Iterator[str]:
    docker, toolkit = catalog.releases.docker, catalog.releases.nvidia_container_toolkit
    version = str(given.get("docker_engine_version") or docker.version)
    if numbers(version) < numbers(docker.minimum):
        yield (
            f"docker_engine_version: {version} is too old for GPU containers; expected {docker.minimum} or newer, such"
            f" as {docker.version}"
        )
    if given.get("nvidia_container_toolkit_version") in toolkit.avoid:
        yield (
            f"nvidia_container_toolkit_version: {given['nvidia_container_toolkit_version']} is known to be broken;"
            f" expected another one, such as {toolkit.version}"
        )


def _together(given: Inputs, exists: Callable[[str], bool]) -> Iterator[str]:
    """Inputs that mean something only together, and files that shall be sent from the controller."""
    there = {half: given.get(f"inference_server_registry_{half}") for half in ("username", "password")}
    if bool(there["username"]) != bool(there["password"]):
        missing = "password" if there["username"] else "username"
        other = "username" if there["username"] else "password"
        yield (
            f"inference_server_registry_{missing}: is not set, but inference_server_registry_{other} is; set both, or"
            " neither"
        )
    source, path = given.get("model_weights_source") or "hub", given.get("model_weights_path")
    if source in ("directory", "archive") and not path:
        yield f"model_weights_path: is not set; expected the {source} that model_weights_source: {source} speaks of"
    if source in ("hub", "http") and path:
        yield (
            f"model_weights_path: {str(path)!r} has no effect with model_weights_source: {source}; set"
            " model_weights_source to directory or archive, or leave the path out"
        )
    address = given.get("model_weights_url")
    if source == "http" and not address:
        yield "model_weights_url: is not set; expected the address that model_weights_source: http speaks of"
    if source != "http" and address:
        yield (
            f"model_weights_url: {_shown(address)} has no effect with model_weights_source: {source}; set"
            " model_weights_source to http, or leave the address out"
        )
    for name, where in _WHERE.items():
        file = given.get(name)
        if file and _on_controller(name, given) and not exists(str(file)):
            yield f"{name}: {str(file)!r} is not on the controller; name one that is, or set {where} to host"


def _peers(given: Inputs, hosts: Collection[str]) -> Iterator[str]:
    """Weights are taken from hosts of the inventory alone."""
    for peer in given.get("model_weights_peers") or []:
        if str(peer) not in hosts:
            yield (
                f"model_weights_peers: {_shown(peer)} is not in the inventory; add the host to it, or take it off the"
                f" list. Allowed: {', '.join(hosts)}"
            )
