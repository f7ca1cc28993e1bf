# SPDX-License-Identifier: Apache-2.0
"""How long a server asks to be left alone: the Retry-After header (RFC 9110, 10.2.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime

# A server's figure is an input like any other.
_LONGEST_S = 86400.0


def retry_after_s(
    headers: Mapping[str, str], *, clock: Callable[[], float] = time.time
) -> float | None:
    """Seconds, 0 to a day; None where the header is missing or says nothing that can be read.

    A date is compared with the answer's own ``Date``, so that no clock need be right; with ours
    where there is none.

    Args:
        headers: Of the answer, names in lower case.
    """
    said = headers.get("retry-after", "").strip()
    if said.isascii() and said.isdigit():
        return min(float(said[:9]), _LONGEST_S)
    until_s = _date_s(said)
    if until_s is None:
        return None
    now_s = _date_s(headers.get("date", ""))
    return min(max(until_s - (clock() if now_s is None else now_s), 0.0), _LONGEST_S)


def _date_s(text: str) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
