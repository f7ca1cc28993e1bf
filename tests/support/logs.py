# SPDX-License-Identifier: Apache-2.0
"""What s3ec itself logged."""

from __future__ import annotations

import logging

import pytest


def ours(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Without what other packages say, of a slow machine for one."""
    return [record for record in caplog.records if record.name.partition(".")[0] == "s3ec"]
