# SPDX-License-Identifier: Apache-2.0
"""What reads bytes that others wrote: one function per reader, for any bytes at all.

Each takes bytes and returns. It lets through the errors that its reader promises, and fails where
the reader raises another one or breaks what it promises besides. No engine, no store, no torch.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

from s3ec import codec
from s3ec.config import load_settings
from s3ec.corpus.catalog_file import decode_part, encode_part, to_rows
from s3ec.errors import ConfigError, CorruptEntryError
from s3ec.identity import (
    OBJECT_SUFFIX,
    Layout,
    canonical_json,
    is_namespace_name,
    is_object_name,
    is_request_scoped,
    key_of_header,
    make_key,
    modality_name,
)
from s3ec.index.deltas import Overlay, parse_delta
from s3ec.index.names import SnapshotName
from s3ec.index.snapshot import Segment, encode, is_sorted
from s3ec.middleware.client_ids import BodyError, rewrite
from s3ec.modality import parse_record
from s3ec.safetensors_file import seal
from s3ec.settings import check_endpoint, check_prefix, parse_url
from s3ec.store.s3_errors import error_of
from s3ec.tenant import Tenant, check_reference
from s3ec.tier.news import make_line, parse_lines
from s3ec.tier.scan import SpoolFileName

NAMESPACE = "gemma-0123456789abcdef"
TENANT = Tenant(b"0123456789abcdef")
LAYOUT = Layout(NAMESPACE)
_ULID = "7" + 25 * "Z"
IDENTIFIER = "ab" * 32
_SAFE = re.compile(r"[0-9a-z./-]+")
_ENDS = (0, 1, 2**63, 2**64 - 1, 0xB90807FE5A4140AA, 0x0123456789ABCDEF)


class BrokenPromiseError(Exception):
    """A reader returned what it says it never returns."""


def require(condition: bool, what: str) -> None:
    """Fail the target where a reader broke its word."""
    if not condition:
        raise BrokenPromiseError(what)


# -- entries -----------------------------------------------------------------------------------


def entry(data: bytes) -> None:
    """A whole object of the bucket, at once and in parts: the same answer."""
    outcomes = []
    for read in (_read_whole, _read_parts):
        try:
            outcomes.append((read(data), ""))
        except CorruptEntryError as exc:
            outcomes.append((None, exc.reason))
    require((outcomes[0][0] is None) == (outcomes[1][0] is None), "parts are read otherwise")
    header = outcomes[0][0]
    if header is not None:
        require(header.total_bytes == len(data), "another length than the bytes have")
        require(header.shape.nbytes <= codec.MAX_TENSOR_BYTES, "too large")
        again = codec.encode_header(header) + data[header.data_start :]
        require(codec.parse_header(again).shape == header.shape, "not written as it was read")


def _read_whole(data: bytes) -> codec.Header:
    header = codec.parse_header(data)
    return codec.verify(data, namespace=header.namespace, identifier=header.identifier)


def _read_parts(data: bytes) -> codec.Header:
    first = data[: 8 + codec.HEADER_LIMIT]
    header = codec.parse_header(first)
    verifier = codec.Verifier(first, namespace=header.namespace, identifier=header.identifier)
    rest = data[len(first) :]
    for start in range(0, len(rest), 1000):
        verifier.feed(rest[start : start + 1000])
    verifier.finish()
    return verifier.header


def forged_entry(data: bytes) -> None:
    """The same from somebody who knows the format: JSON, a zero byte, the tensor's bytes."""
    forged = _forge(data)
    if forged is not None:
        entry(forged)


def _forge(data: bytes) -> bytes | None:
    """A file with checksums that fit, of a header in JSON, a zero byte, and all tensors."""
    text, _, tensors = data.partition(b"\0")
    content = _json(text)
    if not isinstance(content, dict) or not isinstance(content.get("__metadata__"), dict):
        return None
    metadata = content["__metadata__"]
    metadata["xxh3"] = codec.checksum(tensors)
    places = {name: place for name, place in content.items() if name != "__metadata__"}
    try:
        metadata["header_xxh3"] = seal(metadata, places)
        return _front(content) + tensors
    except (ValueError, RecursionError):  # nothing that a forger could write either
        return None


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _front(content: object) -> bytes:
    body = canonical_json(content).encode()
    body += b" " * (-(8 + len(body)) % 64)
    return struct.pack("<Q", len(body)) + body


# -- the index ---------------------------------------------------------------------------------


def segment(data: bytes) -> None:
    """A delta or a snapshot: looked up also where nobody checked its columns."""
    try:
        found = Segment.parse(data, NAMESPACE)
    except CorruptEntryError:
        return
    _look_up(found)
    try:
        rows = parse_delta(data, LAYOUT, "delta")
    except CorruptEntryError:
        return
    require(is_sorted(rows.hi, rows.lo), "not sorted")
    for row in range(min(len(rows), 4)):
        require(found.find(int(rows.hi[row]), int(rows.lo[row])) == row, "a row that is not found")
        found.nbytes(row)
    again = Segment.parse(b"".join(encode(rows, NAMESPACE)), NAMESPACE)
    require(len(again) == len(found), "not written as it was read")


def _look_up(found: Segment) -> None:
    for hi in _ENDS:
        for lo in _ENDS:
            row = found.find(hi, lo)
            require(-1 <= row < len(found), "a row that is not there")


def overlay(data: bytes) -> None:
    """A node's rows of all deltas, which any process of the node has written last."""
    try:
        found = Overlay.parse(data, NAMESPACE)
    except CorruptEntryError:
        return
    _look_up(found.segment)
    pieces = found.encode_with({}, NAMESPACE)
    again = Overlay.parse(b"".join(pieces), NAMESPACE)
    require(sorted(again.read) == sorted(found.read), "not written as it was read")


