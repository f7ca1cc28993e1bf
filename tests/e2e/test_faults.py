# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to the bucket, the engine answers as it would without the connector.

One consumer, started while the server was down and no credentials were to be had, lives through
all of it: the tests share it and a server of their own, and each has pictures of its own, so that
no cache hides the fault.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from s3ec.dev.rigs.engine import EngineProcess, ec_config, text
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import STEADY
from s3ec.testing.server import LocalS3
from tests.e2e.rig import (
    FROM_BUCKET,
    FROM_TIER,
    HEALTHY_ROUNDS,
    HITS,
    LOADS,
    MISSES,
    OPTIONS,
    Answer,
    Corpus,
    Gallery,
    Prompt,
    Record,
    Scenario,
    body,
    eventually,
    healthy,
    moved,
    record,
    said,
    settings,
    tier_of,
)
from tests.support import damage
from tests.support.metadata import MetadataService
from tests.support.on_disk import audit_of, found_in
from tests.support.waiting import stop

_BUCKET = "corpus"
# How the log tells of the breaker, whose state no counter shows.
_OPEN, _CLOSED = "the breaker is open", "the breaker is closed"
_OPENED = "vllm:s3ec_breaker_opened"
_DEFER_TIMEOUTS = "vllm:s3ec_defer_timeouts"
_UNAVAILABLE = "vllm:s3ec_fetch_outcomes{outcome=unavailable}"
# For what takes a picture, or a prompt about it, each time: there are only so many. Where some
# waits were in vain, nobody waits until a fetch has come in time.
patiently = partial(eventually, deadline_s=180.0, pause_s=3.0)


@dataclass
class _Rig:
    """The engine, its server, and what was seen while it started."""

    engine: EngineProcess
    server: LocalS3
    source: LocalS3
    metadata: MetadataService
    gallery: Gallery
    corpus: Corpus
    reference: dict[str, list[Answer]]
    tier: Path
    started: dict[str, Record]
    rounds: Iterator[int]

    def ask(self, purpose: str) -> Record:
        """One picture and the usual question."""
        return self.put(self.gallery.solo(purpose))

    def put(self, *prompts: Prompt, together: bool = False) -> Record:
        """Some prompts."""
        return record(self.engine, Scenario("", prompts, together))

    def is_right(self, seen: Record, name: str) -> bool:
        """Whether the answers are those of the engine without the connector."""
        return [said(a) for a in seen.answers] == [said(a) for a in self.reference[name]]

    def key(self, purpose: str) -> str:
        """Where a picture's embedding lies in the bucket."""
        return self.corpus.objects[purpose]

    def overwrite(self, purpose: str, content: bytes) -> None:
        """Replace an object, as only others than s3ec would."""
        self.server.client().put_object(Bucket=_BUCKET, Key=self.key(purpose), Body=content)

    def original(self, purpose: str) -> bytes:
        """An object as it is in the bucket now."""
        return body(self.server.client(), _BUCKET, self.key(purpose))

    def hits(self) -> bool:
        """Ask about an undamaged picture; whether it came from the bucket to the right answer."""
        number = next(self.rounds)
        prompt, purpose = healthy(self.gallery, number)
        _on_disk(self.tier, self.key(purpose)).unlink(missing_ok=True)
        seen = self.put(prompt)
        assert self.is_right(seen, f"healthy {number}")
        return seen[HITS] == seen[LOADS] == seen[FROM_BUCKET] == 1

    def still_hits(self) -> None:
        """Wait until an undamaged picture comes from the bucket.

        What failed a moment ago is not asked for again so soon. On a busy machine waits may run
        out.
        """
        patiently(self.hits, "an undamaged picture comes from the bucket")

    def hits_come_back(self) -> None:
        """Wait until the breaker is closed and embeddings come from the bucket."""
        eventually(
            lambda: (log := self.engine.log).rfind(_CLOSED) >= log.rfind(_OPEN), "breaker closes"
        )
        patiently(self.hits, "hits come from the bucket")

    def wait_for(self, before: dict[str, float], *counters: str, purpose: str = "") -> None:
        """Wait until a counter has moved; counts travel with a step's results, so make steps.

        Args:
            before: The counters then.
            counters: Names, of which one is enough.
            purpose: Of a picture whose fetch moves it. It is asked for again from time to time: on
                a busy machine, a fetch may fail or not be begun.
        """
        looks = count(1)

        def there() -> bool:
            self.engine.chat([[text("tick")]], max_tokens=2)
            if {*counters} & moved(before, self.engine.counters()).keys():
                return True
            if purpose and not (look := next(looks)) % 20:
                for other in ("healthy-0", "healthy-1"):  # the encoder cache drops the picture
                    self.put(self.gallery.again(other, f"look {look}"))
                self.put(self.gallery.again(purpose, f"look {look}"))
            return False

        eventually(there, f"{' or '.join(counters)} has moved")


