# SPDX-License-Identifier: Apache-2.0
"""`s3ec top`: what a frame shows, and which engines do not end it."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from tests.support.metrics_pages import MODEL, page, served
from tests.unit.cli.conftest import Cli

QUICK = ("--once", "--interval", "0.2")
TIERS = {
    'lookups{tier="device",outcome="hit"}': 4,
    'lookups{tier="device",outcome="miss"}': 6,
    'lookups{tier="node",outcome="hit"}': 3,
    'lookups{tier="node",outcome="miss"}': 3,
}
LEVELS = {
    "spool_entries": 2,
    "spool_oldest_seconds": 3,
    "breaker_open": 0,
    "tier_bytes": 2**30,
    "tier_budget_bytes": 2**31,
    "index_entries": 1234567,
    "index_age_seconds": 4,
}


def nobody() -> str:
    """A URL where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}/metrics"


def test_frame_shows_tiers_queues_and_no_problems(cli: Cli) -> None:
    first = page(dict.fromkeys(TIERS, 0), LEVELS)
    with served(first, page(TIERS, LEVELS)) as url:
        text = cli("top", url, *QUICK).stdout
    assert MODEL in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "40.0 %" in rows["device"]
    assert "50.0 %" in rows["this"]  # disk
    assert "no problems" in text
    assert "1,234,567 entries, 4 s old" in text
    assert "1.0 GiB of 2.0 GiB" in text
    assert "closed" in text


def test_frame_says_what_is_wrong(cli: Cli) -> None:
    levels = LEVELS | {"breaker_open": 1, "spool_oldest_seconds": 700}
    before = page({'save_problems{reason="denied"}': 1}, levels)
    with served(before, page({'save_problems{reason="denied"}': 4}, levels)) as url:
        text = cli("top", url, *QUICK).stdout
    assert "the breaker is open" in text
    assert "OPEN" in text
    assert "the spool is old" in text
    assert "saves with a problem (denied): 4, 3 of them now" in text
    assert "no problems" not in text


def test_frame_takes_no_more_columns_than_the_terminal_has() -> None:
    """Drawn as for a terminal of 80 columns: nothing is cut, and nothing wraps."""
    from io import StringIO

    from rich.console import Console

    from s3ec.cli.top_figures import between, figures, parsed
    from s3ec.cli.top_frame import Engine, frame

    first, second = parsed(page(dict.fromkeys(TIERS, 0)), 0.0), parsed(page(TIERS, LEVELS), 2.0)
    found = figures(second, between(first, second))
    engine = Engine("http://127.0.0.1:8000/metrics", "", True, (MODEL,), found)
    out = Console(file=StringIO(), width=80)
    out.print(frame([engine], found, clock="14:02:31", seconds=2.0))
    lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) < 24  # of a terminal as it is by default
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)


def test_engine_that_started_again_is_named(cli: Cli) -> None:
    with served(page({"hits": 9}), page({"hits": 1})) as url:
        assert "started again" in cli("top", url, *QUICK).stdout


def test_one_engine_of_two_that_is_away_does_not_end_it(cli: Cli) -> None:
    gone = nobody()
    with served(page({"hits": 1}), page({"hits": 2})) as url:
        text = cli("top", url, gone, *QUICK).stdout
        document = cli.json("top", url, gone, *QUICK)
    assert "1 of 2 engines answer" in text
    assert "cannot be reached" in text
    up, away = document["engines"]
    assert (up["is_up"], away["is_up"], away["figures"]) == (True, False, None)
    assert document["all"]["lookups"]["all"]["hit_ratio_since_start"] == 1


def test_two_engines_are_shown_beside_each_other_and_as_one(cli: Cli) -> None:
    with (
        served(page({"hits": 0}, LEVELS), page({"hits": 2}, LEVELS)) as one,
        served(page({"misses": 0}, LEVELS), page({"misses": 2}, LEVELS)) as other,
    ):
        document = cli.json("top", one, other, *QUICK)
    ratios = [engine["figures"]["lookups"]["all"]["hit_ratio"] for engine in document["engines"]]
    assert ratios == [1, 0]
    assert document["all"]["lookups"]["all"]["hit_ratio"] == pytest.approx(0.5)
    # One host, so one folder.
    assert document["all"]["tier_bytes"] == LEVELS["tier_bytes"]


def test_no_engine_at_all_is_exit_status_1(cli: Cli) -> None:
    text = cli("top", nobody(), *QUICK, code=1).stdout
    assert "cannot be reached" in text
    assert "no engine answers" in text
    assert cli.json("top", nobody(), *QUICK, code=1)["all"] is None


@pytest.mark.parametrize(
    ("answer", "said"),
    [(500, "answers with status 500"), ("<html>\n<p>x</p>\n", "no page of metrics")],
)
def test_answer_that_is_no_page_of_metrics_is_said(cli: Cli, answer: str | int, said: str) -> None:
    with served(answer) as url:
        assert said in cli("top", url, *QUICK, code=1).stdout


def test_vllm_without_our_metrics_is_said(cli: Cli) -> None:
    with served("# TYPE vllm:x gauge\nvllm:x 1\n") as url:
        assert "no metrics of s3ec here" in cli("top", url, *QUICK).stdout


@pytest.mark.parametrize("url", ["ftp://x/metrics", "http://", "http://host:port"])
def test_url_that_is_none_is_bad_usage(cli: Cli, url: str) -> None:
    assert cli.json("top", url, *QUICK, code=2)["error"]["kind"] == "usage"


def test_missing_parser_is_bad_usage_and_is_named(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    with served(page({"hits": 1})) as url:
        error = cli.json("top", url, *QUICK, code=2)["error"]
    assert error["fix"] == "pip install 's3ec[metrics]'"


def test_host_and_port_are_enough(cli: Cli) -> None:
    with served(page({"hits": 1})) as url:
        host = url.removeprefix("http://").removesuffix("/metrics")
        assert cli.json("top", host, *QUICK)["engines"][0]["url"] == url


# -- at a terminal -----------------------------------------------------------------------------


@pytest.mark.slow
def test_frames_follow_each_other_until_ctrl_c_and_outlive_the_engine() -> None:
    frames, away, asked = ["hits/s", "cannot be reached", "hits/s"], nobody(), threading.Event()
    terminal, side = pty.openpty()
    with served(page({"hits": 1}), 503, page({"hits": 1})) as url:
        watching = subprocess.Popen(
            [sys.executable, "-m", "s3ec", "top", url, away, "--interval", "0.2"],
            stdin=side,
            stdout=side,
            stderr=subprocess.PIPE,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
        )
        os.close(side)
        shown = ""
        with suppress(OSError):  # once its other side is closed
            while piece := os.read(terminal, 65536):
                shown += piece.decode(errors="replace")
                # The engine was there, was away, and is there again.
                if not asked.is_set() and "503" in shown.partition("hits/s")[2]:
                    rest = shown.rpartition("503")[2]
                    if "1 of 2 engines answer" in rest:
                        asked.set()
                        watching.send_signal(signal.SIGINT)
        assert watching.wait() == 0
        assert watching.stderr is not None
        with watching.stderr as errors:
            assert errors.read() == b""
    os.close(terminal)
    assert asked.is_set(), shown
    assert all(frame in shown for frame in frames)


def test_json_at_a_terminal_needs_once() -> None:
    terminal, side = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "s3ec", "top", "--json"],
        stdout=side,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(side)
    os.close(terminal)
    assert done.returncode == 2
    assert "--once" in done.stderr
