"""Drives the module of the same name: starts a fetch on the host, follows it, and shows how far it is.

Files of a source on the controller are sent first, one by one; those that have arrived are not sent again.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()


def _fetcher() -> ModuleType:
    """The fetching program's functions, which know manifests and archives."""
    name = "gpt_oss_fetch_weights"
    if name not in sys.modules:
        path = Path(__file__).parent.parent / "module_utils" / "gpt_oss" / "fetch_weights.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


class ActionModule(ActionBase):
    """See the module's documentation."""

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        self._task_vars = task_vars or {}
        arguments = dict(self._task.args)
        from_controller = bool(arguments.get("source")) and arguments.get("source_on", "controller") == "controller"
        phase = arguments.pop("phase", "present")
        if arguments.get("address") and arguments.get("manifest") and phase != "check":
            self._enclose_manifest(arguments)
        if phase == "check" or self._task.check_mode or not from_controller:
            result = self._call(arguments, phase)
        else:
            result = self._call(arguments, "check")
            if result.get("verified") or result.get("failed"):
                return result
            self._send(arguments)
            result = self._call(arguments, phase)
        return self._follow(arguments, result)

    def _call(self, arguments: dict[str, Any], phase: str, **more: Any) -> dict[str, Any]:
        result: dict[str, Any] = self._execute_module(
            module_name="model_snapshot",
            module_args={**arguments, "phase": phase, **more},
            task_vars=self._task_vars,
        )
        return result

    @staticmethod
    def _enclose_manifest(arguments: dict[str, Any]) -> None:
        """A manifest beside the inventory goes over with the call; what a web server says of its files is not asked."""
        if arguments.get("source_on", "controller") != "controller":
            return
        try:
            arguments["manifest_content"] = _fetcher().load_manifest(Path(arguments.pop("manifest")))
        except _fetcher().FetchError as error:
            raise AnsibleActionFail(f"model_weights_manifest: on the controller: {error}") from None

    def _say(self, text: str) -> None:
        display.display(f"{self._task_vars.get('inventory_hostname', 'host')}: {text}")

    def _follow(self, arguments: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """Show the progress until the fetch has ended. Each look waits on the host, so the end is seen at once."""
        limit = int(arguments.get("time_limit", 43200))
        until = time.monotonic() + limit
        if result.get("attached"):
            self._say("a fetch is at work here already; following it")
        while not result.get("failed") and not result.get("finished", True):
            self._say(_fetcher().progress_line(result["progress"]))
            if time.monotonic() > until:
                return {
                    **result,
                    "failed": True,
                    "msg": f"the fetch is still at work after {limit} seconds and goes on in the background;"
                    " run again to follow it",
                }
            result = self._call(arguments, "wait")
        return result

    # -- sources on the controller --

    def _send(self, arguments: dict[str, Any]) -> None:
        fetcher = _fetcher()
        path = Path(arguments["source"])
        manifest_path = Path(arguments["manifest"]) if arguments.get("manifest") else None
        try:
            request = fetcher.make_request(
                {
                    "repository": arguments["repository"],
                    "revision": arguments["revision"],
                    "weights_directory": "/nonexistent",
                    "staging_directory": "/nonexistent",
                    "encodings_directory": "/nonexistent",
                    "encodings": arguments.get("encodings") or [],
                    "ignore_patterns": arguments.get("ignore_patterns") or [],
                    "from": str(path),
                    "manifest": manifest_path,
                }
            )
            source = fetcher.open_source(request)
        except fetcher.FetchError as error:
            raise AnsibleActionFail(f"on the controller: {error}") from None
        try:
            files = [f for f in source.files() if not fetcher.ignored(f.path, request.ignore_patterns)]
            user = self._login_user()
            place = self._call(arguments, "receive", receive={"manifest": source.manifest, "user": user})
            if place.get("failed"):
                raise AnsibleActionFail(str(place.get("msg")))
            wanted = {f.sha256: (f.path, f.size) for f in files}
            wanted |= {e.sha256: (f"encodings/{e.file}", e.size or 0) for e in request.encodings}
            missing = [(sha256, *wanted[sha256]) for sha256 in place["missing"]]
            self._send_files(fetcher, source, place["directory"], missing)
        except fetcher.FetchError as error:
            raise AnsibleActionFail(f"on the controller: {error}") from None
        finally:
            source.close()

    def _login_user(self) -> int:
        """Who the connection logs in as; files are sent as that user, before privileges are raised."""
        answer = self._low_level_execute_command("id -u", sudoable=False)
        return int(answer["stdout"].strip())

    def _send_files(
        self, fetcher: ModuleType, source: Any, directory: str, missing: list[tuple[str, str, int]]
    ) -> None:
        total = sum(size for _, _, size in missing)
        began = shown = time.monotonic()
        sent = 0
        for number, (sha256, path, size) in enumerate(missing, 1):
            with self._local(fetcher, source, path) as local:
                self._connection.put_file(str(local), f"{directory}/{sha256}")
            sent += size
            now = time.monotonic()
            if now - shown > float(self._task.args.get("progress_interval", 10)) or number == len(missing):
                shown = now
                state = {
                    "state": "sending",
                    "bytes_done": sent,
                    "bytes_total": total,
                    "files_done": number,
                    "files_total": len(missing),
                    "rate": int(sent / max(now - began, 0.001)),
                    "seconds_left": int((total - sent) * (now - began) / sent) if 0 < sent < total else None,
                }
                self._say(fetcher.progress_line(state))

    @staticmethod
    def _local(fetcher: ModuleType, source: Any, path: str) -> _LocalFile:
        return _LocalFile(fetcher, source, path)


class _LocalFile:
    """A file of the source under a name on the controller: itself, or an archive's member unpacked for a moment."""

    def __init__(self, fetcher: ModuleType, source: Any, path: str) -> None:
        self.fetcher, self.source, self.path = fetcher, source, path
        self.unpacked: Any = None

    def __enter__(self) -> Path:
        if isinstance(self.source, self.fetcher.DirectorySource):
            return Path(self.source.find(self.path))
        self.unpacked = tempfile.NamedTemporaryFile(prefix="gpt-oss-", delete=True)
        for chunk in self._chunks():
            self.unpacked.write(chunk)
        self.unpacked.flush()
        return Path(self.unpacked.name)

    def _chunks(self) -> Iterator[bytes]:
        chunks: Iterator[bytes] = self.source.chunks(self.path, 0)
        return chunks

    def __exit__(self, *_: object) -> None:
        if self.unpacked is not None:
            self.unpacked.close()
