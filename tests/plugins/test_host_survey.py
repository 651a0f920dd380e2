"""host_survey on recorded and built hosts, and on what runs here: sockets, locks, servers."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from serving_catalog import load_catalog
from serving_catalog.checks import annotate, detect_platform
from tests.plugins import trees
from tests.plugins.trees import RECORDED, Tree

Survey = Callable[..., dict[str, Any]]
ALL = [
    "os",
    "architecture",
    "kernel",
    "gpus",
    "platform",
    "driver",
    "nvidia_smi",
    "fabric",
    "packages",
    "apt",
    "memory",
]
ALL += ["docker", "toolkit", "clock"]


@pytest.fixture
def survey(run_module: Callable[..., dict[str, Any]]) -> Survey:
    def ask(tree: Tree | None = None, sections: list[str] | None = None, **more: Any) -> dict[str, Any]:
        where = tree.arguments if tree is not None else {}
        result = run_module("host_survey", {"sections": sections or ALL, **where, **more}, check=True)
        assert result["changed"] is False
        facts: dict[str, Any] = result["ansible_facts"]["host_survey"]
        return facts

    return ask


# --- hardware ----------------------------------------------------------------------------------------------------


def test_four_recorded_h200(survey: Survey, tmp_path: Path) -> None:
    found = survey(trees.recorded("h200-x4", tmp_path))
    assert found["errors"] == {}
    assert found["os"] == {
        "id": "ubuntu",
        "version_id": "24.04",
        "codename": "noble",
        "name": "Ubuntu 24.04.3 LTS",
        "repository": "ubuntu2404",
    }
    assert [gpu["pci_address"] for gpu in found["gpus"]] == [f"0000:00:0{n}.0" for n in (6, 7, 8, 9)]
    assert {gpu["device_id"] for gpu in found["gpus"]} == {"2335"}
    assert found["driver"]["running_version"] == "580.159.04"
    assert found["driver"]["running_open"] is True
    assert found["fabric"]["states"] == ["Completed"] * 4
    assert found["memory_bytes"] == 503 * 2**30
    assert [gpu["memory_total_bytes"] for gpu in found["nvidia_smi"]["gpus"]] == [143771 * 2**20] * 4
    assert {gpu["mig"] for gpu in found["nvidia_smi"]["gpus"]} == {"Disabled"}
    assert [gpu["pci_address"] for gpu in found["nvidia_smi"]["gpus"]] == [g["pci_address"] for g in found["gpus"]]


def test_the_recorded_tree_answers_as_the_real_host_did(survey: Survey, tmp_path: Path) -> None:
    real = json.loads((RECORDED / "h200-x1/found.json").read_text())
    found = annotate(survey(trees.recorded("h200-x1", tmp_path)), load_catalog())
    assert found["memory"]["total_bytes"] == real["memory"]["total_bytes"]
    for section in ("os", "architecture", "platform", "holds"):
        assert found[section] == real[section], section
    # A tree has no device nodes and no driver links.
    assert {**found["driver"], "devices": real["driver"]["devices"]} == real["driver"]
    assert [{**gpu, "driver": "nvidia"} for gpu in found["gpus"]] == real["gpus"]
    assert {**found["nvidia_smi"], "path": real["nvidia_smi"]["path"]} == real["nvidia_smi"]


@pytest.mark.parametrize(
    ("build", "switch", "platform", "candidates"),
    [
        (trees.hgx_h200, "nvswitch", "hgx_h200", ["hgx_h200"]),
        (trees.hgx_b200, "nvlink5", "hgx_b200", ["hgx_b200"]),
        (trees.gb200_tray, "none", None, ["gb200_nvl72", "gb200_nvl4"]),
        (trees.h200_nvl, "none", "h200_nvl", ["h200_nvl"]),
        (trees.gh200, "none", None, []),
        (trees.bare, "none", None, []),
    ],
)
def test_platforms(
    survey: Survey, tmp_path: Path, build: Any, switch: str, platform: str | None, candidates: list[str]
) -> None:
    found = annotate(survey(build(tmp_path)), load_catalog())
    assert found["platform"]["switch"] == switch
    assert found["platform"]["detected"] == platform
    assert found["platform"]["candidates"] == candidates


def test_nvlink5_is_seen_before_the_infiniband_modules_are_loaded(survey: Survey, tmp_path: Path) -> None:
    found = survey(trees.hgx_b200(tmp_path, infiniband=False))
    assert found["platform"]["switch"] == "nvlink5"
    assert found["platform"]["switch_management"] == ["0000:50:00.0"]


def test_nvswitch_is_seen_by_the_driver_too(survey: Survey, tmp_path: Path) -> None:
    tree = (
        trees.bare(tmp_path).pci("0000:10:00.0", "2335").write("proc/driver/nvidia-nvswitch/devices/0000:40:00.0", "")
    )
    assert survey(tree)["platform"]["switch"] == "nvswitch"


@pytest.mark.parametrize(
    ("states", "platform"), [(["Completed"] * 4, "gb200_nvl72"), (["Not Supported"] * 4, "gb200_nvl4"), ([], None)]
)
def test_gb200_trays_differ_by_their_fabric(
    survey: Survey, tmp_path: Path, states: list[str], platform: str | None
) -> None:
    found = survey(trees.gb200_tray(tmp_path))
    found["fabric"]["states"] = states
    assert detect_platform(found, load_catalog()).platform == platform


def test_names_are_never_matched_by_part(survey: Survey, tmp_path: Path) -> None:
    """GB200 holds the letters B200, GH200 the letters H200."""
    found = annotate(survey(trees.gb200_tray(tmp_path / "gb")), load_catalog())
    assert {gpu["gpu"] for gpu in found["gpus"]} == {"GB200"}
    found = annotate(survey(trees.gh200(tmp_path / "gh")), load_catalog())
    assert [(gpu["gpu"], gpu["name"]) for gpu in found["gpus"]] == [(None, None)]
    found["gpus"][0]["name"] = "NVIDIA GH200 480GB"
    assert annotate(found, load_catalog())["gpus"][0]["gpu"] is None


def test_sbsa_and_pages_of_64k(survey: Survey, tmp_path: Path) -> None:
    found = survey(trees.gb200_tray(tmp_path))
    assert found["architecture"] == {"machine": "aarch64", "dpkg": "arm64", "cuda_repository": "sbsa"}
    assert found["kernel"]["page_size"] == 65536


def test_an_empty_host_is_read_without_an_error(survey: Survey, tmp_path: Path) -> None:
    found = survey(Tree(tmp_path / "nothing"), [*ALL, "paths", "ports", "units", "logs"], paths=["/var/lib/x"])
    assert found["errors"] == {}
    assert found["gpus"] == []
    assert found["os"]["repository"] is None
    assert found["driver"]["running_version"] is None
    assert found["nvidia_smi"] == {
        "path": None,
        "error": None,
        "driver_version": None,
        "cuda_version": None,
        "gpus": [],
    }


@pytest.mark.parametrize(
    ("said", "code", "error"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch", 18, "Driver/library version mismatch"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", 9, "couldn't communicate"),
        ("No devices were found", 6, "No devices were found"),
        ("<nvidia_smi_log><gpu>", 0, "did not print XML"),
    ],
)
def test_nvidia_smi_that_fails_says_why(survey: Survey, tmp_path: Path, said: str, code: int, error: str) -> None:
    tree = trees.bare(tmp_path).tool("nvidia-smi", f'echo "{said}"; exit {code}')
    assert error in survey(tree, ["nvidia_smi"])["nvidia_smi"]["error"]


def test_the_installed_module_is_asked_for_the_running_kernel(survey: Survey, tmp_path: Path) -> None:
    tree = trees.bare(tmp_path).tool(
        "modinfo",
        '[ "$*" = "-k 6.8.0-85-generic nvidia" ] && printf "version:  580.178.04\\nlicense:  Dual MIT/GPL\\n"',
    )
    found = survey(tree, ["driver"])["driver"]
    assert (found["installed_version"], found["installed_open"], found["running_version"]) == ("580.178.04", True, None)


def test_dkms_and_library_versions(survey: Survey, tmp_path: Path) -> None:
    tree = trees.bare(tmp_path)
    tree.write("root/var/lib/dkms/nvidia/570.9.1/6.8.0-84-generic/x", "")
    tree.write("root/var/lib/dkms/nvidia/580.159.04/6.8.0-85-generic/x", "")
    tree.write("root/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04", "")
    found = survey(tree, ["driver"])["driver"]
    assert found["installed_version"] == "580.159.04"
    assert found["dkms"][-1]["kernels"] == ["6.8.0-85-generic"]
    assert found["library_version"] == "580.159.04"


# --- kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "expected"), [(b"\x06\0\0\0\x01", True), (b"\x06\0\0\0\x00", False), (None, False)])
def test_secure_boot(survey: Survey, tmp_path: Path, value: bytes | None, expected: bool) -> None:
    tree = trees.bare(tmp_path)
    if value is None:
        tree.gone("sys/firmware")
    else:
        tree.write(trees.SECURE_BOOT, value)
    assert survey(tree, ["kernel"])["kernel"]["secure_boot"] is expected


def test_secure_boot_is_unknown_where_the_firmware_cannot_be_asked(survey: Survey, tmp_path: Path) -> None:
    tree = trees.bare(tmp_path).gone("sys/firmware/efi/efivars")
    assert survey(tree, ["kernel"])["kernel"]["secure_boot"] is None


@pytest.mark.parametrize(
    ("path", "content", "off"),
    [
        ("root/etc/modprobe.d/a.conf", "blacklist nouveau\n", True),
        ("root/etc/modprobe.d/a.conf", "install nouveau /bin/false\n", True),
        ("root/usr/lib/modprobe.d/a.conf", "# blacklist nouveau\nblacklist nouveaux\n", False),
        ("proc/cmdline", "ro modprobe.blacklist=pcspkr,nouveau quiet\n", True),
        ("proc/cmdline", "ro nouveau.modeset=0\n", True),
    ],
)
def test_nouveau(survey: Survey, tmp_path: Path, path: str, content: str, off: bool) -> None:
    tree = trees.bare(tmp_path).write("proc/modules", "nouveau 2629632 1 - Live 0x0\n").write(path, content)
    found = survey(tree, ["kernel"])["kernel"]
    assert (found["nouveau_loaded"], found["nouveau_blacklisted"]) == (True, off)


def test_headers_that_apt_could_bring(survey: Survey, tmp_path: Path) -> None:
    tree = trees.bare(tmp_path).gone("root/usr/src")
    assert survey(tree, ["kernel"])["kernel"]["headers_available"] is None
    tree.write("root/var/lib/apt/lists/x_Packages", "").tool("apt-cache", "echo linux-headers-6.8.0-85-generic")
    found = survey(tree, ["kernel"])["kernel"]
    assert (found["headers_installed"], found["headers_available"]) == (False, True)
    tree.tool("apt-cache", "echo linux-headers-6.8.0-85-generic-64k")
    assert survey(tree, ["kernel"])["kernel"]["headers_available"] is False
    tree.write("root/etc/apt/sources.list.d/added-since.list", "deb file:/srv ./\n")
    os.utime(tmp_path / "root/etc/apt/sources.list.d/added-since.list", (2**31, 2**31))
    assert survey(tree, ["kernel"])["kernel"]["headers_available"] is None


# --- packages ----------------------------------------------------------------------------------------------------

OK = "install ok installed"
NVIDIA = "NVIDIA CORPORATION <cudatools@nvidia.com>"
UBUNTU = "Ubuntu Core Developers <ubuntu-devel-discuss@lists.ubuntu.com>"
DEBIAN = "Debian NVIDIA Maintainers <pkg-nvidia-devel@lists.alioth.debian.org>"


def test_packages_holds_and_where_they_come_from(survey: Survey, tmp_path: Path) -> None:
    tree = trees.bare(tmp_path).packages(
        ("nvidia-open", "580.159.04-1", "hold ok installed", NVIDIA),
        ("nvidia-utils-580-server", "580.95.05-0ubuntu0.24.04.2", OK, UBUNTU),
        ("nvidia-kernel-dkms", "535.183.01-1~deb12u1", OK, DEBIAN),
        ("nvidia-container-toolkit", "1.19.1-1", "hold ok installed", NVIDIA),
        ("docker-ce", "5:29.8.2-1~ubuntu.24.04~noble", "install ok half-configured", "Docker"),
        ("cuda-old", "1", "deinstall ok config-files", NVIDIA),
        ("bash", "5.2", OK, UBUNTU),
    )
    tree.write("root/var/lib/dpkg/updates/0001", "")
    found = survey(tree, ["packages"], packages=["bas*"])
    assert found["packages"]["nvidia-open"] == "580.159.04-1"
    assert found["packages"]["bash"] == "5.2"
    assert "cuda-old" not in found["packages"]
    assert found["holds"] == ["nvidia-container-toolkit", "nvidia-open"]
    assert found["package_state"]["distribution_nvidia"] == ["nvidia-kernel-dkms", "nvidia-utils-580-server"]
    assert found["package_state"]["unfinished"] == ["docker-ce"]
    assert found["package_state"]["interrupted"] is True


def test_leftovers_of_other_installers(survey: Survey, tmp_path: Path) -> None:
    tree = (
        trees.bare(tmp_path)
        .write("root/usr/bin/nvidia-uninstall", "")
        .write("root/var/lib/snapd/snaps/docker_3.snap", "")
    )
    tree.write("root/usr/local/cuda-12.4/bin/cuda-uninstaller", "")
    kinds = [entry["kind"] for entry in survey(tree, ["packages"])["package_state"]["leftovers"]]
    assert kinds == ["runfile", "snap_docker", "cuda_runfile"]


def test_the_same_repository_with_two_keys_is_a_conflict(survey: Survey, tmp_path: Path) -> None:
    base = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64/"
    tree = trees.bare(tmp_path)
    tree.write("root/etc/apt/sources.list.d/cuda.list", f"deb [arch=amd64 signed-by=/a.gpg] {base} /\n# deb {base} /\n")
    tree.write(
        "root/etc/apt/sources.list.d/nvidia-cuda.sources",
        f"Types: deb\nURIs: {base}\nSuites: /\nSigned-By: /b.gpg\n\n"
        f"Types: deb\nEnabled: no\nURIs: {base}\nSuites: /\nSigned-By: /c\n",
    )
    tree.write(
        "root/etc/apt/sources.list.d/docker.sources",
        "Types: deb\nURIs: https://download.docker.com/linux/ubuntu\n"
        "Suites: noble\nSigned-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n",
    )
    found = survey(tree, ["apt"])["apt"]
    assert len(found["sources"]) == 3
    assert [(c["files"], c["signed_by"], c["conflicting"]) for c in found["conflicts"]] == [
        (
            ["/etc/apt/sources.list.d/cuda.list", "/etc/apt/sources.list.d/nvidia-cuda.sources"],
            ["/a.gpg", "/b.gpg"],
            True,
        )
    ]


def test_who_holds_the_apt_lock(survey: Survey, tmp_path: Path) -> None:
    tree = trees.bare(tmp_path).write("root/var/lib/dpkg/lock-frontend", "")
    assert survey(tree, ["apt"])["apt"]["lock_holders"] == []
    with (tmp_path / "root/var/lib/dpkg/lock-frontend").open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        tree.write(f"proc/{os.getpid()}/cmdline", "apt-get\0install\0")
        held = survey(tree, ["apt"])["apt"]["lock_holders"]
    assert held == [{"lock": "/var/lib/dpkg/lock-frontend", "pid": os.getpid(), "command": "apt-get install"}]


def test_a_lock_that_is_released_in_time_is_waited_for(survey: Survey, tmp_path: Path) -> None:
    path = trees.bare(tmp_path).write("root/var/lib/dpkg/lock-frontend", "").base / "root/var/lib/dpkg/lock-frontend"
    for seconds, held in ((1.5, 0), (600, 1)):
        script = f"import fcntl, time; f = open({str(path)!r}, 'w'); fcntl.lockf(f, 2); print(1, flush=True)"
        with subprocess.Popen(
            ["/usr/bin/python3", "-c", f"{script}; time.sleep({seconds})"], stdout=subprocess.PIPE
        ) as holder:
            assert holder.stdout
            holder.stdout.readline()
            found = survey(Tree(tmp_path), ["apt"], lock_timeout=60 if held == 0 else 1)["apt"]["lock_holders"]
            holder.kill()
        assert len(found) == held


# --- storage -----------------------------------------------------------------------------------------------------


def test_paths_that_share_a_device_share_a_file_system(survey: Survey, tmp_path: Path) -> None:
    tree = trees.bare(tmp_path).write("root/var/x", "").write("root/data/y", "").write("root/srv/z", "")
    found = survey(tree, ["paths"], paths=["/var/lib/gpt-oss", "/data/docker", "/srv/cache", "/var/x"])["paths"]
    assert found["/var/lib/gpt-oss"]["filesystem"] == found["/data/docker"]["filesystem"] == "/dev/sda1"
    assert found["/srv/cache"]["filesystem"] == "/dev/nvme0n1"
    assert found["/srv/cache"]["type"] == "xfs"
    assert (found["/var/lib/gpt-oss"]["exists"], found["/var/lib/gpt-oss"]["existing_parent"]) == (False, "/var")
    assert found["/var/x"]["is_directory"] is False
    assert found["/srv/cache"]["free_bytes"] > 0


def _snapshot(tree: Tree) -> tuple[str, dict[str, Any]]:
    base = "root/w/models--openai--gpt-oss-120b"
    tree.write(f"{base}/snapshots/abc/model.safetensors", b"x" * 100).write(f"{base}/refs/main", "abc")
    status = (tree.base / base / "snapshots/abc/model.safetensors").stat()
    entry = {"path": "model.safetensors", "size": 100, "mtime_ns": status.st_mtime_ns}
    return base, {"format_version": 1, "files": [entry]}


@pytest.mark.parametrize(
    ("size", "present", "problems"),
    [(100, True, []), (99, True, ["model.safetensors has changed since it was verified"]), (None, False, [])],
)
def test_weights_are_what_their_marker_says(
    survey: Survey, tmp_path: Path, size: int | None, present: bool, problems: list[str]
) -> None:
    tree = trees.bare(tmp_path)
    base, marker = _snapshot(tree)
    if size is not None:
        marker["files"][0]["size"] = size
        tree.write(f"{base}/verified/abc.json", json.dumps(marker))
    wanted = {"directory": "/w", "repository": "openai/gpt-oss-120b", "revision": "abc"}
    found = survey(tree, ["weights"], weights=wanted)["weights"]
    assert (found["marker_present"], found["problems"], found["snapshot_exists"]) == (present, problems, True)


# --- network -----------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_and_by_whom(survey: Survey) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, but nobody listens
        port, other = server.getsockname()[1], free.getsockname()[1]
        found = survey(None, ["ports"], ports=[port, other])["ports"]
    assert found[str(port)]["listening"] is True
    assert found[str(port)]["addresses"] == ["127.0.0.1"]
    assert found[str(port)]["pid"] == os.getpid()
    assert found[str(other)]["listening"] is False


class _Server(BaseHTTPRequestHandler):
    """HEAD is refused below /get-only; /late is an hour behind; /v1/models is a model server's; /private wants a token,
    which /moved would carry to /open, where one is an error.
    """

    def _answer(self, head: bool) -> None:
        if head and self.path == "/get-only":
            self.send_error(405)
            return
        if self.path == "/moved":
            self.send_response_only(302)
            self.send_header("Location", "/open")
            self.end_headers()
            return
        wanted = {"/private": "Bearer hf_good", "/open": None}
        if self.headers.get("Authorization") != wanted.get(self.path, self.headers.get("Authorization")):
            self.send_error(401)
            return
        body = b'{"data": [{"id": "openai/gpt-oss-120b"}]}' if self.path == "/v1/models" else b"ok"
        self.send_response_only({"/v2/": 401, "/gone": 404, "/loading": 503}.get(self.path, 200))
        hours = 3600 if self.path == "/late" else 0
        self.send_header("Date", time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() - hours)))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_urls_that_answer_and_that_do_not(survey: Survey, server: str) -> None:
    wanted = [f"{server}{path}" for path in ("/", "/get-only", "/v2/", "/gone")]
    wanted += ["http://127.0.0.1:1/", "http://name.invalid/", "file:///etc", "file:///nowhere"]
    found = survey(None, ["urls"], urls=wanted)["urls"]
    assert [found[url]["status"] for url in wanted] == [200, 200, 401, 404, None, None, 200, None]
    assert found["http://127.0.0.1:1/"]["kind"] == "refused"
    assert found["http://name.invalid/"]["kind"] == "dns"
    assert found["file:///nowhere"]["kind"] == "missing"


def test_a_token_goes_to_its_address_alone(survey: Survey, server: str) -> None:
    private, moved, opened = (f"{server}/{name}" for name in ("private", "moved", "open"))
    tokens = {private: "hf_good", moved: "hf_good"}
    found = survey(None, ["urls"], urls=[private, moved, opened], url_tokens=tokens)["urls"]
    assert [found[url]["status"] for url in (private, moved, opened)] == [200, 200, 200]
    assert survey(None, ["urls"], urls=[private], url_tokens={private: "hf_bad"})["urls"][private]["status"] == 401
    assert survey(None, ["urls"], urls=[private])["urls"][private]["status"] == 401


def test_an_image_that_docker_has_is_not_asked_for(survey: Survey, tmp_path: Path, server: str) -> None:
    tree = trees.bare(tmp_path).write("root/run/.keep", "")
    asked = {"name": "nvcr.io/x:1", "registry": "", "insecure": True}
    with socketserver.ThreadingUnixStreamServer(str(tmp_path / "root/run/docker.sock"), _Docker) as daemon:
        threading.Thread(target=daemon.serve_forever, daemon=True).start()
        found = survey(tree, ["docker", "image"], image=asked)["image"]
        daemon.shutdown()
    assert (found["there"], found["status"]) == (True, None)
    asked["registry"] = server.removeprefix("http://")  # a name that Docker does not have; nothing is a registry here
    assert survey(tree, ["docker", "image"], image=asked, url_timeout=2)["image"]["there"] is False


def test_words_of_an_url_are_the_hosts(survey: Survey, tmp_path: Path, server: str) -> None:
    url = server + "/{os_repository}/{cuda_architecture}/{dpkg_architecture}/{os_id}/{os_codename}"
    found = survey(trees.gb200_tray(tmp_path), ["urls"], urls=[url])["urls"][url]
    assert found["url"] == f"{server}/ubuntu2404/sbsa/arm64/ubuntu/noble"


def test_a_silent_address_costs_one_timeout(survey: Survey) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = [f"http://127.0.0.1:{silent.getsockname()[1]}/{n}" for n in range(6)]
        before = time.monotonic()
        found = survey(None, ["urls"], urls=urls, url_timeout=1)["urls"]
    assert {answer["kind"] for answer in found.values()} == {"timeout"}
    assert time.monotonic() - before < 6, "one after the other"


def test_a_certificate_nobody_trusts_is_named(survey: Survey, tmp_path: Path) -> None:
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")]
    subprocess.run([*request, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as running:
        running.socket = context.wrap_socket(running.socket, server_side=True)
        threading.Thread(target=running.serve_forever, daemon=True).start()
        url = f"https://localhost:{running.server_address[1]}/"
        found = survey(None, ["urls"], urls=[url])["urls"][url]
        running.shutdown()
    assert found["kind"] == "tls"
    assert "certificate is not accepted" in found["error"]


def test_a_proxy_is_used_and_its_password_not_shown(survey: Survey, server: str) -> None:
    proxy = server.replace("http://", "http://user:secret@")
    url = "http://mirror.example/gone"
    found = survey(None, ["urls"], urls=[url], proxies={"http": proxy})["urls"][url]
    assert found["proxy"] == server
    assert found["status"] == 200  # the proxy's own answer to the whole address


def test_the_clock_is_compared_with_the_servers(survey: Survey, server: str) -> None:
    found = survey(None, ["clock", "urls"], urls=[f"{server}/late"], controller_time=time.time() - 120)["clock"]
    assert 3590 < found["http_skew_seconds"] < 3610
    assert 119 < found["controller_skew_seconds"] < 130


def test_endpoints(survey: Survey, server: str) -> None:
    wanted = [
        {"name": "0", "url": server},
        {"name": "1", "url": server, "health_path": "/loading"},
        {"name": "2", "url": "http://127.0.0.1:1"},
    ]
    found = survey(None, ["endpoints"], endpoints=wanted)["endpoints"]
    assert (found["0"]["health_status"], found["0"]["models"]) == (200, ["openai/gpt-oss-120b"])
    assert found["1"]["health_status"] == 503
    assert found["2"]["error"] == "connection refused"


# --- services ----------------------------------------------------------------------------------------------------

SYSTEMCTL = r"""
printf 'Id=gpt-oss@0.service\nLoadState=loaded\nActiveState=activating\nSubState=auto-restart\nUnitFileState=enabled\n'
printf 'Result=exit-code\nExecMainStatus=1\nNRestarts=4\nNeedDaemonReload=yes\n\nId=b.service\nLoadState=not-found\n'
"""


def test_units_and_logs(survey: Survey, tmp_path: Path) -> None:
    tree = trees.bare(tmp_path).tool("systemctl", SYSTEMCTL)
    tree.tool("journalctl", "echo '-- Journal begins'; echo '2026 h0: token hf_abcdefghij0123 refused'")
    found = survey(tree, ["units", "logs"], units=["gpt-oss@0.service", "b.service"], log_units=["gpt-oss@0.service"])
    assert found["units"]["gpt-oss@0.service"]["restarts"] == 4
    assert found["units"]["gpt-oss@0.service"]["need_daemon_reload"] is True
    assert found["units"]["b.service"]["load_state"] == "not-found"
    assert found["logs"]["gpt-oss@0.service"] == ["2026 h0: token *** refused"]


DOCKER: dict[str, Any] = {
    "GET /info": {
        "ServerVersion": "29.8.2",
        "DockerRootDir": "/srv/docker",
        "Driver": "overlay2",
        "CgroupDriver": "systemd",
        "Runtimes": {"runc": {}, "nvidia": {}},
        "DefaultRuntime": "runc",
        "CDISpecDirs": ["/etc/cdi", "/var/run/cdi"],
    },
    "GET /containers/json?all=1": [
        {"Id": "a" * 64, "Names": ["/gpt-oss-0"], "Ports": [{"PublicPort": 8000}, {"PrivatePort": 1}]},
        {"Id": "b" * 64, "Names": ["/other"], "Ports": []},
    ],
    "GET /images/json": [{"RepoTags": ["nvcr.io/x:1"], "RepoDigests": ["nvcr.io/x@sha256:00"]}, {"RepoTags": None}],
    f"GET /containers/{'a' * 64}/json": {
        "Name": "/gpt-oss-0",
        "Image": "sha256:11",
        "Config": {"Image": "nvcr.io/x:1", "Labels": {"gpt-oss.process": "0"}},
        "State": {"Status": "running", "OOMKilled": False, "ExitCode": 0},
        "HostConfig": {"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}], "Runtime": "runc"},
        "RestartCount": 0,
    },
    f"POST /containers/{'a' * 64}/exec": {"Id": "e1"},
    "POST /exec/e1/start": "GPU 0: NVIDIA H200 (UUID: GPU-0)\r\nGPU 1: NVIDIA H200 (UUID: GPU-1)\r\n",
    "GET /exec/e1/json": {"ExitCode": 0},
}


class _Docker(BaseHTTPRequestHandler):
    """Answers as the engine's API does, from recorded answers."""

    def _answer(self) -> None:
        answer = DOCKER.get(f"{self.command} {self.path}")
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response_only(200 if answer is not None else 404)
        self.end_headers()
        self.wfile.write((answer if isinstance(answer, str) else json.dumps(answer)).encode())

    do_GET = _answer  # noqa: N815
    do_POST = _answer  # noqa: N815

    def address_string(self) -> str:
        return "socket"

    def log_message(self, *_: object) -> None:
        """Quiet."""


