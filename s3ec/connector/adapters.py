# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters that touch the encoder: identifiers by an adapter's content, not by its name.

With ``enable_tower_connector_lora`` vLLM calls an image ``adapter:hash``. That stays the same when
the adapter is replaced under its name. Between vLLM and the two halves the identifiers are changed
to ``adapter-digest:hash``; the halves, the tier and the bucket know nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from s3ec.connector.kept_answers import KeptAnswers
from s3ec.connector.lookups import DeviceLookups
from s3ec.connector.messages import AdapterUse, StepPlan, WorkerReport
from s3ec.connector.request_waits import NO_PIXELS_WAIT_S
from s3ec.connector.scheduler import SchedulerHalf, named_by
from s3ec.counters import Counters
from s3ec.identity import with_adapter
from s3ec.weights import Adapter, read_adapter

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    """One adapter: a name, a number and a path, as vLLM's requests carry them.

    It is

    ==========  ==========  ==============================================================
    state       goes to     when
    ==========  ==========  ==============================================================
    unknown     known       a look finds its files, for the first time or the same as before
    known       unknown     a look does not find them, or finds others; or a request has
                            waited too long for a look
    any         superseded  another adapter has its number: nobody knows what the workers hold
    any         unknown     the workers read its files: what they hold now is to be looked at
    ==========  ==========  ==============================================================

    Only one that is known has a digest. One whose requests have ``load_inplace`` is known by
    whatever a look finds: the workers read its files with each load.

    Attributes:
        looked: Number of the last look at its files.
        after: Looks up to this number began before the adapter was loaded last, and say nothing.
        reloads: Whether its requests have the workers read it again.
        superseded: Whether another adapter has its number now.
        content: As the workers have it, if the files were not changed since.
    """

    name: str
    path: str
    looked: int = 0
    after: int = 0
    reloads: bool = False
    superseded: bool = False
    digest: str | None = None
    content: Adapter | None = None

    def loaded(self, look: int) -> None:
        """The workers read its files, after the look of this number began."""
        self.after = look
        self.superseded = False
        self.content = self.digest = None

    def supersede(self) -> None:
        """The workers hold another adapter under its number."""
        self.superseded = True
        self.digest = None

    def saw(self, found: Adapter | None, look: int) -> None:
        """Take the result of a look at the files."""
        self.looked = max(self.looked, look)
        if self.superseded or look <= self.after:
            return
        if found is None:
            self.digest = None
        elif self.content is None or self.reloads or found.digest == self.content.digest:
            self.content, self.digest = found, found.digest
        elif self.digest is not None:
            self.digest = None
            log.warning(
                "the files of adapter %s were changed without a reload; its images are encoded "
                "and not saved until it is loaded anew (load_inplace)",
                self.name,
            )


@dataclass(slots=True)
class _Asked:
    """One request that uses an adapter.

    Attributes:
        needs: Number of the look at the adapter's files that it waits for.
        since_s: When it came.
        view: The request as the scheduler half sees it, and the digest that it was made with.
    """

    adapter: _Known
    needs: int
    since_s: float
    view: _Request | None = None
    digest: str | None = None


class _Feature:
    """A feature under another identifier."""

    __slots__ = ("_feature", "identifier")

    def __init__(self, feature: Any, identifier: str) -> None:
        self._feature = feature
        self.identifier = identifier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feature, name)


