# SPDX-License-Identifier: Apache-2.0
# Copies of one written corpus in the regions that read it. A bucket has one replication
# configuration, so all destinations stand here.

data "aws_partition" "current" {}

data "aws_caller_identity" "current" {}

locals {
  encrypted = var.source_corpus.kms_key_arn != null
  # By name, so that a new destination does not renumber the others.
  names = sort(keys(var.destinations))
  # Account of each destination that is another one; S3 lets its bucket's owner own the copies there.
  elsewhere = {
    for name, corpus in var.destinations : name => corpus.account_id
    if corpus.account_id != null && corpus.account_id != data.aws_caller_identity.current.account_id
  }

  batch_name = "${var.name}-batch"
  # Written out, so that a plan shows the job.
  batch_role_arn = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:role/${local.batch_name}"

  statements = concat(
    [
      {
        Sid      = "ReadConfiguration"
        Effect   = "Allow"
        Action   = ["s3:GetReplicationConfiguration", "s3:ListBucket"]
        Resource = [var.source_corpus.arn]
      },
      {
        Sid    = "ReadVersions"
        Effect = "Allow"
        Action = [
          "s3:GetObjectVersionForReplication",
          "s3:GetObjectVersionAcl",
          "s3:GetObjectVersionTagging",
        ]
        Resource = ["${var.source_corpus.arn}/${var.source_corpus.prefix}*"]
      },
      {
        Sid      = "WriteReplicas"
        Effect   = "Allow"
        Action   = concat(["s3:ReplicateObject", "s3:ReplicateTags"], var.delete_markers ? ["s3:ReplicateDelete"] : [])
        Resource = [for name in local.names : "${var.destinations[name].arn}/${var.source_corpus.prefix}*"]
      },
    ],
    [
      for names in [sort(keys(local.elsewhere))] : {
        Sid      = "HandOverReplicas"
        Effect   = "Allow"
        Action   = ["s3:ObjectOwnerOverrideToBucketOwner"]
        Resource = [for name in names : "${var.destinations[name].arn}/${var.source_corpus.prefix}*"]
      } if length(names) > 0
    ],
    [
      for key in [var.source_corpus.kms_key_arn] : {
        Sid      = "Decrypt"
        Effect   = "Allow"
        Action   = ["kms:Decrypt"]
        Resource = [key]
        Condition = {
          StringEquals = { "kms:ViaService" = "s3.${var.source_corpus.region}.${data.aws_partition.current.dns_suffix}" }
          StringLike   = { "kms:EncryptionContext:aws:s3:arn" = [var.source_corpus.arn, "${var.source_corpus.arn}/*"] }
        }
      } if local.encrypted
    ],
    [
      for index, name in local.names : {
        Sid      = "Encrypt${index}"
        Effect   = "Allow"
        Action   = ["kms:Encrypt", "kms:GenerateDataKey"]
        Resource = [var.destinations[name].kms_key_arn]
        Condition = {
          StringEquals = { "kms:ViaService" = "s3.${var.destinations[name].region}.${data.aws_partition.current.dns_suffix}" }
          StringLike   = { "kms:EncryptionContext:aws:s3:arn" = [var.destinations[name].arn, "${var.destinations[name].arn}/*"] }
        }
        # Of a source without a key, too: its copies take the default encryption of where they go.
      } if var.destinations[name].kms_key_arn != null
    ],
  )
}

resource "aws_iam_role" "this" {
  name = var.name
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "s3.amazonaws.com" }
      Action    = ["sts:AssumeRole"]
      # For this bucket of this account. Amazon does not say whether S3 names them when it replicates,
      # and a condition on what is not named would end replication: hence only if they are named.
      Condition = {
        StringEqualsIfExists = { "aws:SourceAccount" = data.aws_caller_identity.current.account_id }
        ArnLikeIfExists      = { "aws:SourceArn" = var.source_corpus.arn }
      }
    }]
  })
  tags = var.tags
}

