# SPDX-License-Identifier: Apache-2.0
"""Request files of other benchmarks: the same questions about the same pictures, elsewhere.

Two forms of JSONL are written and read:

* ``dynamo``: what NVIDIA Dynamo's generator of multimodal requests writes and AIPerf reads as
  ``single_turn``. A line has ``text``, ``images`` (files or addresses), ``image_uuids`` (a UUID of
  version 5 made from the image's reference) and, for arrivals, ``timestamp`` in milliseconds.
* ``inference-perf``: what its replay of traces reads: a line is one OpenTelemetry document with
  ``spans``, and the attribute ``gen_ai.input.messages`` of a span is OpenAI's list of messages as a
  string. It had no form of its own for pictures in November 2026, and its replay keeps the text of
  a message only. The pictures are in the file as ``image_url`` parts all the same, for other
  readers and for this one.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from s3ec.dev.bench.workloads import Ask, Workload
from s3ec.errors import ConfigError

_MODEL = "model"
# Spans need a clock's time; that of the first request's clock.
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
_INPUT = "gen_ai.input.messages"
_ANSWER_TOKENS = 4


def write(workload: Workload, path: Path, form: str, where: Callable[[str], str] = str) -> None:
    """Write all requests to a file.

    Args:
        workload: What to write.
        path: The file; replaced if there.
        form: One of ``FORMS``.
        where: From the name of a picture to its file or address.

    Raises:
        KeyError: No such form.
        OSError: It cannot be written.
    """
    line = _WRITERS[form]
    with path.open("w", encoding="utf-8") as file:
        for number, ask in enumerate(workload.requests):
            images = [where(name) for name in ask.images]
            file.write(json.dumps(line(number, ask, images), separators=(",", ":")) + "\n")


def read(path: Path) -> Workload:
    """Read requests in either form; a picture's name is its reference in the file.

    Raises:
        ConfigError: The file cannot be read, or is in neither form; names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--requests: {path} cannot be read: {exc}") from exc
    requests: list[Ask] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            requests += _asks(json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            raise ConfigError(f"--requests: line {number} of {path}: {_said(exc)}") from exc
    if not requests:
        raise ConfigError(f"--requests: {path} has no requests")
    timed = [ask for ask in requests if ask.at_s is not None]
    if timed and len(timed) < len(requests):
        raise ConfigError(f"--requests: {path} has arrivals for some requests only")
    if timed:
        requests.sort(key=lambda ask: ask.at_s or 0.0)
    return Workload(path.name, requests, {})


def _said(exc: Exception) -> str:
    if isinstance(exc, json.JSONDecodeError):
        return f"not JSON: {exc.msg}"
    return str(exc) if type(exc) is ValueError else f"not of this form ({exc})"


def _dynamo(_: int, ask: Ask, images: list[str]) -> dict[str, Any]:
    uuids = [str(uuid.uuid5(uuid.NAMESPACE_OID, image)) for image in images]
    line = {"text": ask.question, "images": images, "image_uuids": uuids}
    return line if ask.at_s is None else {**line, "timestamp": round(ask.at_s * 1e3, 3)}


def _inference_perf(number: int, ask: Ask, images: list[str]) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    content = [*parts, {"type": "text", "text": ask.question}]
    # One that has no time begins with all others: each line is a session of its own.
    start = _EPOCH + timedelta(seconds=ask.at_s or 0.0)
    trace = uuid.uuid5(uuid.NAMESPACE_OID, f"{number} {ask.question}").hex
    attributes = {
        "gen_ai.request.model": _MODEL,
        "gen_ai.request.max_tokens": _ANSWER_TOKENS,
        _INPUT: json.dumps([{"role": "user", "content": content}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "content": ""}]),
    }
    span = {
        "span_id": trace[:16],
        "trace_id": trace,
        "name": f"chat {_MODEL}",
        "start_time": start.isoformat(),
        "end_time": start.isoformat(),
        "attributes": attributes,
    }
    return {"trace_id": trace, "session_id": f"request-{number:05}", "spans": [span]} | (
        {} if ask.at_s is None else {"at_s": ask.at_s}
    )


def _asks(line: Any) -> Iterable[Ask]:
    if not isinstance(line, Mapping):
        raise ValueError("a line is a JSON object")
    if "spans" in line:
        return [_of_span(span, line.get("at_s")) for span in line["spans"]]
    if "images" in line or "image" in line:
        return [_of_turn(line)]
    raise ValueError("neither 'images' nor 'spans': this is no request about pictures")


def _of_turn(line: Mapping[str, Any]) -> Ask:
    images = line["images"] if "images" in line else [line["image"]]
    texts = line.get("texts") or [line.get("text") or ""]
    at_ms = line.get("timestamp")
    return _ask(None if at_ms is None else at_ms / 1e3, images, " ".join(texts))


def _of_span(span: Mapping[str, Any], at_s: float | None) -> Ask:
    messages: Any = span["attributes"][_INPUT]
    if isinstance(messages, str):
        messages = json.loads(messages)
    images: list[str] = []
    texts: list[str] = []
    for message in messages:
        parts: Any = message.get("content") or []
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        for part in parts:
            if part.get("type") == "image_url":
                images.append(part["image_url"]["url"])
            elif part.get("type") == "text":
                texts.append(part["text"])
    return _ask(at_s, images, " ".join(texts))


def _ask(at_s: float | None, images: Any, question: str) -> Ask:
    if not isinstance(images, list) or not all(isinstance(one, str) and one for one in images):
        raise ValueError("images are a list of files or addresses")
    if not images:
        raise ValueError("a request without pictures has nothing to measure")
    if at_s is not None and not (isinstance(at_s, (int, float)) and at_s >= 0):
        raise ValueError(f"{at_s!r} is no time of arrival")
    return Ask(at_s, tuple(images), question)


_WRITERS: dict[str, Callable[[int, Ask, list[str]], dict[str, Any]]] = {
    "dynamo": _dynamo,
    "inference-perf": _inference_perf,
}
FORMS = tuple(_WRITERS)
