# SPDX-License-Identifier: Apache-2.0

mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }

  mock_resource "aws_kms_key" {
    override_during = plan
    defaults        = { arn = "arn:aws:kms:eu-central-1:123456789012:key/made" }
  }

  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }

  mock_data "aws_service" {
    defaults = { region = "eu-central-1" }
  }
}

variables {
  name = "embeddings"
}

run "bucket_is_private_and_versioned_by_default" {
  command = plan

  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.this[0].block_public_acls,
      aws_s3_bucket_public_access_block.this[0].block_public_policy,
      aws_s3_bucket_public_access_block.this[0].ignore_public_acls,
      aws_s3_bucket_public_access_block.this[0].restrict_public_buckets,
    ])
    error_message = "public access is not blocked in all four ways"
  }
  assert {
    condition     = aws_s3_bucket_versioning.this[0].versioning_configuration[0].status == "Enabled"
    error_message = "versions are off"
  }
  assert {
    condition     = aws_s3_bucket_ownership_controls.this[0].rule[0].object_ownership == "BucketOwnerEnforced"
    error_message = "ACLs are on"
  }
  assert {
    condition     = !aws_s3_bucket.this[0].force_destroy
    error_message = "destroy would delete a corpus"
  }
  assert {
    condition     = one(aws_s3_bucket_server_side_encryption_configuration.this[0].rule).apply_server_side_encryption_by_default[0].sse_algorithm == "AES256"
    error_message = "not encrypted with SSE-S3"
  }
}

run "plain_http_and_old_tls_are_denied" {
  command = plan

  assert {
    condition = anytrue([
      for one in jsondecode(aws_s3_bucket_policy.this[0].policy).Statement :
      one.Effect == "Deny" && try(one.Condition.Bool["aws:SecureTransport"], "") == "false"
      && contains(one.Resource, "arn:aws:s3:::embeddings") && contains(one.Resource, "arn:aws:s3:::embeddings/*")
    ])
    error_message = "plain http is not denied for the bucket and its objects"
  }
  assert {
    condition = anytrue([
      for one in jsondecode(aws_s3_bucket_policy.this[0].policy).Statement :
      one.Effect == "Deny" && try(one.Condition.NumericLessThan["s3:TlsVersion"], "") == "1.2"
    ])
    error_message = "TLS 1.1 is not denied"
  }
  assert {
    condition     = alltrue([for one in jsondecode(aws_s3_bucket_policy.this[0].policy).Statement : one.Effect == "Deny"])
    error_message = "the bucket's policy allows something by itself"
  }
}

run "embeddings_are_write_once" {
  command = plan

  variables {
    prefix = "team-a/"
  }

  assert {
    condition = one([
      for one in jsondecode(aws_s3_bucket_policy.this[0].policy).Statement : one if one.Sid == "DenyReplacing"
      ]) == {
      Sid       = "DenyReplacing"
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3:PutObject"
      Resource = [
        "arn:aws:s3:::embeddings/team-a/*/objects/*",
        "arn:aws:s3:::embeddings/team-a/*/modality/*",
        "arn:aws:s3:::embeddings/team-a/*/manifest/*",
        "arn:aws:s3:::embeddings/team-a/*/catalog/*",
        "arn:aws:s3:::embeddings/team-a/*/namespace.json",
      ]
      Condition = {
        Null = { "s3:if-none-match" = "true" }
        Bool = { "s3:ObjectCreationOperation" = "true" }
      }
    }
    error_message = "a write without If-None-Match is not denied"
  }
}

run "write_once_can_be_left_to_a_store_that_has_no_such_condition" {
  command = plan

  variables {
    write_once = false
  }

  assert {
    condition     = !strcontains(aws_s3_bucket_policy.this[0].policy, "if-none-match")
    error_message = "the statement is still there"
  }
}

run "kms_comes_with_a_bucket_key_and_is_no_setting_of_an_engine" {
  command = plan

  variables {
    kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
    prefix      = "team-a/corpus/"
  }

  assert {
    condition     = one(aws_s3_bucket_server_side_encryption_configuration.this[0].rule).bucket_key_enabled
    error_message = "one KMS call per object"
  }
  assert {
    condition = output.corpus == {
      name        = "embeddings"
      arn         = "arn:aws:s3:::embeddings"
      region      = "eu-central-1"
      prefix      = "team-a/corpus/"
      kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
      account_id  = "123456789012"
    }
    error_message = "the corpus output is another one"
  }
  assert {
    condition = jsondecode(output.ec_transfer_config["ec_consumer"]) == {
      ec_connector = "S3ECConnector"
      ec_role      = "ec_consumer"
      ec_connector_extra_config = {
        bucket = "embeddings"
        region = "eu-central-1"
        prefix = "team-a/corpus"
      }
    }
    error_message = "the settings are other ones"
  }
}

