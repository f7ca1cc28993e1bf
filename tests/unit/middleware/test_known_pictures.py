# SPDX-License-Identifier: Apache-2.0
"""What is known of pictures, and embeddings that are open while a request runs."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from s3ec import codec
from s3ec.codec import Header, Shape
from s3ec.counters import Counters
from s3ec.identity import Key, KeyPolicy, make_key
from s3ec.middleware.chat_pictures import UntouchedError
from s3ec.middleware.known_pictures import Opener, name_of_picture
from s3ec.tier.tier import Tier
from tests.support.file_calls import open_below
from tests.support.on_disk import evict

NAMESPACE = "tiny-qwen-0123456789abcdef"
GRID = {"image_grid_thw": [1, 4, 4]}
FIELDS = frozenset(GRID)


class Names:
    """Names pictures by SHA-256, but for those that begin with `odd`."""

    def __init__(self) -> None:
        self.asked = 0

    def name(self, data: bytes) -> str | None:
        self.asked += 1
        return None if data.startswith(b"odd") else name_of(data)


def name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def names() -> Names:
    return Names()


def test_a_picture_is_named_by_its_bytes(names: Names) -> None:
    assert name_of_picture(url_of(b"one"), names.name) == name_of(b"one")
    assert name_of_picture(url_of(b"two"), names.name) == name_of(b"two")


def test_a_picture_whose_name_the_bytes_do_not_say_is_left_alone(names: Names) -> None:
    with pytest.raises(UntouchedError, match="format"):
        name_of_picture(url_of(b"odd"), names.name)


@pytest.mark.parametrize(
    "url",
    ["data:image/png;base64", "data:image/png,AAAA", "data:,AAAA", "data:image/png;base64,AA A",
     "data:image/png;base64,AAA", "data:image/png;base64,\ud800", "data:image/png;utf8,AAAA"],
)  # fmt: skip
def test_a_data_url_that_vllm_refuses_is_left_alone(url: str, names: Names) -> None:
    with pytest.raises(UntouchedError, match="unreadable"):
        name_of_picture(url, names.name)
    assert names.asked == 0


@pytest.mark.parametrize(
    "url", ["http://a/b.png", "https://a/b", "ftp://a", "file:///etc/passwd", "", "png", "s3://b/k"]
)
def test_addresses_are_left_alone(url: str, names: Names) -> None:
    with pytest.raises(UntouchedError, match="url"):
        name_of_picture(url, names.name)


# -- what the node has -----------------------------------------------------------------------------


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Tier]:
    made = Tier(
        tmp_path / "tier",
        NAMESPACE,
        budget_bytes=1 << 20,
        min_free_bytes=0,
        counters=Counters(),
        check_values=True,
    )
    yield made
    made.close()


def key_of(identifier: str) -> Key:
    key = make_key(identifier)
    assert key is not None
    return key


def publish(
    tier: Tier, identifier: str, *, placeholder: Any = GRID, modality: str = "image"
) -> None:
    data = bytes(4 * 8 * 2)
    header = Header(
        identifier, NAMESPACE, modality, Shape(4, 8, "bfloat16"), codec.checksum(data), placeholder
    )
    tier.writer.publish(key_of(identifier), [codec.encode_header(header), data])


def opener(tier: Tier) -> Opener:
    return Opener(tier, KeyPolicy(), FIELDS)


def open_of(tier: Tier) -> list[str]:
    """Entries that are open."""
    return open_below(tier.folders.objects)


def test_what_is_open_outlives_eviction_until_it_is_let_go_of(tier: Tier) -> None:
    one, two = name_of(b"one"), name_of(b"two")
    publish(tier, one)
    publish(tier, two)
    opened = opener(tier).open([one, two, one])
    assert len(open_of(tier)) == len(opened) == 2
    for name, held in opened.items():
        assert held.header.placeholder == GRID
        evict(tier, key_of(name))
        assert len(os.pread(held.fd, held.nbytes + 1, 0)) == held.nbytes
    del held
    for _ in range(2):
        opened.clear()
    assert open_of(tier) == []


def test_what_a_request_counts_on_is_used_and_what_it_cannot_have_is_not(tier: Tier) -> None:
    """Eviction, which waits for nobody, takes others before it."""
    one, two = name_of(b"one"), name_of(b"two")
    publish(tier, one)
    publish(tier, two, modality="video")
    for path in Path(tier.entries.objects).rglob("*.safetensors"):
        os.utime(path, (1000, 1000))
    opener(tier).open([one])
    with pytest.raises(UntouchedError):
        opener(tier).open([two])
    uses = dict(tier.entries.uses())
    assert abs(uses[key_of(one).name] / 1e9 - time.time()) < 600
    assert uses[key_of(two).name] == 1000 * 10**9


def test_one_picture_that_is_not_here_and_none_stays_open(tier: Tier) -> None:
    one, two = name_of(b"one"), name_of(b"two")
    publish(tier, one)
    with pytest.raises(UntouchedError, match="not_here"):
        opener(tier).open([one, two])
    publish(tier, two)
    evict(tier, key_of(two))
    with pytest.raises(UntouchedError, match="not_here") as caught:
        opener(tier).open([one, two])
    assert open_of(tier) == []
    assert caught.value  # which lives still, and has the frames


def test_bytes_that_are_not_what_was_stored_are_not_counted_on(tier: Tier) -> None:
    one = name_of(b"one")
    publish(tier, one)
    (path,) = Path(tier.entries.objects).rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(UntouchedError, match="not_here"):
        opener(tier).open([one])
    assert open_of(tier) == []


@pytest.mark.parametrize(
    "stored",
    [{"placeholder": {}}, {"placeholder": None}, {"placeholder": {**GRID, "more": 1}},
     {"modality": "video"}],
    ids=["no metadata", "unseen", "more", "a video"],
)  # fmt: skip
def test_an_entry_that_says_something_else_of_its_placeholder_is_not_used(
    stored: dict[str, Any], tier: Tier
) -> None:
    one = name_of(b"one")
    publish(tier, one, **stored)
    with pytest.raises(UntouchedError, match="no_metadata") as caught:
        opener(tier).open([one])
    assert open_of(tier) == []
    assert caught.value
