"""Drives become a cache on a real kernel: made, found after a reboot, lost, rebuilt; those in use are never touched.

Each play costs tens of seconds here, so a test asks for several things at once. Tests follow each other on one cache.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.hosts.machine import REPOSITORY
from tests.stand_ins.hub import content

from .image import GATEWAY
from .machine import GIB, Drive, Machine

pytestmark = pytest.mark.machines

POINT = "/var/lib/gpt-oss"
RECORD = "/var/lib/gpt-oss-drives/record.json"
OWN = "/usr/local/sbin/"  # found before the system's
MOUNT = r"var-lib-gpt\x2doss.mount"
SERIALS = ("SN0001", "SN0002", "SN0003", "SN0004")
DRIVES = tuple(Drive(serial, 2 * GIB) for serial in SERIALS)
BY_ID = [drive.by_id for drive in DRIVES]
SMALL: dict[str, object] = {"model_cache_required_bytes": 10**9, "model_cache_minimum_drive_bytes": GIB}
ROLE: Sequence[dict[str, object]] = [{"hosts": "all", "gather_facts": False, "become": True, "roles": ["model_cache"]}]
MODEL = "openai/gpt-oss-120b"
HELD_BYTES = 512 << 10  # of each large file, before the power goes
ASSEMBLY = "/run/udev/rules.d/64-md-raid-assembly.rules"
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
# The real mkfs, stopped on its way until the power goes.
HALF_WAY = """#!/bin/sh
/usr/sbin/mkfs.xfs "$@" &
sleep 0.3
kill -STOP $!
sync
touch /run/half-way
sleep 600
"""
# Dear, and the reboot of the first cache shows that it is made and booted.
NO_INITRAMFS = "#!/bin/sh\n"
# Part of the initramfs: the arrays' names, before the root filesystem has a say.
NAMES = """#!/bin/sh
[ "$1" = prereqs ] || ls /dev/md > /run/names-in-initramfs
"""
NAMES_SCRIPT = "/etc/initramfs-tools/scripts/init-bottom/names"
FORGET = rf"""
systemctl disable --now '{MOUNT}' 2>/dev/null || true
umount {POINT} /mnt/other 2>/dev/null || true
swapoff -a
vgchange -an vg-test >/dev/null 2>&1 || true
mdadm --stop --scan 2>/dev/null || true
rm -rf '/etc/systemd/system/{MOUNT}' {Path(RECORD).parent}
sed -i '/gpt-oss-cache/d' /etc/mdadm/mdadm.conf
systemctl daemon-reload
"""


def forget(machine: Machine, drives: Sequence[Drive] = DRIVES) -> None:
    """A host that never had a cache, and these blank drives."""
    machine.run(FORGET)
    machine.replace_drives(drives)


@pytest.fixture(scope="module", autouse=True)
def blank_drives(session_machine: Machine) -> Iterator[None]:
    forget(session_machine)
    yield
    forget(session_machine, [Drive(serial) for serial in SERIALS])
    session_machine.run(f"rm -f {NAMES_SCRIPT} {OWN}mkfs.xfs {OWN}update-initramfs")


def cache(machine: Machine, *flags: str, **inputs: object) -> CompletedProcess[str]:
    return machine.play(ROLE, *flags, **{**SMALL, **inputs})


def state(machine: Machine) -> dict[str, str]:
    """What the host says of its cache."""
    told = machine.run(
        f"findmnt --noheadings --output FSTYPE,OPTIONS {POINT} || echo none\n"
        f"findmnt --noheadings --output SOURCE {POINT} || echo none\n"
        f"systemctl show --property=UnitFileState --value '{MOUNT}'\n"
        f'python3 -c \'import json; print(json.load(open("{RECORD}"))["state"])\' 2>/dev/null || echo none\n'
        "grep -c ^md /proc/mdstat || true\n"
    ).splitlines()
    return dict(zip(("filesystem", "source", "unit", "record", "arrays"), told, strict=True))


# --- what holds something is not touched -----------------------------------------------------------------------------


def test_drives_that_hold_something_are_refused_and_left_as_they_are(machine: Machine) -> None:
    first, second, third, fourth = BY_ID
    machine.run(
        # As on a host without mdadm: nobody assembles what an old superblock asks for.
        f"mkdir -p /run/udev/rules.d; : > {ASSEMBLY}; udevadm control --reload\n"
        f"mkfs.ext4 -q -L precious {first}\n"
        f"echo 'start=2048' | sfdisk --quiet --label gpt {second}\n"
        f"mdadm --create /dev/md/old --run --level=1 --raid-devices=2 {third} missing --metadata=1.2 2>/dev/null\n"
        "mdadm --stop /dev/md/old 2>/dev/null\n"
        f"pvcreate -q {fourth} >/dev/null; vgcreate -q vg-test {fourth} >/dev/null\n"
        "udevadm settle"
    )
    before = [machine.checksum(serial) for serial in SERIALS]
    for asked in (BY_ID, "auto"):
        done = cache(machine, model_cache_drives=asked)
        assert done.returncode != 0
        for words in (
            "serial SN0001) holds ext4",
            "label precious",
            "serial SN0002) has partitions (",
            "holds a partition table (gpt)",
            "serial SN0003) holds a RAID superblock",
            "serial SN0004) holds an LVM physical volume",
            "Nothing on the host was changed.",
        ):
            assert words in done.stdout
    assert [machine.checksum(serial) for serial in SERIALS] == before
    assert state(machine)["record"] == "none"
    assert machine.run(f"vgs --noheadings -o vg_name; rm {ASSEMBLY}; udevadm control --reload").strip() == "vg-test"


def test_drives_in_use_too_small_or_with_zfs_labels_are_refused_and_left_as_they_are(machine: Machine) -> None:
    small = Drive("SN0005", 400 << 20)
    forget(machine, [*DRIVES[:4], small])
    first, second, third, _ = BY_ID
    label = "(0x00bab10c).to_bytes(8, 'little') + (5000).to_bytes(8, 'little')"
    machine.run(
        f"mkfs.xfs -q {first}; mkdir -p /mnt/other; mount {first} /mnt/other; echo kept > /mnt/other/file; sync\n"
        f"mkswap -q {second} >/dev/null; swapon {second}\n"
        f"python3 -c \"f = open('{third}', 'r+b'); "
        f'[(f.seek(at), f.write({label})) for at in range(2**17, 2**18, 1024)]"\n'
        "udevadm settle"
    )
    before = {serial: machine.checksum(serial) for serial in ("SN0002", "SN0003", "SN0004", "SN0005")}
    done = cache(machine, model_cache_drives=[*BY_ID, small.by_id], model_cache_wipe={first: "SN0001", third: "SN9999"})
    assert done.returncode != 0
    for words in (
        "serial SN0001) is mounted at /mnt/other",
        "serial SN0002) is in use as swap",
        "serial SN0003) holds a ZFS label",
        "has the serial number SN0003, not 'SN9999'",
        "serial SN0005) has 419430400 bytes",
    ):
        assert words in done.stdout
    assert {serial: machine.checksum(serial) for serial in before} == before
    assert machine.run("cat /mnt/other/file") == "kept\n"
    forget(machine)


# --- one cache's life ------------------------------------------------------------------------------------------------


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
        "for n in $(seq 300); do test -e /run/watching && exit 0; sleep 0.1; done; exit 1"
    )
    done = cache(machine, model_cache_drives="auto")
    assert done.returncode == 0
    assert "changed=0" in done.stdout
    assert machine.run("cat /run/written 2>/dev/null || true") == ""
    # The watch does see a device that is opened for writing.
    machine.run(f"exec 3<>{BY_ID[0]}; exec 3>&-; sleep 1; systemctl stop watch-drives")
    assert "nvme" in machine.run("cat /run/written")


def test_growing_shrinking_and_converting_are_refused(machine: Machine) -> None:
    for inputs, words in (
        ({"model_cache_drives": BY_ID[:3]}, "would be taken out; a cache is not shrunk"),
        ({"model_cache_drives": BY_ID, "model_cache_raid_level": "raid10"}, "was made with raid0, now raid10"),
    ):
        done = cache(machine, **inputs)
        assert done.returncode != 0
        assert words in done.stdout
        assert "docs/runbooks/rebuild-cache.md" in done.stdout


def test_after_a_reboot_it_is_mounted_before_the_server_starts(machine: Machine) -> None:
    template = (REPOSITORY / "roles/inference_server/templates/gpt-oss@.service.j2").read_text()
    line = next(line for line in template.splitlines() if line.startswith("RequiresMountsFor="))
    assert line == "RequiresMountsFor={{ inference_server_cache_directory }}"
    unit = (
        f"[Unit]\nRequiresMountsFor={POINT}\n[Service]\nType=oneshot\nRemainAfterExit=yes\n"
        f"ExecStart=/bin/cat {POINT}/weights/file\n[Install]\nWantedBy=multi-user.target\n"
    )
    machine.put({"/etc/systemd/system/server.service": unit.encode()})
    machine.run("systemctl daemon-reload; systemctl enable --quiet server")
    machine.reboot()
    seen = state(machine)
    assert seen["filesystem"].split()[0] == "xfs"
    told = machine.run(
        "cat /run/names-in-initramfs\n"
        "systemctl show --property=After --value server\n"
        "systemctl is-active server\n"
        "journalctl --boot --unit server --output cat | grep -c weights"
    ).splitlines()
    assert told[0] == "gpt-oss-cache"
    assert MOUNT.replace("\\", "\\\\") in told[1]  # as systemctl quotes it
    assert told[2:] == ["active", "1"]


# --- a download that is cut ------------------------------------------------------------------------------------------


class Mirror(ThreadingHTTPServer):
    """A web server with a model's files; it sends half of each large one, and the rest when the hold is lifted."""

    daemon_threads = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), MirrorHandler)
        self.files = files
        self.released = threading.Event()
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