run "uploads_that_were_given_up_expire_and_embeddings_do_not" {
  command = plan

  assert {
    condition     = aws_s3_bucket_lifecycle_configuration.this[0].rule[0].abort_incomplete_multipart_upload[0].days_after_initiation == 7
    error_message = "uploads stay"
  }
  assert {
    condition     = length(aws_s3_bucket_lifecycle_configuration.this[0].rule) == 1
    error_message = "something expires that nobody asked for"
  }
  assert {
    condition     = length(aws_s3_bucket_logging.this) == 0
    error_message = "an access log that nobody asked for"
  }
}

run "folders_of_embeddings_follow_their_days_and_the_manifest_stays" {
  command = plan

  variables {
    prefix = "team-a/"
    lifecycle_rules = {
      noncurrent_days = 1
      folders = [
        { prefix = "team-a/gemma/objects/", intelligent_tiering_days = 0 },
        { prefix = "logs/", expire_days = 90 },
      ]
    }
    access_log = { bucket = "logs" }
  }

  assert {
    condition = [
      for rule in aws_s3_bucket_lifecycle_configuration.this[0].rule : [rule.id, one(rule.filter).prefix]
    ] == [["tidy", "team-a/"], ["team-a/gemma/objects/", "team-a/gemma/objects/"], ["logs/", "logs/"]]
    error_message = "not the rules that were asked for"
  }
  assert {
    condition     = one(aws_s3_bucket_lifecycle_configuration.this[0].rule[1].transition).storage_class == "INTELLIGENT_TIERING" && length(aws_s3_bucket_lifecycle_configuration.this[0].rule[1].expiration) == 0
    error_message = "embeddings stay where they are, or expire"
  }
  assert {
    condition     = aws_s3_bucket_lifecycle_configuration.this[0].rule[2].expiration[0].days == 90
    error_message = "expires after other days"
  }
  # What covers the manifest removes what was deleted or given up before.
  assert {
    condition     = one(aws_s3_bucket_lifecycle_configuration.this[0].rule[0].expiration).expired_object_delete_marker
    error_message = "the rule of the whole prefix expires what is there"
  }
  assert {
    condition     = length(aws_s3_bucket_lifecycle_configuration.this[0].rule[0].transition) == 0
    error_message = "the rule of the whole prefix moves what is there"
  }
  assert {
    condition     = aws_s3_bucket_logging.this[0].target_bucket == "logs"
    error_message = "no access log"
  }
}

run "rule_on_the_whole_prefix_is_refused" {
  command = plan

  variables {
    prefix          = "team-a/"
    lifecycle_rules = { folders = [{ prefix = "team-a/", expire_days = 90 }] }
  }

  expect_failures = [var.lifecycle_rules]
}

run "rule_on_a_manifest_is_refused" {
  command = plan

  variables {
    write_once      = false
    lifecycle_rules = { folders = [{ prefix = "gemma/manifest/", intelligent_tiering_days = 30 }] }
  }

  expect_failures = [var.lifecycle_rules]
}

run "no_lifecycle_when_null" {
  command = plan

  variables {
    lifecycle_rules = null
  }

  assert {
    condition     = length(aws_s3_bucket_lifecycle_configuration.this) == 0
    error_message = "a lifecycle configuration is planned"
  }
}

run "name_with_a_dot_is_refused" {
  command = plan

  variables {
    name = "embeddings.example"
  }

  expect_failures = [var.name]
}

run "prefix_without_a_slash_is_refused" {
  command = plan

  variables {
    prefix = "team-a"
  }

  expect_failures = [var.prefix]
}

run "prefix_that_leaves_the_bucket_is_refused" {
  command = plan

  variables {
    prefix = "/team-a/"
  }

  expect_failures = [var.prefix]
}

run "key_alias_is_refused" {
  command = plan

  variables {
    kms_key_arn = "alias/embeddings"
  }

  expect_failures = [var.kms_key_arn]
}

run "negative_days_are_refused" {
  command = plan

  variables {
    lifecycle_rules = { folders = [{ prefix = "gemma/objects/", expire_days = -1 }] }
  }

  expect_failures = [var.lifecycle_rules]
}

run "only_named_endpoints_reach_the_objects" {
  command = plan

  variables {
    network_access = {
      vpc_endpoint_ids = ["vpce-1"]
      exempt_role_arns = ["arn:aws:iam::123456789012:role/replication"]
    }
  }

  assert {
    condition = one([
      for one in jsondecode(aws_s3_bucket_policy.this[0].policy).Statement : one if one.Sid == "DenyOtherNetworks"
      ]) == {
      Sid       = "DenyOtherNetworks"
      Effect    = "Deny"
      Principal = "*"
      Action    = ["s3:GetObject", "s3:GetObjectVersion", "s3:PutObject", "s3:DeleteObject", "s3:DeleteObjectVersion"]
      Resource  = ["arn:aws:s3:::embeddings/*"]
      Condition = {
        StringNotEquals    = { "aws:SourceVpce" = ["vpce-1"] }
        BoolIfExists       = { "aws:PrincipalIsAWSService" = "false", "aws:ViaAWSService" = "false" }
        ArnNotLikeIfExists = { "aws:PrincipalArn" = ["arn:aws:iam::123456789012:role/replication"] }
      }
    }
    error_message = "other networks reach the objects, or who manages the bucket is locked out"
  }
}

