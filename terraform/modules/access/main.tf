# SPDX-License-Identifier: Apache-2.0
# What an engine may do with a corpus, and who may be such an engine.

data "aws_partition" "current" {}

data "aws_caller_identity" "current" {}

locals {
  reads  = ["s3:GetObject"]
  writes = ["s3:PutObject", "s3:AbortMultipartUpload"]
  object_actions = concat(
    local.reads,
    var.role == "consumer" ? [] : local.writes,
    var.role == "maintainer" ? ["s3:DeleteObject"] : [],
  )
  key_actions = concat(["kms:Decrypt"], var.role == "consumer" ? [] : ["kms:GenerateDataKey"])

  statements = concat(
    [
      for index, corpus in var.corpora : merge(
        {
          Sid      = "List${index}"
          Effect   = "Allow"
          Action   = ["s3:ListBucket"]
          Resource = [corpus.arn]
        },
        corpus.prefix == "" ? {} : {
          Condition = { StringLike = { "s3:prefix" = ["${corpus.prefix}*"] } }
        },
      )
    ],
    [
      for index, corpus in var.corpora : {
        Sid      = "Objects${index}"
        Effect   = "Allow"
        Action   = local.object_actions
        Resource = ["${corpus.arn}/${corpus.prefix}*"]
      }
    ],
    [
      for index, corpus in var.corpora : {
        Sid      = "Key${index}"
        Effect   = "Allow"
        Action   = local.key_actions
        Resource = [corpus.kms_key_arn]
        # The key serves this bucket's objects, and nothing beside S3.
        Condition = {
          StringEquals = { "kms:ViaService" = "s3.${corpus.region}.${data.aws_partition.current.dns_suffix}" }
          StringLike   = { "kms:EncryptionContext:aws:s3:arn" = [corpus.arn, "${corpus.arn}/*"] }
        }
      } if corpus.kms_key_arn != null
    ],
  )

  trust = concat(
    [
      for one in var.irsa : {
        Effect    = "Allow"
        Principal = { Federated = one.provider_arn }
        Action    = ["sts:AssumeRoleWithWebIdentity"]
        Condition = {
          StringEquals = {
            "${one.issuer}:aud" = "sts.amazonaws.com"
            "${one.issuer}:sub" = "system:serviceaccount:${one.namespace}:${one.service_account}"
          }
        }
      }
    ],
    [
      for one in var.pod_identity : {
        Effect    = "Allow"
        Principal = { Service = "pods.eks.amazonaws.com" }
        Action    = ["sts:AssumeRole", "sts:TagSession"]
        Condition = {
          # Tags that EKS sets on each session.
          StringEquals = merge(
            {
              "aws:RequestTag/kubernetes-namespace"       = one.namespace
              "aws:RequestTag/kubernetes-service-account" = one.service_account
            },
            one.cluster == null ? {} : { "aws:RequestTag/eks-cluster-name" = one.cluster },
          )
          # Only if it is named: see the trust of the replication module's role.
          StringEqualsIfExists = { "aws:SourceAccount" = data.aws_caller_identity.current.account_id }
        }
      }
    ],
    [
      for arns in [var.assume_role_arns] : {
        Effect    = "Allow"
        Principal = { AWS = arns }
        Action    = ["sts:AssumeRole"]
      } if length(arns) > 0
    ],
    [
      for service in ["ec2.amazonaws.com"] : {
        Effect    = "Allow"
        Principal = { Service = service }
        Action    = ["sts:AssumeRole"]
      } if var.instance_profile
    ],
  )
  has_role = length(local.trust) > 0
}

resource "aws_iam_policy" "this" {
  name        = var.name
  description = "s3ec ${var.role}: ${join(", ", [for corpus in var.corpora : corpus.name])}"
  policy      = jsonencode({ Version = "2012-10-17", Statement = local.statements })
  tags        = var.tags
}

resource "aws_iam_role" "this" {
  count = local.has_role ? 1 : 0

  name                 = var.name
  assume_role_policy   = jsonencode({ Version = "2012-10-17", Statement = local.trust })
  permissions_boundary = var.permissions_boundary
  tags                 = var.tags

  lifecycle {
    precondition {
      condition     = var.role != "maintainer" || !var.instance_profile
      error_message = "A `maintainer` deletes, so no instance has its rights for good: name who may take it in `assume_role_arns`, `pod_identity` or `irsa`."
    }
  }
}

resource "aws_iam_role_policy_attachment" "this" {
  count = local.has_role ? 1 : 0

  role       = aws_iam_role.this[0].name
  policy_arn = aws_iam_policy.this.arn
}

resource "aws_iam_instance_profile" "this" {
  count = var.instance_profile ? 1 : 0

  name = var.name
  role = aws_iam_role.this[0].name
  tags = var.tags
}
