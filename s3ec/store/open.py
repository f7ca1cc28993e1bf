# SPDX-License-Identifier: Apache-2.0
"""From settings to a store: the transport, what stands around it, and what the server promises."""

from __future__ import annotations

import asyncio
import enum
import importlib.util
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from s3ec.counters import Counters
from s3ec.errors import AccessError, ConfigError, ConflictError, UnavailableError
from s3ec.settings import Replica, Settings
from s3ec.store.base import Store, Wrapper, refuses_conditions
from s3ec.store.endpoint import BreakerStore, Endpoint
from s3ec.store.places import DeletesEverywhere, Place, PlacesStore
from s3ec.store.retry import HedgeStore, RetryStore
from s3ec.tenant import read_secret

PROBE_PREFIX = ".s3ec-probe/"
KEPT_PROBE = f"{PROBE_PREFIX}kept"
"""For who may write and not delete: one small object stays, however often it is written."""
PROBE_BODY = b"s3ec asked whether If-None-Match is honoured here; this can be deleted\n"
_answers: WeakKeyDictionary[Store, ConditionalPut] = WeakKeyDictionary()
log = logging.getLogger(__name__)


def open_store(settings: Settings, *, patient: bool = False) -> Store:
    """Make the store that the settings ask for; no request goes out yet.

    Args:
        settings: Where the bucket is and how to reach it.
        patient: Whether a request waits for credentials as long as a look for them takes: a command
            has nothing else to do, an engine has.

    Raises:
        ConfigError: Profile, region or CA file cannot be used, or the transport is not installed.
    """
    # The imports are here, because the SDK takes 0.3 s and not every command needs it.
    transport = choose_transport(settings).name
    if settings.url:
        from s3ec.store.url_store import UrlStore

        return UrlStore(settings)
    if transport == "aioboto3":
        from s3ec.store.aioboto3_s3 import Aioboto3Store

        return Aioboto3Store(settings, patient=patient)
    if transport == "botocore":
        from s3ec.store.botocore_s3 import BotocoreStore

        return BotocoreStore(settings, patient=patient)
    from s3ec.store.s3 import ObstoreStore

    return ObstoreStore(settings, patient=patient)


def open_places(
    settings: Settings, home: Store, counters: Counters, *, is_entry: Callable[[str], bool]
) -> PlacesStore | None:
    """Home with the replicas of the settings before it; None where there are none.

    Args:
        home: With all that makes bad days bearable around it.
        is_entry: Whether a name is an entry's.

    Raises:
        ConfigError: As open_store, for a replica.
    """
    places = _open_replicas(settings, counters)
    return PlacesStore(home, places, is_entry=is_entry) if places else None


