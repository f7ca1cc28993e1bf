# SPDX-License-Identifier: Apache-2.0
"""One ``ec_both`` engine with an empty bucket: encodes, saves, evicts, loads what it saved.

It saves through aioboto3; the others through obstore, the default.
It runs on both of vLLM's model runners: GPU users get V2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from s3ec import codec
from s3ec.dev.rigs.engine import EngineProcess, ec_config
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS, V2_RUNNER
from s3ec.identity import Layout, digest_of_name, is_namespace_name, make_key
from s3ec.index.deltas import parse_delta
from s3ec.index.names import deltas_prefix
from s3ec.index.snapshot import Segment, merge
from s3ec.testing.server import LocalS3
from tests.e2e.rig import (
    BOTH,
    FROM_BUCKET,
    FROM_TIER,
    HITS,
    LOADS,
    MISSES,
    OPTIONS,
    SAVES,
    Answer,
    Gallery,
    Record,
    Scenario,
    body,
    eventually,
    keys,
    moved,
    record,
    said,
    settings,
    tier_of,
)
from tests.support.indexes import sizes_in
from tests.support.on_disk import audit_of, found_in

_PURPOSES = [f"both-{number}" for number in range(BOTH)]
_PREFIX = "fleet/a"


@dataclass(frozen=True)
class _Run:
    """Two rounds over the same pictures, and what the bucket held after the engine's end.

    Attributes:
        runner: vLLM's model runner.
        third: The last picture of the second round, asked about once more.
        counted: All metrics of vLLM at the end.
    """

    runner: str
    first: Record
    second: Record
    third: Record
    saved: float
    objects: dict[str, bytes]
    counted: dict[str, float]
    tier: Path
    log: str


@pytest.fixture(scope="module", params=["V1", "V2"])
def run(
    request: pytest.FixtureRequest,
    workdir: Path,
    gallery: Gallery,
    gemma: Path,
    local_s3: LocalS3,
    nursery: EngineForkServer,
) -> _Run:
    runner: str = request.param
    bucket, client = local_s3.create_bucket("both"), local_s3.client()
    tier, log_path = workdir / f"both-tier-{runner}", workdir / f"both-{runner}.log"
    more = {"prefix": _PREFIX, "transport": "aioboto3"}
    env = local_s3.env() | ONE_PROCESS
    with ExitStack() as stack:
        if runner == "V2":
            env |= V2_RUNNER | {"VLLM_LOGGING_LEVEL": "INFO"}
            nursery = stack.enter_context(EngineForkServer(workdir / "nursery-v2.log", env))
        engine = stack.enter_context(
            EngineProcess(
                gemma,
                ec=ec_config("ec_both", settings(local_s3, bucket, tier, **more)),
                log_path=log_path,
                media=workdir,
                env=env,
                options=OPTIONS,
                nursery=nursery,
            )
        )
        before = engine.counters()
        first = record(engine, Scenario("first", [gallery.solo(name) for name in _PURPOSES]))

        def saved() -> float:
            # Counts travel with a step's results, so there has to be a step.
            engine.chat([[{"type": "text", "text": "tick"}]], max_tokens=2)
            return moved(before, engine.counters()).get(SAVES, 0.0)

        eventually(lambda: saved() >= BOTH, "all embeddings are confirmed by the bucket")
        second = record(engine, Scenario("second", [gallery.again(name) for name in _PURPOSES]))
        third = record(engine, Scenario("third", [gallery.again(_PURPOSES[-1], "third")]))
        total = saved()
        eventually(
            lambda: saved() and engine.counters().get("vllm:s3ec_spool_entries") == 0,
            "all embeddings are announced, and the gauge says so",
        )
        counted = engine.counters()
    objects = {key: body(client, bucket, key) for key in keys(client, bucket)}
    local_s3.delete_bucket(bucket)
    log = log_path.read_text()
    return _Run(runner, first, second, third, total, objects, counted, tier, log)


def test_it_runs_on_the_model_runner_that_was_asked_for(run: _Run) -> None:
    assert ("Using V2 Model Runner" in run.log) == (run.runner == "V2")


def assert_said(found: list[Answer], expected: list[Answer]) -> None:
    """The same tokens, as probable: the reference ran on V1, and V2 has another kernel for that."""
    for ours, theirs in zip(found, expected, strict=True):
        tokens, logprobs, end = said(ours)
        assert (tokens, end) == (theirs["token_ids"], theirs["finish_reason"])
        for mine, their in zip(logprobs, theirs["logprobs"], strict=True):
            assert mine == pytest.approx(their, abs=1e-5)


def test_first_round_encodes_everything_and_answers_as_without_the_connector(
    run: _Run, reference: dict[str, list[Answer]]
) -> None:
    assert run.first[MISSES] == BOTH
    assert run.first[HITS] == 0
    assert_said(run.first.answers, [reference[f"solo {name}"][0] for name in _PURPOSES])


def test_second_round_reloads_what_was_evicted_and_encodes_nothing(run: _Run) -> None:
    assert run.second[MISSES] == 0
    # The encoder cache of this engine still held the last two.
    assert run.second[HITS] == run.second[LOADS] >= BOTH - 2
    assert run.second[FROM_TIER] >= BOTH - 2
    assert run.second[FROM_BUCKET] == 0


def test_reloaded_embeddings_give_the_answers_of_an_engine_without_the_connector(
    run: _Run, reference: dict[str, list[Answer]]
) -> None:
    assert_said(run.second.answers, [reference[f"again {name}"][0] for name in _PURPOSES])


def lookups(moved: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Hits and misses by tier."""
    name = "vllm:s3ec_lookups{{tier={},outcome={}}}"
    return {
        tier: (moved.get(name.format(tier, "hit"), 0), moved.get(name.format(tier, "miss"), 0))
        for tier in ("device", "node", "bucket")
    }


