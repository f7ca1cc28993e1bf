# SPDX-License-Identifier: Apache-2.0
"""Entries that come from the bucket: claimed, then published and pinned in one go."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from s3ec.codec import Header, Verifier
from s3ec.errors import TierError
from s3ec.identity import Key
from s3ec.tier.claims import Claim, Claims
from s3ec.tier.entries import Entries
from s3ec.tier.incoming import Incoming
from s3ec.tier.pins import Pin, Pins
from s3ec.tier.publisher import Publisher


class Intake:
    """One Tier's; blocking and thread-safe.

    The pin is made before the entry gets its name: it costs no second look at the file, and
    nobody can evict the entry in between.
    """

    def __init__(self, publisher: Publisher, pins: Pins, entries: Entries, claims: Claims) -> None:
        self._publisher = publisher
        self._pins = pins
        self._entries = entries
        self._claims = claims

    def try_claim(self, key: Key) -> Claim | None:
        """See ``Tier.try_claim``."""
        claim = self._claims.take(key.digest)
        # In this order: who had the claim before us has published by now.
        if claim is not None and self._entries.contains(key):
            self._claims.release(claim)
            return None
        return claim

    def receive(self, key: Key, pieces: Sequence[bytes | memoryview], header: Header) -> Pin:
        """See ``Tier.receive``."""
        return self._pinned(
            key, header, lambda hold: self._publisher.publish(key, pieces, hold=hold)
        )

    def begin(self, key: Key, first: bytes | memoryview, verifier: Verifier) -> Incoming:
        """See ``Tier.begin``."""
        try:
            file = self._publisher.begin(verifier.header.total_bytes)
        except OSError as exc:
            raise TierError(f"cannot receive {key.name}: {exc}") from exc

        def commit() -> Pin:
            return self._pinned(
                key, verifier.header, lambda hold: self._publisher.finish(key, file, hold=hold)
            )

        return Incoming(file, first, verifier, make_room=self._publisher.make_room, commit=commit)

    def _pinned(
        self, key: Key, header: Header, publish: Callable[[Callable[[str], None]], None]
    ) -> Pin:
        made: list[str] = []

        def hold(temp: str) -> None:
            held = self._pins.hold(temp, key.digest)
            if held is None:
                raise FileNotFoundError(temp)
            os.close(held.fd)
            made.append(held.path)

        try:
            publish(hold)
        except BaseException:
            self._drop(made)
            raise
        self._drop(made[:-1])  # of attempts that failed
        return Pin(Path(made[-1]), header.total_bytes, header)

    def _drop(self, paths: Sequence[str]) -> None:
        for path in paths:
            with suppress(OSError):
                self._pins.drop(path)
