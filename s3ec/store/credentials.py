# SPDX-License-Identifier: Apache-2.0
"""Credentials that change under a running process: searched again when a server refuses them.

The SDK renews only credentials with an expiry: it reads a shared credentials file once per
process, so a rotated key or a revoked session stays unnoticed. It also asks a credential service
that does not answer once per request, and each request waits for that. Here one task at a time
asks the chain, seldom, in a thread, and a request waits for its result for a bounded time.
Checked with botocore 1.40 and 1.44.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from botocore.exceptions import CredentialRetrievalError

from s3ec.errors import UnavailableError
from s3ec.runtime import DaemonPool

log = logging.getLogger(__name__)

# A search that hangs for longer than ``longest_look_s`` keeps its thread, and this many may hang:
# the SDK sets no time limit for a command that prints credentials.
_HANGING_LOOKS = 4


class ChainCredentials:
    """The credentials that sign all requests of one store, for one event loop.

    The credentials are missing, good or expiring. Good ones are returned at once, and a search in
    the background renews them now and then; otherwise a request waits for a search, at most
    ``patience_s``. A search that began less than ``look_every_s`` ago is not repeated: the request
    gets its error, or the credentials as they are. One search runs at a time. A refusal changes no
    state: see ``others``.

    Of the SDK's own objects it needs ``get_frozen_credentials``, and ``refresh_needed`` where they
    expire; the former runs in a thread and may take seconds.

    Args:
        find: Walks the SDK's chain, in a thread; raises the SDK's errors, NoCredentialsError if
            there are none.
        clock: Monotonic seconds.

    Attributes:
        look_every_s: Least time between two searches. To ask an instance without a role for its
            role takes seconds, and refused credentials stay refused until a person acts.
        patience_s: How long a request waits for a search.
        longest_look_s: How long a search may take.
        last_s: Credentials that expire sooner than this are not used before another search.
    """

    method = "s3ec"
    look_every_s = 5.0
    patience_s = 5.0
    longest_look_s = 30.0
    last_s = 60

    def __init__(
        self, find: Callable[[], Any], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._find = find
        self._clock = clock
        self._found: Any = None
        self._frozen: Any = None
        self._refused: Any = None  # the last ones that a walk was made for
        self._problem: Exception | None = None
        self._asked_s = self._walked_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._pool = DaemonPool(_HANGING_LOOKS, "s3ec-credentials")

    def __repr__(self) -> str:
        return f"ChainCredentials({getattr(self._found, 'method', None)})"

    async def get_frozen_credentials(self) -> Any:
        """Access key, secret key and token of this moment, the SDK's tuple.

        Raises:
            BotoCoreError, ClientError: The SDK's: the chain has none, or its source refuses.
            UnavailableError: The search takes longer than a request waits; it continues.
        """
        is_due = self._clock() - self._asked_s >= self.look_every_s
        if self._is_usable():
            if is_due and self._asking is None:
                self._ask(self._found)
            return self._frozen
        if self._asking is None and is_due:
            self._ask(self._found)
        await self._wait()
        if self._problem is not None:
            raise self._problem.with_traceback(None)
        return self._frozen

    async def others(self, refused: Any, code: str) -> Any:
        """Return credentials to try instead of refused ones; None if there are no others now.

        The chain is walked again, at once for the first refusal of these and seldom for later ones.

        Args:
            refused: The credentials that signed the request.
            code: The server's error code.
        """
        is_first = refused != self._refused
        with contextlib.suppress(UnavailableError):
            is_due = is_first or self._clock() - self._walked_s >= self.look_every_s
            if is_due:
                await self._wait()  # a search in the background does not walk the chain
            begins = is_due and self._asking is None and self._frozen == refused
            if begins:
                self._refused, self._walked_s = refused, self._clock()
                self._ask(None)
            await self._wait()
            source = getattr(self._found, "method", "unknown source")
            if self._frozen != refused:
                if begins:
                    log.warning(
                        "the credentials were refused (%s); others are used now (%s)", code, source
                    )
                return self._frozen
            if begins and is_first:
                log.warning(
                    "the credentials are refused (%s), and there are no others yet (%s)",
                    *(code, source),
                )
        return None

    async def close(self) -> None:
        """Cancel a search that is under way."""
        task, self._asking = self._asking, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self._pool.shutdown(wait=False)

    def _is_usable(self) -> bool:
        if self._frozen is None:
            return False
        needed = getattr(self._found, "refresh_needed", None)
        return needed is None or not needed(self.last_s)

    def _ask(self, known: Any) -> None:
        """Begin a search.

        Args:
            known: The SDK's object, which renews its credentials; None to walk the whole chain.
        """
        self._asked_s = self._clock()
        self._asking = asyncio.get_running_loop().create_task(
            self._look(known), name="s3ec-credentials"
        )

    async def _wait(self) -> None:
        if self._asking is None:
            return
        patience_s = self._asked_s + self.patience_s - self._clock()
        answered, _ = await asyncio.wait({self._asking}, timeout=max(patience_s, 0.0))
        if not answered:  # another search may have begun by now
            raise UnavailableError("the credentials are still being looked for")

    async def _look(self, known: Any) -> None:
        try:
            asking = asyncio.get_running_loop().run_in_executor(self._pool, self._ask_chain, known)
            async with asyncio.timeout(self.longest_look_s):
                self._found, self._frozen = await asking
            self._problem = None
        except TimeoutError:
            self._found = None  # later searches of the same object would wait for its lock
            self._problem = UnavailableError("the credentials were looked for in vain: timed out")
        except RuntimeError as exc:  # the SDK's error if renewed credentials have expired already
            self._problem = CredentialRetrievalError(provider=self.method, error_msg=str(exc))
        except Exception as exc:  # noqa: BLE001 - the top of a task; waiting requests raise it
            self._problem = exc
        finally:
            self._asking = None

    def _ask_chain(self, known: Any) -> tuple[Any, Any]:
        """Return the SDK's object and its credentials, renewed if need be; in a thread."""
        found = self._find() if known is None else known
        return found, found.get_frozen_credentials()
