# SPDX-License-Identifier: Apache-2.0
"""Encoder-cache connector for vLLM on object storage.

``s3ec.Corpus`` reads, deletes and checks the embeddings in a bucket. Importing the package imports
nothing else: torch and vLLM load it in every process. ``Corpus`` is imported with its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Corpus", "__version__"]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from s3ec.corpus import Corpus
else:

    def __getattr__(name: str) -> Any:
        if name == "Corpus":
            return importlib.import_module("s3ec.corpus").Corpus
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
