#!/usr/bin/python
"""One container image on a host, from a registry or an archive, for the right machine, with its digest on record."""

from __future__ import annotations

DOCUMENTATION = r"""
module: docker_image
short_description: Have one image on the host, and on record by its digest
description:
  - An image that is on record, or on the host under its name, is not asked for again. No registry is contacted then.
  - From a registry, the image's platforms and the disk's free space are checked before the first byte of a layer, and
    the image is pulled by the digest that its tag names at that moment.
  - From an archive (docker save or OCI layout; plain, gzip, bzip2 or xz), names, architecture and completeness are
    read from the archive before the daemon is asked to load it.
options:
  name:
    description: The image's name, as the plan says it.
    type: str
    required: true
  record:
    description: File on the host that keeps which image the name stands for. Without it none is kept.
    type: path
  registry:
    description: Registry, with an optional path, that is asked instead of the one in O(name).
    type: str
  username:
    description: User at the registry. Left out, what C(docker login) left in /root/.docker/config.json is used.
    type: str
  password:
    description: Password or token at the registry. Sent to the local daemon only; never written down.
    type: str
  archive:
    description: Archive on the host to load the image from; no registry is asked.
    type: path
  archive_elsewhere:
    description: The archive is not on this host yet. When it is needed, RV(needs_archive) says so; nothing is loaded.
    type: bool
    default: false
  archive_name:
    description: The archive's name on record, where O(archive) is only a copy of it. Default is O(archive) itself.
    type: str
  sha256:
    description: Checksum that the archive must have.
    type: str
  size_bytes:
    description: Bytes that must be free where Docker keeps images, before anything is pulled or loaded.
    type: int
    default: 0
  architectures:
    description: Machine architectures the image is published for (amd64, arm64), if known.
    type: list
    elements: str
    default: []
  socket:
    description: The daemon's socket.
    type: path
    default: /var/run/docker.sock
attributes:
  check_mode: {support: full, description: Registry and archive are checked; nothing is pulled or loaded.}
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Have the engine's image
  docker_image:
    name: nvcr.io/nvidia/tensorrt-llm/release:1.2.1
    record: /etc/gpt-oss/image.json
"""

RETURN = r"""
reference:
  description: What to give docker run, repository@digest from a registry, the image's id from an archive.
  returned: when the image is there
  type: str
needs_archive:
  description: Whether the archive must be brought to the host, and the module called again with it.
  returned: always
  type: bool
image:
  description: The record; name, source, reference, id, digest, architecture.
  returned: always
  type: dict
"""

import base64
import json
import os
import shutil
from typing import Any
from urllib.parse import quote

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss import docker_host as host
from ansible.module_utils.gpt_oss import image_archive as archives
from ansible.module_utils.gpt_oss.files import read_file, text_diff, write_file
from ansible.module_utils.survey.registry import login_of


