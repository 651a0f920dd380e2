#!/usr/bin/python
"""host_survey: everything the project's roles want to know of a host, in one round trip."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_survey
short_description: Read what a host is and has, in one call
description:
  - Reads the sections that are asked for and returns them as the fact C(ansible_facts['host_survey']). Changes
    nothing, in check mode or out of it.
  - Facts of an earlier call stay; a section that is read again replaces what was there.
  - A section that could not be read is null, and C(errors) says why.
  - On the controller, the action plugin of the same name adds what the serving catalog knows, such as C(gpus[].gpu),
    C(gpus[].name) and C(platform.detected).
author: The gpt-oss-on-nvidia contributors
options:
  sections:
    description:
      - What to read. Some sections read nothing without their input, that is C(paths),
        C(ports), C(urls), C(units), C(logs), C(image) and C(weights).
      - C(nvidia_smi) and C(fabric) start nvidia-smi, which takes seconds where no persistence daemon runs.
    type: list
    elements: str
    choices:
      - os
      - architecture
      - kernel
      - gpus
      - platform
      - driver
      - nvidia_smi
      - fabric
      - packages
      - apt
      - memory
      - paths
      - weights
      - cache_drives
      - ports
      - clock
      - urls
      - docker
      - image
      - toolkit
      - units
      - logs
      - endpoints
    default: [os, architecture, kernel, gpus, platform, driver, packages, memory]
  procfs:
    description: Where the kernel's process files are; another tree makes a recorded host answer.
    type: path
    default: /proc
  sysfs:
    description: Where the kernel's device files are.
    type: path
    default: /sys
  rootfs:
    description: Where C(/etc), C(/usr) and C(/var) are.
    type: path
    default: /
  tool_paths:
    description: Directories to look in for tools first; with a C(rootfs) other than C(/) the only ones.
    type: list
    elements: path
    default: []
  packages:
    description: Patterns of further packages to list, beside those of NVIDIA, CUDA, Docker and the kernel.
    type: list
    elements: str
    default: []
  lock_timeout:
    description: Seconds to wait for another package manager to finish, before anything is read.
    type: float
    default: 0
  paths:
    description: Directories whose file system is wanted; they need not exist.
    type: list
    elements: path
    default: []
  measure:
    description: Directories of which to count the bytes that are there; C(DIR/*) stands for each directory in DIR.
    type: list
    elements: path
    default: []
  weights:
    description: The snapshot to look for.
    type: dict
    suboptions:
      directory:
        description: Directory in the layout of the Hugging Face cache.
        type: path
        required: true
      repository:
        description: Repository of the model.
        type: str
        required: true
      revision:
        description: Commit of the snapshot.
        type: str
        required: true
  cache_record:
    description: Where M(cache_drives) keeps what it made of drives, for the section of that name.
    type: path
    default: /var/lib/gpt-oss-drives/record.json
  ports:
    description: TCP ports of which to say whether something listens, and what.
    type: list
    elements: int
    default: []
  urls:
    description:
      - Addresses to ask with HEAD, or GET where HEAD is refused; C(http), C(https) or C(file).
      - The words C({os_id}), C({os_codename}), C({os_repository}), C({dpkg_architecture}), C({cuda_architecture}) stand
        for the host's own.
    type: list
    elements: str
    default: []
  url_timeout:
    description: Seconds to wait for an address.
    type: float
    default: 10
  url_tokens:
    description: Token to send to an address of O(urls), by that address. It is sent nowhere else.
    type: dict
  proxies:
    description: Proxy for each scheme; left out, the environment's.
    type: dict
  image:
    description:
      - The image to look for. One that Docker has is not asked for, if C(docker) is among O(sections), too; else the
        registry is asked for its manifest as Docker would ask, or the archive is looked into.
    type: dict
    suboptions:
      name:
        description: The image's name.
        type: str
        required: true
      registry:
        description: Registry, with an optional path, that is asked instead of the one in O(image.name).
        type: str
        default: ""
      insecure:
        description: Whether the registry speaks plain HTTP.
        type: bool
        default: false
      username:
        description: User at the registry. Empty takes what C(docker login) left in /root/.docker/config.json.
        type: str
        default: ""
      password:
        description: Password or token at the registry.
        type: str
        default: ""
      archive:
        description: Archive on the host to look into instead.
        type: str
        default: ""
  controller_time:
    description: The controller's time in seconds since 1970, for the difference between the clocks. The action plugin
      fills it in.
    type: float
  image_record:
    description: Where M(docker_image) keeps which image it brought, for the section C(docker).
    type: path
    default: /etc/gpt-oss/image.json
  container_prefix:
    description: Containers whose name starts with this are described.
    type: str
    default: gpt-oss-
  probe_containers:
    description: Ask each of these that runs to list its GPUs, with its own nvidia-smi.
    type: bool
    default: false
  units:
    description: systemd units whose state is wanted.
    type: list
    elements: str
    default: []
  endpoints:
    description: Servers on the host to ask for their health and their models.
    type: list
    elements: dict
    default: []
    suboptions:
      name:
        description: Key of the answer.
        type: str
        required: true
      url:
        description: Where it listens, such as C(http://127.0.0.1:8000).
        type: str
        required: true
      health_path:
        description: Path that answers 200 when it serves.
        type: str
        default: /health
  log_units:
    description: systemd units whose last journal lines are wanted.
    type: list
    elements: str
    default: []
  log_lines:
    description: How many lines of each.
    type: int
    default: 40
attributes:
  check_mode:
    support: full
    description: Reads only.
  diff_mode:
    support: none
    description: There is nothing to differ.
"""