def test_directories_are_measured_one_by_one_or_all_of_a_parent(survey: Survey, tmp_path: Path) -> None:
    tree = (
        trees.bare(tmp_path)
        .write("root/cache/a/x", "x" * 5000)
        .write("root/cache/b/.keep", "")
        .write("root/cache/c", "")
    )
    sizes = survey(tree, ["paths"], measure=["/cache/a", "/cache/*", "/nowhere", "/nowhere/*"])["sizes"]
    assert sizes["/cache/a"] >= 5000
    assert sizes == {"/cache/a": sizes["/cache/a"], "/cache/b": 0, "/nowhere": 0}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ('{"name": "x:1", "reference": "x@sha256:00", "id": "sha256:11"}', {"name": "x:1", "reference": "x@sha256:00"}),
        ('{"name": "x:1"}', None),
        ('{"name": "x', None),
        ("[]", None),
        (None, None),
    ],
)
def test_the_image_on_record(
    survey: Survey, tmp_path: Path, record: str | None, expected: dict[str, str] | None
) -> None:
    tree = trees.bare(tmp_path)
    if record is not None:
        tree.write("root/etc/gpt-oss/image.json", record)
    assert survey(tree, ["docker"])["docker"]["recorded_image"] == expected


def test_docker_and_what_our_container_sees(survey: Survey, tmp_path: Path) -> None:
    tree = trees.bare(tmp_path).write("root/run/.keep", "").write("root/srv/.keep", "")
    with socketserver.ThreadingUnixStreamServer(str(tmp_path / "root/run/docker.sock"), _Docker) as daemon:
        threading.Thread(target=daemon.serve_forever, daemon=True).start()
        found = survey(tree, ["paths", "docker"], paths=["/var"], probe_containers=True)
        daemon.shutdown()
    docker = found["docker"]
    assert (docker["running"], docker["version"], docker["error"]) == (True, "29.8.2", None)
    assert docker["cdi"] == {"enabled": True, "directories": ["/etc/cdi", "/var/run/cdi"]}
    assert docker["images"] == ["nvcr.io/x:1", "nvcr.io/x@sha256:00"]
    assert [c["name"] for c in docker["containers"]] == ["gpt-oss-0"]
    container = docker["containers"][0]
    assert container["ports"] == [8000]
    assert len(container["gpus_seen"]) == 2
    assert container["gpu_requests"][0]["driver"] == "cdi"
    assert found["paths"]["/srv/docker"]["filesystem"] == "/dev/nvme0n1"  # where images lie is measured too


