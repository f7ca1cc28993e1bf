# SPDX-License-Identifier: Apache-2.0
"""Names of embeddings: identifier to key, and model configuration to namespace.

Identifiers come from vLLM's ``mm_feature.identifier`` and may be chosen by a client, so no byte of
one ever reaches an object name: names are made of ``[0-9a-z./-]`` only. Everything except the key
policy at the end is a pure function, without I/O.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from s3ec.counters import Counters
from s3ec.errors import ConfigError
from s3ec.settings import Settings
from s3ec.tenant import Tenant

FORMAT_VERSION = 1
OBJECT_SUFFIX = ".safetensors"
PARQUET_SUFFIX = ".parquet"
# The full identifier is stored in each object's header, which is capped (codec.HEADER_LIMIT);
# 4 KiB leaves room for the rest. vLLM's own hashes have 64 characters.
MAX_IDENTIFIER_BYTES = 4096
DESCRIPTOR_BYTES = 2**20
"""More than a namespace's descriptor ever has."""
# Enough for a content hash and its adapter's name. A longer identifier is hashed at each lookup,
# which takes a few microseconds.
_REMEMBERED_CHARACTERS = 128
# Characters of all renamed identifiers: some 40,000 of a usual length.
_RENAMED_CHARACTERS = 2**23

_CONTENT_HASH = re.compile(r"[0-9a-f]{64}")
# Three characters at least: two could be taken for a fan-out folder.
_LORA_FOLDER = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
# Adapter and identifier as hashed with a tenant's secret: in a header, and in a name.
_TENANT_LABEL = re.compile(r"(?:(t-[0-9a-f]{64}):)?t-([0-9a-f]{64})")
_TENANT_NAME = re.compile(
    r"(?:(t-[0-9a-f]{64})/)?[0-9a-f]{2}/t-([0-9a-f]{64})" + re.escape(OBJECT_SUFFIX)
)
# The adapter's folder, the first two characters of the hash as a folder, and the hash. The hash has
# a mark in front if a client chose the identifier, or if it is made with a tenant's secret.
_OBJECT_NAME = re.compile(
    rf"(?:(?:{_LORA_FOLDER.pattern}|x-[0-9a-f]{{64}})/(?P<a>[0-9a-f]{{2}})/(?P=a)"
    r"|(?:t-[0-9a-f]{64}/)?(?P<t>[0-9a-f]{2})/t-(?P=t)"
    r"|(?P<x>[0-9a-f]{2})/(?:x-)?(?P=x))[0-9a-f]{62}" + re.escape(OBJECT_SUFFIX)
)
# vLLM numbers the items of a request instead of hashing them when both the processor cache and
# prefix caching are off (renderers/base.py, _process_mm_uuids in 0.32): the same name means
# another image after a restart or on another replica.
_REQUEST_SCOPED = re.compile(r"(?:.+:)?renderer-?\d+-mm-\d+-[A-Za-z0-9_]+-\d+", re.DOTALL)
# Crockford's base 32 in upper case; the first character carries three bits only.
_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")
_NAMESPACE = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}-[0-9a-f]{16}")

#: Splits a digest into its two halves, big-endian: (hi, lo). The fastest way known (0.15 us).
split_digest = struct.Struct(">QQ").unpack


@dataclass(frozen=True, slots=True)
class Key:
    """The object name and the digest of one identifier.

    Attributes:
        identifier: vLLM's name for it.
        name: Object name below ``objects/``, such as ``ab/abcd...safetensors``.
        digest: First 16 bytes of SHA-256 of ``name``: the key of every in-memory index.
        renamed: The identifier that its name is made of, if that is not vLLM's; else empty.
        digest_hi: First half of the digest, a big-endian number. Kept, since a lookup in the
            index would spend a tenth of its time on splitting the digest.
        digest_lo: Second half.
    """

    identifier: str
    name: str
    digest: bytes
    renamed: str = ""
    digest_hi: int = field(init=False, repr=False, compare=False)
    digest_lo: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        hi, lo = split_digest(self.digest)
        object.__setattr__(self, "digest_hi", hi)
        object.__setattr__(self, "digest_lo", lo)

    @property
    def stored(self) -> str:
        """The identifier in the entry's header, compared at every load.

        It is the full identifier; under a tenant's secret, the HMACs that its name is made of.
        """
        match = _TENANT_NAME.fullmatch(self.name)
        if match is None:
            return self.renamed or self.identifier
        return f"{match[1]}:t-{match[2]}" if match[1] else f"t-{match[2]}"


