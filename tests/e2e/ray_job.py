# SPDX-License-Identifier: Apache-2.0
"""A job on a Ray of this machine, with two real engines of which one is killed in the middle.

The driver is a process of its own. Each worker notes in a file what its model runner has encoded,
at the connector's hook, so that what was encoded twice is the workers' word and not the report's.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from s3ec.corpus import Corpus
from s3ec.corpus.encoder import VllmEncoder

WORKERS = 2
# Items of a chunk, so many more than the engine has at a time.
CHUNK, BATCH = 12, 4
# Between two embeddings of a worker: announcements come every 2 s, and one has to come before the
# last picture is encoded.
_PAUSE_S = 0.15
_POLL_S = 0.005
ENGINE: Mapping[str, Any] = {
    "enforce_eager": True,
    "gpu_memory_utilization": 0.3,
    "max_model_len": 1024,
    "max_num_seqs": 4,
}


class NotingEncoder(VllmEncoder):
    """Notes each start and each embedding; goes on when ``gate`` is there.

    A line is ``PID started`` or ``PID HASH``. The namespace is in a file beside the notes.
    """

    def __init__(self, notes: Path, gate: Path, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._notes = notes
        self._gate = gate

    def _note(self, what: str) -> None:
        with self._notes.open("a") as file:  # one write a line, so lines of two stay whole
            file.write(f"{os.getpid()} {what}\n")

    def _start(self) -> None:
        from s3ec.connector.connector import S3ECConnector

        save = S3ECConnector.save_caches

        def noting(connector: Any, encoder_cache: Any, mm_hash: str, **more: Any) -> None:
            self._note(mm_hash)
            time.sleep(_PAUSE_S)
            save(connector, encoder_cache, mm_hash, **more)

        S3ECConnector.save_caches = noting  # type: ignore[assignment, method-assign]
        super()._start()
        _namespace_file(self._notes).write_text(self.namespace().name)
        self._note("started")
        while not self._gate.exists():
            time.sleep(_POLL_S)


@dataclass(frozen=True)
class Outcome:
    """How a job ended of which a worker was killed.

    Attributes:
        report: The job's own, as JSON.
        encoded: How often each item was encoded, by vLLM's name for it.
        of_killed: What the killed worker had encoded by its own notes.
        confirmed: What the index told of before the kill: stored, and announced by its writer.
        account: Who encoded what, and the end of the driver's log, for people.
    """

    report: Mapping[str, Any]
    encoded: Mapping[str, int]
    of_killed: frozenset[str]
    confirmed: frozenset[str]
    account: str

    @property
    def twice(self) -> frozenset[str]:
        """What was encoded more than once."""
        return frozenset(name for name, count in self.encoded.items() if count > 1)

    @property
    def beyond_flight(self) -> frozenset[str]:
        """What was encoded again though no worker that died had it in flight."""
        return self.twice - (self.of_killed - self.confirmed)


def run_killing_one(
    folder: Path,
    pictures: Path,
    model: Path,
    settings: Mapping[str, Any],
    *,
    env: Mapping[str, str],
    timeout_s: float,
) -> Outcome:
    """Encode a folder of pictures by two workers, and kill one of them by SIGKILL.

    Args:
        folder: For notes and logs; its path is short enough for sockets below it.
        settings: Of the corpus.
        env: Of the driver, which its workers inherit.
        timeout_s: For all of it.

    Raises:
        RuntimeError: It did not come to its end; the message has the end of the log.
    """
    notes, gate, report = folder / "notes", folder / "gate", folder / "report.json"
    notes.touch()
    spec = {
        "source": str(pictures),
        "model": str(model),
        "settings": dict(settings),
        "notes": str(notes),
        "gate": str(gate),
        "report": str(report),
    }
    end_s = time.monotonic() + timeout_s
    with (folder / "log").open("ab") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.ray_job", json.dumps(spec)],
            env={**env, "RAY_TMPDIR": str(folder), "HOME": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            until = partial(_until, driver, end_s)
            until(lambda: len(_notes(notes, "started")) == WORKERS)
            killed, confirmed = _find_victim(settings, folder, notes, gate, until)
            os.kill(killed, signal.SIGKILL)
            driver.wait(max(end_s - time.monotonic(), 0.0))
        except (RuntimeError, subprocess.TimeoutExpired) as exc:
            driver.terminate()
            driver.wait()
            text = (folder / "log").read_text(errors="replace")
            text += report.read_text() if report.exists() else ""
            raise RuntimeError(f"the job did not end ({exc}): {text[-4000:]}") from exc
    if not report.exists():
        text = (folder / "log").read_text(errors="replace")
        raise RuntimeError(f"the job left no report: {text[-4000:]}")
    made = [(pid, name) for pid, name in _lines(notes) if name != "started"]
    return Outcome(
        json.loads(report.read_text()),
        Counter(name for _, name in made),
        frozenset(name for pid, name in made if pid == killed),
        confirmed,
        _account(killed, made, confirmed, (folder / "log").read_text(errors="replace")),
    )


def _account(
    killed: int, made: Sequence[tuple[int, str]], confirmed: frozenset[str], log: str
) -> str:
    lines = [f"killed: {killed}"]
    lines += [
        f"{pid} {name[:12]}{' confirmed before the kill' if name in confirmed else ''}"
        for pid, name in made
    ]
    return "\n".join([*lines, log[-20_000:]])


def _until(driver: subprocess.Popen[bytes], end_s: float, condition: Callable[[], bool]) -> None:
    while not condition():
        if driver.poll() is not None:
            raise RuntimeError(f"the driver has ended with {driver.returncode}")
        if time.monotonic() > end_s:
            raise RuntimeError("it took too long")
        time.sleep(_POLL_S)


def _lines(notes: Path) -> list[tuple[int, str]]:
    whole = (line for line in notes.read_text().splitlines(keepends=True) if line.endswith("\n"))
    found = (line.split() for line in whole)
    return [(int(pid), what) for pid, what in found]


def _notes(notes: Path, what: str) -> list[int]:
    return [pid for pid, each in _lines(notes) if each == what]


def _encoded(notes: Path) -> dict[int, set[str]]:
    """What each process has encoded so far."""
    found: dict[int, set[str]] = {}
    for pid, what in _lines(notes):
        if what != "started":
            found.setdefault(pid, set()).add(what)
    return found


def _namespace_file(notes: Path) -> Path:
    return notes.with_name("namespace")


def _find_victim(
    settings: Mapping[str, Any],
    folder: Path,
    notes: Path,
    gate: Path,
    until: Callable[[Callable[[], bool]], None],
) -> tuple[int, frozenset[str]]:
    """A process that has announced something of what it has encoded, and not all of it.

    Returns:
        Its number, and what was announced, by all processes.
    """
    from s3ec.corpus.confirmations import Ledger
    from s3ec.identity import Namespace

    victims: list[int] = []
    told: frozenset[str] = frozenset()
    cache_dir = folder / "tier of the killer"
    with Corpus.open({**settings, "cache_dir": str(cache_dir)}) as corpus:
        ledger = Ledger(corpus, Namespace(_namespace_file(notes).read_text(), {}))

        def look() -> bool:
            nonlocal told
            corpus.run(lambda store: ledger.index.refresh())
            encoded = _encoded(notes)
            keys = {name: ledger.key(name) for name in set().union(*encoded.values())}
            told = frozenset(name for name, key in keys.items() if key and ledger.holds(key))
            victims.extend(pid for pid, names in encoded.items() if names & told and names - told)
            return bool(victims)

        try:
            gate.touch()
            until(look)
        finally:
            ledger.close()
    return victims[0], told


def stored(settings: Mapping[str, Any]) -> frozenset[str]:
    """Names of all embeddings in the bucket, by a listing; none where there is no namespace."""
    with Corpus.open(settings) as corpus:
        if not corpus.namespaces():
            return frozenset()
        return frozenset(entry.label for entry in corpus.list())


def start_ray(cpus: int) -> None:
    """Start a Ray on loopback, with its files below RAY_TMPDIR."""
    os.environ |= {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # has it use loopback, on any system
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    import ray

    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    ray.init("local", num_cpus=cpus, include_dashboard=False, **quiet)


def main() -> None:
    """The driver; or the command line, where the arguments are such."""
    spec = json.loads(sys.argv[1])
    start_ray(WORKERS)
    if isinstance(spec, list):
        sys.argv[1:] = spec
        runpy.run_module("s3ec", run_name="__main__", alter_sys=True)
        return
    from s3ec.config import load_settings
    from s3ec.corpus.precompute import Job
    from s3ec.corpus.ray_encoder import RayEncoder, RayOptions
    from s3ec.corpus.sources import open_source

    settings = load_settings(spec["settings"]).settings
    make = partial(
        NotingEncoder,
        Path(spec["notes"]),
        Path(spec["gate"]),
        spec["model"],
        settings,
        engine_args=ENGINE,
        batch=BATCH,
    )
    options = RayOptions(workers=(WORKERS, WORKERS), gpus=0, cpus=1)
    with Corpus(settings) as corpus:
        job = Job(corpus, open_source(spec["source"]), RayEncoder(make, options, chunk=CHUNK))
        try:
            job.run()
        finally:
            Path(spec["report"]).write_text(json.dumps(job.report.to_json()))


if __name__ == "__main__":
    main()
