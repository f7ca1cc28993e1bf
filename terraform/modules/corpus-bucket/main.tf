# SPDX-License-Identifier: Apache-2.0
# A bucket for one corpus: private, TLS only, versioned, encrypted, write-once.

data "aws_partition" "current" {}

# The region: `data.aws_region` has no attribute for it that is in 5.x and not deprecated in 6.x.
data "aws_service" "s3" {
  service_id = "s3"
}

locals {
  # Written out, so that policies are known when they are planned.
  arn    = "arn:${data.aws_partition.current.partition}:s3:::${var.name}"
  region = data.aws_service.s3.region

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

resource "aws_s3_bucket" "this" {
  # checkov:skip=CKV_AWS_144: copies in other regions are the replication module's; one region needs none, embeddings can be encoded again
  bucket        = var.name
  force_destroy = var.force_destroy
  tags          = var.tags
}

resource "aws_s3_bucket_ownership_controls" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket                  = aws_s3_bucket.this.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_versioning" "this" {
  bucket = aws_s3_bucket.this.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    # One call of KMS per bucket key instead of one per object.
    bucket_key_enabled = var.kms_key_arn != null

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
  }
}

resource "aws_s3_bucket_policy" "this" {
  bucket = aws_s3_bucket.this.id
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
  count = var.lifecycle_rules == null ? 0 : 1

  bucket = aws_s3_bucket.this.id

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

    dynamic "expiration" {
      for_each = var.lifecycle_rules.expire_days == null ? [true] : []

      content {
        expired_object_delete_marker = true
      }
    }
  }

  dynamic "rule" {
    for_each = var.lifecycle_rules.expire_days == null ? [] : [var.lifecycle_rules.expire_days]

    content {
      id     = "expire"
      status = "Enabled"

      filter {
        prefix = var.prefix
      }

      expiration {
        days = rule.value
      }
    }
  }

  dynamic "rule" {
    for_each = var.lifecycle_rules.intelligent_tiering_days == null ? [] : [var.lifecycle_rules.intelligent_tiering_days]

    content {
      id     = "intelligent-tiering"
      status = "Enabled"

      filter {
        prefix = var.prefix
      }

      transition {
        days          = rule.value
        storage_class = "INTELLIGENT_TIERING"
      }
    }
  }

  lifecycle {
    precondition {
      condition     = try(var.lifecycle_rules.expire_days, null) == null || !var.write_once
      error_message = "`expire_days` would delete the manifest of a corpus, too. Delete what is old by `s3ec gc --older-than`; for a bucket of logs set `write_once = false`."
    }
  }

  # Without versions there is nothing noncurrent to expire.
  depends_on = [aws_s3_bucket_versioning.this]
}

resource "aws_s3_bucket_logging" "this" {
  count = var.access_log == null ? 0 : 1

  bucket        = aws_s3_bucket.this.id
  target_bucket = var.access_log.bucket
  target_prefix = var.access_log.prefix
}
