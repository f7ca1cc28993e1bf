# SPDX-License-Identifier: Apache-2.0
"""Servers for every test, and an environment that holds nothing of the machine's owner."""

from __future__ import annotations

import atexit
import gc
import itertools
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from s3ec.dev.rigs.vllm_cpu import install_here
from s3ec.errors import ConfigError
from s3ec.testing.server import LocalS3, MotoServer, find_weed
from tests.support.waiting import DEADLINE_S

# A deadline per example, and the check of how long examples take to make, are timed assertions:
# they fail on a busy machine, and on nothing else. By default a test tries the same examples each
# time. To search for others: `make test ARGS=--hypothesis-profile=search`.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", _UNTIMED)
settings.register_profile("s3ec", _UNTIMED, derandomize=True)
settings.load_profile("s3ec")

# Tests that import vllm or transformers into this process.
install_here()

# A shell starts its background jobs with this signal ignored, and every child inherits that:
# a server that a test interrupts would run on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_numbers = itertools.count()
_E2E = "tests/e2e/"
# Of the files with engines, those with a model and a corpus of their own; the others share theirs.
# What of those is left out here is so that both groups take about as long.
_APART = (
    "test_ask_without_pixels.py",
    "test_audio.py",
    "test_epd.py",
    "test_observability.py",
    "test_rag_example.py",
    "test_skip_pictures.py",
    "test_soak.py",
    "test_weights.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay in one process, with its servers; those that share engines likewise.

    xdist 3.8's groups would need an older pytest.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByServers(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            if not path.startswith(_E2E):
                return path
            return "apart" if path.removeprefix(_E2E) in _APART else "shared"

    return ByServers(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays until the end, so no collection of garbage visits it.

    These are millions of objects, vLLM's and torch's: one visit takes a second and more.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # Or extensions would find objects of theirs left at the end, and say so.
        atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the users of real servers; engines first, then files with the slowest tests.

    Where processes share the files out, the others then wait for no long one at the end.
    """
    slowest = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (not item.nodeid.startswith(_E2E), item.path not in slowest))
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "local_s3" in fixtures:
            item.add_marker(pytest.mark.s3)
        if "moto_server" in fixtures or item.get_closest_marker("s3"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No credentials, profile, proxy or s3ec setting of this machine reaches a test."""
    nowhere = tmp_path_factory.mktemp("no-aws")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("AWS_", "S3EC_")) or name.lower().endswith("_proxy"):
                patch.delenv(name)
        patch.setenv("AWS_CONFIG_FILE", str(nowhere / "config"))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(nowhere / "credentials"))
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield


@pytest.fixture(scope="session", autouse=True)
def _credentials_are_waited_for() -> Iterator[None]:
    """An engine waits 5 s for them; a busy machine may take longer to look into its environment."""
    from s3ec.store.credentials import ChainCredentials

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChainCredentials, "patience_s", DEADLINE_S)
        patch.setattr(ChainCredentials, "longest_look_s", DEADLINE_S)
        yield


@pytest.fixture(scope="session", autouse=True)
def _disks_are_waited_for() -> Iterator[None]:
    """A call that takes 5 s is a hang for an engine; the disk of a busy machine may take longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("s3ec.runtime.PATIENCE_S", DEADLINE_S)
        yield


@pytest.fixture(autouse=True)
def _logging_is_left_as_it_was() -> Iterator[None]:
    """A connector sets the level of our loggers; the next test reads what it asks for."""
    logger = logging.getLogger("s3ec")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def local_s3(_clean_environment: None) -> Iterator[LocalS3]:
    """A running SeaweedFS for the whole session; break only a server of your own."""
    try:
        find_weed()
    except ConfigError as exc:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(exc))
    with LocalS3() as server:
        yield server


@pytest.fixture(scope="session")
def moto_server(_clean_environment: None) -> Iterator[MotoServer]:
    """A running moto for the whole session."""
    with MotoServer() as server:
        yield server


@pytest.fixture
def s3_bucket(local_s3: LocalS3) -> Iterator[str]:
    """A new, empty bucket on the SeaweedFS of the session."""
    name = local_s3.create_bucket(f"test-{next(_numbers)}")
    yield name
    local_s3.delete_bucket(name)
