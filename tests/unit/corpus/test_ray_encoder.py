# SPDX-License-Identifier: Apache-2.0
"""Workers on a real Ray of this machine: chunks of a dead one are done again, all is told once."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.corpus.encoder import Encoded, EncoderError, Picture
from s3ec.corpus.ray_encoder import RayEncoder, RayOptions
from s3ec.corpus.sources import SourceItem, open_source
from s3ec.errors import ConfigError
from tests.support.copying import Copier
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:::ray"),  # Ray Data uses what it deprecates
    pytest.mark.filterwarnings("ignore:`ray_remote_args` is deprecated"),
]


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    """One for all tests, on loopback; an encoder uses the one that is there."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        for name in ("ENABLE_WINDOWS_OR_OSX_CLUSTER", "USAGE_STATS_ENABLED", "worker_niceness"):
            patch.setenv(f"RAY_{name}", "0")
        patch.setenv("RAY_TMPDIR", folder)
        import ray

        # With the first variable: on loopback, on any system.
        patch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", False)
        quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        ray.init("local", num_cpus=4, include_dashboard=False, **quiet)
        yield
        ray.shutdown()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.touch()
    return path


def lines(log: Path, what: str) -> list[tuple[int, int]]:
    """Process and number of each line about something."""
    found = (line.split() for line in log.read_text().splitlines())
    return [(int(pid), int(number)) for pid, kind, number in found if kind == what]


def source(folder: Path, *bodies: bytes) -> list[SourceItem]:
    folder.mkdir()
    for number, body in enumerate(bodies):
        (folder / f"{number:04}.png").write_bytes(body)
    return list(open_source(str(folder)))


def encoder(log: Path, workers: tuple[int, int] = (2, 2), chunk: int = 4, **how: Any) -> RayEncoder:
    options = RayOptions(workers=workers, gpus=0, cpus=1)
    return RayEncoder(partial(Copier, log, **how), options, chunk=chunk)


def run(
    made: RayEncoder, items: list[SourceItem], uuids: Mapping[int, str] | None = None
) -> list[Encoded]:
    def pictures() -> Iterator[Picture]:
        for number, item in enumerate(items):
            picture = made.read(number, item)
            uuid = (uuids or {}).get(number)
            yield Picture(number, picture.modality, b"", uuid, item=item)

    try:
        made.namespace()
        return sorted(made.encode(pictures()), key=lambda each: each.number)
    finally:
        made.close()


def test_all_items_are_told_with_what_the_workers_have_read(tmp_path: Path, log: Path) -> None:
    """One is named by the sum of its file; two cannot be read, and cost no other of their chunk."""
    bodies = [b"%d" % number for number in range(10)]
    sums = [hashlib.sha256(body).hexdigest() for body in bodies]
    items = source(tmp_path / "pages", *bodies, b"bad", b"gone")
    (tmp_path / "pages" / "0011.png").unlink()
    made = encoder(log)
    expected = [Encoded(n, f"id-{n}", "", sums[n], 1) for n in range(10)]
    expected[3] = Encoded(3, f"sha256:{sums[3]}", "", sums[3], 1)
    unread = [Encoded(10, None, "no picture"), Encoded(11, None, "no such file")]
    assert run(made, items, {3: "sha256:"}) == [*expected, *unread]
    assert (made.naming, made.is_running) == ("1:abc", True)
    assert sorted(number for _, number in lines(log, "encoded")) == list(range(10))
    # All end: of the workers, one may have had no chunk, and have ended before it was ready; and
    # the process that said where it saves.
    encoded = {pid for pid, _ in lines(log, "encoded")}
    eventually(lambda: encoded < {pid for pid, _ in lines(log, "closed")})


def test_chunks_of_a_killed_worker_are_done_again_and_no_item_is_missing(
    tmp_path: Path, log: Path
) -> None:
    items = source(tmp_path / "pages", *(b"%d" % number for number in range(24)))
    gate = tmp_path / "gate"

    def kill() -> None:
        eventually(lambda: len({pid for pid, _ in lines(log, "given")}) == 2)
        os.kill(lines(log, "given")[0][0], signal.SIGKILL)
        gate.touch()

    killer = threading.Thread(target=kill)
    killer.start()
    found = run(encoder(log, gate=gate), items)
    killer.join()
    assert [(each.number, each.problem) for each in found] == [(n, "") for n in range(24)]
    assert len({pid for pid, _ in lines(log, "given")}) == 3


def test_item_that_ends_its_worker_is_a_failure_and_all_others_are_done(
    tmp_path: Path, log: Path
) -> None:
    """Also those of its chunk, and of the one that the worker has beside it."""
    items = source(tmp_path / "pages", b"good", b"good", b"ends", b"good", b"good", b"good")
    found = run(encoder(log, (1, 1), chunk=2), items)
    assert [each.number for each in found] == [0, 1, 2, 3, 4, 5]
    assert [each.number for each in found if each.problem] == [2]
    assert "each worker that has it ends" in found[2].problem


def test_stop_ends_with_the_chunk_that_is_under_way(tmp_path: Path, log: Path) -> None:
    made = encoder(log, (1, 1), chunk=1)
    items = source(tmp_path / "pages", *[b"good"] * 40)
    made.namespace()
    results = made.encode(made.read(number, item) for number, item in enumerate(items))
    next(results)
    made.stop()
    assert list(results) == []
    made.close()
    assert len(lines(log, "encoded")) < 40


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        ("wrong", ConfigError, "no such model"),
        ("never", EncoderError, "vLLM did not start: no memory"),
        ("own", EncoderError, "saves to another namespace"),
    ],
)
def test_workers_that_cannot_work_end_the_job_with_their_reason(
    model: str, error: type[Exception], says: str, tmp_path: Path, log: Path
) -> None:
    items = source(tmp_path / "pages", *[b"good"] * 8)
    with pytest.raises(error, match=says):
        run(encoder(log, (1, 1), chunk=1, model=model), items)


def test_without_a_cluster_the_job_is_refused(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    none: Any = SimpleNamespace(is_initialized=lambda: False, data=None)
    monkeypatch.setitem(sys.modules, "ray", none)
    monkeypatch.setitem(sys.modules, "ray.data", SimpleNamespace())
    with pytest.raises(ConfigError, match="`ray start --head`") as caught:
        encoder(log)
    assert caught.value.field == "ray_address"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"workers": (0, 1)}, "ray_workers"),
        ({"workers": (2, 1)}, "ray_workers"),
    ],
)
def test_option_out_of_its_range_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RayOptions(**given)
    assert caught.value.field == field
