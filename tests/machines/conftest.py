"""One machine for the session, and what it said when a test failed."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Tests know that they failed, as those on hosts do.
from tests.hosts.conftest import pytest_runtest_makereport as pytest_runtest_makereport
from tests.left_out import leave_out

from .caches import DRIVES, OWN, forget
from .image import Image, UnavailableError, build
from .machine import Machine

# Set where a missing QEMU is a mistake of whoever set the machine up.
REQUIRED = "GPT_OSS_REQUIRE_MACHINES"


@pytest.fixture(scope="session")
def machine_image() -> Image:
    """The disk that machines start from; where there can be none, tests are left out."""
    try:
        return build()
    except UnavailableError as error:
        reason = str(error)
    if os.environ.get(REQUIRED):
        pytest.fail(f"{reason} ({REQUIRED} is set)", pytrace=False)
    return leave_out(reason)


@pytest.fixture(scope="session")
def session_machine(machine_image: Image) -> Iterator[Machine]:
    """Use `machine`."""
    started = Machine.start(machine_image, DRIVES)
    yield started
    started.stop()


@pytest.fixture
def machine(session_machine: Machine, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """The session's machine with four drives of 2 GiB, SN0001 to SN0004; tests leave it as they would find it."""
    yield session_machine
    if getattr(request.node, "failed", False):
        print(f"\n===== console =====\n{session_machine.console()}")
        if session_machine.is_running:
            print(f"\n===== journal =====\n{session_machine.journal()}")


@pytest.fixture(scope="session")
def used_drives() -> list[str]:
    """Modules whose tests made something of the drives."""
    return []


@pytest.fixture(scope="module")
def blank_drives(session_machine: Machine, used_drives: list[str], request: pytest.FixtureRequest) -> None:
    """What an earlier module made of the drives is forgotten."""
    if used_drives:
        forget(session_machine)
    used_drives.append(request.module.__name__)


@pytest.fixture
def no_initramfs(machine: Machine) -> Iterator[None]:
    """`update-initramfs` does nothing: it is dear, and one cache's life shows that its initramfs is made and booted."""
    path = f"{OWN}update-initramfs"
    machine.put({path: b"#!/bin/sh\n"}, modes={path: 0o755})
    yield
    if machine.is_running:
        machine.run(f"rm -f {path}")
