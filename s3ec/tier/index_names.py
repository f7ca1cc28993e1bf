# SPDX-License-Identifier: Apache-2.0
"""Names of the index's files below a namespace: those of the bucket's ``manifest/``."""

from __future__ import annotations

import re

_INDEX_NAME = re.compile(r"(?:base/[0-9]{12}-[0-9a-f]{16}|delta)/[0-9A-Za-z-]+(?:\.[a-z]+){1,2}")


def is_index_name(name: str) -> bool:
    """Whether a file of the index may lie under this name."""
    return _INDEX_NAME.fullmatch(name) is not None
