# SPDX-License-Identifier: Apache-2.0
"""Benchmarks run from end to end, quickly; their figures are not looked at, what they are of is.

Most share one of two processes: what takes most of the time is importing vLLM, torch and the SDK.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

from s3ec.dev.bench import load, registry, save
from s3ec.dev.bench.run import child_env
from s3ec.errors import ConfigError
from s3ec.testing.server import find_weed

Rows = dict[str, Any]

_RUN = """
import json, sys, traceback
from s3ec.dev.bench import run
for name, options in json.loads(sys.argv[1]):
    try:
        result = run.run_here(name, quick=True, say=lambda *_: None, **options).to_json()
    except Exception:
        result = traceback.format_exc()
    print("RESULT", json.dumps([name, result]), flush=True)
"""

pytestmark = pytest.mark.slow
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM here")


class Ran:
    """Benchmarks that ran in one process of their own, each whether or not another one failed."""

    def __init__(self, **benches: dict[str, Any]) -> None:
        self._done = subprocess.run(
            [sys.executable, "-c", _RUN, json.dumps(list(benches.items()))],
            env=child_env(),
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        lines = (line.partition("RESULT ")[2] for line in self._done.stdout.splitlines())
        self._results = dict(json.loads(line) for line in lines if line)

    def rows(self, name: str) -> Rows:
        """By their names; they are those that the benchmark declares."""
        result = self._results.get(name, "its process ended")
        assert isinstance(result, dict), f"{result}\n{self._done.stderr}"
        rows = {row["name"]: row for row in result["rows"]}
        assert list(rows) == [spec.name for spec in registry.load(name).rows]
        return rows


def need_server() -> None:
    try:
        find_weed()
    except ConfigError as exc:
        pytest.skip(str(exc))


@pytest.fixture(scope="module")
def of_vllm() -> Ran:
    return Ran(hooks={}, load={}, save={}, index={})


@pytest.fixture(scope="module")
def of_bytes() -> Ran:
    need_server()
    return Ran(fetch={}, fetch80={}, fetch_8kb={}, hydrate={}, verify={})


@needs_vllm
def test_hooks_are_measured_beside_the_example(of_vllm: Ran) -> None:
    rows = of_vllm.rows("hooks")
    unmeasured = {name for name, row in rows.items() if row["value"] is None}
    assert unmeasured <= {"hooks.syscalls_per_call"}
    for hook in ("has_cache_item", "ensure_cache_available"):
        assert rows[f"hooks.{hook}_p50_us"]["value"] > 0
        assert rows[f"hooks.{hook}_ratio_to_example"]["value"] > 0
    assert "no-op" in rows["hooks.ensure_cache_available_ratio_to_example"]["detail"]["denominator"]
    syscalls = rows["hooks.syscalls_per_call"]
    # Not a time: the hooks either make system calls or they don't.
    assert syscalls["ok"] is not False, syscalls["detail"]


@needs_vllm
def test_loads_are_measured_beside_preadv_and_the_example(of_vllm: Ran) -> None:
    rows = of_vllm.rows("load")
    assert all(row["value"] or "no tmpfs" in row["detail"]["why"] for row in rows.values())
    cases = rows["load.us_per_item"]["detail"]["cases"]
    for size in (1, 8):
        for name in ("s3ec", load.PREADV, load.EXAMPLE):
            assert cases[f"{name}, {size} a step, disk"] > 0


@needs_vllm
def test_saves_are_measured_beside_a_clone_and_the_example(of_vllm: Ran) -> None:
    rows = of_vllm.rows("save")
    cases = rows["save.us_per_item"]["detail"]["cases"]
    both = {f"{name}, {size} a step" for name in ("s3ec", save.CLONE) for size in (1, 8)}
    assert cases.keys() == both | {save.EXAMPLE}
    assert all(value > 0 for value in cases.values())
    assert rows["save.ratio_to_example"]["value"] > 0
    assert "50 us" in rows["save.ratio_to_clone"]["detail"]["formula"]


@needs_vllm
def test_index_is_measured_beside_the_example_and_the_server(of_vllm: Ran) -> None:
    need_server()
    rows = of_vllm.rows("index")
    # A quick run has no larger index to compare.
    assert {n for n, row in rows.items() if row["value"] is None} == {"index.growth_1e6_to_max"}
    # Of these chance is no part.
    for name in ("bloom.bytes_per_key", "index.idle_lists_per_refresh", "compact.peak_mib"):
        assert rows[name]["ok"], rows[name]
    assert rows["index.idle_lists_per_refresh"]["detail"]["requests"].keys() == {"LIST"}
    compacted = rows["compact.seconds"]["detail"]
    assert compacted["entries_after"] == compacted["entries"] + 1000 * compacted["deltas"]


@pytest.mark.parametrize("name", ["fetch", "fetch80"])
def test_fetch_is_measured_beside_raw_loops(name: str, of_bytes: Ran) -> None:
    rows = of_bytes.rows(name)
    assert all(row["value"] > 0 for row in rows.values())
    speed = rows[f"{name}.gb_per_s"]["detail"]
    assert {"raw aioboto3", "s3ec aioboto3"} <= speed["cases"].keys()
    ratio = rows[f"{name}.ratio_to_raw"]["detail"]
    assert {case for case in ratio["cases"] if case.startswith("s3ec ")} == {
        case for case in speed["cases"] if case.startswith("s3ec ")
    }
    assert all(value >= 0 for value in ratio["floor_cpu_ms"].values())
    assert ratio["objects"] % ratio["in_flight"] == 0


def test_small_entries_are_measured_beside_the_same_client(of_bytes: Ran) -> None:
    rows = of_bytes.rows("fetch_8kb")
    assert all(row["value"] > 0 for row in rows.values())
    detail = rows["fetch_8kb.cpu_ratio_to_raw"]["detail"]
    assert 8192 < detail["object_bytes"] < 9216
    assert detail["cases"].keys() == {"s3ec obstore", "raw obstore to file"}


def test_hydrating_is_measured_beside_loops_that_write_files(of_bytes: Ran) -> None:
    rows = of_bytes.rows("hydrate")
    assert all(row["value"] > 0 for row in rows.values())
    cases = rows["hydrate.ratio_to_raw"]["detail"]["cases"]
    assert {"s3ec hydrate", "raw obstore", "raw http.client in threads"} <= cases.keys()


def test_a_deep_check_is_measured_beside_loops_that_only_read(of_bytes: Ran) -> None:
    rows = of_bytes.rows("verify")
    assert all(row["value"] > 0 for row in rows.values())
    cases = rows["verify.ratio_to_raw"]["detail"]["cases"]
    assert {"s3ec verify --deep", "raw aioboto3", "raw obstore"} <= cases.keys()


@needs_vllm
@pytest.mark.e2e
def test_questions_over_documents_are_measured_with_and_without_a_bucket() -> None:
    need_server()
    rows = Ran(rag={}).rows("rag")
    detail = rows["rag.legs"]["detail"]
    by_number = {leg["number"]: leg for leg in detail["legs"]}
    # The mount needs rclone and the right to mount.
    assert by_number.keys() | {6} == {1, 3, 4, 5, 6}
    assert (6 in by_number) != bool(detail["not_measured"])
    about = detail["about"]
    for leg in by_number.values():
        assert leg["requests"] == about["requests"]
        assert leg["references"] == about["references"]
        assert sum(leg["hit_ratio"].values()) == pytest.approx(1.0)
        assert min(leg["hit_ratio"].values()) >= 0
    assert by_number[1]["loaded_bytes"] == 0
    assert by_number[1]["encodes"] > 0
    assert by_number[5]["hit_ratio"]["node"] > 0
    assert by_number[5]["encodes"] == 0
    # How many depends on how long the machine makes a fetch take, beside an encode of 100 ms.
    assert by_number[3]["bucket_bytes"] > 0
    for name in ("rag.total_ratio", "rag.ttft_p50_ratio", "rag.ratio_to_example_disk"):
        assert rows[name]["value"] > 0
