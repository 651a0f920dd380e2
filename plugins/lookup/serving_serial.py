"""How many hosts a play takes at a time, as its inventory says it.

Ansible evaluates `serial` before it looks at any host, so a plain {{ serving_serial }} would only ever come from the
command line. This asks the hosts that the play is about to take.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

from serving_catalog import load_catalog
from serving_catalog.checks.inputs import input_problems

DOCUMENTATION = r"""
name: serving_serial
short_description: How many hosts a play takes at a time
description:
  - The value of C(serving_serial) on the hosts of the play, as C(--limit) leaves them. Hosts that set none go along.
  - Hosts that do not agree, and a value that is no number of hosts, are errors; no host is asked then.
options:
  _terms:
    description: Nothing.
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Serve the plan
  hosts: all
  serial: "{{ lookup('serving_serial') }}"
"""

RETURN = r"""
_raw:
  description: A number, a percentage, or a list of either.
  type: list
"""

NAME = "serving_serial"
EVERYBODY = "100%"


class LookupModule(LookupBase):
    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[Any]:
        known = variables or {}
        asked = known.get("hostvars")  # left out where nothing runs, as with --syntax-check
        hosts = known.get("ansible_play_hosts_all") or ()
        given = {} if asked is None else {host: asked[host][NAME] for host in hosts if NAME in asked.raw_get(host)}
        try:
            return [agreed(given)]
        except ValueError as error:
            raise AnsibleLookupError(str(error)) from None


def agreed(given: Mapping[str, Any]) -> Any:
    """The one value that hosts give, or the reason why there is none."""
    by_value: dict[str, list[str]] = {}
    for host, value in given.items():
        if value is not None:
            by_value.setdefault(_shown(value), []).append(host)
    if not by_value:
        return EVERYBODY
    if len(by_value) > 1:
        told = ", ".join(f"{value} ({_counted(hosts)})" for value, hosts in by_value.items())
        raise ValueError(
            f"{NAME}: the hosts of this run do not agree: {told}. Run them one group after the other (--limit), or say"
            f" on the command line what shall count, such as -e {NAME}={next(iter(by_value))}"
        )
    value = next(value for value in given.values() if value is not None)
    problems = input_problems({NAME: value}, {}, None, load_catalog(), lambda path: False, ())
    if problems:
        raise ValueError("; ".join(problems))
    return value


def _shown(value: Any) -> str:
    """A value as it is written: a number and the same number in quotes are one."""
    return json.dumps([_shown(item) for item in value]) if isinstance(value, list) else str(value)


def _counted(hosts: list[str]) -> str:
    return hosts[0] if len(hosts) == 1 else f"{hosts[0]} and {len(hosts) - 1} more"
