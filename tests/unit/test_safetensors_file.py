# SPDX-License-Identifier: Apache-2.0
"""JSON that two readers could understand differently is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3ec.safetensors_file import plain_json

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(1 - 10**14, 10**15 - 1)  # 15 characters
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.slow
@given(values)
def test_plain_values_are_read_as_by_everybody(value: object) -> None:
    assert plain_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    "text",
    ['{"a":1,"a":1}', '[{"a":{"b":1,"b":2}}]', "1" * 16, "NaN", "-Infinity", "1e999", "{", ""],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        plain_json(text)
