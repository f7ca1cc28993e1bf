# SPDX-License-Identifier: Apache-2.0
"""For clients of a vLLM server whose corpus is precomputed: ask about documents by their ids.

``Pictures`` and ``AsyncPictures`` need neither vLLM nor torch nor the openai package.
"""

from __future__ import annotations

from s3ec.client.pictures import AsyncPictures, Pictures

__all__ = ["AsyncPictures", "Pictures"]
