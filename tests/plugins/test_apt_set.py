"""apt_set with real apt and dpkg, on a throwaway layer over this machine, with a repository of tiny packages."""

from __future__ import annotations

import fcntl
import http.server
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.plugins.conftest import ROOT, WRAPPER
from tests.plugins.throwaway import REPOSITORY, Machine, as_root, build_package, index, make_key, throwaway_machine

pytestmark = pytest.mark.skipif(not as_root(), reason="needs root and apt-get")

KEYRING = "/usr/share/keyrings/demo.gpg"
SOURCE = Path("/etc/apt/sources.list.d/demo.sources")

PREFERENCES = "Package: demo-library\nPin: version 1.1-1\nPin-Priority: 1001\n"


class Apt:
    """The machine, its key, and short forms for what the tests say often."""

    def __init__(self, machine: Machine, key: str, other_key: str) -> None:
        self.machine = machine
        self.key = key
        self.other_key = other_key

    def repository(self, **changes: Any) -> dict[str, Any]:
        return {
            "name": "demo",
            "uris": [f"file:{REPOSITORY}"],
            "suites": ["./"],
            "signed_by": KEYRING,
            "key_url": "file:/srv/good.asc",
            "key_fingerprints": [self.key],
            **changes,
        }

    def traces(self) -> str:
        """Everything that a run could change, with times."""
        places = "/etc/apt /usr/share/keyrings /var/lib/dpkg /var/lib/apt /var/cache/apt /tmp"
        return self.machine.run(
            "sh", "-c", f"find {places} -not -path /tmp | sort | xargs ls -ld --time-style=full-iso"
        ).stdout

    def set(self, *, check: bool = False, **parameters: Any) -> dict[str, Any]:
        parameters.setdefault("repositories", [self.repository()])
        return self.machine.module("apt_set", parameters, check=check, wrapper=WRAPPER)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apt]:
    """One machine for the whole file; `apt` puts it back before each test."""
    with throwaway_machine(tmp_path_factory.mktemp("machine"), ROOT) as machine:
        key, other = make_key(machine, "good"), make_key(machine, "other")
        for version in ("1.0-1", "1.1-1", "2.0-1"):
            build_package(machine, "demo-driver", version, depends=f"demo-library (= {version})")
            build_package(machine, "demo-library", version)
        build_package(machine, "demo-older", "1.0-1", depends="demo-library (<< 2)")
        build_package(machine, "demo-epoch", "5:29.8.2-1~debian.12~bookworm")
        build_package(machine, "demo-old", "1.0-1", files={"/etc/demo-old.conf": "x\n"})
        build_package(machine, "demo-new", "1.0-1", conflicts="demo-old")
        build_package(machine, "demo-extra", "1.0-1")
        build_package(machine, "demo-plain", "1.0-1", recommends="demo-extra")
        pin = "".join(
            f"Package: {name}\nPin: version 1.1-1\nPin-Priority: 1001\n\n" for name in ("demo-driver", "demo-library")
        )
        build_package(machine, "demo-pinning", "1.0-1", files={"/etc/apt/preferences.d/demo-pinning": pin})
        build_package(
            machine,
            "demo-service",
            "1.0-1",
            postinst="#!/bin/sh\ncat /usr/sbin/policy-rc.d > /srv/seen 2>&1 || true\n",
        )
        build_package(
            machine,
            "demo-reader",
            "1.0-1",
            postinst="#!/bin/sh\ncat /etc/demo-reader/settings > /srv/seen 2>&1 || true\n",
        )
        build_package(machine, "demo-broken", "1.0-1", postinst="#!/bin/sh\necho it went wrong >&2\nexit 7\n")
        index(machine, key)
        yield Apt(machine, key, other)


@pytest.fixture
def apt(base: Apt) -> Iterator[Apt]:
    machine = base.machine
    yield base
    installed = "$(dpkg-query -W -f '${Package} ' 'demo*')"
    machine.run("sh", "-c", f"dpkg --purge --force-all {installed}", check=False)
    made = f"/etc/apt/sources.list.d/* /etc/apt/preferences.d/* {KEYRING} /usr/sbin/policy-rc.d"
    made += " /var/lib/apt/lists/* /var/cache/apt/archives/*.deb"
    machine.run("sh", "-c", f"rm -rf {made}")
    machine.run("mkdir", "-p", "/var/lib/apt/lists/partial")


