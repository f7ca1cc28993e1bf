# SPDX-License-Identifier: Apache-2.0
"""What encoding costs: how it is learned, and how it is kept for the next engine."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.encode_costs import PRIOR_ENCODE_S, CostFile, EncodeCosts
from s3ec.tier.files import Folders

NAMESPACE = "ns"
DEVICE = "cpu x1"


def test_cost_is_learned_by_modality_and_size_without_the_first_sample() -> None:
    costs = EncodeCosts()
    assert costs.cost_s("image", 256) == PRIOR_ENCODE_S
    costs.add("image", 256, 9.0)  # compilation
    assert costs.cost_s("image", 256) == PRIOR_ENCODE_S
    for _ in range(20):
        costs.add("image", 256, 0.1)
    assert costs.cost_s("image", 256) == pytest.approx(0.1)
    # A size that was never seen takes the nearest one; a modality that was not, the first guess.
    assert costs.cost_s("image", 1024) == pytest.approx(0.4)
    assert costs.cost_s("video", 256) == PRIOR_ENCODE_S


def test_a_hiccup_counts_for_little() -> None:
    costs = EncodeCosts()
    for _ in range(30):
        costs.add("image", 256, 0.1)
    costs.add("image", 256, 60.0)
    assert costs.cost_s("image", 256) <= 0.2


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_time_that_cannot_be_is_ignored(seconds: float) -> None:
    costs = EncodeCosts()
    for _ in range(3):
        costs.add("image", 256, seconds)
        costs.add("image", 0, 0.1)
    assert costs.document == {}


def test_costs_come_back_from_a_file_and_bad_lines_of_it_do_not() -> None:
    costs = EncodeCosts()
    for _ in range(3):
        costs.add("image", 256, 0.1)
    again = EncodeCosts(
        {**costs.document, "image": 1.0, "image:x": 1.0, "video:9": -1.0, ":9": 1.0}
    )
    assert again.document == costs.document
    assert not again.explore("image", 256)


def test_each_kind_is_explored_until_its_cost_is_known_and_never_for_long() -> None:
    costs = EncodeCosts()
    assert costs.explore("image", 256)
    assert costs.explore("image", 257)  # of the same size class
    assert [costs.explore("image", 256) for _ in range(5)] == [True] + 4 * [False]
    assert costs.explore("image", 1024)
    assert costs.explore("video", 256)
    for _ in range(2):
        costs.add("video", 256, 0.1)
    assert not costs.explore("video", 256)


def test_a_kind_not_encoded_for_ten_minutes_is_explored_again_where_that_could_matter() -> None:
    costs = EncodeCosts({"image:9": 0.1 / 256})
    for number in range(600):
        assert not costs.explore("image", 256, 1000.0 + number)
    assert not costs.explore("image", 256, 1601.0, in_doubt=False)
    assert costs.explore("image", 256, 1601.0)
    for number in range(599):
        assert not costs.explore("image", 256, 1700.0 + number)
    costs.add("image", 256, 0.1)  # encoded all the same
    assert not costs.explore("image", 256, 2500.0)


def test_what_was_explored_again_counts_for_all_that_was_believed() -> None:
    costs = EncodeCosts()
    for _ in range(20):
        costs.add("image", 256, 0.6)
    for number in range(301):
        explored = costs.explore("image", 256, 2.0 * number)
    assert explored
    costs.add("image", 256, 0.02)
    assert costs.cost_s("image", 256) == pytest.approx(0.02)
    costs.add("image", 256, 0.04)  # as one of many again
    assert costs.cost_s("image", 256) == pytest.approx(0.024)


def test_the_first_sample_counts_where_it_is_less_than_what_others_have_learned() -> None:
    """Compilation and lazy loading make it longer, and never shorter."""
    costs = EncodeCosts({"image:9": 1.0 / 256})
    costs.add("image", 256, 9.0)
    assert costs.cost_s("image", 256) == 1.0
    costs = EncodeCosts({"image:9": 1.0 / 256})
    costs.add("image", 256, 0.5)
    assert costs.cost_s("image", 256) == pytest.approx(0.9)


def test_a_kind_that_is_seldom_asked_for_is_not_explored_more_often_than_one_in_300() -> None:
    costs = EncodeCosts({"image:9": 1.0 / 256})
    explored = [
        costs.explore("image", 256, 100.0 * number)
        for number in range(900)
        for _ in range(4)  # items of one request
    ]
    assert 1 <= sum(explored) <= 3


def test_several_alike_in_one_step_count_as_one_of_their_size() -> None:
    costs = EncodeCosts()
    for _ in range(2):
        costs.add("image", 4 * 256, 0.4, items=4)
    assert costs.document == {"image:9": pytest.approx(0.1 / 256)}


def test_what_others_have_learned_counts_until_it_is_measured_here() -> None:
    costs = EncodeCosts()
    assert costs.known_s("image", 256) is None
    costs.adopt({"image:9": 1.0, "video:9": 2.0})
    assert costs.known_s("image", 256) == 256.0
    costs.add("image", 256, 25.6)
    costs.adopt({"image:9": 7.0, "video:9": 3.0})
    assert costs.known_s("video", 256) == 768.0
    assert costs.known_s("image", 256) == pytest.approx(256 - 0.2 * (256 - 25.6))


# -- kept on the disk ------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    made = Folders(tmp_path / "cache")
    made.make()
    return made


@pytest.fixture
def counters() -> Counters:
    return Counters()


Opened = tuple[CostFile, EncodeCosts]
Open = Callable[..., Opened]


@pytest.fixture
def open_file(folders: Folders, counters: Counters) -> Open:
    def opened(device: str = DEVICE, namespace: str = NAMESPACE) -> Opened:
        """As a process of its own."""
        costs = EncodeCosts()
        return CostFile(folders, namespace, device, costs, counters), costs

    return opened


def teach(costs: EncodeCosts, seconds: float, modality: str = "image") -> None:
    for _ in range(40):
        costs.add(modality, 256, seconds)


def test_what_one_engine_has_learned_the_next_one_knows(open_file: Open) -> None:
    file, costs = open_file()
    teach(costs, 0.1)
    file.exchange()
    file, costs = open_file()
    file.exchange()
    assert costs.known_s("image", 256) == pytest.approx(0.1)
    assert not costs.explore("image", 256)


def test_another_device_and_another_namespace_know_nothing_of_it(open_file: Open) -> None:
    file, costs = open_file()
    teach(costs, 0.1)
    file.exchange()
    for place in ({"device": "NVIDIA H100 x1"}, {"namespace": "other"}):
        file, costs = open_file(**place)
        file.exchange()
        assert costs.document == {}
        teach(costs, 0.01)
        file.exchange()
    file, costs = open_file()
    file.exchange()
    assert costs.known_s("image", 256) == pytest.approx(0.1)


def test_engine_that_runs_learns_what_another_process_measures(open_file: Open) -> None:
    scheduler, known = open_file()
    scheduler.exchange()
    assert known.known_s("image", 256) is None
    worker, measured = open_file()
    teach(measured, 0.1)
    worker.exchange()
    scheduler.exchange()
    assert known.known_s("image", 256) == pytest.approx(0.1)


def test_engines_of_one_node_keep_what_the_others_have_learned(open_file: Open) -> None:
    (one, images), (other, videos) = open_file(), open_file()
    teach(images, 0.1)
    one.exchange()
    teach(videos, 0.3, "video")
    other.exchange()
    file, costs = open_file()
    file.exchange()
    assert costs.document.keys() == {"image:9", "video:9"}


def test_nothing_is_written_while_nothing_moves(open_file: Open, folders: Folders) -> None:
    file, costs = open_file()
    file.exchange()
    assert not list(folders.costs.iterdir())
    teach(costs, 0.1)
    file.exchange()
    (path,) = folders.costs.iterdir()
    before = path.stat()
    costs.add("image", 256, 0.101)
    file.exchange()
    assert path.stat().st_ino == before.st_ino
    teach(costs, 0.2)
    file.exchange()
    assert path.stat().st_ino != before.st_ino
    assert path.stat().st_mode & 0o777 == 0o600
    assert not list(folders.incoming.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        "\xff",
        '{"version": 2, "devices": {"cpu x1": {"image:9": 1.0}}}',
        '{"version": 1, "devices": [1]}',
        '{"version": 1, "devices": {"cpu x1": 1}}',
        '{"version": 1, "devices": {"cpu x1": {"image:9": NaN}}}',
        '{"version": 1, "devices": {"cpu x1": {"image:9": -1.0, "image:x": 1.0, "image": 1.0}}}',
        '{"version": 1, "devices": {"cpu x1": {"image:9": "1", "image:999": 1.0}}}',
        '{"version": 1, "devices": {"cpu x1": {"image:9": 1e999}}}',
    ],
)
def test_damaged_file_is_a_cold_start_and_is_written_anew(
    open_file: Open, folders: Folders, counters: Counters, content: str
) -> None:
    path = folders.costs / f"{NAMESPACE}.json"
    path.write_bytes(content.encode("latin-1"))
    file, costs = open_file()
    file.exchange()
    assert costs.document == {}
    teach(costs, 0.1)
    file.exchange()
    assert json.loads(path.read_text())["devices"][DEVICE].keys() == {"image:9"}
    assert counters.snapshot() == {}


def test_link_in_the_place_of_the_file_is_not_followed(
    open_file: Open, folders: Folders, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign.json"
    document = {"version": 1, "devices": {DEVICE: {"image:9": 1.0}}}
    foreign.write_text(json.dumps(document))
    (folders.costs / f"{NAMESPACE}.json").symlink_to(foreign)
    file, costs = open_file()
    file.exchange()
    assert costs.document == {}
    teach(costs, 0.1)
    file.exchange()
    assert json.loads(foreign.read_text()) == document


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_file_of_another_user_is_not_believed(open_file: Open, folders: Folders) -> None:
    file, costs = open_file()
    teach(costs, 0.1)
    file.exchange()
    os.chown(folders.costs / f"{NAMESPACE}.json", 12345, 12345)
    file, costs = open_file()
    file.exchange()
    assert costs.document == {}


def test_cache_that_somebody_emptied_is_filled_again(open_file: Open, folders: Folders) -> None:
    file, costs = open_file()
    folders.costs.rmdir()
    folders.incoming.rmdir()
    teach(costs, 0.1)
    file.exchange()
    assert [path.name for path in folders.costs.iterdir()] == [f"{NAMESPACE}.json"]


def test_file_stays_small_however_many_devices_there_were(
    open_file: Open, folders: Folders
) -> None:
    for number in range(40):
        file, costs = open_file(f"device {number}")
        teach(costs, 0.1)
        file.exchange()
    document = json.loads((folders.costs / f"{NAMESPACE}.json").read_text())
    assert list(document["devices"])[-1] == "device 39"
    assert len(document["devices"]) == 16
