"""unit_set against a real systemd, in a container."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import ansible
import pytest

from tests.hosts import hosts
from tests.plugins.conftest import ROOT, WRAPPER

pytestmark = pytest.mark.hosts

SERVICE = "[Service]\nExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n"
CLEAN = """
systemctl disable --now demo-a demo-b demo@0 demo@1 demo-bad
rm -rf /etc/systemd/system/demo*
systemctl daemon-reload
systemctl reset-failed
"""


class Systemd:
    """A host with systemd, and short forms for what the tests say often."""

    def __init__(self, host: hosts.Host) -> None:
        self.host = host

    def sh(self, script: str, check: bool = True) -> str:
        return hosts.execute(self.host.name, "sh", "-c", script, check=check).strip()

    def write(self, path: str, content: str) -> None:
        subprocess.run(
            ["podman", "exec", "-i", self.host.container, "sh", "-c", f"mkdir -p $(dirname {path}) && cat > {path}"],
            input=content.encode(),
            check=True,
        )

    def pid(self, unit: str) -> str:
        return self.sh(f"systemctl show -P MainPID {unit}")

    def set(self, *units: dict[str, Any], check: bool = False, **parameters: Any) -> dict[str, Any]:
        internal = {"_ansible_check_mode": check, "_ansible_diff": True, "_ansible_module_name": "unit_set"}
        python = (
            "/usr/bin/python3",
            "-B",
            "-c",
            WRAPPER,
            "/srv/plugins/modules/unit_set.py",
            "/srv/plugins/module_utils",
        )
        done = subprocess.run(
            ["podman", "exec", "-i", "--env", "PYTHONPATH=/srv/ansible", self.host.container, *python],
            input=json.dumps({"ANSIBLE_MODULE_ARGS": {"units": units, **parameters, **internal}}),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.strip().startswith("{"), done.stdout + done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result


@pytest.fixture(scope="module")
def host(plugin_host: hosts.Host) -> Systemd:
    # What Ansible's wrapper sends along with a module: module_utils, in a package that is empty otherwise.
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(ROOT / "plugins", "srv/plugins")
        tar.addfile(tarfile.TarInfo("srv/ansible/ansible/__init__.py"))
        for name in ("module_utils", "_internal", "release.py"):
            tar.add(Path(ansible.__file__).parent / name, f"srv/ansible/ansible/{name}")
    unpack = ["podman", "exec", "-i", plugin_host.container, "tar", "-x", "-C", "/", "--no-same-owner"]
    subprocess.run(unpack, input=packed.getvalue(), check=True)
    return Systemd(plugin_host)


@pytest.fixture
def systemd(host: Systemd) -> Systemd:
    host.sh(CLEAN, check=False)
    for name in ("demo-a", "demo-b", "demo@"):
        host.write(f"/etc/systemd/system/{name}.service", SERVICE)
    host.write(
        "/etc/systemd/system/demo-bad.service",
        "[Service]\nExecStart=/bin/sh -c 'echo out of memory; exit 3'\nType=oneshot\n",
    )
    return host


def test_units_are_enabled_and_started_once_and_a_second_run_does_nothing(systemd: Systemd) -> None:
    units = [
        {"name": "demo-a", "enabled": True, "state": "started"},
        {"name": "demo@1.service", "enabled": True, "state": "started"},
    ]
    predicted = systemd.set(*units, check=True)
    assert systemd.sh("systemctl is-active demo-a", check=False) == "inactive"
    first = systemd.set(*units)
    assert first["actions"] == ["enable demo-a.service demo@1.service", "start demo-a.service demo@1.service"]
    assert predicted["actions"] == first["actions"]
    assert predicted["diff"] == first["diff"]
    assert first["states"]["demo@1.service"] == {
        "load": "loaded",
        "active": "active",
        "sub": "running",
        "enabled": "enabled",
        "result": "success",
    }
    second = systemd.set(*units)
    assert not second["changed"]
    assert second["actions"] == []
    assert "diff" not in second


def test_units_are_stopped_disabled_and_masked(systemd: Systemd) -> None:
    systemd.set({"name": "demo-a", "enabled": True, "state": "started"}, {"name": "demo-b", "state": "started"})
    systemd.sh("mv /etc/systemd/system/demo-b.service /usr/lib/systemd/system/ && systemctl daemon-reload")
    wanted = [
        {"name": "demo-a", "enabled": False, "state": "stopped"},
        {"name": "demo-b", "state": "stopped", "masked": True},
    ]
    result = systemd.set(*wanted)
    assert result["actions"] == ["disable demo-a.service", "stop demo-a.service demo-b.service", "mask demo-b.service"]
    assert systemd.sh("systemctl is-enabled demo-a demo-b", check=False).split() == ["disabled", "masked"]
    assert not systemd.set(*wanted)["changed"]
    assert systemd.set({"name": "demo-b", "masked": False, "state": "started"})["actions"] == [
        "unmask demo-b.service",
        "start demo-b.service",
    ]
    systemd.sh("systemctl stop demo-b; rm /usr/lib/systemd/system/demo-b.service")


def test_what_is_left_out_stays_as_it_is(systemd: Systemd) -> None:
    systemd.sh("systemctl enable --now demo-a")
    assert not systemd.set({"name": "demo-a"}, {"name": "demo-b"})["changed"]
    assert systemd.sh("systemctl is-active demo-a demo-b", check=False).split() == ["active", "inactive"]


def test_systemd_reads_its_files_again_only_when_one_has_changed(systemd: Systemd) -> None:
    units = [{"name": "demo-a", "state": "started"}, {"name": "demo-b", "state": "started"}]
    systemd.set(*units)
    assert systemd.set(*units)["actions"] == []
    systemd.write("/etc/systemd/system/demo-b.service.d/limits.conf", "[Service]\nTasksMax=99\n")
    assert systemd.set(*units, daemon_reload="never")["actions"] == []
    assert systemd.set(*units)["actions"] == ["daemon-reload"]
    assert systemd.sh("systemctl show -P TasksMax demo-b") == "99"
    assert systemd.set(*units)["actions"] == []
    assert systemd.set(*units, daemon_reload="always")["actions"] == ["daemon-reload"]
    systemd.sh("rm /etc/systemd/system/demo-b.service.d/limits.conf")
    assert systemd.set(*units)["actions"] == ["daemon-reload"]
    systemd.write("/etc/systemd/system/demo@.service.d/all.conf", "[Service]\nTasksMax=98\n")
    systemd.write("/etc/systemd/system/demo@1.service.d/own.conf", "[Service]\nTasksMax=97\n")
    instances = [{"name": "demo@0", "state": "started"}, {"name": "demo@1", "state": "started"}]
    systemd.set(*instances)
    assert systemd.sh("systemctl show -P TasksMax --value demo@0 demo@1").split() == ["98", "97"]
    assert systemd.set(*instances)["actions"] == []
    systemd.write("/etc/systemd/system/demo-b.service", SERVICE + "# changed\n")
    assert systemd.set(*units)["actions"] == ["daemon-reload"]


def test_a_running_unit_is_restarted_once_when_one_of_its_files_is_newer(systemd: Systemd) -> None:
    systemd.write("/etc/demo.conf", "one\n")
    unit = {"name": "demo@0", "state": "started", "restart_when_newer": ["/etc/nothing-here", "/etc/demo.conf"]}
    systemd.set(unit)
    before = systemd.pid("demo@0")
    assert not systemd.set(unit)["changed"]
    assert systemd.pid("demo@0") == before

    systemd.write("/etc/demo.conf", "two\n")
    predicted = systemd.set(unit, check=True)
    assert predicted["restarted"] == {"demo@0.service": "/etc/demo.conf is newer"}
    assert systemd.pid("demo@0") == before
    result = systemd.set(unit)
    assert result["actions"] == ["restart demo@0.service"]
    assert systemd.pid("demo@0") != before
    assert not systemd.set(unit)["changed"]


def test_a_stopped_unit_is_not_started_because_a_file_is_newer(systemd: Systemd) -> None:
    systemd.write("/etc/demo.conf", "one\n")
    assert not systemd.set({"name": "demo-a", "restart_when_newer": ["/etc/demo.conf"]})["changed"]
    systemd.sh("systemctl start demo-a")
    systemd.write("/etc/demo.conf", "two\n")
    assert systemd.set({"name": "demo-a", "restart_when_newer": ["/etc/demo.conf"]})["actions"] == [
        "restart demo-a.service"
    ]


def test_restarted_always_restarts(systemd: Systemd) -> None:
    systemd.set({"name": "demo-a", "state": "started"})
    before = systemd.pid("demo-a")
    assert systemd.set({"name": "demo-a", "state": "restarted"})["actions"] == ["restart demo-a.service"]
    assert systemd.pid("demo-a") != before


def test_a_unit_that_fails_is_reported_with_its_journal(systemd: Systemd) -> None:
    result = systemd.set({"name": "demo-a", "state": "started"}, {"name": "demo-bad", "state": "started"})
    assert result["failed"]
    assert "systemctl start demo-a.service demo-bad.service failed" in result["msg"]
    assert "demo-bad.service: " in result["msg"]
    assert "out of memory" in result["msg"]
    assert result["states"]["demo-bad.service"]["result"] == "exit-code"
    assert list(result["journal"]) == ["demo-bad.service"]


def test_a_unit_that_used_up_its_attempts_is_started_again_when_asked(systemd: Systemd) -> None:
    systemd.write(
        "/etc/systemd/system/demo-b.service",
        "[Unit]\nStartLimitBurst=2\nStartLimitIntervalSec=600\n"
        "[Service]\nExecStart=/bin/sh -c 'test -e /run/demo-up && sleep infinity'\nRestart=always\nRestartSec=10ms\n",
    )
    systemd.sh(
        "rm -f /run/demo-up; systemctl daemon-reload; systemctl start demo-b; "
        "timeout 10 sh -c 'until systemctl is-failed --quiet demo-b; do sleep 0.1; done'"
    )
    assert (
        "start-limit-hit" in systemd.sh("systemctl show -P Result demo-b")
        or systemd.sh("systemctl is-failed demo-b") == "failed"
    )
    systemd.sh("touch /run/demo-up")
    assert systemd.set({"name": "demo-b", "state": "started"})["states"]["demo-b.service"]["active"] == "active"
    systemd.sh("rm /run/demo-up")


def test_a_unit_that_does_not_exist_is_an_error_but_only_a_warning_in_check_mode(systemd: Systemd) -> None:
    units = [{"name": "demo-a", "state": "started"}, {"name": "demo-none", "state": "started"}]
    result = systemd.set(*units)
    assert "demo-none.service (not-found): no such unit on this host. Nothing was started or stopped" in result["msg"]
    assert systemd.sh("systemctl is-active demo-a", check=False) == "inactive"
    predicted = systemd.set(*units, check=True)
    assert predicted["changed"]
    assert "demo-none.service: does not exist so far" in str(predicted["warnings"])
    assert not systemd.set({"name": "demo-none", "state": "stopped", "enabled": False})["changed"]


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (
            [{"name": "demo-a", "state": "running"}],
            "value of state must be one of: started, stopped, restarted, got: running",
        ),
        ([{"name": "demo-a", "enable": True}], "enable"),
        ([{"name": "demo-a"}, {"name": "demo-a.service"}], "demo-a.service is named twice"),
    ],
)
def test_bad_input_is_named(systemd: Systemd, units: list[dict[str, Any]], message: str) -> None:
    result = systemd.set(*units)
    assert result["failed"]
    assert message in result["msg"]
