# SPDX-License-Identifier: Apache-2.0
"""Redis or Valkey as a fast, small replica: it may evict an entry at any time.

It cannot list, so it is never home, and holds no index.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from s3ec.errors import (
    TOO_LARGE,
    AccessError,
    ConfigError,
    ConflictError,
    CorruptEntryError,
    S3ECError,
    UnavailableError,
)
from s3ec.store.base import (
    ObjectInfo,
    check_batch,
    check_folder_name,
    check_name,
    check_range,
)

if TYPE_CHECKING:
    import redis.asyncio

T = TypeVar("T")
# A longer value would block the server's only thread, and all its clients, for milliseconds.
_MOST_BYTES = 64 * 2**20
# More than the places for which requests wait; beyond this number redis-py refuses.
_CONNECTIONS = 1024


class RedisStore:
    """A Store over one server, or a cluster of them. For one event loop.

    Its values are the objects. ``put_if_absent`` is SET with NX, and with a lifetime if ``ttl_s``
    is given. The server sets its memory and its policy of eviction.
    """

    def __init__(
        self,
        url: str,
        *,
        password: str | None = None,
        prefix: str = "",
        cluster: bool = False,
        ttl_s: int | None = None,
        ca_bundle: Path | None = None,
        connect_timeout_s: float = 1.0,
        read_timeout_s: float = 5.0,
    ) -> None:
        """Set up; no connection is made yet.

        Args:
            url: ``redis://HOST:PORT/DATABASE`` or ``rediss://`` for TLS, perhaps with ``USER@``.
            password: Of that user.
            prefix: Begins all names, like a folder of a bucket.
            cluster: True if the server is one of a cluster.
            ttl_s: Lifetime of written entries; None for no limit.
            ca_bundle: PEM file of the authorities to trust instead of the system's.
            connect_timeout_s: Longest wait for a connection.
            read_timeout_s: Longest silence of the server inside a reply.

        Raises:
            ConfigError: redis-py is not installed, or the PEM file cannot be used.
        """
        try:
            import redis.asyncio
            import redis.exceptions
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError as exc:
            raise ConfigError(
                f"a replica at redis:// needs redis-py ({exc}); pip install redis", field="replicas"
            ) from exc
        self._errors = redis.exceptions
        parts = urlsplit(url)
        self._where = f"{parts.scheme}://{parts.hostname}:{parts.port or 6379}"
        self._root = f"{prefix}/" if prefix else ""
        self._ttl_s = ttl_s
        options: dict[str, Any] = {
            "host": parts.hostname,
            "port": parts.port or 6379,
            "username": unquote(parts.username) if parts.username else None,
            "password": password,
            "max_connections": _CONNECTIONS,
            "socket_connect_timeout": connect_timeout_s,
            "socket_timeout": read_timeout_s,
            "socket_read_size": 2**18,
            # One retry, for a connection that was dropped while idle.
            "retry": Retry(NoBackoff(), 1),
        }
        if parts.scheme == "rediss":
            try:  # check it now rather than at each connection
                ssl.create_default_context(cafile=ca_bundle)
            except OSError as exc:
                raise ConfigError(
                    f"`replicas`, `ca_bundle`: {exc}; give a PEM file", field="replicas"
                ) from exc
            options |= {"ssl": True, "ssl_ca_certs": str(ca_bundle) if ca_bundle else None}
        self._client: redis.asyncio.Redis | redis.asyncio.RedisCluster
        if cluster:
            self._client = redis.asyncio.RedisCluster(**options)
        else:
            database = int(parts.path.strip("/") or 0)
            self._client = redis.asyncio.Redis(db=database, **options)

    def __repr__(self) -> str:
        return f"RedisStore({self._where}, {self._root})"

    async def get(self, name: str, *, max_bytes: int) -> bytes | None:
        # In one round trip, and never more bytes than requested.
        there, nbytes, body = await self._front(name, 0, max_bytes)
        if not there:
            return None
        if nbytes > max_bytes:
            raise CorruptEntryError(
                f"GET {name}: {nbytes} bytes, at most {max_bytes} expected", reason="size"
            )
        if len(body) != nbytes:  # it was replaced in between
            raise CorruptEntryError(f"GET {name}: {len(body)} of {nbytes} bytes", reason="length")
        return body

    async def get_range(self, name: str, start: int, length: int) -> bytes | None:
        check_range(start, length)
        there, _, body = await self._front(name, start, length)
        return body if there else None

    async def _front(self, name: str, start: int, length: int) -> tuple[bool, int, bytes]:
        """True if it exists, its size, and some of its bytes: at most ``length``, or one."""
        key, length = self._key(name), max(length, 1)
        pipe = self._client.pipeline(transaction=False)
        pipe.exists(key)
        pipe.strlen(key)
        pipe.getrange(key, start, start + length - 1)
        there, nbytes, body = await self._ask(name, pipe.execute())
        is_redis = isinstance(there, int) and isinstance(nbytes, int) and isinstance(body, bytes)
        if not is_redis or nbytes < 0 or len(body) > length:
            raise UnavailableError(f"{self._where} answers for {name} as no Redis does")
        return bool(there), nbytes, body

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        whole = b"".join(body)
        key = self._key(name)
        if len(whole) > _MOST_BYTES:
            raise AccessError(
                f"PUT {name}: {len(whole)} bytes, more than fit into a value ({_MOST_BYTES})",
                code=TOO_LARGE,
                is_general=False,
            )
        done = await self._ask(name, self._client.set(key, whole, nx=True, ex=self._ttl_s))
        if not done:
            raise ConflictError(f"PUT {name}: it is there already")

    async def head(self, name: str) -> ObjectInfo | None:
        there, nbytes, _ = await self._front(name, 0, 1)
        return ObjectInfo(name, nbytes) if there else None

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        for info in self._listing():
            yield info

    async def list_folders(self, prefix: str) -> Sequence[str]:
        check_folder_name(prefix)
        return [info.name for info in self._listing()]

    def _listing(self) -> Sequence[ObjectInfo]:
        raise AccessError(f"{self._where} cannot list", code="NotImplemented", is_general=False)

    async def delete(self, name: str) -> None:
        await self._ask(name, self._client.unlink(self._key(name)))

    async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
        check_batch(names)
        if names:
            pipe = self._client.pipeline(transaction=False)
            for name in dict.fromkeys(names):
                # For a cluster, the client's own method would take keys of several servers.
                pipe.execute_command("UNLINK", self._key(name))
            await self._ask(names[0], pipe.execute())
        return {}

    async def close(self) -> None:
        await self._client.aclose()

    def _key(self, name: str) -> bytes:
        check_name(name)
        return f"{self._root}{name}".encode()

    async def _ask(self, name: str, reply: Awaitable[T]) -> T:
        """Await a reply.

        Raises:
            AccessError: User, password or rights are refused, or the server is full.
            CorruptEntryError: The name holds another kind of value.
            UnavailableError: Any other failure.
        """
        errors = self._errors
        try:
            return await reply
        except (errors.NoPermissionError, errors.ReadOnlyError) as exc:
            raise AccessError(
                f"{self._where} refuses {name}: {exc}", code="NoPermission", is_general=False
            ) from exc
        except (errors.AuthenticationError, errors.AuthorizationError) as exc:
            raise AccessError(f"{self._where} refuses: {exc}", code="Authentication") from exc
        except errors.OutOfMemoryError as exc:
            raise AccessError(
                f"{self._where} has no room for {name}: {exc}", code=TOO_LARGE, is_general=False
            ) from exc
        except Exception as exc:  # a reply that is not Redis's can raise any error in redis-py
            said = str(exc) or type(exc).__name__
            if "WRONGTYPE" in said:  # a pipeline's error has no type for it
                raise CorruptEntryError(f"{name} is no string: {said}", reason="header") from exc
            raise UnavailableError(f"{self._where} did not answer for {name}: {said}") from exc
