"""The download Job against the stand-in hub: what it brings, how it fails, what another run costs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from serving_catalog.graphs.jobs import GraphJobs
from tests.stand_ins.hub import content
from tests.stand_ins.hub.server import Fault
from tests.weights.conftest import SHARD, TOKEN, RunningHub, wait_for

from .conftest import SECRETS, reported
from .pods import ContainerConfigError, Pod, Ran

OVERLAY_HUB = "http://10.89.77.2:8100"  # where the overlay says that the encodings are


@dataclass
class Download:
    """Runs the Job's pods, one after the other, on one claim."""

    jobs: Callable[..., GraphJobs]
    pod: Callable[..., Pod]
    hub: RunningHub
    claim: Path
    tools: Path

    def start(self, target: str = "gb200-agg", secrets: Any = SECRETS, **settings: Any) -> Pod:
        """A pod whose first container has the packages at hand, as after an installation."""
        made = self.jobs(target, hub_endpoint=self.hub.url, **settings)
        return self.pod(made, made.download, secrets, empty={"tools": self.tools}, replaced={OVERLAY_HUB: self.hub.url})

    def run(self, target: str = "gb200-agg", **settings: Any) -> Ran:
        return self.start(target, **settings).run()[-1]

    def done(self, target: str = "gb200-agg", **settings: Any) -> dict[str, Any]:
        ran = self.run(target, **settings)
        assert (ran.name, ran.status) == ("download", 0), ran.log
        return reported(ran)

    def fails(self, status: int, **settings: Any) -> dict[str, Any]:
        ran = self.run(**settings)
        assert ran.status == status, ran.log
        assert "Traceback" not in ran.log
        assert TOKEN not in ran.log
        return reported(ran)

    @property
    def snapshot(self) -> Path:
        return self.claim / "weights" / "models--openai--gpt-oss-120b" / "snapshots" / self.hub.repository.revision

    def assert_complete(self) -> None:
        found = {str(p.relative_to(self.snapshot)): p.read_bytes() for p in self.snapshot.rglob("*") if p.is_file()}
        assert found == {file.path: file.content for file in self.hub.files}
        for name, body in content.encodings().items():
            assert (
                hashlib.sha256((self.claim / "encodings" / name).read_bytes()).digest() == hashlib.sha256(body).digest()
            )


@pytest.fixture
def download(
    jobs: Callable[..., GraphJobs], pod: Callable[..., Pod], hub: RunningHub, claim: Path, fetch_tools: Path
) -> Download:
    hub.state.tokens[TOKEN] = []
    return Download(jobs, pod, hub, claim, fetch_tools)


def encodings_bytes() -> int:
    return sum(len(body) for body in content.encodings().values())


def test_brings_weights_and_encodings_and_says_so(download: Download, hub: RunningHub) -> None:
    found = download.done()
    download.assert_complete()
    assert (found["changed"], found["verified"], found["transferred_bytes"]) == (True, True, hub.size)
    assert not [r for r in hub.requests if "original" in r["path"] or "metal" in r["path"]]
    owners = {path.stat().st_uid for path in download.snapshot.rglob("*")}
    pod = download.start()
    assert owners == {pod.user if pod.as_user else 0}


def test_a_second_run_asks_nobody_for_anything(download: Download, hub: RunningHub, place: Path) -> None:
    download.done()
    hub.mend()
    download.tools = place / "empty"  # nothing is installed, and there is nowhere to install it from
    settings = {"package_index": "http://index.invalid/simple"}
    ran = download.start(**settings).run()
    assert [(r.name, r.status) for r in ran] == [("install", 0), ("download", 0)], ran[-1].log
    assert reported(ran[0])["message"] == "not needed"
    assert reported(ran[1])["changed"] is False
    assert not list((place / "empty").iterdir())
    assert hub.requests == []


def test_another_graph_in_the_namespace_finds_it_done(download: Download, hub: RunningHub) -> None:
    download.done("gb200-agg")
    hub.mend()
    assert download.done("gb200-disagg")["changed"] is False
    assert hub.requests == []


def test_two_graphs_at_once_bring_it_once(download: Download, hub: RunningHub) -> None:
    hub.break_(Fault("throttle", f"/lfs/*{SHARD}", times=-1, bytes_per_second=400_000))
    pods = [download.start("gb200-agg"), download.start("gb200-disagg")]
    running = [pod.start(pod.spec.containers[0]) for pod in pods]
    ended = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0], ended
    changed = [json.loads(stdout.strip().splitlines()[-1])["changed"] for stdout, _ in ended]
    assert sorted(changed) == [False, True]
    download.assert_complete()
    assert hub.bytes_sent == hub.size + encodings_bytes()


def test_a_cut_costs_no_byte_twice(download: Download, hub: RunningHub) -> None:
    hub.break_(Fault("cut", f"/lfs/*{SHARD}", after_bytes=300_001))
    download.done()
    download.assert_complete()
    assert hub.bytes_sent == hub.size + encodings_bytes()


