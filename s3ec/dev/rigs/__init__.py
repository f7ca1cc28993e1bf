# SPDX-License-Identifier: Apache-2.0
"""What tests, benchmarks and the demo start: engines, tiny models, pictures, proxies."""

from __future__ import annotations
