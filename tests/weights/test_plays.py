"""The modules and roles as Ansible runs them, on this machine and into temporary directories."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import ansible.module_utils
import pytest
import yaml

from tests.programs import load
from tests.stand_ins.hub.server import Fault

from .conftest import MODEL, ROOT, SHARD, TOKEN, Fetcher, RunningHub, wait_for


@dataclass
class Run:
    """What a play said."""

    status: int
    output: str
    result: dict[str, Any]

    @property
    def changed(self) -> bool:
        return re.search(r"changed=[1-9]", self.output) is not None

    @property
    def said(self) -> str:
        """The output in one line: the terminal breaks long messages."""
        return " ".join(self.output.split())


class Plays:
    """Writes and runs plays with a local connection."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.register = directory / "result.json"

    def write(self, tasks: list[dict[str, Any]]) -> Path:
        playbook = self.directory / "play.yml"
        play = {"hosts": "all", "gather_facts": False, "tasks": tasks}
        playbook.write_text(yaml.safe_dump([play]))
        return playbook

    def module(self, name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        keep = {"content": "{{ result | to_json }}", "dest": str(self.register), "mode": "0600"}
        return [
            {"name": "Run the module", name: arguments, "register": "result"},
            {"name": "Keep the result", "ansible.builtin.copy": keep, "check_mode": False, "diff": False},
        ]

    def role(self, name: str, variables: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"name": "Run the role", "ansible.builtin.include_role": {"name": name}, "vars": variables}]

    def command(self, playbook: Path, *options: str) -> list[str]:
        binary = Path(sys.executable).with_name("ansible-playbook")
        return [str(binary), "--inventory=here,", "--connection=local", str(playbook), *options]

    @property
    def environment(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name != "HF_TOKEN"},
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml",
            "ANSIBLE_NOCOLOR": "1",
            "COLUMNS": "500",
        }

    def run(self, tasks: list[dict[str, Any]], *options: str) -> Run:
        self.register.unlink(missing_ok=True)
        done = subprocess.run(
            self.command(self.write(tasks), *options),
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=180,
            check=False,
        )
        result = json.loads(self.register.read_text()) if self.register.exists() else {}
        return Run(done.returncode, done.stdout, result)


@pytest.fixture
def plays(tmp_path: Path) -> Plays:
    return Plays(tmp_path)


@pytest.fixture
def arguments(fetcher: Fetcher, hub: RunningHub, tmp_path: Path) -> dict[str, Any]:
    return {
        "directory": str(fetcher.directory),
        "repository": MODEL,
        "revision": fetcher.revision,
        "ignore_patterns": ["original/*", "metal/*"],
        "encodings": hub.encodings(),
        "endpoint": hub.url,
        "python": sys.executable,
        "program_directory": str(tmp_path / "libexec"),
        "attempts": 2,
        "progress_interval": 1,
    }


# -- model_snapshot --


def test_first_check_then_run_then_nothing(
    plays: Plays, arguments: dict[str, Any], fetcher: Fetcher, hub: RunningHub
) -> None:
    tasks = plays.module("model_snapshot", arguments)
    check = plays.run(tasks, "--check", "--diff")
    assert check.status == 0, check.output
    assert check.changed
    assert "-weights: there is no snapshot" in check.output
    assert not fetcher.directory.exists()
    assert hub.requests == []

    hub.break_(Fault("throttle", "/lfs/*.safetensors", times=-1, bytes_per_second=180_000))
    run = plays.run(tasks)
    assert run.status == 0, run.output
    assert run.result["changed"] is True
    assert re.search(r"here: downloading: .* MiB of 3\.2 MiB \(\d+ %\), \d+ of 12 files, .*/s, \d+ s left", run.output)
    fetcher.assert_complete()
    assert [p.name for p in (fetcher.directory / "staging").iterdir()] == [f"{fetcher.model.name}.lock"]

    hub.mend()
    again = plays.run(tasks)
    assert again.result["changed"] is False
    assert hub.requests == []


