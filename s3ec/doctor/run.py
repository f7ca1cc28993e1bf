# SPDX-License-Identifier: Apache-2.0
"""The checks in order; what needs a failed one is skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from s3ec.config import Loaded
from s3ec.doctor import bucket, node, serving, writing
from s3ec.doctor.patient import Patient
from s3ec.doctor.report import Check, Outcome, Verdict, fail, ok, skip, warn
from s3ec.doctor.s3 import S3Probe
from s3ec.doctor.vllm_child import VllmChild
from s3ec.errors import ConfigError
from s3ec.store.open import choose_transport, open_store
from s3ec.store.sdk_client import check_settings
from s3ec.tenant import Tenant, exposure


@dataclass(frozen=True, slots=True)
class Step:
    """One check.

    Attributes:
        name: Of the check, for people and machines.
        group: Heading for people.
        run: The check.
        needs: Checks without which this one would only repeat their failure.
        where: Whether it is about corpora in ``s3``, about others (``url``), or ``both``.
    """

    name: str
    group: str
    run: Callable[[Patient], Outcome]
    needs: tuple[str, ...] = ()
    where: Literal["s3", "url", "both"] = "both"


def _settings(patient: Patient) -> Outcome:
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


def _transport(patient: Patient) -> Outcome:
    chosen = choose_transport(patient.settings)
    return ok(f"{chosen.name} {version(chosen.name)}; {chosen.reason}")


STEPS = (
    Step("settings", "Settings", _settings),
    Step("transport", "Settings", _transport),
    Step("credentials", "Bucket", bucket.credentials, where="s3"),
    Step("endpoint", "Bucket", bucket.endpoint, where="s3"),
    Step("clock", "Bucket", bucket.clock, ("endpoint",), where="s3"),
    Step("bucket", "Bucket", bucket.bucket, ("credentials", "endpoint")),
    Step("addressing", "Bucket", bucket.addressing, ("credentials", "endpoint"), where="s3"),
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
    Step("vllm", "vLLM", serving.vllm),
    Step("hooks", "vLLM", serving.hooks, ("vllm",)),
    Step("connector", "vLLM", serving.connector),
    Step("model", "vLLM", serving.model),
    Step("identifiers", "vLLM", serving.identifiers, ("model",)),
    Step("namespace", "vLLM", serving.namespace, ("model",)),
    Step("corpus", "vLLM", serving.corpus, ("bucket",)),
)


def examine(
    loaded: Loaded,
    transfer: Mapping[str, Any],
    *,
    vllm_args: Sequence[str] | None = None,
    starting: Callable[[Step], None] = lambda step: None,
) -> Iterator[Check]:
    """Run every check, one after the other, and hand each out as it ends.

    Writes and deletes a few throw-away objects and files; takes as long as vLLM takes to
    import where that is installed, a few seconds otherwise.

    Args:
        loaded: Settings with their origins.
        transfer: The --ec-transfer-config, empty where it is not known.
        vllm_args: Arguments of ``vllm serve``, or None to leave the model out.
        starting: Called before each check that runs.

    Raises:
        ConfigError: The transport cannot be used, or the SDK not use profile, region or CA file.
    """
    if loaded.settings.url is None:
        check_settings(loaded.settings)
    else:
        open_store(loaded.settings)  # which sends nothing
    where = {"both", "s3" if loaded.settings.url is None else "url"}
    patient = Patient(loaded, transfer, vllm_args, S3Probe(loaded.settings))
    if _has_vllm():
        patient.child = VllmChild(loaded.settings, vllm_args)
    try:
        verdicts: dict[str, Verdict] = {}
        for step in STEPS:
            if step.where not in where:
                continue
            blocked = [n for n in step.needs if verdicts.get(n) in (Verdict.FAIL, Verdict.SKIP)]
            if blocked:
                outcome = skip(f"needs {' and '.join(blocked)}")
            else:
                starting(step)
                outcome = step.run(patient)
            verdicts[step.name] = outcome.verdict
            yield Check(step.name, outcome)
    finally:
        patient.s3.close()
        if patient.child is not None:
            patient.child.close()


def _has_vllm() -> bool:
    """Whether vLLM is installed, found out without importing it."""
    try:
        return importlib.util.find_spec("vllm") is not None
    except ImportError:  # somebody's import hook forbids it
        return False
