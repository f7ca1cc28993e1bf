# SPDX-License-Identifier: Apache-2.0
"""Encoder-cache connector for vLLM on object storage.

``s3ec.Corpus`` reads, deletes and checks the embeddings in a bucket. The two managers are for
vLLM's ``--ec-manager-config``. Importing the package imports nothing else, because torch and vLLM
load it in every process. Each public name is imported at its first use.
"""

from __future__ import annotations

__all__ = ["Corpus", "LRUEncoderCacheManager", "TieredEncoderCacheManager", "__version__"]
__version__ = "0.2.0"

TYPE_CHECKING = False  # mypy knows the name; `typing` itself would take 10 ms to import
if TYPE_CHECKING:
    from s3ec.corpus import Corpus
    from s3ec.managers.encoder_cache import LRUEncoderCacheManager, TieredEncoderCacheManager
else:
    _FROM = {
        "Corpus": "s3ec.corpus",
        "LRUEncoderCacheManager": "s3ec.managers.encoder_cache",
        "TieredEncoderCacheManager": "s3ec.managers.encoder_cache",
    }

    def __getattr__(name: str) -> object:
        if name in _FROM:
            import importlib

            return getattr(importlib.import_module(_FROM[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