def test_a_first_run_writes_the_source_and_key_and_installs_and_a_second_run_starts_no_process(apt: Apt) -> None:
    wanted: dict[str, Any] = {
        "packages": [{"name": "demo-driver", "version": "1.1"}, {"name": "demo-library", "version": "1.1"}],
        "hold": ["demo-*"],
    }
    first = apt.set(**wanted)
    assert first["changed"], first
    assert first["repository_changed"]
    assert first["packages"] == {
        "demo-driver": {"before": None, "after": "1.1-1"},
        "demo-library": {"before": None, "after": "1.1-1"},
    }
    assert apt.machine.versions() == {"demo-driver": "1.1-1", "demo-library": "1.1-1"}
    assert apt.machine.selections() == {"demo-driver": "hold", "demo-library": "hold"}
    assert apt.machine.path(SOURCE).read_text().splitlines()[1:] == [
        "Types: deb",
        f"URIs: file:{REPOSITORY}",
        "Suites: ./",
        f"Signed-By: {KEYRING}",
    ]
    assert apt.machine.path(KEYRING).read_bytes() == apt.machine.path("/srv/good.gpg").read_bytes()

    # Without any tool to call, only the fast path can succeed.
    hidden = [apt.machine.path(f"/usr/bin/{tool}") for tool in ("apt-get", "apt-cache", "apt-mark", "dpkg")]
    for tool in hidden:
        tool.rename(tool.with_suffix(".hidden"))
    try:
        second = apt.set(**wanted)
    finally:
        for tool in hidden:
            tool.with_suffix(".hidden").rename(tool)
    assert not second["changed"], second
    assert second["diff"] == []
    assert second["packages"]["demo-driver"] == {"before": "1.1-1", "after": "1.1-1"}


def test_check_mode_on_a_first_run_predicts_the_versions_and_leaves_no_trace(apt: Apt) -> None:
    wanted: dict[str, Any] = {
        "packages": [{"name": "demo-driver", "version": "1.1-1"}, {"name": "demo-library", "version": "1.1-1"}],
        "hold": ["demo-driver"],
    }
    before = apt.traces()
    predicted = apt.set(check=True, **wanted)
    after = apt.traces()
    assert predicted["changed"], predicted
    assert before == after
    real = apt.set(**wanted)
    for key in ("packages", "transactions", "held", "diff", "repository_changed"):
        assert predicted[key] == real[key], key


def test_check_mode_knows_the_preferences_that_the_first_packages_will_bring(apt: Apt) -> None:
    # demo-driver 1.1-1 needs demo-library at exactly 1.1-1, which apt takes only when it is pinned there.
    wanted: dict[str, Any] = {
        "first": [{"name": "demo-pinning"}],
        "packages": [{"name": "demo-driver", "version": "1.1-1"}],
    }
    predicted = apt.set(check=True, **wanted)
    assert not predicted.get("failed"), predicted
    real = apt.set(**wanted)
    assert sorted(predicted["transactions"]) == sorted(real["transactions"])
    assert apt.machine.versions() == {"demo-driver": "1.1-1", "demo-library": "1.1-1", "demo-pinning": "1.0-1"}
    assert not apt.set(**wanted)["changed"]


def test_check_mode_reports_a_version_that_does_not_exist(apt: Apt) -> None:
    result = apt.set(check=True, packages=[{"name": "demo-driver", "version": "9"}])
    assert result["failed"]
    assert "demo-driver: version 9 is in no repository; available: 2.0-1 from file:" in result["msg"]


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("demo-library", None, "2.0-1"),
        ("demo-library", "1.0", "1.0-1"),
        ("demo-library", "1.0-1", "1.0-1"),
        ("demo-library", "1.*", "1.1-1"),
        ("demo-epoch", "29.8.2", "5:29.8.2-1~debian.12~bookworm"),
        ("demo-epoch", "5:29.8.2", "5:29.8.2-1~debian.12~bookworm"),
    ],
)
def test_a_version_may_lack_epoch_and_revision_or_be_a_glob(
    apt: Apt, name: str, version: str | None, expected: str
) -> None:
    wanted: dict[str, Any] = {"packages": [{"name": name, "version": version}]}
    assert apt.set(**wanted)["packages"][name]["after"] == expected
    assert not apt.set(**wanted)["changed"]


