# SPDX-License-Identifier: Apache-2.0
"""Pictures for a soak, what an engine without the connector says about each, and how to compare."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3ec.dev.rigs.engine import EngineProcess, image, text

Answer = dict[str, Any]

QUESTION = "what is to be seen in it, and where?"
ALTERNATIVES = 3
AT_ONCE = 8
# Beside other requests the sums of a bfloat16 model come out a little differently: 0.001 was seen
# between log probabilities. Another picture's embedding changes the tokens, or moves them further.
_TOLERANCE = 0.003
_TOKENS = 4
_SIDE, _BLOCKS = 112, 7


def write_patterns(out: Path, count: int, seed: int) -> list[Path]:
    """Write pictures of coloured blocks, 1 ms each; no two are alike."""
    from PIL import Image

    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for number in range(count):
        source = random.Random(f"{seed} {number}")
        blocks = Image.frombytes("RGB", (_BLOCKS, _BLOCKS), source.randbytes(3 * _BLOCKS**2))
        path = out / f"pattern-{number:05d}.png"
        blocks.resize((_SIDE, _SIDE), Image.Resampling.NEAREST).save(path)
        paths.append(path)
    return paths


def prompt(path: Path) -> list[dict[str, Any]]:
    """One picture and the question that is always asked."""
    return [image(path), text(QUESTION)]


def ask(engine: EngineProcess, paths: Sequence[Path]) -> list[Answer]:
    """What an engine says about some pictures, asked at once."""
    return engine.chat([prompt(path) for path in paths], logprobs=ALTERNATIVES, max_tokens=_TOKENS)


def references(
    engine: EngineProcess, paths: Sequence[Path], *, stop: Callable[[], bool] = lambda: False
) -> dict[Path, Answer]:
    """The answers to compare with, of the pictures that are fit for it.

    Left out are those where two tokens are so close that the sums' differences could swap them,
    and those whose answer is another's.
    """
    found: dict[Path, Answer] = {}
    said: dict[tuple[int, ...], list[Answer]] = {}
    for some in _batches(paths):
        if stop():
            break
        for path, answer in zip(some, ask(engine, some), strict=True):
            alike = said.setdefault(tuple(answer["token_ids"]), [])
            if _is_clear(answer) and not any(compare(answer, other).right for other in alike):
                found[path] = answer
            alike.append(answer)
    return found


def _batches(paths: Sequence[Path]) -> Iterator[Sequence[Path]]:
    for start in range(0, len(paths), AT_ONCE):
        yield paths[start : start + AT_ONCE]


def _is_clear(answer: Answer) -> bool:
    for position in answer["logprobs"]:
        first, second, *_ = sorted(position.values(), reverse=True)
        if first - second < _TOLERANCE:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an answer compares with the recorded one.

    Attributes:
        right: Same tokens, same end, and log probabilities within the tolerance.
        exact: All log probabilities equal to the last bit.
    """

    right: bool
    exact: bool


def compare(answer: Answer, reference: Answer) -> Verdict:
    """Tokens, finish reason and the log probability of each token."""
    same = all(answer[name] == reference[name] for name in ("token_ids", "finish_reason"))
    if not same:
        return Verdict(right=False, exact=False)
    if answer["logprobs"] == reference["logprobs"]:
        return Verdict(right=True, exact=True)
    apart = max(
        abs(mine[str(token)] - theirs[str(token)])
        for token, mine, theirs in zip(
            answer["token_ids"], answer["logprobs"], reference["logprobs"], strict=True
        )
    )
    return Verdict(right=apart <= _TOLERANCE, exact=False)


@dataclass(slots=True)
class PictureSet:
    """Which pictures are asked about when: most often new ones, sometimes any seen before.

    Attributes:
        paths: All of them, in the order in which they appear.
        share: How far the soak is, 0 to 1.
        window: How many are new at a time.
    """

    paths: Sequence[Path]
    share: float = 0.0
    window: int = 64

    def pick(self, source: random.Random) -> list[Path]:
        """Some pictures for requests at one time; one may come twice."""
        there = self.window + int((len(self.paths) - self.window) * min(self.share, 1.0))
        there = min(there, len(self.paths))
        return [self.paths[_place(source, there, self.window)] for _ in range(_how_many(source))]


def _how_many(source: random.Random) -> int:
    return source.randint(1, AT_ONCE)


def _place(source: random.Random, there: int, window: int) -> int:
    first = 0 if source.random() < 0.3 else max(0, there - window)
    return source.randrange(first, there)
