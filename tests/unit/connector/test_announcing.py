# SPDX-License-Identifier: Apache-2.0
"""What stays in the spool until readers of the corpus can know of it, and what never waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3ec.index.manifest import Ulids
from s3ec.index.rows import EntryInfo, Rows, Tombstone
from s3ec.index.segment import encode_segment, parse_segment

from s3ec import codec
from s3ec.codec import Header, Shape
from s3ec.connector import uploads
from s3ec.connector.uploads import Upload, Uploader
from s3ec.errors import AccessError, UnavailableError
from s3ec.identity import Key
from s3ec.modality import SETTLED_S
from s3ec.testing.fault_store import Fault, Gate
from tests.support.clock import Clock
from tests.support.on_disk import audit_of
from tests.support.waiting import DEADLINE_S, eventually
from tests.unit.connector.processes import Process
from tests.unit.tier.cases import key_of

_NEVER_S = 3600.0
ROWS, WIDTH = 4, 8
DELTA = "manifest/delta/"


@pytest.fixture(autouse=True)
def _only_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No delta goes out because time has passed."""
    monkeypatch.setattr(uploads, "ANNOUNCE_S", _NEVER_S)


def key_at(number: int) -> Key:
    return key_of(f"{number:064x}")


class Rig(Process):
    """One process that uploads."""

    def __init__(
        self, folder: Path, *faults: Fault, clock: Callable[[], float] = time.time, **more: Any
    ) -> None:
        super().__init__(folder, *faults, clock=clock, **more)
        self.clock = clock
        self.spool = self.node.tier.open_spool(self.node.destination)
        self.ended: dict[str, bool] = {}
        self.announced = threading.Event()
        node = self.node
        self.uploader = Uploader(
            *(node.loop, node.sources, node.counters, node.namespace, node.index),
            self.spool,
            cache_bytes=int(node.settings.cache_bytes),
            max_concurrency=node.settings.max_concurrency,
            inflight_bytes=2**20,
            ended=self._end,
            announced=self.announced.set,
            clock=clock,
        )

    def _end(self, upload: Upload, stored: bool) -> None:
        if upload.key is not None:
            self.ended[upload.key.identifier] = stored

    def save(self, *numbers: int, spooled: bool = True, width: int = WIDTH) -> None:
        """Upload, and wait until the bucket has answered."""
        self.begin_to_save(*numbers, spooled=spooled, width=width)
        eventually(lambda: all(key_at(number).identifier in self.ended for number in numbers))

    def begin_to_save(self, *numbers: int, spooled: bool = True, width: int = WIDTH) -> None:
        for number in numbers:
            key, header, pieces = self._entry(number, width)
            if spooled:
                held = self.node.tier.writer.publish(key, pieces, spool=self.spool)
                nbytes = sum(map(len, pieces))
                self.uploader.submit(Upload(key.digest, nbytes, key, spooled=held))
            else:
                self.uploader.submit(Upload(key.digest, 0, key, (header, pieces)))

    def _entry(self, number: int, width: int) -> tuple[Key, Header, list[bytes]]:
        key = key_at(number)
        data = bytes([number, 0x3F]) * (ROWS * width)
        header = Header(
            identifier=key.identifier,
            namespace=self.node.namespace.name,
            modality="image",
            shape=Shape(ROWS, width, "bfloat16"),
            checksum=codec.checksum(data),
        )
        return key, header, [codec.encode_header(header), data]

    def flush(self) -> None:
        """Announce what waits, and wait for it."""
        self.uploader.flush()
        eventually(lambda: self.uploader.unannounced == 0)

    def delete(self, number: int) -> str:
        """Announce a deletion of now; the delta's name."""
        layout, now_s = self.node.layout, self.clock()
        rows = Rows.from_facts([(key_at(number).digest, Tombstone(int(now_s)))])
        name = layout.delta(Ulids().next(now_s))
        self.bucket.objects[name] = b"".join(map(bytes, encode_segment(rows, layout.namespace)))
        self.bucket.modified_s[name] = now_s
        return name

    def told(self) -> dict[bytes, EntryInfo]:
        """What the deltas say, each key once."""
        told: dict[bytes, EntryInfo] = {}
        layout = self.node.layout
        for name, blob in list(self.bucket.objects.items()):
            if layout.delta_of(name) is not None:
                rows = parse_segment(blob, layout.namespace)
                for row in range(len(rows)):
                    assert rows.digest(row) not in told
                    told[rows.digest(row)] = rows.facts(row)
        return told

    def close(self) -> None:
        self.uploader.stop()
        super().close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    assert audit_of(rig.node.tier) == []
    assert rig.counted("internal_errors") == 0
    rig.close()