def test_everything_that_cannot_be_found_is_named_and_nothing_is_installed(apt: Apt) -> None:
    result = apt.set(
        packages=[
            {"name": "demo-driver", "version": "580.159.04"},
            {"name": "demo-none", "version": "1"},
            {"name": "demo-extra"},
        ]
    )
    assert result["failed"]
    assert "demo-driver: version 580.159.04 is in no repository; available: 2.0-1 from" in result["msg"]
    assert "demo-none 1: no repository has a package of this name; searched: file:/srv/apt-set" in result["msg"]
    assert result["msg"].endswith("Nothing on the host was changed.")
    assert apt.machine.versions() == {}
    assert not apt.machine.path(SOURCE).exists()
    assert not apt.machine.path(KEYRING).exists()


def test_a_held_package_that_must_change_is_changed_and_held_again(apt: Apt) -> None:
    both = ("demo-driver", "demo-library")
    apt.set(packages=[{"name": name, "version": "1.0"} for name in both], hold=list(both))
    result = apt.set(packages=[{"name": name, "version": "1.1"} for name in both], hold=list(both))
    assert result["packages"]["demo-driver"] == {"before": "1.0-1", "after": "1.1-1"}
    assert apt.machine.selections() == {"demo-driver": "hold", "demo-library": "hold"}
    assert not apt.set(packages=[{"name": name, "version": "1.1"} for name in both], hold=list(both))["changed"]


def test_a_package_held_by_somebody_else_is_not_changed_as_a_side_effect(apt: Apt) -> None:
    apt.set(packages=[{"name": "demo-driver", "version": "1.0"}, {"name": "demo-library", "version": "1.0"}])
    apt.machine.run("apt-mark", "hold", "demo-library")
    for check in (True, False):
        result = apt.set(packages=[{"name": "demo-driver"}], allow_downgrade=False, check=check)
        assert not result["changed"]  # any version will do
        result = apt.set(packages=[{"name": "demo-driver", "version": "2.0"}], check=check)
        assert result["failed"]
        assert "demo-library" in result["msg"]
        assert "held" in result["msg"]
    assert apt.machine.versions()["demo-driver"] == "1.0-1"
    assert apt.machine.selections() == {"demo-driver": "install", "demo-library": "hold"}


def test_a_hold_on_something_that_will_not_be_there_is_found_before_anything_is_changed(apt: Apt) -> None:
    result = apt.set(packages=[{"name": "demo-extra"}], hold=["demo-extra", "demo-exrta"])
    assert "hold: demo-exrta is not installed, and not part of this set" in result["msg"]
    assert apt.machine.versions() == {}


def test_a_hold_is_lifted(apt: Apt) -> None:
    apt.set(packages=[{"name": "demo-extra"}], hold=["demo-extra"])
    result = apt.set(unhold=["demo-*"])
    assert result["held"] == ["demo-extra"]
    assert apt.machine.selections() == {"demo-extra": "install"}
    assert not apt.set(unhold=["demo-*"])["changed"]


def test_a_hold_that_is_lifted_lets_the_package_move_in_the_same_call(apt: Apt) -> None:
    """A held package stays where it is when it is only a dependency; check mode says what the run will do.

    Which version the dependency moves to is a matter of preferences, which come with the call, too.
    """
    apt.set(packages=[{"name": "demo-library", "version": "2.0"}], hold=["demo-library"])
    preferences = {"path": "/etc/apt/preferences.d/demo", "content": PREFERENCES}
    wanted: dict[str, Any] = {
        "packages": [{"name": "demo-older"}],
        "allow_downgrade": True,
        "preferences": [preferences],
    }
    assert apt.set(**wanted)["failed"]
    assert not apt.machine.path(preferences["path"]).exists()
    before = apt.traces()
    predicted = apt.set(**wanted, unhold=["demo-library"], check=True)
    assert not predicted.get("failed"), predicted
    assert apt.traces() == before
    done = apt.set(**wanted, unhold=["demo-library"])
    assert predicted["transactions"] == done["transactions"] != []
    assert predicted["held"] == done["held"] == ["demo-library"]
    assert apt.machine.versions() == {"demo-library": "1.1-1", "demo-older": "1.0-1"}
    assert apt.machine.selections() == {"demo-library": "install", "demo-older": "install"}
    assert apt.machine.path(preferences["path"]).read_text() == PREFERENCES
    assert not apt.set(**wanted, unhold=["demo-library"])["changed"]
    wanted["preferences"] = [{**preferences, "content": ""}]
    assert apt.set(**wanted)["changed"]
    assert not apt.machine.path(preferences["path"]).exists()
    assert not apt.set(**wanted)["changed"]


