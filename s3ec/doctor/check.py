# SPDX-License-Identifier: Apache-2.0
"""What checks share: the context that they get, and the outcome that they return."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from s3ec.config import LoadedSettings
from s3ec.errors import UnavailableError
from s3ec.runtime import LoopThread
from s3ec.settings import Settings
from s3ec.store.base import Store

if TYPE_CHECKING:
    from s3ec.doctor.s3_probe import S3Probe, ServerProbe
    from s3ec.doctor.serving import VllmChild
    from s3ec.identity import Namespace

T = TypeVar("T")

REQUEST_S = 10.0
"""Longest that a check waits for one answer of the store, in seconds."""
# For closing connections, and for ending the loop.
_CLOSE_S = 1.0


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
        mend: What to do about it; empty where there is nothing to do, always so for ``skip``.
    """

    verdict: Verdict
    found: str
    mend: str = ""


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


def ok(found: str) -> Outcome:
    """All is well."""
    return Outcome(Verdict.OK, found)


def warn(found: str, mend: str) -> Outcome:
    """It works, but not as well as it could."""
    return Outcome(Verdict.WARN, found, mend)


def fail(found: str, mend: str) -> Outcome:
    """It would not work."""
    return Outcome(Verdict.FAIL, found, mend)


def skip(found: str) -> Outcome:
    """Not examined, and why. What was not examined needs no remedy."""
    return Outcome(Verdict.SKIP, found)


@dataclass
class CheckContext:
    """The configuration under examination, and what earlier checks found out for later ones.

    Attributes:
        loaded: Settings and origins.
        transfer: The --ec-transfer-config, empty where it is not known.
        vllm_args: Arguments of ``vllm serve``, or None to leave the model out.
        with_vllm: Whether to look at vLLM at all.
        timeout_s: Longest wait for one answer of the store.
        child: What vLLM said of itself; None before, and where vLLM is not installed.
        server: The endpoint's answer, once there is one.
        first_object: Name of some object in the bucket, once listed.
        may_delete: Whether probe objects can be taken away again.
        encryption: What the server said of the encryption of a write.
        namespace: The namespace of the model, once vLLM has described it.
    """

    loaded: LoadedSettings
    transfer: Mapping[str, Any]
    vllm_args: Sequence[str] | None
    with_vllm: bool = True
    timeout_s: float = REQUEST_S
    child: VllmChild | None = None
    server: ServerProbe | None = None
    first_object: str | None = None
    may_delete: bool = True
    encryption: str | None = None
    namespace: Namespace | None = None
    _loop: LoopThread = field(default_factory=lambda: LoopThread("s3ec-doctor"))

    @property
    def settings(self) -> Settings:
        """The settings under examination."""
        return self.loaded.settings

    @cached_property
    def patient(self) -> Settings:
        """The same, for clients that wait as long as a check does: an engine has no time, this has.

        A busy machine answers late, which says nothing about the bucket.
        """
        times = {"connect_timeout_s": self.timeout_s, "read_timeout_s": self.timeout_s}
        return self.settings.model_copy(update=times)

    @cached_property
    def s3(self) -> S3Probe:
        """Requests that the Store protocol does not have. The first use imports the SDK."""
        from s3ec.doctor.s3_probe import S3Probe

        return S3Probe(self.patient)

    @cached_property
    def _store(self) -> Store:
        from s3ec.store.open import open_store

        return open_store(self.patient, patient=True)

    @property
    def only_reads(self) -> bool:
        """Whether --ec-transfer-config says that this is a consumer, which never writes."""
        return self.transfer.get("ec_role") == "ec_consumer"

    def ask_store(
        self,
        call: Callable[[Store], Awaitable[T]],
        *,
        requests: int = 1,
        store: Store | None = None,
    ) -> T:
        """Run a coroutine with the store that the connector would use, or another one.

        Args:
            call: What to do with the store.
            requests: How many it sends one after another; each may take ``timeout_s``.
            store: A replica; None for home.

        Raises:
            UnavailableError: No answer in time.
        """
        asked, limit_s = store or self._store, requests * self.timeout_s

        async def run() -> T:
            return await call(asked)

        try:
            return self._loop.run(run(), limit_s)
        except TimeoutError as exc:
            raise UnavailableError(f"timed out after {limit_s:.3g} s") from exc

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Close connections, and end every request that is still under way.

        Args:
            timeout_s: How long the store may take to close its connections.
        """
        opened = vars(self)  # what no check used was not made
        if "s3" in opened:
            self.s3.close()
        if "_store" in opened:
            with suppress(Exception):  # it did its work, or told what was wrong
                self._loop.run(self._store.close(), timeout_s)
        self._loop.stop(timeout_s)
