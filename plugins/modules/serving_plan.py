#!/usr/bin/python
"""Documentation of the action plugin of the same name; nothing of it runs on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_plan
short_description: Check every input of a host and plan what it serves
description:
  - Runs on the controller alone, first in every playbook, and touches no host.
  - Every variable of the host that begins with C(serving_) or with the name of a role is checked against
    playbooks/vars/inputs.yml and the roles' argument specifications. Unknown and misspelt names, wrong types, values
    that are not allowed, missing inputs, and inputs that have no effect because the playbooks set them are errors.
    All of a host are reported together, each with what is allowed and the nearest match. Values of secret inputs are
    never shown.
  - Then the serving catalog makes the plan, or says why there is none.
options:
  plan:
    description: V(false) checks names and types alone, for a host that need not be able to serve. A name on the command
      line that resembles an input is then taken for a slip sooner.
    type: bool
    default: true
attributes:
  check_mode:
    support: full
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Check every input and plan what this host serves
  serving_plan:

- name: Check the names and types of every input
  serving_plan:
    plan: false
"""

RETURN = r"""
ansible_facts:
  description: The plan, as C(python -m serving_catalog plan --format json) prints it.
  returned: success, with O(plan=true)
  type: dict
  contains:
    serving_plan:
      description: The host's plan.
      type: dict
problems:
  description: Everything that is wrong with the host's inputs.
  returned: failure
  type: list
  elements: str
"""
