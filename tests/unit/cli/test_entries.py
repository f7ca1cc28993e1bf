# SPDX-License-Identifier: Apache-2.0
"""ns, ls and stat against moto."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from s3ec.testing.server import MotoServer
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, OTHER, Corpus, content_hash, entry_bytes


def test_ns_lists_namespaces_with_their_descriptors(cli: Cli, corpus: Corpus) -> None:
    names = sorted([corpus.namespace(MODEL), corpus.namespace(OTHER)])
    corpus.put("not-ours/file.txt", b"x")
    rows = cli.json("ns")["namespaces"]
    assert [row["namespace"] for row in rows] == names
    assert {row["dtype"] for row in rows} == {"bfloat16", "float16"}
    assert {row["model"] for row in rows} == {"acme/vision-9b"}
    assert {row["weights"] for row in rows} == {MODEL["weights"], None}
    assert "entry_count" not in rows[0]
    text = cli("ns").stdout
    assert all(name in text for name in names)
    assert "float16" in text
    assert MODEL["weights"].partition(":")[2][:12] in text


def test_ns_count_adds_entries_and_bytes(cli: Cli, corpus: Corpus) -> None:
    name = corpus.namespace(MODEL)
    blobs = [corpus.entry(name, content_hash(str(i))) for i in range(3)]
    (row,) = cli.json("ns", "--count")["namespaces"]
    assert row["entry_count"] == 3
    assert row["bytes"] == sum(map(len, blobs))
    assert " 3 " in cli("ns", "--count").stdout


def test_ns_shows_a_namespace_whose_descriptor_is_unusable(cli: Cli, corpus: Corpus) -> None:
    name = corpus.namespace(MODEL)
    corpus.put(f"{name}/namespace.json", b"[1, 2")
    (row,) = cli.json("ns")["namespaces"]
    assert (row["namespace"], row["model"]) == (name, None)
    assert "no namespace.json" in cli("ns").stdout


def test_ns_shows_half_a_surrogate_pair_as_jsons_escape(cli: Cli, corpus: Corpus) -> None:
    name = corpus.namespace(MODEL)
    corpus.put(f"{name}/namespace.json", b'{"model": "\\ud800x", "dtype": "bfloat16"}')
    (row,) = cli.json("ns")["namespaces"]
    assert row["model"] == "\ud800x"
    assert "\\ud800x" in cli("ns", "show").stdout


def test_ns_of_an_empty_bucket_is_empty_and_well(cli: Cli, corpus: Corpus) -> None:
    assert cli.json("ns") == {"namespaces": [], "replicas": []}
    assert "no namespace here yet" in cli("ns").stderr


def test_ls_of_the_only_namespace_needs_no_name(cli: Cli, corpus: Corpus) -> None:
    name = corpus.namespace(MODEL)
    hashed, named = content_hash("a"), "page 1 of the report"
    corpus.entry(name, hashed)
    corpus.entry(name, named)
    corpus.entry(name, f"adapter:{hashed}")
    corpus.put(f"{name}/objects/junk.txt", b"x")
    listed = cli.json("ls")
    assert listed["namespace"] == name
    assert not listed["more"]
    ids = {entry["label"] for entry in listed["entries"]}
    assert ids == {hashed, f"adapter:{hashed}", f"x-{content_hash(named)}"}
    assert all(entry["bytes"] > 0 and entry["age_s"] >= -5 for entry in listed["entries"])
    out = cli("ls")
    assert len(out.stdout.splitlines()) == 1 + 3
    assert "3 entries" in out.stderr


def test_every_name_that_ls_prints_is_accepted_by_stat_as_is_its_beginning(
    cli: Cli, corpus: Corpus
) -> None:
    name = corpus.namespace(MODEL)
    hashed, client = content_hash("a"), "page 1 of the report"
    hashed_adapter = f"My Adapter/v2:{hashed}"
    identifiers = {f"adapter:{hashed}", client, hashed_adapter}
    for identifier in identifiers:
        corpus.entry(name, identifier)
    labels = [entry["label"] for entry in cli.json("ls")["entries"]]
    assert {cli.json("stat", label)["identifier"] for label in labels} == identifiers
    assert cli.json("stat", f"x-{content_hash(client)[:8]}")["identifier"] == client
    assert cli.json("stat", f"adapter:{hashed[:8]}")["identifier"] == f"adapter:{hashed}"


def test_stat_shows_the_header(cli: Cli, corpus: Corpus) -> None:
    name = corpus.namespace(MODEL)
    identifier = content_hash("a")
    blob = corpus.entry(name, identifier)
    found = cli.json("stat", identifier[:8])
    assert found["identifier"] == identifier
    assert (found["rows"], found["width"], found["dtype"]) == (4, 8, "bfloat16")
    assert found["modality"] == "image"
    assert found["bytes"] == len(blob)
    assert found["placeholder"] == {"image_grid_thw": [1, 2, 2]}
    assert not found["verified"]
    assert cli.json("stat", identifier, "--verify")["verified"]
    shown = cli("stat", identifier).stdout
    assert re.search(r"^rows +4$", shown, re.M)
    assert re.search(r'^placeholder +{"image_grid_thw": \[1, 2, 2\]}$', shown, re.M)
    assert found["made_by"] is None
    made_by = "vllm=0.32.0 platform=cpu"
    corpus.entry(name, identifier, entry_bytes(identifier, name, made_by=made_by))
    assert cli.json("stat", identifier)["made_by"] == made_by
    assert made_by in cli("stat", identifier).stdout


def test_stat_of_an_absent_identifier_is_not_found(cli: Cli, corpus: Corpus) -> None:
    corpus.entry(corpus.namespace(MODEL), content_hash("a"))
    for identifier in ("nobody", content_hash("b"), "0123456789", "ab:12345678"):
        out = cli("stat", identifier, "--json", code=1)
        assert json.loads(out.stdout)["error"]["kind"] == "not_found"
        assert "no entry" in out.stderr
    assert "8 or more" in cli("stat", content_hash("a")[:7], code=1).stderr


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda blob: blob[:-1], "length"),
        (lambda blob: b"\0" * 100, "header"),
        (lambda blob: b"", "length"),
        (lambda blob: b"<html></html>" * 10, "header"),
        (lambda blob: entry_bytes(content_hash("b"), "ns-0123456789abcdef"), "identifier"),
        (lambda blob: entry_bytes(content_hash("a"), "ns-0123456789abcdef"), "namespace"),
    ],
)
def test_stat_says_what_is_wrong_with_a_bad_entry(
    cli: Cli, corpus: Corpus, damage: Callable[[bytes], bytes], reason: str
) -> None:
    name = corpus.namespace(MODEL)
    identifier = content_hash("a")
    corpus.entry(name, identifier, damage(entry_bytes(identifier, name)))
    error = cli("stat", identifier, code=1).stderr
    assert cli.json("stat", identifier, "--verify", code=1)["error"]["kind"] == "corrupt"
    assert f"({reason})" in error
    assert identifier in error
    assert "Traceback" not in error


def test_ns_tells_age_weights_and_what_the_index_holds(cli: Cli, corpus: Corpus) -> None:
    name = corpus.namespace({**MODEL, "weights": "xxh3:0123"})
    for i in range(3):
        corpus.entry(name, content_hash(str(i)))
    (row,) = cli.json("ns")["namespaces"]
    assert (row["weights"], row["indexed_count"]) == ("xxh3:0123", None)
    assert -5 <= row["age_s"] < 3600
    cli("manifest", "rebuild")
    (row,) = cli.json("ns")["namespaces"]
    assert row["indexed_count"] == 3
    assert "xxh3:0123" in cli("ns").stdout
    for entry in corpus.client.list_objects_v2(Bucket=corpus.bucket)["Contents"]:
        if "/manifest/v2/snapshot/" in entry["Key"]:
            corpus.put(entry["Key"], b"{}")
    assert cli.json("ns")["namespaces"][0]["indexed_count"] is None


def test_options_before_a_command_of_ns_are_refused(cli: Cli, corpus: Corpus) -> None:
    cli("ns", "--count", "nosuchcommand", code=2)


def test_ns_shows_replicas_with_what_they_lack(
    cli: Cli, corpus: Corpus, moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus.entry(corpus.namespace(MODEL), content_hash("a"))
    near = moto_server.create_bucket("cli-near")
    places = [{"bucket": near}, {"bucket": "cli-none", "endpoint_url": "http://127.0.0.1:1"}]
    places[0]["endpoint_url"] = moto_server.endpoint_url
    places.append({"bucket": "cli-else", "profile": "nobody"})
    monkeypatch.setenv("S3EC_REPLICAS", json.dumps(places))
    found, gone, unusable = cli.json("ns")["replicas"]
    assert (found["replica"], found["sampled_count"], found["missing_count"]) == (near, 1, 1)
    assert found["month_bytes"] > 0
    assert found["month_dollars"] is found["problem"] is None
    assert (gone["missing_count"], gone["sampled_count"]) == (None, 1)
    assert gone["problem"]
    assert "nobody" in unusable["problem"]
    shown = cli("ns")
    assert near in shown.stdout
    assert "cli-none: " in shown.stderr
    moto_server.delete_bucket(near)
