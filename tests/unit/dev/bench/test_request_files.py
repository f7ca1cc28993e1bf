# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from s3ec.dev.bench import request_files, workloads
from s3ec.errors import ConfigError


@pytest.mark.parametrize("form", request_files.FORMS)
@pytest.mark.parametrize("rate_per_s", [None, 3.0])
def test_what_was_written_is_read_again(
    tmp_path: Path, form: str, rate_per_s: float | None
) -> None:
    workload = workloads.make("questions", factor=0.01, rate_per_s=rate_per_s)
    file = tmp_path / "requests.jsonl"

    request_files.write(workload, file, form)
    read = request_files.read(file)

    assert read.name == "requests.jsonl"
    assert [(r.images, r.question) for r in read.requests] == [
        (r.images, r.question) for r in workload.requests
    ]
    for one, other in zip(read.requests, workload.requests, strict=True):
        assert one.at_s == (None if other.at_s is None else pytest.approx(other.at_s, abs=1e-6))


def test_a_line_for_dynamo_has_its_fields(tmp_path: Path) -> None:
    asked = workloads.Ask(1.5, ("a", "b"), "what?")
    file = tmp_path / "requests.jsonl"

    request_files.write(
        workloads.Workload("two", [asked], {}), file, "dynamo", lambda name: f"/pages/{name}.png"
    )

    (line,) = map(json.loads, file.read_text().splitlines())
    assert line == {
        "text": "what?",
        "images": ["/pages/a.png", "/pages/b.png"],
        "image_uuids": [str(uuid.uuid5(uuid.NAMESPACE_OID, f"/pages/{name}.png")) for name in "ab"],
        "timestamp": 1500.0,
    }


def test_a_line_for_inference_perf_is_a_document_of_spans(tmp_path: Path) -> None:
    asked = workloads.Ask(None, ("http://pages/a",), "what?")
    file = tmp_path / "requests.jsonl"

    request_files.write(workloads.Workload("one", [asked], {}), file, "inference-perf")

    (line,) = map(json.loads, file.read_text().splitlines())
    (span,) = line["spans"]
    assert span["start_time"] == span["end_time"] == "2026-01-01T00:00:00+00:00"
    assert json.loads(span["attributes"]["gen_ai.input.messages"]) == [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "http://pages/a"}},
                {"type": "text", "text": "what?"},
            ],
        }
    ]


def test_requests_are_read_in_the_order_of_their_arrival(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(
        '{"text": "late", "images": ["a"], "timestamp": 900}\n\n'
        '{"texts": ["soon"], "image": "b", "timestamp": 10}\n'
    )

    read = request_files.read(file)

    assert [(r.at_s, r.images, r.question) for r in read.requests] == [
        (0.01, ("b",), "soon"),
        (0.9, ("a",), "late"),
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no requests"),
        ("{", "line 1 of .*: not JSON"),
        ("[]", "a line is a JSON object"),
        ('{"text_input": "what?"}', "neither 'images' nor 'spans'"),
        ('{"text": "what?", "images": []}', "a request without pictures"),
        ('{"text": "what?", "images": [7]}', "images are a list of files or addresses"),
        ('{"images": ["a"], "timestamp": -1}', "is no time of arrival"),
        ('{"images": ["a"], "timestamp": "soon"}', "line 1 of .*: not of this form"),
        ('{"spans": [{}]}', "line 1 of .*: not of this form"),
        ('{"images": ["a"]}\n{"images": ["a"], "timestamp": 1}', "arrivals for some requests only"),
    ],
)
def test_a_file_in_neither_form_is_refused_with_its_line(
    tmp_path: Path, content: str, said: str
) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(content)

    with pytest.raises(ConfigError, match=said):
        request_files.read(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--requests: .* cannot be read"):
        request_files.read(tmp_path / "none.jsonl")
