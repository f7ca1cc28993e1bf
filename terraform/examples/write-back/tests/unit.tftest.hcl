# SPDX-License-Identifier: Apache-2.0

mock_provider "aws" {
  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }

  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_data "aws_service" {
    defaults = { region = "us-east-1" }
  }
}

mock_provider "aws" {
  alias = "near"

  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }

  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_data "aws_service" {
    defaults = { region = "eu-central-1" }
  }
}

variables {
  name = "corpus"
}

run "engines_fill_the_near_bucket" {
  command = plan

  assert {
    condition = jsondecode(output.ec_transfer_config.near) == {
      ec_connector = "S3ECConnector"
      ec_role      = "ec_consumer"
      ec_connector_extra_config = {
        bucket   = "corpus"
        region   = "us-east-1"
        prefix   = "corpus"
        replicas = [{ bucket = "corpus-near", region = "eu-central-1", fill = true }]
      }
    }
    error_message = "the settings are other ones"
  }
  assert {
    condition     = !strcontains(output.ec_transfer_config.home, "replicas") && jsondecode(output.ec_transfer_config.home).ec_role == "ec_both"
    error_message = "engines at home read elsewhere first, or do not save"
  }
}

run "each_role_writes_and_deletes_where_it_has_to" {
  command = plan

  assert {
    condition = {
      for role, statements in output.policies : role => {
        for action in ["s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"] : action => flatten([for one in statements : one.Resource if contains(one.Action, action)])
      }
      } == {
      home = {
        "s3:ListBucket"   = ["arn:aws:s3:::corpus"]
        "s3:GetObject"    = ["arn:aws:s3:::corpus/corpus/*"]
        "s3:PutObject"    = ["arn:aws:s3:::corpus/corpus/*"]
        "s3:DeleteObject" = []
      }
      near = {
        "s3:ListBucket"   = ["arn:aws:s3:::corpus", "arn:aws:s3:::corpus-near"]
        "s3:GetObject"    = ["arn:aws:s3:::corpus/corpus/*", "arn:aws:s3:::corpus-near/corpus/*"]
        "s3:PutObject"    = ["arn:aws:s3:::corpus-near/corpus/*"]
        "s3:DeleteObject" = []
      }
      maintainer = {
        "s3:ListBucket"   = ["arn:aws:s3:::corpus", "arn:aws:s3:::corpus-near"]
        "s3:GetObject"    = ["arn:aws:s3:::corpus/corpus/*", "arn:aws:s3:::corpus-near/corpus/*"]
        "s3:PutObject"    = ["arn:aws:s3:::corpus/corpus/*", "arn:aws:s3:::corpus-near/corpus/*"]
        "s3:DeleteObject" = ["arn:aws:s3:::corpus/corpus/*", "arn:aws:s3:::corpus-near/corpus/*"]
      }
    }
    error_message = "a role may do other things"
  }
}