run "from_anywhere_unless_asked" {
  command = plan

  assert {
    condition     = length(jsondecode(aws_s3_bucket_policy.this[0].policy).Statement) == 3
    error_message = "a statement that nobody asked for"
  }
}

run "own_statements_come_into_the_policy" {
  command = plan

  variables {
    additional_policy_statements = [
      {
        sid        = "DenyOthers"
        effect     = "Deny"
        actions    = ["s3:*"]
        conditions = { StringNotEqualsIfExists = { "aws:PrincipalOrgID" = ["o-1"] } }
      },
      {
        sid        = "Logs"
        effect     = "Allow"
        principals = { Service = ["logging.s3.amazonaws.com"] }
        actions    = ["s3:PutObject"]
        resources  = ["arn:aws:s3:::embeddings/logs/*"]
      },
    ]
  }

  assert {
    condition = slice(jsondecode(aws_s3_bucket_policy.this[0].policy).Statement, 3, 5) == [
      {
        Sid       = "DenyOthers"
        Effect    = "Deny"
        Principal = "*"
        Action    = ["s3:*"]
        Resource  = ["arn:aws:s3:::embeddings", "arn:aws:s3:::embeddings/*"]
        Condition = { StringNotEqualsIfExists = { "aws:PrincipalOrgID" = ["o-1"] } }
      },
      {
        Sid       = "Logs"
        Effect    = "Allow"
        Principal = { Service = ["logging.s3.amazonaws.com"] }
        Action    = ["s3:PutObject"]
        Resource  = ["arn:aws:s3:::embeddings/logs/*"]
      },
    ]
    error_message = "the statements are other ones"
  }
}

run "statement_that_lets_everybody_in_is_refused" {
  command = plan

  variables {
    additional_policy_statements = [{ sid = "A", effect = "Allow", principals = { AWS = ["*"] }, actions = ["s3:GetObject"] }]
  }

  expect_failures = [var.additional_policy_statements]
}

run "statement_that_allows_without_principals_is_refused" {
  command = plan

  variables {
    additional_policy_statements = [{ sid = "A", effect = "Allow", actions = ["s3:GetObject"], conditions = { StringEquals = { "aws:SourceVpc" = ["vpc-1"] } } }]
  }

  expect_failures = [var.additional_policy_statements]
}

run "statement_with_a_sid_of_the_module_is_refused" {
  command = plan

  variables {
    additional_policy_statements = [{ sid = "DenyReplacing", effect = "Deny", actions = ["s3:GetObject"] }]
  }

  expect_failures = [var.additional_policy_statements]
}

run "statement_with_another_effect_is_refused" {
  command = plan

  variables {
    additional_policy_statements = [{ sid = "A", effect = "allow", actions = ["s3:GetObject"] }]
  }

  expect_failures = [var.additional_policy_statements]
}

run "statement_on_another_service_is_refused" {
  command = plan

  variables {
    additional_policy_statements = [{ sid = "A", effect = "Deny", actions = ["kms:Decrypt"] }]
  }

  expect_failures = [var.additional_policy_statements]
}

run "statement_about_another_bucket_is_refused" {
  command = plan

  variables {
    additional_policy_statements = [{ sid = "A", effect = "Deny", actions = ["s3:GetObject"], resources = ["arn:aws:s3:::embeddings-of-others/*"] }]
  }

  expect_failures = [aws_s3_bucket_policy.this[0]]
}

run "no_endpoint_at_all_is_refused" {
  command = plan

  variables {
    network_access = { vpc_endpoint_ids = [] }
  }

  expect_failures = [var.network_access]
}

