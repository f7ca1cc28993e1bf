# SPDX-License-Identifier: Apache-2.0
"""The whole job on this machine: encode into a real bucket, answer from it, compare.

``python -m s3ec.dev.demo`` runs it; ``make demo`` calls that.
"""

from __future__ import annotations
