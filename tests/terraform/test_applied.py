# SPDX-License-Identifier: Apache-2.0
"""Examples are applied, used, left alone, and destroyed: against moto and against SeaweedFS."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from s3ec.prefetch import FetchOutcome
from s3ec.testing.server import Identity, LocalS3, MotoServer
from tests.faults.engine import Engine
from tests.support.waiting import eventually
from tests.terraform.cases import HOW, PLUGINS, Provider, Terraform, copy, transfer_json

pytestmark = [
    pytest.mark.terraform,
    pytest.mark.slow,
    pytest.mark.skipif(PLUGINS is None, reason=HOW),
]
BUCKET = "embeddings"
PREFIX = "corpus"
ROLES = ("consumer", "producer", "maintainer")


def client(endpoint_url: str, env: dict[str, str]) -> Any:
    return boto3.client(
        "s3",
        region_name="eu-central-1",
        endpoint_url=endpoint_url,
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
    )


@dataclass(frozen=True)
class Applied:
    """The example of one region as it lies on moto."""

    terraform: Terraform
    s3: Any
    outputs: dict[str, Any]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy(tmp_path_factory.mktemp("terraform") / "terraform")


@pytest.fixture(scope="module")
def applying(tree: Path, moto_server: MotoServer) -> Iterator[Future[Applied]]:
    """Applied meanwhile: the provider looks at a new lifecycle for 50 s until it trusts it."""
    env = {
        **moto_server.env(),
        # An address instead of a name has the provider put buckets into the path.
        "AWS_ENDPOINT_URL": moto_server.endpoint_url,
        "AWS_EC2_METADATA_DISABLED": "true",
        "TF_VAR_bucket": BUCKET,
        "TF_VAR_prefix": f"{PREFIX}/",
    }
    folder = tree / "examples" / "single-region"
    Terraform(folder, env).init()
    s3 = client(moto_server.endpoint_url, moto_server.env())

    def apply(here: Terraform) -> Applied:
        here.run("apply", "-auto-approve", "-input=false")
        return Applied(here, s3, here.outputs())

    with Provider(folder, env) as provider, ThreadPoolExecutor(1) as pool:
        here = Terraform(folder, env, provider)
        yield (future := pool.submit(apply, here))
        future.result()
        # 0: nothing to do; 2 would be a change that each further apply makes again.
        here.run("plan", "-detailed-exitcode", "-input=false")
        here.run("destroy", "-auto-approve", "-input=false")
    assert BUCKET not in {bucket["Name"] for bucket in s3.list_buckets()["Buckets"]}


@pytest.mark.usefixtures("applying")  # which waits, so this one comes first
def test_bucket_of_an_s3_compatible_store_is_made_there_and_named_in_the_output(
    tree: Path, local_s3: LocalS3
) -> None:
    env = {
        **local_s3.env(),
        "TF_VAR_endpoint_url": local_s3.endpoint_url,
        "TF_VAR_bucket": "made-by-terraform",
        "TF_VAR_prefix": "team-a/",
    }
    folder = tree / "examples" / "minio"
    Terraform(folder, env).init()
    with Provider(folder, env) as provider:
        here = Terraform(folder, env, provider)
        here.run("apply", "-auto-approve", "-input=false")
        try:
            extra = {"bucket": "made-by-terraform", "endpoint_url": local_s3.endpoint_url}
            texts = here.outputs()["ec_transfer_config"]
            for role in ("ec_producer", "ec_consumer", "ec_both"):
                expected = transfer_json(role, **extra, prefix="team-a", region="us-east-1")
                assert texts[role] == expected
            here.run("plan", "-detailed-exitcode", "-input=false")
        finally:
            here.run("destroy", "-auto-approve", "-input=false")


@pytest.fixture(scope="module")
def applied(applying: Future[Applied]) -> Applied:
    return applying.result()


def test_bucket_is_private_versioned_and_tidied(applied: Applied) -> None:
    block = applied.s3.get_public_access_block(Bucket=BUCKET)["PublicAccessBlockConfiguration"]
    assert list(block.values()) == [True] * 4
    assert applied.s3.get_bucket_versioning(Bucket=BUCKET)["Status"] == "Enabled"
    rules = applied.s3.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"]
    assert [rule["ID"] for rule in rules] == ["tidy"]
    policy = json.loads(applied.s3.get_bucket_policy(Bucket=BUCKET)["Policy"])
    assert {one["Sid"] for one in policy["Statement"]} == {
        "DenyPlainHttp",
        "DenyOldTls",
        "DenyReplacing",
    }


def test_output_is_what_the_connector_takes(applied: Applied) -> None:
    for role in ("ec_producer", "ec_consumer", "ec_both"):
        expected = transfer_json(role, bucket=BUCKET, prefix=PREFIX, region="eu-central-1")
        assert applied.outputs["ec_transfer_config"][role] == expected


@dataclass(frozen=True)
class Guarded:
    """SeaweedFS with a user for each role, bound by the very policy that Terraform made."""

    server: LocalS3
    users: dict[str, Identity]

    def env(self, role: str) -> dict[str, str]:
        return self.server.env(self.users[role])


@pytest.fixture(scope="module")
def guarded(applied: Applied) -> Iterator[Guarded]:
    policies = applied.outputs["policies"]
    users = {role: Identity(role, policy=policies[role]) for role in ROLES}
    with LocalS3(identities=list(users.values())) as server:
        server.create_bucket(BUCKET)
        yield Guarded(server, users)


# What is tried, and who may.
TRIES: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "get": (lambda s3: s3.get_object(Bucket=BUCKET, Key="corpus/ns/objects/a"), set(ROLES)),
    "get elsewhere": (lambda s3: s3.get_object(Bucket=BUCKET, Key="other/a"), set()),
    "get beside": (lambda s3: s3.get_object(Bucket=BUCKET, Key="corpus-of-others/a"), set()),
    "list": (lambda s3: s3.list_objects_v2(Bucket=BUCKET, Prefix="corpus/"), set(ROLES)),
    "list elsewhere": (lambda s3: s3.list_objects_v2(Bucket=BUCKET, Prefix="other/"), set()),
    "list all": (lambda s3: s3.list_objects_v2(Bucket=BUCKET), set()),
    "add": (
        lambda s3: s3.put_object(
            Bucket=BUCKET, Key="corpus/ns/objects/new", Body=b"x", IfNoneMatch="*"
        ),
        {"producer", "maintainer"},
    ),
    "add elsewhere": (
        lambda s3: s3.put_object(Bucket=BUCKET, Key="other/new", Body=b"x", IfNoneMatch="*"),
        set(),
    ),
    "replace": (
        lambda s3: s3.put_object(
            Bucket=BUCKET, Key="corpus/ns/objects/a", Body=b"x", IfNoneMatch="*"
        ),
        set(),
    ),
    "delete": (
        lambda s3: s3.delete_object(Bucket=BUCKET, Key="corpus/ns/objects/gone"),
        {"maintainer"},
    ),
    "delete elsewhere": (lambda s3: s3.delete_object(Bucket=BUCKET, Key="other/a"), set()),
    "delete the bucket": (lambda s3: s3.delete_bucket(Bucket=BUCKET), set()),
    "change the policy": (
        lambda s3: s3.put_bucket_policy(Bucket=BUCKET, Policy='{"Statement": []}'),
        set(),
    ),
}


@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_do_what_it_is_for_and_nothing_else(role: str, guarded: Guarded) -> None:
    root = client(guarded.server.endpoint_url, guarded.server.env())
    for key in ("corpus/ns/objects/a", "corpus/ns/objects/gone", "other/a", "corpus-of-others/a"):
        root.put_object(Bucket=BUCKET, Key=key, Body=b"as it was")
    root.delete_object(Bucket=BUCKET, Key="corpus/ns/objects/new")
    s3 = client(guarded.server.endpoint_url, guarded.env(role))
    allowed = set()
    refused = {}
    for what, (attempt, _) in TRIES.items():
        try:
            attempt(s3)
        except ClientError as exc:
            refused[what] = exc.response["ResponseMetadata"]["HTTPStatusCode"]
        else:
            allowed.add(what)
    assert allowed == {what for what, (_, may) in TRIES.items() if role in may}
    assert set(refused.values()) <= {403, 412}, refused
    body = root.get_object(Bucket=BUCKET, Key="corpus/ns/objects/a")["Body"].read()
    assert body == b"as it was"


def test_connector_works_as_producer_and_as_consumer(
    guarded: Guarded,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def settings(role: str) -> dict[str, str]:
        for name, value in guarded.env(role).items():
            monkeypatch.setenv(name, value)
        return {
            "bucket": BUCKET,
            "prefix": PREFIX,
            "endpoint_url": guarded.server.endpoint_url,
            "region": "us-east-1",
            "cache_dir": str(tmp_path / role),
            "min_free_bytes": "0",
        }

    with Engine(settings("producer")) as engine:
        engine.save(0, 1)
        eventually(lambda: engine.count("save.items") == 2)
        assert engine.count("save_problem.denied") == 0
    with Engine(settings("consumer")) as engine:
        engine.follow()
        assert engine.outcomes(0, 1, 7) == [
            FetchOutcome.READY,
            FetchOutcome.READY,
            FetchOutcome.ABSENT,
        ]
        engine.save(2)
        eventually(lambda: engine.count("save_problem.denied") >= 1)
        assert engine.count("save.items") == 0
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([line for line in lines if "s3:PutObject" in line]) == 1
