# SPDX-License-Identifier: Apache-2.0
"""Messages between the scheduler half and the worker half; plain data that pickles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from s3ec.codec import Header, Shape

if TYPE_CHECKING:
    from s3ec.tier.open_entry import OpenEntry


@dataclass(frozen=True, slots=True)
class Load:
    """One granted embedding.

    Attributes:
        identifier: Its place in vLLM's encoder cache.
        path: Name of the file when the scheduler's process opened it.
        pid, fd: That process, and its open descriptor, kept until the load is reported.
        device, inode: Of that file. Another file is not damaged, but not the one that was granted.
        header: The file's header, which was checked and compared with the request; without its
            placeholder.
        renamed: See identity.Key.
    """

    identifier: str
    path: str
    pid: int
    fd: int
    device: int
    inode: int
    header: Header
    renamed: str = ""

    @classmethod
    def of(cls, identifier: str, entry: OpenEntry, renamed: str = "") -> Load:
        """Return the load of an open entry."""
        file = entry.path, entry.pid, entry.fd, entry.device, entry.inode
        # No worker needs it, and one that a bucket nests deeply cannot be pickled on its way there.
        return cls(identifier, *file, replace(entry.header, placeholder=None), renamed)

    @property
    def shape(self) -> Shape:
        """Rows, width and dtype of the embedding."""
        return self.header.shape


@dataclass(frozen=True, slots=True)
class Save:
    """One embedding that the worker should store: it encodes it in this step, or holds it.

    Attributes:
        modality: ``image``, ``video``...
        placeholder: Placeholder metadata for a later request without pixels; plain JSON. None if
            the scheduler does not have it.
        on_device: True to store it from the device's encoder cache as the step begins.
        renamed: See identity.Key.
    """

    modality: str
    placeholder: Mapping[str, Any] | None
    on_device: bool = False
    renamed: str = ""


@dataclass(frozen=True, slots=True)
class Encode:
    """One embedding that the encoder makes in this step.

    Attributes:
        modality: ``image``, ``video``...
        rows: Rows of the embedding.
    """

    modality: str
    rows: int


@dataclass(frozen=True, slots=True)
class EncodeTime:
    """How long the encoder ran in one step.

    Attributes:
        modality: Modality of all items.
        items: Number of items.
        rows: Sum of their rows.
        seconds: Time of all of them.
    """

    modality: str
    items: int
    rows: int
    seconds: float


@dataclass(slots=True)
class StepPlan:
    """The scheduler's orders for one engine step.

    Attributes:
        weights: The namespace's record of the model's files, as canonical JSON; empty if the
            scheduler half did not start.
        encodes: By identifier.
    """

    step: int = 0
    weights: str = ""
    loads: list[Load] = field(default_factory=list)
    saves: dict[str, Save] = field(default_factory=dict)
    encodes: dict[str, Encode] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerReport:
    """Work of the workers since their last report.

    Attributes:
        loaded: Step to the ranks that finished that step's loads.
        stored: Identifiers that the bucket confirmed.
        counts: Counter increments.
        levels: Rank to its gauges, for ranks that read them again.
        encoded: Encode times that rank 0 measured.
        has_other_weights: True if a worker loaded other weights than the scheduler's namespace
            names.
    """

    loaded: dict[int, set[int]] = field(default_factory=dict)
    stored: list[str] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    levels: dict[int, Mapping[str, float]] = field(default_factory=dict)
    encoded: list[EncodeTime] = field(default_factory=list)
    has_other_weights: bool = False

    def merge(self, other: WorkerReport) -> WorkerReport:
        """Add another rank's report to this one."""
        for step, ranks in other.loaded.items():
            self.loaded.setdefault(step, set()).update(ranks)
        self.has_other_weights |= other.has_other_weights
        self.levels.update(other.levels)
        self.stored += other.stored
        self.encoded += other.encoded
        for name, amount in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + amount
        return self
