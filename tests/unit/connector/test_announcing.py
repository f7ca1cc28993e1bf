# SPDX-License-Identifier: Apache-2.0
"""What stays in the spool until readers of the corpus can know of it, and what never waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from s3ec import codec
from s3ec.codec import Header, Shape
from s3ec.connector import uploads
from s3ec.connector.uploads import Upload, Uploader
from s3ec.errors import AccessError, UnavailableError
from s3ec.identity import Key
from s3ec.index.deltas import parse_delta
from s3ec.index.names import deltas_prefix
from s3ec.index.snapshot import Segment
from s3ec.modality import SETTLED_S
from s3ec.testing.fault_store import Fault, Gate
from tests.support.clock import Clock
from tests.support.indexes import delta_name, sizes_in
from tests.support.on_disk import audit_of
from tests.support.waiting import DEADLINE_S, eventually
from tests.unit.connector.processes import Process
from tests.unit.tier.cases import key_of

_NEVER_S = 3600.0
ROWS, WIDTH = 4, 8
DELTA = "manifest/v2/delta/"


@pytest.fixture(autouse=True)
def _only_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No delta goes out because time has passed."""
    monkeypatch.setattr(uploads, "PAUSE_S", _NEVER_S)


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
            node,
            self.spool,
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

    def told(self) -> dict[bytes, int]:
        """Digests and sizes that the deltas say, each key once."""
        told: dict[bytes, int] = {}
        layout = self.node.layout
        for name, blob in list(self.bucket.objects.items()):
            if name.startswith(deltas_prefix(layout)):
                sizes = sizes_in(Segment.of(parse_delta(blob, layout, name)))
                assert not sizes.keys() & told.keys()
                told |= sizes
        return told

    def refresh(self) -> None:
        self.node.loop.run(self.node.index.refresh(now=True), DEADLINE_S)

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


def test_object_that_was_there_is_announced_and_not_believed_before(
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
    assert rig.told().keys() == digests(1)
    assert rig.spooled() == 0


def test_another_process_finds_what_was_announced(rig: Rig, tmp_path: Path) -> None:
    other = Rig(tmp_path / "other", shared=rig.bucket)
    other.refresh()
    rig.save(1, 2)
    rig.flush()
    other.refresh()
    held = [other.node.index.maybe_contains(key_at(number)) for number in (1, 2, 3)]
    assert held == [True, True, False]
    assert other.node.index.nbytes(key_at(1)) == rig.told()[key_at(1).digest]
    other.close()


def test_object_that_the_index_holds_already_is_not_announced_again(
    rig: Rig, tmp_path: Path
) -> None:
    other = Rig(tmp_path / "other", shared=rig.bucket)
    other.save(1)
    other.flush()
    other.close()
    rig.refresh()
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


def test_what_was_deleted_and_saved_again_is_believed_by_who_found_it_gone(
    rig: Rig, tmp_path: Path
) -> None:
    other = Rig(tmp_path / "other", shared=rig.bucket)
    rig.save(1)
    rig.flush()
    first = rig.told()
    [delta] = [name for name in rig.bucket.objects if DELTA in name]
    earlier = delta_name(rig.node.layout, ago_s=10)
    rig.bucket.objects[earlier] = rig.bucket.objects.pop(delta)
    for reader in (rig, other):
        reader.refresh()
        reader.node.index.mark_missing(key_at(1), absent=True)
        assert not reader.node.index.maybe_contains(key_at(1))
    del rig.bucket.objects[earlier]
    del rig.bucket.objects[rig.node.layout.object(key_at(1))]
    rig.ended.clear()
    rig.save(1)
    assert rig.node.index.maybe_contains(key_at(1))
    rig.flush()
    assert rig.told() == first
    other.refresh()
    assert other.node.index.maybe_contains(key_at(1))
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
    eventually(lambda: second.uploader.unannounced == 3)
    assert second.counted("save.existed") == 3
    assert second.spooled() == 3
    second.flush()
    assert second.told().keys() == digests(1, 2, 3)
    assert second.spooled() == 0
    assert audit_of(second.node.tier) == []
    second.close()


def test_announcements_that_fail_do_not_hold_uploads_up_and_nothing_leaves_the_spool(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, Fault(op="put_if_absent", name=DELTA, error=AccessError))
    rig.save(*range(40))
    assert all(rig.ended.values())
    rig.uploader.flush()
    eventually(lambda: rig.counted("announce_failed") > 0)
    assert rig.uploader.unannounced == 40
    assert rig.spooled() == 40
    rig.faults.clear()
    rig.flush()
    assert rig.told().keys() == digests(*range(40))
    assert rig.spooled() == 0
    assert rig.counted("announce_dropped") == 0
    assert audit_of(rig.node.tier) == []
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
