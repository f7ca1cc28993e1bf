# SPDX-License-Identifier: Apache-2.0
"""Stores over real servers, with credentials where the SDK's chain finds them."""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from s3ec.config import load_settings
from s3ec.settings import Settings
from s3ec.store.aioboto3_s3 import Aioboto3Store
from s3ec.store.base import Store
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.store.s3 import ObstoreStore
from s3ec.testing.server import Identity, LocalS3, MotoServer

# Failing checks of the shipped suite show their values, as those of a test module do.
pytest.register_assert_rewrite("s3ec.testing.contract")

BUCKET = "contract"
Configure = Callable[..., Settings]
Transport = type[BotocoreStore]


async def names(store: Store) -> list[str]:
    return [info.name async for info in store.list("")]


BODY = os.urandom(300_000)
AMPLE = 2**24
OPERATIONS: dict[str, Callable[[BotocoreStore], Awaitable[object]]] = {
    "get": lambda store: store.get("a", max_bytes=AMPLE),
    "get_range": lambda store: store.get_range("a", 10, 100),
    "head": lambda store: store.head("a"),
    "put": lambda store: store.put_if_absent(f"new/{secrets.token_hex(4)}", [BODY]),
    "delete": lambda store: store.delete("absent"),
    "delete_many": lambda store: store.delete_many(["absent", "absent/too"]),
    "list": names,
    "list_folders": lambda store: store.list_folders(""),
}


@pytest.fixture(params=[ObstoreStore, BotocoreStore], ids=["obstore", "botocore"])
def transport(request: pytest.FixtureRequest) -> Transport:
    """Each S3 client in turn, without the extra one."""
    kind: Transport = request.param
    return kind


@pytest.fixture(
    params=[ObstoreStore, BotocoreStore, Aioboto3Store], ids=["obstore", "botocore", "aioboto3"]
)
def any_transport(request: pytest.FixtureRequest) -> Transport:
    """Each S3 client in turn, for the contract suite and for what keeps secrets."""
    kind: Transport = request.param
    return kind


@pytest.fixture(scope="session")
def seaweed_bucket(local_s3: LocalS3) -> str:
    """A bucket for the whole suite; every test has a prefix of its own."""
    return local_s3.create_bucket(BUCKET)


@pytest.fixture(scope="session")
def moto_bucket(moto_server: MotoServer) -> str:
    return moto_server.create_bucket(BUCKET)


@pytest.fixture
def on_seaweed(
    monkeypatch: pytest.MonkeyPatch, local_s3: LocalS3, seaweed_bucket: str
) -> Configure:
    """Settings for SeaweedFS; the admin's keys are in the environment."""
    return _configure(monkeypatch, local_s3.env(), local_s3.endpoint_url, seaweed_bucket)


@pytest.fixture
def on_moto(
    monkeypatch: pytest.MonkeyPatch, moto_server: MotoServer, moto_bucket: str
) -> Configure:
    """Settings for moto."""
    return _configure(monkeypatch, moto_server.env(), moto_server.endpoint_url, moto_bucket)


def _configure(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], endpoint_url: str, bucket: str
) -> Configure:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    defaults: dict[str, Any] = {
        "bucket": bucket,
        "endpoint_url": endpoint_url,
        "region": "us-east-1",
        "connect_timeout_s": 10,  # the machine may be busy
        "read_timeout_s": 30,
    }

    def configure(**changes: Any) -> Settings:
        return load_settings({**defaults, **changes}).settings

    return configure


READER = Identity("reader", actions=("Read",))
DOMAIN = "s3.test"


@pytest.fixture(scope="session")
def guarded_s3() -> Iterator[LocalS3]:
    """A SeaweedFS with identities that may not do everything, and buckets that are hosts too."""
    with LocalS3(identities=[READER], domain=DOMAIN) as server:
        server.create_bucket(BUCKET)
        yield server


@dataclass(frozen=True)
class Issued:
    """A server's certificate with its key, and that of the authority which issued it; PEM files."""

    server: Path
    authority: Path


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, an authority's as well; with its key, one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    path.write_bytes(_pem(_certificate("s3ec test", key), key))
    return path


@pytest.fixture(scope="session")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    """A certificate for 127.0.0.1 that an authority of these tests signed."""
    return issue(tmp_path_factory.mktemp("issued"))


def issue(folder: Path, *, host: str = "127.0.0.1", ended: bool = False) -> Issued:
    """A certificate of an authority of its own.

    Args:
        host: The address that it is for.
        ended: It was good until yesterday.
    """
    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = _certificate("s3ec test authority", root_key)
    files = Issued(folder / "server.pem", folder / "authority.pem")
    files.authority.write_bytes(root.public_bytes(serialization.Encoding.PEM))
    leaf = _certificate("s3ec test", key, (root, root_key), host=host, ended=ended)
    files.server.write_bytes(_pem(leaf, key))
    return files


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: tuple[x509.Certificate, ec.EllipticCurvePrivateKey] | None = None,
    *,
    host: str = "127.0.0.1",
    ended: bool = False,
) -> x509.Certificate:
    """Without an issuer it signs itself and is an authority."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * day)
        .not_valid_after(now - day if ended else now + day)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .sign(issuer[1] if issuer else key, hashes.SHA256())
    )


def _pem(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
