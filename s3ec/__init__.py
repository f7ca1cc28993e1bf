# SPDX-License-Identifier: Apache-2.0
"""Encoder-cache connector for vLLM on object storage.

``s3ec.Corpus`` reads, deletes and checks the embeddings in a bucket. Importing the package imports
nothing else: torch and vLLM load it in every process. ``Corpus`` is imported with its first use.
"""

from __future__ import annotations

__all__ = ["Corpus", "__version__"]
__version__ = "0.1.0"

TYPE_CHECKING = False  # mypy knows the name; `typing` itself would take 10 ms to import
if TYPE_CHECKING:
    from s3ec.corpus import Corpus
else:

    def __getattr__(name: str) -> object:
        if name == "Corpus":
            import importlib

            return importlib.import_module("s3ec.corpus").Corpus
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
