"""Two ways to run the same Pulumi program: an engine in this process, and the real one through the Automation API.

Both start from a project's directory and a stack's configuration, and both tell what was done in the same words.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pulumi import automation

from .build import REPOSITORY
from .engine import Deployment, Outcome, Project, State, Step, StepFailedError, run
from .engine.objects import never
from .engine.programs import outcome
from .engine.release import NoReleases, Releases

UpdateFailedError = StepFailedError
ORGANIZATION = "organization"


class Stack(Protocol):
    """A stack of a project. Every operation raises `UpdateFailedError` with everything that was printed."""

    name: str
    config: dict[str, Any]

    def preview(self) -> Outcome: ...

    def up(self) -> Outcome: ...

    def refresh(self) -> Outcome: ...

    def destroy(self) -> Outcome: ...

    def export(self) -> str:
        """The state as it is written down."""
        ...


class Driver(Protocol):
    """Makes stacks."""

    name: str

    def stack(
        self, project: Path, name: str, config: Mapping[str, Any], secrets: Mapping[str, str] | None = None
    ) -> Stack: ...


# --- in process ------------------------------------------------------------------------------------------------------


@dataclass
class InProcess:
    """speed and gives_up: see `Deployment`."""

    releases: Releases = field(default_factory=NoReleases)
    speed: float = 1.0
    gives_up: Callable[[], bool] = never
    name: str = "in process"

    def stack(
        self, project: Path, name: str, config: Mapping[str, Any], secrets: Mapping[str, str] | None = None
    ) -> InProcessStack:
        return InProcessStack(self, Project(project), name, dict(config), dict(secrets or {}))


@dataclass
class InProcessStack:
    driver: InProcess
    project: Project
    name: str
    config: dict[str, Any]
    secrets: dict[str, str]
    state: State = field(default_factory=State)

    def preview(self) -> Outcome:
        return self._run(preview=True)

    def up(self) -> Outcome:
        return self._run(preview=False)

    def _run(self, *, preview: bool) -> Outcome:
        deployment = self._deployment(preview)
        return run(self.project, self.name, {**self.config, **self.secrets}, self.secrets, deployment)

    def refresh(self) -> Outcome:
        deployment = self._deployment()
        deployment.refresh()
        return outcome(deployment)

    def destroy(self) -> Outcome:
        deployment = self._deployment()
        deployment.destroy()
        return outcome(deployment)

    def export(self) -> str:
        return self.state.export()

    def _deployment(self, preview: bool = False) -> Deployment:
        driver = self.driver
        return Deployment(self.state, driver.releases, preview=preview, speed=driver.speed, gives_up=driver.gives_up)


# --- the real engine -------------------------------------------------------------------------------------------------


@dataclass
class RealEngine:
    """`pulumi` on PATH, offline, with everything that it keeps below one directory."""

    directory: Path
    name: str = "real engine"

    @staticmethod
    def missing() -> str | None:
        """What of it is not there, in one line. It is looked for where the engine looks, PATH's plugins aside."""
        command = shutil.which("pulumi")
        if command is None:
            return "no `pulumi` on PATH"
        beside = Path(command).resolve().parent
        lacking = [
            f"no {program} beside {beside / 'pulumi'}"
            for program in ("pulumi-language-python", "pulumi-language-python-exec")
            if not os.access(beside / program, os.X_OK)
        ]
        version = importlib.metadata.version("pulumi-kubernetes")
        plugin = _plugins() / f"resource-kubernetes-v{version}"
        if not os.access(plugin / "pulumi-resource-kubernetes", os.X_OK) or Path(f"{plugin}.partial").exists():
            lacking.append(f"no {plugin} (pulumi plugin install resource kubernetes {version})")
        return "; ".join(lacking) or None

    def environment(self) -> dict[str, str]:
        home, state = self.directory / "home", self.directory / "state"
        for each in (home, state):
            each.mkdir(parents=True, exist_ok=True)
        if not (home / "plugins").exists():
            (home / "plugins").symlink_to(_plugins())
        return {
            "PULUMI_HOME": str(home),
            "PULUMI_BACKEND_URL": f"file://{state}",
            "PULUMI_CONFIG_PASSPHRASE": "test",
            "PULUMI_SKIP_UPDATE_CHECK": "true",
            "PULUMI_AUTOMATION_API_SKIP_VERSION_CHECK": "true",
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
            "PULUMI_DISABLE_REGISTRY_RESOLVE": "true",
            "PULUMI_IGNORE_AMBIENT_PLUGINS": "true",  # of the program's version, not whichever is on PATH
            "PULUMI_NEO": "false",
            "PULUMI_SKIP_CONFIRMATIONS": "true",
            "PULUMI_PYTHON_CMD": sys.executable,
            "PYTHONPATH": str(REPOSITORY),  # its catalog, whichever one the interpreter has installed
            "PULUMI_K8S_CLIENT_BURST": "200",
            "PULUMI_K8S_CLIENT_QPS": "100",
            "HELM_CACHE_HOME": str(self.directory / "helm" / "cache"),
            "HELM_CONFIG_HOME": str(self.directory / "helm" / "config"),
            "HELM_DATA_HOME": str(self.directory / "helm" / "data"),
            # Neither of them is ever to be used: the program names its cluster.
            "KUBECONFIG": str(self.directory / "no-kubeconfig"),
            "HOME": str(home),
        }

    def stack(
        self, project: Path, name: str, config: Mapping[str, Any], secrets: Mapping[str, str] | None = None
    ) -> RealStack:
        # Stack files are written beside Pulumi.yaml, and the repository's are not to be touched.
        work = self.directory / "projects" / project.name
        if not work.exists():
            _copy_project(project, work)
        options = automation.LocalWorkspaceOptions(
            work_dir=str(work), env_vars=self.environment(), pulumi_home=str(self.directory / "home")
        )
        stack = automation.create_or_select_stack(stack_name=name, work_dir=str(work), opts=options)
        return RealStack(stack, name, dict(config), dict(secrets or {}))


