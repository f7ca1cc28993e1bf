# SPDX-License-Identifier: Apache-2.0
"""The checks: those of bucket and node side by side, those of vLLM in their order.

What needs a failed check is skipped, and nobody waits for an answer beyond the time for all.
"""

from __future__ import annotations

import glob
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from s3ec.config import Loaded
from s3ec.doctor import bucket, node, serving, writing
from s3ec.doctor.bucket import S3Probe
from s3ec.doctor.patient import CheckContext
from s3ec.doctor.report import Check, Outcome, Verdict, fail, ok, skip, warn
from s3ec.doctor.vllm_child import VllmChild
from s3ec.errors import ConfigError
from s3ec.runtime import DaemonPool
from s3ec.store.open import choose_transport, open_store
from s3ec.store.s3_client import check_settings
from s3ec.tenant import Tenant, exposure


@dataclass(frozen=True, slots=True)
class Step:
    """One check.

    Attributes:
        name: Of the check, for people and machines.
        group: Heading for people.
        run: The check.
        needs: Checks without which this one would only repeat their failure.
        after: Checks that have to have ended, well or not.
        where: Whether it is about corpora in ``s3``, about others (``url``), or ``both``.
        silent: What to do where it gets no answer in the time for all checks, which is a failure;
            empty where that is a warning.
    """

    name: str
    group: str
    run: Callable[[CheckContext], Outcome]
    needs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    where: Literal["s3", "url", "both"] = "both"
    silent: str = ""


def _settings(patient: CheckContext) -> Outcome:
    reference = patient.settings.tenant_key
    try:
        Tenant.read(reference)
    except ConfigError as exc:
        found, _, mend = str(exc).rpartition("; ")
        return fail(found, mend)
    exposed = exposure(reference)
    if exposed is not None:
        found, _, mend = exposed.rpartition("; ")
        return warn(found, mend)
    origins = patient.loaded.origins
    names: dict[str, list[str]] = {}
    for name, origin in origins.items():
        names.setdefault(origin, []).append(name)
    defaults = names.pop("default", [])
    told = [f"{', '.join(settings)} from {origin}" for origin, settings in names.items()]
    return ok("; ".join([*told, f"{len(defaults)} others at their defaults"]))


def _transport(patient: CheckContext) -> Outcome:
    chosen = choose_transport(patient.settings)
    return ok(f"{chosen.name} {version(chosen.name)}; {chosen.reason}")


_UNREACHED = "correct `endpoint_url`, or open the way (firewall, proxy, VPC endpoint)"
_NO_SOURCE = (
    "instance metadata, STS or a `credential_process` does not answer: set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or name a `profile`"
)
_SILENT_BUCKET = "the server answers, but not about this bucket: look at its log"
_WAY = ("credentials", "endpoint")
_VLLM = "vLLM"
STEPS = (
    Step("settings", "Settings", _settings),
    Step("transport", "Settings", _transport),
    Step("credentials", "Bucket", bucket.credentials, where="s3", silent=_NO_SOURCE),
    Step("endpoint", "Bucket", bucket.endpoint, where="s3", silent=_UNREACHED),
    Step("clock", "Bucket", bucket.clock, ("endpoint",), where="s3"),
    Step("bucket", "Bucket", bucket.bucket, _WAY, silent=_SILENT_BUCKET),
    Step("addressing", "Bucket", bucket.addressing, _WAY, ("bucket",), where="s3"),
    Step("read", "Bucket", bucket.read, ("bucket",)),
    Step("write", "Bucket", writing.write, ("bucket",), where="s3"),
    Step("write", "Bucket", writing.write_by_store, ("bucket",), where="url"),
    Step("sse", "Bucket", writing.sse, ("write",), where="s3"),
    Step("conditional_put", "Bucket", writing.conditional_put, ("write", "sse")),
    Step("checksums", "Bucket", writing.checksums, ("write",), where="s3"),
    Step("ranges", "Bucket", writing.ranges, ("write",), where="s3"),
    Step("listing", "Bucket", writing.listing, ("write",), where="s3"),
    Step("cache_folder", "This node", node.cache_folder),
    Step("cache_links", "This node", node.cache_links, ("cache_folder",)),
    Step("cache_space", "This node", node.cache_space, ("cache_folder",)),
    Step("vllm", _VLLM, serving.vllm),
    Step("hooks", _VLLM, serving.hooks, ("vllm",)),
    Step("connector", _VLLM, serving.connector),
    Step("model", _VLLM, serving.model),
    Step("identifiers", _VLLM, serving.identifiers, ("model",)),
    Step("namespace", _VLLM, serving.namespace, ("model",)),
    Step("corpus", "Corpus", serving.corpus, ("bucket",)),
)


# What makes a command of 2 s, and what is little beside the import of vLLM.
_LIMIT_S, _LIMIT_WITH_VLLM_S = 0.9, 10.0
# However busy the machine, nobody waits for more than so many times the limit.
_MOST_TIMES = 10
_SLICE_S = 0.05
_SCHEDSTATS = "/proc/self/task/*/schedstat"


def busy_s() -> float:
    """Seconds in which this process computed, or its threads waited for a processor."""
    delayed_ns = 0
    for path in glob.glob(_SCHEDSTATS):
        with suppress(OSError, ValueError, IndexError):  # a thread that has just ended
            delayed_ns += int(Path(path).read_text().split()[1])
    return time.process_time() + delayed_ns / 1e9


