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
    defaults        = { arn = "arn:aws:kms:eu-central-1:123456789012:key/home" }
  }

  mock_resource "aws_iam_role" {
    override_during = plan
    defaults        = { arn = "arn:aws:iam::123456789012:role/home" }
  }
}

mock_provider "aws" {
  alias = "us"

  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }

  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_data "aws_service" {
    defaults = { region = "us-east-1" }
  }

  mock_resource "aws_kms_key" {
    override_during = plan
    defaults        = { arn = "arn:aws:kms:us-east-1:123456789012:key/us" }
  }

  mock_resource "aws_iam_role" {
    override_during = plan
    defaults        = { arn = "arn:aws:iam::123456789012:role/us" }
  }
}

mock_provider "aws" {
  alias = "ap"

  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }

  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_data "aws_service" {
    defaults = { region = "ap-southeast-1" }
  }

  mock_resource "aws_kms_key" {
    override_during = plan
    defaults        = { arn = "arn:aws:kms:ap-southeast-1:123456789012:key/ap" }
  }

  mock_resource "aws_iam_role" {
    override_during = plan
    defaults        = { arn = "arn:aws:iam::123456789012:role/ap" }
  }
}

variables {
  name = "corpus"
}

run "home_and_two_copies_each_with_the_key_of_its_region" {
  command = plan

  assert {
    condition = { for name, corpus in output.corpora : name => [corpus.name, corpus.region, corpus.kms_key_arn] } == {
      home = ["corpus", "eu-central-1", "arn:aws:kms:eu-central-1:123456789012:key/home"]
      us   = ["corpus-us", "us-east-1", "arn:aws:kms:us-east-1:123456789012:key/us"]
      ap   = ["corpus-ap", "ap-southeast-1", "arn:aws:kms:ap-southeast-1:123456789012:key/ap"]
    }
    error_message = "the buckets are other ones"
  }
}

run "engines_read_their_own_copy_first_and_home_last" {
  command = plan

  assert {
    condition = {
      for name, text in output.ec_transfer_config : name => jsonencode(jsondecode(text).ec_connector_extra_config)
      } == {
      home = jsonencode({ bucket = "corpus", region = "eu-central-1", prefix = "corpus" })
      us   = jsonencode({ bucket = "corpus", region = "eu-central-1", prefix = "corpus", replicas = [{ bucket = "corpus-us", region = "us-east-1" }] })
      ap   = jsonencode({ bucket = "corpus", region = "eu-central-1", prefix = "corpus", replicas = [{ bucket = "corpus-ap", region = "ap-southeast-1" }] })
      maintainer = jsonencode({ bucket = "corpus", region = "eu-central-1", prefix = "corpus", replicas = [
        { bucket = "corpus-us", region = "us-east-1" }, { bucket = "corpus-ap", region = "ap-southeast-1" },
      ] })
    }
    error_message = "the settings are other ones"
  }
  assert {
    condition     = { for name, text in output.ec_transfer_config : name => jsondecode(text).ec_role } == { home = "ec_both", us = "ec_consumer", ap = "ec_consumer", maintainer = "ec_both" }
    error_message = "a reader writes, or a writer does not"
  }
}

run "writers_elsewhere_save_to_home_and_readers_nowhere" {
  command = plan

  variables {
    writers = ["us"]
  }

  assert {
    condition     = { for name, text in output.ec_transfer_config : name => jsondecode(text).ec_role } == { home = "ec_consumer", us = "ec_both", ap = "ec_consumer", maintainer = "ec_both" }
    error_message = "a reader writes, or a writer does not"
  }
  assert {
    condition = {
      for role, statements in output.policies : role => flatten([for one in statements : one.Resource if contains(one.Action, "s3:PutObject")])
    } == { home = [], us = ["arn:aws:s3:::corpus/corpus/*"], ap = [], maintainer = ["arn:aws:s3:::corpus/corpus/*"], replication = [] }
    error_message = "a role writes beside home"
  }
}

run "maintainer_deletes_in_all_places_and_nobody_else_does" {
  command = plan

  assert {
    condition = {
      for role, statements in output.policies : role => flatten([for one in statements : one.Resource if contains(one.Action, "s3:DeleteObject")])
      } == {
      home        = []
      us          = []
      ap          = []
      maintainer  = ["arn:aws:s3:::corpus/corpus/*", "arn:aws:s3:::corpus-us/corpus/*", "arn:aws:s3:::corpus-ap/corpus/*"]
      replication = []
    }
    error_message = "gc leaves copies, or another role deletes"
  }
}