def test_a_downgrade_needs_permission(apt: Apt) -> None:
    apt.set(packages=[{"name": "demo-library", "version": "2.0"}])
    for check in (True, False):
        refused = apt.set(packages=[{"name": "demo-library", "version": "1.0"}], check=check)
        assert refused["failed"]
        assert "demo-library: 2.0-1 is installed, 1.0-1 is lower. Set allow_downgrade: true" in refused["msg"]
    assert apt.set(packages=[{"name": "demo-library", "version": "1.0"}], allow_downgrade=True)["changed"]
    assert apt.machine.versions() == {"demo-library": "1.0-1"}


def test_a_removal_that_nobody_asked_for_is_refused(apt: Apt) -> None:
    apt.set(packages=[{"name": "demo-old"}])
    for check in (True, False):
        refused = apt.set(packages=[{"name": "demo-new"}], check=check)
        assert refused["failed"]
        assert "apt would also remove demo-old" in refused["msg"]
    assert apt.machine.versions() == {"demo-old": "1.0-1"}
    assert apt.set(packages=[{"name": "demo-new"}], may_remove=["demo-o*"])["changed"]
    assert apt.machine.versions() == {"demo-new": "1.0-1"}


def test_one_package_replaces_another_in_one_transaction(apt: Apt) -> None:
    apt.set(packages=[{"name": "demo-old"}])
    wanted: dict[str, Any] = {
        "packages": [{"name": "demo-new"}],
        "absent": ["demo-ol?", "demo-never-there"],
        "purge": True,
    }
    predicted = apt.set(check=True, **wanted)
    real = apt.set(**wanted)
    assert real["packages"] == {
        "demo-new": {"before": None, "after": "1.0-1"},
        "demo-old": {"before": "1.0-1", "after": None},
    }
    assert predicted["packages"] == real["packages"]
    assert apt.machine.versions() == {"demo-new": "1.0-1"}
    assert apt.machine.selections() == {"demo-new": "install"}  # purged: not even its configuration is left
    assert not apt.set(**wanted)["changed"]


def test_removal_takes_dependencies_along_only_when_told(apt: Apt) -> None:
    apt.set(packages=[{"name": "demo-driver", "version": "2.0"}])
    apt.set(absent=["demo-driver"])
    assert apt.machine.versions() == {"demo-library": "2.0-1"}
    apt.set(packages=[{"name": "demo-driver", "version": "2.0"}])
    apt.set(absent=["demo-driver"], autoremove=True)
    assert apt.machine.versions() == {}


def test_what_depends_on_a_removed_package_is_not_removed_silently(apt: Apt) -> None:
    apt.set(packages=[{"name": "demo-driver", "version": "2.0"}])
    refused = apt.set(absent=["demo-library"])
    assert "apt would also remove demo-driver" in refused["msg"]
    assert len(apt.machine.versions()) == 2


def test_recommended_packages_come_only_when_asked_for(apt: Apt) -> None:
    apt.set(packages=[{"name": "demo-plain"}])
    assert apt.machine.versions() == {"demo-plain": "1.0-1"}
    apt.machine.run("dpkg", "--purge", "demo-plain")
    apt.set(packages=[{"name": "demo-plain"}], install_recommends=True)
    assert apt.machine.versions() == {"demo-plain": "1.0-1", "demo-extra": "1.0-1"}


@pytest.mark.parametrize("start", [True, False])
def test_services_are_left_alone_during_the_transaction_when_told(apt: Apt, start: bool) -> None:
    apt.set(packages=[{"name": "demo-service"}], start_services=start)
    seen = apt.machine.path("/srv/seen").read_text()
    assert ("exit 101" in seen) is not start
    assert not apt.machine.path("/usr/sbin/policy-rc.d").exists()


SETTINGS = "/etc/demo-reader/settings"


def settings(validate: str = "test -s %s") -> list[dict[str, Any]]:
    return [
        {"path": "/etc/demo-reader", "state": "directory", "mode": "0755"},
        {"path": SETTINGS, "content": "fast\n", "mode": "0644", "validate": validate},
    ]


@pytest.fixture
def no_settings(apt: Apt) -> Iterator[None]:
    yield
    apt.machine.run("rm", "-rf", "/etc/demo-reader", "/srv/seen")