class Patience:
    """How long the checks of bucket and node may wait for answers, all together.

    Only waiting counts: a machine that is busy, with our imports or with others' work, must not
    make a healthy bucket look silent.

    Args:
        limit_s: So long.
        clock: Seconds, from any start.
        busy: Seconds of these in which we did not wait for answers.
    """

    def __init__(
        self,
        limit_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = busy_s,
    ) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._busy = busy
        self._started_s, self._busy_s = self._clock(), self._busy()

    def is_over(self) -> bool:
        """Whether nobody waits any more."""
        passed_s = self._clock() - self._started_s
        waited_s = passed_s - (self._busy() - self._busy_s)
        return waited_s > self.limit_s or passed_s > _MOST_TIMES * self.limit_s


def examine(
    loaded: Loaded,
    transfer: Mapping[str, Any],
    *,
    vllm_args: Sequence[str] | None = None,
    with_vllm: bool = True,
    timeout_s: float | None = None,
    starting: Callable[[Step], None] = lambda step: None,
) -> Iterator[Check]:
    """Run every check, and hand each out in its place, as soon as it and those before have ended.

    Writes and deletes a few throw-away objects and files. vLLM is imported after the others have
    been handed out, which takes 5 to 20 s.

    Args:
        loaded: Settings with their origins.
        transfer: The --ec-transfer-config, empty where it is not known.
        vllm_args: Arguments of ``vllm serve``, or None to leave the model out.
        with_vllm: Whether to look at vLLM.
        timeout_s: How long the checks of bucket and node may wait for answers, together; what has
            not ended then is given up. None for what makes a command of 2 s, and for more where
            vLLM takes longer anyway.
        starting: Called with the check that is waited for.

    Raises:
        ConfigError: The transport cannot be used, or the SDK not use profile, region or CA file.
    """
    if loaded.settings.url is None:
        check_settings(loaded.settings)
    else:
        open_store(loaded.settings)  # which sends nothing
    where = {"both", "s3" if loaded.settings.url is None else "url"}
    patient = CheckContext(loaded, transfer, vllm_args, S3Probe(loaded.settings), with_vllm)
    steps = [step for step in STEPS if step.where in where]
    imports_vllm = with_vllm and has_vllm()
    patience = Patience(timeout_s or (_LIMIT_WITH_VLLM_S if imports_vllm else _LIMIT_S))
    # Who imports vLLM waits for the namespace of its model before the corpus is looked at.
    later = [step for step in steps if imports_vllm and step.group in (_VLLM, "Corpus")]
    verdicts: dict[str, Verdict] = {}
    try:
        together = [step for step in steps if step not in later]
        for step, outcome in _side_by_side(together, patient, patience, starting):
            verdicts[step.name] = outcome.verdict
            yield Check(step.name, outcome)
        if later:
            patient.child = VllmChild(loaded.settings, vllm_args)
        for step in later:
            starting(step)
            outcome = _blocked(step, verdicts) or step.run(patient)
            verdicts[step.name] = outcome.verdict
            yield Check(step.name, outcome)
    finally:
        patient.close()


def _side_by_side(
    steps: Sequence[Step],
    patient: CheckContext,
    patience: Patience,
    starting: Callable[[Step], None],
) -> Iterator[tuple[Step, Outcome]]:
    """Outcomes in the order of the steps; each begins when those that it needs have ended."""
    pool = DaemonPool(len(steps), "s3ec-check")
    running: dict[str, Future[Outcome]] = {}

    def run(step: Step) -> Outcome:
        # A corpus elsewhere than in S3 is not asked about some of them.
        earlier = [running[name] for name in (*step.needs, *step.after) if name in running]
        wait(earlier)
        needed = {name: running[name].result().verdict for name in step.needs if name in running}
        return _blocked(step, needed) or step.run(patient)

    for step in steps:
        running[step.name] = pool.submit(run, step)
    verdicts: dict[str, Verdict] = {}
    for step in steps:
        outcome = _blocked(step, verdicts)
        if outcome is None:
            starting(step)
            outcome = _in_time(running[step.name], patience)
        # What is given up holds up whatever needs it, be it a failure or not.
        verdicts[step.name] = Verdict.FAIL if outcome is None else outcome.verdict
        yield step, outcome or _silent(step, patience)
    pool.shutdown(wait=False)


def _in_time(running: Future[Outcome], patience: Patience) -> Outcome | None:
    while not running.done() and not patience.is_over():
        wait([running], _SLICE_S)
    return running.result() if running.done() else None


def _silent(step: Step, patience: Patience) -> Outcome:
    found, longer = f"no answer within {patience.limit_s:g} s", "`--timeout 10` waits longer"
    return fail(found, f"{step.silent}; {longer}") if step.silent else warn(found, longer)


def _blocked(step: Step, verdicts: Mapping[str, Verdict]) -> Outcome | None:
    blocked = [n for n in step.needs if verdicts.get(n) in (Verdict.FAIL, Verdict.SKIP)]
    return skip(f"needs {' and '.join(blocked)}") if blocked else None


def has_vllm() -> bool:
    """Whether vLLM is installed, found out without importing it."""
    try:
        return importlib.util.find_spec("vllm") is not None
    except ImportError:  # somebody's import hook forbids it
        return False