@pytest.fixture
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


def test_a_power_cut_in_a_download_costs_no_byte_twice(machine: Machine, mirror: Mirror) -> None:
    revision = content.repositories()[MODEL].revision
    role = [{"hosts": "all", "gather_facts": False, "become": True, "roles": ["model_weights"]}]
    inputs: dict[str, object] = {
        "model_weights_model": {"name": "gpt-oss-120b", "repository": MODEL, "revision": revision},
        "model_weights_source": "http",
        "model_weights_url": f"http://{GATEWAY}:{mirror.server_address[1]}",
        "model_weights_keep_free_bytes": 0,
    }
    shards = {path: body for path, body in mirror.files.items() if len(body) > HELD_BYTES}
    cut = threading.Thread(target=machine.play, args=(role,), kwargs=inputs)
    cut.start()
    machine.run(
        f"for n in $(seq 6000); do test $(find {POINT}/staging -size {HELD_BYTES}c | wc -l) = {len(shards)} && break\n"
        f"sleep 0.1; done; find {POINT}/staging -size {HELD_BYTES}c | grep -c . >&2; sync; echo lost > /root/lost"
    )
    machine.power_cut()
    cut.join()
    assert sorted(path for path, _ in mirror.asked if path in shards) == sorted(shards)
    mirror.released.set()
    machine.start_again()
    snapshot = f"{POINT}/weights/models--{MODEL.replace('/', '--')}/snapshots/{revision}"
    assert machine.run(f"test -s /root/lost || echo lost; test -e {snapshot} || echo hidden").split() == [
        "lost",
        "hidden",
    ]
    mirror.asked.clear()
    assert machine.play(role, **inputs).returncode == 0
    assert {(path, HELD_BYTES) for path in shards} == {asked for asked in mirror.asked if asked[0] in shards}
    sums = "".join(f"{hashlib.sha256(body).hexdigest()}  {snapshot}/{path}\n" for path, body in shards.items())
    machine.run(f"sha256sum --quiet --check - <<'END'\n{sums}END")
    assert machine.play(role, **inputs).stdout.count("changed=0") == 1


