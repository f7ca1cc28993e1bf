# SPDX-License-Identifier: Apache-2.0
"""The loader: several files at a time, in whichever thread, through any staging."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from s3ec.codec import Header, Shape
from s3ec.connector.messages import Load
from s3ec.errors import CorruptEntryError, UnavailableError
from s3ec.node import Node
from s3ec.testing.fault_store import Fault, Gate
from tests.support.waiting import DEADLINE_S, eventually
from tests.unit.connector.processes import HASHES, Process
from tests.unit.tier.cases import key_of

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
loading = pytest.importorskip("s3ec.connector.loads")
reading = pytest.importorskip("s3ec.connector.loads")
host_pool = pytest.importorskip("s3ec.connector.staging")
staging = pytest.importorskip("s3ec.connector.staging")
accelerators = pytest.importorskip("tests.unit.connector.accelerators")

SMALLEST = 64 * 1024


def tensor(seed: int) -> torch.Tensor:
    return torch.full((4, 8), float(seed), dtype=torch.bfloat16)


class Bench(Process):
    def load(self, number: int) -> Load:
        return self.granted(HASHES[number], tensor(number))

    def loads(self, count: int) -> list[Load]:
        return [self.load(number) for number in range(count)]

    def only_in_the_bucket(self, load: Load, number: int) -> None:
        blob = self.entry(load.identifier, tensor(number))
        self.bucket.objects[self.object_name(load.identifier)] = blob
        self.lose(load)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries count as large: readers are worth it."""
    monkeypatch.setattr(loading, "READERS_FROM_BYTES", 0)


@pytest.fixture(params=["small", "large"])
def any_size(request: pytest.FixtureRequest) -> None:
    if request.param == "large":
        request.getfixturevalue("large")


@pytest.fixture
def in_memory(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a page that the kernel let go of meanwhile would be another thread's to read."""
    monkeypatch.setattr(bench.node.tier, "is_in_memory", True)


class Watched(staging.HostStaging):
    """Notes which threads read; they meet where the test wants them to."""

    def __init__(self, meeting: threading.Barrier | None = None) -> None:
        super().__init__()
        self.threads: list[str] = []
        self.meeting = meeting

    def take(self, shape: Shape) -> host_pool.Buffer:
        self.threads.append(threading.current_thread().name)
        if self.meeting is not None:
            self.meeting.wait(DEADLINE_S)
        return super().take(shape)


def loader_on(node: Node, make_staging: Callable[[], Any], **more: Any) -> loading.Loader:
    return loading.Loader(node, make_staging, **more)


def check(outcomes: list[torch.Tensor | Exception], count: int) -> None:
    assert len(outcomes) == count
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, torch.Tensor), outcome
        assert torch.equal(outcome, tensor(number))


@pytest.mark.usefixtures("in_memory")
def test_small_ones_that_are_in_memory_are_read_by_the_calling_thread(bench: Bench) -> None:
    watched = Watched()
    loader = loader_on(bench.node, lambda: watched)
    check(loader.load(bench.loads(5)), 5)
    assert watched.threads == [threading.current_thread().name] * 5


def test_small_ones_that_a_disk_would_have_to_bring_are_a_readers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, mine = loading.read_data, threading.current_thread()
    readers: set[threading.Thread] = set()

    def cold(load: Load, memory: torch.Tensor, *, hashed: bool = True, wait: bool = True) -> None:
        if not wait:
            raise BlockingIOError
        readers.add(threading.current_thread())
        read(load, memory, hashed=hashed)

    monkeypatch.setattr(loading, "read_data", cold)
    loader = loader_on(bench.node, staging.HostStaging)
    check(loader.load(bench.loads(5)), 5)
    assert readers
    assert mine not in readers
    loader.close()


@pytest.mark.usefixtures("large")
def test_the_calling_thread_reads_what_no_reader_can_be_started_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its loads the engine would end."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    watched = Watched()
    loader = loader_on(bench.node, lambda: watched)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        check(loader.load(bench.loads(2)), 2)
    assert watched.threads == [threading.current_thread().name] * 2
    check(loader.load(bench.loads(2)), 2)
    assert len(watched.threads) == 4  # what was refused is not read later


@pytest.mark.usefixtures("any_size")
def test_failures_stay_with_their_loads(bench: Bench) -> None:
    loads = bench.loads(8)
    bench.lose(loads[3])
    bench.only_in_the_bucket(loads[6], 6)
    loader = loader_on(bench.node, staging.HostStaging)
    outcomes = loader.load(loads)
    assert [isinstance(outcome, RuntimeError) for outcome in outcomes] == [
        number == 3 for number in range(8)
    ]
    assert loads[3].path in str(outcomes[3])
    outcomes[3] = tensor(3)
    check(outcomes, 8)
    loader.close()


