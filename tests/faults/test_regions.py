# SPDX-License-Identifier: Apache-2.0
"""One corpus in two places, a node that reads near first: lag, lies, and places that are down."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import redis

from s3ec.corpus import Corpus
from s3ec.counters import Counters
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import Answer, Stall, StallUpload, s3_error
from s3ec.dev.rigs.valkey import Valkey
from s3ec.errors import TOO_LARGE, UnavailableError
from s3ec.index.child import Job, in_child
from s3ec.index.maker import UNION_ROWS
from s3ec.index.names import snapshots_prefix
from s3ec.node import Node
from s3ec.prefetch import FetchOutcome
from s3ec.settings import Settings
from s3ec.store import places
from s3ec.store.base import Blob
from s3ec.store.open import open_places
from s3ec.store.places import LATE_AT_FIRST_S
from s3ec.testing.fault_store import Fault, FaultStore, Gate, Script
from s3ec.testing.memory_store import MemoryStore
from s3ec.testing.server import HOST, LocalS3
from tests.faults.embeddings import LAYOUT, body_at, key_at
from tests.faults.indexed import Bucket, evict, fetch, noding, refresh, run_rebuild, serve
from tests.support import damage
from tests.support.indexes import delta_bytes, delta_name
from tests.support.waiting import DEADLINE_S, eventually

ASKED = range(8)


class Regions:
    """A home with eight entries, and a place near; both behind proxies."""

    def __init__(self, home: Bucket, near: Bucket, proxies: tuple[FaultProxy, FaultProxy]) -> None:
        self.home, self.near = home, near
        self.home_proxy, self.near_proxy = proxies

    def settings(self, cache_dir: Path, *, fill: bool = False, **other: str) -> dict[str, object]:
        replica = {
            "bucket": self.near.name,
            "prefix": self.near.prefix,
            "endpoint_url": self.near_proxy.url,
            "region": "us-east-1",
            "fill": fill,
        }
        settings = self.home.settings(cache_dir, endpoint_url=self.home_proxy.url, **other)
        return {**settings, "replicas": [replica]}

    def replicate(self, *below: str) -> None:
        """Copy what lies below these prefixes; everything for none."""
        for prefix in below or ("",):
            for name in self.home.names(prefix):
                self.near.put(name, self.home.get(name))

    def asked(self) -> tuple[int, int]:
        """Requests for entries near and at home since the last time."""
        counts = []
        for proxy in (self.near_proxy, self.home_proxy):
            counts.append(sum("/objects/" in one.target for one in proxy.requests))
            proxy.requests.clear()
        return counts[0], counts[1]


@pytest.fixture
def regions(local_s3: LocalS3, s3_bucket: str, signed: None, tmp_path: Path) -> Iterator[Regions]:
    away = local_s3.create_bucket(f"{s3_bucket}-near")
    with ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(local_s3.endpoint_url)) for _ in range(2)]
        home, near = Bucket(local_s3, s3_bucket, "corpus"), Bucket(local_s3, away, "corpus")
        home.stock(*ASKED)
        with noding(home.settings(tmp_path / "maker")) as node:
            run_rebuild(node, ago_s=10)
        # On a busy machine, where requests are counted, nothing is late.
        stack.enter_context(mock.patch.object(places, "LATE_AT_FIRST_S", 60.0))
        yield Regions(home, near, (proxies[0], proxies[1]))
    local_s3.delete_bucket(away)


def outcomes(node: Node) -> set[FetchOutcome]:
    return {one.outcome for one in fetch(node, ASKED).values()}


def held_back(node: Node, gate: Gate) -> Any:
    """What copies entries near; each copy waits for the gate."""
    (filler,) = node._fillers
    script = Script([Fault("put_if_absent", gate=gate)])
    filler._place.store = FaultStore(filler._place.store, script)
    return filler


def test_what_is_near_is_read_near(regions: Regions, tmp_path: Path) -> None:
    regions.replicate()
    with noding(regions.settings(tmp_path / "cache")) as node:
        refresh(node)
        assert serve(node, ASKED) == set(ASKED)
        assert node.prefetcher.drain_far() == []
    assert regions.asked() == (len(ASKED), 0)


def test_what_lags_is_read_at_home_and_near_once_it_has_come(
    regions: Regions, tmp_path: Path
) -> None:
    with noding(regions.settings(tmp_path / "cache")) as node:
        refresh(node)
        assert serve(node, ASKED) == set(ASKED)
        near, home = regions.asked()
        # A 404 of obstore is asked of botocore, which tells a missing key from a missing bucket.
        assert len(ASKED) <= near <= 2 * len(ASKED)
        assert home == len(ASKED)
        assert {one.key for one in node.prefetcher.drain_far()} == set(map(key_at, ASKED))
        evict(node, ASKED)
        assert serve(node, ASKED) == set(ASKED)
        assert regions.asked() == (0, len(ASKED))  # not asked again for a minute
    regions.replicate()
    with noding(regions.settings(tmp_path / "other")) as node:
        refresh(node)
        assert serve(node, ASKED) == set(ASKED)
    assert regions.asked() == (len(ASKED), 0)


# What a place gives instead of a sound entry: another one for each entry of these tests.
LIES: list[Callable[[bytes], bytes]] = [
    lambda _: body_at(len(ASKED)),
    lambda sound: sound[:-1],
    lambda sound: sound + bytes(2**17),
    lambda _: b"",
    damage.web_page,
    damage.other_rows,
    damage.other_width,
    damage.other_modality,
]


def test_a_place_that_lies_is_a_miss_of_this_place_alone(regions: Regions, tmp_path: Path) -> None:
    regions.replicate()
    for number, lie in zip(ASKED, LIES, strict=True):
        regions.near.put(LAYOUT.object(key_at(number)), lie(body_at(number)))
    with noding(regions.settings(tmp_path / "cache")) as node:
        refresh(node)
        assert serve(node, ASKED) == set(ASKED)
        assert node.counters.get("bad_objects") == 0
        regions.asked()
        evict(node, ASKED)
        assert serve(node, ASKED) == set(ASKED)
        assert regions.asked()[0] == 0


def test_a_place_that_hangs_is_left_alone_and_delays_nobody_for_long(
    regions: Regions, tmp_path: Path
) -> None:
    """Else each of these would wait for the timeout of the read, a minute here."""
    regions.replicate()
    stall = regions.near_proxy.add(Rule(Stall(), target="/objects/"))
    with (
        mock.patch.object(places, "LATE_AT_FIRST_S", LATE_AT_FIRST_S),
        noding(regions.settings(tmp_path / "cache")) as node,
    ):
        refresh(node)
        for number in ASKED:  # one after the other
            assert serve(node, [number]) == {number}
        assert stall.fired < len(ASKED)
        assert node.counters.get("breaker.opened") == 1


def test_a_portal_in_front_of_the_near_place_costs_no_answer(
    regions: Regions, tmp_path: Path
) -> None:
    regions.replicate()
    page = Answer(200, b"<html>please log in</html>", {"content-type": "text/html"})
    regions.near_proxy.add(Rule(page))
    with noding(regions.settings(tmp_path / "cache")) as node:
        refresh(node)
        assert serve(node, ASKED) == set(ASKED)


def test_while_home_is_down_a_fresh_node_reads_near_and_its_saves_wait(
    regions: Regions, tmp_path: Path
) -> None:
    regions.replicate()
    with (
        regions.home_proxy.refusing(),
        noding(regions.settings(tmp_path / "cache")) as node,
    ):
        refresh(node)
        assert serve(node, ASKED) == set(ASKED)
        assert not node.breaker.is_open
        with pytest.raises(UnavailableError):
            node.loop.run(node.store.put_if_absent("x", [b"1"]), 60)


def test_while_the_near_place_is_down_all_is_read_at_home(regions: Regions, tmp_path: Path) -> None:
    regions.replicate()
    with noding(regions.settings(tmp_path / "cache")) as node:
        with regions.near_proxy.refusing():
            refresh(node)
            assert serve(node, ASKED) == set(ASKED)
            assert not node.breaker.is_open
        evict(node, ASKED)
        regions.asked()

        def is_read_near() -> bool:  # once its breaker has probed
            evict(node, ASKED)
            return serve(node, ASKED) == set(ASKED) and regions.asked()[0] == len(ASKED)

        eventually(is_read_near, "the near place is asked again")


def test_old_manifests_near_take_nothing_away(regions: Regions, tmp_path: Path) -> None:
    regions.replicate()
    regions.home.stock(8)
    with noding(regions.home.settings(tmp_path / "again")) as node:
        run_rebuild(node)
    with noding(regions.settings(tmp_path / "cache")) as node:
        refresh(node)
        assert serve(node, [*ASKED, 8]) == {*ASKED, 8}
        with regions.home_proxy.refusing():
            refresh(node)
            assert node.index.maybe_contains(key_at(8))


def test_a_snapshot_that_only_a_replica_has_counts_no_longer_than_home_is_down(
    regions: Regions, tmp_path: Path
) -> None:
    """An engine whose bucket is the replica lists it: its snapshot is newer, and lacks most."""
    regions.replicate(LAYOUT.modality("image"), LAYOUT.object(key_at(0)))
    with noding(regions.near.settings(tmp_path / "stray")) as node:
        run_rebuild(node)
    with noding(regions.settings(tmp_path / "cache")) as node:
        with regions.home_proxy.refusing():
            refresh(node)
            assert serve(node, ASKED) == {0}

        def knows_all() -> bool:
            with contextlib.suppress(UnavailableError):  # its breaker has to probe
                refresh(node)
            return all(node.index.maybe_contains(key_at(number)) for number in ASKED)

        eventually(knows_all, "home's snapshot counts")
        assert node.index.loaded
        assert serve(node, ASKED) == set(ASKED)


def test_no_snapshot_is_made_of_what_a_replica_lists(regions: Regions, tmp_path: Path) -> None:
    """One that lags would leave out what home was told since, until the next listing."""
    regions.home.delete(*regions.home.names(snapshots_prefix(LAYOUT)))
    many = {number.to_bytes(4, "big") * 4: 1 for number in range(UNION_ROWS + 1)}
    regions.home.put(delta_name(LAYOUT, ago_s=3000), delta_bytes(many, LAYOUT))
    with noding(regions.home.settings(tmp_path / "other")) as node:
        run_rebuild(node, ago_s=7200)
    regions.replicate()
    regions.home.stock(8)
    regions.home.announce(8, ago_s=2000)
    told = regions.home.names(snapshots_prefix(LAYOUT))
    regions.home_proxy.add(Rule(s3_error(503, "SlowDown"), method="GET", target="list-type=2"))
    settings = Settings.model_validate(regions.settings(tmp_path / "cache"))
    job = Job("union", LAYOUT.namespace, str(tmp_path / "index"))
    with pytest.raises(UnavailableError):
        asyncio.run(in_child(settings)(job))
    assert regions.home.names(snapshots_prefix(LAYOUT)) == told


def test_what_is_copied_after_its_deletion_is_not_read_once_the_index_has_heard(
    regions: Regions, tmp_path: Path
) -> None:
    gate = Gate()
    gone = LAYOUT.object(key_at(0))
    with noding(regions.settings(tmp_path / "cache", fill=True)) as node:
        held_back(node, gate)
        refresh(node)
        assert serve(node, [0]) == {0}
        assert gate.reached.wait(DEADLINE_S)
        settings = Settings.model_validate(regions.settings(tmp_path / "command"))
        with Corpus.open(settings) as corpus:
            corpus.delete([key_at(0).identifier])
        assert gone not in regions.home.names()
        gate.release()
        eventually(lambda: gone in regions.near.names(), "it is copied all the same")
        run_rebuild(node)
    with noding(regions.settings(tmp_path / "other")) as node:
        refresh(node)
        assert serve(node, ASKED) == {*ASKED} - {0}


def test_what_came_from_home_is_copied_near_and_the_index_as_well(
    regions: Regions, tmp_path: Path
) -> None:
    # Some servers list from the start only.
    unable = s3_error(501, "NotImplemented")
    regions.near_proxy.add(Rule(unable, method="GET", target="start-after="))
    with noding(regions.settings(tmp_path / "cache", fill=True)) as node:
        refresh(node)
        assert serve(node, ASKED) == set(ASKED)
        (filler,) = node._fillers
        names = {LAYOUT.object(key_at(number)) for number in ASKED}
        eventually(lambda: set(regions.near.names(LAYOUT.objects)) == names, "all are copied")
        node.loop.run(filler.mirror(node.index, node._index_folder), 60)
    assert regions.near.names(LAYOUT.manifest)
    for name in regions.near.names():
        assert regions.near.get(name) == regions.home.get(name)
    regions.asked()
    with (
        regions.home_proxy.refusing(),
        noding(regions.settings(tmp_path / "other", fill=True)) as node,
    ):
        refresh(node)
        assert serve(node, ASKED) == set(ASKED)
    assert regions.asked() == (len(ASKED), 0)


def test_a_burst_is_copied_whole_but_for_what_was_evicted_meanwhile(
    regions: Regions, tmp_path: Path
) -> None:
    gate = Gate()
    with noding(regions.settings(tmp_path / "cache", fill=True)) as node:
        filler = held_back(node, gate)
        refresh(node)
        assert serve(node, ASKED) == set(ASKED)
        assert gate.reached.wait(DEADLINE_S)  # the first copy is under way, the others wait
        evict(node, [7])
        gate.release()

        def ended() -> bool:
            counted = [
                node.counters.get(f"place.{filler._place.name}.{what}")
                for what in ("filled", "unfilled")
            ]
            return sum(counted) == len(ASKED)

        eventually(ended, "all copies have ended")
    assert len(regions.near.names(LAYOUT.objects)) >= len(ASKED) - 1


def test_a_place_that_takes_no_copies_is_left_alone(
    regions: Regions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    denied = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    rule = regions.near_proxy.add(Rule(Answer(403, denied), method="PUT"))
    with noding(regions.settings(tmp_path / "cache", fill=True)) as node:
        refresh(node)
        assert serve(node, ASKED) == set(ASKED)
        eventually(lambda: rule.fired > 0, "a copy is tried")
        eventually(lambda: "takes no copies" in caplog.text, "it is said")
        evict(node, ASKED)
        assert serve(node, ASKED) == set(ASKED)
    assert caplog.text.count("takes no copies") == 1


def test_a_node_ends_while_a_copy_is_under_way_and_others_wait(
    regions: Regions, tmp_path: Path
) -> None:
    stalled = regions.near_proxy.add(Rule(StallUpload(), method="PUT"))
    with noding(regions.settings(tmp_path / "cache", fill=True)) as node:
        refresh(node)
        assert serve(node, ASKED) == set(ASKED)
        eventually(lambda: stalled.fired > 0, "a copy is under way")
    assert regions.near.names(LAYOUT.objects) == []


def test_one_entry_that_is_too_large_for_a_place_keeps_no_other_from_it(
    regions: Regions, tmp_path: Path
) -> None:
    regions.near_proxy.add(Rule(s3_error(400, TOO_LARGE), method="PUT", times=2))
    with noding(regions.settings(tmp_path / "cache", fill=True)) as node:
        refresh(node)
        assert serve(node, ASKED) == set(ASKED)
        rest = len(ASKED) - 1
        eventually(lambda: len(regions.near.names(LAYOUT.objects)) == rest, "the rest is copied")


def test_what_this_disk_has_damaged_since_is_not_copied(regions: Regions, tmp_path: Path) -> None:
    gate = Gate()
    with noding(regions.settings(tmp_path / "cache", fill=True), audit=False) as node:
        filler = held_back(node, gate)
        refresh(node)
        assert serve(node, ASKED) == set(ASKED)
        assert gate.reached.wait(DEADLINE_S)
        key = filler._waiting[-1]  # not the one that is under way
        path = tmp_path / "cache" / "v1" / "objects" / LAYOUT.namespace / key.name
        path.write_bytes(damage.flipped(path.read_bytes()))
        gate.release()
        name = f"place.{filler._place.name}"
        eventually(lambda: node.counters.get(f"{name}.unfilled") == 1, "one is left out")
        eventually(lambda: node.counters.get(f"{name}.filled") == len(ASKED) - 1, "others are not")
    assert LAYOUT.object(key) not in regions.near.names()


def test_a_full_redis_is_still_read(regions: Regions, tmp_path: Path) -> None:
    with Valkey("--maxmemory-policy", "noeviction") as valkey:
        replica = {"url": valkey.url, "fill": True}
        settings = {**regions.settings(tmp_path / "cache"), "replicas": [replica]}
        with contextlib.closing(redis.Redis(host=HOST, port=valkey.port)) as client:
            client.set(f"{regions.home.prefix}/{LAYOUT.object(key_at(0))}", body_at(0))
            client.config_set("maxmemory", 1)  # it holds more than that already
        with noding(settings) as node:
            refresh(node)
            assert serve(node, ASKED) == set(ASKED)
            name = f"place.{node._fillers[0]._place.name}"
            eventually(
                lambda: node.counters.get(f"{name}.unfilled") == len(ASKED) - 1, "none finds room"
            )
            regions.asked()
            evict(node, [0])
            assert serve(node, [0]) == {0}
            assert node.counters.get(f"{name}.skipped") == 0
        assert regions.asked() == (0, 0)


def test_a_redis_near_is_filled_read_and_forgets_without_an_error(
    regions: Regions, tmp_path: Path
) -> None:
    with Valkey() as valkey:
        replica = {"url": valkey.url, "fill": True}

        def settings(folder: str) -> dict[str, object]:
            return {**regions.settings(tmp_path / folder), "replicas": [replica]}

        def filled(node: Node) -> bool:
            name = node._fillers[0]._place.name
            return node.counters.get(f"place.{name}.filled") == len(ASKED)

        with noding(settings("first")) as node:
            refresh(node)
            assert serve(node, ASKED) == set(ASKED)
            eventually(lambda: filled(node), "all are copied")
        regions.asked()
        with noding(settings("second")) as node:
            refresh(node)
            assert serve(node, ASKED) == set(ASKED)
            assert regions.asked() == (0, 0)
            valkey.kill()
            evict(node, ASKED)
            assert serve(node, ASKED) == set(ASKED)
            valkey.start()
        with noding(settings("third")) as node:  # it has forgotten all
            refresh(node)
            assert serve(node, ASKED) == set(ASKED)
            eventually(lambda: filled(node), "all are copied again")


def test_commands_read_home_and_delete_everywhere_and_name_a_place_that_refuses(
    regions: Regions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    regions.replicate()
    gone = [LAYOUT.object(key_at(number)) for number in (0, 1)]
    settings = Settings.model_validate(regions.settings(tmp_path / "cache"))
    with Corpus.open(settings) as corpus:
        corpus.delete([key_at(0).identifier])
        assert regions.asked()[0] == 0  # deletions of many names name none in the path
        denied = Answer(403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")
        regions.near_proxy.add(Rule(denied, method="POST"))
        corpus.delete([key_at(1).identifier])
    assert not set(gone) & set(regions.home.names())
    assert set(gone) & set(regions.near.names()) == {gone[1]}
    assert caplog.text.count("what is deleted stays in") == 1


def test_hydrate_reads_near_and_at_home_what_near_lacks_or_has_bad(
    regions: Regions, tmp_path: Path
) -> None:
    regions.replicate()
    settings = Settings.model_validate(regions.settings(tmp_path / "cache"))
    with Corpus.open(settings) as corpus:
        assert corpus.hydrate().fetched == len(ASKED)
    assert regions.asked() == (len(ASKED), 0)
    regions.near.delete(LAYOUT.object(key_at(0)))
    regions.near.put(LAYOUT.object(key_at(1)), body_at(2))
    settings = Settings.model_validate(regions.settings(tmp_path / "other"))
    with Corpus.open(settings) as corpus:
        found = corpus.hydrate()
        assert (found.fetched, found.status) == (len(ASKED), "complete")
    assert regions.asked()[1] == 2
    with noding(settings.model_dump(mode="json")) as node:
        refresh(node)
        assert serve(node, ASKED) == set(ASKED)
    assert regions.asked() == (0, 0)


def test_each_place_is_asked_with_the_credentials_of_its_profile(
    regions: Regions, local_s3: LocalS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions.replicate()
    keys = local_s3.env()
    shared = tmp_path / "credentials"
    shared.write_text(
        f"[second]\naws_access_key_id = {keys['AWS_ACCESS_KEY_ID']}\n"
        f"aws_secret_access_key = {keys['AWS_SECRET_ACCESS_KEY']}\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OFHOME")  # which the server does not know
    given = regions.settings(tmp_path / "cache")
    [replica] = given["replicas"]
    variable = json.dumps([{**replica, "profile": "second"}])
    settings = Settings.model_validate({**given, "replicas": variable})
    places = open_places(settings, MemoryStore(), Counters(), is_entry=LAYOUT.is_entry)
    assert places is not None

    async def read() -> Blob | None:
        try:
            return await places.get(LAYOUT.object(key_at(0)), max_bytes=2**20)
        finally:
            await places.close()

    assert asyncio.run(read()) == body_at(0)
    [asked] = regions.near_proxy.requests
    assert f"Credential={keys['AWS_ACCESS_KEY_ID']}/" in asked.headers["authorization"]


def test_settings_of_a_replica_are_checked_and_named(tmp_path: Path) -> None:
    good = {"bucket": "home", "replicas": json.dumps([{"bucket": "corpus-eu", "region": "eu"}])}
    settings = Settings.model_validate(good)
    assert settings.at(settings.replicas[0]).bucket == "corpus-eu"
    for replica, field in (
        ({"bucket": "a/b"}, "bucket"),
        ({"bucket": "near", "endpoint_url": "http://10.1.2.3"}, "allow_http"),
        ({"bucket": "near", "prefix": "../x"}, "prefix"),
        ({"region": "eu"}, "bucket"),
        ({"bucket": "near", "secret": "s"}, "secret"),
        ({"bucket": "near", "fill_bytes_per_minute": 0}, "fill_bytes_per_minute"),
    ):
        with pytest.raises(ValueError, match=f"(?s)replicas.*{field}"):
            Settings.model_validate({"bucket": "home", "replicas": [replica]})