def test_the_token_is_nowhere_to_be_seen(
    plays: Plays, arguments: dict[str, Any], fetcher: Fetcher, hub: RunningHub, tmp_path: Path
) -> None:
    token = f"hf_{secrets.token_hex(16)}"  # of this test alone: others run beside it
    hub.state.tokens[token] = []
    hub.break_(Fault("throttle", "/lfs/*.safetensors", times=-1, bytes_per_second=250_000))
    tasks = plays.module("model_snapshot", {**arguments, "token": "{{ lookup('ansible.builtin.env', 'TEST_TOKEN') }}"})
    playbook = plays.write(tasks)
    log = tmp_path / "output"
    seen = set()
    with log.open("w") as output:
        process = subprocess.Popen(
            plays.command(playbook, "-vvv"),
            cwd=ROOT,
            env={**plays.environment, "TEST_TOKEN": token},
            stdout=output,
            stderr=output,
        )
        while process.poll() is None:
            for entry in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.add(entry.read_bytes())
                except OSError:
                    continue
            time.sleep(0.05)
    assert process.returncode == 0, log.read_text()
    assert any(b"fetch_weights.py" in line and str(fetcher.directory).encode() in line for line in seen)
    assert not any(token.encode() in line for line in seen)
    assert all(r["authenticated"] for r in hub.state.requests if r["path"].startswith("/api"))
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or token.encode() not in path.read_bytes(), path


def test_a_fetch_goes_on_when_its_play_is_killed_and_the_next_play_follows_it(
    plays: Plays, arguments: dict[str, Any], fetcher: Fetcher, hub: RunningHub, tmp_path: Path
) -> None:
    hub.break_(Fault("throttle", "/lfs/*.safetensors", times=-1, bytes_per_second=20_000))
    command = plays.command(plays.write(plays.module("model_snapshot", arguments)))
    process = subprocess.Popen(command, cwd=ROOT, env=plays.environment, start_new_session=True)
    wait_for(lambda: list((fetcher.work / "partial").rglob("*.safetensors")), "the fetch")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    fetcher.assert_nothing_visible()
    log = tmp_path / "output"
    with log.open("w") as output:
        follower = subprocess.Popen(command, cwd=ROOT, env=plays.environment, stdout=output, stderr=output)
    following = "a fetch is at work here already; following it"
    wait_for(lambda: following in log.read_text() or follower.poll() is not None)
    assert following in log.read_text(), log.read_text()
    hub.hurry()
    assert follower.wait(120) == 0, log.read_text()
    fetcher.assert_complete()
    assert hub.bytes_of(SHARD) == len(hub.repository.by_path[SHARD].content)


