# SPDX-License-Identifier: Apache-2.0
"""``s3ec hydrate`` against moto: what options name, what is printed, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.corpus import catalog
from s3ec.identity import Layout, make_key
from s3ec.testing.server import MotoServer
from s3ec.trace import Access, Engine, Header, event_line, header_line
from tests.support.catalogues import row
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus, content_hash, entry_bytes

IDS = [content_hash(text) for text in "abc"]


@pytest.fixture
def namespace(corpus: Corpus) -> str:
    name = corpus.namespace(MODEL)
    corpus.put(Layout(name).modality("image"), b'{"width": 8, "dtype": "bfloat16"}')
    for one in (*IDS, "page 1"):
        corpus.entry(name, one)
    return name


def here(folder: Path) -> set[str]:
    return {path.name.partition(".")[0] for path in folder.glob("v1/objects/*/*/*.safetensors")}


def test_everything_comes_and_the_second_run_has_nothing_to_do(
    cli: Cli, namespace: str, tmp_path: Path
) -> None:
    found = cli.json("hydrate")
    nbytes = sum(len(entry_bytes(one, namespace)) for one in (*IDS, "page 1"))
    assert found == {
        "namespace": namespace,
        "folder": str(tmp_path / "s3ec-cache"),
        "dry_run": False,
        "wanted": 4,
        "here": 0,
        "fetched": 4,
        "fetched_bytes": nbytes,
        "left_out": 0,
        "left_out_bytes": 0,
        "absent": [],
        "damaged": {},
        "failed": {},
        "stopped": "",
        "seconds": found["seconds"],
        "status": "complete",
    }
    assert len(here(tmp_path / "s3ec-cache")) == 4
    result = cli("hydrate")
    assert "here already  4 entries" in result.stdout
    assert "complete" in result.stdout


@pytest.mark.usefixtures("namespace")
def test_a_list_comes_from_a_file_with_a_limit(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(f"{IDS[1]}\n\npage 1\n{IDS[0]}\n")
    found = cli.json("hydrate", "--ids", str(tmp_path / "ids"), "--top", "2")
    assert found["fetched"] == 2
    assert IDS[1] in here(tmp_path / "s3ec-cache")
    labels = [entry["label"] for entry in cli.json("ls")["entries"]]
    (tmp_path / "labels").write_text("\n".join(labels))
    found = cli.json("hydrate", "--ids", str(tmp_path / "labels"), "--name", "--rate-limit", "1GB")
    assert (found["here"], found["fetched"]) == (2, 2)


def test_what_is_missing_is_named_and_ends_with_3(
    cli: Cli, corpus: Corpus, namespace: str, tmp_path: Path
) -> None:
    corpus.entry(namespace, "bad", entry_bytes("another", namespace))
    (tmp_path / "ids").write_text(f"{IDS[0]}\nno such\nbad\n")
    result = cli("hydrate", "--ids", str(tmp_path / "ids"), code=3)
    assert "absent: no such" in result.stderr
    assert "damaged: bad (identifier)" in result.stderr
    assert "partial" in result.stdout


@pytest.mark.usefixtures("namespace")
def test_a_full_tier_says_what_was_left_out(cli: Cli) -> None:
    result = cli("hydrate", "--max-bytes", "1", code=3)
    assert "left out" in result.stdout
    assert "4 entries" in result.stdout
    assert "`--max-bytes` is reached" in result.stdout


def test_a_dry_run_says_what_would_come(cli: Cli, namespace: str, tmp_path: Path) -> None:
    result = cli("hydrate", "--dry-run")
    assert "would fetch" in result.stdout
    assert here(tmp_path / "s3ec-cache") == set()


def test_a_trace_with_names_says_what_comes(cli: Cli, namespace: str, tmp_path: Path) -> None:
    keys = [key for one in (IDS[2], IDS[0], IDS[2]) if (key := make_key(one))]
    lines = [header_line(Header(0.0, (Engine(namespace),)))]
    lines += [event_line(Access(1.0, "r", "h", 4, "node", name=key.name)) for key in keys]
    path = tmp_path / "hot.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    assert cli.json("hydrate", "--trace", str(path), "--top", "1")["fetched"] == 1
    assert here(tmp_path / "s3ec-cache") == {IDS[2]}


def test_a_query_of_the_catalogue_says_what_comes(
    cli: Cli, namespace: str, tmp_path: Path, moto_server: MotoServer
) -> None:
    import s3ec

    rows = [row("a.pdf", page=1, identifier=IDS[0]), row("b.pdf", page=1, identifier=IDS[1])]
    with s3ec.Corpus.open() as opened:
        opened.within(lambda store, layout: catalog.append_rows(store, layout, rows), namespace)
    found = cli.json("hydrate", "--where", "document = 'b.pdf'")
    assert (found["fetched"], found["wanted"]) == (1, 1)
    assert here(tmp_path / "s3ec-cache") == {IDS[1]}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--ids", "a", "--trace", "b"), "`--ids` and `--trace` say what is wanted; give one"),
        (("--ids", "not-there"), "cannot read not-there: No such file or directory"),
        (("--trace", "not-there"), "cannot read not-there: No such file or directory"),
        (("--rate-limit", "fast"), "`--rate-limit` 'fast' is no size; write it as `10GiB`"),
        (("--max-concurrency", "0"), "`max_concurrency` 0 is out of range; take 1 to 1024"),
        (("--top", "3"), "`--top` needs an order; give `--ids`, `--where` or `--trace`, or take"),
        (("--name",), "`--name` is about the lines of `--ids`; name a file there"),
    ],
)
@pytest.mark.usefixtures("namespace")
def test_bad_usage_names_the_option_and_the_fix(
    cli: Cli, arguments: tuple[str, ...], problem: str
) -> None:
    assert problem in cli("hydrate", *arguments, code=2).stderr