@pytest.mark.usefixtures("no_settings")
def test_files_are_there_before_the_packages_scripts_run(apt: Apt) -> None:
    wanted: dict[str, Any] = {"packages": [{"name": "demo-reader"}], "files": settings()}
    predicted = apt.set(check=True, **wanted)
    assert predicted["changed"]
    assert SETTINGS in [diff["after_header"].split(" ")[0] for diff in predicted["diff"]]
    assert not apt.machine.path(SETTINGS).exists()
    assert apt.set(**wanted)["changed"]
    assert apt.machine.path("/srv/seen").read_text() == "fast\n"
    before = apt.traces()
    assert not apt.set(**wanted)["changed"]
    assert apt.traces() == before
    apt.machine.path(SETTINGS).write_text("slow\n")
    put_back = apt.set(**wanted)
    assert put_back["changed"]
    assert put_back["transactions"] == []
    assert apt.machine.path(SETTINGS).read_text() == "fast\n"


@pytest.mark.usefixtures("no_settings")
@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"packages": [{"name": "demo-nowhere"}], "files": settings()}, "demo-nowhere: no repository has a package"),
        ({"packages": [{"name": "demo-reader"}], "files": settings("test ! -s %s")}, "test refused the new content"),
    ],
    ids=["package", "file"],
)
def test_neither_files_nor_packages_change_where_one_of_them_cannot(
    apt: Apt, wanted: dict[str, Any], message: str
) -> None:
    refused = apt.set(**wanted)
    assert refused["failed"]
    assert message in refused["msg"]
    assert "Nothing on the host was changed" in refused["msg"]
    assert not apt.machine.path(SETTINGS).exists()
    assert not apt.machine.path("/srv/seen").exists()


def test_the_proof_is_run_when_everything_is_there_and_decides(apt: Apt) -> None:
    wanted: dict[str, Any] = {
        "packages": [{"name": "demo-plain"}],
        "proof": {"argv": ["dpkg-query", "--show", "demo-plain"], "expect": r"demo-plain\s1\.0-1"},
    }
    assert apt.set(check=True, **wanted)["changed"], "nothing to prove before it is there"
    assert "failed" not in apt.set(**wanted)
    wrong = {**wanted, "proof": {**wanted["proof"], "expect": "release 2"}}
    for check in (False, True):
        refused = apt.set(check=check, **wrong)
        assert refused["failed"]
        assert not refused["changed"]
        assert "dpkg-query --show demo-plain ended with status 0; 'release 2' is not in: demo-plain" in refused["msg"]
    absent = apt.set(packages=wanted["packages"], proof={"argv": ["demo-nowhere"], "expect": ""})
    assert "proof: demo-nowhere: No such file" in absent["msg"]


def test_a_proof_that_fails_after_a_change_does_not_hide_the_change(apt: Apt) -> None:
    failed = apt.set(packages=[{"name": "demo-plain"}], proof={"argv": ["false"], "expect": ""})
    assert failed["failed"]
    assert failed["changed"]
    assert "proof: false ended with status 1" in failed["msg"]
    assert "Nothing on the host was changed" not in failed["msg"]


def test_a_service_policy_that_a_killed_run_has_left_is_removed(apt: Apt) -> None:
    policy = apt.machine.path("/usr/sbin/policy-rc.d")
    policy.write_text("#!/bin/sh\n# Written by apt_set for one transaction of process 999999999\nexit 101\n")
    assert apt.set(repositories=[], check=True)["changed"]
    assert policy.exists()
    assert apt.set(repositories=[])["changed"]
    assert not policy.exists()
    assert not apt.set(repositories=[])["changed"]


def test_an_operators_own_service_policy_is_not_touched(apt: Apt) -> None:
    policy = apt.machine.path("/usr/sbin/policy-rc.d")
    policy.write_text("#!/bin/sh\nexit 0\n")
    apt.set(packages=[{"name": "demo-service"}], start_services=False)
    assert policy.read_text() == "#!/bin/sh\nexit 0\n"


def test_a_failing_package_script_is_reported_with_what_it_said_and_found_again_later(apt: Apt) -> None:
    result = apt.set(packages=[{"name": "demo-broken"}])
    assert result["failed"]
    assert "error processing package demo-broken" in result["msg"]
    again = apt.set(packages=[{"name": "demo-extra"}])
    assert "dpkg was interrupted on this host: demo-broken is half-configured" in again["msg"]
    assert "dpkg --configure -a" in again["msg"]