# --- a drive that is lost ---------------------------------------------------------------------------------------------


def verdict(machine: Machine, directory: Path) -> dict[str, object]:
    """The check of the cache's drives, of a whole verdict; the host serves nothing, so the verdict is not ok."""
    machine.play(REPOSITORY / "playbooks/diagnose.yml", verdict_directory=str(directory), **SERVES)
    checks = json.loads((directory / "machine.json").read_text())["checks"]
    found: dict[str, object] = next(check for check in checks if check["id"] == "cache.drives")
    return found


def test_a_lost_drive_is_told_of_and_the_cache_is_rebuilt_from_the_others(machine: Machine, tmp_path: Path) -> None:
    hurry = "/etc/systemd/system.conf.d/zz-hurry.conf"  # the test machine's patience with a slow drive is half an hour
    machine.put({hurry: b"[Manager]\nDefaultDeviceTimeoutSec=20s\n"})
    machine.unplug("SN0003")
    machine.reboot()  # the host boots without its cache, and the server waits
    assert machine.run(f"rm {hurry}; systemctl is-active server || true").strip() == "inactive"
    found = verdict(machine, tmp_path)
    assert found["ok"] is False
    assert "(serial SN0003) is gone" in str(found["seen"])
    assert "rebuild_cache.yml" in str(found["remedy"])
    done = cache(machine, model_cache_drives="auto")
    assert done.returncode != 0
    assert "the cache has lost a drive" in done.stdout
    machine.put({f"{OWN}update-initramfs": NO_INITRAMFS.encode()}, modes={f"{OWN}update-initramfs": 0o755})
    rebuilt = machine.play(
        REPOSITORY / "playbooks/rebuild_cache.yml", "--tags", "model_cache", model_cache_drives="auto", **SERVES
    )
    assert rebuilt.returncode == 0
    seen = state(machine)
    assert (seen["filesystem"].split()[0], seen["record"], seen["arrays"]) == ("xfs", "ready", "1")
    assert verdict(machine, tmp_path)["ok"] is True
    machine.run("systemctl disable --quiet --now server; rm /etc/systemd/system/server.service")