EXAMPLES = r"""
- name: Know the operating system
  host_survey:
    sections: [os, architecture, kernel]

- name: Know whether the server's port is free
  host_survey:
    sections: [ports, docker]
    ports: [8000]
"""

RETURN = r"""
ansible_facts:
  description: The survey.
  returned: always
  type: dict
  contains:
    host_survey:
      description: One key for each section, and C(holds), C(package_state), C(memory_bytes), C(errors).
      type: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.survey.collect import SECTIONS, collect
from ansible.module_utils.survey.host import Host

ARGUMENTS = {
    "sections": {
        "type": "list",
        "elements": "str",
        "choices": list(SECTIONS),
        "default": ["os", "architecture", "kernel", "gpus", "platform", "driver", "packages", "memory"],
    },
    "procfs": {"type": "path", "default": "/proc"},
    "sysfs": {"type": "path", "default": "/sys"},
    "rootfs": {"type": "path", "default": "/"},
    "tool_paths": {"type": "list", "elements": "path", "default": []},
    "packages": {"type": "list", "elements": "str", "default": []},
    "lock_timeout": {"type": "float", "default": 0},
    "paths": {"type": "list", "elements": "path", "default": []},
    "measure": {"type": "list", "elements": "path", "default": []},
    "weights": {
        "type": "dict",
        "options": {
            "directory": {"type": "path", "required": True},
            "repository": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
        },
    },
    "cache_record": {"type": "path", "default": "/var/lib/gpt-oss-drives/record.json"},
    "ports": {"type": "list", "elements": "int", "default": []},
    "urls": {"type": "list", "elements": "str", "default": []},
    "url_timeout": {"type": "float", "default": 10},
    "url_tokens": {"type": "dict", "no_log": True},
    "proxies": {"type": "dict"},
    "image": {
        "type": "dict",
        "options": {
            "name": {"type": "str", "required": True},
            "registry": {"type": "str", "default": ""},
            "insecure": {"type": "bool", "default": False},
            "username": {"type": "str", "default": ""},
            "password": {"type": "str", "default": "", "no_log": True},
            "archive": {"type": "str", "default": ""},
        },
    },
    "controller_time": {"type": "float"},
    "image_record": {"type": "path", "default": "/etc/gpt-oss/image.json"},
    "container_prefix": {"type": "str", "default": "gpt-oss-"},
    "probe_containers": {"type": "bool", "default": False},
    "units": {"type": "list", "elements": "str", "default": []},
    "endpoints": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "name": {"type": "str", "required": True},
            "url": {"type": "str", "required": True},
            "health_path": {"type": "str", "default": "/health"},
        },
    },
    "log_units": {"type": "list", "elements": "str", "default": []},
    "log_lines": {"type": "int", "default": 40},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    given = module.params
    host = Host(given["procfs"], given["sysfs"], given["rootfs"], given["tool_paths"])
    survey = collect(host, given["sections"], given)
    module.exit_json(changed=False, ansible_facts={"host_survey": survey})


if __name__ == "__main__":
    main()
