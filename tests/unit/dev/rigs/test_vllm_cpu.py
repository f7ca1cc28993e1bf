# SPDX-License-Identifier: Apache-2.0
"""The environment of a test engine."""

from __future__ import annotations

import os

from s3ec.dev.rigs.vllm_cpu import SITE_DIR, engine_env


def test_engine_environment_keeps_tunables_and_forbids_downloads() -> None:
    base = {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "0", "PYTHONPATH": "a::b"}
    env = engine_env(base)
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["PYTHONPATH"].split(os.pathsep) == [str(SITE_DIR), "a", "b"]
    assert base["PYTHONPATH"] == "a::b"
    assert engine_env(env) == env
