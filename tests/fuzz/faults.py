# SPDX-License-Identifier: Apache-2.0
"""Connectors with one fault each, and engines in which faults show soon."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from s3ec.connector.messages import Load, StepPlan, WorkerReport
from s3ec.connector.scheduler import SchedulerHalf
from s3ec.connector.worker import WorkerHalf
from s3ec.prefetch import FetchRequest
from s3ec.tier import OpenEntry
from tests.fuzz.connectors import S3EC
from tests.fuzz.engine import Options, has_pixels
from tests.fuzz.workload import Habits


class LetsGoEarly(SchedulerHalf):
    """Takes a load for done when the next step is scheduled."""

    def build_connector_meta(self, freed: Iterable[str], **tokens: int) -> StepPlan:
        plan = super().build_connector_meta(freed, **tokens)
        self.update_connector_output(WorkerReport(loaded={plan.step - 1: {0, 1}}))
        return plan


class LosesLoads(SchedulerHalf):
    """Grants, and does not tell the workers."""

    def build_connector_meta(self, freed: Iterable[str], **tokens: int) -> StepPlan:
        plan = super().build_connector_meta(freed, **tokens)
        return dataclasses.replace(plan, loads=[])


class RemembersTheDead(SchedulerHalf):
    """Does not hear that a request has ended."""

    def request_finished(self, request: Any) -> None:
        pass


class NeverLetsGo(SchedulerHalf):
    """Who was deferred once is deferred for ever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deferred: set[str] = set()

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        if not super().ensure_cache_available(request, num_computed_tokens):
            self.deferred.add(request.request_id)
        return request.request_id not in self.deferred


class Miscounts(SchedulerHalf):
    """Takes what was allocated for what the device held."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lookups.allocated = lambda *_: None  # type: ignore[method-assign]


class KnowsNoCost(SchedulerHalf):
    """Cannot say what it takes to have an embedding again."""

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        raise KeyError(identifier)


class SeesNoChange(SchedulerHalf):
    """Keeps its answers though an item has changed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker.look_again = StaysEmpty()


class StaysEmpty(set[str]):
    """Takes nothing."""

    def __ior__(self, _: Any) -> StaysEmpty:  # type: ignore[misc,override]
        return self


class SchedulesAnything(SchedulerHalf):
    """Lets requests without pixels go on without an embedding."""

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        super().ensure_cache_available(request, num_computed_tokens)
        return True


class GrantsAnything(SchedulerHalf):
    """Grants what it has not."""

    def has_cache_item(self, identifier: str) -> bool:
        return super().has_cache_item(identifier) or True


class GrantsOtherRows(S3EC):
    """Grants what is open, however many rows it has."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.granted: dict[str, OpenEntry] = {}
        self.loads: list[Load] = []

    def has_cache_item(self, identifier: str) -> bool:
        if super().has_cache_item(identifier):
            return True
        for entry in self.prefetcher.live.values():
            if entry.header.identifier == identifier and self.options.loads:
                self.granted[identifier] = entry
                self.answers[-1] = ("has", True)
                return True
        return False

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        super().update_state_after_alloc(request, index)
        identifier = request.mm_features[index].identifier
        entry = self.granted.pop(identifier, None)
        if entry is not None:
            self.loads.append(Load.of(identifier, entry))

    def build_connector_meta(self, output: Any) -> StepPlan:
        plan = super().build_connector_meta(output)
        plan.loads += self.loads
        self.loads.clear()
        return plan


class OnlyReports(WorkerHalf):
    """Says that it has loaded what it has not."""

    def start_load_caches(self, encoder_cache: dict[str, Any], plan: StepPlan) -> None:
        super().start_load_caches(dict(encoder_cache), plan)


class KeepsTheOld(WorkerHalf):
    """Takes a tensor of that name for the one that was granted."""

    def start_load_caches(self, encoder_cache: dict[str, Any], plan: StepPlan) -> None:
        loads = [load for load in plan.loads if load.identifier not in encoder_cache]
        super().start_load_caches(encoder_cache, dataclasses.replace(plan, loads=loads))


class SavesAnother(WorkerHalf):
    """Saves the first tensor that the device holds, under any name."""

    def save_caches(
        self, encoder_cache: Mapping[str, Any], identifier: str, plan: StepPlan
    ) -> None:
        first = next(iter(encoder_cache.values()))
        super().save_caches({**encoder_cache, identifier: first}, identifier, plan)


def of_half(half: type[SchedulerHalf]) -> type[S3EC]:
    return type(half.__name__, (S3EC,), {"scheduler_half": half})


def of_worker(half: type[WorkerHalf]) -> type[S3EC]:
    return type(half.__name__, (S3EC,), {"worker_half": half})


class KeepsOpen(S3EC):
    """Never lets go of an entry."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.prefetcher.release = lambda entries: None  # type: ignore[method-assign]


class KeepsOldWeights(S3EC):
    """Is not told that the weights have changed; nor does it audit, which would tell it."""

    def weights_may_have_changed(self, what: str, *, was_reset: bool) -> None:
        pass

    def audit(self, *, requests: Collection[str], device: Collection[str]) -> None:
        pass


class SeesNoReset(SchedulerHalf):
    """Believes the device to hold what was there before a reset."""

    def device_was_reset(self) -> None:
        pass