def test_a_fetch_that_is_killed_is_reported(
    plays: Plays, arguments: dict[str, Any], fetcher: Fetcher, hub: RunningHub
) -> None:
    hub.break_(Fault("throttle", "/lfs/*.safetensors", times=-1, bytes_per_second=20_000))
    process = subprocess.Popen(
        plays.command(plays.write(plays.module("model_snapshot", arguments))),
        cwd=ROOT,
        env=plays.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    progress = fetcher.work.with_name(f"{fetcher.revision}.progress.json")
    wait_for(progress.exists, "the fetch")
    os.kill(json.loads(progress.read_text())["pid"], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "the fetch on the host ended without a word while" in output
    fetcher.assert_nothing_visible()


@pytest.mark.parametrize(
    ("wrong", "fault", "words"),
    [
        ({"revision": "main"}, None, "revision: 'main' is not a pinned commit"),
        ({"endpoint": "http://127.0.0.1:9", "attempts": 1}, None, "http://127.0.0.1:9 cannot be reached"),
        ({"keep_free_bytes": 10**15}, None, "are missing"),
        ({}, Fault("corrupt", f"/lfs/*{SHARD}"), f"{SHARD} from"),
        ({"token": TOKEN}, Fault("deny", "/api/*"), "refused the token in model_weights_token (HF_TOKEN)"),
        ({"source": "/nonexistent.tar"}, None, "on the controller: /nonexistent.tar does not exist"),
    ],
)
def test_failures_name_what_is_wrong(
    plays: Plays,
    arguments: dict[str, Any],
    fetcher: Fetcher,
    hub: RunningHub,
    wrong: dict[str, Any],
    fault: Fault | None,
    words: str,
) -> None:
    if fault is not None:
        hub.break_(fault)
    run = plays.run(plays.module("model_snapshot", {**arguments, **wrong}))
    assert run.status != 0
    assert words in run.said
    assert TOKEN not in run.output
    assert "Traceback" not in run.output
    fetcher.assert_nothing_visible()


@pytest.fixture
def bundle(fetcher: Fetcher, tmp_path: Path) -> Path:
    connected = Fetcher(tmp_path / "connected", fetcher.hub, fetcher.revision)
    connected.fetch(encodings=True)
    archive = tmp_path / "bundle.tar"
    assert connected.run("bundle", f"--output={archive}", encodings=True).returncode == 0
    return archive


@pytest.mark.parametrize("kind", ["archive", "directory"])
def test_weights_are_sent_from_the_controller(
    plays: Plays, arguments: dict[str, Any], fetcher: Fetcher, hub: RunningHub, bundle: Path, tmp_path: Path, kind: str
) -> None:
    hub.mend()
    source = bundle
    if kind == "directory":
        source = tmp_path / "unpacked"
        source.mkdir()
        subprocess.run(["tar", "-xf", str(bundle), "-C", str(source)], check=True)
    tasks = plays.module("model_snapshot", {**arguments, "source": str(source), "python": "/usr/bin/python3"})
    run = plays.run(tasks)
    assert run.status == 0, run.output
    assert "sending: 3.2 MiB of 3.2 MiB (100 %), 14 of 14 files" in run.output
    fetcher.assert_complete()
    assert hub.requests == []
    assert [p.name for p in (fetcher.directory / "staging").iterdir()] == [f"{fetcher.model.name}.lock"]
    assert plays.run(tasks).result["changed"] is False


def test_only_what_arrived_damaged_is_sent_again(
    plays: Plays, arguments: dict[str, Any], fetcher: Fetcher, bundle: Path, tmp_path: Path
) -> None:
    source = tmp_path / "unpacked"
    source.mkdir()
    subprocess.run(["tar", "-xf", str(bundle), "-C", str(source)], check=True)
    good = (source / SHARD).read_bytes()
    (source / SHARD).write_bytes(bytes(len(good)))
    tasks = plays.module("model_snapshot", {**arguments, "source": str(source), "python": "/usr/bin/python3"})
    run = plays.run(tasks)
    assert run.status != 0
    assert SHARD in run.said
    fetcher.assert_nothing_visible()
    (source / SHARD).write_bytes(good)
    run = plays.run(tasks)
    assert run.status == 0, run.output
    assert "1 of 1 files" in run.output, run.output
    fetcher.assert_complete()


# -- role model_weights --


def weights_role(fetcher: Fetcher, hub: RunningHub, tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "model_weights_model": {
            "name": "gpt-oss-120b",
            "repository": MODEL,
            "revision": fetcher.revision,
            "ignore_patterns": ["original/*", "metal/*"],
            "encodings": [{**e, "url": "http://hub.invalid/" + e["file"]} for e in hub.encodings()],
        },
        "model_weights_directory": str(fetcher.directory),
        "model_weights_program_directory": str(tmp_path / "libexec"),
        "model_weights_endpoint": hub.url,
        "model_weights_huggingface_hub_version": "2.4.0",
        "model_weights_keep_free_bytes": 0,
        **more,
    }


def test_role_brings_weights_from_a_share_and_looks_once_the_next_time(
    plays: Plays, fetcher: Fetcher, hub: RunningHub, bundle: Path, tmp_path: Path
) -> None:
    share = {"model_weights_source": "archive", "model_weights_path": str(bundle), "model_weights_path_on": "host"}
    tasks = plays.role("model_weights", weights_role(fetcher, hub, tmp_path, **share))
    first = plays.run(tasks)
    assert first.status == 0, first.output
    assert first.changed
    fetcher.assert_complete()
    hub.mend()
    bundle.unlink()  # what is verified needs its source no more
    again = plays.run(tasks, "-vvv")
    assert again.status == 0, again.output
    assert not again.changed
    assert hub.requests == []
    assert again.output.count("EXEC ") <= 3, "more than one remote call"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model_weights_source": "archive"}, "model_weights_path: it is empty"),
        (
            {"model_weights_source": "torrent"},
            "value of model_weights_source must be one of: hub, http, directory, archive",
        ),
        ({"model_weights_workers": "many"}, "model_weights_workers"),
        ({"model_weights_model": {"repository": MODEL}}, "revision"),
    ],
)
def test_role_refuses_bad_input(
    plays: Plays, fetcher: Fetcher, hub: RunningHub, tmp_path: Path, wrong: dict[str, Any], words: str
) -> None:
    run = plays.run(plays.role("model_weights", weights_role(fetcher, hub, tmp_path, **wrong)))
    assert run.status != 0
    assert words in run.said
    assert not fetcher.directory.exists()


