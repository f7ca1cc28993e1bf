# SPDX-License-Identifier: Apache-2.0
"""Encoder-cache managers for vLLM: they choose which embedding the device evicts.

They work with and without the connector. Their names are ``s3ec.LRUEncoderCacheManager`` and
``s3ec.TieredEncoderCacheManager``; only ``encoder_cache`` imports vLLM.
"""

from __future__ import annotations
