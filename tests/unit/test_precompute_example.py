# SPDX-License-Identifier: Apache-2.0
"""What examples/precompute.py does; with a real engine: tests/e2e/test_precompute.py."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.tier.cases import DESTINATION, entry, key_at, new_tier, publish

PATH = Path(__file__).parents[2] / "examples" / "precompute.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("precompute", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Engine:
    """Takes batches, and refuses those with a file that is no picture."""

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def chat(self, conversations: list[Any], sampling: object, *, use_tqdm: bool) -> None:
        urls = [messages[0]["content"][0]["image_url"]["url"] for messages in conversations]
        if any("broken" in url for url in urls):
            raise ValueError("cannot identify image file")
        self.encoded += urls


def test_one_bad_file_costs_no_other_of_its_batch(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "_sampling", lambda: None)
    pictures = [Path(f"/pages/{name}.png") for name in ("a", "broken", "c")]
    engine = Engine()
    failed = script._encode(engine, pictures)
    assert failed == {pictures[1]: "ValueError: cannot identify image file"}
    assert engine.encoded == ["file:///pages/a.png", "file:///pages/c.png"]


def test_what_waits_for_the_bucket_is_found(script: ModuleType, tmp_path: Path) -> None:
    tier = new_tier(tmp_path)
    publish(tier, 0, 1, spool=tier.open_spool(DESTINATION))
    waiting = script._waiting_nbytes({"cache_dir": str(tmp_path)})
    tier.close()
    assert waiting == len(entry(key_at(0))) + len(entry(key_at(1)))


@pytest.mark.parametrize(("text", "shard"), [("0/1", (0, 1)), ("3/4", (3, 4))])
def test_shards_count_from_nought(script: ModuleType, text: str, shard: tuple[int, int]) -> None:
    assert script._shard(text) == shard


@pytest.mark.parametrize("text", ["4/4", "1", "-1/4", "a/b", "1/0"])
def test_a_shard_that_is_none_is_refused(script: ModuleType, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write it as 0/4"):
        script._shard(text)
