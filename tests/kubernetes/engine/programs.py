"""Running a Pulumi program in this process, with the SDK's own mock settings, and an engine that answers for real."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import runpy
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import pulumi
import yaml
from google.protobuf import empty_pb2, struct_pb2
from pulumi.runtime import Mocks
from pulumi.runtime.config import set_all_config
from pulumi.runtime.mocks import MockMonitor
from pulumi.runtime.proto import callback_pb2, callback_pb2_grpc, resource_pb2
from pulumi.runtime.settings import SETTINGS
from pulumi.runtime.stack import run_in_stack

from . import values
from .deployment import STACK, Deployment, Goal, Outcome, StepFailedError, StoppedError, seconds
from .sdk import talk_to
from .state import Entry, Step

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Project:
    """A directory with a Pulumi.yaml and a Python program."""

    directory: Path

    @property
    def name(self) -> str:
        return str(self._settings["name"])

    @cached_property
    def _settings(self) -> dict[str, Any]:
        settings = yaml.load((self.directory / "Pulumi.yaml").read_text(), Loader=_Loader)
        assert isinstance(settings, dict)
        return settings

    def config(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Keys with their project, defaults included; what `pulumi up` refuses about them is refused."""
        declared: Mapping[str, Any] = self._settings.get("config", {})
        values_: dict[str, Any] = {}
        for key, entry in declared.items():
            if ":" in key:
                values_[key] = entry["value"] if isinstance(entry, dict) and "value" in entry else entry
                continue
            if key in given:
                _check_type(key, given[key], entry)
                values_[f"{self.name}:{key}"] = given[key]
            elif "default" in entry:
                values_[f"{self.name}:{key}"] = entry["default"]
            else:
                raise StepFailedError(f"missing required configuration variable '{key}'")
        for key, value in given.items():
            if key not in declared:
                values_[key if ":" in key else f"{self.name}:{key}"] = value
        return {key: _text(value) for key, value in values_.items()}


def _check_type(key: str, value: Any, entry: Mapping[str, Any]) -> None:
    kinds: Mapping[str, type | tuple[type, ...]] = {
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "array": list,
        "object": dict,
    }
    kind = entry.get("type", "string")
    wrong = not isinstance(value, kinds[kind]) or (kind == "integer" and isinstance(value, bool))
    if wrong and not (kind == "string" and isinstance(value, int | float)):
        raise StepFailedError(f"configuration key '{key}' must be of type '{kind}'")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)


