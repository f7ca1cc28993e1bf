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
      bucket         = "embeddings"
      region         = "eu-central-1"
      prefix         = "corpus"
      sse            = "aws:kms"
      sse_kms_key_id = "arn:aws:kms:eu-central-1:123456789012:key/one"
    }
    error_message = "the settings are other ones"
  }
  assert {
    condition     = output.engine_role_arn != null && output.maintainer_role_arn != null && output.vpc_endpoint_id == "vpce-0123456789abcdef0"
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