class Image:
    """The wanted image and the record of the one that is there."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.asked: dict[str, Any] = module.params
        self.docker = host.Docker(self.asked["socket"])
        self.name: str = self.asked["name"]
        self.pulled_as = archives.mirrored(self.name, self.asked["registry"]) if self.asked["registry"] else self.name
        self.machine = host.machine()

    @property
    def source(self) -> str:
        if not self.asked["archive"]:
            return f"registry {archives.split_registry(archives.full_name(self.pulled_as))[0] or 'docker.io'}"
        checksum = f" sha256:{self.asked['sha256']}" if self.asked["sha256"] else ""
        return f"archive {self.asked['archive_name'] or self.asked['archive']}{checksum}"

    # -- what is there ---------------------------------------------------------------------------------------------

    def recorded(self) -> dict[str, Any] | None:
        """The record, if it is of this image from this source and the image is still there."""
        content = read_file(self.asked["record"]) if self.asked["record"] else None
        try:
            record: dict[str, Any] = json.loads(content or b"null") or {}
        except ValueError:
            return None
        if (record.get("name"), record.get("source")) != (self.name, self.source):
            return None
        return record if self.docker.image(str(record.get("id"))) is not None else None

    def here(self) -> dict[str, Any] | None:
        """A record of the image that the host already has under the wanted name, for this machine."""
        found = None if self.asked["archive"] else self.docker.image(self.pulled_as)
        if found is None or found.get("Architecture") != self.machine:
            return None
        return self.record_of(found)

    def repository_and_tag(self) -> tuple[str, str]:
        head, slash, tail = self.pulled_as.partition("@")[0].rpartition("/")
        bare, _, tag = tail.partition(":")
        return f"{head}{slash}{bare}", tag

    def record_of(self, found: dict[str, Any]) -> dict[str, Any]:
        repository, _ = self.repository_and_tag()
        digests = [] if self.asked["archive"] else found.get("RepoDigests") or []
        same = [
            digest
            for digest in digests
            if archives.full_name(digest.partition("@")[0]) == archives.full_name(repository)
        ]
        return {
            "name": self.name,
            "source": self.source,
            "reference": same[0] if same else found["Id"],
            "id": found["Id"],
            "digest": same[0].partition("@")[2] if same else None,
            "architecture": found.get("Architecture"),
        }

    def predicted(self, digest: str = "") -> dict[str, Any]:
        """What check mode says of an image that is not there."""
        image = {"name": self.name, "source": self.source, "digest": digest or None}
        reference = f"{self.repository_and_tag()[0]}@{digest}" if digest else self.pulled_as
        return {"changed": True, "needs_archive": False, "image": image, "reference": reference}

    # -- getting it ------------------------------------------------------------------------------------------------

    def check_machine(self) -> None:
        if self.asked["architectures"] and self.machine not in self.asked["architectures"]:
            raise host.DockerError(
                f"{self.name} is published for {', '.join(self.asked['architectures'])}, this host is "
                f"{self.machine}; choose a "
                "release (serving_release) that is published for it"
            )

    def check_space(self, info: dict[str, Any]) -> None:
        needed: int = self.asked["size_bytes"]
        root = str(info.get("DockerRootDir") or "/var/lib/docker")
        if "containerd" in json.dumps(info.get("DriverStatus") or []) and os.path.isdir("/var/lib/containerd"):
            root = "/var/lib/containerd"
        place = os.statvfs(root)
        free = place.f_bavail * place.f_frsize
        if free < needed:
            raise host.DockerError(
                f"{root}: {free} bytes are free, {self.name} needs {needed}: {needed - free} are missing. Remove "
                "images that "
                "nothing uses (docker image prune --all), or move Docker's data: docker_engine_daemon_options: "
                "{data-root: …}"
            )

    def login(self) -> dict[str, str]:
        given = login_of(self.pulled_as, self.asked["username"], self.asked["password"])
        if given is None:
            return {}
        registry = archives.split_registry(self.pulled_as)[0]
        user, password = given
        login = {"username": user, "password": password, "serveraddress": registry or "https://index.docker.io/v1/"}
        return {"X-Registry-Auth": base64.urlsafe_b64encode(json.dumps(login).encode()).decode()}

    def look_up(self) -> str:
        """The digest that the name stands for at the registry, once it is known to have an image for this machine."""
        try:
            found = self.docker.get(f"/distribution/{quote(self.pulled_as, safe='/:@')}/json", headers=self.login())
        except host.DockerError as error:
            raise host.DockerError(self.explained(error)) from None
        platforms = [platform.get("architecture") for platform in found.get("Platforms") or []]
        there = sorted({str(platform) for platform in platforms if platform and platform != "unknown"})
        if there and self.machine not in there:
            raise host.DockerError(
                f"{self.pulled_as}: the registry has it for {', '.join(there)}, not for {self.machine}, which this "
                "host is. "
                "Mirror the image with all its platforms, or choose a release (serving_release) that has this one"
            )
        return str(found["Descriptor"]["digest"])

    def explained(self, error: host.DockerError) -> str:
        said = str(error)
        low = said.lower()
        if "unauthorized" in low or "denied" in low or "authentication required" in low or error.status in (401, 403):
            remedy = (
                "the registry denies it or has no such image: check the name, and inference_server_registry_username "
                "and "
                "inference_server_registry_password"
            )
        elif error.status == 404 or "manifest unknown" in low or "not found" in low:
            remedy = (
                "the registry has no such image: check serving_release and inference_server_image_registry, or load "
                "it from an "
                "archive (inference_server_image_archive)"
            )
        elif "http response to https client" in low:
            remedy = (
                "the registry speaks plain HTTP: give it TLS, or name it in "
                "docker_engine_daemon_options: {insecure-registries: [...]}"
            )
        elif "x509" in low:
            remedy = "its certificate is not trusted: put the CA into /etc/docker/certs.d/<registry>/ca.crt"
        else:
            remedy = (
                "the registry cannot be reached: check the network, or name a mirror "
                "(inference_server_image_registry) or an "
                "archive (inference_server_image_archive)"
            )
        return f"{self.pulled_as}: {remedy}. Docker says: {said}"

    def pull(self, digest: str) -> dict[str, Any]:
        repository, tag = self.repository_and_tag()
        asked = f"/images/create?fromImage={quote(repository, safe='')}&tag={quote(digest, safe='')}"
        try:
            for _ in host.messages(self.docker.open("POST", asked, headers=self.login(), timeout=None)):
                pass
        except host.DockerError as error:
            raise host.DockerError(self.explained(error)) from None
        found: dict[str, Any] | None = self.docker.image(f"{repository}@{digest}")
        if found is None:
            raise host.DockerError(f"{self.pulled_as}: was pulled as {digest}, but Docker does not have it")
        if tag:
            self.docker.open(
                "POST", f"/images/{found['Id']}/tag?repo={quote(repository, safe='')}&tag={quote(tag, safe='')}"
            )
        return found

    def read_archive(self) -> tuple[archives.Archive, archives.ArchivedImage]:
        path = self.asked["archive"]
        if not os.path.isfile(path):
            raise host.DockerError(
                f"{path}: there is no such archive on this host. Name one with inference_server_image_archive, and "
                "say with "
                "inference_server_image_archive_on whether it lies on the controller or on the host"
            )
        if self.asked["sha256"]:
            found = archives.sha256_of(path)
            if found != self.asked["sha256"].lower():
                raise host.DockerError(
                    f"{path}: is corrupt or another archive: its sha256 is {found}, "
                    "inference_server_image_archive_sha256 says "
                    f"{self.asked['sha256']}. Copy it again"
                )
        try:
            archive = archives.Archive(path)
            return archive, archive.choose(self.name, self.machine)
        except archives.ArchiveError as error:
            raise host.DockerError(str(error)) from None

    def load(self, archive: archives.Archive, image: archives.ArchivedImage) -> dict[str, Any]:
        headers = {"Content-Type": "application/x-tar"}
        body = archive.load_stream(image, self.name)
        try:
            for _ in host.messages(self.docker.open("POST", "/images/load?quiet=1", body, headers, timeout=None)):
                pass
        except host.DockerError as error:
            raise host.DockerError(
                f"{archive.path}: Docker refuses it: {error}. If a layer does not match its digest, the archive is "
                "corrupt: copy it again"
            ) from None
        found: dict[str, Any] | None = self.docker.image(self.name) or self.docker.image(image.id)
        if found is None:
            raise host.DockerError(f"{archive.path}: was loaded, but Docker has no {self.name}; it has {image.tags}")
        return found


def have(image: Image) -> dict[str, Any]:
    if image.module.check_mode and shutil.which("dockerd") is None:
        # An earlier role would have installed it.
        return image.predicted()
    record = image.recorded() or image.here()
    info: dict[str, Any] = {}
    archive = None
    digest = ""
    if record is None:
        info = image.docker.info()
        image.check_machine()
        if image.asked["archive_elsewhere"]:
            image.check_space(info)
            if image.module.check_mode:
                return image.predicted()
            return {"changed": False, "needs_archive": True, "image": {}}
        if image.asked["archive"]:
            archive = image.read_archive()
        else:
            digest = image.look_up()
        image.check_space(info)
        if image.module.check_mode:
            return image.predicted(digest)
        record = image.record_of(image.load(*archive) if archive else image.pull(digest))
        if record["architecture"] != image.machine:
            raise host.DockerError(f"{image.name} is for {record['architecture']}, this host is {image.machine}")
    path = image.asked["record"]
    if path is None:
        return {"changed": bool(info), "needs_archive": False, "image": record, "reference": record["reference"]}
    before = read_file(path)
    after = (json.dumps(record, indent=2) + "\n").encode()
    result: dict[str, Any] = {
        "changed": before != after,
        "needs_archive": False,
        "image": record,
        "reference": record["reference"],
    }
    if before != after and image.module._diff:
        result["diff"] = [text_diff(path, before, after)]
    if before != after and not image.module.check_mode:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_file(path, after)
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "record": {"type": "path"},
            "registry": {"type": "str"},
            "username": {"type": "str"},
            "password": {"type": "str", "no_log": True},
            "archive": {"type": "path"},
            "archive_elsewhere": {"type": "bool", "default": False},
            "archive_name": {"type": "str"},
            "sha256": {"type": "str"},
            "size_bytes": {"type": "int", "default": 0},
            "architectures": {"type": "list", "elements": "str", "default": []},
            "socket": {"type": "path", "default": host.SOCKET},
        },
        required_together=[["username", "password"]],
        supports_check_mode=True,
    )
    try:
        result = have(Image(module))
    except host.DockerError as error:
        said, archive, name = str(error), module.params["archive"], module.params["archive_name"]
        if archive and name:  # the operator knows the archive, not the copy
            said = said.replace(archive, name)
        module.fail_json(msg=said)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
