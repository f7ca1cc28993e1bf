# SPDX-License-Identifier: Apache-2.0
"""How vLLM makes a manager, and what it refuses."""

from __future__ import annotations

import logging
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of its own parts as vLLM imports them
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core import encoder_cache_manager as vllm_managers

    import s3ec
    from s3ec.managers import restore
    from s3ec.managers.encoder_cache import LRUEncoderCacheManager, TieredEncoderCacheManager

from s3ec.errors import ConfigError

BOTH = [LRUEncoderCacheManager, TieredEncoderCacheManager]


def configuration(*, encoder_decoder: bool = False, **manager_config: Any) -> Any:
    return SimpleNamespace(
        ec_manager_config=SimpleNamespace(manager_config=manager_config),
        model_config=SimpleNamespace(is_encoder_decoder=encoder_decoder),
    )


@pytest.mark.parametrize("manager", BOTH)
def test_vllm_finds_it_by_its_short_name(manager: type[Any]) -> None:
    assert resolve_obj_by_qualname(f"s3ec.{manager.__name__}") is manager
    assert manager.__name__ in dir(s3ec)


@pytest.mark.parametrize("manager", BOTH)
def test_it_says_that_it_is_active(manager: type[Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="s3ec"):
        made = manager.create_manager(cache_size=4096, vllm_config=configuration())
    assert type(made) is manager
    assert f"{manager.__name__} for 4096 rows on the device" in caplog.text


@pytest.mark.parametrize("manager", BOTH)
def test_a_setting_is_refused_since_there_is_none(manager: type[Any]) -> None:
    with pytest.raises(ConfigError, match=r"manager_config: .* 'size'; leave `manager_config` out"):
        manager.create_manager(cache_size=4096, vllm_config=configuration(size=1))


@pytest.mark.parametrize("manager", BOTH)
def test_encoder_decoder_models_keep_vllms_own(
    manager: type[Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = configuration(encoder_decoder=True)
    made = manager.create_manager(cache_size=4096, vllm_config=config)
    assert type(made) is vllm_managers.EncoderDecoderCacheManager
    assert "shares no embeddings between requests" in caplog.text


def picture(name: str) -> Any:
    feature = SimpleNamespace(identifier=name, modality="image")
    return SimpleNamespace(
        request_id=f"of {name}", mm_features=[feature], get_num_encoder_embeds=lambda _: 16
    )


def ask(manager: Any, name: str) -> bool:
    asked = picture(name)
    hit = manager.check_and_update_cache(asked, 0)
    if not hit:
        assert manager.can_allocate(asked, 0, 1024, 0)
        manager.allocate(asked, 0)
    manager.free(asked)
    return bool(hit)


def test_the_connector_of_the_same_engine_is_asked_while_it_works() -> None:
    class Connector:
        restore_costs: Any = SimpleNamespace(
            restore_s=lambda name, *_: 0.001 if name == "on disk" else 1.0
        )

        def follow_device(self, held: Any) -> None:
            self.held = held

    config, connector = configuration(), Connector()
    restore.register(config, connector)
    manager = TieredEncoderCacheManager.create_manager(cache_size=64, vllm_config=config)
    for name in ("nowhere", "elsewhere", "on disk", "new"):
        ask(manager, name)
    ask(manager, "newer")
    assert set(manager.cached) == {"nowhere", "elsewhere", "new", "newer"}
    connector.restore_costs = None  # it has ended
    for number in range(50):  # then it is asked about no more, and what was dear goes, too
        ask(manager, f"newer {number}")
    assert not {"nowhere", "elsewhere"} & set(manager.cached)


def test_a_fault_of_the_connector_does_not_reach_vllm(caplog: pytest.LogCaptureFixture) -> None:
    class Connector:
        restore_costs: Any = SimpleNamespace()  # has no restore_s

        def follow_device(self, held: Any) -> None:
            pass

    config, connector = configuration(), Connector()
    restore.register(config, connector)
    manager = TieredEncoderCacheManager.create_manager(cache_size=64, vllm_config=config)
    for name in "abcdef":
        ask(manager, name)
    assert len(manager.cached) == 4
    assert caplog.text.count("asked no more what embeddings cost") == 1


def test_without_a_connector_it_works_alone() -> None:
    manager = TieredEncoderCacheManager.create_manager(cache_size=64, vllm_config=configuration())
    for name in "aabbccde":
        ask(manager, name)
    assert set(manager.cached) == {"b", "c", "a", "e"}


def test_an_older_vllm_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class has no ``create_manager``; the import says so, which ends vLLM's start."""
    monkeypatch.delattr(vllm_managers.EncoderCacheManager, "create_manager")
    for name in [name for name in sys.modules if name.startswith("s3ec.managers")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"use 0\.32 or newer, or leave --ec-manager-config out"):
        _ = s3ec.TieredEncoderCacheManager