def test_lookups_say_where_each_picture_was_found_and_add_up(run: _Run) -> None:
    assert lookups(run.first.moved) == {"device": (0, BOTH), "node": (0, BOTH), "bucket": (0, BOTH)}
    second = lookups(run.second.moved)
    assert sum(second["device"]) == BOTH
    assert second["node"] == (run.second[HITS], 0)
    assert second["device"][1] == run.second[HITS]
    assert lookups(run.third.moved) == {"device": (1, 0), "node": (0, 0), "bucket": (0, 0)}


def test_times_and_gauges_of_both_halves_reach_vllms_metrics(run: _Run) -> None:
    counted = run.counted
    assert counted["vllm:s3ec_save_time_seconds_count"] == BOTH
    assert counted["vllm:s3ec_load_time_seconds_count"] > 0
    assert counted["vllm:s3ec_fetch_time_seconds_count{source=tier}"] == counted[FROM_TIER]
    assert counted["vllm:s3ec_wait_time_seconds_count"] > 0
    assert counted["vllm:s3ec_saves_queued"] == BOTH
    assert counted["vllm:s3ec_save_queue_entries"] == 0
    assert counted["vllm:s3ec_breaker_open"] == 0
    assert "vllm:s3ec_tier_bytes" in counted
    assert counted["vllm:s3ec_tier_budget_bytes"] == 2**30
    assert counted["vllm:s3ec_index_age_seconds"] >= 0


def test_the_log_sums_up_in_one_line_what_vllm_does_not_say_as_well(run: _Run) -> None:
    lines = [line.partition(" s3ec: ")[2] for line in run.log.splitlines() if " s3ec: " in line]
    assert lines
    assert sum(int(line.partition(" hits")[0]) for line in lines) >= BOTH
    assert "EC Transfer metrics" not in run.log


def test_nothing_is_saved_twice(run: _Run) -> None:
    assert run.saved == BOTH


def test_the_bucket_holds_a_verifiable_object_per_picture_after_the_engines_end(
    run: _Run, gemma: Path
) -> None:
    names = {key.removeprefix(f"{_PREFIX}/") for key in run.objects}
    (namespace,) = {name.split("/")[0] for name in names}
    assert is_namespace_name(namespace)
    layout = Layout(namespace)
    entries = {name for name in names if name.startswith(layout.objects)}
    assert len(entries) == BOTH
    index = {name for name in names if name.startswith(layout.manifest)}
    assert names - entries - index == {layout.descriptor, layout.modality("image")}
    deltas = {name for name in index if name.startswith(deltas_prefix(layout))}
    announced = merge(
        [parse_delta(run.objects[f"{_PREFIX}/{name}"], layout, name) for name in deltas]
    )
    assert sizes_in(Segment.of(announced)) == {
        digest_of_name(name.removeprefix(layout.objects)): len(run.objects[f"{_PREFIX}/{name}"])
        for name in entries
    }
    for name in entries:
        blob = run.objects[f"{_PREFIX}/{name}"]
        identifier = codec.parse_header(blob).identifier
        header = codec.verify(blob, namespace=namespace, identifier=identifier)
        key = make_key(identifier)
        assert key is not None
        assert name == layout.object(key)
        assert header.modality == "image"
        assert header.made_by.startswith(f"vllm={version('vllm-cpu')} transformers=")
        assert header.shape == codec.Shape(64, 64, "bfloat16")
    # vLLM kills an engine that takes long to end, on a busy machine. The next process sweeps.
    tier_of(run.tier, namespace).close()
    assert audit_of(found_in(run.tier)) == []
    descriptor = json.loads(run.objects[f"{_PREFIX}/{layout.descriptor}"])
    assert descriptor["model"] == str(gemma)
    record = json.loads(run.objects[f"{_PREFIX}/{layout.modality('image')}"])
    assert record == {"width": 64, "dtype": "bfloat16"}
