# SPDX-License-Identifier: Apache-2.0
"""``s3ec trace``: asks engines that run, collects what they record, and leaves nothing behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s3ec import trace
from s3ec.connector.recorder import Recorder, TraceWriter
from s3ec.counters import Counters
from s3ec.encode_costs import EncodeCosts
from s3ec.runtime import Background
from s3ec.tier.files import Folders
from s3ec.tier.trace_requests import TraceFolder, TraceRequest
from s3ec.trace import Access, Engine, Header
from tests.unit.cli.conftest import Cli


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith("S3EC_"):
            monkeypatch.delenv(name)
    folder = tmp_path / "cache"
    monkeypatch.setenv("S3EC_CACHE_DIR", str(folder))
    Folders(folder).make()
    return folder


class PlayedEngine:
    """Asks for the same picture all the time; its disk thread is the real one."""

    def __init__(self, root: Path, model: str) -> None:
        self.recorder = Recorder()
        self.counters = Counters()
        self.writer = TraceWriter(
            Folders(root), self.recorder, Engine("ns", model), EncodeCosts(), self.counters
        )
        self.thread = Background(f"engine-{model}", self._work)

    def _work(self, _pause: Callable[[], None]) -> float:
        self.writer.exchange()
        if self.recorder.recording is not None:
            self.recorder.recording.accessed(self.thread_name(), 0, "picture", "image", 4)
        self.thread.wake()
        return 0.01

    def thread_name(self) -> str:
        return threading.current_thread().name


@pytest.fixture
def engines(root: Path) -> Iterator[list[PlayedEngine]]:
    running = [PlayedEngine(root, model) for model in ("gemma", "qwen")]
    for one in running:
        one.thread.wake()
    yield running
    for one in running:
        one.thread.stop()


def left_in(root: Path) -> list[str]:
    return os.listdir(root / "v1" / "traces")


@pytest.mark.usefixtures("engines")
def test_all_engines_of_the_node_are_recorded_into_one_file(
    cli: Cli, root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "trace.jsonl"
    document = cli.json("trace", "--seconds", "0.5", "--out", str(out))
    assert document["accesses"] > 0
    assert document["items"] == 1  # under one secret
    assert {engine["model"] for engine in document["engines"]} == {"gemma", "qwen"}
    assert document["outcomes"] == {"device": document["accesses"]}
    times = [one.at_s for one in trace.read(out)]
    assert times == sorted(times)
    assert {one.engine for one in trace.read(out)} == {0, 1}
    assert left_in(root) == []
    assert cli.json("trace", "show", str(out)) == document


def test_without_an_engine_the_command_says_so_and_leaves_nothing(
    cli: Cli, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("s3ec.cli.trace.ENGINE_TIMEOUT_S", 0.05)
    result = cli("trace", "--out", str(tmp_path / "t"), code=1)
    assert "no engine has answered: none runs whose `cache_dir` is" in result.stderr
    assert "--cache-dir" in result.stderr
    assert left_in(root) == []
    assert not (tmp_path / "t").exists()


def test_a_second_command_at_the_same_time_is_refused(cli: Cli, root: Path, tmp_path: Path) -> None:
    folder = TraceFolder(Folders(root))
    with folder.locked():
        folder.ask(TraceRequest.new(0.0, 1.0))
        result = cli("trace", "--out", str(tmp_path / "t"), code=2)
        assert "another `s3ec trace` records in" in result.stderr
        assert left_in(root) == ["request.json"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "nowhere to save it; name a file with `--out FILE`"),
        (("--out", "t", "--seconds", "0"), "`--seconds` 0 is out of range; take 1 to 86400"),
        (("--out", "t", "--seconds", "1e9"), "`--seconds` 1e+09 is out of range"),
        (("--out", "t", "--seconds", "nan"), "`--seconds` nan is out of range"),
        (("--seconds", "5", "show", "t"), "write options after the command: `s3ec trace show ...`"),
        (("show", "not-there"), "cannot read not-there: No such file or directory"),
    ],
)
@pytest.mark.usefixtures("root")
def test_bad_usage_names_the_option_and_the_fix(
    cli: Cli, arguments: tuple[str, ...], problem: str
) -> None:
    assert problem in cli("trace", *arguments, code=2).stderr


def test_a_file_that_is_there_stays(cli: Cli, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    out.write_text("mine")
    assert "--force replaces it" in cli("trace", "--out", str(tmp_path), code=2).stderr
    assert out.read_text() == "mine"
    assert left_in(root) == []


def test_a_node_without_a_cache_is_named(cli: Cli, tmp_path: Path) -> None:
    result = cli("trace", "--out", "t", "--cache-dir", str(tmp_path / "none"), code=2)
    assert "no cache in" in result.stderr


def test_show_prints_what_is_in_a_trace(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t"
    accesses = [Access(float(at), f"r{at}", f"{at % 3}", 256, "encoded") for at in range(8)]
    accesses.append(Access(9.0, "r9", "0", 256, "device"))
    lines = [trace.header_line(Header(0.0, (Engine("ns", "gemma"),)))]
    lines += map(trace.event_line, accesses)
    path.write_text("\n".join([*lines, '{"kind": "lost", "at_s": 9, "count": 4}', ""]))
    shown = cli("trace", "show", str(path)).stdout
    for text in ("1 (gemma)", "9 in 9.0 s", "3 (768 rows)", "encoded", "88.9%", "4 accesses"):
        assert text in shown


def test_show_names_the_broken_line(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(trace.header_line(Header(0.0, (Engine(),))) + "\nnonsense\n")
    assert "t line 2: not JSON" in cli("trace", "show", str(path), code=2).stderr