def test_what_goes_on_meanwhile_begins_before_the_weights_and_only_where_they_have_to_come(
    plays: Plays, fetcher: Fetcher, hub: RunningHub, bundle: Path, tmp_path: Path
) -> None:
    meanwhile, began = tmp_path / "meanwhile.yml", tmp_path / "began"
    command = {"cmd": f"sh -c 'test ! -e {fetcher.marker} && touch {began}'"}
    meanwhile.write_text(
        yaml.safe_dump([{"name": "Begin", "ansible.builtin.command": command, "async": 60, "poll": 0}])
    )
    share = {"model_weights_source": "archive", "model_weights_path": str(bundle), "model_weights_path_on": "host"}
    variables = weights_role(fetcher, hub, tmp_path, model_weights_meanwhile=str(meanwhile), **share)
    tasks = plays.role("model_weights", variables)
    checked = plays.run(tasks, "--check")
    assert checked.status == 0, checked.output
    assert "TASK [model_weights : Begin]" not in checked.output
    first = plays.run(tasks)
    assert first.status == 0, first.output
    wait_for(began.exists, "the background task")
    again = plays.run(tasks)
    assert again.status == 0, again.output
    assert "TASK [model_weights : Begin]" not in again.output


# -- role model_cache --


def cache_role(directory: Path, **more: Any) -> dict[str, Any]:
    return {"model_cache_directory": str(directory), "model_cache_required_bytes": 1000, **own_user(), **more}


def own_user() -> dict[str, str]:
    return {"model_cache_owner": str(os.geteuid()), "model_cache_group": str(os.getegid())}