def test_an_interrupted_dpkg_is_repaired_when_told(apt: Apt) -> None:
    apt.set()
    apt.machine.run("sh", "-c", "cd /srv && dpkg --unpack apt-set/demo-extra_1.0-1_all.deb")
    refused = apt.set(packages=[{"name": "demo-plain"}])
    assert "demo-extra is unpacked" in refused["msg"]
    assert apt.set(packages=[{"name": "demo-plain"}], repair_interrupted=True)["changed"]
    assert apt.machine.versions() == {"demo-extra": "1.0-1", "demo-plain": "1.0-1"}


@pytest.mark.parametrize("path", ["/var/lib/dpkg/lock-frontend", "/var/lib/apt/lists/lock"])
def test_a_lock_that_is_not_released_is_reported_with_its_holder(apt: Apt, path: str) -> None:
    with locked(apt.machine.path(path)):
        began = time.monotonic()
        result = apt.set(packages=[{"name": "demo-extra"}], lock_timeout=1)
        assert 1 <= time.monotonic() - began < 60
    assert result["failed"]
    command = Path("/proc/self/cmdline").read_text().split("\0")[0]
    assert f"{path} is held by process {os.getpid()} ({command}" in result["msg"]
    assert apt.machine.versions() == {}


def test_a_lock_that_is_released_in_time_is_waited_for(apt: Apt) -> None:
    script = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.lockf(f, 2); print(1, flush=True); time.sleep(2)"
    )
    path = apt.machine.path("/var/lib/dpkg/lock-frontend")
    with subprocess.Popen(["/usr/bin/python3", "-c", script, path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        assert apt.set(packages=[{"name": "demo-extra"}], lock_timeout=60)["changed"]
        assert holder.wait() == 0
    assert apt.machine.versions() == {"demo-extra": "1.0-1"}


class locked:  # noqa: N801 - reads as a verb
    def __init__(self, path: Path) -> None:
        self.stream = path.open("w")

    def __enter__(self) -> None:
        fcntl.lockf(self.stream, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.stream.close()


@pytest.mark.parametrize("form", ["asc", "gpg"])
@pytest.mark.parametrize("keyring", ["/usr/share/keyrings/demo.gpg", "/etc/apt/keyrings/demo.asc"])
def test_a_key_is_accepted_in_either_form_and_stored_as_its_name_says(apt: Apt, form: str, keyring: str) -> None:
    repository = apt.repository(key_url=f"file:/srv/good.{form}", signed_by=keyring)
    result = apt.set(repositories=[repository], packages=[{"name": "demo-extra"}])
    assert result["changed"], result
    assert apt.machine.path(keyring).read_bytes().startswith(b"-----BEGIN PGP") is keyring.endswith(".asc")
    assert not apt.set(repositories=[repository], packages=[{"name": "demo-extra"}])["changed"]
    apt.machine.path(keyring).unlink()


def test_a_key_with_another_fingerprint_is_refused_before_anything_is_written(apt: Apt) -> None:
    for check in (True, False):
        result = apt.set(
            repositories=[apt.repository(key_url="file:/srv/other.asc")], packages=[{"name": "demo-extra"}], check=check
        )
        assert result["failed"]
        assert f"file:/srv/other.asc: it holds the key {apt.other_key}; allowed: {apt.key}" in result["msg"]
    assert not apt.machine.path(KEYRING).exists()
    assert not apt.machine.path(SOURCE).exists()


def test_a_keyring_with_an_extra_key_is_refused_and_replaced(apt: Apt) -> None:
    apt.machine.run("sh", "-c", "cat /srv/good.gpg /srv/other.gpg > /srv/both.gpg")
    refused = apt.set(repositories=[apt.repository(key_url="file:/srv/both.gpg")])
    assert f"it holds the key {apt.other_key}" in refused["msg"]
    apt.machine.path(KEYRING).write_bytes(apt.machine.path("/srv/both.gpg").read_bytes())
    assert apt.set()["changed"]
    assert apt.machine.path(KEYRING).read_bytes() == apt.machine.path("/srv/good.gpg").read_bytes()


def test_a_repository_signed_by_another_key_is_not_used(apt: Apt) -> None:
    repository = apt.repository(key_url="file:/srv/other.asc", key_fingerprints=[apt.other_key])
    result = apt.set(repositories=[repository], packages=[{"name": "demo-extra"}])
    assert result["failed"]
    assert "NO_PUBKEY" in result["msg"]
    assert "signature does not fit its key" in result["msg"]


@pytest.mark.parametrize(
    "content",
    ["", "<html>404</html>", "-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n!!\n-----END PGP PUBLIC KEY BLOCK-----\n"],
)
def test_what_is_no_key_is_not_written(apt: Apt, content: str) -> None:
    apt.machine.path("/srv/bad.asc").write_text(content)
    result = apt.set(repositories=[apt.repository(key_url="file:/srv/bad.asc")])
    assert "file:/srv/bad.asc: it is not an OpenPGP public key" in result["msg"]
    assert not apt.machine.path(KEYRING).exists()


def test_a_keyring_package_is_installed_and_its_own_source_file_removed(apt: Apt) -> None:
    machine = apt.machine
    ring, listing = "/usr/share/keyrings/demo-package.gpg", "/etc/apt/sources.list.d/demo-package.list"
    contents: dict[str, str | bytes] = {
        ring: machine.path("/srv/good.gpg").read_bytes(),
        listing: f"deb [signed-by={ring}] file:{REPOSITORY} ./\n",
    }
    deb = str(build_package(machine, "demo-keyring", "1.1-1", where=Path("/srv"), files=contents))
    checksum = machine.run("sha256sum", deb).stdout.split()[0]
    package = {"name": "demo-keyring", "version": "1.1-1", "url": f"file:{deb}", "sha256": checksum}
    repository = apt.repository(key_url=None, keyring_package=package, signed_by=ring)
    wanted: dict[str, Any] = {
        "repositories": [repository],
        "stale_files": [listing],
        "packages": [{"name": "demo-extra"}],
    }
    assert apt.set(check=True, **wanted)["packages"]["demo-extra"]["after"] == "1.0-1"
    assert machine.versions() == {}
    result = apt.set(**wanted)
    assert result["changed"], result
    assert machine.versions() == {"demo-extra": "1.0-1", "demo-keyring": "1.1-1"}
    assert [path.name for path in machine.path("/etc/apt/sources.list.d").iterdir()] == ["demo.sources"]
    assert not apt.set(**wanted)["changed"]

    package["sha256"] = "0" * 64
    machine.run("dpkg", "--purge", "demo-keyring")
    refused = apt.set(**wanted)
    assert f"file:{deb}: sha256 is {checksum}, expected {'0' * 64}" in refused["msg"]


def test_a_second_declaration_of_the_repository_is_named_and_removed_as_stale(apt: Apt) -> None:
    stale = apt.machine.path("/etc/apt/sources.list.d/old.list")
    stale.write_text(f"deb [signed-by=/srv/other.gpg] file:{REPOSITORY} ./\n")
    refused = apt.set(packages=[{"name": "demo-extra"}])
    assert "Conflicting values set for option Signed-By" in refused["msg"]
    assert "also in /etc/apt/sources.list.d/old.list" in refused["msg"]
    assert apt.set(packages=[{"name": "demo-extra"}], stale_files=["/etc/apt/sources.list.d/old.list"])["changed"]
    assert not stale.exists()


def test_a_broken_repository_of_somebody_else_is_a_warning_and_a_broken_one_of_ours_an_error(apt: Apt) -> None:
    apt.machine.path("/etc/apt/sources.list.d/foreign.list").write_text("deb [trusted=yes] file:/srv/nowhere ./\n")
    result = apt.set(packages=[{"name": "demo-extra"}])
    assert result["changed"], result
    assert "/srv/nowhere" in str(result["warnings"])
    broken = apt.repository(uris=["file:/srv/gone"])
    result = apt.set(repositories=[broken], packages=[{"name": "demo-driver"}])
    assert result["failed"]
    assert "/srv/gone" in result["msg"]


def test_lists_that_lack_the_wanted_version_are_fetched_again(apt: Apt) -> None:
    apt.set(packages=[{"name": "demo-extra"}])
    build_package(apt.machine, "demo-late", "1.0-1")
    index(apt.machine, apt.key)
    assert apt.set(packages=[{"name": "demo-late", "version": "1.0"}])["changed"]


class Moving(http.server.SimpleHTTPRequestHandler):
    """A repository that is being renewed: what `stale` names comes `times` times as it was, or not at all."""

    stale: ClassVar[dict[str, bytes]] = {}
    times = 0

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[-1]
        if name in self.stale and type(self).times > 0:
            type(self).times -= 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.stale[name])))
            self.end_headers()
            self.wfile.write(self.stale[name])
            return
        super().do_GET()

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def moving(apt: Apt) -> Iterator[tuple[dict[str, Any], type[Moving]]]:
    handler = type("Handler", (Moving,), {"stale": {}, "times": 0})
    directory = str(apt.machine.path(REPOSITORY))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=directory)) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield apt.repository(uris=[f"http://127.0.0.1:{server.server_address[1]}"]), handler
        server.shutdown()


