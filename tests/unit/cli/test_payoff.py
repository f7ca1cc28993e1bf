# SPDX-License-Identifier: Apache-2.0
"""``s3ec advise``: each figure says where it comes from."""

from __future__ import annotations

import http.server
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from s3ec.payoff import GPUS, MODELS, STORES
from tests.support.serving import running
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import Corpus

OWN = ("--rows", "256", "--width", "5376", "--encode-ms", "100")
GEMMA = "google/gemma-3-27b-it"
METRICS = """# TYPE vllm:s3ec_encode_seconds_total counter
vllm:s3ec_encode_seconds_total{engine="0",model_name="google/gemma-3-27b-it"} 1.5
vllm:s3ec_encode_seconds_total{engine="1",model_name="google/gemma-3-27b-it"} 0.5
vllm:s3ec_encoded_rows_total{engine="0",model_name="google/gemma-3-27b-it"} 3000.0
vllm:s3ec_encoded_rows_total{engine="1",model_name="google/gemma-3-27b-it"} 1000.0
"""
CALCULATE = ("advise", "--no-probe")


def row(document: Any, name: str) -> Any:
    return next(figure for figure in document["figures"] if figure["name"] == name)


@contextmanager
def page(text: str) -> Iterator[str]:
    """Serves one text."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with running(server):
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"


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


@pytest.mark.parametrize("model", [model.hub for model in MODELS.values()])
def test_every_model_of_the_table_on_every_gpu_and_store(cli: Cli, model: str) -> None:
    for gpu in GPUS:
        for store in STORES:
            document = cli.json(*CALCULATE, "--like", model, "--gpu", gpu, "--store", store)
            assert set(document["verdicts"]) == {"latency", "throughput", "money"}


def test_people_are_told_what_was_assumed(cli: Cli) -> None:
    text = cli(*CALCULATE, "--like", GEMMA).stdout
    assert "`--gpu` names another" in text
    assert 'beside the bucket: {"save": "worth"}' in text
    assert "prices of 20" in text
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


@pytest.mark.parametrize("asked", [("--like", GEMMA), ("--like", "gemma-3-27b-it"), ()])
def test_encode_time_of_an_engine_that_runs(cli: Cli, asked: tuple[str, ...]) -> None:
    with page(METRICS) as url:
        document = cli.json(*CALCULATE, "--from-metrics", url, *asked)
    found = row(document, "encode")
    assert found["source"] == "measured"
    assert found["value"] == pytest.approx(256 * 0.5)


def test_the_figures_of_another_models_engine_are_not_used(cli: Cli) -> None:
    pixtral = "mistralai/Pixtral-12B-2409"
    with page(METRICS) as url:
        document = cli.json(*CALCULATE, "--from-metrics", url, "--like", pixtral)
        other = (*OWN[:4], "--json", "--", "--model", "me/mine")
        served = json.loads(cli(*CALCULATE, "--from-metrics", url, *other, code=2).stdout)
    assert row(document, "encode")["source"] == "assumed"
    assert document["notes"] == [
        f"{url} is not used: it serves {GEMMA}, and you ask about {pixtral}"
    ]
    assert "and you ask about me/mine" in served["error"]["message"]


def test_metrics_without_encodes_are_refused(cli: Cli) -> None:
    with page("# nothing yet\n") as url:
        error = cli.json("advise", "--like", GEMMA, "--from-metrics", url, code=2)["error"]
    assert error["field"] == "from_metrics"
    assert "s3ec_encode_seconds_total" in error["message"]


@pytest.mark.parametrize("url", ["file:///etc/hosts", "http://127.0.0.1:9/metrics"])
def test_metrics_that_cannot_be_read_are_refused(cli: Cli, url: str) -> None:
    error = cli.json("advise", "--like", GEMMA, "--from-metrics", url, code=2)["error"]
    assert error["field"] == "from_metrics"


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
