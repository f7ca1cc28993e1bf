# SPDX-License-Identifier: Apache-2.0
"""Ask questions about PDF files, and show the references and what was not sent.

    python examples/rag/run.py --tiny
    python examples/rag/run.py FOLDER "QUESTION" "QUESTION"

The first line does everything on this machine with a tiny model. The second one uses your bucket
(S3EC_BUCKET and the like), your server (OPENAI_BASE_URL, OPENAI_API_KEY) and your model.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType

import httpx
import openai
from rag import Assistant

from s3ec import Corpus
from s3ec.errors import ConfigError, S3ECError

_METRICS_S = 5.0  # vLLM updates its metrics a moment after the answer


class Traffic:
    """Counts what the client sends to the server, repeated requests included."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.pictures = 0

    def count(self, request: httpx.Request) -> None:
        """Count one request."""
        body = request.read()
        self.nbytes += len(body)
        self.pictures += body.count(b"data:image/")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="the folder that was precomputed")
    parser.add_argument("questions", nargs="*", metavar="question")
    parser.add_argument("--tiny", action="store_true", help="show it on this machine alone")
    parser.add_argument("--model", help="the server's name for the model; unset: its first one")
    parser.add_argument("--pages", type=int, default=2, help="pages of a request, at most")
    parser.add_argument("--max-tokens", type=int, default=300, help="of an answer")
    options = parser.parse_args(arguments)
    if not options.tiny and not options.questions:
        parser.error("give a folder and a question, or --tiny")
    if not options.tiny and not options.folder.is_dir():
        parser.error(f"no folder {options.folder}")
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ExitStack() as stack:
            folder, questions = options.folder, options.questions
            if options.tiny:
                tiny = tiny_parts()
                folder, questions = stack.enter_context(tiny.everything()), tiny.QUESTIONS
                options.max_tokens = 12
            ask(folder, questions, options)
    except (openai.OpenAIError, S3ECError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def tiny_parts() -> ModuleType:
    """Import what ``--tiny`` needs.

    Raises:
        ConfigError: s3ec is installed from its wheel, which lacks the tiny model and the servers.
    """
    try:
        import s3ec.dev  # noqa: F401
    except ModuleNotFoundError as exc:
        raise ConfigError(
            "`--tiny` needs parts of s3ec that its wheel lacks; in a checkout run "
            "pip install -e '.[corpus,s3server]'"
        ) from exc
    import tiny

    return tiny


def ask(folder: Path, questions: Sequence[str], options: argparse.Namespace) -> None:
    """Answer the questions, and print what each of them sent.

    Raises:
        openai.OpenAIError: The server did not answer.
        S3ECError: A setting is wrong, or a PDF file cannot be read.
    """
    sent, not_sent, by_name = 0, 0, set()
    traffic = Traffic()
    http = openai.DefaultHttpxClient(event_hooks={"request": [traffic.count]})
    with Corpus.open() as corpus, openai.OpenAI(http_client=http) as client:
        model = options.model or client.models.list().data[0].id
        assistant = Assistant(folder, corpus.catalog(), client, model)
        before = counts(client)
        for question in questions:
            traffic.nbytes = traffic.pictures = 0
            answer = assistant.answer(question, pages=options.pages, max_tokens=options.max_tokens)
            text = "".join(letter if letter.isprintable() else " " for letter in answer.text)
            print(f"\nQ: {question}\nA: {text.strip()}")
            for place, page in enumerate(answer.pages, start=1):
                print(f"   [{place}] {page}")
            sent += traffic.nbytes
            line = f"   sent: {traffic.nbytes:,} bytes (pictures: {traffic.pictures})"
            if answer.pages and not traffic.pictures:
                saved = sum(len(json.dumps(assistant.picture(page))) for page in answer.pages)
                not_sent += saved
                by_name.update(answer.pages)
                line += f"; not sent: {saved:,} bytes (pictures: {len(answer.pages)})"
            print(line)
        assistant.pictures.close()
        print(f"\nsent: {sent:,} bytes; not sent: {not_sent:,} bytes")
        if before is not None:
            hits, misses = moved(client, before, len(by_name))
            print(f"server: {hits} embeddings from s3ec, {misses} pictures encoded")


def counts(client: openai.OpenAI) -> tuple[int, int] | None:
    """Return s3ec's hits and misses so far by vLLM's /metrics, or None if they are not readable."""
    url = str(client.base_url.join("/metrics"))
    found = {"vllm:s3ec_hits_total": 0.0, "vllm:s3ec_misses_total": 0.0}
    with suppress(httpx.HTTPError, ValueError):
        for line in httpx.get(url, timeout=10).raise_for_status().text.splitlines():
            sample, _, value = line.rpartition(" ")
            if (name := sample.partition("{")[0]) in found:
                found[name] += float(value)
        hits, misses = found.values()
        return int(hits), int(misses)
    return None


def moved(client: openai.OpenAI, before: tuple[int, int], expected: int) -> tuple[int, int]:
    """Return how far hits and misses have risen; wait a little for the hits that are expected."""
    deadline = time.monotonic() + _METRICS_S
    while True:
        now = counts(client) or before
        hits, misses = now[0] - before[0], now[1] - before[1]
        if hits >= expected or time.monotonic() >= deadline:
            return hits, misses
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
