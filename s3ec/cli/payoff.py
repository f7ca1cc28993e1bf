# SPDX-License-Identifier: Apache-2.0
"""``s3ec advise``: does storing embeddings pay, and by how much?

It measures what can be measured here, and calculates with that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from s3ec.cli.doctor import completed
from s3ec.cli.options import (
    SETTINGS,
    JsonOption,
    OptionGroup,
    SettingsSource,
    option,
    with_options,
)
from s3ec.cli.output import (
    App,
    counting,
    echo,
    print_json,
    print_note,
    safe,
    styled,
    table,
    wrapped,
    write,
)
from s3ec.errors import ConfigError
from s3ec.payoff import (
    GPUS,
    PRICES_AS_OF,
    STORES,
    Inputs,
    Known,
    ModelEstimate,
    Payoff,
    advised_settings,
    alike,
    figures,
    find_model,
    pay_off,
)

if TYPE_CHECKING:
    from s3ec.doctor.advise import Measured

T = TypeVar("T")

_COLORS = {"yes": "green", "even": "yellow", "no": "red"}
_QUESTIONS = {
    "latency": "is a request faster with a hit from the bucket?",
    "throughput": "does a busy engine answer more requests?",
    "money": "does storing cost less than encoding again?",
}


def _model(text: str) -> ModelEstimate:
    """A model of the table; a parser of options."""
    if (found := find_model(text)) is not None:
        return found
    near = " or ".join(alike(text))
    fix = f"did you mean {near}?" if near else "`--rows` and `--width` give its size"
    raise typer.BadParameter(f"{text!r:.90} is not in the table; {fix}")


def _one_of(known: Mapping[str, T]) -> Callable[[str], T]:
    """A parser of options that names one of these."""

    def parse(text: str) -> T:
        if text.lower() not in known:
            raise typer.BadParameter(f"{text!r:.50} is unknown; it is one of {', '.join(known)}")
        return known[text.lower()]

    return parse


_MOST = 10**9  # of any figure; infinity, which the parser takes, is no figure
# Name, kind, metavar, help, and the least value or the parser.
_TABLE: tuple[tuple[str, Any, str, str, Any], ...] = (
    (
        "like",
        Any,
        "MODEL",
        "A model of the table in docs/does-it-pay.md, by its name on the hub: "
        "google/gemma-3-27b-it.",
        _model,
    ),
    ("rows", int, "N", "Rows of an embedding; `s3ec stat` shows the rows of stored ones.", 1),
    ("width", int, "N", "Values of a row.", 1),
    ("encode_ms", float, "MS", "Time of one encode in the engine, on all its GPUs.", 0.001),
    ("fetch_ms", float, "MS", "Time to fetch one embedding from the bucket.", 0.001),
    ("reads", float, "N", "Reads of one entry from the bucket a month. [1.5]", 0.0),
    ("gpu", Any, "NAME", f"GPU of the engine: {', '.join(GPUS)}. \\[h100]", _one_of(GPUS)),
    ("gpus", int, "N", "GPUs of one engine. [1]", 1),
    ("gpu_dollars", float, "USD", "Price of one GPU for an hour.", 0.0),
    (
        "store",
        Any,
        "NAME",
        f"Source of prices, and of times that are not measured: {', '.join(STORES)}. \\[aws]",
        _one_of(STORES),
    ),
)


def _figure(name: str, kind: Any, metavar: str, text: str, given: Any) -> Any:
    more = {"parser": given} if callable(given) else {"min": given, "max": _MOST}
    return Annotated[kind | None, option(f"--{name.replace('_', '-')}", metavar, text, **more)]


_FIGURES: OptionGroup = (
    {row[0]: _figure(*row) for row in _TABLE},
    lambda given: Known(gpu_dollars_an_hour=given.pop("gpu_dollars"), **given),
)

commands = App()


@commands.command(
    "advise",
    (
        "s3ec advise --bucket embeddings --images ./pages -- --model google/gemma-3-27b-it",
        "your pages, your bucket, from this machine",
    ),
    (
        "s3ec advise --no-probe --like google/gemma-3-27b-it --gpu l4",
        "a model of the table on another GPU, nothing is measured",
    ),
    (
        "s3ec advise --no-probe --rows 256 --width 5376 --encode-ms 20 --gpu h100 --reads 4",
        "figures of your own",
    ),
)
@with_options(SETTINGS, _FIGURES)
def advise(
    source: SettingsSource,
    known: Known,
    vllm_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- VLLM ARGS", help="Arguments of `vllm serve`."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            metavar="DIR",
            help="Pictures like those of your requests. Unset: one blank A4 page.",
        ),
    ] = None,
    no_probe: Annotated[
        bool, typer.Option("--no-probe", help="Measure neither the bucket nor the disk tier.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether s3ec pays for a model, before you deploy it.

    Computes the size of your pages' embeddings with vLLM's processor, writes one object to the
    bucket, reads it a hundred times and deletes it, and reads this node's disk. Then it calculates
    the costs and savings of a stored embedding. It needs no weights and no GPU. It estimates
    unknown values, and each number says so.
    """
    from s3ec.doctor.advise import Measured, measure_here, named_model, use_prices

    vllm_args = vllm_args or []
    source = completed(source, vllm_args)
    loaded = source.load(need_bucket=False)
    use_prices(loaded.settings, known)
    found = Measured()
    if vllm_args:
        with counting("asking vLLM's processor (its import takes 5 to 20 s)"):
            found.pages = _pages(loaded.settings, vllm_args, images, found)
        known.like = known.like or named_model(vllm_args)
    elif images:
        raise ConfigError("`--images` needs the model: add `-- --model MODEL`", field="images")
    if not no_probe:
        with counting("measuring bucket and disk"):
            measure_here(known, found, loaded)
    _show(known, found, as_json)


