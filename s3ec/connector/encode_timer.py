# SPDX-License-Identifier: Apache-2.0
"""How long the encoder runs in a step, measured in the worker without waiting for the device.

vLLM's runners call the worker half directly before the encoder runs: with
``bind_connector_metadata``, then ``start_save_caches`` in a producer (0.30 and newer), then
``start_load_caches`` in a consumer. They call it directly after it: with the first ``save_caches``
of what was encoded, and with ``get_finished``. So it was in the sources of 0.24.0 to 0.32.0, V1
runner and V2 (``v1/worker/ec_connector_model_runner_mixin.py``, ``v1/worker/gpu/ec_connector.py``).

On a GPU both points are events in the stream that the encoder runs in. They are asked in later
steps whether they have passed, so nothing ever waits for them. Gaps in which the device waits for
the CPU count as encoding, as they should.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from s3ec.connector.messages import Encode, EncodeTime

log = logging.getLogger(__name__)

# Steps whose events have not passed yet. More are dropped: the device hangs, or nobody asks.
_MOST_UNDER_WAY = 64


class EncodeTimer:
    """One worker's measurements. One thread: the model runner's.

    A step is idle, then ``begun``, then ``ended`` and, where the device is a GPU, waits for its
    two events. A step that begins before the last one has ended drops that one: it has failed.
    """

    def __init__(
        self,
        device: Callable[[], torch.device],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start idle.

        Args:
            device: The model's device.
            clock: Seconds, for a device that runs in the caller's thread.
        """
        self._device = device
        self._clock = clock
        self._begun: tuple[Sequence[Encode], Any] | None = None
        self._under_way: deque[tuple[Sequence[Encode], Any, Any]] = deque(maxlen=_MOST_UNDER_WAY)
        self._done: list[EncodeTime] = []
        self._works = True

    def begin(self, encodes: Sequence[Encode]) -> None:
        """The encoder is about to run for these; nothing is measured where there are none.

        Items of two modalities in one step say nothing about either, so they are left out.
        """
        self._begun = None
        if encodes and self._works and len({one.modality for one in encodes}) == 1:
            self._begun = (encodes, self._now())

    def end(self) -> None:
        """The encoder has run, or was launched. Only the first call after ``begin`` counts."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        encodes, before = begun
        after = None if before is None else self._now()
        if after is None:
            return
        if isinstance(before, float):
            self._finish(encodes, after - before)
        else:
            self._under_way.append((encodes, before, after))

    def take(self) -> list[EncodeTime]:
        """What has been measured since the last call."""
        while self._under_way and self._under_way[0][2].query():
            encodes, before, after = self._under_way.popleft()
            self._finish(encodes, before.elapsed_time(after) / 1000)
        done, self._done = self._done, []
        return done

    def _finish(self, encodes: Sequence[Encode], seconds: float) -> None:
        rows = sum(one.rows for one in encodes)
        self._done.append(EncodeTime(encodes[0].modality, len(encodes), rows, seconds))

    def _now(self) -> Any:
        """This moment: seconds, or an event in the device's stream; None where there is neither.

        Called from hooks whose faults end the engine, and a measurement is not worth that.
        """
        try:
            kind = self._device().type
            if kind == "cpu":
                return self._clock()
            event = getattr(torch, kind).Event(enable_timing=True)
            event.record()
            return event
        except Exception:
            self._works = False
            log.exception("what encoding costs is not measured on this device")
            return None
