# SPDX-License-Identifier: Apache-2.0
"""The tier against a dict: a state machine that knows exactly what must be on the disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from s3ec import codec
from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError
from s3ec.identity import Key
from s3ec.tier import residents
from s3ec.tier.inspection import Inspection
from s3ec.tier.open_entry import OpenEntry
from s3ec.tier.residents import Residents
from s3ec.tier.tier import Tier
from tests.support.file_calls import open_below
from tests.support.on_disk import ByHand, audit_of, evict, make_room, running_total, usage_of
from tests.unit.tier.cases import (
    DESTINATION,
    NAMESPACE,
    disk_clock,
    entry,
    file_of,
    key_at,
    touch,
    unspool,
)

KEYS = [key_at(number) for number in range(7)]
UNIT = len(entry(KEYS[0], rows=4))
BUDGET_BYTES = 7 * UNIT
LOW_BYTES = int(BUDGET_BYTES * 0.9)

keys = st.sampled_from(KEYS)
DAMAGES = {
    "flip": lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]),
    "cut": lambda blob: blob[:-1],
    "cut short": lambda blob: blob[:50],
    "grow": lambda blob: blob + b"\0",
    "empty": lambda blob: b"",
    "zeros": lambda blob: bytes(len(blob)),
    "foreign": lambda blob: entry(key_at(99)),
}


@dataclass(eq=False)
class File:
    """One inode: what it holds, and when it was used."""

    key: Key
    blob: bytes
    used_s: float

    @property
    def complaint(self) -> str | None:
        """Why it is bad, as the codec says it."""
        try:
            codec.verify(self.blob, namespace=NAMESPACE, identifier=self.key.identifier)
        except CorruptEntryError as exc:
            return exc.reason
        return None


@dataclass(eq=False)
class Held:
    """An open entry, and the file that it must go on showing."""

    entry: OpenEntry
    file: File


@dataclass
class Model:
    """What should be on the disk, and what is open."""

    entries: dict[Key, File] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)
    residents: dict[Key, File] = field(default_factory=dict)
    spooled: dict[Key, File] = field(default_factory=dict)

    def files(self) -> set[File]:
        return {*self.entries.values(), *self.kept()}

    def kept(self) -> set[File]:
        """What eviction cannot free."""
        return {*self.spooled.values()}

    def total_bytes(self) -> int:
        return sum(len(file.blob) for file in self.files())

    def make_room(self, incoming_bytes: int, now_s: float) -> int:
        """The rule of eviction, said once more."""
        if self.total_bytes() + incoming_bytes <= BUDGET_BYTES:
            return 0
        return self.evict_to(LOW_BYTES - incoming_bytes, now_s)

    def close_evicted(self) -> None:
        """A sweep, or a round of eviction that freed anything: who has lost the name has to go."""
        self.residents = {
            key: file for key, file in self.residents.items() if self.entries.get(key) is file
        }

    def evict_to(self, target_bytes: int, now_s: float) -> int:
        """By use, after those that a clock noted which was ahead; what is spooled stays."""

        def order(item: tuple[Key, File]) -> tuple[bool, float]:
            return item[1].used_s <= now_s + 300, item[1].used_s

        total, freed = self.total_bytes(), 0
        for key, file in sorted(self.entries.items(), key=order):
            if total - freed <= target_bytes:
                break
            if file not in self.kept():
                del self.entries[key]
                freed += len(file.blob)
        return freed


class TierMachine(RuleBasedStateMachine):
    """Every rule does one thing to both, and compares what they answer."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="s3ec-tier-"))
        self.clock = disk_clock()
        self.counters = Counters()
        self.model = Model()
        self.dropped = 0
        self.tier = self.new_tier()
        self.spool = self.tier.open_spool(DESTINATION)
        self.walk()

    def walk(self) -> None:
        """Have residents, as a process does after its walk over the folder."""
        with patch.object(residents, "Background", ByHand):
            self.residents: Residents = self.tier.open_residents(lambda header: True)
        self.thread = ByHand.made.pop()
        self.residents.start()
        for key, file in list(self.model.entries.items()):
            if file.complaint not in (None, "checksum"):
                self.expect_dropped(key)
        self.model.residents = dict(self.model.entries)
        self.turn()

    def new_tier(self) -> Tier:
        return Tier(
            self.root,
            NAMESPACE,
            budget_bytes=BUDGET_BYTES,
            min_free_bytes=0,
            counters=self.counters,
            clock=self.clock,
        )

    def teardown(self) -> None:
        self.tier.close()
        for held in self.model.held:
            del held.entry
        left = [] if self.model.spooled else os.listdir(self.root / "v1" / "spool")
        left += open_below(self.root)
        shutil.rmtree(self.root)
        assert left == []

    def expect_dropped(self, key: Key) -> None:
        self.dropped += self.model.entries.pop(key, None) is not None

    @rule(
        key=keys,
        seed=st.integers(0, 2),
        rows=st.sampled_from([1, 4, 16]),
        spool=st.booleans(),
    )
    def publish(self, key: Key, seed: int, rows: int, spool: bool) -> None:
        blob = entry(key, seed=seed, rows=rows)
        # The estimate may make the tier look sooner than needed, but what it then finds decides.
        if self.model.make_room(len(blob), self.clock.now_s):
            self.model.close_evicted()
        self.tier.writer.publish(key, [blob[:64], blob[64:]], spool=self.spool if spool else None)
        self.model.entries[key] = File(key, blob, self.clock.now_s)
        if spool:
            self.model.spooled[key] = self.model.entries[key]
        kept = sum(len(file.blob) for file in self.model.kept())
        assert self.model.total_bytes() - kept <= BUDGET_BYTES

    @rule(key=keys)
    def confirm(self, key: Key) -> None:
        unspool(self.spool, key)
        self.model.spooled.pop(key, None)

    @rule(key=keys)
    def load(self, key: Key) -> None:
        file, loaded = self.model.spooled.get(key), self.spool.load(key.digest)
        assert (file is None) == (loaded is None)
        if file is not None and loaded is not None:
            assert (loaded.key, loaded.blob) == (key, file.blob)

    @rule(target=held, key=keys)
    def open(self, key: Key) -> object:
        file = self.model.entries.get(key)
        entry = self.tier.entries.open(key)
        if file is None:
            assert entry is None
            return multiple()
        if file.complaint not in (None, "checksum"):
            assert entry is None
            self.expect_dropped(key)
            return multiple()
        assert entry is not None
        held = Held(entry, file)
        self.model.held.append(held)
        if file.complaint:  # the reader's part
            self.drop_bad(key)
        else:
            self.residents.add(key.digest, entry)
            self.model.residents[key] = file
        return held

    @rule()
    def open_all(self) -> None:
        """Requests ask for everything, so all that is good is resident from now on."""
        for key in list(self.model.entries):
            held = self.open(key)
            if isinstance(held, Held):
                self.model.held.remove(held)

    @rule(target=held, key=keys)
    def grant(self, key: Key) -> object:
        """At once, whatever has become of the file's name since it was opened."""
        entry, file = self.residents.get(key.digest, time.monotonic()), self.model.residents
        assert (entry is not None) == (key in file)
        if entry is None:
            return multiple()
        self.model.held.append(Held(entry, file[key]))
        return self.model.held[-1]

    @rule(held=held)
    def read(self, held: Held) -> None:
        """As a worker does, in time or late; it notes the use."""
        assert os.pread(held.entry.fd, held.entry.nbytes + 1, 0) == held.file.blob
        touch(held.entry, self.clock)
        held.file.used_s = self.clock.now_s

    @rule(held=consumes(held), by_thread=st.booleans())
    def close(self, held: Held, by_thread: bool) -> None:
        """The last reference goes, here or in the thread."""
        self.model.held.remove(held)
        if by_thread:
            self.residents.release([held.entry])
        del held.entry

    @rule()
    def turn(self) -> None:
        """The thread looks for what was evicted or replaced, and closes what nobody needs."""
        for _ in range(2):  # what one has let go of the next one closes
            self.thread.turn()
        self.model.close_evicted()
        is_open = {held.entry.fd for held in self.model.held}
        for key in KEYS:
            entry = self.residents.get(key.digest, time.monotonic())
            assert (entry is not None) == (key in self.model.residents)
            is_open |= {entry.fd} if entry is not None else set()
        assert len(open_below(self.root / "v1" / "objects")) == len(is_open)

    @rule(key=keys)
    def evict(self, key: Key) -> None:
        evict(self.tier, key)
        self.model.entries.pop(key, None)

    @rule(incoming_bytes=st.integers(0, 2 * BUDGET_BYTES))
    def make_room(self, incoming_bytes: int) -> None:
        wanted = self.model.make_room(incoming_bytes, self.clock.now_s)
        assert wanted == make_room(
            self.tier,
            incoming_bytes,
            budget_bytes=BUDGET_BYTES,
            clock=self.clock,
            counters=self.counters,
        )

    @rule(target_bytes=st.integers(0, BUDGET_BYTES))
    def evict_by_hand(self, target_bytes: int) -> None:
        now_s = self.clock()
        freed = Inspection.open(self.root).evict_to(target_bytes, now_s=now_s)
        assert freed.before_bytes == self.model.total_bytes()
        assert freed.gone.nbytes == self.model.evict_to(target_bytes, now_s)
        assert running_total(self.tier) == freed.after_bytes == self.model.total_bytes()

    @rule()
    def recount(self) -> None:
        """After a walk the running total is exact."""
        self.make_room(0)
        assert running_total(self.tier) == self.model.total_bytes()

    @rule()
    def lose_the_total(self) -> None:
        (self.root / "v1" / "usage").unlink(missing_ok=True)
        self.recount()

    @rule(key=keys)
    def drop_bad(self, key: Key) -> None:
        self.tier.entries.drop_bad(key, "checksum")
        self.residents.discard(key.digest)
        self.model.residents.pop(key, None)
        self.expect_dropped(key)

    @rule()
    def restart(self) -> None:
        """What is open stays open: this process goes on."""
        self.tier.close()
        self.tier = self.new_tier()
        self.spool = self.tier.open_spool(DESTINATION)
        adopted = {one.digest for one in self.spool.adopt()}
        assert adopted == {key.digest for key in self.model.spooled}
        self.walk()

    @precondition(lambda self: self.model.entries)
    @rule(data=st.data(), damage=st.sampled_from(sorted(DAMAGES)))
    def corrupt(self, data: st.DataObject, damage: str) -> None:
        """Bad bytes under a good name; open files keep theirs (the disk is not to blame)."""
        key = data.draw(st.sampled_from(sorted(self.model.entries, key=lambda key: key.name)))
        file, path = self.model.entries[key], file_of(self.root, key)
        blob = DAMAGES[damage](file.blob) if file.blob else b"x"
        before, other = path.stat(), path.with_name("damaged")
        other.touch(mode=0o600)
        other.write_bytes(blob)
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(path)
        self.model.entries[key] = File(key, blob, file.used_s)
        self.make_room(0)  # a walk: no estimate knows of bytes that others bring

    @precondition(lambda self: self.model.entries)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.model.entries, key=lambda key: key.name)))
        file_of(self.root, key).unlink()
        del self.model.entries[key]

    @rule()
    def vanish_altogether(self) -> None:
        """All but the spool: without it there would be nothing to compare."""
        shutil.rmtree(self.root / "v1" / "objects", ignore_errors=True)
        self.model.entries.clear()

    @rule(seconds=st.sampled_from([-86400.0, -1.0, 0.5, 86400.0]))
    def clock_jumps(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @invariant()
    def open_bytes_are_readable_and_right(self) -> None:
        for held in self.model.held:
            assert held.entry.nbytes == len(held.file.blob)
            assert os.pread(held.entry.fd, held.entry.nbytes + 1, 0) == held.file.blob

    @invariant()
    def what_is_there_is_what_should_be(self) -> None:
        usage, model = usage_of(self.tier), self.model
        spooled = model.spooled.values()
        assert set(self.tier.entries.names()) == {key.name for key in model.entries}
        assert [self.tier.entries.contains(key) for key in KEYS] == [
            key in model.entries for key in KEYS
        ]
        assert len(usage.entries) == len(model.entries)
        assert usage.entry_bytes == sum(len(file.blob) for file in model.entries.values())
        assert usage.spooled_bytes == sum(len(file.blob) for file in spooled)
        assert self.spool.nbytes == usage.spooled_bytes
        held = model.kept() - {*model.entries.values()}
        assert usage.held_bytes == sum(len(file.blob) for file in held)
        assert usage.total_bytes == model.total_bytes()

    @invariant()
    def report_tells_what_is_evicted_and_open(self) -> None:
        report = Inspection.open(self.root).report(now_s=self.clock.now_s)
        named = {id(file) for file in self.model.files()}
        mine = {held.file for held in self.model.held} | {*self.model.residents.values()}
        lost = sum(len(file.blob) for file in mine if id(file) not in named)
        # Until the next turn files are open that nobody needs.
        assert report.open_nbytes >= lost

    @invariant()
    def estimate_is_never_too_low(self) -> None:
        assert running_total(self.tier) >= usage_of(self.tier).total_bytes

    @invariant()
    def check_complains_about_what_is_bad_and_nothing_else(self) -> None:
        complaints = audit_of(self.tier)
        bad = [key for key, file in self.model.entries.items() if file.complaint]
        assert len(complaints) == len(bad), complaints
        for key in bad:
            assert any(key.name in complaint for complaint in complaints)

    @invariant()
    def nothing_failed_in_secret(self) -> None:
        assert self.counters.get("tier.errors") == 0
        assert self.counters.get("tier.bad_files") == self.dropped


TestTierModel = pytest.mark.slow(TierMachine.TestCase)
TestTierModel.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
