# SPDX-License-Identifier: Apache-2.0
"""How this process derives keys: under whose secret, and of which identifiers at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cachetools import LRUCache

from s3ec.counters import Counters
from s3ec.identity import Key, is_content_hash, make_key
from s3ec.settings import Settings
from s3ec.tenant import Tenant

# A content hash and its adapter's name. What is longer is hashed at each lookup, which takes a
# few microseconds.
_REMEMBERED_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class Naming:
    """The rules of one process; what identity.make_key does without any.

    Attributes:
        tenant: Whose secret goes into every name.
        trust_client_ids: Whether an identifier that is no content hash has a key.
    """

    tenant: Tenant | None = None
    trust_client_ids: bool = True

    def make_key(self, identifier: str) -> Key | None:
        """As identity.make_key; None also where refuses() is true."""
        if self.refuses(identifier):
            return None
        return make_key(identifier, self.tenant)

    def refuses(self, identifier: str) -> bool:
        """Whether a client chose this identifier, and is not to."""
        return not self.trust_client_ids and not is_content_hash(identifier)


def naming_of(settings: Settings) -> Naming:
    """The rules that some settings ask for.

    Raises:
        ConfigError: The tenant's secret cannot be read, or is too short.
    """
    return Naming(Tenant.read(settings.tenant_key), settings.trust_client_ids)


class KeyMaker:
    """make_key with a bounded memory of recent answers; not thread-safe, one per owner.

    A scheduler asks for the same identifiers at every step; hashing them each time would be
    most of the cost of a lookup. At most 64 MiB, whatever clients call their pictures.
    """

    def __init__(
        self, make: Callable[[str], Key | None] = make_key, *, capacity: int = 65536
    ) -> None:
        self._make = make
        self._known: LRUCache[str, Key | None] = LRUCache(capacity)

    def __call__(self, identifier: str) -> Key | None:
        try:
            return self._known[identifier]
        except KeyError:
            key = self._make(identifier)
            # What is refused can be huge, and what is not can have 4 KiB; remembering that would
            # let clients fill the memory.
            if key is not None and len(identifier) <= _REMEMBERED_CHARACTERS:
                self._known[identifier] = key
            return key


class CountedKeys(KeyMaker):
    """A KeyMaker that can count what has no key.

    Counters: ``ids.refused``, what a client chose and is not to; ``refused_identifiers``, others.
    """

    def __init__(self, naming: Naming, counters: Counters, *, capacity: int = 65536) -> None:
        super().__init__(naming.make_key, capacity=capacity)
        self._naming = naming
        self._counters = counters

    def asked(self, identifier: str) -> Key | None:
        """As a call; counted where it answers None."""
        key = self(identifier)
        if key is None:
            chosen = self._naming.refuses(identifier)
            self._counters.add("ids.refused" if chosen else "refused_identifiers")
        return key
