# SPDX-License-Identifier: Apache-2.0
"""What `s3ec top` makes of pages of metrics: snapshots, intervals, figures."""

from __future__ import annotations

import sys

import pytest

from s3ec.cli.top_figures import (
    Figures,
    Interval,
    between,
    figures,
    merged,
    merged_intervals,
    parsed,
    quantile,
)
from s3ec.connector.metrics import GAUGES, HISTOGRAMS, LOOKUPS, PLAIN
from s3ec.errors import ConfigError, UnavailableError
from tests.support.metrics_pages import MODEL, page

INFINITE = float("inf")


def figures_of(before: str, after: str, seconds: float = 2.0) -> Figures:
    first, second = parsed(before, 0.0), parsed(after, seconds)
    return figures(second, between(first, second))


# -- a page ------------------------------------------------------------------------------------


def test_page_is_read_with_our_labels_and_without_vllms() -> None:
    found = parsed(
        page({'lookups{tier="node",outcome="hit"}': 3}, {"spool_entries": 2}, {"load_time": [0.02]})
        + "# TYPE vllm:other_total counter\nvllm:other_total 5\n",
        1.0,
    )
    assert found.counts == {"lookups{hit,node}": 3}
    assert found.levels == {"spool_entries": 2}
    assert found.buckets["load_time"][0.05] == 1
    assert found.models == (MODEL,)
    assert not found.is_empty


def test_order_of_labels_is_the_pages_own_affair() -> None:
    labels = ('tier="node"', 'outcome="hit"', 'engine="0"')
    for some in (labels, labels[::-1]):
        name = "vllm:s3ec_lookups_total"
        text = f"# TYPE {name} counter\n{name}{{{','.join(some)}}} 3\n"
        assert figures(parsed(text, 0.0), None).lookups["node"].hit_ratio_since_start == 1


def test_engines_of_one_page_add_up_but_not_what_a_node_has_once() -> None:
    levels = {"spool_entries": 2, "tier_bytes": 100, "index_age_seconds": 4}
    one, other = (page({"hits": 5}, levels, engine=engine) for engine in "01")
    # As vLLM does it: one family, the samples of all engines.
    found = parsed(one + other, 0.0)
    assert found.counts["hits"] == 10
    assert found.levels == {"spool_entries": 4, "tier_bytes": 100, "index_age_seconds": 4}


def test_page_of_an_engine_without_us_is_empty() -> None:
    assert parsed("# TYPE vllm:x gauge\nvllm:x 1\n", 0.0).is_empty


@pytest.mark.parametrize("text", ["<html>\n<p>It works!</p>\n", 'vllm:s3ec_hits{a="b" 1\n'])
def test_what_is_no_page_of_metrics_is_said(text: str) -> None:
    with pytest.raises(UnavailableError, match="no page of metrics"):
        parsed(text, 0.0)


def test_missing_parser_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    with pytest.raises(ConfigError, match=r"pip install 's3ec\[metrics\]'"):
        parsed("", 0.0)


# -- an interval -------------------------------------------------------------------------------


def test_interval_has_what_rose() -> None:
    interval = between(parsed(page({"hits": 5}), 1.0), parsed(page({"hits": 8, "misses": 1}), 3.0))
    assert interval == Interval(2.0, {"hits": 3, "misses": 1})


def test_engine_that_started_again_counts_from_zero() -> None:
    before = parsed(page({"hits": 5, "misses": 1}, times={"load_time": [0.02, 0.02]}), 0.0)
    after = parsed(page({"hits": 2, "misses": 3}, times={"load_time": [0.2]}), 2.0)
    interval = between(before, after)
    assert interval.restarted
    assert interval.counts == {"hits": 2, "misses": 3}
    assert interval.buckets["load_time"][INFINITE] == 1


def test_several_engines_are_one_and_a_node_has_its_disk_once() -> None:
    levels = {"tier_bytes": 100.0, "spool_entries": 2.0, "index_age_seconds": 3.0}
    one = parsed(page({"hits": 5}, levels, {"load_time": [0.02]}), 2.0)
    total = merged([("a", one), ("a", one), ("b", one)])
    assert total.levels == {"tier_bytes": 200, "spool_entries": 6, "index_age_seconds": 3}
    assert total.counts == {"hits": 15}
    assert total.buckets["load_time"][INFINITE] == 3
    both = merged_intervals([Interval(2.0, {"hits": 1}), Interval(3.0, {"hits": 2}, {}, True)])
    assert both == Interval(3.0, {"hits": 3}, {}, restarted=True)


# -- figures -----------------------------------------------------------------------------------


def test_quantiles_are_those_of_prometheus() -> None:
    bounds = {0.1: 0.0, 0.2: 10.0, INFINITE: 10.0}
    assert quantile(bounds, 0.5) == pytest.approx(0.15)
    assert quantile(bounds, 1.0) == pytest.approx(0.2)
    assert quantile({0.1: 0.0, INFINITE: 3.0}, 0.5) == 0.1  # nobody knows how far above
    assert quantile({0.1: 0.0, INFINITE: 0.0}, 0.5) is None
    assert quantile({}, 0.5) is None


