# SPDX-License-Identifier: Apache-2.0
# One region writes, two read their own copy. Everything is encrypted with a key of its region.

provider "aws" {
  region = var.writer_region
}

provider "aws" {
  alias  = "us"
  region = var.reader_regions.us
}

provider "aws" {
  alias  = "ap"
  region = var.reader_regions.ap
}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

locals {
  # What format() answers is never null. Of an ARN that the provider will tell, a plan does not know
  # that, and would hide the rules and statements that depend on there being one.
  key_arns = {
    writer = format("%s", aws_kms_key.writer.arn)
    us     = format("%s", aws_kms_key.us.arn)
    ap     = format("%s", aws_kms_key.ap.arn)
  }

  # In a key's own policy the resource * is that key. Who may use it stands in IAM policies, which
  # this statement lets count: without it nobody but the key's maker could.
  key_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
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
        "kms:UpdateKeyDescription",
      ]
      Resource = "*"
    }]
  })
}

resource "aws_kms_key" "writer" {
  description             = "Embeddings of ${var.name} in ${var.writer_region}"
  enable_key_rotation     = true
  deletion_window_in_days = var.key_deletion_days
  policy                  = local.key_policy
  tags                    = var.tags
}

resource "aws_kms_alias" "writer" {
  name          = "alias/${var.name}"
  target_key_id = aws_kms_key.writer.key_id
}

resource "aws_kms_key" "us" {
  provider = aws.us

  description             = "Embeddings of ${var.name} in ${var.reader_regions.us}"
  enable_key_rotation     = true
  deletion_window_in_days = var.key_deletion_days
  policy                  = local.key_policy
  tags                    = var.tags
}

resource "aws_kms_alias" "us" {
  provider = aws.us

  name          = "alias/${var.name}"
  target_key_id = aws_kms_key.us.key_id
}

resource "aws_kms_key" "ap" {
  provider = aws.ap

  description             = "Embeddings of ${var.name} in ${var.reader_regions.ap}"
  enable_key_rotation     = true
  deletion_window_in_days = var.key_deletion_days
  policy                  = local.key_policy
  tags                    = var.tags
}

resource "aws_kms_alias" "ap" {
  provider = aws.ap

  name          = "alias/${var.name}"
  target_key_id = aws_kms_key.ap.key_id
}

module "writer" {
  source = "../../modules/corpus-bucket"

  name        = var.name
  prefix      = var.prefix
  tags        = var.tags
  kms_key_arn = local.key_arns.writer
}

module "us" {
  source    = "../../modules/corpus-bucket"
  providers = { aws = aws.us }

  name        = "${var.name}-us"
  prefix      = var.prefix
  tags        = var.tags
  kms_key_arn = local.key_arns.us
}

module "ap" {
  source    = "../../modules/corpus-bucket"
  providers = { aws = aws.ap }

  name        = "${var.name}-ap"
  prefix      = var.prefix
  tags        = var.tags
  kms_key_arn = local.key_arns.ap
}

module "replication" {
  source = "../../modules/replication"

  name          = "${var.name}-replication"
  source_corpus = module.writer.corpus
  destinations  = { us = module.us.corpus, ap = module.ap.corpus }
  tags          = var.tags
}

module "producer" {
  source = "../../modules/access"

  name         = "${var.name}-producer"
  role         = "producer"
  corpora      = [module.writer.corpus]
  pod_identity = var.pods
  tags         = var.tags
}

module "maintainer" {
  source = "../../modules/access"

  # What is deleted where it was written is deleted in the copies: replication carries the markers.
  name         = "${var.name}-maintainer"
  role         = "maintainer"
  corpora      = [module.writer.corpus]
  pod_identity = var.maintainer_pods
  tags         = var.tags
}

module "consumer" {
  source   = "../../modules/access"
  for_each = { writer = module.writer.corpus, us = module.us.corpus, ap = module.ap.corpus }

  # IAM is global: one role per region, each for the bucket of that region.
  name         = "${var.name}-consumer-${each.key}"
  role         = "consumer"
  corpora      = [each.value]
  pod_identity = var.pods
  tags         = var.tags
}

module "observability" {
  source = "../../modules/observability"

  name          = var.name
  corpus        = module.writer.corpus
  destinations  = { us = module.us.corpus.name, ap = module.ap.corpus.name }
  alarm_actions = var.alarm_actions
  tags          = var.tags
}
