# SPDX-License-Identifier: Apache-2.0
"""Adapters that touch the encoder are their content: nothing of one is served for another."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.connector import live_weights
from s3ec.connector.adapters import Adapters, read_adapter
from s3ec.connector.messages import StepPlan
from s3ec.identity import is_object_name, make_key
from s3ec.weights import UnknownFilesError
from tests.support.clock import Clock
from tests.unit.connector.scheduling import (
    World,
    bare,
    feature,
    has_no_pixels,
    identifier_of,
    request,
)
from tests.unit.test_weights import tensors_of, write
from tests.unit.tier.cases import key_of

NAME = "my-lora"
WEIGHTS = "adapter_model.safetensors"


def adapter(folder: Path, version: int = 1, *, rank: int = 8, size: int = 4096) -> Path:
    """The files of an adapter; every version has other values and other times."""
    tensors = tensors_of([f"vision_tower.layers.0.lora_A.{version}"], size)
    write(folder / WEIGHTS, tensors)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    os.utime(folder / WEIGHTS, (version, version))  # the kernel's clock may stand still
    return folder


def digest_of(folder: Path) -> str:
    return read_adapter(str(folder))[0]


# -- what is read ------------------------------------------------------------------------------


def test_an_adapter_is_its_weights_and_its_configuration(tmp_path: Path) -> None:
    one = adapter(tmp_path / "one")
    same = Path(shutil.copytree(one, tmp_path / "copy"))
    retrained = adapter(tmp_path / "retrained", 2)
    scaled = adapter(tmp_path / "scaled", rank=16)
    assert digest_of(same) == digest_of(one)
    assert len({digest_of(each) for each in (one, retrained, scaled)}) == 3


@pytest.mark.parametrize("place", [0, 4_000_000, 15_999_999])
def test_every_byte_of_an_adapter_counts(place: int, tmp_path: Path) -> None:
    one = adapter(tmp_path / "one", size=16_000_000)
    other = Path(shutil.copytree(one, tmp_path / "other"))
    with (other / WEIGHTS).open("r+b") as file:
        file.seek(place - 16_000_000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    keys = {make_key(f"{NAME}-{digest_of(each)}:{'ab' * 32}") for each in (one, other)}
    assert len(keys) == 2


def append(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"more")


def overwrite(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[::-1])


def replace(folder: Path) -> None:
    other = folder / "other"
    other.write_bytes((folder / WEIGHTS).read_bytes()[::-1])
    os.utime(other, (1, 1))
    other.replace(folder / WEIGHTS)


def rescale(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r": 9999}')


def remove(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize("change", [append, overwrite, replace, rescale, remove])
def test_an_adapter_that_changes_while_it_is_read_is_unknown(
    change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter(tmp_path)
    known = read_adapter(str(tmp_path))
    assert read_adapter(str(tmp_path), known) == known
    hashed = []

    def digest(file: Any, name: str) -> Any:
        hashed.append(file.name)
        found = original(file, name)
        if file.name.endswith(WEIGHTS):
            change(tmp_path)
        return found

    original = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", digest)
    with pytest.raises(UnknownFilesError, match="change"):
        read_adapter(str(tmp_path))
    assert len(hashed) == 2
    with pytest.raises(UnknownFilesError, match="change"):
        read_adapter(str(tmp_path), known)


def test_an_adapter_that_is_not_here_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for path in (tmp_path / "gone", "acme/never-downloaded"):
        with pytest.raises(UnknownFilesError, match="no snapshot"):
            read_adapter(str(path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnknownFilesError, match="has not the files of an adapter"):
        read_adapter(str(tmp_path))


# -- in the scheduler half ---------------------------------------------------------------------


class Engine:
    """A scheduler half with adapters; files are read when the test says so."""

    def __init__(self, **role: Any) -> None:
        self.reads: list[Callable[[], None]] = []

        def adapters(clock: Clock) -> Adapters:
            return Adapters(self.reads.append, self.longest_wait_s, clock)

        self.world = World(adapters=adapters, **({"producer": True} | role))
        self.half = self.world.half

    @staticmethod
    def longest_wait_s(request: Any) -> float:
        return 10.0 if any(map(has_no_pixels, request.mm_features)) else 2.0

    def ask(self, request: Any, computed: int = 0) -> bool:
        return self.half.ensure_cache_available(request, computed)

    def step(self, freed: tuple[str, ...] = (), *, read: bool = True) -> StepPlan:
        """End a pass; what is to be read is read before the next one."""
        plan = self.half.build_connector_meta(freed, scheduled_tokens=10)
        while read and self.reads:
            self.reads.pop(0)()
        return plan

    def allocate(self, request: Any) -> list[bool]:
        return self.world.schedule(request)

    def until_asked(self, request: Any) -> None:
        """Passes until the request may be scheduled: the adapter, and nothing else, is awaited."""
        for _ in range(3):
            if self.ask(request):
                return
            self.step()
        raise AssertionError("still deferred")

    def saves(self, request: Any) -> dict[str, str]:
        """What is ordered to be saved for a request that is encoded: vLLM's name to ours."""
        self.until_asked(request)
        assert not any(self.allocate(request))
        freed = tuple(one.identifier for one in request.mm_features)
        saves = {one: save.renamed for one, save in self.step().saves.items()}
        self.step(freed)
        return saves

    def told(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def lora(path: Path, number: int = 1, *, name: str = NAME, inplace: bool = False) -> Any:
    return SimpleNamespace(
        lora_name=name, lora_int_id=number, lora_path=str(path), load_inplace=inplace
    )


def adapted(name: str, text: object, of: Any, *, pixels: bool = True) -> Any:
    raw = f"{of.lora_name}:{identifier_of(text)}"
    made = request(name, feature(raw, raw=True) if pixels else bare(raw, raw=True))
    made.lora_request = of
    return made


def raw_name(text: object, name: str = NAME) -> str:
    return f"{name}:{identifier_of(text)}"


def stored_name(folder: Path, text: object) -> str:
    return f"{NAME}-{digest_of(folder)}:{identifier_of(text)}"


def test_an_entry_is_found_by_the_adapter_s_content(tmp_path: Path) -> None:
    engine = Engine()
    stored = stored_name(adapter(tmp_path), "cat")
    engine.world.index.add(key_of(stored))
    asked = adapted("r", "cat", lora(tmp_path))
    assert not engine.ask(asked)  # its adapter is being read
    engine.step()
    assert not engine.ask(asked)  # it is being fetched
    engine.step()
    (want,) = engine.world.prefetcher.open.values()
    assert (want.key.name, want.key.stored) == (key_of(stored).name, stored)
    engine.world.prefetcher.finish(raw_name("cat"))
    assert engine.ask(asked)
    assert engine.allocate(asked) == [True]
    (load,) = engine.step().loads
    assert (load.identifier, load.renamed) == (raw_name("cat"), stored)


def test_an_encoded_image_is_saved_under_the_adapter_s_content(tmp_path: Path) -> None:
    engine = Engine()
    stored = stored_name(adapter(tmp_path), "cat")
    asked = adapted("r", "cat", lora(tmp_path))
    engine.until_asked(asked)
    assert engine.allocate(asked) == [False]
    (save,) = engine.step().saves.values()
    assert save.renamed == stored
    assert [Path(path).name for path, *_ in save.made_by] == ["adapter_config.json", WEIGHTS]
    key = key_of(stored)
    assert is_object_name(key.name)
    assert key.name.startswith(stored.split(":")[0] + "/")


def in_place(engine: Engine, folder: Path) -> Any:
    return lora(folder, inplace=True)


def in_place_between_two_steps(engine: Engine, folder: Path) -> Any:
    engine.half.adapter_loaded(lora(folder, inplace=True))
    return lora(folder)


def under_another_number(engine: Engine, folder: Path) -> Any:
    return lora(folder, 2)


def from_another_folder(engine: Engine, folder: Path) -> Any:
    return lora(adapter(folder.with_name("two"), 2))


def with_a_twin(engine: Engine, folder: Path) -> Any:
    engine.until_asked(adapted("twin", "dog", lora(folder, name="twin")))
    return lora(folder)


def with_other_files(engine: Engine, folder: Path) -> Any:
    adapter(folder, 3)
    engine.world.clock.now_s += 2
    engine.until_asked(adapted("looks", "dog", lora(folder)))
    engine.step()
    return lora(folder)


@pytest.mark.parametrize(
    "again",
    [in_place, in_place_between_two_steps, under_another_number, from_another_folder, with_a_twin,
     with_other_files],
)  # fmt: skip
def test_where_nobody_knows_what_the_workers_hold_nothing_is_loaded_or_saved(
    again: Callable[[Engine, Path], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    folder = adapter(tmp_path / "one")
    stored = stored_name(folder, "cat")
    engine.world.index.add(key_of(stored))
    first = adapted("first", "cat", lora(folder))
    engine.until_asked(adapted("reads", "cow", lora(folder)))
    assert not engine.ask(first)
    engine.step()
    engine.world.prefetcher.finish(raw_name("cat"))
    assert engine.ask(first)  # it is here, and would be granted
    with caplog.at_level(logging.WARNING, logger="s3ec"):
        of = again(engine, folder)
        for number in range(2):
            asked = adapted(f"later {number}", "cat", of)
            assert engine.saves(asked) == {}
        assert engine.saves(first) == {}
    told = engine.told(caplog)
    assert len(told) == (2 if again is with_a_twin else 1)
    assert all("nothing is loaded or saved under adapter" in one for one in told)


def test_an_adapter_without_files_is_a_miss_that_is_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine()
    gone, here = tmp_path / "gone", adapter(tmp_path / "here")
    with caplog.at_level(logging.WARNING, logger="s3ec"):
        assert engine.saves(adapted("r", "cat", lora(gone, name="gone"))) == {}
        assert engine.saves(adapted("s", "dog", lora(gone, name="gone"))) == {}
    assert len(engine.told(caplog)) == 1
    assert engine.saves(adapted("t", "cat", lora(here, 2)))


def test_a_request_without_pixels_fails_alone_where_its_adapter_is_unknown(tmp_path: Path) -> None:
    engine = Engine()
    none = adapted("none", "cat", lora(tmp_path / "gone"), pixels=False)
    assert not engine.ask(none)
    engine.step()
    assert not engine.ask(none)
    assert engine.half.take_unavailable_requests() == {"none"}
    assert engine.ask(request("plain", feature("dog")))


def test_a_request_waits_for_its_adapter_no_longer_than_it_would_for_the_bucket(
    tmp_path: Path,
) -> None:
    engine = Engine()
    adapter(tmp_path)
    with_pixels = adapted("pixels", "cat", lora(tmp_path))
    without = adapted("none", "dog", lora(tmp_path), pixels=False)
    for one in (with_pixels, without):
        assert not engine.ask(one)
    engine.step(read=False)
    engine.world.clock.now_s += 2.5
    assert engine.ask(with_pixels)
    assert engine.allocate(with_pixels) == [False]
    assert not engine.step(read=False).saves
    assert not engine.ask(without)
    assert engine.half.take_unavailable_requests() == set()
    engine.world.clock.now_s += 8
    assert not engine.ask(without)
    assert engine.half.take_unavailable_requests() == {"none"}
    # Nobody waits again, and what is read at last is known.
    assert engine.ask(adapted("later", "cow", lora(tmp_path)))
    engine.reads.pop()()
    assert engine.saves(adapted("last", "cow", lora(tmp_path)))


def test_requests_without_an_adapter_are_called_as_ever(tmp_path: Path) -> None:
    engine = Engine()
    plain = request("plain", feature("cat"))
    assert engine.ask(plain)
    assert engine.allocate(plain) == [False]
    (save,) = engine.step().saves.values()
    assert (save.renamed, save.made_by) == ("", ())
    # Nor is an adapter's that does not touch the encoder: vLLM leaves its name out.
    other = request("other", feature("dog"))
    other.lora_request = lora(adapter(tmp_path))
    assert engine.saves(other) == {identifier_of("dog"): ""}


def test_after_a_stop_nothing_of_an_adapter_is_granted_or_saved(tmp_path: Path) -> None:
    engine = Engine()
    engine.world.index.add(key_of(stored_name(adapter(tmp_path), "cat")))
    engine.until_asked(adapted("first", "dog", lora(tmp_path)))
    engine.half.device_was_reset()
    assert engine.half.stop()
    asked = adapted("r", "cat", lora(tmp_path))
    assert engine.ask(asked)
    assert engine.allocate(asked) == [False]
    plan = engine.step()
    assert not plan.saves
    assert not plan.loads


# -- in vLLM -----------------------------------------------------------------------------------


class Told:
    """An s3ec connector, as far as vLLM's engine core is concerned."""

    def __init__(self) -> None:
        self.loads: list[Any] = []

    def adapter_loaded(self, lora: Any) -> None:
        self.loads.append(lora)
        raise ValueError("a fault of ours")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_vllm_s_engine_core_says_which_adapters_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("vllm.v1.engine.core")
    monkeypatch.setattr(core.EngineCore, "add_lora", core.EngineCore.add_lora)  # undone at the end
    live_weights.watch_adapters()
    live_weights.watch_adapters()
    told = Told()
    engine = core.EngineCore.__new__(core.EngineCore)
    engine.model_executor = SimpleNamespace(add_lora=lambda one: f"loaded {one}")
    for connector in (told, None, SimpleNamespace()):
        engine.scheduler = SimpleNamespace(ec_connector=connector)
        assert engine.add_lora("mine") == "loaded mine"
    assert told.loads == ["mine"]
