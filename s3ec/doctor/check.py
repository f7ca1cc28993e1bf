# SPDX-License-Identifier: Apache-2.0
"""The types that checks share: the context that they get, and the outcome that they return."""

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
"""Longest time that a check waits for one response of the store, in seconds."""
# The time to close connections, and to end the loop.
_CLOSE_S = 1.0


class Verdict(StrEnum):
    """The result of a check. The values are those of ``s3ec doctor --json``."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one check, still without its name.

    Attributes:
        verdict: ``warn`` does not stop a fleet, ``fail`` does, ``skip`` was not examined.
        found: The finding; never a credential.
        mend: How to fix it; empty if there is nothing to do, and always for ``skip``.
    """

    verdict: Verdict
    found: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A named outcome.

    Attributes:
        name: Stable, for machines: ``bucket``, ``conditional_put``...
        outcome: The result of the check.
        group: Heading in the printed list.
    """

    name: str
    outcome: Outcome
    group: str = ""


def ok(found: str) -> Outcome:
    """The outcome of a check that passes."""
    return Outcome(Verdict.OK, found)


def warn(found: str, mend: str) -> Outcome:
    """The outcome of a check that works, but not as well as it could."""
    return Outcome(Verdict.WARN, found, mend)


def fail(found: str, mend: str) -> Outcome:
    """The outcome of a check that fails."""
    return Outcome(Verdict.FAIL, found, mend)


def skip(found: str) -> Outcome:
    """The outcome of a check that was not made, with the reason; it needs no fix."""
    return Outcome(Verdict.SKIP, found)


@dataclass
class CheckContext:
    """The configuration under examination, and results of earlier checks for later ones.

    Attributes:
        loaded: Settings and origins.
        transfer: The --ec-transfer-config, empty if not known.
        vllm_args: Arguments of ``vllm serve``, or None to leave the model out.
        with_vllm: False to leave out vLLM.
        timeout_s: Longest wait for one response of the store.
        child: The child process that examined vLLM; None before, and if vLLM is not installed.
        server: The endpoint's response, once there is one.
        first_object: Name of some object in the bucket, once listed.
        may_delete: True if probe objects can be deleted.
        encryption: The encryption of a write, as the server reports it.
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
        """The settings with the timeouts of a check, which are longer than an engine's.

        A busy machine answers late, which says nothing about the bucket.
        """
        times = {"connect_timeout_s": self.timeout_s, "read_timeout_s": self.timeout_s}
        return self.settings.model_copy(update=times)

    @cached_property
    def s3(self) -> S3Probe:
        """The requests that the Store protocol does not have. The first use imports the SDK."""
        from s3ec.doctor.s3_probe import S3Probe

        return S3Probe(self.patient)

    @cached_property
    def _store(self) -> Store:
        from s3ec.store.open import open_store

        return open_store(self.patient, patient=True)

    @property
    def only_reads(self) -> bool:
        """True if --ec-transfer-config names a consumer, which never writes."""
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
            call: The work with the store.
            requests: How many requests it sends in sequence; each may take ``timeout_s``.
            store: A replica; None for home.

        Raises:
            UnavailableError: No response in time.
        """
        asked, limit_s = store or self._store, requests * self.timeout_s

        async def run() -> T:
            return await call(asked)

        try:
            return self._loop.run(run(), limit_s)
        except TimeoutError as exc:
            raise UnavailableError(f"timed out after {limit_s:.3g} s") from exc

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Close connections, and end all requests under way.

        Args:
            timeout_s: How long the store may take to close its connections.
        """
        opened = vars(self)  # a property that no check used has no value
        if "s3" in opened:
            self.s3.close()
        if "_store" in opened:
            with suppress(Exception):  # the checks have reported any fault already
                self._loop.run(self._store.close(), timeout_s)
        self._loop.stop(timeout_s)