def _pages(
    settings: Any, vllm_args: list[str], images: Path | None, found: Measured
) -> Mapping[str, Any] | None:
    """The measurements of the model's processor; None, and a note, if it fails."""
    from s3ec.doctor.pages import pictures_in
    from s3ec.doctor.serving import VllmChild, has_vllm

    if not has_vllm():
        found.notes.append("vLLM is not installed here, so its processor was not asked")
        return None
    files = pictures_in(images) if images else []
    if images and not files:
        raise ConfigError(f"`--images` {images} holds no pictures", field="images")
    child = VllmChild(settings, vllm_args, pages=[str(path) for path in files])
    pages = child.stage("pages")
    if pages is None:
        found.notes.append(f"vLLM's processor gave no answer: {child.last_words()}")
    return pages


def _show(known: Known, found: Measured, as_json: bool) -> None:
    from s3ec.doctor.advise import inputs_of

    try:
        inputs = inputs_of(known, found)
    except ConfigError as exc:
        if found.notes:  # a failed measurement may be the reason
            raise ConfigError(f"{'; '.join(found.notes)}; {exc}", field=exc.field) from exc
        raise
    payoff = pay_off(inputs)
    if as_json:
        print_json(_document(inputs, payoff, found))
        return
    _print(inputs, payoff, found)


def _document(inputs: Inputs, payoff: Payoff, found: Measured) -> dict[str, Any]:
    verdicts = {name: getattr(payoff, name) for name in _QUESTIONS}
    return {
        "figures": figures(inputs, payoff),
        "verdicts": {
            name: {
                "verdict": one.word,
                "ratio": one.ratio if math.isfinite(one.ratio) else None,
                "why": one.why,
            }
            for name, one in verdicts.items()
        },
        "settings": advised_settings(payoff),
        "store_latency": asdict(found.latency) if found.latency else None,
        "prices_as_of": PRICES_AS_OF,
        "notes": found.notes,
    }


def _print(inputs: Inputs, payoff: Payoff, found: Measured) -> None:
    rows = [
        {
            "figure": row["name"].replace("_", " "),
            **{key: row[key] for key in ("value", "unit", "source", "note")},
        }
        for row in figures(inputs, payoff)
    ]
    table([{**row, "value": "no limit" if row["value"] is None else row["value"]} for row in rows])
    echo("")
    for name, question in _QUESTIONS.items():
        one = getattr(payoff, name)
        label = f"{styled(f'{one.word:<4}', _COLORS[one.word])}  {name:<10}  "
        write(label + wrapped(f"{question} {one.why}", 18))
    echo("")
    settings = json.dumps(advised_settings(payoff))
    echo(f"for `ec_connector_extra_config`, beside the bucket: {settings}")
    if math.isfinite(payoff.keep_days) and payoff.keep_days >= 1:
        echo(
            f"an entry that is not read from the bucket within {payoff.keep_days:.0f} days has "
            "cost more than it saves"
        )
    echo(f"prices of {PRICES_AS_OF}; a GPU that would be idle otherwise saves no money")
    for note in found.notes:
        print_note(safe(note))
