# SPDX-License-Identifier: Apache-2.0
"""Which steps may still be reading pinned files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Steps:
    """Counts steps, and says when one that loads has ended on every rank."""

    def __init__(self, *, ranks: int, in_flight: int) -> None:
        """Start before the first step.

        Args:
            ranks: Workers that load what a step grants.
            in_flight: Steps that can be scheduled before the first of them has ended.
        """
        self._ranks = ranks
        self._in_flight = in_flight
        # Identifiers, and the ranks that reported.
        self._loading: dict[int, tuple[list[str], set[int]]] = {}
        self.current = 0

    def __len__(self) -> int:
        return len(self._loading)

    def begin(self) -> list[str]:
        """Go on to the next step.

        Returns:
            What was loaded by steps that must have ended by now, reported or not: steps end in
            order, and vLLM schedules at most ``in_flight`` ahead; one more is for ranks behind
            the one that answers.
        """
        self.current += 1
        ended: list[str] = []
        for step in list(self._loading):
            if self.current - step <= self._in_flight:
                break
            ended += self._loading.pop(step)[0]
        return ended

    def load(self, identifiers: Iterable[str]) -> None:
        """The current step loads these."""
        self._loading[self.current] = (list(identifiers), set())

    def reported(self, loaded: Mapping[int, set[int]]) -> list[str]:
        """Take the ranks' word for what they have finished.

        Returns:
            What was loaded by steps that every rank has reported.
        """
        ended: list[str] = []
        for step, ranks in loaded.items():
            entry = self._loading.get(step)
            if entry is not None:
                entry[1].update(ranks)
                if len(entry[1]) >= self._ranks:
                    ended += self._loading.pop(step)[0]
        return ended
