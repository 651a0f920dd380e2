"""Helm Releases, without Helm: what is to be installed is told by whoever knows the chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tests.kubernetes.api import Api

HELM_RELEASE = "kubernetes:helm.sh/v3:Release"


class Releases(Protocol):
    """What installs charts. Inputs are those of the Release resource."""

    def install(self, api: Api, inputs: Mapping[str, Any]) -> dict[str, Any]: ...

    def upgrade(self, api: Api, inputs: Mapping[str, Any]) -> dict[str, Any]: ...

    def uninstall(self, api: Api, inputs: Mapping[str, Any]) -> None: ...


class NoReleases:
    """For programs that install no chart."""

    def install(self, api: Api, inputs: Mapping[str, Any]) -> dict[str, Any]:
        raise NotImplementedError(f"the chart {inputs.get('chart')!r} is not known here")

    def upgrade(self, api: Api, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return self.install(api, inputs)

    def uninstall(self, api: Api, inputs: Mapping[str, Any]) -> None:
        self.install(api, inputs)
