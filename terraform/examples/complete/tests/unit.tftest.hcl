# SPDX-License-Identifier: Apache-2.0

mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }

  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_data "aws_service" {
    defaults = { region = "eu-central-1" }
  }

  mock_resource "aws_kms_key" {
    override_during = plan
    defaults        = { arn = "arn:aws:kms:eu-central-1:123456789012:key/one" }
  }

  mock_resource "aws_vpc_endpoint" {
    override_during = plan
    defaults        = { id = "vpce-0123456789abcdef0" }
  }

  mock_resource "aws_iam_role" {
    override_during = plan
    defaults        = { arn = "arn:aws:iam::123456789012:role/one" }
  }
}

variables {
  name            = "embeddings"
  vpc_id          = "vpc-0123456789abcdef0"
  route_table_ids = ["rtb-0123456789abcdef0"]
  organization_id = "o-a1b2c3d4e5"
  maintainer_arns = ["arn:aws:iam::123456789012:role/operator"]
  irsa = [{
    provider_arn    = "arn:aws:iam::123456789012:oidc-provider/oidc.example/id/ABC"
    issuer          = "oidc.example/id/ABC"
    namespace       = "serving"
    service_account = "vllm"
  }]
}

run "settings_name_bucket_and_key" {
  command = plan

  assert {
    condition = jsondecode(output.ec_transfer_config["ec_both"]).ec_connector_extra_config == {
      bucket = "embeddings"
      region = "eu-central-1"
      prefix = "corpus"
    } && output.corpus.kms_key_arn == "arn:aws:kms:eu-central-1:123456789012:key/one"
    error_message = "the settings are other ones"
  }
  assert {
    condition     = output.engine_role_arn != null && output.maintainer_role_arn != null && one(output.vpc_endpoint_ids) == "vpce-0123456789abcdef0"
    error_message = "a role or the endpoint is missing"
  }
  assert {
    condition     = length(output.alarm_names) == 2
    error_message = "an alarm is missing"
  }
}

run "without_pods_and_people_there_are_policies_only" {
  command = plan

  variables {
    irsa            = []
    maintainer_arns = []
    organization_id = null
  }

  assert {
    condition     = output.engine_role_arn == null && output.maintainer_role_arn == null
    error_message = "a role that nobody may take"
  }
}

run "pods_get_their_role_by_pod_identity" {
  command = plan

  variables {
    irsa         = []
    pod_identity = [{ cluster = "gpu", namespace = "serving", service_account = "vllm" }]
  }

  assert {
    condition     = aws_eks_pod_identity_association.engines["gpu/serving/vllm"].role_arn == output.engine_role_arn && output.engine_role_arn != null
    error_message = "the pods get another role, or none"
  }
  assert {
    condition     = [for one in jsondecode(module.engines.trust_json).Statement : [one.Principal.Service, one.Condition.StringEquals["aws:RequestTag/eks-cluster-name"]]] == [["pods.eks.amazonaws.com", "gpu"]]
    error_message = "other pods could take it"
  }
}

run "pods_get_their_role_by_irsa" {
  command = plan

  assert {
    condition     = length(aws_eks_pod_identity_association.engines) == 0 && jsondecode(module.engines.trust_json).Statement[0].Condition.StringEquals["oidc.example/id/ABC:sub"] == "system:serviceaccount:serving:vllm"
    error_message = "other pods could take it"
  }
}

run "what_is_there_is_handed_in_and_not_made" {
  command = plan

  override_data {
    target = module.corpus.data.aws_s3_bucket.existing[0]
    values = { bucket = "of-old", region = "eu-central-1" }
  }

  override_data {
    target = module.engines.data.aws_iam_role.existing[0]
    values = { name = "engines", arn = "arn:aws:iam::123456789012:role/engines" }
  }

  variables {
    vpc_id          = null
    route_table_ids = []
    irsa            = []
    existing = {
      bucket           = "of-old"
      vpc_endpoint_ids = ["vpce-of-old"]
      engine_role_name = "engines"
    }
  }

  assert {
    condition     = jsondecode(output.ec_transfer_config["ec_both"]).ec_connector_extra_config.bucket == "of-old" && module.corpus.policy_json == null && length(module.logs) == 0
    error_message = "a bucket is made or changed"
  }
  assert {
    condition     = one(output.vpc_endpoint_ids) == "vpce-of-old" && length(module.network) == 0
    error_message = "an endpoint is made"
  }
  assert {
    condition     = output.engine_role_arn == "arn:aws:iam::123456789012:role/engines"
    error_message = "a role is made"
  }
}

run "key_without_its_bucket_is_refused" {
  command = plan

  variables {
    existing = { kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/theirs" }
  }

  expect_failures = [var.existing]
}
