"""Sets of files, directories and links: all judged first, then put in place one by one, each atomically."""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import shlex
import shutil
import tempfile
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss.files import StagedFile, kind_of, read_file, text_diff

_HIDDEN = "(sensitive content, not shown)\n"
_OCTAL = re.compile(r"0?[0-7]{3,4}")
_DEFAULT_MODES = {"file": 0o644, "directory": 0o755}

ENTRY_OPTIONS: dict[str, Any] = {
    "path": {"type": "path", "required": True},
    "state": {"type": "str", "choices": ["file", "directory", "link", "absent"], "default": "file"},
    "content": {"type": "raw"},
    "target": {"type": "str"},
    "owner": {"type": "str"},
    "group": {"type": "str"},
    "mode": {"type": "raw"},
    "validate": {"type": "str"},
    "merge": {"type": "str", "choices": ["json"]},
}


# For modules that can keep a content to themselves: made with no_log, they call FileSet.hide_contents().
HIDEABLE_ENTRY_OPTIONS = {**ENTRY_OPTIONS, "sensitive": {"type": "bool", "default": False}}


class EntryError(Exception):
    """Something an entry asks for that cannot be done."""


class Entry:
    """One wanted path: what is there, what shall be, and the steps between."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self.path: str = wanted["path"]
        self.state: str = wanted["state"]
        self.target: str | None = wanted["target"]
        self.validate: str | None = wanted["validate"]
        self.sensitive: bool = wanted.get("sensitive", False)
        self._wanted = wanted
        self.kind = "absent"
        self.before: bytes | None = None
        self.after: bytes | None = None
        self.current: tuple[int, int, int] | None = None  # uid, gid, mode
        self.mode = 0
        self.uid = -1
        self.gid = -1
        self.staged: StagedFile | None = None

    # -- looking ---------------------------------------------------------------------------------------------------

    def look(self, soft: list[str]) -> None:
        """Read the host and decide. `soft` collects findings that check mode tolerates."""
        if not os.path.isabs(self.path) or os.path.normpath(self.path) != self.path:
            raise EntryError("path must be absolute and without '..', '//' or a trailing slash")
        self._reject_unused_keys()
        self.kind = kind_of(self.path)
        if self.state == "absent":
            self._look_before_removing()
            return
        if self.state == "link":
            if not self.target:
                raise EntryError("target is required for state 'link'")
            if self.kind not in ("absent", "link"):
                raise EntryError(f"is a {self.kind}; a link replaces only a link. Remove it first (state: absent)")
            return
        if self.kind == "link" and self.state == "directory" and os.path.isdir(self.path):
            self.kind = "directory"  # a link to a directory is as good as one: caches move to other disks that way
        if self.kind not in ("absent", self.state):
            detail = f" to {os.readlink(self.path)}" if self.kind == "link" else ""
            raise EntryError(f"is a {self.kind}{detail}, not a {self.state}; name the real path, or remove it first")
        if self.kind != "absent":
            found = os.stat(self.path)
            self.current = (found.st_uid, found.st_gid, found.st_mode & 0o7777)
        self.mode = self._wanted_mode()
        self.uid = _number(self._wanted["owner"], "owner", soft)
        self.gid = _number(self._wanted["group"], "group", soft)
        if self.state == "file":
            self.before = read_file(self.path)
            self.after = self._wanted_content(soft)

    def _reject_unused_keys(self) -> None:
        used = {
            "file": {"content", "owner", "group", "mode", "validate", "merge"},
            "directory": {"owner", "group", "mode"},
            "link": {"target"},
            "absent": set(),
        }[self.state]
        asked = {
            key
            for key in ("content", "target", "owner", "group", "mode", "validate", "merge")
            if self._wanted[key] is not None
        }
        unused = sorted(asked - used)
        if unused:
            raise EntryError(
                "{}: not used with state {!r}; it takes: {}".format(
                    ", ".join(unused), self.state, ", ".join(sorted(used)) or "nothing"
                )
            )

    def _look_before_removing(self) -> None:
        if self.path.count("/") < 2:
            raise EntryError("will not remove a top-level directory")
        if self.kind == "directory":
            with open("/proc/self/mounts", encoding="utf-8", errors="replace") as mounts:
                points = [line.split(" ")[1].replace("\\040", " ") for line in mounts if line.count(" ") > 1]
            inside = sorted({p for p in points if p == self.path or p.startswith(self.path + "/")})
            if inside:
                raise EntryError(
                    "something is mounted at {}; unmount it before the directory is removed".format(", ".join(inside))
                )

    def _wanted_mode(self) -> int:
        mode = self._wanted["mode"]
        if mode is None:
            if self.sensitive and self.state == "file":
                return 0o600
            return self.current[2] if self.current else _DEFAULT_MODES[self.state]
        if not isinstance(mode, str) or not _OCTAL.fullmatch(mode):
            raise EntryError(f'mode: {mode!r} is not an octal mode in quotes, such as "0644"')
        return int(mode, 8)

    def _wanted_content(self, soft: list[str]) -> bytes | None:
        content = self._wanted["content"]
        if content is None:
            if self._wanted["merge"]:
                raise EntryError("merge: needs content")
            if self.before is None:
                soft.append("does not exist, and no content is given to make it from")
            return self.before
        if self._wanted["merge"] == "json":
            return self._merged(content)
        if not isinstance(content, str):
            raise EntryError(
                f"content must be text, found {type(content).__name__}; render it with to_nice_json or to_nice_yaml"
            )
        return content.encode("utf-8")

    def _merged(self, patch: Any) -> bytes:
        if isinstance(patch, str):
            patch = _json_object(patch, "content")
        if not isinstance(patch, dict):
            raise EntryError(f"content must be a mapping, found {type(patch).__name__}")
        now: Any = {}
        if self.before is not None and self.before.strip():
            now = _json_object(self.before.decode("utf-8", "replace"), "the file on the host")
        result = _patched(now, patch)
        if self.before is not None and self.before.strip() and result == now:
            return self.before
        return (json.dumps(result, indent=2, ensure_ascii=False) + "\n").encode("utf-8")

    # -- judging ---------------------------------------------------------------------------------------------------

    @property
    def content_changes(self) -> bool:
        return self.state == "file" and self.after is not None and self.before != self.after

    @property
    def attributes_change(self) -> bool:
        if self.state not in ("file", "directory") or self.current is None:
            return False
        uid, gid, mode = self.current
        return mode != self.mode or self.uid not in (-1, uid) or self.gid not in (-1, gid)

    @property
    def changed(self) -> bool:
        if self.state == "absent":
            return self.kind != "absent"
        if self.state == "link":
            return self.kind != "link" or os.readlink(self.path) != self.target
        return self.kind == "absent" or self.content_changes or self.attributes_change

    def diffs(self) -> list[dict[str, Any]]:
        found = []
        if self.state == "file" and self.content_changes:
            found.append(self._content_diff(self.before, self.after))
        if self.state == "absent" and self.kind == "file":
            found.append(self._content_diff(read_file(self.path), None))
        elif self.state in ("absent", "link") or self.kind == "absent" or self.attributes_change:
            found.append(
                {
                    "before_header": self.path,
                    "after_header": self.path,
                    "before": self._described(self.kind, self.current),
                    "after": self._described(self.state, (self.uid, self.gid, self.mode)),
                }
            )
        return found

    def _content_diff(self, before: bytes | None, after: bytes | None) -> dict[str, Any]:
        shown: dict[str, Any] = text_diff(self.path, before, after)
        if self.sensitive:
            shown["before"] = _HIDDEN if before is not None else ""
            shown["after"] = "(new sensitive content, not shown)\n" if after is not None else ""
        return shown

    def _described(self, kind: str, attributes: tuple[int, int, int] | None) -> dict[str, str]:
        described = {"state": kind}
        if kind == "link":
            described["target"] = str(
                self.target if kind == self.state and attributes is not self.current else os.readlink(self.path)
            )
        if attributes is not None and kind in ("file", "directory"):
            uid, gid, mode = attributes
            described["mode"] = f"{mode:04o}"
            if self.uid != -1:
                described["owner"] = str(uid)
            if self.gid != -1:
                described["group"] = str(gid)
        return described

    # -- doing -----------------------------------------------------------------------------------------------------

    def stage(self) -> None:
        if self.content_changes:
            assert self.after is not None
            uid, gid = self.uid, self.gid
            if self.current is not None:
                uid = self.current[0] if uid == -1 else uid
                gid = self.current[1] if gid == -1 else gid
            self.staged = StagedFile(self.path, self.after, self.mode, uid, gid)

    def make_directory(self) -> None:
        if self.kind == "absent":
            os.mkdir(self.path, 0o700)
            self._set_attributes()

    def put(self) -> None:
        if self.staged is not None:
            self.staged.put()
        elif self.state == "link":
            self._put_link()
        elif self.state == "absent":
            if self.kind == "directory":
                shutil.rmtree(self.path)
            elif self.kind != "absent":
                os.unlink(self.path)
        elif self.attributes_change:
            self._set_attributes()

    def _set_attributes(self) -> None:
        if self.uid != -1 or self.gid != -1:
            os.chown(self.path, self.uid, self.gid)
        os.chmod(self.path, self.mode)

    def _put_link(self) -> None:
        assert self.target is not None
        holder = tempfile.mkdtemp(prefix="." + os.path.basename(self.path) + ".", dir=os.path.dirname(self.path))
        try:
            os.symlink(self.target, os.path.join(holder, "link"))
            os.replace(os.path.join(holder, "link"), self.path)
        finally:
            shutil.rmtree(holder)


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise EntryError(f"{where} is not JSON ({error}); repair it or remove it first") from None
    if not isinstance(value, dict):
        raise EntryError(f"{where} must be a JSON object, found {type(value).__name__}")
    return value


def _patched(now: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result: dict[str, Any] = dict(now) if isinstance(now, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _patched(result.get(key), value)
    return result


def _number(name: str | None, what: str, soft: list[str]) -> int:
    if name is None:
        return -1
    if name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid if what == "owner" else grp.getgrnam(name).gr_gid
    except KeyError:
        soft.append("{}: there is no {} {!r} on this host".format(what, "user" if what == "owner" else "group", name))
        return -1


def _missing_parents(entries: list[Entry]) -> list[tuple[Entry, str]]:
    """Entries that need a directory which is neither there nor made by this call."""
    coming = {entry.path for entry in entries if entry.state == "directory"}
    going = {entry.path for entry in entries if entry.state == "absent"}
    found = []
    for entry in entries:
        parent = os.path.dirname(entry.path)
        needed = os.path.isabs(entry.path) and entry.state != "absent" and parent not in coming
        if needed and (not os.path.isdir(parent) or parent in going):
            found.append((entry, f"its directory {parent} does not exist; add it as an entry with state 'directory'"))
    return found


class PutError(Exception):
    """A set that could not be put in place; `done` are the paths that had been changed by then."""

    def __init__(self, text: str, done: list[str]) -> None:
        super().__init__(text)
        self.done = done


class FileSet:
    """The entries of one call."""

    def __init__(self, module: AnsibleModule, wanted: list[dict[str, Any]]) -> None:
        self._module = module
        self.entries = [Entry(each) for each in wanted]

    def hide_contents(self, parameter: str) -> None:
        """The host's log gets the module's paths, the result no content that is sensitive."""
        module = self._module
        module.no_log = False
        module.params[parameter] = [
            dict(wanted, content="(not shown)") if wanted["sensitive"] else wanted
            for wanted in module.params[parameter]
        ]
        module.log(f"{module._name}: " + ", ".join(entry.path for entry in self.entries))

    @property
    def changed(self) -> list[Entry]:
        """What is not yet as it shall be; after `problems` has found none."""
        return [entry for entry in self.entries if entry.changed]

    def problems(self) -> list[str]:
        """Reads, checks and validates everything; all that is wrong, as "path: what"."""
        problems: list[str] = []
        seen: set[str] = set()
        for entry in self.entries:
            soft: list[str] = []
            try:
                if entry.path in seen:
                    raise EntryError("is named twice")
                seen.add(entry.path)
                entry.look(soft)
            except (EntryError, OSError) as error:
                problems.append(f"{entry.path}: {error}")
            self._add(problems, entry, soft)
        for entry, text in _missing_parents(self.entries):
            self._add(problems, entry, [text])
        changing = [entry for entry in self.entries if entry.validate and entry.content_changes]
        if changing and not problems:
            directory = tempfile.mkdtemp(prefix="file_set.")
            try:
                for entry in changing:
                    try:
                        found = self._validate(entry, directory)
                    except EntryError as error:
                        found = str(error)
                    if found:
                        problems.append(f"{entry.path}: {found}")
            finally:
                shutil.rmtree(directory)
        return problems

    def look_or_fail(self) -> list[str]:
        """The paths that are to change; the module ends here where anything is wrong."""
        problems = self.problems()
        if problems:
            self._module.fail_json(msg="Nothing was changed. " + "; ".join(problems), problems=problems, changed=False)
        return [entry.path for entry in self.changed]

    def put_or_fail(self) -> None:
        try:
            self.put()
        except PutError as error:
            nothing = "" if error.done else "Nothing was changed. "
            self._module.fail_json(msg=f"{nothing}{error}", changed=bool(error.done), changed_paths=error.done)

    def _add(self, problems: list[str], entry: Entry, soft: list[str]) -> None:
        for text in soft:
            if self._module.check_mode:
                self._module.warn(f"{entry.path}: {text} (so far; an earlier task may make it in a real run)")
            else:
                problems.append(f"{entry.path}: {text}")

    def _validate(self, entry: Entry, directory: str) -> str | None:
        """Run the entry's validating command on a copy of its new content; returns what is wrong."""
        assert entry.validate is not None
        assert entry.after is not None
        words = shlex.split(entry.validate)
        if sum("%s" in word for word in words) != 1:
            raise EntryError(f"validate: {entry.validate!r} must hold %s exactly once, for the file to look at")
        if shutil.which(words[0]) is None:
            if self._module.check_mode:
                self._module.warn(f"{entry.path}: not validated, because {words[0]} is not installed yet")
                return None
            return f"validate: there is no command {words[0]!r} on this host"
        place = tempfile.mkdtemp(dir=directory)
        copy = os.path.join(place, os.path.basename(entry.path))
        with open(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(entry.after)
        status, out, err = self._module.run_command([word.replace("%s", copy) for word in words])
        if status == 0:
            return None
        said = (
            "(its output is hidden with the content)"
            if entry.sensitive
            else (err.strip() or out.strip()).replace(copy, entry.path)
        )
        return f"{words[0]} refused the new content (exit status {status}): {said}"

    def diffs(self) -> list[dict[str, Any]]:
        return [diff for entry in self.changed for diff in entry.diffs()]

    def put(self) -> None:
        """Raises PutError; when its `done` is empty, the host is as it was."""
        made: list[str] = []
        try:
            for entry in sorted((e for e in self.entries if e.state == "directory"), key=lambda e: e.path.count("/")):
                if entry.kind == "absent":
                    entry.make_directory()
                    made.append(entry.path)
            for entry in self.entries:
                entry.stage()
        except OSError as error:
            # The disk is full, or read-only: what was staged goes, so that the host is as it was.
            self._discard(self.entries)
            for path in reversed(made):
                os.rmdir(path)
            raise PutError("{}: {}".format(error.filename or "staging the files", error.strerror), []) from None
        for position, entry in enumerate(self.entries):
            try:
                entry.put()
            except OSError as error:
                done = [e.path for e in self.entries[:position] if e.changed]
                self._discard(self.entries[position:])
                raise PutError(f"{entry.path}: {error}", done) from None

    @staticmethod
    def _discard(entries: list[Entry]) -> None:
        for entry in entries:
            if entry.staged is not None:
                entry.staged.discard()
