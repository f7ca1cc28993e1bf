# SPDX-License-Identifier: Apache-2.0
"""What runs in the doctor's child process: imports vLLM and describes a model as vLLM would.

Reads one JSON request from stdin and writes one JSON line per stage to the file descriptor
that its argument names. An exception ends it; the stages before stand, and the parent reads
the traceback's last line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from s3ec.settings import Settings


def main() -> None:
    """Go through the stages; the parent sees how far we came."""
    request = json.load(sys.stdin)
    settings = Settings.model_validate(request["settings"])
    with os.fdopen(int(sys.argv[1]), "w") as replies:

        def reply(stage: str, **facts: Any) -> None:
            replies.write(json.dumps({stage: facts}) + "\n")
            replies.flush()

        import vllm

        reply("version", version=str(vllm.__version__))
        from s3ec.connector import compat

        reply(
            "hooks",
            present=compat.installed_hooks(),
            costs=compat.OPTIONAL_HOOKS,
            release=compat.release(compat.vllm_version()),
            oldest=compat.OLDEST,
            newest=compat.NEWEST_TESTED,
        )
        if request["args"] is not None:
            _describe(request["args"], settings, reply)


def _describe(args: Sequence[str], settings: Settings, reply: Any) -> None:
    from s3ec.connector.vllm_config import (
        encoder_weights,
        identifier_problem,
        model_problem,
        namespace_of,
    )

    vllm_config, ignored = _vllm_config(args)
    problem = model_problem(vllm_config)
    reply("model", model=vllm_config.model_config.model, problem=problem, ignored=ignored)
    if problem is None:
        reply("identifiers", problem=identifier_problem(vllm_config))
        weights = encoder_weights(vllm_config, settings)
        namespace = namespace_of(vllm_config, settings, weights.mark)
        reply(
            "namespace",
            name=namespace.name,
            descriptor=dict(namespace.descriptor),
            weights_problem=weights.problem,
        )


def _vllm_config(args: Sequence[str]) -> tuple[Any, list[str]]:
    """vLLM's configuration of a command line, and the names of options it leaves to the server."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class EngineParser(FlexibleArgumentParser):  # type: ignore[misc]
        """Leaves aside what belongs to the HTTP server (--port, --api-key...)."""

        rest: list[str]

        def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, Any]:
            found, self.rest = super().parse_known_args(args, namespace)
            return found, []

    parser = AsyncEngineArgs.add_cli_args(EngineParser())
    found = parser.parse_args(_without_command(args))
    load_general_plugins()  # as vLLM does at start-up: other plugins may add models
    if found.model.startswith(("/", "./", "../", "~")) and not os.path.isdir(found.model):
        # vLLM would take it for a name on a hub, and say that it is a strange one.
        raise FileNotFoundError(f"no folder {found.model}")
    config = AsyncEngineArgs.from_cli_args(found).create_engine_config()
    return config, [arg.partition("=")[0] for arg in parser.rest if arg.startswith("--")]


def _without_command(args: Sequence[str]) -> list[str]:
    """``vllm serve MODEL ...`` and ``MODEL ...`` as ``--model MODEL ...``."""
    rest = list(args)
    if rest[:1] and rest[0].rpartition("/")[2] == "vllm":
        rest.pop(0)
    if rest[:1] == ["serve"]:
        rest.pop(0)
    if rest and not rest[0].startswith("-"):
        rest.insert(0, "--model")
    return rest
