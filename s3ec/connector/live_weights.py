# SPDX-License-Identifier: Apache-2.0
"""Detects events of an engine that no hook reports: weights that may have changed, and more.

A namespace covers the weights that were loaded at the start. vLLM can change them later
(reinforcement learning, `reload_weights`, `apply_model`). No release from 0.26 to 0.33 reports this
to an encoder-cache connector. All of these ways go through one of three methods of the process that
schedules, called between two passes of the scheduler (vLLM 0.32, `v1/engine/core.py` and
`v1/core/sched/scheduler.py`):

* ``EngineCore.collective_rpc``: every call that reaches into the workers from outside,
* ``EngineCore.set_weight_version`` (0.27 and newer),
* ``Scheduler.reset_encoder_cache``: the device's embeddings are gone. Pausing with cleared caches
  and sleeping come here too, with the weights as they were.

They are wrapped once per process, and each call is passed on unchanged. A caller that bypasses all
three, by writing into the workers' memory itself, is not detected.

``Scheduler.add_request`` is wrapped in releases with bounded replay (0.32 and newer): only the
scheduler knows how many tokens of a prefix hit vLLM computes again, and it is ready only after it
has made its connector.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

# vLLM's own calls into the workers that leave the weights as they are. All others may change them:
# most exist for that, `get_model` returns the model itself, and a function or an extension of the
# worker may do anything, whatever its name.
_HARMLESS = frozenset((
    "add_lora", "check_health", "compute_weight_checksums", "get_cache_block_size_bytes",
    "get_compilation_match_table", "get_encoder_timing_stats", "get_kv_cache_spec",
    "get_kv_connector_handshake_metadata", "get_model_inspection",
    "get_supported_kv_cache_layouts", "get_supported_tasks", "list_loras", "pin_lora", "profile",
    "release_late_interaction_query_cache", "remove_lora", "reset_mm_cache", "save_sharded_state",
    "save_tensorized_model", "sleep", "synchronize_device", "wake_up",
))  # fmt: skip
_MARK = "__s3ec_watches__"


def watch() -> None:
    """Wrap these methods, unless they are wrapped already. Engines without s3ec are not touched."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    _wrap(EngineCore, "collective_rpc", _on_rpc)
    _wrap(EngineCore, "set_weight_version", _on_version)
    _wrap(Scheduler, "reset_encoder_cache", _on_reset)
    if hasattr(Scheduler, "_mark_prefix_replay"):
        _wrap(Scheduler, "add_request", _on_request)


def _wrap(owner: type, name: str, notice: Callable[..., None]) -> None:
    original = getattr(owner, name, None)
    if original is None or getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            notice(self, *args, **kwargs)
        except Exception:
            log.exception("%s.%s", owner.__name__, name)
        return original(self, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


def _on_rpc(core: Any, method: Any, *_: Any, **__: Any) -> None:
    if isinstance(method, str) and method in _HARMLESS:
        return
    name = method if isinstance(method, str) else getattr(method, "__qualname__", repr(method))
    _notify(core.scheduler, f"`{name}` was called on its workers", was_reset=False)


def _on_version(core: Any, weight_version: str) -> None:
    _notify(core.scheduler, f"its weights are called {weight_version!r} now", was_reset=False)


def _on_reset(scheduler: Any) -> None:
    _notify(scheduler, "its encoder cache was reset", was_reset=True)


def _on_request(scheduler: Any, *_: Any) -> None:
    tokens = getattr(scheduler, "prefix_replay_tokens", 0)
    if tokens:
        notice = getattr(getattr(scheduler, "ec_connector", None), "prefix_is_replayed", None)
        if notice is not None:
            notice(tokens)


def _notify(scheduler: Any, what: str, *, was_reset: bool) -> None:
    notice = getattr(getattr(scheduler, "ec_connector", None), "weights_may_have_changed", None)
    if notice is not None:
        notice(what, was_reset=was_reset)
