# SPDX-License-Identifier: Apache-2.0
"""Servers that are not who they should be get no request, and other hosts no credentials; each
client takes the way that the environment names.
"""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from s3ec.dev.rigs.proxy import FaultProxy, Rule
from s3ec.dev.rigs.proxy_faults import Answer, s3_error
from s3ec.errors import AccessError, UnavailableError
from s3ec.store.botocore_s3 import BotocoreStore
from s3ec.store.s3 import ObstoreStore
from s3ec.store.s3_client import Address
from s3ec.testing.server import LocalS3
from tests.contract.conftest import OPERATIONS, Configure, Issued, Transport, issue, names

TOKEN = "a-session-token-for-one-host-only"
PASSWORD = "a-proxys-password"


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


REDIRECTS: list[tuple[str, dict[str, str]]] = [
    # (another host, other variables)
    ("localhost", {"no_proxy": "*"}),
    ("127.0.0.1", {"HTTPS_PROXY": "http://127.0.0.1:9", "ALL_PROXY": ""}),
]


@pytest.mark.parametrize(("host", "variables"), REDIRECTS)
async def test_redirect_elsewhere_is_refused_and_nothing_is_sent_there(
    host: str,
    variables: dict[str, str],
    local_s3: LocalS3,
    on_seaweed: Configure,
    any_transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {**variables, "AWS_SESSION_TOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)
    with (
        FaultProxy(local_s3.endpoint_url) as asked,
        FaultProxy(local_s3.endpoint_url) as elsewhere,
    ):
        address = elsewhere.url.replace("127.0.0.1", host)
        rule = asked.add(
            Rule(s3_error(307, "TemporaryRedirect", headers={"location": f"{address}/a"}))
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


async def test_redirect_to_another_port_of_the_host_gets_no_credentials(
    local_s3: LocalS3, on_seaweed: Configure, any_transport: Transport
) -> None:
    with (
        FaultProxy(local_s3.endpoint_url) as asked,
        FaultProxy(local_s3.endpoint_url) as elsewhere,
    ):
        location = {"location": f"{elsewhere.url}/a"}
        store = any_transport(on_seaweed(endpoint_url=asked.url))
        for status in (301, 303, 308):
            asked.clear(Rule(s3_error(status, "TemporaryRedirect", headers=location)))
            for operation in OPERATIONS.values():
                with pytest.raises(AccessError):
                    await operation(store)
        assert not any("authorization" in request.headers for request in elsewhere.requests)
        await store.close()


@pytest.mark.parametrize("has_token", [True, False])
async def test_redirect_behind_a_proxy_is_not_followed(
    has_token: bool,
    local_s3: LocalS3,
    on_seaweed: Configure,
    any_transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if has_token:
        monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    with FaultProxy(local_s3.endpoint_url) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        location = {"location": "http://elsewhere.test/a"}
        proxy.add(Rule(s3_error(307, "TemporaryRedirect", headers=location)))
        store = any_transport(on_seaweed(endpoint_url="http://s3.test", allow_http=True))
        for operation in OPERATIONS.values():
            with pytest.raises(AccessError, match=f"through the proxy {proxy.url}: 307") as caught:
                await operation(store)
            assert "redirects, correct `endpoint_url`" in str(caught.value)
        assert {urlsplit(request.target).hostname for request in proxy.requests} == {"s3.test"}
        await store.close()
    assert caplog.text.count("does the work of obstore") == (any_transport is ObstoreStore)


async def test_redirect_to_another_region_names_it(
    local_s3: LocalS3, on_seaweed: Configure, any_transport: Transport
) -> None:
    region = {
        "location": "http://contract.s3.eu-north-1.amazonaws.com/a",
        "x-amz-bucket-region": "eu-north-1",
    }
    with FaultProxy(local_s3.endpoint_url) as asked:
        asked.add(Rule(s3_error(307, "TemporaryRedirect", headers=region)))
        store = any_transport(on_seaweed(endpoint_url=asked.url))
        for operation in OPERATIONS.values():
            with pytest.raises(AccessError, match="in region eu-north-1, set `region`"):
                await operation(store)
        await store.close()


async def test_token_for_amazon_travels_by_obstore_and_to_no_other_host(
    local_s3: LocalS3,
    on_seaweed: Configure,
    issued: Issued,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setattr(Address, "is_amazons", True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.server)
    with (
        FaultProxy(local_s3.endpoint_url, tls=context) as asked,
        FaultProxy(local_s3.endpoint_url, tls=context) as elsewhere,
    ):
        location = {"location": elsewhere.url.replace("127.0.0.1", "localhost")}
        asked.add(Rule(s3_error(307, "TemporaryRedirect", headers=location)))
        store = ObstoreStore(on_seaweed(endpoint_url=asked.url, ca_bundle=issued.authority))
        with pytest.raises(AccessError, match="redirects, correct `endpoint_url`"):
            await store.get("a", max_bytes=10)
        sent = asked.requests[0].headers
        assert sent["x-amz-security-token"] == TOKEN
        assert "boto" not in sent["user-agent"].lower()
        assert elsewhere.requests == []
        await store.close()


# -- what the environment says of the way ------------------------------------------------------


async def all_go(store: BotocoreStore, name: str) -> None:
    await store.put_if_absent(name, [b"body"])
    assert await store.get(name, max_bytes=10) == b"body"
    assert await store.get_range(name, 1, 2) == b"od"
    assert await store.head(name) is not None
    assert await names(store) == [name]
    await store.delete(name)


async def test_each_request_passes_the_proxy_of_the_environment_with_its_password(
    local_s3: LocalS3,
    on_seaweed: Configure,
    any_transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FaultProxy(local_s3.endpoint_url) as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.url.replace("http://", "us%40er:p%3Ass@"))
        settings = on_seaweed(endpoint_url="http://s3.test", allow_http=True, prefix="proxied")
        store = any_transport(settings)
        await all_go(store, "a")
        assert len(proxy.requests) == 6
        expected = "Basic " + base64.b64encode(b"us@er:p:ss").decode()
        assert {one.headers["proxy-authorization"] for one in proxy.requests} == {expected}
        proxy.add(Rule(Answer(407, b"")))
        for operation in OPERATIONS.values():
            with pytest.raises(AccessError, match=f"proxy {proxy.url}: 407.*USER:PASS") as caught:
                await operation(store)
            assert caught.value.is_general
            assert "p%3Ass" not in "".join(traceback.format_exception(caught.value))
        await store.close()


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_proxy_that_lets_nothing_through_is_named_without_its_password(
    scheme: str,
    on_seaweed: Configure,
    any_transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FaultProxy("http://127.0.0.1:9") as refusing:
        refusing.add(Rule(Answer(407, b"")))
        for place in ("127.0.0.1:9", "nobody.invalid:1", refusing.url[7:]):
            monkeypatch.setenv(f"{scheme}_proxy", f"http://user:{PASSWORD}@{place}")
            store = any_transport(on_seaweed(endpoint_url=f"{scheme}://s3.test", allow_http=True))
            for operation in ("get", "put", "list"):
                with pytest.raises((AccessError, UnavailableError)) as caught:
                    await OPERATIONS[operation](store)
                assert f"through the proxy http://{place}: " in str(caught.value)
                assert isinstance(caught.value, AccessError) == refusing.url.endswith(place)
                assert PASSWORD not in "".join(traceback.format_exception(caught.value))
            await store.close()


async def test_a_server_in_no_proxy_is_asked_directly_by_each_request(
    local_s3: LocalS3,
    on_seaweed: Configure,
    any_transport: Transport,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = urlsplit(local_s3.endpoint_url).port
    for number, form in enumerate([f"127.0.0.1:{port}", "10.0.0.0/8,127.0.0.0/8", "*", "127.*"]):
        with monkeypatch.context() as patched:
            patched.setenv("HTTP_PROXY", "http://127.0.0.1:9")
            patched.setenv("NO_PROXY", form)
            store = any_transport(on_seaweed(prefix=f"no-proxy-{number}"))
            await all_go(store, "a")
            await store.close()
    assert "does the work of obstore" not in caplog.text


@pytest.fixture
def behind_tls(local_s3: LocalS3, issued: Issued) -> Iterator[FaultProxy]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(issued.server)
    with FaultProxy(local_s3.endpoint_url, tls=context) as proxy:
        yield proxy


@pytest.mark.parametrize("name", ["ca_bundle", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE"])
async def test_the_authority_counts_for_each_request_wherever_it_is_named(
    name: str,
    on_seaweed: Configure,
    behind_tls: FaultProxy,
    transport: Transport,
    issued: Issued,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "ca.pem"
    mark = b"\xef\xbb\xbf"  # of editors on Windows
    path.write_bytes(mark + issued.authority.read_bytes())
    given = {"endpoint_url": behind_tls.url, "prefix": f"{name}/{transport.__name__}"}
    if name == "ca_bundle":
        given[name] = str(path)
    else:
        monkeypatch.setenv(name, str(path))
    store = transport(on_seaweed(**given))
    await all_go(store, "a")
    await store.close()


# In a process of its own, since obstore reads the system's authorities once.
ALL_GO = """
import asyncio, json, sys
from s3ec.config import load_settings
from s3ec.store import botocore_s3, s3
from tests.contract.test_server_identity import all_go

async def use(settings):
    for kind in (s3.ObstoreStore, botocore_s3.BotocoreStore):
        store = kind(load_settings(settings).settings)
        await all_go(store, "a")
        await store.close()

asyncio.run(use(json.loads(sys.argv[1])))
"""


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_the_systems_authorities_count_for_each_request(
    name: str,
    on_seaweed: Configure,
    behind_tls: FaultProxy,
    issued: Issued,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes(issued.authority.read_bytes())
    if name == "SSL_CERT_DIR":
        subprocess.run(["openssl", "rehash", str(tmp_path)], check=True)
    monkeypatch.setenv(name, str(tmp_path if name == "SSL_CERT_DIR" else path))
    settings = on_seaweed(endpoint_url=behind_tls.url, prefix=name)
    given = settings.model_dump(include={"bucket", "prefix", "endpoint_url", "region"})
    command = [sys.executable, "-c", ALL_GO, json.dumps(given)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
