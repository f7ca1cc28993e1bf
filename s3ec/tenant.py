# SPDX-License-Identifier: Apache-2.0
"""A tenant's secret: where it is, and the names that only its holders can derive.

Settings carry a reference, since vLLM logs its whole configuration. The secret itself is in no
setting, log line, repr or pickle.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
from typing import Literal, NoReturn

from s3ec.errors import ConfigError

FIELD = "tenant_key"
MIN_SECRET_BYTES = 16
# Limit of a read into memory; a mistyped path may name any file.
_MAX_SECRET_BYTES = 64 * 1024
_VARIABLE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]{0,254})")
_FILE = re.compile(r"file:(/[^\0\n]{1,4095})")
# Each kind of name has a separate prefix, so that equal strings give different digests. The zero
# ends it: no prefix with its text can begin with another prefix.
_MESSAGES = {"identifier": b"s3ec identifier\0", "adapter": b"s3ec adapter\0"}
_ID_MESSAGE = b"s3ec tenant id"


def check_reference(reference: str | None) -> str | None:
    """Return the reference if it has the form of one; does not read the secret.

    Raises:
        ValueError: It does not. The text is left out: it may be the secret.
    """
    if reference is None or _VARIABLE.fullmatch(reference) or _FILE.fullmatch(reference):
        return reference
    raise ValueError(
        "a reference is needed, `env:VARIABLE` or `file:/absolute/path`. Never give the secret "
        "itself: vLLM logs its whole configuration; if that was one, choose another"
    )


class Tenant:
    """The holder of one secret. Derives names by HMAC-SHA256, about 2 microseconds each.

    Attributes:
        id: Public: 16 hex digits that differ between secrets and reveal nothing about them.
    """

    __slots__ = ("_secret", "id")

    def __init__(self, secret: bytes) -> None:
        """Take a secret.

        Raises:
            ConfigError: It is too short to be one.
        """
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"`{FIELD}`: the secret has {len(secret)} bytes, {MIN_SECRET_BYTES} are the least; "
                "make one with `openssl rand -hex 32`",
                field=FIELD,
            )
        self._secret = secret
        self.id = hmac.digest(secret, _ID_MESSAGE, "sha256").hex()[:16]

    @classmethod
    def read(cls, reference: str | None) -> Tenant | None:
        """Return the tenant of a ``tenant_key`` setting; None if that is unset.

        Raises:
            ValueError: As check_reference.
            ConfigError: The variable is unset, the file cannot be read, or the secret is too
                short. Names the field and the fix, never the value.
        """
        if reference is None:
            return None
        return cls(read_secret(reference, FIELD))

    def hex_of(self, kind: Literal["identifier", "adapter"], text: str) -> str:
        """Return the tenant's name for a string, 64 hex digits.

        Raises:
            UnicodeEncodeError: It is not valid Unicode.
        """
        return hmac.digest(self._secret, _MESSAGES[kind] + text.encode("utf-8"), "sha256").hex()

    def __repr__(self) -> str:
        return f"Tenant({self.id})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a tenant's secret is not pickled; each process reads it for itself")


def read_secret(reference: str, field: str) -> bytes:
    """Return the secret that a reference names, without a line break at its end.

    Args:
        field: The setting, for messages.

    Raises:
        ValueError: As check_reference.
        ConfigError: The variable is unset, or the file cannot be read.
    """
    check_reference(reference)
    path = path_of(reference)
    secret = _from_variable(reference, field) if path is None else _from_file(path, field)
    return secret.removesuffix(b"\n")


def path_of(reference: str | None) -> str | None:
    """Return the file that a reference names; None for a variable."""
    match = _FILE.fullmatch(reference or "")
    return match[1] if match else None


def exposure(reference: str | None) -> str | None:
    """Return a warning if every user of this machine can read the secret's file; else None."""
    path = path_of(reference)
    try:
        mode = os.stat(path).st_mode if path else 0
    except OSError:
        return None
    if not mode & stat.S_IROTH:
        return None
    return f"`{FIELD}`: everybody on this machine can read {path}; do `chmod 600 {path}`"


def _from_variable(reference: str, field: str) -> bytes:
    name = reference.removeprefix("env:")
    value = os.environb.get(name.encode())
    if value is None:
        raise ConfigError(
            f"`{field}`: the variable {name} is not set; set it in the environment of every "
            "process that uses the corpus",
            field=field,
        )
    return value


def _from_file(path: str, field: str) -> bytes:
    try:
        with open(path, "rb") as file:
            secret = file.read(_MAX_SECRET_BYTES + 1)
    except OSError as exc:
        raise ConfigError(
            f"`{field}`: cannot read {path}: {exc.strerror or exc}; make it readable for the user "
            "of this process",
            field=field,
        ) from exc
    if len(secret) > _MAX_SECRET_BYTES:
        raise ConfigError(
            f"`{field}`: {path} has more than {_MAX_SECRET_BYTES} bytes; that is no secret",
            field=field,
        )
    return secret
