# SPDX-License-Identifier: Apache-2.0
"""ls: what is chosen, in which order, how many in all; for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from s3ec import codec
from s3ec.cli.ls import Found, Sort
from s3ec.corpus import CorpusEntry
from s3ec.identity import Layout, digest_of_name, make_key
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus, content_hash, entry_bytes

# By growing size.
HASHES = sorted(content_hash(str(number)) for number in range(5))
LORA = f"adapter:{content_hash('lora')}"


@pytest.fixture
def namespace(corpus: Corpus) -> str:
    """Five entries of the base model, one of an adapter, one under a client's own name."""
    name = corpus.namespace(MODEL)
    for rows, identifier in enumerate(HASHES, start=1):
        corpus.entry(name, identifier, entry_bytes(identifier, name, rows=rows * 1000))
    corpus.entry(name, LORA)
    corpus.entry(name, "page 1")
    return name


def labels(found: dict[str, Any]) -> list[str]:
    return [entry["label"] for entry in found["entries"]]


def test_totals_are_of_all_that_fit_and_not_of_the_page(
    cli: Cli, corpus: Corpus, namespace: str
) -> None:
    everything = cli.json("ls")
    assert everything["entry_count"] == 7
    assert everything["bytes"] == sum(entry["bytes"] for entry in everything["entries"])
    page = cli.json("ls", "--limit", "2")
    assert len(page["entries"]) == 2
    assert page["more"]
    assert (page["entry_count"], page["bytes"]) == (7, everything["bytes"])
    out = cli("ls", "--limit", "2")
    assert len(out.stdout.splitlines()) == 2
    assert "7 entries, " in out.stderr
    assert "2 shown" in out.stderr
    assert not cli.json("ls", "--limit", "0")["more"]


def test_rows_have_label_identifier_digest_and_object(cli: Cli, namespace: str) -> None:
    rows = {row["label"]: row for row in cli.json("ls")["entries"]}
    for identifier in (HASHES[0], LORA):
        key = make_key(identifier)
        assert key is not None
        assert rows[identifier]["identifier"] == identifier
        assert rows[identifier]["digest"] == digest_of_name(key.name).hex()
        assert rows[identifier]["object"] == Layout(namespace).object(key)
    assert rows[f"x-{content_hash('page 1')}"]["identifier"] is None


def test_sorting_by_size_by_age_and_backwards(cli: Cli, namespace: str) -> None:
    by_name = labels(cli.json("ls"))
    assert by_name == sorted(by_name)
    assert labels(cli.json("ls", "--reverse")) == by_name[::-1]
    assert labels(cli.json("ls", "--sort", "bytes"))[2:] == HASHES
    largest = cli.json("ls", "--sort", "bytes", "--reverse", "--limit", "2")
    assert labels(largest) == HASHES[:2:-1]
    ages = [entry["age_s"] for entry in cli.json("ls", "--sort", "age")["entries"]]
    assert ages == sorted(ages)


def test_first_ones_are_right_where_the_rest_is_dropped_on_the_way() -> None:
    found = Found(Sort.BYTES, reverse=True, limit=2, keeps=True)
    sizes = [size * 7919 % 30_011 for size in range(1, 30_011)]  # each once, in no order
    for size in sizes:
        found.add(CorpusEntry("acme", f"00/{size}.safetensors", size, 0.0), {})
        assert len(found.entries) < 10_010
    found.finish()
    assert [entry.nbytes for entry, _ in found.entries] == [30_010, 30_009]
    assert (found.count, found.nbytes) == (len(sizes), sum(sizes))


def test_filters_choose_and_the_totals_follow(cli: Cli, namespace: str) -> None:
    assert labels(cli.json("ls", "--adapter", "adapter")) == [LORA]
    assert labels(cli.json("ls", "--starts-with", HASHES[3][:6])) == [HASHES[3]]
    assert labels(cli.json("ls", "--starts-with", "x-")) == [f"x-{content_hash('page 1')}"]
    assert labels(cli.json("ls", "--starts-with", LORA[:11])) == [LORA]
    assert labels(cli.json("ls", "--adapter", "adapter", "--starts-with", LORA[:11])) == [LORA]
    assert labels(cli.json("ls", "--starts-with", LORA)) == [LORA]
    large = cli.json("ls", "--min-size", "40KB", "--max-size", "70KB")
    assert labels(large) == [HASHES[2], HASHES[3]]
    assert large["entry_count"] == 2
    assert cli.json("ls", "--older-than", "1d")["entry_count"] == 0
    assert cli.json("ls", "--newer-than", "1d")["entry_count"] == 7
    assert cli.json("ls", "--adapter", "nobody")["entry_count"] == 0


def test_beginning_that_fits_a_hash_and_an_adapter_finds_both(
    cli: Cli, corpus: Corpus, namespace: str
) -> None:
    digits = HASHES[0][:3]
    corpus.entry(namespace, f"{digits}-adapter:{HASHES[1]}")
    expected = [HASHES[0], f"{digits}-adapter:{HASHES[1]}"]
    assert sorted(labels(cli.json("ls", "--starts-with", digits))) == sorted(expected)


