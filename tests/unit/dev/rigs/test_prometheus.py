# SPDX-License-Identifier: Apache-2.0
"""Where Prometheus is looked for; tests/e2e/test_observability.py runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.dev.rigs import prometheus
from s3ec.errors import ConfigError


def test_tool_on_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "promtool"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert prometheus.find_tool("promtool") == own


def test_tool_that_is_nowhere_is_named_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"no-such-tool is not on .* `make prometheus`"):
        prometheus.find_tool("no-such-tool")
