"""preflight: documentation of the action plugin of the same name, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: preflight
short_description: Judge a host before anything is changed on it
description:
  - Asks the host once (M(host_survey)) and judges the answer with C(serving_catalog.checks.preflight).
  - Fails with every finding, each with what was seen, what was expected and a remedy. Changes nothing.
author: The gpt-oss-on-nvidia contributors
options:
  plan:
    description: The host's plan.
    type: dict
    required: true
  platform:
    description: Platform that was declared; C(auto) or nothing takes the one that is there.
    type: str
  directories:
    description:
      - Directories with the bytes that will be written below each, as C(path), C(bytes) and C(purpose) (C(weights),
        C(image),
        C(caches), C(other)). Those on one file system are added up; what is there already is taken off.
    type: list
    elements: dict
    default: []
  measure:
    description: Directories whose content counts as already there, below C(staging) or C(engine_caches); C(DIR/*)
      stands for each directory in DIR.
    type: list
    elements: path
    default: []
  keep_free_bytes:
    description: Bytes that stay free on each file system that is written to.
    type: int
    default: 1073741824
  urls:
    description:
      - Addresses that will be asked, as C(name), C(url), C(needed_for), C(accept), the statuses that count as an answer
        beside 200 to 399, and C(with_token), whether O(hub_token) is sent. The url may hold the words that
        M(host_survey) fills in.
    type: list
    elements: dict
    default: []
  lock_timeout:
    description: Seconds to wait for another package manager to finish, where nothing else is in the way.
    type: float
    default: 0
  hub_token:
    description: Access token of the hub, so that a wrong one is found now.
    type: str
    default: ""
  image_registry:
    description: Registry, with an optional path, that is asked for the plan's image instead of the image's own.
    type: str
    default: ""
  insecure_registries:
    description: Registries that speak plain HTTP.
    type: list
    elements: str
    default: []
  registry_username:
    description: User at the registry; empty takes the login that root has on the host.
    type: str
    default: ""
  registry_password:
    description: Password or token at the registry.
    type: str
    default: ""
  image_archive:
    description: Archive that the image will be loaded from; no registry is asked then.
    type: path
    default: ""
  image_archive_on:
    description: Where the archive lies.
    type: str
    choices: [controller, host]
    default: controller
  url_timeout:
    description: Seconds to wait for an address.
    type: float
    default: 10
  proxies:
    description: Proxy for each scheme; left out, the environment's.
    type: dict
  ports:
    description: Ports that must be free, beside the plan's own.
    type: list
    elements: int
    default: []
  minimum_memory_bytes:
    description: Memory the host must have, where it is more than the plan's.
    type: int
    default: 0
  weights_directory:
    description: Where the weights lie or will lie.
    type: path
    default: /var/lib/gpt-oss/weights
  driver_version:
    description: Driver that will be installed; empty is the catalog's.
    type: str
    default: ""
  driver_source:
    description: Where the driver will come from.
    type: str
    choices: [cuda_repo, distro]
    default: cuda_repo
  driver_modules:
    description: Flavour of the kernel modules.
    type: str
    choices: [open, proprietary]
    default: open
  driver_packages:
    description: Further packages that will be asked for by name.
    type: list
    elements: str
    default: []
  kernel_headers:
    description: Whether the running kernel's headers will be needed.
    type: bool
    default: true
  reboot:
    description: Whether the host may be rebooted.
    type: str
    choices: [never, when_needed]
    default: when_needed
  toolkit_version:
    description: Container toolkit that will be installed; empty is the catalog's.
    type: str
    default: ""
  docker_source:
    description: Where Docker comes from; C(present) means that it is there and stays as it is.
    type: str
    choices: [docker_repo, distribution, present]
    default: docker_repo
  maximum_skew_seconds:
    description: How far the host's clock may be off.
    type: int
    default: 60
  allow_findings:
    description: Findings that are accepted, by id or pattern.
    type: list
    elements: str
    default: []
  image_record:
    description: Where M(docker_image) keeps which image it brought; compile caches are named after that.
    type: path
    default: /etc/gpt-oss/image.json
  container_prefix:
    description: Containers whose name starts with this are the project's own.
    type: str
    default: gpt-oss-
  procfs:
    description: Root of procfs.
    type: path
    default: /proc
  sysfs:
    description: Root of sysfs.
    type: path
    default: /sys
  rootfs:
    description: Where C(/etc), C(/usr) and C(/var) are.
    type: path
    default: /
  tool_paths:
    description: Directories to look in for tools first.
    type: list
    elements: path
    default: []
attributes:
  check_mode:
    support: full
    description: Reads only.
"""

EXAMPLES = r"""
- name: Look at the host before anything is changed
  preflight:
    plan: "{{ ansible_facts['serving_plan'] }}"
    directories:
      - path: /var/lib/gpt-oss
        bytes: 70000000000
        purpose: weights
"""

RETURN = r"""
checks:
  description: Every check, as docs/verdict.md describes it.
  returned: success
  type: list
  elements: dict
findings:
  description: Ids of the findings; the message says more.
  returned: failure
  type: list
  elements: str
ansible_facts:
  description: The survey, as host_survey returns it.
  returned: success
  type: dict
"""
