# SPDX-License-Identifier: Apache-2.0

mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }

  mock_data "aws_service" {
    defaults = { region = "eu-central-1" }
  }
}

variables {
  bucket = "embeddings"
}

run "engines_have_profiles_and_who_deletes_is_named" {
  command = plan

  variables {
    maintainer_arns = ["arn:aws:iam::123456789012:role/operator"]
  }

  assert {
    condition     = toset(keys(output.instance_profiles)) == toset(["consumer", "producer"])
    error_message = "an engine has no profile, or an instance may delete"
  }
  assert {
    condition     = toset(keys(output.policy_arns)) == toset(["consumer", "maintainer", "producer"])
    error_message = "a policy is missing"
  }
  assert {
    condition = jsondecode(output.ec_transfer_config["ec_both"]).ec_connector_extra_config == {
      bucket = "embeddings"
      region = "eu-central-1"
      prefix = "corpus"
    }
    error_message = "the settings are other ones"
  }
}
