"""The program under Pulumi's own mock engine, with what the real one is told kept: parents, dependencies, options.

The mock monitor of the SDK answers registrations and forgets most of them. This one keeps the whole request, encodes
secrets as the real engine receives them, and calls error hooks as the engine does, through the program's own callback
server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import runpy
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pulumi
from google.protobuf import empty_pb2
from pulumi.runtime import rpc
from pulumi.runtime.mocks import MockMonitor, MockResourceArgs, Mocks
from pulumi.runtime.proto import callback_pb2, callback_pb2_grpc, resource_pb2
from pulumi.runtime.stack import run_in_stack

from tests.kubernetes.engine.sdk import talk_to

PROGRAM = Path(__file__).parents[2] / "pulumi"
PROJECT = "gpt-oss"

SECRET_SIGNATURE = "4dabf18193072939515e22adb298388d"
SECRET = "1b47061264138c4ac30d75fd1eb44270"

Fault = Callable[["Registration"], str | None]  # what the provider says against a resource, or None


@dataclass(frozen=True)
class Registration:
    """A resource, as the program asked the engine for it."""

    type: str
    name: str
    label: str
    inputs: Mapping[str, Any]
    parent: str  # empty: the stack
    provider: str
    dependencies: frozenset[str]
    create_within: str
    update_within: str
    retained: bool
    error_hooks: tuple[str, ...]
    urn: str

    @property
    def manifest_name(self) -> str:
        return str(self.inputs["metadata"]["name"])

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.inputs["metadata"].get("annotations", {})  # type: ignore[no-any-return]


@dataclass
class Recording:
    """What a run of the program registered, exported and logged."""

    registrations: list[Registration] = field(default_factory=list)
    exports: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    error: str | None = None

    def __getitem__(self, label: str) -> Registration:
        (found,) = [each for each in self.registrations if each.label == label]
        return found

    @property
    def labels(self) -> list[str]:
        return [each.label for each in self.registrations]


class _NoCalls(Mocks):
    def new_resource(self, args: MockResourceArgs) -> tuple[str | None, dict[Any, Any]]:
        return f"{args.name}-id", dict(args.inputs)

    def call(self, args: Any) -> tuple[dict[Any, Any], list[tuple[str, str]] | None]:
        raise AssertionError(f"the program asks a provider for {args.token}: everything should be known before")


class RecordingMonitor(MockMonitor):
    """Keeps every request; where a provider is to fail, calls the resource's error hooks first."""

    def __init__(self, recording: Recording, fault: Fault) -> None:
        super().__init__(_NoCalls())
        self._recording = recording
        self._fault = fault
        self._hooks: dict[str, Any] = {}

    def RegisterErrorHook(self, request: Any) -> Any:  # noqa: N802 - the engine's own name
        self._hooks[request.name] = request.callback
        return empty_pb2.Empty()

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802
        registration = _registration(request, self.make_urn(request.parent, request.type, request.name))
        if request.type != "pulumi:pulumi:Stack":
            self._recording.registrations.append(registration)
            said = self._fault(registration)
            if said is not None:
                self._call_hooks(request, registration, said)
                raise RuntimeError(f"{registration.name}: {said}")
        return super().RegisterResource(request)  # type: ignore[no-untyped-call]

    def RegisterResourceOutputs(self, request: Any) -> Any:  # noqa: N802
        if request.urn.endswith("pulumi:pulumi:Stack::" + request.urn.rsplit("::", 1)[-1]):
            self._recording.exports = rpc.deserialize_properties(request.outputs)
        return empty_pb2.Empty()

    def _call_hooks(self, request: Any, registration: Registration, said: str) -> None:
        for name in registration.error_hooks:
            callback = self._hooks[name]
            asked = resource_pb2.ErrorHookRequest(
                urn=registration.urn,
                name=registration.name,
                type=registration.type,
                new_inputs=request.object,
                failed_operation="create",
                errors=[said],
            )
            with grpc.insecure_channel(callback.target) as channel:
                answer = callback_pb2_grpc.CallbacksStub(channel).Invoke(
                    callback_pb2.CallbackInvokeRequest(token=callback.token, request=asked.SerializeToString()),
                    timeout=30,
                )
            response = resource_pb2.ErrorHookResponse.FromString(answer.response)
            assert not response.error, response.error
            assert not response.retry, f"{registration.name}: a failure is not tried again by itself"


def _registration(request: Any, urn: str) -> Registration:
    return Registration(
        type=request.type,
        name=request.name,
        inputs=rpc.deserialize_properties(request.object, keep_unknowns=True),
        label=_label(urn),
        parent=_label(request.parent),
        provider=_label(request.provider.rpartition("::")[0]),
        dependencies=frozenset(_label(each) for each in request.dependencies),
        create_within=request.customTimeouts.create,
        update_within=request.customTimeouts.update,
        retained=request.retainOnDelete,
        error_hooks=tuple(request.hooks.on_error),
        urn=urn,
    )


def _label(urn: str) -> str:
    """`ConfigMap/programs`, its content's hash left out; a component or provider by its name alone: `serving`."""
    if not urn or "::pulumi:pulumi:Stack::" in urn:
        return ""
    kind, name = urn.split("::")[2].rpartition("$")[2], re.sub("-[0-9a-f]{8}$", "", urn.rpartition("::")[2])
    return name if kind.startswith(("gpt-oss:", "pulumi:")) else f"{kind.rpartition(':')[2]}/{name}"


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


def is_secret(value: Any) -> bool:
    """Whether the engine was told that this value is a secret: it is then encrypted in the state and never shown."""
    return isinstance(value, Mapping) and value.get(SECRET_SIGNATURE) == SECRET


def run_program(
    config: Mapping[str, Any],
    *,
    secrets: Collection[str] = (),
    stack: str = "test",
    preview: bool = False,
    fault: Fault = lambda registration: None,
) -> Recording:
    """Run pulumi/__main__.py as the language host does, with `config` as a stack's file has it."""
    recording = Recording()
    # As the language host does: a program that fails leaves futures behind, and asyncio would complain of each.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    logger = logging.getLogger(f"program-{id(recording)}")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_Lines(recording.log))

    async def run() -> None:
        talk_to(RecordingMonitor(recording, fault), logger, project=PROJECT, stack=stack, preview=preview)
        pulumi.runtime.set_all_config(engine_config(config), [f"{PROJECT}:{key}" for key in secrets])
        await run_in_stack(_run_main)

    interrupted = signal.getsignal(signal.SIGINT)
    try:
        asyncio.run(run())
    except Exception as error:
        recording.error = str(error)
    finally:
        signal.signal(signal.SIGINT, interrupted)  # the program has changed it for the rest of its life
    return recording


def engine_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Values of a stack's file as the engine hands them to a program: text, or JSON where there is structure."""
    return {
        key if ":" in key else f"{PROJECT}:{key}": value if isinstance(value, str) else json.dumps(value)
        for key, value in config.items()
    }


def _run_main() -> None:
    here = str(PROGRAM)
    if here not in sys.path:
        sys.path.insert(0, here)
    runpy.run_path(str(PROGRAM / "__main__.py"), run_name="__main__")
