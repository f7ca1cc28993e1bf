# SPDX-License-Identifier: Apache-2.0
"""One process that has imported vLLM, and forks engines: importing is most of a start.

Its engines differ from those that EngineProcess starts by itself in what costs time at a start and
an end: an engine of several processes forks the others, where it would spawn them on a CPU; vLLM
looks at a model's class here and not in one more process; torch compiles nothing; nothing that was
imported is freed. What is read from the environment while vLLM and torch are imported is the same
for all of them. It forks vLLM's API server as well.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from s3ec.dev.rigs.vllm_cpu import engine_env

# What a start imports; one that a release of vLLM does not have is imported by the engine.
_MODULES = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.entrypoints.launchers.api_server.entry",
    "transformers.tokenization_mistral_common",
    "s3ec.dev.rigs.engine_child",
)
# Read while those are imported, so an engine cannot have another value.
_READ_ONCE = ("OMP_NUM_THREADS", "PYTHONPATH", "VLLM_LOGGING_LEVEL", "HF_HUB_OFFLINE", "HF_HOME")
_MESSAGE_BYTES = 2**17


class Forked:
    """A forked process, as much of a Popen as EngineProcess and ApiServer need."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    def __del__(self) -> None:
        os.close(self._pidfd)

    def poll(self) -> str | None:
        """None while it lives; its parent alone learns the exit status."""
        return "forked" if self._has_ended(0) else None

    def wait(self, timeout: float | None = None) -> str:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It did not come.
        """
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(f"engine {self.pid}", timeout or 0.0)
        return "forked"

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def _has_ended(self, timeout_s: float | None) -> bool:
        poller = select.poll()  # select() refuses descriptors from 1024 on
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))


class EngineForkServer:
    """Forks engines; a context manager, for any number of threads."""

    def __init__(self, log_path: Path, env: Mapping[str, str] | None = None) -> None:
        """Nothing runs yet.

        Args:
            log_path: Where its own words go.
            env: Additions to the environment, as EngineProcess takes them.
        """
        self._log_path = log_path
        self._env = engine_env({**os.environ, **(env or {})})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EngineForkServer:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(self._log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "s3ec.dev.rigs.nursery", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
                pass_fds=(theirs.fileno(),),
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()  # the end of requests; engines go on
        if self._process is not None:
            self._process.wait()

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        log: int,
        fds: Sequence[int],
    ) -> Forked:
        """As ``spawn``, which calls it; waits until vLLM is imported.

        Engines that the new process starts are forked from it in turn.

        Raises:
            ValueError: The environment differs in what was read already.
            OSError: The nursery ended; its log says why.
        """
        for name in _READ_ONCE:
            if env.get(name) != self._env.get(name):
                raise ValueError(f"an engine of this nursery cannot have its own {name}")
        asked = {"module": module, "arguments": list(arguments), "env": dict(env)}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(asked).encode()], [*fds, log])
            pid, pidfds, _, _ = socket.recv_fds(self._socket, 64, 1)
        if not pid:
            raise OSError(f"the nursery ended: {self._log_path.read_text()[-4000:]}")
        return Forked(int(pid), pidfds[0])


def spawn(
    module: str,
    arguments: Sequence[str] = (),
    *,
    env: Mapping[str, str],
    log: int,
    fds: Sequence[int] = (),
    nursery: EngineForkServer | None = None,
) -> subprocess.Popen[bytes] | Forked:
    """Start ``python -m MODULE ARGUMENTS`` in a process group of its own.

    Args:
        module: Its full name.
        arguments: Of its command line.
        env: Its environment, whole.
        log: Descriptor for its standard output and error.
        fds: Descriptors that it inherits; their numbers are its last arguments.
        nursery: Forks it; None starts a new interpreter.
    """
    if nursery is not None:
        return nursery.fork(module, arguments, env=env, log=log, fds=fds)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments, *map(str, fds)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=env,
        pass_fds=fds,
        start_new_session=True,  # so that its workers can be ended with it
    )


def end(process: subprocess.Popen[bytes] | Forked, timeout_s: float) -> None:
    """Wait for the end of a process that was told to end; then kill what is left of its group."""
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    """Import; then fork an engine for each message, until the socket ends."""
    atexit.register(_leave)  # the first one runs last
    # Without it vLLM compiles one helper when it is first asked for log probabilities.
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    for name in _MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    from s3ec.dev.rigs import engine_child

    with suppress(ImportError):
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda look: look()
    # A collection writes to each object, and what is written to is copied for the writer alone.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that ended
    with socket.socket(fileno=int(sys.argv[1])) as messages:
        while True:
            message, fds, _, _ = socket.recv_fds(messages, _MESSAGE_BYTES, 3)
            if not message:
                return
            pid = os.fork()
            # A group of its own, so that its workers end with it. Whoever is first makes it.
            with suppress(OSError):
                os.setpgid(pid, pid)
            if not pid:
                break
            pidfd = os.pidfd_open(pid)
            socket.send_fds(messages, [str(pid).encode()], [pidfd])
            for fd in (*fds, pidfd):
                os.close(fd)
    # The new process from here on.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.unfreeze = lambda: None  # by vLLM as an engine ends; what was imported stays as it is
    asked = json.loads(message)
    os.environ.clear()
    os.environ.update(asked["env"])
    *pipes, log = fds
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Those that are spawned would import everything again. vLLM forks them by default, but on a CPU
    # it sets its variable to `spawn` itself (0.32: platforms/cpu.py).
    context: Any = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda _method=None: context
    if asked["module"] == engine_child.__name__:  # which is imported
        engine_child.serve(*pipes)
    else:
        sys.argv = [asked["module"].rpartition(".")[2], *asked["arguments"]]
        runpy.run_module(asked["module"], run_name="__main__")


def _leave() -> None:
    """End without freeing every object that was imported: that would copy nearly all of them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nobody asks for the status


if __name__ == "__main__":
    main()