# --- cuts ------------------------------------------------------------------------------------------------------------


def test_a_power_cut_in_the_middle_of_mkfs_is_healed_by_the_next_run(machine: Machine) -> None:
    forget(machine)
    machine.put(
        {f"{OWN}mkfs.xfs": HALF_WAY.encode(), f"{OWN}update-initramfs": NO_INITRAMFS.encode()},
        modes={f"{OWN}mkfs.xfs": 0o755, f"{OWN}update-initramfs": 0o755},
    )
    cut = threading.Thread(target=cache, args=(machine,), kwargs={"model_cache_drives": BY_ID[:2]})
    cut.start()
    machine.run("for n in $(seq 3000); do test -e /run/half-way && exit 0; sleep 0.1; done; exit 1")
    machine.power_cut()
    cut.join()
    machine.start_again()
    machine.run(f"rm {OWN}mkfs.xfs")
    assert state(machine)["record"] == "building"
    done = cache(machine, model_cache_drives=BY_ID[:2])
    assert done.returncode == 0
    seen = state(machine)
    assert (seen["filesystem"].split()[0], seen["record"]) == ("xfs", "ready")
    assert "sunit=128    swidth=256 blks" in machine.run(f"xfs_info {POINT}")


def test_two_drives_mirror_each_other_with_ext4_and_a_wiped_one_among_them(machine: Machine) -> None:
    forget(machine)
    machine.run(f"mkfs.xfs -q {BY_ID[1]}; udevadm settle")
    done = cache(
        machine,
        model_cache_drives=BY_ID[:2],
        model_cache_raid_level="raid1",
        model_cache_filesystem="ext4",
        model_cache_wipe={BY_ID[1]: "SN0002"},
    )
    assert done.returncode == 0
    assert state(machine)["filesystem"].split()[0] == "ext4"
    assert "raid1" in machine.run("cat /proc/mdstat")