def test_adapter_whose_name_is_hashed_is_found_by_name_and_by_label(
    cli: Cli, corpus: Corpus, namespace: str
) -> None:
    identifier = f"My Adapter/v2:{content_hash('b')}"
    corpus.entry(namespace, identifier)
    (label,) = labels(cli.json("ls", "--adapter", "My Adapter/v2"))
    assert labels(cli.json("ls", "--adapter", label.partition(":")[0])) == [label]
    (row,) = cli.json("ls", "--adapter", "My Adapter/v2")["entries"]
    assert row["identifier"] is None


def test_modality_is_read_from_the_headers(cli: Cli, corpus: Corpus, namespace: str) -> None:
    data = bytes(8)
    header = codec.Header(
        identifier=content_hash("film"),
        namespace=namespace,
        modality="video",
        shape=codec.Shape(1, 4, "bfloat16"),
        checksum=codec.checksum(data),
        placeholder={},
    )
    corpus.entry(namespace, content_hash("film"), codec.encode_header(header) + data)
    corpus.entry(namespace, content_hash("bad"), b"no entry")
    out = cli("ls", "--modality", "video", "--json")
    found = json.loads(out.stdout)
    assert labels(found) == [content_hash("film")]
    assert found["entries"][0]["modality"] == "video"
    assert "1 entry left out" in out.stderr
    assert cli.json("ls", "--modality", "image")["entry_count"] == 7


def test_ndjson_is_one_object_a_line_of_all(cli: Cli, namespace: str) -> None:
    out = cli("ls", "--ndjson")
    rows = {row["label"]: row for row in map(json.loads, out.stdout.splitlines())}
    expected = {row["label"]: row for row in cli.json("ls")["entries"]}
    assert rows.keys() == expected.keys()
    for label, row in rows.items():
        assert {**row, "age_s": 0} == {**expected[label], "age_s": 0}
    assert "7 entries" in out.stderr
    two = cli("ls", "--ndjson", "--limit", "2")
    assert len(two.stdout.splitlines()) == 2
    assert "7 entries" in two.stderr
    largest = cli("ls", "--ndjson", "--sort", "bytes", "--reverse", "--limit", "1").stdout
    assert json.loads(largest)["label"] == HASHES[-1]


def test_failure_under_ndjson_is_one_line(cli: Cli, namespace: str) -> None:
    out = cli("ls", "--ndjson", "-n", "nobody", code=1)
    (line,) = out.stdout.splitlines()
    assert json.loads(line)["error"]["kind"] == "not_found"


def test_quick_ends_at_the_limit_and_claims_no_totals(cli: Cli, namespace: str) -> None:
    found = cli.json("ls", "--quick", "--limit", "3")
    assert len(found["entries"]) == 3
    assert (found["entry_count"], found["bytes"], found["more"]) == (None, None, True)
    assert "there are more" in cli("ls", "--quick", "--limit", "3").stderr
    assert cli.json("ls", "--quick")["entry_count"] == 7


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["--min-size", "big"], "min_size"),
        (["--max-size", ""], "max_size"),
        (["--older-than", "old"], "older_than"),
        (["--newer-than", "0d"], "newer_than"),
        (["--quick", "--sort", "age"], "quick"),
        (["--sort", "colour"], "sort"),
    ],
)
def test_bad_options_are_named(cli: Cli, namespace: str, args: list[str], field: str) -> None:
    assert cli.json("ls", *args, code=2)["error"]["field"] == field


def test_json_and_ndjson_exclude_each_other(cli: Cli, tmp_path: Path) -> None:
    assert "leave one out" in cli("ls", "--json", "--ndjson", code=2).stderr


def test_made_by_chooses_by_headers(cli: Cli, corpus: Corpus, namespace: str) -> None:
    old, new = "vllm=0.32.0 platform=cpu", "vllm=0.32.1 platform=cpu"
    for seed, made_by in (("old", old), ("known", old), ("new", new)):
        identifier = content_hash(seed)
        corpus.entry(namespace, identifier, entry_bytes(identifier, namespace, made_by=made_by))
    found = cli.json("ls", "--made-by", "vllm=0.32.0")
    assert sorted(labels(found)) == sorted(map(content_hash, ("old", "known")))
    assert {entry["made_by"] for entry in found["entries"]} == {old}
    assert f"{content_hash('new')}  {new}" in cli("ls", "--made-by", "vllm=0.32.1").stdout
    assert cli.json("ls", "--made-by", "vllm=0.32.*", "--modality", "image")["entry_count"] == 3
    assert cli.json("ls", "--made-by", "vllm=*", "--quick", "--limit", "1")["more"]
    assert cli.json("ls", "--made-by", "torch=*")["entry_count"] == 0
    assert cli.json("ls", "--made-by", "0.32.0", code=2)["error"]
