# SPDX-License-Identifier: Apache-2.0
"""Lists the objects below a URL of another bucket than the corpus's: names, sizes and tags.

A tag (ETag) changes when an object is replaced, so weights that an engine streams from a bucket can
be distinguished without reading them.
"""

from __future__ import annotations

import asyncio
import os

from pydantic import ValidationError

from s3ec.counters import Counters
from s3ec.errors import ConfigError, UnavailableError
from s3ec.runtime import call_within
from s3ec.settings import Settings, parse_url
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.store.retry import RetryStore

# An engine that has just streamed its weights from there waits no longer than this.
_LONGEST_S = 5.0


def tags_below(url: str, *, allow_http: bool = False) -> list[tuple[str, int, str]]:
    """List a folder of S3 with the SDK's own credentials, as vLLM's streamer reads it. Blocks.

    Args:
        url: ``s3://BUCKET/FOLDER``.
        allow_http: See Settings.

    Returns:
        Name below the folder, size in bytes and tag of each object; in no order.

    Raises:
        S3ECError: The folder cannot be listed; the message says why.
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
    try:
        return call_within(_LONGEST_S, lambda: asyncio.run(_list(settings)))
    except TimeoutError:
        raise UnavailableError(f"{url}: no whole listing within {_LONGEST_S:.0f} s") from None


async def _list(settings: Settings) -> list[tuple[str, int, str]]:
    store = BotocoreStore(settings, patient=True)

    async def every_tag() -> list[tuple[str, int, str]]:
        return [one async for page in store.list_tags() for one in page]

    try:
        return await RetryStore(store, Counters()).ask("tags", settings.prefix, every_tag)
    finally:
        await store.close()
