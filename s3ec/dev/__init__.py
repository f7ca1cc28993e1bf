# SPDX-License-Identifier: Apache-2.0
"""What developers of s3ec run: benchmarks, the demo, and rigs of tests. It is not in the wheel."""

from __future__ import annotations
