# SPDX-License-Identifier: Apache-2.0
"""``bench policy``: replays count right, and the optimum is one."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from s3ec import trace
from s3ec.dev.bench import policy, run
from s3ec.dev.bench.result import Result
from tests.unit.dev.bench import fakes
from tests.unit.dev.bench.test_cli import invoke

pytestmark = [
    pytest.mark.slow,
    # vLLM's manager is imported here, and what it imports.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def made() -> Any:
    pytest.importorskip("vllm")
    from s3ec.dev.bench import policy_replay

    return policy_replay


def least_misses(asked: list[str], room: int) -> int:
    """Of any order of victims, found by trying all of them."""
    states: dict[frozenset[str], int] = {frozenset(): 0}
    for name in asked:
        following: dict[frozenset[str], int] = {}
        for held, misses in states.items():
            if name in held:
                choices = [held]
            elif len(held) < room:
                choices = [held | {name}]
            else:
                choices = [held - {one} | {name} for one in held]
            for choice in choices:
                count = misses + (name not in held)
                following[choice] = min(count, following.get(choice, count))
        states = following
    return min(states.values())


@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_misses_as_little_as_any_order_can(made: Any, seed: int) -> None:
    rnd = random.Random(seed)
    asked = [f"p{min(rnd.randrange(8), rnd.randrange(8))}" for _ in range(60)]
    replay = made.Replay(
        [[made.Item(name, 10)] for name in asked],
        cache_rows=30,
        node_rows=0,
        costs=made.Costs(1.0, 0.1),
        at_once=0,
    )
    found = {name: replay.run(name).misses for name in made.POLICIES}
    assert found[made.OPTIMUM] == least_misses(asked, 3)
    assert min(found.values()) == found[made.OPTIMUM]


def test_each_item_is_found_in_one_place_and_costs_what_that_costs(made: Any) -> None:
    costs = made.Costs(encode_s=2.56, node_s=0.256)
    asked = ["a", "b", "a", "c", "b", "a"]  # a device of one picture over a node of two
    replay = made.Replay([[made.Item(name, 100)] for name in asked], 100, 200, costs, at_once=0)
    one = replay.run(made.LRU)
    assert (one.device, one.node, one.bucket, one.encoded) == (0, 1, 0, 5)
    assert one.seconds == pytest.approx(5 * 1.0 + 0.1)
    assert one.accesses == len(asked)
    with_bucket = made.Replay(replay.requests, 100, 200, made.Costs(2.56, 0.256, 0.512), at_once=0)
    assert with_bucket.run(made.LRU).bucket == 5


def test_a_request_with_more_than_the_device_holds_ends(made: Any) -> None:
    items = [made.Item(f"p{number}", 60) for number in range(10)]
    replay = made.Replay([items, items], 150, 0, made.Costs(1.0, 0.1))
    for name in made.POLICIES:
        assert replay.run(name).accesses == 20


def test_an_item_that_fits_nowhere_is_refused(made: Any) -> None:
    with pytest.raises(ValueError, match="200 rows does not fit into a cache of 100"):
        made.Replay([[made.Item("a", 200)]], 100, 0, made.Costs(1.0, 0.1))


def test_zipf_asks_for_all_pictures_once_in_its_scan(made: Any) -> None:
    requests = made.zipf_requests(1.0, 50, 200, seed=1, scan=True)
    assert len(requests) == 250
    scanned = {one.identifier for one in itertools.chain(*requests[100:150])}
    assert len(scanned) == 50


def write_trace(path: Path) -> Path:
    """Two engines; the second has more accesses, and a request of two pictures."""
    header = trace.Header(0.0, (trace.Engine(), trace.Engine()))
    lines = [trace.header_line(header)]
    asked = [(0, "r1", "x"), (1, "r1", "a"), (1, "r1", "b"), (1, "r2", "a"), (1, "r3", "c")]
    lines += [
        trace.event_line(trace.Access(number * 1.0, request, item, 16, "encoded", engine=engine))
        for number, (engine, request, item) in enumerate(asked)
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_a_trace_is_replayed_by_request_for_its_busiest_engine(made: Any, tmp_path: Path) -> None:
    requests = policy.traced(write_trace(tmp_path / "trace.jsonl"))
    assert [[item.identifier for item in one] for one in requests] == [["a", "b"], ["a"], ["c"]]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--zipf", "1.0"], "an exponent up to 10 and a number of pictures"),
        (["--zipf", "0,100"], "an exponent up to 10 and a number of pictures"),
        (["--cache-embeds", "0"], "numbers of rows"),
        (["--cache-embeds", "1,x"], "numbers of rows"),
        (["--workload", "nothing"], "questions, decks, zipf, scan, pool"),
        (["--trace", "/nowhere"], "does not exist"),
        (["--zipf", "1,100", "--workload", "pool"], "--zipf and --workload: give one of them"),
        (["--zipf", "1,100", "--cache-embeds", "255"], "the largest embedding has 256 rows"),
    ],
)
def test_a_bad_option_is_named(args: list[str], problem: str) -> None:
    text = invoke("policy", *args, code=2).output
    assert problem in " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize(
    ("args", "name"),
    [([], "policy"), (["--zipf", "0.9,500"], "policy_replay")],
)
def test_rows_with_a_reach_are_those_of_the_fixed_requests(
    monkeypatch: pytest.MonkeyPatch, args: list[str], name: str
) -> None:
    ran: list[str] = []

    def run_here(which: str, *, quick: bool, say: object, **_: Any) -> Result:
        ran.append(which)
        return fakes.result(name=which)

    monkeypatch.setattr(run, "run_here", run_here)
    invoke("policy", *args)
    assert ran == [name]


def test_a_trace_gives_a_table_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    out = tmp_path / "policy.json"
    image = tmp_path / "policy.png"
    file = write_trace(tmp_path / "trace.jsonl")
    invoke("policy", "--trace", str(file), "--json", str(out), "--plot", str(image))
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["policy_replay.lru_vs_belady"]["value"] >= 1
    assert image.read_bytes().startswith(b"\x89PNG")
