# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` hits what LLM.chat precomputed, with the connector's name as its only hint.

The server's vision encoder has other weights than the one that filled the bucket. The client
calls its picture by the hash of another one, which the bucket holds too; the middleware that the
server was started with keeps that from having an effect.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.consumers import Exchange
from tests.e2e.rig import Answer, Corpus, Record, tier_of
from tests.support.on_disk import audit_of, usage_of


@pytest.fixture
def exchange(consumers: tuple[dict[str, Record], Exchange]) -> Exchange:
    return consumers[1]


def test_a_picture_posted_as_data_url_hits_what_was_precomputed_from_its_file(
    exchange: Exchange,
) -> None:
    assert exchange.metrics["vllm:s3ec_hits_total"] == 1
    assert exchange.metrics["vllm:s3ec_loads_total"] == 1
    assert exchange.metrics.get("vllm:s3ec_misses_total", 0) == 0
    # A miss of the device and one of this node's disk, and a hit of the bucket.
    assert exchange.metrics["vllm:s3ec_lookups_total"] == 3
    assert exchange.metrics["vllm:s3ec_fetch_time_seconds_count"] == 1
    assert exchange.metrics["vllm:s3ec_load_time_seconds_count"] == 1


def test_a_client_that_takes_anothers_hash_gets_the_answer_to_its_own_picture(
    exchange: Exchange, reference: dict[str, list[Answer]]
) -> None:
    assert exchange.answer != reference["solo single"][0]["text"]


def test_the_servers_answer_is_that_of_an_engine_without_the_connector(
    exchange: Exchange, reference: dict[str, list[Answer]]
) -> None:
    assert exchange.answer == reference["solo posted"][0]["text"]


def test_the_killed_server_leaves_the_nodes_disk_in_order(
    exchange: Exchange, workdir: Path, corpus: Corpus
) -> None:
    # vLLM's server ends its engine by SIGKILL unless told otherwise (--shutdown-timeout).
    tier = tier_of(workdir / "server-tier", corpus.namespace)
    try:
        assert audit_of(tier) == []
        assert len(usage_of(tier).entries) == 1
    finally:
        tier.close()
