# SPDX-License-Identifier: Apache-2.0

mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }

  mock_resource "aws_iam_role" {
    override_during = plan
    defaults        = { arn = "arn:aws:iam::123456789012:role/replication" }
  }
}

variables {
  name = "replication"
  source_corpus = {
    name        = "embeddings"
    arn         = "arn:aws:s3:::embeddings"
    region      = "eu-central-1"
    prefix      = "team-a/"
    kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/source"
  }
  destinations = {
    us = {
      name        = "embeddings-us"
      arn         = "arn:aws:s3:::embeddings-us"
      region      = "us-east-1"
      prefix      = "team-a/"
      kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/us"
    }
    ap = {
      name        = "embeddings-ap"
      arn         = "arn:aws:s3:::embeddings-ap"
      region      = "ap-south-1"
      prefix      = "team-a/"
      kms_key_arn = "arn:aws:kms:ap-south-1:123456789012:key/ap"
    }
  }
}

run "each_destination_has_a_rule_and_its_own_key" {
  command = plan

  assert {
    condition     = { for rule in aws_s3_bucket_replication_configuration.this.rule : rule.id => one(rule.destination).bucket } == { us = "arn:aws:s3:::embeddings-us", ap = "arn:aws:s3:::embeddings-ap" }
    error_message = "not one rule per destination"
  }
  assert {
    condition = {
      for rule in aws_s3_bucket_replication_configuration.this.rule :
      rule.id => one(one(rule.destination).encryption_configuration).replica_kms_key_id
      } == {
      us = "arn:aws:kms:us-east-1:123456789012:key/us"
      ap = "arn:aws:kms:ap-south-1:123456789012:key/ap"
    }
    error_message = "a replica is encrypted with another region's key"
  }
  assert {
    condition     = length(distinct([for rule in aws_s3_bucket_replication_configuration.this.rule : rule.priority])) == 2
    error_message = "two rules have one priority"
  }
  assert {
    condition = alltrue([
      for rule in aws_s3_bucket_replication_configuration.this.rule :
      one(one(rule.source_selection_criteria).sse_kms_encrypted_objects).status == "Enabled"
      && one(rule.filter).prefix == "team-a/"
      && one(rule.delete_marker_replication).status == "Enabled"
    ])
    error_message = "encrypted objects, other folders or deletions are treated otherwise"
  }
}

run "role_reads_the_source_writes_the_replicas_and_no_more" {
  command = plan

  assert {
    condition = toset(flatten([for one in jsondecode(aws_iam_role_policy.this.policy).Statement : one.Resource])) == toset([
      "arn:aws:s3:::embeddings",
      "arn:aws:s3:::embeddings/team-a/*",
      "arn:aws:s3:::embeddings-us/team-a/*",
      "arn:aws:s3:::embeddings-ap/team-a/*",
      "arn:aws:kms:eu-central-1:123456789012:key/source",
      "arn:aws:kms:us-east-1:123456789012:key/us",
      "arn:aws:kms:ap-south-1:123456789012:key/ap",
    ])
    error_message = "the role reaches something else"
  }
  assert {
    condition     = alltrue(flatten([for one in jsondecode(aws_iam_role_policy.this.policy).Statement : [for action in one.Action : !strcontains(action, "*")]]))
    error_message = "a wildcard action"
  }
  assert {
    condition = toset([
      for one in jsondecode(aws_iam_role_policy.this.policy).Statement : one.Condition.StringEquals["kms:ViaService"]
      if startswith(one.Action[0], "kms:")
    ]) == toset(["s3.eu-central-1.amazonaws.com", "s3.us-east-1.amazonaws.com", "s3.ap-south-1.amazonaws.com"])
    error_message = "a key can be used beside S3"
  }
}

run "nothing_is_handed_over_within_one_account" {
  command = plan

  assert {
    condition = alltrue([
      for rule in aws_s3_bucket_replication_configuration.this.rule : length(one(rule.destination).access_control_translation) == 0
    ]) && !strcontains(aws_iam_role_policy.this.policy, "ObjectOwnerOverride") && length(aws_iam_role.batch) == 0
    error_message = "a right or a role that nobody asked for"
  }
}

run "copies_in_another_account_are_that_accounts" {
  command = plan

  variables {
    destinations = {
      ap = { name = "embeddings-ap", arn = "arn:aws:s3:::embeddings-ap", region = "ap-south-1", prefix = "team-a/", kms_key_arn = "arn:aws:kms:ap-south-1:123456789012:key/ap", account_id = "123456789012" }
      us = { name = "embeddings-us", arn = "arn:aws:s3:::embeddings-us", region = "us-east-1", prefix = "team-a/", kms_key_arn = "arn:aws:kms:us-east-1:210987654321:key/us", account_id = "210987654321" }
    }
  }

  assert {
    condition = {
      for rule in aws_s3_bucket_replication_configuration.this.rule :
      rule.id => [for one in one(rule.destination).access_control_translation : [one(rule.destination).account, one.owner]]
    } == { ap = [], us = [["210987654321", "Destination"]] }
    error_message = "copies stay the source's, or are given away"
  }
  assert {
    condition = one([
      for one in jsondecode(aws_iam_role_policy.this.policy).Statement : one if one.Sid == "HandOverReplicas"
      ]) == {
      Sid      = "HandOverReplicas"
      Effect   = "Allow"
      Action   = ["s3:ObjectOwnerOverrideToBucketOwner"]
      Resource = ["arn:aws:s3:::embeddings-us/team-a/*"]
    }
    error_message = "the role may hand over other copies"
  }
}

