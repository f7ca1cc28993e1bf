# SPDX-License-Identifier: Apache-2.0
"""What is done with the entries of one namespace that are here: look, pin, drop, set aside."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from s3ec import codec
from s3ec.counters import Counters
from s3ec.errors import CorruptEntryError, TierError
from s3ec.identity import Key
from s3ec.tier.entry_paths import EntryPaths
from s3ec.tier.files import note_use, require_own_folders
from s3ec.tier.headers import check_values, read_header
from s3ec.tier.pins import Held, Pin, Pins
from s3ec.tier.quarantine import Quarantine
from s3ec.tier.use_clock import UseClock

_log = logging.getLogger(__name__)


class Entries:
    """Blocking and thread-safe; nothing here raises for what the disk refuses."""

    def __init__(
        self,
        paths: EntryPaths,
        pins: Pins,
        quarantine: Quarantine,
        clock: UseClock,
        counters: Counters,
        failed: Callable[[str, OSError | TierError], None],
        *,
        check_values: bool,
    ) -> None:
        self._paths = paths
        self._pins = pins
        self._quarantine = quarantine
        self._clock = clock
        self._counters = counters
        self._failed = failed
        self._check_values = check_values

    def pin(self, key: Key) -> Pin | None:
        """See ``Tier.pin``."""
        try:
            require_own_folders(self._paths.parents(key))
            held = self._pins.hold(self._paths.path(key), key.digest)
            return None if held is None else self._checked(key, held)
        except FileNotFoundError:
            return None
        except CorruptEntryError as exc:  # not even a file
            self.quarantine(key, exc.reason)
        except (OSError, TierError) as exc:
            self._failed("pin", exc)
        return None

    def unpin(self, pin: Pin) -> None:
        """See ``Tier.unpin``."""
        path = str(pin.path)
        if self._pins.owns(path):
            try:
                self._pins.drop(path)
            except (OSError, TierError) as exc:
                self._failed("unpin", exc)

    def contains(self, key: Key) -> bool:
        """See ``Tier.contains``."""
        try:
            return stat.S_ISREG(os.lstat(self._paths.path(key)).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as exc:
            self._failed("contains", exc)
            return False

    def evict(self, key: Key) -> None:
        """See ``Tier.evict``."""
        try:
            require_own_folders(self._paths.parents(key))
            os.unlink(self._paths.path(key))
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, TierError) as exc:
            self._failed("evict", exc)

    def quarantine(self, key: Key, reason: str) -> None:
        """See ``Tier.quarantine``."""
        path = self._paths.path(key)
        label = f"{self._paths.namespace}--{key.digest.hex()}"
        try:
            require_own_folders(self._paths.parents(key))
            if not self._quarantine.take(path, label, reason, mtime_ns=self._clock.use_ns()):
                return
        except FileNotFoundError:
            return
        except (OSError, TierError) as exc:
            self._failed("quarantine", exc)
            self.evict(key)  # the evidence is worth less than the next reader's time
            if os.path.lexists(path):
                return
        self._counters.add("tier.quarantined")
        _log.warning(
            "entry %s of %s was bad (%s); set aside", key.name, self._paths.namespace, reason
        )

    def _checked(self, key: Key, held: Held) -> Pin | None:
        """Look into what was linked, and touch it; a bad entry is quarantined."""
        try:
            found = os.fstat(held.fd)
            try:
                header = read_header(held.fd, found.st_size)
                codec.check_identity(header, namespace=self._paths.namespace, identifier=key.stored)
                if self._check_values:
                    check_values(held.fd, header)
            except CorruptEntryError as exc:
                self._counters.add(f"corrupt.{exc.reason}")
                self._pins.drop(held.path)
                # Unless somebody has just published a better one.
                if os.lstat(self._paths.path(key)).st_ino == found.st_ino:
                    self.quarantine(key, exc.reason)
                return None
            try:
                note_use(held.fd, found, self._clock.use_ns(found.st_mtime_ns))
            except OSError as exc:  # the entry is as good as before
                self._failed("touch", exc)
        except BaseException:
            self._pins.drop(held.path)
            raise
        finally:
            os.close(held.fd)
        return Pin(Path(held.path), found.st_size, header)
