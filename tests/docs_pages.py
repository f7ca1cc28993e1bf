# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/ that are made from the code: settings, commands, metrics and payoff.

``python -m tests.docs_pages`` writes them between the marker comments of their pages, and
``make docs`` calls it. tests/unit/test_docs.py fails while a page is stale.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from s3ec.cli.app import app
from s3ec.connector.metrics import (
    GAUGES,
    HISTOGRAMS,
    LABELLED,
    NOT_EXPORTED,
    PLAIN,
    label_values,
)
from s3ec.doctor.advise import Measured, inputs_of
from s3ec.payoff import GPUS, MODELS, STORES, Known, ModelEstimate, Payoff, pay_off
from s3ec.settings import settings_table

DOCS = Path(__file__).parents[1] / "docs"
# Options that many commands have; docs/commands.md explains them once, at its beginning.
_SETTINGS = {
    "--config", "--url", "--bucket", "--prefix", "--endpoint-url", "--region", "--profile",
    "--ca-bundle", "--allow-http", "--cache-dir", "--cache-bytes",
}  # fmt: skip
_SHARED = {"--json", "--namespace", "--model", "--yes", "--dry-run"}
_LEFT_OUT = {"--help", "--install-completion", "--show-completion"}


def _table(headings: str, rows: Iterator[tuple[str, ...]]) -> str:
    lines = [headings, re.sub(r"[^|]+", "---", headings)]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _prometheus(name: str, labels: tuple[str, ...] = ()) -> str:
    return f"`{name}{{{', '.join(labels)}}}`" if labels else f"`{name}`"


def metrics_tables() -> str:
    """All metrics, the values of their labels, and what is counted and not exported."""
    counters = ((_prometheus(f"{name}_total"), text) for name, text in PLAIN.values())
    gauges = ((f"`{entry[0]}`", entry[1]) for entry in GAUGES.values())
    histograms = (
        (_prometheus(name, labels), text) for name, text, labels, _values in HISTOGRAMS.values()
    )
    labelled = (
        (_prometheus(f"{name}_total", labels), text)
        for name, text, labels, _values in LABELLED.values()
    )
    parts = ["### Counters\n\n" + _table("| metric | meaning |", counters)]
    parts.append("### Gauges\n\n" + _table("| metric | meaning |", gauges))
    parts.append("### Histograms\n\n" + _table("| metric | meaning |", histograms))
    parts.append("### Counters with a label\n\n" + _table("| metric | meaning |", labelled))
    parts.append("### Values of the labels\n")
    with_label = [one for one in (*HISTOGRAMS.values(), *LABELLED.values()) if one[2]]
    for (labels, _), of_label in groupby(with_label, key=lambda metric: metric[2:]):
        metrics = list(of_label)
        rows = (
            (*(f"`{one}`" for one in label_values(labels, value)), meaning)
            for value, meaning in metrics[0][3].items()
        )
        named = ", ".join(f"`{name}`" for name, *_rest in metrics)
        of_these = textwrap.fill(f"{named}:", 100)
        parts.append(f"{of_these}\n\n" + _table(f"| {' | '.join(labels)} | meaning |", rows))
    hidden = ((f"`{name}`", meaning) for name, meaning in NOT_EXPORTED.items())
    parts.append("### Not exported\n\n" + _table("| counter | meaning |", hidden))
    return "\n".join(parts)


def _sentence(text: str | None) -> str:
    return " ".join(re.sub(r"\\?\[", "[", text or "").split())


def _options(parameters: list[Any]) -> Iterator[tuple[str, ...]]:
    for parameter in parameters:
        names = [*parameter.opts, *parameter.secondary_opts]
        if _LEFT_OUT & set(names) or (_SHARED | _SETTINGS) & set(names):
            continue
        if parameter.param_type_name == "argument":
            spelt = f"`{parameter.metavar or parameter.name.upper()}`"
        else:
            word = f" {parameter.metavar}" if parameter.metavar else ""
            spelt = ", ".join(f"`{name}{word}`" for name in names)
        yield spelt, _sentence(parameter.help)


def _shared(parameters: list[Any]) -> str:
    found = {name for parameter in parameters for name in parameter.opts}
    said = [f"`{name}`" for name in sorted(_SHARED & found)]
    if "--bucket" in found:
        said.append("[options of the bucket](#options-of-the-bucket)")
    elif "--cache-dir" in found:
        said.append("[options of the node](#options-of-the-node)")
    return f"Also: {', '.join(said)}.\n" if said else ""