@pytest.mark.parametrize("name", ["Packages.gz", "demo-extra_1.0-1_all.deb"], ids=["lists", "package"])
@pytest.mark.parametrize("change", [lambda old: old + b"x", lambda old: old[:-1] + b"x"], ids=["size", "sum"])
def test_a_mirror_in_the_middle_of_a_renewal_is_asked_once_more(
    apt: Apt, moving: tuple[dict[str, Any], type[Moving]], name: str, change: Callable[[bytes], bytes]
) -> None:
    repository, handler = moving
    old = apt.machine.path(REPOSITORY / name).read_bytes()
    handler.stale, handler.times = {name: change(old)}, 1
    result = apt.set(repositories=[repository], packages=[{"name": "demo-extra"}])
    assert result["changed"], result
    assert handler.times == 0
    assert apt.machine.versions() == {"demo-extra": "1.0-1"}


def test_a_mirror_that_never_fits_together_is_an_error(apt: Apt, moving: tuple[dict[str, Any], type[Moving]]) -> None:
    repository, handler = moving
    handler.stale, handler.times = {"demo-extra_1.0-1_all.deb": b"something else"}, 1000
    result = apt.set(repositories=[repository], packages=[{"name": "demo-extra"}])
    assert result["failed"]
    assert "the mirror is being renewed, or is damaged" in result["msg"]
    assert apt.machine.versions() == {}