# A disk that takes its time


class SlowDisk:
    """Reads nothing that it is not told to; hours of it pass in no time.

    Attributes:
        now_s: The engine's clock.
        deliveries_s: When it delivers one load each, on that clock; later never.
        reading: Where the memory is that readers are about to fill.
        before_answers: Called before the bucket's answers are waited for.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *deliveries_s: float) -> None:
        self.now_s = 0.0
        self.deliveries_s = list(deliveries_s)
        self.reading: set[int] = set()
        self.before_answers: Callable[[], object] = lambda: None
        self._allowed = threading.Semaphore(0)
        self._read = reading.read_data
        self._outcomes: list[Future[Any]] = []
        monkeypatch.setattr(reading, "read_data", self._read_slowly)
        disk = self

        class Readers(loading.DaemonPool):
            def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
                disk._outcomes.append(super().submit(*args, **kwargs))
                return disk._outcomes[-1]

        monkeypatch.setattr(loading, "DaemonPool", Readers)

    def _read_slowly(
        self, load: Load, memory: torch.Tensor, *, hashed: bool = True, wait: bool = True
    ) -> None:
        if not wait:
            raise BlockingIOError
        self.reading.add(memory.data_ptr())
        self._allowed.acquire()
        self.reading.remove(memory.data_ptr())
        self._read(load, memory, hashed=hashed)

    def loader(self, bench: Bench, make_staging: Callable[[], Any] = staging.HostStaging) -> Any:
        return loader_on(bench.node, make_staging, clock=self.clock, wait_for_any=self.wait_for_any)

    def clock(self) -> float:
        return self.now_s

    def wait_for_any(self, outcomes: Collection[Future[Any]], timeout_s: float) -> None:
        until_s = self.now_s + max(0.0, timeout_s)
        answers = [one for one in outcomes if one not in self._outcomes]
        if answers:  # the bucket's, which come at once
            self.before_answers()
            assert not wait(answers, DEADLINE_S).not_done
            return
        if not self.deliveries_s or self.deliveries_s[0] > until_s:
            self.now_s = until_s
            return
        self.now_s = self.deliveries_s.pop(0)
        self._allowed.release()
        assert wait(outcomes, DEADLINE_S, FIRST_COMPLETED).done

    def deliver_all(self) -> None:
        """For the readers that nobody waits for any more."""
        self._allowed.release(100)


def test_a_disk_that_delivers_something_in_time_is_waited_for_to_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch, *(4.0 * (number + 1) for number in range(12)))
    loader = disk.loader(bench)
    check(loader.load(bench.loads(12)), 12)
    assert disk.now_s == 48.0
    assert bench.counted("load.hung") == 0
    loader.close()


def test_a_disk_that_pauses_while_the_bucket_is_down_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch, 30.0, 85.0, 86.0)
    bench.faults.append(Fault(error=UnavailableError))
    loader = disk.loader(bench)
    check(loader.load(bench.loads(3)), 3)
    assert bench.faults[0].struck >= 1
    assert bench.counted("load.rescued") == 0
    loader.close()


def test_a_reader_is_given_up_once_the_bucket_has_delivered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch, 4.0)
    loads = bench.loads(3)
    for number, load in enumerate(loads):
        blob = bench.entry(load.identifier, tensor(number))
        bench.bucket.objects[bench.object_name(load.identifier)] = blob
    device = staging.AcceleratorStaging(accelerators.FakeAccelerator())
    loader = disk.loader(bench, lambda: device)
    disk.before_answers = lambda: eventually(lambda: bool(disk.reading))
    check(loader.load(loads), 3)
    assert disk.now_s == 9.0
    assert bench.counted("load.hung") == bench.counted("load.rescued") == 2
    # The disk may write to their buffers yet, so nobody else gets them.
    taken = {device.take(load.shape).memory.data_ptr() for load in loads}
    assert disk.reading
    assert taken.isdisjoint(disk.reading)
    disk.deliver_all()
    loader.close()


def test_a_bucket_that_takes_its_time_for_a_bad_file_does_not_make_the_disk_hang(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, gate = [0.0], Gate()

    def wait_for_any(outcomes: Collection[Future[Any]], timeout_s: float) -> None:
        if timeout_s > loading.PATIENCE_S:  # the disk has answered
            assert gate.reached.wait(DEADLINE_S)
            if not now_s[0]:
                now_s[0] += loading.PATIENCE_S
                return
            gate.release()
        assert wait(outcomes, DEADLINE_S, FIRST_COMPLETED).done

    load = bench.load(0)
    bench.only_in_the_bucket(load, 0)
    disk = SlowDisk(monkeypatch)
    disk.deliver_all()
    bench.faults.append(Fault(op="get", gate=gate))
    loader = loader_on(
        bench.node, staging.HostStaging, clock=lambda: now_s[0], wait_for_any=wait_for_any
    )
    check(loader.load([load]), 1)
    assert now_s[0] == loading.PATIENCE_S
    assert bench.counted("load.hung") == 0
    assert bench.counted("load.rescued") == bench.faults[0].struck == 1
    loader.close()


def test_where_the_disk_fails_late_the_bucket_is_asked_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        bench.faults.clear()  # the bucket is back as well
        raise OSError("an error of the disk")

    monkeypatch.setattr(reading, "read_data", fail)
    disk = SlowDisk(monkeypatch, 30.0)
    bench.faults.append(Fault(error=UnavailableError))
    load = bench.load(0)
    bench.only_in_the_bucket(load, 0)
    loader = disk.loader(bench)
    check(loader.load([load]), 1)
    assert disk.now_s == 30.0
    assert bench.counted("load.rescued") == 1
    loader.close()


def test_where_neither_disk_nor_bucket_deliver_loads_fail_after_a_minute(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch, 3.0)
    bench.faults.append(Fault(error=UnavailableError))
    loader = disk.loader(bench)
    loads = bench.loads(3)
    outcomes = loader.load(loads)
    failed = [one for one in zip(loads, outcomes, strict=True) if isinstance(one[1], Exception)]
    assert disk.now_s == 63.0
    assert len(failed) == bench.counted("load.hung") == 2
    for load, outcome in failed:
        assert isinstance(outcome, RuntimeError)
        assert load.path in str(outcome)
    disk.deliver_all()
    loader.close()


# Through a device with streams


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("buffers", [1, 2, 8])
def test_accelerator_gets_all_through_few_buffers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, buffers: int
) -> None:
    monkeypatch.setattr(host_pool, "PATIENCE_S", 60.0)
    fake = accelerators.FakeAccelerator()
    device = staging.AcceleratorStaging(fake, load_buffer_bytes=buffers * SMALLEST)
    loader = loader_on(bench.node, lambda: device)
    loads = bench.loads(len(HASHES))
    bench.only_in_the_bucket(loads[5], 5)
    check(loader.load(loads), len(HASHES))
    assert accelerators.is_all_idle(device.loads)
    assert device.loads.held_bytes <= buffers * SMALLEST
    assert fake.log.count("computing waits") == 1
    loader.close()


@pytest.mark.usefixtures("any_size")
def test_buffer_comes_back_from_a_load_that_failed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "PATIENCE_S", 60.0)
    fake = accelerators.FakeAccelerator()
    device = staging.AcceleratorStaging(fake, load_buffer_bytes=SMALLEST)
    loader = loader_on(bench.node, lambda: device)
    loads = bench.loads(3)
    bench.lose(loads[1])
    for _ in range(3):
        outcomes = loader.load(loads)
        assert isinstance(outcomes[1], RuntimeError)
    fake.fail_next = "copy"
    failed = [one for one in loader.load(loads) if isinstance(one, Exception)]
    assert len(failed) == 2
    assert accelerators.is_all_idle(device.loads)
    loader.close()


# One file


@pytest.mark.parametrize("cached", [4096, 8192, 9000])
def test_file_of_which_the_kernel_has_the_front_only_is_no_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: int
) -> None:
    """Headers of long identifiers are longer than a page, and pages are let go of one by one."""
    blob = bytes(8192) + bytes(4096)
    path = tmp_path / "entry"
    path.write_bytes(blob)
    found = os.stat(path)
    granted = (str(path), 0, 0, found.st_dev, found.st_ino)
    shape = Shape(64, 32, "bfloat16")
    header = Header("i", "ns", "image", shape, "0" * 32, data_start=8192, front_digest="0" * 32)
    load = Load("i", *granted, header)
    real = os.preadv

    def preadv(fd: int, views: list[memoryview], offset: int, flags: int) -> int:
        if offset >= cached:
            raise BlockingIOError(11, "not in memory")
        return min(real(fd, views, offset), cached - offset)

    monkeypatch.setattr(reading.os, "preadv", preadv)
    memory = torch.empty(load.shape.nbytes, dtype=torch.uint8)
    with pytest.raises(BlockingIOError):
        reading.read_data(load, memory, wait=False)


def test_only_the_tensor_s_part_of_the_memory_is_written(bench: Bench) -> None:
    load = bench.load(1)
    memory = torch.full((SMALLEST,), 0xEE, dtype=torch.uint8)
    loading.read_data(load, memory)
    assert (memory[load.shape.nbytes :] == 0xEE).all()


def test_file_that_shrinks_while_it_is_read_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = bench.load(1)
    found = os.stat(load.path)
    monkeypatch.setattr(loading.os, "fstat", lambda _: found)
    os.truncate(load.path, found.st_size - 1)
    with pytest.raises(CorruptEntryError, match="ends after 63 bytes"):
        loading.read_data(load, torch.empty(load.shape.nbytes, dtype=torch.uint8))


@pytest.mark.parametrize("at", [0, 40, 200])
def test_header_that_was_changed_after_the_grant_is_refused(bench: Bench, at: int) -> None:
    load = bench.load(1)
    blob = bytearray(Path(load.path).read_bytes())
    blob[at] ^= 1
    Path(load.path).write_bytes(blob)
    with pytest.raises(CorruptEntryError, match="another header"):
        loading.read_data(load, torch.empty(load.shape.nbytes, dtype=torch.uint8))


def test_values_that_are_not_hashed_are_believed_length_and_header_are_not(bench: Bench) -> None:
    load = bench.load(1)
    path = Path(load.path)
    good = path.read_bytes()
    memory = torch.empty(load.shape.nbytes, dtype=torch.uint8)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CorruptEntryError, match="checksum"):
        loading.read_data(load, memory)
    loading.read_data(load, memory, hashed=False)
    assert bytes(memory[:-1].numpy()) == good[load.header.data_start : -1]
    for bad in (good[:-1], good + b"x", good[:40] + bytes([good[40] ^ 1]) + good[41:]):
        path.write_bytes(bad)
        with pytest.raises(CorruptEntryError):
            loading.read_data(load, memory, hashed=False)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_is_no_file_is_refused_at_once(bench: Bench, kind: str, tmp_path: Path) -> None:
    load = out_of_reach(bench.load(1))
    path = Path(load.path)
    real = tmp_path / "real"
    path.rename(real)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(real)
    with pytest.raises((OSError, CorruptEntryError)):
        loading.read_data(load, torch.empty(load.shape.nbytes, dtype=torch.uint8))
    path.rmdir() if kind == "folder" else path.unlink()


# What was granted, whatever its name means by now


def out_of_reach(load: Load) -> Load:
    """The load where the scheduler's process cannot be looked into: it may be in a container."""
    return replace(load, pid=0)