def test_ratios_are_of_the_interval_and_since_the_start() -> None:
    def lookups(hit: int, miss: int) -> dict[str, float]:
        return {
            'lookups{tier="device",outcome="hit"}': hit,
            'lookups{tier="device",outcome="miss"}': miss,
            "hits": hit,
            "misses": miss,
        }

    found = figures_of(page(lookups(0, 10)), page(lookups(6, 12)))
    device, everything = found.lookups["device"], found.lookups["all"]
    assert device.hit_ratio == pytest.approx(6 / 8)
    assert device.hit_ratio_since_start == pytest.approx(6 / 18)
    assert (device.hits_per_s, device.misses_per_s) == (3, 1)
    # Hits of the device and of s3ec; only s3ec's misses were encoded.
    assert everything.hit_ratio == pytest.approx(12 / 14)
    assert found.lookups["bucket"].hit_ratio is None


def test_rates_are_unknown_before_there_is_an_interval() -> None:
    found = figures(parsed(page({"hits": 5, "misses": 5}), 0.0), None)
    assert found.deferred_per_s is None
    assert found.lookups["all"].hits_per_s is None
    assert found.lookups["all"].hit_ratio_since_start == 0.5


def test_times_are_of_the_interval_if_there_were_any() -> None:
    key = 'fetch_time_seconds{source="bucket"}'
    times = {key: [0.6] * 4}
    found = figures_of(page(times=times), page(times={key: [0.6] * 4 + [0.02] * 4}))
    recent = found.times["fetch_time_seconds{bucket}"]
    assert recent.per_s == 2
    assert recent.p90_s is not None
    assert recent.p90_s <= 0.05
    assert not recent.since_start
    quiet = figures_of(page(times=times), page(times=times)).times["fetch_time_seconds{bucket}"]
    assert quiet.since_start
    assert quiet.p50_s is not None
    assert quiet.p50_s >= 0.5


def test_rates_and_levels_are_those_of_the_page() -> None:
    counts = {
        "saved_encoder_seconds": 10.0,
        "encode_seconds": 2.0,
        'fetch_bytes{source="bucket"}': 4000.0,
        "save_bytes": 2000.0,
        "deferred_requests": 6.0,
        "defer_timeouts": 2.0,
    }
    levels = {
        "save_queue_entries": 1.0, "spool_entries": 2.0, "spool_bytes": 3.0,
        "spool_oldest_seconds": 4.0, "breaker_open": 0.0, "index_entries": 5.0,
        "index_age_seconds": 6.0, "index_lag_seconds": 7.0, "tier_bytes": 8.0,
        "tier_budget_bytes": 9.0,
    }  # fmt: skip
    found = figures_of(page(dict.fromkeys(counts, 0)), page(counts, levels))
    assert (found.encoder_saved_s_per_min, found.encoder_ran_s_per_min) == (300, 60)
    assert (found.fetched_bytes_per_s, found.saved_bytes_per_s) == (2000, 1000)
    assert (found.deferred_per_s, found.defer_timeouts_per_s) == (3, 1)
    assert (found.save_queue_count, found.spool_count, found.spool_bytes) == (1, 2, 3)
    assert (found.spool_oldest_s, found.breakers_open, found.index_count) == (4, 0, 5)
    assert (found.index_age_s, found.index_lag_s) == (6, 7)
    assert (found.tier_bytes, found.tier_budget_bytes) == (8, 9)
    assert not found.needs_somebody


def test_problems_come_with_their_reason_and_the_newest_first() -> None:
    before = page({'corrupt{reason="checksum"}': 7, 'save_problems{reason="denied"}': 1})
    after = page(
        {
            'corrupt{reason="checksum"}': 7,
            'save_problems{reason="denied"}': 3,
            "stopped_by_weights": 1,
            "internal_errors": 0,
        }
    )
    found = figures_of(before, after)
    assert [(one.what, one.count, one.recent) for one in found.problems] == [
        ("stopped: the weights may have changed", 1, 1),
        ("saves with a problem (denied)", 3, 2),
        ("corrupt entries (checksum)", 7, 0),
    ]
    assert found.needs_somebody


@pytest.mark.parametrize(
    ("levels", "somebody"),
    [
        ({"breaker_open": 1}, True),
        ({"spool_oldest_seconds": 301}, True),
        ({"index_age_seconds": 101}, True),
        ({"spool_oldest_seconds": 3, "index_age_seconds": 9, "breaker_open": 0}, False),
    ],
)
def test_state_alone_can_need_somebody(levels: dict[str, float], somebody: bool) -> None:
    assert figures_of(page({}, levels), page({}, levels)).needs_somebody is somebody


def test_every_metric_that_is_shown_exists() -> None:
    """All of them in one page: what the figures look for is what the connector has."""
    plain = {name.removeprefix("vllm:s3ec_") for name, _ in PLAIN.values()}
    gauges = {name.removeprefix("vllm:s3ec_") for name, *_ in GAUGES.values()}
    histograms = {name.removeprefix("vllm:s3ec_") for name, *_ in HISTOGRAMS.values()}
    tiers = [f'lookups{{tier="{tier}",outcome="{how}"}}' for tier, how in LOOKUPS[3].values()]
    counts: dict[str, float] = dict.fromkeys([*plain, *tiers, "fetch_bytes"], 4)
    found = figures_of(
        page(dict.fromkeys(counts, 0)),
        page(
            counts | {'fetch_bytes{source="bucket"}': 4},
            dict.fromkeys(gauges, 1),
            {name: [0.02] for name in histograms - {"fetch_time_seconds"}}
            | {f'fetch_time_seconds{{source="{source}"}}': [0.02] for source in ("tier", "bucket")},
        ),
    )
    for name in Figures.__dataclass_fields__:
        assert getattr(found, name), name
    assert all(times.p50_s for times in found.times.values())
    assert all(lookups.hit_ratio for lookups in found.lookups.values())
