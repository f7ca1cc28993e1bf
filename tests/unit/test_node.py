# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from s3ec.config import load_settings
from s3ec.node import _destination


def destination(**changes: Any) -> str:
    return _destination(load_settings(changes).settings)


def test_destination_of_s3_stays_what_spools_on_disk_have_in_their_names() -> None:
    assert destination(bucket="corpus", prefix="a") == "ae441ceb2774632d"
    assert destination(url="s3://corpus/a") == destination(bucket="corpus", prefix="a")


def test_every_place_has_a_destination_of_its_own() -> None:
    places = [
        {"bucket": "corpus"},
        {"bucket": "corpus", "prefix": "a"},
        {"bucket": "corpus", "endpoint_url": "http://127.0.0.1:1"},
        {"url": "gs://corpus"},
        {"url": "az://corpus"},
        {"url": "gs://corpus/a"},
        {"url": "file:///corpus"},
        {"url": "file:///corpus/a"},
    ]
    assert len({destination(**place) for place in places}) == len(places)


@pytest.mark.parametrize("url", ["file:///a%20b", "file:///a b/"])
def test_one_place_written_in_two_ways_has_one_destination(url: str) -> None:
    assert destination(url=url) == destination(url="file:///a%20b")
