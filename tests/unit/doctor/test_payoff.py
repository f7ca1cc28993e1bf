# SPDX-License-Identifier: Apache-2.0
"""What it comes to: the store's times, the region, and models that do not pay."""

from __future__ import annotations

import math
from typing import Any

import pytest

from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.doctor import bucket, payoff
from s3ec.doctor.advise import preset_of
from s3ec.doctor.check import CheckContext, Verdict
from s3ec.payoff import GPUS
from tests.unit.doctor.conftest import MakePatient, ReplyHeaders, says

# As describe_pages gives it, of a model like Pixtral-12B: 30 MB for little work.
PIXTRAL = {
    "pages": 0,
    "rows": 2944,
    "patches": 8600,
    "span": 2944,
    "processor_ms": 16.0,
    "width": 5120,
    "itemsize": 2,
    "gpus": 1,
    "gpu": "NVIDIA H100 80GB HBM3",
    "encoder": {"layers": 24, "width": 512, "inner": 2048, "gated": True},
}


class Child:
    """In place of the process that imports vLLM."""

    def __init__(self, pages: dict[str, Any] | None) -> None:
        self._pages = pages

    def stage(self, name: str) -> dict[str, Any] | None:
        return self._pages if name == "pages" else None

    def close(self) -> None:
        pass


def with_pages(patient: CheckContext, **changes: Any) -> CheckContext:
    patient.child = Child({**PIXTRAL, **changes})  # type: ignore[assignment]
    patient.vllm_args = ["--model", "m"]
    return patient


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """No store is far, however slow this machine is."""
    monkeypatch.setattr(payoff, "_FAR_MS", math.inf)


@pytest.mark.usefixtures("near")
def test_latency_is_measured_when_asked_for(make_patient: MakePatient) -> None:
    patient = make_patient()
    says(payoff.latency(patient), Verdict.SKIP)
    patient.with_latency = True
    says(payoff.latency(patient), Verdict.OK, found="2.75 MB: one read p50")
    assert patient.latency is not None
    assert patient.latency.left is None


@pytest.mark.usefixtures("near")
def test_latency_is_measured_at_the_models_size(make_patient: MakePatient) -> None:
    patient = with_pages(make_patient(), rows=100, width=50)
    patient.with_latency = True
    says(payoff.latency(patient), Verdict.OK, found="0.01 MB")


def test_a_store_that_is_far_is_a_warning(
    make_patient: MakePatient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payoff, "_FAR_MS", 0.0)
    patient = make_patient()
    patient.with_latency = True
    says(payoff.latency(patient), Verdict.WARN, found="one read p50", mend="another region")


def test_a_model_that_cannot_pay_is_a_warning(make_patient: MakePatient) -> None:
    patient = with_pages(make_patient(endpoint_url="https://s3.eu-west-1.amazonaws.com"))
    says(payoff.payoff(patient), Verdict.WARN, found="money no", mend="s3ec advise")


def test_a_model_that_pays_is_well(make_patient: MakePatient) -> None:
    encoder = {"layers": 45, "width": 3200, "inner": 12800, "gated": False}
    patient = with_pages(make_patient(), rows=256, encoder=encoder)
    says(payoff.payoff(patient), Verdict.OK, found="money yes")


@pytest.mark.parametrize("changes", [{"gpu": None}, {"gpu": "Abacus 9"}, {"encoder": None}])
def test_what_is_not_known_is_left_to_advise(
    make_patient: MakePatient, changes: dict[str, Any]
) -> None:
    outcome = payoff.payoff(with_pages(make_patient(), **changes))
    says(outcome, Verdict.OK, found="`s3ec advise` says whether that pays")


def test_without_a_model_nothing_is_said(make_patient: MakePatient) -> None:
    says(payoff.payoff(make_patient()), Verdict.SKIP)


@pytest.mark.parametrize(
    ("here", "there", "verdict"),
    [
        ("eu-west-1", "us-east-1", Verdict.WARN),
        ("us-east-1", "us-east-1", Verdict.OK),
        ("", "us-east-1", Verdict.OK),
        ("eu-west-1", None, Verdict.OK),
    ],
)
def test_a_bucket_of_another_region_is_a_warning(
    make_patient: MakePatient,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    here: str,
    there: str | None,
    verdict: Verdict,
) -> None:
    patient = make_patient()
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    monkeypatch.setenv("AWS_REGION", here)
    proxy.add(Rule(ReplyHeaders({"x-amz-bucket-region": there})))
    outcome = bucket.endpoint(patient)
    says(outcome, verdict, found="this machine in eu-west-1" if verdict == Verdict.WARN else "")


def test_devices_by_their_names() -> None:
    assert preset_of("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert preset_of("NVIDIA A100-SXM4-80GB") is GPUS["a100"]
    assert preset_of("NVIDIA L4") is GPUS["l4"]
    assert preset_of("NVIDIA L40S") is GPUS["l40s"]
    assert preset_of("NVIDIA H200") is GPUS["h200"]
    assert preset_of("NVIDIA B200") is GPUS["b200"]
    assert preset_of("AMD Instinct MI300X") is GPUS["mi300x"]
    assert preset_of("NVIDIA L40") is None
