# SPDX-License-Identifier: Apache-2.0
"""A scheduler half with vLLM's objects played by plain ones, a clock, and a prefetcher of ours."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

from s3ec.codec import Header, Shape
from s3ec.connector.messages import StepPlan, WorkerReport
from s3ec.connector.save_orders import SeenKeys
from s3ec.connector.scheduler import SchedulerHalf
from s3ec.connector.vllm_config import Role
from s3ec.connector.waiting import WaitPolicy
from s3ec.counters import Counters
from s3ec.dev.rigs.virtual_tier import VirtualEntry
from s3ec.identity import KeyPolicy, Layout, ModalityScopes
from s3ec.index.reader import ManifestIndex
from s3ec.prefetch import FetchOutcome, FetchRequest, FetchResult, Priority
from s3ec.tier.entries import LocalKeys
from s3ec.tier.open_entry import OpenEntry
from tests.support.clock import Clock
from tests.support.fake_index import FakeIndex
from tests.support.half_audit import leftovers_of
from tests.unit.tier.cases import key_of

LAYOUT = Layout("gemma-0123456789abcdef")
ROWS = 4
# Small, so that differences of a few milliseconds are exact enough.
START_S = 1000.0
WINDOW = 100


def identifier_of(text: object) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()


def feature(
    text: object,
    offset: int = 0,
    *,
    rows: int = ROWS,
    length: int | None = None,
    modality: str = "image",
    pixels: bool = True,
    raw: bool = False,
) -> Any:
    """One multimodal feature; ``raw`` takes the text itself for the identifier."""
    return SimpleNamespace(
        identifier=text if raw else identifier_of(text),
        modality=modality,
        data={"pixel_values": 1} if pixels else {"image_grid_thw": 1},
        mm_position=SimpleNamespace(
            offset=offset,
            length=rows if length is None else length,
            get_num_embeds=lambda: rows,
        ),
    )


def bare(text: object, offset: int = 0, **more: Any) -> Any:
    """A feature that came without pixels."""
    return feature(text, offset, pixels=False, **more)


def request(name: str, *features: Any) -> Any:
    ends = [one.mm_position.offset + one.mm_position.length for one in features]
    return SimpleNamespace(
        request_id=name,
        mm_features=list(features),
        num_prompt_tokens=max(ends),
        arrival_time=START_S,
    )


def has_no_pixels(feature: Any) -> bool:
    return "pixel_values" not in feature.data


class FakePrefetcher:
    """Fetches end when the test says so, and every entry is accounted for."""

    def __init__(self) -> None:
        self.submitted: list[FetchRequest] = []
        self.demoted: list[str] = []
        self.open: dict[str, FetchRequest] = {}
        self.done: list[FetchResult] = []
        self.far: list[FetchRequest] = []
        self.placeholder: dict[str, Any] = {}  # of every entry
        self.live: Counter[str] = Counter()  # who holds a file, by its name
        self.released: list[str] = []
        self.resident: dict[bytes, OpenEntry] = {}
        self._opened = 0

    def submit(self, wants: Sequence[FetchRequest]) -> None:
        for want in wants:
            identifier = want.key.identifier
            if want.priority is Priority.FORGOTTEN and identifier in self.open:
                self.demoted.append(identifier)
            else:
                self.submitted.append(want)
                self.open.setdefault(identifier, want)

    @property
    def has_news(self) -> bool:
        return bool(self.done or self.far)

    def drain(self) -> list[FetchResult]:
        done, self.done = self.done, []
        return done

    def drain_far(self) -> list[FetchRequest]:
        far, self.far = self.far, []
        return far

    # -- as Residents

    def get(self, digest: bytes, now: float) -> OpenEntry | None:
        entry = self.resident.get(digest)
        if entry is not None:
            self.live[entry.path] += 1
        return entry

    def release(self, entries: Iterable[OpenEntry]) -> None:
        for entry in entries:
            assert entry.path in self.live, f"{entry.path} released twice, or never made"
            self.live[entry.path] -= 1
            self.live += Counter()  # without zeros
            self.released.append(entry.path)

    def entry(self, identifier: str, modality: str, rows: int) -> OpenEntry:
        self._opened += 1
        shape = Shape(rows, 32, "bfloat16")
        header = Header(identifier, LAYOUT.namespace, modality, shape, "0" * 32, self.placeholder)
        return VirtualEntry(f"/open/{self._opened}", header)

    def finish(
        self,
        identifier: str,
        outcome: FetchOutcome = FetchOutcome.READY,
        *,
        holds: int | None = None,
        source: Literal["tier", "bucket"] = "bucket",
        seconds: float = 0.0,
    ) -> OpenEntry | None:
        """End one fetch as the real one would: rows that differ are a mismatch.

        Args:
            holds: Rows of the entry; what was asked for if None.
            source: Where it was.
            seconds: That it took.
        """
        want = self.open.pop(identifier)
        if outcome is FetchOutcome.READY and holds is not None and holds != want.rows:
            outcome = FetchOutcome.MISMATCH
        entry = None
        if outcome is FetchOutcome.READY:
            entry = self.entry(identifier, want.modality, want.rows)
            self.live[entry.path] += 1
        self.done.append(FetchResult(want, outcome, entry, source if entry else None, seconds))
        return entry


class World:
    """The half and what it talks to."""

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        index: ManifestIndex | None = None,
        naming: KeyPolicy | None = None,
        scopes: ModalityScopes | None = None,
        policy: WaitPolicy | None = None,
        seen: SeenKeys | None = None,
        **role: Any,
    ) -> None:
        values = {
            "producer": False,
            "consumer": True,
            "window_tokens": WINDOW,
            "ranks": 1,
            "steps_in_flight": 2,
            "defer_timeout_s": 2.0,
        }
        self.role = Role(**(values | role))  # type: ignore[arg-type]
        self.clock = clock or Clock(START_S)
        self.counters = Counters()
        self.index: ManifestIndex = index or FakeIndex(self.counters, self.clock)
        self.local = LocalKeys()
        self.prefetcher = FakePrefetcher()
        self.policy = policy
        self.store = SimpleNamespace(is_open=False)
        self.disk = SimpleNamespace(hangs=False)
        self.placeholders: dict[str, Any] = {"image_grid_thw": [[1, 2, 2]]}
        self.half = SchedulerHalf(
            self.role,
            index=self.index,
            local=self.local,
            prefetcher=self.prefetcher,
            residents=self.prefetcher,
            store=self.store,
            disk=self.disk,
            needs_embedding=has_no_pixels,
            placeholder_of=lambda _: self.placeholders,
            counters=self.counters,
            naming=naming,
            scopes=scopes,
            policy=policy,
            seen=seen,
            clock=self.clock,
        )

    def stock(self, *texts: object) -> None:
        for text in texts:
            self.index.add(key_of(identifier_of(text)))

    def put_here(self, *texts: object) -> None:
        """This node's disk is believed to hold them."""
        for text in texts:
            self.local.add(key_of(identifier_of(text)))

    def defer(self, text: object, *, stocked: bool = True, **more: Any) -> Any:
        """A request for one picture that waits for it; the pass is over."""
        if stocked:
            self.stock(text)
        return self.deferred(request("r", feature(text, **more)))

    def deferred_far(self, text: object) -> Any:
        """A request for one picture that no replica has: it waited until home was asked."""
        self.stock(text)
        asker = self.deferred(request(f"r {text}", feature(text)))
        self.go_far(text)
        return asker

    def deferred(self, request: Any) -> Any:
        """A request that waits; the pass is over."""
        assert not self.ask(request)
        self.step()
        return request

    def run(self, request: Any, *indices: int) -> list[bool]:
        """Schedule a request that need not wait; what was granted."""
        assert self.ask(request)
        return self.schedule(request, *indices)

    def end(self, request: Any) -> None:
        self.half.request_finished(request)

    def failed(self) -> set[str]:
        return self.half.take_unavailable_requests()

    def is_on_device(self, text: object) -> bool:
        return identifier_of(text) in self.half.on_device

    def ask(self, request: Any, computed: int = 0) -> bool:
        return self.half.ensure_cache_available(request, computed)

    def has(self, text: object) -> bool:
        return self.half.has_cache_item(identifier_of(text))

    def schedule(self, request: Any, *indices: int) -> list[bool]:
        """What vLLM does with a request that is scheduled: ask for each item and allocate it."""
        granted = []
        for index in indices or range(len(request.mm_features)):
            granted.append(self.half.has_cache_item(request.mm_features[index].identifier))
            self.half.update_state_after_alloc(request, index)
        return granted

    def step(
        self, freed: Iterable[object] = (), *, tokens: int = 10, requests: int = 1
    ) -> StepPlan:
        return self.half.build_connector_meta(
            map(identifier_of, freed), scheduled_tokens=tokens, requests=requests if tokens else 0
        )

    def report(self, step: int, *ranks: int, **more: Any) -> None:
        loaded = {step: set(ranks or (0,))}
        self.half.update_connector_output(WorkerReport(loaded=loaded, **more))

    def finish(
        self, text: object, outcome: FetchOutcome = FetchOutcome.READY, **more: Any
    ) -> OpenEntry | None:
        return self.prefetcher.finish(identifier_of(text), outcome, **more)

    def go_far(self, text: object) -> None:
        """No replica has it, and home is asked."""
        self.prefetcher.far.append(self.prefetcher.open[identifier_of(text)])

    def make_resident(self, text: object, rows: int = ROWS, modality: str = "image") -> OpenEntry:
        """This node's disk holds it, open and verified."""
        identifier = identifier_of(text)
        entry = self.prefetcher.entry(identifier, modality, rows)
        self.prefetcher.resident[key_of(identifier).digest] = entry
        return entry

    def bring(self, *texts: object) -> list[str]:
        """Stock, ask, step and fetch: afterwards the items are here and known to be."""
        self.stock(*texts)
        asker = request("bringer", *(feature(text, 10 * n) for n, text in enumerate(texts)))
        self.ask(asker)
        self.step()
        entries = [self.finish(text) for text in texts]
        assert self.ask(asker)
        self.half.request_finished(asker)
        return [entry.path for entry in entries if entry is not None]

    def load_one(self, text: str = "a") -> tuple[int, str]:
        """Have it loaded; the step that loads it, and its file."""
        (path,) = self.bring(text)
        assert self.run(request(f"load {text}", feature(text))) == [True]
        return self.step().step, path

    @property
    def wanted(self) -> list[str]:
        """Identifiers submitted so far, in order."""
        return [want.key.identifier for want in self.prefetcher.submitted]

    def leftovers(self) -> list[str]:
        """What is remembered though all requests, steps and leases have ended."""
        return leftovers_of(self.half, self.clock())