def forged_segment(data: bytes) -> None:
    """The same with checksums that fit: JSON, a zero byte, the columns."""
    forged = _forge(data)
    if forged is not None:
        segment(forged)


def forged_overlay(data: bytes) -> None:
    """The same with checksums that fit."""
    forged = _forge(data)
    if forged is not None:
        overlay(forged)


def record(data: bytes) -> None:
    """What a modality's record says of width and dtype."""
    found = parse_record(data)
    if found is not None:
        require(found.width > 0 and found.dtype in ("bfloat16", "float16", "float32"), "no record")


# -- names -------------------------------------------------------------------------------------


def names(data: bytes) -> None:
    """What a listing, a folder or a client calls something."""
    text = os.fsdecode(data)
    for known in (is_object_name, is_namespace_name):
        if known(text):
            parts = text.split("/")
            require(text.isascii() and not {"", ".", ".."} & set(parts), f"unsafe: {known}")
    if is_object_name(text):
        require(_SAFE.fullmatch(text) is not None, "an unsafe object name")
    spooled = SpoolFileName.parse(text)
    if spooled is not None:
        first = f"{spooled.namespace}--{spooled.destination}--{spooled.owner}-"
        last = f"--{spooled.digest.hex()}{OBJECT_SUFFIX}"
        require(text.startswith(first) and text.endswith(last), "another spool name")
    snapshot = SnapshotName.parse(text)
    require(snapshot is None or str(snapshot) == text, "another snapshot")


def identifiers(data: bytes) -> None:
    """What a client calls a picture, and what a header says that one is called."""
    # With what is no UTF-8 as lone surrogates, which a client's JSON can hold.
    text = data.decode("utf-8", "surrogateescape")
    plain, tenants = make_key(text), make_key(text, TENANT)
    require((plain is None) == (tenants is None), "a key with a secret alone")
    for key in (plain, tenants):
        if key is None:
            continue
        require(_SAFE.fullmatch(key.name) is not None and is_object_name(key.name), "unsafe")
        require(len(key.name) <= 150 and ".." not in key.name, "unsafe")
        found = key_of_header(key.stored, key.digest)
        require(found is not None and found.name == key.name, "not found by its header")
    if plain is not None and tenants is not None:
        require(plain.name != tenants.name, "no secret in the name")
        require(not is_request_scoped(text), "a counter has a key")
    key_of_header(text, data[:16])
    if _utf8(text):
        modality = modality_name(text)
        require(re.fullmatch(r"[a-z0-9_]{1,64}", modality) is not None, "an unsafe modality")


def _utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def news(data: bytes) -> None:
    """What other processes of the node told of new entries, in a file that anybody may cut."""
    digests, done = parse_lines(data, NAMESPACE)
    require(done <= len(data), "more was read than is there")
    again = b"".join(make_line(NAMESPACE, digest) for digest in digests)
    require(parse_lines(again, NAMESPACE)[0] == digests, "not read as it was written")


# -- settings ----------------------------------------------------------------------------------


def settings(data: bytes) -> None:
    """The JSON of ``ec_connector_extra_config``."""
    content = _json(data)
    if not isinstance(content, dict):
        return
    try:
        loaded = load_settings({"cache_dir": "/cache", **content})
    except ConfigError as exc:
        require(str(exc).partition("\n")[0].strip() != "", "a message without a beginning")
        return
    require(
        load_settings(json.loads(loaded.settings.model_dump_json())).settings == loaded.settings,
        "not read as it was written",
    )


def places(data: bytes) -> None:
    """URLs, endpoints, prefixes and references, from settings and the command line."""
    text = data.decode("utf-8", "replace")
    for check in (check_prefix, check_endpoint, check_reference):
        try:
            check(text)
        except ValueError:
            continue
    try:
        url = parse_url(text)
    except ValueError:
        return
    require(parse_url(str(url)) == url, "another URL")
    require(".." not in url.prefix.split("/"), "a prefix that leads out")


# -- requests and replies ----------------------------------------------------------------------


def request_body(data: bytes) -> None:
    """The body of a request to ``vllm serve``."""
    for must_be_json in (True, False):
        try:
            fresh = rewrite(data, must_be_json=must_be_json)
        except BodyError:
            continue
        require(rewrite(fresh, must_be_json=must_be_json) is fresh, "a name is left")
        if fresh is not data:
            json.loads(fresh)


def error_text(data: bytes) -> None:
    """What a server says in a refusal."""
    text = data.decode("utf-8", "replace")
    response = {
        "Error": {"Code": text, "Message": text, "Region": text, "ServerTime": text},
        "ResponseMetadata": {"HTTPStatusCode": 403, "HTTPHeaders": {"retry-after": text}},
    }
    said = str(error_of(ClientError(response, "GetObject"), "GET", ""))
    require(said.isprintable() and len(said) < 1000, "not a short line")


def catalog_part(data: bytes) -> None:
    """A part of a catalogue: whatever passes can be listed, and written as another part."""
    try:
        table = decode_part(data, NAMESPACE, ulid=_ULID, name="part")
    except CorruptEntryError:
        return
    rows = list(to_rows(table))
    require(list(to_rows(decode_part_again(table))) == rows, "a part is read otherwise")


def decode_part_again(table: Any) -> Any:
    """The rows that a part was read as, written once more."""
    body = encode_part(table, NAMESPACE)
    return decode_part(body, NAMESPACE, ulid=_ULID, name="part")


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        *(entry, forged_entry, segment, forged_segment, overlay, forged_overlay, record),
        catalog_part,
        *(
            names,
            identifiers,
            news,
            settings,
            places,
            request_body,
            error_text,
        ),
    )
}
