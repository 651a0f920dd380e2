#!/usr/bin/python
"""Old revisions of a model go, once the new one serves."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_revisions
short_description: Keep the revision that is served and so many others, and remove the oldest
description:
  - Call it after the endpoint was checked. It removes revisions of one model from the model cache, oldest first.
  - Never removed are O(revision), what an engine process on the host is set up with, what the model's name leads to
    (C(refs/main)), what a process has open, and what was not verified by M(model_snapshot).
  - Nothing at all is removed while no engine process on the host is set up with O(revision), while O(revision) is not
    verified, or while a fetch of the model is at work.
options:
  directory: {type: path, required: true, description: The model cache.}
  repository: {type: str, required: true, description: "The model's name on the hub, C(owner/name)."}
  revision: {type: str, required: true, description: The revision that is served now.}
  keep: {type: int, required: true, description: "How many revisions stay besides those in use, the newest."}
  configuration_directory: {type: path, default: /etc/gpt-oss, description: Where the engine processes are described.}
  procfs: {type: path, default: /proc, description: Where the host's processes are read.}
attributes:
  check_mode: {support: full, description: "Says what would be removed when O(revision) serves."}
  diff_mode: {support: full, description: Revisions before and after.}
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Keep one revision to go back to
  model_revisions:
    directory: /var/lib/gpt-oss
    repository: openai/gpt-oss-120b
    revision: b5c939de8f754692c1647ca79fbf85e8c1e70f8a
    keep: 1
"""

RETURN = r"""
removed: {description: "What was removed: revision, bytes, checked_at.", returned: always, type: list, elements: dict}
in_use: {description: "Revisions that are in use, each with the reason.", returned: always, type: dict}
freed_bytes: {description: Bytes of it that no other revision has as well., returned: always, type: int}
skipped_because: {description: Why nothing was looked at; empty otherwise., returned: always, type: str}
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss import fetch_weights as weights
from ansible.module_utils.gpt_oss import revisions


def layout_of(params: dict[str, Any]) -> weights.Layout:
    base = params["directory"]
    directories = {f"{part}_directory": os.path.join(base, part) for part in ("weights", "staging", "encodings")}
    return weights.make_request({**directories, **{key: params[key] for key in ("repository", "revision")}}).layout


def reasons(layout: weights.Layout, params: dict[str, Any], *, predict: bool) -> dict[str, str]:
    """Why revisions of this model are in use. A prediction is of the time when the wanted one serves."""
    found = {layout.revision: "it is served"}
    if predict:
        return found
    for snapshot in revisions.installed(params["configuration_directory"]):
        if snapshot.parent == layout.snapshot.parent.resolve():
            found.setdefault(snapshot.name, "an engine process is set up with it")
    current = weights.current_revision(layout)
    if current:
        found.setdefault(current, "the model's name leads to it")
    return found


def obstacle(layout: weights.Layout, params: dict[str, Any]) -> str:
    """Why nothing may be removed now."""
    marker = weights.read_marker(layout) or {}
    problem = weights.weights_problem(layout, marker.get("ignore_patterns", []))
    if problem is not None:
        return f"{layout.revision} is not verified here: {problem}"
    if layout.snapshot.resolve() not in revisions.installed(params["configuration_directory"]):
        return f"no engine process on this host is set up with {layout.revision}"
    return ""


def nothing(why: str) -> dict[str, Any]:
    return {"changed": False, "removed": [], "in_use": {}, "freed_bytes": 0, "skipped_because": why}


def alone(module: AnsibleModule, layout: weights.Layout) -> dict[str, Any]:
    """Do it while no fetch of the model is at work, and none begins."""
    handle = os.open(str(layout.lock), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if weights.try_lock(handle, layout):
            return run(module, layout)
        return nothing(f"a fetch of {layout.repository} is at work; run again when it has ended")
    finally:
        os.close(handle)


def run(module: AnsibleModule, layout: weights.Layout) -> dict[str, Any]:
    params = module.params
    found = revisions.revisions(layout)
    result = nothing("" if module.check_mode else obstacle(layout, params))
    if result["skipped_because"]:
        return result
    result["in_use"] = reasons(layout, params, predict=module.check_mode)
    going = revisions.choose(found, result["in_use"], params["keep"])
    if not module.check_mode:
        held = revisions.opened([layout.snapshot.parent / r.name for r in going], params["procfs"])
        result["in_use"].update({snapshot.name: "a process has it open" for snapshot in held})
        going = [revision for revision in going if revision.name not in result["in_use"]]
    left_behind = revisions.leftovers(layout)
    result["changed"] = bool(going or left_behind)
    result["freed_bytes"] = revisions.freed(layout.snapshot.parent / revision.name for revision in going)
    if module._diff and result["changed"]:
        staying = [revision for revision in found if revision not in going]
        half = "".join(f"{path} (half removed)\n" for path in left_behind)
        result["diff"] = {"before": revisions.listed(found) + half, "after": revisions.listed(staying)}
    if not module.check_mode:
        revisions.sweep(layout)
        for revision in going:
            revisions.remove(layout, revision.name)
    result["removed"] = [revisions.described(revision) for revision in going]
    return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "directory": {"type": "path", "required": True},
            "repository": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "keep": {"type": "int", "required": True},
            "configuration_directory": {"type": "path", "default": "/etc/gpt-oss"},
            "procfs": {"type": "path", "default": "/proc"},
        },
        supports_check_mode=True,
    )
    if module.params["keep"] < 0:
        module.fail_json(msg=f"keep: {module.params['keep']} is not allowed; expected 0 or more")
    try:
        layout = layout_of(module.params)
        if not Path(layout.staging).is_dir():  # check mode on a host without a cache
            module.exit_json(**nothing("there is no cache"))
        result = run(module, layout) if module.check_mode else alone(module, layout)
    except weights.FetchError as error:
        module.fail_json(msg=str(error))
    except (ValueError, KeyError, TypeError) as error:
        where = f"{module.params['configuration_directory']}/processes/*/process.json"
        module.fail_json(msg=f"{where}: one is not what playbooks/serve.yml writes ({error}); nothing was removed")
    except OSError as error:
        module.fail_json(msg=weights.os_error(error))
    if result["skipped_because"]:
        module.warn(f"No revision of {layout.repository} was removed: {result['skipped_because']}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
