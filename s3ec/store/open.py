# SPDX-License-Identifier: Apache-2.0
"""Opens stores by the settings: the transport, its wrappers, and a probe of conditional writes."""

from __future__ import annotations

import importlib.util
import logging
import secrets
from collections.abc import Callable, Sequence

from s3ec.counters import Counters
from s3ec.errors import AccessError, ConfigError, ConflictError
from s3ec.settings import Replica, Settings
from s3ec.store.base import Store, Wrapper
from s3ec.store.endpoint import BreakerStore, Endpoint
from s3ec.store.places import DeletesEverywhere, Place, PlacesStore
from s3ec.store.retry import HedgeStore, RetryStore
from s3ec.tenant import read_secret

PROBE_PREFIX = ".s3ec-probe/"
KEPT_PROBE = f"{PROBE_PREFIX}kept"
"""One small object that is kept; further writes change nothing."""
PROBE_BODY = b"s3ec asked whether If-None-Match is honoured here; this can be deleted\n"
log = logging.getLogger(__name__)


def open_store(settings: Settings, *, patient: bool = False) -> Store:
    """Make the store that the settings describe; no request is sent yet.

    Args:
        settings: Where the bucket is and how to reach it.
        patient: True if a request waits for credentials until a search for them ends, as in a
            command; an engine must not wait.

    Raises:
        ConfigError: Profile, region or CA file cannot be used, or the transport is not installed.
    """
    # The imports are here, because the SDK takes 0.3 s and not every command needs it.
    if settings.url:
        from s3ec.store.url_store import UrlStore

        return UrlStore(settings)
    if settings.transport == "aioboto3":
        check_transport(settings)
        from s3ec.store.aioboto3_s3 import Aioboto3Store

        return Aioboto3Store(settings, patient=patient)
    from s3ec.store.s3 import ObstoreStore

    return ObstoreStore(settings, patient=patient)


def check_transport(settings: Settings) -> None:
    """Check whether the transport is installed, without an import of the SDK.

    Raises:
        ConfigError: The S3 client that the settings name is not installed.
    """
    if settings.transport == "aioboto3" and importlib.util.find_spec("aioboto3") is None:
        raise ConfigError(
            "`transport` = `aioboto3`: it is not installed; pip install aioboto3, or set `obstore`",
            field="transport",
        )


def open_places(
    settings: Settings, home: Store, counters: Counters, *, is_entry: Callable[[str], bool]
) -> PlacesStore | None:
    """Make a store of home and the replicas of the settings; None if there are no replicas.

    Args:
        home: With its retries and breaker around it.
        is_entry: True for the name of an entry.

    Raises:
        ConfigError: As open_store, for a replica.
    """
    places = _open_replicas(settings, counters)
    return PlacesStore(home, places, is_entry=is_entry) if places else None


def deleting_everywhere(settings: Settings, home: Store) -> Store:
    """Make a store for a command, which reads only from home, and deletes in the replicas as well.

    Raises:
        ConfigError: As open_store, for a replica.
    """
    places = _open_replicas(settings, Counters(), patient=True)
    return DeletesEverywhere(home, places) if places else home


def _open_replicas(settings: Settings, counters: Counters, *, patient: bool = False) -> list[Place]:
    places = []
    for replica in settings.replicas:
        opened = open_replica(settings, replica, patient=patient)
        endpoint = Endpoint(settings.max_concurrency)
        # Not hedged: a late read goes to the next place.
        store = resilient(opened, endpoint, counters, hedge=False)
        places.append(Place(replica.name, store, endpoint, counters, fill=replica.fill))
    return places


def open_replica(settings: Settings, replica: Replica, *, patient: bool = False) -> Store:
    """Open a replica of the settings, as open_store; no request is sent yet."""
    if replica.url is None:
        return open_store(settings.at(replica), patient=patient)
    from s3ec.store.redis_store import RedisStore

    secret = replica.password
    return RedisStore(
        replica.url,
        password=None if secret is None else read_secret(secret, "replicas").decode(),
        prefix=settings.prefix if replica.prefix is None else replica.prefix,
        cluster=replica.cluster,
        ttl_s=replica.ttl_s,
        ca_bundle=replica.ca_bundle or settings.ca_bundle,
        connect_timeout_s=settings.connect_timeout_s,
        read_timeout_s=settings.read_timeout_s,
    )


def resilient(store: Store, endpoint: Endpoint, counters: Counters, *, hedge: bool) -> Store:
    """Wrap a store with breaker, retries and, if ``hedge``, hedged reads."""
    if hedge:
        store = HedgeStore(store, endpoint, counters)
    return RetryStore(BreakerStore(store, endpoint, counters), counters, endpoint=endpoint)


def probe_name(begin: str = PROBE_PREFIX) -> str:
    """Make a new name for a throw-away object."""
    return begin + secrets.token_hex(8)


async def probe_conditional_put(store: Store, name: str = KEPT_PROBE) -> bool | None:
    """Find out whether the server honours ``If-None-Match: *``, by writing a name twice.

    One or two small requests. The object stays, so that a probe needs no right to delete; all
    processes share it.

    Returns:
        True if the second writer of a name is refused, False if it overwrites or the header itself
        is refused. None if this identity may not write, so that it does not matter.

    Raises:
        UnavailableError: The store does not answer now; ask again later.
    """
    try:
        await store.put_if_absent(name, [PROBE_BODY])
        await store.put_if_absent(name, [PROBE_BODY])
    except ConflictError:
        # Already the first write is refused if the object was kept.
        return True
    except AccessError as exc:
        log.info("cannot tell whether conditional writes are honoured: %s", exc)
        return None
    return False


async def with_conditional_put(store: Store) -> Store:
    """Return the store, in a HeadBeforePut if ``If-None-Match: *`` is not honoured.

    Costs and errors are those of probe_conditional_put.
    """
    return HeadBeforePut(store) if await probe_conditional_put(store) is False else store


class HeadBeforePut(Wrapper):
    """A Store for servers that do not honour ``If-None-Match: *``: checks before it writes.

    Two writers can still both pass the check; then the later one wins. Entries are
    content-addressed, so that is only a wasted upload, but nothing that needs exactly one winner
    may run on such a server.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        log.warning(
            "the server does not honour If-None-Match: each write is preceded by a HEAD request, "
            "and racing writers of one object overwrite each other (%r)",
            inner,
        )

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        if await self._inner.head(name) is not None:
            raise ConflictError(f"PUT {name}: it is there already")
        await self._inner.put_if_absent(name, body)