resource "aws_iam_role_policy" "this" {
  name   = var.name
  role   = aws_iam_role.this.id
  policy = jsonencode({ Version = "2012-10-17", Statement = local.statements })
}

resource "aws_s3_bucket_replication_configuration" "this" {
  bucket = var.source_corpus.name
  role   = aws_iam_role.this.arn

  dynamic "rule" {
    for_each = local.names

    content {
      id       = rule.value
      status   = "Enabled"
      priority = rule.key

      filter {
        prefix = var.source_corpus.prefix
      }

      delete_marker_replication {
        status = var.delete_markers ? "Enabled" : "Disabled"
      }

      dynamic "source_selection_criteria" {
        for_each = local.encrypted ? [true] : []

        content {
          sse_kms_encrypted_objects {
            status = "Enabled"
          }
        }
      }

      destination {
        bucket        = var.destinations[rule.value].arn
        storage_class = "STANDARD"
        account       = lookup(local.elsewhere, rule.value, null)

        dynamic "access_control_translation" {
          for_each = contains(keys(local.elsewhere), rule.value) ? ["Destination"] : []

          content {
            owner = access_control_translation.value
          }
        }

        dynamic "encryption_configuration" {
          for_each = local.encrypted ? [var.destinations[rule.value].kms_key_arn] : []

          content {
            replica_kms_key_id = encryption_configuration.value
          }
        }

        metrics {
          status = "Enabled"

          dynamic "event_threshold" {
            for_each = var.time_control ? [15] : []

            content {
              minutes = event_threshold.value
            }
          }
        }

        dynamic "replication_time" {
          for_each = var.time_control ? [15] : []

          content {
            status = "Enabled"

            time {
              minutes = replication_time.value
            }
          }
        }
      }
    }
  }

  lifecycle {
    precondition {
      condition     = alltrue([for corpus in values(var.destinations) : corpus.region != var.source_corpus.region])
      error_message = "A destination is in the region of the source (${var.source_corpus.region}); give each bucket a region of its own."
    }
    precondition {
      condition     = !local.encrypted || alltrue([for corpus in values(var.destinations) : corpus.kms_key_arn != null])
      error_message = "The source is encrypted with a KMS key, so each destination needs a key of its own region: set `kms_key_arn` of its bucket."
    }
    precondition {
      condition     = alltrue([for corpus in values(var.destinations) : corpus.prefix == var.source_corpus.prefix])
      error_message = "Replication keeps names, so all buckets need the same `prefix` as the source (\"${var.source_corpus.prefix}\")."
    }
  }

  depends_on = [aws_iam_role_policy.this]
}

# What was there before the rules is copied by a job of S3 Batch Operations, which Terraform cannot
# start: here are its role and its request. The copies themselves are made by the role above.
resource "aws_iam_role" "batch" {
  count = var.batch_copy ? 1 : 0

  name = local.batch_name
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "batchoperations.s3.amazonaws.com" }
      Action    = ["sts:AssumeRole"]
      Condition = { StringEqualsIfExists = { "aws:SourceAccount" = data.aws_caller_identity.current.account_id } }
    }]
  })
  tags = var.tags
}

resource "aws_iam_role_policy" "batch" {
  count = var.batch_copy ? 1 : 0

  name = local.batch_name
  role = aws_iam_role.batch[0].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid      = "CopyWhatIsThere"
        Effect   = "Allow"
        Action   = ["s3:InitiateReplication"]
        Resource = ["${var.source_corpus.arn}/${var.source_corpus.prefix}*"]
      },
      {
        # S3 lists the objects for the job by an inventory of its own.
        Sid      = "ListWhatIsThere"
        Effect   = "Allow"
        Action   = ["s3:GetReplicationConfiguration", "s3:PutInventoryConfiguration"]
        Resource = [var.source_corpus.arn]
      },
    ]
  })
}
