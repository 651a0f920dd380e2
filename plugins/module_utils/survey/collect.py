"""The survey: the sections that were asked for, in one mapping."""

from __future__ import annotations

from typing import Any

from . import hardware, network, packages, registry, services, storage, system
from .host import Host

# In the order in which a reader meets them.
SECTIONS = (
    "os",
    "architecture",
    "kernel",
    "gpus",
    "platform",
    "driver",
    "nvidia_smi",
    "fabric",
    "packages",
    "apt",
    "memory",
    "paths",
    "weights",
    "cache_drives",
    "ports",
    "clock",
    "urls",
    "docker",
    "image",
    "toolkit",
    "units",
    "logs",
    "endpoints",
)


def collect(host: Host, sections: list[str], asked: dict[str, Any]) -> dict[str, Any]:
    """Read `sections`. A section that could not be read is null, and `errors` says why; the others are not lost."""
    survey: dict[str, Any] = {"sections": [name for name in SECTIONS if name in sections], "errors": {}}
    if asked["lock_timeout"]:
        packages.wait_for_locks(host, asked["lock_timeout"])
    for name in survey["sections"]:
        try:
            survey.update(_read(host, name, asked) if name != "image" else _image(host, asked, survey))
            # Only Docker knows where its images are.
            directory = (survey.get("docker") or {}).get("image_directory")
            if name == "docker" and directory and directory not in (survey.get("paths") or {directory: None}):
                survey["paths"].update(storage.paths(host, [directory]))
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            survey[name] = None
            survey["errors"][name] = f"{type(error).__name__}: {error}"
    skews = [answer.get("skew_seconds") for answer in (survey.get("urls") or {}).values()]
    known = sorted(skew for skew in skews if skew is not None)
    if survey.get("clock") and known:
        survey["clock"]["http_skew_seconds"] = known[len(known) // 2]
    return survey


def _read(host: Host, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    if name == "os":
        return {"os": system.operating_system(host)}
    if name == "memory":
        memory = system.memory(host)
        return {"memory": memory, "memory_bytes": memory["total_bytes"]}
    if name == "packages":
        return packages.packages(host, asked["packages"])
    if name == "fabric":
        return {"fabric": hardware.fabric(host, packages.packages(host, [])["packages"])}
    if name == "paths":
        return {"paths": storage.paths(host, asked["paths"]), "sizes": storage.sizes(host, asked["measure"])}
    if name == "weights":
        return {"weights": storage.weights(host, **asked["weights"]) if asked["weights"] else None}
    if name == "cache_drives":
        return {"cache_drives": storage.cache_drives(host, asked["cache_record"])}
    if name == "ports":
        return {"ports": network.ports(host, asked["ports"])}
    if name == "clock":
        return {"clock": system.clock(host, asked["controller_time"])}
    if name == "urls":
        addresses = {url: _filled(url, host) for url in asked["urls"]}
        tokens = {addresses[url]: token for url, token in (asked["url_tokens"] or {}).items() if url in addresses}
        answers = network.urls(list(addresses.values()), asked["url_timeout"], asked["proxies"], tokens)
        return {"urls": {url: {"url": address, **answers[address]} for url, address in addresses.items()}}
    if name == "docker":
        prefix, probe, record = asked["container_prefix"], asked["probe_containers"], asked["image_record"]
        return {"docker": services.docker(host, prefix, probe, record)}
    if name == "units":
        return {"units": services.units(host, asked["units"])}
    if name == "endpoints":
        return {"endpoints": network.endpoints(asked["endpoints"], asked["url_timeout"])}
    if name == "logs":
        return {"logs": services.logs(host, asked["log_units"], asked["log_lines"])}
    plain = {
        "architecture": system.architecture,
        "kernel": system.kernel,
        "gpus": hardware.gpus,
        "platform": hardware.platform,
        "driver": hardware.driver,
        "nvidia_smi": hardware.nvidia_smi,
        "apt": packages.apt,
        "toolkit": services.toolkit,
    }
    return {name: plain[name](host)}


def _image(host: Host, asked: dict[str, Any], survey: dict[str, Any]) -> dict[str, Any]:
    there = (survey.get("docker") or {}).get("images") or []
    if not asked["image"]:
        return {"image": None}
    return {"image": registry.image(host, asked["image"], there, asked["url_timeout"], asked["proxies"])}


def _filled(url: str, host: Host) -> str:
    """An address with the host's own words in it: only the host knows which repository is its own."""
    release = system.operating_system(host)
    machine = system.architecture(host)
    words = {
        "os_id": release["id"],
        "os_codename": release["codename"],
        "os_repository": release["repository"],
        "dpkg_architecture": machine["dpkg"],
        "cuda_architecture": machine["cuda_repository"],
    }
    for word, value in words.items():
        url = url.replace("{" + word + "}", str(value))
    return url
