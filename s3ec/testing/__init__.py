# SPDX-License-Identifier: Apache-2.0
"""Test helpers that s3ec ships: stores, their contract suite, and local S3 servers.

Importing this package imports none of them.
"""

from __future__ import annotations
