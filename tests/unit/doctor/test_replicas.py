# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of replicas, and what ``s3ec ns`` says of lag and of crossing regions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import Answer
from s3ec.dev.rigs.valkey import Valkey
from s3ec.doctor import replicas
from s3ec.doctor.check import CheckContext, Outcome, Verdict
from s3ec.doctor.run import examine
from s3ec.identity import Layout, make_key
from s3ec.namespaces import NamespaceInfo
from s3ec.settings import Settings
from s3ec.store.open import KEPT_PROBE
from s3ec.testing.memory_store import MemoryStore
from s3ec.testing.server import MotoServer
from tests.unit.doctor.conftest import BUCKET, MakePatient, says

LAYOUT = Layout("gemma-0123456789abcdef")
DENIED = Answer(403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")


def name_of(number: int) -> str:
    key = make_key(f"{number:064x}")
    assert key is not None
    return LAYOUT.object(key)


class Two:
    """A home with five entries, and a bucket near."""

    def __init__(self, server: MotoServer, near: str, home: str, make: MakePatient) -> None:
        self.near, self._home, self._make = near, home, make
        self._client = server.client()
        self.proxy_url = server.endpoint_url
        for number in range(5):
            self.put(BUCKET, number)

    def put(self, bucket: str, number: int, body: bytes = b"") -> None:
        key = f"{self._home}/{name_of(number)}"
        self._client.put_object(Bucket=bucket, Key=key, Body=body or b"%d" % number)

    def put_probe(self) -> None:
        key = f"{self._home}/{KEPT_PROBE}"
        self._client.put_object(Bucket=self.near, Key=key, Body=b"")

    def patient(self, **other: Any) -> CheckContext:
        place = {"bucket": self.near, "endpoint_url": self.proxy_url, **other}
        return self._make(replicas=[{k: v for k, v in place.items() if v is not None}])

    def check(self, **other: Any) -> Outcome:
        patient = self.patient(**other)
        return replicas.replica(patient, patient.settings.replicas[0])

    def names_near(self) -> list[str]:
        page = self._client.list_objects_v2(Bucket=self.near)
        return [entry["Key"] for entry in page.get("Contents", [])]


@pytest.fixture
def two(
    moto_server: MotoServer, make_patient: MakePatient, tmp_path: Any, proxy: FaultProxy
) -> Iterator[Two]:
    near = moto_server.create_bucket("doctor-near")
    made = Two(moto_server, near, tmp_path.name, make_patient)
    made.proxy_url = proxy.url
    yield made
    moto_server.delete_bucket(near)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour after the entries were stored."""
    now_s = time.time() + 3600
    monkeypatch.setattr("s3ec.doctor.replicas.time.time", lambda: now_s)


def test_a_whole_replica_is_read_and_compared(two: Two) -> None:
    for number in range(5):
        two.put(two.near, number)
    says(two.check(), Verdict.OK, found="can be read; it has 5 of 5 entries")


@pytest.mark.usefixtures("later")
def test_what_it_lacks_is_said_and_how_to_mend_it(two: Two) -> None:
    two.put(two.near, 0)
    says(two.check(), Verdict.WARN, found="1 of 5 entries", mend="set `fill`, or look at the")
    # What nobody has read through it is not there.
    says(two.check(fill=True), Verdict.OK, found="can be read and written; it has 1 of 5")
    assert not [name for name in two.names_near() if KEPT_PROBE in name]


def test_the_probe_of_those_whose_home_it_is_stays(two: Two) -> None:
    """One of them may be between its two writes of it."""
    two.put_probe()
    assert two.check(fill=True).verdict == Verdict.OK
    assert [name for name in two.names_near() if KEPT_PROBE in name]


def test_an_entry_of_the_last_minutes_is_lag_and_no_fault(two: Two) -> None:
    says(two.check(), Verdict.OK, found="0 of 5")


def test_a_copy_that_is_not_homes_is_named(two: Two) -> None:
    two.put(two.near, 3, b"other")
    says(two.check(), Verdict.WARN, found=f"its copy of {name_of(3)} is not home's", mend="verify")


def test_a_replica_that_refuses_or_does_not_answer_stops_no_fleet(
    two: Two, proxy: FaultProxy
) -> None:
    says(two.check(bucket="doctor-none"), Verdict.WARN, found="all is read at home")
    denied = proxy.add(Rule(DENIED, method="PUT", target="doctor-near"))
    says(two.check(fill=True), Verdict.WARN, found="it takes no copies", mend="s3:PutObject")
    assert denied.fired
    found = two.check(endpoint_url="http://127.0.0.1:1")
    says(found, Verdict.WARN, found="all is read at home", mend="correct `endpoint_url`")


def test_without_home_a_replica_is_tried_all_the_same(two: Two, proxy: FaultProxy) -> None:
    proxy.add(Rule(DENIED, target=f"/{BUCKET}[?/]"))
    says(two.check(), Verdict.WARN, found="can be read; what it lacks is not known")


def test_a_redis_is_a_replica_like_others(two: Two) -> None:
    with Valkey() as server:
        found = two.check(bucket=None, endpoint_url=None, url=server.url, fill=True)
        says(found, Verdict.OK, found="can be read and written; it has 0 of 5")
    found = two.check(bucket=None, endpoint_url=None, url="redis://127.0.0.1:1")
    says(found, Verdict.WARN, found="all is read at home", mend="password")


def test_each_replica_is_a_check_of_its_own(two: Two) -> None:
    patient = two.patient()
    checks = {check.name: check for check in examine(patient.loaded, {}, with_vllm=False)}
    assert checks["replica:doctor-near"].group == "Replicas"
    names = list(checks)
    assert names.index("listing") + 1 == names.index("replica:doctor-near")


# -- s3ec ns -----------------------------------------------------------------------------------


async def test_of_a_large_namespace_a_page_is_looked_at_and_the_month_is_estimated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home, near, day_s, now_s = MemoryStore(), MemoryStore(), 86400.0, time.time()
    for number in range(1500):
        name = name_of(number * 2**244)
        home.bucket.objects[name] = bytes(10)
        home.bucket.modified_s[name] = now_s - (number % 60) * day_s
        near.bucket.objects[name] = bytes(10)
    listed = await replicas.listed_entries(home, LAYOUT)
    assert len(listed) == 1000
    sample = replicas.newest(listed)
    assert len(sample) == replicas.SAMPLED
    assert {round((now_s - info.modified_s) / day_s) for info in sample} <= {0, 1, 2}
    monkeypatch.setattr(replicas, "open_replica", lambda *_, **__: near)
    settings = Settings.model_validate({
        "bucket": "home",
        "region": "us-east-1",
        "replicas": [{"bucket": "near", "region": "sa-east-1"}],
    })  # fmt: skip
    namespaces = [NamespaceInfo(LAYOUT.namespace, indexed=10**8)]
    [row] = await replicas.replica_rows(home, settings, namespaces)
    assert (row["sampled_count"], row["missing_count"]) == (replicas.SAMPLED, 0)
    assert row["problem"] is None
    # About half of 10^8 entries of 10 bytes, at 2 cents for a gigabyte.
    assert row["month_bytes"] == pytest.approx(5e8, rel=0.1)
    assert row["month_dollars"] == pytest.approx(0.01, rel=0.1)


def test_the_price_of_a_crossing_is_that_of_the_region_it_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)

    def price(home: dict[str, str], near: dict[str, str]) -> float | None:
        given = {"bucket": "home", **home, "replicas": [{"bucket": "near", **near}]}
        settings = Settings.model_validate(given)
        return replicas.crossing_price(settings, settings.replicas[0])

    assert price({"region": "us-east-1"}, {"region": "eu-west-1"}) == 0.02
    assert price({"region": "us-east-1"}, {"region": "us-east-2"}) == 0.01
    assert price({"region": "sa-east-1"}, {"region": "us-east-1"}) == 0.138
    assert price({"region": "eu-west-1"}, {"region": "eu-west-1"}) == 0.0
    assert price({"region": "us-east-1"}, {}) is None
    assert price({"region": "mars-1"}, {"region": "us-east-1"}) is None
    server = {"endpoint_url": "http://127.0.0.1:9000", "region": "us-east-1"}
    assert price(server, {"region": "eu-west-1"}) is None
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert price({"region": "us-east-1"}, {}) == 0.02
