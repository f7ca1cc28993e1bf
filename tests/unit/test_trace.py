# SPDX-License-Identifier: Apache-2.0
"""Traces: what is written is read back, and what is broken is named with its line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from s3ec import trace
from s3ec.errors import ConfigError
from s3ec.trace import Access, Engine, Event, Hasher, Header, Lost, Outcome

ENGINE = Engine("gemma/abc", "google/gemma", "ec_both", 8192)
FULL = Access(1.25, "r1", "i1", 256, "bucket", "video", 0, 2_800_000, 0.5, 0.021, 0.13)


def access(at_s: float = 0.0, item: str = "a", outcome: Outcome = "encoded") -> Access:
    return Access(at_s, "r", item, 4, outcome)


def write(
    path: Path, events: Iterable[Event], *, began_s: float = 1000.0, engine: Engine = ENGINE
) -> Path:
    lines = [trace.header_line(Header(began_s, (engine,))), *map(trace.event_line, events)]
    path.write_text("\n".join(lines) + "\n")
    return path


def with_line(path: Path, **changes: Any) -> Path:
    """A trace whose third line is an access with some fields changed; None takes one out."""
    document = json.loads(trace.event_line(FULL)) | changes
    kept = {name: value for name, value in document.items() if value is not None}
    write(path, [FULL])
    with path.open("a") as file:
        file.write(json.dumps(kept) + "\n")
    return path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    events = [FULL, access(2.0), Lost(2.5, 17), access(3.0, outcome="device")]
    path = write(tmp_path / "t", events)
    assert trace.read_header(path) == Header(1000.0, (ENGINE,))
    assert list(trace.events(path)) == events
    assert list(trace.read(path)) == [one for one in events if isinstance(one, Access)]


def test_names_of_objects_are_read_back_and_no_others(tmp_path: Path) -> None:
    name = f"my-lora/ab/{'ab' * 32}.safetensors"
    assert [one.name for one in trace.read(with_line(tmp_path / "t", name=name))] == [None, name]
    for bad in ("../../etc/passwd.safetensors", "a/b", "/a.safetensors", 7):
        path = with_line(tmp_path / "u", name=bad)
        with pytest.raises(ConfigError, match="line 3: `name` is not the name of an object"):
            list(trace.read(path))


def test_what_an_outcome_took_is_of_its_kind() -> None:
    assert FULL.cost_s == 0.021
    encoded = Access(0.0, "r", "i", 4, "encoded", fetch_s=9.0, encode_s=0.13)
    assert (encoded.cost_s, access().cost_s) == (0.13, None)
    assert access(outcome="device").cost_s == 0.0


def test_unknown_fields_and_kinds_are_ignored(tmp_path: Path) -> None:
    path = with_line(tmp_path / "t", colour="blue")
    with path.open("a") as file:
        file.write('{"kind": "weather", "at_s": "sunny"}\n')
    assert list(trace.read(path)) == [FULL, FULL]


def test_a_last_line_that_was_cut_is_tolerated(tmp_path: Path) -> None:
    path = write(tmp_path / "t", [access(), access(1.0)])
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in range(1, last):
        path.write_bytes(whole[:-cut])
        # Only the end of the line is missing with the first of them.
        assert len(list(trace.read(path))) == (2 if cut == 1 else 1)


def test_a_cut_line_in_the_middle_names_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "t", [access(), access(1.0)])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-3], lines[2]]) + "\n")
    with pytest.raises(ConfigError, match=r"t line 2: not JSON; record it again") as caught:
        list(trace.read(path))
    assert caught.value.field == "trace"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rows": 0}, "`rows` is not a whole number of 1 or more"),
        ({"rows": None}, "`rows` is not a whole number of 1 or more"),
        ({"rows": 2.5}, "`rows` is not a whole number"),
        ({"rows": True}, "`rows` is not a whole number"),
        ({"at_s": None}, "`at_s` is missing"),
        ({"at_s": -1}, "`at_s` is not a number of seconds"),
        ({"at_s": float("nan")}, "`at_s` is not a number of seconds"),
        ({"fetch_s": "soon"}, "`fetch_s` is not a number of seconds"),
        ({"waited_s": 10**400}, "`waited_s` is not a number of seconds"),
        ({"outcome": "lucky"}, "`outcome` is none of device, node, bucket"),
        ({"outcome": ["device"]}, "`outcome` is none of"),
        ({"item": None}, "`item` is not a text"),
        ({"request": 7}, "`request` is not a text"),
        ({"engine": 1}, "`engine` is not the place of an engine"),
        ({"nbytes": -1}, "`nbytes` is not a whole number of 0 or more"),
    ],
)
def test_a_bad_field_is_named_with_its_line(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"t line 3: {problem}"):
        list(trace.read(with_line(tmp_path / "t", **changes)))


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"[1]\n", b'{"a": 1}\n', b"[" * 100_000])
def test_another_file_is_no_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="t line 1: not a trace of s3ec; record one with"):
        list(trace.read(path))


def test_a_newer_version_says_so(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text('{"format": "s3ec-trace", "version": 2}\n')
    with pytest.raises(ConfigError, match="version 2, and this s3ec reads version 1"):
        trace.read_header(path)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"engines": []}, "`engines` is not a list"),
        ({"engines": ["a"]}, "an engine is not a JSON object"),
        ({"engines": [{"model": 1}]}, "`model` is not a text"),
        ({"engines": [{}], "began_s": "now"}, "`began_s` is not"),
    ],
)
def test_a_broken_header_says_what_is_wrong(
    tmp_path: Path, header: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "t"
    path.write_text(json.dumps({"format": "s3ec-trace", "version": 1, **header}))
    with pytest.raises(ConfigError, match=f"t line 1: {problem}"):
        trace.read_header(path)


def test_traces_of_several_engines_become_one_in_order_of_time(tmp_path: Path) -> None:
    first = write(tmp_path / "1", [access(0.0, "a"), access(4.0, "b"), Lost(5.0, 3)])
    second = write(
        tmp_path / "2", [access(1.0, "c")], began_s=1001.0, engine=Engine("other", "m", "", None)
    )
    path = tmp_path / "out"
    path.write_text("\n".join(trace.merge([second, first])) + "\n")
    header = trace.read_header(path)
    assert header.began_s == 1000.0
    assert [engine.namespace for engine in header.engines] == ["other", "gemma/abc"]
    assert [(one.at_s, one.item, one.engine) for one in trace.read(path)] == [
        (0.0, "a", 1),
        (2.0, "c", 0),
        (4.0, "b", 1),
    ]
    assert list(trace.events(path))[-1] == Lost(5.0, 3, 1)


def test_nothing_to_merge_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no trace to merge"):
        list(trace.merge([]))


def test_equal_names_hash_alike_under_one_secret_only() -> None:
    one, other = Hasher(b"1"), Hasher(b"2")
    assert one("ns", "a") == one("ns", "a") != one("ns", "b")
    assert one("ns", "a") != other("ns", "a")
    assert one("ns", "a") != one("nsa", "")
    assert one("\ud800")  # a client's name may be half of a surrogate pair


def test_the_summary_counts_what_is_there() -> None:
    events: list[Event] = [access(float(at), f"{at % 4}") for at in range(12)]
    events += [Access(20.0, "r2", "0", 9, "device", waited_s=0.5), Lost(21.0, 5)]
    found = trace.summarize(events)
    assert (found.accesses, found.requests, found.items, found.lost) == (13, 2, 4, 5)
    assert found.outcomes == {"device": 1, "encoded": 12}
    assert (found.rows, found.seconds, found.waited_s) == (9 + 3 * 4, 20.0, 0.5)
    assert found.top_share == 4 / 13
    assert found.again_share == pytest.approx(1 - 4 / 13)


def test_an_empty_trace_has_a_summary() -> None:
    found = trace.summarize([])
    assert (found.accesses, found.top_share, found.zipf) == (0, 0.0, None)


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.4])
def test_the_exponent_of_a_zipf_law_is_found(exponent: float) -> None:
    counts = (1e6 * np.arange(1, 1001) ** -exponent).astype(int).tolist()
    assert trace.zipf_exponent(counts) == pytest.approx(exponent, abs=0.01)