def digests(*numbers: int) -> set[bytes]:
    return {key_at(number).digest for number in numbers}


def test_entry_stays_in_the_spool_until_its_announcement_is_confirmed(rig: Rig) -> None:
    gate = Gate()
    rig.faults.append(Fault(op="put_if_absent", name=DELTA, gate=gate))
    rig.save(1, 2)
    assert rig.ended == {key_at(1).identifier: True, key_at(2).identifier: True}
    assert rig.node.index.maybe_contains(key_at(1))  # this process need not wait
    assert (rig.spooled(), rig.uploader.unannounced) == (2, 2)
    rig.uploader.flush()
    assert gate.reached.wait(DEADLINE_S)
    assert (rig.spooled(), rig.uploader.unannounced) == (2, 2)
    assert not rig.announced.is_set()
    gate.release()
    assert rig.announced.wait(DEADLINE_S)
    assert (rig.spooled(), rig.uploader.unannounced) == (0, 0)
    assert rig.told().keys() == digests(1, 2)
    assert rig.counted("announced") == 2


def test_confirmed_announcement_leaves_a_later_save_of_the_entry_in_the_spool(rig: Rig) -> None:
    """Its object was deleted in between: the later save may be the only copy."""
    announcing, storing = Gate(), Gate()
    rig.faults.append(Fault(op="put_if_absent", name=DELTA, gate=announcing))
    rig.save(1)
    rig.uploader.flush()
    assert announcing.reached.wait(DEADLINE_S)
    name = rig.node.layout.object(key_at(1))
    del rig.bucket.objects[name]
    rig.ended.clear()
    rig.faults.append(Fault(op="put_if_absent", name=name, gate=storing))
    rig.begin_to_save(1)
    assert storing.reached.wait(DEADLINE_S)
    announcing.release()
    assert rig.announced.wait(DEADLINE_S)
    assert rig.spooled() == 1
    storing.release()
    eventually(lambda: key_at(1).identifier in rig.ended)
    rig.faults.clear()
    rig.flush()
    assert rig.spooled() == 0
    assert name in rig.bucket.objects


def test_announcement_says_what_was_stored(rig: Rig) -> None:
    rig.save(1)
    rig.flush()
    blob = rig.bucket.objects[rig.node.layout.object(key_at(1))]
    header = codec.verify(blob, namespace=rig.node.namespace.name, identifier=key_at(1).identifier)
    (facts,) = rig.told().values()
    assert abs(facts.time_s - time.time()) < 3600
    assert facts == EntryInfo(
        len(blob), ROWS, WIDTH, "bfloat16", int(header.checksum[:8], 16), facts.time_s
    )


def gated(folder: Path, clock: Clock, writing: Gate, looking: Gate) -> Rig:
    """A process whose writes, and looks at what was written, wait for these."""
    return Rig(
        folder,
        Fault(op="put_if_absent", name="/objects/", gate=writing),
        Fault(op="head", name="/objects/", gate=looking),
        clock=clock,
    )


