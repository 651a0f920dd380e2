"""What a check says, and what many of them say together. docs/verdict.md describes both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, StringConstraints, model_validator

from serving_catalog.entries import Part

SCHEMA_VERSION: Literal[1] = 1

Kind = Literal["host", "namespace"]

CheckId = Annotated[str, StringConstraints(pattern=r"^[a-z_]+\.\S+$")]


class Check(Part):
    """One thing that was looked at."""

    id: CheckId = Field(
        description="Stable name: an area, a dot and a subject. The subject may be a path, port, unit or object."
    )
    title: str = Field(description="What the check asks, in a few words.")
    ok: bool | None = Field(
        description="true: as expected. false: a finding. null: does not apply, or cannot be known."
    )
    seen: str = Field(description="What was found.")
    expected: str = Field(description="What should have been found.")
    remedy: str = Field(description="What to do about it. Empty unless the check is a finding.")
    accepted: bool = Field(default=False, description="A finding that the operator has accepted by its id.")

    @model_validator(mode="after")
    def _a_finding_has_a_remedy(self) -> Self:
        if self.ok is False and not self.remedy:
            raise ValueError(f"{self.id}: a finding needs a remedy")
        if self.accepted and self.ok is not False:
            raise ValueError(f"{self.id}: only a finding can be accepted")
        return self

    @property
    def stops(self) -> bool:
        return self.ok is False and not self.accepted


class Verdict(Part):
    """What was proved about one host, or about one namespace of a cluster. Written as one JSON file."""

    schema_version: Literal[1] = Field(default=1, description="Changes when a key changes its meaning.")
    kind: Kind = Field(default="host", description="What the verdict is about.")
    name: str = Field(description="The host's name in the inventory, or the namespace's.")
    at: str = Field(description="When it was judged, in UTC: 2026-11-21T08:00:00Z.")
    request: Mapping[str, JsonValue] = Field(description="What was asked to be served there.")
    ok: bool = Field(description="Whether no check is a finding, accepted ones left out.")
    checks: tuple[Check, ...] = Field(description="Every check, in the order of the path from hardware to answer.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.ok != (not any(check.stops for check in self.checks)):
            raise ValueError("ok: differs from what the checks say")
        ids = [check.id for check in self.checks]
        twice = sorted({name for name in ids if ids.count(name) > 1})
        if twice:
            raise ValueError(f"checks: the id {', '.join(twice)} is used twice")
        return self

    @property
    def findings(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.stops)


def judged(
    name: str, at: str, request: Mapping[str, JsonValue], checks: Iterable[Check], kind: Kind = "host"
) -> Verdict:
    """The verdict that follows from the checks."""
    listed = tuple(checks)
    ok = not any(check.stops for check in listed)
    return Verdict(kind=kind, name=name, at=at, request=request, ok=ok, checks=listed)


def accept(checks: Iterable[Check], allowed: Iterable[str]) -> tuple[Check, ...]:
    """The checks, with findings whose id matches one of `allowed` (an id, or a pattern such as `port.*`) accepted."""
    patterns = tuple(allowed)
    return tuple(
        check.model_copy(update={"accepted": True})
        if check.ok is False and any(fnmatchcase(check.id, pattern) for pattern in patterns)
        else check
        for check in checks
    )


def request_of(plan: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The part of a host's plan that says what was asked for."""
    wanted = ("engine", "release", "profile", "gpu", "gpu_count", "platform", "image", "plan_hash")
    request = {key: plan[key] for key in wanted if key in plan}
    model = plan.get("model")
    if isinstance(model, dict):
        request["model"] = model.get("name")
        request["revision"] = model.get("revision")
    return request
