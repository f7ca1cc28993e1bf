# SPDX-License-Identifier: Apache-2.0
"""``s3ec hydrate``: fill this node's tier before traffic."""

from __future__ import annotations

from typing import Annotated

from s3ec.cli.options import (
    CORPUS_AND_TIER,
    JsonOption,
    SettingsSource,
    lines_of,
    option,
    size_bytes,
    with_options,
)
from s3ec.cli.output import RESUMES, App, counting, end_job

_FULL = "the tier is full, and nothing that is in it goes for them"


commands = App()


@commands.command(
    "hydrate",
    ("s3ec hydrate --model gemma-3 --rate-limit 200MB", "everything there is room for"),
    ("s3ec tier ls --names | s3ec hydrate --ids -", "what another node has used"),
)
@with_options(CORPUS_AND_TIER)
def hydrate(
    source: SettingsSource,
    ids: Annotated[
        str | None,
        option(
            "--ids",
            "FILE",
            "Only these entries: a file with an identifier or a label on each line, or -.",
        ),
    ] = None,
    rate_limit: Annotated[
        int | None,
        option("--rate-limit", "SIZE", "Bytes per second, such as `100MB`.", parser=size_bytes),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch entries into this node's disk tier before engines request them, and check every byte.

    Fetches everything in the namespace, or the entries of --ids, in their order. It evicts nothing:
    when the tier is full, it leaves out the rest. An entry that is there already costs no request,
    so the next run resumes after an interruption. Engines may run meanwhile.

    Exits with 3 if a requested entry is not on this node afterwards.
    """
    given = None if ids is None else lines_of(ids)
    with source.corpus() as corpus:
        name = source.choose(corpus)
        with counting("hydrating", in_bytes=True, resume=RESUMES) as report:
            found = corpus.hydrate(
                given, namespace=name, rate_limit_bytes_per_s=rate_limit, report=report
            )
    kinds = {"absent": dict.fromkeys(found.absent, "the bucket does not have it")}
    kinds |= {"damaged": found.damaged, "failed": found.failed}
    failures = [
        {"label": label, "kind": kind, "reason": why}
        for kind, some in kinds.items()
        for label, why in some.items()
    ]
    document = {
        "status": found.status,
        "namespace": found.namespace,
        "cache_dir": found.folder,
        "wanted_count": found.wanted,
        "present_count": found.here,
        "fetched_count": found.fetched,
        "fetched_bytes": found.fetched_bytes,
        "left_out_count": found.left_out,
        "left_out_bytes": found.left_out_bytes,
        "problem": _FULL if found.stopped == "full" else found.stopped or None,
        "seconds": found.seconds,
        "failures": failures,
    }
    end_job(document, as_json=as_json)
