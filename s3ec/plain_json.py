# SPDX-License-Identifier: Apache-2.0
"""JSON from a bucket or a disk, read so that no two readers could understand it differently."""

from __future__ import annotations

import json
import math
from typing import Any


def loads(text: str) -> Any:
    """JSON as we write it, and nothing that readers take in different ways.

    Duplicate keys, integers of more than 15 characters, NaN and infinity are refused.

    Raises:
        ValueError, RecursionError: Something else.
    """
    return json.loads(
        text,
        object_pairs_hook=_unique,
        parse_int=_small,
        parse_float=_finite,
        parse_constant=_finite,
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse duplicate keys: readers differ in which one they believe."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _small(digits: str) -> int:
    if len(digits) > 15:
        raise ValueError("number too large")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return value
