"""The operator beside the cluster: it runs while a Deployment of it does, wherever that came from."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import TracebackType

from tests.kubernetes import pods
from tests.kubernetes.cluster import Cluster
from tests.stand_ins.dynamo_operator.operator import Operator

LABELS = {"app.kubernetes.io/name": "dynamo-operator"}
SELECTOR = ",".join(f"{key}={value}" for key, value in LABELS.items())
LOOKS_EVERY = 0.2


class Beside:
    """`with Beside(cluster, "dynamo-system"):` while a test installs, uses and removes the platform there."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beside", daemon=True)
        self._gate = ExitStack()  # holds the operator's pod unready
        self._operator: Operator | None = None
        self.problem: Exception | None = None

    def __enter__(self) -> Beside:
        self._close_gate()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._stop()
        self._gate.close()
        if self.problem and error is None:
            raise self.problem

    @property
    def runs(self) -> bool:
        return self._operator is not None

    def _close_gate(self) -> None:
        self._gate.enter_context(self._cluster.behave(pods.stay_unready(), self._namespace, **LABELS))

    def _run(self) -> None:
        while not self._ended.wait(LOOKS_EVERY):
            try:
                there = bool(self._cluster.api.list("apps/v1", "Deployment", self._namespace, labels=SELECTOR))
                if there and self._operator is None:
                    operator = Operator(self._cluster.kubeconfig, self._cluster.context)
                    operator.start()
                    self._operator = operator
                    self._gate.close()  # the pod becomes ready
                elif not there and self._operator is not None:
                    self._stop()
                    self._close_gate()
            except Exception as error:
                self.problem = error
                return

    def _stop(self) -> None:
        if self._operator is not None:
            self._operator.stop()
            self._operator.unregister()  # its webhooks are the release's
            self._operator = None