def _plugins() -> Path:
    """Where the user's Pulumi keeps its plugins."""
    return Path(os.environ.get("PULUMI_HOME") or Path.home() / ".pulumi") / "plugins"


def _copy_project(project: Path, work: Path) -> None:
    shutil.copytree(project, work, ignore=shutil.ignore_patterns("venv", "__pycache__", "Pulumi.*.yaml"))
    settings = work / "Pulumi.yaml"
    # The interpreter of the tests has everything that the program needs; a user's has a virtual environment instead.
    kept = [line for line in settings.read_text().splitlines() if line.strip() != "virtualenv: venv"]
    settings.write_text("\n".join(kept) + "\n")


@dataclass
class RealStack:
    stack: automation.Stack
    name: str
    config: dict[str, Any]
    secrets: dict[str, str]
    _set: dict[str, Any] = field(default_factory=dict)

    def preview(self) -> Outcome:
        return self._operate(self.stack.preview)

    def up(self) -> Outcome:
        return self._operate(self.stack.up)

    def refresh(self) -> Outcome:
        return self._operate(self.stack.refresh)

    def destroy(self) -> Outcome:
        return self._operate(self.stack.destroy)

    def export(self) -> str:
        """Out of the backend's own file: the Automation API would decrypt the secrets."""
        backend = Path(self.stack.workspace.env_vars["PULUMI_BACKEND_URL"].removeprefix("file://"))
        [written] = backend.glob(f".pulumi/stacks/*/{self.name}.json")
        return json.dumps(json.loads(written.read_text())["checkpoint"]["latest"])

    def command(self, *words: str) -> None:
        """`pulumi up` and the like, as a person types it: without what the Automation API asks before and after."""
        self._configure()
        workspace = self.stack.workspace
        try:
            workspace.pulumi_command.run([*words, "--stack", self.name], workspace.work_dir, workspace.env_vars)
        except automation.CommandError as error:
            raise UpdateFailedError(str(error)) from error

    def _operate(self, operation: Callable[..., Any]) -> Outcome:
        self._configure()
        said: list[str] = []
        steps: dict[str, tuple[str, Step]] = {}

        def see(event: automation.EngineEvent) -> None:
            done = event.resource_pre_event or event.res_outputs_event
            if done is not None:
                metadata = done.metadata
                word = str(getattr(metadata.op, "value", metadata.op))
                if word == "delete" and metadata.old is not None and metadata.old.retain_on_delete:
                    word = "discard"  # the engine shows it as [retain]
                _see(steps, metadata.urn, word, metadata.type)

        try:
            result = operation(on_output=said.append, on_event=see)
        except automation.CommandError as error:
            raise UpdateFailedError("\n".join([*said, str(error)])) from error
        outputs: automation.OutputMap = getattr(result, "outputs", {})  # an up's; asking again takes seconds
        return Outcome(
            steps=tuple(step for _, step in steps.values()),
            outputs={key: output.value for key, output in outputs.items()},
            text="\n".join(said),
            secret_outputs=frozenset(key for key, output in outputs.items() if output.secret),
        )

    def _configure(self) -> None:
        wanted = {**self.config, **self.secrets}
        gone = set(self._set) - set(wanted)
        changed = {key: value for key, value in wanted.items() if key not in self._set or self._set[key] != value}
        plain = {key: value for key, value in changed.items() if key not in self.secrets}
        settings_file = Path(self.stack.workspace.work_dir) / f"Pulumi.{self.name}.yaml"
        if plain or gone:
            _write_settings(settings_file, Path(self.stack.workspace.work_dir) / "Pulumi.yaml", plain, gone)
        for key in set(changed) & set(self.secrets):
            self.stack.set_config(key, automation.ConfigValue(self.secrets[key], secret=True))
        self._set = copy.deepcopy(wanted)  # a test may change what is inside of a value


def _write_settings(file: Path, project: Path, values: Mapping[str, Any], gone: Collection[str]) -> None:
    """Into the stack's file, as a person writes it: lists and mappings as such."""
    import yaml

    name = yaml.safe_load(project.read_text())["name"]
    settings = yaml.safe_load(file.read_text()) if file.exists() else None
    settings = settings or {}
    config = settings.setdefault("config", {})
    for key, value in values.items():
        config[key if ":" in key else f"{name}:{key}"] = value
    for key in gone:
        del config[key if ":" in key else f"{name}:{key}"]
    file.write_text(yaml.safe_dump(settings, sort_keys=False))


# The engine's words for what it does, and ours. The two halves of a replacement are one thing.
_OPERATIONS: Mapping[str, Any] = {
    "same": "same",
    "create": "create",
    "update": "update",
    "delete": "delete",
    "replace": "replace",
    "create-replacement": "replace",
    "delete-replaced": "replace",
    "discard": "discard",
    "discard-replaced": "replace",
    "refresh": "same",
}


def _see(steps: dict[str, tuple[str, Step]], urn: str, operation: str, kind: str) -> None:
    known = _OPERATIONS.get(operation)
    if known is None:
        raise NotImplementedError(f"{operation} of {urn}: not a step that the scenario knows")
    steps.pop(urn, None)
    steps[urn] = (operation, Step(known, kind, urn.rpartition("::")[2]))


def changed(outcome: Outcome) -> list[str]:
    """What an operation changed, the stack itself and its components aside."""
    leaves = [step for step in outcome.steps if step.type.startswith("kubernetes:") and step.operation != "same"]
    return sorted(map(str, leaves))
