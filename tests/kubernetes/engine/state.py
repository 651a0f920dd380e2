"""What a stack made, and what an operation did to it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from . import values
from .values import Path

Operation = Literal["create", "update", "replace", "delete", "same", "discard"]


@dataclass(frozen=True)
class Step:
    """One thing that was done, or in a preview would be. `discard` forgets a resource and leaves the object."""

    operation: Operation
    type: str
    name: str

    def __str__(self) -> str:
        return f"{self.operation} {self.name}"


@dataclass
class Entry:
    """One resource, as the state remembers it."""

    urn: str
    type: str
    name: str
    custom: bool
    parent: str = ""
    provider: str = ""  # the provider's URN
    dependencies: frozenset[str] = frozenset()
    inputs: dict[str, Any] = field(default_factory=dict)
    secrets: frozenset[Path] = frozenset()
    outputs: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    field_manager: str = ""
    init_errors: tuple[str, ...] = ()
    retain_on_delete: bool = False
    protect: bool = False
    timeouts: Mapping[str, float] = field(default_factory=dict)

    @property
    def needs(self) -> frozenset[str]:
        """URNs of what has to be there as long as it is."""
        return self.dependencies | {self.parent, self.provider}

    @property
    def output_secrets(self) -> frozenset[Path]:
        """What is secret among the inputs is among the outputs; a Secret's strings come back as its data."""
        data = {("data", *path[1:]) for path in self.secrets if path[0] == "stringData"}
        return self.secrets | frozenset(data)


@dataclass
class State:
    """The resources of a stack, in the order they were made."""

    entries: dict[str, Entry] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    output_secrets: frozenset[Path] = frozenset()
    replaced: list[Entry] = field(default_factory=list)  # whose objects are still to be deleted

    def export(self) -> str:
        """As it would be written down: secrets hidden."""
        resources = [
            {
                "urn": entry.urn,
                "inputs": values.hidden(entry.inputs, entry.secrets),
                "outputs": values.hidden(entry.outputs, entry.output_secrets),
                "initErrors": entry.init_errors,
                "dependencies": sorted(entry.dependencies),
            }
            for entry in self.entries.values()
        ]
        return json.dumps(
            {"resources": resources, "outputs": values.hidden(self.outputs, self.output_secrets)}, indent=2
        )

    def reversed_rounds(self, urns: Collection[str]) -> list[list[Entry]]:
        """These resources, in rounds: what needs a resource is in an earlier one.

        So the engine deletes (pulumi 3.244, pkg/resource/deploy/step_generator.go: ScheduleDeletes): a round at once,
        and the next one when all of it is gone.
        """
        left = {urn: entry for urn, entry in self.entries.items() if urn in urns}
        rounds: list[list[Entry]] = []
        while left:
            last = [entry for entry in left.values() if not left.keys() & entry.needs]
            rounds.insert(0, last)
            for entry in last:
                del left[entry.urn]
        return rounds
