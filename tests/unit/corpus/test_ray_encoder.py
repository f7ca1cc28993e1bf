# SPDX-License-Identifier: Apache-2.0
"""Workers on a real Ray of this machine: what a dead one had goes to the others, and only that."""

from __future__ import annotations

import importlib.util
import math
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.corpus.encoder import Encoded, EncoderError, Picture
from s3ec.corpus.ray_encoder import RayEncoder, RayOptions, _Member, start_ray
from s3ec.corpus.sources import SourceItem, open_source
from s3ec.errors import ConfigError, SourceError
from tests.support.copying import Copier
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    """One for all tests; an encoder uses the one that is there."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_TMPDIR", folder)
        # Imported before, as vLLM does: what the variable says is settled by then.
        import ray

        patch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", True)
        start_ray(4)
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


def encoder(log: Path, workers: tuple[int, int] = (2, 2), **given: Any) -> RayEncoder:
    more = {name: given.pop(name) for name in ("model", "gate") if name in given}
    return RayEncoder(
        partial(Copier, log, **more), RayOptions(workers=workers, gpus=0, cpus=1, **given)
    )


def pictures(made: RayEncoder, items: list[SourceItem]) -> Iterator[Picture]:
    with ThreadPoolExecutor(4) as pool:
        yield from pool.map(made.read, range(len(items)), items)


def run(made: RayEncoder, items: list[SourceItem]) -> list[Encoded]:
    try:
        made.namespace()
        return sorted(made.encode(pictures(made, items)), key=lambda each: each.number)
    finally:
        made.close()


def test_a_ray_of_our_own_is_on_loopback_whoever_imported_it_first() -> None:
    import ray

    assert ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")
    assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}
    assert os.environ["RAY_AUTH_MODE"] == "token"


def fake_ray(version: str, address: str) -> Any:
    """A Ray that would listen there."""

    def init(*_: object, **__: object) -> None:
        raise AssertionError("started")

    return SimpleNamespace(
        __version__=version,
        _private=SimpleNamespace(ray_constants=SimpleNamespace()),
        util=SimpleNamespace(get_node_ip_address=lambda: address),
        init=init,
    )


@pytest.mark.parametrize(
    ("version", "address", "kind", "says"),
    [
        ("2.58.1", "127.0.0.1", ConfigError, "Ray 2.59 or newer"),
        ("2.9.3", "127.0.0.1", ConfigError, "Ray 2.59 or newer"),
        ("2.60.0", "192.0.2.2", RuntimeError, "would listen on 192.0.2.2"),
        ("3.0.0.dev0", "::1", AssertionError, "started"),
    ],
)
def test_a_ray_that_others_reach_is_not_started(
    monkeypatch: pytest.MonkeyPatch, version: str, address: str, kind: type[Exception], says: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", fake_ray(version, address))
    with pytest.raises(kind, match=says):
        start_ray(1)


def test_all_items_are_encoded_once_by_who_has_read_them(tmp_path: Path, log: Path) -> None:
    items = source(tmp_path / "pages", *(b"%d" % number for number in range(40)))
    found = run(encoder(log, given=4), items)
    assert found == [Encoded(number, f"id-{number}") for number in range(40)]
    assert sorted(number for _, number in lines(log, "encoded")) == list(range(40))


def test_item_that_cannot_be_read_or_encoded_is_told(tmp_path: Path, log: Path) -> None:
    items = source(tmp_path / "pages", b"good" * 1000, b"bad", b"gone")
    made = encoder(log, (1, 1))
    made.namespace()
    read = [made.read(number, item) for number, item in enumerate(items)]
    assert (read[0].data, read[0].nbytes, len(read[0].sha256)) == (b"", 4000, 64)
    (tmp_path / "pages" / "0002.png").unlink()
    with pytest.raises(SourceError, match="no such file"):
        made.read(3, items[2])
    found = list(made.encode(read))
    made.close()
    assert Encoded(1, None, "no picture") in found
    assert len(found) == 3  # the bytes of the third were kept


def test_items_of_a_killed_worker_are_done_by_the_other(tmp_path: Path, log: Path) -> None:
    """And nothing else is done twice. Which items it was at is what it says itself."""
    items = source(tmp_path / "pages", *(b"%d" % number for number in range(60)))
    gate = tmp_path / "gate"
    made = encoder(log, given=4, gate=gate)
    killed: list[int] = []

    def kill() -> None:
        eventually(lambda: len({pid for pid, _ in lines(log, "given")}) == 2)
        killed.append(lines(log, "given")[0][0])
        os.kill(killed[0], signal.SIGKILL)
        gate.touch()

    killer = threading.Thread(target=kill)
    killer.start()
    found = run(made, items)
    killer.join()
    assert [each.number for each in found] == list(range(60))
    assert not [each for each in found if each.problem]
    encoded = Counter(number for _, number in lines(log, "encoded"))
    assert set(encoded) == set(range(60))
    given = Counter(number for _, number in lines(log, "given"))
    again = {number for number, count in given.items() if count > 1}
    assert again
    assert again <= {number for pid, number in lines(log, "given") if pid == killed[0]}


def test_item_that_ends_its_worker_is_a_failure_and_the_others_are_done(
    tmp_path: Path, log: Path
) -> None:
    items = source(tmp_path / "pages", b"good", b"kills", b"good", b"ends", b"good")
    found = run(encoder(log, given=8), items)
    assert [each.number for each in found] == [0, 1, 2, 3, 4]
    problem = "3 workers have ended while they had this item"
    assert [each.problem for each in found] == ["", problem, "", problem, ""]


def test_what_only_a_dead_worker_had_is_encoded_again(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told as encoded, and the bucket has not confirmed it."""
    monkeypatch.setattr("s3ec.corpus.ray_encoder._GRACE_S", 0.0)
    items = source(tmp_path / "pages", b"a", b"b")
    made = encoder(log, (2, 2))
    made.namespace()
    confirmed: set[str] = set()
    made.confirmed_by(lambda name, since_s: name in confirmed)
    found = made.encode(pictures(made, items))
    first = [next(found), next(found)]
    ((dead, number), *_) = lines(log, "encoded")
    confirmed.update({"id-0", "id-1"} - {f"id-{number}"})
    os.kill(dead, signal.SIGKILL)

    def confirm() -> None:
        eventually(lambda: len(lines(log, "encoded")) == 3)
        confirmed.add(f"id-{number}")

    watching = threading.Thread(target=confirm)
    watching.start()
    assert list(found) == []
    watching.join()
    made.close()
    assert {each.number for each in first} == {0, 1}
    again = Counter(each for _, each in lines(log, "encoded"))
    assert again[number] == 2
    assert again[1 - number] == 1


