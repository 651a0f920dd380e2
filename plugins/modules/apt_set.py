#!/usr/bin/python
"""Repositories, keys, packages and holds in one call; a single look at dpkg's status file when nothing is to do."""

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_set
short_description: Bring repositories and a whole set of packages to their versions in one call
description:
  - Writes deb822 sources with their keys and other files, installs, removes, holds. When all of it is as it shall be,
    dpkg's status file is read once and no process is started.
  - Versions, removals and holds are judged on a simulation before the first change. A version that no repository has, a
    package that would be removed without having been named, or a downgrade that was not allowed stop the run with the
    host as it was.
  - All of O(packages) and O(absent) go through in one transaction; packages of one driver branch move together or not
    at all.
  - Services are not restarted behind the operator's back. needrestart is told to list only.
options:
  repositories:
    description: Repositories that shall be there, each as C(/etc/apt/sources.list.d/<name>.sources).
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the file, without its extension.
        type: str
        required: true
      uris:
        description: Base addresses.
        type: list
        elements: str
        required: true
      suites:
        description: Suites; V(/) (any name with a slash at its end) for a flat repository.
        type: list
        elements: str
        required: true
      components:
        description: Components. None for a flat repository.
        type: list
        elements: str
        default: []
      architectures:
        description: dpkg architectures. Left out, all of the host's.
        type: list
        elements: str
        default: []
      signed_by:
        description: Path of the keyring. Ends in V(.gpg) (binary) or V(.asc) (armored); a key in the other form is
          converted.
        type: path
        required: true
      key_url:
        description: Where the key is fetched from (http, https or file), armored or binary, when the keyring is
          missing.
        type: str
      key_fingerprints:
        description:
          - Fingerprints of the primary keys that the keyring may hold. Any other key in it is refused. A keyring on the
            host that does not satisfy this is fetched again from O(repositories[].key_url).
        type: list
        elements: str
        default: []
      keyring_package:
        description: A package that brings the keyring, downloaded and installed with dpkg. Name the source file that it
          also brings in O(stale_files), so that each repository is declared once.
        type: dict
        suboptions:
          name:
            description: Name of the package.
            type: str
            required: true
          version:
            description: Its version, as in O(packages[].version).
            type: str
            required: true
          url:
            description: Where it is downloaded from (http, https or file).
            type: str
            required: true
          sha256:
            description: Its checksum, 64 hex digits.
            type: str
  preferences:
    description: Files of apt preferences, which decide at which version a dependency is taken. An empty text means that
      the file shall not be there.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: The file, in C(/etc/apt/preferences.d).
        type: path
        required: true
      content:
        description: Its text.
        type: str
        required: true
  stale_files:
    description: Files that shall not be there, such as sources that declare the same repository a second time.
    type: list
    elements: path
    default: []
  files:
    description:
      - Files, directories and links that shall be there before the packages, such as configuration that their own
        scripts look at; entries as those of M(file_set), but for C(sensitive). They are judged with everything else
        and put in place when nothing is in the way.
    type: list
    elements: dict
    default: []
  first:
    description: Packages that are installed before all others, in a transaction of their own; small ones that steer
      apt, such as C(nvidia-driver-pinning-<version>).
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the package.
        type: str
        required: true
      version:
        description: Its version, as in O(packages[].version).
        type: str
  packages:
    description: Packages that shall be installed, all in one transaction.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Name of the package.
        type: str
        required: true
      version:
        description: A Debian version, or one without epoch and revision (V(580.159.04) is V(580.159.04-1)), or a glob.
          The newest match is taken. Left out, any installed version will do.
        type: str
  absent:
    description: Names, or globs, of packages that shall not be installed. Removed in the same transaction.
    type: list
    elements: str
    default: []
  purge:
    description: Removes the configuration of O(absent) packages, too.
    type: bool
    default: false
  autoremove:
    description: Removes what was installed only as a dependency of packages that this call removes.
    type: bool
    default: false
  may_remove:
    description: Globs of packages that apt may remove to make way, though they are not in O(absent).
    type: list
    elements: str
    default: []
  hold:
    description: Names, or globs, of installed packages that shall be held at their version. A held package that is
      named in O(packages) with another version is changed and held again.
    type: list
    elements: str
    default: []
  unhold:
    description: Names, or globs, of packages whose hold is lifted, before the transaction if there is one.
    type: list
    elements: str
    default: []
  allow_downgrade:
    description: Allows packages to move to a lower version.
    type: bool
    default: false
  install_recommends:
    description: Installs recommended packages, too.
    type: bool
    default: false
  start_services:
    description: V(false) keeps package scripts from starting, stopping or restarting any service during the
      transaction.
    type: bool
    default: true
  lists_valid_for:
    description: Seconds for which package lists count as fresh, if they know the wanted versions. A changed source is
      always looked up.
    type: int
    default: 3600
  lock_timeout:
    description: Seconds to wait for another apt or dpkg to finish. After that the run fails and names the holder.
    type: int
    default: 300
  repair_interrupted:
    description: Runs C(dpkg --configure -a) first when dpkg was stopped half way. Otherwise that is an error.
    type: bool
    default: false
  proof:
    description: A command that shows that the packages work, run when all of it is as it shall be; not in check mode
      where something would still change. The run fails when the command does, or does not print what is expected.
    type: dict
    suboptions:
      argv:
        description: The command and its arguments.
        type: list
        elements: str
        required: true
      expect:
        description: Regular expression that its standard output has to contain.
        type: str
        required: true
