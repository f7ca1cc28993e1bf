# SPDX-License-Identifier: Apache-2.0
"""``s3ec advise``: each figure says where it comes from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from s3ec.payoff import GPUS, MODELS, STORES
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import Corpus

OWN = ("--rows", "256", "--width", "5376", "--encode-ms", "100")
GEMMA = "google/gemma-3-27b-it"
CALCULATE = ("advise", "--no-probe")


def row(document: Any, name: str) -> Any:
    return next(figure for figure in document["figures"] if figure["name"] == name)


def test_it_calculates_with_what_is_given(cli: Cli) -> None:
    document = cli.json(*CALCULATE, *OWN, "--gpu", "l4", "--reads", "3", "--fetch-ms", "7")
    sources = {figure["name"]: figure["source"] for figure in document["figures"]}
    assert sources["rows"] == sources["encode"] == sources["reads"] == sources["fetch"] == "given"
    assert sources["gpu_price"] == "assumed"
    assert sources["keep"] == "computed"
    assert row(document, "embedding")["value"] == pytest.approx(256 * 5376 * 2 / 1e6)
    assert document["verdicts"]["latency"]["verdict"] == "yes"
    assert document["settings"] == {"save": "worth"}
    assert document["prices_as_of"]


def test_every_model_gpu_and_store_has_a_verdict(cli: Cli) -> None:
    for option, names in (
        ("--like", [model.hub for model in MODELS.values()]),
        ("--gpu", [name.upper() for name in GPUS]),
        ("--store", STORES),
    ):
        for name in names:
            document = cli.json(*CALCULATE, "--like", GEMMA, option, name)
            assert set(document["verdicts"]) == {"latency", "throughput", "money"}


@pytest.mark.parametrize("figure", ["encode-ms", "fetch-ms", "reads", "gpu-dollars", "rows"])
def test_a_figure_beyond_all_measure_is_refused(cli: Cli, figure: str) -> None:
    value = str(10**400) if figure == "rows" else "inf"
    error = cli.json(*CALCULATE, "--like", GEMMA, f"--{figure}", value, code=2)["error"]
    assert error["field"] == figure.replace("-", "_")


def test_people_are_told_what_was_assumed(cli: Cli) -> None:
    text = cli(*CALCULATE, "--like", GEMMA).stdout
    assert "`--gpu` names another" in text
    assert 'beside the bucket: {"save": "worth"}' in text
    assert "prices of 20" in text
    assert "a node fetches 1,250 MB/s" in text
    help_text = " ".join(cli("advise", "--help").stdout.split())
    assert all(f"[{default}]" in help_text for default in ("h100", "aws", "1.5"))


@pytest.mark.parametrize(
    ("args", "field", "part"),
    [
        ((), "rows", "`--like`"),
        (("--rows", "9"), "width", "`--width`"),
        (("--rows", "9", "--width", "9"), "encode_ms", "`--encode-ms`"),
        (("--like", "google/gemma-3-27b"), "like", f"did you mean {GEMMA}"),
        (("--like", "0000"), "like", "`--rows`"),
        (("--like", "gemma3-4b", "--gpu", "b300"), "gpu", "h100"),
        (("--like", "gemma3-4b", "--store", "floppy"), "store", "minio-nvme"),
        (("--like", "gemma3-4b", "--gpus", "0"), "gpus", ""),
        (("--like", "gemma3-4b", "--reads", "-1"), "reads", ""),
    ],
)
def test_it_refuses_and_names_the_field(
    cli: Cli, args: tuple[str, ...], field: str, part: str
) -> None:
    error = cli.json(*CALCULATE, *args, code=2)["error"]
    assert error["field"] == field
    assert part in error["message"]


def test_advise_measures_the_bucket_and_leaves_nothing(
    cli: Cli, make_corpus: Callable[..., Corpus], tmp_path: Path
) -> None:
    corpus = make_corpus()
    cache = tmp_path / "tier"
    args = ("advise", "--rows", "16", "--width", "64", "--encode-ms", "100")
    document = cli.json(*args, "--config", f'{{"cache_dir": "{cache}"}}')
    assert row(document, "fetch")["source"] == "measured"
    assert row(document, "node_bandwidth")["source"] == "measured"
    assert row(document, "tier_read")["source"] == "measured"
    latency = document["store_latency"]
    assert latency["nbytes"] == 16 * 64 * 2
    assert latency["p50_ms"] <= latency["p90_ms"] <= latency["p99_ms"]
    assert latency["left"] is None
    assert document["notes"] == []
    assert "Contents" not in corpus.client.list_objects_v2(Bucket=corpus.bucket)
    assert not cache.exists()
    # A store that is not AWS's has other prices, which is an assumption.
    assert row(document, "storage_price")["value"] == pytest.approx(
        16 * 64 * 2 / 1e9 * STORES["minio-nvme"].dollars_gb_month * 1e6
    )


def test_a_bucket_that_is_not_there_leaves_an_assumption(
    cli: Cli, make_corpus: Callable[..., Corpus], tmp_path: Path
) -> None:
    make_corpus()
    cache = f'{{"cache_dir": "{tmp_path / "tier"}"}}'
    document = cli.json("advise", *OWN, "--bucket", "no-such-bucket", "--config", cache)
    assert row(document, "fetch")["source"] == "assumed"
    assert document["store_latency"] is None
    assert "the bucket was not measured" in document["notes"][0]


def test_no_probe_touches_nothing(cli: Cli, tmp_path: Path) -> None:
    cache = tmp_path / "tier"
    config = f'{{"bucket": "embeddings", "cache_dir": "{cache}"}}'
    document = cli.json("advise", *OWN, "--no-probe", "--config", config)
    assert row(document, "fetch")["source"] == "assumed"
    assert not cache.exists()


def test_a_read_from_another_region_is_priced_by_the_region_that_it_leaves(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    gigabytes = 256 * 5376 * 2 / 1e9

    def prices(region: str, *more: str) -> tuple[float, float | None]:
        where = ("--bucket", "embeddings", "--region", region, *more)
        document = cli.json("advise", *OWN, "--no-probe", *where)
        names = [one["name"] for one in document["figures"]]
        crossing = row(document, "crossing_price") if "crossing_price" in names else {}
        return row(document, "read_price")["value"], crossing.get("value")

    get = STORES["aws"].dollars_get
    assert prices("eu-central-1") == (pytest.approx(get * 1e6), None)
    assert prices("sa-east-1") == (pytest.approx((get + gigabytes * 0.138) * 1e6), None)
    # Near a replica each entry crosses once, and reads are those of a region.
    monkeypatch.setenv("S3EC_REPLICAS", '[{"bucket": "near", "region": "eu-central-1"}]')
    assert prices("sa-east-1") == pytest.approx((get * 1e6, gigabytes * 0.138 * 1e6))


def test_advise_without_vllm_says_so_where_it_needs_it(cli: Cli, tmp_path: Path) -> None:
    result = cli("advise", "--no-probe", "--json", "--", "--model", "m", code=2)
    error = json.loads(result.stdout)["error"]
    assert "vLLM is not installed" in error["message"]
    assert error["field"] == "rows"
    error = cli.json("advise", "--no-probe", "--images", str(tmp_path), code=2)["error"]
    assert error["field"] == "images"


def test_without_vllm_the_table_answers_for_a_model_of_its_own(cli: Cli) -> None:
    served = ("--", "vllm", "serve", GEMMA, "--port", "8000")
    document = json.loads(cli(*CALCULATE, "--json", *served).stdout)
    assert row(document, "rows")["value"] == MODELS["gemma3-27b"].rows
    assert row(document, "rows")["source"] == "assumed"
    assert document["notes"] == ["vLLM is not installed here, so its processor was not asked"]


def test_the_readmes_json_is_what_is_advised_for_its_model(cli: Cli) -> None:
    text = (Path(__file__).parents[3] / "README.md").read_text()
    command = text.partition("vllm serve ")[2].partition("\n```")[0]
    model, _, config = command.partition(" --ec-transfer-config ")
    given = json.loads(config.strip("'"))["ec_connector_extra_config"]
    advised = cli.json(*CALCULATE, "--like", model, "--gpu", "l4")["settings"]
    assert given == {"bucket": "embeddings", "region": "us-east-1", **advised}