def deleting_everywhere(settings: Settings, home: Store) -> Store:
    """Home for a command, which reads there alone, and deletes in the replicas as well.

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
        # Not hedged by itself: the next place is.
        store = resilient(opened, endpoint, counters, hedge=False)
        places.append(Place(replica.name, store, endpoint, counters, fill=replica.fill))
    return places


def open_replica(settings: Settings, replica: Replica, *, patient: bool = False) -> Store:
    """A replica of the settings, as open_store; no request goes out yet."""
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
    """The store, with all that makes bad days bearable around it."""
    if hedge:
        store = HedgeStore(store, endpoint, counters)
    return RetryStore(BreakerStore(store, endpoint, counters), counters, endpoint=endpoint)


@dataclass(frozen=True, slots=True)
class Transport:
    """The S3 client that does the work.

    Attributes:
        name: ``obstore``, ``aioboto3``, or ``botocore`` where there is no obstore.
        reason: Why it is this one, for people.
    """

    name: str
    reason: str


def choose_transport(settings: Settings) -> Transport:
    """What ``settings.transport`` comes to on this machine; imports no SDK.

    Raises:
        ConfigError: One is asked for, or ``url`` needs obstore, and it is not installed.
    """
    if settings.transport == "aioboto3":
        if importlib.util.find_spec("aioboto3") is None:
            raise ConfigError(
                "`transport` = `aioboto3`: it is not installed; pip install aioboto3, or "
                "set `auto`",
                field="transport",
            )
        return Transport("aioboto3", "`transport` asks for it")
    try:
        importlib.import_module("obstore.store")
    except ImportError as exc:
        field = "url" if settings.url else "transport"
        if settings.url or settings.transport == "obstore":
            raise ConfigError(
                f"`{field}` needs obstore ({exc}): pip install obstore", field=field
            ) from exc
        return Transport("botocore", f"no obstore ({exc}); pip install obstore")
    if settings.url:
        return Transport("obstore", "nothing else opens such a `url`")
    asked = settings.transport == "obstore"
    return Transport("obstore", "`transport` asks for it" if asked else "`auto`: it is installed")


def probe_name(begin: str = PROBE_PREFIX) -> str:
    """A new name for a throw-away object."""
    return begin + secrets.token_hex(8)


class ConditionalPut(enum.Enum):
    """What a server makes of ``If-None-Match: *``."""

    ENFORCED = "enforced"
    """The second writer of a name is refused."""
    IGNORED = "ignored"
    """The second writer overwrites silently: use HeadBeforePut."""
    REFUSED = "refused"
    """Such a write is refused, and one without the condition is not: use HeadBeforePut as well."""
    UNKNOWN = "unknown"
    """This identity may not write, so it could not be tried; nor does it matter to it."""


_NOT_HONOURED = (ConditionalPut.IGNORED, ConditionalPut.REFUSED)


async def probe_conditional_put(store: Store) -> ConditionalPut:
    """Find out whether the server honours ``If-None-Match: *``, by writing a name twice.

    Three or four small requests. The name is random and deleted again. An identity that may
    write but not delete uses one fixed name instead, so that one small object stays in the
    bucket however many processes start.

    Raises:
        UnavailableError: The store does not answer now; ask again later.
    """
    name = probe_name()
    deletable = True
    try:
        await store.delete(name)
    except AccessError:
        name, deletable = KEPT_PROBE, False
    try:
        return await _write_twice(store, name)
    except AccessError as exc:
        log.info("cannot tell whether conditional writes are honoured: %s", exc)
        return ConditionalPut.UNKNOWN
    except asyncio.CancelledError:
        deletable = False  # whoever ends has no time for that, and perhaps no store
        raise
    finally:
        if deletable:
            await _clean_up(store, name)


async def with_conditional_put(store: Store) -> Store:
    """The store, or HeadBeforePut around it where ``If-None-Match: *`` is not honoured.

    Costs what probe_conditional_put costs, and raises what it raises; once for each store,
    unless it could not be told.
    """
    answer = _answers.get(store)
    if answer is None:
        answer = await probe_conditional_put(store)
        if answer is not ConditionalPut.UNKNOWN:  # the rights of this identity may change
            _answers[store] = answer
    return HeadBeforePut(store) if answer in _NOT_HONOURED else store


async def _write_twice(store: Store, name: str) -> ConditionalPut:
    try:
        await store.put_if_absent(name, [PROBE_BODY])
        await store.put_if_absent(name, [PROBE_BODY])
    except ConflictError:
        # Also the first of the two may say so: a kept name, or a retry after a lost reply.
        return ConditionalPut.ENFORCED
    return ConditionalPut.REFUSED if refuses_conditions(store) else ConditionalPut.IGNORED


async def _clean_up(store: Store, name: str) -> None:
    try:
        await store.delete(name)
    except (AccessError, UnavailableError) as exc:
        log.warning("the probe object %s stays in the bucket: %s", name, exc)


class HeadBeforePut(Wrapper):
    """A Store for servers that ignore or refuse ``If-None-Match: *``: looks before it writes.

    Two writers can still both pass the look; then the later one wins. Entries are
    content-addressed, so that is a wasted upload and no more, but nothing that needs exactly one
    winner may run on such a server.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        log.warning(
            "the server %s If-None-Match: each write is preceded by a HEAD request, and "
            "racing writers of one object overwrite each other (%r)",
            *("refuses" if refuses_conditions(inner) else "ignores", inner),
        )

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        if await self._inner.head(name) is not None:
            raise ConflictError(f"PUT {name}: it is there already")
        await self._inner.put_if_absent(name, body)
