# SPDX-License-Identifier: Apache-2.0

mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }

  mock_data "aws_region" {
    defaults = { name = "eu-central-1" }
  }
}

variables {
  bucket = "embeddings"
}

run "three_roles_and_their_settings" {
  command = plan

  assert {
    condition     = toset(keys(output.instance_profiles)) == toset(["consumer", "maintainer", "producer"])
    error_message = "a role is missing"
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