@pytest.mark.parametrize("is_deleted_first", [False, True])
def test_of_a_slow_write_and_a_deletion_the_later_one_counts(
    tmp_path: Path, is_deleted_first: bool
) -> None:
    """Its answer may be on its way for long, and so may the request."""
    clock, writing, looking = Clock(), Gate(), Gate()
    rig = gated(tmp_path, clock, writing, looking)
    asked_s, name = int(clock.now_s), rig.node.layout.object(key_at(1))
    rig.begin_to_save(1)
    assert writing.reached.wait(DEADLINE_S)
    clock.now_s += 100
    deletion = rig.delete(1)
    rig.node.loop.run(rig.node.index.refresh(), DEADLINE_S)
    clock.now_s += 5
    writing.release()
    assert looking.reached.wait(DEADLINE_S)
    if not is_deleted_first:
        rig.bucket.modified_s[name] = asked_s
    looking.release()
    eventually(lambda: key_at(1).identifier in rig.ended)
    rig.flush()
    del rig.bucket.objects[deletion]
    told_s = rig.told()[key_at(1).digest].time_s
    assert told_s > asked_s + 100 if is_deleted_first else told_s <= asked_s
    rig.close()


def test_slow_write_whose_object_was_deleted_meanwhile_is_repeated(tmp_path: Path) -> None:
    clock, writing, looking = Clock(), Gate(), Gate()
    rig = gated(tmp_path, clock, writing, looking)
    name = rig.node.layout.object(key_at(1))
    rig.begin_to_save(1)
    assert writing.reached.wait(DEADLINE_S)
    clock.now_s += 100
    writing.release()
    assert looking.reached.wait(DEADLINE_S)
    del rig.bucket.objects[name]
    looking.release()
    eventually(lambda: key_at(1).identifier in rig.ended)
    assert name in rig.bucket.objects
    rig.close()


def test_slow_write_is_not_sent_again_where_nobody_says_when_it_was(tmp_path: Path) -> None:
    clock, writing = Clock(), Gate()
    rig = Rig(
        tmp_path,
        Fault(op="put_if_absent", name="/objects/", gate=writing, times=1),
        Fault(op="head", name="/objects/", error=UnavailableError, times=3),
        clock=clock,
    )
    again = Fault(op="put_if_absent", name="/objects/")
    rig.faults.append(again)
    rig.begin_to_save(1)
    assert writing.reached.wait(DEADLINE_S)
    clock.now_s += 3
    writing.release()
    eventually(lambda: key_at(1).identifier in rig.ended)
    assert again.struck == 0
    assert rig.ended == {key_at(1).identifier: True}
    assert rig.node.index.maybe_contains(key_at(1))
    rig.close()


def test_announcement_is_dated_before_the_object_was_sent(tmp_path: Path) -> None:
    """Whoever deletes it while the answer is on its way does so later."""
    clock, gate = Clock(), Gate()
    rig = Rig(tmp_path, Fault(op="put_if_absent", name="/objects/", gate=gate), clock=clock)
    asked_s = int(clock.now_s)
    rig.begin_to_save(1)
    assert gate.reached.wait(DEADLINE_S)
    clock.now_s += 2
    gate.release()
    eventually(lambda: key_at(1).identifier in rig.ended)
    rig.flush()
    assert rig.told()[key_at(1).digest].time_s == asked_s
    rig.close()


def test_object_that_was_there_is_announced_with_its_own_time(tmp_path: Path) -> None:
    """So it does not come back for readers when a deletion is under way."""
    clock = Clock()
    rig = Rig(tmp_path, clock=clock)
    stored_s = int(clock.now_s)
    rig.bucket.objects[rig.node.layout.object(key_at(1))] = b"entry"
    rig.bucket.modified_s[rig.node.layout.object(key_at(1))] = clock.now_s
    clock.now_s += 100
    rig.save(1)
    rig.flush()
    assert rig.counted("save.existed") == 1
    assert rig.told()[key_at(1).digest].time_s == stored_s
    rig.close()


