# SPDX-License-Identifier: Apache-2.0
"""What s3ec finds out about the vLLM around it."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version

import pytest

from s3ec.codec import Header, Shape, encode_header, parse_header

compat = pytest.importorskip("s3ec.connector.compat")


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H100 80GB HBM3", "é\x1b", "x" * 500, ""])
def test_whatever_the_device_is_called_a_header_can_say_what_made_it(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(compat, "device_name", lambda: device)
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.32.1.dev3+cu129")
    compat.made_by.cache_clear()
    try:
        made_by = compat.made_by()
    finally:
        compat.made_by.cache_clear()
    header = Header("ab" * 32, "n-0123456789abcdef", "image", Shape(1, 1, "float32"), "0" * 32)
    blob = encode_header(replace(header, made_by=made_by)) + bytes(4)
    assert parse_header(blob).made_by == made_by
    words = dict(word.split("=") for word in made_by.split(" "))
    assert list(words) == ["vllm", "transformers", "torch", "pillow", "platform"]
    assert words["vllm"] == "0.32.1.dev3+cu129"
    assert words["torch"] == version("torch")


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [("0.25.1", True), ("0.26.0", False), ("0.33.1", False), ("1.0.0", False), ("dev", False)],
)
def test_a_release_that_does_not_tell_when_a_request_ends_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, is_refused: bool
) -> None:
    monkeypatch.setattr(compat, "vllm_version", lambda: version)
    problem = compat.release_problem()
    assert (problem is not None) is is_refused
    assert problem is None or "install 0.26 or newer" in problem
