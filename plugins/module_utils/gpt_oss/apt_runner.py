"""Runs apt and dpkg: their environment, locks and private scratch directory, and what their failures mean."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from typing import Iterator, Sequence

from ansible.module_utils.gpt_oss import dpkg
from ansible.module_utils.gpt_oss.apt_sources import SOURCES, AptError, Repository, RunCommand, files_in_deb
from ansible.module_utils.gpt_oss.files import read_file, write_file

LISTS = "/var/lib/apt/lists"
PREFERENCES = "/etc/apt/preferences.d"
POLICY = "/usr/sbin/policy-rc.d"
_POLICY_MARK = b"# Written by apt_set for one transaction of process "
_LOCKED = re.compile(r"Could not get lock|is locked by another process|Unable to lock")
_MOVED_ON = re.compile(r"404 +Not Found")
# Lists and packages of two days, as a mirror has them while it is being renewed.
_RENEWED = re.compile(r"[Uu]nexpected size|Hash Sum mismatch|Clearsigned file isn't valid|Mirror sync in progress")
_ENVIRONMENT = {
    "DEBIAN_FRONTEND": "noninteractive",
    "DEBIAN_PRIORITY": "critical",
    "APT_LISTCHANGES_FRONTEND": "none",
    "NEEDRESTART_MODE": "l",
    "UCF_FORCE_CONFFOLD": "1",
    "LC_ALL": "C",
    "LANGUAGE": "C",
}
_REMEDIES = (
    (
        r"No space left on device|don't have enough free space",
        "the disk is full: free space on / or on /var, then run again",
    ),
    (
        r"NO_PUBKEY|is not signed|EXPKEYSIG|invalid signature|BADSIG",
        "the repository's signature does not fit its key: check signed_by and key_url",
    ),
    (r"unmet dependencies|held broken packages", "the versions asked for do not go together: see the lines above"),
    (
        r"Could not resolve|Could not connect|Connection (refused|timed out)|Temporary failure",
        "the repository cannot be reached: check network and proxy, or point it to a mirror",
    ),
    (_RENEWED.pattern, "the mirror is being renewed, or is damaged: run again in some minutes, or use another one"),
    (_MOVED_ON.pattern, "the repository does not have this path: check its address and suite"),
    (r"dpkg was interrupted", "run 'dpkg --configure -a', then again"),
    (_LOCKED.pattern, "another apt or dpkg is running: wait for it to end, then run again"),
)


class Apt:
    """apt on the host or, between `look_ahead` and `look_back`, on a private copy of its sources and lists."""

    def __init__(self, run_command: RunCommand, repositories: Sequence[Repository], lock_timeout: int) -> None:
        self._run_command = run_command
        self._repositories = repositories
        self._lock_timeout = lock_timeout
        self._deadline = dpkg.Deadline(lock_timeout)
        self._scratch: str | None = None
        self._status: str | None = None
        self.touched = False  # something on the host was really changed; told when a run fails
        self.updated = False
        self.complaints: list[str] = []  # what `apt-get update` said about repositories of others

    # -- running ---------------------------------------------------------------------------------------------------

    def ask(self, command: Sequence[str], cwd: str | None = None) -> tuple[int, str, str]:
        """Run something that changes nothing on the host."""
        words = list(command)
        if self._scratch and words[0].startswith("apt"):
            places = {
                "Dir::State::lists": "lists",
                "Dir::Cache": "cache",
                "Dir::Etc::sourceparts": "sources",
                "Dir::Etc::preferencesparts": "preferences",
            }
            for key, name in places.items():
                words += ["-o", f"{key}={self._scratch}/{name}"]
            words += ["-o", "APT::Sandbox::User=root"]
        if self._status and words[0].startswith("apt"):
            words += ["-o", f"Dir::State::status={self._status}"]
        status, out, err = self._run_command(words, environ_update=_ENVIRONMENT, cwd=cwd)
        return status, out, err

    def change(self, command: Sequence[str]) -> None:
        """Run something that changes the host, once nobody else does."""
        status, out, err = self._locked(command, [dpkg.FRONTEND_LOCK])
        self.touched = True
        if status != 0:
            raise AptError(self.explained(" ".join(command[:2]), status, out, err))

    def install(self, command: Sequence[str]) -> None:
        """A transaction. Where the mirror has moved on since the lists were fetched, they are fetched first, once."""
        command = [*command, "-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold"]
        try:
            self.change(command)
        except AptError as error:
            moved = _MOVED_ON.search(str(error)) and not self.updated
            if not moved and not _RENEWED.search(str(error)):
                raise
            self.update()
            self.change(command)

    def _locked(self, command: Sequence[str], locks: Sequence[str]) -> tuple[int, str, str]:
        while True:
            for lock in locks:
                self.wait(lock)
            status, out, err = self.ask(command)
            # Somebody may have been quicker between our look at the lock and apt's.
            if status == 0 or not _LOCKED.search(err) or not self._deadline.left:
                return status, out, err

    def wait(self, lock: str) -> None:
        try:
            dpkg.wait_for_lock(lock, self._deadline.left)
        except dpkg.LockedError as error:
            raise AptError(
                f"{error}, still after {self._lock_timeout} s (lock_timeout); wait for it to end, then run again"
            ) from None

    # -- lists -----------------------------------------------------------------------------------------------------

    def lists_age(self) -> float:
        try:
            return time.time() - os.stat(LISTS).st_mtime
        except FileNotFoundError:
            return float("inf")

    def update(self) -> None:
        """Fetch the lists. A repository of ours that fails stops the run; others are only complained about."""
        self.updated = True
        command = ["apt-get", "update", "--quiet", "-o", "APT::Update::Error-Mode=any"]
        status, out, err = self._fetch_lists(command)
        if _RENEWED.search(out + err):
            status, out, err = self._fetch_lists(command)
        if status == 0:
            if not self._scratch:
                os.utime(LISTS)  # apt leaves the time alone when every list was up to date
            return
        lines = [line for line in (out + err).splitlines() if line.startswith(("E:", "W:", "Err:"))]
        ours = {uri.rstrip("/") for repository in self._repositories for uri in repository.uris}
        fatal = any(uri in line for uri in ours for line in lines)
        if fatal or re.search(r"could not be read|Malformed|Conflicting", err):
            raise AptError(self.explained("apt-get update", status, out, err))
        self.complaints = [line for line in lines if not line.startswith("Err:")]

    def _fetch_lists(self, command: Sequence[str]) -> tuple[int, str, str]:
        return self.ask(command) if self._scratch else self._locked(command, [dpkg.FRONTEND_LOCK, dpkg.LISTS_LOCK])

    # -- looking ahead ---------------------------------------------------------------------------------------------

    def look_ahead(
        self, keyrings: dict[str, bytes], leave_out: Sequence[str], preferences: Sequence[dict[str, str]] = ()
    ) -> None:
        """From here on `ask` and `update` see the repositories as they will be, and the host stays as it is."""
        self._scratch = tempfile.mkdtemp(prefix="apt_set.")
        for name in ("sources", "preferences", "keys", "lists/partial", "cache/archives/partial"):
            os.makedirs(f"{self._scratch}/{name}")
        skipped = {os.path.realpath(path) for path in [*leave_out, *(r.path for r in self._repositories)]}
        for source, target in ((LISTS, "lists"), (SOURCES, "sources"), (PREFERENCES, "preferences")):
            for entry in os.scandir(source) if os.path.isdir(source) else []:
                if entry.is_file() and entry.name != "lock" and os.path.realpath(entry.path) not in skipped:
                    shutil.copy2(entry.path, f"{self._scratch}/{target}/{entry.name}")
        for file in preferences:
            write_file(f"{self._scratch}/preferences/{os.path.basename(file['path'])}", file["content"].encode())
        for repository in self._repositories:
            keyring = repository.keyring
            if repository.name in keyrings:
                keyring = f"{self._scratch}/keys/{repository.name}{os.path.splitext(keyring)[1]}"
                write_file(keyring, keyrings[repository.name])
            write_file(f"{self._scratch}/sources/{repository.name}.sources", repository.rendered(keyring))

    def look_ahead_without_holds(self, names: Sequence[str]) -> None:
        """From here on `ask` takes these packages as not held, until `look_back`."""
        stanzas = (read_file(dpkg.ADMIN + "/status") or b"").split(b"\n\n")
        named = {b"Package: " + name.encode() for name in names}
        freed = [
            stanza.replace(b"\nStatus: hold ", b"\nStatus: install ", 1)
            if stanza.lstrip(b"\n").split(b"\n", 1)[0] in named
            else stanza
            for stanza in stanzas
        ]
        descriptor, self._status = tempfile.mkstemp(prefix="apt_set.status.")
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(b"\n\n".join(freed))

    def look_ahead_of(self, words: Sequence[str]) -> None:
        """Lay the preferences that these packages bring into the scratch directory, as their installation would."""
        assert self._scratch
        place = f"{self._scratch}/first"
        os.mkdir(place)
        command = ["apt-get", "download", "--quiet", *words]
        status, out, err = self.ask(command, cwd=place)
        if status != 0 and _RENEWED.search(out + err):
            self.update()
            status, out, err = self.ask(command, cwd=place)
        if status != 0:
            raise AptError(self.explained("apt-get download", status, out, err))
        for entry in os.scandir(place):
            deb = read_file(entry.path) or b""
            found = files_in_deb(self._run_command, deb, lambda path: path.startswith(PREFERENCES + "/"))
            for path, content in found.items():
                write_file(f"{self._scratch}/preferences/{os.path.basename(path)}", content)

    def look_back(self, keep_lists: bool = False) -> None:
        """Back to the host itself; with the lists that were fetched, where they are those it would fetch now."""
        if self._status is not None:
            os.unlink(self._status)
            self._status = None
        if self._scratch is None:
            return
        scratch, self._scratch = self._scratch, None
        try:
            if keep_lists and self.updated:
                self._adopt_lists(f"{scratch}/lists")
        finally:
            shutil.rmtree(scratch)

    def _adopt_lists(self, fetched: str) -> None:
        self.wait(dpkg.LISTS_LOCK)
        os.makedirs(f"{LISTS}/partial", exist_ok=True)
        with open(dpkg.LISTS_LOCK, "a", encoding="utf-8") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            for entry in os.scandir(fetched):
                if entry.is_file() and entry.name != "lock":
                    shutil.copy2(entry.path, f"{LISTS}/{entry.name}")
            os.utime(LISTS)

    # -- services --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def services_left_alone(self) -> Iterator[None]:
        """Package scripts touch no service meanwhile: invoke-rc.d and deb-systemd-invoke obey this file."""
        if read_file(POLICY) is not None:  # the operator's own
            yield
            return
        write_file(POLICY, b"#!/bin/sh\n" + _POLICY_MARK + b"%d\nexit 101\n" % os.getpid(), mode=0o755)
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(POLICY)

    # -- explaining ------------------------------------------------------------------------------------------------

    def explained(self, what: str, status: int, out: str, err: str) -> str:
        text = err + out
        advice = [remedy for pattern, remedy in _REMEDIES if re.search(pattern, text)]
        twice = re.search(r"Conflicting values set for option Signed-By regarding source (\S+)", text)
        if twice:
            advice.insert(0, self._other_declarations(twice[1]))
        said = [line for line in text.splitlines() if line.startswith(("E:", "W:", "Err:", "dpkg:"))]
        said = said or text.strip().splitlines()[-10:]
        if "unmet dependencies" in text:
            said = [line for line in out.splitlines() if line.startswith((" ", "The following"))][:20] + said
        lines = " | ".join(dict.fromkeys(map(str.strip, said)))
        return f"{what} failed (exit status {status}): {lines}" + "".join(f". Remedy: {text}" for text in advice)

    def _other_declarations(self, uri: str) -> str:
        ours = {repository.path for repository in self._repositories}
        found = []
        for name in sorted(os.listdir(SOURCES)):
            path = os.path.join(SOURCES, name)
            content = read_file(path) if os.path.isfile(path) else None
            if path not in ours and content and uri.rstrip("/").encode() in content:
                found.append(path)
        where = ", ".join(found) or "/etc/apt/sources.list"
        return f"the repository is declared twice, also in {where}: remove that, or name it in stale_files"


def forgotten_policy() -> bool:
    """Whether a run that was killed has left its policy file behind."""
    content = read_file(POLICY)
    if content is None or _POLICY_MARK not in content:
        return False
    pid = content.split(_POLICY_MARK)[1].split(b"\n")[0].decode()
    return not os.path.exists(f"/proc/{pid}")
