# SPDX-License-Identifier: Apache-2.0
"""How the demo names its connector, and how it ends an engine that nobody waits for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints

import psutil
import pytest

from s3ec.dev.demo import engines
from tests.support.waiting import eventually

# A child and a grandchild that both outlive an interrupt, as an engine core in the middle of a
# step can; the child says when both do.
STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a child inherits
code = "import signal; print(flush=True); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
signal.pause()
"""
OBEDIENT = """
import signal
print(0, flush=True)
signal.pause()
"""


def plugins(*names: str) -> EntryPoints:
    return EntryPoints(EntryPoint(name, "x:y", "vllm.general_plugins") for name in names)


@pytest.fixture
def spawned() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Children of a test, which are gone after it."""
    children: list[subprocess.Popen[bytes]] = []
    yield children
    for child in children:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def spawn(code: str, spawned: list[subprocess.Popen[bytes]]) -> list[psutil.Process]:
    """Start a child, wait until it is ready; returns it with its children."""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    spawned.append(child)
    assert child.stdout is not None
    assert child.stdout.readline()
    process = psutil.Process(child.pid)
    return [process, *process.children(recursive=True)]


def has_ended(process: psutil.Process) -> bool:
    """A grandchild is nobody's child at last, so it may stay a zombie until somebody reaps it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_transfer_config_is_the_name_alone_where_the_plugin_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "entry_points", lambda group: plugins("other", "s3ec"))
    config = engines.transfer_config("ec_both", {"bucket": "b"})
    assert config == {
        "ec_connector": "S3ECConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"bucket": "b"},
    }


def test_transfer_config_has_the_module_path_where_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "entry_points", lambda group: plugins("other"))
    config = engines.transfer_config("ec_both", {"bucket": "b"})
    assert config["ec_connector_module_path"] == "s3ec.connector"


def test_end_interrupts_first(spawned: list[subprocess.Popen[bytes]]) -> None:
    family = spawn(OBEDIENT, spawned)
    engines.end_all(family)
    assert not family[0].is_running()


def test_end_kills_what_an_interrupt_leaves(
    spawned: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = spawn(STUBBORN, spawned)
    assert len(family) == 2
    monkeypatch.setattr(engines, "END_TIMEOUT_S", 0.2)
    engines.end_all(family)
    eventually(lambda: all(map(has_ended, family)))


def test_end_of_no_process_does_nothing() -> None:
    engines.end_all([])
