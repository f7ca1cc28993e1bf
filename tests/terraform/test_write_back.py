# SPDX-License-Identifier: Apache-2.0
"""The rights of ``examples/write-back``, tried in both buckets by users of a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from s3ec.testing.server import Identity, LocalS3, MotoServer
from tests.terraform.cases import HOW, PLUGINS, Terraform, copy

HOME, NEAR = "corpus", "corpus-near"
# What each role may do, and in which bucket.
ALLOWED = {
    "home": {("get", HOME), ("list", HOME), ("put", HOME)},
    "near": {("get", HOME), ("list", HOME), ("get", NEAR), ("list", NEAR), ("put", NEAR)},
    "maintainer": {
        (action, bucket) for action in ("get", "list", "put", "delete") for bucket in (HOME, NEAR)
    },
}
pytestmark = [
    pytest.mark.terraform,
    pytest.mark.slow,
    pytest.mark.skipif(PLUGINS is None, reason=HOW),
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory, moto_server: MotoServer) -> dict[str, Any]:
    """What the first plan says that outputs will be: without a key of KMS it knows them."""
    tree = copy(tmp_path_factory.mktemp("terraform") / "terraform")
    env = {**moto_server.env(), "AWS_ENDPOINT_URL": moto_server.endpoint_url, "TF_VAR_name": HOME}
    here = Terraform(tree / "examples" / "write-back", env)
    here.init()
    here.run("plan", "-input=false", "-out=first.plan")
    shown = json.loads(here.run("show", "-json", "first.plan").stdout)
    kinds = {one["type"] for one in shown["resource_changes"]}
    assert "aws_s3_bucket" in kinds
    assert "aws_s3_bucket_replication_configuration" not in kinds
    return {name: one["after"] for name, one in shown["output_changes"].items()}


def test_settings_say_that_engines_fill_the_near_bucket(outputs: dict[str, Any]) -> None:
    assert json.loads(outputs["ec_transfer_config"]["near"])["ec_connector_extra_config"] == {
        "bucket": HOME,
        "region": "us-east-1",
        "prefix": "corpus",
        "replicas": [{"bucket": NEAR, "region": "eu-central-1", "fill": True}],
    }


@pytest.fixture(scope="module")
def server(outputs: dict[str, Any]) -> Iterator[tuple[LocalS3, dict[str, Identity]]]:
    users = {
        role: Identity(role, policy=json.dumps({"Version": "2012-10-17", "Statement": statements}))
        for role, statements in outputs["policies"].items()
    }
    with LocalS3(identities=list(users.values())) as running:
        for bucket in (HOME, NEAR):
            running.create_bucket(bucket)
        yield running, users


@pytest.mark.parametrize("role", ALLOWED)
def test_each_role_may_do_in_each_bucket_what_it_is_for(
    role: str, server: tuple[LocalS3, dict[str, Identity]]
) -> None:
    running, users = server

    def client(env: dict[str, str]) -> Any:
        return boto3.client(
            "s3",
            region_name="us-east-1",
            endpoint_url=running.endpoint_url,
            aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        )

    root, s3 = client(running.env()), client(running.env(users[role]))
    objects = "corpus/ns/objects/"
    allowed, refused = set(), set()
    for bucket in (HOME, NEAR):
        for name in ("a", "gone"):
            root.put_object(Bucket=bucket, Key=objects + name, Body=b"as it was")
        root.delete_object(Bucket=bucket, Key=objects + "new")
        tries: dict[str, Callable[[str], Any]] = {
            "get": lambda at: s3.get_object(Bucket=at, Key=objects + "a"),
            "list": lambda at: s3.list_objects_v2(Bucket=at, Prefix="corpus/"),
            "put": lambda at: s3.put_object(
                Bucket=at, Key=objects + "new", Body=b"x", IfNoneMatch="*"
            ),
            "delete": lambda at: s3.delete_object(Bucket=at, Key=objects + "gone"),
        }
        for action, attempt in tries.items():
            try:
                attempt(bucket)
            except ClientError as exc:
                refused.add(exc.response["ResponseMetadata"]["HTTPStatusCode"])
            else:
                allowed.add((action, bucket))
    assert allowed == ALLOWED[role]
    assert refused <= {403}