@pytest.fixture(scope="module")
def rig(
    workdir: Path,
    gallery: Gallery,
    gemma: Path,
    corpus: Corpus,
    reference: dict[str, list[Answer]],
    local_s3: LocalS3,
    nursery: EngineForkServer,
) -> Iterator[_Rig]:
    """The consumer, after the server was down, then up with an empty bucket, then filled."""
    tier = workdir / "faults-tier"
    with LocalS3() as server, MetadataService(server) as metadata:
        server.create_bucket(_BUCKET)
        server.kill()
        # One entry is on this node's disk from earlier.
        warm = _on_disk(tier, corpus.objects["warm"])
        shutil.copytree(
            workdir / "producer-tier",
            tier,
            ignore=lambda folder, names: set(names) - set(warm.relative_to(tier).parts),
        )
        # A server that is silent is to be given up soon.
        limits = {"connect_timeout_s": 1.0, "read_timeout_s": 5.0, "defer_timeout_s": 2.0}
        more = {"index_refresh_s": 2.0, **limits}
        with EngineProcess(
            gemma,
            ec=ec_config("ec_consumer", settings(server, _BUCKET, tier, **more)),
            log_path=workdir / "faults.log",
            media=workdir,
            env=metadata.env | STEADY,
            options=OPTIONS,
            nursery=nursery,
        ) as engine:
            numbers = iter(range(HEALTHY_ROUNDS))
            made = _Rig(
                engine, server, local_s3, metadata, gallery, corpus, reference, tier, {}, numbers
            )
            _start(made)
            yield made
    # vLLM kills an engine that takes long to end, on a busy machine. The next process sweeps.
    tier_of(tier, corpus.namespace).close()
    assert audit_of(found_in(tier)) == []


def _on_disk(tier: Path, key: str) -> Path:
    return tier / "v1" / "objects" / key.replace("/objects/", "/")


def _start(rig: _Rig) -> None:
    rig.started["down"] = rig.ask("down")
    eventually(lambda: _OPEN in rig.engine.log, "the breaker opens")
    rig.started["resting"] = rig.ask("resting")
    rig.started["warm"] = rig.ask("warm")
    eventually(lambda: rig.metadata.asked > 0, "credentials are looked for")
    rig.metadata.answering.set()
    rig.server.restart()
    eventually(lambda: _CLOSED in rig.engine.log, "the bucket is listed")
    rig.started["empty"] = rig.ask("empty")
    _fill(rig)
    rig.hits_come_back()


def _fill(rig: _Rig) -> None:
    """Copy the corpus into the server's bucket."""
    origin, client = rig.source.client(), rig.server.client()
    for key in [*rig.corpus.others, *rig.corpus.objects.values()]:
        content = body(origin, rig.corpus.bucket, key)
        client.put_object(Bucket=_BUCKET, Key=key, Body=content)


@pytest.mark.parametrize("state", ["down", "resting", "empty"])
def test_no_server_and_no_credentials_at_start_or_an_empty_bucket_changes_no_answer(
    state: str, rig: _Rig
) -> None:
    seen = rig.started[state]
    assert rig.is_right(seen, f"solo {state}")
    assert seen[MISSES] == 1
    assert seen[HITS] == 0


def test_what_is_on_this_nodes_disk_is_served_while_the_server_is_down(rig: _Rig) -> None:
    seen = rig.started["warm"]
    assert rig.is_right(seen, "solo warm")
    assert seen[HITS] == seen[LOADS] == seen[FROM_TIER] == 1


def test_a_server_that_is_down_opens_the_breaker_and_the_engine_hits_once_it_is_up(
    rig: _Rig,
) -> None:
    assert rig.engine.counters()[_OPENED] >= 1
    rig.still_hits()


