"""verdict: documentation of the action plugin of the same name, which runs on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: verdict
short_description: Judge a host that should be serving, and write what was proved
description:
  - Asks the host once (M(host_survey)), judges the answer with C(serving_catalog.checks.diagnose), prints a table
    and writes
    C(<directory>/<host>.json) on the controller, whole or not at all. docs/verdict.md describes the file.
  - Changes nothing on the host. In check mode the file is not written.
author: The gpt-oss-on-nvidia contributors
options:
  plan:
    description: The host's plan.
    type: dict
    required: true
  platform:
    description: Platform that was declared; C(auto) or nothing takes the one that is there.
    type: str
  probes:
    description: Checks that were made elsewhere, such as the answers of the endpoint, in the form of docs/verdict.md.
    type: list
    elements: dict
    default: []
  benchmark:
    description:
      - Summary of a short run, as C(requests), C(failed_requests), C(output_tokens_per_second) and
        C(time_to_first_token_ms).
        Left out, throughput does not apply.
    type: dict
  minimum_output_tokens_per_second:
    description: What the run must reach at least. 0 asks only that no request failed.
    type: float
    default: 0
  cache_directory:
    description: The model cache.
    type: path
    default: /var/lib/gpt-oss
  unit_prefix:
    description: A process's unit is this, its name and C(.service).
    type: str
    default: gpt-oss@
  container_prefix:
    description: A process's container is this and its name.
    type: str
    default: gpt-oss-
  address:
    description: Address that the server publishes on.
    type: str
    default: 127.0.0.1
  keep_free_bytes:
    description: Bytes that must be free below the model cache.
    type: int
    default: 1073741824
  maximum_restarts:
    description: Restarts of a unit that are still taken for healthy.
    type: int
    default: 3
  log_lines:
    description: Journal lines of each unit to look for a cause in.
    type: int
    default: 40
  allow_findings:
    description: Findings that are accepted, by id or pattern.
    type: list
    elements: str
    default: []
  directory:
    description: Where verdicts are written, on the controller; a relative path is below the working directory.
    type: path
    default: verdicts
  fail:
    description: Whether a verdict that is not ok fails the task. The table is printed and the file written before.
    type: bool
    default: false
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
- name: Say what is proved
  verdict:
    plan: "{{ ansible_facts['serving_plan'] }}"
    fail: true
"""

RETURN = r"""
verdict:
  description: The content of the file.
  returned: when the task does not fail
  type: dict
findings:
  description: Ids of the checks that are findings.
  returned: when the task fails
  type: list
  elements: str
path:
  description: The file on the controller.
  returned: always
  type: str
"""
