# SPDX-License-Identifier: Apache-2.0
"""What lies below a URL of another bucket than the corpus's: names, sizes and tags.

A tag (ETag) changes when an object is replaced, so weights that an engine streams from a bucket can
be told apart without reading them.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

from pydantic import ValidationError

from s3ec.errors import ConfigError, UnavailableError
from s3ec.settings import Settings, parse_url
from s3ec.store.botocore_s3 import BotocoreStore

# An engine that has just streamed its weights from there waits no longer than that.
_LONGEST_S = 5.0
_PAUSE_S = 0.5


def tags_below(url: str, *, allow_http: bool = False) -> list[tuple[str, int, str]]:
    """List a folder of S3 with the SDK's own credentials, as vLLM's streamer reads it. Blocks.

    Args:
        url: ``s3://BUCKET/FOLDER``.
        allow_http: See Settings.

    Returns:
        Name below the folder, bytes and tag of each object; in no order.

    Raises:
        S3ECError: It cannot be listed; the message says why.
    """
    try:
        place = parse_url(url)
        settings = Settings.model_validate(
            {
                "bucket": place.bucket,
                "prefix": place.prefix,
                "endpoint_url": os.environ.get("RUNAI_STREAMER_S3_ENDPOINT") or None,
                "allow_http": allow_http,
            }
        )
    except (ValueError, ValidationError) as exc:
        raise ConfigError(f"{url} is no folder of a bucket") from exc
    # On a thread of its own: the caller's may run a loop.
    with ThreadPoolExecutor(1, thread_name_prefix="s3ec-tags") as pool:
        return pool.submit(asyncio.run, _list(settings)).result()


async def _list(settings: Settings) -> list[tuple[str, int, str]]:
    store = BotocoreStore(settings, patient=True)
    failure = UnavailableError(f"no whole listing within {_LONGEST_S:.0f} s")
    try:
        async with asyncio.timeout(_LONGEST_S):
            while True:
                try:
                    return [found async for found in store.list_tags()]
                except UnavailableError as exc:
                    failure = exc
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError:
        raise failure from None
    finally:
        await store.close()
