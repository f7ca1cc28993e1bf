# SPDX-License-Identifier: Apache-2.0
"""Every registered benchmark can be listed and shown on a machine that could not run it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from s3ec.dev.bench import machine, registry
from s3ec.dev.bench.run import ALL_TIME_S, child_env

# Those that are about more than their name says.
ALSO = {"index": ("bloom.", "compact."), "precompute": ("corpus.",)}


@pytest.mark.parametrize("name", registry.ENTRIES)
def test_rows_are_named_after_their_benchmark(name: str) -> None:
    names = [spec.name for spec in registry.load(name).rows]
    assert names
    assert all(one.startswith((f"{name}.", *ALSO.get(name, ()))) for one in names)


def test_no_two_rows_of_all_benchmarks_share_a_name() -> None:
    names = [spec.name for name in registry.ENTRIES for spec in registry.load(name).rows]
    assert len(set(names)) == len(names)


def test_all_of_them_fit_into_their_time() -> None:
    assert sum(registry.ENTRIES[name].typical_s for name in registry.together()) < ALL_TIME_S


def test_looking_at_benchmarks_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from s3ec.dev.bench import registry\n"
        "[registry.load(name) for name in registry.ENTRIES]\n"
        "import s3ec.dev.bench.report, s3ec.dev.bench.run, s3ec.dev.bench.command\n"
        "print(sorted({'torch', 'vllm', 'matplotlib', 'boto3', 'rich.table'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_env(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        registry.load("no-such-benchmark")


def test_machine_says_what_explains_figures_and_not_whose_it_is() -> None:
    about = machine.describe()
    assert about["cpus"] >= 1
    assert about["memory_bytes"] > 2**20
    assert {"cpu_model", "kernel", "python", "load_1min"} < about.keys()
    assert "s3ec" in about["versions"]
    text = repr(about)
    assert platform.node() not in text
    assert "/" not in text


def test_any_latency_has_rows_of_its_own() -> None:
    assert [spec.name for spec in registry.load("fetch5").rows] == [
        "fetch5.ratio_to_raw",
        "fetch5.gb_per_s",
    ]
    for name in ("fetch0", "fetch-1", "fetch80x"):
        with pytest.raises(KeyError):
            registry.load(name)
