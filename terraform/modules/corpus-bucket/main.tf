# SPDX-License-Identifier: Apache-2.0
# A bucket for one corpus: private, TLS only, versioned, encrypted, write-once. Or one that is there
# already, which the module then only looks up.

data "aws_partition" "current" {}

data "aws_caller_identity" "current" {}

# The region: `data.aws_region` has no attribute for it that is in 5.x and not deprecated in 6.x.
data "aws_service" "s3" {
  service_id = "s3"
}

data "aws_s3_bucket" "existing" {
  count = var.create ? 0 : 1

  bucket = var.name

  lifecycle {
    postcondition {
      condition     = self.region == local.region
      error_message = "The bucket ${var.name} is in ${self.region}, and the provider in ${local.region}: hand in a provider of the bucket's region."
    }
  }
}

locals {
  # Written out, so that policies are known when they are planned.
  arn    = "arn:${data.aws_partition.current.partition}:s3:::${var.name}"
  region = data.aws_service.s3.region

  # What format() answers is never null. Of an ARN that the provider will tell, a plan does not know
  # that, and would hide the rules and statements that depend on there being one.
  kms_key_arn = var.create_kms_key ? format("%s", aws_kms_key.this[0].arn) : var.kms_key_arn

  corpus = {
    name        = var.create ? aws_s3_bucket.this[0].bucket : data.aws_s3_bucket.existing[0].bucket
    arn         = local.arn
    region      = local.region
    prefix      = var.prefix
    kms_key_arn = local.kms_key_arn
    account_id  = data.aws_caller_identity.current.account_id
  }

  # What a right of `account_access` is, for objects and for the key.
  object_actions = {
    read      = ["s3:GetObject"]
    add       = ["s3:PutObject", "s3:AbortMultipartUpload"]
    delete    = ["s3:DeleteObject"]
    replicate = ["s3:ReplicateObject", "s3:ReplicateDelete", "s3:ReplicateTags", "s3:ObjectOwnerOverrideToBucketOwner"]
  }
  key_actions = {
    read      = ["kms:Decrypt"]
    add       = ["kms:Decrypt", "kms:GenerateDataKey"]
    delete    = []
    replicate = ["kms:Encrypt", "kms:GenerateDataKey"]
  }
  # In order of the ids and of the rights, so that a plan does not shuffle statements.
  accounts = [
    for id in sort(keys(var.account_access)) : {
      id      = id
      root    = "arn:${data.aws_partition.current.partition}:iam::${id}:root"
      objects = flatten([for right in sort(var.account_access[id]) : local.object_actions[right]])
      key     = distinct(flatten([for right in sort(var.account_access[id]) : local.key_actions[right]]))
    }
  ]

  # All that s3ec writes is put-if-absent: embeddings, records of widths, the files of the manifest
  # and of the catalogue.
  immutable = [
    for below in ["objects/*", "modality/*", "manifest/*", "catalog/*", "namespace.json"] :
    "${local.arn}/${var.prefix}*/${below}"
  ]

  policy_statements = concat(
    [
      {
        Sid       = "DenyPlainHttp"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:*"
        Resource  = [local.arn, "${local.arn}/*"]
        Condition = { Bool = { "aws:SecureTransport" = "false" } }
      },
      {
        Sid       = "DenyOldTls"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:*"
        Resource  = [local.arn, "${local.arn}/*"]
        Condition = { NumericLessThan = { "s3:TlsVersion" = "1.2" } }
      },
    ],
    [
      for statement in [{
        Sid       = "DenyReplacing"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:PutObject"
        Resource  = local.immutable
        Condition = {
          Null = { "s3:if-none-match" = "true" }
          # Parts of a multipart upload cannot carry the header; what completes the upload can.
          Bool = { "s3:ObjectCreationOperation" = "true" }
        }
      }] : statement if var.write_once
    ],
    [
      for access in var.network_access == null ? [] : [var.network_access] : {
        Sid       = "DenyOtherNetworks"
        Effect    = "Deny"
        Principal = "*"
        # Contents only. Listing a bucket is how Terraform looks whether it is there, from wherever
        # it runs.
        Action   = ["s3:GetObject", "s3:GetObjectVersion", "s3:PutObject", "s3:DeleteObject", "s3:DeleteObjectVersion"]
        Resource = ["${local.arn}/*"]
        Condition = merge(
          {
            StringNotEquals = { "aws:SourceVpce" = access.vpc_endpoint_ids }
            # S3 itself, where it expires or replicates, comes from no endpoint.
            BoolIfExists = { "aws:PrincipalIsAWSService" = "false", "aws:ViaAWSService" = "false" }
          },
          length(access.exempt_role_arns) == 0 ? {} : {
            ArnNotLikeIfExists = { "aws:PrincipalArn" = access.exempt_role_arns }
          },
        )
      }
    ],
    [
      # An account, and not its roles by name: S3 refuses a policy that names a role before it is made.
      # Which roles it are is said by that account's own policies.
      for one in local.accounts : merge(
        {
          Sid       = "List${one.id}"
          Effect    = "Allow"
          Principal = { AWS = one.root }
          Action    = ["s3:ListBucket"]
          Resource  = [local.arn]
        },
        var.prefix == "" ? {} : { Condition = { StringLike = { "s3:prefix" = ["${var.prefix}*"] } } },
      ) if length(setintersection(var.account_access[one.id], ["read", "delete"])) > 0
    ],
    [
      # S3 looks whether a target of replication has versions.
      for one in local.accounts : {
        Sid       = "Versioning${one.id}"
        Effect    = "Allow"
        Principal = { AWS = one.root }
        Action    = ["s3:GetBucketVersioning"]
        Resource  = [local.arn]
      } if contains(var.account_access[one.id], "replicate")
    ],
    [
      for one in local.accounts : {
        Sid       = "Objects${one.id}"
        Effect    = "Allow"
        Principal = { AWS = one.root }
        Action    = one.objects
        Resource  = ["${local.arn}/${var.prefix}*"]
      }
    ],
    [
      for one in var.additional_policy_statements : merge(
        {
          Sid    = one.sid
          Effect = one.effect
          # By way of text, since "*" and an object are of different types.
          Principal = jsondecode(one.principals == null ? "\"*\"" : jsonencode(one.principals))
          Action    = one.actions
          Resource  = one.resources == null ? [local.arn, "${local.arn}/*"] : one.resources
        },
        length(one.conditions) == 0 ? {} : { Condition = one.conditions },
      )
    ],
  )
}