run "what_was_there_is_copied_by_a_job_with_a_role_of_its_own" {
  command = plan

  variables {
    batch_copy = true
  }

  assert {
    condition     = aws_iam_role.batch[0].name == "replication-batch"
    error_message = "the job names another role"
  }
  assert {
    condition = jsondecode(output.batch_copy_job) == {
      AccountId            = "123456789012"
      ConfirmationRequired = false
      Operation            = { S3ReplicateObject = {} }
      Priority             = 10
      RoleArn              = "arn:aws:iam::123456789012:role/replication-batch"
      Report               = { Enabled = false }
      ManifestGenerator = {
        S3JobManifestGenerator = {
          SourceBucket         = "arn:aws:s3:::embeddings"
          EnableManifestOutput = false
          Filter = {
            EligibleForReplication    = true
            ObjectReplicationStatuses = ["NONE", "FAILED"]
            KeyNameConstraint         = { MatchAnyPrefix = ["team-a/"] }
          }
        }
      }
    }
    error_message = "the job is another one"
  }
  assert {
    condition = {
      for one in jsondecode(aws_iam_role_policy.batch[0].policy).Statement : one.Sid => [one.Action, one.Resource]
      } == {
      CopyWhatIsThere = [["s3:InitiateReplication"], ["arn:aws:s3:::embeddings/team-a/*"]]
      ListWhatIsThere = [["s3:GetReplicationConfiguration", "s3:PutInventoryConfiguration"], ["arn:aws:s3:::embeddings"]]
    }
    error_message = "the job's role may do other things"
  }
}

run "role_is_for_this_bucket_of_this_account_where_s3_says_so" {
  command = plan

  assert {
    condition = jsondecode(aws_iam_role.this.assume_role_policy).Statement[0].Condition == {
      StringEqualsIfExists = { "aws:SourceAccount" = "123456789012" }
      ArnLikeIfExists      = { "aws:SourceArn" = "arn:aws:s3:::embeddings" }
    }
    error_message = "another bucket could have it taken"
  }
}

run "unencrypted_source_needs_no_keys" {
  command = plan

  variables {
    source_corpus = { name = "e", arn = "arn:aws:s3:::e", region = "eu-central-1", prefix = "", kms_key_arn = null }
    destinations = {
      us = { name = "u", arn = "arn:aws:s3:::u", region = "us-east-1", prefix = "", kms_key_arn = null }
    }
    delete_markers = false
    time_control   = true
  }

  assert {
    condition     = !strcontains(aws_iam_role_policy.this.policy, "kms:") && !strcontains(aws_iam_role_policy.this.policy, "ReplicateDelete")
    error_message = "rights that nothing needs"
  }
  assert {
    condition     = one(one(one(aws_s3_bucket_replication_configuration.this.rule).destination).replication_time).status == "Enabled"
    error_message = "no time control"
  }
}

run "copies_of_an_unencrypted_source_may_be_encrypted_where_they_go" {
  command = plan

  variables {
    source_corpus = { name = "e", arn = "arn:aws:s3:::e", region = "eu-central-1", prefix = "", kms_key_arn = null }
    destinations = {
      us = { name = "u", arn = "arn:aws:s3:::u", region = "us-east-1", prefix = "", kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/us" }
    }
  }

  assert {
    condition = [
      for one in jsondecode(aws_iam_role_policy.this.policy).Statement : one.Resource if startswith(one.Action[0], "kms:")
    ] == [["arn:aws:kms:us-east-1:123456789012:key/us"]]
    error_message = "the role could not write the copies, or uses another key"
  }
}

run "destination_in_the_region_of_the_source_is_refused" {
  command = plan

  variables {
    destinations = {
      here = { name = "u", arn = "arn:aws:s3:::u", region = "eu-central-1", prefix = "team-a/", kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/u" }
    }
  }

  expect_failures = [aws_s3_bucket_replication_configuration.this]
}

run "destination_without_a_key_is_refused_for_an_encrypted_source" {
  command = plan

  variables {
    destinations = {
      us = { name = "u", arn = "arn:aws:s3:::u", region = "us-east-1", prefix = "team-a/", kms_key_arn = null }
    }
  }

  expect_failures = [aws_s3_bucket_replication_configuration.this]
}

run "destination_with_another_prefix_is_refused" {
  command = plan

  variables {
    destinations = {
      us = { name = "u", arn = "arn:aws:s3:::u", region = "us-east-1", prefix = "team-b/", kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/u" }
    }
  }

  expect_failures = [aws_s3_bucket_replication_configuration.this]
}

run "two_destinations_in_one_region_are_refused" {
  command = plan

  variables {
    destinations = {
      a = { name = "a", arn = "arn:aws:s3:::a", region = "us-east-1", prefix = "team-a/", kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/u" }
      b = { name = "b", arn = "arn:aws:s3:::b", region = "us-east-1", prefix = "team-a/", kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/u" }
    }
  }

  expect_failures = [var.destinations]
}