def test_an_unreachable_key_is_reported_with_its_address(apt: Apt) -> None:
    result = apt.set(repositories=[apt.repository(key_url="http://127.0.0.1:9/key")])
    assert "http://127.0.0.1:9/key: cannot be downloaded" in result["msg"]
    assert not apt.machine.path(SOURCE).exists()


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"repositories": [{"name": "a b"}]}, "missing required arguments"),
        ({"repository": []}, "Unsupported parameters"),
        ({"packages": [{"name": "x", "versoin": "1"}]}, "versoin"),
        ({"packages": [{"name": "Bad Name"}]}, "'Bad Name' is not a package name"),
        ({"packages": [{"name": "demo-x"}], "first": [{"name": "demo-x"}]}, "demo-x is named twice"),
        ({"packages": [{"name": "demo-x"}], "absent": ["demo-*"]}, "absent: demo-x is also in packages"),
        (
            {"packages": [{"name": "demo-x"}], "hold": ["demo-*"], "unhold": ["demo-x"]},
            "unhold: demo-x is also in hold",
        ),
        ({"hold": ["demo-none"]}, "hold: demo-none is not installed"),
        ({"stale_files": ["etc/x"]}, "etc/x is not an absolute path"),
        ({"proof": {"argv": [], "expect": ""}}, "proof: argv is empty"),
        ({"proof": {"argv": ["true"], "expect": "("}}, "proof: expect: '(' is not a regular expression"),
    ],
)
def test_bad_input_is_named(apt: Apt, parameters: dict[str, Any], message: str) -> None:
    parameters.setdefault("repositories", [])
    result = apt.set(**parameters)
    assert result["failed"]
    assert message in result["msg"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a b"}, "'a b' may hold letters"),
        ({"suites": ["bookworm"]}, "components: missing"),
        ({"components": ["main"]}, "leave them out"),
        ({"signed_by": "/usr/share/keyrings/demo.key"}, "must be an absolute path that ends in .gpg or .asc"),
        ({"key_fingerprints": ["3BF863CC"]}, "'3BF863CC' is not a whole fingerprint"),
        (
            {"keyring_package": {"name": "a", "version": "1", "url": "x"}},
            "key_url and keyring_package: give one of them",
        ),
        ({"key_url": None}, "there is no such file; give key_url or keyring_package"),
        ({"key_url": "ftp://x/key"}, "ftp://x/key: must begin with https://"),
    ],
)
def test_a_bad_repository_is_named(apt: Apt, changes: dict[str, Any], message: str) -> None:
    result = apt.set(repositories=[apt.repository(**changes)])
    assert result["failed"]
    assert message in result["msg"]
    assert not apt.machine.path(SOURCE).exists()
