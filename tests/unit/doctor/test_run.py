# SPDX-License-Identifier: Apache-2.0
"""One deadline for all checks: it begins with the command, and nobody waits beyond it."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from s3ec.cli import main
from s3ec.config import LoadedSettings, load_settings
from s3ec.doctor.check import Check, Verdict
from s3ec.doctor.run import LIMIT_S, STEPS, examine

NO_TIME = "not checked: no time"
LONG = 100.0
SHORT = 0.01


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[LoadedSettings]:
    """Settings of a server that takes connections and never answers, and is waited for."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        patience = {"connect_timeout_s": 60, "read_timeout_s": 600}
        folder = str(tmp_path / "cache")
        yield load_settings(
            {"bucket": "corpus", "endpoint_url": url, "cache_dir": folder, **patience}
        )


def by_name(checks: Iterator[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_command_that_took_all_its_time_to_start_checks_nothing_and_says_so(
    silent: LoadedSettings,
) -> None:
    started_s = time.monotonic() - LIMIT_S
    found = by_name(examine(silent, {}, with_vllm=False, started_s=started_s))
    assert list(found) == [step.name for step in STEPS if step.where != "url"]
    for name in ("credentials", "endpoint"):
        outcome = found[name].outcome
        assert (outcome.verdict, outcome.found) == (Verdict.FAIL, NO_TIME)
        assert outcome.mend.endswith("`--timeout 10` waits longer")
    assert found["bucket"].outcome.found == "needs credentials and endpoint"
    assert all(
        check.outcome.found == NO_TIME or check.outcome.found.startswith("needs ")
        for check in found.values()
    )


def test_the_time_of_a_caller_begins_with_the_call_and_node_checks_need_no_server(
    silent: LoadedSettings,
) -> None:
    found = by_name(examine(silent, {}, with_vllm=False, timeout_s=SHORT))
    assert found["endpoint"].outcome.found in (NO_TIME, f"no answer within {SHORT:g} s")
    checks = examine(silent, {}, with_vllm=False, timeout_s=LONG)
    assert next(checks).outcome.verdict is Verdict.OK  # a call of its own has all of its time
    checks.close()  # type: ignore[attr-defined]  # and nobody waits for the rest


def test_the_command_counts_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []

    def note(*_: object, started_s: float, **__: object) -> list[Check]:
        told.append(started_s)
        return []

    monkeypatch.setattr("s3ec.doctor.run.examine", note)
    monkeypatch.setattr(sys, "argv", ["s3ec", "doctor", "--no-vllm", "--bucket", "corpus"])
    before_s = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert before_s <= told[0] <= time.monotonic()
