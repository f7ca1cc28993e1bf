# SPDX-License-Identifier: Apache-2.0
"""What tests and the demo need of any S3 server on this machine: keys, a client, buckets."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

import boto3
from botocore.config import Config

HOST = "127.0.0.1"
REGION = "us-east-1"
ALL_ACTIONS = ("Admin", "Read", "Write", "List", "Tagging")


@dataclass(frozen=True)
class Identity:
    """A user of the server, with keys of its own.

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


class Endpoint:
    """What tests and the demo need of any S3 server."""

    def __init__(self, admin: Identity, port: int) -> None:
        self._admin = admin
        self._port = port

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
        """Variables that hand the SDK's chain the keys (the admin's unless one is named).

        The endpoint is not among them: it is a setting of s3ec, not of the SDK.
        """
        who = identity or self._admin
        return {
            "AWS_ACCESS_KEY_ID": who.access_key,
            "AWS_SECRET_ACCESS_KEY": who.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_REGION": REGION,
            # No instance role is asked for: that would wait for seconds off AWS.
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, identity: Identity | None = None) -> Any:
        """A boto3 client without retries, proxies or profile (the admin's unless one is named)."""
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
