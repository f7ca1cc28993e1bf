# SPDX-License-Identifier: Apache-2.0
"""A namespace, keys, and a clock for tests of the index."""

from __future__ import annotations

import hashlib

from s3ec.identity import Key, Layout, make_key

NAMESPACE = "gemma-0123456789abcdef"
LAYOUT = Layout(NAMESPACE)
START_S = 1_800_000_000.0


class Clock:
    """Moved by hand."""

    def __init__(self, now_s: float = START_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def key_of(text: object) -> Key:
    key = make_key(hashlib.sha256(str(text).encode()).hexdigest())
    assert key is not None
    return key
