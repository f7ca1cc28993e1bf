# SPDX-License-Identifier: Apache-2.0
"""What a person must find in the plan of ``examples/cross-region``, which is never applied here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import botocore.session
import pytest
from botocore.validate import ParamValidator

from s3ec.config import load_settings
from s3ec.testing.server import MotoServer
from tests.terraform.cases import HOW, PLUGINS, Terraform, copy

NAME = "embeddings"
REGIONS = {"home": "eu-central-1", "us": "us-east-1", "ap": "ap-southeast-1"}
BUCKETS = {"home": NAME, "us": f"{NAME}-us", "ap": f"{NAME}-ap"}
ROLES = {"home", "us", "ap", "maintainer", "replication"}
pytestmark = [
    pytest.mark.terraform,
    pytest.mark.slow,
    pytest.mark.skipif(PLUGINS is None, reason=HOW),
]
# Attributes that hold a policy, of all types that the example makes.
POLICIES = ("policy", "assume_role_policy")


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def too_wide(statement: dict[str, Any], *, of_key: bool) -> list[str]:
    """What a statement gives to whom nobody named; empty for one that is as it should be.

    Two things are not too wide. The policy of a KMS key, which cannot name its key, says ``*`` and
    means that key. And what denies may deny everything to everyone, below a bucket that it names.

    Args:
        statement: Of a policy document; None stands for an ARN that is not known yet.
        of_key: It stands in the policy of a KMS key.
    """
    found = [name for name in statement if name.startswith("Not")]
    denies = statement["Effect"] == "Deny"
    if not denies:
        found += [action for action in as_list(statement["Action"]) if "*" in action]
        principals = statement.get("Principal", {})
        named = principals.values() if isinstance(principals, dict) else [principals]
        found += [f"principal {one}" for who in named for one in as_list(who) if "*" in one]
    # A role's trust has no resource: it is the role's own.
    for resource in as_list(statement.get("Resource", [])):
        if resource is None or (of_key and resource == "*"):
            continue
        below = "" if denies else "corpus/"
        # One bucket, whole or what lies below its folder; else an ARN without a star.
        if not re.fullmatch(rf"arn:aws:s3:::[a-z0-9-]+(/{below}.*)?|arn:aws:[^*]+", resource):
            found.append(f"resource {resource}")
    return found


STATEMENT = {"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": ["arn:aws:s3:::e/corpus/*"]}


@pytest.mark.parametrize(
    "wide",
    [
        {"Action": ["s3:GetObject", "s3:Put*"]},
        {"Action": "*"},
        {"Resource": "*"},
        {"Resource": ["arn:aws:s3:::*"]},
        {"Resource": ["arn:aws:s3:::e/*"]},
        {"Resource": ["arn:aws:s3:::e*/corpus/*"]},
        {"Resource": ["arn:aws:kms:us-east-1:123456789012:key/*"]},
        {"Principal": "*"},
        {"Principal": {"AWS": ["*"]}},
        {"NotAction": ["s3:DeleteObject"]},
        {"Effect": "Deny", "Resource": "*"},
    ],
)
def test_what_is_too_wide_is_found(wide: dict[str, Any]) -> None:
    assert not too_wide(STATEMENT, of_key=False)
    assert too_wide({**STATEMENT, **wide}, of_key=False)


@dataclass(frozen=True)
class Plan:
    """A plan as ``terraform show -json`` writes it."""

    shown: dict[str, Any]

    def planned(self, kind: str) -> dict[str, dict[str, Any]]:
        """What is known of each resource of one type, by the module that makes it, or its name."""
        return {
            change.get("module_address", change["address"]).split(".")[1]: change["change"]["after"]
            for change in self.shown["resource_changes"]
            if change["type"] == kind
        }

    def provider_of(self, kind: str) -> dict[str, str]:
        """The configured provider, and by it the region, of each resource of one type."""
        root = self.shown["configuration"]["root_module"]
        called = {name: call["module"] for name, call in root["module_calls"].items()}
        return {
            name or one["name"]: one["provider_config_key"]
            for name, module in {"": root, **called}.items()
            for one in module.get("resources", [])
            if one["type"] == kind
        }

    def output(self, name: str) -> Any:
        return self.shown["output_changes"][name]["after"]

    def documents(self) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
        """Address, type and document of each policy; None for one that is not known yet."""
        for change in self.shown["resource_changes"]:
            after, unknown = change["change"]["after"], change["change"]["after_unknown"]
            if change["type"] == "aws_s3_bucket":
                continue  # what an old version of the provider wrote there; it is read only
            for name in POLICIES:
                if name in after:
                    yield change["address"], change["type"], json.loads(after[name])
                elif unknown.get(name) is True:
                    yield change["address"], change["type"], None


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory, moto_server: MotoServer) -> Plan:
    """The first plan, in an account that has nothing yet: no key, no role."""
    tree = copy(tmp_path_factory.mktemp("terraform") / "terraform")
    env = {
        **moto_server.env(),
        "AWS_ENDPOINT_URL": moto_server.endpoint_url,
        "TF_VAR_name": NAME,
        "TF_VAR_batch_copy": "true",
    }
    here = Terraform(tree / "examples" / "cross-region", env)
    here.init()
    here.run("plan", "-input=false", "-out=first.plan")
    return Plan(json.loads(here.run("show", "-json", "first.plan").stdout))


def test_settings_of_each_region_are_what_engines_take(plan: Plan) -> None:
    """The example's own tests say which; and that home is written and the copies are read."""
    for name, text in plan.output("ec_transfer_config").items():
        settings = load_settings(json.loads(text)["ec_connector_extra_config"]).settings
        near = [settings.at(replica).bucket for replica in settings.replicas]
        copies = {"home": [], "maintainer": ["us", "ap"]}.get(name, [name])
        assert near == [BUCKETS[one] for one in copies]
        assert (settings.bucket, settings.prefix) == (NAME, "corpus")
        assert settings.region == REGIONS["home"]


