"""The CUDA apt repository of a host, as apt_set takes it: declared in one way by every role that needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError

DOCUMENTATION = r"""
name: cuda_repository
short_description: The CUDA repository of a host, for apt_set
description:
  - Turns what host_survey says of a host (sections os and architecture) into the repository and the stale files that
    apt_set takes. The distribution and architecture are part of the address; arm64 is C(sbsa) there.
options:
  _input:
    description: The survey.
    type: dict
    required: true
  releases:
    description: The catalog's releases; keyring, key and known checksums come from there.
    type: dict
    required: true
  url:
    description: Base address of the repository, or of a mirror.
    type: str
    required: true
  keyring_url:
    description: Where the keyring package is; empty means in the repository.
    type: str
    default: ""
  keyring_sha256:
    description: Its checksum; empty takes the catalog's, for NVIDIA's own address.
    type: str
    default: ""
  fingerprints:
    description: Fingerprints of the keys that may sign.
    type: list
    elements: str
    required: true
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
wanted: "{{ survey | cuda_repository(releases, 'https://mirror.example/cuda', fingerprints=keys) }}"
"""

RETURN = r"""
_value:
  description: repositories and stale_files, as apt_set takes them.
  type: dict
"""


def cuda_repository(
    survey: Mapping[str, Any],
    releases: Mapping[str, Any],
    url: str,
    keyring_url: str = "",
    keyring_sha256: str = "",
    fingerprints: Sequence[str] = (),
) -> dict[str, Any]:
    """apt_set's `repositories` and `stale_files` for a host."""
    distribution, architecture = survey["os"]["repository"], survey["architecture"]["cuda_repository"]
    if not distribution or not architecture:
        raise AnsibleFilterError(
            f"there is no CUDA repository for {survey['os']['name']} on {survey['architecture']['machine']}; "
            "allowed: Debian 12, Ubuntu 22.04 and 24.04 on x86_64 and aarch64"
        )
    keyring = releases["cuda_keyring"]
    place = f"{distribution}/{architecture}"
    base = f"{url.rstrip('/')}/{place}"
    package = {
        "name": keyring["package"],
        "version": keyring["version"],
        "url": keyring_url or f"{base}/{keyring['file']}",
    }
    if not keyring_sha256 and not keyring_url and url.rstrip("/") == releases["repositories"]["cuda"].rstrip("/"):
        keyring_sha256 = keyring["checksums"].get(place, "")
    if keyring_sha256:
        package["sha256"] = keyring_sha256
    repository = {
        "name": "nvidia-cuda",
        "uris": [f"{base}/"],
        "suites": ["/"],
        "signed_by": keyring["keyring"],
        "key_fingerprints": list(fingerprints),
        "keyring_package": package,
    }
    # The keyring package declares NVIDIA's own address in the old form: apt would know the repository twice.
    stale = ["/etc/apt/sources.list.d/cuda.list", f"/etc/apt/sources.list.d/cuda-{distribution}-{architecture}.list"]
    return {"repositories": [repository], "stale_files": stale}


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"cuda_repository": cuda_repository}
