# SPDX-License-Identifier: Apache-2.0
"""Checks of what it comes to: how fast the store is here, and whether this model pays at all."""

from __future__ import annotations

from typing import Any

from s3ec.doctor.advise import Measured, inputs_of, preset_of, prices_of
from s3ec.doctor.bucket import outcome_of
from s3ec.doctor.check import CheckContext, Outcome, ok, skip, warn
from s3ec.doctor.latency import AT_ONCE, measure
from s3ec.errors import S3ECError
from s3ec.payoff import Known, pay_off

# Gemma3-27B's, where no model was named.
_USUAL_BYTES = 256 * 5376 * 2
_FAR_MS, _SMALL_BYTES = 150.0, 4 * 2**20


def latency(context: CheckContext) -> Outcome:
    """How long reads take, at the size of one embedding of this model."""
    if not context.with_latency:
        return skip("not asked for; `--latency` measures it")
    pages = _pages(context)
    nbytes = int(pages["rows"] * pages["width"] * pages["itemsize"]) if pages else _USUAL_BYTES
    try:
        found = measure(context, nbytes)
    except S3ECError as exc:
        return outcome_of(exc, "s3:PutObject and s3:GetObject")
    context.latency = found
    alone, together = found.alone, found.together
    told = (
        f"{nbytes / 1e6:.3g} MB: one read p50 {alone.p50_ms:.3g} ms, p90 {alone.p90_ms:.3g}, p99 "
        f"{alone.p99_ms:.3g}; {AT_ONCE} at a time p50 {together.p50_ms:.3g}, p99 "
        f"{together.p99_ms:.3g}, {found.node_mb_s:.3g} MB/s; one write {found.put_ms:.3g} ms"
    )
    if found.left:
        told += f"; deleting is not allowed, so one object stays: {found.left}"
    if nbytes <= _SMALL_BYTES and alone.p50_ms > _FAR_MS:
        return warn(told, "is the store in another region? A copy that is near is faster")
    return ok(told)


def payoff(context: CheckContext) -> Outcome:
    """Whether this model pays at all, on this machine's GPU."""
    pages = _pages(context)
    if pages is None:
        return skip("no model was named" if context.vllm_args is None else "its size is not known")
    nbytes = pages["rows"] * pages["width"] * pages["itemsize"]
    size = f"{pages['rows']:.0f} x {pages['width']}, {nbytes / 1e6:.3g} MB for an A4 page"
    if pages["gpu"] is None or preset_of(pages["gpu"]) is None or pages["encoder"] is None:
        return ok(f"{size}; `s3ec advise` says whether that pays")
    known = Known(store=prices_of(context.settings))
    found = pay_off(inputs_of(known, Measured(pages=pages, latency=context.latency)))
    answers = [f"{name} {getattr(found, name).word}" for name in ("latency", "throughput", "money")]
    told = f"{size}; estimated: {', '.join(answers)}"
    if found.is_a_loss:
        return warn(
            told, "encoding again is faster and costs less: see `s3ec advise`, or serve without"
        )
    return ok(told)


def _pages(context: CheckContext) -> Any:
    """What the model's processor makes of a page; None where nobody could be asked."""
    return context.child.stage("pages") if context.child else None
