# SPDX-License-Identifier: Apache-2.0
"""Stores over real servers, with credentials where the SDK's chain finds them."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from s3ec.config import Settings, load_settings
from s3ec.testing.server import Identity, LocalS3, MotoServer

# Failing checks of the shipped suite show their values, as those of a test module do.
pytest.register_assert_rewrite("s3ec.testing.contract")

BUCKET = "contract"
Configure = Callable[..., Settings]


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
    defaults = {"bucket": bucket, "endpoint_url": endpoint_url, "region": "us-east-1"}

    def configure(**changes: Any) -> Settings:
        return load_settings({**defaults, **changes}).settings

    return configure


READER = Identity("reader", actions=("Read",))
WRITER = Identity("writer", actions=("Write",))


@pytest.fixture(scope="session")
def guarded_s3() -> Iterator[LocalS3]:
    """A SeaweedFS with identities that may not do everything."""
    with LocalS3(identities=[READER, WRITER]) as server:
        server.create_bucket(BUCKET)
        yield server


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1 with its key, one PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "s3ec test")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    path.write_bytes(
        signed.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return path
