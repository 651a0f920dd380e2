"""Loads in the controller, once, what the process of each task would otherwise load again."""

from __future__ import annotations

import gc
from typing import Any

from ansible.plugins.callback import CallbackBase
from ansible.plugins.loader import filter_loader, test_loader

from serving_catalog import load_catalog

DOCUMENTATION = r"""
name: loaded_once
type: aggregate
short_description: Loads Jinja's plugins and the serving catalog before the first task
description:
  - Ansible forks a process for each task of each host. What the controller has loaded, that process has already. Of
    itself the controller seldom uses a filter or a test, so each process reads every file of them for its first one.
  - Nothing is printed, and nothing depends on it but time.
author: gpt-oss on NVIDIA
"""


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "loaded_once"
    CALLBACK_NEEDS_ENABLED = True

    def v2_playbook_on_start(self, playbook: Any) -> None:
        for loader, one in ((filter_loader, "bool"), (test_loader, "search")):
            loader.get(one)  # the first that is asked for brings them all
        load_catalog()
        # What is there stays until the end: forks need not look through it for garbage, which copies its pages.
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 50, 50)
