# SPDX-License-Identifier: Apache-2.0
"""What encoding costs on this machine: learned in the running engine, and kept for the next one.

The worker measures, see ``connector/worker.py``. Where scheduler and worker are one process
they share one ``EncodeCosts``. Else the scheduler learns from the workers' reports, and, where vLLM
drops those (before 0.30, pure producers, pipeline parallel), from the file that the worker's
process writes a moment later::

    CACHE_DIR/v1/costs/NAMESPACE.json    {"version": 1, "devices": {DEVICE: {"image:9": 0.0004}}}

The figures are seconds per row, by modality and size class. A file is a hint: one that is damaged,
foreign or absent is a cold start.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError, TierError
from s3ec.safetensors_file import plain_json
from s3ec.tier.files import DiskErrors, Folders, read_small

# Before anything was encoded: for one item, whatever its size.
PRIOR_ENCODE_S = 0.05
# Weight of a new sample among the earlier ones of its kind.
_NEW_WEIGHT = 0.2
# Encodes that only teach what encoding costs, for each kind.
_MOST_EXPLORED = 3
# An engine that has encoded nothing of a kind for so long, and for so many requests, does so again.
# Fewer requests would see it in what one in a hundred takes.
_STALE_S = 600.0
_STALE_REQUESTS = 300
# A sample counts for at most so many times what was learned: a hiccup says nothing.
_MOST_TIMES = 5.0
# Modalities are few, and sizes are powers of two.
_MOST_KINDS = 256
_LONGEST_NAME = 64

_Kind = tuple[str, int]


@dataclass(slots=True)
class _Unseen:
    """Since a kind was last encoded: when that was, the last question, and how many requests."""

    began_s: float
    asked_s: float = -math.inf
    requests: int = 0


class EncodeCosts:
    """What encoding costs, by modality and size: seconds per row, learned from the worker.

    Sizes fall into classes by powers of two. A class that was never seen takes the nearest one of
    its modality; a modality that was never seen takes PRIOR_ENCODE_S per item.

    Safe to use from any thread without a lock: what threads share is replaced and not changed,
    but for single values. A sample may be lost where two come at once.
    """

    def __init__(self, learned: Mapping[str, float] | None = None) -> None:
        """Start with what an earlier engine has learned, as ``document`` gave it."""
        self._row_s: dict[_Kind, float] = _parse(learned or {})
        # Learned here, so that what others have learned counts for nothing.
        self._own: set[_Kind] = set()
        # The first sample of a process holds compilation and lazy loading.
        self._seen: set[_Kind] = set()
        self._explored: dict[_Kind, int] = {}
        self._unseen: dict[_Kind, _Unseen] = {}
        # To be learned anew: the next sample counts for all before it.
        self._stale: set[_Kind] = set()

    def add(self, modality: str, rows: int, seconds: float, *, items: int = 1) -> None:
        """The encoder took so long for so many rows, of one item or of several alike."""
        if rows < items or items <= 0 or not 0.0 < seconds < math.inf:
            return
        kind = (modality, (rows // items).bit_length())
        self._unseen.pop(kind, None)
        row_s = seconds / rows
        known = self._row_s.get(kind)
        if kind not in self._seen:
            self._seen.add(kind)
            self._explored.pop(kind, None)  # all of those may have been in this one sample
            if known is None or row_s > known:
                return
        if known is None:
            if len(self._row_s) < _MOST_KINDS:
                self._row_s = {**self._row_s, kind: row_s}
        else:
            weight = 1.0 if kind in self._stale else _NEW_WEIGHT
            row_s = min(row_s, _MOST_TIMES * known)
            self._row_s[kind] = known + weight * (row_s - known)
        self._stale.discard(kind)
        self._own.add(kind)

    def adopt(self, learned: Mapping[str, float]) -> None:
        """Another process has learned this; it counts for what this one has not measured."""
        others = _parse(learned).items()
        fresh = {kind: row_s for kind, row_s in others if kind not in self._own}
        self._row_s = {**self._row_s, **fresh}

    def known_s(self, modality: str, rows: int) -> float | None:
        """What one item of this size is expected to take; None where nothing like it was seen."""
        size = rows.bit_length()
        learned = self._row_s
        row_s = learned.get((modality, size))
        if row_s is None:
            near = [
                (abs(other - size), value)
                for (name, other), value in learned.items()
                if name == modality
            ]
            if not near:
                return None
            row_s = min(near)[1]
        return row_s * rows

    def cost_s(self, modality: str, rows: int) -> float:
        """The same, with a first guess where nothing is known."""
        known_s = self.known_s(modality, rows)
        return PRIOR_ENCODE_S if known_s is None else known_s

    def explore(self, modality: str, rows: int, now: float = 0.0, *, in_doubt: bool = True) -> bool:
        """Whether an item should be encoded so that its cost becomes known.

        A few times for each kind: the first sample does not count, and what has been encoded for
        this is reported some steps later, if at all. And once where a known kind was not encoded
        for ten minutes: what was learned wrong would stay so for ever.

        Args:
            now: Monotonic seconds.
            in_doubt: Another cost could change an answer.
        """
        kind = (modality, rows.bit_length())
        if kind in self._row_s:
            since = self._unseen.setdefault(kind, _Unseen(now))
            if now != since.asked_s:  # not one more item of the same request
                since.asked_s = now
                since.requests += 1
            if not in_doubt or now - since.began_s < _STALE_S or since.requests < _STALE_REQUESTS:
                return False
            del self._unseen[kind]
            self._stale.add(kind)
            return True
        explored = self._explored.get(kind, 0)
        if explored >= _MOST_EXPLORED:
            return False
        self._explored[kind] = explored + 1
        return True

    @property
    def document(self) -> dict[str, float]:
        """For a file: seconds per row by ``modality:size class``."""
        return _named(self._row_s)

    @property
    def own(self) -> dict[str, float]:
        """Of that, what this process has measured."""
        own = self._own
        return _named({kind: row_s for kind, row_s in self._row_s.items() if kind in own})


def _named(row_s: Mapping[_Kind, float]) -> dict[str, float]:
    return {f"{modality}:{size}": seconds for (modality, size), seconds in row_s.items()}


def _parse(learned: Mapping[str, Any]) -> dict[_Kind, float]:
    """What of a document can be believed."""
    found: dict[_Kind, float] = {}
    for name, row_s in learned.items():
        modality, _, size = name.rpartition(":")
        is_kind = modality and len(modality) <= _LONGEST_NAME and size.isdigit() and len(size) <= 2
        if is_kind and isinstance(row_s, float) and 0.0 < row_s < math.inf:
            found[modality, int(size)] = row_s
        if len(found) == _MOST_KINDS:
            break
    return found


_VERSION = 1
_FILE_LIMIT = 1 << 18
_MOST_DEVICES = 16
# What moved by less is not worth a write.
_WORTH_WRITING = 1.05


class CostFile:
    """One namespace's file, for one device. Blocking; for one thread at a time. Never raises.

    Several engines of a node may write it: each puts in what it has measured itself and leaves the
    rest. Of two that write at once one may lose its figures until its next write.
    """

    def __init__(
        self,
        folders: Folders,
        namespace: str,
        device: str,
        costs: EncodeCosts,
        counters: Counters,
    ) -> None:
        """Nothing is read before ``exchange``.

        Args:
            folders: The tier's.
            namespace: ``Namespace.name``.
            device: Figures of other devices are of no use.
            costs: What is kept, and what learns from the file.
        """
        self._folders = folders
        self._path = f"{folders.costs}/{namespace}.json"
        self._device = device[:_LONGEST_NAME]
        self._costs = costs
        self._refused = DiskErrors(folders.root, counters).record
        self._seen: tuple[int, int] | None = None
        self._written: dict[str, float] = {}

    def exchange(self) -> None:
        """Write what has moved here since the last call, and learn what others have written."""
        try:
            self._read_new()
            self.write()
        except (OSError, TierError) as exc:
            self._refused("keep what encoding costs", exc)

    def write(self) -> None:
        """Write what has moved; nothing where nothing has.

        Raises:
            OSError, TierError: The disk refused.
        """
        own = self._costs.own
        if not any(_has_moved(row_s, self._written.get(name)) for name, row_s in own.items()):
            return
        devices = self._read()
        kept = {**devices.pop(self._device, {}), **own}
        # The newest last: what is over goes at the front.
        others = list(devices.items())[-(_MOST_DEVICES - 1) :]
        document = {"version": _VERSION, "devices": {**dict(others), self._device: kept}}
        self._folders.write_small(self._path, (json.dumps(document) + "\n").encode())
        self._written = own

    def _read_new(self) -> None:
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            return
        seen = (found.st_mtime_ns, found.st_ino)
        if seen != self._seen:
            self._seen = seen
            self._costs.adopt(self._read().get(self._device, {}))

    def _read(self) -> dict[str, dict[str, float]]:
        """Device to its figures; empty for anything that is no such file of ours."""
        try:
            content = read_small(self._path, max_bytes=_FILE_LIMIT)
            document: Any = plain_json(content.decode())
        except (FileNotFoundError, CorruptEntryError, ValueError, RecursionError):
            return {}
        if not isinstance(document, dict) or document.get("version") != _VERSION:
            return {}
        devices = document.get("devices")
        if not isinstance(devices, dict):
            return {}
        return {name: _named(_parse(one)) for name, one in devices.items() if isinstance(one, dict)}


def _has_moved(row_s: float, written: float | None) -> bool:
    return written is None or max(row_s, written) > _WORTH_WRITING * min(row_s, written)
