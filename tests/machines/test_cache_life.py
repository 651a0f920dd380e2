"""One cache's life on a real kernel: made, filled in spite of a power cut, robbed of a drive, rebuilt.

Each play costs tens of seconds here, so a test asks for several things at once. Tests follow each other on one cache.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.hosts.machine import REPOSITORY
from tests.stand_ins.hub import content

from .caches import BY_ID, MOUNT, POINT, cache, state
from .image import GATEWAY
from .machine import GIB, Drive, Machine

pytestmark = [pytest.mark.machines, pytest.mark.usefixtures("blank_drives")]

MODEL = "openai/gpt-oss-120b"
REVISION = content.repositories()[MODEL].revision
SNAPSHOT = f"{POINT}/weights/models--{MODEL.replace('/', '--')}/snapshots/{REVISION}"
HELD_BYTES = 512 << 10  # of each large file, before the power goes
# What a host serves, so that whole playbooks can be run; the stand-in hub's model is small enough for these drives.
SERVES: dict[str, object] = {
    "serving_gpu": "H200",
    "serving_gpu_count": 1,
    "serving_engine": "tensorrt_llm",
    "serving_profile": "low_latency",
    "serving_catalog_overlay": str(REPOSITORY / "tests/stand_ins/hub/catalog_overlay"),
    "model_cache_minimum_drive_bytes": GIB,
}

# Whoever opens a drive or array for writing is seen when it closes it.
WATCH = """
import ctypes, glob, os, struct
libc = ctypes.CDLL(None)
watch = libc.inotify_init()
paths = [path for path in glob.glob("/dev/nvme*n*") + glob.glob("/dev/md*") if not os.path.isdir(path)]
names = {libc.inotify_add_watch(watch, path.encode(), 8): path for path in paths}
open("/run/watching", "w").close()
while True:
    seen = os.read(watch, 4096)
    with open("/run/written", "a") as file:
        file.write(names[struct.unpack_from("i", seen)[0]] + "\\n")