class _Monitor(MockMonitor):
    """Answers a program's registrations out of a deployment."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(_Answers())
        self._deployment = deployment
        self._hooks: dict[str, callback_pb2.Callback] = {}

    def make_urn(self, parent: str, type_: str, name: str) -> str:
        stack, project = pulumi.get_stack(), pulumi.get_project()
        outer = parent.split("::")[2] if parent else ""
        qualified = f"{outer}${type_}" if outer and outer != STACK else type_
        return "::".join([f"urn:pulumi:{stack}", project, qualified, name])

    def RegisterResource(self, request: Any) -> Any:  # noqa: N802 - gRPC's name
        urn = self.make_urn(request.parent, request.type, request.name)
        if request.type == STACK:
            self._deployment.state.entries.setdefault(urn, Entry(urn, STACK, request.name, custom=False))
            self._deployment._registered.add(urn)
            return resource_pb2.RegisterResourceResponse(urn=urn)
        inputs, secrets = values.read(request.object)
        goal = Goal(
            urn=urn,
            type=request.type,
            name=request.name,
            custom=request.custom,
            parent=request.parent,
            provider=request.provider.rpartition("::")[0],
            dependencies=frozenset(request.dependencies),
            inputs=inputs,
            secrets=secrets,
            ignore_changes=tuple(request.ignoreChanges),
            delete_before_replace=request.deleteBeforeReplace,
            retain_on_delete=request.retainOnDelete,
            protect=request.protect,
            timeouts={
                name: seconds(text)
                for name in ("create", "update", "delete")
                if (text := getattr(request.customTimeouts, name))
            },
            on_error=tuple(request.hooks.on_error),
        )
        if request.importId or request.aliases or request.aliasURNs or request.transforms:
            raise NotImplementedError(f"{request.name}: import, aliases and transforms are not known to this engine")
        entry = self._deployment.register(goal, self._run_error_hooks)
        if self._deployment.preview and entry.custom:
            return resource_pb2.RegisterResourceResponse(urn=urn, id=entry.id, object=request.object)
        outputs = values.write({**entry.inputs, **entry.outputs}, entry.output_secrets)
        return resource_pb2.RegisterResourceResponse(urn=urn, id=entry.id, object=outputs)

    def RegisterResourceOutputs(self, request: Any) -> Any:  # noqa: N802
        outputs, secrets = values.read(request.outputs)
        state = self._deployment.state
        if request.urn.split("::")[2] == STACK:
            state.outputs, state.output_secrets = outputs, secrets
        elif request.urn in state.entries:
            state.entries[request.urn].outputs = outputs
        return empty_pb2.Empty()

    def ReadResource(self, request: Any) -> Any:  # noqa: N802
        raise NotImplementedError(f"{request.name}: reading what the stack did not make is not known to this engine")

    def Invoke(self, request: Any) -> Any:  # noqa: N802
        raise NotImplementedError(f"{request.tok}: functions of providers are not known to this engine")

    def RegisterErrorHook(self, request: Any) -> Any:  # noqa: N802
        if request.name in self._hooks:
            raise StepFailedError(f"error hook already registered for name {request.name!r}")
        self._hooks[request.name] = request.callback
        return empty_pb2.Empty()

    def RegisterResourceHook(self, request: Any) -> Any:  # noqa: N802
        raise NotImplementedError(f"{request.name}: of hooks, this engine knows those on errors")

    def _run_error_hooks(self, goal: Goal, operation: str, message: str) -> None:
        for name in goal.on_error:
            callback = self._hooks[name]
            request = resource_pb2.ErrorHookRequest(
                urn=goal.urn,
                name=goal.name,
                type=goal.type,
                new_inputs=values.write(goal.inputs, goal.secrets)
                if isinstance(goal.inputs, dict)
                else struct_pb2.Struct(),
                failed_operation=operation,
                errors=[message],
            )
            with grpc.insecure_channel(callback.target) as channel:
                stub = callback_pb2_grpc.CallbacksStub(channel)
                answer = stub.Invoke(
                    callback_pb2.CallbackInvokeRequest(token=callback.token, request=request.SerializeToString())
                )
            said = resource_pb2.ErrorHookResponse.FromString(answer.response)
            if said.error:
                self._deployment.messages.append(
                    f"error hooks execution failed: error hook {name!r} failed: {said.error}"
                )
            if said.retry:
                raise NotImplementedError(f"{goal.name}: this engine tries nothing again on a hook's word")


class _Answers(Mocks):
    """Everything is answered by the monitor itself, which sees what a `Mocks` is not shown: options."""

    def new_resource(self, args: Any) -> tuple[str | None, dict[Any, Any]]:
        raise NotImplementedError(args.name)

    def call(self, args: Any) -> Any:
        raise NotImplementedError(args.token)


class _Log(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.INFO)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        prefix = {logging.WARNING: "warning: ", logging.ERROR: "error: "}.get(record.levelno, "")
        self._messages.append(prefix + record.getMessage())


def run(
    project: Project, stack: str, config: Mapping[str, Any], secret_keys: Iterable[str], deployment: Deployment
) -> Outcome:
    """Run the program once. A `StepFailedError` carries everything that was said."""
    texts = project.config(config)
    logger = logging.Logger(f"pulumi.{project.name}.{stack}")
    logger.addHandler(_Log(deployment.messages))
    problems: list[BaseException] = []

    def body() -> None:
        loop = asyncio.new_event_loop()
        # What fails is told once, by the deployment; the SDK leaves the futures of what depended on it behind.
        loop.set_exception_handler(lambda *_: None)
        asyncio.set_event_loop(loop)
        try:
            set_all_config(texts, [f"{project.name}:{key}" for key in secret_keys])
            talk_to(_Monitor(deployment), logger, project=project.name, stack=stack, preview=deployment.preview)
            SETTINGS.outputs = set()  # those of the run before are still there
            loop.run_until_complete(run_in_stack(lambda: _execute(project)))
        except BaseException as error:
            problems.append(error)
        finally:
            loop.run_until_complete(loop.shutdown_default_executor())  # steps that were begun are ended
            loop.close()

    # Everything of the SDK's that is global lives in context variables: a context of its own is a process of its own.
    thread = threading.Thread(target=contextvars.Context().run, args=(body,), name=f"pulumi-{stack}")
    with _on_path(project):
        thread.start()
        thread.join()
    _raise(deployment, problems)
    if not deployment.preview:
        deployment.delete_unregistered()
    return outcome(deployment)


def _execute(project: Project) -> None:
    runpy.run_path(str(project.directory / "__main__.py"), run_name="__main__")


@contextmanager
def _on_path(project: Project) -> Iterator[None]:
    """The program's directory comes first, and its modules go when it has ended: the next one may have namesakes."""
    directory = str(project.directory)
    before = set(sys.modules)
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and Path(file).is_relative_to(project.directory):
                del sys.modules[name]


def _raise(deployment: Deployment, problems: list[BaseException]) -> None:
    if not problems and not deployment.failed:
        return
    deployment.failed = True
    for problem in problems:
        said = str(problem) or type(problem).__name__
        told = isinstance(problem, StepFailedError | StoppedError) or any(said in each for each in deployment.messages)
        if not told:
            deployment.messages.append(f"error: {said}")
            # Where in the program: as the language host prints it. Not as a cause: it is of another thread.
            deployment.messages += traceback.format_exception(problem)
    raise StepFailedError("\n".join(deployment.messages))


def outcome(deployment: Deployment) -> Outcome:
    state = deployment.state
    return Outcome(
        steps=tuple(deployment.steps),
        outputs=dict(state.outputs),
        text="\n".join(deployment.messages),
        secret_outputs=frozenset(str(path[0]) for path in state.output_secrets),
    )


__all__ = ["Project", "Step", "outcome", "run"]
