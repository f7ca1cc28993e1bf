# SPDX-License-Identifier: Apache-2.0
"""Every request says who pays for it, where the settings ask for that; by all transports."""

from __future__ import annotations

import pytest

from s3ec.dev.rigs.proxy import FaultProxy
from s3ec.testing.server import MotoServer
from tests.contract.conftest import Configure, Transport

HEADER = "x-amz-request-payer"


@pytest.mark.parametrize("pays", [False, True])
async def test_every_request_says_who_pays(
    pays: bool, moto_server: MotoServer, on_moto: Configure, any_transport: Transport
) -> None:
    with FaultProxy(moto_server.endpoint_url) as proxy:
        prefix = f"payer-{any_transport.__name__}-{pays}".lower()
        store = any_transport(on_moto(endpoint_url=proxy.url, prefix=prefix, requester_pays=pays))
        await store.put_if_absent("a", [b"body"])
        assert await store.get("a", max_bytes=10) == b"body"
        assert await store.get_range("a", 1, 2) == b"od"
        assert await store.head("a") is not None
        assert [info.name async for info in store.list("")] == ["a"]
        assert await store.delete_many(["a"]) == {}
        await store.delete("a")
        await store.close()
        assert len(proxy.requests) >= 7
        said = {request.headers.get(HEADER) for request in proxy.requests}
        assert said == ({"requester"} if pays else {None})