def test_cache_is_made_once(plays: Plays, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    tasks = plays.role("model_cache", cache_role(cache))
    check = plays.run(tasks, "--check", "--diff")
    assert check.status == 0, check.output
    assert check.changed
    assert f"+{cache}/weights: made" in check.output
    assert not cache.exists()
    assert plays.run(tasks).changed
    assert {p.name for p in cache.iterdir()} == {"weights", "staging", "encodings", "engine_caches"}
    assert {p.stat().st_mode & 0o7777 for p in (cache, *cache.iterdir())} == {0o755}
    assert not plays.run(tasks).changed
    (cache / "weights").chmod(0o700)
    assert plays.run(tasks).changed
    assert (cache / "weights").stat().st_mode & 0o7777 == 0o755


def mounts(tmp_path: Path, *lines: str) -> str:
    """A recorded process filesystem with these mounts."""
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    (own / "mountinfo").write_text("1 0 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n" + "".join(f"{x}\n" for x in lines))
    return str(tmp_path / "proc")


@pytest.fixture(scope="session")
def cache_module() -> ModuleType:
    """The module's functions."""
    own = str(ROOT / "plugins" / "module_utils")
    if own not in ansible.module_utils.__path__:
        ansible.module_utils.__path__.append(own)
    return load("plugins/modules/cache_directory.py")


def findings(module: ModuleType, tmp_path: Path, mount: str, **inputs: Any) -> str:
    """What the module finds wrong with a directory on this mount."""
    procfs = mounts(tmp_path, *([mount.format(tmp_path)] if mount else []))
    params = {"path": str(tmp_path / "cache"), "required_bytes": 1000, "require_mount": False} | inputs
    params.setdefault("allow_network_filesystem", False)
    facts = module.paths(module.Host(procfs, "/sys", "/", []), [params["path"]])[params["path"]]
    return "; ".join(module.filesystem_problems(facts, params, 0))


@pytest.mark.parametrize(
    ("mount", "inputs", "words"),
    [
        ("2 1 0:40 / {} rw - tmpfs tmpfs rw", {}, "would take up memory and be gone after a reboot"),
        ("2 1 0:40 / {} rw - nfs4 server:/x rw", {}, "a network filesystem"),
        ("2 1 0:40 / {} rw - fuse.sshfs server:/x rw", {}, "a network filesystem"),
        ("2 1 8:2 / {} ro - xfs /dev/nvme0n1 rw", {}, "mounted read-only"),
        ("2 1 7:0 / {} ro - squashfs /dev/loop0 ro", {}, "holds no files"),
        ("", {"require_mount": True}, "the disk meant for it is not mounted"),
        ("", {"required_bytes": 10**16}, "are missing"),
    ],
)
def test_cache_finds_what_cannot_hold_weights(
    cache_module: ModuleType, tmp_path: Path, mount: str, inputs: dict[str, Any], words: str
) -> None:
    assert words in findings(cache_module, tmp_path, mount, **inputs)


@pytest.mark.parametrize(
    ("mount", "inputs"),
    [
        ("", {}),
        ("2 1 0:40 / {} rw - overlay overlay rw", {}),
        ("2 1 0:40 / {} rw - nfs4 server:/x rw", {"allow_network_filesystem": True}),
        ("2 1 259:1 / {} rw,noexec - xfs /dev/nvme0n1 rw", {"require_mount": True}),
    ],
)
def test_cache_takes_what_can(cache_module: ModuleType, tmp_path: Path, mount: str, inputs: dict[str, Any]) -> None:
    assert findings(cache_module, tmp_path, mount, **inputs) == ""


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/usr/share/gpt-oss", "belongs to the system"),
        ("/dev/shm/gpt-oss", "belongs to the system"),
        ("/var/lib", "belongs to the system"),
        ("/", "belongs to the system"),
        ("/srv/../etc/x", "is not a plain absolute path"),
        ("srv/x", "is not a plain absolute path"),
    ],
)
def test_cache_stays_out_of_the_system(cache_module: ModuleType, path: str, words: str) -> None:
    assert words in "; ".join(cache_module.path_problems(path))


@pytest.mark.parametrize(
    ("mount", "inputs", "words"),
    [
        (
            "2 1 0:40 / {} ro - tmpfs tmpfs rw",
            {"model_cache_required_bytes": 10**16},
            ["gone after a reboot", "mounted read-only", "are missing"],
        ),
        ("", {"model_cache_directory": "/etc/x", "model_cache_mode": "rwx"}, ["belongs to the system", "octal mode"]),
        ("", {"model_cache_owner": "nobody-here"}, ["there is no 'nobody-here' on this host"]),
    ],
)
def test_cache_reports_everything_at_once_and_makes_nothing(
    plays: Plays, tmp_path: Path, mount: str, inputs: dict[str, Any], words: list[str]
) -> None:
    cache = tmp_path / "data" / "cache"
    cache.parent.mkdir()
    procfs = mounts(tmp_path, *([mount.format(cache.parent)] if mount else []))
    run = plays.run(plays.role("model_cache", cache_role(cache, model_cache_procfs=procfs, **inputs)))
    assert run.status != 0
    for expected in words:
        assert expected in run.said
    assert not cache.exists()


