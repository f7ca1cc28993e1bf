# SPDX-License-Identifier: Apache-2.0
"""``bench fetch`` runs from end to end; its figures are not looked at."""

from __future__ import annotations

import pytest

from s3ec.dev.bench import registry
from s3ec.errors import ConfigError
from s3ec.testing.server import find_weed
from tests.unit.dev.bench.benches import quick_rows


def needs_server() -> None:
    try:
        find_weed()
    except ConfigError as exc:
        pytest.skip(str(exc))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "args"), [("fetch", ()), ("fetch80", ("fetch", "--latency-ms", "80"))]
)
def test_fetch_is_measured_beside_raw_loops(name: str, args: tuple[str, ...]) -> None:
    needs_server()
    rows = quick_rows(name, *args)
    assert all(row["value"] > 0 for row in rows.values())
    speed = rows[f"{name}.gb_per_s"]["detail"]
    assert {"raw aioboto3", "s3ec aioboto3"} <= speed["cases"].keys()
    ratio = rows[f"{name}.ratio_to_raw"]["detail"]
    assert {case for case in ratio["cases"] if case.startswith("s3ec ")} == {
        case for case in speed["cases"] if case.startswith("s3ec ")
    }
    assert all(value >= 0 for value in ratio["floor_cpu_ms"].values())
    assert ratio["objects"] % ratio["in_flight"] == 0


def test_any_latency_has_rows_of_its_own() -> None:
    assert [spec.name for spec in registry.load("fetch5").rows] == [
        "fetch5.ratio_to_raw",
        "fetch5.gb_per_s",
    ]
    for name in ("fetch0", "fetch-1", "fetch80x"):
        with pytest.raises(KeyError):
            registry.load(name)
