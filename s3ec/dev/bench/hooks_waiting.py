# SPDX-License-Identifier: Apache-2.0
"""What a thousand requests that wait cost vLLM's own scheduler, with s3ec behind it and without.

The same requests stand in two schedulers. Behind one is a connector that defers them and does
nothing else; behind the other is S3ECConnector, whose fetches never end. Prefix caching is on, as
it is by default, so the scheduler looks for each request's prefix in each pass.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from s3ec import runtime
from s3ec.connector.connector import S3ECConnector
from s3ec.connector.scheduler import SchedulerHalf
from s3ec.connector.vllm_config import Role
from s3ec.connector.waiting import EngineLoad, WaitPolicy
from s3ec.counters import Counters
from s3ec.dev.bench.hooks_rig import Identifiers, engine_config, identifiers_of, make_request
from s3ec.dev.rigs.models import write_gemma3
from s3ec.dev.rigs.virtual_engine import (
    NoConnector,
    PlayedFetches,
    PlayedIndex,
    make_scheduler,
    played_parts,
)
from s3ec.encode_costs import EncodeCosts
from s3ec.identity import make_key

PICTURES = 20
_BLOCK = 16
_TOKENS = 8192
# Until every request was looked at: 64 of them are weighed in one pass.
_FIRST_PASSES = 30
# What encoding one picture costs, as far as the policy knows: far more than to wait for the fetches
# of all requests before it.
_ENCODE_S = 50.0


class Deferring(NoConnector):
    """Defers every request, and does nothing else."""

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return False


class _Watched:
    """Times every pass of one scheduler."""

    def __init__(self, scheduler: Scheduler, requests: Sequence[Request]) -> None:
        self._scheduler = scheduler
        self._waiting = len(requests)
        self._places = scheduler.max_num_active_reqs
        for request in requests:
            scheduler.add_request(request)

    def schedule_s(self, *, is_full: bool = False) -> float:
        """One pass; a full engine asks about nobody.

        Raises:
            RuntimeError: A request was scheduled, so that something else would be measured.
        """
        self._scheduler.max_num_active_reqs = 0 if is_full else self._places
        started = time.thread_time()
        output = self._scheduler.schedule()
        seconds = time.thread_time() - started
        if output.total_num_scheduled_tokens or len(self._scheduler.requests) != self._waiting:
            raise RuntimeError("not all requests wait")
        return seconds


def ratios(scratch: Path, *, requests: int, rounds: int) -> dict[str, list[float]]:
    """Time of a pass over that of a connector that only defers, for ``always`` and ``auto``.

    Args:
        scratch: For a model's configuration.
        requests: That wait.
        rounds: Passes of each, in turn, after those in which every request was looked at.

    Returns:
        By the setting ``wait``: one ratio a round. Behind ``after a full pass, `` the same where
        the engine was full in the pass before, which is in the time as well.
    """
    init_none_hash(sha256)
    config = EngineArgs(
        model=str(write_gemma3(scratch / "model")),
        max_model_len=_TOKENS,
        max_num_batched_tokens=_TOKENS,
        max_num_seqs=128,
        block_size=_BLOCK,
        enforce_eager=True,
    ).create_engine_config()
    named = Identifiers()
    asked = [make_request(f"waits-{one}", named.take(PICTURES)) for one in range(requests)]
    hasher = get_request_block_hasher(_BLOCK, sha256)
    hashes = [hasher(one) for one in asked]
    watched = {}
    for name in ("", "always", "auto"):
        connector: Any = _s3ec(asked, is_auto=name == "auto") if name else Deferring()
        scheduler = make_scheduler(
            config, connector, is_async=False, blocks=4096, block_size=_BLOCK, cache_rows=_TOKENS
        )
        copies = [copy.copy(one) for one in asked]
        for one, its_hashes in zip(copies, hashes, strict=True):
            one.block_hashes = its_hashes
        watched[name] = _Watched(scheduler, copies)
    times: dict[str, list[float]] = {name: [] for name in watched}
    after_full: dict[str, list[float]] = {name: [] for name in watched}
    gc.collect()
    gc.disable()
    try:
        for number in range(_FIRST_PASSES + rounds):
            for name, each in watched.items():
                seconds = each.schedule_s()
                if number >= _FIRST_PASSES:
                    times[name].append(seconds)
        for _ in range(rounds):
            for name, each in watched.items():
                seconds = each.schedule_s(is_full=True) + each.schedule_s()
                after_full[name].append(seconds)
    finally:
        gc.enable()
    return _over_alone(times) | {
        f"after a full pass, {name}": found for name, found in _over_alone(after_full).items()
    }


def _over_alone(times: dict[str, list[float]]) -> dict[str, list[float]]:
    alone = times.pop("")
    return {
        name: [one / other for one, other in zip(seconds, alone, strict=True)]
        for name, seconds in times.items()
    }


def _s3ec(asked: Sequence[Request], *, is_auto: bool) -> S3ECConnector:
    """S3ECConnector with a scheduler half that knows all pictures, and fetches that never end."""
    policy = None
    if is_auto:
        costs = EncodeCosts()
        policy = WaitPolicy(costs, EngineLoad(1))
        for _ in range(2):
            costs.add("image", 256, _ENCODE_S)
    index = PlayedIndex()
    for identifier in identifiers_of(asked):
        key = make_key(identifier)
        if key is not None:
            index.add(key)
    half = SchedulerHalf(
        Role(
            producer=False,
            consumer=True,
            window_tokens=_TOKENS + 16,
            ranks=1,
            steps_in_flight=1,
            defer_timeout_s=60.0,
        ),
        **played_parts(index, PlayedFetches(1, 3600.0)),
        needs_embedding=lambda _: False,
        placeholder_of=lambda _: None,
        counters=Counters(),
        policy=policy,
    )
    parts: Any = SimpleNamespace(
        node=SimpleNamespace(process=runtime.process_number, counters=Counters()),
        scheduler=half,
        features=None,
        weights="",
    )
    config = engine_config("S3ECConnector", {})
    return S3ECConnector(config, ECConnectorRole.SCHEDULER, parts=parts)
