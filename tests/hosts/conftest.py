"""What failures of host tests show: the journal and the containers' logs of the hosts they ran on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts import hosts


@pytest.fixture
def shown_hosts(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Names of hosts whose logs are printed when the test fails; the test adds them."""
    names: list[str] = []
    yield names
    if getattr(request.node, "failed", False):
        for name in names:
            print(f"\n===== journal of {name} =====\n{hosts.journal(hosts.PREFIX + name, 150)}")
            print(f"\n===== containers of {name} =====\n{hosts.containers_log(name)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when == "call" and report.failed:  # type: ignore[attr-defined]
        item.failed = True  # type: ignore[attr-defined]
    return report
