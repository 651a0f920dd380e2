"""One operation on a stack: what a program registers becomes steps, and steps become objects."""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from . import differences, objects, values
from .objects import NotReadyError, ObjectError, Objects, never
from .release import HELM_RELEASE, Releases
from .state import Entry, State, Step
from .values import Path

PROVIDER = "pulumi:providers:kubernetes"
STACK = "pulumi:pulumi:Stack"
ErrorHook = Callable[["Goal", str, str], None]  # goal, operation, message


class StepFailedError(Exception):
    """A step failed; the message is what the engine prints."""


class StoppedError(Exception):
    """Nothing more is begun after a failure."""


@dataclass(frozen=True)
class Goal:
    """What a program registers."""

    urn: str
    type: str
    name: str
    custom: bool
    parent: str
    provider: str
    dependencies: frozenset[str]
    inputs: dict[str, Any]
    secrets: frozenset[Path]
    ignore_changes: tuple[str, ...] = ()
    delete_before_replace: bool = False
    retain_on_delete: bool = False
    protect: bool = False
    timeouts: Mapping[str, float] = field(default_factory=dict)
    on_error: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What an operation did and said."""

    steps: tuple[Step, ...]
    outputs: Mapping[str, Any]
    text: str
    secret_outputs: frozenset[str] = frozenset()

    def names(self, operation: str) -> set[str]:
        return {step.name for step in self.steps if step.operation == operation}

    def changes(self) -> list[str]:
        """Everything that was not left alone, in the order it was done."""
        return [str(step) for step in self.steps if step.operation != "same"]


@dataclass
class Deployment:
    """An up, a preview, a refresh or a destroy of one stack.

    speed shortens waits that would run out: 0.01 makes a timeout of two minutes one of a second. gives_up ends them
    early, as soon as it is true: what a test waits for has come about, and stays.
    """

    state: State
    releases: Releases
    preview: bool = False
    speed: float = 1.0
    gives_up: Callable[[], bool] = never
    steps: list[Step] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    failed: bool = False
    _registered: set[str] = field(default_factory=set)
    _providers: dict[str, Objects] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # Registering

    def register(self, goal: Goal, on_error: ErrorHook) -> Entry:
        with self._lock:
            if self.failed:
                raise StoppedError(f"{goal.name}: not begun, since the update has failed")
            if goal.urn in self._registered:
                raise self._failure(goal, f"Duplicate resource URN {goal.urn!r}")
            self._registered.add(goal.urn)
        old = self.state.entries.get(goal.urn)
        if not goal.custom:
            return self._settled(goal, old, "same" if old else "create")
        if goal.type == PROVIDER:
            return self._register_provider(goal, old)
        if goal.provider not in self._providers:
            raise self._failure(goal, "is registered without an explicit provider: it would go to the ambient cluster")
        if not goal.type.startswith("kubernetes:"):
            raise self._failure(goal, f"is of the type {goal.type}, which this engine does not know")
        if self.preview and values.has_unknown(goal.inputs):
            return self._settled(goal, old, "update" if old else "create")
        try:
            return self._carry_out(goal, old)
        except (ObjectError, NotImplementedError) as error:
            operation = "update" if old else "create"
            message = f"resource {goal.urn!r}: {error}"
            on_error(goal, operation, message)
            raise self._failure(goal, str(error)) from error

    def _register_provider(self, goal: Goal, old: Entry | None) -> Entry:
        try:
            self._providers[goal.urn] = Objects(goal.inputs, self.speed, self.gives_up)
        except (ObjectError, OSError, StopIteration, KeyError) as error:
            raise self._failure(goal, str(error) or f"{goal.inputs.get('context')}: no such context") from error
        entry = self._settled(goal, old, "same" if old and old.inputs == goal.inputs else "update" if old else "create")
        entry.id = old.id if old else secrets.token_hex(8)
        return entry

    def _settled(self, goal: Goal, old: Entry | None, operation: Any, **changes: Any) -> Entry:
        entry = Entry(
            urn=goal.urn,
            type=goal.type,
            name=goal.name,
            custom=goal.custom,
            parent=goal.parent,
            provider=goal.provider,
            dependencies=goal.dependencies,
            inputs=goal.inputs,
            secrets=goal.secrets,
            outputs=old.outputs if old and goal.custom else dict(goal.inputs),
            id=old.id if old else "",
            field_manager=old.field_manager if old else "",
            retain_on_delete=goal.retain_on_delete,
            protect=goal.protect,
            timeouts=goal.timeouts,
        )
        for key, value in changes.items():
            setattr(entry, key, value)
        with self._lock:
            self.steps.append(Step(operation, goal.type, goal.name))
            if not self.preview:
                self.state.entries.pop(goal.urn, None)  # last registered, last in order
                self.state.entries[goal.urn] = entry
        return entry

    def _failure(self, goal: Goal, message: str) -> StepFailedError:
        with self._lock:
            self.failed = True
            self.messages.append(f"{goal.type} ({goal.name}): error: {message}")
        return StepFailedError(self.messages[-1])

    # Steps

    def _carry_out(self, goal: Goal, old: Entry | None) -> Entry:
        if goal.type == HELM_RELEASE:
            return self._carry_out_release(goal, old)
        provider = self._providers[goal.provider]
        if old is None:
            return self._create(goal, provider)
        if goal.ignore_changes:
            kept = differences.keep_ignored(list(goal.ignore_changes), old.inputs, goal.inputs)
            goal = Goal(**{**vars(goal), "inputs": kept})
        paths = differences.differences(old.inputs, old.outputs, goal.inputs)
        replacing = differences.replacing(goal.inputs, paths)
        paths = differences.without(paths, list(goal.ignore_changes))
        replacing = [path for path in replacing if path in paths]
        if replacing or provider.needs_rerun(goal.inputs):
            return self._replace(goal, old, provider)
        if paths or old.init_errors:
            return self._update(goal, old, provider)
        return self._settled(goal, old, "same")

    def _create(self, goal: Goal, provider: Objects, operation: str = "create") -> Entry:
        manager = objects.new_field_manager()
        if self.preview:
            return self._settled(goal, None, operation)
        timeout = goal.timeouts.get("create")
        return self._made(goal, None, operation, manager, lambda: provider.create(goal.inputs, manager, timeout))

    def _update(self, goal: Goal, old: Entry, provider: Objects) -> Entry:
        manager = old.field_manager
        if self.preview:
            return self._settled(goal, old, "update")
        timeout = goal.timeouts.get("update")
        ignored = list(goal.ignore_changes)
        return self._made(goal, old, "update", manager, lambda: provider.update(goal.inputs, ignored, manager, timeout))

    def _replace(self, goal: Goal, old: Entry, provider: Objects) -> Entry:
        if self.preview:
            return self._settled(goal, old, "replace")
        # An object of the same name has to go first. Otherwise the old one goes when everything has moved on.
        same = all(old.inputs["metadata"].get(key) == goal.inputs["metadata"].get(key) for key in ("name", "namespace"))
        first = same or goal.delete_before_replace
        if old.protect:
            raise ObjectError("is protected, and would have to be replaced")
        if first:
            self._delete_object(old)
            self.state.entries.pop(old.urn, None)
        entry, problem = None, None
        try:
            entry = self._create(goal, provider, "replace")
        except NotReadyError as error:  # the new one is there
            problem = error
        if not first:  # deleted when everything else has been done; after a failure it stays where it is
            with self._lock:
                self.state.replaced.append(old)
        if problem:
            raise problem
        assert entry is not None
        return entry

    def _made(
        self, goal: Goal, old: Entry | None, operation: str, manager: str, write: Callable[[], Mapping[str, Any]]
    ) -> Entry:
        try:
            live = dict(write())
        except NotReadyError as error:  # there, and remembered, but to be waited for again
            self._settled(
                goal, old, operation, outputs=error.live, init_errors=(str(error),), field_manager=manager, id=_id(goal)
            )
            raise
        return self._settled(goal, old, operation, outputs=live, field_manager=manager, id=_id(goal))

    def _carry_out_release(self, goal: Goal, old: Entry | None) -> Entry:
        operation = "create" if old is None else "same" if old.inputs == goal.inputs else "update"
        identity = ("name", "namespace")
        if old and any(old.inputs.get(key) != goal.inputs.get(key) for key in identity):
            operation = "replace"
        if self.preview:
            return self._settled(goal, old, operation)
        api = self._providers[goal.provider].api
        if operation == "replace":
            assert old is not None
            self.releases.uninstall(api, old.inputs)
        if operation in ("create", "replace"):
            outputs = self.releases.install(api, goal.inputs)
        elif operation == "update":
            outputs = self.releases.upgrade(api, goal.inputs)
        else:
            assert old is not None
            outputs = old.outputs
        return self._settled(goal, old, operation, outputs=outputs, id=_id_of_release(goal.inputs))

    # Deleting

    def delete_unregistered(self) -> None:
        """What has been replaced or the program no longer speaks of, after everything that it does speak of."""
        self._delete_replaced()
        self._delete_in_rounds(set(self.state.entries) - self._registered)

    def _delete_replaced(self) -> None:
        while self.state.replaced and not self.preview:
            self._delete_object(self.state.replaced[-1])
            self.state.replaced.pop()

    def destroy(self) -> None:
        for entry in list(self.state.entries.values()):
            if entry.type == PROVIDER:
                self._providers[entry.urn] = Objects(entry.inputs, self.speed, self.gives_up)
        self._delete_replaced()
        self._delete_in_rounds(set(self.state.entries))
        if not self.preview:
            self.state.outputs = {}

    def _delete_in_rounds(self, urns: set[str]) -> None:
        with ThreadPoolExecutor(max_workers=16) as workers:
            for entries in self.state.reversed_rounds(urns):
                begun = [workers.submit(self._delete, entry) for entry in entries]
                wait(begun)  # what was begun is ended, whatever fails
                for each in begun:
                    each.result()

    def _delete(self, entry: Entry) -> None:
        try:
            if entry.protect:
                raise ObjectError("is protected")
            operation = "discard" if entry.retain_on_delete and entry.custom else "delete"
            if not self.preview:
                if operation == "delete":
                    self._delete_object(entry)
                with self._lock:
                    del self.state.entries[entry.urn]
        except ObjectError as error:
            with self._lock:
                self.failed = True
                self.messages.append(f"{entry.type} ({entry.name}): error: {error}")
            raise StepFailedError(f"{entry.type} ({entry.name}): error: {error}") from error
        with self._lock:
            self.steps.append(Step(operation, entry.type, entry.name))  # type: ignore[arg-type]

    def _delete_object(self, entry: Entry) -> None:
        if not entry.custom or entry.type == PROVIDER or entry.retain_on_delete:
            return
        provider = self._providers[entry.provider]
        if entry.type == HELM_RELEASE:
            self.releases.uninstall(provider.api, entry.inputs)
        else:
            provider.delete(entry.inputs, entry.timeouts.get("delete"))

    # Refreshing

    def refresh(self) -> None:
        """The state as the cluster has it: what is gone is forgotten, what changed is remembered as it is."""
        for entry in list(self.state.entries.values()):
            if entry.type == PROVIDER:
                self._providers[entry.urn] = Objects(entry.inputs, self.speed, self.gives_up)
        for entry in list(self.state.entries.values()):
            if not entry.custom or entry.type in (PROVIDER, HELM_RELEASE):
                self.steps.append(Step("same", entry.type, entry.name))
                continue
            live = self._providers[entry.provider].read(entry.inputs)
            if live is None:
                del self.state.entries[entry.urn]
                self.steps.append(Step("delete", entry.type, entry.name))
                continue
            before = differences.differences(entry.inputs, live, entry.inputs)
            known = differences.differences(entry.inputs, entry.outputs, entry.inputs)
            entry.outputs = live
            self.steps.append(Step("same" if before == known else "update", entry.type, entry.name))


def seconds(text: str) -> float:
    """A duration as Pulumi takes it: `1h30m`, `90s`."""
    parts = re.findall(r"([0-9.]+)(h|ms|m|s)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is no duration")
    return sum(float(number) * {"h": 3600, "m": 60, "s": 1, "ms": 0.001}[unit] for number, unit in parts)


def _id(goal: Goal) -> str:
    metadata = goal.inputs["metadata"]
    return "/".join(filter(None, (metadata.get("namespace"), metadata["name"])))


def _id_of_release(inputs: Mapping[str, Any]) -> str:
    return f"{inputs.get('namespace', 'default')}/{inputs['name']}"
