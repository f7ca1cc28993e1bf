# SPDX-License-Identifier: Apache-2.0
"""What a thousand requests that wait cost vLLM's own scheduler, with s3ec behind it and without.

The same requests stand in two schedulers. Behind one is a connector that defers them and does
nothing else; behind the other is S3ECConnector, whose fetches never end. Prefix caching is on, as
it is by default, so the scheduler looks for each request's prefix in each pass.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from s3ec import runtime
from s3ec.connector.connector import S3ECConnector
from s3ec.connector.waiting import EngineLoad, WaitPolicy
from s3ec.counters import Counters
from s3ec.dev.bench import measure
from s3ec.dev.bench.hooks_rig import Identifiers, engine_config, identifiers_of, make_request
from s3ec.dev.rigs.models import write_gemma3
from s3ec.dev.rigs.virtual_engine import (
    NoConnector,
    PlayedFetches,
    PlayedIndex,
    make_scheduler,
    played_half,
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


def ratios(scratch: Path, *, requests: int, rounds: int) -> dict[str, list[float]]:
    """Time of a pass over that of a connector that only defers, for ``always`` and ``auto``.

    Args:
        scratch: For a model's configuration.
        requests: That wait.
        rounds: Passes of each, in turn, after those in which every request was looked at.

    Returns:
        By the setting ``wait``: one ratio a round.

    Raises:
        RuntimeError: A request was scheduled, so that something else would be measured.
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
    schedulers: dict[str, Any] = {}
    for name in ("", "always", "auto"):
        connector: Any = _s3ec(asked, is_auto=name == "auto") if name else Deferring()
        schedulers[name] = make_scheduler(
            config, connector, is_async=False, blocks=4096, block_size=_BLOCK, cache_rows=_TOKENS
        )
        for one, its_hashes in zip(map(copy.copy, asked), hashes, strict=True):
            one.block_hashes = its_hashes
            schedulers[name].add_request(one)

    def schedule_s(scheduler: Any) -> float:
        started = time.thread_time()
        output = scheduler.schedule()
        seconds = time.thread_time() - started
        if output.total_num_scheduled_tokens or len(scheduler.requests) != requests:
            raise RuntimeError("not all requests wait")
        return seconds

    times: dict[str, list[float]] = {name: [] for name in schedulers}
    with measure.no_collection():
        for _ in range(_FIRST_PASSES + rounds):
            for name, scheduler in schedulers.items():
                times[name].append(schedule_s(scheduler))
    times = {name: found[_FIRST_PASSES:] for name, found in times.items()}
    return {name: measure.ratios(times[name], times[""]) for name in ("always", "auto")}


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
    half = played_half(
        index,
        PlayedFetches(1, 3600.0),
        policy=policy,
        steps_in_flight=1,
        defer_timeout_s=60.0,
    )
    parts: Any = SimpleNamespace(
        node=SimpleNamespace(process=runtime.process_number, counters=Counters()),
        scheduler=half,
        features=None,
        weights="",
    )
    config = engine_config("S3ECConnector", {})
    return S3ECConnector(config, ECConnectorRole.SCHEDULER, parts=parts)
