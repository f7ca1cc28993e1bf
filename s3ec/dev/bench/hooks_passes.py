# SPDX-License-Identifier: Apache-2.0
"""The scheduling passes that the hooks benchmark times: each returns nanoseconds by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from s3ec.dev.bench.hooks_rig import IMAGES, Kind, Rig, identifiers_of, make_request, step_output
from s3ec.dev.bench.measure import time_each

Times = Mapping[str, Sequence[int]]
_NEW_REQUESTS = 16  # a pass, of images that were never seen
_IDLE_STEPS = 200


@dataclass(frozen=True, slots=True)
class HookCalls:
    """Hook calls to run under strace, and how many they are."""

    run: Callable[[], object]
    calls: int


class Passes:
    """One pass per case. Every pass leaves the rig as it found it, but for new images."""

    def __init__(self, rig: Rig, example: Any) -> None:
        self._rig = rig
        self._shell = rig.shell
        self._example = example
        self._new_requests = min(_NEW_REQUESTS, rig.size.requests)
        self._serial = 0

    def cases(self) -> dict[str, Callable[[], Times]]:
        """All passes, for measure.interleave."""
        made: dict[str, Callable[[], Times]] = {}
        for kind in Kind:
            for images in (1, IMAGES):
                made[f"{kind.value}/{images}"] = self._asking(kind, images)
        return made | {
            "loading": self._load_steps,
            "new": self._new_images,
            "absent": self._absent_images,
            "idle": self._idle_steps,
            "example": self._ask_example,
            "example loading": self._example_steps,
        }

    def _asking(self, kind: Kind, images: int) -> Callable[[], Times]:
        """For each request ensure_cache_available, then has_cache_item; all of that twice.

        The first time stands for a request that comes up: other passes have run since, so little
        of it is in the processor's caches, and a deferred one begins to wait. The second time
        is how vLLM asks from then on, at every step.
        """
        rig, shell = self._rig, self._shell
        case = f"{kind.value}/{images}"
        # vLLM asks nothing more of a request that decodes.
        plan = [
            (call, [] if kind is Kind.DECODING else [(n,) for n in identifiers_of([call[0]])])
            for call in rig.calls(kind, images)
        ]

        def ask() -> Times:
            times: dict[str, list[int]] = {}
            for which in ("cold", "warm"):
                ensure = times.setdefault(f"ensure {which}/{case}", [])
                has = times.setdefault(f"has {which}/{case}", [])
                for call, names in plan:
                    ensure += time_each(shell.ensure_cache_available, [call])
                    has += time_each(shell.has_cache_item, names)
                rig.end_step()
            rig.end_requests(kind, images)
            return times

        return ask

    def _load_steps(self) -> Times:
        """Whole steps: a request of four images that are loaded, then freed on the device."""
        shell = self._shell
        alloc: list[int] = []
        meta: list[int] = []
        freed: list[str] = []
        for request in self._rig.requests[Kind.HIT, IMAGES]:
            names = identifiers_of([request])
            shell.ensure_cache_available(request, 0)
            for name in names:
                shell.has_cache_item(name)
            alloc += time_each(
                shell.update_state_after_alloc, [(request, n) for n in range(IMAGES)]
            )
            # What the device drops is not given back to the tier, so the next round hits again.
            meta += time_each(shell.build_connector_meta, [(step_output(freed),)])
            freed = names
        for _ in range(4):  # until the steps in flight are over
            self._rig.end_step(freed)
        return {"alloc/load": alloc, "meta/loads": meta}

    def _fresh(self, names: Sequence[str], images: int) -> list[Any]:
        made = []
        for start in range(0, len(names), images):
            self._serial += 1
            made.append(make_request(f"new-{self._serial}", names[start : start + images]))
        return made

    def _new_images(self) -> Times:
        """Images of the corpus that nobody asked for yet: their fetch is noted and handed over."""
        times: dict[str, list[int]] = {"meta/demand": []}
        for images in (1, IMAGES):
            requests = self._fresh(self._rig.unseen(self._new_requests * images), images)
            first: list[int] = []
            for request in requests:
                first += time_each(self._shell.ensure_cache_available, [(request, 0)])
                meta = time_each(self._shell.build_connector_meta, [(step_output(),)])
                if images == IMAGES:
                    times["meta/demand"] += meta
                self._shell.request_finished(request)
                self._rig.settle()
            times[f"first/in the corpus/{images}"] = first
        return times

    def _absent_images(self) -> Times:
        """Images that the corpus lacks: they are encoded, and then saved."""
        times: dict[str, list[int]] = {"alloc/save": []}
        for images in (1, IMAGES):
            names = self._rig.identifiers.take(self._new_requests * images)
            requests = self._fresh(names, images)
            calls = [(request, 0) for request in requests]
            times[f"first/not in it/{images}"] = time_each(
                self._shell.ensure_cache_available, calls
            )
            for name in names:
                self._shell.has_cache_item(name)
            for request in requests:
                saves = [(request, n) for n in range(images)]
                times["alloc/save"] += time_each(self._shell.update_state_after_alloc, saves)
                self._shell.request_finished(request)
            self._rig.end_step()
            self._rig.end_step(names)
        return times

    def _idle_steps(self) -> Times:
        steps = [(step_output(),) for _ in range(_IDLE_STEPS)]
        return {"meta/idle": time_each(self._shell.build_connector_meta, steps)}

    def _ask_example(self) -> Times:
        rig, example = self._rig, self._example
        times = {"noop": time_each(example.ensure_cache_available, rig.calls(Kind.HIT, IMAGES))}
        for case, names in (("hit", rig.hits), ("miss", rig.misses)):
            calls = [(name,) for name in names]
            for which in ("cold", "warm"):
                times[f"example {which}/{case}"] = time_each(example.has_cache_item, calls)
        return times

    def _example_steps(self) -> Times:
        alloc: list[int] = []
        meta: list[int] = []
        for request in self._rig.requests[Kind.HIT, IMAGES]:
            indexes = [(request, n) for n in range(IMAGES)]
            alloc += time_each(self._example.update_state_after_alloc, indexes)
            meta += time_each(self._example.build_connector_meta, [(step_output(),)])
        return {"example/alloc": alloc, "example/meta": meta}

    def hot_path(self) -> HookCalls:
        """ensure_cache_available and has_cache_item for the requests of every kind."""
        shell = self._shell
        calls = [call for key in self._rig.requests for call in self._rig.calls(*key)]
        plan = [(request, tokens, identifiers_of([request])) for request, tokens in calls]

        def run() -> None:
            for request, tokens, names in plan:
                shell.ensure_cache_available(request, tokens)
                for name in names:
                    shell.has_cache_item(name)

        return HookCalls(run, sum(1 + len(names) for _, _, names in plan))

    def example_path(self) -> HookCalls:
        """has_cache_item of the Example for every hit."""

        def run() -> None:
            for name in self._rig.hits:
                self._example.has_cache_item(name)

        return HookCalls(run, len(self._rig.hits))
