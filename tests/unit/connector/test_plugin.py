# SPDX-License-Identifier: Apache-2.0
"""The entry point that every vLLM process calls."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from s3ec.connector.plugin import NAME, register
from s3ec.testing.vllm_cpu import engine_env

FACTORY = "vllm.distributed.ec_transfer.ec_connector.factory"
REPOSITORY = Path(__file__).parents[3]


class Factory:
    """As vLLM 0.32's: it refuses a name that it knows."""

    _registry: dict[str, tuple[str, str]] = {}  # noqa: RUF012 - replaced by the fixture

    @classmethod
    def register_connector(cls, name: str, module: str, class_name: str) -> None:
        if name in cls._registry:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls._registry[name] = (module, class_name)


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> type[Factory]:
    module: Any = SimpleNamespace(ECConnectorFactory=Factory)
    monkeypatch.setitem(sys.modules, FACTORY, module)
    monkeypatch.setattr(Factory, "_registry", {})
    return Factory


def test_registering_twice_is_fine(factory: type[Factory]) -> None:
    register()
    register()
    assert factory._registry == {NAME: ("s3ec.connector", "S3ECConnector")}


@pytest.mark.parametrize("module", [None, SimpleNamespace()])
def test_a_vllm_without_encoder_connectors_is_told_in_one_line_and_lives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: Any
) -> None:
    """vLLM ends a process whose plugin raises."""
    monkeypatch.setitem(sys.modules, FACTORY, module)
    register()
    assert len(caplog.records) == 1
    assert "no encoder-cache connectors" in caplog.text


def test_the_entry_point_names_this_function() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert 's3ec = "s3ec.connector.plugin:register"' in text
    entry = EntryPoint("s3ec", "s3ec.connector.plugin:register", "vllm.general_plugins")
    assert entry.load() is register


REAL = """
from s3ec.connector.plugin import register
register()
register()
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
found = ECConnectorFactory._registry["S3ECConnector"]()
from s3ec.connector import S3ECConnector
assert found is S3ECConnector, found
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
assert issubclass(found, ECConnectorBase)
"""


@pytest.mark.slow
def test_a_real_vllm_knows_the_name() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("no vllm here")
    done = subprocess.run(
        [sys.executable, "-c", REAL],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=REPOSITORY,
        env=engine_env() | {"PYTHONPATH": f"{engine_env()['PYTHONPATH']}:{REPOSITORY}"},
    )
    assert done.returncode == 0, done.stderr
