"""What tests against a live API server share: recorded stories, live ones, and a namespace to serve in."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import yaml

from tests.kubernetes.api import Object, Refused
from tests.kubernetes.cluster import Cluster
from tests.stand_ins.dynamo_operator import names

RECORDED = Path(__file__).parent / "recorded"
AGG, DISAGG = "gpt-oss-agg", "gpt-oss-disagg"
# The recorded nodes carried one taint; those here, like some clouds' arm64 nodes, carry one more.
ARM = {"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"}

Beat = tuple[bool, str, str, str, str]


def beat(generation: int, status: Mapping[str, Any]) -> Beat:
    """One status in short: does it lag, what does it say, how far are a roll and a restart."""
    conditions: list[Object] = status.get("conditions", [])
    ready: Object = next((item for item in conditions if item["type"] == "Ready"), {})
    return (
        "observedGeneration" in status and status["observedGeneration"] < generation,
        status.get("state", ""),
        ready.get("reason", ""),
        status.get("rollingUpdate", {}).get("phase", ""),
        ",".join([status.get("restart", {}).get("phase", ""), *status.get("restart", {}).get("inProgress", [])]),
    )


def shortened(beats: list[Beat]) -> list[Beat]:
    """Without repetitions."""
    return [each for index, each in enumerate(beats) if index == 0 or each != beats[index - 1]]


def recorded_story(number: str) -> list[Beat]:
    """Of the first graph in a recorded scenario, up to its deletion or to another graph of that name."""
    [path] = (RECORDED / "status-timeline").glob(f"{number}-*.yaml")
    snapshots = yaml.safe_load(path.read_text())["snapshots"]
    first = snapshots[0]["name"]
    beats = []
    for item in snapshots:
        if item["name"] == first and "deletionTimestamp" not in item:
            beats.append(beat(item["generation"], item.get("status") or {}))
        elif item["name"] == first:
            break
    return shortened(beats)


class Reader:
    """Reads a graph's changes from a watch, in the background, for a test to ask for their story."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace
        self._seen: list[tuple[str, Object]] = []
        listed = cluster.api.request("GET", f"/apis/nvidia.com/v1beta1/namespaces/{namespace}/dynamographdeployments")
        self._since = listed["metadata"]["resourceVersion"]
        self._closed = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        api, where = self._cluster.api, (names.API_VERSION, names.GRAPH, self._namespace)
        with suppress(OSError, HTTPException, Refused):  # the cluster may be stopped first
            while not self._closed.is_set():
                for change in api.watch(*where, since=self._since, seconds=30):
                    self._seen.append(change)
                    self._since = change[1]["metadata"]["resourceVersion"]

    def close(self) -> None:
        self._closed.set()

    def has_seen(self, item: Object) -> bool:
        return int(self._since) >= int(item["metadata"]["resourceVersion"])

    def mark(self) -> int:
        return len(self._seen)

    def story(self, name: str, since: int = 0) -> list[Beat]:
        return shortened(
            [
                beat(item["metadata"]["generation"], item.get("status") or {})
                for _, item in self._seen[since:]
                if item["metadata"]["name"] == name and "deletionTimestamp" not in item["metadata"]
            ]
        )


class Serving:
    """A namespace with what the recorded graphs need, and the graphs in it."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.reader = Reader(cluster, namespace)
        self._mark = 0
        metadata = {"namespace": namespace}
        claim = {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "shared-files",
            "resources": {"requests": {"storage": "400Gi"}},
        }
        for manifest in (
            {"apiVersion": "v1", "kind": "Secret", "metadata": metadata | {"name": "hf-token-secret"}},
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata | {"name": "model-cache"}}
            | {"spec": claim},
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata | {"name": f"{AGG}-llm-config"}},
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata | {"name": f"{DISAGG}-llm-config"}},
        ):
            cluster.api.apply(manifest)

    def submitted(self, file: str) -> Object:
        """A recorded manifest for this namespace and its nodes."""
        manifest: Object = yaml.safe_load((RECORDED / "submitted" / f"{file}.yaml").read_text())
        manifest["metadata"]["namespace"] = self.namespace
        for entry in manifest["spec"]["components"]:
            pod = entry["podTemplate"]["spec"]
            if "tolerations" in pod:
                pod["tolerations"] = [*pod["tolerations"], ARM]
        return manifest

    def apply(self, manifest: Object) -> Object:
        """Server-side apply; the story starts anew."""
        self._mark = self.reader.mark()
        return self.cluster.api.apply(manifest)

    def graph(self, name: str) -> Object:
        return self.cluster.api.get(names.API_VERSION, names.GRAPH, name, self.namespace)

    def patch(self, name: str, changes: Mapping[str, Any]) -> Object:
        self._mark = self.reader.mark()
        return self.cluster.api.patch(names.API_VERSION, names.GRAPH, name, changes, self.namespace)

    def story(self, name: str) -> list[Beat]:
        return self.reader.story(name, self._mark)

    def wait_ready(self, name: str) -> Object:
        """Until the graph is ready in its present generation, and the story has reached that."""

        def ready() -> Object | None:
            item = self.graph(name)
            told = beat(item["metadata"]["generation"], item.get("status") or {})
            done = not told[0] and told[2] == "all_resources_are_ready" and "Restarting" not in told[4]
            return item if done and self.reader.has_seen(item) else None

        return self._wait(name, "is ready", ready)

    def wait_told(self, name: str, message: str) -> Object:
        """Until the graph's Ready says this, as a regular expression over the whole message."""

        def told() -> Object | None:
            item = self.graph(name)
            said = item.get("status", {}).get("conditions", [{}])[0].get("message", "")
            return item if re.fullmatch(message, said) else None

        return self._wait(name, f"says {message!r}", told)

    def _wait(self, name: str, what: str, asked: Callable[[], Object | None]) -> Object:
        try:
            found: Object = self.cluster.api.wait(f"{name} {what}", asked)
        except TimeoutError as error:
            raise AssertionError(
                f"{error}; story: {self.story(name)}; status: {self.graph(name).get('status')}"
            ) from None
        return found

    def gone(self, name: str) -> None:
        self.cluster.api.wait(
            f"{name} is gone",
            lambda: self.cluster.api.find(names.API_VERSION, names.GRAPH, name, self.namespace) is None,
        )

    def deployments(self) -> dict[str, Object]:
        return {
            item["metadata"]["name"]: item for item in self.cluster.api.list("apps/v1", "Deployment", self.namespace)
        }

    def worker_names(self) -> list[str]:
        return sorted(name for name in self.deployments() if "frontend" not in name)


def with_argument(manifest: Object, index: int, before: str, after: str) -> Object:
    changed = copy.deepcopy(manifest)
    main = changed["spec"]["components"][index]["podTemplate"]["spec"]["containers"][0]
    assert before in main["args"][0]
    main["args"] = [main["args"][0].replace(before, after)]
    return changed


def batch(manifest: Object, size: int) -> Object:
    return with_argument(manifest, 1, "--max-batch-size 800", f"--max-batch-size {size}")
