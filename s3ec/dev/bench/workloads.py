# SPDX-License-Identifier: Apache-2.0
"""Questions over document images, by seed: who asks about which pictures.

Counts are those of MMLongBench-Doc (arXiv 2407.01523): 135 documents of 47 pages, 1,082 questions,
which are 8 a document. Five pages a question, as the retrieval of M-LongDoc and of ViDoRe V3 hands
over. Nobody publishes which pages are asked for how often, with identities. So any page of the
document and any order of the questions are assumptions of ours.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

_DOCUMENTS, _PAGES, _QUESTIONS, _TOP = 135, 47, 8, 5


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        images: What it shows, in this order. The same name is the same picture.
        question: What it asks.
    """

    images: tuple[str, ...]
    question: str


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in their order.

    Attributes:
        requests: All of them.
        about: What it was made of, for a report: factor and seed.
    """

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


def questions(*, factor: float = 1.0, seed: int = 0) -> Workload:
    """Make the requests; the same arguments make the same ones.

    Args:
        factor: Of the published number of documents. At least one is left.
        seed: Of what is drawn at random.
    """
    source = random.Random(f"questions {seed}")
    shown = []
    for document in range(max(1, round(_DOCUMENTS * factor))):
        pages = [f"document-{document:03}/page-{page:02}" for page in range(_PAGES)]
        shown += [tuple(source.sample(pages, _TOP)) for _ in range(_QUESTIONS)]
    source.shuffle(shown)
    requests = [
        Ask(images, f"Question {number}: what do these pages say, and where?")
        for number, images in enumerate(shown, 1)
    ]
    return Workload(requests, {"factor": factor, "seed": seed})
