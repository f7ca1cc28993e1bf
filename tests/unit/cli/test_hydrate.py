# SPDX-License-Identifier: Apache-2.0
"""``s3ec hydrate`` against moto: what options name, what is printed, and how it ends."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from s3ec.counters import Counters
from s3ec.identity import Layout, make_key
from s3ec.tier.tier import Tier
from tests.support.clock import Clock
from tests.unit.cli.conftest import Cli
from tests.unit.cli.corpus import MODEL, Corpus, content_hash, entry_bytes
from tests.unit.tier.cases import use as use_entry

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
        "status": "complete",
        "namespace": namespace,
        "cache_dir": str(tmp_path / "s3ec-cache"),
        "wanted_count": 4,
        "present_count": 0,
        "fetched_count": 4,
        "fetched_bytes": nbytes,
        "left_out_count": 0,
        "left_out_bytes": 0,
        "problem": None,
        "seconds": found["seconds"],
        "failures": [],
    }
    assert len(here(tmp_path / "s3ec-cache")) == 4
    result = cli("hydrate")
    assert re.search(r"^present +4$", result.stdout, re.M)
    assert "complete" in result.stdout


@pytest.mark.usefixtures("namespace")
def test_a_list_comes_from_a_file(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "ids").write_text(f"{IDS[1]}\n\npage 1\n")
    found = cli.json("hydrate", "--ids", str(tmp_path / "ids"))
    assert found["fetched_count"] == 2
    assert IDS[1] in here(tmp_path / "s3ec-cache")
    labels = [entry["label"] for entry in cli.json("ls")["entries"]]
    (tmp_path / "labels").write_text("\n".join(labels))
    found = cli.json("hydrate", "--ids", str(tmp_path / "labels"), "--rate-limit", "1GB")
    assert (found["present_count"], found["fetched_count"]) == (2, 2)


def test_what_is_missing_is_named_and_ends_with_3(
    cli: Cli, corpus: Corpus, namespace: str, tmp_path: Path
) -> None:
    corpus.entry(namespace, "bad", entry_bytes("another", namespace))
    (tmp_path / "ids").write_text(f"{IDS[0]}\nno such\nbad\n")
    result = cli("hydrate", "--ids", str(tmp_path / "ids"), code=3)
    assert "absent: no such" in result.stderr
    assert "damaged: bad: identifier" in result.stderr
    assert "partial" in result.stdout


@pytest.mark.usefixtures("namespace")
def test_a_full_tier_says_what_was_left_out(cli: Cli) -> None:
    result = cli("hydrate", "--cache-bytes", "1", code=3)
    assert "left out" in result.stdout
    assert re.search(r"^left out +4$", result.stdout, re.M)
    assert "the tier is full" in result.stdout


def use(folder: Path, namespace: str, *identifiers: str) -> None:
    """Use entries as an engine of the node does, a second after the other."""
    clock = Clock(time.time() - 60.0, tick_s=1.0)
    tier = Tier(
        folder, namespace, budget_bytes=2**20, min_free_bytes=0, counters=Counters(), clock=clock
    )
    for one in identifiers:
        key = make_key(one)
        assert key is not None
        use_entry(tier, key, clock)
    tier.close()


def test_what_a_node_has_used_comes_to_others_in_the_order_of_use(
    cli: Cli, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("hydrate")
    use(tmp_path / "s3ec-cache", namespace, IDS[1], "page 1", IDS[2], IDS[0], IDS[1])
    used = cli("tier", "ls", "--names").stdout
    assert used.split()[:3] == [IDS[1], IDS[0], IDS[2]]
    assert used.split()[3].startswith("x-")
    names = tmp_path / "names"
    names.write_text(used)
    monkeypatch.setenv("S3EC_CACHE_DIR", str(tmp_path / "second"))
    assert cli.json("hydrate", "--ids", str(names))["fetched_count"] == 4
    assert cli("tier", "ls", "--names").stdout == used
    monkeypatch.setenv("S3EC_CACHE_DIR", str(tmp_path / "third"))
    names.write_text("\n".join(used.split()[:2]))
    assert cli.json("hydrate", "--ids", str(names))["fetched_count"] == 2
    assert cli("tier", "ls", "--names").stdout.split() == used.split()[:2]


def test_names_of_another_namespace_are_absent_and_what_is_never_stored_is_refused(
    cli: Cli, corpus: Corpus, namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "names").write_text(f"{content_hash('of another')}\n{IDS[0]}\n")
    found = cli.json("hydrate", "--ids", str(tmp_path / "names"), code=3)
    [failure] = found["failures"]
    assert (failure["label"], failure["kind"]) == (content_hash("of another"), "absent")
    assert found["fetched_count"] == 1
    (tmp_path / "names").write_text(f"{'x' * 4097}\n")
    result = cli("hydrate", "--ids", str(tmp_path / "names"), code=2)
    assert "under which nothing is stored" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--ids", "not-there"), "cannot read not-there: No such file or directory"),
        (("--rate-limit", "fast"), "'--rate-limit': 'fast' is no size; write it as `10GiB`"),
    ],
)
@pytest.mark.usefixtures("namespace")
def test_bad_usage_names_the_option_and_the_fix(
    cli: Cli, arguments: tuple[str, ...], problem: str
) -> None:
    assert problem in cli("hydrate", *arguments, code=2).stderr