"""
# Part of the initramfs: the arrays' names, before the root filesystem has a say.
NAMES = """#!/bin/sh
[ "$1" = prereqs ] || echo /dev/md/* > /run/names-in-initramfs
"""
NAMES_SCRIPT = "/etc/initramfs-tools/scripts/init-bottom/names"
SPARE = Drive("SN0005", 2 * GIB)


def test_unused_drives_become_a_striped_cache(machine: Machine) -> None:
    machine.put({NAMES_SCRIPT: NAMES.encode()}, modes={NAMES_SCRIPT: 0o755})
    done = cache(machine, model_cache_drives="auto")
    assert done.returncode == 0
    seen = state(machine)
    assert seen["filesystem"].split()[0] == "xfs"
    assert "noatime" in seen["filesystem"]
    assert (seen["unit"], seen["record"], seen["arrays"]) == ("enabled", "ready", "1")
    geometry = machine.run(f"xfs_info {POINT}")
    assert "sunit=128    swidth=512 blks" in geometry  # 512 KiB on each of four drives, in blocks of 4 KiB
    machine.run(f"echo weights > {POINT}/weights/file; sync")


def test_a_second_run_changes_nothing_and_opens_no_device_for_writing(machine: Machine) -> None:
    machine.put({"/root/watch.py": WATCH.encode()})
    machine.run(
        "rm -f /run/written /run/watching; systemd-run --quiet --unit=watch-drives python3 /root/watch.py\n"
        "for n in $(seq 3000); do test -e /run/watching && exit 0; sleep 0.1; done; exit 1"
    )
    done = cache(machine, model_cache_drives="auto")
    assert done.returncode == 0
    assert "changed=0" in done.stdout
    # The watch does see a device that is opened for writing, and this is the first it sees.
    written, opened = machine.run(
        f"exec 3<>{BY_ID[0]}; exec 3>&-\n"
        "for n in $(seq 3000); do test -s /run/written && break; sleep 0.1; done\n"
        f"systemctl stop watch-drives; cat /run/written; realpath {BY_ID[0]}"
    ).split()
    assert written == opened


def test_growing_and_converting_are_refused(machine: Machine) -> None:
    machine.plug(SPARE)
    done = cache(machine, model_cache_drives=[*BY_ID, SPARE.by_id], model_cache_raid_level="raid10")
    assert done.returncode != 0
    for words in (
        f"{SPARE.by_id} would be added; a cache is not grown",
        "was made with raid0, now raid10",
        "docs/runbooks/rebuild-cache.md",
    ):
        assert words in done.stdout


# --- a download that is cut ------------------------------------------------------------------------------------------


class Mirror(ThreadingHTTPServer):
    """A web server with a model's files; it sends half of each large one, and the rest when the hold is lifted."""

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), MirrorHandler)
        self.files = files
        self.released = threading.Event()
        self.large = {path: body for path, body in files.items() if len(body) > HELD_BYTES}
        self.asked: list[tuple[str, int]] = []  # path and first byte of each answer

    def handle_error(self, request: object, client_address: object) -> None:
        """A machine without power is no error of the server."""


class MirrorHandler(BaseHTTPRequestHandler):
    server: Mirror

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        body = self.answer()
        if len(body) > HELD_BYTES and not self.server.released.is_set():
            self.wfile.write(body[:HELD_BYTES])
            self.wfile.flush()
            self.server.released.wait()
            return
        self.wfile.write(body)

    def answer(self) -> bytes:
        path = self.path.lstrip("/")
        first = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        whole = self.server.files[path]
        if self.command == "GET":
            self.server.asked.append((path, first))
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(whole) - 1}/{len(whole)}")
        self.send_header("Content-Length", str(len(whole) - first))
        self.end_headers()
        return whole[first:]

    def log_message(self, *_: object) -> None:
        """Requests are noted, not printed."""


@pytest.fixture(scope="module")
def mirror() -> Iterator[Mirror]:
    model = content.repositories()[MODEL]
    files = {file.path: file.content for file in model.files if not file.path.startswith(("original/", "metal/"))}
    listed = [
        {"path": path, "size": len(body), "sha256": hashlib.sha256(body).hexdigest()} for path, body in files.items()
    ]
    manifest = {
        "format_version": 1,
        "repository": MODEL,
        "revision": model.revision,
        "source": "stand-in",
        "files": listed,
        "encodings": [],
    }
    with Mirror({**files, "manifest.json": json.dumps(manifest).encode()}) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()


def fetch(machine: Machine, mirror: Mirror) -> CompletedProcess[str]:
    """Run the role model_weights."""
    return machine.play(
        [{"hosts": "all", "gather_facts": False, "become": True, "roles": ["model_weights"]}],
        model_weights_model={"name": "gpt-oss-120b", "repository": MODEL, "revision": REVISION},
        model_weights_source="http",
        model_weights_url=f"http://{GATEWAY}:{mirror.server_address[1]}",
        model_weights_keep_free_bytes=0,
    )


def test_the_power_goes_in_a_download(machine: Machine, mirror: Mirror) -> None:
    template = (REPOSITORY / "roles/inference_server/templates/gpt-oss@.service.j2").read_text()
    line = next(line for line in template.splitlines() if line.startswith("RequiresMountsFor="))
    assert line == "RequiresMountsFor={{ inference_server_cache_directory }}"
    unit = (
        f"[Unit]\nRequiresMountsFor={POINT}\n[Service]\nType=oneshot\nRemainAfterExit=yes\n"
        f"ExecStart=/bin/cat {POINT}/weights/file\n[Install]\nWantedBy=multi-user.target\n"
    )
    machine.put({"/etc/systemd/system/server.service": unit.encode()})
    machine.run("systemctl daemon-reload; systemctl enable --quiet server")
    cut = threading.Thread(target=fetch, args=(machine, mirror))
    cut.start()
    half = f"find {POINT}/staging -size {HELD_BYTES}c"
    machine.run(
        f"for n in $(seq 12000); do test $({half} | wc -l) = {len(mirror.large)} && break; sleep 0.1; done\n"
        f"{half} | grep -c . >&2; findmnt --mountpoint {POINT}; sync; echo lost > /root/lost"
    )
    machine.power_cut()
    cut.join()
    assert sorted(path for path, _ in mirror.asked if path in mirror.large) == sorted(mirror.large)
    machine.start_again()
    # What was not on the disks is lost, and what is not whole has not got its name.
    assert machine.run(f"test -s /root/lost || echo lost; test -e {SNAPSHOT} || echo hidden").split() == [
        "lost",
        "hidden",
    ]


def test_after_that_boot_it_is_mounted_before_the_server_starts(machine: Machine) -> None:
    assert state(machine)["filesystem"].split()[0] == "xfs"
    told = machine.run(
        "cat /run/names-in-initramfs\n"
        "systemctl show --property=After --value server\n"
        "systemctl is-active server\n"
        "journalctl --boot --unit server --output cat | grep -c weights"
    ).splitlines()
    assert told[0] == "/dev/md/gpt-oss-cache"
    assert MOUNT.replace("\\", "\\\\") in told[1]  # as systemctl quotes it
    assert told[2:] == ["active", "1"]


def test_the_next_run_finishes_the_download_and_asks_for_no_byte_twice(machine: Machine, mirror: Mirror) -> None:
    mirror.asked.clear()
    mirror.released.set()
    assert fetch(machine, mirror).returncode == 0
    assert sorted(asked for asked in mirror.asked if asked[0] in mirror.large) == [
        (path, HELD_BYTES) for path in sorted(mirror.large)
    ]
    sums = "".join(f"{hashlib.sha256(body).hexdigest()}  {SNAPSHOT}/{path}\n" for path, body in mirror.large.items())
    machine.run(f"sha256sum --quiet --check - <<'END'\n{sums}END")


# --- a drive that is lost ---------------------------------------------------------------------------------------------


def verdict(machine: Machine, directory: Path) -> dict[str, object]:
    """The check of the cache's drives, of a whole verdict; the host serves nothing, so the verdict is not ok."""
    machine.play(REPOSITORY / "playbooks/diagnose.yml", verdict_directory=str(directory), **SERVES)
    checks = json.loads((directory / "machine.json").read_text())["checks"]
    found: dict[str, object] = next(check for check in checks if check["id"] == "cache.drives")
    return found


@pytest.mark.usefixtures("no_initramfs")
def test_a_lost_drive_is_told_of_and_the_cache_is_rebuilt_with_another(machine: Machine, tmp_path: Path) -> None:
    hurry = "/etc/systemd/system.conf.d/zz-hurry.conf"  # the test machine's patience with a slow drive is half an hour
    machine.put({hurry: b"[Manager]\nDefaultDeviceTimeoutSec=20s\n"})
    machine.unplug("SN0003")
    machine.reboot()  # the host boots without its cache, and the server waits
    assert machine.run(f"rm {hurry}; systemctl is-active server || true").strip() == "inactive"
    found = verdict(machine, tmp_path)
    assert found["ok"] is False
    assert "(serial SN0003) is gone" in str(found["seen"])
    assert "rebuild_cache.yml" in str(found["remedy"])
    rebuilt = machine.play(
        REPOSITORY / "playbooks/rebuild_cache.yml", "--tags", "model_cache", model_cache_drives="auto", **SERVES
    )
    assert rebuilt.returncode == 0
    seen = state(machine)
    assert (seen["filesystem"].split()[0], seen["record"], seen["arrays"]) == ("xfs", "ready", "1")
    assert verdict(machine, tmp_path)["ok"] is True
    machine.run(f"systemctl disable --quiet --now server; rm /etc/systemd/system/server.service {NAMES_SCRIPT}")
