# SPDX-License-Identifier: Apache-2.0

mock_provider "aws" {
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
      aws_s3_bucket_public_access_block.this.block_public_acls,
      aws_s3_bucket_public_access_block.this.block_public_policy,
      aws_s3_bucket_public_access_block.this.ignore_public_acls,
      aws_s3_bucket_public_access_block.this.restrict_public_buckets,
    ])
    error_message = "public access is not blocked in all four ways"
  }
  assert {
    condition     = aws_s3_bucket_versioning.this.versioning_configuration[0].status == "Enabled"
    error_message = "versions are off"
  }
  assert {
    condition     = aws_s3_bucket_ownership_controls.this.rule[0].object_ownership == "BucketOwnerEnforced"
    error_message = "ACLs are on"
  }
  assert {
    condition     = !aws_s3_bucket.this.force_destroy
    error_message = "destroy would delete a corpus"
  }
  assert {
    condition     = one(aws_s3_bucket_server_side_encryption_configuration.this.rule).apply_server_side_encryption_by_default[0].sse_algorithm == "AES256"
    error_message = "not encrypted with SSE-S3"
  }
}

run "plain_http_and_old_tls_are_denied" {
  command = plan

  assert {
    condition = anytrue([
      for one in jsondecode(aws_s3_bucket_policy.this.policy).Statement :
      one.Effect == "Deny" && try(one.Condition.Bool["aws:SecureTransport"], "") == "false"
      && contains(one.Resource, "arn:aws:s3:::embeddings") && contains(one.Resource, "arn:aws:s3:::embeddings/*")
    ])
    error_message = "plain http is not denied for the bucket and its objects"
  }
  assert {
    condition = anytrue([
      for one in jsondecode(aws_s3_bucket_policy.this.policy).Statement :
      one.Effect == "Deny" && try(one.Condition.NumericLessThan["s3:TlsVersion"], "") == "1.2"
    ])
    error_message = "TLS 1.1 is not denied"
  }
  assert {
    condition     = alltrue([for one in jsondecode(aws_s3_bucket_policy.this.policy).Statement : one.Effect == "Deny"])
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
      for one in jsondecode(aws_s3_bucket_policy.this.policy).Statement : one if one.Sid == "DenyReplacing"
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
    condition     = !strcontains(aws_s3_bucket_policy.this.policy, "if-none-match")
    error_message = "the statement is still there"
  }
}

run "kms_comes_with_a_bucket_key_and_with_its_settings" {
  command = plan

  variables {
    kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
    prefix      = "team-a/corpus/"
  }

  assert {
    condition     = one(aws_s3_bucket_server_side_encryption_configuration.this.rule).bucket_key_enabled
    error_message = "one KMS call per object"
  }
  assert {
    condition = output.corpus == {
      name        = "embeddings"
      arn         = "arn:aws:s3:::embeddings"
      region      = "eu-central-1"
      prefix      = "team-a/corpus/"
      kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
    }
    error_message = "the corpus output is another one"
  }
  assert {
    condition = jsondecode(output.ec_transfer_config["ec_consumer"]) == {
      ec_connector = "S3ECConnector"
      ec_role      = "ec_consumer"
      ec_connector_extra_config = {
        bucket         = "embeddings"
        region         = "eu-central-1"
        prefix         = "team-a/corpus"
        sse            = "aws:kms"
        sse_kms_key_id = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
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

run "lifecycle_follows_its_days" {
  command = plan

  variables {
    prefix          = "team-a/"
    write_once      = false
    lifecycle_rules = { expire_days = 90, intelligent_tiering_days = 0, noncurrent_days = 1 }
    access_log      = { bucket = "logs" }
  }

  assert {
    condition     = [for rule in aws_s3_bucket_lifecycle_configuration.this[0].rule : rule.id] == ["tidy", "expire", "intelligent-tiering"]
    error_message = "not the rules that were asked for"
  }
  assert {
    condition     = alltrue([for rule in aws_s3_bucket_lifecycle_configuration.this[0].rule : one(rule.filter).prefix == "team-a/"])
    error_message = "a rule reaches beyond the prefix"
  }
  assert {
    condition     = aws_s3_bucket_lifecycle_configuration.this[0].rule[1].expiration[0].days == 90
    error_message = "expires after other days"
  }
  assert {
    condition     = aws_s3_bucket_logging.this[0].target_bucket == "logs"
    error_message = "no access log"
  }
}

run "no_rule_deletes_the_manifest_of_a_corpus" {
  command = plan

  variables {
    lifecycle_rules = { expire_days = 90 }
  }

  expect_failures = [aws_s3_bucket_lifecycle_configuration.this]
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
    lifecycle_rules = { expire_days = -1 }
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
      for one in jsondecode(aws_s3_bucket_policy.this.policy).Statement : one if one.Sid == "DenyOtherNetworks"
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
    condition     = length(jsondecode(aws_s3_bucket_policy.this.policy).Statement) == 3
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
    condition = slice(jsondecode(aws_s3_bucket_policy.this.policy).Statement, 3, 5) == [
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

  expect_failures = [aws_s3_bucket_policy.this]
}

run "no_endpoint_at_all_is_refused" {
  command = plan

  variables {
    network_access = { vpc_endpoint_ids = [] }
  }

  expect_failures = [var.network_access]
}
