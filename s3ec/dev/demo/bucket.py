# SPDX-License-Identifier: Apache-2.0
"""What the demo's bucket holds, read as any S3 client would."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from s3ec import codec
from s3ec.codec import Header
from s3ec.errors import UnavailableError
from s3ec.identity import digest_of_name, is_object_name

_FOLDER = "/objects/"
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Entry:
    """One embedding in the bucket.

    Attributes:
        name: Object name in the bucket.
        digest: Of its key, 32 hex digits, as in s3ec's log.
        nbytes: Size of the object.
        header: What it says of itself.
    """

    name: str
    digest: str
    nbytes: int
    header: Header


class Bucket:
    """The entries of one bucket."""

    def __init__(self, client: Any, name: str) -> None:
        """Read bucket ``name`` through a boto3 client."""
        self._client = client
        self._name = name

    def entries(self) -> set[str]:
        """Object names of all embeddings, whatever namespace they are in."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._name)
        names = [item["Key"] for page in pages for item in page.get("Contents", [])]
        return {name for name in names if is_object_name(name.partition(_FOLDER)[2])}

    def wait_for_another(self, known: Set[str], timeout_s: float = 60.0) -> Entry:
        """Wait until there is one entry beside the known ones, and read its header.

        Raises:
            UnavailableError: There is none, or more than one: saves went wrong.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            new = self.entries() - known
            if len(new) == 1:
                return self._read(new.pop())
            if new or time.monotonic() > deadline:
                raise UnavailableError(
                    f"expected one new embedding in the bucket, found {len(new)}; "
                    "the producer's log says why"
                )
            time.sleep(_POLL_S)

    def _read(self, name: str) -> Entry:
        front = f"bytes=0-{8 + codec.HEADER_LIMIT - 1}"
        reply = self._client.get_object(Bucket=self._name, Key=name, Range=front)
        header = codec.parse_header(reply["Body"].read())
        total = int(reply["ContentRange"].rpartition("/")[2])
        digest = digest_of_name(name.partition(_FOLDER)[2]).hex()
        return Entry(name, digest, total, header)
