"""Facts of the serving catalog for roles: one place for each version, size and package name."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

from serving_catalog import CatalogError, load_catalog

DOCUMENTATION = r"""
name: serving_catalog
short_description: A value of the serving catalog, by its dotted path
description:
  - Reads serving_catalog/data on the controller, with the operator's overlay (C(serving_catalog_overlay)) laid over it.
  - A path that does not exist is an error that names the nearest one.
options:
  _terms:
    description: Dotted paths, such as V(releases.nvidia_driver.version). Keys may hold dots themselves.
    required: true
author: gpt-oss on NVIDIA
"""

EXAMPLES = r"""
nvidia_driver_version: "{{ lookup('serving_catalog', 'releases.nvidia_driver.version') }}"
"""

RETURN = r"""
_raw:
  description: The values, of whatever type they have in the catalog.
  type: list
"""


class LookupModule(LookupBase):
    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[Any]:
        self.set_options(var_options=variables, direct=kwargs)
        overlay = (variables or {}).get("serving_catalog_overlay")
        if overlay:
            overlay = self._templar.template(overlay)
        try:
            catalog = load_catalog(overlay or None)
            return [catalog.lookup(str(term)) for term in terms]
        except CatalogError as error:
            raise AnsibleLookupError(str(error)) from None
