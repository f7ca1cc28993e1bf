# SPDX-License-Identifier: Apache-2.0
"""Which requests wait for which identifiers; in memory, for the scheduler's thread."""

from __future__ import annotations


class Interest:
    """A relation between requests and identifiers, kept in both directions.

    It holds only identifiers that are being fetched or pinned, and each for as long as that
    lasts: vLLM 0.24 and 0.25 do not tell when a request ends.

    Attributes:
        requests: Request id to what it waits for. For reading, so that the hooks can tell in one
            look that a request waits for nothing.
    """

    def __init__(self) -> None:
        self.requests: dict[str, set[str]] = {}
        self._identifiers: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._identifiers)

    def note(self, request_id: str, identifier: str) -> None:
        """The request waits for it, or will need it later."""
        wanted = self.requests.get(request_id)
        if wanted is None:
            wanted = self.requests[request_id] = set()
        if identifier not in wanted:
            wanted.add(identifier)
            self._identifiers.setdefault(identifier, set()).add(request_id)

    def is_wanted(self, identifier: str) -> bool:
        """Whether any request waits for it."""
        return identifier in self._identifiers

    def leave(self, request_id: str, identifier: str) -> None:
        """The request does not wait for it any more, if it did."""
        _take_out(self.requests, request_id, identifier)
        _take_out(self._identifiers, identifier, request_id)

    def leave_all(self, request_id: str) -> list[str]:
        """The request waits for nothing any more.

        Returns:
            What it had waited for and nobody else does.
        """
        wanted = self.requests.pop(request_id, ())
        for identifier in wanted:
            _take_out(self._identifiers, identifier, request_id)
        return [identifier for identifier in wanted if identifier not in self._identifiers]

    def drop(self, identifier: str) -> None:
        """There is nothing left to wait for."""
        for request_id in self._identifiers.pop(identifier, ()):
            _take_out(self.requests, request_id, identifier)


def _take_out(sets: dict[str, set[str]], name: str, member: str) -> None:
    members = sets.get(name)
    if members is not None:
        members.discard(member)
        if not members:
            del sets[name]
