# SPDX-License-Identifier: Apache-2.0
"""What s3ec finds out about the vLLM around it."""

from __future__ import annotations

import sys

import pytest

compat = pytest.importorskip("s3ec.connector.compat")


@pytest.mark.parametrize(
    ("arguments", "serves"),
    [
        (["/opt/venv/bin/vllm", "serve", "model"], True),
        (["/site-packages/vllm/entrypoints/openai/api_server.py", "--model", "m"], True),
        (["/site-packages/vllm/entrypoints/launchers/api_server/entry.py"], True),
        (["/opt/venv/bin/vllm", "run-batch", "-i", "requests.jsonl"], False),
        (["precompute.py"], False),
        (["-c"], False),
        ([], False),
    ],
)
def test_a_server_is_told_from_a_job(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], serves: bool
) -> None:
    monkeypatch.setattr(sys, "argv", arguments)
    assert compat.serves_requests() is serves
