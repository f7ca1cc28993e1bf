# SPDX-License-Identifier: Apache-2.0
"""A running engine whose corpus loses an object, and whose vision weights are changed.

What its device holds is stored again. After the change nothing of the old weights is used or added
to, and it answers as an engine without the connector whose weights were changed in the same way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from s3ec.dev.rigs.engine import EngineProcess, ec_config, text
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS
from s3ec.testing.server import LocalS3
from tests.e2e.rig import (
    HITS,
    LOADS,
    OPTIONS,
    SAVES,
    Answer,
    Gallery,
    at_once,
    eventually,
    keys,
    moved,
    said,
    settings,
    until_index_is_read,
)

# The first two are encoded, and saved, before the change; the device holds them then.
_BEFORE, _AFTER = ("single", "left"), ("left", "single", "middle")
# Of the device's cache, which holds two pictures.
_OTHERS = ("right", "extra")


@dataclass(frozen=True)
class _Seen:
    before: list[Answer]
    after: list[Answer]
    moved: dict[str, float]
    stored_before: set[str]
    stored_after: set[str]
    log: str


def _ask(engine: EngineProcess, gallery: Gallery, purposes: tuple[str, ...]) -> list[Answer]:
    return [engine.chat([gallery.solo(each)], logprobs=2)[0] for each in purposes]


def _plain(workdir: Path, gallery: Gallery, gemma: Path, nursery: EngineForkServer) -> list[Answer]:
    with EngineProcess(
        gemma,
        ec=None,
        log_path=workdir / "live-plain.log",
        media=workdir,
        env=ONE_PROCESS,
        options=OPTIONS,
        nursery=nursery,
    ) as engine:
        engine.shuffle_vision_tower()
        return _ask(engine, gallery, _AFTER)


def _with_s3ec(
    workdir: Path,
    gallery: Gallery,
    gemma: Path,
    server: LocalS3,
    bucket: str,
    nursery: EngineForkServer,
) -> _Seen:
    client = server.client()

    def objects() -> set[str]:
        return {key for key in keys(client, bucket) if "/objects/" in key}

    with EngineProcess(
        gemma,
        ec=ec_config(
            "ec_both", settings(server, bucket, workdir / "live-tier", index_refresh_s=0.2)
        ),
        log_path=workdir / "live.log",
        media=workdir,
        env=server.env() | ONE_PROCESS,
        options=OPTIONS,
        nursery=nursery,
    ) as engine:
        first = _ask(engine, gallery, (*_OTHERS, _BEFORE[0]))
        eventually(lambda: len(objects()) == len(first), "the first ones are stored")
        others = objects()
        before = [first[-1], *_ask(engine, gallery, _BEFORE[1:])]
        eventually(lambda: len(objects()) == len(first) + 1, "all are stored")
        # What is deleted before it was announced would be in the index for good.
        until_index_is_read(engine, len(first) + 1)
        stored = objects()
        (lost,) = stored - others
        _delete(lost, bucket, server, workdir / "live-tier")
        asked = 0

        def is_stored_again() -> bool:
            nonlocal asked
            asked += 1
            engine.chat([gallery.again(_BEFORE[-1], f"look {asked}")], max_tokens=1)
            return lost in objects()

        eventually(is_stored_again, "what the device holds is stored again")
        hit = engine.chat([gallery.again(_OTHERS[0])])
        assert hit

        def saves() -> float:
            # Counts travel with a step's results, so there has to be a step.
            engine.chat([[text("tick")]], max_tokens=1)
            return engine.counters().get(SAVES, 0.0)

        # The one that was deleted counts twice.
        eventually(lambda: saves() >= len(stored) + 1, "all saves are counted")
        counted = engine.counters()
        assert counted[HITS] == 1
        engine.shuffle_vision_tower()
        after = _ask(engine, gallery, _AFTER)
        seen = moved(counted, engine.counters())
    return _Seen(before, after, seen, stored, objects(), engine.log)


def _delete(key: str, bucket: str, server: LocalS3, cache_dir: Path) -> None:
    """As people do it, on the engine's node."""
    identifier = key.rpartition("/")[2].partition(".")[0]
    place = ["--bucket", bucket, "--endpoint-url", server.endpoint_url]
    subprocess.run(
        [sys.executable, "-m", "s3ec", "rm", identifier, "--yes", *place],
        env={**os.environ, **server.env(), "S3EC_CACHE_DIR": str(cache_dir)},
        check=True,
        capture_output=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def both(
    workdir: Path, gallery: Gallery, gemma: Path, local_s3: LocalS3, nursery: EngineForkServer
) -> Iterator[tuple[list[Answer], _Seen]]:
    bucket = local_s3.create_bucket("live-weights")
    yield at_once(
        partial(_plain, workdir, gallery, gemma, nursery),
        partial(_with_s3ec, workdir, gallery, gemma, local_s3, bucket, nursery),
    )
    local_s3.delete_bucket(bucket)


def test_answers_are_those_of_the_new_weights(both: tuple[list[Answer], _Seen]) -> None:
    plain, seen = both
    assert [said(answer) for answer in seen.after] == [said(answer) for answer in plain]
    single = (seen.before[_BEFORE.index("single")], seen.after[_AFTER.index("single")])
    assert said(single[0]) != said(single[1])  # else the change would prove nothing


def test_nothing_is_granted_loaded_or_saved_after_the_change(
    both: tuple[list[Answer], _Seen],
) -> None:
    seen = both[1]
    assert not {HITS, LOADS, SAVES} & seen.moved.keys()
    assert seen.stored_after == seen.stored_before
    assert seen.log.count("nothing is loaded or saved from here on") == 1
