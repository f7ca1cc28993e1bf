# SPDX-License-Identifier: Apache-2.0
"""Where the entries of one namespace lie."""

from __future__ import annotations

from collections.abc import Sequence

from s3ec.identity import Key
from s3ec.tier.files import Folders


class EntryPaths:
    """Names only; no system call."""

    def __init__(self, folders: Folders, namespace: str) -> None:
        self.namespace = namespace
        self.objects = str(folders.objects / namespace)
        self._above = (*folders.above, str(folders.objects), self.objects)

    def path(self, key: Key) -> str:
        """The file of one entry."""
        return f"{self.objects}/{key.name}"

    def parents(self, key: Key) -> Sequence[str]:
        """Its folders from the root down; see ``require_own_folders``."""
        folder, _, fan_out = key.name.rpartition("/")[0].rpartition("/")
        lora = (f"{self.objects}/{folder}",) if folder else ()
        return (*self._above, *lora, f"{lora[0] if lora else self.objects}/{fan_out}")
