# SPDX-License-Identifier: Apache-2.0
"""``s3ec serve-s3``: a real S3 server on this machine, for trying things out."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3ec.cli.options import JsonOption
from s3ec.cli.output import App, counting, echo, print_json, print_note
from s3ec.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from s3ec.testing.server import LocalS3

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_POLL_S = 0.5
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


commands = App()


@commands.command(
    "serve-s3",
    ("s3ec serve-s3", "port 8333, bucket `embeddings`, gone at the end"),
    ("s3ec serve-s3 --data ./s3 --bucket docs --bucket test", "keep the objects"),
    ("s3ec serve-s3 --port 0 --json", "any free port, for scripts"),
)
def serve_s3(
    port: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=55535, help="Port on 127.0.0.1; 0 uses any free one."),
    ] = 8333,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Folder for the objects. Unset: a scratch folder, deleted at the end.",
        ),
    ] = None,
    bucket: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Bucket to have; may be repeated. \\[embeddings]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a SeaweedFS server in the foreground, until Ctrl-C or SIGTERM.

    It listens only on 127.0.0.1, and prints the lines to paste into a shell and into vLLM. Its keys
    are those of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or random ones.
    """
    from s3ec.testing.server import Identity, LocalS3

    buckets = bucket or ["embeddings"]
    for name in buckets:
        if not _BUCKET.fullmatch(name):
            raise ConfigError(f"bucket `{name}`: 3 to 63 of lower-case letters, digits, `.`, `-`")
    keys = [os.environ.get(name, "") for name in _KEYS]
    if any(keys) and not all(keys):
        raise ConfigError(f"give both of {' and '.join(_KEYS)}, or neither")
    admin = Identity("admin", access_key=keys[0], secret_key=keys[1]) if all(keys) else None
    server = LocalS3(data, port=port or None, admin=admin)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with counting("starting SeaweedFS"):
            server.start()
        _make_buckets(server, buckets)
        # From here on a signal only leaves a mark. An exception is lost where Python runs a
        # destructor at that moment, and the server would run on.
        told: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _frame: told.append(number))
        _announce(server, buckets, data, own_keys=admin is not None, as_json=as_json)
        _wait(server, told)
        print_note("stopping")
    except KeyboardInterrupt:
        print_note("stopping")
    finally:
        server.close()


def _make_buckets(server: LocalS3, buckets: list[str]) -> None:
    present = {entry["Name"] for entry in server.client().list_buckets()["Buckets"]}
    for name in buckets:
        if name not in present:
            server.create_bucket(name)


def _announce(
    server: LocalS3, buckets: list[str], data: Path | None, *, own_keys: bool, as_json: bool
) -> None:
    extra = {"bucket": buckets[0], "endpoint_url": server.endpoint_url}
    transfer = {
        "ec_connector": "S3ECConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": extra,
    }
    environment = server.env()
    if own_keys:  # the caller has them already, and they may be keys to more than this
        environment = {name: value for name, value in environment.items() if name not in _KEYS}
    if as_json:
        document: dict[str, Any] = {"endpoint_url": server.endpoint_url, "buckets": buckets}
        document |= {"data": str(data) if data else None, "env": environment}
        print_json(document | {"ec_transfer_config": transfer})
        sys.stdout.flush()  # scripts read this through a pipe while we run on
        return
    where = f"objects in {data}" if data else "objects gone at the end (--data keeps them)"
    keys = ["# (the keys are those that you have there)"] if own_keys else []
    settings = {f"S3EC_{name.upper()}": value for name, value in extra.items()}
    lines = [
        f"# SeaweedFS on {server.endpoint_url}, {where}",
        "# In the shell that runs vLLM or s3ec:",
        *keys,
        *(f"export {name}={shlex.quote(it)}" for name, it in (environment | settings).items()),
        "\n# For vLLM:",
        f"vllm serve MODEL --ec-transfer-config {shlex.quote(json.dumps(transfer))}",
    ]
    echo("\n".join(lines))
    print_note("\nCtrl-C ends the server.")


def _wait(server: LocalS3, told: list[int]) -> None:
    """Wait until a signal has come."""
    while not told:
        if server.pid is None:
            raise UnavailableError("SeaweedFS ended by itself")
        time.sleep(_POLL_S)
