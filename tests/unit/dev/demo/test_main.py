# SPDX-License-Identifier: Apache-2.0
"""The command line of the demo, as far as it goes without an engine."""

from __future__ import annotations

import importlib.util
import os
from unittest import mock

import pytest
from typer.testing import CliRunner

from s3ec.dev.demo import __main__ as demo


def test_help_shows_presets_and_examples() -> None:
    result = CliRunner().invoke(demo.app, ["--help"])
    assert result.exit_code == 0
    assert "encoder-27b" in result.output
    assert "python -m s3ec.dev.demo --preset" in result.output


def test_unknown_preset_is_bad_usage() -> None:
    assert CliRunner().invoke(demo.app, ["--preset", "huge"]).exit_code == 2


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


def test_an_engine_error_is_shortened_to_its_first_line_and_the_end_of_the_log() -> None:
    message = "\n".join(["ValueError: no room", *(f"line {number}" for number in range(100))])
    lines = demo.shortened(message).splitlines()
    assert lines[0] == "ValueError: no room"
    assert lines[-1] == "line 99"
    assert len(lines) == 26