def test_each_bucket_has_a_key_of_its_region_and_versions(plan: Plan) -> None:
    assert plan.provider_of("aws_kms_key") == plan.provider_of("aws_s3_bucket")
    assert len(set(plan.provider_of("aws_kms_key").values())) == 3
    encryption = plan.planned("aws_s3_bucket_server_side_encryption_configuration")
    assert set(encryption) == set(BUCKETS)
    for one in encryption.values():
        [rule] = one["rule"]
        assert rule["bucket_key_enabled"] is True
        [default] = rule["apply_server_side_encryption_by_default"]
        assert default["sse_algorithm"] == "aws:kms"
    versioning = plan.planned("aws_s3_bucket_versioning")
    assert set(versioning) == set(BUCKETS)
    assert {one["versioning_configuration"][0]["status"] for one in versioning.values()} == {
        "Enabled"
    }


def test_home_replicates_encrypted_to_both_copies(plan: Plan) -> None:
    [replication] = plan.planned("aws_s3_bucket_replication_configuration").values()
    assert replication["bucket"] == BUCKETS["home"]
    to = {rule["id"]: rule["destination"][0]["bucket"] for rule in replication["rule"]}
    assert to == {name: f"arn:aws:s3:::{BUCKETS[name]}" for name in ("us", "ap")}
    for rule in replication["rule"]:
        assert rule["status"] == "Enabled"
        [selected] = rule["source_selection_criteria"]
        assert selected["sse_kms_encrypted_objects"] == [{"status": "Enabled"}]
        # That there is a key; the plan does not know its id yet.
        assert len(rule["destination"][0]["encryption_configuration"]) == 1
    uses = {
        (action, one["Condition"]["StringEquals"]["kms:ViaService"])
        for one in plan.output("policies")["replication"]
        for action in one["Action"]
        if action.startswith("kms:")
    }
    written = {"kms:Encrypt", "kms:GenerateDataKey"}
    assert uses == {("kms:Decrypt", "s3.eu-central-1.amazonaws.com")} | {
        (action, f"s3.{REGIONS[name]}.amazonaws.com") for action in written for name in ("us", "ap")
    }


def test_job_that_copies_what_is_there_is_one_that_s3_takes(plan: Plan) -> None:
    job = json.loads(plan.output("batch_copy_job"))
    assert job["RoleArn"] == f"arn:aws:iam::123456789012:role/{NAME}-replication-batch"
    service = botocore.session.get_session().get_service_model("s3control")
    shape = service.operation_model("CreateJob").input_shape
    # The token is made by who sends it.
    report = ParamValidator().validate({**job, "ClientRequestToken": "one"}, shape)
    assert not report.has_errors(), report.generate_report()


def test_no_bucket_is_public(plan: Plan) -> None:
    blocks = plan.planned("aws_s3_bucket_public_access_block")
    assert set(blocks) == set(BUCKETS)
    for name, block in blocks.items():
        four = [value for key, value in block.items() if re.match("block_|ignore_|restrict_", key)]
        assert four == [True] * 4, name
    owners = plan.planned("aws_s3_bucket_ownership_controls")
    assert set(owners) == set(BUCKETS)
    assert {one["rule"][0]["object_ownership"] for one in owners.values()} == {
        "BucketOwnerEnforced"
    }
    allows = {
        statement["Effect"]
        for _, kind, document in plan.documents()
        if kind == "aws_s3_bucket_policy" and document is not None
        for statement in document["Statement"]
    }
    assert allows == {"Deny"}


def test_no_policy_has_a_wildcard(plan: Plan) -> None:
    unknown = set()
    read = 0
    for address, kind, document in plan.documents():
        if document is None:
            unknown.add(address)
            continue
        read += 1
        for statement in document["Statement"]:
            assert not too_wide(statement, of_key=kind == "aws_kms_key"), address
    # Three keys, three buckets, who may take each of the six roles, what the job's role may do.
    assert read == 13
    # The rest names keys, so of it the plan knows but the output; that this says all of it is
    # asserted in the example's own tests, where the keys have ids.
    assert unknown == {
        "module.maintainer.aws_iam_policy.this",
        "module.replication.aws_iam_role_policy.this",
        *(f"module.engines_{name}.aws_iam_policy.this" for name in BUCKETS),
    }
    policies = plan.output("policies")
    assert set(policies) == ROLES
    for role, statements in policies.items():
        for statement in statements:
            assert not too_wide(statement, of_key=False), role