@pytest.mark.parametrize(
    ("purpose", "wound", "counter"),
    [
        ("flipped", damage.flipped, "vllm:s3ec_corrupt{reason=checksum}"),
        ("other-rows", damage.other_rows, "vllm:s3ec_mismatches{field=rows}"),
        ("other-model", damage.other_model, "vllm:s3ec_corrupt{reason=namespace}"),
        ("web-page", damage.web_page, "vllm:s3ec_corrupt{reason=header}"),
        ("other-object", None, "vllm:s3ec_corrupt{reason=identifier}"),
    ],
)
def test_a_bad_object_is_counted_and_its_image_encoded(
    purpose: str, wound: Callable[[bytes], bytes] | None, counter: str, rig: _Rig
) -> None:
    before = rig.engine.counters()
    bad = wound(rig.original(purpose)) if wound else rig.original("healthy-0")
    rig.overwrite(purpose, bad)
    seen = rig.ask(purpose)
    assert rig.is_right(seen, f"solo {purpose}")
    assert seen[MISSES] == 1
    assert seen[HITS] == seen[LOADS] == 0
    rig.wait_for(before, counter, purpose=purpose)
    rig.still_hits()


def test_a_server_that_stops_answering_delays_a_request_but_not_its_answer(rig: _Rig) -> None:
    before = rig.engine.counters()
    assert rig.server.pid is not None
    stop(rig.server.pid)
    try:
        seen = rig.ask("stalled")
    finally:
        os.kill(rig.server.pid, signal.SIGCONT)
    assert rig.is_right(seen, "solo stalled")
    assert seen[MISSES] == 1
    # The request's patience ends first, or that of the breaker does.
    rig.wait_for(before, _DEFER_TIMEOUTS, _OPENED)
    rig.hits_come_back()


def test_a_server_killed_with_requests_in_flight_changes_no_answer_and_hits_come_back(
    rig: _Rig,
) -> None:
    purposes = [f"flight-{number}" for number in range(6)]
    before = rig.engine.counters()
    answers: list[Answer] = []

    def chat() -> None:
        prompts = [rig.gallery.solo(purpose) for purpose in purposes]
        answers.extend(rig.engine.chat(prompts, logprobs=2))

    asking = threading.Thread(target=chat)
    assert rig.server.pid is not None
    stop(rig.server.pid)  # so that no request can be over before the kill
    try:
        asking.start()
        # The index has at most one request out; a second one is for an embedding.
        eventually(lambda: _unread(rig.server) >= 2, "requests lie unread at the server")
    finally:
        rig.server.kill()
        asking.join()
    assert [answer["token_ids"] for answer in answers] == [
        rig.reference[f"solo {purpose}"][0]["token_ids"] for purpose in purposes
    ]
    rig.server.restart()
    # On a busy machine the breaker opens, by the look at the index, before a fetch is begun.
    rig.wait_for(before, _UNAVAILABLE, _OPENED)
    assert moved(before, rig.engine.counters())[MISSES] == len(purposes)
    rig.hits_come_back()


def _unread(server: LocalS3) -> int:
    """Connections to the server with bytes that it has not read."""
    port = int(server.endpoint_url.rpartition(":")[2])
    count = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, _, queues, *_ = line.split()
        count += int(local.partition(":")[2], 16) == port and int(queues.partition(":")[2], 16) > 0
    return count


def test_a_cache_folder_that_is_taken_away_changes_no_answer_and_hits_come_back(rig: _Rig) -> None:
    shutil.rmtree(rig.tier)
    for _ in range(2):
        number = next(rig.rounds)
        assert rig.is_right(rig.put(healthy(rig.gallery, number)[0]), f"healthy {number}")
    rig.hits_come_back()


def test_a_deleted_bucket_changes_no_answer_and_hits_come_back_with_another(rig: _Rig) -> None:
    rig.server.delete_bucket(_BUCKET)
    seen = rig.ask("bucket-gone")
    assert rig.is_right(seen, "solo bucket-gone")
    assert seen[HITS] == 0
    rig.server.create_bucket(_BUCKET)
    _fill(rig)
    rig.hits_come_back()


def test_no_fault_ended_the_engine_or_raised_an_error_of_ours(rig: _Rig) -> None:
    rig.still_hits()
    assert rig.engine.counters()["vllm:s3ec_internal_errors"] == 0
    assert "failed; the request is served without the cache" not in rig.engine.log
