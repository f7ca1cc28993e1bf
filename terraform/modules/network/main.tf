# SPDX-License-Identifier: Apache-2.0
# A gateway endpoint: traffic to the corpus stays in the region's network, costs nothing, and goes
# to no other bucket, so a compromised engine cannot copy embeddings into somebody else's.

# The region: `data.aws_region` has no attribute for it that is in 5.x and not deprecated in 6.x.
data "aws_service" "s3" {
  service_id = "s3"
}

data "aws_caller_identity" "current" {}

locals {
  region = data.aws_service.s3.region

  # An endpoint's policy cannot name roles. Whose principals go through is a condition: keys that
  # somebody brings along from another account are of no use here.
  ours = {
    StringEquals = {
      "aws:PrincipalAccount" = length(var.principal_account_ids) > 0 ? var.principal_account_ids : [data.aws_caller_identity.current.account_id]
    }
  }

  statements = concat(
    [
      {
        Sid       = "ListCorpora"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:ListBucket"]
        Resource  = [for corpus in var.corpora : corpus.arn]
        Condition = local.ours
      },
      {
        Sid       = "UseCorpora"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
        Resource  = [for corpus in var.corpora : "${corpus.arn}/${corpus.prefix}*"]
        Condition = local.ours
      },
    ],
    [
      # Without that condition: a registry signs the addresses of its layers with its own account.
      for arns in [var.other_bucket_arns] : {
        Sid       = "ReadOthers"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:GetObject", "s3:ListBucket"]
        Resource  = flatten([for arn in arns : [arn, "${arn}/*"]])
      } if length(arns) > 0
    ],
  )
}

resource "aws_vpc_endpoint" "s3" {
  vpc_id            = var.vpc_id
  service_name      = "com.amazonaws.${local.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = var.route_table_ids
  policy            = jsonencode({ Version = "2012-10-17", Statement = local.statements })
  tags              = var.tags

  lifecycle {
    precondition {
      condition     = alltrue([for corpus in var.corpora : corpus.region == local.region])
      error_message = "A gateway endpoint reaches buckets of its own region only (${local.region})."
    }
  }
}
