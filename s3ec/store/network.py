# SPDX-License-Identifier: Apache-2.0
"""The way to a server by environment and settings: its proxy, and the authorities to trust.

It is decided once for a store and passed to each client. By themselves the clients differ:
botocore knows neither ``ALL_PROXY`` nor networks in ``NO_PROXY``, obstore knows no ports there,
and only obstore reads ``SSL_CERT_FILE`` and ``SSL_CERT_DIR``.
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment

from botocore.httpsession import get_cert_path

from s3ec.errors import ConfigError
from s3ec.settings import Settings

_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[0-9a-z._:-]+")
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy; its ``str`` has no credentials and is for messages.

    Attributes:
        url: With its user name and password.
    """

    url: str = field(repr=False)

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def proxy_for(url: str) -> Proxy | None:
    """The proxy that the environment names for a server; None if there is none.

    Of two spellings of a variable the one in lower case counts. The variable of the URL's scheme
    overrides ``ALL_PROXY``.

    Raises:
        ConfigError: The proxy cannot be used.
    """
    server, variables = urlsplit(url), getproxies_environment()
    host, port = server.hostname or "", server.port or _PORTS[server.scheme]
    if any(_covers(entry, host, port) for entry in re.split(r"[\s,]+", variables.get("no", ""))):
        return None
    for name in (server.scheme, "all"):
        if value := variables.get(name, "").strip():
            return _usable(name, value)
    return None


def _covers(entry: str, host: str, port: int) -> bool:
    """True if an entry of ``NO_PROXY`` covers a server.

    An entry is a name, which also covers all names below it, an address, a network, or a pattern
    with ``*``; each may have a port.
    """
    name, _, its_port = entry.rpartition(":")
    if its_port.isdecimal() and (name.endswith("]") or (name and ":" not in name)):
        if int(its_port) != port:
            return False
        entry = name
    entry = entry.strip("[]").lower()
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:  # one of the two is a name
        host, name = host.rstrip("."), entry.strip(".")
        return fnmatchcase(host, entry) or (name != "" and f".{host}".endswith(f".{name}"))


def _usable(name: str, value: str) -> Proxy:
    url = value if "://" in value else f"http://{value.lstrip('/')}"
    try:
        parts = urlsplit(url)
        is_usable = (
            parts.scheme in _PORTS
            and _HOST.fullmatch(parts.hostname or "") is not None
            and parts.port != 0
            # Such as the rest of a password with a `#`.
            and not (parts.path.strip("/") + parts.query + parts.fragment)
            # botocore cannot send others.
            and unquote((parts.username or "") + (parts.password or "")).isascii()
        )
    except ValueError:  # its text repeats the value
        is_usable = False
    if not is_usable:
        variable = f"{name}_proxy"
        raise ConfigError(
            f"{variable.upper()} (or {variable}) is no proxy that can be used here: write it as "
            "http://HOST:PORT or http://USER:PASSWORD@HOST:PORT, special characters as %XX; "
            "there is no SOCKS. NO_PROXY names servers that need none"
        )
    return Proxy(url)


def roots_for(settings: Settings, core: Any) -> str:
    """PEM file of the authorities to trust in addition to the system's; by default the SDK's.

    Args:
        core: A session of botocore, which knows the profile.
    """
    return _named_roots(settings, core)[1] or str(get_cert_path(True))


def check_roots(settings: Settings, core: Any) -> None:
    """Check the PEM file that settings, profile or environment name.

    Raises:
        ConfigError: It is not a PEM file.
    """
    source, path = _named_roots(settings, core)
    if not path:
        return
    try:
        ssl.create_default_context(cafile=path)
    except (ssl.SSLError, OSError) as exc:
        raise ConfigError(
            f"{source} is not a file of PEM certificates",
            field="ca_bundle" if settings.ca_bundle else None,
        ) from exc


def _named_roots(settings: Settings, core: Any) -> tuple[str, str]:
    """The setting or variable that names a PEM file, and its path; empty if none does."""
    if settings.ca_bundle:
        return "`ca_bundle`", str(settings.ca_bundle)
    if path := core.get_config_variable("ca_bundle"):
        return "AWS_CA_BUNDLE (or `ca_bundle` of the profile)", str(path)
    return "REQUESTS_CA_BUNDLE", os.environ.get("REQUESTS_CA_BUNDLE", "")


def certificates(path: str | Path) -> bytes:
    """Read the certificates of a PEM file, and nothing else in it.

    OpenSSL skips a byte order mark and private keys, and obstore does not.
    """
    return b"\n".join(_CERTIFICATE.findall(Path(path).read_bytes())) + b"\n"