def is_content_hash(identifier: str) -> bool:
    """Return True for a 64-hex content hash, with or without a ``lora:`` prefix."""
    if len(identifier) > 64 and identifier[-65] != ":":
        return False
    return _CONTENT_HASH.fullmatch(identifier[-64:]) is not None


@dataclass(frozen=True, slots=True)
class ModalityScopes:
    """Marks of the identifiers of modalities for which an engine has separate settings.

    Attributes:
        marks: Modality to mark.
        other: The mark of a modality that is not in ``known``; empty for none.
        known: Modalities that depend only on their own settings.
    """

    marks: Mapping[str, str] = field(default_factory=dict)
    other: str = ""
    known: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.marks)

    def name(self, identifier: str, modality: str) -> str:
        """Return the identifier as used in names and headers: ``mark:identifier``.

        An identifier that a client read there, and sends, is not marked twice.
        """
        mark = self.marks.get(modality) or ("" if modality in self.known else self.other)
        if not mark or identifier.startswith(f"{mark}:"):
            return identifier
        return f"{mark}:{identifier}"


def without_key(identifier: str) -> str:
    """Return a name for an item that may be neither loaded nor saved: it has no key.

    It is not valid Unicode, so no client can send it either.
    """
    return f"\ud800{identifier}"


def is_request_scoped(identifier: str) -> bool:
    """Return True if this identifier is a counter of one process and may never be shared."""
    return _REQUEST_SCOPED.fullmatch(identifier) is not None


def digest_of_name(name: str) -> bytes:
    """Return the index digest of an object name below ``objects/``; 16 bytes."""
    return hashlib.sha256(name.encode("ascii")).digest()[:16]


