# SPDX-License-Identifier: Apache-2.0
"""What scheduler half and worker half tell each other; plain data that pickles."""

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
        pid, fd: That process, and where it has the file open until it hears of the load.
        device, inode: Of that file. Another one is no damage, it is not the one that was granted.
        header: The file's, as it was checked, and compared with the request; without placeholder.
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
        """The load of an open entry."""
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
        placeholder: What a later request without pixels will need; plain JSON. None where the
            scheduler cannot see it.
        on_device: It is stored from the device's encoder cache as the step begins.
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
        modality: Of all that it made.
        items: How many.
        rows: Of all of them.
        seconds: In sum.
    """

    modality: str
    items: int
    rows: int
    seconds: float


@dataclass(slots=True)
class StepPlan:
    """The scheduler's orders for one engine step.

    Attributes:
        weights: What the namespace says of the model's files, as canonical JSON; empty where the
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
    """What the workers did since they last reported.

    Attributes:
        loaded: Step to the ranks that finished that step's loads.
        stored: Identifiers that the bucket confirmed.
        counts: Counter increments.
        levels: Rank to what its gauges say now, where that was looked at anew.
        encoded: What rank 0 has measured.
        has_other_weights: One of them loaded other weights than the scheduler's namespace names.
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