resource "aws_kms_key" "this" {
  count = var.create_kms_key ? 1 : 0

  description             = "Embeddings in ${var.name}"
  enable_key_rotation     = true
  deletion_window_in_days = var.key_deletion_days
  tags                    = var.tags

  # In a key's own policy the resource * is that key. Who may use it stands in IAM policies, which
  # the first statement lets count: without it nobody but the key's maker could.
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      [{
        Sid       = "IamPoliciesCount"
        Effect    = "Allow"
        Principal = { AWS = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:root" }
        Action = [
          "kms:CancelKeyDeletion",
          "kms:CreateAlias",
          "kms:Decrypt",
          "kms:DeleteAlias",
          "kms:DescribeKey",
          "kms:DisableKey",
          "kms:EnableKey",
          "kms:EnableKeyRotation",
          "kms:Encrypt",
          "kms:GenerateDataKey",
          "kms:GetKeyPolicy",
          "kms:GetKeyRotationStatus",
          "kms:ListAliases",
          "kms:ListResourceTags",
          "kms:PutKeyPolicy",
          "kms:ScheduleKeyDeletion",
          "kms:TagResource",
          "kms:UntagResource",
          "kms:UpdateAlias",
          "kms:UpdateKeyDescription",
        ]
        Resource = "*"
      }],
      [
        for one in local.accounts : {
          Sid       = "Account${one.id}"
          Effect    = "Allow"
          Principal = { AWS = one.root }
          Action    = one.key
          Resource  = "*"
          Condition = { StringEquals = { "kms:ViaService" = "s3.${local.region}.${data.aws_partition.current.dns_suffix}" } }
        } if length(one.key) > 0
      ],
    )
  })

  lifecycle {
    precondition {
      condition     = var.create && var.kms_key_arn == null
      error_message = "`create_kms_key` is for a bucket that the module makes, and without `kms_key_arn`: there is one key."
    }
  }
}

