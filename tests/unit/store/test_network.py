# SPDX-License-Identifier: Apache-2.0
"""Which proxy the environment names for a server, and which certificates a file has."""

from __future__ import annotations

from pathlib import Path

import pytest

from s3ec.errors import ConfigError
from s3ec.store.network import certificates, proxy_for

PROXY = "http://proxy:3128"


@pytest.mark.parametrize(
    ("no_proxy", "url", "is_direct"),
    [
        ("", "https://minio.corp:9000", False),
        (" , ,", "https://minio.corp:9000", False),
        ("*", "https://minio.corp:9000", True),
        ("minio.corp", "https://minio.corp:9000", True),
        ("MinIO.Corp", "https://MINIO.corp:9000", True),
        (".corp", "https://minio.corp:9000", True),
        (".minio.corp", "https://minio.corp:9000", True),
        ("*.corp", "https://minio.corp:9000", True),
        ("corp", "https://minio.corp:9000", True),
        ("orp", "https://minio.corp:9000", False),
        ("minio.corp", "https://bucket.minio.corp", True),
        ("bucket.minio.corp", "https://minio.corp", False),
        ("minio.corp:9000", "https://minio.corp:9000", True),
        ("minio.corp:9000", "https://minio.corp", False),
        ("minio.corp:443", "https://minio.corp", True),
        ("minio.corp:80", "http://minio.corp", True),
        (".corp:9000", "https://minio.corp:9000", True),
        ("localhost, 10.0.0.7", "http://10.0.0.7:9000", True),
        ("localhost 10.0.0.7", "http://10.0.0.7:9000", True),
        ("10.0.0.0/8", "http://10.1.2.3:9000", True),
        ("10.1.2.3/8", "http://10.9.9.9:9000", True),
        ("10.0.0.0/8:9000", "http://10.1.2.3:9000", True),
        ("10.0.0.0/8", "http://11.1.2.3:9000", False),
        ("10.0.0.0/8", "http://ten.corp", False),
        ("10.*", "http://10.1.2.3:9000", True),
        ("10.0.0.70", "http://10.0.0.7:9000", False),
        ("::1", "http://[::1]:9000", True),
        ("[::1]", "http://[::1]:9000", True),
        ("[::1]:9000", "http://[::1]:9000", True),
        ("[::1]:9001", "http://[::1]:9000", False),
        ("fd00::/8", "http://[fd00::7]:9000", True),
        ("fd00::/8", "http://10.0.0.7", False),
        (".amazonaws.com", "https://b.s3.eu-west-1.amazonaws.com", True),
    ],
)
def test_no_proxy_is_read_in_all_its_forms(
    no_proxy: str, url: str, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert (proxy_for(url) is None) == is_direct


@pytest.mark.parametrize(
    ("variables", "url", "expected"),
    [
        ({}, "https://h", None),
        ({"HTTPS_PROXY": PROXY}, "https://h", PROXY),
        ({"HTTPS_PROXY": PROXY}, "http://h", None),
        ({"HTTP_PROXY": PROXY}, "https://h", None),
        ({"http_proxy": PROXY}, "http://h", PROXY),
        ({"all_proxy": PROXY}, "http://h", PROXY),
        ({"HTTPS_PROXY": PROXY, "ALL_PROXY": "http://other:1"}, "https://h", PROXY),
        ({"https_proxy": PROXY, "HTTPS_PROXY": "http://other:1"}, "https://h", PROXY),
        ({"https_proxy": "", "HTTPS_PROXY": PROXY}, "https://h", None),
        ({"HTTPS_PROXY": " "}, "https://h", None),
        ({"FTP_PROXY": PROXY}, "http://h", None),
        ({"HTTP_PROXY": PROXY, "REQUEST_METHOD": "GET"}, "http://h", None),
        ({"ALL_PROXY": PROXY, "no_proxy": "", "NO_PROXY": "h"}, "http://h", PROXY),
        ({"HTTPS_PROXY": "proxy:3128"}, "https://h", PROXY),
        ({"HTTPS_PROXY": "//proxy:3128"}, "https://h", PROXY),
        ({"HTTPS_PROXY": "https://proxy:3128/"}, "https://h", "https://proxy:3128"),
        ({"HTTPS_PROXY": "http://[::1]:3128"}, "https://h", "http://[::1]:3128"),
    ],
)
def test_the_variable_of_the_scheme_counts_and_the_one_in_lower_case(
    variables: dict[str, str], url: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = proxy_for(url)
    assert (found and str(found)) == expected


def test_a_proxy_shows_neither_user_nor_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "us%40er:p%3Ass@proxy:3128")
    proxy = proxy_for("https://h")
    assert proxy is not None
    assert proxy.url == "http://us%40er:p%3Ass@proxy:3128"
    assert f"{proxy} {proxy!r}" == "http://proxy:3128 Proxy()"


@pytest.mark.parametrize(
    "value",
    [
        "socks5://user:SECRET@proxy:1080",
        "socks5h://proxy:1080",
        "http://user:SEC#RET@proxy:3128",
        "user:12#SECRET@proxy:3128",
        "http://user:SEC/RET@proxy:3128",
        "http://user:SEC?RET@proxy:3128",
        "http://user:SECRET@proxy:99999",
        "http://user:SECRET@proxy:0",
        "http://user:SECRET@",
        "http://user:SECRETä@proxy:3128",
        "http://user:SECRET%C3%A4@proxy:3128",
        "http://[SECRET",
        "%SECRET",
        "http://",
    ],
)
def test_a_proxy_that_cannot_be_used_is_named_by_its_variable_and_not_repeated(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", value)
    with pytest.raises(ConfigError, match=r"ALL_PROXY .* http://HOST:PORT") as caught:
        proxy_for("https://h")
    assert "SEC" not in str(caught.value)
    assert caught.value.__cause__ is None
    monkeypatch.setenv("NO_PROXY", "h")
    assert proxy_for("https://h") is None


def test_of_a_file_the_certificates_are_taken_and_nothing_else(tmp_path: Path) -> None:
    one, two = (
        b"-----BEGIN CERTIFICATE-----\nAAA%d\n-----END CERTIFICATE-----" % number
        for number in (1, 2)
    )
    key = b"-----BEGIN PRIVATE KEY-----\nBBBB\n-----END PRIVATE KEY-----"
    trusted = b"-----BEGIN TRUSTED CERTIFICATE-----\nCC\n-----END TRUSTED CERTIFICATE-----"
    path = tmp_path / "ca.pem"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([one, key, trusted, b"# Z\xfcrich AG", two]))
    assert certificates(path) == one + b"\n" + two + b"\n"
