# SPDX-License-Identifier: Apache-2.0
"""A configuration in which vLLM numbers images instead of hashing them is refused at start."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.dev.rigs.engine import EngineError, EngineProcess, ec_config
from s3ec.dev.rigs.nursery import EngineForkServer
from s3ec.dev.rigs.vllm_cpu import ONE_PROCESS
from s3ec.testing.server import LocalS3
from tests.e2e.rig import settings


def test_an_engine_that_would_only_have_request_scoped_identifiers_names_the_flag_to_change(
    workdir: Path, qwen: Path, local_s3: LocalS3, nursery: EngineForkServer
) -> None:
    engine = EngineProcess(
        qwen,
        ec=ec_config("ec_both", settings(local_s3, "unused", workdir / "scoped-tier")),
        log_path=workdir / "scoped.log",
        media=workdir,
        env=local_s3.env() | ONE_PROCESS,
        options={"mm_processor_cache_gb": 0, "enable_prefix_caching": False},
        nursery=nursery,
    )
    try:
        with pytest.raises(EngineError):
            engine.start()
    finally:
        engine.stop()
    assert "ConfigError" in engine.log
    assert "--mm-processor-cache-gb" in engine.log
    assert "--enable-prefix-caching" in engine.log
