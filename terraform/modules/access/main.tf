# SPDX-License-Identifier: Apache-2.0
# What an engine may do with a corpus, and who may be such an engine.

data "aws_partition" "current" {}

data "aws_caller_identity" "current" {}

locals {
  # Home is written to by who writes at all; a replica by who writes back what came from home.
  places = concat(
    [for corpus in var.corpora : merge(corpus, { writes = var.role != "consumer" })],
    [for corpus in var.replicas : merge(corpus, { writes = corpus.fill })],
  )

  statements = concat(
    [
      for index, place in local.places : merge(
        {
          Sid      = "List${index}"
          Effect   = "Allow"
          Action   = ["s3:ListBucket"]
          Resource = [place.arn]
        },
        place.prefix == "" ? {} : {
          Condition = { StringLike = { "s3:prefix" = ["${place.prefix}*"] } }
        },
      )
    ],
    [
      for index, place in local.places : {
        Sid    = "Objects${index}"
        Effect = "Allow"
        Action = concat(
          ["s3:GetObject"],
          place.writes ? ["s3:PutObject", "s3:AbortMultipartUpload"] : [],
          var.role == "maintainer" ? ["s3:DeleteObject"] : [],
        )
        Resource = ["${place.arn}/${place.prefix}*"]
      }
    ],
    [
      for index, place in local.places : {
        Sid      = "Key${index}"
        Effect   = "Allow"
        Action   = concat(["kms:Decrypt"], place.writes ? ["kms:GenerateDataKey"] : [])
        Resource = [place.kms_key_arn]
        # The key serves this bucket's objects, and nothing beside S3.
        Condition = {
          StringEquals = { "kms:ViaService" = "s3.${place.region}.${data.aws_partition.current.dns_suffix}" }
          StringLike   = { "kms:EncryptionContext:aws:s3:arn" = [place.arn, "${place.arn}/*"] }
        }
      } if place.kms_key_arn != null
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
  description = "s3ec ${var.role}: ${join(", ", [for place in local.places : place.name])}"
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

data "aws_iam_role" "existing" {
  count = var.existing_role_name == null ? 0 : 1

  name = var.existing_role_name
}

resource "aws_iam_role_policy_attachment" "this" {
  for_each = merge(
    local.has_role ? { made = one(aws_iam_role.this[*].name) } : {},
    var.existing_role_name == null ? {} : { existing = one(data.aws_iam_role.existing[*].name) },
  )

  role       = each.value
  policy_arn = aws_iam_policy.this.arn

  lifecycle {
    precondition {
      condition     = var.existing_role_name == null || !local.has_role
      error_message = "The role ${coalesce(var.existing_role_name, "-")} exists, and says itself who may take it: leave `irsa`, `pod_identity`, `assume_role_arns` and `instance_profile` out."
    }
  }
}

resource "aws_iam_instance_profile" "this" {
  count = var.instance_profile ? 1 : 0

  name = var.name
  role = aws_iam_role.this[0].name
  tags = var.tags
}
