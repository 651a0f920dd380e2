#!/usr/bin/python
"""The Docker daemon: its configuration merged and validated, enabled, running, and restarted only when its state "
"asks for it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: docker_daemon
short_description: Configure the Docker daemon and restart it only when, and only while, that is right
description:
  - Lays O(options) over the daemon's configuration file, lets the daemon validate the result where it can (23.0 and
    newer), writes it atomically, enables the service and starts it.
  - A restart is decided on the host's state. The running daemon must be younger than its configuration, its program and
    every path of O(newer), so a run that was interrupted between a file and the restart is healed by the next one.
  - While an inference container runs, a needed restart is an error and changes nothing, unless O(maintenance) is set.
  - A daemon that does not start with the new configuration gets the old one back.
options:
  options:
    description: Keys of the configuration file. Mappings merge, V(null) removes a key, anything else replaces.
    type: dict
    default: {}
  path:
    description: The configuration file.
    type: path
    default: /etc/docker/daemon.json
  minimum_version:
    description: The oldest daemon that will do.
    type: str
  cdi_since:
    description: From this version on C(features.cdi) is set, so that containers can ask for CDI devices.
    type: str
  cdi_default_since:
    description: From this version on CDI is on by itself and nothing is set.
    type: str
  newer:
    description: Further paths that the running daemon must be younger than, because it reads them only when it starts.
    type: list
    elements: path
    default: []
  must_be_there:
    description: Whether a daemon that is absent is an error in check mode, too, because nobody was going to install it.
    type: bool
    default: false
  maintenance:
    description: Whether a daemon may be restarted under a running inference container.
    type: bool
    default: false
  socket:
    description: The daemon's socket.
    type: path
    default: /var/run/docker.sock
attributes:
  check_mode: {support: full, description: Validates and reports; a daemon that is absent is taken as installed.}
  diff_mode: {support: full, description: The configuration file and the service.}
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Configure Docker
  docker_daemon:
    options: {live-restore: true}
    minimum_version: 20.10.0
"""

RETURN = r"""
version:
  description: Version of the installed daemon.
  returned: when it is installed
  type: str
restarted:
  description: Whether the daemon was restarted, or would be.
  returned: always
  type: bool
reasons:
  description: Why it was restarted.
  returned: always
  type: list
  elements: str
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss import docker_host as host
from ansible.module_utils.gpt_oss.docker_service import Daemon


def wanted_options(asked: dict[str, Any], version: str) -> dict[str, Any]:
    options = dict(asked["options"])
    since, by_default = asked["cdi_since"], asked["cdi_default_since"]
    if since and host.at_least(version, since) and not (by_default and host.at_least(version, by_default)):
        options["features"] = {"cdi": True, **(options.get("features") or {})}
    return options


def configure(module: AnsibleModule) -> dict[str, Any]:
    asked = module.params
    if host.snap_docker():
        raise host.DockerError(
            "Docker is installed as a snap, which is confined: it reads no /etc/docker/daemon.json and cannot use "
            "the NVIDIA "
            "Container Toolkit. Remove it (snap remove --purge docker) and run again; its images and volumes go with it"
        )
    daemon = Daemon(asked["path"], {}, asked["newer"], host.Docker(asked["socket"]))
    if daemon.program is None:
        if module.check_mode and not asked["must_be_there"]:
            return {"changed": True, "restarted": False, "reasons": []}
        raise host.DockerError(
            "Docker is absent: there is no dockerd on this host. Install it, or have role docker_engine do so; "
            "docker_engine_source says from where (docker_repo or distribution)"
        )
    version = daemon.version()
    if asked["minimum_version"] and not host.at_least(version, asked["minimum_version"]):
        raise host.DockerError(
            f"Docker {version} is too old; {asked['minimum_version']} or newer is needed. Take a newer one with "
            "docker_engine_source: docker_repo, or raise docker_engine_version"
        )
    daemon.options = wanted_options(asked, version)
    daemon.plan()
    daemon.validate(version)
    result: dict[str, Any] = {"version": version, "changed": daemon.changed, "reasons": daemon.reasons}
    notice = daemon.refuse_under_load(asked["maintenance"])
    if notice:
        module.warn(notice)
    if module._diff:
        result["diff"] = daemon.diff()
    if module.check_mode:
        return {**result, "restarted": bool(daemon.reasons)}
    return {**result, "restarted": daemon.apply()}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "options": {"type": "dict", "default": {}},
            "path": {"type": "path", "default": "/etc/docker/daemon.json"},
            "minimum_version": {"type": "str"},
            "cdi_since": {"type": "str"},
            "cdi_default_since": {"type": "str"},
            "newer": {"type": "list", "elements": "path", "default": []},
            "must_be_there": {"type": "bool", "default": False},
            "maintenance": {"type": "bool", "default": False},
            "socket": {"type": "path", "default": host.SOCKET},
        },
        supports_check_mode=True,
    )
    try:
        result = configure(module)
    except host.DockerError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
