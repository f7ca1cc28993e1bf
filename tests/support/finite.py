# SPDX-License-Identifier: Apache-2.0
"""Random bytes that are numbers whatever their dtype: what is stored holds no NaN."""

from __future__ import annotations

#: For ``bytes.translate``: an exponent never has all its bits set.
FINITE = bytes(byte & 0xBF for byte in range(256))
