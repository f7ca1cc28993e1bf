# SPDX-License-Identifier: Apache-2.0
"""Jobs over a corpus in real processes: an audit that is killed, a gc beside engines that save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from s3ec.corpus import Corpus
from s3ec.dev.rigs.proxy import Rule
from s3ec.dev.rigs.proxy_faults import Cut, Flip, Stall, s3_error
from s3ec.prefetch import FetchOutcome
from tests.faults.embeddings import LAYOUT, NAMESPACE, body_at, key_at
from tests.faults.engine import Engine
from tests.faults.site import Site
from tests.support.on_disk import evict
from tests.support.waiting import eventually

_ENTRIES = 60


def verify(site: Site, *options: str) -> subprocess.Popen[bytes]:
    """``s3ec verify --deep``, begun."""
    config = json.dumps(site.settings())
    command = ("verify", "--config", config, "--namespace", NAMESPACE.name, "--deep", "--json")
    return subprocess.Popen(
        [sys.executable, "-m", "s3ec", *command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def result_of(process: subprocess.Popen[bytes]) -> Any:
    told, _ = process.communicate()
    return json.loads(told)


def fill(site: Site) -> list[str]:
    """Entries, of which one is damaged; their names in order."""
    site.client.put_object(Bucket=site.bucket, Key=LAYOUT.descriptor, Body=NAMESPACE.to_json())
    site.stock(*range(_ENTRIES))
    names = sorted(key_at(number).name for number in range(_ENTRIES))
    bad = bytearray(site.body(names[1]))
    bad[-1] ^= 1
    site.client.put_object(Bucket=site.bucket, Key=LAYOUT.objects + names[1], Body=bytes(bad))
    return names


def test_deep_verify_that_is_killed_goes_on_where_it_was(stocked: Site, tmp_path: Path) -> None:
    names = fill(stocked)
    folder = tmp_path / "state"
    stocked.proxy.add(Rule(Stall(), method="GET", target=names[40]))
    stocked.proxy.add(Rule(Stall(), method="GET", target="|".join(names[50:])))
    first = verify(stocked, "--state", str(folder))
    eventually(lambda: set(stocked.gets()) >= set(names[:50]))
    eventually(lambda: any(folder.glob("*.json")))
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    stocked.let_through()
    deep = result_of(verify(stocked, "--state", str(folder)))["deep"]
    again = set(stocked.gets())
    assert set(names[40:]) <= again
    assert 0 < deep["resumed_count"] == len(set(names) - again) <= 40
    assert (deep["object_count"], deep["corrupt_count"]) == (_ENTRIES, 1)
    assert [one["object"] for one in deep["corrupt"]] == [LAYOUT.objects + names[1]]


def test_what_a_sick_server_gives_is_not_deleted(stocked: Site) -> None:
    names = fill(stocked)
    stocked.proxy.add(Rule(s3_error(500, "InternalError"), method="GET", target=names[5]))
    stocked.proxy.add(Rule(Cut(100), method="GET", target=names[6]))
    stocked.proxy.add(Rule(Flip(20_000), method="GET", target=names[7], times=1))
    found = result_of(verify(stocked, "--repair", "--yes"))
    assert not found["ok"]
    assert found["deep"]["unread_count"] == 2
    assert found["deep"]["unstable_count"] == 1
    assert found["repaired"]["deleted"] == 1
    assert stocked.objects() == set(names) - {names[1]}


def test_gc_beside_an_engine_that_saves_the_same_gives_no_wrong_bytes_and_heals(
    stocked: Site, tmp_path: Path
) -> None:
    """The engine finds the object a moment before it goes."""
    settings = stocked.settings()
    stocked.client.put_object(
        Bucket=stocked.bucket, Key=LAYOUT.descriptor, Body=NAMESPACE.to_json()
    )
    with (
        Engine.at(stocked, tmp_path / "a") as engine,
        Engine.at(stocked, tmp_path / "b") as other,
        Corpus.open(settings) as corpus,
    ):
        for number in range(3):
            other.save_and_wait(number)
        other.announce()
        engine.refresh()
        assert engine.node.index.maybe_contains(key_at(1))
        held = stocked.proxy.add(Rule(Stall(), method="POST", target="delete", times=1))
        done: list[object] = []
        job = threading.Thread(
            target=lambda: done.append(corpus.gc(NAMESPACE.name, older_than_s=-60.0))
        )
        job.start()
        eventually(lambda: held.fired == 1)
        engine.save_and_wait(1)
        engine.announce()
        stocked.proxy.remove(held)
        job.join()
        assert done
        for one in (engine, other):
            one.refresh()
            evict(one.node.tier, key_at(1))
            assert one.fetch(1).outcome in (FetchOutcome.ABSENT, FetchOutcome.READY)
        engine.save_and_wait(1)
        engine.announce()
        assert stocked.body(key_at(1).name) == body_at(1)
        evict(other.node.tier, key_at(1))
        other.refresh()
        eventually(lambda: other.fetch(1).outcome is FetchOutcome.READY)
    assert {key_at(1).name} <= stocked.objects()
