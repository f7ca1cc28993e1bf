# SPDX-License-Identifier: Apache-2.0
"""A namespace and keys, for tests of the index."""

from __future__ import annotations

import hashlib

from s3ec.identity import Key, Layout, make_key

NAMESPACE = "gemma-0123456789abcdef"
LAYOUT = Layout(NAMESPACE)


def key_of(text: object) -> Key:
    key = make_key(hashlib.sha256(str(text).encode()).hexdigest())
    assert key is not None
    return key