@contextmanager
def held_by_another(bench: Bench, load: Load) -> Iterator[Load]:
    """The load where another process has the file open, as the scheduler's, and this one not."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[load.fd]) as process:
        bench.let_go(load)
        yield replace(load, pid=process.pid)
        assert process.stdin is not None
        process.stdin.close()


@contextmanager
def reached(bench: Bench, load: Load, how: str) -> Iterator[Load]:
    if how == "elsewhere":
        with held_by_another(bench, load) as its:
            yield its
    else:
        yield load


def read_again(load: Load) -> torch.Tensor:
    memory = torch.empty(load.shape.nbytes, dtype=torch.uint8)
    loading.read_data(load, memory)
    return memory.view(torch.bfloat16).view(4, 8)


def test_what_has_its_name_is_read_by_it_where_the_schedulers_process_is_out_of_reach(
    bench: Bench,
) -> None:
    load = bench.load(1)
    bench.let_go(load)
    assert torch.equal(read_again(out_of_reach(load)), tensor(1))
    assert torch.equal(read_again(load), tensor(1))  # its descriptor is closed, or another file's


@pytest.mark.parametrize("becomes", ["evicted", "replaced"])
def test_another_file_under_the_name_is_not_the_one_and_no_damage(
    bench: Bench, becomes: str
) -> None:
    """The bucket stands in, and what took the place of the granted file stays."""
    load = bench.load(1)
    blob = bench.entry(load.identifier, tensor(1))
    bench.bucket.objects[bench.object_name(load.identifier)] = blob
    os.unlink(load.path)  # still open, so no other file gets its inode
    if becomes == "replaced":
        bench.granted(load.identifier, tensor(2))
    load = out_of_reach(load)
    with pytest.raises(FileNotFoundError):
        read_again(load)
    (outcome,) = loader_on(bench.node, staging.HostStaging).load([load])
    assert torch.equal(outcome, tensor(1))
    assert bench.counted("load.rescued") == 1
    assert Path(load.path).exists() is (becomes == "replaced")
    assert bench.counted("tier.bad_files") == 0


def test_a_file_that_was_found_bad_is_granted_no_more(bench: Bench) -> None:
    load = bench.load(1)
    key = key_of(load.identifier)
    bench.node.residents.add(key.digest, bench.open[-1])
    bench.bucket.objects[bench.object_name(load.identifier)] = bench.entry(
        load.identifier, tensor(1)
    )
    blob = Path(load.path).read_bytes()
    Path(load.path).write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
    (outcome,) = loader_on(bench.node, staging.HostStaging).load([load])
    assert torch.equal(outcome, tensor(1))
    assert len(bench.node.residents) == 0
    assert not bench.node.tier.entries.contains(key)
