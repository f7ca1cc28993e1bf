# SPDX-License-Identifier: Apache-2.0
"""Servers that are not who they should be get no request, and other hosts no credentials."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import s3_error
from s3ec.errors import AccessError
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.testing.server import LocalS3
from tests.contract.conftest import Configure, Issued, Transport, issue

TOKEN = "a-session-token-for-one-host-only"


async def _list(store: BotocoreStore) -> list[str]:
    return [info.name async for info in store.list("")]


OPERATIONS: dict[str, Callable[[BotocoreStore], Awaitable[object]]] = {
    "get": lambda store: store.get("a", max_bytes=10),
    "get_range": lambda store: store.get_range("a", 0, 10),
    "head": lambda store: store.head("a"),
    "put": lambda store: store.put_if_absent("b", [b"body of a secret picture"]),
    "delete": lambda store: store.delete("a"),
    "list": _list,
}


@pytest.mark.parametrize("fault", ["wrong authority", "wrong host", "expired"])
async def test_server_with_a_bad_certificate_gets_no_request(
    fault: str,
    local_s3: LocalS3,
    on_seaweed: Configure,
    any_transport: Transport,
    issued: Issued,
    tmp_path: Path,
) -> None:
    host = "127.0.0.9" if fault == "wrong host" else "127.0.0.1"
    shown = issue(tmp_path, host=host, ended=fault == "expired")
    trusted = issued if fault == "wrong authority" else shown
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown.server)
    fixes = {
        "wrong authority": "is not trusted; name its authority in `ca_bundle`",
        "wrong host": "is for another host; correct `endpoint_url`",
        "expired": "has expired; renew it",
    }
    with FaultProxy(local_s3.endpoint_url, tls=context) as proxy:
        store = any_transport(on_seaweed(endpoint_url=proxy.url, ca_bundle=trusted.authority))
        for operation in OPERATIONS.values():
            with pytest.raises(AccessError, match=fixes[fault]) as caught:
                await operation(store)
            assert caught.value.code == "CertificateNotTrusted"
            assert caught.value.is_general
        assert proxy.requests == []
        await store.close()


@pytest.mark.parametrize("status", [301, 307])
async def test_redirect_to_another_host_is_refused_and_nothing_is_sent_there(
    status: int,
    local_s3: LocalS3,
    on_seaweed: Configure,
    any_transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    with (
        FaultProxy(local_s3.endpoint_url) as asked,
        FaultProxy(local_s3.endpoint_url) as elsewhere,
    ):
        address = elsewhere.url.replace("127.0.0.1", "localhost")
        rule = asked.add(
            Rule(s3_error(status, "TemporaryRedirect", headers={"location": f"{address}/a"}))
        )
        store = any_transport(on_seaweed(endpoint_url=asked.url))
        for count, operation in enumerate(OPERATIONS.values(), 1):
            with pytest.raises(AccessError, match="redirects, correct `endpoint_url`") as caught:
                await operation(store)
            assert caught.value.is_general
            assert TOKEN not in str(caught.value)
            assert rule.fired >= count
        assert asked.requests[0].headers["x-amz-security-token"] == TOKEN
        assert elsewhere.requests == []
        await store.close()