class KnowsNoReplay(S3EC):
    """Is not told that vLLM goes back behind a prefix hit."""

    def prefix_is_replayed(self, tokens: int) -> None:
        pass


class GivesUpAtOnce(SchedulerHalf):
    """Fails a request without pixels as soon as its embedding is not there."""

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        can = super().ensure_cache_available(request, num_computed_tokens)
        if not can and not all(map(has_pixels, request.mm_features)):
            self.failed.add(request.request_id)
        return can

    def take_unavailable_requests(self) -> set[str]:
        taken = super().take_unavailable_requests() | self.failed
        self.failed.clear()
        return taken

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failed: set[str] = set()


class NeverWaits(SchedulerHalf):
    """Encodes what is on its way."""

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        can = super().ensure_cache_available(request, num_computed_tokens)
        if can or not all(map(has_pixels, request.mm_features)):
            return can
        self.waits.look_at_all()  # or this would be found: it is not what is said here
        return True


class ForgetsFetches(S3EC):
    """Forgets what it was to fetch without pixels."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        submit = self.prefetcher.submit

        def some(wants: Sequence[FetchRequest]) -> None:
            submit(wants[1:])

        self.prefetcher.submit = some  # type: ignore[method-assign, assignment]


def tiered(options: Options, habits: Habits) -> tuple[Options, Habits]:
    """As crowded, with the manager that asks what embeddings cost."""
    options, habits = crowded(options, habits)
    return dataclasses.replace(options, manager="tiered"), habits


def crowded(options: Options, habits: Habits) -> tuple[Options, Habits]:
    """Small caches, and two sizes of many pictures: where old tensors are in the way."""
    return (
        dataclasses.replace(
            options,
            cache_rows=72,
            role="both",
            v2=False,
            depth=2,
            defer_timeout_s=2.0,
            manager="fifo",
            replay_tokens=0,
        ),
        dataclasses.replace(
            habits,
            two_sizes=0.4,
            pictures=5,
            requests=40,
            stored=1.0,
            framed=0.0,
            emptied=0.0,
        ),
    )


def calm(options: Options, habits: Habits) -> tuple[Options, Habits]:
    """Nothing fails, and everything comes in time."""
    options, habits = crowded(options, habits)
    return options, dataclasses.replace(habits, two_sizes=0.0, faults=0.0, outages=0.0, jumps=0.0)


def reborn(options: Options, habits: Habits) -> tuple[Options, Habits]:
    """The weights change again and again."""
    options, habits = calm(options, habits)
    return options, dataclasses.replace(habits, weights=0.02)


def emptied(options: Options, habits: Habits) -> tuple[Options, Habits]:
    """An operator resets the encoder cache again and again."""
    options, habits = crowded(options, habits)
    return options, dataclasses.replace(habits, emptied=0.05)


def replayed(options: Options, habits: Habits) -> tuple[Options, Habits]:
    """The end of every prefix hit is computed again, and many requests bring no pixels."""
    options, habits = calm(options, habits)
    return dataclasses.replace(options, replay_tokens=32), dataclasses.replace(habits, bare=0.5)


def encodes_no_more(options: Options, habits: Habits) -> tuple[Options, Habits]:
    """vLLM's V2 runner does not encode what its cache holds under that name, of any size."""
    options, habits = crowded(options, habits)
    return dataclasses.replace(options, v2=True), habits


# By the name of the fault: the connector, what is said of it, and where it shows.
FAULTS = {
    "lets go early": (of_half(LetsGoEarly), "let go of before it was loaded", crowded),
    "loses loads": (of_half(LosesLoads), "encoder cache miss", crowded),
    "remembers the dead": (of_half(RemembersTheDead), "the half's audit complains", crowded),
    "never lets go": (of_half(NeverLetsGo), "a request waits for ever", crowded),
    "miscounts": (of_half(Miscounts), "lookups are counted wrong", crowded),
    "knows no cost": (of_half(KnowsNoCost), "no cost", tiered),
    "sees no change": (
        of_half(SeesNoChange),
        "a kept answer is not what a look gives",
        crowded,
    ),
    "schedules anything": (of_half(SchedulesAnything), "the encoder runs on nothing", crowded),
    "grants anything": (of_half(GrantsAnything), "granted without an entry", crowded),
    "grants other rows": (GrantsOtherRows, "rows of another picture", crowded),
    "only reports": (of_worker(OnlyReports), "a load leaves another embedding", crowded),
    "keeps the old": (of_worker(KeepsTheOld), "a load leaves another embedding", crowded),
    "saves another": (of_worker(SavesAnother), "another embedding is saved", crowded),
    "keeps old weights": (KeepsOldWeights, "a load leaves another embedding", reborn),
    "sees no reset": (of_half(SeesNoReset), "the half's audit complains", emptied),
    "knows no replay": (KnowsNoReplay, "the encoder runs on nothing", replayed),
    "gives up at once": (of_half(GivesUpAtOnce), "a request is failed before its time", calm),
    "never waits": (of_half(NeverWaits), "what lies on this node is encoded", calm),
    "keeps open": (KeepsOpen, "entries are left open", crowded),
    "forgets fetches": (ForgetsFetches, "the half's audit complains", crowded),
}