resource "aws_kms_alias" "this" {
  count = var.create_kms_key ? 1 : 0

  name          = "alias/${var.name}"
  target_key_id = aws_kms_key.this[0].key_id
}

resource "aws_s3_bucket" "this" {
  count = var.create ? 1 : 0

  # checkov:skip=CKV_AWS_144: copies in other regions are the replication module's; one region needs none, embeddings can be encoded again
  bucket        = var.name
  force_destroy = var.force_destroy
  tags          = var.tags
}

resource "aws_s3_bucket_ownership_controls" "this" {
  count = var.create ? 1 : 0

  bucket = aws_s3_bucket.this[0].id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_public_access_block" "this" {
  count = var.create ? 1 : 0

  bucket                  = aws_s3_bucket.this[0].id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_versioning" "this" {
  count = var.create ? 1 : 0

  bucket = aws_s3_bucket.this[0].id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  count = var.create ? 1 : 0

  bucket = aws_s3_bucket.this[0].id

  rule {
    # One call of KMS per bucket key instead of one per object.
    bucket_key_enabled = local.kms_key_arn != null

    apply_server_side_encryption_by_default {
      sse_algorithm     = local.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = local.kms_key_arn
    }
  }
}

resource "aws_s3_bucket_policy" "this" {
  count = var.create ? 1 : 0

  bucket = aws_s3_bucket.this[0].id
  policy = jsonencode({ Version = "2012-10-17", Statement = local.policy_statements })

  lifecycle {
    precondition {
      condition = alltrue(flatten([
        for one in var.additional_policy_statements : [
          for resource in one.resources == null ? [] : one.resources :
          resource == local.arn || startswith(resource, "${local.arn}/")
        ]
      ]))
      error_message = "A bucket's policy is about that bucket: each of `resources` in `additional_policy_statements` is ${local.arn} or begins with ${local.arn}/."
    }
  }

  # A policy that S3 takes for public is refused while the block is being set.
  depends_on = [aws_s3_bucket_public_access_block.this]
}

resource "aws_s3_bucket_lifecycle_configuration" "this" {
  # checkov:skip=CKV_AWS_300: the rule "tidy" does so, below the prefix, where alone s3ec writes; checkov sees only the last dynamic rule
  count = var.create && var.lifecycle_rules != null ? 1 : 0

  bucket = aws_s3_bucket.this[0].id

  rule {
    id     = "tidy"
    status = "Enabled"

    filter {
      prefix = var.prefix
    }

    abort_incomplete_multipart_upload {
      days_after_initiation = var.lifecycle_rules.abort_uploads_days
    }

    noncurrent_version_expiration {
      noncurrent_days = var.lifecycle_rules.noncurrent_days
    }

    expiration {
      expired_object_delete_marker = true
    }
  }

  # What is there is expired and moved below folders that the caller names, none of which is a
  # manifest's: see the variable's validation.
  dynamic "rule" {
    for_each = var.lifecycle_rules.folders

    content {
      id     = rule.value.prefix
      status = "Enabled"

      filter {
        prefix = rule.value.prefix
      }

      dynamic "expiration" {
        for_each = rule.value.expire_days == null ? [] : [rule.value.expire_days]

        content {
          days = expiration.value
        }
      }

      dynamic "transition" {
        for_each = rule.value.intelligent_tiering_days == null ? [] : [rule.value.intelligent_tiering_days]

        content {
          days          = transition.value
          storage_class = "INTELLIGENT_TIERING"
        }
      }
    }
  }

  # Without versions there is nothing noncurrent to expire.
  depends_on = [aws_s3_bucket_versioning.this]
}

resource "aws_s3_bucket_logging" "this" {
  count = var.create && var.access_log != null ? 1 : 0

  bucket        = aws_s3_bucket.this[0].id
  target_bucket = var.access_log.bucket
  target_prefix = var.access_log.prefix
}

module "transfer_config" {
  source = "../transfer-config"

  home = local.corpus
}
