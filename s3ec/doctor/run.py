# SPDX-License-Identifier: Apache-2.0
"""Runs the checks: those of bucket and node side by side, then those of vLLM in their order.

What needs a failed check is skipped, and nobody waits for an answer beyond the time for all.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from s3ec.config import LoadedSettings
from s3ec.doctor import bucket, node, payoff, serving
from s3ec.doctor.check import Check, CheckContext, Outcome, Verdict, fail, ok, skip, warn
from s3ec.doctor.serving import VllmChild
from s3ec.errors import ConfigError
from s3ec.runtime import DaemonPool
from s3ec.store.open import choose_transport, open_store
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


def _settings(context: CheckContext) -> Outcome:
    """Whether the settings and the tenant's secret can be used, and where values come from.

    Raises:
        ConfigError: The transport cannot be used, or the SDK not use profile, region or CA file.
    """
    if context.settings.url is None:
        from s3ec.store.s3_client import check_settings  # here, since the SDK takes so long

        check_settings(context.settings)
    else:
        open_store(context.settings)  # which sends nothing
    reference = context.settings.tenant_key
    try:
        Tenant.read(reference)
    except ConfigError as exc:
        found, _, mend = str(exc).rpartition("; ")
        return fail(found, mend)
    exposed = exposure(reference)
    if exposed is not None:
        found, _, mend = exposed.rpartition("; ")
        return warn(found, mend)
    origins = context.loaded.origins
    names: dict[str, list[str]] = {}
    for name, origin in origins.items():
        names.setdefault(origin, []).append(name)
    defaults = names.pop("default", [])
    told = [f"{', '.join(settings)} from {origin}" for origin, settings in names.items()]
    return ok("; ".join([*told, f"{len(defaults)} others at their defaults"]))


def _transport(context: CheckContext) -> Outcome:
    chosen = choose_transport(context.settings)
    return ok(f"{chosen.name} {version(chosen.name)}; {chosen.reason}")


_UNREACHED = "correct `endpoint_url`, or open the way (firewall, proxy, VPC endpoint)"
_NO_SOURCE = (
    "instance metadata, STS or a `credential_process` does not answer: set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or name a `profile`"
)
_SILENT_BUCKET = "the server answers, but not about this bucket: look at its log"
_SDK = ("settings",)  # which imports it, and that takes longer than an answer
_WAY = ("credentials", "endpoint")
_SETTINGS, _VLLM, _PAYOFF = "Settings", "vLLM", "Does it pay"
STEPS = (
    Step("settings", _SETTINGS, _settings),
    Step("transport", _SETTINGS, _transport),
    Step("credentials", "Bucket", bucket.credentials, (), _SDK, "s3", _NO_SOURCE),
    Step("endpoint", "Bucket", bucket.endpoint, (), _SDK, "s3", _UNREACHED),
    Step("clock", "Bucket", bucket.clock, ("endpoint",), where="s3"),
    Step("bucket", "Bucket", bucket.bucket, _WAY, silent=_SILENT_BUCKET),
    Step("addressing", "Bucket", bucket.addressing, _WAY, ("bucket",), where="s3"),
    Step("read", "Bucket", bucket.read, ("bucket",)),
    Step("write", "Bucket", bucket.write, ("bucket",), where="s3"),
    Step("write", "Bucket", bucket.write_by_store, ("bucket",), where="url"),
    Step("sse", "Bucket", bucket.sse, ("write",), where="s3"),
    Step("conditional_put", "Bucket", bucket.conditional_put, ("write", "sse")),
    Step("checksums", "Bucket", bucket.checksums, ("write",), where="s3"),
    Step("ranges", "Bucket", bucket.ranges, ("write",), where="s3"),
    Step("listing", "Bucket", bucket.listing, ("write",), where="s3"),
    Step("cache_folder", "This node", node.cache_folder),
    Step("cache_links", "This node", node.cache_links, ("cache_folder",)),
    Step("open_files", "This node", node.open_files),
    Step("cache_space", "This node", node.cache_space, ("cache_folder",)),
    Step("vllm", _VLLM, serving.vllm),
    Step("hooks", _VLLM, serving.hooks, ("vllm",)),
    Step("connector", _VLLM, serving.connector),
    Step("model", _VLLM, serving.model),
    Step("identifiers", _VLLM, serving.identifiers, ("model",)),
    Step("encoder_cache", _VLLM, serving.encoder_cache, ("model",)),
    Step("without_pixels", _VLLM, serving.without_pixels, ("model",)),
    Step("namespace", _VLLM, serving.namespace, ("model",)),
    Step("corpus", "Corpus", serving.corpus, ("bucket",)),
    Step("latency", _PAYOFF, payoff.latency, ("write",)),
    Step("payoff", _PAYOFF, payoff.payoff, ("model",), ("latency",)),
)


# Seconds from the start of the command. The first makes a command of 2 s: the rest of them is for
# the start of the interpreter and for its end. The second is little beside the import of vLLM.
LIMIT_S, LIMIT_WITH_VLLM_S = 1.6, 10.0
# For letting go of connections, where the time is over.
_CLOSE_S = 0.1


def examine(
    loaded: LoadedSettings,
    transfer: Mapping[str, Any],
    *,
    vllm_args: Sequence[str] | None = None,
    with_vllm: bool = True,
    with_latency: bool = False,
    timeout_s: float | None = None,
    started_s: float | None = None,
    starting: Callable[[Step], None] = lambda step: None,
) -> Iterator[Check]:
    """Run every check, and yield the outcomes in a fixed order, each as soon as it is known.

    Writes and deletes a few throw-away objects and files. vLLM is imported after the others have
    been handed out, which takes 5 to 20 s.

    Args:
        loaded: Settings with their origins.
        transfer: The --ec-transfer-config, empty where it is not known.
        vllm_args: Arguments of ``vllm serve``, or None to leave the model out.
        with_vllm: Whether to look at vLLM.
        with_latency: Whether to measure the store, which takes seconds beyond ``timeout_s``.
        timeout_s: How long the checks of bucket and node may take together; what has not ended
            then is given up. None for LIMIT_S, and for LIMIT_WITH_VLLM_S where vLLM is imported.
        started_s: Since when, by time.monotonic(); None for now. A command counts its imports too.
        starting: Called with the check that is waited for.

    Raises:
        ConfigError: The transport cannot be used, or the SDK not use profile, region or CA file.
    """
    started_s = time.monotonic() if started_s is None else started_s
    where = {"both", "s3" if loaded.settings.url is None else "url"}
    context = CheckContext(loaded, transfer, vllm_args, with_vllm, with_latency)
    steps = [step for step in STEPS if step.where in where]
    imports_vllm = with_vllm and has_vllm()
    limit_s = timeout_s or (LIMIT_WITH_VLLM_S if imports_vllm else LIMIT_S)
    end_s = started_s + limit_s
    # Who imports vLLM waits for the namespace of its model before the corpus is looked at.
    later = [
        step
        for step in steps
        if (imports_vllm and step.group in (_VLLM, "Corpus", _PAYOFF))
        or (with_latency and step.group == _PAYOFF)
    ]
    verdicts: dict[str, Verdict] = {}
    try:
        together = [step for step in steps if step not in later]
        for step, outcome in _side_by_side(together, context, limit_s, end_s, starting):
            verdicts[step.name] = outcome.verdict
            yield Check(step.name, outcome, step.group)
        if imports_vllm:
            context.child = VllmChild(loaded.settings, vllm_args, role=serving.role_of(context))
        for step in later:
            starting(step)
            outcome = _blocked(step, verdicts) or step.run(context)
            verdicts[step.name] = outcome.verdict
            yield Check(step.name, outcome, step.group)
    finally:
        context.close(max(end_s - time.monotonic(), 0.0) + _CLOSE_S)


def _side_by_side(
    steps: Sequence[Step],
    context: CheckContext,
    limit_s: float,
    end_s: float,
    starting: Callable[[Step], None],
) -> Iterator[tuple[Step, Outcome]]:
    """Yield outcomes in the order of the steps. A step begins once those that it needs ended."""
    pool = DaemonPool(len(steps), "s3ec-check")
    running: dict[str, Future[Outcome]] = {}
    begun: set[str] = set()

    def run(step: Step) -> Outcome:
        # A corpus elsewhere than in S3 is not asked about some of them.
        earlier = [running[name] for name in (*step.needs, *step.after) if name in running]
        wait(earlier)
        needed = {name: running[name].result().verdict for name in step.needs if name in running}
        if time.monotonic() >= end_s:
            return _silent(step, None)
        begun.add(step.name)
        return _blocked(step, needed) or step.run(context)

    for step in steps:
        running[step.name] = pool.submit(run, step)
    verdicts: dict[str, Verdict] = {}
    for step in steps:
        outcome = _blocked(step, verdicts)
        if outcome is None:
            starting(step)
            wait([running[step.name]], max(end_s - time.monotonic(), 0.0))
            if running[step.name].done():
                outcome = running[step.name].result()
        # What is given up holds up whatever needs it, be it a failure or not.
        verdicts[step.name] = Verdict.FAIL if outcome is None else outcome.verdict
        # Settings ask nobody.
        asked = step.name in begun and step.group != _SETTINGS
        yield step, outcome or _silent(step, limit_s if asked else None)
    pool.shutdown(wait=False)


def _silent(step: Step, limit_s: float | None) -> Outcome:
    """The outcome of a check that has not ended in time.

    Args:
        limit_s: The time for all checks; None where this one has asked nobody yet.
    """
    found = "not checked: no time" if limit_s is None else f"no answer within {limit_s:g} s"
    longer = "`--timeout 10` waits longer"
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