run "output_names_every_statement_of_every_role" {
  command = plan

  assert {
    condition = { for role, statements in output.policies : role => jsonencode(statements) } == {
      for role, text in {
        home        = module.engines_home.policy_json
        us          = module.engines_us.policy_json
        ap          = module.engines_ap.policy_json
        maintainer  = module.maintainer.policy_json
        replication = module.replication.policy_json
      } : role => jsonencode(jsondecode(text).Statement)
    }
    error_message = "a role may do what the output does not say"
  }
}

run "each_role_and_rule_uses_the_keys_of_its_places" {
  command = plan

  assert {
    condition = {
      for role, statements in output.policies : role => [
        for one in statements : [one.Resource[0], one.Condition.StringEquals["kms:ViaService"]] if startswith(one.Action[0], "kms:")
      ]
      } == {
      home = [["arn:aws:kms:eu-central-1:123456789012:key/home", "s3.eu-central-1.amazonaws.com"]]
      us = [
        ["arn:aws:kms:eu-central-1:123456789012:key/home", "s3.eu-central-1.amazonaws.com"],
        ["arn:aws:kms:us-east-1:123456789012:key/us", "s3.us-east-1.amazonaws.com"],
      ]
      ap = [
        ["arn:aws:kms:eu-central-1:123456789012:key/home", "s3.eu-central-1.amazonaws.com"],
        ["arn:aws:kms:ap-southeast-1:123456789012:key/ap", "s3.ap-southeast-1.amazonaws.com"],
      ]
      maintainer = [
        ["arn:aws:kms:eu-central-1:123456789012:key/home", "s3.eu-central-1.amazonaws.com"],
        ["arn:aws:kms:us-east-1:123456789012:key/us", "s3.us-east-1.amazonaws.com"],
        ["arn:aws:kms:ap-southeast-1:123456789012:key/ap", "s3.ap-southeast-1.amazonaws.com"],
      ]
      replication = [
        ["arn:aws:kms:eu-central-1:123456789012:key/home", "s3.eu-central-1.amazonaws.com"],
        ["arn:aws:kms:ap-southeast-1:123456789012:key/ap", "s3.ap-southeast-1.amazonaws.com"],
        ["arn:aws:kms:us-east-1:123456789012:key/us", "s3.us-east-1.amazonaws.com"],
      ]
    }
    error_message = "a role uses another place's key, or one beside S3"
  }
}

run "copy_in_another_account_is_let_in_and_lets_home_in" {
  command = plan

  override_data {
    target = data.aws_caller_identity.us
    values = { account_id = "210987654321" }
  }

  override_data {
    target = module.us.data.aws_caller_identity.current
    values = { account_id = "210987654321" }
  }

  variables {
    writers = ["home", "us"]
  }

  assert {
    condition = {
      for name, text in { home = module.home.policy_json, us = module.us.policy_json, ap = module.ap.policy_json } : name => {
        for one in jsondecode(text).Statement : one.Sid => one.Principal.AWS if one.Effect == "Allow"
      }
      } == {
      home = { List210987654321 = "arn:aws:iam::210987654321:root", Objects210987654321 = "arn:aws:iam::210987654321:root" }
      us = {
        List123456789012       = "arn:aws:iam::123456789012:root"
        Versioning123456789012 = "arn:aws:iam::123456789012:root"
        Objects123456789012    = "arn:aws:iam::123456789012:root"
      }
      ap = {}
    }
    error_message = "an account is let in that has no part in it, or one that has is not"
  }
  assert {
    condition     = one([for one in jsondecode(module.home.policy_json).Statement : one.Action if one.Sid == "Objects210987654321"]) == ["s3:PutObject", "s3:AbortMultipartUpload", "s3:GetObject"]
    error_message = "engines of the other account could not save, or may do more"
  }
  assert {
    condition     = contains([for one in output.policies.replication : one.Sid], "HandOverReplicas")
    error_message = "copies in the other account stay home's"
  }
}

run "existing_buckets_are_taken_and_not_made" {
  command = plan

  override_data {
    target = module.us.data.aws_s3_bucket.existing[0]
    values = { bucket = "of-old", region = "us-east-1" }
  }

  variables {
    existing_buckets = { us = { name = "of-old", kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/of-old" } }
  }

  assert {
    condition     = output.corpora.us.name == "of-old" && output.corpora.us.kms_key_arn == "arn:aws:kms:us-east-1:123456789012:key/of-old" && module.us.policy_json == null
    error_message = "the bucket is made anew, or changed"
  }
  assert {
    condition     = jsondecode(output.ec_transfer_config.us).ec_connector_extra_config.replicas == [{ bucket = "of-old", region = "us-east-1" }]
    error_message = "engines read another copy"
  }
}

run "two_copies_in_one_region_are_refused" {
  command = plan

  variables {
    replica_regions = { us = "us-east-1", ap = "us-east-1" }
  }

  expect_failures = [var.replica_regions]
}
