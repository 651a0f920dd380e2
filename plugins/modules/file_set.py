#!/usr/bin/python
"""Many files, directories and links in one call: all checked first, then put in place one by one, each atomically."""

from __future__ import annotations

DOCUMENTATION = r"""
module: file_set
short_description: Manage many files, directories and links in one call
description:
  - Every entry is checked, staged and validated before the first one is put in place. When anything is wrong, all
    findings are reported together and nothing on the host has changed.
  - Files are written beside their place, synced and renamed, so that no reader sees half a file.
  - A file whose content, owner and mode are right is not touched, its modification time included.
  - One call for a set costs one round trip, where a loop of C(copy) costs one for each file.
options:
  files:
    description: The entries, in the order in which they are applied. A path may be named once.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Absolute path on the host. Its directory must exist or be an entry of the same call.
        type: path
        required: true
      state:
        description:
          - V(absent) removes a file, a link, or a directory with all that is in it; never a mount point or a top-level
            directory.
          - A V(file) never replaces a link, and a V(link) never replaces a file or directory; name the case and remove
            it first.
        type: str
        choices: [file, directory, link, absent]
        default: file
      content:
        description:
          - Text of the file, exactly as it shall be on the host. Left out, only owner, group and mode of a file that
            exists are managed.
          - With O(files[].merge=json) a mapping, or text that is a JSON object.
        type: raw
      target:
        description: What the link points to. For O(files[].state=link).
        type: str
      owner:
        description: Name or number of the owner. Left out, an existing owner stays and a new file belongs to the user
          who runs the module.
        type: str
      group:
        description: Name or number of the group. Left out, an existing group stays.
        type: str
      mode:
        description:
          - Octal mode as a quoted string, such as V("0644"). Left out, an existing mode stays; new files get 0644, new
            directories 0755, and files marked O(files[].sensitive) are always held at 0600.
        type: raw
      validate:
        description:
          - Command that must succeed before the file is put in place. V(%s) stands for the staged file, which has the
            file's own name in a directory of its own. Run without a shell.
        type: str
      merge:
        description:
          - V(json) lays O(files[].content) over the JSON object that the file holds now, as RFC 7396 (JSON merge patch)
            does. Mappings merge key by key, V(null) removes a key, anything else replaces. A file that already holds
            the result is not rewritten.
        type: str
        choices: [json]
      sensitive:
        description: Keeps the content out of diffs, results and the host's log.
        type: bool
        default: false
notes:
  - In check mode a missing parent directory, user, group or validating command is taken as something that an earlier
    task would have made. It is reported as a warning there, and as an error in a real run.
attributes:
  check_mode:
    support: full
    description: Reports what would change; contents are validated in check mode, too.
  diff_mode:
    support: full
    description: Unified diffs of contents and attributes; hidden where O(files[].sensitive) is true.
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
- name: Write the server's configuration
  file_set:
    files:
      - {path: /etc/gpt-oss, state: directory, mode: "0755"}
      - path: /etc/gpt-oss/environment
        content: "HF_HUB_OFFLINE=1\n"
        sensitive: true
      - path: /etc/systemd/system/gpt-oss@.service
        content: "{{ lookup('ansible.builtin.template', 'gpt-oss@.service.j2') }}"
        validate: systemd-analyze verify %s
      - path: /etc/docker/daemon.json
        merge: json
        content: {live-restore: true}
        validate: dockerd --validate --config-file %s
      - {path: /etc/apt/sources.list.d/nvidia-docker.list, state: absent}
"""

RETURN = r"""
changed_paths:
  description: Paths that were changed, or would be in check mode.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.gpt_oss.file_entries import HIDEABLE_ENTRY_OPTIONS, FileSet


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "list", "elements": "dict", "required": True, "options": HIDEABLE_ENTRY_OPTIONS}
        },
        supports_check_mode=True,
        no_log=True,
    )
    files = FileSet(module, module.params["files"])
    files.hide_contents("files")

    paths = files.look_or_fail()
    result = {"changed": bool(paths), "changed_paths": paths}
    if module._diff:
        result["diff"] = files.diffs()
    if paths and not module.check_mode:
        files.put_or_fail()
    module.exit_json(**result)


if __name__ == "__main__":
    main()