class _Request:
    """A request whose features have other identifiers."""

    __slots__ = ("_request", "ec_transfer_params", "mm_features")

    def __init__(self, request: Any, rename: Callable[[str], str]) -> None:
        self._request = request
        named = named_by(request)
        self.mm_features = [_Feature(one, rename(one.identifier)) for one in request.mm_features]
        self.ec_transfer_params = {
            ours.identifier: None
            for ours, one in zip(self.mm_features, request.mm_features, strict=True)
            if one.identifier in named
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


@dataclass(slots=True)
class _Looks:
    """What crosses the threads: adapters to look at, and what was found."""

    found: deque[tuple[int, list[tuple[_Known, Adapter | None]]]] = field(default_factory=deque)

    def look(self, number: int, wanted: list[tuple[_Known, str, Adapter | None]]) -> None:
        """Read the files; on a thread that may wait."""
        results: list[tuple[_Known, Adapter | None]] = []
        try:
            results += [(it, read_adapter(path, old)) for it, path, old in wanted]
        finally:  # whatever happens, nobody waits for a look that has ended
            self.found.append((number, results or [(it, None) for it, _, _ in wanted]))


class AdapterNames:
    """The scheduler half, for engines whose adapters touch the encoder.

    Each request waits for a look at its adapter's files that began after it came, a few
    milliseconds; at most ``defer_timeout_s``, or 10 s where it has no pixels. After that its
    images have names without a key: they are encoded and not saved.

    Attributes:
        answers: None is ever in force; each request's adapter is looked at in each pass.
    """

    def __init__(
        self,
        half: SchedulerHalf,
        *,
        start: Callable[[Callable[[], None]], None],
        needs_embedding: Callable[[Any], bool],
        defer_timeout_s: float,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wire it up.

        Args:
            half: Who decides.
            start: Has a function run on a thread that may wait; does not wait itself.
            needs_embedding: Whether a feature came without pixels.
            defer_timeout_s: Longest wait of a request for its adapter.
            counters: Where to count.
            clock: Monotonic seconds.
        """
        self._half = half
        self.answers = KeptAnswers()
        self._start = start
        self._needs_embedding = needs_embedding
        self._defer_timeout_s = defer_timeout_s
        self._counters = counters
        self._clock = clock
        self._adapters: dict[int, dict[tuple[str, str], _Known]] = {}  # by number
        self._by_name: dict[str, _Known] = {}  # of the request that was asked about last
        self._requests: dict[str, _Asked] = {}
        self._to_look_at: dict[int, _Known] = {}
        self._looks = _Looks()
        self._number = 0  # of the last look that was started
        self._looking = False
        # What the device holds: vLLM's identifier -> ours, and from there on what it is.
        self._on_device: dict[str, str] = {}
        self._uses: dict[str, AdapterUse] = {}
        self._replaced: list[tuple[str, str]] = []  # of this pass

    # -- before scheduling a request -------------------------------------------------------

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether the request can be scheduled now; False defers it for this step."""
        asked = self._asked(request)
        if asked is None:
            return self._half.ensure_cache_available(request, num_computed_tokens)
        adapter = asked.adapter
        self._by_name[adapter.name] = adapter
        if num_computed_tokens < request.num_prompt_tokens:
            self._to_look_at[id(adapter)] = adapter
            if asked.needs <= adapter.after and self._has_no_chance(asked, request):
                asked.needs = adapter.after + 1  # once more: it was loaded anew meanwhile
            if adapter.looked < asked.needs and not self._has_waited(asked, request):
                return False
        return self._half.ensure_cache_available(self._view(request, asked), num_computed_tokens)

    def _asked(self, request: Any) -> _Asked | None:
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return None
        asked = self._requests.get(request.request_id)
        if asked is None:
            adapter = self._adapter_of(lora)
            # One that is under way may have read the files before they were replaced.
            asked = _Asked(adapter, self._number + 1, self._clock())
            self._requests[request.request_id] = asked
        return asked

    def _adapter_of(self, lora: Any) -> _Known:
        alike = self._adapters.setdefault(lora.lora_int_id, {})
        key = (lora.lora_name, lora.lora_path)
        adapter = alike.get(key)
        is_new = adapter is None
        if adapter is None:
            adapter = alike[key] = _Known(*key)
        if getattr(lora, "load_inplace", False):
            adapter.reloads = True
            if is_new or adapter.superseded:
                self._took_over(adapter, alike)
        elif is_new and len(alike) > 1:
            # Two adapters of one number, and no reload: the workers hold one or the other.
            for one in alike.values():
                one.supersede()
        return adapter

    def _took_over(self, adapter: _Known, alike: Mapping[tuple[str, str], _Known]) -> None:
        for other in alike.values():
            if other is not adapter:
                other.supersede()
        adapter.loaded(self._number)

    def adapter_loaded(self, lora: Any) -> None:
        """vLLM has the workers load an adapter, between two steps."""
        adapter = self._adapter_of(lora)
        if adapter.reloads:
            self._took_over(adapter, self._adapters[lora.lora_int_id])

    def _has_no_chance(self, asked: _Asked, request: Any) -> bool:
        """Whether a request that came without pixels has not given its adapter up yet."""
        return asked.needs > 0 and any(map(self._needs_embedding, request.mm_features))

    def _has_waited(self, asked: _Asked, request: Any) -> bool:
        """Whether a request has waited long enough for its adapter; then it is a miss."""
        limit_s = self._defer_timeout_s
        if any(map(self._needs_embedding, request.mm_features)):
            limit_s = max(limit_s, NO_PIXELS_WAIT_S)
        if self._clock() - asked.since_s < limit_s:
            return False
        self._counters.add("defer_timeouts")
        asked.needs = 0
        asked.adapter.digest = None  # until the next look
        return True

    def _view(self, request: Any, asked: _Asked) -> _Request:
        view, adapter = asked.view, asked.adapter
        known = view is not None and asked.digest == adapter.digest
        if view is None or not known or len(view.mm_features) != len(request.mm_features):
            view = asked.view = _Request(
                request, lambda name: with_adapter(name, adapter.name, adapter.digest)
            )
            asked.digest = adapter.digest
            self._half.answers.drop(request.request_id)  # it was about other names
        return view

    # -- while scheduling a request --------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """Whether vLLM may skip the encoder for this item."""
        return self._half.has_cache_item(self.name_of(identifier))

    def name_of(self, identifier: str) -> str:
        """What we call an image that vLLM calls so, as of the request asked about last."""
        adapter = self._by_name.get(identifier.rpartition(":")[0])
        if adapter is None:
            return identifier
        return with_adapter(identifier, adapter.name, adapter.digest)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """The request will be scheduled: turn the last decision into a load or a save."""
        identifier = request.mm_features[index].identifier
        asked = self._asked(request)
        view = request if asked is None else self._view(request, asked)
        ours = view.mm_features[index].identifier
        before = self._on_device.pop(identifier, None)
        if before is not None and before != ours:
            self._uses.pop(before, None)
            self._replaced.append((identifier, before))
        if asked is not None and ours != identifier:
            self._on_device[identifier] = ours
            if asked.digest is not None:
                self._uses[ours] = AdapterUse(identifier, asked.adapter.path, asked.digest)
        self._half.update_state_after_alloc(view, index)

    def restore_s(self, identifier: str, modality: str, rows: int) -> float:
        """As the half's, of what the device holds under vLLM's name."""
        ours = self._on_device.get(identifier, identifier)
        return self._half.restore_s(ours, modality, rows)

    # -- once per step ---------------------------------------------------------------------

    def build_connector_meta(
        self, freed: Iterable[str], *, scheduled_tokens: int, decode_tokens: int = 0
    ) -> StepPlan:
        """Close the pass; as SchedulerHalf's. Digests change here only, between two passes."""
        times = Counter(freed)
        times.subtract(one for one, _ in self._replaced)  # each was given up before
        gone = [ours for _, ours in self._replaced]
        for identifier, count in times.items():
            gone += [self._on_device.get(identifier, identifier)] * count
        plan = self._half.build_connector_meta(
            gone, scheduled_tokens=scheduled_tokens, decode_tokens=decode_tokens
        )
        for identifier in times:
            ours = self._on_device.get(identifier)
            if ours is not None and ours not in self._half.on_device:
                del self._on_device[identifier]
                self._uses.pop(ours, None)
        for identifier in [one for one, save in plan.saves.items() if save.on_device]:
            if identifier in self._uses:  # who encoded it may have held another adapter by then
                del plan.saves[identifier]
        for identifier in (*(load.identifier for load in plan.loads), *plan.saves):
            use = self._uses.get(identifier)
            if use is not None:
                plan.adapters[identifier] = use
        self._replaced.clear()
        self._look()
        return plan

    def _look(self) -> None:
        """Take what the last look found, and begin the next one if somebody waits for it."""
        while self._looks.found:
            number, results = self._looks.found.popleft()
            self._looking = False
            for adapter, found in results:
                adapter.saw(found, number)
        if self._looking or not self._to_look_at:
            return
        wanted = [(it, it.path, it.content) for it in self._to_look_at.values()]
        self._to_look_at.clear()
        self._number += 1
        number = self._number
        with contextlib.suppress(RuntimeError):  # the loop has ended; so will this engine
            self._start(lambda: self._looks.look(number, wanted))
            self._looking = True

    @property
    def lookups(self) -> DeviceLookups:
        """As SchedulerHalf's; it goes by a request's number of an input."""
        return self._half.lookups

    def update_connector_output(self, report: WorkerReport) -> None:
        """Take the workers' report; it names what it is about as the plans did."""
        self._half.update_connector_output(report)

    def stop(self, *, was_reset: bool) -> bool:
        """Grant, load and save nothing more; as SchedulerHalf's."""
        if was_reset:
            self._on_device.clear()
            self._uses.clear()
        return self._half.stop(was_reset=was_reset)

    # -- the end of a request --------------------------------------------------------------

    def take_unavailable_requests(self) -> set[str]:
        """Requests that vLLM must fail; each is named once."""
        return self._half.take_unavailable_requests()

    def request_finished(self, request: Any) -> list[int] | None:
        """The request has ended; as SchedulerHalf's."""
        asked = self._requests.pop(request.request_id, None)
        view = request if asked is None else self._view(request, asked)
        return self._half.request_finished(view)

    # -- at any time between two hooks -------------------------------------------------------

    def audit(
        self, *, requests: Collection[str], device: Collection[str], **more: Any
    ) -> list[str]:
        """As SchedulerHalf.audit; all names are vLLM's, but for those being fetched."""
        ours = {self._on_device.get(name, name) for name in device}
        kept: dict[str, tuple[Collection[str], Collection[str]]] = {
            "a request": (self._requests, requests),
            "a name on the device": (self._on_device, device),
            "a use": (self._uses, ours),
        }
        complaints = [
            f"{what} is kept of {name}"
            for what, (names, there) in kept.items()
            for name in names
            if name not in there
        ]
        return complaints + self._half.audit(requests=requests, device=ours, **more)


class AdapterCache(MutableMapping[str, Any]):
    """vLLM's encoder cache in a worker, under the identifiers of a plan that names adapters."""

    def __init__(self, cache: MutableMapping[str, Any], plan: StepPlan) -> None:
        self._cache = cache
        self._uses = plan.adapters

    def _name(self, identifier: str) -> str:
        use = self._uses.get(identifier)
        return identifier if use is None else use.identifier

    def __getitem__(self, identifier: str) -> Any:
        return self._cache[self._name(identifier)]

    def __setitem__(self, identifier: str, tensor: Any) -> None:
        self._cache[self._name(identifier)] = tensor

    def __delitem__(self, identifier: str) -> None:
        del self._cache[self._name(identifier)]

    def __contains__(self, identifier: object) -> bool:
        return isinstance(identifier, str) and self._name(identifier) in self._cache

    def __iter__(self) -> Iterator[str]:
        return iter(self._cache)

    def __len__(self) -> int:
        return len(self._cache)


class AdapterFiles:
    """Whether an adapter is still what a plan says, seen from a worker after it encoded.

    vLLM reads an adapter's files when it is loaded anew, between two steps. Where they are still
    those that the scheduler saw, the encoder worked with them.
    """

    def __init__(self) -> None:
        self._read: dict[str, Adapter] = {}

    def vouch_for(self, use: AdapterUse) -> bool:
        """Look at the files; a few microseconds where nobody touched them."""
        found = read_adapter(use.path, self._read.get(use.path))
        if found is None:
            self._read.pop(use.path, None)
            return False
        self._read[use.path] = found
        return found.digest == use.digest


def name_in_plan(identifier: str, plan: StepPlan) -> str:
    """What a plan calls an embedding that vLLM calls so."""
    for ours, use in plan.adapters.items():
        if use.identifier == identifier:
            return ours
    return identifier
