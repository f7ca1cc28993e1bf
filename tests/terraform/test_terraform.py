# SPDX-License-Identifier: Apache-2.0
"""The modules plan what they promise, and one example is applied, left alone, and destroyed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from s3ec.config import load_settings
from s3ec.testing.server import LocalS3
from tests.terraform.cases import HOW, PLUGINS, SOURCE, Terraform, copy

pytestmark = [
    pytest.mark.terraform,
    pytest.mark.slow,
    pytest.mark.skipif(PLUGINS is None, reason=HOW),
]
FOLDERS = sorted(
    str(path.parent.relative_to(SOURCE)) for path in SOURCE.glob("*/*/main.tf")
)
PARTS = {"main.tf", "variables.tf", "outputs.tf", "versions.tf", "tests"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy(tmp_path_factory.mktemp("terraform") / "terraform")


def test_every_file_is_formatted(tree: Path) -> None:
    Terraform(tree).run("fmt", "-check", "-recursive", "-diff")


def test_every_module_and_example_has_all_of_its_parts() -> None:
    assert len(FOLDERS) == 9
    for folder in FOLDERS:
        missing = PARTS - {path.name for path in (SOURCE / folder).iterdir()}
        assert not missing, f"{folder} has no {missing}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_plans_hold_with_a_mocked_provider(tree: Path, folder: str) -> None:
    here = Terraform(tree / folder)
    here.init()
    here.run("validate")
    summary = json.loads(here.run("test", "-json").stdout.splitlines()[-1])["test_summary"]
    assert summary["status"] == "pass"
    assert summary["passed"] > 0
    assert summary["skipped"] == 0


@pytest.fixture(scope="module")
def moto() -> Iterator[dict[str, str]]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        # An address instead of a name has the provider put buckets into the path.
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    server.stop()


def client(env: dict[str, str]) -> Any:
    return boto3.client(
        "s3",
        region_name="eu-central-1",
        endpoint_url=env["AWS_ENDPOINT_URL"],
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
    )


def test_example_is_applied_does_not_drift_and_is_destroyed(
    tree: Path, moto: dict[str, str]
) -> None:
    here = Terraform(tree / "examples" / "single-region", {**moto, "TF_VAR_bucket": "embeddings"})
    here.init()
    here.run("apply", "-auto-approve", "-input=false")
    s3 = client(moto)
    block = s3.get_public_access_block(Bucket="embeddings")["PublicAccessBlockConfiguration"]
    assert all(block.values())
    assert len(block) == 4
    assert s3.get_bucket_versioning(Bucket="embeddings")["Status"] == "Enabled"
    rules = s3.get_bucket_lifecycle_configuration(Bucket="embeddings")["Rules"]
    assert [rule["ID"] for rule in rules] == ["tidy"]
    outputs = here.outputs()
    assert outputs["corpus"]["name"] == "embeddings"
    transfer = json.loads(outputs["ec_transfer_config"]["ec_both"])
    settings = load_settings(transfer["ec_connector_extra_config"]).settings
    assert (settings.bucket, settings.prefix) == ("embeddings", "corpus")
    # 0: nothing to do; 2 would be a change that each further apply makes again.
    here.run("plan", "-detailed-exitcode", "-input=false")
    here.run("destroy", "-auto-approve", "-input=false")
    assert s3.list_buckets()["Buckets"] == []


def test_bucket_of_an_s3_compatible_store_is_made_there_and_opens(
    tree: Path, local_s3: LocalS3
) -> None:
    env = {
        **local_s3.env(),
        "TF_VAR_endpoint_url": local_s3.endpoint_url,
        "TF_VAR_bucket": "made-by-terraform",
        "TF_VAR_prefix": "team-a/",
    }
    here = Terraform(tree / "examples" / "minio", env)
    here.init()
    here.run("apply", "-auto-approve", "-input=false")
    try:
        transfer = json.loads(here.outputs()["ec_transfer_config"]["ec_both"])
        assert transfer["ec_connector"] == "S3ECConnector"
        settings = load_settings(transfer["ec_connector_extra_config"]).settings
        assert settings.endpoint_url == local_s3.endpoint_url
        assert settings.prefix == "team-a"
        here.run("plan", "-detailed-exitcode", "-input=false")
    finally:
        here.run("destroy", "-auto-approve", "-input=false")
