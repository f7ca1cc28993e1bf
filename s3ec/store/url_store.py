# SPDX-License-Identifier: Apache-2.0
"""A corpus outside S3: a bucket of Google or Azure, or a folder, all of it through obstore.

obstore finds credentials by itself: GOOGLE_ and AZURE_ variables, files of the clouds' own tools,
an instance's identity. The type of an error gives its meaning; if it does not, a check of the
object's size or the folder's disk does. In a folder no symbolic link is followed. Checked with
obstore 0.12.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import os
import re
import stat
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any

import obstore
from obstore import exceptions as obs
from obstore.store import AzureStore, GCSStore, LocalStore

from s3ec.errors import AccessError, ConfigError, ConflictError, S3ECError, UnavailableError
from s3ec.settings import Settings
from s3ec.store import obstore_runtime
from s3ec.store.base import (
    Blob,
    NoSpaceError,
    ObjectInfo,
    UnorderedListingError,
    check_batch,
    check_folder_name,
    check_range,
    content_type_of,
    delete_each,
)
from s3ec.store.concurrency import RequestSlot, RequestSlots
from s3ec.store.network import certificates
from s3ec.store.obstore_runtime import held
from s3ec.store.s3 import OBSTORE_ERRORS, http_options, is_panic, read_result
from s3ec.store.s3_errors import one_line

# obstore's names for files that it is still writing.
_UNFINISHED = re.compile(r"#\d+$")
_REFUSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG})


class AbsentError(AccessError):
    """There is no such object; in a request without an object, no such bucket."""


class UntoldError(UnavailableError):
    """Obstore failed, and the type of its error does not tell why."""


@contextlib.contextmanager
def plain_errors(what: str) -> Iterator[None]:
    """Map every error of obstore in this block to ours; ``what`` begins every message."""
    try:
        yield
    except TimeoutError as exc:  # a deadline of ours
        raise UnavailableError(f"{what}: timed out") from exc
    except OBSTORE_ERRORS as exc:
        # Not `from exc`: its text is scrubbed for the message, and not in a traceback.
        raise _meaning(exc, what) from None
    except BaseException as exc:
        if not is_panic(exc):
            raise
        raise UnavailableError(f"{what}: obstore failed inside") from exc


def _meaning(exc: Exception, what: str) -> S3ECError:
    if isinstance(exc, FileNotFoundError):
        return AbsentError(f"{what}: there is no such thing; correct `url`", code="NotFound")
    if isinstance(exc, (obs.AlreadyExistsError, obs.PreconditionError)):
        return ConflictError(f"{what}: it is there already")
    if isinstance(exc, (obs.PermissionDeniedError, obs.UnauthenticatedError)):
        return AccessError(
            f"{what}: refused; allow these credentials to read, list and create objects here",
            code="PermissionDenied",
            is_general=isinstance(exc, obs.UnauthenticatedError),
        )
    said = one_line(str(exc).partition("\n")[0]) or "obstore failed without a reason"
    if isinstance(exc, (ValueError, NotImplementedError, obs.NotSupportedError)):
        return AccessError(
            f"{what}: {said}; obstore cannot do that", code="NotSupported", is_general=False
        )
    return UntoldError(f"{what}: {said}")


class RealFolder:
    """Checks names below ``root``. Every method reads the disk.

    It refuses existing links, and whatever is not a file: to open a pipe may take for ever. A
    process that may write to the folder can still make one between the check and the use.
    """

    def __init__(self, root: str) -> None:
        self._root = root

    def require(self, key: str) -> None:
        """Refuse a name that leads over a link or to no file, or that obstore reserves.

        Raises:
            AccessError: It is such a name, or the file system refuses it.
            AbsentError: A file is where the name has a folder.
            UnavailableError: The disk failed.
        """
        if _UNFINISHED.search(key):
            raise _refusal("a file's name may not end with `#` and digits", "NameNotSupported")
        if not self.real([key]):
            raise _refusal("symbolic links are not followed", "SymbolicLink")
        try:
            mode = os.lstat(f"{self._root}/{key}").st_mode
        except FileNotFoundError:
            return
        except NotADirectoryError as exc:
            raise AbsentError("a file is in the way", code="ENOTDIR", is_general=False) from exc
        except OSError as exc:
            raise _of_the_disk(exc) from exc
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise _refusal("it is no file", "NoFile")

    def why_not_written(self, nbytes: int) -> S3ECError | None:
        """Find why obstore could not write ``nbytes``; None if the cause is unknown."""
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._root)
            if disk.f_bavail * disk.f_frsize < nbytes:
                return NoSpaceError("the disk is full; free some of it")
            if not os.access(self._root, os.W_OK):
                return _of_the_disk(OSError(errno.EACCES, os.strerror(errno.EACCES)))
        return None

    def real(self, keys: Iterable[str]) -> set[str]:
        """Return those of some names that lead over no link."""
        is_link = functools.cache(os.path.islink)

        def is_real(key: str) -> bool:
            above = itertools.accumulate(key.split("/"), "{}/{}".format, initial=self._root)
            return not any(is_link(path) for path in itertools.islice(above, 1, None))

        return {key for key in keys if is_real(key)}

    def with_files(self, folders: Sequence[str]) -> list[str]:
        """Return those of some folders that hold a file at any depth; links do not count."""
        return [
            folder
            for folder in folders
            if self.real([folder])
            and any(
                not _UNFINISHED.search(name)
                for _, _, files in os.walk(f"{self._root}/{folder}")
                for name in files
            )
        ]


def _refusal(said: str, code: str) -> AccessError:
    return AccessError(said, code=code, is_general=False)


def _of_the_disk(exc: OSError) -> S3ECError:
    name = errno.errorcode.get(exc.errno or 0, str(exc.errno))
    if exc.errno not in _REFUSED:
        return UnavailableError(f"{name} ({exc.strerror})")
    return _refusal(f"{name}; give this user the right to do that", name)


# A page of a listing: 1000 entries of a name of up to 1 KiB each.
_PAGE_BYTES = 2**21


class UrlStore:
    """The corpus that ``settings.url`` names; names are relative to its prefix. See base.Store.

    May be made before a loop exists. Requests are bounded as BotocoreStore's are. Names with empty,
    ``.`` or ``..`` parts or control characters are refused, in a folder also those that RealFolder
    refuses. The folder of a ``file`` URL must exist, as a bucket must.

    Attributes:
        page_size: Entries requested per page of a listing.

    Raises:
        ConfigError: obstore refuses the environment's settings for this cloud.
    """

    page_size = 1000

    def __init__(self, settings: Settings) -> None:
        self._corpus = settings.corpus
        self._folder: RealFolder | None = None
        inside = self._corpus.prefix
        if self._corpus.scheme == "file":
            self._folder, inside = RealFolder(inside), ""
        self._root = f"{inside}/" if inside else ""
        self._slots = RequestSlots(settings)
        self._silence_s = settings.read_timeout_s
        # A folder may appear later, so a missing one is an error of each request.
        self._client: Any = None if self._folder else cloud_client(settings)

    def __repr__(self) -> str:
        return f"UrlStore({self._corpus})"

    async def get(self, name: str, *, max_bytes: int) -> Blob | None:
        key = self._key(name)
        with contextlib.suppress(AbsentError):
            async with self._slot("GET", key) as slot:
                return await self._get_object(slot, key, max_bytes)
        return None

    async def get_range(self, name: str, start: int, length: int) -> Blob | None:
        check_range(start, length)
        key = self._key(name)
        try:
            async with self._slot("GET", key) as slot:
                return await self._get_object(slot, key, length, (start, start + length))
        except AbsentError:
            return None
        except UntoldError:
            info = await self.head(name)
            if info is not None and start >= info.nbytes:
                return b""
            raise

    async def put_if_absent(self, name: str, body: Sequence[bytes | memoryview]) -> None:
        key = self._key(name)
        pieces = [held(memoryview(piece).cast("B")) for piece in body]
        # A folder keeps no attributes.
        about = None if self._folder else {"Content-Type": content_type_of(key)}
        nbytes = sum(piece.nbytes for piece in pieces)
        try:
            async with self._slot("PUT", key) as slot:
                slot.extend(nbytes)
                await self._require(slot, key)
                client = self._client
                put = obstore.put_async(
                    client, key, pieces, attributes=about, mode="create", use_multipart=False
                )
                await held(put)
        except UntoldError:
            if self._folder is not None:
                found = await asyncio.to_thread(self._folder.why_not_written, nbytes)
                if found is not None:
                    raise found from None
            raise

    async def head(self, name: str) -> ObjectInfo | None:
        key = self._key(name)
        with contextlib.suppress(AbsentError):
            async with self._slot("HEAD", key) as slot:
                await self._require(slot, key)
                return self._info(await held(obstore.head_async(self._client, key)))
        return None

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        wanted = self._root + prefix
        after = self._root + start_after if start_after else None
        # obstore matches whole parts of names only.
        above = wanted.rpartition("/")[0]
        pages: Any = None
        while True:
            try:
                async with self._slot("LIST", wanted) as slot:
                    slot.extend(_PAGE_BYTES)
                    pages = pages or obstore.list(
                        self._client, above or None, offset=after, chunk_size=self.page_size
                    )
                    try:
                        page = await held(anext(pages))
                    except StopAsyncIteration:
                        return
                    found = [entry for entry in page if entry["path"].startswith(wanted)]
                    if self._folder is not None:
                        names = [entry["path"] for entry in found]
                        real = await asyncio.to_thread(self._folder.real, names)
                        found = [entry for entry in found if entry["path"] in real]
            except UnavailableError as exc:
                if self._folder is not None:
                    raise UnorderedListingError(str(exc)) from exc
                await self._check_rights(exc)
                raise
            for entry in found:
                yield self._info(entry)

    async def list_folders(self, prefix: str) -> Sequence[str]:
        check_folder_name(prefix)
        above = self._root + prefix
        folder = above.rstrip("/") or None
        try:
            async with self._slot("LIST", above) as slot:
                slot.extend(_PAGE_BYTES)
                listed = await held(obstore.list_with_delimiter_async(self._client, folder))
        except UntoldError as exc:
            await self._check_rights(exc)
            raise
        folders = [str(folder) for folder in listed["common_prefixes"]]
        if self._folder is not None:
            folders = await asyncio.to_thread(self._folder.with_files, folders)
        return tuple(f"{folder.removeprefix(above)}/" for folder in folders)

    async def delete(self, name: str) -> None:
        key = self._key(name)
        with contextlib.suppress(AbsentError):
            async with self._slot("DELETE", key) as slot:
                await self._require(slot, key)
                await held(obstore.delete_async(self._client, key))

    async def delete_many(self, names: Sequence[str]) -> dict[str, S3ECError]:
        check_batch(names)
        keys = [self._key(name) for name in dict.fromkeys(names)]
        if self._folder is None and keys:
            # One of them may be refused or absent, and the error does not name it.
            with contextlib.suppress(AccessError):
                async with self._slot("DELETE", f"{keys[0]} and {len(keys) - 1} more") as slot:
                    slot.extend(_PAGE_BYTES)
                    await held(obstore.delete_async(self._client, keys))
                    return {}
        return await delete_each(self, names)

    async def close(self) -> None:
        self._slots.close()
        # obstore closes a client's connections when no reference to it is left.
        self._client = None

    def _key(self, name: str) -> str:
        # obstore silently changes such names, "a/" into "a".
        if any(part in ("", ".", "..") for part in name.split("/")) or not name.isprintable():
            raise ValueError(
                "an object's name has no empty, `.` or `..` parts and only printable characters"
            )
        return self._root + name

    def _info(self, entry: Any) -> ObjectInfo:
        name = str(entry["path"])[len(self._root) :]
        return ObjectInfo(name, int(entry["size"]), entry["last_modified"].timestamp())

    @contextlib.asynccontextmanager
    async def _slot(self, verb: str, key: str) -> AsyncIterator[RequestSlot]:
        """Provide a slot, a deadline and the error boundary of one request."""
        what = f"{verb} {self._corpus.scheme}://{self._corpus.bucket or self._corpus.prefix}/{key}"
        self._slots.check_loop()
        with plain_errors(what):
            await obstore_runtime.start(self._slots)
            async with RequestSlot(self._slots, what) as slot:
                if self._client is None:
                    self._client = await asyncio.to_thread(self._open_folder)
                yield slot

    def _open_folder(self) -> LocalStore:
        try:
            return LocalStore(self._corpus.prefix)
        except obs.BaseError as exc:
            raise AccessError(
                f"{self._corpus}: no such folder; make it, or correct `url`", code="NoSuchFolder"
            ) from exc

    async def _check_rights(self, exc: UnavailableError) -> None:
        """Request an object after a listing failed, since its refusal has a type.

        Raises:
            AccessError: These credentials are refused.
        """
        if isinstance(exc, UntoldError) and self._folder is None:
            with contextlib.suppress(UnavailableError):
                await self.head(".s3ec")
            exc.args = (f"{exc}; if that stays, correct `url`",)

    async def _require(self, slot: RequestSlot, key: str) -> None:
        if self._folder is not None:
            try:
                await asyncio.to_thread(self._folder.require, key)
            except (AccessError, UnavailableError) as exc:
                exc.args = (f"{slot.what}: {exc}",)
                raise

    async def _get_object(
        self, slot: RequestSlot, key: str, most: int, wanted: tuple[int, int] | None = None
    ) -> Blob:
        await self._require(slot, key)
        part: Any = {} if wanted is None else {"range": wanted}
        result = await held(obstore.get_async(self._client, key, options=part))
        is_part = wanted is not None
        return await read_result(result, slot, most, self._silence_s, is_part=is_part)


def cloud_client(settings: Settings) -> GCSStore | AzureStore:
    options = http_options(settings)
    if settings.ca_bundle is not None:
        options["root_certificate"] = certificates(settings.ca_bundle)
    # Our wrapper retries.
    common: Any = {"client_options": options, "retry_config": {"max_retries": 0}}
    corpus = settings.corpus
    try:
        if corpus.scheme == "gs":
            return GCSStore(corpus.bucket, **common)
        return AzureStore(corpus.bucket, **common)
    except (obs.BaseError, ValueError) as exc:
        hint = "; set AZURE_STORAGE_ACCOUNT_NAME" if corpus.scheme == "az" else ""
        reason = one_line(str(exc).partition("\n")[0])
        raise ConfigError(f"`url` = `{corpus}`: {reason}{hint}", field="url") from exc
