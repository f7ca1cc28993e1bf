# SPDX-License-Identifier: Apache-2.0
"""Encoder-cache connector for vLLM on object storage.

Importing the package imports nothing else: torch and vLLM load it in every process.
"""

from __future__ import annotations

__version__ = "0.1.0"