run "made_key_rotates_names_each_action_and_can_be_found" {
  command = plan

  variables {
    create_kms_key = true
    tags           = { Team = "vision" }
  }

  assert {
    condition     = output.corpus.kms_key_arn == "arn:aws:kms:eu-central-1:123456789012:key/made" && one(one(aws_s3_bucket_server_side_encryption_configuration.this[0].rule).apply_server_side_encryption_by_default).kms_master_key_id == output.corpus.kms_key_arn
    error_message = "the bucket is encrypted with another key"
  }
  assert {
    condition = alltrue([
      for action in jsondecode(aws_kms_key.this[0].policy).Statement[0].Action : !strcontains(action, "*")
    ]) && length(jsondecode(aws_kms_key.this[0].policy).Statement) == 1
    error_message = "a wildcard action in the key's policy, or a statement that nobody asked for"
  }
  assert {
    condition     = aws_kms_key.this[0].enable_key_rotation && aws_kms_key.this[0].deletion_window_in_days == 30
    error_message = "the key does not rotate, or is gone, and with it the corpus, before anybody notices"
  }
  assert {
    condition     = aws_kms_alias.this[0].name == "alias/embeddings" && aws_kms_key.this[0].tags == tomap({ Team = "vision" })
    error_message = "the key cannot be found by a name or by its tags"
  }
}

run "two_keys_are_refused" {
  command = plan

  variables {
    create_kms_key = true
    kms_key_arn    = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
  }

  expect_failures = [aws_kms_key.this[0]]
}

run "other_accounts_may_do_what_they_are_named_for" {
  command = plan

  variables {
    prefix         = "team-a/"
    create_kms_key = true
    account_access = { "210987654321" = ["read"], "321098765432" = ["replicate", "delete"] }
  }

  assert {
    condition = [
      for one in slice(jsondecode(aws_s3_bucket_policy.this[0].policy).Statement, 3, 8) :
      [one.Sid, one.Principal.AWS, one.Action, one.Resource]
      ] == [
      ["List210987654321", "arn:aws:iam::210987654321:root", ["s3:ListBucket"], ["arn:aws:s3:::embeddings"]],
      ["List321098765432", "arn:aws:iam::321098765432:root", ["s3:ListBucket"], ["arn:aws:s3:::embeddings"]],
      ["Versioning321098765432", "arn:aws:iam::321098765432:root", ["s3:GetBucketVersioning"], ["arn:aws:s3:::embeddings"]],
      ["Objects210987654321", "arn:aws:iam::210987654321:root", ["s3:GetObject"], ["arn:aws:s3:::embeddings/team-a/*"]],
      ["Objects321098765432", "arn:aws:iam::321098765432:root", [
        "s3:DeleteObject", "s3:ReplicateObject", "s3:ReplicateDelete", "s3:ReplicateTags", "s3:ObjectOwnerOverrideToBucketOwner",
      ], ["arn:aws:s3:::embeddings/team-a/*"]],
    ]
    error_message = "another account may do other things"
  }
  assert {
    condition     = length(jsondecode(aws_s3_bucket_policy.this[0].policy).Statement) == 8
    error_message = "a statement that nobody asked for"
  }
  assert {
    condition = [
      for one in slice(jsondecode(aws_kms_key.this[0].policy).Statement, 1, 3) :
      [one.Principal.AWS, one.Action, one.Condition.StringEquals["kms:ViaService"]]
      ] == [
      ["arn:aws:iam::210987654321:root", ["kms:Decrypt"], "s3.eu-central-1.amazonaws.com"],
      ["arn:aws:iam::321098765432:root", ["kms:Encrypt", "kms:GenerateDataKey"], "s3.eu-central-1.amazonaws.com"],
    ]
    error_message = "another account uses the key for other things"
  }
}

run "unknown_right_is_refused" {
  command = plan

  variables {
    account_access = { "210987654321" = ["admin"] }
  }

  expect_failures = [var.account_access]
}

run "existing_bucket_is_handed_on_and_left_as_it_is" {
  command = plan

  override_data {
    target = data.aws_s3_bucket.existing[0]
    values = { bucket = "embeddings", region = "eu-central-1" }
  }

  variables {
    create      = false
    prefix      = "team-a/"
    kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/theirs"
    access_log  = { bucket = "logs" }
  }

  assert {
    condition     = length(aws_s3_bucket.this) + length(aws_s3_bucket_policy.this) + length(aws_s3_bucket_versioning.this) + length(aws_s3_bucket_lifecycle_configuration.this) + length(aws_s3_bucket_logging.this) + length(aws_s3_bucket_server_side_encryption_configuration.this) + length(aws_s3_bucket_public_access_block.this) + length(aws_s3_bucket_ownership_controls.this) == 0
    error_message = "something of the existing bucket is changed"
  }
  assert {
    condition     = output.corpus.name == "embeddings" && output.corpus.kms_key_arn == "arn:aws:kms:eu-central-1:123456789012:key/theirs" && jsondecode(output.ec_transfer_config["ec_both"]).ec_connector_extra_config.bucket == "embeddings"
    error_message = "another bucket is handed on"
  }
}

run "existing_bucket_of_another_region_is_refused" {
  command = plan

  override_data {
    target = data.aws_s3_bucket.existing[0]
    values = { bucket = "embeddings", region = "us-east-1" }
  }

  variables {
    create = false
  }

  expect_failures = [data.aws_s3_bucket.existing]
}
