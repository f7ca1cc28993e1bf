# SPDX-License-Identifier: Apache-2.0
"""All checks: in their order, without a time for all of them, and what needs a failed one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3ec.config import LoadedSettings, load_settings
from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import Delay
from s3ec.doctor.check import Verdict
from s3ec.doctor.run import examine, steps_for
from s3ec.testing.server import MotoServer


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[LoadedSettings]:
    """Settings of a server that takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        folder = str(tmp_path / "cache")
        yield load_settings({"bucket": "corpus", "endpoint_url": url, "cache_dir": folder})


def test_a_server_that_never_answers_fails_and_what_needs_it_is_skipped_without_a_remedy(
    silent: LoadedSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    found = {c.name: c.outcome for c in examine(silent, {}, with_vllm=False, timeout_s=0.3)}
    assert list(found) == [step.name for step in steps_for(silent.settings)]
    assert found["endpoint"].verdict is Verdict.FAIL
    assert "timed out" in found["endpoint"].found
    assert found["bucket"].found == "needs endpoint"
    assert found["cache_folder"].verdict is not Verdict.FAIL  # node checks need no server
    for outcome in found.values():
        assert outcome.verdict is not Verdict.SKIP or outcome.mend == ""


def test_a_bucket_whose_answers_come_late_fails_no_check(
    moto_server: MotoServer,
    proxy: FaultProxy,
    doctor_bucket: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a busy machine. All together take longer than one request may."""
    for name, value in moto_server.env().items():
        monkeypatch.setenv(name, value)
    proxy.add(Rule(Delay(0.2)))
    loaded = load_settings({
        "bucket": doctor_bucket,
        "prefix": tmp_path.name,
        "endpoint_url": proxy.url,
        "cache_dir": str(tmp_path / "cache"),
        "cache_bytes": "1MiB",
        "min_free_bytes": 0,
        # An engine would give up.
        "connect_timeout_s": 0.1,
        "read_timeout_s": 0.1,
    })  # fmt: skip
    limit_s = 4.0
    checks = list(examine(loaded, {}, with_vllm=False, timeout_s=limit_s))
    failed = [check for check in checks if check.outcome.verdict is Verdict.FAIL]
    assert failed == []
    assert len(proxy.requests) * 0.2 > limit_s
