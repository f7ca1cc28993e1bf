# SPDX-License-Identifier: Apache-2.0
"""Starting with a full folder: nothing is walked, and nothing is forgotten."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from s3ec.identity import Key, digest_of_name
from s3ec.tier import LocalKeys, Tier
from tests.unit.tier.cases import NAMESPACE, MakeTier, entry, key_at


class Walks:
    """The folders that were listed, and how often the disk was asked for one thing or another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listed: list[str] = []
        self.calls = 0
        for name in ("scandir", "listdir"):
            monkeypatch.setattr(os, name, self._noting(getattr(os, name), listing=True))
        for name in ("open", "stat", "lstat", "statvfs", "mkdir", "link", "unlink", "rename"):
            monkeypatch.setattr(os, name, self._noting(getattr(os, name)))

    def _noting(self, call: Callable[..., object], *, listing: bool = False) -> object:
        def noting(*arguments: object, **options: object) -> object:
            self.calls += 1
            if listing:
                self.listed.append(str(arguments[0]))
            return call(*arguments, **options)

        return noting


def start(make_tier: MakeTier) -> Walks:
    with pytest.MonkeyPatch.context() as patch:
        walks = Walks(patch)
        make_tier()
    return walks


def names_of(count: int) -> list[str]:
    """Object names, evenly spread over the 256 folders."""
    return [f"{n % 256:02x}/{n % 256:02x}{n:062x}.safetensors" for n in range(count)]


def link_entries(objects: Path, names: list[str]) -> None:
    """Many names for few files: cheap to make, and entries like others to every walk."""
    for number, name in enumerate(names):
        path = objects / name
        if number % 30_000 == 0:  # file systems limit the names of one file
            source = objects.parent.parent / "incoming" / f"source{number}"
            source.write_bytes(entry(key_at(0)))
        if number < 256:
            path.parent.mkdir(mode=0o700)
        os.link(source, path)


@pytest.mark.parametrize("count", [300, pytest.param(40_000, marks=pytest.mark.slow)])
def test_start_costs_the_same_however_many_entries_there_are(
    make_tier: MakeTier, root: Path, count: int
) -> None:
    make_tier().close()
    empty = start(make_tier)
    link_entries(root / "v1" / "objects" / NAMESPACE, names_of(count))
    full = start(make_tier)
    assert not [folder for folder in full.listed if "/objects" in folder]
    assert full.calls == empty.calls
    (root / "v1" / "usage").unlink()
    assert not [folder for folder in start(make_tier).listed if "/objects" in folder]
    tier = make_tier()
    local = LocalKeys()
    local.replace(tier.entries.names())
    assert all(local(Key("", name, digest_of_name(name))) for name in names_of(count))


def test_names_added_and_dropped_during_a_scan_are_kept_that_way(tier: Tier) -> None:
    """A scan takes seconds, and entries come and go meanwhile."""
    local, added, dropped = LocalKeys(), key_at(1), key_at(2)

    def scan() -> Iterator[str]:
        yield dropped.name
        local.add(added)
        local.discard(dropped)
        yield key_at(3).name

    local.replace(scan())
    assert local(added)
    assert not local(dropped)
    assert local(key_at(3))