def test_a_docker_socket_that_nobody_serves(survey: Survey, tmp_path: Path) -> None:
    tree = trees.bare(tmp_path).write("root/run/.keep", "")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "root/run/docker.sock"))
    docker = survey(tree, ["docker"])["docker"]
    assert (docker["running"], docker["installed"]) == (False, True)
    assert "refused" in docker["error"]


def test_toolkit_and_the_driver_its_device_list_was_made_for(survey: Survey, tmp_path: Path) -> None:
    tree = trees.bare(tmp_path)
    tree.tool(
        "nvidia-ctk",
        'case "$*" in --version) echo "NVIDIA Container Toolkit CLI version 1.19.1";;\n'
        "*) echo nvidia.com/gpu=0; echo nvidia.com/gpu=all;; esac",
    )
    tree.write(
        "root/var/run/cdi/nvidia.yaml",
        "kind: nvidia.com/gpu\n  - hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.570.10.01\n",
    )
    found = survey(tree, ["toolkit"])["toolkit"]
    assert found["version"] == "1.19.1"
    assert found["cdi_devices"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=all"]
    assert found["cdi_specifications"] == [{"path": "/var/run/cdi/nvidia.yaml", "driver_versions": ["570.10.01"]}]


def test_a_section_that_cannot_be_read_does_not_lose_the_others(survey: Survey, tmp_path: Path) -> None:
    tree = trees.bare(tmp_path).write("proc/net/tcp", "x\n0: zz:gg y 0A 0 0 0 0 0 5 0\n")
    found = survey(tree, ["os", "ports"], ports=[8000])
    assert found["ports"] is None
    assert "ValueError" in found["errors"]["ports"]
    assert found["os"]["id"] == "ubuntu"