def _sha256_hex(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _lora_folder(lora: str) -> str:
    """Return one adapter's folder. Readable names stay; others become a digest without clashes."""
    if _LORA_FOLDER.fullmatch(lora):
        return lora
    return f"x-{_sha256_hex(lora)}"


def make_key(identifier: str, tenant: Tenant | None = None) -> Key | None:
    """Derive the key of one identifier.

    A 64-hex content hash keeps its name so that people can find it in the bucket; every
    other string is hashed and marked with ``x-``, so that no client-chosen string can take
    the name of a content hash. A ``lora:`` prefix in front of a content hash becomes a folder.

    Args:
        tenant: Tenant whose secret goes into the name. Then every name is marked with ``t-``, and
            so is the folder of an adapter; neither reveals anything without the secret.

    Returns:
        The key; None if the identifier must never be looked up or saved: empty, request-scoped,
        not valid Unicode, or longer than MAX_IDENTIFIER_BYTES.
    """
    # The fast path for nearly all of vLLM's identifiers: most of the time of a first lookup.
    if tenant is None and _CONTENT_HASH.fullmatch(identifier):
        name = f"{identifier[:2]}/{identifier}{OBJECT_SUFFIX}"
        return Key(identifier, name, digest_of_name(name))
    if not identifier or len(identifier) > MAX_IDENTIFIER_BYTES or is_request_scoped(identifier):
        return None
    try:
        if len(identifier.encode("utf-8")) > MAX_IDENTIFIER_BYTES:
            return None
    except UnicodeEncodeError:  # a lone surrogate from a client's JSON
        return None
    lora, _, tail = identifier.rpartition(":")
    if tenant is not None:
        hashed = tenant.hex_of("identifier", identifier)
        with_lora = ":" in identifier and _CONTENT_HASH.fullmatch(tail)
        folder = f"t-{tenant.hex_of('adapter', lora)}/" if with_lora else ""
        name = _tenant_name(folder, hashed)
    elif _CONTENT_HASH.fullmatch(tail):
        folder = f"{_lora_folder(lora)}/" if ":" in identifier else ""
        name = f"{folder}{tail[:2]}/{tail}{OBJECT_SUFFIX}"
    else:
        hashed = _sha256_hex(identifier)
        name = f"{hashed[:2]}/x-{hashed}{OBJECT_SUFFIX}"
    return Key(identifier, name, digest_of_name(name))


def _tenant_name(folder: str, hashed: str) -> str:
    return f"{folder}{hashed[:2]}/t-{hashed}{OBJECT_SUFFIX}"


def key_of_header(stored: str, digest: bytes) -> Key | None:
    """Return the key of an entry, from its header and its object's name; needs no secret.

    Args:
        stored: The header's identifier.
        digest: Digest of the object's name.

    Returns:
        The key; None if this entry does not belong there. If a tenant's secret made its name,
        ``identifier`` is empty: vLLM's name cannot be known.
    """
    key = make_key(stored)
    if key is not None and key.digest == digest:
        return key
    # Without a secret, such a client identifier has another name, and so another digest.
    match = _TENANT_LABEL.fullmatch(stored)
    if match is None:
        return None
    name = _tenant_name(f"{match[1]}/" if match[1] else "", match[2])
    return Key("", name, digest) if digest_of_name(name) == digest else None


def is_object_name(name: str) -> bool:
    """Return True if ``name`` could have been made by make_key.

    Listings contain junk: directory markers, foreign files, half-typed uploads.
    """
    return _OBJECT_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything an encoder output depends on besides the image itself.

    Attributes:
        name: Folder in the bucket: a readable slug, a dash and 16 hex digits.
        descriptor: The facts that the digits are computed from; stored as ``namespace.json`` so
            that people can see why two fleets do not share.
    """

    name: str
    descriptor: Mapping[str, Any]

    @classmethod
    def from_descriptor(cls, descriptor: Mapping[str, Any]) -> Namespace:
        """Build the namespace of one descriptor.

        Args:
            descriptor: JSON-serialisable facts; must hold ``model`` (a string, the slug's
                source). Order of keys does not matter; any difference in content does.

        Raises:
            ConfigError: The descriptor has no model, or is not plain JSON.
        """
        model = descriptor.get("model")
        if not isinstance(model, str) or not model:
            raise ConfigError(
                "the namespace needs a model name; set `model_identity`", field="model_identity"
            )
        full = {"format": FORMAT_VERSION, **descriptor}
        try:
            canonical = canonical_json(full)
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"the namespace descriptor is not plain JSON: {exc}") from exc
        digest = hashlib.sha256(canonical.encode("utf-8")).hexdigest()[:16]
        return cls(f"{_slug(model)}-{digest}", full)

    def to_json(self) -> bytes:
        """Return the content of ``namespace.json``."""
        return (json.dumps(self.descriptor, indent=2, sort_keys=True) + "\n").encode()


def canonical_json(value: object) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _slug(model: str) -> str:
    """Return the readable part of a namespace name: at most 40 characters of ``[a-z0-9.-]``."""
    tail = "-".join(model.rstrip("/").split("/")[-2:]).lower()
    slug = re.sub(r"[^a-z0-9]+", "-", tail).strip("-")[-40:].strip("-")
    return slug or "model"


def is_namespace_name(name: str) -> bool:
    """Return True if a folder name in the bucket could be a namespace of ours."""
    return _NAMESPACE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Layout:
    """Object names of one namespace, relative to the store's prefix."""

    namespace: str

    @property
    def descriptor(self) -> str:
        """The namespace's descriptor, JSON."""
        return f"{self.namespace}/namespace.json"

    @property
    def objects(self) -> str:
        """Prefix of all entries, with its trailing slash."""
        return f"{self.namespace}/objects/"

    def object(self, key: Key) -> str:
        """Return the name of one entry."""
        return f"{self.namespace}/objects/{key.name}"

    def is_entry(self, name: str) -> bool:
        """Return True if a name, or a prefix, is that of entries."""
        return name.startswith(self.objects)

    def modality(self, modality: str) -> str:
        """Return the name of one modality's record: width and dtype, JSON, written once."""
        return f"{self.modalities}{modality_name(modality)}.json"

    @property
    def modalities(self) -> str:
        """Prefix of the records of all modalities."""
        return f"{self.namespace}/modality/"

    @property
    def catalog(self) -> str:
        """Prefix of the catalogue's parts."""
        return f"{self.namespace}/catalog/"

    def catalog_part(self, ulid: str) -> str:
        """Return the name of one part of the catalogue, Parquet."""
        return f"{self.catalog}{ulid}{PARQUET_SUFFIX}"

    def catalog_part_of(self, name: str) -> str | None:
        """Return the ULID of a catalogue part's name; None for any other name."""
        if not (name.startswith(self.catalog) and name.endswith(PARQUET_SUFFIX)):
            return None
        stem = name.removeprefix(self.catalog).removesuffix(PARQUET_SUFFIX)
        return stem if is_ulid(stem) else None

    @property
    def everything(self) -> str:
        """Prefix of all objects of the namespace."""
        return f"{self.namespace}/"

    @property
    def manifest(self) -> str:
        """Prefix of the index; ``s3ec.index.names`` defines the names below it."""
        return f"{self.namespace}/manifest/"


def is_ulid(text: str) -> bool:
    """Return True if this could be a ULID as we write them: 26 characters, upper case."""
    return _ULID.fullmatch(text) is not None


def modality_name(modality: str) -> str:
    """Return a modality (``image``, ``video``, ...) as a safe file name."""
    return modality if re.fullmatch(r"[a-z][a-z0-9_]{0,31}", modality) else _sha256_hex(modality)


@dataclass(frozen=True, slots=True)
class KeyPolicy:
    """The rules by which one process makes keys.

    Attributes:
        tenant: Tenant whose secret goes into every name.
        trust_client_ids: True if an identifier that is no content hash has a key.
    """

    tenant: Tenant | None = None
    trust_client_ids: bool = True

    def make_key(self, identifier: str, renamed: str = "") -> Key | None:
        """As identity.make_key; None also if refuses() is true.

        Args:
            renamed: See Key.
        """
        if self.refuses(renamed or identifier):
            return None
        key = make_key(renamed or identifier, self.tenant)
        return replace(key, identifier=identifier, renamed=renamed) if key and renamed else key

    def refuses(self, identifier: str) -> bool:
        """Return True if a client chose this identifier, and clients may not choose."""
        return not self.trust_client_ids and not is_content_hash(identifier)


def naming_of(settings: Settings) -> KeyPolicy:
    """Return the rules that the settings ask for.

    Raises:
        ConfigError: The tenant's secret cannot be read, or is too short.
    """
    return KeyPolicy(Tenant.read(settings.tenant_key), settings.trust_client_ids)


class KeyCache:
    """KeyPolicy.make_key with a bounded cache of recent keys; not thread-safe, one per owner.

    A scheduler asks for the same identifiers at every step. Hashing them each time would be most of
    the cost of a lookup. It takes at most 64 MiB, whatever names clients choose.

    Counters: ``ids.refused`` (identifiers of clients if those may not choose) and
    ``refused_identifiers`` (the others without a key).
    """

    def __init__(self, policy: KeyPolicy, counters: Counters, *, capacity: int = 65536) -> None:
        self._policy = policy
        self._counters = counters
        # The oldest is dropped first: making a key again costs less than noting each use.
        self._known: OrderedDict[str, Key] = OrderedDict()
        self._capacity = capacity
        self._renamed: dict[str, tuple[str, Key | None]] = {}
        self._renamed_characters = 0  # added since it was empty

    def rename(self, identifier: str, name: str) -> None:
        """Map an identifier of vLLM to the entry of another one.

        That holds until it is renamed again, or until ``forget_names`` drops all names.
        """
        known = self._renamed.get(identifier)
        if name == identifier:
            self._renamed.pop(identifier, None)
        elif known is None or known[0] != name:
            self._renamed_characters += len(identifier) + len(name)
            self._renamed[identifier] = name, self._policy.make_key(identifier, name)

    def forget_names(self) -> None:
        """Drop all names if they are too many. Do not call it between a rename and its use."""
        if self._renamed_characters > _RENAMED_CHARACTERS:
            self._renamed.clear()
            self._renamed_characters = 0

    def __call__(self, identifier: str) -> Key | None:
        if self._renamed and identifier in self._renamed:
            return self._renamed[identifier][1]
        try:
            return self._known[identifier]
        except KeyError:
            key = self._policy.make_key(identifier)
            # A refused identifier can be huge, and an accepted one can have 4 KiB; caching those
            # would let clients fill the memory.
            if key is not None and len(identifier) <= _REMEMBERED_CHARACTERS:
                if len(self._known) >= self._capacity:
                    self._known.popitem(last=False)
                self._known[identifier] = key
            return key

    def asked(self, identifier: str) -> Key | None:
        """Return the key of an identifier; count it if there is none."""
        key = self(identifier)
        if key is None:
            chosen = self._policy.refuses(identifier)
            self._counters.add("ids.refused" if chosen else "refused_identifiers")
        return key
