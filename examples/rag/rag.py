# SPDX-License-Identifier: Apache-2.0
"""Answer questions about PDF files, with references, from embeddings that a bucket holds.

Copy this file into your product. It has two parts: `PageIndex` finds the pages for a question by
their text, and `Assistant` asks a vLLM server about these pages. The request names the stored
embedding of each page and carries no picture. Where the bucket lacks a page, the request carries
the pictures instead.

It needs s3ec, openai, pyarrow, pypdfium2 and pillow, and neither vLLM nor a GPU.
"""

from __future__ import annotations

import base64
import logging
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pypdfium2

from s3ec.client import Pictures
from s3ec.corpus.reading import DPI, render_page
from s3ec.errors import S3ECError

log = logging.getLogger(__name__)


class Page(NamedTuple):
    """A page of a document. Documents are named as in the catalogue: by path below the folder."""

    document: str
    number: int

    def __str__(self) -> str:
        return f"{self.document}, page {self.number}"


class PageIndex:
    """Full-text search over the pages of all PDF files below a folder: SQLite FTS5 with BM25.

    It is built in memory and reads text only. It does not find pages without text, such as scans:
    index the words of an OCR for these, or use another retriever.
    """

    _LEAST = 0.1  # of the best score; pages below it share only words such as "the"

    def __init__(self, folder: Path) -> None:
        """Read the text of all pages. A file that cannot be read is left out, with a warning."""
        self._database = sqlite3.connect(":memory:")
        self._database.execute(
            "CREATE VIRTUAL TABLE pages USING fts5"
            "(document UNINDEXED, number UNINDEXED, words, tokenize = 'porter')"
        )
        for path in sorted(folder.rglob("*")):
            if path.suffix.lower() != ".pdf":
                continue
            document = path.relative_to(folder).as_posix()
            try:
                with pypdfium2.PdfDocument(path) as pdf:
                    words = [page.get_textpage().get_text_bounded() for page in pdf]
            except pypdfium2.PdfiumError as exc:
                log.warning("%s is left out: %s", document, exc)
                continue
            rows = [(document, number, text) for number, text in enumerate(words, start=1)]
            self._database.executemany("INSERT INTO pages VALUES (?, ?, ?)", rows)

    def search(self, question: str, limit: int) -> list[Page]:
        """Find the pages that fit a question best, the best first; empty if no word occurs."""
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", question))
        if not words:
            return []
        found = self._database.execute(
            "SELECT document, number, -rank FROM pages WHERE words MATCH ? ORDER BY rank LIMIT ?",
            (words, limit),
        ).fetchall()
        return [Page(*page) for *page, score in found if score >= self._LEAST * found[0][-1]]


class Answer(NamedTuple):
    """An answer and its references: the text names the pages as [1], [2] and so on."""

    text: str
    pages: Sequence[Page]


class Assistant:
    """Answers questions about the PDF files of a folder."""

    def __init__(
        self, folder: Path, catalog: Any, client: openai.OpenAI, model: str, *, dpi: int = DPI
    ) -> None:
        """Index the folder.

        Args:
            folder: The PDF files that `s3ec precompute` was given.
            catalog: `corpus.catalog()`, or the path of a file from `s3ec catalog export`.
            client: Of a vLLM server that has S3ECConnector.
            model: The server's name for the model.
            dpi: The `--dpi` of `s3ec precompute`.
        """
        self.index = PageIndex(folder)
        self._folder, self._client, self._model, self._dpi = folder, client, model, dpi
        # `chat` calls `fetch` if the server cannot load an embedding.
        self.pictures = Pictures(catalog, fetch=lambda row: self._png(row.document, row.page))

    def answer(self, question: str, *, pages: int = 2, max_tokens: int = 300) -> Answer:
        """Answer from the pages that fit best.

        Raises:
            openai.OpenAIError: The server did not answer.
            S3ECError: A picture is needed, and the PDF file cannot be read.
        """
        found = self.index.search(question, pages)
        if not found:
            return Answer("No page has a word of this question.", [])
        content: list[dict[str, Any]] = []
        for place, page in enumerate(found, start=1):
            content += [{"type": "text", "text": f"[{place}] {page}:"}, *self._parts(page)]
        task = "Answer from these pages. Give the number of each page that you use, such as [1]."
        content.append({"type": "text", "text": f"{task}\n{question}"})
        reply = self.pictures.chat(
            self._client,
            model=self._model,
            messages=[{"role": "user", "content": content}],
            max_tokens=max_tokens,
            temperature=0,
        )
        return Answer(reply.choices[0].message.content or "", found)

    def _parts(self, page: Page) -> list[dict[str, Any]]:
        """Return the page by name, or as a picture if it is not in the catalogue."""
        try:
            return self.pictures.parts(page.document, page.number)
        except S3ECError as exc:  # not precomputed yet; or the bucket does not answer
            log.warning("the picture of %s is sent: %s", page, exc)
            return [self.picture(page)]

    def picture(self, page: Page) -> dict[str, Any]:
        """Return the page as a picture."""
        png = base64.b64encode(self._png(page.document, page.number)).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}}

    def _png(self, document: str, number: int) -> bytes:
        return render_page(self._folder / document, number, dpi=self._dpi)
