# SPDX-License-Identifier: Apache-2.0
"""Runs the checks, one after another. A check that needs a failed one is skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from s3ec.config import LoadedSettings
from s3ec.counters import Report, unreported
from s3ec.doctor import bucket, node, replicas, serving
from s3ec.doctor.check import (
    REQUEST_S,
    Check,
    CheckContext,
    Outcome,
    Verdict,
    fail,
    ok,
    skip,
    warn,
)
from s3ec.errors import ConfigError
from s3ec.settings import Settings
from s3ec.store.open import check_transport, open_store
from s3ec.tenant import Tenant, exposure


@dataclass(frozen=True, slots=True)
class Step:
    """One check.

    Attributes:
        group: Heading in the printed list.
        run: The check; its name is the function's.
        needs: Checks that must pass first, since this one would only repeat their failure.
        only_s3: True if it does not apply to corpora outside S3.
        about: Name of the replica that it checks; there may be several.
    """

    group: str
    run: Callable[[CheckContext], Outcome]
    needs: tuple[str, ...] = ()
    only_s3: bool = False
    about: str = ""

    @property
    def name(self) -> str:
        """The check's name, in the printed list and in JSON."""
        return f"replica:{self.about}" if self.about else self.run.__name__


def settings(context: CheckContext) -> Outcome:
    """Check whether the settings, their S3 client and the tenant's secret can be used.

    Raises:
        ConfigError: The transport cannot be used, or the SDK cannot use profile, region or CA file.
    """
    check_transport(context.settings)
    if context.settings.url is None:
        from s3ec.store.s3_client import check_settings  # here, since the SDK's import is slow

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
    client = "obstore" if context.settings.url else context.settings.transport
    return ok(
        f"they go together, for {client} {version(client)}; `s3ec config show` says where each "
        "comes from"
    )


_BUCKET, _NODE, _VLLM = "Bucket", "This node", "vLLM"


def steps_for(given: Settings) -> list[Step]:
    """All checks, in their order."""
    steps = [
        Step("Settings", settings),
        Step(_BUCKET, bucket.credentials, only_s3=True),
        Step(_BUCKET, bucket.endpoint, only_s3=True),
        Step(_BUCKET, bucket.clock, ("endpoint",), only_s3=True),
        Step(_BUCKET, bucket.bucket, ("credentials", "endpoint")),
        Step(_BUCKET, bucket.read, ("bucket",)),
        Step(_BUCKET, bucket.write, ("bucket",)),
        Step(_BUCKET, bucket.sse, ("write",), only_s3=True),
        Step(_BUCKET, bucket.conditional_put, ("write", "sse")),
        Step(_BUCKET, bucket.ranges, ("write",), only_s3=True),
        Step(_BUCKET, bucket.listing, ("write",), only_s3=True),
        *(
            Step("Replicas", partial(replicas.replica, place=place), about=place.name)
            for place in given.replicas
        ),
        Step(_NODE, node.cache_folder),
        Step(_NODE, node.cache_space, ("cache_folder",)),
        Step(_VLLM, serving.vllm),
        Step(_VLLM, serving.connector),
        Step(_VLLM, serving.model),
        Step(_VLLM, serving.namespace, ("model",)),
        Step("Corpus", serving.corpus, ("bucket",)),
    ]
    return [one for one in steps if given.url is None or not one.only_s3]


def examine(
    loaded: LoadedSettings,
    transfer: Mapping[str, Any],
    *,
    vllm_args: Sequence[str] | None = None,
    with_vllm: bool = True,
    timeout_s: float = REQUEST_S,
    report: Report = unreported,
) -> Iterator[Check]:
    """Run every check in a fixed order, and yield each outcome as soon as it is known.

    Writes and deletes a few throw-away objects and files. Each request to the store has its own
    time limit, and there is none for all together, so that a busy machine fails no check. vLLM,
    whose import takes 5 to 20 s, is imported after the checks of bucket and node.

    Args:
        loaded: Settings with their origins.
        transfer: The --ec-transfer-config, empty if not known.
        vllm_args: Arguments of ``vllm serve``, or None to leave the model out.
        with_vllm: False to leave out vLLM.
        timeout_s: Longest wait for one response of the store.
        report: Called when a check begins.

    Raises:
        ConfigError: The transport cannot be used, or the SDK cannot use profile, region or CA file.
    """
    context = CheckContext(loaded, transfer, vllm_args, with_vllm, timeout_s)
    verdicts: dict[str, Verdict] = {}
    try:
        steps = steps_for(context.settings)
        for number, step in enumerate(steps):
            report(f"examining {step.name}", number, len(steps))
            outcome = _blocked(step, verdicts) or step.run(context)
            verdicts[step.name] = outcome.verdict
            yield Check(step.name, outcome, step.group)
    finally:
        context.close()


def _blocked(step: Step, verdicts: Mapping[str, Verdict]) -> Outcome | None:
    blocked = [n for n in step.needs if verdicts.get(n) in (Verdict.FAIL, Verdict.SKIP)]
    return skip(f"needs {' and '.join(blocked)}") if blocked else None
