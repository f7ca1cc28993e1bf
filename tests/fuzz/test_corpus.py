# SPDX-License-Identifier: Apache-2.0
"""Every reader of foreign bytes, on the corpus that fuzzing left and on changes of it.

``make fuzz`` goes on from here for longer, led by what code each input reaches.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
SEEDS = {name: sorted((CORPUS / name).glob("*")) for name in TARGETS}
_EXAMPLES = 40

numbers = st.integers(0, 2**12)
edits = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "drop", "repeat"]), numbers,
              st.binary(max_size=8)),
    max_size=6,
)  # fmt: skip
values = st.sampled_from(
    [None, True, -1, 0, 2**48, 2**63, 1e300, "", "x" * 300, "../", "\0", "\ud800", [], {}, [[]]]
)


def changed(seed: bytes, edits: Sequence[tuple[str, int, bytes]]) -> bytes:
    """A seed after some changes of its bytes."""
    data = bytearray(seed)
    for kind, number, some in edits:
        at = number % (len(data) + 1)
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << number % 8
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = some
        elif kind == "drop":
            del data[at : at + len(some)]
        elif kind == "repeat":
            data[at:at] = data[at : at + 64]
    return bytes(data)


def replaced(seed: bytes, picks: Sequence[int], value: object) -> bytes:
    """A seed that is JSON, in front of other bytes or not, with another value somewhere."""
    text, zero, rest = seed.partition(b"\0")
    try:
        content = json.loads(text)
    except ValueError:
        return seed
    within = content
    for pick in picks:
        places = list(within) if isinstance(within, dict) else list(range(len(within)))
        if not places:
            break
        place = places[pick % len(places)]
        if not isinstance(within[place], (dict, list)):
            within[place] = value
            break
        if pick % 7 == 0:
            within[place] = value
            break
        within = within[place]
    return json.dumps(content).encode() + zero + rest


def test_every_target_has_seeds_and_nothing_else_is_there() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    assert [name for name, seeds in SEEDS.items() if not seeds] == []
    assert sum(path.stat().st_size for seeds in SEEDS.values() for path in seeds) < 2**17


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_keeps_its_promises_on_the_corpus(name: str) -> None:
    for seed in SEEDS[name]:
        try:
            TARGETS[name](seed.read_bytes())
        except Exception as exc:
            raise AssertionError(f"{seed}: {exc!r}") from exc


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_keeps_its_promises_on_changes_of_the_corpus(name: str) -> None:
    seeds = [seed.read_bytes() for seed in SEEDS[name]]

    @settings(max_examples=_EXAMPLES)
    @given(st.sampled_from(seeds), edits, st.lists(numbers, max_size=6), values)
    def run(
        seed: bytes, some: list[tuple[str, int, bytes]], picks: list[int], value: object
    ) -> None:
        TARGETS[name](changed(replaced(seed, picks, value), some))

    run()
