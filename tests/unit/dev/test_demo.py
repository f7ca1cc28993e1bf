# SPDX-License-Identifier: Apache-2.0
"""What the demo says of a run, and how it ends, without an engine."""

from __future__ import annotations

import importlib.util
import io
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console
from typer.testing import CliRunner

from s3ec.dev import demo
from s3ec.dev.demo import Picture, Preset, Report
from s3ec.dev.rigs.engine import EngineError
from s3ec.errors import ConfigError, UnavailableError


def answer(*tokens: int, seconds: float = 0.5, shift: float = 0.0) -> dict[str, Any]:
    """An answer as EngineProcess.chat returns it, every log probability shifted by ``shift``."""
    logprobs = [{str(token): -0.5 + shift, "999": -3.0 + shift} for token in tokens]
    return {"token_ids": list(tokens), "logprobs": logprobs, "first_token_s": seconds}


def picture(number: int, theirs: dict[str, Any] | None = None, **ours: float) -> Picture:
    """A picture of which both engines say the same, ``theirs`` unless given."""
    own = answer(number, 7, **ours)
    return Picture(f"p{number}.png", 4.0, own, theirs or {**own, "first_token_s": 5.0})


def report(pictures: Sequence[Picture] = (), **changed: Any) -> Report:
    """Of a run in which all went well, but for what is given."""
    pictures = pictures or [picture(number) for number in range(3)]
    count = len(pictures)
    good = Report(Preset.TINY, "demo-bucket", count + 1, 4 * 464, pictures, count, 0, count)
    return replace(good, **changed)


def shown(one: Report, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    demo.show(one, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line(text: str, start: str) -> str:
    """The first line that begins so, with single spaces."""
    return " ".join(next(one for one in text.splitlines() if one.strip().startswith(start)).split())


@pytest.mark.parametrize(
    ("run", "problems"),
    [
        (report(), []),
        (report([picture(0)]), []),  # one picture may have one answer
        (report([picture(5), picture(5, shift=0.1)]), []),  # it differs in probability only
        (report(objects=3), ["3 embeddings in the bucket for 4"]),
        (report(hits=2), ["2 hits for 3 pictures"]),
        (report(misses=1), ["1 pictures were encoded by the consumer"]),
        (report(fetches=2), ["2 of 3 pictures came from the bucket"]),
    ],
)
def test_a_consumer_that_did_not_take_all_from_the_bucket_is_a_problem(
    run: Report, problems: list[str]
) -> None:
    assert run.problems() == problems


@pytest.mark.parametrize(
    "theirs",
    [
        answer(1, 8),  # other tokens
        answer(1),  # fewer
        answer(1, 7, 7),  # more
        answer(1, 7, shift=1e-6),  # the same with other probabilities
        answer(1, 7) | {"logprobs": [{"1": -0.5, "999": -3.0}, {"7": -0.5, "998": -3.0}]},
        answer(1, 7) | {"logprobs": [{"1": -0.5, "999": -3.0}, {"7": -0.5, "999": float("nan")}]},
    ],
    ids=["other", "fewer", "more", "less likely", "other alternatives", "no number"],
)
def test_another_answer_is_a_problem_that_names_the_picture(theirs: dict[str, Any]) -> None:
    bad = report([picture(0), picture(1, theirs)])
    assert bad.problems() == ["other answers than without the connector: p1.png"]
    assert line(shown(bad), "p1.png").endswith(" NO")
    assert line(shown(bad), "answers").endswith(" identical: NO")
    assert "PROBLEM: other answers" in shown(bad)


def test_one_answer_for_all_pictures_is_a_problem() -> None:
    same = [replace(picture(5), name=f"p{number}.png") for number in range(3)]
    [problem] = report(same).problems()
    assert problem.startswith("all pictures have the same answer")


@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        (Preset.GEMMA3_27B, "simulated encoder"),
        (Preset.TINY, "real encoder, random weights"),
    ],
)
def test_report_says_the_total_whether_its_encoder_is_simulated_and_the_times_of_each_picture(
    preset: Preset, kind: str
) -> None:
    text = shown(report(preset=preset))
    said = f"total of 3 pictures: 1.50 s with s3ec, 15.00 s without ({kind})"
    assert text.splitlines()[0] == said
    assert ("sleeps" in text) == (kind == "simulated encoder")
    assert line(text, "p1.png") == "p1.png 4.00 s 500 ms 5.00 s yes"
    assert line(text, "3 pictures") == "3 pictures 12.00 s 1.50 s 15.00 s yes"
    assert line(text, "consumer").startswith("consumer 3 hits, 0 misses, 3 fetched from the bucket")
    assert line(text, "answers") == "answers tokens and log probabilities identical: yes"
    assert "PROBLEM" not in text


def test_show_cuts_names_but_no_figures_where_the_terminal_is_narrow() -> None:
    long = replace(picture(0), name="photo-04-hubble_deep_field-which-is-too-long.jpg")
    text = shown(report([long, picture(1)]), width=64)
    assert line(text, "photo-").endswith(" 4.00 s 500 ms 5.00 s yes")


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """What stands in for the run; environment and signals are put back."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    run = mock.Mock(return_value=report())
    monkeypatch.setattr(demo, "run", run)
    with mock.patch.dict(os.environ):
        yield run


def test_a_run_ends_with_0_or_with_1_where_it_has_a_problem(ended: mock.Mock) -> None:
    result = CliRunner().invoke(demo.app, ["--preset", "tiny"])
    assert result.exit_code == 0
    assert "p2.png" in result.stdout
    ended.assert_called_once_with("tiny", 12, Path(".demo").absolute(), keep_bucket=False)
    ended.return_value = report(misses=1)
    result = CliRunner().invoke(demo.app, [])
    assert result.exit_code == 1
    assert "PROBLEM" in result.stdout


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (EngineError("the engine ended (1): no room\nlast line of its log"), 1, "last line of its"),
        (UnavailableError("the model could not be built: no disk"), 1, "no disk"),
        (ConfigError("scikit-image is not installed"), 2, "scikit-image"),
        (KeyboardInterrupt(), 130, "engines and server have been ended"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_run_that_breaks_off_says_why(
    ended: mock.Mock, error: BaseException, status: int, said: str
) -> None:
    ended.side_effect = error
    result = CliRunner().invoke(demo.app, [])
    assert result.exit_code == status
    assert said in result.stderr
    assert result.stdout == ""


def test_missing_vllm_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(demo.app, [])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: vLLM is not installed")


def test_keys_profiles_and_proxies_of_the_caller_are_forgotten() -> None:
    strange = {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_PROFILE": "p",
        "S3EC_SSE": "aws:kms",
        "https_proxy": "http://proxy:1",
        "NO_PROXY": "x",
        "HOME_OF_SOMETHING": "stays",
    }
    with mock.patch.dict(os.environ, strange):
        demo.forget_other_stores()
        assert not (strange.keys() - {"HOME_OF_SOMETHING"}) & os.environ.keys()
        assert os.environ["HOME_OF_SOMETHING"] == "stays"
        assert os.environ["AWS_CONFIG_FILE"] == os.devnull
