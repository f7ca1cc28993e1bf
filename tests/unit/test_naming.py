# SPDX-License-Identifier: Apache-2.0
"""The memory of recent keys: the same answers, and a bound that no client moves."""

from __future__ import annotations

import tracemalloc

import pytest

from s3ec.identity import KeyCache, KeyPolicy, make_key
from s3ec.tenant import Tenant
from tests.unit.test_identity import TRICKY


def test_key_maker_answers_as_make_key_does() -> None:
    make = KeyCache(capacity=8)
    for identifier in [*TRICKY, "renderer0-mm-1-image-0", "", *TRICKY]:
        assert make(identifier) == make_key(identifier)


def test_key_maker_remembers_a_bounded_number_and_nothing_refused() -> None:
    make = KeyCache(capacity=8)
    for number in range(100):
        make(f"picture {number}")
        make(f"renderer0-mm-{number}-image-0")
        make(f"{number}" * 5000)
    assert len(make._known) == 8
    assert make("picture 99") is make("picture 99")


@pytest.mark.parametrize("character", ["x", "\U0001f600"])
@pytest.mark.parametrize("tenant", [None, Tenant(b"0123456789abcdef")])
def test_names_in_any_number_and_of_any_length_take_a_bounded_memory(
    character: str, tenant: Tenant | None
) -> None:
    """Measured with a small one: 1 KiB an entry, so 64 MiB with the default capacity."""
    capacity = 512
    for characters in (128, 129, 1000):
        make = KeyCache(KeyPolicy(tenant).make_key, capacity=capacity)
        tracemalloc.start()
        for number in range(capacity + 100):
            name = f"{number:06}".ljust(characters, character)
            key = make(name)
            assert (key is None) is (len(name.encode()) > 4096)
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert used <= capacity * 1024 + 16 * 1024
        assert len(make._known) == (capacity if characters == 128 else 0)
