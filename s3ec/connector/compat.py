# SPDX-License-Identifier: Apache-2.0
"""Detects the vLLM release and its connector hooks, once, and logs them in one line."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re

import torch
from vllm import __version__ as _vllm_version
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

# Older releases do not report the end of a request, so the state of requests would only grow.
OLDEST = (0, 26)
NEWEST_TESTED = (0, 33)

_REQUIRED_HOOKS = (
    "ensure_cache_available",
    "has_cache_item",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
)
# Hooks that not every supported release has, and what is lost if they are missing.
OPTIONAL_HOOKS = {
    "build_connector_worker_meta": "files are closed by time, not by the worker's report",
    "take_unavailable_requests": "a request without pixels waits until its client gives up",
    "get_ec_connector_stats": "no metrics on vLLM's /metrics: the log has a line each minute",
    "start_save_caches": "what was deleted is stored again only once the device has dropped it",
}


def vllm_version() -> str:
    """Return vLLM's own version string."""
    return str(_vllm_version)


def release(version: str) -> tuple[int, int] | None:
    """Return major and minor of a version string; None if it does not start with them."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found.group(1)), int(found.group(2))) if found else None


@functools.cache
def installed_hooks() -> dict[str, bool]:
    """Map every hook that s3ec can use to True if the installed vLLM's base class declares it."""
    declared = {name for name, _ in inspect.getmembers(ECConnectorBase, inspect.isfunction)}
    return {name: name in declared for name in (*_REQUIRED_HOOKS, *OPTIONAL_HOOKS)}


def release_problem() -> str | None:
    """Return why s3ec cannot work with this vLLM; None if it can."""
    this = release(vllm_version())
    if this is None or this >= OLDEST:
        return None
    return f"vLLM {vllm_version()} is older than s3ec supports; install {_dotted(OLDEST)} or newer"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def summary() -> str:
    """Return one line for the log: version, and what the missing hooks cost."""
    missing = [name for name, there in installed_hooks().items() if not there]
    line = f"vLLM {vllm_version()}"
    this = release(vllm_version())
    if this is not None and not OLDEST <= this <= NEWEST_TESTED:
        line += f" (tested with {_dotted(OLDEST)} to {_dotted(NEWEST_TESTED)})"
    costs = [f"no {name}: {OPTIONAL_HOOKS.get(name, 'required')}" for name in missing]
    return "; ".join([line, *costs])


def current_device() -> torch.device:
    """Return the device of this worker's model."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return torch.device("cpu")
    index = getattr(torch, current_platform.device_type).current_device()
    return torch.device(current_platform.device_type, index)


def device_name() -> str:
    """Return the name of the computing device, such as ``NVIDIA H100 80GB HBM3`` or ``cpu``.

    Only its kind if it has no name, or the driver does not report it.
    """
    from vllm.platforms import current_platform

    try:
        return str(current_platform.get_device_name())
    except Exception:  # noqa: BLE001 (whatever a driver raises)
        return str(current_platform.device_type)


@functools.cache
def made_by() -> str:
    """Describe the releases and the device that decide the values of embeddings made here."""
    found = {
        "vllm": vllm_version(),
        **{name: _installed(name) for name in ("transformers", "torch", "pillow")},
        "platform": device_name(),
    }
    words = (f"{name}={re.sub('[^!-~]+', '-', value)[:80] or '-'}" for name, value in found.items())
    return " ".join(words)


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "-"


@functools.cache
def loading_rank() -> int:
    """Return this worker's number among those that load; 0 is the one that saves.

    vLLM creates worker connectors after it set the ranks up. The number never changes; it is cached
    since asking vLLM is a good part of a save's cost besides the copy.
    """
    from vllm.distributed import parallel_state

    rank = int(parallel_state.get_tensor_model_parallel_rank())
    group = getattr(parallel_state, "get_pcp_group", None)
    if group is None:
        return rank
    size = int(parallel_state.get_tensor_model_parallel_world_size())
    return int(group().rank_in_group) * size + rank


def can_pin_memory() -> bool:
    """Return True if pinned host memory is available here; WSL has none."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_pin_memory_available())
