# SPDX-License-Identifier: Apache-2.0
"""Which fault comes when in a soak: a seed gives the same sequence each time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Two faults at once, so often.
_PAIRS = 0.25
_DURATION_S = (4.0, 16.0)
_PAUSE_S = (4.0, 12.0)


@dataclass(frozen=True, slots=True)
class Step:
    """Faults that begin and end together.

    Attributes:
        number: Counts from 0.
        kinds: One or two kinds of fault.
        duration_s: How long they last.
        pause_s: Shortest time without a fault after them.
        seed: For whatever they choose at random.
    """

    number: int
    kinds: tuple[str, ...]
    duration_s: float
    pause_s: float
    seed: int


def plan(seed: int, kinds: Sequence[str], *, scale: float = 1.0) -> Iterator[Step]:
    """Steps without end; every kind comes once before any comes again.

    Args:
        seed: Same seed and kinds, same steps.
        kinds: Of faults.
        scale: Of all times.
    """
    source = random.Random(f"soak {seed}")
    bag: list[str] = []
    number = 0
    while True:
        chosen: list[str] = []
        for _ in range(2 if source.random() < _PAIRS else 1):
            if not bag:
                bag = list(kinds)
                source.shuffle(bag)
            if bag[-1] not in chosen:
                chosen.append(bag.pop())
        yield Step(
            number,
            tuple(chosen),
            source.uniform(*_DURATION_S) * scale,
            source.uniform(*_PAUSE_S) * scale,
            source.getrandbits(32),
        )
        number += 1
