# SPDX-License-Identifier: Apache-2.0
"""What checks share: the context that they get, and the outcome that they return."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from s3ec.config import LoadedSettings
from s3ec.errors import UnavailableError
from s3ec.runtime import LoopThread, in_thread
from s3ec.settings import Settings
from s3ec.store.base import Store

if TYPE_CHECKING:
    from s3ec.doctor.latency import StoreLatency
    from s3ec.doctor.s3_probe import S3Probe, ServerProbe
    from s3ec.doctor.serving import VllmChild
    from s3ec.identity import Namespace


class Verdict(StrEnum):
    """How a check ended. The values are those of ``s3ec doctor --json``."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one check, still without its name.

    Attributes:
        verdict: ``warn`` does not stop a fleet, ``fail`` does, ``skip`` was not examined.
        found: What was seen; never a credential.
        mend: What to do about it; empty where there is nothing to do.
        cell: The same in a word or two, for the table of stores; empty where there is no more to
            say than the verdict.
    """

    verdict: Verdict
    found: str
    mend: str = ""
    cell: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A named outcome.

    Attributes:
        name: Stable, for machines: ``bucket``, ``conditional_put``...
        outcome: What the check says.
        group: Heading for people.
    """

    name: str
    outcome: Outcome
    group: str = ""

    def to_json(self) -> dict[str, str]:
        """One element of ``checks`` in ``s3ec doctor --json``."""
        return {
            "name": self.name,
            "verdict": self.outcome.verdict.value,
            "found": self.outcome.found,
            "mend": self.outcome.mend,
        }


def ok(found: str, *, cell: str = "") -> Outcome:
    """All is well."""
    return Outcome(Verdict.OK, found, cell=cell)


def warn(found: str, mend: str, *, cell: str = "") -> Outcome:
    """It works, but not as well as it could."""
    return Outcome(Verdict.WARN, found, mend, cell)


def fail(found: str, mend: str, *, cell: str = "") -> Outcome:
    """It would not work."""
    return Outcome(Verdict.FAIL, found, mend, cell)


def skip(found: str, mend: str = "") -> Outcome:
    """Not examined, and why."""
    return Outcome(Verdict.SKIP, found, mend)


T = TypeVar("T")

# What is added to the timeouts of the settings, for name lookup, redirects and a second request.
_SLACK_S = 2.0
_LONGEST_S = 30.0
# How long the loop may take to end, once its requests are cancelled.
_STOP_S = 0.1


@dataclass(slots=True)
class CheckContext:
    """The configuration under examination, and what earlier checks found out for later ones.

    Attributes:
        loaded: Settings and origins.
        transfer: The --ec-transfer-config, empty where it is not known.
        vllm_args: Arguments of ``vllm serve``, or None to leave the model out.
        with_vllm: Whether to look at vLLM at all.
        with_latency: Whether to measure the store.
        child: The process that imports vLLM, None before it runs and where vLLM is not installed.
        server: The endpoint's answer, once there is one.
        first_object: Name of some object in the bucket, once listed.
        listed: Whether listing worked.
        may_delete: Whether probe objects can be taken away again.
        encryption: What the server said of the encryption of a write.
        namespace: The namespace of the model, once vLLM has described it.
        latency: Of the store, once measured.
    """

    loaded: LoadedSettings
    transfer: Mapping[str, Any]
    vllm_args: Sequence[str] | None
    with_vllm: bool = True
    with_latency: bool = False
    child: VllmChild | None = None
    server: ServerProbe | None = None
    first_object: str | None = None
    listed: bool = False
    may_delete: bool = True
    encryption: str | None = None
    namespace: Namespace | None = None
    latency: StoreLatency | None = None
    _loop: LoopThread = field(default_factory=lambda: LoopThread("s3ec-doctor"))
    _store: Store | None = None
    _s3: S3Probe | None = None
    _making_s3: threading.Lock = field(default_factory=threading.Lock)

    @property
    def settings(self) -> Settings:
        """The settings under examination."""
        return self.loaded.settings

    @property
    def s3(self) -> S3Probe:
        """Requests that the Store protocol does not have. The first use imports the SDK."""
        from s3ec.doctor.s3_probe import S3Probe

        with self._making_s3:
            if self._s3 is None:
                self._s3 = S3Probe(self.settings)
            return self._s3

    @property
    def only_reads(self) -> bool:
        """Whether --ec-transfer-config says that this is a consumer, which never writes."""
        return self.transfer.get("ec_role") == "ec_consumer"

    @property
    def deadline_s(self) -> float:
        """Longest that one network check may take."""
        timeouts_s = self.settings.connect_timeout_s + self.settings.read_timeout_s
        return min(timeouts_s + _SLACK_S, _LONGEST_S)

    def ask(self, call: Callable[[], T]) -> T:
        """Run a blocking SDK call within the deadline.

        The SDK has timeouts per phase and none over all: name lookup, credentials and a trickling
        reply have none.

        Raises:
            UnavailableError: No answer in time.
        """
        return self._answer(in_thread(call, "s3ec-doctor"))

    def ask_store(
        self, call: Callable[[Store], Awaitable[T]], *, deadline_s: float | None = None
    ) -> T:
        """Run a coroutine with the store that the connector would use.

        Args:
            deadline_s: How long it may take; None for ``deadline_s`` of the settings.

        Raises:
            UnavailableError: No answer in time.
        """

        async def run() -> T:
            return await call(self._opened())

        return self._answer(self._loop.submit(run()), deadline_s)

    def _answer(self, future: Future[T], deadline_s: float | None = None) -> T:
        deadline_s = deadline_s or self.deadline_s
        try:
            return future.result(deadline_s)
        except TimeoutError as exc:
            if future.done():  # the call's own TimeoutError
                raise
            future.cancel()
            raise UnavailableError(f"no answer within {deadline_s:.0f} s") from exc

    def _opened(self) -> Store:
        from s3ec.store.open import open_store

        if self._store is None:
            self._store = open_store(self.settings, patient=True)
        return self._store

    def close(self, timeout_s: float) -> None:
        """Close connections, and end vLLM's process and every request that is still under way.

        Args:
            timeout_s: How long the store may take to close its connections.
        """
        if self._s3 is not None:
            self._s3.close()
        if self._store is not None:
            with suppress(Exception):  # it did its work, or told what was wrong
                self._loop.run(self._store.close(), timeout_s)
        self._loop.stop(_STOP_S)
        if self.child is not None:
            self.child.close()
