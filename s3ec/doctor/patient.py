# SPDX-License-Identifier: Apache-2.0
"""What is examined, and what earlier checks found out for later ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from s3ec.config import Loaded
from s3ec.doctor.deadline import run_within, within
from s3ec.settings import Settings
from s3ec.store.base import Store

if TYPE_CHECKING:
    from s3ec.doctor.s3 import Hello, S3Probe
    from s3ec.doctor.vllm_child import VllmChild
    from s3ec.identity import Namespace

T = TypeVar("T")

# Over the settings' own timeouts: name lookup, redirects, a second request.
_SLACK_S = 2.0
_LONGEST_S = 30.0


@dataclass(slots=True)
class Patient:
    """One configuration on one machine.

    Attributes:
        loaded: Settings and origins.
        transfer: The --ec-transfer-config, empty where it is not known.
        vllm_args: Arguments of ``vllm serve``, or None to leave the model out.
        s3: For questions that the Store protocol has no words for.
        child: The process that imports vLLM, None where vLLM is not installed.
        hello: The endpoint's answer, once there is one.
        first_object: Name of some object in the bucket, once listed.
        listed: Whether listing worked.
        may_delete: Whether probe objects can be taken away again.
        encryption: What the server said of the encryption of a write.
        namespace: The namespace of the model, once vLLM has described it.
    """

    loaded: Loaded
    transfer: Mapping[str, Any]
    vllm_args: Sequence[str] | None
    s3: S3Probe
    child: VllmChild | None = None
    hello: Hello | None = None
    first_object: str | None = None
    listed: bool = False
    may_delete: bool = True
    encryption: str | None = None
    namespace: Namespace | None = None

    @property
    def settings(self) -> Settings:
        """The settings under examination."""
        return self.loaded.settings

    @property
    def only_reads(self) -> bool:
        """Whether this is known to be a consumer, which needs no right to write."""
        return self.transfer.get("ec_role") == "ec_consumer"

    @property
    def deadline_s(self) -> float:
        """Longest that one network check may take."""
        timeouts_s = self.settings.connect_timeout_s + self.settings.read_timeout_s
        return min(timeouts_s + _SLACK_S, _LONGEST_S)

    def ask(self, call: Callable[[], T]) -> T:
        """Run a blocking SDK call within the deadline.

        Raises:
            UnavailableError: No answer in time.
        """
        return within(self.deadline_s, call)

    def ask_store(self, call: Callable[[Store], Awaitable[T]]) -> T:
        """Run a coroutine with the store that the connector would use, within the deadline.

        Raises:
            UnavailableError: No answer in time.
        """

        async def run() -> T:
            from s3ec.store.open import open_store

            store = open_store(self.settings)
            try:
                return await call(store)
            finally:
                await store.close()

        return run_within(self.deadline_s, run)
