# SPDX-License-Identifier: Apache-2.0
"""The bucket of a corpus, open for a program without a loop; jobs and ``Corpus`` work on it.

Its work runs on an asyncio loop of its own in one thread, so it also works in a notebook, where a
loop runs already, and several threads may share it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from s3ec.corpus.entries import key_of
from s3ec.counters import Counters
from s3ec.errors import S3ECError, UnavailableError
from s3ec.identity import Key, Layout
from s3ec.namespaces import Spell, as_argument, choose_namespace, require_ours
from s3ec.runtime import LoopThread
from s3ec.store.base import Store
from s3ec.store.open import deleting_everywhere, open_store, with_conditional_put
from s3ec.store.retry import RetryStore
from s3ec.store.unreachable import in_plain_words
from s3ec.tenant import Tenant
from s3ec.tier.files import Folders

if TYPE_CHECKING:
    from s3ec.index.local import NodeFolder
    from s3ec.settings import Settings

T = TypeVar("T")
log = logging.getLogger(__name__)

NAMESPACE_VARIABLE = "S3EC_NAMESPACE"
ATTEMPTS = 5
"""Attempts of each request: work of thousands of requests must not end with the first failure."""
_CLOSE_S = 5.0
_DISK_THREADS = 4


class OpenBucket:
    """A store with retries, a thread with a loop that works on it, and the chosen namespace.

    States: open until ``close``, then closed for good. It opens no connection before the first
    call that needs one. A forked child opens a bucket of its own. Safe to use from any thread.

    Attributes:
        settings: The settings of the corpus.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        store: Store | None = None,
        attempts: int = ATTEMPTS,
        spell: Spell = as_argument,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """Open a bucket by loaded settings; other programs call ``Corpus.open``.

        Args:
            settings: Where the corpus is.
            store: The bucket, without retries; opened from the settings if None.
            attempts: How often each request is sent at most.
            spell: How messages spell arguments.
            note: Called with a message on the choice if several namespaces fit; the log if None.

        Raises:
            ConfigError: Profile, region or CA file cannot be used.
        """
        self.settings = settings
        opened = store or open_store(settings, patient=True)
        self._store = RetryStore(opened, Counters(), attempts=attempts)
        self._spell = spell
        self._note = note or (lambda text: log.info("%s", text))
        # As many disk threads as a node has at most: no scheduler runs in this process.
        self._thread = LoopThread("s3ec-corpus", disk_threads=_DISK_THREADS)
        self._closed = False
        # Several threads may fill these, each with the same values.
        self._chosen: dict[tuple[str | None, str | None], str] = {}
        self._writable: Store | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.settings.corpus)!r})"

    def close(self) -> None:
        """Close the connections, within 10 s. Idempotent."""
        if self._closed:
            return
        with suppress(UnavailableError, TimeoutError):
            self.run(lambda store: asyncio.wait_for((self._writable or store).close(), _CLOSE_S))
        self._closed = True
        self._thread.stop(_CLOSE_S)

    @property
    def tenant(self) -> Tenant | None:
        """The tenant whose secret is in the names; None without one.

        Raises:
            ConfigError: It cannot be read, or is too short.
        """
        return Tenant.read(self.settings.tenant_key)

    def key_of(self, text: str) -> Key | None:
        """The key of an identifier, a label or an object's name.

        Returns:
            The key; None if nothing can be stored under it.
        """
        return key_of(text, self.tenant)

    def index_folder(self, layout: Layout) -> NodeFolder:
        """This node's files of the index, where its engines read of deletions."""
        from s3ec.index.local import NodeFolder

        root = Path(os.path.realpath(self.settings.cache_dir))
        return NodeFolder.of(Folders(root), layout.namespace)

    def choose(self, namespace: str | None = None, *, model: str | None = None) -> str:
        """The name of the namespace that fits, see ``Corpus``.

        Raises:
            NotFoundError: The bucket has none, or none that fits.
            AmbiguousError: Several models fit, or the store has no times of writing; the message
                lists the choices.
        """
        origin, variable = "", os.environ.get(NAMESPACE_VARIABLE)
        if variable and not namespace and not model:
            namespace, origin = variable, NAMESPACE_VARIABLE
        asked = namespace or None, model or None
        if asked not in self._chosen:
            name, note = self.run(
                lambda store: choose_namespace(store, *asked, self._spell, origin=origin)
            )
            self._chosen[asked] = self._chosen[name, None] = name
            if note:
                self._note(note)
        return self._chosen[asked]

    def run(self, work: Callable[[Store], Awaitable[T]]) -> T:
        """Run a coroutine of s3ec's own parts on the store, and wait. For jobs and commands.

        After an interruption, such as Ctrl-C, it waits until the coroutine has cleaned up.

        Raises:
            S3ECError: The corpus is closed; and errors of the coroutine.
        """
        ended = threading.Event()

        async def watched() -> T:
            try:
                return await work(self._store)
            except UnavailableError as exc:
                plain = in_plain_words(exc, self.settings)
                if plain is None:
                    raise
                raise plain from exc
            finally:
                ended.set()

        future = self._submit(watched())
        try:
            return future.result()
        except CancelledError as exc:
            raise S3ECError("this corpus was closed meanwhile; open another one") from exc
        finally:
            if not future.done():
                future.cancel()
                ended.wait()

    def within(
        self,
        work: Callable[[Store, Layout], Awaitable[T]],
        namespace: str | None = None,
        *,
        model: str | None = None,
        write: bool = False,
        dry_run: bool = False,
    ) -> T:
        """As run, on one namespace.

        Args:
            write: True to change it: refuse a namespace that a newer s3ec made, and probe first
                whether the server honours conditional writes.
            dry_run: True if ``work`` only reports what would change: then nothing is probed.

        Raises:
            ConfigError: See ``write``.
            NotFoundError, AmbiguousError: No namespace fits, or several do.
        """
        layout = Layout(self.choose(namespace, model=model))
        if write and not dry_run:
            return self.change(lambda store: work(store, layout), layout.namespace)

        async def call(store: Store) -> T:
            if write:
                await require_ours(store, layout.namespace)
            return await work(store, layout)

        return self.run(call)

    def change(self, work: Callable[[Store], Awaitable[T]], namespace: str) -> T:
        """As run, to change a namespace, which need not exist yet.

        Raises:
            ConfigError: A newer s3ec made it.
        """

        async def call(store: Store) -> T:
            await require_ours(store, namespace)
            if self._writable is None:
                store = await with_conditional_put(store)
                self._writable = deleting_everywhere(self.settings, store)
            return await work(self._writable)

        return self.run(call)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            coroutine.close()  # it will not be awaited
            raise S3ECError("this corpus is closed; open another one")
        try:
            return self._thread.submit(coroutine)
        except RuntimeError as exc:  # it is just closing, or no descriptor is left
            raise S3ECError(f"this corpus cannot be used: {exc}") from exc
