# SPDX-License-Identifier: Apache-2.0
"""A corpus, the embeddings in one bucket, and the work that is done on one.

``s3ec.Corpus`` is the public class. It needs neither vLLM nor torch.
"""

from __future__ import annotations

from s3ec.corpus.bucket import ATTEMPTS
from s3ec.corpus.corpus import Corpus
from s3ec.corpus.entries import CorpusEntry, Embedding, is_hash_prefix, read_header, scan

__all__ = [
    "ATTEMPTS",
    "Corpus",
    "CorpusEntry",
    "Embedding",
    "is_hash_prefix",
    "read_header",
    "scan",
]
