# SPDX-License-Identifier: Apache-2.0
"""``s3ec advise``: does storing embeddings pay, and by how much?

It measures what can be measured here, and calculates with that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from s3ec.cli.doctor import completed
from s3ec.cli.options import JsonOption, SettingsSource, option, with_settings
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

_MOST = 10**9  # of any figure; infinity, which the parser takes, is no figure

_FIGURES = {
    name: Annotated[kind | None, option(f"--{name.replace('_', '-')}", metavar, text, **limits)]
    for name, kind, metavar, text, limits in (
        (
            "like",
            str,
            "MODEL",
            "A model of the table in docs/does-it-pay.md, by its name on the hub: "
            "google/gemma-3-27b-it.",
            {},
        ),
        (
            "rows",
            int,
            "N",
            "Rows of an embedding; `s3ec stat` shows the rows of stored ones.",
            {"min": 1},
        ),
        ("width", int, "N", "Values of a row.", {"min": 1}),
        (
            "encode_ms",
            float,
            "MS",
            "Time of one encode in the engine, on all its GPUs.",
            {"min": 0.001},
        ),
        ("fetch_ms", float, "MS", "Time to fetch one embedding from the bucket.", {"min": 0.001}),
        ("reads", float, "N", "Reads of one entry from the bucket a month. [1.5]", {"min": 0.0}),
        ("gpu", str, "NAME", f"GPU of the engine: {', '.join(GPUS)}. \\[h100]", {}),
        ("gpus", int, "N", "GPUs of one engine. [1]", {"min": 1}),
        ("gpu_dollars", float, "USD", "Price of one GPU for an hour.", {"min": 0.0}),
        (
            "store",
            str,
            "NAME",
            f"Source of prices, and of times that are not measured: {', '.join(STORES)}. \\[aws]",
            {},
        ),
    )
}


def register(app: App) -> None:
    """Add the command to the tree."""
    app.command(
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
    )(with_settings(advise, (_FIGURES, _known)))


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


def _choice(name: str, given: str | None, known: Mapping[str, T]) -> T | None:
    if given is None:
        return None
    if given.lower() not in known:
        raise ConfigError(
            f"`--{name}` {given!r:.50} is unknown; it is one of {', '.join(known)}", field=name
        )
    return known[given.lower()]


def _model(given: str | None) -> ModelEstimate | None:
    found = None if given is None else find_model(given)
    if given is None or found is not None:
        return found
    near = (
        f"did you mean {' or '.join(alike(given))}?"
        if alike(given)
        else "`--rows` and `--width` give its size"
    )
    raise ConfigError(f"`--like` {given!r:.90} is not in the table; {near}", field="like")


def _known(given: dict[str, Any]) -> Known:
    for name, value in given.items():
        if isinstance(value, int | float) and value > _MOST:
            raise ConfigError(f"`--{name.replace('_', '-')}` is more than {_MOST:,}", field=name)
    given["like"] = _model(given["like"])
    given["gpu"] = _choice("gpu", given["gpu"], GPUS)
    given["store"] = _choice("store", given["store"], STORES)
    return Known(gpu_dollars_an_hour=given.pop("gpu_dollars"), **given)


def _pages(
    settings: Any, vllm_args: list[str], images: Path | None, found: Measured
) -> Mapping[str, Any] | None:
    """What the model's processor makes of the pictures; None, and a note, where it fails."""
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
        if found.notes:  # what was to be measured and was not may be why
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
