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
    defaults        = { arn = "arn:aws:kms:eu-central-1:123456789012:key/writer" }
  }

  mock_resource "aws_iam_role" {
    override_during = plan
    defaults        = { arn = "arn:aws:iam::123456789012:role/one" }
  }
}

mock_provider "aws" {
  alias = "us"

  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }

  mock_data "aws_service" {
    defaults = { region = "us-east-1" }
  }

  mock_resource "aws_kms_key" {
    override_during = plan
    defaults        = { arn = "arn:aws:kms:us-east-1:123456789012:key/us" }
  }
}

mock_provider "aws" {
  alias = "ap"

  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }

  mock_data "aws_service" {
    defaults = { region = "ap-southeast-1" }
  }

  mock_resource "aws_kms_key" {
    override_during = plan
    defaults        = { arn = "arn:aws:kms:ap-southeast-1:123456789012:key/ap" }
  }
}

variables {
  name = "embeddings"
}

run "one_writer_and_two_readers_each_with_the_key_of_its_region" {
  command = plan

  assert {
    condition = { for name, corpus in output.corpora : name => [corpus.name, corpus.region, corpus.kms_key_arn] } == {
      writer = ["embeddings", "eu-central-1", "arn:aws:kms:eu-central-1:123456789012:key/writer"]
      us     = ["embeddings-us", "us-east-1", "arn:aws:kms:us-east-1:123456789012:key/us"]
      ap     = ["embeddings-ap", "ap-southeast-1", "arn:aws:kms:ap-southeast-1:123456789012:key/ap"]
    }
    error_message = "the buckets are other ones"
  }
  assert {
    condition     = output.ec_transfer_config["us"] != output.ec_transfer_config["ap"] && jsondecode(output.ec_transfer_config["us"]).ec_role == "ec_consumer"
    error_message = "a reader reads elsewhere, or writes"
  }
}

run "output_names_every_statement_of_every_role" {
  command = plan

  assert {
    condition = { for role, statements in output.policies : role => jsonencode(statements) } == merge(
      { for role in ["producer", "maintainer", "replication"] : role => jsonencode(jsondecode({
        producer    = module.producer.policy_json
        maintainer  = module.maintainer.policy_json
        replication = module.replication.policy_json
      }[role]).Statement) },
      { for name, access in module.consumer : "consumer-${name}" => jsonencode(jsondecode(access.policy_json).Statement) },
    )
    error_message = "a role may do what the output does not say"
  }
}

run "each_role_and_rule_uses_the_key_of_its_region" {
  command = plan

  assert {
    condition = {
      for role, statements in output.policies : role => [
        for one in statements : [one.Resource[0], one.Condition.StringEquals["kms:ViaService"]] if startswith(one.Action[0], "kms:")
      ]
      } == {
      producer        = [["arn:aws:kms:eu-central-1:123456789012:key/writer", "s3.eu-central-1.amazonaws.com"]]
      maintainer      = [["arn:aws:kms:eu-central-1:123456789012:key/writer", "s3.eu-central-1.amazonaws.com"]]
      consumer-writer = [["arn:aws:kms:eu-central-1:123456789012:key/writer", "s3.eu-central-1.amazonaws.com"]]
      consumer-us     = [["arn:aws:kms:us-east-1:123456789012:key/us", "s3.us-east-1.amazonaws.com"]]
      consumer-ap     = [["arn:aws:kms:ap-southeast-1:123456789012:key/ap", "s3.ap-southeast-1.amazonaws.com"]]
      replication = [
        ["arn:aws:kms:eu-central-1:123456789012:key/writer", "s3.eu-central-1.amazonaws.com"],
        ["arn:aws:kms:ap-southeast-1:123456789012:key/ap", "s3.ap-southeast-1.amazonaws.com"],
        ["arn:aws:kms:us-east-1:123456789012:key/us", "s3.us-east-1.amazonaws.com"],
      ]
    }
    error_message = "a role uses another region's key, or one beside S3"
  }
}

run "keys_name_each_action" {
  command = plan

  assert {
    condition = alltrue([
      for action in jsondecode(aws_kms_key.writer.policy).Statement[0].Action : !strcontains(action, "*")
    ])
    error_message = "a wildcard action in a key's policy"
  }
  assert {
    condition     = aws_kms_key.writer.enable_key_rotation && aws_kms_key.us.enable_key_rotation && aws_kms_key.ap.enable_key_rotation
    error_message = "a key does not rotate"
  }
  assert {
    condition     = toset([aws_kms_key.writer.deletion_window_in_days, aws_kms_key.us.deletion_window_in_days, aws_kms_key.ap.deletion_window_in_days]) == toset([30])
    error_message = "a key, and with it a corpus, is gone before anybody notices"
  }
  assert {
    condition     = toset([aws_kms_alias.writer.name, aws_kms_alias.us.name, aws_kms_alias.ap.name]) == toset(["alias/embeddings"])
    error_message = "a key cannot be found by a name"
  }
}

run "tags_are_on_everything_that_costs" {
  command = plan

  variables {
    tags = { Team = "vision" }
  }

  assert {
    condition     = aws_kms_key.writer.tags == tomap({ Team = "vision" }) && aws_kms_key.ap.tags == tomap({ Team = "vision" })
    error_message = "a key has no tags"
  }
}

run "reader_in_the_region_of_the_writer_is_refused" {
  command = plan

  variables {
    reader_regions = { us = "us-east-1", ap = "us-east-1" }
  }

  expect_failures = [var.reader_regions]
}
