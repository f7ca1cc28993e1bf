# SPDX-License-Identifier: Apache-2.0
"""A machine's metadata service, which gives credentials; silent until it is told to answer."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from s3ec.testing.server import HOST, REGION, S3Server
from tests.support.serving import running

_ROLES = "/latest/meta-data/iam/security-credentials/"


class MetadataService:
    """Takes connections from the start, and answers once ``answering`` is set.

    Attributes:
        answering: Whether it answers.
        refusing: Whether it then answers with an error.
        asked: How many requests it has got, answered or not.
    """

    def __init__(self, keys: S3Server) -> None:
        self.answering = threading.Event()
        self.asked = 0
        self._ended = False
        until = datetime.now(UTC) + timedelta(hours=6)
        credentials = {
            "Code": "Success",
            "AccessKeyId": keys.access_key,
            "SecretAccessKey": keys.secret_key,
            "Token": "",
            "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        answers = {
            "/latest/api/token": "a-token",
            _ROLES: "engine",
            f"{_ROLES}engine": json.dumps(credentials),
        }
        service = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                service.asked += 1
                service.answering.wait()
                if service._ended:
                    return
                body = answers.get(self.path, "").encode()
                self.send_response(200 if body else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = answer  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                """Not to the terminal."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """Who asked did not wait."""

        self._server = Server((HOST, 0), Handler)
        self._running = running(self._server)

    @property
    def env(self) -> dict[str, str]:
        """Variables by which the SDK finds nothing but this service."""
        return {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{HOST}:{self._server.server_port}",
            "AWS_EC2_METADATA_DISABLED": "false",
            "AWS_ACCESS_KEY_ID": "",
            "AWS_SECRET_ACCESS_KEY": "",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
        }

    def __enter__(self) -> MetadataService:
        self._running.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended = True
        self.answering.set()
        self._running.__exit__(None, None, None)