def test_the_next_pod_goes_on_where_this_one_failed(download: Download, hub: RunningHub) -> None:
    hub.break_(Fault("cut", f"/lfs/*{SHARD}", after_bytes=500_000), Fault("status", f"/lfs/*{SHARD}", times=-1))
    found = download.fails(1, job_environment={"ATTEMPTS": "1"})
    assert found["kind"] == "unreachable"
    assert "broke off at byte 500000" in found["message"]
    assert not download.snapshot.exists()
    hub.state.faults.clear()
    hub.cdn.faults.clear()
    download.done()
    download.assert_complete()
    assert hub.bytes_sent == hub.size + encodings_bytes()


def test_a_pod_that_is_evicted_keeps_what_has_arrived(download: Download, hub: RunningHub) -> None:
    hub.break_(Fault("throttle", "/lfs/*.safetensors", times=-1, bytes_per_second=200_000))
    pod = download.start()
    process = pod.start(pod.spec.containers[0])
    staging = download.claim / "staging"
    wait_for(lambda: sum(p.stat().st_size for p in staging.rglob("*.safetensors")) >= 100_000, "the download")
    process.terminate()
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stderr
    assert json.loads(stdout.strip().splitlines()[-1])["kind"] == "stopped"
    arrived = sum(p.stat().st_size for p in staging.rglob("*") if p.is_file())
    assert arrived > 0
    hub.mend()
    hub.state.tokens[TOKEN] = []
    assert download.done()["found_bytes"] > 0
    download.assert_complete()


def test_damage_on_the_way_is_never_published(download: Download, hub: RunningHub) -> None:
    hub.break_(Fault("corrupt", f"/lfs/*{SHARD}", after_bytes=1000))
    found = download.fails(1)
    assert found["kind"] == "checksum"
    assert SHARD in found["message"]
    assert not download.snapshot.exists()
    download.done()
    download.assert_complete()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("token", "token", "refused the token in HF_TOKEN (status 401)"),
        ("gated", "gated", "Accept its terms"),
        ("private", "repository", "does not exist, or is private"),
        ("forbidden", "token", "refused the file list (status 403)"),
    ],
)
def test_what_no_attempt_would_put_right_ends_the_job(
    download: Download, hub: RunningHub, fault: str, kind: str, words: str
) -> None:
    if fault == "token":
        hub.state.tokens.clear()
        hub.state.tokens["hf_another"] = []
    elif fault == "forbidden":
        hub.break_(Fault("status", "/api/*", times=-1, status=403))
    else:
        getattr(hub.state, fault).add("openai/gpt-oss-120b")
    found = download.fails(3)
    assert found["kind"] == kind, found
    assert words in found["message"]
    policy = download.start().job.spec.pod_failure_policy
    assert policy is not None
    fatal = [rule.on_exit_codes for rule in policy.rules if rule.action == "FailJob"]
    assert [(codes.operator, codes.values, codes.container_name) for codes in fatal if codes] == [
        ("In", (2, 3), "download")
    ]


def test_the_token_goes_to_the_hub_alone(download: Download, hub: RunningHub) -> None:
    pod = download.start()
    assert TOKEN not in json.dumps(pod.job.manifest())
    assert [v.name for v in pod.spec.init_containers[0].env if v.value_from] == []
    ran = pod.run()
    assert ran[-1].status == 0, ran[-1].log
    assert not any(TOKEN in container.log for container in ran)
    assert all(r["authenticated"] for r in hub.state.requests if not r["path"].startswith("/encodings/"))
    assert not any(r["authenticated"] for r in hub.cdn.requests)
    assert not any(TOKEN.encode() in p.read_bytes() for p in download.claim.rglob("*") if p.is_file())


def test_a_mirror_without_a_token(download: Download, hub: RunningHub) -> None:
    download.done(hf_token_secret=None, secrets={})
    assert not any(r["authenticated"] for r in hub.requests)


@pytest.mark.parametrize(
    ("secrets", "said"),
    [
        ({}, 'secret "hf-token-secret" not found'),
        ({"hf-token-secret": {"token": "x"}}, "couldn't find key HF_TOKEN"),
    ],
)
def test_without_the_secret_it_never_starts(download: Download, secrets: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ContainerConfigError, match=said):
        download.start(secrets=secrets).run()


def test_a_volume_that_is_not_ours_to_write(download: Download) -> None:
    pod = download.start()
    if not pod.as_user:
        pytest.skip("running as another user needs root")
    download.claim.chmod(0o755)
    os.chown(download.claim, 0, 0)
    ran = pod.run()[-1]
    assert ran.status == 1, ran.log
    assert "must be writable for user 1000, group 1000" in reported(ran)["message"]


def test_without_an_index_the_remedy_is_named(download: Download, place: Path) -> None:
    download.tools = place / "empty"
    quick = {"PIP_RETRIES": "0"}
    ran = download.start(package_index="http://127.0.0.1:9/simple", job_environment=quick).run()
    assert [(r.name, r.status) for r in ran] == [("install", 1)], ran[-1].log
    message = reported(ran[0])["message"]
    assert "huggingface-hub==2.4.0 (there is none) could not be installed: set the package index" in message
    assert "Traceback" not in ran[0].log


def test_locks_are_asked_for_and_waited_for(jobs: Callable[..., GraphJobs]) -> None:
    job = jobs().download
    assert f"--lock-wait={job.spec.active_deadline_seconds}" in job.spec.template.spec.containers[0].args
