# SPDX-License-Identifier: Apache-2.0
"""How the place of a corpus is written: URLs, prefixes, servers."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal, cast
from urllib.parse import quote, unquote, urlsplit

Scheme = Literal["s3", "gs", "az", "file"]
_FORMS = "gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, file:///FOLDER or s3://BUCKET/PREFIX"


@dataclass(frozen=True, slots=True)
class CorpusUrl:
    """Where a corpus is.

    Attributes:
        scheme: ``s3``, ``gs`` (Google Cloud Storage), ``az`` (Azure Blob Storage) or ``file``.
        bucket: Bucket or container; empty for ``file``.
        prefix: Folder inside it, without surrounding slashes; for ``file`` the absolute path.
    """

    scheme: Scheme
    bucket: str
    prefix: str

    def __str__(self) -> str:
        between = "" if self.scheme == "file" else "/"
        return f"{self.scheme}://{self.bucket}{between}{quote(self.prefix)}".rstrip("/")


def parse_url(text: str) -> CorpusUrl:
    """Take a URL apart; ``%20`` and the like are decoded.

    Raises:
        ValueError: Not such a URL; the message does not repeat it.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or not text.isprintable():
        raise ValueError(f"write it as {_FORMS}")
    if scheme not in ("s3", "gs", "az", "file"):
        raise ValueError(f"no such kind of corpus; write it as {_FORMS}")
    bucket, _, path = rest.partition("/")
    # Anywhere, since a key with a slash in it would be taken for host and path.
    if "@" in (bucket if scheme == "file" else rest):
        raise ValueError("no credentials in the URL; they come from the environment")
    if "?" in rest or "#" in rest:
        raise ValueError("a URL has `?` as %3F and `#` as %23")
    prefix = check_prefix(unquote(path, errors="strict"))
    if scheme == "file":
        if bucket:
            raise ValueError("a `file` URL has three slashes, file:///FOLDER")
        if not prefix:
            raise ValueError("name a folder, not the whole file system")
        return CorpusUrl("file", "", f"/{prefix}")
    if not re.fullmatch(r"[A-Za-z0-9._-]{3,255}", bucket):
        raise ValueError("a bucket name has 3 or more of letters, digits, `.`, `-` and `_`")
    return CorpusUrl(cast("Scheme", scheme), bucket, prefix)


def check_prefix(value: str) -> str:
    """A folder's name without surrounding slashes.

    Raises:
        ValueError: It could not stand in front of an object's name.
    """
    value = value.strip("/")
    if any(part in ("", ".", "..") for part in value.split("/") if value):
        raise ValueError("no empty, `.` or `..` parts between the slashes")
    if not value.isprintable():
        raise ValueError("printable characters only")
    if len(value.encode()) > 512:
        raise ValueError("at most 512 bytes, so that object names fit S3's limit of 1024")
    return value


def check_endpoint(value: str) -> str:
    """The URL of a server, without a slash at its end.

    Raises:
        ValueError: It says more or less than a server; the message does not repeat it.
    """
    # Anywhere, since a key with a slash in it would be taken for host and path.
    if "@" in value:
        raise ValueError("no credentials in the URL; they come from the SDK's chain")
    url = urlsplit(value)
    # urlsplit drops line breaks silently.
    plain = value.isprintable() and " " not in value
    if url.scheme not in ("http", "https") or not url.hostname or not plain:
        raise ValueError("write it as http://host:port or https://host:port")
    if url.path.strip("/") or url.query or url.fragment:
        raise ValueError("host and port only; the bucket goes into `bucket`")
    try:
        _ = url.port
    except ValueError:
        # Without its text and trace: both repeat what was given.
        raise ValueError("the port is not a number from 0 to 65535") from None
    return value.rstrip("/")


def is_plain_http_elsewhere(url: str) -> bool:
    """Whether this is ``http://`` to what may be another machine.

    Only addresses of loopback and the name ``localhost`` are this one for sure: what else a name
    resolves to is for others to say, and can change.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname == "localhost":
        return False
    try:
        return not ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return True