def test_what_is_in_the_cache_counts(plays: Plays, tmp_path: Path, small_disk: Path) -> None:
    cache = small_disk / "cache"
    cache.mkdir()
    (cache / "shard").write_bytes(bytes(4_000_000))
    procfs = mounts(tmp_path, f"2 1 259:1 / {small_disk} rw - xfs /dev/nvme0n1 rw")
    fits = cache_role(cache, model_cache_procfs=procfs, model_cache_required_bytes=6_000_000)
    assert plays.run(plays.role("model_cache", fits)).status == 0
    run = plays.run(plays.role("model_cache", {**fits, "model_cache_required_bytes": 7_000_000}))
    assert run.status != 0
    assert "7000000 bytes are needed, 4001792 are in it and" in run.said


# -- python_venv --


def test_environment_that_meets_the_pins_is_left_alone(plays: Plays) -> None:
    pins = {"path": sys.prefix, "requirements": ["huggingface_hub==2.4.0"]}
    run = plays.run(plays.module("python_venv", pins))
    assert run.status == 0, run.output
    assert run.result["changed"] is False
    assert run.result["before"] == {"huggingface-hub": "2.4.0"}
    other = plays.run(plays.module("python_venv", {**pins, "requirements": ["huggingface_hub==9.9"]}), "--check")
    assert other.result["changed"] is True


def test_environment_that_cannot_be_filled_is_removed(plays: Plays, tmp_path: Path) -> None:
    empty = tmp_path / "wheels"
    empty.mkdir()
    venv = tmp_path / "venv"
    arguments = {
        "path": str(venv),
        "requirements": ["huggingface_hub==2.4.0"],
        "wheel_directory": str(empty),
        "python": sys.executable,
    }
    run = plays.run(plays.module("python_venv", arguments))
    assert run.status != 0
    assert "No matching distribution found for huggingface_hub==2.4.0" in run.said
    assert not venv.exists()


@pytest.mark.parametrize("loose", ["huggingface_hub", "huggingface_hub>=2", "git+https://example.org/x"])
def test_loose_requirements_are_refused(plays: Plays, tmp_path: Path, loose: str) -> None:
    run = plays.run(plays.module("python_venv", {"path": str(tmp_path / "venv"), "requirements": [loose]}))
    assert run.status != 0
    assert "allowed: name==version" in run.said


def test_a_password_in_the_index_is_not_shown(plays: Plays, tmp_path: Path) -> None:
    arguments = {
        "path": str(tmp_path / "venv"),
        "requirements": ["huggingface_hub==2.4.0"],
        "index_url": "http://user:secret-word@127.0.0.1:9/simple",
        "python": sys.executable,
    }
    environment = {"PIP_RETRIES": "0", "PIP_TIMEOUT": "1", "PIP_FIND_LINKS": ""}
    tasks = plays.module("python_venv", arguments)
    tasks[0]["environment"] = environment
    run = plays.run(tasks)
    assert run.status != 0
    assert "secret-word" not in run.output


# -- removing --


def test_everything_is_taken_away_but_not_under_a_fetch(
    plays: Plays, fetcher: Fetcher, hub: RunningHub, tmp_path: Path
) -> None:
    hub.break_(Fault("throttle", "/lfs/*.safetensors", times=-1, bytes_per_second=20_000))
    variables = weights_role(fetcher, hub, tmp_path, model_weights_venv=str(tmp_path / "venv"))
    remove = [
        {
            "name": "Remove",
            "ansible.builtin.include_role": {"name": "model_weights", "tasks_from": "remove"},
            "vars": variables,
        }
    ]
    process = fetcher.start()
    wait_for(lambda: list((fetcher.work / "partial").rglob("*.safetensors")), "the fetch")
    refused = plays.run(remove)
    assert refused.status != 0
    assert f"{fetcher.model.name} is being fetched into {fetcher.directory}" in refused.said
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=120)
    hub.mend()
    fetcher.fetch()
    (fetcher.directory / "lost+found").mkdir()
    removed = plays.run(remove)
    assert removed.status == 0, removed.output
    assert [p.name for p in fetcher.directory.iterdir()] == ["lost+found"]
    assert not plays.run(remove).changed
