"""Pulumi's SDK, set to talk to a monitor in this process."""

from __future__ import annotations

import logging

from google.protobuf import empty_pb2
from pulumi.runtime.mocks import MockEngine, MockMonitor, MockSettings
from pulumi.runtime.settings import configure, set_root_resource

ORGANIZATION = "organization"  # a local backend's, always


def talk_to(monitor: MockMonitor, logger: logging.Logger, *, project: str, stack: str, preview: bool) -> None:
    """As the SDK's `set_mocks`, which begins a stack of its own: that one exports nothing, and may do so last."""
    features = set(monitor.GetDeploymentInfo(empty_pb2.Empty()).supportedFeatures)  # type: ignore[no-untyped-call]
    configure(
        MockSettings(  # type: ignore[no-untyped-call]
            monitor=monitor,
            monitor_features=features,
            engine=MockEngine(logger),
            project=project,
            stack=stack,
            dry_run=preview,
            organization=ORGANIZATION,
            callbacks=None,
        )
    )
    set_root_resource(None)  # type: ignore[arg-type]
