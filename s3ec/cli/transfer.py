# SPDX-License-Identifier: Apache-2.0
"""``s3ec export``, ``import`` and ``cp``: a corpus to another place, every byte checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from s3ec.cli.options import (
    JsonOption,
    NamespaceChoice,
    OptionGroup,
    SettingsSource,
    lines_of,
    option,
    size_bytes,
    with_namespace,
)
from s3ec.cli.output import (
    EXIT_PARTIAL,
    EXIT_WRONG,
    RESUMES,
    App,
    counting,
    echo,
    human_bytes,
    many,
    print_json,
    print_note,
    safe,
)
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from s3ec.corpus import CopyOptions, Selection, Transferred
    from s3ec.counters import Report

_SHOWN_FAILURES = 20


class _Asked:
    """The options that say what is copied, and how."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def selection(self) -> Selection:
        """What is copied.

        Raises:
            ConfigError: The list cannot be read, or has nothing in it.
        """
        from s3ec.corpus import Selection

        file = self._given["ids"]
        identifiers = None if file is None else lines_of(file)
        if identifiers == []:
            raise ConfigError(
                "`--ids` has no line with an identifier; leave it out for all entries", field="ids"
            )
        return Selection(
            identifiers=identifiers,
            where=self._given["where"],
            adapter=self._given["adapter"],
        )

    def options(self, report: Report) -> CopyOptions:
        """How it is copied.

        Raises:
            ConfigError: The rate is none.
        """
        from s3ec.corpus import CopyOptions
        from s3ec.store.concurrency import REQUESTS_AT_A_TIME

        rate = self._given["rate_limit"]
        bytes_per_s = None if rate is None else size_bytes(rate, "rate_limit")
        if bytes_per_s == 0:
            raise ConfigError(
                "`--rate-limit` 0 would copy nothing; leave it out for no limit", field="rate_limit"
            )
        return CopyOptions(
            deep=bool(self._given["deep"]),
            max_concurrency=self._given["max_concurrency"] or REQUESTS_AT_A_TIME,
            rate_limit_bytes_per_s=bytes_per_s,
            report=report,
        )


_OPTIONS: OptionGroup = (
    {
        "ids": Annotated[
            str | None,
            option(
                "--ids",
                "FILE",
                "Only these: a file with one identifier, or what `s3ec ls` prints, a line, or -.",
            ),
        ],
        "where": Annotated[
            str | None,
            option(
                "--where",
                "SQL",
                "Only those in the catalogue for which this is true, such as `modality = "
                "'image' AND rows > 1000`.",
            ),
        ],
        "adapter": Annotated[
            str | None, option("--adapter", "NAME", "Only those of this LoRA adapter.")
        ],
        "deep": Annotated[
            bool | None,
            typer.Option(
                "--deep",
                help="Read every byte of what is there already, and of what a server copies.",
            ),
        ],
        "rate_limit": Annotated[
            str | None, option("--rate-limit", "SIZE", "Bytes per second, such as `100MB`.")
        ],
        "max_concurrency": Annotated[
            int | None,
            option("--max-concurrency", "N", "Entries at a time; 16 unless given.", min=1, max=256),
        ],
    },
    _Asked,
)

_TO_OPTIONS: OptionGroup = (
    {
        "to_namespace": Annotated[
            str | None,
            option(
                "--to-namespace",
                "NAME",
                "Namespace to copy into, or the first characters of its name; it must be "
                "there. Unset: the same.",
            ),
        ],
        "same_encoder": Annotated[
            bool | None,
            typer.Option(
                "--same-encoder",
                help="The two namespaces are of different models, and you know that their "
                "encoders are the same.",
            ),
        ],
    },
    lambda given: {
        "to_namespace": given["to_namespace"],
        "same_encoder": bool(given["same_encoder"]),
    },
)

FormOption = Annotated[
    Literal["s3ec", "vllm"],
    typer.Option(
        "--layout",
        help="`s3ec`: as in the bucket, so that `url: file:///DIR` serves it. `vllm`: that of "
        "vLLM's ECExampleConnector.",
    ),
]


def register(app: App) -> None:
    """Add the commands to the tree."""
    app.command(
        "export",
        ("s3ec export /media/disk/corpus", "everything of the newest namespace"),
        ("s3ec export corpus --where \"document LIKE 'manuals/%'\"", "a part of it"),
        ("s3ec export ec --layout vllm", "for vLLM's ECExampleConnector"),
    )(with_namespace(export, _OPTIONS))
    app.command(
        "import",
        ("s3ec import /media/disk/corpus", "what an export wrote, into the bucket"),
        ("s3ec import ec --layout vllm --model vision-9b", "what ECExampleConnector wrote"),
    )(with_namespace(import_, _OPTIONS, _TO_OPTIONS))
    app.command(
        "cp",
        ("s3ec cp s3://old/corpus s3://new/corpus", "between two buckets of one server"),
        (
            "s3ec cp s3://here/c s3://there/c --to-endpoint-url https://minio.example:9000",
            "to another server",
        ),
    )(with_namespace(cp, _OPTIONS, _TO_OPTIONS))


def export(
    source: SettingsSource,
    choice: NamespaceChoice,
    asked: _Asked,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made if it is absent.")],
    layout: FormOption = "s3ec",
    as_json: JsonOption = False,
) -> None:
    """Copy a namespace into a folder; every byte is checked as it is read.

    A second run copies what lacks. With the layout `s3ec`, the records, the catalogue and an index
    go along. Exit status 3 where some entries could not be copied, 1 where none could.
    """
    with source.corpus() as corpus:
        name = choice.within(corpus)
        selection = asked.selection()
        with counting("copying", resume=RESUMES) as report:
            done = corpus.export(
                folder, selection, namespace=name, form=layout, options=asked.options(report)
            )
    _tell(done, f"from {name} to {safe(str(folder))}", as_json=as_json)


