# SPDX-License-Identifier: Apache-2.0
"""What scheduler half and worker half tell each other; plain data that pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from s3ec.codec import Shape

if TYPE_CHECKING:
    from s3ec.tier import Pin


@dataclass(frozen=True, slots=True)
class Load:
    """One granted embedding.

    Attributes:
        identifier: Its place in vLLM's encoder cache.
        path: Pinned file on this node.
        shape: Rows, width and dtype that were compared with the request.
        checksum: xxh3-128 of the tensor's bytes, from the header that was checked.
        data_start: Offset of the tensor in the file, bytes.
    """

    identifier: str
    path: str
    shape: Shape
    checksum: str
    data_start: int

    @classmethod
    def of(cls, identifier: str, pin: Pin) -> Load:
        """The load of a pinned file."""
        header = pin.header
        return cls(identifier, str(pin.path), header.shape, header.checksum, header.data_start)


@dataclass(frozen=True, slots=True)
class Save:
    """One embedding that the worker will encode in this step and should store.

    Attributes:
        modality: ``image``, ``video``...
        placeholder: What a later request without pixels will need; plain JSON.
    """

    modality: str
    placeholder: Mapping[str, Any]


@dataclass(slots=True)
class StepPlan:
    """The scheduler's orders for one engine step."""

    step: int = 0
    loads: list[Load] = field(default_factory=list)
    saves: dict[str, Save] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerReport:
    """What the workers did since they last reported.

    Attributes:
        loaded: Step to the ranks that finished that step's loads.
        published: Identifiers whose entries are on this node's disk now.
        stored: Identifiers that the bucket confirmed.
        counts: Counter increments.
    """

    loaded: dict[int, set[int]] = field(default_factory=dict)
    published: list[str] = field(default_factory=list)
    stored: list[str] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.loaded or self.published or self.stored or self.counts)

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Add another rank's report to this one."""
        for step, ranks in other.loaded.items():
            self.loaded.setdefault(step, set()).update(ranks)
        self.published += other.published
        self.stored += other.stored
        for name, amount in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + amount
        return self