def test_object_that_was_there_and_is_gone_is_stored(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    name = rig.node.layout.object(key_at(1))
    gate = Gate()
    rig.faults.append(Fault(op="head", name="/objects/", gate=gate, times=1))
    rig.bucket.objects[name] = b"entry"
    rig.bucket.modified_s[name] = time.time()
    rig.begin_to_save(1)
    assert gate.reached.wait(DEADLINE_S)
    del rig.bucket.objects[name]
    gate.release()
    eventually(lambda: key_at(1).identifier in rig.ended)
    assert rig.ended == {key_at(1).identifier: True}
    assert name in rig.bucket.objects
    rig.close()


def test_object_that_was_there_and_may_not_be_read_is_announced(tmp_path: Path) -> None:
    first = Rig(tmp_path)
    first.save(1)
    first.close()
    denied = Fault(op="head", name="/objects/", error=AccessError)
    rig = Rig(tmp_path / "other", denied, shared=first.bucket)
    rig.save(1)
    rig.flush()
    assert rig.told().keys() == digests(1)
    rig.close()


def test_what_the_disk_refused_is_announced_all_the_same(rig: Rig) -> None:
    rig.save(1, spooled=False)
    rig.flush()
    assert rig.told().keys() == digests(1)


def test_object_that_was_there_is_announced_without_a_checksum_of_ours(
    rig: Rig, tmp_path: Path
) -> None:
    """Whoever stored it may have ended before its announcement."""
    other = Rig(tmp_path / "other", shared=rig.bucket)
    other.save(1)
    other.close()
    rig.node.index.mark_missing(key_at(1))
    rig.save(1)
    assert rig.counted("save.existed") == 1
    assert not rig.node.index.maybe_contains(key_at(1))  # it may be what was found bad
    rig.flush()
    (facts,) = rig.told().values()
    assert (facts.rows, facts.width, facts.dtype, facts.checksum) == (ROWS, WIDTH, "bfloat16", 0)
    assert rig.spooled() == 0


def test_another_process_finds_what_was_announced(rig: Rig, tmp_path: Path) -> None:
    other = Rig(tmp_path / "other", shared=rig.bucket)
    other.node.loop.run(other.node.index.refresh(), DEADLINE_S)
    rig.save(1, 2)
    rig.flush()
    other.node.loop.run(other.node.index.refresh(), DEADLINE_S)
    assert [other.node.index.holds(key_at(number)) for number in (1, 2, 3)] == [True, True, False]
    assert other.node.index.facts(key_at(1)) == rig.told()[key_at(1).digest]
    other.close()


def test_object_that_the_index_holds_already_is_not_announced_again(
    rig: Rig, tmp_path: Path
) -> None:
    """Also where it was found bad: told anew, every reader would believe in it again."""
    other = Rig(tmp_path / "other", shared=rig.bucket)
    other.save(1)
    other.flush()
    other.close()
    rig.node.loop.run(rig.node.index.refresh(), DEADLINE_S)
    rig.node.index.mark_missing(key_at(1))
    rig.save(1)
    assert rig.counted("save.existed") == 1
    assert rig.uploader.unannounced == 0
    assert rig.spooled() == 0
    rig.flush()
    assert rig.told().keys() == digests(1)


def test_key_whose_first_announcement_is_under_way_stays_in_the_spool(rig: Rig) -> None:
    """This process's own index knows of it, and other readers do not."""
    rig.save(1)
    rig.ended.clear()
    rig.save(1)
    assert rig.counted("save.existed") == 1
    assert rig.spooled() == 1
    rig.flush()
    assert rig.told().keys() == digests(1)
    assert rig.spooled() == 0


def test_what_was_deleted_and_saved_again_is_told_later_than_its_deletion(
    rig: Rig, tmp_path: Path
) -> None:
    rig.save(1)
    rig.flush()
    ahead_s = int(time.time()) + 1000
    tombstone = Rows.from_facts([(key_at(1).digest, Tombstone(ahead_s))])
    layout = rig.node.layout
    body = b"".join(map(bytes, encode_segment(tombstone, layout.namespace)))
    del rig.bucket.objects[layout.object(key_at(1))]
    del rig.bucket.modified_s[layout.object(key_at(1))]
    rig.bucket.objects[layout.delta(Ulids().next(time.time() + 1))] = body
    rig.node.loop.run(rig.node.index.refresh(), DEADLINE_S)
    assert not rig.node.index.maybe_contains(key_at(1))

    rig.ended.clear()
    rig.save(1)
    rig.flush()
    other = Rig(tmp_path / "other", shared=rig.bucket)
    other.node.loop.run(other.node.index.refresh(), DEADLINE_S)
    facts = other.node.index.facts(key_at(1))
    assert facts is not None
    assert facts.time_s == ahead_s + 1
    other.close()


def test_descriptor_that_was_deleted_under_a_writer_is_written_again(tmp_path: Path) -> None:
    clock = Clock()
    rig = Rig(tmp_path, clock=clock)
    rig.save(1)
    del rig.bucket.objects[rig.node.layout.descriptor]
    rig.save(2)
    assert rig.node.layout.descriptor not in rig.bucket.objects  # not asked for with each save
    clock.now_s += SETTLED_S
    rig.save(3)
    assert rig.node.layout.descriptor in rig.bucket.objects
    rig.close()


def test_what_may_never_be_stored_is_not_announced(rig: Rig) -> None:
    rig.save(1)
    rig.save(2, width=2 * WIDTH)
    assert rig.counted("save_problem.record") == 1
    rig.flush()
    assert rig.told().keys() == digests(1)
    assert rig.spooled() == 0


def test_next_process_announces_what_the_last_one_uploaded(tmp_path: Path) -> None:
    first = Rig(tmp_path)
    first.save(1, 2, 3)
    first.close()
    assert first.spooled() == 3
    assert first.told() == {}

    second = Rig(tmp_path, shared=first.bucket)
    second.uploader.start_adopting()
    eventually(lambda: second.uploader.unannounced == 3)
    assert second.counted("save.existed") == 3
    assert second.spooled() == 3
    second.flush()
    assert second.told().keys() == digests(1, 2, 3)
    assert second.spooled() == 0
    assert audit_of(second.node.tier) == []
    second.close()


def test_announcements_that_fail_do_not_hold_uploads_up_nor_fill_the_disk(tmp_path: Path) -> None:
    denied = Fault(op="put_if_absent", name=DELTA, error=AccessError)
    nbytes = 512 + 2 * ROWS * WIDTH
    rig = Rig(tmp_path, denied, cache_bytes=4 * nbytes * uploads.KEPT_SHARE)
    rig.save(*range(40))
    assert all(rig.ended.values())
    eventually(lambda: rig.spooled() <= 4)  # the last ones are being unlinked
    eventually(lambda: rig.counted("announce_failed") > 0)
    assert rig.uploader.unannounced == 40
    assert rig.spooled() > 0
    rig.faults.clear()
    rig.flush()
    assert rig.told().keys() == digests(*range(40))
    assert rig.spooled() == 0
    assert rig.counted("announce_dropped") == 0
    assert audit_of(rig.node.tier) == []
    rig.close()


def test_spool_that_fills_with_what_waits_is_announced_early(tmp_path: Path) -> None:
    nbytes = 512 + 2 * ROWS * WIDTH
    rig = Rig(tmp_path, cache_bytes=4 * nbytes * uploads.KEPT_SHARE)
    rig.save(1, 2)
    assert rig.told() == {}
    rig.save(3)
    eventually(lambda: rig.uploader.unannounced == 0)
    assert rig.told().keys() == digests(1, 2, 3)
    rig.close()


def test_what_is_given_up_stays_in_the_spool_or_is_counted(tmp_path: Path) -> None:
    rig = Rig(tmp_path, Fault(op="put_if_absent", name=DELTA, error=UnavailableError))
    rig.save(1, 2)
    rig.save(3, spooled=False)
    rig.uploader.stop()
    eventually(lambda: rig.uploader.unannounced == 0)
    assert rig.spooled() == 2
    assert rig.counted("announce_dropped") == 1
    rig.close()
    assert rig.told() == {}


def test_many_confirmed_at_once_are_all_removed(rig: Rig) -> None:
    rig.save(*range(2 * uploads.REMOVED_AT_ONCE + 1))
    rig.flush()
    assert rig.spooled() == 0
    assert len(rig.told()) == 2 * uploads.REMOVED_AT_ONCE + 1