def import_(
    source: SettingsSource,
    choice: NamespaceChoice,
    asked: _Asked,
    to: dict[str, Any],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What `s3ec export` wrote.")],
    layout: FormOption = "s3ec",
    modality: Annotated[
        str | None,
        option(
            "--modality",
            "NAME",
            "With --layout vllm: what the embeddings are of; `image` unless given.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a folder into the bucket, and tell every reader; every byte is checked before that.

    Nothing in the bucket is replaced. A second run copies what lacks. --namespace is one of the
    folder; with the layout `vllm`, which has none, it is one of the bucket. Exit status as for
    `export`.
    """
    if layout == "vllm" and any(to.values()):
        raise ConfigError(
            "`--to-namespace` and `--same-encoder` go with --layout s3ec; give --namespace",
            field="to_namespace",
        )
    if layout == "s3ec" and modality is not None:
        raise ConfigError(
            "`--modality` goes with --layout vllm: other entries say themselves what they are of; "
            "leave it out",
            field="modality",
        )
    with source.corpus() as corpus, counting("copying", resume=RESUMES) as report:
        selection, options = asked.selection(), asked.options(report)
        if layout == "vllm":
            done = corpus.import_example(
                folder,
                selection,
                namespace=choice.within(corpus),
                modality=modality or "image",
                options=options,
            )
        else:
            done = corpus.import_from(
                folder,
                selection,
                namespace=choice.name,
                model=choice.model,
                options=options,
                **to,
            )
    _tell(done, f"from {safe(str(folder))} to {done.to_namespace}", as_json=as_json)


def cp(
    source: SettingsSource,
    choice: NamespaceChoice,
    asked: _Asked,
    to: dict[str, Any],
    src: Annotated[
        str,
        typer.Argument(metavar="SRC", help="Such as `s3://BUCKET/PREFIX` or `file:///FOLDER`."),
    ],
    dst: Annotated[str, typer.Argument(metavar="DST", help="Likewise.")],
    to_config: Annotated[
        str | None, option("--to-config", "JSON|FILE", "As --config, for DST; unset: the same.")
    ] = None,
    to_endpoint_url: Annotated[
        str | None,
        option("--to-endpoint-url", "URL", "As --endpoint-url, for DST; unset: the same."),
    ] = None,
    to_region: Annotated[
        str | None, option("--to-region", "NAME", "As --region, for DST; unset: the same.")
    ] = None,
    to_profile: Annotated[
        str | None, option("--to-profile", "NAME", "As --profile, for DST; unset: the same.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a namespace into another bucket, folder or namespace, and tell every reader there.

    Nothing is replaced. A second run copies what lacks. Between two buckets of one server the
    server copies by itself; otherwise every byte passes here and is checked. Exit status as for
    `export`.
    """
    given = {"endpoint_url": to_endpoint_url, "region": to_region, "profile": to_profile}
    there = source.beside(
        dst, {name: value for name, value in given.items() if value is not None}, to_config
    )
    here = source.beside(src, {}, None)
    with here.corpus() as corpus, there.corpus() as target:
        ends = [(one.settings.corpus, one.settings.endpoint_url) for one in (corpus, target)]
        if ends[0] == ends[1] and to["to_namespace"] is None:
            raise ConfigError("SRC and DST are the same place; give --to-namespace, or another DST")
        name = choice.within(corpus)
        with counting("copying", resume=RESUMES) as report:
            done = corpus.copy_to(
                target,
                asked.selection(),
                namespace=name,
                options=asked.options(report),
                **to,
            )
        places = f"from {name} to {target.settings.corpus}/{done.to_namespace}"
    _tell(done, places, as_json=as_json)


def _tell(done: Transferred, places: str, *, as_json: bool) -> None:
    """Print what was done, and end with the exit status for it."""
    if as_json:
        print_json(
            {
                "status": done.status,
                "namespace": done.namespace,
                "to_namespace": done.to_namespace,
                "copied": done.copied,
                "bytes": done.nbytes,
                "by_server": done.by_server,
                "present": done.present,
                "skipped": done.skipped,
                "announced": done.announced,
                "catalogued": done.catalogued,
                "failed": len(done.failures),
                "failures": [{"label": k, "reason": why} for k, why in done.failures.items()],
            }
        )
    else:
        entries = many(done.copied, "entry", "entries")
        echo(f"copied {entries}, {human_bytes(done.nbytes)}, {places}")
        counts = {
            "were there": done.present,
            "copied by the server": done.by_server,
            "skipped: no content hash": done.skipped,
            "rows of the catalogue": done.catalogued,
            "failed": len(done.failures),
        }
        echo(", ".join(f"{number:,} {what}" for what, number in counts.items() if number))
        for what, why in list(done.failures.items())[:_SHOWN_FAILURES]:
            print_note(f"failed: {safe(what)}: {safe(why)}")
        if len(done.failures) > _SHOWN_FAILURES:
            print_note(f"and {len(done.failures) - _SHOWN_FAILURES} more, see --json")
    if done.failures:
        raise typer.Exit(EXIT_PARTIAL if done.status == "partial" else EXIT_WRONG)
