"""What a test makes pods do instead of starting well. Statuses and events are worded as a kubelet words them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .api import Object

# Times that stay the same when a stage is played again: a change would play it for ever.
_SINCE = "{{ $since := or .status.startTime Now }}"


@dataclass(frozen=True)
class Behaviour:
    """One way in which pods do not become ready, as a KWOK stage."""

    name: str
    status: str  # template of a pod's status
    event: tuple[str, str] | None = None  # reason and message of the warning a kubelet emits

    def stage(self, name: str, namespace: str, labels: Mapping[str, str]) -> Object:
        expressions: list[dict[str, Any]] = [
            _is(".metadata.namespace", namespace),
            {"jq": {"key": ".metadata.deletionTimestamp", "operator": "DoesNotExist"}},
            {"jq": {"key": ".status.phase", "operator": "In", "values": ["Pending", "Running"]}},
            *(_is(f'.metadata.labels["{key}"]', value) for key, value in labels.items()),
        ]
        steps: list[dict[str, Any]] = [{"patch": {"subresource": "status", "root": "status", "template": self.status}}]
        if self.event:
            reason, message = self.event
            steps.append({"event": {"type": "Warning", "reason": reason, "message": message}})
        return {
            "apiVersion": "kwok.x-k8s.io/v1alpha1",
            "kind": "Stage",
            "metadata": {"name": name},
            "spec": {
                "resourceRef": {"apiGroup": "v1", "kind": "Pod"},
                "weight": 100,  # stages without a weight do not stand a chance
                "selector": {"matchExpressions": expressions},
                "steps": steps,
            },
        }


def _is(key: str, value: str) -> dict[str, Any]:
    return {"jq": {"key": key, "operator": "In", "values": [value]}}


def _conditions(reason: str) -> str:
    names = "{{ range $i, $c := .spec.containers }}{{ if $i }} {{ end }}{{ $c.name }}{{ end }}"
    message = f"containers with unready status: [{names}]"
    return f"""
startTime: {{{{ $since | Quote }}}}
conditions:
- {{type: PodReadyToStartContainers, status: "True", lastTransitionTime: {{{{ $since | Quote }}}}}}
- {{type: Initialized, status: "True", lastTransitionTime: {{{{ $since | Quote }}}}}}
- type: Ready
  status: "False"
  reason: {reason}
  message: "{message}"
  lastTransitionTime: {{{{ $since | Quote }}}}
- type: ContainersReady
  status: "False"
  reason: {reason}
  message: "{message}"
  lastTransitionTime: {{{{ $since | Quote }}}}
"""


def _containers(state: str, *, started: bool, restarts: int = 0, last: str = "") -> str:
    return f"""
containerStatuses:
{{{{ range .spec.containers }}}}
- name: {{{{ .name | Quote }}}}
  image: {{{{ .image | Quote }}}}
  imageID: ""
  ready: false
  started: {str(started).lower()}
  restartCount: {restarts}
  state: {state}
  lastState: {last or "{}"}
{{{{ end }}}}
"""


def fail(exit_code: int = 1, message: str = "", *, reason: str = "Error", long_ago: bool = False) -> Behaviour:
    """Every container ends with this status, and nobody starts it again: what a Job's pod does that fails.

    With `long_ago` it ended hours before: the Job's next attempt is due, however many there were.
    """
    ended = "2000-01-01T00:00:00Z" if long_ago else "{{ $since }}"
    state = (
        f"{{terminated: {{exitCode: {exit_code}, reason: {reason}, message: {_quoted(message)}, "
        f'startedAt: "{ended}", finishedAt: "{ended}"}}}}'
    )
    text = "phase: Failed" + _conditions("PodFailed") + _containers(state, started=False)
    return Behaviour("fail", _SINCE + "\n" + text)


def stay_unready() -> Behaviour:
    """Containers run, and their readiness probe fails: an engine that loads, or hangs. Ends a pod's being ready too."""
    state = "{running: {startedAt: {{ $since | Quote }}}}"
    text = "phase: Running" + _conditions("ContainersNotReady") + _containers(state, started=True)
    event = ("Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 503")
    return Behaviour("stay_unready", _SINCE + "\n" + text, event)


def image_cannot_be_pulled(message: str = "not found") -> Behaviour:
    """ImagePullBackOff."""
    words = f"Back-off pulling image {{{{ .image }}}}: ErrImagePull: {message}"
    state = f"{{waiting: {{reason: ImagePullBackOff, message: {_quoted(words)}}}}}"
    text = "phase: Pending" + _conditions("ContainersNotReady") + _containers(state, started=False)
    return Behaviour("image_cannot_be_pulled", _SINCE + "\n" + text, ("Failed", f"Failed to pull image: {message}"))


def crash(exit_code: int = 1, *, restarts: int = 4, reason: str = "Error") -> Behaviour:
    """CrashLoopBackOff: the container ended and is to be started again; OOMKilled with exit code 137."""
    state = '{waiting: {reason: CrashLoopBackOff, message: "back-off 40s restarting failed container={{ .name }} pod"}}'
    last = (
        f"{{terminated: {{exitCode: {exit_code}, reason: {reason}, "
        "startedAt: {{ $since | Quote }}, finishedAt: {{ $since | Quote }}}}"
    )
    text = (
        "phase: Running"
        + _conditions("ContainersNotReady")
        + _containers(state, started=False, restarts=restarts, last=last)
    )
    return Behaviour("crash", _SINCE + "\n" + text, ("BackOff", "Back-off restarting failed container"))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
