# SPDX-License-Identifier: Apache-2.0
"""ASGI middleware behind SkipPictures: takes embeddings away after it has counted on them.

As a program it writes what vLLM calls some pictures, as JSON: ``MODEL OUT PICTURE...``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from s3ec.identity import make_key
from s3ec.middleware import skip_pictures

# A look that takes 2 s on a busy machine is not what the tests are about.
skip_pictures._PATIENCE_S = 60.0

ROOTS_VARIABLE = "VANISHING_ROOTS"
LOG_VARIABLE = "VANISHING_LOG"
HEADER = b"x-vanish"


class Vanishing:
    """For a request whose header names an entry: deletes that, and notes what is answered."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        name = dict(scope["headers"]).get(HEADER) if scope["type"] == "http" else None
        if name is None:
            await self._app(scope, receive, send)
            return
        _delete(name.decode())

        async def noting(message: Any) -> None:
            body = message.get("body", b"").decode()
            _note({"name": name.decode(), "status": message.get("status"), "body": body})
            await send(message)

        await self._app(scope, receive, noting)


def _delete(identifier: str) -> None:
    key = make_key(identifier)
    if key is None:
        raise ValueError(f"{identifier} has no key")
    for root in os.environ[ROOTS_VARIABLE].split(os.pathsep):
        for path in Path(root).rglob(f"objects/**/{Path(key.name).name}"):
            path.unlink()


def _note(said: Any) -> None:
    with open(os.environ[LOG_VARIABLE], "a", encoding="utf-8") as file:
        file.write(json.dumps(said) + "\n")


def main(model: str, out: str, *pictures: str) -> None:
    """Find the names out as the middleware does."""
    from vllm.engine.arg_utils import EngineArgs

    from s3ec.middleware.vllm_names import VLLMNames, names_of

    options: dict[str, Any] = {"model": model, "max_model_len": 2048, "enforce_eager": True}
    found: VLLMNames = names_of(EngineArgs(**options).create_engine_config(), None)
    names = [str(found.name(Path(picture).read_bytes())) for picture in pictures]
    Path(out).write_text(json.dumps(names))


if __name__ == "__main__":
    main(*sys.argv[1:])
