#!/usr/bin/python
"""One verified revision of a model on the host: looked at, fetched in the background, followed."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_snapshot
short_description: Bring one revision of a model to a host, verified, or change nothing
description:
  - Looks first. A snapshot whose marker agrees with names, sizes and times is verified; no weights are read and nobody
    is asked.
  - Otherwise the fetch runs in the background on the host and is followed from here, with bytes, rate and time left on
    the terminal. It goes on when the connection to the host is lost; run again to follow it.
  - Files become visible only when all of them are complete and agree with their checksums.
  - The action plugin of the same name drives the phases; give O(phase) only to look without fetching.
options:
  directory:
    description: The model cache. Weights, downloads in progress and encodings lie below it.
    type: path
    required: true
  repository:
    description: The model's name on the hub, C(owner/name).
    type: str
    required: true
  revision:
    description: The commit, 40 hexadecimal digits.
    type: str
    required: true
  ignore_patterns:
    description: Files to leave out.
    type: list
    elements: str
    default: []
  encodings:
    description: Vocabulary files to bring as well, each with C(file), C(url) and C(sha256).
    type: list
    elements: dict
    default: []
  encodings_url:
    description: Address of a directory with the encodings, in place of their own addresses.
    type: str
    default: ""
  endpoint:
    description: Address of the hub or of a mirror of it.
    type: str
    default: https://huggingface.co
  token:
    description: Access token; only for gated and private models. It reaches the fetching process by its environment.
    type: str
    default: ""
  source:
    description: A directory or tar archive with the files, instead of a hub.
    type: path
  address:
    description: Address of a directory on a plain web server with the files, instead of a hub. No token is sent there.
    type: str
    default: ""
  source_on:
    description: Where O(source) is, and a O(manifest) apart from the files.
    type: str
    choices: [controller, host]
    default: controller
  manifest:
    description: The manifest of O(source), on the same machine, or of O(address); left out when the files have their
      own C(manifest.json) with them.
    type: path
  manifest_content:
    description: Used by the action plugin, for a manifest of O(address) that is on the controller.
    type: dict
    default: {}
  python:
    description: Interpreter that has huggingface_hub. Any Python 3.8 will do where O(source) or O(address) is
      given.
    type: path
    default: /usr/bin/python3
  program_directory:
    description: Where the fetching program is kept on the host.
    type: path
    default: /opt/gpt-oss/libexec
  workers:
    description: Files brought at once.
    type: int
    default: 8
  keep_free_bytes:
    description: Room to leave on the disk.
    type: int
    default: 0
  attempts:
    description: Times to ask again without a new byte before giving up.
    type: int
    default: 6
  connection_timeout:
    description: Seconds without a byte after which a connection counts as broken.
    type: int
    default: 30
  remove_stale_staging:
    description: Remove half-done downloads of the model's other revisions.
    type: bool
    default: false
  progress_interval:
    description: Seconds between lines of progress.
    type: int
    default: 10
  time_limit:
    description: Seconds after which the play stops following. The fetch itself goes on.
    type: int
    default: 43200
  phase:
    description: V(check) only looks. The others belong to the action plugin.
    type: str
    choices: [check, present, wait, receive]
    default: present
  receive:
    description: Used by the action plugin, for files that it sends.
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: Says whether something would be fetched; asks no hub.
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Bring the weights
  model_snapshot:
    directory: /var/lib/gpt-oss
    repository: openai/gpt-oss-120b
    revision: b5c939de8f754692c1647ca79fbf85e8c1e70f8a
    ignore_patterns: [original/*, metal/*]
    python: /opt/gpt-oss/venvs/huggingface_hub/bin/python
"""

RETURN = r"""
verified:
  description: Whether everything is there and verified.
  returned: always
  type: bool
problems:
  description: What was missing or not verified.
  returned: always
  type: list
  elements: str
snapshot:
  description: Directory of the snapshot.
  returned: always
  type: str
other_revisions:
  description: Other revisions of the model in this cache.
  returned: always
  type: list
  elements: str
fetching:
  description: Models that were being fetched into this cache when it was looked at.
  returned: always
  type: list
  elements: str
finished:
  description: Whether a fetch has ended.
  returned: always
  type: bool
progress:
  description: The state of a fetch, as its progress file has it.
  returned: when one was started or found
  type: dict
"""

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss import fetch_weights as weights
from ansible.module_utils.gpt_oss import revisions
from ansible.module_utils.gpt_oss.background import install, last_lines, locked, read_state

PROGRAM = "fetch_weights.py"


def request_of(params: dict[str, Any], source: str | None) -> weights.Request:
    """The fetcher's own form of the parameters."""
    base = params["directory"]
    return weights.make_request(
        {
            "repository": params["repository"],
            "revision": params["revision"],
            "weights_directory": os.path.join(base, "weights"),
            "staging_directory": os.path.join(base, "staging"),
            "encodings_directory": os.path.join(base, "encodings"),
            "ignore_patterns": params["ignore_patterns"],
            "encodings": params["encodings"],
            "endpoint": params["endpoint"],
            "token": "" if source or params["address"] else params["token"],  # nobody but a hub gets it
            "from": source or params["address"],
            "manifest": params["manifest"] if params["source_on"] == "host" else None,
            "keep_free_bytes": params["keep_free_bytes"],
        }
    )


