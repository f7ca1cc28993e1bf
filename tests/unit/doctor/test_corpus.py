# SPDX-License-Identifier: Apache-2.0
"""Namespaces of a bucket, and why two fleets do not share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3ec.doctor import serving
from s3ec.doctor.check import Verdict
from s3ec.identity import Layout, Namespace
from s3ec.namespaces import differences, read_namespaces, slug_of
from s3ec.testing.memory_store import MemoryStore
from s3ec.testing.server import MotoServer
from tests.unit.doctor.conftest import MakePatient, says

OURS = Namespace.from_descriptor(
    {"model": "acme/vision", "dtype": "bfloat16", "mm_processor_kwargs": {"max_pixels": 1}}
)
Store = Callable[[Namespace], None]


@pytest.fixture
def store(moto_server: MotoServer, doctor_bucket: str, tmp_path: Any) -> Store:
    """Puts the descriptor of a namespace where the patients look."""

    def put(namespace: Namespace) -> None:
        key = f"{tmp_path.name}/{Layout(namespace.name).descriptor}"
        moto_server.client().put_object(Bucket=doctor_bucket, Key=key, Body=namespace.to_json())

    return put


def test_namespace_of_this_model_is_found(make_patient: MakePatient, store: Store) -> None:
    store(OURS)
    patient = make_patient()
    assert OURS.name in serving.corpus(patient).found
    patient.namespace = OURS
    says(serving.corpus(patient), Verdict.OK, found="this model's is there")


def test_namespace_of_the_same_model_with_other_settings_is_explained(
    make_patient: MakePatient, store: Store
) -> None:
    other = {**OURS.descriptor, "dtype": "float16", "mm_processor_kwargs": {"max_pixels": 2}}
    store(Namespace.from_descriptor(other))
    patient = make_patient()
    patient.namespace = OURS
    outcome = serving.corpus(patient)
    assert outcome.verdict == Verdict.WARN
    assert 'dtype: here "bfloat16", there "float16"' in outcome.found
    assert "mm_processor_kwargs.max_pixels: here 1, there 2" in outcome.found


def test_the_nearest_namespace_is_named_with_the_one_field_that_keeps_two_fleets_apart(
    make_patient: MakePatient, store: Store
) -> None:
    """An encoder under another name: the name differs too, and so does all that follows."""
    encoders = {**OURS.descriptor, "media_io_kwargs": {"video": {"backend": "x"}}}
    store(Namespace.from_descriptor({**OURS.descriptor, "dtype": "float16", "revision": "r9"}))
    store(near := Namespace.from_descriptor(encoders))
    store(Namespace.from_descriptor({"model": "zzz/other", "dtype": "float16"}))
    patient = make_patient()
    patient.namespace = OURS
    outcome = serving.corpus(patient)
    assert outcome.verdict == Verdict.WARN
    assert f"{near.name} is, which differs in one field alone" in outcome.found
    assert 'media_io_kwargs.video.backend: here (not there), there "x"' in outcome.found


def test_a_namespace_of_another_path_of_the_same_model_is_found(
    make_patient: MakePatient, store: Store
) -> None:
    store(moved := Namespace.from_descriptor({**OURS.descriptor, "model": "/mnt/models/vision"}))
    patient = make_patient()
    patient.namespace = OURS
    outcome = serving.corpus(patient)
    assert moved.name in outcome.found
    assert "one field alone, model:" in outcome.found
    assert "model_identity" in outcome.mend


def test_neighbours_are_named_where_the_models_own_namespace_is_there(
    make_patient: MakePatient, store: Store
) -> None:
    other = Namespace.from_descriptor({**OURS.descriptor, "dtype": "float16"})
    for namespace in (OURS, other):
        store(namespace)
    patient = make_patient()
    patient.namespace = OURS
    outcome = serving.corpus(patient)
    assert outcome.verdict == Verdict.OK
    assert f'{other.name} differs from it in dtype: here "bfloat16", there "float16"' in (
        outcome.found
    )


@pytest.mark.parametrize(
    ("role", "verdict"), [("ec_both", Verdict.OK), ("ec_consumer", Verdict.WARN)]
)
def test_empty_bucket_matters_to_a_consumer_only(
    make_patient: MakePatient, role: str, verdict: Verdict
) -> None:
    patient = make_patient({"ec_role": role})
    patient.namespace = OURS
    outcome = serving.corpus(patient)
    assert outcome.verdict == verdict, outcome


def test_differences_name_what_only_one_side_has() -> None:
    told = differences({"a": 1, "b": {"c": 2}}, {"a": 1, "d": [1, 2]})
    assert told == ["b.c: here 2, there (not there)", "d: here (not there), there [1,2]"]


def test_long_values_are_cut() -> None:
    (told,) = differences({"a": "x" * 500}, {})
    assert len(told) < 120


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
DESCRIPTORS = st.dictionaries(st.text(max_size=3), JSON, max_size=4)


@given(DESCRIPTORS)
def test_equal_descriptors_have_no_differences(descriptor: dict[str, Any]) -> None:
    assert differences(descriptor, dict(reversed(descriptor.items()))) == []


def test_slug_is_the_readable_part() -> None:
    assert slug_of(OURS.name) == "acme-vision"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"x" * 300_000])
async def test_unusable_descriptor_reads_as_empty(body: bytes) -> None:
    store = MemoryStore()
    await store.put_if_absent(Layout(OURS.name).descriptor, [body])
    (found,) = await read_namespaces(store, [OURS.name])
    assert dict(found.descriptor) == {}
