# SPDX-License-Identifier: Apache-2.0
"""A folder that is used as a bucket: no symbolic link inside it is followed."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from s3ec.errors import AccessError

# obstore's names for what it is still writing.
_UNFINISHED = re.compile(r"#\d+$")


class RealFolder:
    """Looks at the names below ``root``. Every method touches the disk, one call per part.

    Looking comes before using: somebody who may write there can put a link in between. It keeps
    links out that lie there, not a writer of the folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def require(self, key: str) -> None:
        """Refuse a name that leads over a link, or that obstore keeps for itself.

        Raises:
            AccessError: It is one.
        """
        if _UNFINISHED.search(key):
            raise AccessError(
                "a file's name may not end with `#` and digits",
                code="NameNotSupported",
                is_general=False,
            )
        if self._leads_over_link(key.split("/"), {}):
            raise AccessError(
                "symbolic links are not followed", code="SymbolicLink", is_general=False
            )

    def real(self, keys: Iterable[str]) -> set[str]:
        """Those of some names that lead over no link."""
        seen: dict[str, bool] = {}
        return {key for key in keys if not self._leads_over_link(key.split("/"), seen)}

    def with_files(self, folders: Sequence[str]) -> list[str]:
        """Those of some folders that hold a file at any depth, links aside."""
        return [
            name
            for name in folders
            if not self._leads_over_link(name.split("/"), {}) and self._holds_file(name)
        ]

    def _holds_file(self, folder: str) -> bool:
        for _, _, files in os.walk(self._root / folder):
            if any(not _UNFINISHED.search(name) for name in files):
                return True
        return False

    def _leads_over_link(self, parts: Sequence[str], seen: dict[str, bool]) -> bool:
        """Whether the name or a folder above it is a link; ``seen`` remembers folders."""
        for end in range(1, len(parts) + 1):
            path = "/".join(parts[:end])
            if path not in seen:
                found = _is_link(self._root / path)
                if end < len(parts):
                    seen[path] = found
                if found:
                    return True
            elif seen[path]:
                return True
        return False


def _is_link(path: Path) -> bool:
    try:
        return stat.S_ISLNK(path.lstat().st_mode)
    except OSError:  # not there, or not to be looked at: what then is done with it will tell
        return False
