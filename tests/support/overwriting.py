# SPDX-License-Identifier: Apache-2.0
"""A store that ignores the condition of a write, as some servers do."""

from __future__ import annotations

from collections.abc import Sequence

from s3ec.testing.memory_store import MemoryStore


class OverwritingStore(MemoryStore):
    """What rclone and s3rver do with If-None-Match: nothing."""

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        self.bucket.objects.pop(self._key(name), None)
        await super().put_if_absent(name, body)
