"""One machine for the session, and what it said when a test failed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Tests know that they failed, as those on hosts do.
from tests.hosts.conftest import pytest_runtest_makereport as pytest_runtest_makereport

from .image import Image, UnavailableError, build
from .machine import Drive, Machine

# Set where a missing QEMU is a mistake of whoever set the machine up.
REQUIRED = "GPT_OSS_REQUIRE_MACHINES"
DRIVES = tuple(Drive(f"SN000{number}") for number in (1, 2, 3, 4))


@pytest.fixture(scope="session")
def machine_image() -> Image:
    """The disk that machines start from; where there can be none, tests are left out."""
    try:
        return build()
    except UnavailableError as error:
        reason = str(error)
    if os.environ.get(REQUIRED):
        pytest.fail(f"{reason} ({REQUIRED} is set)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def session_machine(machine_image: Image) -> Iterator[Machine]:
    """Use `machine`."""
    started = Machine.start(machine_image, DRIVES)
    yield started
    started.stop()


@pytest.fixture
def machine(session_machine: Machine, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """The session's machine with four drives of 1 GiB, SN0001 to SN0004; tests leave it as they would find it."""
    yield session_machine
    if getattr(request.node, "failed", False):
        print(f"\n===== console =====\n{session_machine.console()}")
        if session_machine.is_running:
            print(f"\n===== journal =====\n{session_machine.journal()}")
