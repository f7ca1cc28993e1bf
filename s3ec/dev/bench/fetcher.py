# SPDX-License-Identifier: Apache-2.0
"""A node of s3ec that fetches a whole corpus again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from s3ec.codec import Shape
from s3ec.dev.bench.corpus import MODALITY, Corpus
from s3ec.identity import Key
from s3ec.node import Node
from s3ec.prefetch import FetchOutcome, FetchRequest
from s3ec.tier.open_entry import OpenEntry

# How often the main thread looks for news, as a scheduler does at its steps.
_LOOK_S = 0.01
_TIMEOUT_S = 120.0


class Fetcher:
    """A Node over the corpus; nothing of it but the prefetcher is at work."""

    def __init__(self, corpus: Corpus, cache_dir: Path) -> None:
        self.corpus = corpus
        # Else a server that this machine is too busy for counts as down after 1.5 s.
        patient = {"defer_timeout_s": _TIMEOUT_S}
        settings = corpus.settings(cache_dir).model_copy(update=patient)
        self.node = Node(settings, corpus.namespace, name="s3ec-bench")
        self._entries: list[OpenEntry] = []
        for key in corpus.keys:  # as a reader of the bucket's index knows them
            self.node.index.add(key, corpus.entry_bytes)

    def fetch(self) -> None:
        """Bring every entry, verified, to the tier and open it."""
        self._entries = fetch_all(self.node, self.corpus.keys, self.corpus.shape, look_s=_LOOK_S)

    def empty(self) -> None:
        """Close and evict every entry."""
        tier = self.node.tier
        self._entries.clear()
        for key in self.corpus.keys:
            path = tier.folders.objects / self.node.namespace.name / key.name
            path.unlink(missing_ok=True)
            self.node.local.discard(key)

    def close(self) -> None:
        """End the node."""
        self.node.close(10)


def fetch_all(node: Node, keys: Sequence[Key], shape: Shape, *, look_s: float) -> list[OpenEntry]:
    """Fetch these entries; returns them open.

    Raises:
        RuntimeError: An entry could not be had, or not in time.
    """
    node.prefetcher.submit([FetchRequest(key, MODALITY, shape.rows) for key in keys])
    deadline = time.monotonic() + _TIMEOUT_S
    entries: list[OpenEntry] = []
    while len(entries) < len(keys):
        for fetched in node.prefetcher.drain():
            if fetched.outcome is not FetchOutcome.READY or fetched.entry is None:
                raise RuntimeError(f"an entry ended as {fetched.outcome}")
            entries.append(fetched.entry)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(entries)} entries came within {_TIMEOUT_S:.0f} s")
        time.sleep(look_s)
    return entries
