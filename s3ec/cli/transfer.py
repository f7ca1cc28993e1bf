# SPDX-License-Identifier: Apache-2.0
"""``s3ec export`` and ``import``: a corpus to and from a folder, every byte checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from s3ec.cli.options import CORPUS, JsonOption, SettingsSource, lines_of, option, with_options
from s3ec.cli.output import RESUMES, App, counting, end_job
from s3ec.errors import ConfigError

if TYPE_CHECKING:
    from s3ec.corpus.exchange import Transferred


commands = App()


@commands.command(
    "export",
    ("s3ec export /media/disk/corpus", "everything of the newest namespace"),
    ("s3ec export corpus --ids names.txt", "a part of it"),
)
@with_options(CORPUS)
def export(
    source: SettingsSource,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder to write; created if it is absent.")
    ],
    ids: Annotated[
        str | None,
        option(
            "--ids",
            "FILE",
            "Only these entries: a file with an identifier or a label from `s3ec ls` on each "
            "line, or -.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a namespace into a folder, and check every byte.

    An engine can use the folder with `url: file:///DIR`, because the copy includes the records, the
    catalogue and an index. A second run copies only missing entries. Exits with 3 if some entries
    could not be copied, and with 1 if none could.
    """
    identifiers = None if ids is None else lines_of(ids)
    if identifiers == []:
        raise ConfigError(
            "`--ids` has no line with an identifier; leave it out for all entries", field="ids"
        )
    with source.corpus() as corpus:
        name = source.choose(corpus)
        with counting("copying", resume=RESUMES) as report:
            done = corpus.export(folder, namespace=name, identifiers=identifiers, report=report)
    _end(done, as_json=as_json)


@commands.command(
    "import",
    ("s3ec import /media/disk/corpus", "what an export wrote, into the bucket"),
    ("s3ec import ec --layout vllm --model vision-9b", "what ECExampleConnector wrote"),
)
@with_options(CORPUS)
def import_(
    source: SettingsSource,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that `s3ec export` wrote.")],
    layout: Annotated[
        Literal["s3ec", "vllm"],
        typer.Option(
            "--layout",
            help="`s3ec`: the layout of the bucket. `vllm`: the layout of vLLM's "
            "ECExampleConnector.",
        ),
    ] = "s3ec",
    modality: Annotated[
        str | None,
        option(
            "--modality",
            "NAME",
            "With --layout vllm: the modality of the embeddings; `image` unless given.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a folder into the bucket, after a check of every byte, and announce the entries.

    Replaces nothing in the bucket. A second run copies only missing entries. --namespace names one
    of the folder; with the layout `vllm`, which has none, it names one of the bucket. The exit
    status is as for `export`.
    """
    if layout == "s3ec" and modality is not None:
        raise ConfigError(
            "`--modality` goes with --layout vllm: other entries contain their modality; "
            "leave it out",
            field="modality",
        )
    with source.corpus() as corpus, counting("copying", resume=RESUMES) as report:
        if layout == "vllm":
            done = corpus.import_example(
                folder,
                namespace=source.choose(corpus),
                modality=modality or "image",
                report=report,
            )
        else:
            done = corpus.import_from(
                folder, namespace=source.namespace, model=source.model, report=report
            )
    _end(done, as_json=as_json)


def _end(done: Transferred, *, as_json: bool) -> None:
    document = {
        "status": done.status,
        "namespace": done.namespace,
        "copied": done.copied,
        "bytes": done.nbytes,
        "present": done.present,
        "skipped": done.skipped,
        "catalogued": done.catalogued,
        "failed": len(done.failures),
        "failures": [{"label": what, "reason": why} for what, why in done.failures.items()],
    }
    end_job(document, as_json=as_json, about={"skipped": "of no content hash"})
