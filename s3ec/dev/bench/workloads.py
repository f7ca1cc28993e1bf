# SPDX-License-Identifier: Apache-2.0
"""Questions over document images, by name and seed: who asks about which pictures, and when.

Counts are those of published sets of questions. Nobody publishes which pages are asked for how
often, with identities, so which pages a request names is an assumption of ours in each of them:

===========  =====================================================================================
questions    MMLongBench-Doc (arXiv 2407.01523): 135 documents of 47 pages, 1,082 questions, which
             are 8 a document. Five pages a question, as the retrieval of M-LongDoc and of ViDoRe
             V3 hands over. Assumed: any page of the document, and any order of the questions.
decks        SlideVQA (arXiv 2301.04883): 2,600 decks of 20 slides, 14,500 questions, which are 5.6
             a deck. A request shows the whole deck. Assumed: any order of the questions.
zipf         ViDoRe V3 (arXiv 2601.08620): 26,000 pages, 3,099 queries, five pages each. Assumed:
             how often a page is asked for falls with its rank by Zipf's law.
scan         ``zipf``, and in its middle one scan of the whole corpus, ten pages a request.
pool         50 requests of 10 images. The pool has 50 images for each one of a request, as the
             cache workload of SGLang's pull request 30398 has. Assumed there too: any of them.
===========  =====================================================================================

A factor scales documents, decks, pages and requests alike, and leaves the shape of a request.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

_DOCUMENTS, _PAGES, _QUESTIONS, _TOP = 135, 47, 8, 5
_DECKS, _SLIDES, _QUESTIONS_A_DECK = 2600, 20, 5.6
_CORPUS, _QUERIES = 26_000, 3_099
_SCANNED_AT_ONCE = 10
_POOL_REQUESTS, _POOL_IMAGES, _POOL_EACH = 50, 10, 50
# An assumption. Requests to web proxies had 0.64 to 0.83 (Breslau and others, INFOCOM 1999); of
# pages and their embeddings nothing is published.
_EXPONENT = 1.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        at_s: When it arrives, in seconds from the first one's clock; None for as soon as one of
            those before it has ended.
        images: What it shows, in this order. The same name is the same picture.
        question: What it asks.
    """

    at_s: float | None
    images: tuple[str, ...]
    question: str


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their arrival.

    Attributes:
        name: Which it is.
        requests: All of them.
        about: What it was made of, for a report: factor, seed, rate and exponent where it has one.
    """

    name: str
    requests: Sequence[Ask]
    about: dict[str, float]

    @property
    def names(self) -> list[str]:
        """All pictures, in the order of their first request."""
        return list(dict.fromkeys(itertools.chain.from_iterable(r.images for r in self.requests)))

    @property
    def pictures(self) -> int:
        """How many pictures are different."""
        return len(self.names)

    @property
    def references(self) -> int:
        """How many pictures are shown, each as often as it is."""
        return sum(len(request.images) for request in self.requests)

    @property
    def most_images(self) -> int:
        """Of one request."""
        return max((len(request.images) for request in self.requests), default=0)

    def arriving(self, rate_per_s: float, seed: int = 0) -> Workload:
        """The same requests at random times (Poisson), so many a second."""
        source = random.Random(f"arrivals {seed}")
        at_s = itertools.accumulate(source.expovariate(rate_per_s) for _ in self.requests)
        requests = [replace(one, at_s=when) for one, when in zip(self.requests, at_s, strict=True)]
        return replace(self, requests=requests, about={**self.about, "rate_per_s": rate_per_s})


def make(name: str, *, factor: float = 1.0, seed: int = 0) -> Workload:
    """Make a workload; the same arguments make the same one.

    Args:
        name: One of ``NAMES``.
        factor: Of the published counts. At least one document, deck or request is left.
        seed: Of what is drawn at random.

    Raises:
        ValueError: No such workload, or a factor that is not above zero.
    """
    if name not in _MAKERS:
        raise ValueError(f"workload {name!r} is not one of {', '.join(NAMES)}")
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"factor {factor} is not above zero")
    about = {"factor": factor, "seed": seed}
    if name in ("zipf", "scan"):
        about["exponent"] = _EXPONENT
    # Without its scan, `scan` is the same as `zipf`.
    source = random.Random(f"{'zipf' if name == 'scan' else name} {seed}")
    shown = _MAKERS[name](factor, source)
    requests = [
        Ask(None, images, f"Question {number}: what do these pages say, and where?")
        for number, images in enumerate(shown, 1)
    ]
    return Workload(name, requests, about)


def _scaled(count: float, factor: float, least: int = 1) -> int:
    return max(least, round(count * factor))


def _questions(factor: float, source: random.Random) -> Iterable[tuple[str, ...]]:
    asked = []
    for document in range(_scaled(_DOCUMENTS, factor)):
        pages = [f"document-{document:03}/page-{page:02}" for page in range(_PAGES)]
        asked += [tuple(source.sample(pages, _TOP)) for _ in range(_QUESTIONS)]
    source.shuffle(asked)
    return asked


def _decks(factor: float, source: random.Random) -> Iterable[tuple[str, ...]]:
    asked = []
    for deck in range(_scaled(_DECKS, factor)):
        slides = tuple(f"deck-{deck:04}/slide-{slide:02}" for slide in range(_SLIDES))
        # Five or six of a deck, so that the mean comes out.
        until, before = ((deck + more) * _QUESTIONS_A_DECK for more in (1, 0))
        asked += [slides] * (math.floor(until + 1e-9) - math.floor(before + 1e-9))
    source.shuffle(asked)
    return asked


def _corpus(factor: float) -> list[str]:
    return [f"page-{page:05}" for page in range(_scaled(_CORPUS, factor, least=_TOP))]


def _zipf(factor: float, source: random.Random) -> Iterator[tuple[str, ...]]:
    ranked = _corpus(factor)
    # A page's rank says nothing about its place in the corpus.
    source.shuffle(ranked)
    weights = list(itertools.accumulate(rank**-_EXPONENT for rank in range(1, len(ranked) + 1)))
    for _ in range(_scaled(_QUERIES, factor)):
        images: dict[str, None] = {}
        while len(images) < _TOP:
            (page,) = source.choices(ranked, cum_weights=weights)
            images[page] = None
        yield tuple(images)


def _scan(factor: float, source: random.Random) -> Iterable[tuple[str, ...]]:
    asked = list(_zipf(factor, source))
    pages = _corpus(factor)
    scan = [
        tuple(pages[start : start + _SCANNED_AT_ONCE])
        for start in range(0, len(pages), _SCANNED_AT_ONCE)
    ]
    middle = len(asked) // 2
    return [*asked[:middle], *scan, *asked[middle:]]


def _pool(factor: float, source: random.Random) -> Iterator[tuple[str, ...]]:
    size = _scaled(_POOL_IMAGES * _POOL_EACH, factor, least=_POOL_IMAGES)
    pool = [f"image-{number:05}" for number in range(size)]
    for _ in range(_scaled(_POOL_REQUESTS, factor)):
        yield tuple(source.sample(pool, _POOL_IMAGES))


_MAKERS: dict[str, Callable[[float, random.Random], Iterable[tuple[str, ...]]]] = {
    "questions": _questions,
    "decks": _decks,
    "zipf": _zipf,
    "scan": _scan,
    "pool": _pool,
}
NAMES = tuple(_MAKERS)