class Fetch:
    """The background process: one for a model at a time, known by the lock that it holds."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params
        source = params["source"]
        request = request_of(params, source)
        if source and params["source_on"] == "controller":
            request.source = request.layout.received
        self.request = request
        self.layout = request.layout
        side = self.layout.staging / self.layout.folder
        self.progress_file = side / (self.layout.revision + ".progress.json")
        self.log = side / (self.layout.revision + ".log")
        self.manifest = side / (self.layout.revision + ".manifest.json")
        if params["manifest_content"]:
            request.manifest = self.manifest

    def try_lock(self) -> int | None:
        """The lock's descriptor, or nothing while a fetch is running."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        descriptor: int | None = locked(self.layout.lock)
        return descriptor

    def start(self, lock: int) -> None:
        """Start the fetch; it inherits the lock, so there is no moment without an owner."""
        for stale in (self.progress_file, self.log):
            with contextlib.suppress(FileNotFoundError):
                stale.unlink()
        if self.request.source == self.layout.received:
            weights.take_received(self.layout, weights.load_manifest(self.layout.received / weights.MANIFEST_NAME))
        if self.params["manifest_content"]:
            weights.write_atomically(self.manifest, json.dumps(self.params["manifest_content"]))
        environment = dict(os.environ, HF_ENDPOINT=self.request.endpoint, PYTHONUNBUFFERED="1")
        environment.pop("HF_TOKEN", None)
        if self.request.token:
            environment["HF_TOKEN"] = self.request.token
        descriptor = os.open(str(self.log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            subprocess.Popen(
                [*self.command(lock)],
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                cwd="/",
                env=environment,
                pass_fds=(lock,),
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    def command(self, lock: int) -> list[str]:
        layout, params = self.layout, self.params
        command = [params["python"], str(self.install_program()), "fetch"]
        for option, value in (
            ("repository", layout.repository),
            ("revision", layout.revision),
            ("weights-directory", layout.weights),
            ("staging-directory", layout.staging),
            ("encodings-directory", layout.encodings),
            ("ignore-patterns", " ".join(params["ignore_patterns"])),
            ("encodings", json.dumps(params["encodings"])),
            ("workers", params["workers"]),
            ("keep-free-bytes", params["keep_free_bytes"]),
            ("attempts", params["attempts"]),
            ("timeout", params["connection_timeout"]),
            ("progress-file", self.progress_file),
            ("progress-interval", params["progress_interval"]),
            ("lock-descriptor", lock),
            ("from", self.request.source or self.request.address or None),
            ("manifest", self.request.manifest),
        ):
            if value is not None:
                command.append(f"--{option}={value}")
        if params["remove_stale_staging"]:
            command.append("--remove-stale-staging")
        return command

    def install_program(self) -> Path:
        """Put the fetching program on the host; it is the module's own other half."""
        path: Path = install(PROGRAM, self.params["program_directory"])
        return path

    def progress(self) -> dict[str, Any]:
        return read_state(self.progress_file) or {"state": "starting"}

    def follow(self, seconds: float) -> dict[str, Any]:
        """Wait for the end, but no longer than this, and say how far it is."""
        until = time.monotonic() + seconds
        while True:
            lock = self.try_lock()
            if lock is not None:
                os.close(lock)
                return {"finished": True, "progress": self.progress()}
            if time.monotonic() >= until:
                return {"finished": False, "progress": self.progress()}
            time.sleep(0.1)

    def last_words(self) -> str:
        try:
            said = last_lines(self.log)
        except OSError:
            return "it wrote no log"
        return f"its last lines: {said}" if said else "its log is empty"

    def tidy(self) -> None:
        """After success nothing of the fetch stays behind."""
        for leftover in (self.progress_file, self.log, self.manifest):
            with contextlib.suppress(FileNotFoundError):
                leftover.unlink()
        if self.layout.received.is_dir():
            for name in os.listdir(str(self.layout.received)):
                os.unlink(os.path.join(str(self.layout.received), name))
            self.layout.received.rmdir()
        with contextlib.suppress(OSError):  # other revisions may be half-done there
            (self.layout.staging / self.layout.folder).rmdir()

    def has_received(self, sha256: str) -> bool:
        """Whether a small file has come from the controller already."""
        try:
            content = (self.layout.received / sha256).read_bytes()
        except OSError:
            return False
        return hashlib.sha256(content).hexdigest() == sha256

    def receive(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Make ready for files from the controller: room for them, and a place that the login user may write to."""
        manifest = wanted["manifest"]
        source = weights.ManifestSource(self.request, manifest, str(self.params["source"]))
        files = [f for f in source.files() if not weights.ignored(f.path, self.request.ignore_patterns)]
        weights.link_known(self.layout, files)
        missing = [f.sha256 for f in files if weights.bytes_here(self.layout, f) != f.size]
        if weights.weights_problem(self.layout, self.request.ignore_patterns) is None:
            missing = []
        encodings = [
            encoding
            for encoding in weights.encodings_missing(self.layout, self.request.encodings)
            if not self.has_received(encoding.sha256)
        ]
        for directory in (self.layout.weights, self.layout.received):
            directory.mkdir(parents=True, exist_ok=True)
        if missing:
            weights.require_space(self.request, files)
        weights.write_atomically(self.layout.received / weights.MANIFEST_NAME, json.dumps(manifest))
        os.chown(str(self.layout.received), int(wanted["user"]), -1)
        os.chmod(str(self.layout.received), 0o700)
        return {"directory": str(self.layout.received), "missing": missing + [e.sha256 for e in encodings]}


def fetching(staging: Path) -> list[str]:
    """Models that are being fetched into this cache at this moment, as their cache directories are called."""
    found = []
    for lock in sorted(staging.glob("models--*.lock")):
        with lock.open("rb") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(lock.name[: -len(".lock")])
    return found


def in_input_words(message: str, request: weights.Request) -> str:
    """The program knows its environment and options; who runs a play knows the inputs that come there."""
    message = message.replace("HF_TOKEN", "model_weights_token (HF_TOKEN)")
    of_the_source = request.address and request.address in message and not message.startswith("/")
    return f"model_weights_url: {message}" if of_the_source else message


def outcome(fetch: Fetch, followed: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """What to tell the play about a fetch that has ended or goes on."""
    result.update(followed)
    result["changed"] = True
    if not followed["finished"]:
        return result
    state = followed["progress"].get("state")
    status = weights.check(fetch.request)
    if state == "failed":
        result["failed"] = True
        result["msg"] = in_input_words(followed["progress"]["message"], fetch.request)
    elif status["verified"]:  # another play may have followed it too, and tidied up
        fetch.tidy()
        result.update(status)
    else:
        result["failed"] = True
        result["msg"] = f"the fetch on the host ended without a word while {state}; {fetch.last_words()}"
    return result


def run(module: AnsibleModule) -> dict[str, Any]:
    params = module.params
    fetch = Fetch(params)
    if params["phase"] == "receive":
        return {"changed": True, **fetch.receive(params["receive"])}
    status = weights.check(fetch.request)
    result: dict[str, Any] = {
        "changed": False,
        "finished": True,
        "fetching": fetching(fetch.layout.staging),
        "other_revisions": revisions.others(fetch.layout),
        **status,
    }
    if params["phase"] == "wait":
        return outcome(fetch, fetch.follow(params["progress_interval"]), result)
    if status["verified"] or params["phase"] == "check":
        return result
    if module._diff:
        result["diff"] = {
            "before": "".join(problem + "\n" for problem in status["problems"]),
            "after": f"{params['repository']} at {params['revision']}, verified, in {status['snapshot']}\n",
        }
    if module.check_mode:
        result["changed"] = True
        return result
    lock = fetch.try_lock()
    result["attached"] = lock is None
    if lock is not None:
        try:
            fetch.start(lock)
        finally:
            os.close(lock)
    return outcome(fetch, fetch.follow(min(3, params["progress_interval"])), result)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "directory": {"type": "path", "required": True},
            "repository": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "ignore_patterns": {"type": "list", "elements": "str", "default": []},
            "encodings": {"type": "list", "elements": "dict", "default": []},
            "encodings_url": {"type": "str", "default": ""},
            "endpoint": {"type": "str", "default": "https://huggingface.co"},
            "token": {"type": "str", "default": "", "no_log": True},
            "source": {"type": "path"},
            "address": {"type": "str", "default": ""},
            "source_on": {"type": "str", "choices": ["controller", "host"], "default": "controller"},
            "manifest": {"type": "path"},
            "manifest_content": {"type": "dict", "default": {}},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "program_directory": {"type": "path", "default": "/opt/gpt-oss/libexec"},
            "workers": {"type": "int", "default": 8},
            "keep_free_bytes": {"type": "int", "default": 0},
            "attempts": {"type": "int", "default": 6},
            "connection_timeout": {"type": "int", "default": 30},
            "remove_stale_staging": {"type": "bool", "default": False},
            "progress_interval": {"type": "int", "default": 10},
            "time_limit": {"type": "int", "default": 43200},
            "phase": {"type": "str", "choices": ["check", "present", "wait", "receive"], "default": "present"},
            "receive": {"type": "dict", "default": {}},
        },
        mutually_exclusive=[("source", "address")],
        supports_check_mode=True,
    )
    os.umask(0o022)
    mirror = module.params["encodings_url"].rstrip("/")
    if mirror:
        for encoding in module.params["encodings"]:
            encoding["url"] = mirror + "/" + encoding["file"]
    try:
        result = run(module)
    except weights.FetchError as error:
        module.fail_json(msg=weights.hide(str(error), module.params["token"]))
    except OSError as error:
        module.fail_json(msg=weights.os_error(error))
    if result.pop("failed", False):
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
