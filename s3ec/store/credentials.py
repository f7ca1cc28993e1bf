# SPDX-License-Identifier: Apache-2.0
"""Credentials that change under a running engine: looked for again when a server refuses them.

The SDK renews what comes with an expiry, and nothing else: a shared credentials file, a rotated
key, a session that was revoked are read once per process. It also asks a credential service that
does not answer once per request, and each request waits for that. Here the chain is asked by one
task at a time, seldom, in a thread, and who needs what it is about to say waits for a bounded
time. Checked with botocore 1.40 and 1.44.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from botocore.exceptions import CredentialRetrievalError

from s3ec.errors import UnavailableError
from s3ec.runtime import DaemonPool

log = logging.getLogger(__name__)

# A look that hangs for longer than ``longest_look_s`` keeps its thread, and so many may: a command
# that prints credentials has no limit of the SDK's.
_HANGING_LOOKS = 4


class ChainCredentials:
    """What signs all requests of one store, for one event loop.

    States of the credentials:

    - missing: the chain has given none yet.
    - good: requests get them at once. A look beside the requests renews them now and then.
    - expiring: their end is near. A look has the SDK's object renew them.
    - refused: a server said so (``refused``). A look walks the whole chain. They are good again
      once a server accepts them (``accepted``) or a look finds others.

    Where they are not good, a request waits for a look, but no longer than ``patience_s``. A look
    that ended less than ``look_every_s`` ago is not repeated: the request gets its error, or the
    credentials as they are. One look is under way at a time.

    Of the SDK's own objects it needs ``get_frozen_credentials``, and ``refresh_needed`` where they
    expire; the former may take its time, in a thread.

    Args:
        find: Walks the SDK's chain, in a thread; raises what the SDK raises, NoCredentialsError
            where there are none.
        clock: Monotonic seconds.

    Attributes:
        look_every_s: The chain is asked at most so often. To ask an instance for its role takes
            seconds where there is none, and what is refused stays so until somebody acts.
        patience_s: How long a request waits for credentials that are being looked for.
        longest_look_s: How long the look itself may take.
        last_s: Nearer to their end than this, credentials are not used without asking again.
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
        self._since_s = 0.0  # when those came into use
        self._refused = ""  # the server's code; empty while they are good
        self._refused_s = 0.0
        self._logged: Any = None  # those that the log has called refused, with no others there
        self._problem: Exception | None = None
        self._asked_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._pool = DaemonPool(_HANGING_LOOKS, "s3ec-credentials")

    def __repr__(self) -> str:
        return f"ChainCredentials({getattr(self._found, 'method', None)})"

    async def get_frozen_credentials(self) -> Any:
        """Access key, secret key and token of this moment, the SDK's tuple.

        Raises:
            BotoCoreError, ClientError: The SDK's: the chain has none, or its source refuses.
            UnavailableError: The chain takes longer than a request waits; the look goes on.
        """
        waited_s = self._clock() - self._asked_s
        if self._is_usable():
            if waited_s >= self.look_every_s and self._asking is None:
                self._ask()
            return self._frozen
        if self._asking is None:
            if waited_s < self.look_every_s:
                return self._last_answer()
            self._ask()
        elif waited_s >= self.patience_s:
            raise UnavailableError("the credentials are still being looked for")
        await self._wait()
        return self._last_answer()

    def refused(self, code: str, asked_s: float) -> None:
        """A server refused a request that they signed; the next request looks for others.

        Args:
            code: The server's word for it.
            asked_s: When that request began, by the clock of this object.
        """
        if asked_s >= self._since_s:  # others may have come since
            self._refused = code
            self._refused_s = self._clock()

    def accepted(self, asked_s: float) -> None:
        """A server took a request that they signed: an earlier refusal was a mistake of its own.

        Args:
            asked_s: When that request began.
        """
        if self._refused and asked_s > self._refused_s:
            self._refused = ""

    async def close(self) -> None:
        """End a look that is under way."""
        task, self._asking = self._asking, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self._pool.shutdown(wait=False)

    def _is_usable(self) -> bool:
        if self._frozen is None or self._refused:
            return False
        needed = getattr(self._found, "refresh_needed", None)
        return needed is None or not needed(self.last_s)

    def _last_answer(self) -> Any:
        if self._problem is not None:
            raise self._problem.with_traceback(None)
        return self._frozen

    def _ask(self) -> None:
        self._asked_s = self._clock()
        self._asking = asyncio.get_running_loop().create_task(self._look(), name="s3ec-credentials")

    async def _wait(self) -> None:
        if self._asking is None:
            return
        answered, _ = await asyncio.wait({self._asking}, timeout=self.patience_s)
        if not answered:  # another look may have begun by now
            raise UnavailableError("the credentials are still being looked for")

    async def _look(self) -> None:
        try:
            known = None if self._refused else self._found
            asking = asyncio.get_running_loop().run_in_executor(self._pool, self._ask_chain, known)
            async with asyncio.timeout(self.longest_look_s):
                self._take(*await asking)
        except TimeoutError:
            self._found = None  # others that ask the same object would wait for its lock
            self._problem = UnavailableError("the credentials were looked for in vain: timed out")
        except RuntimeError as exc:  # the SDK's word for renewed ones that have expired already
            self._problem = CredentialRetrievalError(provider=self.method, error_msg=str(exc))
        except Exception as exc:  # noqa: BLE001 - the top of a task; raised again by who waits
            self._problem = exc
        finally:
            self._asking = None

    def _ask_chain(self, known: Any) -> tuple[Any, Any]:
        """The SDK's object and its credentials of this moment, which it renews; in a thread."""
        found = self._find() if known is None else known
        return found, found.get_frozen_credentials()

    def _take(self, found: Any, frozen: Any) -> None:
        self._problem = None
        self._found = found
        if frozen != self._frozen:
            if self._refused:
                log.warning(
                    "the credentials were refused (%s); others are used now (%s)",
                    self._refused,
                    getattr(found, "method", "unknown source"),
                )
            self._frozen, self._refused = frozen, ""
            self._since_s = self._clock()
        elif self._refused and frozen != self._logged:
            self._logged = frozen
            log.warning(
                "the credentials are refused (%s), and there are no others yet (%s)",
                self._refused,
                getattr(found, "method", "unknown source"),
            )