attributes:
  check_mode:
    support: full
    description: Repositories that are not configured yet are looked up in a scratch directory, so that a first run,
      too, is predicted from what they really hold.
  diff_mode:
    support: full
    description: Source files, keys, and every package that apt would touch, dependencies included.
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Install the container toolkit, all four packages at one version
  apt_set:
    repositories:
      - name: nvidia-container-toolkit
        uris: [https://nvidia.github.io/libnvidia-container/stable/deb/amd64/]
        suites: [/]
        signed_by: /usr/share/keyrings/nvidia-container-toolkit-keyring.gpg
        key_url: https://nvidia.github.io/libnvidia-container/gpgkey
        key_fingerprints: [C95B321B61E88C1809C4F759DDCAE044F796ECB0]
    stale_files: [/etc/apt/sources.list.d/libnvidia-container.list]
    packages:
      - {name: nvidia-container-toolkit, version: 1.19.1-1}
      - {name: nvidia-container-toolkit-base, version: 1.19.1-1}
      - {name: libnvidia-container-tools, version: 1.19.1-1}
      - {name: libnvidia-container1, version: 1.19.1-1}
    hold: [nvidia-container-toolkit]

- name: Replace the distribution's Docker by Docker's own, in one transaction
  apt_set:
    packages: [{name: docker-ce, version: 29.8.2}, {name: containerd.io}]
    absent: [docker.io, containerd, runc]
"""

RETURN = r"""
packages:
  description: Every package that was named, with its version before and after (V(null) where it is not installed).
  returned: always
  type: dict
  sample: {docker-ce: {before: null, after: "5:29.8.2-1~debian.12~bookworm"}}
repository_changed:
  description: Whether a source, a key or a stale file was changed.
  returned: always
  type: bool
transactions:
  description: What apt did, or would do, one line a package.
  returned: always
  type: list
  elements: str
held:
  description: Packages whose hold was set or lifted.
  returned: always
  type: list
  elements: str
"""

import contextlib
import os
import re
import tempfile
from fnmatch import fnmatchcase
from typing import Any, Iterable

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss import dpkg, openpgp
from ansible.module_utils.gpt_oss.apt_runner import POLICY, PREFERENCES, Apt, forgotten_policy
from ansible.module_utils.gpt_oss.apt_sources import AptError, Repository
from ansible.module_utils.gpt_oss.file_entries import ENTRY_OPTIONS, FileSet, PutError
from ansible.module_utils.gpt_oss.files import read_file, text_diff, write_file

_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9-]+)?")
_ACTION = re.compile(r"^(Inst|Remv|Purg) (\S+)(?: \[([^\]]*)\])?(?: \((\S+))?")
_PACKAGE = {"name": {"type": "str", "required": True}, "version": {"type": "str"}}
ARGUMENTS: dict[str, Any] = {
    "repositories": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "name": {"type": "str", "required": True},
            "uris": {"type": "list", "elements": "str", "required": True},
            "suites": {"type": "list", "elements": "str", "required": True},
            "components": {"type": "list", "elements": "str", "default": []},
            "architectures": {"type": "list", "elements": "str", "default": []},
            "signed_by": {"type": "path", "required": True},
            "key_url": {"type": "str", "no_log": False},
            "key_fingerprints": {"type": "list", "elements": "str", "default": [], "no_log": False},
            "keyring_package": {
                "type": "dict",
                "no_log": False,
                "options": {
                    "name": {"type": "str", "required": True},
                    "version": {"type": "str", "required": True},
                    "url": {"type": "str", "required": True},
                    "sha256": {"type": "str"},
                },
            },
        },
    },
    "preferences": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {"path": {"type": "path", "required": True}, "content": {"type": "str", "required": True}},
    },
    "stale_files": {"type": "list", "elements": "path", "default": []},
    "files": {"type": "list", "elements": "dict", "default": [], "options": ENTRY_OPTIONS},
    "first": {"type": "list", "elements": "dict", "default": [], "options": _PACKAGE},
    "packages": {"type": "list", "elements": "dict", "default": [], "options": _PACKAGE},
    "absent": {"type": "list", "elements": "str", "default": []},
    "purge": {"type": "bool", "default": False},
    "autoremove": {"type": "bool", "default": False},
    "may_remove": {"type": "list", "elements": "str", "default": []},
    "hold": {"type": "list", "elements": "str", "default": []},
    "unhold": {"type": "list", "elements": "str", "default": []},
    "allow_downgrade": {"type": "bool", "default": False},
    "install_recommends": {"type": "bool", "default": False},
    "start_services": {"type": "bool", "default": True},
    "lists_valid_for": {"type": "int", "default": 3600},
    "lock_timeout": {"type": "int", "default": 300},
    "repair_interrupted": {"type": "bool", "default": False},
    "proof": {
        "type": "dict",
        "options": {
            "argv": {"type": "list", "elements": "str", "required": True},
            "expect": {"type": "str", "required": True},
        },
    },
}


def matching(patterns: list[str], names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)})


def is_glob(name: str) -> bool:
    return any(mark in name for mark in "*?[")


def twice(names: list[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})


def version_in(packages: dict[str, dpkg.Package], name: str) -> str | None:
    package = packages.get(name)
    return package.version if package and package.installed else None


def satisfied(wanted: dict[str, Any], packages: dict[str, dpkg.Package]) -> bool:
    version = version_in(packages, wanted["name"])
    return version is not None and (not wanted["version"] or dpkg.matches(wanted["version"], version))


def proof_problems(proof: dict[str, Any] | None) -> list[str]:
    if proof is None:
        return []
    problems = [] if proof["argv"] else ["argv is empty"]
    try:
        re.compile(proof["expect"])
    except re.error as error:
        problems.append(f"expect: {proof['expect']!r} is not a regular expression: {error}")
    return problems


class Pending:
    """What is not yet as it shall be."""

    def __init__(self, p: dict[str, Any], repositories: list[Repository], packages: dict[str, dpkg.Package]) -> None:
        self.sources = [
            repository for repository in repositories if read_file(repository.path) != repository.rendered()
        ]
        self.keyrings = [repository for repository in repositories if self._lacks_keyring(repository, packages)]
        self.preferences = [
            file for file in p["preferences"] if (read_file(file["path"]) or b"") != file["content"].encode()
        ]
        self.stale = [path for path in p["stale_files"] if os.path.lexists(path)]
        self.first = [package for package in p["first"] if not satisfied(package, packages)]
        self.packages = [package for package in p["packages"] if not satisfied(package, packages)]
        gone = ("config-files", "not-installed") if not p["purge"] else ("not-installed",)
        self.removals = [name for name in matching(p["absent"], packages) if packages[name].state not in gone]

    @property
    def repository(self) -> bool:
        return bool(self.sources or self.keyrings or self.stale)

    @property
    def transaction(self) -> bool:
        return bool(self.first or self.packages or self.removals)

    @staticmethod
    def _lacks_keyring(repository: Repository, packages: dict[str, dpkg.Package]) -> bool:
        wrong = repository.keyring_problem(read_file(repository.keyring))
        package = repository.package
        if package:
            version = version_in(packages, package["name"])
            if version is None or not dpkg.matches(package["version"], version):
                return True
            if wrong:
                raise AptError(f"{repository.keyring}: {wrong}; {package['name']} {version} should have brought it")
        elif wrong and not repository.key_url:
            raise AptError(f"{repository.keyring}: {wrong}; give key_url or keyring_package, or put the key there")
        return wrong is not None


class AptSet:
    """Looks, judges, then changes, in that order."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.p: dict[str, Any] = module.params
        self.check: bool = module.check_mode
        self.repositories = [Repository(wanted) for wanted in self.p["repositories"]]
        self.files = FileSet(module, self.p["files"])
        self.apt = Apt(module.run_command, self.repositories, self.p["lock_timeout"])
        self.changed = False  # or would be, in check mode
        self.repository_changed = False
        self.held: list[str] = []
        self.freed: list[str] = []  # holds that are lifted before the transaction, for it to move them
        self.transactions: list[str] = []
        self.diffs: list[dict[str, Any]] = []
        self.before: dict[str, dpkg.Package] = {}
        self.predicted: dict[str, str | None] = {}

    def run(self) -> dict[str, Any]:
        self.reject_bad_input()
        self.before = dpkg.read_packages()
        self.forget_policy()
        self.repair_or_refuse()
        pending = Pending(self.p, self.repositories, self.before)
        try:
            if pending.repository or pending.preferences or pending.transaction:
                self.changed = True
                self.bring(pending)
            else:
                self.refuse_unknown_holds()
                self.put_files()
        finally:
            self.apt.look_back()
        self.change_holds()
        self.prove()
        return self.result()

    def result(self) -> dict[str, Any]:
        after = self.before if self.check or not self.changed else dpkg.read_packages()
        versions = {name: version_in(after, name) for name in {**self.before, **after}}
        versions.update(self.predicted if self.check else {})
        named = {wanted["name"] for wanted in self.p["first"] + self.p["packages"]}
        named |= set(matching(self.p["absent"], self.before))
        return {
            "changed": self.changed,
            "repository_changed": self.repository_changed,
            "packages": {
                name: {"before": version_in(self.before, name), "after": versions.get(name)} for name in sorted(named)
            },
            "transactions": self.transactions,
            "held": self.held,
        }

    # -- looking -------------------------------------------------------------------------------------------------------

    def reject_bad_input(self) -> None:
        wanted = [package["name"] for package in self.p["first"] + self.p["packages"]]
        problems = [f"repositories: {r.name}: {text}" for r in self.repositories for text in r.problems()]
        problems += [f"repositories: {name} is named twice" for name in twice([r.name for r in self.repositories])]
        problems += [f"packages: {name!r} is not a package name" for name in wanted if not _NAME.fullmatch(name)]
        problems += [f"packages: {name} is named twice" for name in twice(wanted)]
        problems += [f"absent: {name} is also in packages" for name in matching(self.p["absent"], wanted)]
        both = matching(self.p["unhold"], matching(self.p["hold"], [*wanted, *self.p["hold"]]))
        problems += [f"unhold: {name} is also in hold" for name in both]
        problems += [
            f"preferences: {file['path']} is not in {PREFERENCES}"
            for file in self.p["preferences"]
            if os.path.dirname(file["path"]) != PREFERENCES
        ]
        relative = [path for path in self.p["stale_files"] if not path.startswith("/")]
        problems += [f"stale_files: {path} is not an absolute path" for path in relative]
        problems += [f"files: {text}" for text in self.files.problems()]
        problems += [f"proof: {text}" for text in proof_problems(self.p["proof"])]
        if problems:
            raise AptError("; ".join(problems))

    def forget_policy(self) -> None:
        if forgotten_policy():
            self.changed = True
            self.transactions.append(f"remove {POLICY}, which a run that was cut has left")
            if not self.check:
                os.unlink(POLICY)

    def repair_or_refuse(self) -> None:
        if not dpkg.interrupted(self.before):
            return
        # A transaction in progress looks the same: only a state that outlives the lock is an interrupted one.
        self.apt.wait(dpkg.FRONTEND_LOCK)
        self.before = dpkg.read_packages()
        signs = dpkg.interrupted(self.before)
        if not signs:
            return
        if not self.p["repair_interrupted"]:
            raise AptError(
                f"dpkg was interrupted on this host: {'; '.join(signs[:5])}. Run 'dpkg --configure -a' (and 'apt-get"
                " --fix-broken install' if that asks for it), then again"
            )
        self.changed = True
        self.transactions.append("dpkg --configure -a")
        if not self.check:
            with self.services():
                self.apt.change(["dpkg", "--configure", "-a"])
            self.before = dpkg.read_packages()

    # -- the order of things -------------------------------------------------------------------------------------------

    def bring(self, pending: Pending) -> None:
        """Everything is looked up and judged, on a private copy of apt's sources where they change; then it is done."""
        run = self.module.run_command
        fetched = {repository.name: repository.fetch_keyring(run) for repository in pending.keyrings}
        self.show_repositories(pending, {name: content for name, (content, _) in fetched.items()})
        if pending.repository or pending.preferences or pending.first or self.check:
            self.apt.look_ahead(
                {name: content for name, (content, _) in fetched.items()}, self.p["stale_files"], pending.preferences
            )
        if pending.transaction:
            held = [name for name, package in self.before.items() if package.installed and package.held]
            self.freed = matching(self.p["unhold"], held)
        if self.freed:
            self.apt.look_ahead_without_holds(self.freed)
        versions = self.look_up(pending)
        first = [word(package, versions) for package in pending.first]
        words = [word(package, versions) for package in pending.packages]
        if first:
            self.apt.look_ahead_of(first)
        if pending.transaction:
            self.simulate(first + words, pending.removals)
        self.refuse_unknown_holds()
        self.put_files()
        if self.check:
            return
        if pending.repository:
            self.put_repositories(pending, fetched)
        for file in pending.preferences:
            put_or_remove(file["path"], file["content"])
        self.apt.look_back(keep_lists=True)
        if self.freed:
            self.apt.change(["apt-mark", "unhold", *self.freed])
        if first:
            self.transact(first, [])
        if words or pending.removals:
            if first:  # they may steer apt: what it will do now is what counts
                self.simulate(words, pending.removals, show=False)
            self.transact(words, pending.removals)
        after = dpkg.read_packages()
        unmet = [package["name"] for package in pending.first + pending.packages if not satisfied(package, after)]
        if unmet:
            raise AptError(f"apt reported success, but these are not at their version: {', '.join(unmet)}")

    def put_files(self) -> None:
        if not self.files.changed:
            return
        self.changed = True
        self.diffs += self.files.diffs()
        if self.check:
            return
        try:
            self.files.put()
        except PutError as error:
            self.apt.touched = self.apt.touched or bool(error.done)
            raise AptError(f"files: {error}") from None
        self.apt.touched = True

    # -- repositories --------------------------------------------------------------------------------------------------

    def show_repositories(self, pending: Pending, keyrings: dict[str, bytes]) -> None:
        self.repository_changed = pending.repository
        self.diffs += [text_diff(path, read_file(path), None) for path in pending.stale]
        self.diffs += [
            text_diff(file["path"], read_file(file["path"]), file["content"].encode() or None)
            for file in pending.preferences
        ]
        self.diffs += [text_diff(r.path, read_file(r.path), r.rendered()) for r in pending.sources]
        for repository in pending.keyrings:
            before = read_file(repository.keyring)
            shown = None if before is None else keys_shown(before)
            self.diffs.append(text_diff(repository.keyring, shown, keys_shown(keyrings[repository.name])))
            if repository.package:
                self.transactions.append(f"Inst {repository.package['name']} ({repository.package['version']})")

    def put_repositories(self, pending: Pending, fetched: dict[str, tuple[bytes, bytes | None]]) -> None:
        self.apt.touched = True
        for repository in pending.keyrings:
            content, deb = fetched[repository.name]
            if deb is None:
                os.makedirs(os.path.dirname(repository.keyring), mode=0o755, exist_ok=True)
                write_file(repository.keyring, content)
                continue
            with tempfile.NamedTemporaryFile(suffix=".deb") as place:
                place.write(deb)
                place.flush()
                self.apt.change(["dpkg", "--install", "--force-confdef", "--force-confold", place.name])
        for path in self.p["stale_files"]:  # a keyring package may just have brought one
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        for repository in pending.sources:
            write_file(repository.path, repository.rendered())

    # -- packages ------------------------------------------------------------------------------------------------------

    def look_up(self, pending: Pending) -> dict[str, str | None]:
        """The exact version of each package that is to be installed."""
        wanted = pending.first + pending.packages
        changed = bool(pending.sources or pending.keyrings)
        versions: dict[str, str | None] = {}
        lacking = ["not looked up yet"] if changed else []
        if wanted and not changed:
            fresh = self.apt.lists_age() < self.p["lists_valid_for"]
            versions, lacking = self.resolve(wanted) if fresh else ({}, ["not looked up yet"])
        if lacking:
            self.apt.update()
            for line in self.apt.complaints[:5]:
                self.module.warn(f"apt-get update: {line}")
            versions, lacking = self.resolve(wanted)
        if lacking:
            raise AptError("; ".join(lacking))
        self.refuse_downgrades(wanted, versions)
        return versions

    def resolve(self, wanted: list[dict[str, Any]]) -> tuple[dict[str, str | None], list[str]]:
        """The exact version of each wanted package, and what could not be found."""
        if not wanted:
            return {}, []
        status, out, err = self.apt.ask(["apt-cache", "madison", *[package["name"] for package in wanted]])
        if status != 0 and "Unable to locate package" not in err:
            raise AptError(self.apt.explained("apt-cache madison", status, out, err))
        known: dict[str, list[tuple[str, str]]] = {}
        for line in out.splitlines():
            name, version, origin = (part.strip() for part in line.split("|", 2))
            if not origin.endswith(" Sources"):
                known.setdefault(name, []).append((version, origin))
        versions: dict[str, str | None] = {}
        lacking = []
        for package in wanted:
            name, version = package["name"], package["version"]
            there = known.get(name, [])
            fitting = [candidate for candidate, _ in there if version and dpkg.matches(version, candidate)]
            if fitting or (there and not version):
                versions[name] = fitting[0] if version else None  # apt lists the newest first
            else:
                lacking.append(self.lacking(name, version, there))
        return versions, lacking

    def lacking(self, name: str, version: str | None, there: list[tuple[str, str]]) -> str:
        uris = [uri for repository in self.repositories for uri in repository.uris]
        searched = ", ".join(uris) or "the host's apt sources"
        said = "".join(f" ({text})" for text in self.apt.complaints[:3])
        if not there:
            asked = f" {version}" if version else ""
            return f"{name}{asked}: no repository has a package of this name; searched: {searched}{said}"
        offered = ", ".join(dict.fromkeys(f"{candidate} from {origin}" for candidate, origin in there[:8]))
        return f"{name}: version {version} is in no repository; available: {offered}; searched: {searched}{said}"

    def refuse_downgrades(self, wanted: list[dict[str, Any]], versions: dict[str, str | None]) -> None:
        lower = []
        for package in wanted:
            there, version = version_in(self.before, package["name"]), versions[package["name"]]
            if there and version and dpkg.compare(version, there) < 0:
                lower.append(f"{package['name']}: {there} is installed, {version} is lower")
        if lower and not self.p["allow_downgrade"]:
            raise AptError(f"{'; '.join(lower)}. Set allow_downgrade: true to move down")

    def command(self, words: list[str], removals: list[str], autoremove: bool) -> list[str]:
        # Holds are judged here, on the simulation, and kept: a package is never left unheld by a run that is cut.
        options = ["--yes", "--quiet", "--allow-change-held-packages"]
        options += ["--install-recommends" if self.p["install_recommends"] else "--no-install-recommends"]
        options += ["--allow-downgrades"] if self.p["allow_downgrade"] else []
        options += ["--auto-remove"] if autoremove and removals else []
        options += ["--purge"] if self.p["purge"] else []
        if not words:
            return ["apt-get", "purge" if self.p["purge"] else "remove", *options, *removals]
        return ["apt-get", "install", *options, *words, *[f"{name}-" for name in removals]]

    def simulate(self, words: list[str], removals: list[str], show: bool = True) -> None:
        """Ask apt what it would do, and refuse what nobody asked for."""
        actions = self.simulated(self.command(words, removals, autoremove=False))
        named = {text.partition("=")[0] for text in words} | set(removals)
        gone = {action[2] for action in actions if action[1] != "Inst"}
        unasked = sorted(gone - named - set(matching(self.p["may_remove"], gone)))
        if unasked:
            raise AptError(
                f"apt would also remove {', '.join(unasked)} to do this; if that is right, name them in absent or"
                " may_remove"
            )
        held = {action[2] for action in actions if action[2] in self.before and self.before[action[2]].held}
        held -= named | set(matching(self.p["hold"] + self.p["unhold"], held))
        if held:
            raise AptError(
                f"{', '.join(sorted(held))}: held on this host, but would have to change for"
                f" {', '.join(sorted(named))}; name the version wanted in packages, or lift the hold (apt-mark unhold)"
            )
        if self.p["autoremove"] and removals:
            actions = self.simulated(self.command(words, removals, autoremove=True))
        if show:
            self.show_packages(actions)

    def simulated(self, command: list[str]) -> list[re.Match[str]]:
        status, out, err = self.apt.ask([*command, "--simulate"])
        if status != 0:
            raise AptError(self.apt.explained("apt-get", status, out, err))
        return [match for match in map(_ACTION.match, out.splitlines()) if match]

    def show_packages(self, actions: list[re.Match[str]]) -> None:
        for action in actions:
            verb, name, old, new = action.groups()
            self.transactions.append(f"{verb} {name}" + (f" [{old}]" if old else "") + (f" ({new})" if new else ""))
            self.predicted[name] = new if verb == "Inst" else None
        names = sorted(self.predicted)
        before = [f"{name} {version_in(self.before, name)}\n" for name in names if version_in(self.before, name)]
        after = [f"{name} {self.predicted[name]}\n" for name in names if self.predicted[name]]
        self.diffs.append(headed("packages", "".join(before), "".join(after)))

    def transact(self, words: list[str], removals: list[str]) -> None:
        held = [name for name, package in self.before.items() if package.held and name not in self.freed]
        try:
            with self.services():
                self.apt.install(self.command(words, removals, self.p["autoremove"]))
        finally:
            after = dpkg.read_packages()
            lost = [name for name in held if name in after and after[name].installed and not after[name].held]
            if lost:
                self.apt.change(["apt-mark", "hold", *lost])

    def services(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.p["start_services"] else self.apt.services_left_alone()

    # -- holds ---------------------------------------------------------------------------------------------------------

    def refuse_unknown_holds(self) -> None:
        installed = {name for name, package in self.before.items() if package.installed}
        installed |= {name for name, version in self.predicted.items() if version}
        installed -= {name for name, version in self.predicted.items() if not version}
        unknown = [name for name in self.p["hold"] if not is_glob(name) and name not in installed]
        if unknown:
            raise AptError(f"hold: {', '.join(unknown)} is not installed, and not part of this set; add it to packages")

    def change_holds(self) -> None:
        now = self.before if self.check or not self.changed else dpkg.read_packages()
        held = {name: package.held for name, package in now.items() if package.installed}
        if self.check:
            held.update({name: held.get(name, False) for name, version in self.predicted.items() if version})
            held = {name: state for name, state in held.items() if self.predicted.get(name, "stays") is not None}
        to_hold = [name for name in matching(self.p["hold"], held) if not held[name]]
        freed = [] if self.check else [name for name in self.freed if name in held]
        held.update(dict.fromkeys(freed, True))
        to_free = [name for name in matching(self.p["unhold"], held) if held[name]]
        self.held = to_hold + to_free
        if not self.held:
            return
        self.changed = True
        before = [f"{name} {'held' if held[name] else 'not held'}\n" for name in self.held]
        after = [f"{name} {'not held' if held[name] else 'held'}\n" for name in self.held]
        self.diffs.append(headed("holds", "".join(before), "".join(after)))
        for verb, names in (("hold", to_hold), ("unhold", [name for name in to_free if name not in freed])):
            if names and not self.check:
                self.apt.change(["apt-mark", verb, *names])

    # -- the proof ---------------------------------------------------------------------------------------------------

    def prove(self) -> None:
        proof = self.p["proof"]
        if not proof or (self.check and self.changed):
            return
        command = " ".join(proof["argv"])
        try:
            status, out, err = self.module.run_command(proof["argv"], handle_exceptions=False)
        except OSError as error:
            raise AptError(f"proof: {command}: {error.strerror}") from None
        if status != 0 or not re.search(proof["expect"], out):
            printed = (out + err).strip() or "nothing"
            raise AptError(f"proof: {command} ended with status {status}; {proof['expect']!r} is not in: {printed}")


def word(package: dict[str, Any], versions: dict[str, str | None]) -> str:
    """A package as apt-get takes it."""
    version = versions[package["name"]]
    return f"{package['name']}={version}" if version else str(package["name"])


def put_or_remove(path: str, content: str) -> None:
    if content:
        write_file(path, content.encode())
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def keys_shown(keyring: bytes) -> bytes:
    """A keyring as a diff shows it: its fingerprints."""
    try:
        return "".join(f"{fingerprint}\n" for fingerprint in openpgp.fingerprints(keyring)).encode()
    except openpgp.NotAKeyError:
        return keyring


def headed(title: str, before: str, after: str) -> dict[str, str]:
    return {"before_header": title, "after_header": title, "before": before, "after": after}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    work = AptSet(module)
    try:
        result = work.run()
    except AptError as error:
        said = f"{error}." if work.apt.touched else f"{error}. Nothing on the host was changed."
        module.fail_json(msg=said, changed=work.apt.touched, transactions=work.transactions)
    if module._diff:
        result["diff"] = work.diffs
    module.exit_json(**result)


if __name__ == "__main__":
    main()
