"""Installs the stand-in chart without Helm, for the engine in the test's process: what Helm would do to a cluster.

Of Helm's template language it knows `.Release`, `.Chart` and `.Values`, of hooks those before an install or upgrade.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.kubernetes.api import Api, Object, Refused
from tests.kubernetes.engine.objects import ObjectError

Chart = Mapping[str, str]  # path inside the chart -> text
HOOK = "helm.sh/hook"
EXPRESSION = re.compile(r"\{\{\s*(.+?)\s*\}\}")
KNOWN = {
    *("name", "namespace", "chart", "version", "values", "atomic", "cleanupOnFail", "waitForJobs", "skipAwait"),
    *("maxHistory", "timeout", "createNamespace", "compat"),
}
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the definitions are 1.6 MB


class ChartReleases:
    """Helm, as far as a small chart needs it."""

    def install(self, api: Api, inputs: Mapping[str, Any]) -> dict[str, Any]:
        chart = _read(inputs)
        if api.find("v1", "Secret", _record_name(inputs), inputs["namespace"]):
            raise ObjectError(f"cannot re-use a name that is still in use: {inputs['name']}")
        objects = _rendered(chart, inputs)
        try:
            self._define(api, chart)
            self._run_hooks(api, objects, inputs, "pre-install")
            made = [each for each in objects if HOOK not in _annotations(each)]
            for each in made:
                api.create(each)
            _await_deployments(api, made, float(inputs.get("timeout", 300)))
        except (Refused, TimeoutError) as error:
            if inputs.get("atomic"):
                self._remove(api, objects)
            raise ObjectError(f"Helm Release {inputs['namespace']}/{inputs['name']}: {error}") from error
        record = {"objects": made, "values": inputs.get("values", {})}
        api.create(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "type": "helm.sh/release.v1",
                "metadata": {"name": _record_name(inputs), "namespace": inputs["namespace"]},
                "stringData": {"release": json.dumps(record)},
            }
        )
        return _outputs(chart, inputs)

    def upgrade(self, api: Api, inputs: Mapping[str, Any]) -> dict[str, Any]:
        chart = _read(inputs)
        objects = _rendered(chart, inputs)
        try:
            self._run_hooks(api, objects, inputs, "pre-upgrade")
            made = [each for each in objects if HOOK not in _annotations(each)]
            for each in made:
                api.apply(each)
            _await_deployments(api, made, float(inputs.get("timeout", 300)))
        except (Refused, TimeoutError) as error:
            raise ObjectError(f"Helm Release {inputs['namespace']}/{inputs['name']}: {error}") from error
        return _outputs(chart, inputs)

    def uninstall(self, api: Api, inputs: Mapping[str, Any]) -> None:
        """Definitions stay, as with Helm."""
        self._remove(api, _rendered(_read(inputs), inputs))
        api.delete("v1", "Secret", _record_name(inputs), inputs["namespace"])

    def _define(self, api: Api, chart: Chart) -> None:
        names = []
        for path, text in chart.items():
            if not path.startswith("crds/"):
                continue
            for definition in yaml.load_all(text, Loader=_Loader):
                name = definition["metadata"]["name"]
                if api.find(definition["apiVersion"], definition["kind"], name) is None:
                    api.apply(definition)
                names.append(name)
        for name in names:
            api.wait(f"{name} is established", partial(_established, api, name))

    def _run_hooks(self, api: Api, objects: list[Object], inputs: Mapping[str, Any], hook: str) -> None:
        for each in objects:
            if hook not in _annotations(each).get(HOOK, "").split(","):
                continue
            self._remove(api, [each])
            api.create(each)
            name, namespace = each["metadata"]["name"], inputs["namespace"]
            seconds = float(inputs.get("timeout", 300))
            api.wait(f"hook {name}", partial(_succeeded, api, name, namespace), seconds=seconds)
            self._remove(api, [each])

    @staticmethod
    def _remove(api: Api, objects: list[Object]) -> None:
        for each in reversed(objects):
            metadata = each["metadata"]
            place = (each["apiVersion"], each["kind"], metadata["name"], metadata.get("namespace"))
            api.delete(*place, propagation="Foreground")
            api.wait(f"{each['kind']} {metadata['name']} is gone", partial(_is_gone, api, *place))


def _read(inputs: Mapping[str, Any]) -> Chart:
    unknown = sorted(set(inputs) - KNOWN)
    if unknown:
        raise NotImplementedError(f"Release: {', '.join(unknown)}: not known to this stand-in for Helm")
    try:
        with tarfile.open(fileobj=io.BytesIO(_fetched(inputs["chart"]))) as packed:
            return {
                member.name.partition("/")[2]: content.read().decode()
                for member in packed.getmembers()
                if (content := packed.extractfile(member)) is not None
            }
    except (OSError, tarfile.TarError) as error:
        raise ObjectError(f"failed to locate chart {inputs['chart']}: {error}") from error


def _fetched(chart: str) -> bytes:
    """From a path or an address."""
    if "://" not in chart:
        return Path(chart).read_bytes()
    with urllib.request.urlopen(chart, timeout=60) as answer:
        content: bytes = answer.read()
    return content


def _rendered(chart: Chart, inputs: Mapping[str, Any]) -> list[Object]:
    about = yaml.safe_load(chart["Chart.yaml"])
    if inputs.get("version") not in (None, about["version"]):
        raise ObjectError(f"chart {inputs['chart']} has the version {about['version']}, not {inputs['version']}")
    values = _merged(yaml.safe_load(chart["values.yaml"]), inputs.get("values", {}))
    try:
        jsonschema.validate(values, json.loads(chart["values.schema.json"]))
    except jsonschema.ValidationError as error:
        path = ".".join(map(str, error.absolute_path))
        raise ObjectError(f"values don't meet the specifications of the schema(s): {path}: {error.message}") from error
    scope = {
        "Release": {"Name": inputs["name"], "Namespace": inputs["namespace"]},
        "Chart": {"Name": about["name"], "Version": about["version"]},
        "Values": values,
    }
    objects: list[Object] = []
    for path in sorted(chart):
        if path.startswith("templates/"):
            text = EXPRESSION.sub(lambda found: _value(found[1], scope), chart[path])
            objects += [_marked(each, inputs) for each in yaml.safe_load_all(text) if each]
    return objects


def _marked(each: Object, inputs: Mapping[str, Any]) -> Object:
    """Whose an object is, as Helm writes on all but hooks."""
    metadata = each["metadata"]
    if HOOK in metadata.get("annotations", {}):
        return each
    marks = {"meta.helm.sh/release-name": inputs["name"], "meta.helm.sh/release-namespace": inputs["namespace"]}
    annotations = {**metadata.get("annotations", {}), **marks}
    labels = {**metadata.get("labels", {}), "app.kubernetes.io/managed-by": "Helm"}
    return {**each, "metadata": {**metadata, "annotations": annotations, "labels": labels}}


def _value(expression: str, scope: Mapping[str, Any]) -> str:
    """`.Release.Name`, or `(index .Values "a-b").c.d`."""
    indexed = re.fullmatch(r'\(index (\.[\w.]+) "([^"]+)"\)(.*)', expression)
    start, key, rest = indexed.groups() if indexed else (expression, None, "")
    value: Any = scope
    for part in [*_parts(start), *([key] if key else []), *_parts(rest)]:
        value = value[part]
    return str(value)


def _parts(path: str) -> Iterator[str]:
    yield from (part for part in path.split(".") if part)


def _merged(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {key: _merged(base.get(key), over[key]) if key in over else base[key] for key in {**base, **over}}
    return over


def _annotations(each: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = each["metadata"].get("annotations", {})
    return found


def _record_name(inputs: Mapping[str, Any]) -> str:
    return f"sh.helm.release.v1.{inputs['name']}.v1"


def _outputs(chart: Chart, inputs: Mapping[str, Any]) -> dict[str, Any]:
    about = yaml.safe_load(chart["Chart.yaml"])
    status = {"name": inputs["name"], "namespace": inputs["namespace"], "status": "deployed"}
    return {**inputs, "status": {**status, "version": about["version"]}}


def _is_gone(api: Api, api_version: str, kind: str, name: str, namespace: str | None) -> bool:
    return api.find(api_version, kind, name, namespace) is None


def _established(api: Api, name: str) -> bool:
    live = api.get("apiextensions.k8s.io/v1", "CustomResourceDefinition", name)
    conditions = {each["type"]: each["status"] for each in live.get("status", {}).get("conditions") or []}
    return conditions.get("Established") == "True"


def _succeeded(api: Api, name: str, namespace: str) -> bool:
    return bool(api.get("batch/v1", "Job", name, namespace).get("status", {}).get("succeeded"))


def _await_deployments(api: Api, objects: list[Object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for each in objects:
        if each["kind"] != "Deployment":
            continue
        name, namespace = each["metadata"]["name"], each["metadata"]["namespace"]
        while True:
            live = api.get("apps/v1", "Deployment", name, namespace)
            status = live.get("status", {})
            observed = status.get("observedGeneration", 0) >= live["metadata"]["generation"]
            if observed and status.get("availableReplicas", 0) >= live["spec"]["replicas"]:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"Deployment {name} is not available: timed out waiting for the condition")
            time.sleep(0.1)
