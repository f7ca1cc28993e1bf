# SPDX-License-Identifier: Apache-2.0
"""The local S3 servers: up, down, up again, and never left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from s3ec.errors import ConfigError
from s3ec.testing import server as server_module
from s3ec.testing.server import HOST, Identity, LocalS3, find_weed
from tests.support.waiting import eventually

# Also those that start a server of their own.
pytestmark = pytest.mark.s3

_CHILD = """
import sys
from s3ec.testing.server import LocalS3
server = LocalS3().start()
print(server.endpoint_url, flush=True)
sys.stdin.read()
"""


def _refuses(endpoint_url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, int(endpoint_url.rpartition(":")[2]))) != 0


def test_wrong_secret_key_is_refused(local_s3: LocalS3) -> None:
    forged = Identity("admin", access_key=local_s3.access_key, secret_key="guessed")
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        local_s3.client(forged).list_buckets()


def test_identity_does_only_what_its_actions_say() -> None:
    reader = Identity("reader", actions=("Read:pictures",))
    keeper = Identity("keeper", may=("s3:PutObject", "s3:GetObject"))
    with LocalS3(identities=[reader, keeper]) as server:
        for name in ("pictures", "letters"):
            server.create_bucket(name)
            server.client().put_object(Bucket=name, Key="k", Body=b"1")
        client = server.client(reader)
        assert client.get_object(Bucket="pictures", Key="k")["Body"].read() == b"1"
        with pytest.raises(ClientError, match="AccessDenied"):
            client.get_object(Bucket="letters", Key="k")
        with pytest.raises(ClientError, match="AccessDenied"):
            client.put_object(Bucket="pictures", Key="k2", Body=b"1")
        # ``Write`` would delete as well.
        client = server.client(keeper)
        client.put_object(Bucket="pictures", Key="k3", Body=b"1")
        with pytest.raises(ClientError, match="AccessDenied"):
            client.delete_object(Bucket="pictures", Key="k3")
        with pytest.raises(ClientError, match="AccessDenied"):
            client.list_objects_v2(Bucket="pictures")


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_restart_keeps_endpoint_keys_and_objects(end: str) -> None:
    with LocalS3() as server:
        endpoint, client = server.endpoint_url, server.client()
        client.create_bucket(Bucket="kept")
        client.put_object(Bucket="kept", Key="k", Body=b"x" * 100_000)
        getattr(server, end)()
        assert server.pid is None
        with pytest.raises(BotoCoreError):
            client.list_buckets()
        server.restart()
        assert server.endpoint_url == endpoint
        assert client.get_object(Bucket="kept", Key="k")["Body"].read() == b"x" * 100_000


def test_sigkilled_parent_leaves_no_server_and_no_files(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as parent:
        assert parent.stdout is not None
        endpoint = parent.stdout.readline().strip()
        assert not _refuses(endpoint)
        assert list(tmp_path.iterdir())
        parent.kill()
    eventually(lambda: _refuses(endpoint))
    eventually(lambda: not list(tmp_path.iterdir()))


def test_missing_binary_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(server_module.sysconfig, "get_path", lambda _name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"s3ec\[s3server\]"):
        find_weed()