def _commands(command: Any, name: str, parent: Any = None) -> Iterator[str]:
    """One section for a command and each below it."""
    context = command.context_class(command, info_name=name, parent=parent)
    parameters = command.get_params(context)
    if parent is not None:
        paragraphs = (command.help or "").strip().split("\n\n")
        text = "\n\n".join(textwrap.fill(one, 100, break_on_hyphens=False) for one in paragraphs)
        parts = [f"### {context.command_path}\n", f"{text}\n"]
        if rows := list(_options(parameters)):
            parts.append(_table("| argument or option | meaning |", iter(rows)))
        if also := _shared(parameters):
            parts.append(also)
        yield "\n".join(parts)
    for below in getattr(command, "list_commands", lambda _context: [])(context):
        yield from _commands(command.get_command(context, below), below, context)


def commands_reference() -> str:
    """Every command with its arguments and options."""
    return "\n".join(_commands(typer.main.get_command(app), "s3ec"))


SCHEMA = json.loads((DOCS / "commands.schema.json").read_text())


def vocabulary() -> str:
    """Every key of the commands' JSON, those of one meaning together."""
    meanings: dict[str, list[str]] = {}
    for key, spec in SCHEMA["properties"].items():
        meanings.setdefault(spec["description"], []).append(f"`{key}`")
    for pattern, spec in SCHEMA["patternProperties"].items():
        ending = "..." + pattern.removeprefix("[a-z]").removesuffix("$")
        meanings.setdefault(spec["description"], []).append(f"`{ending}`")
    return _table("| key | meaning |", ((", ".join(keys), text) for text, keys in meanings.items()))


# Models that fit on one L4 of 24 GB.
_ON_L4 = {
    "gemma3-4b", "gemma3-12b", "minicpm-v-4.5", "kimi-vl-a3b-2506", "kimi-vl-a3b-instruct",
    "ultravox-8b", "qwen2.5-vl-7b", "qwen3.5-9b", "phi-4-multimodal", "molmo-7b-d", "qwen3-vl-8b",
    "internvl3.5-8b", "llava-onevision-7b", "qwen2-audio-7b", "pixtral-12b",
}  # fmt: skip
_SHOWN_GPUS = ("l4", "a100", "h100")


def _payoff(model: ModelEstimate, gpu: str, store: str) -> Payoff:
    known = Known(like=model, gpu=GPUS[gpu], store=STORES[store])
    return pay_off(inputs_of(known, Measured()))


def _on(model: ModelEstimate, gpu: str, store: str = "aws") -> Payoff | None:
    if gpu == "l4" and model.key not in _ON_L4:
        return None
    return _payoff(model, gpu, store)


def _each_gpu(model: ModelEstimate, cell: Callable[[Payoff], str], store: str = "aws") -> str:
    found = [_on(model, gpu, store) for gpu in _SHOWN_GPUS]
    return " / ".join("-" if one is None else cell(one) for one in found)


def payoff_table() -> str:
    """Each model of ``s3ec advise`` by its table, the one that pays most first."""

    def rows() -> Iterator[tuple[str, ...]]:
        order = {key: _payoff(model, "h100", "aws") for key, model in MODELS.items()}
        for key in sorted(order, key=lambda key: -order[key].keep_days):
            model, on_h100 = MODELS[key], order[key]
            gpus = f" ({model.gpus} GPUs)" if model.gpus > 1 else ""
            yield (
                f"{model.hub}{gpus}",
                f"{model.nbytes / 1e6:.1f}",
                _each_gpu(model, lambda one: f"{one.encode_ms:.0f}"),
                f"{on_h100.tie_mb_s:.0f}",
                f"{on_h100.keep_days:.0f}",
                f"{on_h100.break_even_reads:.1f}",
                _each_gpu(model, lambda one: one.latency.word),
                _each_gpu(model, lambda one: one.latency.word, "minio-nvme"),
            )

    return _table(
        "| model | MB | encode ms, L4 / A100 / H100 | MB/s that tie | days to keep | reads a month "
        "| faster from S3? | faster from the local network? |",
        rows(),
    )


# Page and marker -> what stands there.
MADE: dict[tuple[str, str], Callable[[], str]] = {
    ("settings.md", "settings"): settings_table,
    ("commands.md", "commands"): commands_reference,
    ("commands.md", "keys"): vocabulary,
    ("metrics.md", "metrics"): metrics_tables,
    ("does-it-pay.md", "models"): payoff_table,
}


def with_tables(page: str) -> str:
    """A page of docs/ as it ought to be."""
    text = (DOCS / page).read_text()
    for (name, marker), make in MADE.items():
        if name == page:
            pattern = rf"(<!-- {marker}: made by [^\n]* -->\n).*?(<!-- /{marker} -->)"
            made = make()
            text, count = re.subn(
                pattern,
                lambda found, made=made: f"{found[1]}{made}{found[2]}",
                text,
                flags=re.DOTALL,
            )
            if count != 1:
                raise ValueError(f"docs/{page} needs the markers of `{marker}` once")
    return text


def main() -> None:
    """Write all pages anew."""
    for page in {name for name, _ in MADE}:
        (DOCS / page).write_text(with_tables(page))


if __name__ == "__main__":
    main()