def test_item_of_a_dead_worker_waits_until_the_bucket_was_asked(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: the driver may have been too busy to ask."""
    monkeypatch.setattr("s3ec.corpus.ray_encoder._GRACE_S", 0.0)
    monkeypatch.setattr("s3ec.corpus.ray_encoder._PRUNE_S", 0.0)
    made = encoder(log, (2, 2))
    made.namespace()
    asked: Counter[str] = Counter()

    def check(name: str, since_s: float) -> bool | None:
        asked[name] += since_s < math.inf
        is_told = number is not None and (name != f"id-{number}" or asked[name] > 3)
        return True if is_told else None

    number: int | None = None
    made.confirmed_by(check)
    found = made.encode(pictures(made, source(tmp_path / "pages", b"a", b"b")))
    ends = [next(found), next(found)]
    ((dead, number), *_) = lines(log, "encoded")
    os.kill(dead, signal.SIGKILL)
    assert list(found) == []
    made.close()
    assert {each.number for each in ends} == {0, 1}
    assert asked[f"id-{number}"] > 3
    assert len(lines(log, "encoded")) == 2


def test_result_of_a_worker_that_a_reader_has_just_found_gone_is_told_once(log: Path) -> None:
    made = encoder(log)
    made.stop()  # no other one is started
    item = Picture(0, "image", b"", uuid="id-0")
    member = _Member(None, None, 0.0, given={0: item})
    made._members.append(member)
    made._bury(member, "it was killed")
    assert list(made._note(member, Encoded(0, "id-0"))) == []
    made._prune()
    assert made._take_results() == [Encoded(0, "id-0")]


def test_more_workers_start_while_all_are_busy(tmp_path: Path, log: Path) -> None:
    items = source(tmp_path / "pages", *[b"good"] * 12)
    gate = tmp_path / "gate"
    made = encoder(log, (1, 3), given=2, gate=gate)

    def open_gate() -> None:
        eventually(lambda: len({pid for pid, _ in lines(log, "given")}) == 3)
        gate.touch()

    opener = threading.Thread(target=open_gate)
    opener.start()
    found = run(made, items)
    opener.join()
    assert len(found) == 12


def test_stop_ends_soon_and_closes_the_workers(tmp_path: Path, log: Path) -> None:
    items = source(tmp_path / "pages", *[b"good"] * 4)
    made = encoder(log, (1, 1), gate=tmp_path / "never")

    def stop() -> None:
        eventually(lambda: bool(lines(log, "given")))
        made.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    assert run(made, items) == []
    stopper.join()
    assert len(lines(log, "closed")) == 1


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        ("wrong", ConfigError, "no such model"),
        ("never", EncoderError, "3 workers in a row did not start; the last: vLLM did not"),
        ("own", EncoderError, "saves to another namespace"),
    ],
)
def test_workers_that_cannot_work_end_the_job(
    model: str, error: type[Exception], says: str, tmp_path: Path, log: Path
) -> None:
    items = source(tmp_path / "pages", b"good", b"good")
    workers = (2, 2) if model == "own" else (1, 1)
    # The first one must not be done before the other is there.
    with pytest.raises(error, match=says):
        run(encoder(log, workers, model=model, gate=tmp_path / "never"), items)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"workers": (0, 1)}, "ray_workers"),
        ({"workers": (2, 1)}, "ray_workers"),
        ({"gpus": -1}, "ray_gpus"),
        ({"cpus": 2000}, "ray_cpus"),
        ({"given": 0}, "given"),
    ],
)
def test_option_out_of_its_range_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RayOptions(**given)
    assert caught.value.field == field
