"""What Kubernetes and the operator accept as a word: names, labels, quantities, images."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([a-zA-Z]*)")
_FACTORS = {
    "": 1.0,
    "m": 0.001,
    **{unit: 1000.0**n for n, unit in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    **{unit: 1024.0**n for n, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
}


def size_of(quantity: str) -> int:
    """Bytes (or pieces) of a Kubernetes quantity such as 100Gi."""
    match = _QUANTITY.fullmatch(quantity)
    if match is None or match[2] not in _FACTORS:
        raise ValueError(f"{quantity!r} is not a quantity such as 100Gi")
    return int(float(match[1]) * _FACTORS[match[2]])


def label_problem(name: str, limit: int = 63) -> str | None:
    """What is wrong with a name that must be a DNS label, or None."""
    if not _LABEL.fullmatch(name):
        return "allowed: lower-case letters, digits and -, beginning and ending with a letter or digit"
    return f"has {len(name)} characters; allowed: at most {limit}" if len(name) > limit else None


def subdomain_problem(name: str) -> str | None:
    """What is wrong with a name that must be a DNS subdomain, or None."""
    if not _SUBDOMAIN.fullmatch(name):
        return "allowed: lower-case letters, digits, - and ., beginning and ending with a letter or digit"
    return f"has {len(name)} characters; allowed: at most 253" if len(name) > 253 else None


def labels_problems(field: str, labels: Mapping[str, str]) -> list[str]:
    """What the API server would refuse in labels."""
    problems = keys_problems(field, labels)
    for key, value in labels.items():
        if len(value) > 63 or not _LABEL_VALUE.fullmatch(value):
            problems.append(
                f"{field}: {key}={value!r}: not a label's value; allowed: at most 63 letters, digits, -, _ and ., "
                "beginning and ending with a letter or digit"
            )
    return problems


def keys_problems(field: str, keys: Iterable[str]) -> list[str]:
    """What the API server would refuse in the keys of labels or annotations."""
    problems = []
    for key in keys:
        prefix, slash, name = key.rpartition("/")
        if (slash and subdomain_problem(prefix) is not None) or len(name) > 63 or not _QUALIFIED.fullmatch(name):
            problems.append(
                f"{field}: {key!r}: not a key; allowed: [example.com/]name, the name with at most 63 characters"
            )
    return problems


def mirrored(image: str, registry: str | None) -> str:
    """The image from another registry, under the path it has in its own."""
    if registry is None:
        return image
    first, slash, rest = image.partition("/")
    if not slash:
        return f"{registry}/library/{image}"
    has_registry = "." in first or ":" in first or first == "localhost"
    return f"{registry}/{rest if has_registry else image}"


def tag_of(image: str) -> str:
    """An image's tag, as the operator reads it: a digest after it does not count, a digest alone is no tag."""
    name = image.strip().partition("@")[0]
    head, colon, tag = name.rpartition(":")
    return tag if colon and "/" not in tag and head else ""


def image_problem(image: str, versioned_tag: str) -> str | None:
    """What the operator would say of an image without a version of its own beside it, or None."""
    tag = tag_of(image)
    if re.fullmatch(versioned_tag, tag):
        return None
    found = f"its tag {tag!r} says no version" if tag else "it has no tag that says a version"
    return f"{found}, and the operator refuses that"
