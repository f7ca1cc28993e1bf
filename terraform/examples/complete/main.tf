# SPDX-License-Identifier: Apache-2.0
# One region with everything that the modules offer: a key, an endpoint through which alone the
# corpus is read, access logs, an organisation's own statement, roles for pods and people, alarms.

provider "aws" {
  region = var.region

  default_tags {
    tags = var.tags
  }
}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

locals {
  account_arn = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:root"
  # Written out: the bucket's policy names the role, and the role's policy the bucket.
  maintainer_role_arn = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:role/${var.name}-maintainer"
  # What format() answers is never null, which a plan does not know of an ARN that it does not know.
  key_arn = format("%s", aws_kms_key.this.arn)
}

resource "aws_kms_key" "this" {
  description             = "Embeddings of ${var.name}"
  enable_key_rotation     = true
  deletion_window_in_days = 30

  # In a key's own policy the resource * is that key. Who may use it stands in IAM policies, which
  # this statement lets count: without it nobody but the key's maker could.
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "IamPoliciesCount"
      Effect    = "Allow"
      Principal = { AWS = local.account_arn }
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
    }]
  })
}

resource "aws_kms_alias" "this" {
  name          = "alias/${var.name}"
  target_key_id = aws_kms_key.this.key_id
}

# Where S3 writes who asked for what. The module fits: private, TLS only, and nothing is write-once
# below a prefix that no corpus has. S3 encrypts its logs with its own keys only.
module "logs" {
  source = "../../modules/corpus-bucket"

  name            = "${var.name}-logs"
  write_once      = false
  lifecycle_rules = { expire_days = var.log_days, noncurrent_days = 1 }

  additional_policy_statements = [{
    sid        = "AccessLogs"
    effect     = "Allow"
    principals = { Service = ["logging.s3.amazonaws.com"] }
    actions    = ["s3:PutObject"]
    resources  = ["arn:${data.aws_partition.current.partition}:s3:::${var.name}-logs/*"]
    conditions = {
      StringEquals = { "aws:SourceAccount" = [data.aws_caller_identity.current.account_id] }
      ArnLike      = { "aws:SourceArn" = ["arn:${data.aws_partition.current.partition}:s3:::${var.name}"] }
    }
  }]
}

module "corpus" {
  source = "../../modules/corpus-bucket"

  name        = var.name
  prefix      = var.prefix
  kms_key_arn = local.key_arn
  access_log  = { bucket = module.logs.access_log_bucket, prefix = "corpus/" }

  lifecycle_rules = { intelligent_tiering_days = 30 }

  network_access = {
    vpc_endpoint_ids = [module.network.vpc_endpoint_id]
    exempt_role_arns = [local.maintainer_role_arn]
  }

  additional_policy_statements = [
    for id in var.organization_id == null ? [] : [var.organization_id] : {
      sid     = "DenyOtherOrganizations"
      effect  = "Deny"
      actions = ["s3:*"]
      conditions = {
        StringNotEqualsIfExists = { "aws:PrincipalOrgID" = [id] }
        BoolIfExists            = { "aws:PrincipalIsAWSService" = ["false"] }
      }
    }
  ]
}

module "network" {
  source = "../../modules/network"

  vpc_id            = var.vpc_id
  route_table_ids   = var.route_table_ids
  corpora           = [module.corpus.corpus]
  other_bucket_arns = ["arn:${data.aws_partition.current.partition}:s3:::prod-${var.region}-starport-layer-bucket"]
}

module "engines" {
  source = "../../modules/access"

  name    = "${var.name}-engines"
  role    = "producer"
  corpora = [module.corpus.corpus]
  irsa    = var.irsa
}

module "maintainer" {
  source = "../../modules/access"

  name             = "${var.name}-maintainer"
  role             = "maintainer"
  corpora          = [module.corpus.corpus]
  assume_role_arns = var.maintainer_arns
}

module "observability" {
  source = "../../modules/observability"

  name          = var.name
  corpus        = module.corpus.corpus
  alarm_actions = var.alarm_actions
}
