# SPDX-License-Identifier: Apache-2.0
"""The loader: several files at a time, in whichever thread, through any staging."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from s3ec.codec import Shape
from s3ec.connector import saves
from s3ec.connector.messages import Load
from s3ec.errors import CorruptEntryError
from s3ec.identity import Namespace, make_key
from s3ec.node import Node
from s3ec.settings import Settings
from s3ec.testing.memory_store import MemoryBucket, MemoryStore

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
loading = pytest.importorskip("s3ec.connector.loads")
reading = pytest.importorskip("s3ec.connector.loads")
host_pool = pytest.importorskip("s3ec.connector.staging")
staging = pytest.importorskip("s3ec.connector.staging")
accelerators = pytest.importorskip("tests.unit.connector.accelerators")

HASHES = [f"{n:064x}" for n in range(1, 21)]
DEADLINE_S = 20.0
SMALLEST = 64 * 1024


def tensor(seed: int) -> torch.Tensor:
    return torch.full((4, 8), float(seed), dtype=torch.bfloat16)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.bucket = MemoryBucket()
        settings = Settings.model_validate(
            {"bucket": "corpus", "cache_dir": folder / "tier", "min_free_bytes": 0}
        )
        name = Namespace.from_descriptor({"model": "tiny"})
        self.node = Node(settings, name, store=MemoryStore(self.bucket))

    def entry(self, number: int) -> bytes:
        header = saves.describe(
            tensor(number),
            identifier=HASHES[number],
            namespace=self.node.namespace.name,
            modality="image",
        )
        return b"".join(saves.encode(header, tensor(number)))

    def load(self, number: int) -> Load:
        key = make_key(HASHES[number])
        assert key is not None
        self.node.tier.writer.publish(key, [self.entry(number)])
        pin = self.node.tier.entries.pin(key)
        assert pin is not None
        return Load.of(HASHES[number], pin)

    def loads(self, count: int) -> list[Load]:
        return [self.load(number) for number in range(count)]

    def only_in_the_bucket(self, load: Load, number: int) -> None:
        key = make_key(load.identifier)
        assert key is not None
        self.bucket.objects[self.node.layout.object(key)] = self.entry(number)
        Path(load.path).unlink()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.node.close(5)


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


def check(outcomes: list[torch.Tensor | Exception], count: int) -> None:
    assert len(outcomes) == count
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, torch.Tensor), outcome
        assert torch.equal(outcome, tensor(number))


def test_one_alone_is_read_in_the_calling_thread(bench: Bench) -> None:
    watched = Watched()
    loader = loading.Loader(bench.node, lambda: watched)
    check(loader.start(bench.loads(1), later=False).finish(), 1)
    assert watched.threads == [threading.current_thread().name]
    assert loader._readers is None


def test_two_are_read_at_the_same_time(bench: Bench) -> None:
    watched = Watched(threading.Barrier(2))
    loader = loading.Loader(bench.node, lambda: watched)
    check(loader.start(bench.loads(2), later=False).finish(), 2)
    assert len(set(watched.threads)) == 2
    loader.close()


def test_many_keep_their_order(bench: Bench) -> None:
    loader = loading.Loader(bench.node, staging.HostStaging)
    for later in (False, True):
        check(loader.start(bench.loads(len(HASHES)), later=later).finish(), len(HASHES))
    loader.close()


def test_caller_reads_what_the_readers_have_not_begun(bench: Bench) -> None:
    """The readers are held in their first file: the caller does all the others."""
    me = threading.current_thread()
    gate = threading.Event()
    mine: list[int] = []

    class Held(staging.HostStaging):
        def take(self, shape: Shape) -> host_pool.Buffer:
            if threading.current_thread() is me:
                mine.append(shape.nbytes)
                if len(mine) == len(HASHES) - loader._readers._max_workers:
                    gate.set()
            else:
                assert gate.wait(DEADLINE_S)
            return super().take(shape)

    loader = loading.Loader(bench.node, Held)
    check(loader.start(bench.loads(len(HASHES)), later=True).finish(), len(HASHES))
    assert gate.is_set()
    loader.close()


def test_failures_stay_with_their_loads(bench: Bench) -> None:
    loads = bench.loads(8)
    Path(loads[3].path).unlink()
    bench.only_in_the_bucket(loads[6], 6)
    loader = loading.Loader(bench.node, staging.HostStaging)
    outcomes = loader.start(loads, later=False).finish()
    assert [isinstance(outcome, RuntimeError) for outcome in outcomes] == [
        number == 3 for number in range(8)
    ]
    assert loads[3].path in str(outcomes[3])
    outcomes[3] = tensor(3)
    check(outcomes, 8)
    loader.close()


# Through a device with streams


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("buffers", [1, 2, 8])
def test_accelerator_gets_all_through_few_buffers(bench: Bench, buffers: int, later: bool) -> None:
    fake = accelerators.FakeAccelerator()
    device = staging.AcceleratorStaging(fake, load_buffer_bytes=buffers * SMALLEST)
    loader = loading.Loader(bench.node, lambda: device)
    loads = bench.loads(len(HASHES))
    bench.only_in_the_bucket(loads[5], 5)
    check(loader.start(loads, later=later).finish(), len(HASHES))
    assert accelerators.is_all_idle(device._loads)
    assert device._loads.held_bytes <= buffers * SMALLEST
    assert fake.log.count("computing waits") == 1
    loader.close()


def test_next_file_is_read_while_the_copy_of_the_last_is_held_back(bench: Bench) -> None:
    fake = accelerators.FakeAccelerator()
    device = staging.AcceleratorStaging(fake)
    loader = loading.Loader(bench.node, lambda: device)
    fake.streams[0].held = True
    outcomes = loader.start(bench.loads(6), later=False).finish()
    assert fake.log.count("loads copies") == 6  # all read, none there
    fake.release()
    check(outcomes, 6)
    loader.close()


def test_buffer_comes_back_from_a_load_that_failed(bench: Bench) -> None:
    fake = accelerators.FakeAccelerator()
    device = staging.AcceleratorStaging(fake, load_buffer_bytes=SMALLEST)
    loader = loading.Loader(bench.node, lambda: device)
    loads = bench.loads(3)
    Path(loads[1].path).unlink()
    for _ in range(3):
        outcomes = loader.start(loads, later=False).finish()
        assert isinstance(outcomes[1], RuntimeError)
    fake.fail_next = "copy"
    failed = [
        one for one in loader.start(loads, later=False).finish() if isinstance(one, Exception)
    ]
    assert len(failed) == 2
    assert accelerators.is_all_idle(device._loads)
    loader.close()


# One file


def test_large_entry_is_read_in_parts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PART_BYTES", 7)
    load = bench.load(1)
    memory = torch.empty(load.shape.nbytes, dtype=torch.uint8)
    loading.read_data(load, memory)
    assert torch.equal(memory.view(torch.bfloat16).view(4, 8), tensor(1))


@pytest.mark.parametrize("cached", [4096, 8192, 9000])
def test_file_of_which_the_kernel_has_the_front_only_is_no_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: int
) -> None:
    """Headers of long identifiers are longer than a page, and pages are let go of one by one."""
    blob = bytes(8192) + bytes(4096)
    path = tmp_path / "entry"
    path.write_bytes(blob)
    load = Load("i", str(path), Shape(64, 32, "bfloat16"), "0" * 32, 8192, "0" * 32)
    real = os.preadv

    def preadv(fd: int, views: list[memoryview], offset: int, flags: int) -> int:
        if offset >= cached:
            raise BlockingIOError(11, "not in memory")
        return min(real(fd, views, offset), cached - offset)

    monkeypatch.setattr(reading.os, "preadv", preadv)
    monkeypatch.setattr(reading, "_is_in_memory", lambda _: False)
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
    size = os.stat(load.path).st_size
    monkeypatch.setattr(loading.os, "fstat", lambda _: SimpleNamespace(st_size=size))
    os.truncate(load.path, size - 1)
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
    assert bytes(memory[:-1].numpy()) == good[load.data_start : -1]
    for bad in (good[:-1], good + b"x", good[:40] + bytes([good[40] ^ 1]) + good[41:]):
        path.write_bytes(bad)
        with pytest.raises(CorruptEntryError):
            loading.read_data(load, memory, hashed=False)


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_is_no_file_is_refused_at_once(bench: Bench, kind: str, tmp_path: Path) -> None:
    load = bench.load(1)
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
