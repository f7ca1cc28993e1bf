# SPDX-License-Identifier: Apache-2.0
"""Environments that hold what others need: s3ec changes none of it when it comes, and works.

They are made here, from the package index that pip is configured with; without one these are
skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from s3ec.testing.server import LocalS3
from tests.support.checkout import WHEEL, build, copy_checkout

pytestmark = pytest.mark.slow
_PATIENCE_S = 600


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "S3EC_"))}
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE_S,
        env={**keep, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1", **variables},
    )


def pip(python: Path | str, *words: str | Path) -> str:
    """What pip printed."""
    done = run(python, "-m", "pip", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def versions(python: Path) -> dict[str, str]:
    listed = json.loads(pip(python, "list", "--format", "json"))
    return {canonicalize_name(one["name"]): one["version"] for one in listed}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    copy_checkout(folder, *WHEEL)
    [built] = build(folder, "-t", "wheel")
    return built


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> tuple[Path, dict[str, str]]:
    """An environment that held the newest boto3 before s3ec: its Python, and what it held."""
    folder = tmp_path_factory.mktemp("newest")
    done = run(sys.executable, "-m", "venv", "--without-pip", folder)
    assert done.returncode == 0, done.stderr
    python = folder / "bin" / "python"
    # The newest, older ones download to resolve; by this pip, since venv would install an old one.
    done = run(
        *(sys.executable, "-m", "pip", "--python", python),
        *("install", "--quiet", "--retries", "1", "pip"),
    )
    if done.returncode:
        pytest.skip(f"needs a package index: {done.stderr.strip().splitlines()[-1][:200]}")
    pip(python, "install", "--quiet", "boto3")
    before = versions(python)
    pip(python, "install", "--quiet", wheel, "pytest>=8.4", "pytest-asyncio>=1.0")
    return python, before


def test_installing_beside_the_newest_boto3_changes_no_package(
    newest: tuple[Path, dict[str, str]],
) -> None:
    python, before = newest
    assert {"boto3", "botocore", "s3transfer", "urllib3"} <= set(before)
    after = versions(python)
    assert {name: after.get(name) for name in before} == before
    assert "s3ec" in after
    pip(python, "check")


def test_store_passes_its_suite_beside_the_newest_boto3(
    newest: tuple[Path, dict[str, str]], local_s3: LocalS3, tmp_path: Path
) -> None:
    python, before = newest
    suite = tmp_path / "installed_store.py"
    shutil.copyfile(Path(__file__).with_name(suite.name), suite)
    done = run(
        python, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider",
        "-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function",
        "--rootdir", tmp_path, "-W", "error", suite,
        S3EC_TEST_ENDPOINT=local_s3.endpoint_url,
        S3EC_TEST_BUCKET=local_s3.create_bucket("newest"),
        S3EC_TEST_BOTOCORE=before["botocore"],
        **local_s3.env(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_installed_without_vllm_the_commands_work(
    newest: tuple[Path, dict[str, str]], local_s3: LocalS3, tmp_path: Path
) -> None:
    python, _ = newest
    settings = {
        "bucket": local_s3.create_bucket("commands"),
        "endpoint_url": local_s3.endpoint_url,
        "region": "us-east-1",
        "cache_dir": str(tmp_path),
        "connect_timeout_s": 30,  # a busy machine's
        "read_timeout_s": 30,
    }
    config = json.dumps(settings)
    namespace = "gemma-0123456789abcdef"
    for name in ("namespace.json", f"objects/ab/{'ab' * 32}.safetensors"):
        local_s3.client().put_object(
            Bucket=settings["bucket"], Key=f"{namespace}/{name}", Body=b"{}"
        )

    def s3ec(*words: str) -> subprocess.CompletedProcess[str]:
        return run(python.with_name("s3ec"), *words, **local_s3.env())

    for words, shown in (
        (("doctor", "--no-vllm"), " 0 fail"),
        (("ls",), "abababab"),
    ):
        done = s3ec(*words, "--config", config)
        assert done.returncode == 0, done.stdout + done.stderr
        assert shown in done.stdout
    done = s3ec("bench", "--help")
    assert done.returncode == 0
    assert "in a checkout" in done.stdout
    assert "encode" in done.stdout
